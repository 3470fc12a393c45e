"""Compare the hierarchical model with the baselines on the same held-out rows."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace

from covey.errors import ConvergenceWarning, DataError
from covey.fitting.fit import learn
from covey.fitting.selection import held_out_loss, single_cluster
from covey.nodes.network import InMemory
from covey.problem.problem import Problem, Spec
from covey.problem.settings import BASELINES
from covey.tables.rows import GroupedData

TEST_SHARE = 0.2
_ROWS = 50_000  # rows that choose the penalty of the single-cluster baseline


@dataclass(frozen=True)
class Comparison:
    """Held-out error of each model (``Loss.error``)."""

    errors: dict[str, float]
    train_rows: int
    test_rows: int


def compare(
    data: GroupedData,
    problem: Problem,
    *,
    test: float = TEST_SHARE,
    progress: Callable[[str], None] | None = None,
) -> Comparison:
    """Fit the problem and the three baselines to part of each client's rows, and score the rest.

    The comparison is between models, not solvers: each model is fitted to its minimum. Held-out rows are not used to learn
    penalties.
    """
    spec = problem.spec
    train, held = data.split(test, spec.seed)
    if held.n_rows == 0:
        raise DataError(
            f"Holding out {test:g} of each client's rows leaves none to test on; raise the share, or skip it with 0."
        )
    plain = Spec(family=spec.family, reduction=spec.reduction, ridge=spec.ridge, seed=spec.seed)
    trials = {name: replace(plain, baseline=name) for name in BASELINES}
    trials["hierarchical"] = replace(spec, solver="auto", options=None, tests=False)
    errors = {}
    for name, trial in trials.items():
        if progress is not None:
            progress(name)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # only the final fit warns
            try:
                if name == "single-cluster":  # 80 fits choose its penalty; a sample is enough for that
                    fit = single_cluster(train, spec.loss, seed=spec.seed, most_rows=_ROWS)
                else:
                    fit = learn(InMemory.of(train, spec.loss), replace(problem, spec=trial)).fit
            except DataError as mistake:
                raise DataError(f"With {test:g} of the rows held out: {mistake}") from None
        errors[name] = spec.loss.error(held_out_loss(fit, held, spec.loss), held)
    return Comparison(errors, train.n_rows, held.n_rows)
