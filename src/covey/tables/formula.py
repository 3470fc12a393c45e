"""Formulas: text to terms, once.

:func:`parse_formula` makes a :class:`ParsedFormula` of a text: the response, the common terms and lme4's bars, each term as
factors of which every one is a column, a number or an expression. A parsed formula is a plain value that JSON can hold, so
that whoever receives it (a site, a saved model) evaluates the terms without parsing any text.

Expressions are evaluated only if every piece is a column, a number, arithmetic or one of ``FUNCTIONS``: a formula that comes
with a model or a message from elsewhere cannot run code, and cannot ask for more terms than ``MOST_TERMS``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from covey.errors import FormulaError

if TYPE_CHECKING:
    import pandas as pd

FUNCTIONS = ("log", "log2", "log10", "log1p", "exp", "sqrt", "abs", "C", "I")
MOST_TERMS = 5_000  # that products and powers may expand to
_MOST_TEXT = 100_000
_HIGHEST_POWER = 20
_CONTEXT = {"log1p": np.log1p, "sqrt": np.sqrt, "abs": np.abs}
_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow, ast.UAdd, ast.USub)
_ARITHMETIC = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.Constant, ast.Load, *_OPERATORS)
_QUOTED = re.compile(r"`[^`]*`|'[^']*'|\"[^\"]*\"")
_NAME = r"`[^`]+`|[^\W\d][\w.]*"
_GROUPS = re.compile(rf"({_NAME})(?:\s*([/:])\s*({_NAME})(\s*[/:].*)?)?")

FactorKind = Literal["literal", "lookup", "python"]
_FACTOR_KINDS = ("literal", "lookup", "python")


@dataclass(frozen=True)
class Factor:
    """One factor of a term: a number (``literal``), a column (``lookup``) or an expression (``python``)."""

    expression: str
    kind: FactorKind


Term = tuple[Factor, ...]


@dataclass(frozen=True)
class Terms:
    """The terms of one side of a formula, or of one bar, and the text that they were written as.

    >>> [[factor.expression for factor in term] for term in Terms.parse("log(x) + zone:x").terms]
    [['1'], ['log(x)'], ['zone', 'x']]
    """

    text: str
    terms: tuple[Term, ...]

    @classmethod
    def parse(cls, text: str) -> Terms:
        """Read a text in Wilkinson's notation, with an intercept unless it says ``0`` or ``- 1``."""
        terms = cls(text, _read_terms(text))
        terms.check()
        return terms

    def check(self) -> None:
        """Refuse expressions with pieces that are not allowed."""
        for factor in self.factors:
            if factor.kind == "python":
                _refuse_code(factor.expression, self.text)

    @property
    def factors(self) -> list[Factor]:
        """Factors that are not numbers, as often as they occur."""
        return [factor for term in self.terms for factor in term if factor.kind != "literal"]

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The columns that the terms need, in order."""
        used = (name for factor in self.factors for name in names_in(factor)[0])
        return tuple(dict.fromkeys(used))

    def by_factors(self) -> dict[frozenset[str], Term]:
        """The terms by the expressions of their factors, whose order does not matter."""
        return {frozenset(factor.expression for factor in term): term for term in self.terms}

    def evaluate(self, table: pd.DataFrame) -> pd.DataFrame:
        """The terms' columns."""
        from formulaic import Formula
        from formulaic.parser.types import Factor as Piece
        from formulaic.parser.types import Term as Product

        pieces = [[Piece(factor.expression, eval_method=factor.kind) for factor in term] for term in self.terms]
        try:
            with np.errstate(all="ignore"):
                formula = Formula([Product(factors) for factors in pieces])
                return formula.get_model_matrix(table, na_action="ignore", context=_CONTEXT, output="pandas")
        except Exception as problem:  # formulaic has no common base class for its errors
            raise FormulaError(f"The formula {self.text!r} cannot be evaluated: {problem}") from None

    def to_json(self) -> dict[str, Any]:
        terms = [[[factor.expression, factor.kind] for factor in term] for term in self.terms]
        return {"text": self.text, "terms": terms}

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Terms:
        """Terms from elsewhere: no text is parsed, and every factor is checked."""
        if len(plain["terms"]) > MOST_TERMS:
            raise _too_many(plain["text"])
        terms = tuple(tuple(_factor_from_json(*factor) for factor in term) for term in plain["terms"])
        found = cls(str(plain["text"]), terms)
        found.check()
        return found


@dataclass(frozen=True)
class Bar:
    """``(terms | group)``, or ``(terms | within:group)``; ``diagonal`` if written with ``||``."""

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
    """A formula: the response if it names one, the common terms, and the bars, each of one level.

    The response is a column of that name, or else an expression; ``expression`` is None where it can only be a column.
    """

    response: str | None
    expression: Terms | None
    common: Terms
    bars: tuple[Bar, ...] = ()

    @property
    def factors(self) -> list[Factor]:
        """Columns and expressions on both sides, without those of the bars, which are among them."""
        left = [] if self.response is None else [Factor(self.response.strip("`"), "lookup")]
        return (left if self.expression is None else self.expression.factors) + self.common.factors

    def to_json(self) -> dict[str, Any]:
        return {
            "response": self.response,
            "expression": None if self.expression is None else self.expression.to_json(),
            "common": self.common.to_json(),
            "bars": [bar.to_json() for bar in self.bars],
        }

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> ParsedFormula:
        left = plain["expression"]
        bars = tuple(Bar.from_json(bar) for bar in plain["bars"])
        expression = None if left is None else Terms.from_json(left)
        return cls(plain["response"], expression, Terms.from_json(plain["common"]), bars)


def parse_formula(text: str) -> ParsedFormula:
    """Read a formula: ``response ~ terms`` or terms alone, with bars if any.

    >>> formula = parse_formula("log(radon) ~ floor + (1 + floor | state/county)")
    >>> formula.response, formula.common.text, [str(bar) for bar in formula.bars]
    ('log(radon)', 'floor', ['(1 + floor | state)', '(1 + floor | state:county)'])
    """
    sides = [side.strip() for side in text.split("~")]
    if len(sides) > 2 or not sides[-1]:
        raise FormulaError(f"The formula {text!r} must read 'response ~ terms', with one '~' and at least one term.")
    response = sides[0] if len(sides) == 2 and sides[0] else None
    common, bars = split_bars(sides[-1])
    return ParsedFormula(response, _expression(response), Terms.parse(common), bars)


def _expression(response: str | None) -> Terms | None:
    """The response as terms; None for the name of a column, however odd."""
    if response is None or re.fullmatch(r"`[^`]+`|\w+", response):
        return None
    try:
        return Terms.parse(f"0 + {response}")
    except FormulaError:
        return None  # a column may still have this name; else the mistake is named when the response is evaluated


def split_bars(rhs: str) -> tuple[str, tuple[Bar, ...]]:
    """The right-hand side of a formula without its bar terms, and these, each of one level.

    >>> fixed, bars = split_bars("x + (1 + x | state/county)")
    >>> fixed, *map(str, bars)
    ('x', '(1 + x | state)', '(1 + x | state:county)')
    """
    if "|" not in rhs:
        return rhs, ()
    mask = _mask(rhs)
    if "|" not in mask:
        return rhs, ()
    kept, bars = "", []
    for start, sign, end in _pieces(rhs, mask):
        begin = start + len(sign)
        if "|" in mask[begin:end]:
            bars += _read_bar(rhs[begin:end].strip(), sign.strip())
        else:
            kept += rhs[start:end]
    return re.sub(r"^\+\s*(?=\S)", "", kept.strip()) or "1", tuple(bars)


def names_in(factor: Factor) -> tuple[list[str], set[str]]:
    """The columns in a factor, and those inside ``C()``."""
    if factor.kind == "lookup":
        return [factor.expression], set()
    tree = _syntax(factor.expression, factor.expression)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    functions = {id(call.func) for call in calls}
    used = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and id(node) not in functions]
    wrapped = {call.args[0].id for call in calls if _is_c(call) and isinstance(call.args[0], ast.Name)}
    return used, wrapped


def show(text: str | None) -> str:
    """Quoted, and cut so that a long formula does not bury the sentence around it."""
    return repr(text if text is None or len(text) <= 48 else f"{text[:45]}...")


# Terms


def _read_terms(text: str) -> tuple[Term, ...]:
    from formulaic import Formula
    from formulaic.parser import DefaultFormulaParser

    class Bounded(DefaultFormulaParser):  # type: ignore[misc]
        """Refuses products and powers of which nobody could wait for the terms, before it expands them."""

        def get_terms_from_ast(self, ast: Any, *, context: Any) -> Any:
            if _expanded(ast) > MOST_TERMS:
                raise _too_many(text)
            return super().get_terms_from_ast(ast, context=context)

    if len(text) > _MOST_TEXT:
        raise _too_many(text)
    if re.search(r"(^|[\s+(*:-])\.($|[\s+)*:-])", text):
        raise FormulaError(f"The formula {text!r} uses '.' for all columns, which is not supported; name the columns.")
    try:
        parsed = Formula(text, _parser=Bounded())
        if type(parsed).__name__ != "SimpleFormula":
            raise FormulaError(f"The formula {text!r} has several parts; write one, without '|' or a second '~'.")
        return tuple(tuple(Factor(str(each.expr), each.eval_method.value) for each in term.factors) for term in parsed)
    except FormulaError:
        raise
    except Exception as problem:  # formulaic has no common base class for its parser's errors
        reason = re.sub(r"\x1b\[[0-9;]*m", "", str(problem)).strip().splitlines() or ["it cannot be parsed"]
        raise FormulaError(f"The formula {text!r} cannot be read: {reason[0]}") from None


def _too_many(text: str) -> FormulaError:
    return FormulaError(f"The formula {show(str(text))} asks for more than {MOST_TERMS:,} terms; write fewer.")


def _expanded(root: Any) -> int:
    """At most how many terms a syntax tree of formulaic's makes, counting no further than needed."""
    counts: dict[int, int] = {}
    pending = [root]
    while pending:
        node = pending.pop()
        children = list(getattr(node, "args", ()))
        if any(id(child) not in counts for child in children):
            pending += [node, *(child for child in children if id(child) not in counts)]
            continue
        counts[id(node)] = min(_terms_of(node, [counts[id(child)] for child in children]), 2 * MOST_TERMS)
    return counts[id(root)]


def _terms_of(node: Any, counts: Sequence[int]) -> int:
    if len(counts) < 2:
        return max(counts, default=1)
    symbol, (left, right) = node.operator.symbol, counts
    if symbol in ("**", "^"):
        digits = str(getattr(node.args[1], "token", ""))
        power = int(digits) if digits.isdecimal() and len(digits) < 4 else 0
        return int(left**power) if 0 < power <= _HIGHEST_POWER else 2 * MOST_TERMS
    return left + right if symbol in ("+", "-", "~", "|") else left * right + left + right


def _factor_from_json(expression: Any, kind: Any) -> Factor:
    if not isinstance(expression, str) or kind not in _FACTOR_KINDS or len(expression) > _MOST_TEXT:
        raise FormulaError(f"The term {show(str(expression))} is neither a column nor a number nor an expression.")
    if kind == "literal" and not re.fullmatch(r"\d+(\.\d*)?|\.\d+", expression):
        raise FormulaError(f"The constant {show(expression)} of a term is not a number.")
    return Factor(expression, kind)


# Expressions


def _syntax(expression: str, text: str) -> ast.Expression:
    try:
        return ast.parse(expression, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise FormulaError(f"The term {expression!r} of {text!r} cannot be read; rename columns that need quotes.") from None


def _refuse_code(expression: str, text: str) -> None:
    for node in _nodes(_syntax(expression, text), text):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow) and not _is_modest(node):
            raise FormulaError(f"The power {ast.unparse(node)!r} in {text!r} must be of a column, to a number of at most 20.")
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitXor):
            raise FormulaError(f"{ast.unparse(node)!r} in {text!r} is not supported; write a power with '**'.")
        if isinstance(node, ast.Constant) and not (isinstance(node.value, int | float) and abs(node.value) < 1e300):
            raise FormulaError(f"The constant {show(str(node.value))} in {text!r} is not a number.")
        if not isinstance(node, (*_ARITHMETIC, ast.Name)):
            raise FormulaError(
                f"{_unparsed(node)!r} in {text!r} is not supported; terms are columns, numbers, arithmetic and "
                f"the functions {', '.join(FUNCTIONS)}."
            )


def _unparsed(node: ast.AST) -> str:
    """Source of a node; of an operator, which has none, its name."""
    return ast.unparse(node) or type(node).__name__


def _is_modest(power: ast.BinOp) -> bool:
    """Whether a power can be computed in no time: numbers to the power of numbers can fill the memory."""
    exponent = power.right.operand if isinstance(power.right, ast.UnaryOp) else power.right
    value = exponent.value if isinstance(exponent, ast.Constant) else None
    small = isinstance(value, int | float) and abs(value) <= _HIGHEST_POWER
    return small and any(isinstance(node, ast.Name) for node in ast.walk(power.left))


def _nodes(tree: ast.AST, text: str) -> Iterator[ast.AST]:
    """All nodes but the calls to known functions, whose arguments are looked at instead."""
    pending = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Call):
            if not isinstance(node.func, ast.Name) or node.func.id not in FUNCTIONS or node.keywords or len(node.args) != 1:
                raise FormulaError(
                    f"{ast.unparse(node)!r} in {text!r} is not supported; the functions, each of one argument, are "
                    f"{', '.join(FUNCTIONS)}."
                )
            if _is_c(node) and not isinstance(node.args[0], ast.Name):
                raise FormulaError(f"{ast.unparse(node)!r} in {text!r} must name one column.")
            pending += node.args
            continue
        yield node
        pending += ast.iter_child_nodes(node)


def _is_c(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Name) and call.func.id == "C"


# Bars


def _mask(text: str) -> str:
    """The text with quoted names blotted out, each character in its place."""
    return _QUOTED.sub(lambda quoted: "_" * len(quoted[0]), text)


def _depths(mask: str) -> list[int]:
    """How many parentheses are open after each character."""
    return list(accumulate((char == "(") - (char == ")") for char in mask))


def _pieces(rhs: str, mask: str) -> Iterable[tuple[int, str, int]]:
    """Start, sign and end of each of the terms that '+' and '-' join at the top."""
    depths = _depths(mask)
    if min(depths) < 0 or depths[-1] > 0:
        raise FormulaError(f"The parentheses of {show(rhs)} do not match; close each bar term, as in (1 | g).")
    signs = [match for match in re.finditer(r"[+-](?:\s*[+-])*", mask) if depths[match.start()] == 0]
    starts = [0, *(match.start() for match in signs)]
    return zip(starts, ["", *(match[0] for match in signs)], [*starts[1:], len(rhs)], strict=True)


def _read_bar(text: str, sign: str) -> list[Bar]:
    mask = _mask(text)
    depths = _depths(mask)
    strokes = list(re.finditer(r"\|+", mask))
    where = {depths[stroke.start()] for stroke in strokes}
    if 0 in where:
        raise FormulaError(f"The bar in {show(text)} needs parentheses around its terms and its group, as in (1 | g).")
    if mask[0] != "(" or depths.index(0) < len(mask) - 1 or where != {1}:
        raise FormulaError(f"The bar term in {show(text)} must stand by itself, joined to others by '+', as in x + (1 | g).")
    if sign not in ("", "+"):
        raise FormulaError(f"The bar term {show(text)} follows {sign!r}; bar terms can only be added, with '+'.")
    if len(strokes) > 1 or len(strokes[0][0]) > 2:
        raise FormulaError(f"The bar term {show(text)} has more than one bar; write one bar term for each group.")
    stroke = strokes[0]
    terms, groups = text[1 : stroke.start()].strip(), text[stroke.end() : -1].strip()
    if not terms:
        raise FormulaError(f"The bar term {show(text)} has nothing left of its bar; write 1 for an intercept that varies.")
    if not groups:
        raise FormulaError(f"The bar term {show(text)} has nothing right of its bar; name the column of the groups.")
    outer, sep, inner = _read_groups(groups)
    parsed, diagonal = Terms.parse(terms), len(stroke[0]) == 2
    upper, lower = Bar(parsed, outer, None, diagonal), Bar(parsed, inner, outer, diagonal)
    return {"": [upper], "/": [upper, lower], ":": [lower]}[sep]


def _read_groups(text: str) -> tuple[str, str, str]:
    """``a/b`` into ``("a", "/", "b")``, ``a`` into ``("a", "", "")``."""
    found = _GROUPS.fullmatch(text)
    if found is None:
        raise FormulaError(f"The groups {show(text)} are not supported; name a column (an odd one in `), or cluster/client.")
    outer, sep, inner, more = (part or "" for part in found.groups())
    if more:
        raise FormulaError(f"The groups {show(text)} have more than two levels; keep two, as in (1 | cluster/client).")
    if outer.strip("`") == inner.strip("`"):
        raise FormulaError(f"The groups {show(text)} name one column twice; write (1 | cluster/client) with two columns.")
    return outer.strip("`"), sep, inner.strip("`")
