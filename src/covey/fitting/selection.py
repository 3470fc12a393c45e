"""Penalties chosen by cross-validation: folds within each client, scored on the rows left out.

What the hierarchy is measured against: one model for all, one for each client alone, one cluster for all clients.

Each returns the same :class:`Fit` as the solvers, with coefficients at every level, so that whatever predicts, prints or
saves a hierarchical fit does so with these.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import polars as pl

from covey._typing import Floats
from covey.errors import ConvergenceWarning, one_of
from covey.losses import Loss
from covey.objective.objective import Penalty
from covey.problem.settings import BASELINES
from covey.solvers import Fit, Progress, minimise
from covey.tables.rows import GroupedData
from covey.tree.hierarchy import Hierarchy, segment_sum

Count = Callable[[int, int], None]  # told the number of fits done and to do

FOLDS = 5

# On the scale of a sum over rows: from hardly any tie to one that few clients have the data to resist.
GAMMAS = np.geomspace(1e-2, 1e3, 16)
LAMS = np.geomspace(1e-1, 1e2, 7)


Score = Literal["row", "client"]
"""What is averaged: the loss of all rows left out, or of each client's (so that small clients count as much as large ones)."""

_TRIAL_TOL = 1e-9  # of the gradient at zero: a score needs fewer digits than a fit that is kept


@dataclass(frozen=True)
class Choice:
    """The pair that did best, its position among those tried, and the score of each (mean loss of the rows left out)."""

    gamma: float
    lam: float
    index: int
    scores: Floats


@dataclass(frozen=True)
class Search:
    """A grid of penalties with their scores ``(gammas, lams)``, and the pair that did best."""

    gammas: Floats
    lams: Floats
    scores: Floats
    gamma: float
    lam: float


def client_losses(theta: Floats, data: GroupedData, loss: Loss) -> Floats:
    """Each client's mean loss on rows it was not fitted to, ``(n,)``; NaN where it has none."""
    weight = _weights(data)
    mean: Floats = np.divide(_totals(theta, data, loss), weight, out=np.full(data.n_clients, np.nan), where=weight > 0)
    return mean


def held_out_loss(fit: Fit, data: GroupedData, loss: Loss, score: Score = "row") -> float:
    """Mean loss of the clients' own models on rows they were not fitted to."""
    return _mean(_totals(fit.theta, data, loss), _weights(data), score)


def cross_validate(
    data: GroupedData,
    loss: Loss,
    pairs: Sequence[tuple[float, float]],
    *,
    folds: int = FOLDS,
    score: Score = "row",
    seed: int | np.random.Generator = 0,
    progress: Count | None = None,
) -> Choice:
    """Score each pair ``(gamma, lam)`` by its mean held-out loss; each fit starts where the one before it ended."""
    fold = data.folds(folds, seed)
    totals, weights = np.zeros((len(pairs), data.n_clients)), np.zeros(data.n_clients)
    for left_out in range(folds):
        train, test = data.rows(fold != left_out), data.rows(fold == left_out)
        weight = _weights(test)
        if not weight.any():
            continue
        weights += weight
        at_zero = loss.gradient(train, np.zeros((data.n_clients, data.n_terms)))
        tol = max(_TRIAL_TOL * float(np.linalg.norm(at_zero)), 1e-12)
        fit = None
        for index, (gamma, lam) in enumerate(pairs):
            penalty = Penalty.of(data.hierarchy, gamma=gamma, lam=lam)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ConvergenceWarning)  # of a trial; the fit that is kept speaks for itself
                fit = minimise(train, loss, penalty, start=fit, tol=tol)
            totals[index] += _totals(fit.theta, test, loss)
            if progress is not None:
                progress(left_out * len(pairs) + index + 1, folds * len(pairs))
    scores = np.array([_mean(total, weights, score) for total in totals])
    best = int(scores.argmin())
    return Choice(*pairs[best], best, scores)


def search(
    data: GroupedData,
    loss: Loss,
    *,
    gammas: Floats = GAMMAS,
    lams: Floats = LAMS,
    folds: int = FOLDS,
    score: Score = "row",
    seed: int | np.random.Generator = 0,
    progress: Count | None = None,
) -> Search:
    """Every pair of a grid; equal scores go to the strongest ties, the simpler model.

    The path goes up and down the columns in turn: each pair is a neighbour of the one before, and its fit a short way from it.
    """
    path = [
        (i, j)
        for turn, i in enumerate(np.argsort(-gammas, kind="stable"))
        for j in (np.argsort(-lams, kind="stable") if turn % 2 == 0 else np.argsort(lams, kind="stable"))
    ]
    pairs = [(float(gammas[i]), float(lams[j])) for i, j in path]
    choice = cross_validate(data, loss, pairs, folds=folds, score=score, seed=seed, progress=progress)
    scores = np.empty((len(gammas), len(lams)))
    for (i, j), value in zip(path, choice.scores, strict=True):
        scores[i, j] = value
    tied = np.argwhere(scores == scores.min())
    gamma, lam = max((float(gammas[i]), float(lams[j])) for i, j in tied)
    return Search(gammas, lams, scores, gamma, lam)


def _totals(theta: Floats, data: GroupedData, loss: Loss) -> Floats:
    """The sum of each client's losses, ``(n,)``."""
    return replace(loss, reduction="sum", ridge=0.0).value(data, theta)


def _mean(total: Floats, weight: Floats, score: Score) -> float:
    """Over all rows, or over clients' own means; clients with nothing held out do not count."""
    told = weight > 0
    return float(total[told].sum() / weight[told].sum() if score == "row" else (total[told] / weight[told]).mean())


def _weights(data: GroupedData) -> Floats:
    """The weight of each client's rows together, their number where they have none, ``(n,)``."""
    if data.weights is None:
        return data.rows_per_client.astype(np.float64)
    return segment_sum(data.weights, data.client_ptr)


# Alone, a client whose classes are separable has no finite optimum; this little pull to zero gives it one.
LOCAL_RIDGE = 1e-3


def fit_baseline(name: str, data: GroupedData, loss: Loss, *, seed: int = 0, progress: Progress | None = None) -> Fit:
    """A baseline by name."""
    if name == "single-model":
        return single_model(data, loss, progress=progress)
    if name == "locally-trained":
        return locally_trained(data, loss, progress=progress)
    if name == "single-cluster":
        return single_cluster(data, loss, seed=seed, progress=progress)
    raise one_of("baseline", name, BASELINES)


def single_model(data: GroupedData, loss: Loss, *, progress: Progress | None = None) -> Fit:
    """All rows as those of one client: every level gets the same coefficients."""
    pooled = data.pooled()
    fit = minimise(pooled, loss, Penalty.of(pooled.hierarchy), progress=progress)
    return _everywhere(fit, fit.wbar, data)


def locally_trained(data: GroupedData, loss: Loss, *, progress: Progress | None = None) -> Fit:
    """Each client alone. Gaussian: ``pinv(X_i) y_i``, the shortest solution where a client has too few rows.

    Other losses carry a ridge of ``LOCAL_RIDGE``, without which a separable client has no finite optimum. There is no
    model for a cluster or the whole; the plain means of the clients' coefficients stand in for unseen clients.
    """
    n = data.n_clients
    tree = Hierarchy(np.arange(n + 1), data.hierarchy.client_ids, pl.Series(np.arange(n)))
    alone = replace(data, hierarchy=tree)
    if not loss.quadratic and loss.ridge == 0:
        loss = replace(loss, ridge=LOCAL_RIDGE)
    # Clusters of one, tied to nothing: the client's tie to its own cluster costs nothing.
    fit = minimise(alone, loss, Penalty.of(tree, gamma=1.0, lam=0.0), progress=progress)
    means = data.hierarchy.mean_up(fit.theta, np.ones(n))
    return Fit(fit.theta, means, fit.theta.mean(axis=0), fit.convergence)


def single_cluster(
    data: GroupedData,
    loss: Loss,
    *,
    grid: Floats = GAMMAS,
    seed: int = 0,
    progress: Progress | None = None,
) -> Fit:
    """The one-cluster model of L2GD, pFedMe and Ditto, its penalty chosen from ``grid`` by cross-validation."""
    merged = data.one_cluster()
    choice = cross_validate(merged, loss, [(float(gamma), np.inf) for gamma in grid], seed=seed)
    fit = minimise(merged, loss, Penalty.of(merged.hierarchy, gamma=choice.gamma, lam=np.inf), progress=progress)
    message = f"{fit.convergence.message}; gamma = {choice.gamma:.3g} by cross-validation"
    fit = replace(fit, convergence=replace(fit.convergence, message=message))
    return _everywhere(fit, fit.wbar, data, theta=fit.theta)


def _everywhere(fit: Fit, coefficients: Floats, data: GroupedData, theta: Floats | None = None) -> Fit:
    tile = np.tile(coefficients, (data.n_clients, 1)) if theta is None else theta
    return replace(fit, theta=tile, w=np.tile(coefficients, (data.n_clusters, 1)), wbar=coefficients)
