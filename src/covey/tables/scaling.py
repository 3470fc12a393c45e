"""Terms about their means, in units of their standard deviations, so that one penalty means the same for all of them.

Mean and standard deviation come from sums of the rows and of their squares that are exact and add (:mod:`covey.exact`), so they
are the same bits however rows are dealt out to sites.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
from numba import njit

from covey._typing import Floats, Ints
from covey.errors import DataError
from covey.exact import WIDE_DIGITS, Exact, accumulate, from_digits
from covey.records import Record
from covey.tables.design import Columns, Formula, Scaled
from covey.tables.rows import GroupedData

_EQUAL = Fraction(1, 2**286)  # what rounding leaves of the variance of equal values
_FAINT = Fraction(1, 2**236)  # a mean square below which digits are lost
_SPLITTER = 2.0**27 + 1.0


@dataclass(frozen=True, eq=False)
class Scale(Record):
    """How terms are standardised: ``mean (d,)`` and ``sd (d,)``, 0 and 1 for a term that is left as it is.

    >>> import numpy as np
    >>> X = np.array([[1.0, 2.0, 1e9], [1.0, 4.0, 1e9 + 3]])
    >>> scale = Scale.of(moments(X), 2, ("Intercept", "x", "z"))
    >>> scale.mean.tolist(), scale.sd.tolist()
    ([0.0, 3.0, 1000000001.5], [1.0, 1.0, 1.5])
    """

    mean: Floats
    sd: Floats

    @classmethod
    def of(cls, found: Exact, rows: int, terms: Sequence[str]) -> Scale:
        """From the :func:`moments` of all rows, added over sites.

        Terms that are constant are left as they are. If none is, there is no intercept to take up what centring takes away,
        and the others keep their zero.
        """
        sums = found.fractions()
        pairs = [_mean_and_variance(sums[0, at], sums[1, at], rows, term) for at, term in enumerate(terms)]
        centred = any(mean and not variance for mean, variance in pairs)
        means = [float(mean) if centred and variance else 0.0 for mean, variance in pairs]
        return cls(np.array(means), np.array([_root(variance) if variance else 1.0 for _, variance in pairs]))

    def rows(self, data: GroupedData) -> GroupedData:
        """The same rows, standardised."""
        X = data.X - self.mean
        X /= self.sd
        return replace(data, X=X)

    def design(self, inner: Columns | Formula) -> Scaled:
        """What does the same to new rows."""
        return Scaled(inner, tuple(self.mean.tolist()), tuple(self.sd.tolist()))


def moments(X: Floats) -> Exact:
    """Sums of the rows and of their squares: ``(2, d)``.

    >>> import numpy as np
    >>> moments(np.array([[3.0], [4.0]])).floats().tolist()
    [[7.0], [25.0]]
    """
    digits = np.zeros((2, X.shape[1], WIDE_DIGITS), dtype=np.int64)
    _add_moments(np.ascontiguousarray(X), digits)
    return from_digits(digits)


@njit(cache=True)  # type: ignore[untyped-decorator]
def _add_moments(X: Floats, digits: Ints) -> None:
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


def _mean_and_variance(total: Fraction | float, squares: Fraction | float, rows: int, term: str) -> tuple[Fraction, Fraction]:
    """Of one term, from its sums; variance 0 for values that are equal as far as sums can tell."""
    if not (isinstance(total, Fraction) and isinstance(squares, Fraction)):
        raise DataError(f"The values of term {term!r} are too large to standardise; put its column in a larger unit.")
    mean, square = total / rows, squares / rows
    if square < _FAINT and (square or mean):
        raise DataError(f"The values of term {term!r} are too small to standardise; put its column in a smaller unit.")
    variance = square - mean**2
    return mean, variance if variance > _EQUAL else Fraction(0)


def _root(square: Fraction) -> float:
    """The nearest number to a square root: 64 bits of it, and one that says whether more would follow."""
    shift = 64 - (square.numerator.bit_length() - square.denominator.bit_length()) // 2
    whole = square * Fraction(4) ** shift
    root = math.isqrt(whole.numerator // whole.denominator)
    return float((2 * root + (root**2 != whole)) / Fraction(2) ** (shift + 1))
