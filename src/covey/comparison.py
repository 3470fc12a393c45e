"""The hierarchy and its baselines on the same held-out rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from covey.baselines import BASELINES
from covey.data import GroupedData
from covey.errors import DataError
from covey.model import Spec, fit_data
from covey.selection import held_out_loss
from covey.solvers import Fit


@dataclass(frozen=True)
class Comparison:
    """Held-out error of each model: root mean squared error for a Gaussian response, else the mean loss of a row."""

    errors: dict[str, float]
    train_rows: int
    test_rows: int


def compare(
    data: GroupedData, spec: Spec, *, test: float = 0.2, seed: int = 0, progress: Callable[[str], None] | None = None
) -> Comparison:
    """Fit the specification and the three baselines to a share of each client's rows, and score the rest."""
    train, held = data.split(test, seed)
    if held.n_rows == 0:
        raise DataError(
            f"Holding out {test:g} of each client's rows leaves none to test on; raise the share or skip it with 0."
        )
    errors = {}
    for name in (*BASELINES, "hierarchical"):
        if progress is not None:
            progress(name)
        fit, _ = fit_data(train, replace(spec, baseline=None if name == "hierarchical" else name))
        errors[name] = held_out_error(fit, held, spec)
    return Comparison(errors, train.n_rows, held.n_rows)


def held_out_error(fit: Fit, data: GroupedData, spec: Spec) -> float:
    loss = held_out_loss(fit, data, spec.loss)
    return float(np.sqrt(2 * loss)) if spec.family == "gaussian" else loss
