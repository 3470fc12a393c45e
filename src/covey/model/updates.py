"""Add and remove clients without a new fit: from the sums that a model keeps, at the variance components of its fit.

For a linear model the result is exact: the coefficients at every level are those of a fit to all rows with the same variance
components. For counts and classes the loss of a client of the fit is taken to second order about the mode; that of new rows is
exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl

from covey._typing import Floats, Ints
from covey.errors import DataError, listing, warn
from covey.model.model import Fitted, Model, assemble
from covey.solvers.direct.elimination import Quadratic, descend, eliminate, invert
from covey.solvers.direct.sweep import solve_top
from covey.solvers.result import Fit
from covey.tables.rows import GroupedData
from covey.tree.hierarchy import Hierarchy, as_labels, lookup
from covey.variance.components import Learned
from covey.variance.identify import check_rank

_STEPS, _CLOSE, _REACH = 100, 1e-10, 2.0
_LATER = "clients were added or removed after the fit: variances, log-likelihood and tests are those of the fit"


def add_clients(model: Model, data: GroupedData) -> Model:
    """The model with new rows (see ``group_rows``), of clients and clusters of the model or of new ones."""
    learned = model.posterior.require_sums(all_clients=True)
    tree, places = _joined(model.hierarchy, data.hierarchy)
    n = tree.n_clients
    kept = model.hierarchy.n_clients
    old = _placed(learned.units, places[:kept], n)
    rows = np.bincount(places, np.concatenate([model.rows, data.rows_per_client]), n).astype(np.int64)
    loss, at = model.problem.loss, np.tile(learned.origin, (data.n_clients, 1))
    exact = loss.quadratic
    if not exact:
        at = at + _start(model, data)
    for _ in range(_STEPS):
        here = loss.expand(data, at)
        # About the origin: f(t) = 1/2 t'Ht - b't with b = H (at - origin) - slope.
        b = np.einsum("iab,ib->ia", here.hessian, at - learned.origin) - here.gradient
        fresh = Quadratic(here.hessian, b, here.value, data.rows_that_count)
        updated = _solved(model, replace(learned, units=old + _placed(fresh, places[kept:], n)), tree, rows)
        step = updated.theta[places[kept:]] - at
        if exact or float(np.abs(step).max(initial=0.0)) <= _CLOSE * (1.0 + float(np.abs(at).max(initial=0.0))):
            return updated
        # Far from the mode the quadratic is inaccurate, so a row's margin moves by a few units at most.
        reach = np.maximum.reduceat(np.abs(np.einsum("ld,ld->l", data.X, step[data.client_of_row])), data.client_ptr[:-1])
        at = at + step * np.minimum(1.0, _REACH / np.maximum(reach, _REACH))[:, None]
    warn("The models of the new rows did not converge; their responses differ too much from those of the fit.")
    return updated


def remove_clients(model: Model, clients: Sequence[Any]) -> Model:
    """The model without the data of these clients."""
    learned, tree = model.posterior.require_sums(all_clients=True), model.hierarchy
    if isinstance(clients, str):
        clients = [clients]
    places = lookup(as_labels(clients, "client"), tree.client_ids, "client")
    if (places < 0).any():
        unknown = [list(clients)[at] for at in np.flatnonzero(places < 0)]
        raise DataError(f"The model has no client {listing(unknown, 5)}; the ids are those of clients_.")
    keep = np.ones(tree.n_clients, dtype=bool)
    keep[places] = False
    if not keep.any():
        raise DataError("These are all clients of the model; keep at least one.")
    counts = np.bincount(tree.parent[keep], minlength=tree.n_clusters)
    left = Hierarchy(np.concatenate([[0], np.cumsum(counts)]), tree.client_ids.filter(pl.Series(keep)), tree.cluster_ids)
    units = learned.units
    check_rank(units.C[keep].sum(axis=0), model.terms, learned.free)
    fewer = Quadratic(units.C[keep], units.r[keep], units.c[keep], units.n[keep])
    return _solved(model, replace(learned, units=fewer), left, model.rows[keep])


def _solved(model: Model, learned: Learned, tree: Hierarchy, rows: Ints) -> Model:
    """Solve for all coefficients by one sweep over the sums of the clients of ``tree``."""
    learned = replace(learned, tree=tree)
    seen, whole = _top(learned)
    _, before = _top(model.posterior.learned)
    inverse = invert(whole.C[0], learned.free)[0]
    # The gradient of the likelihood's determinants in the global model, as at the fit. It is zero in a linear model.
    own = before.C[0] @ (model.wbar - learned.origin) - before.r[0]
    w, _, wbar = solve_top(seen, learned.cluster, settle=lambda *_: inverse @ (whole.r[0] + own))
    theta, _ = descend(learned.units.C, learned.units.r, learned.client, tree.parent, w)
    # The sums give the change of the covariance. They do not give all of the covariance itself in a model of counts.
    change = inverse - invert(before.C[0], learned.free)[0]
    covariance = model.posterior.learned.covariance + learned.dispersion * change
    components = learned.components
    if _LATER not in components.notes:
        components = replace(components, notes=(*components.notes, _LATER))
    learned = replace(learned, covariance=covariance, components=components)
    shift = learned.origin
    fit = Fit(shift + theta, shift + w, shift + wbar, model.convergence)
    return assemble(model.problem, Fitted(fit, None, learned), tree, rows)


def _top(learned: Learned) -> tuple[Quadratic, Quadratic]:
    """The loss as a function of each cluster's coefficients, and of the global coefficients."""
    seen = eliminate(learned.units, learned.client, learned.tree.cluster_ptr)
    return seen, eliminate(seen, learned.cluster, np.array([0, learned.tree.n_clusters]))


def _start(model: Model, data: GroupedData) -> Floats:
    """Where Newton's method starts for new rows: at the coefficients that predict them."""
    tree = data.hierarchy
    chosen = model.hierarchy.resolve(tree.client_ids, tree.cluster_ids.gather(tree.parent), n_rows=tree.n_clients)
    return np.asarray(model.coefficient_table[chosen.index(len(model.theta))])


def _joined(old: Hierarchy, new: Hierarchy) -> tuple[Hierarchy, Ints]:
    """Both hierarchies as one, and the place in it of each client of the old, then of the new."""
    for level, before, added in (("client", old.client_ids, new.client_ids), ("cluster", old.cluster_ids, new.cluster_ids)):
        if before.dtype == pl.Int64 and added.dtype == pl.Float64:
            odd = added.filter(added != added.floor())[0]
            raise DataError(f"The {level} id {odd!r} is not a whole number, but the model's {level} ids are; change the id.")
    cluster = lookup(new.cluster_ids, old.cluster_ids, "cluster")
    new_clusters = np.flatnonzero(cluster < 0)
    cluster[new_clusters] = old.n_clusters + np.arange(len(new_clusters))
    client = lookup(new.client_ids, old.client_ids, "client")
    moved = np.flatnonzero((client >= 0) & (old.parent[client] != cluster[new.parent]))
    if len(moved):
        at = int(moved[0])
        raise DataError(
            f"Client {new.client_ids[at]!r} is in cluster {old.cluster_ids[int(old.parent[client[at]])]!r} in the model but in "
            f"{new.cluster_ids[int(new.parent[at])]!r} in the new rows; correct the cluster, or give the client a new id."
        )
    new_clients = np.flatnonzero(client < 0)
    client[new_clients] = old.n_clients + np.arange(len(new_clients))
    ids = pl.concat([old.client_ids, new.client_ids.gather(new_clients).cast(old.client_ids.dtype)])
    clusters = pl.concat([old.cluster_ids, new.cluster_ids.gather(new_clusters).cast(old.cluster_ids.dtype)])
    parent = np.concatenate([old.parent, cluster[new.parent[new_clients]]])
    order = np.argsort(parent, kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    ptr = np.concatenate([[0], np.cumsum(np.bincount(parent, minlength=len(clusters)))])
    return Hierarchy(ptr, ids.gather(order), clusters), place[np.concatenate([np.arange(old.n_clients), client])]


def _placed(units: Quadratic, places: Ints, n: int) -> Quadratic:
    """The units at these places among ``n``, and zeros at the other places."""
    d = units.r.shape[1]
    whole = Quadratic(np.zeros((n, d, d)), np.zeros((n, d)), np.zeros(n), np.zeros(n))
    whole.C[places], whole.r[places], whole.c[places], whole.n[places] = units.C, units.r, units.c, units.n
    return whole
