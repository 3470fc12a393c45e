"""The hierarchy and its baselines on the same held-out rows."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from scipy.special import xlogy

from covey.baselines import BASELINES
from covey.data import GroupedData
from covey.errors import ConvergenceWarning, DataError
from covey.model import Spec, fit_data
from covey.selection import Count, held_out_loss, search
from covey.solvers import Fit

TEST_SHARE = 0.2


@dataclass(frozen=True)
class Comparison:
    """Held-out error of each model: root mean squared error, cross-entropy, or mean Poisson deviance."""

    errors: dict[str, float]
    train_rows: int
    test_rows: int


def compare(
    data: GroupedData, spec: Spec, *, test: float = TEST_SHARE, progress: Callable[[str], None] | None = None
) -> Comparison:
    """Fit the specification and the three baselines to a share of each client's rows, and score the rest.

    Models are compared, not solvers: each is fitted to its minimum.
    """
    spec = replace(spec, solver="auto", options=None)
    train, held = data.split(test, spec.seed)
    if held.n_rows == 0:
        raise DataError(
            f"Holding out {test:g} of each client's rows leaves none to test on; raise the share or skip it with 0."
        )
    errors = {}
    for name in (*BASELINES, "hierarchical"):
        if progress is not None:
            progress(name)
        own = name == "hierarchical"
        trial = replace(spec, baseline=None if own else name, james_stein=own and spec.james_stein)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # of a trial; the fit that is kept speaks for itself
            fit, _ = fit_data(train, trial)
        errors[name] = held_out_error(fit, held, spec)
    return Comparison(errors, train.n_rows, held.n_rows)


def held_out_error(fit: Fit, data: GroupedData, spec: Spec) -> float:
    """The error of one fit on rows it did not see, zero for perfect predictions."""
    loss = held_out_loss(fit, data, spec.loss)
    if spec.family == "gaussian":
        return float(np.sqrt(2 * loss))
    if spec.family == "poisson":
        saturated = np.average(xlogy(data.y, data.y) - data.y, weights=data.weights)
        return float(2 * (loss + saturated))
    return loss


def choose_on_training_rows(data: GroupedData, spec: Spec, *, test: float, progress: Count | None = None) -> Spec:
    """Set both penalties by cross-validation on the rows that :func:`compare` will train on, and on no others."""
    return chosen(data.split(test, spec.seed)[0], spec, progress=progress)


def chosen(data: GroupedData, spec: Spec, *, progress: Count | None = None) -> Spec:
    """The same specification with both penalties set by cross-validation."""
    found = search(data, spec.loss, seed=spec.seed, progress=progress)
    return replace(spec, gamma=found.gamma, lam=found.lam)
