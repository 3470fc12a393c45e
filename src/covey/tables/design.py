"""How columns become terms: numeric columns as they are, or a formula.

A design remembers what prediction needs (column names, categories) in plain values, so that it can be saved as JSON.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import narwhals as nw
import numpy as np

from covey._typing import Anything, Floats
from covey.errors import DataError, FormulaError, ModelError, listing, unknown_column
from covey.tables.formula import ParsedFormula, Terms, names_in

Frame = Any  # an eager narwhals DataFrame of whichever library the user works with


class Design(Protocol):
    """What turns a table into the columns of ``X``."""

    @property
    def terms(self) -> tuple[str, ...]: ...

    @property
    def columns(self) -> tuple[str, ...]: ...

    def blocks(self, frame: Frame) -> list[Anything]:
        """Arrays of one or two dimensions that stand side by side in ``X``."""
        ...

    def to_json(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Columns:
    """Numeric columns as they are, after an intercept unless told otherwise."""

    columns: tuple[str, ...]
    intercept: bool = True

    @property
    def terms(self) -> tuple[str, ...]:
        return (("Intercept",) if self.intercept else ()) + self.columns

    def blocks(self, frame: Frame) -> list[Anything]:
        return self._beside_intercept([numeric(frame, name) for name in self.columns], len(frame))

    def matrix_blocks(self, X: Floats) -> list[Anything]:
        """The same for a plain matrix, whose columns are taken in order."""
        return self._beside_intercept([X], len(X))

    def _beside_intercept(self, blocks: list[Anything], n_rows: int) -> list[Anything]:
        return [np.broadcast_to(1.0, n_rows), *blocks] if self.intercept else blocks

    def to_json(self) -> dict[str, Any]:
        return {"kind": "columns", "columns": list(self.columns), "intercept": self.intercept}


@dataclass(frozen=True)
class Formula:
    """The common terms of a formula, with the columns they need and the categories these have."""

    rhs: Terms
    terms: tuple[str, ...]
    columns: tuple[str, ...]
    levels: Mapping[str, Sequence[Any]]

    @classmethod
    def of(cls, rhs: Terms, columns: Sequence[str], levels: Mapping[str, Sequence[Any]]) -> Formula:
        """For columns whose categories are known, without any data."""
        design = cls(rhs, (), tuple(columns), levels)
        terms = tuple(design.columns_of(rhs))
        if not terms:
            raise FormulaError(f"The formula {rhs.text!r} has no terms; write at least '1' for an intercept.")
        return replace(design, terms=terms)

    def columns_of(self, terms: Terms) -> list[str]:
        """The names of the columns that some terms make of these categories."""
        import pandas as pd

        # One row is enough to see which columns a term makes of its categories.
        row: dict[str, Any] = {name: [1.0] for name in self.columns}
        for name, levels in self.levels.items():
            row[name] = pd.Categorical(list(levels)[:1] or [None], list(levels))
        return [str(name) for name in terms.evaluate(pd.DataFrame(row, index=[0])).columns]

    def blocks(self, frame: Frame) -> list[Anything]:
        import pandas as pd

        table = {name: self._column(frame, name) for name in self.columns}
        matrix = self.rhs.evaluate(pd.DataFrame(table, index=range(len(frame))))
        return [matrix[name].to_numpy(dtype=np.float64) for name in matrix.columns]

    def to_json(self) -> dict[str, Any]:
        levels = {name: list(values) for name, values in self.levels.items()}
        return {
            "kind": "formula",
            "rhs": self.rhs.text,
            "terms": list(self.terms),
            "columns": list(self.columns),
            "levels": levels,
        }

    def _column(self, frame: Frame, name: str) -> Any:
        import pandas as pd

        if name not in self.levels:
            return numeric(frame, name)
        values = column(frame, name).to_list()
        codes = pd.Index(self.levels[name], dtype=object).get_indexer(pd.Index(values, dtype=object))
        lost = np.flatnonzero(codes < 0)
        if len(lost) and _is_null(values[lost[0]]):
            raise DataError(f"Column {name!r} has no category in row {lost[0]}; fill it or leave the row out.")
        if len(lost):
            raise DataError(
                f"Column {name!r} has the category {values[lost[0]]!r} in row {lost[0]}, which training did not see; "
                f"the known ones are {listing(self.levels[name])}."
            )
        return pd.Categorical.from_codes(codes, categories=list(self.levels[name]))


@dataclass(frozen=True)
class Scaled:
    """A design whose terms are put about their ``mean``, in units of their ``sd``; 0 and 1 leave a term as it is.

    >>> scaled = Scaled(Columns(("x",)), mean=(0.0, 10.0), sd=(1.0, 5.0))
    >>> [block.tolist() for block in scaled.matrix_blocks(np.array([[20.0], [10.0]]))]
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

    def blocks(self, frame: Frame) -> list[Anything]:
        return self._scaled(self.inner.blocks(frame))

    def matrix_blocks(self, X: Floats) -> list[Anything]:
        """The same for a plain matrix, if the design is of columns."""
        if not isinstance(self.inner, Columns):
            raise DataError("A formula needs a table with named columns; pass a data frame.")
        return self._scaled(self.inner.matrix_blocks(X))

    def _scaled(self, blocks: list[Anything]) -> list[Anything]:
        ends = np.cumsum([1 if block.ndim == 1 else block.shape[1] for block in blocks])
        means, sds = np.split(np.array(self.mean), ends[:-1]), np.split(np.array(self.sd), ends[:-1])
        return [(block - mean) / sd for block, mean, sd in zip(blocks, means, sds, strict=True)]

    def to_json(self) -> dict[str, Any]:
        return {"kind": "scaled", "inner": self.inner.to_json(), "mean": list(self.mean), "sd": list(self.sd)}


def unscaled(design: Design) -> Design:
    """The design itself, of terms as they are."""
    return design.inner if isinstance(design, Scaled) else design


def design_from_json(document: Mapping[str, Any], rhs: Terms | None = None) -> Columns | Formula | Scaled:
    """Rebuild a design; a formula is checked again, whoever wrote it.

    ``rhs`` are the common terms, if they are parsed already; a document that holds other terms is refused.
    """
    if document["kind"] == "scaled":
        inner = plain_design_from_json(document["inner"], rhs)
        mean, sd = (tuple(float(value) for value in document[name]) for name in ("mean", "sd"))
        if not len(mean) == len(sd) == len(inner.terms) or not np.isfinite(mean).all() or not (np.array(sd) > 0).all():
            raise ModelError("The model is damaged: its means and standard deviations do not fit its terms; fit it again.")
        return Scaled(inner, mean, sd)
    return plain_design_from_json(document, rhs)


def plain_design_from_json(document: Mapping[str, Any], rhs: Terms | None = None) -> Columns | Formula:
    """The same, of terms as they are."""
    if document["kind"] == "columns":
        return Columns(tuple(document["columns"]), bool(document["intercept"]))
    if rhs is None:
        rhs = Terms.parse(document["rhs"])
    if rhs.text != document["rhs"]:
        raise FormulaError(
            f"The terms {document['rhs']!r} of a design are not those of the formula, {rhs.text!r}; fit it again."
        )
    for name, levels in document["levels"].items():
        if len(set(levels)) < len(levels):
            raise ModelError(f"The categories of column {name!r} are listed twice; fit the model again.")
    return Formula(rhs, tuple(document["terms"]), tuple(document["columns"]), dict(document["levels"]))


def response(formula: ParsedFormula, frame: Frame) -> Any:
    """The left-hand side of a formula: a column as it is, or an expression such as ``log(radon)``."""
    lhs = formula.response or ""
    plain = lhs.strip("`")
    if plain in frame.columns:
        return frame.get_column(plain).to_native()
    if re.fullmatch(r"\w+", plain):
        raise unknown_column(plain, frame.columns)
    import pandas as pd

    terms = Terms.parse(f"0 + {lhs}") if formula.expression is None else formula.expression  # an odd one, to name its mistake
    columns, categorical = inspect(terms, frame)
    if categorical:
        raise FormulaError(f"The response {lhs!r} must be numeric; {listing(categorical)} holds categories.")
    values = terms.evaluate(pd.DataFrame({name: numeric(frame, name) for name in columns}))
    if values.shape[1] != 1:
        raise FormulaError(f"The response {lhs!r} must be one column or expression.")
    return values.iloc[:, 0].to_numpy(dtype=np.float64)


def column(frame: Frame, name: Any) -> Any:
    """One column of a frame, or the error that says which one is meant."""
    if name not in frame.columns:
        raise unknown_column(name, frame.columns)
    return frame.get_column(name)


def numeric(frame: Frame, name: str) -> Floats:
    """A column as float64; missing values as NaN, for the caller to find and name."""
    series = column(frame, name)
    if series.dtype.is_numeric() or series.dtype == nw.Boolean:
        return np.asarray(series.cast(nw.Float64()).to_numpy(), dtype=np.float64)
    try:
        if series.dtype == nw.Object:  # pandas keeps numbers that came with None as objects
            return np.asarray(series.to_numpy(), dtype=np.float64)
    except (TypeError, ValueError):
        pass
    shown = next((value for value in series.to_list() if not _is_null(value)), None)
    raise DataError(
        f"Column {name!r} holds {str(series.dtype).lower()} values (such as {shown!r}), not numbers; name it in a formula "
        "to code its categories, or convert it."
    )


def inspect(terms: Terms, frame: Frame) -> tuple[tuple[str, ...], dict[str, list[Any]]]:
    """The columns that terms need, and the categories of those that hold some, in order."""
    alone: set[str] = set()
    categories: set[str] = set()
    numbers: set[str] = set()
    for factor in terms.factors:
        used, wrapped = names_in(factor)
        categories |= wrapped
        (alone if factor.kind == "lookup" else numbers).update(set(used) - wrapped)
    text = {name for name in terms.names if not _is_number(column(frame, name))}
    for name in sorted(text - categories):
        _refuse_broken_numbers(frame, name)
    if "Intercept" in terms.names:
        raise FormulaError(f"The column 'Intercept' in {terms.text!r} has the name of covey's own intercept; rename it.")
    clash = sorted((categories & (alone | numbers)) | (text & numbers))
    if clash:
        raise FormulaError(
            f"Column {clash[0]!r} is used both as a category and as a number in {terms.text!r}; add a copy of it."
        )
    return terms.names, {name: _levels(frame, name) for name in terms.names if name in text | categories}


def _refuse_broken_numbers(frame: Frame, name: str) -> None:
    """A stray word makes a column of numbers one of text; coding each number as a category would hide that."""
    values = column(frame, name).to_list()
    words = [(row, value) for row, value in enumerate(values) if isinstance(value, str) and not _reads_as_number(value)]
    numbers = sum(isinstance(value, str) for value in values) - len(words)
    if numbers > len(words):
        broken = f"except {words[0][1]!r} in row {words[0][0]}" if words else "in every row"
        raise DataError(
            f"Column {name!r} holds text that reads as numbers {broken}; convert it, or write C({name}) for categories."
        )


def _reads_as_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _levels(frame: Frame, name: str) -> list[Any]:
    series = column(frame, name)
    values = {value for value in series.to_list() if not _is_null(value)}
    if hasattr(series.to_native(), "cat") and hasattr(series.to_native().cat, "categories"):
        return [value for value in series.to_native().cat.categories.tolist() if value in values]  # pandas: the user's order
    odd = next((value for value in values if not isinstance(value, str | int | float)), None)
    if odd is not None:
        raise DataError(
            f"Column {name!r} holds {type(odd).__name__} values; convert it to text or numbers to use it in a formula."
        )
    return sorted(values, key=lambda value: (str(type(value)), value))


def _is_number(series: Any) -> bool:
    return bool(series.dtype.is_numeric() or series.dtype == nw.Boolean)


def _is_null(value: Any) -> bool:
    return value is None or (isinstance(value, float) and np.isnan(value)) or type(value).__name__ == "NAType"
