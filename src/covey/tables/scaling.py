"""Terms about their means, in units of their standard deviations, so that one penalty means the same for all of them.

Mean and standard deviation come from sums of the rows and of their squares that are exact and add (:mod:`covey.exact`), so they
are the same bits for any assignment of rows to sites.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from covey._typing import Floats
from covey.errors import DataError
from covey.exact import WIDE, WIDE_DIGITS, Exact, accumulate_moments, from_digits
from covey.records import Record
from covey.tables.design import Columns, Formula, Scaled
from covey.tables.rows import GroupedData

_UNITS = 1 << 32 * WIDE  # in one, of the integers of a wide sum
_EQUAL = 286  # a variance of at most 2^-286 is what rounding leaves of equal values
_FAINT = 236  # a mean square below 2^-236 has lost digits


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
        sums = found.integers()
        spreads = [_Spread.of(sums[0, at], sums[1, at], int(rows), term) for at, term in enumerate(terms)]
        centred = any(each.total and not each.varies for each in spreads)
        means = [each.mean() if centred and each.varies else 0.0 for each in spreads]
        return cls(np.array(means), np.array([each.deviation() if each.varies else 1.0 for each in spreads]))

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
    accumulate_moments(np.ascontiguousarray(X), digits)
    return from_digits(digits)


@dataclass(frozen=True)
class _Spread:
    """The values of one term: how many, their sum in units of ``1 / _UNITS``, and their variance.

    These are integers, so nothing is rounded before mean and deviation are, each once. ``variance`` is in units of
    ``1 / (rows * _UNITS)^2``, and 0 for values that are equal as far as sums can tell.
    """

    rows: int
    total: int
    variance: int

    @classmethod
    def of(cls, total: int | None, squares: int | None, rows: int, term: str) -> _Spread:
        if total is None or squares is None:
            raise DataError(f"The values of term {term!r} are too large to standardise; put its column in a larger unit.")
        if squares << _FAINT < rows * _UNITS and (squares or total):
            raise DataError(f"The values of term {term!r} are too small to standardise; put its column in a smaller unit.")
        variance = squares * rows * _UNITS - total**2
        return cls(rows, total, variance if variance << _EQUAL > (rows * _UNITS) ** 2 else 0)

    @property
    def varies(self) -> bool:
        return self.variance > 0

    def mean(self) -> float:
        return self.total / (self.rows * _UNITS)

    def deviation(self) -> float:
        """The nearest number to the root of the variance, rounded once."""
        # 64 bits of the quotient, and one that says whether more would follow.
        shift = max(0, 64 + self.rows.bit_length() - self.variance.bit_length() // 2)
        root = math.isqrt(self.variance << 2 * shift)
        more = root**2 != self.variance << 2 * shift
        return (2 * root + more) / (self.rows * _UNITS << shift + 1)
