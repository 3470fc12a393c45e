"""Expressions in formulas: ``log(x)``, ``I(x**2)``, ``C(zone, contr.sum)``, ``poly(x, 2)``.

A formula may come from somebody else, in a message or in a saved model. Therefore an expression may hold columns, numbers,
arithmetic and a fixed list of functions only. :func:`read_expression` checks this. :class:`Expression` then computes the values
itself, by walking over the syntax tree, so that no text is ever executed.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from covey._typing import Anything
from covey.errors import FormulaError, listing
from covey.tables.transforms import OPTIONS, State, Transform

FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    **{name: getattr(np, name) for name in ("log", "log2", "log10", "log1p", "exp", "sqrt", "abs")},
    "I": lambda value: value,
}
CONTRASTS = ("treatment", "sum", "helmert", "diff", "poly")
HIGHEST_POWER = 20
_LONG, _MOST_TRANSFORMS = 2_000, 50
_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_KNOWN = ", ".join([*FUNCTIONS, "C", *OPTIONS])
_CATEGORIES = "write C({0}) for categories"
_SPLINES = "write cr({0}, df=4) for natural splines, or bs({0}, df=4)"
_BASE = 'write C({0}, contr.treatment("b")), with the reference category in quotes'
# What users of R, patsy and numpy write, and what they would write here.
_HABITS = {
    **dict.fromkeys(["factor", "as.factor", "ordered", "as.ordered", "as.character", "Q"], _CATEGORIES),
    **dict.fromkeys(["ns", "cs", "cc", "s", "te", "ti", "rcs", "natural_cubic_spline"], _SPLINES),
    **dict.fromkeys(["relevel", "fct_relevel"], _BASE),
    **dict.fromkeys(["as.numeric", "as.integer", "float", "int"], "convert the column {0} in the table"),
    **dict.fromkeys(["standardize", "std", "zscore"], "write scale({0})"),
    **dict.fromkeys(["bool", "ifelse", "cut", "where"], "add a column to the table that holds the values"),
}
_PATSY = {
    "Treatment": 'contr.treatment("b")',
    **{name: f"contr.{name.lower()}" for name in ("Sum", "Helmert", "Diff", "Poly")},
}


@dataclass(frozen=True)
class Expression:
    """An expression that has been read and checked.

    Attributes
    ----------
    tree : its syntax tree
    names : the columns in it
    category : the column inside ``C()``, if it is one
    contrast : the contrasts of the category and the reference category, if they are given
    transforms : calls that remember their training rows
    width : the number of columns; 1 for a category, whose number depends on the data
    """

    tree: ast.expr
    names: tuple[str, ...]
    category: str | None = None
    contrast: tuple[str, Any] | None = None
    transforms: tuple[Transform, ...] = ()
    width: int = 1

    def evaluate(self, columns: Mapping[str, Any], state: Mapping[str, State], n_rows: int) -> Any:
        """The values: ``(rows,)``, or ``(rows, width)`` for a transform with several columns, or a category for formulaic."""
        if self.category is not None:
            return self._coded(columns[self.category])
        values = np.asarray(self._value(self.tree, columns, state), dtype=np.float64)
        return np.broadcast_to(values, (n_rows,)) if values.ndim == 0 else values

    def argument(self, transform: Transform, columns: Mapping[str, Any], n_rows: int) -> Anything:
        """The values that a transform of this expression transforms."""
        return np.broadcast_to(np.asarray(self._value(transform.argument, columns, {}), dtype=np.float64), (n_rows,))

    def _value(self, node: ast.expr, columns: Mapping[str, Any], state: Mapping[str, State]) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            return np.asarray(columns[node.id], dtype=np.float64)
        if isinstance(node, ast.UnaryOp):
            value = self._value(node.operand, columns, state)
            return -value if isinstance(node.op, ast.USub) else value
        if isinstance(node, ast.BinOp):
            left, right = (self._value(side, columns, state) for side in (node.left, node.right))
            if not isinstance(left, np.ndarray) and not isinstance(right, np.ndarray):
                left = np.float64(left)  # numpy divides by zero without an exception
            return _BINARY[type(node.op)](left, right)
        call: Any = node
        if call.func.id in FUNCTIONS:
            return FUNCTIONS[call.func.id](self._value(call.args[0], columns, state))
        transform = next(each for each in self.transforms if each.text == ast.unparse(call))
        x = np.atleast_1d(np.asarray(self._value(call.args[0], columns, state), dtype=np.float64))
        values = transform.values(x, state.get(transform.text, ()))
        return values[:, 0] if transform.width == 1 else values

    def _coded(self, values: Any) -> Any:
        from formulaic.transforms.contrasts import C, ContrastsRegistry

        if self.contrast is None:
            return C(values)
        name, base = self.contrast
        known = list(values.cat.categories)
        if base is not None and base not in known:
            fix = f"its categories are {listing(known)}"
            raise FormulaError(f"Column {self.category!r} has no category {base!r} to be the reference; {fix}.")
        contrasts = getattr(ContrastsRegistry, name)
        return C(values, contrasts() if base is None else contrasts(base=base))


def read_expression(expression: str, text: str) -> Expression:
    """Read an expression of the formula ``text``; anything but columns, numbers, arithmetic and functions is refused.

    >>> read_expression("I(scale(x) ** 2)", "").names
    ('x',)
    """
    # Long expressions of somebody else must not fill the memory.
    return _cached(expression, text) if len(expression) + len(text) < _LONG else _read(expression, text)


def _read(expression: str, text: str) -> Expression:
    try:
        tree = ast.parse(expression, mode="eval").body
        return _Reader(text).read(tree)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as problem:
        if isinstance(problem, FormulaError):
            raise
        raise FormulaError(f"The term {expression!r} of {text!r} cannot be read; rename columns that need quotes.") from None


_cached = lru_cache(maxsize=512)(_read)


class _Reader:
    """Collects the columns and transforms of one expression, and refuses what is not allowed."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.names: list[str] = []
        self.transforms: list[Transform] = []

    def read(self, tree: ast.expr) -> Expression:
        if isinstance(tree, ast.Call) and _function(tree) == "C":
            if not tree.args or not isinstance(tree.args[0], ast.Name):
                raise FormulaError(f"{self._shown(tree)} must name one column.")
            return Expression(tree, (tree.args[0].id,), tree.args[0].id, self._contrast(tree))
        self._visit(tree, top=True)
        width = max((each.width for each in self.transforms), default=1)  # a wide one stands alone
        return Expression(tree, tuple(self.names), transforms=tuple(self.transforms), width=width)

    def _visit(self, node: ast.expr, *, top: bool = False, inside: str = "") -> None:
        """Check a node; ``inside`` is the transform around it."""
        if isinstance(node, ast.Name):
            self.names.append(node.id)
        elif isinstance(node, ast.Constant):
            if not (isinstance(node.value, int | float) and abs(node.value) < 1e300):
                raise FormulaError(f"The constant {str(node.value)[:48]!r} in {self.text!r} is not a number.")
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.UAdd | ast.USub):
            self._visit(node.operand, inside=inside)
        elif isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
            if isinstance(node.op, ast.Pow) and not _is_small_power(node):
                raise FormulaError(f"The power {self._shown(node)} needs a column, and an exponent of at most {HIGHEST_POWER}.")
            self._visit(node.left, inside=inside)
            self._visit(node.right, inside=inside)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitXor):
            power = f"{ast.unparse(node.left)}**{ast.unparse(node.right)}"
            raise FormulaError(f"{self._shown(node)} is not supported; write a power with '**', as in {power}.")
        elif isinstance(node, ast.Call):
            self._visit_call(node, top, inside)
        else:
            raise FormulaError(
                f"{self._shown(node)} is not supported; terms are columns, numbers, arithmetic and the functions {_KNOWN}."
            )

    def _visit_call(self, call: ast.Call, top: bool, inside: str) -> None:
        name = _function(call)
        if name == "C":
            raise FormulaError(f"{self._shown(call)} is a category, so it must be a term of its own.")
        if name in OPTIONS:
            transform = Transform.read(call)
            if inside or (transform.width > 1 and not top):
                where = f"inside {inside}" if inside else "inside an expression"
                raise FormulaError(f"{transform.text} cannot stand {where} in {self.text!r}; write it as a term of its own.")
            if len(self.transforms) >= _MOST_TRANSFORMS:
                raise FormulaError(f"A term of {self.text[:48]!r} has more than {_MOST_TRANSFORMS} functions; write fewer.")
            self.transforms.append(transform)
            before = len(self.names)
            self._visit(call.args[0], inside=transform.text)
            if len(self.names) == before:
                raise FormulaError(f"{self._shown(call)} names no column; give it one.")
            return
        if name not in FUNCTIONS or call.keywords or len(call.args) != 1:
            habit = _habit(name, ast.unparse(call.args[0]) if call.args else "x")
            fix = habit or f"the functions are {_KNOWN}" + (", with one argument" if name in FUNCTIONS else "")
            raise FormulaError(f"{self._shown(call)} is not supported; {fix}.")
        self._visit(call.args[0], inside=inside)

    def _contrast(self, call: ast.Call) -> tuple[str, Any] | None:
        """The contrasts of ``C(x, contr.treatment("b"))`` and their reference category."""
        if len(call.args) == 1 and not call.keywords:
            return None
        column = ast.unparse(call.args[0])
        given = call.args[1] if len(call.args) == 2 and not call.keywords else None
        function = given.func if isinstance(given, ast.Call) else given
        if isinstance(function, ast.Attribute) and ast.unparse(function.value) == "contr" and function.attr in CONTRASTS:
            settings = [] if not isinstance(given, ast.Call) else [*given.args, *(each.value for each in given.keywords)]
            names = [] if not isinstance(given, ast.Call) else [each.arg for each in given.keywords]
            if not settings:
                return function.attr, None
            one = function.attr == "treatment" and len(settings) == 1 and names in ([], ["base"])
            if one and isinstance(settings[0], ast.Constant):
                return function.attr, settings[0].value
        asked = ast.unparse(function) if isinstance(function, ast.Name) else ""
        patsy = f"write C({column}, {_PATSY[asked]})" if asked in _PATSY else ""
        choices = ", ".join(f"contr.{name}" for name in CONTRASTS)
        fix = patsy or f'write C({column}, contr.treatment("b")) to choose the reference, or one of {choices} without arguments'
        raise FormulaError(f"{self._shown(call)} is not supported; {fix}.")

    def _shown(self, node: ast.AST) -> str:
        return f"{ast.unparse(node) or type(node).__name__!r} in {self.text!r}"


def _function(call: ast.Call) -> str:
    """The name of a function, also one with dots."""
    return ast.unparse(call.func) if isinstance(call.func, ast.Name | ast.Attribute) else ""


def _habit(name: str, argument: str) -> str:
    module, _, function = name.rpartition(".")
    if module in ("np", "numpy", "math") and function in FUNCTIONS:
        return f"write {function}({argument})"
    return _HABITS.get(name, "").format(argument)


def refuse_habits(text: str) -> None:
    """Refuse what only R can read, such as ``as.factor(x)`` and ``%in%``, with what to write instead."""
    if "%in%" in text:
        raise FormulaError(f"'%in%' in {text!r} is not supported; write a:b for b within a, or (1 | a/b) for groups.")
    if re.search(r"[=!]=|[<>]", text):
        raise FormulaError(f"A comparison in {text!r} is not supported; add a column of 0 and 1 to the table.")
    dotted = re.search(r"\b(as\.\w+|Boundary\.knots)\s*[(=]\s*([\w.]*)", text)
    if dotted and dotted[1] == "Boundary.knots":
        raise FormulaError(f"'Boundary.knots' in {text!r} is not supported; write lower_bound=0, upper_bound=3.")
    if dotted and dotted[1] in _HABITS:
        raise FormulaError(f"{dotted[1]}() in {text!r} is not supported; {_habit(dotted[1], dotted[2] or 'x')}.")


def _is_small_power(power: ast.BinOp) -> bool:
    """Whether a power is quick to compute; a power of two large numbers could fill the memory."""
    exponent = power.right.operand if isinstance(power.right, ast.UnaryOp) else power.right
    value = exponent.value if isinstance(exponent, ast.Constant) else None
    small = isinstance(value, int | float) and abs(value) <= HIGHEST_POWER
    return small and any(isinstance(node, ast.Name) for node in ast.walk(power.left))
