"""Eliminate everything but the coefficients of sparse shared columns.

The linear predictor is ``X_i theta_i + Z_i beta`` with a sparse ``Z (N, s)``. The coefficients ``beta`` have no penalty and
are the same for all clients. Given ``beta``, the model is one of ``X`` alone with the offset ``Z beta``, which every solver
knows. So ``beta`` minimises the profile: the least value of the objective over all other coefficients. Its second derivative is
what is left of the Hessian after clients, clusters and the global model are eliminated. For clients with the covariance ``S``
about their cluster, and clusters with ``T`` about the global model,

    A_i = X_i'W X_i      G_i = X_i'W Z_i      K_i = I + A_i S       M_i = S K_i^-1
    B_j = sum K_i^-1 A_i   H_j = sum K_i^-1 G_i   L_j = I + B_j T     N_j = T L_j^-1
    D = sum L_j^-1 B_j   R = sum L_j^-1 H_j
    Z'WZ - sum G_i'M_i G_i - sum H_j'N_j H_j - R'D^-1 R

``G_i`` and ``H_j`` have values in the columns that occur in the client or the cluster only. One dense matrix ``(s, s)`` is
kept, for all rows. There is none for a client or a cluster.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy import linalg

from covey._typing import Anything, Floats, Ints
from covey.errors import SolverError
from covey.solvers.direct import shared_kernels as kernels
from covey.solvers.direct.elimination import solve_columns
from covey.solvers.direct.hessians import leading_products
from covey.tables.rows import GroupedData
from covey.threads import block_count, share
from covey.tree.hierarchy import Hierarchy, segment_sum


@dataclass(frozen=True)
class Entries:
    """The columns in which units have values: those of unit ``i`` are ``columns[ptr[i]:ptr[i + 1]]``, in order.

    ``place`` is the entry of each of the values that the entries sum up.
    """

    ptr: Ints
    columns: Ints
    place: Ints

    @classmethod
    def of(cls, owner: Ints, columns: Ints, units: int, width: int) -> Entries:
        """The entries of units, given the unit and the column of each value; there are ``width`` columns."""
        distinct, place = np.unique(owner * width + columns, return_inverse=True)
        ptr = np.searchsorted(distinct, np.arange(units + 1) * width)
        return cls(ptr, np.asarray(distinct % width), place.ravel())


@dataclass(frozen=True)
class Layout:
    """A sparse matrix in CSR format, ``(N, width)``, and the columns that occur in each row, client and cluster.

    The last column may be the response. It has the number ``s``, and the matrices ``(s, s)`` leave it out.
    """

    values: Floats
    s: int
    rows: Entries
    clients: Entries
    clusters: Entries

    @classmethod
    def of(cls, Z: Any, s: int, client_ptr: Ints, tree: Hierarchy) -> Layout:
        Z.sort_indices()
        width, indices = Z.shape[1] + 1, Z.indices.astype(np.int64)
        rows = Entries(Z.indptr.astype(np.int64), indices, np.empty(0, dtype=np.int64))
        owner = np.repeat(np.repeat(np.arange(tree.n_clients), np.diff(client_ptr)), np.diff(Z.indptr))
        clients = Entries.of(owner, indices, tree.n_clients, width)
        owner = np.repeat(tree.parent, np.diff(clients.ptr))
        return cls(Z.data, s, rows, clients, Entries.of(owner, clients.columns, tree.n_clusters, width))


@dataclass(frozen=True)
class SharedSums:
    """What is left of the losses of clients: sums by cluster, and over all clients.

    Attributes
    ----------
    B, H : (k, q, q) and the entries of the clusters, as above
    C : (s, s) ``Z'WZ - sum G_i'M_i G_i``, its lower triangle
    edge : (s + 1,) the same for the response with the columns and itself; empty without a response
    A, G, inverse : of the clients: ``A_i``, the entries ``G_i`` and ``K_i^-1``
    """

    layout: Layout
    B: Floats
    H: Floats
    C: Floats
    edge: Floats
    A: Floats
    G: Floats
    inverse: Floats


def sum_shared(
    data: GroupedData, layout: Layout, curves: Floats, S: Floats, *, response: bool, ridge: float = 0.0
) -> SharedSums:
    """Eliminate the clients, whose rows have the second derivatives ``curves (N,)``. ``S`` is ``(1 or n, q, q)``.

    The terms of ``data`` that vary are its first ``q``. With ``response``, the last column of the layout is the response. A
    ``ridge`` pulls the coefficients of every client to zero, and so the shared ones as many times as there are clients.
    """
    q, tree, s = S.shape[1], data.hierarchy, layout.s
    X = np.ascontiguousarray(data.X[:, :q])
    A = leading_products(replace(data, X=X, terms=data.terms[:q]), curves, np.arange(q))
    A[:, np.arange(q), np.arange(q)] += ridge
    inverse: Floats = np.linalg.inv(np.eye(q) + A @ S) if q else np.empty_like(A)  # type: ignore[assignment]
    G, H = (np.zeros((len(each.columns), q)) for each in (layout.clients, layout.clusters))
    given = X, curves, data.client_ptr, layout.rows.ptr, layout.values, layout.clients.place, G
    share(kernels.cross_products, block_count(len(A)), *given)
    clients = layout.clients.ptr, layout.clusters.place, tree.cluster_ptr
    share(kernels.lift, tree.n_clusters, np.ascontiguousarray(inverse), *clients, G, H)
    C, edge = np.zeros((s, s)), np.zeros(s + 1 if response else 0)
    C[np.diag_indices(s)] = ridge * tree.n_clients
    add_all(layout.rows, layout.values[:, None], curves[:, None, None], C, edge)
    add_all(layout.clients, G, -(S @ inverse), C, edge)
    return SharedSums(layout, segment_sum(inverse @ A, tree.cluster_ptr), H, C, edge, A, G, inverse)


def add_all(units: Entries, G: Floats, M: Floats, C: Floats, edge: Floats) -> None:
    if G.shape[1]:
        blocks = max(1, -(-len(C) // kernels.COLUMNS))
        share(kernels.add_products, blocks, units.ptr, units.columns, np.ascontiguousarray(G), np.ascontiguousarray(M), C, edge)


@dataclass(frozen=True)
class SharedTop:
    """The profile of the shared coefficients: its second derivative as a Cholesky factor ``L (s, s)``, a lower triangle.

    Attributes
    ----------
    edge : (s + 1,) as in :class:`SharedSums`; the first ``s`` numbers are the right-hand side
    response : (q, s) how the global model moves with the shared coefficients, ``-D^-1 R``
    inverse, N : (k, q, q) ``L_j^-1`` and ``N_j``
    """

    L: Floats
    edge: Floats
    response: Floats
    inverse: Floats
    N: Floats

    def solve(self, b: Floats) -> Floats:
        """The step ``x`` for a right-hand side ``b (s,)``."""
        return np.asarray(linalg.lapack.dpotrs(self.L.T, b, lower=0)[0]) if len(b) else b

    def log_determinant(self, start: int = 0) -> float:
        """Of the columns from ``start`` on, given the others eliminated."""
        return 2.0 * float(np.log(np.diag(self.L)[start:]).sum())

    def covariance(self) -> Floats:
        """The inverse of the second derivative, its lower triangle; the factor is lost."""
        if len(self.L):
            linalg.lapack.dpotri(self.L.T, lower=0, overwrite_c=1)
        return self.L


def eliminate_upper(sums: SharedSums, T: Floats, free: Anything) -> SharedTop:
    """Eliminate the clusters, with the covariance ``T (1 or k, q, q)``, and the global coefficients that are ``free (q,)``.

    The matrix of ``sums`` becomes the factor.
    """
    (k, q, _), layout, C, edge = sums.B.shape, sums.layout, sums.C, sums.edge
    inverse: Floats = np.linalg.inv(np.eye(q) + sums.B @ T) if q else np.empty_like(sums.B)  # type: ignore[assignment]
    N = np.broadcast_to(T @ inverse, (k, q, q))
    add_all(layout.clusters, sums.H, -N, C, edge)
    s, width = len(C), len(C) + (1 if len(edge) else 0)
    lifted = (inverse[np.repeat(np.arange(k), np.diff(layout.clusters.ptr))] @ sums.H[:, :, None])[:, :, 0]
    R = np.zeros((width, q))
    kept = layout.clusters.columns < width
    np.add.at(R, layout.clusters.columns[kept], lifted[kept])
    move = np.zeros((q, width))
    if free.any():
        D = (inverse @ sums.B).sum(axis=0)[np.ix_(free, free)]
        move[free] = -solve_columns(D[None], R.T[free][None])[0][0]
        whole = Entries(np.array([0, width]), np.arange(width), np.empty(0, dtype=np.int64))
        change = np.zeros((q, q))
        change[np.ix_(free, free)] = -_pseudo_inverse(D)
        add_all(whole, R, change[None], C, edge)
    if s:
        singular = linalg.lapack.dpotrf(C.T, lower=0, clean=0, overwrite_a=1)[1]
        if singular:
            raise SolverError(
                "The rows do not determine the coefficients of the sparse columns; merge rare categories, drop columns, or "
                "set ridge= with given penalties."
            )
    return SharedTop(C, edge, move[:, :s], inverse, N)


def _pseudo_inverse(D: Floats) -> Floats:
    return np.asarray(solve_columns(D[None], np.eye(len(D))[None])[0][0])
