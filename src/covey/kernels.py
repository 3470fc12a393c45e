"""Compiled loops over ids and rows, and for exact sums. Tests compare each with plain numpy or rational arithmetic.

Loops over a family's rows are in ``losses/kernels.py``; those of the solvers are in their own ``kernels.py`` files.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from covey._typing import Anything, Floats, Ints
from covey.compiling import njit

Limbs = npt.NDArray[np.uint64]
TOO_LARGE = 1 << 30  # from this size on, a sum could reach 2^95 and overflow
PIECE = 1024  # rows that one thread sums at a time
_TILE = 128  # rows that are hashed together
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MASK = 0xFFFFFFFF
_SMALL = 2.0**19
_BESIDE_FIRST, _BESIDE_SECOND, _BESIDE_THIRD = 1.5 * 2.0**20, 1.5 * 2.0**-12, 1.5 * 2.0**-44
_SPLITTER = 2.0**27 + 1.0


# Ids and rows


@njit(forceinline=True)  # type: ignore[untyped-decorator]
def _scrambled(state: Any) -> Any:
    """The last step of SplitMix64."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


@njit(forceinline=True)  # type: ignore[untyped-decorator]
def _hash_step(state: Any, bits: Any) -> Any:
    """The hash after one more number; 0 and -0 are equal."""
    return _scrambled((state ^ (bits if bits != np.uint64(1 << 63) else np.uint64(0))) + _GOLDEN)


@njit(forceinline=True)  # type: ignore[untyped-decorator]
def _hash_tile(state: Limbs, rows: int, values: Limbs, first: int) -> None:
    """Hash one more number of each row of a tile; ``values`` holds one for each row, or one for all."""
    if len(values) > 1:
        for r in range(rows):
            state[r] = _hash_step(state[r], values[first + r])
    else:
        value = values[0]
        for r in range(rows):
            state[r] = _hash_step(state[r], value)


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def hash_rows(begin: int, end: int, X: Limbs, y: Limbs, weights: Limbs, offset: Limbs, client_ptr: Ints, code: Limbs) -> None:
    """Set ``code (n,)`` to a hash of each client's rows, whose numbers are given as bits. It is a sum, so order is free.

    ``weights`` and ``offset`` hold one number for each row, or one for all. A tile of rows takes each step together, because
    the steps of one row have to wait for each other.
    """
    state, i, last = np.empty(_TILE, np.uint64), begin, client_ptr[end]
    for first in range(client_ptr[begin], last, _TILE):
        rows = min(_TILE, last - first)
        state[:] = _GOLDEN
        for column in range(X.shape[1]):
            for r in range(rows):
                state[r] = _hash_step(state[r], X[first + r, column])
        _hash_tile(state, rows, y, first)
        _hash_tile(state, rows, weights, first)
        _hash_tile(state, rows, offset, first)
        for r in range(rows):
            while first + r >= client_ptr[i + 1]:
                i += 1
            code[i] += state[r]


@njit(cache=True)  # type: ignore[untyped-decorator]
def rank_in_table(values: Ints, low: int, place: Ints, codes: Ints) -> None:
    """Set ``codes`` to the rank of each row, and ``place`` to the rank of each value counted from 1; 0 if it is absent."""
    for row in range(len(values)):
        place[values[row] - low] = 1
    rank = 0
    for at in range(len(place)):
        if place[at]:
            rank += 1
            place[at] = rank
    for row in range(len(values)):
        codes[row] = place[values[row] - low] - 1


@njit(cache=True)  # type: ignore[untyped-decorator]
def find_in_table(values: Ints, low: int, place: Ints, codes: Ints) -> None:
    """Set ``codes`` to the entry of ``place`` for each value, counted from ``low``; -1 outside of the table."""
    for row in range(len(values)):
        value = values[row]
        codes[row] = place[value - low] if low <= value < low + len(place) else -1


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def find_pairs(begin: int, end: int, code: Ints, cluster: Ints, ptr: Ints, order: Ints, parent: Ints, found: Ints) -> None:
    """Set ``found`` to the client of ``order[ptr[code]:ptr[code + 1]]`` in the row's cluster, -1 if there is none.

    The parents of these clients increase.
    """
    for row in range(begin, end):
        found[row] = -1
        if code[row] >= 0:
            low, last = ptr[code[row]], ptr[code[row] + 1]
            high = last
            while low < high:
                middle = (low + high) // 2
                if parent[order[middle]] < cluster[row]:
                    low = middle + 1
                else:
                    high = middle
            if low < last and parent[order[low]] == cluster[row]:
                found[row] = order[low]


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def multiply_rows(begin: int, end: int, rows: Floats, table: Floats, which: Ints, product: Floats) -> None:
    """Set ``product[l]`` to ``rows[l]'table[which[l]]``; -1 is the last row of the table."""
    for row in range(begin, end):
        at = which[row] if which[row] >= 0 else len(table) - 1
        total = 0.0
        for a in range(rows.shape[1]):
            total += rows[row, a] * table[at, a]
        product[row] = total


@njit(inline="always")  # type: ignore[untyped-decorator]
def _run(runs: Ints, r: int) -> tuple[int, int]:
    """The rows of run ``r``: from ``runs[r]`` to ``runs[r + 1]``, or row ``r`` alone if there is no list of runs."""
    return (runs[r], runs[r + 1]) if len(runs) else (r, r + 1)


@njit(cache=True)  # type: ignore[untyped-decorator]
def find_parents(client: Ints, runs: Ints, cluster: Ints, parent: Ints, counts: Ints) -> int:
    """Find the cluster and the number of rows of each client; returns the first row that contradicts, or -1.

    ``client`` has one entry for each run of rows (see :func:`_run`), ``cluster`` one for each row, or one for all.
    """
    each = int(len(cluster) > 1)
    for r in range(len(client)):
        i = client[r]
        first, last = _run(runs, r)
        for row in range(first, last):
            if parent[i] >= 0 and parent[i] != cluster[row * each]:
                return row
            parent[i] = cluster[row * each]
        counts[i] += last - first
    return -1


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def rank_in_segments(begin: int, end: int, values: Floats, ptr: Ints, longest: int, rank: Ints) -> None:
    """Set ``rank`` to the position of each value in its sorted segment; segments above ``longest`` are left out."""
    for i in range(begin, end):
        if ptr[i + 1] - ptr[i] <= longest:
            for row in range(ptr[i], ptr[i + 1]):
                below = 0
                for other in range(ptr[i], ptr[i + 1]):
                    below += values[other] < values[row] or (values[other] == values[row] and other < row)
                rank[row] = below


@njit(cache=True)  # type: ignore[untyped-decorator]
def counting_sort(client: Ints, runs: Ints, rank: Ints, ptr: Ints, order: Anything) -> bool:
    """Fill ``order`` with the rows, stably sorted by the rank of their client; returns whether a row moves.

    ``client`` has one entry for each run of rows (see :func:`_run`).
    """
    place = ptr[:-1].copy()
    moved = False
    for r in range(len(client)):
        at = rank[client[r]]
        first, last = _run(runs, r)
        moved |= place[at] != first
        for row in range(first, last):
            order[place[at]] = row
            place[at] += 1
    return moved


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def take_rows(begin: int, end: int, source: Floats, rows: Anything, target: Floats, left: int) -> None:
    """Set the columns of ``target`` from ``left`` on to ``source[rows]``.

    Threads are worth it, because every distant row waits for memory.
    """
    for at in range(begin, end):
        for a in range(source.shape[1]):
            target[at, left + a] = source[rows[at], a]


# Exact sums: see covey.exact for the digits


@njit(fastmath=False)  # type: ignore[untyped-decorator]
def accumulate_in(digits: Ints, row: int, x: float) -> None:
    """Add ``x`` to one of many sums, ``digits (sums, 2 n + 1)`` that start as zeros.

    The compiler must not reorder the arithmetic, which would lose the small digits. So this function is not inlined, and
    ``fastmath`` is off explicitly; by default it would be that of the kernel that is compiled first.
    """
    last = digits.shape[1] - 1  # 2 n, the column of the size
    bits = np.float64(x).view(np.int64)
    exponent = (bits >> 52) & 0x7FF  # 2^(exponent - 1023) <= |x| < 2^(exponent - 1022)
    lowest = 1075 - 16 * last
    if lowest <= exponent < 991 + 16 * last:  # a multiple of the quantum below 2^(32 n - 32)
        sign = bits >> 63
        whole = (((bits & 0xFFFFFFFFFFFFF) | 0x10000000000000) ^ sign) - sign
        at, shift = (exponent - lowest) >> 5, (exponent - lowest) & 31
        upper = whole >> (32 - shift)
        digits[row, at] += (whole << shift) & _MASK
        digits[row, at + 1] += upper & _MASK
        digits[row, at + 2] += upper >> 32
    elif exponent < lowest:
        whole = np.int64(np.rint(x * power_of_two(16 * last)))
        digits[row, 0] += whole & _MASK
        digits[row, 1] += whole >> 32
    elif exponent < 1021 + 16 * last:  # below 2^(32 n - 2)
        x *= power_of_two(96 - 16 * last)
        top = np.trunc(x * 2.0**-64)
        upper = np.trunc((x - top * 2.0**64) * 2.0**-32)
        digits[row, last] += np.int64(abs(top))
        digits[row, last - 1] += np.int64(top)
        digits[row, last - 2] += np.int64(upper)
        digits[row, last - 3] += np.int64(x - top * 2.0**64 - upper * 2.0**32)
    else:
        digits[row, last] += TOO_LARGE


@njit(fastmath=False)  # type: ignore[untyped-decorator]
def power_of_two(exponent: int) -> float:
    """Return ``2^exponent``."""
    return np.int64((1023 + exponent) << 52).view(np.float64)


@njit(fastmath=False)  # type: ignore[untyped-decorator]
def accumulate_rows(digits: Ints, weights: Floats, rows: Floats) -> None:
    """Add ``weights[i] * rows[i]`` to sums ``digits (columns, DIGITS)``.

    Small numbers take a third of the time and are the most frequent. Large numbers wait for a second pass.
    """
    large = 0
    for start in range(0, len(rows), PIECE):
        for i in range(start, min(start + PIECE, len(rows))):
            for column in range(rows.shape[1]):
                large += not _accumulate_small(digits, column, weights[i] * rows[i, column])
        for column in range(rows.shape[1]):  # digits overflow after about 2000 addends
            for at in range(3):
                digits[column, at + 1] += digits[column, at] >> 32
                digits[column, at] &= _MASK
    if large:
        for i in range(len(rows)):
            for column in range(rows.shape[1]):
                if not abs(weights[i] * rows[i, column]) < _SMALL:
                    accumulate_in(digits, column, weights[i] * rows[i, column])


@njit(cache=True)  # type: ignore[untyped-decorator]
def accumulate_moments(X: Floats, digits: Ints) -> None:
    """Add the rows of ``X (n, d)`` and their squares to sums ``digits (2, d, WIDE_DIGITS)``."""
    for row in range(X.shape[0]):
        for a in range(X.shape[1]):
            z = X[row, a]
            # The square is the sum of three products of 26-bit halves; no product is rounded.
            far = _SPLITTER * z
            upper = far - (far - z)
            lower = z - upper
            accumulate_in(digits[0], a, z)
            accumulate_in(digits[1], a, upper * upper)
            accumulate_in(digits[1], a, 2.0 * upper * lower)
            accumulate_in(digits[1], a, lower * lower)


@njit(fastmath=False)  # type: ignore[untyped-decorator]
def _accumulate_small(digits: Ints, row: int, x: float) -> bool:
    """Add ``x`` if its size is below ``2^19``, and return whether it is.

    Adding ``1.5 * 2^20`` rounds ``x`` to a multiple of ``2^-32``, which the low bits of the sum show; so do the next digits.
    """
    if not abs(x) < _SMALL:
        return False
    first = np.float64(x + _BESIDE_FIRST)
    rest = x - (first - _BESIDE_FIRST)
    second = np.float64(rest + _BESIDE_SECOND)
    third = np.float64(rest - (second - _BESIDE_SECOND) + _BESIDE_THIRD)
    digits[row, 2] += first.view(np.int64) - np.float64(_BESIDE_FIRST).view(np.int64)
    digits[row, 1] += second.view(np.int64) - np.float64(_BESIDE_SECOND).view(np.int64)
    digits[row, 0] += third.view(np.int64) - np.float64(_BESIDE_THIRD).view(np.int64)
    return True


@njit(cache=True)  # type: ignore[untyped-decorator]
def carry_digits(digits: Ints, limbs: Limbs, size: Ints) -> None:
    """Fill limbs ``(sums, n)`` and sizes ``(sums,)`` from digits ``(sums, 2 n + 1)``."""
    for row in range(len(digits)):
        size[row] = min(digits[row, -1], TOO_LARGE)
        carry = np.int64(0)
        for i in range(limbs.shape[1]):
            low = digits[row, 2 * i] + carry
            high = digits[row, 2 * i + 1] + (low >> 32)
            limbs[row, i] = np.uint64(low & _MASK) | (np.uint64(high & _MASK) << np.uint64(32))
            carry = high >> 32


@njit(cache=True)  # type: ignore[untyped-decorator]
def round_limbs(limbs: Limbs, size: Ints, nearest: Floats) -> None:
    """Fill ``nearest`` with the floating-point number nearest to each sum.

    The 64 bits from the leading one on are rounded once; the last of them is set if any bit below is set.
    """
    one, many = np.uint64(1), limbs.shape[1]
    whole = np.empty(many, dtype=np.uint64)
    for row in range(len(limbs)):
        negative = limbs[row, many - 1] >> np.uint64(63) == one
        carry = negative
        for i in range(many):
            whole[i] = ~limbs[row, i] + np.uint64(carry) if negative else limbs[row, i]
            carry = carry and whole[i] == 0
        at = many - 1
        while at > 0 and whole[at] == 0:
            at -= 1
        top, mid = whole[at], whole[at - 1] if at > 0 else np.uint64(0)
        exponent = 64 * at - 32 * many
        for bits in (32, 16, 8, 4, 2, 1):
            up, down = np.uint64(bits), np.uint64(64 - bits)
            if top >> down == 0:
                top = top << up | mid >> down
                mid = mid << up
                exponent -= bits
        if mid != 0 or (whole[: max(at - 1, 0)] != 0).any():
            top |= one
        value = math.ldexp(np.float64(top), exponent)
        nearest[row] = math.nan if size[row] >= TOO_LARGE else -value if negative else value


@njit(fastmath=False)  # type: ignore[untyped-decorator]
def _sum_rows(rows: Floats, first: int, last: int, digits: Ints) -> None:
    for row in range(first, last):
        for column in range(rows.shape[1]):
            accumulate_in(digits, column, rows[row, column])


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def sum_pieces(begin: int, end: int, rows: Floats, ptr: Ints, start: Ints, owner: Ints, digits: Ints) -> None:
    """Add the rows of each piece of a segment, at most ``PIECE``, to its sums ``digits (pieces, columns, DIGITS)``."""
    for piece in range(begin, end):
        _sum_rows(rows, start[piece], min(start[piece] + PIECE, ptr[owner[piece] + 1]), digits[piece])


# Sums of products


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def square_roots(begin: int, end: int, grams: Floats) -> None:
    """Replace the positive semi-definite matrices ``G (n, q, q)`` of a block, each by an ``R`` with ``R'R = G``.

    This is Cholesky's method with pivots, on matrices scaled to a unit diagonal. It ends when what is left is rounding, so the
    error of an entry ``G_ab`` is a rounding error of ``sqrt(G_aa G_bb)``, also if ``G`` is singular.
    """
    q = grams.shape[1]
    for i in range(begin, end):
        G, R = grams[i], np.zeros((q, q))
        size = np.zeros(q)
        for a in range(q):
            size[a] = math.sqrt(max(G[a, a], 0.0))
        for a in range(q):
            for b in range(q):
                G[a, b] = G[a, b] / (size[a] * size[b]) if size[a] > 0.0 and size[b] > 0.0 else 0.0
        for row in range(q):
            pivot = 0
            for a in range(q):
                if G[a, a] > G[pivot, pivot]:
                    pivot = a
            if not G[pivot, pivot] > 4e-16:
                break
            root = math.sqrt(G[pivot, pivot])
            for a in range(q):
                R[row, a] = G[pivot, a] / root
            for a in range(q):
                for b in range(q):
                    G[a, b] -= R[row, a] * R[row, b]
                G[a, pivot] = 0.0
                G[pivot, a] = 0.0
        for a in range(q):
            for b in range(q):
                G[a, b] = R[a, b] * size[b]
