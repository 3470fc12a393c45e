"""Sparse columns of shared terms: the columns of a sparse matrix, or categories as indicator columns that are never dense.

Shared terms have one coefficient for all clients. Here they are kept beside the dense matrix ``X`` as one matrix in scipy's CSR
format, with its rows in the order of the clients. Work and memory grow with the number of its nonzero values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from scipy import sparse

from covey._typing import Anything, Floats
from covey.errors import DataError, FormulaError, listing
from covey.tables.design import Columns, Formula, Frame, column
from covey.tables.formula import ParsedFormula, Term, Terms
from covey.tables.values import category_codes

MANY_CATEGORIES = 500  # indicator columns of one category from which on they are sparse, if the bars say what varies


@runtime_checkable
class SparseMatrix(Protocol):
    """A matrix or an array of :mod:`scipy.sparse`, of any format."""

    shape: tuple[int, int]
    nnz: int

    def tocsr(self) -> Any: ...


@dataclass(frozen=True)
class OneHot:
    """A column of categories as indicator columns, one for each category but the first: treatment contrasts.

    >>> import narwhals as nw, polars as pl
    >>> coded = OneHot("C(shop)", "shop", ("a", "b", "c"))
    >>> coded.terms, coded.matrix(nw.from_native(pl.DataFrame({"shop": ["c", "a"]}))).toarray().tolist()
    (('C(shop)[T.b]', 'C(shop)[T.c]'), [[0.0, 1.0], [0.0, 0.0]])
    """

    text: str
    column: str
    levels: tuple[Any, ...]

    @property
    def terms(self) -> tuple[str, ...]:
        return tuple(f"{self.text}[T.{level}]" for level in self.levels[1:])

    def matrix(self, rows: Frame) -> Any:
        """The indicators of the rows of a table."""
        codes = category_codes(column(rows, self.column), self.column, self.levels)
        some = np.flatnonzero(codes > 0)
        entries = np.ones(len(some)), (some, codes[some] - 1)
        return sparse.csr_matrix(entries, shape=(len(codes), len(self.levels) - 1))

    def to_json(self) -> dict[str, Any]:
        return {"text": self.text, "column": self.column, "levels": list(self.levels)}


@dataclass(frozen=True)
class SparseDesign:
    """Dense terms, which may vary, and sparse shared terms.

    Attributes
    ----------
    inner : the dense terms
    coded : the categories whose indicators are sparse, in a table
    features : the names of all columns of a sparse matrix, in order; those that ``inner`` does not have are sparse
    """

    inner: Columns | Formula
    coded: tuple[OneHot, ...] = ()
    features: tuple[str, ...] = ()

    @property
    def terms(self) -> tuple[str, ...]:
        """The dense terms."""
        return self.inner.terms

    @property
    def columns(self) -> tuple[str, ...]:
        return self.features or (*self.inner.columns, *(coded.column for coded in self.coded))

    @property
    def sparse_terms(self) -> tuple[str, ...]:
        """The terms whose columns are sparse."""
        if self.features:
            dense = set(self.inner.columns)
            return tuple(name for name in self.features if name not in dense)
        return tuple(term for coded in self.coded for term in coded.terms)

    def blocks(self, rows: Frame | Anything) -> list[Anything]:
        """Refuse: what asks for the columns of ``X`` alone would leave out the sparse ones."""
        raise DataError(NOT_SPARSE)

    def split(self, rows: Any) -> tuple[list[Anything], Any]:
        """The dense columns of a table or a sparse matrix, as blocks side by side, and the sparse ones in one CSR matrix."""
        if not self.features:
            return self.inner.blocks(rows), sparse.hstack([coded.matrix(rows) for coded in self.coded], format="csr")
        if not isinstance(rows, SparseMatrix):
            rows = sparse.csr_matrix(rows)
        dense = set(self.inner.columns)
        at = [position for position, name in enumerate(self.features) if name in dense]
        rest = [position for position, name in enumerate(self.features) if name not in dense]
        by_column = rows.tocsc()
        return self.inner.blocks(by_column[:, at].toarray()), by_column[:, rest].tocsr()

    def to_json(self) -> dict[str, Any]:
        coded = [each.to_json() for each in self.coded]
        return {"kind": "sparse", "inner": self.inner.to_json(), "coded": coded, "features": list(self.features)}


NOT_SPARSE = (
    "This is not supported for a model with sparse columns. Fit it with dense ones: sparse=False, or X.toarray(); or give the "
    "groups a variance in place of coefficients, as in (1 | product)."
)


@dataclass(frozen=True)
class SparseColumns:
    """The sparse columns of grouped rows.

    Attributes
    ----------
    Z : (N, s) matrix in CSR format, its rows sorted as those of ``X``
    terms : the names of its columns
    offset : (N,) the offset of the rows without the part of these columns, or None
    """

    Z: Any
    terms: tuple[str, ...]
    offset: Floats | None = None

    @classmethod
    def of(cls, Z: Any, terms: tuple[str, ...]) -> SparseColumns:
        """The columns of a matrix, after a check of their values."""
        Z = sparse.csr_matrix(Z, dtype=np.float64)
        Z.sum_duplicates()
        bad = np.flatnonzero(~np.isfinite(Z.data))
        if len(bad):
            row = int(np.searchsorted(Z.indptr, bad[0], side="right")) - 1
            name = terms[Z.indices[bad[0]]]
            raise DataError(f"Column {name!r} is {Z.data[bad[0]]} in row {row}; fill the value or leave the row out.")
        return cls(Z, terms)

    def sorted(self, order: Anything | None, offset: Floats | None) -> SparseColumns:
        """The columns with their rows in the given order, beside this offset."""
        return SparseColumns(self.Z if order is None else self.Z[order], self.terms, offset)

    def offset_with(self, beta: Floats) -> Floats:
        """The offset of the rows if these columns have the coefficients ``beta (s,)``."""
        part = np.asarray(self.Z @ beta)
        return part if self.offset is None else part + self.offset

    def keep(self, columns: Anything) -> SparseColumns:
        """Only the columns where the mask is true."""
        kept = [term for term, keep in zip(self.terms, columns, strict=True) if keep]
        return SparseColumns(self.Z[:, np.flatnonzero(columns)], tuple(kept), self.offset)


def sparse_design(
    formula: ParsedFormula, columns: Sequence[str], levels: Mapping[str, Sequence[Any]], asked: bool | None
) -> Formula | SparseDesign:
    """The design of a formula, with sparse columns for categories that stand alone outside the bars.

    ``asked``: for all such categories (True), none (False), or those with very many categories beside bars (None).
    """
    found = _alone(formula, levels) if asked is not False else {}
    if asked is None:
        found = {term: name for term, name in found.items() if formula.bars and len(levels[name]) > MANY_CATEGORIES}
    elif asked and not found:
        raise FormulaError(
            "sparse=True found no term to make sparse: it needs an intercept, and a column of categories that is a term by "
            "itself and in no interaction or bar, such as C(product)."
        )
    if not found:
        return Formula.of(formula.common, columns, levels, formula.bars)
    coded = tuple(OneHot(term[0].expression, name, tuple(levels[name])) for term, name in found.items())
    others = [name for name in columns if name not in found.values()]
    inner = Formula.of(
        without(formula.common, coded), others, {name: levels[name] for name in others if name in levels}, formula.bars
    )
    return SparseDesign(inner, coded)


def without(terms: Terms, coded: Sequence[OneHot]) -> Terms:
    """The terms that are not sparse."""
    gone = {each.text for each in coded}
    return Terms(terms.text, tuple(term for term in terms.terms if not (len(term) == 1 and term[0].expression in gone)))


def _alone(formula: ParsedFormula, levels: Mapping[str, Sequence[Any]]) -> dict[Term, str]:
    """The terms that are one column of categories, which nothing else in the formula uses, if there is an intercept."""
    terms = formula.common.terms
    if not any(len(term) == 1 and term[0].kind == "literal" and float(term[0].expression) == 1 for term in terms):
        return {}
    factors = [*formula.common.factors, *(factor for bar in formula.bars for factor in bar.terms.factors)]
    used = [name for factor in factors for name in factor.names()[0]]
    found: dict[Term, str] = {}
    for term in (term for term in terms if len(term) == 1 and term[0].kind != "literal"):
        names = term[0].names()[0]
        plain = term[0].expression.replace(" ", "").replace("`", "")
        alone = len(names) == 1 and plain in (_bare(names[0]), f"C({_bare(names[0])})") and used.count(names[0]) == 1
        if alone and len(levels.get(names[0], ())) > 1:
            found[term] = names[0]
    return found


def _bare(name: str) -> str:
    return name.replace(" ", "").replace("`", "")


def matrix_design(names: Sequence[str], vary: Any, intercept: bool) -> SparseDesign:
    """The design of a sparse matrix: its columns are shared, but for those that ``vary`` names, which become dense."""
    by_level = vary if isinstance(vary, Mapping) else {"client": vary, "cluster": vary}
    asked = [
        name for level in by_level.values() if level is not None for name in ([level] if isinstance(level, str) else level)
    ]
    unknown = [name for name in asked if str(name) not in (*names, "1", "Intercept")]
    if unknown:
        raise DataError(f"The 'vary' parameter names {unknown[0]!r}, which is not a column; the columns are {listing(names)}.")
    dense = tuple(name for name in names if name in set(map(str, asked)))
    if not dense and not intercept:
        raise DataError(
            "The columns of a sparse matrix do not vary by group, and there is no intercept, so nothing varies; set "
            "fit_intercept=True, or name columns in vary=."
        )
    if len(dense) == len(names):
        raise DataError("vary= names every column of the sparse matrix, so none is shared; pass X.toarray().")
    return SparseDesign(Columns(dense, intercept), features=tuple(names))
