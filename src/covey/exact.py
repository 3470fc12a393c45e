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

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from covey._typing import Anything, Floats, Ints
from covey.kernels import PIECE, TOO_LARGE, Limbs, carry_digits, round_limbs, sum_pieces
from covey.records import Record
from covey.threads import share

LIMBS, WIDE = 3, 9
DIGITS, WIDE_DIGITS = 2 * LIMBS + 1, 2 * WIDE + 1  # digits of 32 bits, then the size
QUANTUM = 2.0**-96


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
    >>> from covey.kernels import accumulate_in
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
        start, owner, first = _pieces(ptr)
        parts = digits if len(owner) == len(digits) == len(first) else np.zeros((len(owner), *digits.shape[1:]), dtype=np.int64)
        share(sum_pieces, len(owner), rows, np.asarray(ptr, dtype=np.int64), start, owner, parts)
        if parts is not digits:
            digits[owner[first]] = np.add.reduceat(parts, first)
    return from_digits(digits.reshape(len(ptr) - 1, *rest, 2 * limbs + 1))


def _pieces(ptr: Ints) -> tuple[Ints, Ints, Ints]:
    """Cut segments ``ptr[j]:ptr[j + 1]`` into pieces of at most ``PIECE``.

    Returns the start and the segment of each piece, and the first piece of each segment that is not empty.
    """
    size = np.diff(ptr)
    if ((size > 0) & (size <= PIECE)).all():
        each = np.arange(len(size))
        return np.asarray(ptr)[:-1], each, each
    count = -(-size // PIECE)
    before = np.cumsum(count) - count
    owner = np.repeat(np.arange(len(count)), count)
    return np.asarray(ptr)[owner] + PIECE * (np.arange(len(owner)) - before[owner]), owner, before[count > 0]
