"""Exact sums in fixed-point arithmetic. They do not depend on the order of the addends, nor on which node adds which.

A floating-point sum changes in its last digits with the order of the addends, so a sum over clients would depend on the
assignment of clients to nodes. Here a number is an integer multiple of ``2^-96``, stored modulo ``2^192`` as three limbs of
64 bits. Addition is exact, gives the same bits in any order, and allows masking by random integers.

An addend is rounded to the nearest multiple of ``2^-96``, ties to even. It is exact if its size is at least ``2^-44``, and 0
below ``2^-97``. A sum that might overflow is NaN, and this does not depend on the order either: each sum also has a ``size``,
the sum of the addends' sizes in whole multiples of ``2^64``. NaN, infinities and addends from ``2^94`` on add
:data:`TOO_LARGE` to it. If ``size < TOO_LARGE`` and there are fewer than ``2^30`` addends, the sum is below ``2^95``.

Numbers of unknown size, such as squared gradients over a whole run, have :data:`WIDE` limbs: multiples of ``2^-288`` below
``2^286``. With ``n`` limbs the exponents 96, 64, 94 and 95 above are ``32n``, ``32n - 32``, ``32n - 2`` and ``32n - 1``.

Inside kernels a sum is a row of digits, each worth ``2^32`` times the one before it, followed by the size. Digits may exceed
32 bits: :func:`accumulate_in` adds a number with three integer additions, and :func:`from_digits` carries at the end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit, prange

from covey._typing import Anything, Floats, Ints
from covey.records import Record

Limbs = npt.NDArray[np.uint64]

LIMBS, WIDE = 3, 9
DIGITS, WIDE_DIGITS = 2 * LIMBS + 1, 2 * WIDE + 1  # digits of 32 bits, then the size
QUANTUM = 2.0**-96
TOO_LARGE = 1 << 30  # from this size on, a sum could reach 2^95 and overflow

_PIECE = 1024  # rows that one thread sums at a time
_WORTH_SHARING = 1 << 16  # below this number of values, threads would mostly wait for each other
_MASK = 0xFFFFFFFF
_SMALL = 2.0**19
_BESIDE_FIRST, _BESIDE_SECOND, _BESIDE_THIRD = 1.5 * 2.0**20, 1.5 * 2.0**-12, 1.5 * 2.0**-44
_SPLITTER = 2.0**27 + 1.0


@dataclass(frozen=True, eq=False)
class Exact(Record):
    """An array of exact sums.

    Parameters
    ----------
    limbs : (..., n) uint64
        Two's complement, least significant limb first, in multiples of ``2^(-32 n)``.
    size : (...) int64
        Sum of the absolute values of the addends in multiples of ``2^(32 n - 32)``. From :data:`TOO_LARGE` on the sum is NaN.

    Examples
    --------
    >>> import numpy as np
    >>> a, b, c = Exact.of([1e16, 0.1]), Exact.of([1.0, 0.2]), Exact.of([-1e16, 0.3])
    >>> (a + b + c).floats().tolist(), (c + b + a).floats().tolist()
    ([1.0, 0.6], [1.0, 0.6])
    >>> (a + Exact.of([np.inf, 0.0]) - Exact.of([np.inf, 0.0])).floats().tolist()
    [nan, 0.1]
    """

    limbs: Limbs
    size: Ints

    @classmethod
    def of(cls, values: npt.ArrayLike, limbs: int = LIMBS) -> Exact:
        """Round each value to the nearest multiple of the quantum."""
        floats = np.asarray(values, dtype=np.float64)
        each = segment_sum(floats.reshape(-1), np.arange(floats.size + 1), limbs)
        return each.reshape(*floats.shape)

    @classmethod
    def zeros(cls, *shape: int, limbs: int = LIMBS) -> Exact:
        return cls(np.zeros((*shape, limbs), dtype=np.uint64), np.zeros(shape, dtype=np.int64))

    @classmethod
    def join(cls, parts: Sequence[Exact]) -> Exact:
        """Concatenate arrays with the same number of limbs into one flat array."""
        limbs = np.concatenate([part.limbs.reshape(-1, part.limbs.shape[-1]) for part in parts])
        return cls(limbs, np.concatenate([part.size.reshape(-1) for part in parts]))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.size.shape

    @property
    def finite(self) -> Anything:
        """Which sums are numbers (boolean)."""
        return np.asarray(self.size < TOO_LARGE)

    def reshape(self, *shape: int) -> Exact:
        size = self.size.reshape(shape)
        return Exact(self.limbs.reshape(*size.shape, self.limbs.shape[-1]), size)

    def __getitem__(self, index: Any) -> Exact:
        """Index the leading axes."""
        size = self.size[index]
        return Exact(self.limbs[index].reshape(*np.shape(size), self.limbs.shape[-1]), np.asarray(size))

    def widened(self) -> Exact:
        """Return the same numbers with :data:`WIDE` limbs. Of the size, only whether it is too large is kept."""
        below = (WIDE - self.limbs.shape[-1]) // 2
        whole = np.zeros((*self.shape, WIDE), dtype=np.uint64)
        whole[..., below : WIDE - below] = self.limbs
        whole[..., WIDE - below :] = np.where(self.limbs[..., -1:] >> np.uint64(63), ~np.uint64(0), np.uint64(0))
        return Exact(whole, np.where(self.finite, 0, TOO_LARGE))

    def narrowed(self) -> Exact:
        """Return sums of widened numbers with :data:`LIMBS` limbs; NaN where a sum does not fit."""
        below = (WIDE - LIMBS) // 2
        floats = self.floats()
        fits = self.finite & (np.abs(floats) < 2.0**94)
        size = np.where(fits, np.floor(np.abs(np.where(fits, floats, 0.0)) * 2.0**-64), TOO_LARGE).astype(np.int64)
        return Exact(np.ascontiguousarray(self.limbs[..., below : WIDE - below]), size)

    def __add__(self, other: Exact) -> Exact:
        return from_digits(self._digits() + other._digits())

    def __sub__(self, other: Exact) -> Exact:
        digits = other._digits()
        digits[..., :-1] *= -1
        return from_digits(self._digits() + digits)

    def sum(self, axis: int = 0) -> Exact:
        """Sum over an axis with fewer than ``2^30`` values."""
        return from_digits(self._digits().sum(axis=range(len(self.shape))[axis]))

    def __float__(self) -> float:
        return float(self.floats())

    def floats(self) -> Floats:
        """Return the nearest floating-point numbers, ties to even."""
        limbs = np.ascontiguousarray(self.limbs, dtype=np.uint64).reshape(-1, self.limbs.shape[-1])
        nearest = np.empty(self.shape)
        round_limbs(limbs, self.size.reshape(-1), nearest.reshape(-1))
        return nearest

    def integers(self) -> Anything:
        """Return the sums as Python integers in multiples of ``2^(-32 n)``; None where a sum is NaN."""
        whole = np.empty(self.size.size, dtype=object)
        rows = zip(self.limbs.reshape(-1, self.limbs.shape[-1]).astype("<u8"), self.finite.reshape(-1), strict=True)
        for at, (row, finite) in enumerate(rows):
            whole[at] = int.from_bytes(row.tobytes(), "little", signed=True) if finite else None
        return whole.reshape(self.shape)

    def _digits(self) -> Ints:
        """Return digits of 32 bits and the size, ``(*shape, 2 n + 1)``: the inverse of :func:`from_digits`."""
        halves = np.ascontiguousarray(self.limbs, dtype="<u8").view("<u4")
        return np.concatenate([halves.astype(np.int64), self.size[..., None]], axis=-1)


def from_digits(digits: Ints) -> Exact:
    """Turn digits ``(*shape, 2 n + 1)`` that :func:`accumulate_in` filled into sums.

    >>> import numpy as np
    >>> digits = np.zeros((1, DIGITS), dtype=np.int64)
    >>> for x in (0.5, -2.0**70, 2.0**70):
    ...     accumulate_in(digits, 0, x)
    >>> from_digits(digits).floats().tolist()
    [0.5]
    """
    many = digits.shape[-1]
    limbs = np.empty((*digits.shape[:-1], many // 2), dtype=np.uint64)
    size = np.empty(digits.shape[:-1], dtype=np.int64)
    carry_digits(np.ascontiguousarray(digits).reshape(-1, many), limbs.reshape(-1, many // 2), size.reshape(-1))
    return Exact(limbs, size)


def total(values: Floats) -> Exact:
    """Return the sum of all values, with :data:`WIDE` limbs.

    >>> import numpy as np
    >>> float(total(np.array([1e-30, 3.0])) + total(np.array([-3.0]))), float(total(np.array([1e60, 1e60])))
    (1e-30, 2e+60)
    """
    return segment_sum(values.reshape(-1), np.array([0, values.size]), WIDE)[0]


def segment_sum(values: Floats, ptr: Ints, limbs: int = LIMBS) -> Exact:
    """Return exact sums of ``values[ptr[j]:ptr[j + 1]]``, ``(k, *rest)``; an empty segment sums to zero.

    >>> import numpy as np
    >>> segment_sum(np.array([0.1, 0.2, 1e20, 3.0, -1e20]), np.array([0, 2, 2, 5])).floats().tolist()
    [0.30000000000000004, 0.0, 3.0]
    """
    rest = values.shape[1:]
    rows = np.ascontiguousarray(values, dtype=np.float64).reshape(len(values), -1) if values.size else np.zeros((0, 0))
    digits = np.zeros((len(ptr) - 1, int(np.prod(rest)), 2 * limbs + 1), dtype=np.int64)
    if rows.size:
        kernel = sum_segments if rows.size > _WORTH_SHARING else sum_segments_serially
        kernel(rows, np.asarray(ptr, dtype=np.int64), *_pieces(ptr), digits)
    return from_digits(digits.reshape(len(ptr) - 1, *rest, 2 * limbs + 1))


def _pieces(ptr: Ints) -> tuple[Ints, Ints]:
    """Cut segments ``ptr[j]:ptr[j + 1]`` into pieces of at most ``_PIECE``; return the start and the segment of each."""
    count = -(-np.diff(ptr) // _PIECE)
    owner = np.repeat(np.arange(len(count)), count)
    nth = np.arange(len(owner)) - np.repeat(np.cumsum(count) - count, count)
    return np.asarray(ptr)[owner] + _PIECE * nth, owner


# Compiled loops. Tests compare each with rational arithmetic.


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
    for start in range(0, len(rows), _PIECE):
        for i in range(start, min(start + _PIECE, len(rows))):
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


@njit(parallel=True, cache=True)  # type: ignore[untyped-decorator]
def sum_segments(rows: Floats, ptr: Ints, start: Ints, owner: Ints, out: Ints) -> None:
    """Add each row to the sums of its segment. A thread takes a piece of at most ``_PIECE`` rows at a time."""
    parts = np.zeros((len(owner), rows.shape[1], out.shape[2]), dtype=np.int64)
    for piece in prange(len(owner)):
        _sum_rows(rows, start[piece], min(start[piece] + _PIECE, ptr[owner[piece] + 1]), parts[piece])
    for piece in range(len(owner)):
        for column in range(rows.shape[1]):
            for digit in range(out.shape[2]):
                out[owner[piece], column, digit] += parts[piece, column, digit]


sum_segments_serially = njit(cache=True)(sum_segments.py_func)
