"""Add rows and remove clients without a new fit: from the sums that a model keeps, at the variance components of its fit.

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
from covey.errors import DataError, SolverError, listing, warn
from covey.model.batches import Batches
from covey.model.model import Fitted, Model, assemble
from covey.solvers.direct.elimination import Quadratic, descend, eliminate, invert
from covey.solvers.direct.sweep import solve_top
from covey.solvers.result import Fit
from covey.tables.rows import GroupedData
from covey.tree.hierarchy import Hierarchy, as_labels, encode, lookup
from covey.variance.components import Learned
from covey.variance.identify import check_rank

_STEPS, _CLOSE, _REACH = 100, 1e-10, 2.0
_LATER = "rows were added or removed after the fit: variances, log-likelihood and tests are those of the fit"


def add_clients(model: Model, data: GroupedData) -> Model:
    """The model with the rows of new clients (see ``group_rows``), in clusters of the model or in new ones."""
    _learned_of(model)
    places, old = _joined(model.hierarchy, data.hierarchy)[1], model.hierarchy.n_clients
    known = np.flatnonzero(np.isin(places[old:], places[:old]))
    if len(known):
        shown = listing([data.hierarchy.identity(int(at)) for at in known], 3)
        raise DataError(f"The model has client {shown} already, and add_clients takes new clients; use update for more rows.")
    return update(model, data)


def update(model: Model, data: GroupedData, *, repeat: bool = False) -> Model:
    """The model with new rows, of clients of the model or of new ones; unless ``repeat``, an equal batch is refused."""
    learned = _learned_of(model)
    tree, places = _joined(model.hierarchy, data.hierarchy)
    batch, held = Batches.of(data).moved(places[model.hierarchy.n_clients :]), model.batches or Batches.from_table(None)
    held = held.moved(places[: model.hierarchy.n_clients])
    if not repeat and held.holds(batch):
        size = f"rows: {data.n_rows:,}, clients: {data.n_clients:,}"
        raise DataError(f"All these rows ({size}) are in the model already; if they are new, pass repeat=True.")
    added = _with_rows(model, learned, data, tree, places)
    dropped = model.dropped if data.dropped is None else data.dropped + model.dropped
    return replace(added, dropped=dropped, batches=held.joined(batch))


def _learned_of(model: Model) -> Learned:
    """The variance components and the sums of all clients, which updates need."""
    if model.learned is None:
        raise SolverError(
            "update, add_clients and remove_clients need variance components, and this model has none; fit all rows again, or "
            "fit with penalty='reml' or 'ml'."
        )
    return model.posterior.require_sums(all_clients=True)


def _with_rows(model: Model, learned: Learned, data: GroupedData, tree: Hierarchy, places: Ints) -> Model:
    """The model with new rows; ``places`` are those of its clients, then of the clients of ``data``, in ``tree``."""
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
    learned, tree = _learned_of(model), model.hierarchy
    keep = np.ones(tree.n_clients, dtype=bool)
    keep[_named(tree, [clients] if isinstance(clients, str) else list(clients))] = False
    if not keep.any():
        raise DataError("These are all clients of the model; keep at least one.")
    counts = np.bincount(tree.parent[keep], minlength=tree.n_clusters)
    ptr = np.concatenate([[0], np.cumsum(counts)])
    left = replace(tree, cluster_ptr=ptr, client_ids=tree.client_ids.filter(pl.Series(keep)))
    units = learned.units
    check_rank(units.C[keep].sum(axis=0), model.terms, learned.free)
    fewer = Quadratic(units.C[keep], units.r[keep], units.c[keep], units.n[keep])
    solved = _solved(model, replace(learned, units=fewer), left, model.rows[keep])
    place = np.where(keep, np.cumsum(keep) - 1, -1)
    batches = None if model.batches is None else model.batches.moved(place)
    return replace(solved, dropped=model.dropped, batches=batches)


def _named(tree: Hierarchy, clients: list[Any]) -> Ints:
    """The positions of clients that are named by their ids or by pairs of the ids of their cluster and their own."""
    alone = np.array([not isinstance(client, tuple | list) for client in clients], dtype=bool)
    pairs = [(None, client) if single else tuple(client) for client, single in zip(clients, alone, strict=True)]
    for pair in (pair for pair in pairs if len(pair) != 2):
        raise DataError(f"A client is named by its id or by the pair (cluster, client). Got {pair!r} instead.")
    inner = as_labels([own for _, own in pairs], "client")
    cluster = lookup(as_labels([outer for outer, _ in pairs], "cluster"), tree.cluster_ids, "cluster")
    distinct, codes = encode(tree.client_ids, "client")
    which, holder = lookup(inner, distinct, "client"), np.zeros(len(distinct), dtype=np.int64)
    holder[codes] = np.arange(len(codes))
    for at in np.flatnonzero(alone & (which >= 0) & (np.bincount(codes)[which] > 1)):
        found = [tree.identity(int(i)) for i in np.flatnonzero(codes == which[at])]
        raise DataError(
            f"Client {inner[int(at)]!r} is in {len(found)} clusters; give the pair (cluster, client): {listing(found, 3)}."
        )
    cluster = np.where(alone, np.where(which >= 0, tree.parent[holder[which]], -1), cluster)
    places = tree.find(inner, cluster)
    places = np.where(tree.parent[places] == cluster, places, -1)
    if (places < 0).any():
        unknown = [clients[at] for at in np.flatnonzero(places < 0)]
        raise DataError(f"The model has no client {listing(unknown, 5)}; the ids are those of clients_.")
    return places


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
    known = model.posterior.satterthwaite  # the uncertainty of the components is that of the fit
    learned = replace(learned, covariance=covariance, components=components, satterthwaite=known, draws=None)
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
    chosen = model.hierarchy.resolve(tree.client_ids, tree.cluster_of_client, n_rows=tree.n_clients)
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
    client = old.find(new.client_ids, cluster[new.parent])
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
    return Hierarchy(ptr, ids.gather(order), clusters, old.nested), place[np.concatenate([np.arange(old.n_clients), client])]


def _placed(units: Quadratic, places: Ints, n: int) -> Quadratic:
    """The units at these places among ``n``, and zeros at the other places."""
    d = units.r.shape[1]
    whole = Quadratic(np.zeros((n, d, d)), np.zeros((n, d)), np.zeros(n), np.zeros(n))
    whole.C[places], whole.r[places], whole.c[places], whole.n[places] = units.C, units.r, units.c, units.n
    return whole
