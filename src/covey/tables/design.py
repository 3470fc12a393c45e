"""How columns become terms: numeric columns as they are, or a formula.

A design remembers what prediction needs (column names, categories) in plain values, so that it can be saved as
JSON. Formulas are parsed by formulaic but evaluated only if every piece is a column, a number, arithmetic or
one of ``FUNCTIONS``: a formula that comes with a model from elsewhere cannot run code.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import narwhals as nw
import numpy as np

from covey._typing import Anything, Floats
from covey.errors import DataError, FormulaError, ModelError, listing, unknown_column

if TYPE_CHECKING:
    import pandas as pd

Frame = Any  # an eager narwhals DataFrame of whichever library the user works with

FUNCTIONS = ("log", "log2", "log10", "log1p", "exp", "sqrt", "abs", "C", "I")
CONTEXT = {"log1p": np.log1p, "sqrt": np.sqrt, "abs": np.abs}
_ARITHMETIC = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.Constant, ast.Load)


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
    """The right-hand side of a formula, with the categories it met in training."""

    rhs: str
    terms: tuple[str, ...]
    columns: tuple[str, ...]
    levels: Mapping[str, Sequence[Any]]

    @classmethod
    def learn(cls, rhs: str, frame: Frame) -> Formula:
        columns, categorical = _inspect(rhs, frame)
        levels = {name: _levels(frame, name) for name in columns if name in categorical}
        return cls.of(rhs, columns, levels)

    @classmethod
    def of(cls, rhs: str, columns: Sequence[str], levels: Mapping[str, Sequence[Any]]) -> Formula:
        """For columns whose categories are known, without any data."""
        import pandas as pd

        # One row is enough to see which terms a formula makes of its categories.
        row = {
            name: pd.Categorical(list(levels[name])[:1] or [None], list(levels[name])) if name in levels else [1.0]
            for name in columns
        }
        terms = tuple(str(name) for name in _evaluate(rhs, pd.DataFrame(row, index=[0])).columns)
        if not terms:
            raise FormulaError(f"The formula {rhs!r} has no terms; write at least '1' for an intercept.")
        return cls(rhs, terms, tuple(columns), levels)

    def blocks(self, frame: Frame) -> list[Anything]:
        matrix = self._model_matrix(frame)
        return [matrix[name].to_numpy(dtype=np.float64) for name in matrix.columns]

    def to_json(self) -> dict[str, Any]:
        levels = {name: list(values) for name, values in self.levels.items()}
        return {
            "kind": "formula",
            "rhs": self.rhs,
            "terms": list(self.terms),
            "columns": list(self.columns),
            "levels": levels,
        }

    def _model_matrix(self, frame: Frame) -> pd.DataFrame:
        import pandas as pd

        table = {name: self._column(frame, name) for name in self.columns}
        return _evaluate(self.rhs, pd.DataFrame(table, index=range(len(frame))))

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


def design_from_json(document: Mapping[str, Any]) -> Columns | Formula | Scaled:
    """Rebuild a design; a formula is inspected again, whoever wrote it."""
    if document["kind"] == "scaled":
        inner = plain_design_from_json(document["inner"])
        mean, sd = (tuple(float(value) for value in document[name]) for name in ("mean", "sd"))
        if not len(mean) == len(sd) == len(inner.terms) or not np.isfinite(mean).all() or not (np.array(sd) > 0).all():
            raise ModelError("The model is damaged: its means and standard deviations do not fit its terms; fit it again.")
        return Scaled(inner, mean, sd)
    return plain_design_from_json(document)


def plain_design_from_json(document: Mapping[str, Any]) -> Columns | Formula:
    """The same, of terms as they are."""
    if document["kind"] == "columns":
        return Columns(tuple(document["columns"]), bool(document["intercept"]))
    check_formula(document["rhs"])
    return Formula(document["rhs"], tuple(document["terms"]), tuple(document["columns"]), dict(document["levels"]))


def split_formula(text: str) -> tuple[str | None, str]:
    """``"y ~ x"`` into ``("y", "x")``; a right-hand side alone into ``(None, "x")``.

    >>> split_formula("log(radon) ~ floor + uranium")
    ('log(radon)', 'floor + uranium')
    """
    sides = [side.strip() for side in text.split("~")]
    if len(sides) > 2 or not sides[-1]:
        raise FormulaError(f"The formula {text!r} must read 'response ~ terms', with one '~' and at least one term.")
    return (sides[0] or None, sides[1]) if len(sides) == 2 else (None, sides[0])


def response(lhs: str, frame: Frame) -> Any:
    """The left-hand side of a formula: a column as it is, or an expression such as ``log(radon)``."""
    plain = lhs.strip("`")
    if plain in frame.columns:
        return frame.get_column(plain).to_native()
    if re.fullmatch(r"\w+", plain):
        raise unknown_column(plain, frame.columns)
    import pandas as pd

    columns, categorical = _inspect(lhs, frame)
    if categorical:
        raise FormulaError(f"The response {lhs!r} must be numeric; {listing(categorical)} holds categories.")
    values = _evaluate(f"0 + {lhs}", pd.DataFrame({name: numeric(frame, name) for name in columns}))
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


def _inspect(rhs: str, frame: Frame) -> tuple[tuple[str, ...], set[str]]:
    """The columns a formula needs, and those of them that are categories."""
    names: list[str] = []
    alone: set[str] = set()
    categories: set[str] = set()
    numbers: set[str] = set()
    for expression, is_column in check_formula(rhs):
        used, wrapped = ([expression], set()) if is_column else _names(expression)
        names += [name for name in used if name not in names]
        categories |= wrapped
        (alone if is_column else numbers).update(set(used) - wrapped)
    text = {name for name in names if not _is_number(column(frame, name))}
    for name in sorted(text - categories):
        _refuse_broken_numbers(frame, name)
    if "Intercept" in names:
        raise FormulaError(f"The column 'Intercept' in {rhs!r} has the name of covey's own intercept; rename it.")
    clash = sorted((categories & (alone | numbers)) | (text & numbers))
    if clash:
        raise FormulaError(f"Column {clash[0]!r} is used both as a category and as a number in {rhs!r}; add a copy of it.")
    return tuple(names), text | categories


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


def check_formula(rhs: str) -> list[tuple[str, bool]]:
    """The factors of a formula and whether each is a column; any other is made of allowed pieces only."""
    from formulaic import Formula as Parsed

    if re.search(r"(^|[\s+(*:-])\.($|[\s+)*:-])", rhs):
        raise FormulaError(f"The formula {rhs!r} uses '.' for all columns, which is not supported; name the columns.")
    try:
        parsed = Parsed(rhs)
        if type(parsed).__name__ != "SimpleFormula":
            raise FormulaError(f"The formula {rhs!r} has several parts; write one, without '|' or a second '~'.")
        factors = [factor for term in parsed for factor in term.factors]
    except FormulaError:
        raise
    except Exception as problem:  # formulaic has no common base class for its parser's errors
        reason = re.sub(r"\x1b\[[0-9;]*m", "", str(problem)).strip().splitlines() or ["it cannot be parsed"]
        raise FormulaError(f"The formula {rhs!r} cannot be read: {reason[0]}") from None
    for factor in factors:
        if factor.eval_method.value == "python":
            _refuse_code(factor.expr, rhs)
    used = [factor for factor in factors if factor.eval_method.value != "literal"]
    return [(str(factor.expr), factor.eval_method.value == "lookup") for factor in used]


def _refuse_code(expression: str, rhs: str) -> None:
    try:
        tree = ast.parse(expression, mode="eval")
    except SyntaxError:
        raise FormulaError(f"The term {expression!r} of {rhs!r} cannot be read; rename columns that need quotes.") from None
    for node in _nodes(tree, rhs):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow) and not _is_modest(node):
            raise FormulaError(f"The power {ast.unparse(node)!r} in {rhs!r} must be of a column, to a number of at most 20.")
        if isinstance(node, ast.Constant) and not isinstance(node.value, int | float):
            raise FormulaError(f"The constant {node.value!r} in {rhs!r} is not a number.")
        if not isinstance(node, (*_ARITHMETIC, ast.Name)):
            raise FormulaError(
                f"{ast.unparse(node)!r} in {rhs!r} is not supported; terms are columns, numbers, arithmetic and "
                f"the functions {', '.join(FUNCTIONS)}."
            )


def _is_modest(power: ast.BinOp) -> bool:
    """Whether a power can be computed in no time: numbers to the power of numbers can fill the memory."""
    exponent = power.right.operand if isinstance(power.right, ast.UnaryOp) else power.right
    small = isinstance(exponent, ast.Constant) and isinstance(exponent.value, int | float) and abs(exponent.value) <= 20
    return small and any(isinstance(node, ast.Name) for node in ast.walk(power.left))


def _nodes(tree: ast.AST, rhs: str) -> Iterator[ast.AST]:
    """All nodes but the calls to known functions, whose arguments are looked at instead."""
    pending = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Call):
            if not isinstance(node.func, ast.Name) or node.func.id not in FUNCTIONS or node.keywords or len(node.args) != 1:
                raise FormulaError(
                    f"{ast.unparse(node)!r} in {rhs!r} is not supported; the functions, each of one argument, are "
                    f"{', '.join(FUNCTIONS)}."
                )
            if _is_c(node) and not isinstance(node.args[0], ast.Name):
                raise FormulaError(f"{ast.unparse(node)!r} in {rhs!r} must name one column.")
            pending += node.args
            continue
        yield node
        pending += ast.iter_child_nodes(node)


def _names(expression: str) -> tuple[list[str], set[str]]:
    """The columns in an expression, and those inside ``C()``."""
    tree = ast.parse(expression, mode="eval")
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    functions = {id(call.func) for call in calls}
    used = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and id(node) not in functions]
    wrapped = {call.args[0].id for call in calls if _is_c(call) and isinstance(call.args[0], ast.Name)}
    return used, wrapped


def _is_c(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Name) and call.func.id == "C"


def _evaluate(rhs: str, table: pd.DataFrame) -> pd.DataFrame:
    from formulaic import Formula as Parsed

    try:
        with np.errstate(all="ignore"):
            matrix = Parsed(rhs).get_model_matrix(table, na_action="ignore", context=CONTEXT, output="pandas")
    except Exception as problem:  # as above: no common base class
        raise FormulaError(f"The formula {rhs!r} cannot be evaluated: {problem}") from None
    return matrix


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
