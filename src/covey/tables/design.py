"""From the columns of a table to the terms of a model, and which terms vary by which groups.

A design makes the columns of the matrix ``X``. It takes numeric columns as they are (:class:`Columns`) or evaluates a formula
(:class:`Formula`). It keeps the names and categories that prediction needs as plain values, so it can be saved as JSON.

The bars of a formula, or the ``vary`` setting, say which terms vary: ``y ~ x + (1 + x | state/county)`` lets the intercept and
``x`` differ between states, and between the counties of a state (Bates et al. 2015, Fitting linear mixed-effects models using
lme4, section 2.1). covey has two levels, clients within clusters. Formulas that need more are refused.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from typing import Any

import narwhals as nw
import numpy as np

from covey._typing import Anything, Floats
from covey.errors import DataError, FormulaError, listing, unknown_column
from covey.exact import Exact
from covey.tables.expressions import Expression
from covey.tables.formula import Bar, ParsedFormula, Terms
from covey.tables.text import quoted
from covey.tables.transforms import State, Transform
from covey.tables.values import as_numbers, category_codes, category_values, declared_order, is_categorical, is_numeric
from covey.tree.hierarchy import is_missing

Frame = nw.DataFrame[Any]  # of any data frame library
_CATEGORY = r"(?:\[(?:(?!\]:).)*\])?"  # the category in the name of a term, such as [T.b]


@dataclass(frozen=True)
class Columns:
    """Numeric columns as they are, after an intercept if ``intercept`` is true."""

    columns: tuple[str, ...]
    intercept: bool = True

    @property
    def terms(self) -> tuple[str, ...]:
        return (("Intercept",) if self.intercept else ()) + self.columns

    def blocks(self, rows: Frame | Anything) -> list[Anything]:
        """Arrays that stand side by side in ``X``: the columns of a data frame by name, or a matrix as it is."""
        if not isinstance(rows, nw.DataFrame | np.ndarray):
            raise DataError("This model was fitted to plain arrays; read it with covey.load and pass arrays to its predict.")
        blocks = [rows] if isinstance(rows, np.ndarray) else [numeric(rows, name) for name in self.columns]
        return [np.broadcast_to(1.0, len(rows)), *blocks] if self.intercept else blocks

    def to_json(self) -> dict[str, Any]:
        return {"kind": "columns", "columns": list(self.columns), "intercept": self.intercept}


@dataclass(frozen=True)
class Formula:
    """The common terms of a formula, the columns that they need, and the categories of these columns (``levels``).

    ``state`` is what functions such as ``scale(x)`` have learned from training rows, by the text of the call
    (:mod:`covey.tables.transforms`). ``extra`` are the terms of bars with columns that the common terms do not have. These
    columns follow the others; they vary about zero, because they have no common coefficient.
    """

    rhs: Terms
    terms: tuple[str, ...]
    columns: tuple[str, ...]
    levels: Mapping[str, Sequence[Any]]
    state: Mapping[str, State] = field(default_factory=dict)
    extra: tuple[Terms, ...] = ()

    @classmethod
    def of(cls, rhs: Terms, columns: Sequence[str], levels: Mapping[str, Sequence[Any]], bars: Sequence[Bar] = ()) -> Formula:
        """The design for columns with these categories; no data are needed."""
        design = cls(rhs, (), tuple(columns), levels)
        names, extra = dict.fromkeys(design.terms_of(rhs)), []
        for terms in dict.fromkeys(design.like_common(bar.terms) for bar in bars):
            own = design.terms_of(terms)
            if not set(own) <= set(names):
                extra.append(terms)
                names |= dict.fromkeys(own)
        if not names:
            raise FormulaError(f"The formula {rhs.text!r} has no terms; write at least '1' for an intercept.")
        design = replace(design, terms=tuple(names), extra=tuple(extra))
        given = {text: transform.given() for text, (_, transform) in design.transforms.items()}
        return replace(design, state={text: state for text, state in given.items() if state})

    @property
    def transforms(self) -> dict[str, tuple[Expression, Transform]]:
        """The functions that learn from training rows, by the text of the call."""
        return {text: found for terms in (self.rhs, *self.extra) for text, found in terms.transforms.items()}

    @property
    def zero(self) -> tuple[str, ...]:
        """The terms that have no common coefficient."""
        return self.terms[len(self.terms_of(self.rhs)) :] if self.extra else ()

    def like_common(self, terms: Terms) -> Terms:
        """Terms as the common terms write them and in their order, on which the coding of categories depends."""
        common, asked = self.rhs.by_factors(), terms.by_factors()
        shared = tuple(term for factors, term in common.items() if factors in asked)
        return Terms(terms.text, (*shared, *(term for factors, term in asked.items() if factors not in common)))

    def terms_of(self, terms: Terms) -> list[str]:
        """The names of the columns of ``X`` that some terms make."""
        if not terms.terms:
            return []
        # The names depend on the categories, not on the values. One row is enough.
        row: dict[str, Any] = {name: np.ones(1) for name in self.columns}
        row |= {name: _codes([0 if levels else -1], levels) for name, levels in self.levels.items()}
        return list(terms.evaluate(row, 1))

    def blocks(self, rows: Frame | Anything) -> list[Anything]:
        """The columns of ``X`` for the rows of a data frame."""
        if not isinstance(rows, nw.DataFrame):
            raise DataError("A formula needs a table with named columns; pass a data frame.")
        table, blocks = {name: self._column(rows, name) for name in self.columns}, dict[str, Anything]()
        for terms in (self.rhs, *self.extra):
            found = terms.evaluate(table, len(rows), self.state) if terms.terms else {}
            blocks |= {name: values for name, values in found.items() if name not in blocks}
        return list(blocks.values())

    @property
    def unlearned(self) -> list[tuple[str, Expression, Transform]]:
        """The functions that have not yet learned all they need from training rows."""
        calls = [(text, *found) for text, found in self.transforms.items()]
        return [call for call in calls if len(self.state.get(call[0], ())) < call[2].size]

    def sums(self, rows: Frame) -> Exact:
        """The sums over rows from which :meth:`learn` makes the next step, ``(functions, 2)``; sums can be added over sites."""
        found = [call.sums(self._argument(rows, read, call), self.state.get(text, ())) for text, read, call in self.unlearned]
        return Exact.join(found).reshape(-1, 2)

    def learning_columns(self, rows: Frame) -> dict[str, Floats]:
        """Columns whose sums of squares are :meth:`sums`, up to the sign of what is added."""
        found: dict[str, Floats] = {}
        for text, read, call in self.unlearned:
            one, two = call.sum_columns(self._argument(rows, read, call), self.state.get(text, ()))
            found |= {f"the size of {text}": one, f"the mean of {text}": two}
        return found

    def learn(self, sums: Exact) -> Formula:
        """The design after one more round of :meth:`sums` over all rows."""
        totals = zip(self.unlearned, sums.floats(), strict=True)
        new = {text: call.learn(self.state.get(text, ()), total) for (text, _, call), total in totals}
        return replace(self, state={**self.state, **new})

    def learn_from(self, rows: Frame) -> Formula:
        """The design after all that its functions learn from these training rows."""
        knots = {text: call.place_knots(self._argument(rows, read, call)) for text, read, call in self.unlearned if call.spline}
        design = replace(self, state={**self.state, **knots})
        while design.unlearned:
            design = design.learn(design.sums(rows))
        return design

    def _argument(self, rows: Frame, read: Expression, call: Transform) -> Floats:
        columns = {name: self._column(rows, name) for name in read.names}
        with np.errstate(all="ignore"):
            return read.argument(call, columns, len(rows))

    def to_json(self) -> dict[str, Any]:
        levels = {name: list(values) for name, values in self.levels.items()}
        terms, columns = list(self.terms), list(self.columns)
        document: dict[str, Any] = {
            "kind": "formula",
            "rhs": self.rhs.text,
            "terms": terms,
            "columns": columns,
            "levels": levels,
        }
        document |= {"extra": [terms.to_json() for terms in self.extra]} if self.extra else {}
        return document | ({"state": {text: list(state) for text, state in self.state.items()}} if self.state else {})

    def _column(self, frame: Frame, name: str) -> Any:
        if name not in self.levels:
            return numeric(frame, name)
        levels = self.levels[name]
        return _codes(category_codes(column(frame, name), name, levels), levels)


def _codes(codes: Any, levels: Sequence[Any]) -> Any:
    """Categories as formulaic takes them."""
    import pandas as pd

    return pd.Categorical.from_codes(codes, categories=list(levels))


# Columns of a table


def response(formula: ParsedFormula, frame: Frame) -> Any:
    """The left-hand side of a formula: a column, an expression such as ``log(radon)``, or the two columns of ``cbind``."""
    lhs = formula.response or ""
    plain = lhs.strip("`")
    if plain in frame.columns:
        return frame.get_column(plain).to_native()
    if formula.expression is None:
        raise unknown_column(plain, frame.columns)
    if len(formula.expression.terms) != 1 + formula.counts:
        raise FormulaError(f"The response {lhs!r} must be one column or expression.")
    return np.column_stack(_values(formula.expression, frame)) if formula.counts else sum_of(formula.expression, frame)


def sum_of(terms: Terms, frame: Frame) -> Floats:
    """The sum of some expressions of numeric columns, such as a response or an offset."""
    return np.asarray(sum(_values(terms, frame)), dtype=np.float64)


def _values(terms: Terms, frame: Frame) -> list[Floats]:
    return list(terms.evaluate({name: numeric(frame, name) for name in terms.names}, len(frame)).values())


def column(frame: Frame, name: Any) -> nw.Series[Any]:
    """One column of a frame; if it is not there, the error suggests a similar name."""
    if name not in frame.columns:
        raise unknown_column(name, frame.columns)
    return frame.get_column(name)


def numeric(frame: Frame, name: str) -> Floats:
    """A column as float64, with NaN for missing values."""
    series = column(frame, name)
    if is_numeric(series):
        return as_numbers(series)
    shown = next((value for value in series.to_list() if not is_missing(value)), None)
    raise DataError(
        f"Column {name!r} holds {str(series.dtype).lower()} values (such as {shown!r}), not numbers; name it in a formula "
        "to code its categories, or convert it."
    )


def inspect(terms: Terms, frame: Frame) -> tuple[tuple[str, ...], dict[str, list[Any]]]:
    """The columns that terms need, and the categories of those columns that hold categories."""
    categories: set[str] = set()  # columns inside C()
    plain: set[str] = set()  # columns as they are
    numbers: set[str] = set()  # columns in other expressions
    for factor in terms.factors:
        used, wrapped = factor.names()
        categories |= wrapped
        (plain if factor.kind == "lookup" else numbers).update(set(used) - wrapped)
    text = {name for name in terms.names if not is_numeric(column(frame, name))}
    for name in sorted(name for name in text - categories if not is_categorical(column(frame, name))):
        _refuse_broken_numbers(frame, name)
    if "Intercept" in terms.names:
        raise FormulaError(f"The column 'Intercept' in {terms.text!r} has the name that covey gives the intercept; rename it.")
    clash = sorted((categories & (plain | numbers)) | (text & numbers))
    if clash:
        raise FormulaError(
            f"Column {clash[0]!r} is used both as a category and as a number in {terms.text!r}; add a copy of it."
        )
    return terms.names, {name: _categories(frame, name) for name in terms.names if name in text | categories}


def _refuse_broken_numbers(frame: Frame, name: str) -> None:
    """Refuse a column of numbers that a stray word has made text; as categories its numbers would be of no use."""
    texts = [(row, value) for row, value in enumerate(column(frame, name).to_list()) if isinstance(value, str)]
    words = [(row, value) for row, value in texts if not _reads_as_number(value)]
    if len(texts) > 2 * len(words):
        broken = f"except {words[0][1]!r} in row {words[0][0]}" if words else "in every row"
        raise DataError(
            f"Column {name!r} holds text that reads as numbers {broken}; convert it, or write C({name}) for categories."
        )
    if texts and all(_reads_as_date(value) for _, value in texts):
        raise DataError(
            f"Column {name!r} holds dates, such as {texts[0][1]!r}; make a column of numbers from it, such as days since the "
            f"first, or write C({name}) for categories."
        )


def _reads_as_date(text: str) -> bool:
    try:
        date.fromisoformat(text[:10])
    except ValueError:
        return False
    return True


def _reads_as_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _categories(frame: Frame, name: str) -> list[Any]:
    series = column(frame, name)
    values, order = {value for value in category_values(series) if not is_missing(value)}, declared_order(series)
    if order is not None:
        return [value for value in order if value in values]
    odd = next((value for value in values if not isinstance(value, str | int | float)), None)
    if odd is not None:
        raise DataError(
            f"Column {name!r} holds {type(odd).__name__} values; convert it to text or numbers to use it in a formula."
        )
    return sorted(values, key=lambda value: (str(type(value)), value))


# Which terms vary


@dataclass(frozen=True)
class Grouping:
    """The columns of the two levels; ``nested`` if the formula says that clients lie within clusters."""

    client: str | None
    cluster: str | None
    nested: bool = False


@dataclass(frozen=True)
class Vary:
    """The terms that vary at each level, and the kind of covariance (``full``, ``diagonal``) if bars say it."""

    client: tuple[str, ...]
    cluster: tuple[str, ...]
    client_kind: str | None = None
    cluster_kind: str | None = None


def grouping_of(bars: Sequence[Bar], client: str | None = None, cluster: str | None = None) -> Grouping:
    """Which column holds the clients and which the clusters; bars and settings must agree.

    >>> from covey.tables.formula import parse_formula
    >>> grouping_of(parse_formula("y ~ (1 | state/county)").bars)
    Grouping(client='county', cluster='state', nested=True)
    """
    pairs = {(bar.within, bar.group): None for bar in bars if bar.within is not None}
    alone = {bar.group: None for bar in bars if bar.within is None}
    if len(pairs) > 1:
        shown = " and ".join(quoted(f"{outer}:{inner}") for outer, inner in list(pairs)[:2])
        raise FormulaError(f"The bars nest groups in two ways, {shown}; use one cluster column and one client column.")
    for outer, inner in pairs:
        if inner in alone:
            fix = f"write the group the same way in both bars, as {outer}:{inner} or {outer}/{inner}"
            raise FormulaError(f"{quoted(inner)} is alone in one bar and within {quoted(outer)} in another; {fix}.")
        if client not in (None, inner) or cluster not in (None, outer):
            raise FormulaError(
                f"The bars say that {quoted(inner)} lies within {quoted(outer)}, but client={quoted(client)} and "
                f"cluster={quoted(cluster)}; make them agree."
            )
        client, cluster = inner, outer
    if client is None and cluster is None and len(alone) == 1:
        client = next(iter(alone))
    if client is None and cluster is None and len(alone) == 2:
        a, b = alone
        raise FormulaError(
            f"The formula groups by {quoted(a)} and by {quoted(b)}, and crossed groupings are not supported. If one is within "
            f"the other, write (1 | outer/inner): (1 | {a}/{b}) if each {quoted(b)} is in one {quoted(a)}, else (1 | {b}/{a})."
        )
    if client is None and cluster is None and len(alone) > 2:
        raise FormulaError(
            f"The formula has {len(alone)} groupings, {', '.join(map(quoted, list(alone)[:5]))}; covey fits one, or two nested "
            "ones, such as (1 | state/county)."
        )
    if not set(alone) <= {client, cluster}:
        raise FormulaError(
            f"The bars name {', '.join(map(quoted, list(alone)[:3]))} as groups, with client={quoted(client)} and "
            f"cluster={quoted(cluster)}; write (1 | cluster/client), or set client= and cluster= to match."
        )
    return Grouping(client, cluster, nested=bool(pairs))


def vary_from_bars(bars: Sequence[Bar], client: str | None, cluster: str | None, design: Formula) -> Vary:
    """The terms that vary by the columns ``client`` and ``cluster``; at a level without bars no term varies.

    >>> from covey.tables.formula import parse_formula
    >>> formula = parse_formula("y ~ x + (x | county)")
    >>> vary_from_bars(formula.bars, "county", None, Formula.of(formula.common, ["x"], {}))
    Vary(client=('Intercept', 'x'), cluster=(), client_kind='full', cluster_kind=None)
    """
    (of_client, client_kind), (of_cluster, cluster_kind) = (
        _vary_by([bar for bar in bars if bar.group == group], design) for group in (client, cluster)
    )
    return Vary(of_client, of_cluster, client_kind, cluster_kind)


def vary_from_setting(vary: Any, terms: Sequence[str]) -> Vary:
    """The terms that the ``vary`` setting names: None for all, a list for both levels, or a mapping from level to list.

    >>> vary_from_setting({"cluster": ["1", "zone"]}, ["Intercept", "x", "zone[T.b]", "zone[T.c]"]).cluster
    ('Intercept', 'zone[T.b]', 'zone[T.c]')
    """
    by_level = vary if isinstance(vary, Mapping) else {"client": vary, "cluster": vary}
    for level in (level for level in by_level if level not in ("client", "cluster")):
        raise DataError(f"The 'vary' parameter has the key {level!r}; its levels are 'client' and 'cluster'.")
    return Vary(_named_terms(by_level.get("client"), terms), _named_terms(by_level.get("cluster"), terms))


def _vary_by(bars: Sequence[Bar], design: Formula) -> tuple[tuple[str, ...], str | None]:
    """The terms that the bars of one group let vary, in the design's order, and the kind of their covariance."""
    if not bars:
        return (), None
    group, named = quoted(bars[0].group), [_terms_of_bar(bar, design) for bar in bars]
    counts = Counter(term for terms in named for term in terms)
    for term in (term for term in design.terms if counts[term] > 1):
        raise FormulaError(
            f"{quoted(term)} varies by {group} in two bars; leave it out of one (for an intercept, write 0 + there)."
        )
    uncorrelated = all(bar.diagonal or len(terms) <= 1 for bar, terms in zip(bars, named, strict=True))
    if len(bars) > 1 and not uncorrelated:
        raise FormulaError(
            f"The bars of {group} correlate some terms only; write one bar: | correlates all its terms, || none."
        )
    return tuple(term for term in design.terms if counts[term]), "diagonal" if uncorrelated else "full"


def _terms_of_bar(bar: Bar, design: Formula) -> list[str]:
    """The columns of ``X`` that a bar names."""
    if not bar.terms.terms:
        raise FormulaError(f"The bar term {quoted(str(bar))} has no terms; write 1 for an intercept that varies.")
    return design.terms_of(design.like_common(bar.terms))


def _named_terms(names: Any, terms: Sequence[str]) -> tuple[str, ...]:
    """The terms that one level of ``vary`` names, in the order of ``terms``."""
    if names is None:
        return tuple(terms)
    if not isinstance(names, Iterable):
        raise DataError(f"The 'vary' parameter must be a list of terms, or lists by level. Got {names!r} instead.")
    chosen: set[str] = set()
    for given in [names] if isinstance(names, str) else names:
        name = "Intercept" if str(given) == "1" else str(given)
        coded = re.compile(":".join(re.escape(factor) + _CATEGORY for factor in name.split(":")), re.DOTALL)
        matches = {name} & set(terms) or {term for term in terms if coded.fullmatch(term)}
        if not matches:
            raise DataError(f"The 'vary' parameter names {quoted(name)}, which is not a term; the terms are {listing(terms)}.")
        chosen |= matches
    return tuple(term for term in terms if term in chosen)
