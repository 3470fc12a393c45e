"""Terms as expressions that an engine evaluates where the rows are: narwhals expressions, and SQL.

Each column of a design is a product of arithmetic on numeric columns and of codes of categories. :func:`term_columns` finds
this product for every term. :class:`Engine` writes it for a lazy table of any library that narwhals reads, :class:`Sql` as text
for DuckDB or Spark. Both compute in double precision. A value that has no logarithm or root is null, where numpy has NaN.
"""

from __future__ import annotations

import ast
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import narwhals as nw
import numpy as np

from covey.errors import DataError, FormulaError
from covey.tables.design import Columns, Formula
from covey.tables.formula import Factor, Terms
from covey.tables.scaling import Design, Scaled
from covey.tables.sparse import NOT_SPARSE, SparseDesign
from covey.tables.transforms import State

V = TypeVar("V")
Dialect = Literal["duckdb", "spark"]
DIALECTS: tuple[Dialect, ...] = ("duckdb", "spark")
_ARITHMETIC = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
_FIX = "add a column with its values to the table, or lay the table out in shards (covey shard)"


@dataclass(frozen=True)
class TermColumn:
    """One column of ``X``: the product of ``numeric``, an expression, and of one code for each of some categorical columns.

    ``codes`` has for each categorical column the code of each of its categories; categories that are not named have code 0.
    """

    name: str
    numeric: ast.expr
    codes: tuple[tuple[str, tuple[tuple[Any, float], ...]], ...] = ()

    @property
    def constant(self) -> float | None:
        """The value, if it is the same in all rows of any table."""
        return float(self.numeric.value) if not self.codes and isinstance(self.numeric, ast.Constant) else None  # type: ignore[arg-type]


ONE: ast.expr = ast.Constant(1.0)


def product(factors: Sequence[ast.expr]) -> ast.expr:
    """The product of expressions, without factors 1."""
    proper = [factor for factor in factors if not (isinstance(factor, ast.Constant) and factor.value == 1.0)]
    whole = proper[0] if proper else ONE
    for factor in proper[1:]:
        whole = ast.BinOp(whole, ast.Mult(), factor)
    return whole


def columns_in(tree: ast.expr) -> list[str]:
    """The columns in an expression."""
    if isinstance(tree, ast.Name):
        return [tree.id]
    inside = tree.args if isinstance(tree, ast.Call) else list(ast.iter_child_nodes(tree))
    return [name for each in inside if isinstance(each, ast.expr) for name in columns_in(each)]


def term_columns(design: Design) -> list[TermColumn]:
    """The columns of ``X`` as products; a function that no engine can evaluate is refused.

    >>> from covey.tables.formula import parse_formula
    >>> design = Formula.of(parse_formula("zone * log(x)").common, ["zone", "x"], {"zone": ["a", "b"]})
    >>> [(each.name, ast.unparse(each.numeric), each.codes) for each in term_columns(design)][2:]
    [('log(x)', 'log(x)', ()), ('zone[T.b]:log(x)', 'log(x)', (('zone', (('b', 1.0),)),))]
    """
    if isinstance(design, Scaled):
        inner = zip(term_columns(design.inner), design.mean, design.sd, strict=True)
        return [_standardised(column, mean, sd) for column, mean, sd in inner]
    if isinstance(design, Columns):
        plain = [TermColumn(name, ast.Name(name)) for name in design.columns]
        return [TermColumn("Intercept", ONE), *plain] if design.intercept else plain
    if isinstance(design, SparseDesign):
        raise DataError(NOT_SPARSE)
    found: dict[str, TermColumn] = {}
    for terms in (design.rhs, *design.extra):
        found = {**{column.name: column for column in _columns_of(terms, design)}, **found}
    return [found[name] for name in design.terms]


def numeric_part(term: Sequence[Factor], levels: Mapping[str, Any], state: Mapping[str, State]) -> ast.expr:
    """The product of the factors of a term that are not categories."""
    return product([tree for factor in term if (tree := _numeric(factor, levels, state)) is not None])


def _numeric(factor: Factor, levels: Mapping[str, Any], state: Mapping[str, State]) -> ast.expr | None:
    """A factor as an expression; None for categories."""
    if factor.kind == "literal":
        return ast.Constant(float(factor.expression))
    found = factor.read()
    if found is None:
        return None if factor.expression in levels else ast.Name(factor.expression)
    return None if found.category is not None else pushed(found.tree, state)


def pushed(tree: ast.expr, state: Mapping[str, State] | None = None) -> ast.expr:
    """An expression with arithmetic in place of ``center`` and ``scale``; what an engine cannot evaluate is refused."""
    state = {} if state is None else state
    if isinstance(tree, ast.Name | ast.Constant):
        return tree
    if isinstance(tree, ast.UnaryOp):
        return ast.UnaryOp(tree.op, pushed(tree.operand, state))
    if isinstance(tree, ast.BinOp) and (type(tree.op) in _ARITHMETIC or isinstance(tree.op, ast.Pow)):
        return ast.BinOp(pushed(tree.left, state), tree.op, pushed(tree.right, state))
    if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name):
        name, inside = tree.func.id, tree.args[0]
        if name == "I":
            return pushed(inside, state)
        if name in Target.FUNCTIONS:
            return ast.Call(tree.func, [pushed(inside, state)], [])
        if name in ("center", "scale"):
            learned = state.get(ast.unparse(tree), (1.0, 0.0, 1.0))
            centred = ast.BinOp(pushed(inside, state), ast.Sub(), ast.Constant(float(learned[1])))
            sd = math.sqrt(learned[2] / max(learned[0] - 1.0, 1.0)) if name == "scale" else 1.0
            return centred if name == "center" else ast.BinOp(centred, ast.Div(), ast.Constant(sd))
    raise FormulaError(f"{ast.unparse(tree)} cannot be evaluated by the engine that holds the table; {_FIX}.")


def _columns_of(terms: Terms, design: Formula) -> list[TermColumn]:
    """The columns of some terms. formulaic codes the categories, given one row for each combination of a term's categories."""
    import pandas as pd

    found = []
    for term in terms.terms:
        parts = {_category(factor): factor for factor in term if _category(factor) in design.levels}
        levels = {name: list(design.levels[name]) for name in parts if name is not None}
        shape = tuple(len(each) for each in levels.values())
        grid = np.indices(shape).reshape(len(levels), math.prod(shape))
        rows = math.prod(shape)
        table = pd.DataFrame(index=range(rows))
        for name in design.columns:
            others = design.levels.get(name)
            codes = grid[list(levels).index(name)] if name in levels else np.zeros(rows, dtype=np.int64)
            table[name] = 1.0 if others is None else pd.Categorical.from_codes(codes, categories=list(others))
        # Numeric factors are 1, so that the values are the products of the codes.
        values: dict[str, Any] = {}
        for factor in terms.factors:
            read = factor.read()
            numeric = _category(factor) not in design.levels
            if numeric:
                values[factor.expression] = pd.Series(1.0, index=table.index)
            else:
                values[factor.expression] = table[factor.expression] if read is None else read.evaluate(table, {}, rows)
        matrix = terms.combine(table, values)
        indices = next(
            found
            for product, found in matrix.model_spec.term_indices.items()
            if {str(factor.expr) for factor in product.factors} == {factor.expression for factor in term}
        )
        scalar = numeric_part(term, design.levels, design.state)
        literal = math.prod(float(factor.expression) for factor in term if factor.kind == "literal")
        for index in indices:
            codes = matrix.iloc[:, index].to_numpy(dtype=np.float64).reshape(shape) / (literal or 1.0)
            found.append(TermColumn(str(matrix.columns[index]), scalar, _separated(codes, levels)))
    return found


def _category(factor: Factor) -> str | None:
    """The column of a factor that may hold categories; None for a number or arithmetic."""
    if factor.kind == "literal":
        return None
    found = factor.read()
    return factor.expression if found is None else found.category


def _separated(table: Any, levels: Mapping[str, Sequence[Any]]) -> tuple[tuple[str, tuple[tuple[Any, float], ...]], ...]:
    """The codes of each categorical column, given the table of their products."""
    if not levels:
        return ()
    top = np.unravel_index(np.abs(table).argmax(), table.shape)
    codes, scale = [], 1.0
    for axis, (name, named) in enumerate(levels.items()):
        line = table[tuple(slice(None) if each == axis else at for each, at in enumerate(top))] / scale
        scale = table[top] if axis == 0 else scale
        codes.append((name, tuple((level, float(code)) for level, code in zip(named, line, strict=True) if code != 0.0)))
    return tuple(codes)


def _standardised(column: TermColumn, mean: float, sd: float) -> TermColumn:
    """A term less its mean, divided by its standard deviation."""
    if mean == 0.0 and sd == 1.0:
        return column
    if column.codes and mean:
        raise FormulaError(
            f"The standardised term {column.name!r} cannot be evaluated by an engine; leave out standardize=True."
        )
    centred = ast.BinOp(column.numeric, ast.Sub(), ast.Constant(mean)) if mean else column.numeric
    return TermColumn(column.name, ast.BinOp(centred, ast.Div(), ast.Constant(sd)), column.codes)


class Target(ABC, Generic[V]):
    """Writes expressions in the language of an engine."""

    FUNCTIONS = ("log", "log2", "log10", "log1p", "exp", "sqrt", "abs")

    @abstractmethod
    def column(self, name: str) -> V:
        """A column as a number."""

    @abstractmethod
    def number(self, value: float) -> V: ...

    @abstractmethod
    def arithmetic(self, sign: str, left: V, right: V) -> V:
        """One of ``+ - * /``."""

    @abstractmethod
    def power(self, base: V, exponent: float) -> V: ...

    @abstractmethod
    def call(self, name: str, value: V) -> V:
        """One of ``FUNCTIONS``."""

    @abstractmethod
    def code(self, name: str, codes: Sequence[tuple[Any, float]]) -> V:
        """The code of a category."""

    def value(self, tree: ast.expr) -> V:
        """An expression from :func:`pushed`."""
        if isinstance(tree, ast.Name):
            return self.column(tree.id)
        if isinstance(tree, ast.Constant):
            return self.number(float(tree.value))  # type: ignore[arg-type]
        if isinstance(tree, ast.UnaryOp):
            value = self.value(tree.operand)
            return self.arithmetic("*", self.number(-1.0), value) if isinstance(tree.op, ast.USub) else value
        if isinstance(tree, ast.BinOp) and isinstance(tree.op, ast.Pow):
            exponent = tree.right.operand if isinstance(tree.right, ast.UnaryOp) else tree.right
            sign = -1.0 if isinstance(tree.right, ast.UnaryOp) and isinstance(tree.right.op, ast.USub) else 1.0
            return self.power(self.value(tree.left), sign * float(exponent.value))  # type: ignore[attr-defined]
        if isinstance(tree, ast.BinOp):
            return self.arithmetic(_ARITHMETIC[type(tree.op)], self.value(tree.left), self.value(tree.right))
        call: Any = tree
        return self.call(call.func.id, self.value(call.args[0]))

    def term(self, column: TermColumn) -> V:
        """A column of ``X``."""
        factors = [self.code(name, codes) for name, codes in column.codes]
        if column.numeric is not ONE or not factors:
            factors.insert(0, self.value(column.numeric))
        whole = factors[0]
        for factor in factors[1:]:
            whole = self.arithmetic("*", whole, factor)
        return whole


class Engine(Target["nw.Expr"]):
    """Expressions of narwhals, for lazy tables of Polars, DuckDB, Spark and others."""

    def column(self, name: str) -> nw.Expr:
        return nw.col(name).cast(nw.Float64())

    def number(self, value: float) -> nw.Expr:
        return nw.lit(value, dtype=nw.Float64())

    def arithmetic(self, sign: str, left: nw.Expr, right: nw.Expr) -> nw.Expr:
        return {"+": left.__add__, "-": left.__sub__, "*": left.__mul__, "/": left.__truediv__}[sign](right)

    def power(self, base: nw.Expr, exponent: float) -> nw.Expr:
        return base * base if exponent == 2 else base**exponent

    def call(self, name: str, value: nw.Expr) -> nw.Expr:
        if name in ("exp", "abs"):
            return value.exp() if name == "exp" else value.abs()
        if name == "log1p":
            value = value + 1.0
        allowed = nw.when(value >= 0).then(value) if name == "sqrt" else nw.when(value > 0).then(value)
        bases = {"log2": 2.0, "log10": 10.0}
        return allowed.sqrt() if name == "sqrt" else allowed.log(bases[name]) if name in bases else allowed.log()

    def code(self, name: str, codes: Sequence[tuple[Any, float]]) -> nw.Expr:
        whole: nw.Expr | None = None
        for level, code in codes:
            one = (nw.col(name) == level).cast(nw.Float64())
            one = one if code == 1.0 else one * code
            whole = one if whole is None else whole + one
        return self.number(0.0) if whole is None else whole


class Sql(Target[str]):
    """SQL text, for DuckDB or Spark."""

    def __init__(self, dialect: Dialect) -> None:
        self.dialect = dialect

    def name(self, name: str) -> str:
        """A name in quotes."""
        mark = '"' if self.dialect == "duckdb" else "`"
        return f"{mark}{name.replace(mark, 2 * mark)}{mark}"

    def literal(self, value: Any) -> str:
        """A text or number as SQL writes it."""
        if isinstance(value, bool | np.bool_):
            return "TRUE" if value else "FALSE"
        if isinstance(value, int | float | np.number):
            return str(int(value)) if isinstance(value, int | np.integer) else self.number(float(value))
        text = (
            str(value).replace("'", "''") if self.dialect == "duckdb" else str(value).replace("\\", "\\\\").replace("'", "\\'")
        )
        return f"'{text}'"

    def column(self, name: str) -> str:
        return f"CAST({self.name(name)} AS DOUBLE)"

    def number(self, value: float) -> str:
        text = repr(float(value)) if "e" in repr(float(value)) else f"{float(value)!r}e0"
        return f"({text})" if value < 0 else text

    def arithmetic(self, sign: str, left: str, right: str) -> str:
        return f"({left} {sign} {right})"

    def power(self, base: str, exponent: float) -> str:
        return f"({base} * {base})" if exponent == 2 else f"POWER({base}, {self.number(exponent)})"

    def call(self, name: str, value: str) -> str:
        if name in ("exp", "abs"):
            return f"{name.upper()}({value})"
        value = f"({value} + 1e0)" if name == "log1p" else value
        function = {"sqrt": "SQRT", "log2": "LOG2", "log10": "LOG10"}.get(name, "LN")
        return f"CASE WHEN {value} {'>=' if name == 'sqrt' else '>'} 0 THEN {function}({value}) END"

    def code(self, name: str, codes: Sequence[tuple[Any, float]]) -> str:
        cases = " ".join(f"WHEN {self.literal(level)} THEN {self.number(code)}" for level, code in codes)
        return f"CASE {self.name(name)} {cases} ELSE 0e0 END" if cases else "0e0"
