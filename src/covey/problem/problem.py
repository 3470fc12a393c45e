"""From settings and a table to a :class:`Problem` and its rows.

:func:`resolve` checks a :class:`~covey.problem.settings.Spec` and parses its formula. The result is a draft. It names the
columns that it needs, but the categories in these columns are not known yet. :func:`read_rows` reads a table and completes the
draft. In a federated fit the sites agree on the categories instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import narwhals as nw
import numpy as np

from covey._typing import Anything, Floats
from covey.errors import DataError, FormulaError, ModelError
from covey.exact import Exact
from covey.losses import Loss
from covey.problem.settings import Spec as Spec
from covey.tables.design import (
    Columns,
    Formula,
    Frame,
    Vary,
    grouping_of,
    numeric,
    sum_of,
    vary_from_bars,
    vary_from_setting,
)
from covey.tables.formula import ParsedFormula, Terms, parse_formula, read_column
from covey.tables.scaling import Design, Scale, Scaled, design_from_json
from covey.tables.sparse import SparseDesign, SparseMatrix, sparse_design


@dataclass(frozen=True)
class Classes:
    """The two classes of a binary response, in sorted order, and their numpy type."""

    values: tuple[Any, ...]
    dtype: str

    @classmethod
    def of(cls, classes: Anything | None) -> Classes | None:
        return None if classes is None else cls(tuple(classes.tolist()), str(classes.dtype))

    @property
    def array(self) -> Anything:
        kind = np.dtype(self.dtype).kind
        # The length of text is taken from the values: a length in a document could be so large that it fills the memory.
        return np.array(self.values, dtype=kind if kind in "US" else np.dtype(self.dtype))

    def to_json(self) -> dict[str, Any]:
        if np.dtype(self.dtype).kind not in "OUSbiuf" or not all(isinstance(each, str | int | float) for each in self.values):
            raise ModelError(f"Classes of type {self.dtype} cannot be saved; use text, numbers or booleans.")
        return {"dtype": self.dtype, "values": list(self.values)}

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Classes:
        return cls(tuple(plain["values"]), str(plain["dtype"]))


@dataclass(frozen=True)
class Schema:
    """What the columns of a table hold.

    Attributes
    ----------
    columns : the columns that the terms need
    categories : the categories of those columns that hold categories, in order
    classes : the two classes of a binary response
    has_offset : whether rows have a known part of their linear predictor
    """

    columns: tuple[str, ...]
    categories: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    classes: Classes | None = None
    has_offset: bool = False


@dataclass(frozen=True)
class Problem:
    """Checked settings, the parsed formula and, unless it is a draft, the design of the terms and the classes.

    ``spec`` names the client and cluster columns, even if only the bars of the formula named them.

    >>> from covey import Spec
    >>> problem = resolve(Spec(formula="y ~ x + (1 | state/county)"), Schema(("x",)))
    >>> problem.spec.client, problem.terms, problem.vary.client
    ('county', ('Intercept', 'x'), ('Intercept',))
    >>> Problem.from_json(problem.to_json()) == problem
    True
    """

    spec: Spec
    formula: ParsedFormula | None = None
    agreed_design: Design | None = None
    classes: Classes | None = None
    has_offset: bool = False

    @property
    def draft(self) -> bool:
        """Whether the columns and their categories are still unknown."""
        return self.agreed_design is None

    @property
    def design(self) -> Design:
        """The design of the terms."""
        if self.agreed_design is None:
            raise FormulaError(
                "This is a draft: the categories of its columns are unknown until agree() has those of all sites."
            )
        return self.agreed_design

    @property
    def terms(self) -> tuple[str, ...]:
        """The names of the terms."""
        return self.design.terms

    @property
    def loss(self) -> Loss:
        """The loss of the family."""
        return self.spec.loss

    @cached_property
    def offset(self) -> Terms | None:
        """The offset as an expression of columns, from the formula or the settings; None if it is a column, or not there."""
        named = None if self.formula is None else self.formula.offset
        return read_column(self.spec.offset, arithmetic=True) if named is None else named

    @property
    def names_offset(self) -> bool:
        """Whether the formula or the settings say what the offset is."""
        return self.spec.offset is not None or self.offset is not None

    def offset_of(self, frame: Frame) -> Floats | None:
        """The offset of the rows of a table: a column, or an expression such as ``log(expected)``; None if it is not named."""
        if self.offset is not None and self.spec.offset not in frame.columns:
            return sum_of(self.offset, frame)
        return None if self.spec.offset is None else numeric(frame, self.spec.offset)

    def check_offset(self, given: Any) -> None:
        """Refuse an array of offsets beside the ``offset()`` of the formula."""
        if given is not None and self.formula is not None and self.formula.offset is not None:
            raise FormulaError("The offset is given twice, in the formula and beside it; leave one out.")

    @property
    def has_bars(self) -> bool:
        """Whether the formula says which terms vary."""
        return self.formula is not None and bool(self.formula.bars)

    @cached_property
    def vary(self) -> Vary:
        """The terms that vary at each level."""
        if self.formula is None or not self.formula.bars or not isinstance(self._unscaled, Formula):
            return vary_from_setting(self.spec.vary, self.terms)
        return vary_from_bars(self.formula.bars, self.spec.client, self.spec.cluster, self._unscaled)

    @cached_property
    def zero(self) -> tuple[str, ...]:
        """The terms that vary about zero, because only bars name them."""
        return self._unscaled.zero if isinstance(self._unscaled, Formula) else ()

    @property
    def learning(self) -> bool:
        """Whether functions such as ``scale(x)`` have not yet learned all they need from training rows."""
        return isinstance(self._unscaled, Formula) and bool(self._unscaled.unlearned)

    @property
    def sparse(self) -> SparseDesign | None:
        """The design, if some of its terms are sparse."""
        return self.agreed_design if isinstance(self.agreed_design, SparseDesign) else None

    @property
    def _unscaled(self) -> Columns | Formula:
        return self.design.inner if isinstance(self.design, Scaled | SparseDesign) else self.design

    def agree(self, schema: Schema, *, sparse: bool = False) -> Problem:
        """Complete a draft with what its columns hold; some terms may be ``sparse`` if their rows are in memory."""
        design: Design = Columns(schema.columns, self.spec.fit_intercept)
        if self.spec.sparse and not sparse:
            raise DataError("sparse=True needs a table in memory, not a lazy table, shards or sites; leave it out.")
        if self.formula is not None and sparse:
            design = sparse_design(self.formula, schema.columns, schema.categories, self.spec.wants_sparse)
        elif self.formula is not None:
            design = Formula.of(self.formula.common, schema.columns, schema.categories, self.formula.bars)
        elif self.spec.sparse:
            raise DataError("sparse=True is for categories in a formula; a sparse matrix is used as it is.")
        return self.of_design(design, schema.classes, schema.has_offset)

    def learn_from(self, rows: Frame | Anything) -> Problem:
        """The same problem after what functions such as ``scale(x)`` learn from these training rows."""
        if not self.learning:
            return self
        inner = self._unscaled.learn_from(as_frame(rows))  # type: ignore[union-attr]
        return replace(self, agreed_design=inner if self.sparse is None else replace(self.sparse, inner=inner))

    def learn(self, sums: Exact) -> Problem:
        """The same problem after one more round of sums over the rows of all sites."""
        if not isinstance(self.agreed_design, Formula) or sums.shape != (len(self.agreed_design.unlearned), 2):
            raise FormulaError(
                f"A site sent sums that do not fit the functions of the formula {self.spec.formula!r}; all sites need the same "
                "version of covey."
            )
        return replace(self, agreed_design=self.agreed_design.learn(sums))

    def of_design(self, design: Design, classes: Classes | None, has_offset: bool) -> Problem:
        """Complete a draft with a design, such as that of a saved model."""
        return Problem(self.spec, self.formula, design, classes, has_offset)

    def scaled(self, scale: Scale) -> Problem:
        """The same problem with standardised terms."""
        return replace(self, agreed_design=scale.design(self._unscaled))

    def to_json(self) -> dict[str, Any]:
        """Plain values, from which :meth:`from_json` builds the same problem without parsing text."""
        return {
            "spec": self.spec.to_json(),
            "formula": None if self.formula is None else self.formula.to_json(),
            "design": None if self.agreed_design is None else self.agreed_design.to_json(),
            "classes": None if self.classes is None else self.classes.to_json(),
            "has_offset": self.has_offset,
        }

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Problem:
        """Read a problem that somebody else wrote.

        Every factor of the formula is checked. The settings are checked too, unless it is a draft: the settings of a draft are
        checked when the completed problem arrives, before anything is fitted.
        """
        spec = Spec.from_json(plain["spec"])
        if plain["design"] is not None:
            spec.check()
        formula = None if plain["formula"] is None else ParsedFormula.from_json(plain["formula"])
        rhs = None if formula is None else formula.common
        design = None if plain["design"] is None else design_from_json(plain["design"], rhs)
        classes = None if plain["classes"] is None else Classes.from_json(plain["classes"])
        return cls(_with_groups(spec, formula), formula, design, classes, bool(plain["has_offset"]))


def resolve(spec: Spec, schema: Schema | None = None) -> Problem:
    """Check settings and parse their formula; every fit begins here.

    Without a ``schema`` the problem is a draft, which :meth:`Problem.agree` completes.
    """
    spec.check()
    formula = None if spec.formula is None else parse_formula(spec.formula)
    draft = Problem(_with_groups(spec, formula), formula)
    draft.check_offset(spec.offset)
    return draft if schema is None else draft.agree(schema)


def _with_groups(spec: Spec, formula: ParsedFormula | None) -> Spec:
    """The settings with the client and cluster columns that the bars of the formula name."""
    if formula is None or not formula.bars:
        return spec
    if spec.vary is not None:
        raise FormulaError("The formula's bars say what varies, and so does vary=; leave one out.")
    if not spec.by_likelihood:
        raise FormulaError(
            "The formula's bars say what to learn from the data; leave out gamma, lam, alpha, baseline and penalty='cv'."
        )
    grouping = grouping_of(formula.bars, spec.client, spec.cluster)
    return replace(spec, client=grouping.client, cluster=grouping.cluster, nested=grouping.nested or bool(spec.nested))


# Rows


def as_frame(X: Any) -> Frame:
    """A data frame of any library, as narwhals wraps it."""
    frame: Any = X if isinstance(X, nw.DataFrame) else _native_frame(X)
    if not isinstance(frame, nw.DataFrame):
        raise DataError(
            f"Columns are named, so X must be a data frame (pandas, polars, pyarrow); got {type(X).__name__}. With "
            "plain arrays, pass client= and cluster= as arrays to fit and predict."
        )
    for name in (name for name in frame.columns if not isinstance(name, str)):
        raise DataError(f"Column names must be text; got {name!r}: rename the columns, or pass a plain array.")
    return frame


def _native_frame(X: Any) -> Any:
    """A frame of any library as narwhals wraps it; anything else as it is."""
    refuse_odd_table(X)
    return nw.from_native(X, eager_only=True, pass_through=True)


def refuse_odd_table(X: Any) -> None:
    """Refuse tables that cannot be read: sparse matrices, lazy frames, and frames with two columns of one name."""
    if isinstance(X, SparseMatrix):
        raise DataError(
            "X is a sparse matrix, which has no names of columns: leave out the formula and names of columns and pass client= "
            "to fit, or pass X.toarray()."
        )
    try:
        lazy = isinstance(nw.from_native(X, pass_through=True), nw.LazyFrame)
    except nw.exceptions.DuplicateError:
        names = list(X.columns) if not hasattr(X, "column_names") else list(X.column_names)
        twice = next((name for name in names if names.count(name) > 1), "")
        raise DataError(f"X has two columns with the name {twice!r}; rename or drop one.") from None
    if lazy:
        what = f"X is a lazy table ({type(X).__module__.split('.')[0]}), and rows are needed here"
        raise DataError(f"{what}; read it into a data frame (Polars: X.collect(), DuckDB: X.df()).")
