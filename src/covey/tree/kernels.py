"""Compiled loops that code ids as integers."""

from __future__ import annotations

import numba

from covey._typing import Ints


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def rank_in_table(values: Ints, low: int, place: Ints, codes: Ints) -> None:
    """Leaves each row's rank in ``codes``, and in ``place`` the rank of each value, from 1; 0 if it does not occur."""
    for row in range(len(values)):
        place[values[row] - low] = 1
    rank = 0
    for at in range(len(place)):
        if place[at]:
            rank += 1
            place[at] = rank
    for row in range(len(values)):
        codes[row] = place[values[row] - low] - 1
