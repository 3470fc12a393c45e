"""Sums that do not depend on their order, nor on who added what: fixed point instead of floating point.

Floating-point sums change in their last digits with the order of the addends, so a sum over clients would depend on which
node holds which client. Here a number is a whole multiple of ``2^-96``, an integer modulo ``2^192`` kept as three limbs of
64 bits: adding is exact, has the same bits in any order and split, and can be masked by adding random integers.

An addend is rounded to the nearest multiple of ``2^-96``, ties to even: from ``2^-44`` in size on it is exactly itself, below
``2^-97`` it is 0. Whatever cannot be summed safely comes out as NaN, and that too does not depend on the order: beside the
integer goes the ``size`` of the addends, in whole multiples of ``2^64``, of which NaN, infinities and anything from ``2^94`` on
count :data:`TOO_LARGE` at once. Sizes below that mean that a sum of fewer than ``2^30`` addends is less than ``2^95`` and has
not wrapped around.

Numbers of which nobody knows how large they are, such as squared gradients from the start to the end of a run, have
:data:`WIDE` limbs, multiples of ``2^-288`` and less than ``2^286``. With ``n`` limbs 96, 64, 94 and 95 above are ``32n``,
``32n - 32``, ``32n - 2`` and ``32n - 1``.

Inside kernels a sum is a row of carry-save digits, each worth ``2^32`` of the one before it, and the size: :func:`accumulate`
adds a number by three integer additions, and :func:`from_digits` carries at the end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit, prange

from covey._typing import Anything, Floats, Ints
from covey.records import Record

Limbs = npt.NDArray[np.uint64]

LIMBS, WIDE = 3, 9
DIGITS, WIDE_DIGITS = 2 * LIMBS + 1, 2 * WIDE + 1  # of 32 bits each, then the size
TOO_LARGE = 1 << 30  # sizes that add up to this: the sum could reach 2^95 and wrap around
QUANTUM = 2.0**-96

_MASK = 0xFFFFFFFF
_SMALL = 2.0**19
_BESIDE_FIRST, _BESIDE_SECOND, _BESIDE_THIRD = 1.5 * 2.0**20, 1.5 * 2.0**-12, 1.5 * 2.0**-44
_PIECE = 1024  # rows summed by one thread at a time
_WORTH_SHARING = 1 << 16  # values below which threads would mostly wait for each other


@dataclass(frozen=True, eq=False)
class Exact(Record):
    """An array of exact sums.

    Parameters
    ----------
    limbs : (..., n) uint64, least significant first, two's complement, in multiples of ``2^(-32 n)``
    size : (...) int64: the addends' absolute values in multiples of ``2^(32 n - 32)``; from :data:`TOO_LARGE` on the sum is NaN

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
        """Each value by itself, rounded to the nearest multiple of the quantum."""
        floats = np.asarray(values, dtype=np.float64)
        each = segment_sum(floats.reshape(-1), np.arange(floats.size + 1), limbs)
        return each.reshape(*floats.shape)

    @classmethod
    def zeros(cls, *shape: int, limbs: int = LIMBS) -> Exact:
        return cls(np.zeros((*shape, limbs), dtype=np.uint64), np.zeros(shape, dtype=np.int64))

    @classmethod
    def join(cls, parts: Sequence[Exact]) -> Exact:
        """All values of these arrays, of the same number of limbs, in one flat array."""
        limbs = np.concatenate([part.limbs.reshape(-1, part.limbs.shape[-1]) for part in parts])
        return cls(limbs, np.concatenate([part.size.reshape(-1) for part in parts]))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.size.shape

    @property
    def finite(self) -> Anything:
        """Which sums are numbers; boolean, of this shape."""
        return np.asarray(self.size < TOO_LARGE)

    def reshape(self, *shape: int) -> Exact:
        size = self.size.reshape(shape)
        return Exact(self.limbs.reshape(*size.shape, self.limbs.shape[-1]), size)

    def __getitem__(self, index: Any) -> Exact:
        """A part of the array, by its leading axes."""
        size = self.size[index]
        return Exact(self.limbs[index].reshape(*np.shape(size), self.limbs.shape[-1]), np.asarray(size))

    def widened(self) -> Exact:
        """The same numbers with :data:`WIDE` limbs; of the size only whether it is too large."""
        below = (WIDE - self.limbs.shape[-1]) // 2
        whole = np.zeros((*self.shape, WIDE), dtype=np.uint64)
        whole[..., below : WIDE - below] = self.limbs
        whole[..., WIDE - below :] = np.where(self.limbs[..., -1:] >> np.uint64(63), ~np.uint64(0), np.uint64(0))
        return Exact(whole, np.where(self.finite, 0, TOO_LARGE))

    def narrowed(self) -> Exact:
        """The reverse, for sums of what :meth:`widened` made; those without room in :data:`LIMBS` limbs are not numbers."""
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
        """The sum over an axis, of fewer than ``2^30`` values."""
        return from_digits(self._digits().sum(axis=range(len(self.shape))[axis]))

    def __float__(self) -> float:
        """Of a single sum."""
        return float(self.floats())

    def floats(self) -> Floats:
        """The nearest floating-point numbers, ties to even; NaN where the sum is not a number."""
        limbs = np.ascontiguousarray(self.limbs, dtype=np.uint64).reshape(-1, self.limbs.shape[-1])
        nearest = np.empty(self.shape)
        _round(limbs, self.size.reshape(-1), nearest.reshape(-1))
        return nearest

    def fractions(self) -> Anything:
        """The sums themselves, as :class:`fractions.Fraction`; a float NaN where the sum is not a number."""
        exact = np.empty(self.size.size, dtype=object)
        many = self.limbs.shape[-1]
        rows = zip(self.limbs.reshape(-1, many).astype("<u8"), self.finite.reshape(-1), strict=True)
        for at, (row, finite) in enumerate(rows):
            whole = int.from_bytes(row.tobytes(), "little", signed=True)
            exact[at] = Fraction(whole, 2 ** (32 * many)) if finite else np.nan
        return exact.reshape(self.shape)

    def _digits(self) -> Ints:
        """``(*shape, 2 n + 1)``: 32 bits each, and the size; the inverse of :func:`from_digits`."""
        halves = np.ascontiguousarray(self.limbs, dtype="<u8").view("<u4")
        return np.concatenate([halves.astype(np.int64), self.size[..., None]], axis=-1)


def from_digits(digits: Ints) -> Exact:
    """The sums that :func:`accumulate` collected in rows ``(*shape, 2 n + 1)``; carries are done here.

    >>> import numpy as np
    >>> digits = np.zeros(DIGITS, dtype=np.int64)
    >>> for x in (0.5, -2.0**70, 2.0**70):
    ...     accumulate(digits, x)
    >>> float(from_digits(digits))
    0.5
    """
    many = digits.shape[-1]
    limbs = np.empty((*digits.shape[:-1], many // 2), dtype=np.uint64)
    size = np.empty(digits.shape[:-1], dtype=np.int64)
    _carry(np.ascontiguousarray(digits).reshape(-1, many), limbs.reshape(-1, many // 2), size.reshape(-1))
    return Exact(limbs, size)


def total(values: Floats) -> Exact:
    """The sum of all values, of any size.

    >>> import numpy as np
    >>> float(total(np.array([1e-30, 3.0])) + total(np.array([-3.0]))), float(total(np.array([1e60, 1e60])))
    (1e-30, 2e+60)
    """
    return segment_sum(values.reshape(-1), np.array([0, values.size]), WIDE)[0]


def segment_sum(values: Floats, ptr: Ints, limbs: int = LIMBS) -> Exact:
    """Exact sums of ``values[ptr[j]:ptr[j + 1]]``, ``(k, *rest)``; an empty segment sums to zero.

    >>> import numpy as np
    >>> segment_sum(np.array([0.1, 0.2, 1e20, 3.0, -1e20]), np.array([0, 2, 2, 5])).floats().tolist()
    [0.30000000000000004, 0.0, 3.0]
    """
    rest = values.shape[1:]
    rows = np.ascontiguousarray(values, dtype=np.float64).reshape(len(values), -1) if values.size else np.zeros((0, 0))
    digits = np.zeros((len(ptr) - 1, int(np.prod(rest)), 2 * limbs + 1), dtype=np.int64)
    if rows.size:
        kernel = _sum_segments if rows.size > _WORTH_SHARING else _sum_few
        kernel(rows, np.asarray(ptr, dtype=np.int64), *_pieces(ptr), digits)
    return from_digits(digits.reshape(len(ptr) - 1, *rest, 2 * limbs + 1))


def _pieces(ptr: Ints) -> tuple[Ints, Ints]:
    """Segments cut into pieces of at most ``_PIECE`` rows: where each starts, and whose it is."""
    count = -(-np.diff(ptr) // _PIECE)
    owner = np.repeat(np.arange(len(count)), count)
    nth = np.arange(len(owner)) - np.repeat(np.cumsum(count) - count, count)
    return np.asarray(ptr)[owner] + _PIECE * nth, owner


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
        whole = np.int64(np.rint(x * _power(16 * last)))
        digits[row, 0] += whole & _MASK
        digits[row, 1] += whole >> 32
    elif exponent < 1021 + 16 * last:  # below 2^(32 n - 2)
        x *= _power(96 - 16 * last)
        top = np.trunc(x * 2.0**-64)
        upper = np.trunc((x - top * 2.0**64) * 2.0**-32)
        digits[row, last] += np.int64(abs(top))
        digits[row, last - 1] += np.int64(top)
        digits[row, last - 2] += np.int64(upper)
        digits[row, last - 3] += np.int64(x - top * 2.0**64 - upper * 2.0**32)
    else:
        digits[row, last] += TOO_LARGE


@njit(fastmath=False)  # type: ignore[untyped-decorator]
def _power(exponent: int) -> float:
    """``2^exponent``, by its bits."""
    return np.int64((1023 + exponent) << 52).view(np.float64)


@njit(fastmath=False)  # type: ignore[untyped-decorator]
def accumulate_rows(digits: Ints, weights: Floats, rows: Floats) -> None:
    """Add ``weights[i] * rows[i]`` to as many sums ``digits (columns, DIGITS)``; for use inside kernels.

    Small numbers, which most are, take a third of the time of the others, so these are left to a second pass.
    """
    large = 0
    for start in range(0, len(rows), _PIECE):
        for i in range(start, min(start + _PIECE, len(rows))):
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
def _carry(digits: Ints, limbs: Limbs, size: Ints) -> None:
    for row in range(len(digits)):
        size[row] = min(digits[row, -1], TOO_LARGE)
        carry = np.int64(0)
        for i in range(limbs.shape[1]):
            low = digits[row, 2 * i] + carry
            high = digits[row, 2 * i + 1] + (low >> 32)
            limbs[row, i] = np.uint64(low & _MASK) | (np.uint64(high & _MASK) << np.uint64(32))
            carry = high >> 32


@njit(cache=True)  # type: ignore[untyped-decorator]
def _round(limbs: Limbs, size: Ints, nearest: Floats) -> None:
    """The 64 bits from the leading one on, the last of them set if anything is below, converted: rounded once."""
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
def _sum_segments(rows: Floats, ptr: Ints, start: Ints, owner: Ints, out: Ints) -> None:
    parts = np.zeros((len(owner), rows.shape[1], out.shape[2]), dtype=np.int64)
    for piece in prange(len(owner)):
        _sum_rows(rows, start[piece], min(start[piece] + _PIECE, ptr[owner[piece] + 1]), parts[piece])
    for piece in range(len(owner)):
        for column in range(rows.shape[1]):
            for digit in range(out.shape[2]):
                out[owner[piece], column, digit] += parts[piece, column, digit]


_sum_few = njit(cache=True)(_sum_segments.py_func)
