"""Compiled loops over sparse shared columns; :mod:`.shared` has the algebra. Tests compare each with plain numpy.

Each unit (a row, a client or a cluster) has values in some columns only: those in ``columns[ptr[i]:ptr[i + 1]]``, in order,
with ``q`` values each.
"""

from __future__ import annotations

import numpy as np

from covey._typing import Floats, Ints
from covey.compiling import njit
from covey.losses.kernels import FASTMATH
from covey.threads import BLOCK

COLUMNS = 256  # columns of a block of products


@njit(nogil=True, cache=True, fastmath=FASTMATH, error_model="numpy")  # type: ignore[untyped-decorator]
def cross_products(
    begin: int, end: int, X: Floats, curves: Floats, client_ptr: Ints, indptr: Ints, values: Floats, place: Ints, G: Floats
) -> None:  # fmt: skip
    """Add ``X_i' diag(curves) Z_i`` of each client to ``G (entries, q)``.

    ``place`` says which entry of its client a value of ``Z`` belongs to.
    """
    for i in range(begin * BLOCK, min(end * BLOCK, len(client_ptr) - 1)):
        for row in range(client_ptr[i], client_ptr[i + 1]):
            for t in range(indptr[row], indptr[row + 1]):
                value = curves[row] * values[t]
                for a in range(X.shape[1]):
                    G[place[t], a] += value * X[row, a]


@njit(nogil=True, cache=True, fastmath=FASTMATH, error_model="numpy")  # type: ignore[untyped-decorator]
def lift(begin: int, end: int, K: Floats, ptr: Ints, place: Ints, cluster_ptr: Ints, G: Floats, H: Floats) -> None:
    """Add ``K_i G_i`` of the clients of each cluster to ``H``, at the entries ``place`` of the cluster."""
    q = G.shape[1]
    for j in range(begin, end):
        for i in range(cluster_ptr[j], cluster_ptr[j + 1]):
            for t in range(ptr[i], ptr[i + 1]):
                for a in range(q):
                    for b in range(q):
                        H[place[t], a] += K[i, a, b] * G[t, b]


@njit(nogil=True, cache=True, fastmath=FASTMATH, error_model="numpy")  # type: ignore[untyped-decorator]
def add_products(
    begin: int, end: int, ptr: Ints, columns: Ints, G: Floats, M: Floats, C: Floats, edge: Floats
) -> None:  # fmt: skip
    """Add ``G_i' M_i G_i`` of all units to the lower triangle of ``C (s, s)``, for blocks of its rows.

    A column ``s``, beyond the matrix, is the response: its products go to ``edge (s + 1,)``, or nowhere if that is empty.
    """
    q, s, along = G.shape[1], len(C), np.empty(G.shape[1])
    for block in range(begin, end):
        low, high = block * COLUMNS, (block + 1) * COLUMNS
        if high >= s:
            high = s + 1  # the last block has the response too
        for i in range(len(ptr) - 1):
            first, last = ptr[i], ptr[i + 1]
            t = first + np.searchsorted(columns[first:last], low)
            while t < last and columns[t] < high:
                row = columns[t]
                for b in range(q):
                    along[b] = 0.0
                    for a in range(q):
                        along[b] += G[t, a] * M[i, a, b]
                if row < s:
                    for u in range(first, t + 1):
                        for b in range(q):
                            C[row, columns[u]] += along[b] * G[u, b]
                elif len(edge):
                    for u in range(first, t + 1):
                        for b in range(q):
                            edge[columns[u]] += along[b] * G[u, b]
                t += 1


@njit(nogil=True, cache=True, fastmath=FASTMATH, error_model="numpy")  # type: ignore[untyped-decorator]
def forms(begin: int, end: int, ptr: Ints, columns: Ints, G: Floats, P: Floats, out: Floats, GP: Floats) -> None:
    """Set ``G_i P G_i' (q, q)`` of each unit, and ``G_i P`` at the unit's own columns unless ``GP`` is empty.

    ``P (s, s)`` is symmetric, and only its lower triangle is read. Columns from ``s`` on do not count.
    """
    q, s, along = G.shape[1], len(P), np.empty(G.shape[1])
    for i in range(begin, end):
        out[i] = 0.0
        for t in range(ptr[i], ptr[i + 1]):
            row = columns[t]
            if row >= s:
                continue
            along[:] = 0.0
            for u in range(ptr[i], ptr[i + 1]):
                column = columns[u]
                if column < s:
                    value = P[row, column] if column <= row else P[column, row]
                    for a in range(q):
                        along[a] += value * G[u, a]
            for a in range(q):
                if len(GP):
                    GP[t, a] = along[a]
                for b in range(q):
                    out[i, b, a] += G[t, b] * along[a]
