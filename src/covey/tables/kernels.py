"""Compiled loops that sort rows by cluster and client."""

from __future__ import annotations

import numba

from covey._typing import Anything, Floats, Ints


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def find_parents(client: Ints, cluster: Ints, parent: Ints, counts: Ints) -> int:
    """Fill each client's cluster and number of rows; the first row that puts a client in a second cluster, or -1."""
    for row in range(len(client)):
        i = client[row]
        if parent[i] >= 0 and parent[i] != cluster[row]:
            return row
        parent[i] = cluster[row]
        counts[i] += 1
    return -1


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def counting_sort(client: Ints, rank: Ints, ptr: Ints, order: Anything) -> bool:
    """Fill ``order`` with the rows by rank of their client, first come first; whether that moves any row."""
    place = ptr[:-1].copy()
    moved = False
    for row in range(len(client)):
        at = rank[client[row]]
        order[place[at]] = row
        moved |= place[at] != row
        place[at] += 1
    return moved


@numba.njit(parallel=True, cache=True)  # type: ignore[untyped-decorator]
def take_rows(source: Floats, rows: Anything, target: Floats) -> None:
    """``target[:] = source[rows]``."""
    for at in numba.prange(len(rows)):
        for a in range(source.shape[1]):
            target[at, a] = source[rows[at], a]
