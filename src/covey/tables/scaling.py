"""Standardise terms: subtract their mean and divide by their standard deviation, so that one penalty suits all of them.

The mean and the standard deviation come from exact sums of the rows and of their squares (:mod:`covey.exact`). These sums can
be added over sites. The result is the same to the last bit for any assignment of rows to sites.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np

from covey._typing import Anything, Floats
from covey.errors import DataError, FormulaError, ModelError
from covey.exact import WIDE, WIDE_DIGITS, Exact, from_digits
from covey.kernels import accumulate_moments
from covey.records import Axes, Record
from covey.tables.design import Columns, Formula, Frame
from covey.tables.formula import Terms
from covey.tables.rows import GroupedData
from covey.tables.sparse import OneHot, SparseDesign, without

_UNIT = 1 << 32 * WIDE  # the number 1 as an integer of a wide sum
_EQUAL = 286  # rounding alone makes a variance of up to 2^-286 of equal values
_FAINT = 236  # a mean square below 2^-236 has lost digits


@dataclass(frozen=True, eq=False)
class Scale(Record):
    """How terms are standardised: ``mean (d,)`` and ``sd (d,)``; 0 and 1 leave a term as it is.

    >>> import numpy as np
    >>> X = np.array([[1.0, 2.0, 1e9], [1.0, 4.0, 1e9 + 3]])
    >>> scale = Scale.of(moments(X), 2, ("Intercept", "x", "z"))
    >>> scale.mean.tolist(), scale.sd.tolist()
    ([0.0, 3.0, 1000000001.5], [1.0, 1.0, 1.5])
    """

    mean: Annotated[Floats, Axes("d")]
    sd: Annotated[Floats, Axes("d")]

    @classmethod
    def of(cls, found: Exact, rows: int, terms: Sequence[str]) -> Scale:
        """The scale from the :func:`moments` of all rows, added over sites.

        A constant term is left as it is. Without a constant term there is no intercept that could absorb the means, so no term
        is centred.
        """
        sums = found.integers()
        spreads = [_mean_and_sd(sums[0, at], sums[1, at], int(rows), term) for at, term in enumerate(terms)]
        centred = any(mean and not sd for mean, sd in spreads)
        means = [mean if centred and sd else 0.0 for mean, sd in spreads]
        return cls(np.array(means), np.array([sd or 1.0 for _, sd in spreads]))

    def rows(self, data: GroupedData) -> GroupedData:
        """The same rows, standardised."""
        X = data.X - (self.mean if data.sums is None else data.unit[:, None] * self.mean)
        X /= self.sd
        return replace(data, X=X)

    def design(self, inner: Columns | Formula) -> Scaled:
        """A design that standardises new rows in the same way."""
        return Scaled(inner, tuple(self.mean.tolist()), tuple(self.sd.tolist()))


@dataclass(frozen=True)
class Scaled:
    """A design with standardised terms; a mean of 0 and an sd of 1 leave a term as it is.

    >>> scaled = Scaled(Columns(("x",)), mean=(0.0, 10.0), sd=(1.0, 5.0))
    >>> [block.tolist() for block in scaled.blocks(np.array([[20.0], [10.0]]))]
    [[1.0, 1.0], [[2.0], [0.0]]]
    """

    inner: Columns | Formula
    mean: tuple[float, ...]
    sd: tuple[float, ...]

    @property
    def terms(self) -> tuple[str, ...]:
        return self.inner.terms

    @property
    def columns(self) -> tuple[str, ...]:
        return self.inner.columns

    def blocks(self, rows: Frame | Anything) -> list[Anything]:
        blocks = self.inner.blocks(rows)
        ends = np.cumsum([1 if block.ndim == 1 else block.shape[1] for block in blocks])
        means, sds = np.split(np.array(self.mean), ends[:-1]), np.split(np.array(self.sd), ends[:-1])
        return [(block - mean) / sd for block, mean, sd in zip(blocks, means, sds, strict=True)]

    def to_json(self) -> dict[str, Any]:
        return {"kind": "scaled", "inner": self.inner.to_json(), "mean": list(self.mean), "sd": list(self.sd)}


Design = Columns | Formula | Scaled | SparseDesign
"""What turns a table into the columns of ``X``: ``terms``, ``columns``, ``blocks(rows)`` and ``to_json()``."""


def design_from_json(document: Mapping[str, Any], rhs: Terms | None = None) -> Design:
    """Rebuild a design from JSON; the formula is checked again.

    ``rhs`` are the common terms, if the formula is parsed already; a document with other terms is refused.
    """
    if document["kind"] == "sparse":
        coded = tuple(OneHot(str(each["text"]), str(each["column"]), tuple(each["levels"])) for each in document["coded"])
        inner = _inner_from_json(document["inner"], None if rhs is None else without(rhs, coded))
        return SparseDesign(inner, coded, tuple(document["features"]))
    scaled = document["kind"] == "scaled"
    inner = _inner_from_json(document["inner"] if scaled else document, rhs)
    if not scaled:
        return inner
    mean, sd = (tuple(float(value) for value in document[name]) for name in ("mean", "sd"))
    if not len(mean) == len(sd) == len(inner.terms) or not np.isfinite(mean).all() or not (np.array(sd) > 0).all():
        raise ModelError("The model is damaged: its means and standard deviations do not fit its terms; fit it again.")
    return Scaled(inner, mean, sd)


def _inner_from_json(document: Mapping[str, Any], rhs: Terms | None) -> Columns | Formula:
    if document["kind"] == "columns":
        return Columns(tuple(document["columns"]), bool(document["intercept"]))
    terms = Terms.parse(document["rhs"]) if rhs is None else rhs
    if terms.text != document["rhs"]:
        raise FormulaError(
            f"The terms {document['rhs']!r} of a design are not those of the formula, {terms.text!r}; fit the model again."
        )
    for name, levels in document["levels"].items():
        if len(set(levels)) < len(levels):
            raise ModelError(f"The categories of column {name!r} are listed twice; fit the model again.")
    extra = tuple(Terms.from_json(each) for each in document.get("extra", ()))
    design = Formula(terms, tuple(document["terms"]), tuple(document["columns"]), dict(document["levels"]), {}, extra)
    state = {text: design.transforms[text][1].check(numbers) for text, numbers in document.get("state", {}).items()}
    return replace(design, state=state)


def moments(X: Floats) -> Exact:
    """Sums of the rows and of their squares: ``(2, d)``.

    >>> import numpy as np
    >>> moments(np.array([[3.0], [4.0]])).floats().tolist()
    [[7.0], [25.0]]
    """
    digits = np.zeros((2, X.shape[1], WIDE_DIGITS), dtype=np.int64)
    accumulate_moments(np.ascontiguousarray(X), digits)
    return from_digits(digits)


def _mean_and_sd(total: int | None, squares: int | None, rows: int, term: str) -> tuple[float, float]:
    """The mean and the standard deviation of one term; the latter is 0 if the values are equal up to rounding.

    ``total`` and ``squares`` are in units of ``1 / _UNIT``, and None if they overflow. They are integers, so the mean and the
    standard deviation are rounded only once.
    """
    if total is None or squares is None:
        raise DataError(f"The values of term {term!r} are too large to standardise; put its column in a larger unit.")
    if squares << _FAINT < rows * _UNIT and (squares or total):
        raise DataError(f"The values of term {term!r} are too small to standardise; put its column in a smaller unit.")
    unit = rows * _UNIT
    variance = squares * unit - total**2  # in units of 1 / unit^2
    if variance << _EQUAL <= unit**2:
        return total / unit, 0.0
    # 64 bits of the square root, and one bit that says whether the rest is zero.
    shift = max(0, 64 + rows.bit_length() - variance.bit_length() // 2)
    root = math.isqrt(variance << 2 * shift)
    more = root**2 != variance << 2 * shift
    return total / unit, (2 * root + more) / (unit << shift + 1)
