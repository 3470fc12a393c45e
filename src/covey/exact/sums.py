"""Arrays of exact sums, and how they are made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from covey._typing import Anything, Floats, Ints
from covey.exact.kernels import PIECE, TOO_LARGE, Limbs, carry_digits, round_limbs, sum_segments, sum_segments_serially
from covey.records import Record

LIMBS, WIDE = 3, 9
DIGITS, WIDE_DIGITS = 2 * LIMBS + 1, 2 * WIDE + 1  # of 32 bits each, then the size
QUANTUM = 2.0**-96

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
        round_limbs(limbs, self.size.reshape(-1), nearest.reshape(-1))
        return nearest

    def integers(self) -> Anything:
        """The sums themselves, as Python's integers in multiples of ``2^(-32 n)``; None where the sum is not a number."""
        whole = np.empty(self.size.size, dtype=object)
        rows = zip(self.limbs.reshape(-1, self.limbs.shape[-1]).astype("<u8"), self.finite.reshape(-1), strict=True)
        for at, (row, finite) in enumerate(rows):
            whole[at] = int.from_bytes(row.tobytes(), "little", signed=True) if finite else None
        return whole.reshape(self.shape)

    def _digits(self) -> Ints:
        """``(*shape, 2 n + 1)``: 32 bits each, and the size; the inverse of :func:`from_digits`."""
        halves = np.ascontiguousarray(self.limbs, dtype="<u8").view("<u4")
        return np.concatenate([halves.astype(np.int64), self.size[..., None]], axis=-1)


def from_digits(digits: Ints) -> Exact:
    """The sums that :func:`accumulate` collected in rows ``(*shape, 2 n + 1)``; carries are done here.

    >>> import numpy as np
    >>> from covey.exact import accumulate
    >>> digits = np.zeros(DIGITS, dtype=np.int64)
    >>> for x in (0.5, -2.0**70, 2.0**70):
    ...     accumulate(digits, x)
    >>> float(from_digits(digits))
    0.5
    """
    many = digits.shape[-1]
    limbs = np.empty((*digits.shape[:-1], many // 2), dtype=np.uint64)
    size = np.empty(digits.shape[:-1], dtype=np.int64)
    carry_digits(np.ascontiguousarray(digits).reshape(-1, many), limbs.reshape(-1, many // 2), size.reshape(-1))
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
        kernel = sum_segments if rows.size > _WORTH_SHARING else sum_segments_serially
        kernel(rows, np.asarray(ptr, dtype=np.int64), *_pieces(ptr), digits)
    return from_digits(digits.reshape(len(ptr) - 1, *rest, 2 * limbs + 1))


def _pieces(ptr: Ints) -> tuple[Ints, Ints]:
    """Segments cut into pieces of at most ``PIECE`` rows: where each starts, and whose it is."""
    count = -(-np.diff(ptr) // PIECE)
    owner = np.repeat(np.arange(len(count)), count)
    nth = np.arange(len(owner)) - np.repeat(np.cumsum(count) - count, count)
    return np.asarray(ptr)[owner] + PIECE * nth, owner
