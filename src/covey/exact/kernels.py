"""The compiled loops of exact sums; tests compare each with a plain one in rational arithmetic."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from numba import njit, prange

from covey._typing import Floats, Ints

Limbs = npt.NDArray[np.uint64]

TOO_LARGE = 1 << 30  # sizes that add up to this: the sum could reach 2^95 and wrap around
PIECE = 1024  # rows summed by one thread at a time

_MASK = 0xFFFFFFFF
_SMALL = 2.0**19
_BESIDE_FIRST, _BESIDE_SECOND, _BESIDE_THIRD = 1.5 * 2.0**20, 1.5 * 2.0**-12, 1.5 * 2.0**-44
_SPLITTER = 2.0**27 + 1.0


@njit(fastmath=False)  # type: ignore[untyped-decorator]
def accumulate(digits: Ints, x: float) -> None:
    """Add ``x`` to a sum, a row of digits that starts as zeros; for use inside kernels."""
    accumulate_in(digits.reshape(1, len(digits)), 0, x)


@njit(fastmath=False)  # type: ignore[untyped-decorator]
def accumulate_in(digits: Ints, row: int, x: float) -> None:
    """The same for one of many sums, ``digits (sums, 2 n + 1)``.

    Not inlined by numba, and ``fastmath`` said to be off: it would else be that of whichever kernel is compiled first, and the
    arithmetic here, reordered, would lose the small digits.
    """
    last = digits.shape[1] - 1  # 2 n: of the size
    bits = np.float64(x).view(np.int64)
    exponent = (bits >> 52) & 0x7FF  # |x| is 2^(exponent - 1023) or more, and less than twice that
    lowest = 1075 - 16 * last
    if lowest <= exponent < 991 + 16 * last:  # a multiple of the quantum, below 2^(32 n - 32): 53 bits, moved into place
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
    """``2^exponent``, by its bits."""
    return np.int64((1023 + exponent) << 52).view(np.float64)


@njit(fastmath=False)  # type: ignore[untyped-decorator]
def accumulate_rows(digits: Ints, weights: Floats, rows: Floats) -> None:
    """Add ``weights[i] * rows[i]`` to as many sums ``digits (columns, DIGITS)``; for use inside kernels.

    Small numbers, which most are, take a third of the time of the others, so these are left to a second pass.
    """
    large = 0
    for start in range(0, len(rows), PIECE):
        for i in range(start, min(start + PIECE, len(rows))):
            for column in range(rows.shape[1]):
                large += not _accumulate_small(digits, column, weights[i] * rows[i, column])
        for column in range(rows.shape[1]):  # the digits have room for about 2000 addends
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
    """Add the rows ``X (n, d)`` and their squares to sums ``digits (2, d, WIDE_DIGITS)``."""
    for row in range(X.shape[0]):
        for a in range(X.shape[1]):
            z = X[row, a]
            # The square as three products of halves of 26 bits, none of which is rounded.
            far = _SPLITTER * z
            upper = far - (far - z)
            lower = z - upper
            accumulate(digits[0, a], z)
            accumulate(digits[1, a], upper * upper)
            accumulate(digits[1, a], 2.0 * upper * lower)
            accumulate(digits[1, a], lower * lower)


@njit(fastmath=False)  # type: ignore[untyped-decorator]
def _accumulate_small(digits: Ints, row: int, x: float) -> bool:
    """Add ``x`` below ``2^19`` in size; or else do nothing.

    Beside ``1.5 * 2^20`` a number is rounded to a multiple of ``2^-32``, which the bits of the sum count; the rest likewise.
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
    """Digits ``(sums, 2 n + 1)`` as limbs ``(sums, n)`` and sizes ``(sums,)``."""
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
    """The nearest number to each sum, rounded once: the 64 bits from the leading one on, the last set if anything is below."""
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


@njit(parallel=True, cache=True)  # type: ignore[untyped-decorator]
def sum_segments(rows: Floats, ptr: Ints, start: Ints, owner: Ints, out: Ints) -> None:
    """Add each row to the sums of its segment, a piece of at most ``PIECE`` rows to a thread."""
    parts = np.zeros((len(owner), rows.shape[1], out.shape[2]), dtype=np.int64)
    for piece in prange(len(owner)):
        _sum_rows(rows, start[piece], min(start[piece] + PIECE, ptr[owner[piece] + 1]), parts[piece])
    for piece in range(len(owner)):
        for column in range(rows.shape[1]):
            for digit in range(out.shape[2]):
                out[owner[piece], column, digit] += parts[piece, column, digit]


sum_segments_serially = njit(cache=True)(sum_segments.py_func)
