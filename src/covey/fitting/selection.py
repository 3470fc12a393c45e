"""Penalties by cross-validation, and the three baselines of Section 6.1 of the paper (arXiv:2204.13619).

Cross-validation divides the rows of each client into folds, and scores penalties on the rows that were left out. The baselines
are one model for all clients, one for each client alone, and one cluster for all clients. They return the same :class:`Fit` as
the solvers, with coefficients at every level.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import polars as pl

from covey._typing import Floats
from covey.errors import ConvergenceWarning
from covey.losses import Loss
from covey.objective.objective import Penalty
from covey.solvers import Fit, Progress, minimise
from covey.tables.rows import GroupedData
from covey.tree.hierarchy import Hierarchy

Count = Callable[[int, int], None]  # receives the number of finished fits and of all fits

Score = Literal["row", "client"]
"""Mean loss over all rows that were left out, or mean over clients of their mean losses, which gives them equal weight."""

FOLDS = 5

# Penalties for a loss that is a sum over rows: from almost no pull to one that few clients have enough rows to resist.
GAMMAS = np.geomspace(1e-2, 1e3, 16)
LAMS = np.geomspace(1e-1, 1e2, 7)

LOCAL_RIDGE = 1e-3  # gives a client with separable classes a finite optimum when it is fitted alone

_TRIAL_TOL = 1e-9  # relative to the gradient at zero; a score needs fewer digits than the final fit


# Cross-validation


@dataclass(frozen=True)
class Search:
    """A grid of penalties with its scores ``(gammas, lams)``, and the best pair."""

    gammas: Floats
    lams: Floats
    scores: Floats
    gamma: float
    lam: float


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
    """Score every pair of a grid by its mean held-out loss.

    Of equal scores, the strongest penalties win, because their model is simpler. The columns of the grid are fitted in
    alternating direction. So each pair is a neighbour of the pair before, whose fit is a good starting point.
    """
    path = [
        (i, j)
        for turn, i in enumerate(np.argsort(-gammas, kind="stable"))
        for j in (np.argsort(-lams, kind="stable") if turn % 2 == 0 else np.argsort(lams, kind="stable"))
    ]
    fold = data.folds(folds, seed)
    totals, weights = np.zeros((len(gammas), len(lams), data.n_clients)), np.zeros(data.n_clients)
    for left_out in range(folds):
        train, test = data.rows(fold != left_out), data.rows(fold == left_out)
        weight = _weights(test)
        if not weight.any():
            continue
        weights += weight
        at_zero = loss.gradient(train, np.zeros((data.n_clients, data.n_terms)))
        tol = max(_TRIAL_TOL * float(np.linalg.norm(at_zero)), 1e-12)
        fit = None
        for done, (i, j) in enumerate(path, start=left_out * len(path) + 1):
            penalty = Penalty.of(data.hierarchy, gamma=gammas[i], lam=lams[j])
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ConvergenceWarning)  # only the final fit warns
                fit = minimise(train, loss, penalty, start=fit, tol=tol)
            totals[i, j] += _totals(fit.theta, test, loss)
            if progress is not None:
                progress(done, folds * len(path))
    scores = np.array([[_mean(total, weights, score) for total in row] for row in totals])
    best = [(float(gammas[i]), float(lams[j])) for i, j in np.argwhere(scores == scores.min())]
    return Search(gammas, lams, scores, *max(best))


def client_losses(theta: Floats, data: GroupedData, loss: Loss) -> Floats:
    """Return the mean loss of each client on held-out rows, ``(n,)``; NaN for a client without rows."""
    weight = _weights(data)
    mean: Floats = np.divide(_totals(theta, data, loss), weight, out=np.full(data.n_clients, np.nan), where=weight > 0)
    return mean


def held_out_loss(fit: Fit, data: GroupedData, loss: Loss, score: Score = "row") -> float:
    """Return the mean loss of the clients' models on held-out rows."""
    return _mean(_totals(fit.theta, data, loss), _weights(data), score)


def _totals(theta: Floats, data: GroupedData, loss: Loss) -> Floats:
    """Sum of the losses of each client's rows, ``(n,)``."""
    return replace(loss, reduction="sum", ridge=0.0).value(data, theta)


def _weights(data: GroupedData) -> Floats:
    """Sum of the weights of each client's rows, ``(n,)``; without weights their number."""
    return data.weight_of_client


def _mean(total: Floats, weight: Floats, score: Score) -> float:
    """Mean over clients with held-out rows."""
    total, weight = total[weight > 0], weight[weight > 0]
    return float(total.sum() / weight.sum() if score == "row" else (total / weight).mean())


# Baselines


def fit_baseline(name: str, data: GroupedData, loss: Loss, *, seed: int = 0, progress: Progress | None = None) -> Fit:
    """Fit a baseline, given its name."""
    if name == "single-cluster":
        return single_cluster(data, loss, seed=seed, progress=progress)
    return (single_model if name == "single-model" else locally_trained)(data, loss, progress=progress)


def single_model(data: GroupedData, loss: Loss, *, progress: Progress | None = None) -> Fit:
    """Fit all rows as rows of one client. Every level has the same coefficients."""
    pooled = data.pooled()
    fit = minimise(pooled, loss, Penalty.of(pooled.hierarchy), progress=progress)
    return replace(_one_centre(fit, data), theta=np.tile(fit.wbar, (data.n_clients, 1)))


def locally_trained(data: GroupedData, loss: Loss, *, progress: Progress | None = None) -> Fit:
    """Fit each client alone.

    A quadratic loss gives ``pinv(X_i) y_i``, the shortest solution if a client has too few rows. Other losses have a ridge of
    ``LOCAL_RIDGE``, unless the loss has one. The coefficients of clusters and of the global model, which predict for unseen
    clients, are plain means over clients.
    """
    n = data.n_clients
    tree = Hierarchy(np.arange(n + 1), data.hierarchy.client_ids, pl.Series(np.arange(n)))
    if not loss.quadratic and loss.ridge == 0:
        loss = replace(loss, ridge=LOCAL_RIDGE)
    # Every client is the only one of a cluster that is independent of the others, so its penalty is zero.
    fit = minimise(replace(data, hierarchy=tree), loss, Penalty.of(tree, gamma=1.0, lam=0.0), progress=progress)
    means = data.hierarchy.mean_up(fit.theta, np.ones(n))
    return Fit(fit.theta, means, fit.theta.mean(axis=0), fit.convergence)


def single_cluster(
    data: GroupedData,
    loss: Loss,
    *,
    grid: Floats = GAMMAS,
    seed: int = 0,
    most_rows: int | None = None,
    progress: Progress | None = None,
) -> Fit:
    """Fit the one-cluster model of L2GD, pFedMe and Ditto, with its penalty chosen from ``grid`` by cross-validation.

    With ``most_rows``, the penalty is chosen with every m-th client, so that there are about as many rows.
    """
    merged = data.one_cluster()
    some = merged if most_rows is None else merged.every(max(1, -(-data.n_rows // most_rows)))
    gamma = search(some, loss, gammas=grid, lams=np.array([np.inf]), seed=seed).gamma
    fit = minimise(merged, loss, Penalty.of(merged.hierarchy, gamma=gamma, lam=np.inf), progress=progress)
    message = f"{fit.convergence.message}; gamma = {gamma:.3g} by cross-validation"
    return replace(_one_centre(fit, data), convergence=replace(fit.convergence, message=message))


def _one_centre(fit: Fit, data: GroupedData) -> Fit:
    """Give every cluster of ``data`` the global coefficients."""
    return replace(fit, w=np.tile(fit.wbar, (data.n_clusters, 1)))
