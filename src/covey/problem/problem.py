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

from covey._typing import Anything, Floats, Ints
from covey.errors import DataError, FormulaError, ModelError, listing
from covey.exact import Exact
from covey.losses import Loss
from covey.problem.settings import COLUMNS
from covey.problem.settings import Spec as Spec
from covey.tables.design import (
    Columns,
    Formula,
    Frame,
    Vary,
    column,
    grouping_of,
    inspect,
    numeric,
    response,
    sum_of,
    vary_from_bars,
    vary_from_setting,
)
from covey.tables.formula import ParsedFormula, Terms, parse_formula, read_column
from covey.tables.rows import GroupedData
from covey.tables.scaling import Design, Scale, Scaled, design_from_json, moments
from covey.tables.values import Dropped, choose_rows, missing, take


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
            raise FormulaError("The categories of this problem's columns are not known yet; agree on them first.")
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
    def _unscaled(self) -> Columns | Formula:
        return self.design.inner if isinstance(self.design, Scaled) else self.design

    def agree(self, schema: Schema) -> Problem:
        """Complete a draft with what its columns hold."""
        design: Design = Columns(schema.columns, self.spec.fit_intercept)
        if self.formula is not None:
            design = Formula.of(self.formula.common, schema.columns, schema.categories, self.formula.bars)
        return self.of_design(design, schema.classes, schema.has_offset)

    def learn_from(self, rows: Frame | Anything) -> Problem:
        """The same problem after what functions such as ``scale(x)`` learn from these training rows."""
        if not isinstance(self.agreed_design, Formula) or not self.learning:
            return self
        return replace(self, agreed_design=self.agreed_design.learn_from(as_frame(rows)))

    def learn(self, sums: Exact) -> Problem:
        """The same problem after one more round of sums over the rows of all sites."""
        if not isinstance(self.agreed_design, Formula) or sums.shape != (len(self.agreed_design.unlearned), 2):
            raise FormulaError(f"The sums for the functions of the formula {self.spec.formula!r} have another shape.")
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


@dataclass(frozen=True)
class Arrays:
    """Arrays that are passed beside a table, with one value for each row; each replaces the column that a setting names."""

    y: Any = None
    client: Any = None
    cluster: Any = None
    weights: Any = None
    offset: Any = None
    frequency: Any = None
    trials: Any = None


def used_columns(problem: Problem) -> tuple[str, ...]:
    """The columns that a problem with a formula reads."""
    factors = [] if problem.formula is None else problem.formula.factors
    named = {name for factor in factors for name in factor.names()[0]}
    offset = () if problem.offset is None else problem.offset.names
    return tuple(sorted((named | {getattr(problem.spec, name) for name in COLUMNS} | set(offset)) - {None}))


def usable_rows(
    rows: Any, problem: Problem, given: Arrays, columns: Sequence[str] | None = None
) -> tuple[Any, Arrays, Ints | None, Dropped | None]:
    """The rows of a table, and of arrays beside it, that count: those of positive frequency, without missing values to drop.

    Also returns their numbers in the table (None: all rows), and what was dropped.
    """
    found: dict[str, Any]
    spec, beside = problem.spec, {name: values for name, values in vars(given).items() if values is not None}
    if isinstance(rows, nw.DataFrame):
        columns = used_columns(problem)
        if problem.formula is None:
            columns = tuple(rows.columns) if problem.draft else (*columns, *problem.design.columns)
        replaced = {getattr(spec, name) for name in COLUMNS if name in beside}
        found = {name: rows.get_column(name) for name in columns if name in rows.columns and name not in replaced}
        frequency = given.frequency
        if frequency is None and spec.frequency is not None:
            frequency = numeric(rows, spec.frequency)
    else:
        found, frequency = {name: rows[:, at] for at, name in enumerate(columns or ())}, given.frequency
    if spec.na != "drop" and frequency is None:
        return rows, given, None, None
    kept, dropped = choose_rows({**found, **beside}, len(rows), frequency, spec.na)
    fewer = Arrays(**{name: take(values, kept) for name, values in vars(given).items()})
    return take(rows, kept), fewer, kept, dropped


def read_rows(
    X: Any, draft: Problem, arrays: Arrays | None = None, columns: Sequence[str] | None = None
) -> tuple[GroupedData, Problem]:
    """Read the rows that a draft needs, and complete the draft.

    Parameters
    ----------
    X : a data frame; or a matrix, with the names of its columns in ``columns``
    draft : the problem from :func:`resolve`
    arrays : columns that are not in ``X``

    Returns
    -------
    The rows, sorted and checked, and the problem.
    """
    given = Arrays() if arrays is None else arrays
    rows = as_frame(X) if columns is None else X
    if len(rows) == 0:
        raise DataError("The table has no rows; covey needs at least one.")
    rows, given, numbers, dropped = usable_rows(rows, draft, given, columns)
    frame, y = rows if columns is None else None, given.y
    draft.check_offset(given.offset)
    if frame is not None:
        given, y = _from_columns(frame, draft, given), _response(frame, draft, y)
    names, categories = (tuple(columns or ()), {}) if frame is None else _columns(frame, draft)
    shares = shares_of(y, given.trials, given.weights, draft)
    outcome, classes = encode_response(y, draft.loss) if shares is None else (shares[0], _SUCCESS)
    if shares is not None and shares[0] @ shares[1] in (0.0, shares[1].sum()):
        raise DataError("All trials have the same outcome. A classifier needs successes and failures.")
    problem = draft.agree(Schema(names, categories, Classes.of(classes), given.offset is not None)).learn_from(rows)
    checks = (problem.loss.check,) if given.client is None else (problem.loss.check, problem.loss.check_grouped)
    data = GroupedData.from_blocks(
        problem.design.blocks(rows),
        len(rows),
        outcome,
        given.client,
        given.cluster,
        weights=given.weights if shares is None else shares[1],
        offset=given.offset,
        frequency=given.frequency,
        terms=problem.terms,
        nested=bool(problem.spec.nested),
        checks=checks if shares is None else (),
        numbers=numbers,
    )
    data = replace(data, dropped=dropped)
    problem.loss.check_offset(data.offset)
    if not problem.spec.standardize:
        return data, problem
    scale = Scale.of(moments(data.X), data.n_rows, data.terms)
    return scale.rows(data), problem.scaled(scale)


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
    if hasattr(X, "toarray") and hasattr(X, "nnz"):
        raise DataError("X is a sparse matrix, and covey needs dense rows: pass X.toarray(), or name categories in a formula.")
    try:
        lazy = isinstance(nw.from_native(X, pass_through=True), nw.LazyFrame)
    except nw.exceptions.DuplicateError:
        names = list(X.columns) if not hasattr(X, "column_names") else list(X.column_names)
        twice = next((name for name in names if names.count(name) > 1), "")
        raise DataError(f"X has two columns with the name {twice!r}; rename or drop one.") from None
    if lazy:
        raise DataError(f"X is a lazy frame ({type(X).__module__.split('.')[0]}); pass X.collect().")


def series_values(y: Any) -> Anything:
    """A column of any library, or a sequence, as an array."""
    series = nw.from_native(y, series_only=True, pass_through=True)
    return series.to_numpy() if isinstance(series, nw.Series) else np.asarray(y)


def encode_response(y: Any, loss: Loss) -> tuple[Any, Anything | None]:
    """The response as numbers; if the loss is for two classes, 0 and 1 for the sorted classes, and these classes."""
    values = series_values(y)
    if not loss.two_classes:
        return values, None
    absent = missing(values)
    if absent.any():
        raise DataError(f"The response is missing (NaN) in row {int(absent.argmax())}; fill the value or leave the row out.")
    try:
        classes, codes = np.unique(values, return_inverse=True)
    except TypeError:
        raise DataError("The response mixes types that cannot be compared; convert its classes to one type.") from None
    if len(classes) == 1:
        raise DataError(f"The response has one class only, {classes.tolist()[0]!r}; a classifier needs rows of two classes.")
    if len(classes) > 2:
        raise DataError(
            f"Only binary classification is supported. The type of the target is multiclass: {listing(classes.tolist(), 5)}; "
            "keep two classes, or fit one against the rest."
        )
    return codes.ravel().astype(np.float64), classes


_SUCCESS = np.array([0, 1])  # the classes of successes of trials


def shares_of(y: Any, trials: Any, weights: Any, problem: Problem) -> tuple[Floats, Floats] | None:
    """The share of successes and the number of trials of each row; None if the response is not one of trials.

    A row with ``n`` trials has the loss of ``n`` rows, but for the binomial coefficient, which the loss adds as a constant.
    """
    counts = problem.formula is not None and problem.formula.counts
    if not counts and trials is None:
        return None
    if not problem.loss.two_classes:
        raise DataError(f"Successes of trials are for the bernoulli family, not {problem.loss.name}; use a classifier.")
    if weights is not None or (counts and trials is not None):
        raise DataError(f"The numbers of trials are given, so leave out {'trials=' if weights is None else 'weights'}.")
    try:
        values = np.asarray(series_values(y), dtype=np.float64)
        n = values.sum(axis=1) if counts else np.asarray(series_values(trials), dtype=np.float64)
    except (TypeError, ValueError):
        raise DataError("Successes and trials must be numbers; convert the columns.") from None
    if values.shape[0] != len(n) or n.ndim != 1:
        raise DataError(f"There are {len(n)} numbers of trials for {len(values)} responses; give one for each row.")
    successes = values[:, 0] if counts else n * values
    whole = np.round(successes)
    for what, number, wrong in (
        ("number of trials", n, ~((n >= 0) & (n == np.round(n)) & np.isfinite(n))),
        ("number of successes", successes, ~((whole >= 0) & (whole <= n) & (np.abs(successes - whole) <= 1e-3))),
    ):
        for row in np.flatnonzero(wrong)[:1].tolist():
            raise DataError(
                f"The {what} is {number[row]:g} in row {row}, with {n[row]:g} trials; write cbind(successes, failures) with "
                "whole numbers, or give the share of successes as response and trials=."
            )
    return whole / np.where(n > 0, n, 1.0), n


def encode_known(y: Any, classes: Anything | None) -> Any:
    """New responses as numbers, with the classes of a fitted model."""
    values = series_values(y)
    if classes is None:
        return values
    known = np.isin(values, classes)
    if not known.all():
        shown = values.tolist()[int((~known).argmax())]
        raise DataError(f"The response is {shown!r}, which is neither of the model's classes {listing(classes.tolist(), 2)}.")
    return (values == classes[1]).astype(np.float64)


def _from_columns(frame: Frame, draft: Problem, given: Arrays) -> Arrays:
    """Ids, weights and offset: as given, or from the columns that the settings name."""
    read = {"client": column, "cluster": column, "weights": numeric, "frequency": numeric, "trials": numeric}
    named = {what: getattr(draft.spec, what) for what in read if getattr(given, what) is None}
    found: dict[str, Any] = {what: read[what](frame, name) for what, name in named.items() if name is not None}
    return replace(given, **found, offset=draft.offset_of(frame) if given.offset is None else given.offset)


def _response(frame: Frame, draft: Problem, y: Any) -> Any:
    """The response: as given, or from the formula; if both have one they must be equal."""
    formula = draft.formula
    if formula is None or formula.response is None:
        if y is None:
            raise DataError("There is no response: pass y, or write it to the left of '~' in the formula.")
        return y
    named = response(formula, frame)
    if y is not None and not _same(y, named):  # cross-validation passes a response that the formula names too
        raise FormulaError(
            f"The response is given twice, as y and as {formula.response!r} in the formula, and they differ; leave one out."
        )
    return named if y is None else y


def _columns(frame: Frame, draft: Problem) -> tuple[tuple[str, ...], dict[str, list[Any]]]:
    """The columns of the terms, and their categories."""
    spec, formula = draft.spec, draft.formula
    if formula is not None:
        columns, categories = inspect(formula.right, frame)
        if formula.response in columns:
            raise FormulaError(f"The response {formula.response!r} is also on the right of '~'; remove it there.")
        return columns, categories
    others = {getattr(spec, each) for each in COLUMNS} | set(() if draft.offset is None else draft.offset.names)
    features = tuple(name for name in frame.columns if name not in others)
    if "Intercept" in features and spec.fit_intercept:
        raise DataError(
            "The column 'Intercept' has the name that covey gives the intercept; rename it, or set fit_intercept=False."
        )
    if not features and not spec.fit_intercept:
        raise DataError("No column is left to learn from; add one, or keep the intercept.")
    return features, {}


def _same(first: Any, second: Any) -> bool:
    one, two = series_values(first), series_values(second)
    return one.shape == two.shape and bool((one == two).all())
