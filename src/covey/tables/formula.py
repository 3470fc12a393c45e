"""Parse formulas: from text to terms and bars.

:func:`parse_formula` reads the response, the common terms and the bars of lme4, such as ``(1 + x | state/county)``. A term is a
product of factors. A factor is a column, a number or an expression. The result can be written as JSON, so a site evaluates the
terms without parsing text again. :mod:`covey.tables.design` turns bars into levels.

A formula may come from somebody else, in a message or in a saved model. Therefore every factor is checked when it is built
(:mod:`covey.tables.expressions`), so it cannot run code. A formula may have at most ``MOST_TERMS`` terms, so parsing it cannot
fill the memory.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from covey._typing import Floats
from covey.errors import CoveyError, FormulaError
from covey.tables.expressions import Expression, read_expression, refuse_habits
from covey.tables.text import MOST_TERMS, MOST_TEXT, depths_of, masked, quoted, read_terms, summands, too_many
from covey.tables.transforms import State, Transform

if TYPE_CHECKING:
    import pandas as pd

_NAME = r"`[^`]+`|[^\W\d][\w.]*"
_GROUPS = re.compile(rf"({_NAME})(?:\s*([/:])\s*({_NAME})(\s*[/:].*)?)?")


@dataclass(frozen=True)
class Factor:
    """One factor of a term: a number (``literal``), a column (``lookup``) or an expression (``python``)."""

    expression: str
    kind: Literal["literal", "lookup", "python"]

    def __post_init__(self) -> None:
        text = self.expression
        if not isinstance(text, str) or self.kind not in ("literal", "lookup", "python") or len(text) > MOST_TEXT:
            raise FormulaError(f"The term {quoted(str(text))} is neither a column nor a number nor an expression.")
        if self.kind == "literal" and not re.fullmatch(r"\d+(\.\d*)?|\.\d+", text):
            raise FormulaError(f"The constant {quoted(text)} of a term is not a number.")

    def read(self, text: str = "") -> Expression | None:
        """The expression, checked; None for a number or a column. ``text`` is the formula, for messages."""
        return read_expression(self.expression, text or self.expression) if self.kind == "python" else None

    def names(self) -> tuple[list[str], set[str]]:
        """All columns in the factor, and those that stand inside ``C()``."""
        found = self.read()
        if found is None:
            return [self.expression], set()
        return list(found.names), set() if found.category is None else {found.category}


def _values(factor: Factor, table: pd.DataFrame, state: Mapping[str, State]) -> Any:
    """The values of a column or an expression, as formulaic takes them."""
    import pandas as pd
    from formulaic.materializers.types import FactorValues

    found = factor.read()
    if found is None:
        return table[factor.expression]
    values = found.evaluate(table, state, len(table))
    if not isinstance(values, np.ndarray):
        return values
    if values.ndim == 1:
        return pd.Series(values, index=table.index)
    names = tuple(str(at + 1) for at in range(values.shape[1]))
    columns = pd.DataFrame(values, columns=list(names), index=table.index)
    return FactorValues(columns, kind="numerical", column_names=names, format="{name}[{field}]", encoded=False)


Term = tuple[Factor, ...]


@dataclass(frozen=True)
class Terms:
    """The terms of one side of a formula or of one bar, and the text that they were read from.

    >>> [[factor.expression for factor in term] for term in Terms.parse("log(x) + zone:x").terms]
    [['1'], ['log(x)'], ['zone', 'x']]
    """

    text: str
    terms: tuple[Term, ...]

    def __post_init__(self) -> None:
        if len(self.terms) > MOST_TERMS:
            raise too_many(self.text)
        read = [[factor.read(self.text) for factor in term] for term in self.terms]
        if sum(math.prod(1 if each is None else each.width for each in term) for term in read) > MOST_TERMS:
            raise too_many(self.text)

    @classmethod
    def parse(cls, text: str) -> Terms:
        """Read terms in Wilkinson's notation; an intercept is added unless the text says ``0`` or ``- 1``."""
        return cls(text, tuple(tuple(Factor(*each) for each in term) for term in read_terms(text)))

    @property
    def factors(self) -> list[Factor]:
        """The factors of all terms, without numbers."""
        return [factor for term in self.terms for factor in term if factor.kind != "literal"]

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The columns that the terms need, in the order in which they first occur."""
        return tuple(dict.fromkeys(name for factor in self.factors for name in factor.names()[0]))

    def by_factors(self) -> dict[frozenset[str], Term]:
        """Each term by the set of its factors, because ``x:z`` and ``z:x`` are the same term."""
        return {frozenset(factor.expression for factor in term): term for term in self.terms}

    @cached_property
    def transforms(self) -> dict[str, tuple[Expression, Transform]]:
        """The calls that remember their training rows, by their text, with the expression that each belongs to."""
        read = [found for factor in self.factors if (found := factor.read(self.text)) is not None]
        return {transform.text: (found, transform) for found in read for transform in found.transforms}

    def evaluate(self, columns: Mapping[str, Any], n_rows: int, state: Mapping[str, State] | None = None) -> dict[str, Floats]:
        """Compute the columns of the terms; categories are coded by treatment contrasts unless ``C()`` says otherwise.

        ``columns`` are arrays, or categories of pandas. ``state`` is what transforms have learned. The columns of a transform
        without a complete state are zero.
        """
        try:
            with np.errstate(all="ignore"):
                if self._of_numbers(columns):
                    return self._products(columns, n_rows, state or {})
                return self._coded(columns, n_rows, state or {})
        except CoveyError:
            raise
        except Exception as problem:  # formulaic has no common base class for its errors
            raise FormulaError(f"The formula {self.text!r} cannot be evaluated: {problem}") from None

    def _of_numbers(self, columns: Mapping[str, Any]) -> bool:
        """Whether each term is an intercept or a product of numbers that have one column, so that nothing needs coding."""
        literals = all(term[0].expression == "1" for term in self.terms if any(each.kind == "literal" for each in term))
        narrow = all(found is None or found.width == 1 for found in (factor.read(self.text) for factor in self.factors))
        return literals and narrow and all(isinstance(columns[name], np.ndarray) for name in self.names)

    def _products(self, columns: Mapping[str, Any], n_rows: int, state: Mapping[str, State]) -> dict[str, Floats]:
        found = dict[str, Floats]()
        # As in formulaic, terms of fewer factors come first.
        for term in sorted(self.terms, key=lambda term: sum(factor.kind != "literal" for factor in term)):
            if term[0].kind == "literal":
                found["Intercept"] = np.broadcast_to(1.0, n_rows)
                continue
            read = [(factor.read(), factor.expression) for factor in term]
            values = [columns[name] if each is None else each.evaluate(columns, state, n_rows) for each, name in read]
            found[":".join(factor.expression for factor in term)] = functools.reduce(np.multiply, values)
        return found

    def _coded(self, columns: Mapping[str, Any], n_rows: int, state: Mapping[str, State]) -> dict[str, Floats]:
        import pandas as pd

        table = pd.DataFrame(dict(columns), index=range(n_rows))
        matrix = self.combine(table, {each.expression: _values(each, table, state) for each in self.factors})
        return {str(name): matrix[name].to_numpy(dtype=np.float64) for name in matrix.columns}

    def combine(self, table: pd.DataFrame, values: Mapping[str, Any]) -> pd.DataFrame:
        """Compute the columns of the terms from the values of their factors, by the text of the factor."""
        from formulaic import Formula
        from formulaic.parser.types import Factor as Piece
        from formulaic.parser.types import Term as Product

        # formulaic finds the values of expressions by their text and evaluates nothing itself.
        pieces = [
            [Piece(each.expression, eval_method="literal" if each.kind == "literal" else "lookup") for each in term]
            for term in self.terms
        ]
        formula = Formula([Product(factors) for factors in pieces])
        return formula.get_model_matrix(table, na_action="ignore", context=dict(values), output="pandas")

    def to_json(self) -> dict[str, Any]:
        terms = [[[factor.expression, factor.kind] for factor in term] for term in self.terms]
        return {"text": self.text, "terms": terms}

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Terms:
        return cls(str(plain["text"]), tuple(tuple(Factor(*factor) for factor in term) for term in plain["terms"]))


@dataclass(frozen=True)
class Bar:
    """A bar of one level: ``(terms | group)``, or ``(terms | within:group)``; ``diagonal`` if it is written with ``||``."""

    terms: Terms
    group: str
    within: str | None = None
    diagonal: bool = False

    def __str__(self) -> str:
        group = self.group if self.within is None else f"{self.within}:{self.group}"
        return f"({self.terms.text} {'||' if self.diagonal else '|'} {group})"

    def to_json(self) -> dict[str, Any]:
        return {"terms": self.terms.to_json(), "group": self.group, "within": self.within, "diagonal": self.diagonal}

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Bar:
        return cls(Terms.from_json(plain["terms"]), plain["group"], plain["within"], bool(plain["diagonal"]))


@dataclass(frozen=True)
class ParsedFormula:
    """A formula that has been read.

    Attributes
    ----------
    response : text to the left of ``~``; None if there is none
    expression : the response as a term, used if no column has the name ``response``; None if it can only be a column
    common : terms outside the bars
    bars : ``(terms | a/b)`` is two bars, one of ``a`` and one of ``a:b``
    offset : the terms inside ``offset()``, whose sum is a known part of the linear predictor; None if there are none
    """

    response: str | None
    expression: Terms | None
    common: Terms
    bars: tuple[Bar, ...] = ()
    offset: Terms | None = None

    @property
    def counts(self) -> bool:
        """Whether the response is ``cbind(successes, failures)``."""
        return self.expression is not None and _counts(self.response) is not None

    @property
    def right(self) -> Terms:
        """All terms to the right of ``~``: the common terms, then those of the bars that are not among them."""
        terms = self.common.by_factors()
        for bar in self.bars:
            terms = {**bar.terms.by_factors(), **terms}
        extra = [term for term in terms.values() if term not in self.common.terms]
        return Terms(self.common.text, (*self.common.terms, *extra))

    @property
    def factors(self) -> list[Factor]:
        """The factors of both sides and of the offset."""
        left = [] if self.response is None else [Factor(self.response.strip("`"), "lookup")]
        known = [] if self.offset is None else self.offset.factors
        return (left if self.expression is None else self.expression.factors) + self.right.factors + known

    def to_json(self) -> dict[str, Any]:
        return {
            "response": self.response,
            "expression": None if self.expression is None else self.expression.to_json(),
            "common": self.common.to_json(),
            "bars": [bar.to_json() for bar in self.bars],
            "offset": None if self.offset is None else self.offset.to_json(),
        }

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> ParsedFormula:
        left = plain["expression"]
        bars = tuple(Bar.from_json(bar) for bar in plain["bars"])
        expression, known = (
            None if side is None else plain_expression(Terms.from_json(side)) for side in (left, plain.get("offset"))
        )
        return cls(plain["response"], expression, Terms.from_json(plain["common"]), bars, known)


def parse_formula(text: str) -> ParsedFormula:
    """Read a formula: ``response ~ terms``, or terms alone.

    >>> formula = parse_formula("log(radon) ~ floor + (1 + floor | state/county)")
    >>> formula.response, formula.common.text, [str(bar) for bar in formula.bars]
    ('log(radon)', 'floor', ['(1 + floor | state)', '(1 + floor | state:county)'])
    """
    sides = [side.strip() for side in text.split("~")]
    if len(sides) > 2 or not sides[-1]:
        raise FormulaError(f"The formula {text!r} must read 'response ~ terms', with one '~' and at least one term.")
    response = sides[0] if len(sides) == 2 and sides[0] else None
    refuse_habits(masked(text))
    rhs, known = _split_offsets(sides[-1])
    common, bars = split_bars(rhs)
    return ParsedFormula(response, read_column(response), Terms.parse(common), bars, known)


def read_column(text: str | None, *, arithmetic: bool = False) -> Terms | None:
    """An expression that stands for a column, such as the response ``log(y)``; None for the name of a column.

    If ``arithmetic``, signs such as ``*`` mean arithmetic as inside ``I()``.

    >>> read_column("2 * log(n)", arithmetic=True).names, read_column("n")
    (('n',), None)
    """
    if text is None or re.fullmatch(r"`[^`]+`|\w+", text):
        return None
    counts = None if arithmetic else _counts(text)
    if counts is not None:
        wrapped = [part if re.fullmatch(_NAME, part) else f"I({part})" for part in counts]
        return plain_expression(Terms.parse(f"0 + {' + '.join(wrapped)}"))
    try:
        terms = Terms.parse(f"0 + I({text})" if arithmetic else f"0 + {text}")
    except FormulaError as problem:
        if re.fullmatch(r"[^\W\d][\w.]*\(.*\)", text) or "^" in text:
            raise problem from None  # a column hardly has this name, so the reason helps more
        return None  # only a column can have this name
    return plain_expression(terms)


def plain_expression(terms: Terms) -> Terms:
    """The terms of a response or an offset; functions that learn from rows and categories are refused there."""
    read = [found for factor in terms.factors if (found := factor.read(terms.text)) is not None]
    for text in (text for found in read for text in [*([] if found.category is None else ["C()"]), *terms.transforms]):
        raise FormulaError(f"{text} is not supported in a response or an offset; add a column with its values to the table.")
    return terms


def _counts(response: str | None) -> list[str] | None:
    """The two parts of ``cbind(successes, failures)``; None for another response."""
    found = re.fullmatch(r"cbind\s*\((.*)\)", response or "", re.DOTALL)
    if found is None:
        return None
    inner, mask = found[1], masked(found[1])
    depths = depths_of(mask)
    commas = [at for at, char in enumerate(mask) if char == "," and depths[at] == 0]
    parts = [inner[: commas[0]].strip(), inner[commas[0] + 1 :].strip()] if len(commas) == 1 else []
    if not all(parts) or not parts or parts[0] == parts[1]:
        raise FormulaError(f"The response {quoted(response)} must name two columns: cbind(successes, failures).")
    return parts


# Offsets and bars


def _split_offsets(rhs: str) -> tuple[str, Terms | None]:
    """Separate ``offset(...)`` from the other terms of a right-hand side."""
    mask = masked(rhs)
    if not re.search(r"\boffset\s*\(", mask):
        return rhs, None
    rest, known = "", []
    for sign, start, end in summands(rhs, mask):
        part = rhs[start:end].strip()
        inner = re.fullmatch(r"offset\s*(\(.*\))", part, re.DOTALL)
        if inner is None or depths_of(masked(inner[1])).index(0) < len(inner[1]) - 1:
            if re.search(r"\boffset\s*\(", masked(part)):
                raise FormulaError(f"The offset in {quoted(part)} must stand by itself, as in x + offset(log(n)).")
            rest += sign + rhs[start:end]
        elif not inner[1][1:-1].strip():
            raise FormulaError(f"The offset in {quoted(part)} is empty; name its column, as in offset(log(n)).")
        elif sign.strip() not in ("", "+"):
            raise FormulaError(f"{quoted(part)} follows {sign.strip()!r}; an offset can only be added, with '+'.")
        else:
            known.append(f"I{inner[1]}")
    return re.sub(r"^\+\s*(?=\S)", "", rest.strip()) or "1", plain_expression(Terms.parse("0 + " + " + ".join(known)))


def split_bars(rhs: str) -> tuple[str, tuple[Bar, ...]]:
    """Separate the bars of a right-hand side from its other terms.

    >>> fixed, bars = split_bars("x + (1 + x | state/county)")
    >>> fixed, *map(str, bars)
    ('x', '(1 + x | state)', '(1 + x | state:county)')
    """
    mask = masked(rhs)
    if "|" not in mask:
        return rhs, ()
    common, bars = "", []
    for sign, start, end in summands(rhs, mask):
        if "|" in mask[start:end]:
            bars += _read_bar(rhs[start:end].strip(), sign.strip())
        else:
            common += sign + rhs[start:end]
    return re.sub(r"^\+\s*(?=\S)", "", common.strip()) or "1", tuple(bars)


def _read_bar(text: str, sign: str) -> list[Bar]:
    mask = masked(text)
    depths = depths_of(mask)
    strokes = list(re.finditer(r"\|+", mask))
    where = {depths[stroke.start()] for stroke in strokes}
    if 0 in where:
        raise FormulaError(f"The bar in {quoted(text)} needs parentheses around its terms and its group, as in (1 | g).")
    if mask[0] != "(" or depths.index(0) < len(mask) - 1 or where != {1}:
        raise FormulaError(f"The bar term in {quoted(text)} must stand by itself, joined by '+', as in x + (1 | g).")
    if sign not in ("", "+"):
        raise FormulaError(f"The bar term {quoted(text)} follows {sign!r}; bar terms can only be added, with '+'.")
    if len(strokes) > 1 or len(strokes[0][0]) > 2:
        raise FormulaError(f"The bar term {quoted(text)} has more than one bar; write one bar term for each group.")
    stroke = strokes[0]
    terms, groups = text[1 : stroke.start()].strip(), text[stroke.end() : -1].strip()
    if not terms:
        raise FormulaError(f"The bar term {quoted(text)} has no terms before its bar; write 1 for an intercept that varies.")
    if not groups:
        raise FormulaError(f"The bar term {quoted(text)} has no group after its bar; name the column of the groups.")
    outer, sep, inner = _read_groups(groups)
    parsed, diagonal = Terms.parse(terms), len(stroke[0]) == 2
    upper, lower = Bar(parsed, outer, None, diagonal), Bar(parsed, inner, outer, diagonal)
    return {"": [upper], "/": [upper, lower], ":": [lower]}[sep]


def _read_groups(text: str) -> tuple[str, str, str]:
    """``a/b`` into ``("a", "/", "b")``, ``a`` into ``("a", "", "")``."""
    found = _GROUPS.fullmatch(text)
    if found is None:
        raise FormulaError(
            f"The groups {quoted(text)} are not supported; write one column, or two as in cluster/client, and put a name with "
            "spaces or signs in backticks."
        )
    outer, sep, inner, more = (part or "" for part in found.groups())
    if more:
        raise FormulaError(f"The groups {quoted(text)} have more than two levels; keep two, as in (1 | cluster/client).")
    if outer.strip("`") == inner.strip("`"):
        raise FormulaError(f"The groups {quoted(text)} name one column twice; write (1 | cluster/client) with two columns.")
    return outer.strip("`"), sep, inner.strip("`")
