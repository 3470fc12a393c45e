"""The first query to a table that an engine holds: categories, means, and mistakes such as missing values.

One pass over the table, grouped by its categorical columns if the formula has any, answers everything that must be known before
the sums of products can be asked for (:mod:`covey.nodes.lazy`). If a value cannot be used, a further small query finds a client
that has it, so that the error names the column, the client and the number of rows.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import narwhals as nw
import numpy as np
import polars as pl

from covey._typing import Floats
from covey.errors import DataError, FormulaError, listing, unknown_column
from covey.problem.problem import Problem
from covey.tables.design import Formula
from covey.tables.formula import Terms
from covey.tables.pushdown import Engine, TermColumn, columns_in, numeric_part, pushed
from covey.tables.values import Dropped

Lazy = nw.LazyFrame[Any]
_ENGINE = Engine()
_HOT, _GROUPS = "POLARS_HOT_TABLE_SIZE", 1 << 16


def own(name: str) -> str:
    """The name of a column of covey's own in a query; the table may have a column that is called ``name``."""
    return f"covey_{name}"


_ROWS, _USABLE = own("rows"), own("usable")


def collected(query: Lazy, rows: int = 0) -> pl.DataFrame:
    """The result of a query, as a polars frame; ``rows`` of the table are grouped by client."""
    polars = query.implementation.is_polars()
    options = {"engine": "streaming"} if polars else {}
    try:
        with _grouping(rows if polars else 0):
            found: pl.DataFrame = query.collect("polars", **options).to_native()
    except Exception as problem:  # every engine has errors of its own
        reason = (str(problem).strip().splitlines() or [type(problem).__name__])[0].rstrip(".")
        raise DataError(f"The engine that holds the table cannot answer: {reason}.") from None
    return found


@contextmanager
def _grouping(rows: int) -> Iterator[None]:
    """Let polars add up a group for every 16 rows as it reads them.

    Its default is a few thousand groups. The rows of all others stay in memory until the end: 11 GB for 1e8 rows of a million
    clients, and 0.8 GB with this setting. The numbers are the same.
    """
    groups = min(1 << max(rows // 16, 1).bit_length(), 1 << 24)
    if groups <= _GROUPS or _HOT in os.environ:
        yield
        return
    os.environ[_HOT] = str(groups)
    try:
        _reload()
        yield
    finally:
        del os.environ[_HOT]
        _reload()


def _reload() -> None:
    """Let polars read its settings again; early versions read them for every query."""
    reload = getattr(pl.Config, "reload_env_vars", None)
    if reload is not None:
        reload()


def total(condition: nw.Expr) -> nw.Expr:
    """The number of rows where a condition is true; null counts as false."""
    return nw.when(condition).then(nw.lit(1, dtype=nw.Int64())).otherwise(nw.lit(0, dtype=nw.Int64())).sum()


def sum_tree(terms: Terms) -> ast.expr:
    """The sum of the terms of a response or an offset."""
    whole, *others = [numeric_part(term, {}, {}) for term in terms.terms]
    for other in others:
        whole = ast.BinOp(whole, ast.Add(), other)
    return whole


@dataclass(frozen=True)
class LazyRows:
    """A lazy table and the problem that reads it.

    Attributes
    ----------
    table : the table
    problem : a draft, or the problem of a fitted model whose terms new rows have
    """

    table: Lazy
    problem: Problem

    @cached_property
    def schema(self) -> Mapping[str, Any]:
        return dict(self.table.collect_schema())

    def kind(self, name: str) -> Any:
        """The type of a column; if it is not there, the error suggests a similar name."""
        if name not in self.schema:
            raise unknown_column(name, list(self.schema))
        return self.schema[name]

    def is_number(self, name: str) -> bool:
        kind = self.kind(name)
        return bool(kind.is_numeric() or kind == nw.Boolean)

    @cached_property
    def response(self) -> ast.expr:
        """The response less the offset."""
        formula = self.problem.formula
        if formula is None or formula.response is None:
            raise DataError("A lazy table needs a formula that names the response, such as 'y ~ x + (1 | county)'.")
        plain = formula.response.strip("`")
        if plain in self.schema or formula.expression is None:
            self.kind(plain)
            tree: ast.expr = ast.Name(plain)
        else:
            if formula.counts or len(formula.expression.terms) != 1:
                raise FormulaError(f"The response {formula.response!r} must be one column or expression.")
            tree = sum_tree(formula.expression)
        offset = self.offset
        return tree if offset is None else ast.BinOp(tree, ast.Sub(), offset)

    @property
    def offset(self) -> ast.expr | None:
        problem = self.problem
        if problem.offset is not None and problem.spec.offset not in self.schema:
            return sum_tree(problem.offset)
        return None if problem.spec.offset is None else ast.Name(problem.spec.offset)

    @cached_property
    def ids(self) -> list[str]:
        """The columns of clients and clusters."""
        spec = self.problem.spec
        if spec.client is None and spec.cluster is not None:
            raise DataError("Clusters were given without clients; name the column of the clients with client=.")
        named = [name for name in (spec.cluster, spec.client) if name is not None]
        for name in named:
            self.kind(name)
        return named

    @cached_property
    def terms(self) -> Terms:
        """All terms to the right of ``~``."""
        formula = self.problem.formula
        if formula is None:
            raise DataError("A lazy table needs a formula that names the response, such as 'y ~ x + (1 | county)'.")
        return formula.right

    @cached_property
    def categorical(self) -> list[str]:
        """The columns of terms that hold categories."""
        wrapped = {name for factor in self.terms.factors for name in factor.names()[1]}
        return [name for name in self.terms.names if name in wrapped or not self.is_number(name)]

    @cached_property
    def numbers(self) -> list[str]:
        """The columns that are read as numbers."""
        spec, trees = self.problem.spec, [*self.parts, self.response]
        named = [*(name for tree in trees for name in columns_in(tree)), spec.weights, spec.frequency]
        found = list(dict.fromkeys(name for name in named if name is not None))
        for name in found:
            if not self.is_number(name):
                raise DataError(
                    f"Column {name!r} holds {str(self.kind(name)).lower()} values, not numbers; name it in a formula to code "
                    "its categories, or convert it."
                )
        return found

    @cached_property
    def parts(self) -> list[ast.expr]:
        """The numeric parts of all terms, each once, with arguments of ``center`` and ``scale`` as they are."""
        levels = dict.fromkeys(self.categorical)
        parts = [numeric_part(term, levels, {}) for term in self.terms.terms]
        parts += [pushed(transform.argument) for _, transform in self.terms.transforms.values()]
        return list({ast.dump(tree): tree for tree in parts if not isinstance(tree, ast.Constant)}.values())

    @property
    def scales(self) -> bool:
        """Whether variances are needed."""
        scaled = (call.name == "scale" for _, call in self.terms.transforms.values())
        return bool(self.problem.spec.standardize) or any(scaled)

    # Conditions on rows

    def missing(self, name: str) -> nw.Expr:
        absent = nw.col(name).is_null()
        return absent | nw.col(name).is_nan() if self.kind(name).is_float() else absent

    @cached_property
    def used(self) -> list[str]:
        """All columns that the problem reads."""
        return list(dict.fromkeys([*self.ids, *self.categorical, *self.numbers]))

    @cached_property
    def usable(self) -> Lazy:
        """The rows that count: of positive frequency, and without missing values if these are to be dropped."""
        spec, table = self.problem.spec, self.table
        if spec.na == "drop":
            for name in self.used:
                table = table.filter(~self.missing(name))
        return table if spec.frequency is None else table.filter(nw.col(spec.frequency) > 0)

    def mistakes(self) -> list[_Mistake]:
        """What must not occur in any row, in the order in which it is reported."""
        spec, found, drop = self.problem.spec, list[_Mistake](), ", or drop such rows with na='drop' (--na drop)"
        leave = f"leave the rows out{drop}"
        for name, what in zip(self.ids, ("cluster", "client")[2 - len(self.ids) :], strict=True):
            found.append(_Mistake(self.missing(name), f"have no {what} id in column {name!r}; fill the column or {leave}"))
        for name in self.categorical:
            found.append(_Mistake(self.missing(name), f"have no category in column {name!r}; fill it or {leave}"))
        fill = "fill the values or leave the rows out"
        for name in self.numbers:
            found.append(_Mistake(self.missing(name), f"have no value (NaN or null) in column {name!r}; {fill}{drop}"))
            if self.kind(name).is_float():
                finite = nw.col(name).is_finite() | self.missing(name)
                found.append(_Mistake(~finite, f"have an infinite value (inf) in column {name!r}; {fill}"))
        for tree in [*self.parts, self.response]:
            if not isinstance(tree, ast.Name | ast.Constant):
                value, shown = _ENGINE.value(tree), ast.unparse(tree)
                whole = nw.when(value.is_finite()).then(nw.lit(False)).otherwise(nw.lit(True))
                found.append(_Mistake(whole, f"have no finite value of {shown!r}; {fill}"))
        if spec.weights is not None:
            found.append(
                _Mistake(nw.col(spec.weights) < 0, f"have a negative weight in column {spec.weights!r}; weights must be >= 0")
            )
        if spec.frequency is not None:
            count = _ENGINE.column(spec.frequency)
            odd = (count < 0) | (count != count.floor())
            what = f"have a frequency in column {spec.frequency!r} that is no whole number >= 0"
            found.append(_Mistake(odd, f"{what} (weights= takes precisions)", everywhere=True))
        return found

    def look(self) -> Look:
        """Ask for categories, means and mistakes, in one query; raise an error if there are mistakes."""
        mistakes, spec = self.mistakes(), self.problem.spec
        drop = spec.na == "drop"
        complete = [~self.missing(name) for name in self.used] if drop else []
        counts = complete if spec.frequency is None else [*complete, nw.col(spec.frequency) > 0]
        asked = [nw.len().alias(_ROWS), (total(_all(counts)) if counts else nw.len()).alias(_USABLE)]
        for at, mistake in enumerate(mistakes):
            where = [mistake.condition] if mistake.everywhere else [mistake.condition, *counts]
            asked.append(total(_all(where)).alias(own(f"mistake_{at}")))
        if drop:
            asked += [total(self.missing(name)).alias(own(f"missing_{name}")) for name in self.used]
            asked.append(total(_all(complete)).alias(own("complete")))
        if spec.weights is not None:
            asked.append(_if(counts, _ENGINE.column(spec.weights)).sum().alias(own("weight")))
        for at, tree in enumerate([*self.parts, self.response]):
            value = _if(counts, _ENGINE.value(tree))
            statistics = {"mean": value.mean(), "low": value.min(), "high": value.max()}
            statistics |= {"variance": value.var(ddof=0)} if self.scales else {}
            asked += [each.alias(own(f"{what}_{at}")) for what, each in statistics.items()]
        table = self.table
        query = table.group_by(*self.categorical).agg(*asked) if self.categorical else table.select(*asked)
        found = Look(self, collected(query))
        found.refuse(mistakes)
        return found

    def example(self, condition: nw.Expr, *, everywhere: bool = False) -> str:
        """For an error message, the smallest id of a client that has rows where a condition is true, or of their cluster.

        ``everywhere`` if the rows may be left out otherwise, such as by their frequency.
        """
        if not self.ids:
            return ""
        rows = (self.table if everywhere else self.usable).filter(condition)
        smallest = collected(rows.select(*(nw.col(name).min() for name in self.ids))).row(0)
        for what, value in zip(("client", "cluster"), reversed(smallest), strict=False):
            if value is not None:
                return f" (such as {what} {value!r})"
        return ""


@dataclass(frozen=True)
class _Mistake:
    """A condition that no row may fulfil, and what to say of rows that do; ``everywhere`` if it concerns rows left out too."""

    condition: nw.Expr
    text: str
    everywhere: bool = False


@dataclass(frozen=True)
class Look:
    """The answer to the first query: one row for each combination of categories, or one for the whole table."""

    rows: LazyRows
    found: pl.DataFrame

    def refuse(self, mistakes: Sequence[_Mistake]) -> None:
        """Raise an error for the first mistake that occurs."""
        if not self.found[_ROWS].sum():
            raise DataError("The table has no rows; covey needs at least one.")
        for at, mistake in enumerate(mistakes):
            count = int(self.found[own(f"mistake_{at}")].sum())
            if count:
                n = f"{count:,} rows" if count > 1 else "1 row"
                where = self.rows.example(mistake.condition, everywhere=mistake.everywhere)
                text = mistake.text.replace("have ", "has ", 1) if count == 1 else mistake.text
                raise DataError(f"{n}{where} {text}.")
        if not self.found[_USABLE].sum():
            if self.dropped is not None and self.dropped.rows == self.dropped.of:
                worst = max(self.dropped.columns.items(), key=lambda each: each[1])
                raise DataError(f"Every row has a missing value ({worst[0]!r} in {worst[1]} rows), so na='drop' leaves no row.")
            raise DataError("Every frequency is 0; at least one row must count.")
        if self.rows.problem.spec.weights is not None and not self.found[own("weight")].sum():
            raise DataError("All weights are zero; give at least one row a positive weight.")

    @property
    def n_rows(self) -> int:
        """The number of rows of the table."""
        return int(self.found[_ROWS].sum())

    @property
    def dropped(self) -> Dropped | None:
        """The rows with missing values that are left out."""
        if self.rows.problem.spec.na != "drop":
            return None
        rows, used = int(self.found[_ROWS].sum()), self.rows.used
        columns = {name: int(self.found[own(f"missing_{name}")].sum()) for name in sorted(used)}
        return Dropped(rows - int(self.found[own("complete")].sum()), rows, columns)

    def frame(self) -> pl.DataFrame:
        """A small table with the same types and categories, from which a draft is completed."""
        known = self.found.filter(pl.col(_USABLE) > 0)
        numbers = {name: pl.Series([1.0] * len(known)) for name in self.rows.schema if name not in self.rows.categorical}
        return pl.DataFrame(
            {name: known[name] if name in self.rows.categorical else numbers[name] for name in self.rows.schema}
        )

    def refuse_new_categories(self, design: Formula) -> None:
        """Raise an error for categories that training did not see."""
        for name, levels in design.levels.items():
            new = sorted((value for value in self.frame()[name].unique().to_list() if value not in levels), key=str)
            if new:
                where = self.rows.example(nw.col(name) == new[0])
                raise DataError(
                    f"Column {name!r} has the category {new[0]!r}{where}, which training did not see; the known ones are "
                    f"{listing(list(levels))}."
                )

    def statistics(self, tree: ast.expr, codes: Floats | None = None) -> tuple[float, float, float, float]:
        """Mean, variance, smallest and largest value of an expression, times a code for each combination of categories.

        The variance is asked for only if something is scaled; else it is that between combinations of categories.
        """
        known = self.found.filter(pl.col(_USABLE) > 0)
        n, code = known[_USABLE].to_numpy().astype(np.float64), np.ones(len(known)) if codes is None else codes
        if isinstance(tree, ast.Constant):
            value = np.full(len(known), float(tree.value))  # type: ignore[arg-type]
            mean, variance, low, high = value, 0.0 * value, value, value
        else:
            at = [ast.dump(each) for each in [*self.rows.parts, self.rows.response]].index(ast.dump(tree))
            mean, low, high, variance = (
                known[own(f"{what}_{at}")].cast(pl.Float64).fill_null(0.0).to_numpy()
                if own(f"{what}_{at}") in known.columns
                else np.zeros(len(known))
                for what in ("mean", "low", "high", "variance")
            )
        whole = float(n @ (code * mean) / n.sum())
        spread = float(n @ (code**2 * variance + (code * mean - whole) ** 2) / n.sum())
        ends = np.concatenate([code * low, code * high])
        return whole, spread, float(ends.min()), float(ends.max())

    def codes(self, column: TermColumn) -> Floats:
        """The product of a term's codes, for each combination of categories."""
        known = self.found.filter(pl.col(_USABLE) > 0)
        whole = np.ones(len(known))
        for name, codes in column.codes:
            code = dict(codes)
            whole *= np.array([code.get(value, 0.0) for value in _plain(known[name])])
        return whole


def _plain(values: pl.Series) -> list[Any]:
    return (values.cast(pl.String) if isinstance(values.dtype, pl.Categorical | pl.Enum) else values).to_list()


def _all(conditions: Sequence[nw.Expr]) -> nw.Expr:
    whole, *others = conditions
    for other in others:
        whole = whole & other
    return whole


def _if(conditions: Sequence[nw.Expr], value: nw.Expr) -> nw.Expr:
    """The value where all conditions are true, else null."""
    return nw.when(_all(conditions)).then(value) if conditions else value
