"""Penalties chosen by cross-validation: folds within each client, scored on the rows left out."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from covey._typing import Floats
from covey.data import GroupedData
from covey.errors import ConvergenceWarning
from covey.losses import Loss
from covey.objective import Penalty
from covey.solvers import Fit, solve

Count = Callable[[int, int], None]  # told the number of fits done and to do

FOLDS = 5

# On the scale of a sum over rows: from hardly any tie to one that few clients have the data to resist.
GAMMAS = np.geomspace(1e-2, 1e3, 16)
LAMS = np.geomspace(1e-1, 1e2, 7)


@dataclass(frozen=True)
class Choice:
    """The penalty that did best, its position in the grid, and the score of each (mean loss of the rows left out)."""

    penalty: Penalty
    index: int
    scores: Floats


def held_out_loss(fit: Fit, data: GroupedData, loss: Loss) -> float:
    """Mean loss per row (by weight) of the clients' own models on rows they were not fitted to."""
    values = loss.pointwise(data.margin(fit.theta), data.y)
    return float(np.average(values, weights=data.weights))


def cross_validate(
    data: GroupedData,
    loss: Loss,
    penalties: Sequence[Penalty],
    *,
    folds: int = FOLDS,
    seed: int | np.random.Generator = 0,
    progress: Count | None = None,
) -> Choice:
    """Score each penalty by its mean held-out loss; each fit starts where the one before it ended."""
    fold = data.folds(folds, seed)
    totals = np.zeros(len(penalties))
    for left_out in range(folds):
        train, test = data.rows(fold != left_out), data.rows(fold == left_out)
        if test.n_rows == 0 or (test.weights is not None and not test.weights.any()):
            continue
        share = test.n_rows if test.weights is None else test.weights.sum()
        fit = None
        for index, penalty in enumerate(penalties):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ConvergenceWarning)  # of a trial; the fit that is kept speaks for itself
                fit = solve(train, loss, penalty, start=fit)
            totals[index] += share * held_out_loss(fit, test, loss)
            if progress is not None:
                progress(left_out * len(penalties) + index + 1, folds * len(penalties))
    best = int(totals.argmin())
    return Choice(penalties[best], best, totals / (data.n_rows if data.weights is None else data.weights.sum()))


def choose_penalty(
    data: GroupedData,
    loss: Loss,
    *,
    gammas: Floats = GAMMAS,
    lams: Floats = LAMS,
    seed: int | np.random.Generator = 0,
    progress: Count | None = None,
) -> tuple[float, float]:
    """The pair ``(gamma, lam)`` of a grid that predicts left-out rows best."""
    pairs = [(float(gamma), float(lam)) for lam in lams for gamma in gammas]
    penalties = [Penalty.of(data.hierarchy, gamma=gamma, lam=lam) for gamma, lam in pairs]
    return pairs[cross_validate(data, loss, penalties, seed=seed, progress=progress).index]
