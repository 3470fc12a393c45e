"""What the hierarchy is measured against: one model for all, one for each client alone, one cluster for all clients.

Each returns the same :class:`Fit` as the solvers, with coefficients at every level, so that whatever predicts, prints or
saves a hierarchical fit does so with these.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import polars as pl

from covey._typing import Floats
from covey.errors import one_of
from covey.fitting.selection import GAMMAS, cross_validate
from covey.losses import Loss
from covey.objective.penalty import Penalty
from covey.problem.settings import BASELINES
from covey.solvers import Fit, Progress, minimise
from covey.tables.rows import GroupedData
from covey.tree.hierarchy import Hierarchy

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
