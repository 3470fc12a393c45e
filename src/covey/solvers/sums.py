"""Sums over clients that leave a node: the same bits whoever shares a node with whom.

:class:`~covey.exact.Exact` sums have an absolute precision, ``2^-96``, and a largest size, ``2^94``. A :class:`Wide` sum is
several of them, of the same addends times powers of two, and its value is that of the finest that has room for it: numbers of
any magnitude, such as squared gradients from the start to the end of a run, keep their digits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numba import njit, prange

from covey._typing import Floats, Ints
from covey.exact import DIGITS, Exact, accumulate_in, from_digits

_BLOCK = 256  # clients summed by one thread at a time
UNITS = 2.0 ** np.array([160, 80, 0, -80, -160])


@dataclass(frozen=True)
class Wide:
    """A sum of numbers between about ``2^-200`` and ``2^250`` in size. Adds over nodes.

    Parameters
    ----------
    parts : exact sums of the addends times decreasing powers of two, ``(5,)``

    >>> import numpy as np
    >>> whole = Wide.of(np.array([1e-30, 3.0])) + Wide.of(np.array([-3.0]))
    >>> float(whole), float(Wide.of(np.array([1e60, 1e60])))
    (1e-30, 2e+60)
    """

    parts: Exact

    @classmethod
    def of(cls, values: Floats) -> Wide:
        """The sum of all values."""
        flat = np.ascontiguousarray(values).reshape(-1, 1)
        digits = np.zeros((-(-len(flat) // _BLOCK), 1, len(UNITS), DIGITS), dtype=np.int64)
        _add_up(flat, UNITS, digits)
        return cls.of_digits(digits[:, 0])

    @classmethod
    def of_digits(cls, digits: Ints) -> Wide:
        """From rows of digits ``(blocks, 5, DIGITS)``, such as a kernel collects."""
        return cls(from_digits(digits.sum(axis=0)))

    def __add__(self, other: Wide) -> Wide:
        return Wide(self.parts + other.parts)

    def __float__(self) -> float:
        """NaN if there is no room for it anywhere, or an addend was not finite."""
        sums = self.parts.floats() / UNITS
        fits = np.flatnonzero(self.parts.finite)
        return float(sums[fits[0]]) if len(fits) else float("nan")


def dot(left: Floats, right: Floats) -> Wide:
    """The inner product of two arrays."""
    return Wide.of(left * right)


@njit(parallel=True, cache=True)  # type: ignore[untyped-decorator]
def _add_up(values: Floats, units: Floats, digits: Ints) -> None:
    for block in prange(len(digits)):
        for i in range(block * _BLOCK, min(len(values), (block + 1) * _BLOCK)):
            for column in range(values.shape[1]):
                add_wide(digits[block, column], values[i, column], units)


@njit(fastmath=False)  # type: ignore[untyped-decorator]
def add_wide(digits: Ints, x: float, units: Floats) -> None:
    """Add ``x`` to the digits ``(5, DIGITS)`` of a wide sum; for use inside kernels."""
    for part in range(len(units)):
        accumulate_in(digits, part, x * units[part])
