"""The sums of a linear fit as SQL, for a database that covey does not reach; and the result of such a query as rows.

:func:`sql_queries` writes two statements. The first counts what would be a mistake. The second computes the sums by client that
:mod:`covey.nodes.lazy` asks an engine for, the means of the columns, which it subtracts, and the number of rows that cannot be
summed. :func:`read_sums` takes the result.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl

from covey.errors import DataError, FormulaError
from covey.nodes.lazy import Aggregate, check_pushed
from covey.nodes.look import own, sum_tree
from covey.problem.problem import Problem, Schema
from covey.tables.design import Formula
from covey.tables.pushdown import Dialect, Sql, TermColumn, columns_in, term_columns
from covey.tables.rows import GroupedData
from covey.tables.sums import rows_from_sums

Categories = Mapping[str, Sequence[Any]]


def complete(draft: Problem, categories: Categories) -> Problem:
    """A draft with the categories of its columns; all other columns hold numbers."""
    check_pushed(draft)
    formula = draft.formula
    if formula is None or formula.response is None:
        raise DataError("The sums need a formula that names the response, such as 'y ~ x + (1 | county)'.")
    if draft.spec.na == "drop" or draft.spec.standardize:
        raise DataError("Leave out na='drop' and standardize=True: the database gives the sums of all rows as they are.")
    names = formula.right.names
    for name in (name for name in categories if name not in names):
        raise DataError(f"The categories of {name!r} are given, but the formula has no such term; leave them out.")
    wrapped = {name for factor in formula.right.factors for name in factor.names()[1]}
    for name in sorted(wrapped - set(categories)):
        raise DataError(f"The column {name!r} holds categories, which must be listed: --categories {name}=a,b,c.")
    sorted_ = {name: sorted(values, key=lambda value: (str(type(value)), value)) for name, values in categories.items()}
    problem = draft.agree(Schema(names, sorted_, None, draft.names_offset))
    for text, *_ in problem.design.unlearned if isinstance(problem.design, Formula) else ():
        raise FormulaError(f"{text} learns from rows, so it cannot be written as one statement; add a column with its values.")
    return problem


def aggregate_of_problem(problem: Problem, centre: Any = None) -> Aggregate:
    """The sums of a problem; without ``centre`` it is zero."""
    terms, formula, spec = term_columns(problem.design), problem.formula, problem.spec
    if formula is None or formula.response is None:
        raise DataError("The sums need a formula that names the response, such as 'y ~ x + (1 | county)'.")
    plain: ast.expr = ast.Name(formula.response.strip("`"))
    response = plain if formula.expression is None else sum_tree(formula.expression)
    if problem.offset is not None or spec.offset is not None:
        offset = sum_tree(problem.offset) if problem.offset is not None else ast.Name(spec.offset or "")
        response = ast.BinOp(response, ast.Sub(), offset)
    values = [term for term in terms if term.constant is None]
    places = {term.name: at + 1 for at, term in enumerate(values)}
    columns = [(0, term.constant) if term.constant is not None else (places[term.name], 1.0) for term in terms]
    whole = (*values, TermColumn("response", response))
    zero = np.zeros(len(whole)) if centre is None else centre
    return Aggregate(tuple(each.name for each in whole), whole, zero, tuple(columns), spec.weights, spec.frequency)


def sql_queries(problem: Problem, dialect: Dialect, table: str) -> tuple[str, str]:
    """The statement that looks for mistakes, and the one that computes the sums.

    >>> from covey.problem.problem import Spec, resolve
    >>> problem = complete(resolve(Spec(formula="y ~ (1 | county)")), {})
    >>> print(sql_queries(problem, "duckdb", "visits")[0])
    SELECT
      COUNT(*) AS "rows",
      SUM(CASE WHEN "county" IS NULL THEN 1 ELSE 0 END) AS "missing county",
      SUM(CASE WHEN "y" IS NULL OR ABS(CAST("y" AS DOUBLE)) > 1.7976931348623157e308 THEN 1 ELSE 0 END) AS "missing y"
    FROM "visits"
    """
    sql, found, spec = Sql(dialect), aggregate_of_problem(problem), problem.spec
    q, source = sql.name, ".".join(sql.name(part) for part in table.split("."))
    ids = [name for name in (spec.cluster, spec.client) if name is not None]
    held = [name for value in found.values for name in columns_in(value.numeric)]
    coded = [name for value in found.values for name, _ in value.codes]
    used = dict.fromkeys([*ids, *coded, *held, *filter(None, (spec.weights, spec.frequency))])
    counts = ["COUNT(*) AS " + q("rows")]
    numbers = {*held, *filter(None, (spec.weights, spec.frequency))}
    for name in used:
        lost = f"{q(name)} IS NULL" + (f" OR {_endless(sql.column(name))}" if name in numbers else "")
        counts.append(f"SUM(CASE WHEN {lost} THEN 1 ELSE 0 END) AS {q('missing ' + name)}")
    look = "SELECT\n  " + ",\n  ".join(counts) + f"\nFROM {source}"

    values = [sql.term(value) for value in found.values]
    every, plain = range(len(values)), spec.weights is None and spec.frequency is None
    z, c = [own(f"z{at}") for at in every], [own(f"c{at}") for at in every]
    times = "1e0" if spec.frequency is None else sql.column(spec.frequency)
    weight = "1e0" if spec.weights is None else sql.column(spec.weights)
    means = ",\n    ".join(f"AVG({value}) AS {centre}" for value, centre in zip(values, c, strict=True))
    wrong = " OR ".join(_wrong(problem, sql, ids, coded, values))
    base = [*map(q, ids), f"CASE WHEN {wrong} THEN 1 ELSE 0 END AS {own('bad')}"]
    base += [f"{value} - {own('centres')}.{c[at]} AS {z[at]}" for at, value in enumerate(values)]
    base += [f"{own('centres')}.{name}" for name in c]
    asked, w = [f"COUNT(*) AS {own('rows')}"], "" if plain else f"{own('weight')} * "
    if not plain:
        n, one = own("times"), own("one")
        base += [f"{times} AS {n}", f"{weight} AS {one}", f"{weight} * {times} AS {own('weight')}"]
        asked = [
            f"SUM({n}) AS {own('rows')}",
            f"SUM(CASE WHEN {one} > 0 THEN {n} ELSE 0 END) AS {own('counted')}",
            f"SUM({own('weight')}) AS {own('weight')}",
            f"SUM(CASE WHEN {one} > 0 THEN {n} * LN({one}) ELSE 0 END) AS {own('logs')}",
        ]
    asked = [f"SUM({own('bad')}) AS {own('bad')}", *asked]
    asked += [f"SUM({w}{name}) AS {own(f's{at}')}" for at, name in enumerate(z)]
    asked += [f"SUM({w}{z[a]} * {z[b]}) AS {own(f's{a}_{b}')}" for a, b in found.pairs()]
    asked += [f"MIN({name}) AS {name}" for name in c]
    # A row of frequency 0 does not count; one whose frequency is missing or negative is counted as bad.
    where = "" if spec.frequency is None else f"\n  WHERE COALESCE({times}, -1e0) <> 0"
    keys = ", ".join(map(q, ids))
    sums = f"WITH {own('centres')} AS (\n  SELECT\n    {means}\n  FROM {source}{where}\n),\n{own('centred')} AS (\n  SELECT\n"
    sums += "    " + ",\n    ".join(base) + f"\n  FROM {source} CROSS JOIN {own('centres')}{where}\n)\nSELECT\n  "
    sums += ",\n  ".join([*map(q, ids), *asked]) + f"\nFROM {own('centred')}" + (f"\nGROUP BY {keys}" if keys else "")
    return look, sums


def _wrong(problem: Problem, sql: Sql, ids: Sequence[str], coded: Sequence[str], values: Sequence[str]) -> list[str]:
    """Conditions on a row that cannot be summed: a sum leaves out null, so that it would go unnoticed."""
    spec, levels = problem.spec, problem.design.levels if isinstance(problem.design, Formula) else {}
    found = [f"{sql.name(name)} IS NULL" for name in ids]
    found += [f"{each} IS NULL OR {_endless(each)}" for each in dict.fromkeys(values)]
    for name in dict.fromkeys([*coded, *levels]):
        known = ", ".join(map(sql.literal, levels[name]))
        found.append(f"{sql.name(name)} IS NULL OR {sql.name(name)} NOT IN ({known})")
    for name in filter(None, (spec.weights, spec.frequency)):
        found.append(f"{sql.column(name)} IS NULL OR {sql.column(name)} < 0 OR {_endless(sql.column(name))}")
    if spec.frequency is not None:
        found.append(f"{sql.column(spec.frequency)} <> FLOOR({sql.column(spec.frequency)})")
    return found


def _endless(value: str) -> str:
    """The condition that a number is infinite or NaN, which DuckDB and Spark order after all others."""
    return f"ABS({value}) > 1.7976931348623157e308"


def read_sums(sums: pl.DataFrame, draft: Problem, categories: Categories) -> tuple[GroupedData, Problem]:
    """The result of the second statement of :func:`sql_queries` as rows with the same products, and the problem."""
    problem = complete(draft, categories)
    found, spec = aggregate_of_problem(problem), problem.spec
    ids = [name for name in (spec.cluster, spec.client) if name is not None]
    width = range(len(found.names))
    mine = ["bad", "rows", *(f"s{a}" for a in width), *(f"s{a}_{b}" for a, b in found.pairs()), *(f"c{a}" for a in width)]
    mine += [] if spec.weights is None and spec.frequency is None else ["counted", "weight", "logs"]
    wanted = [*ids, *map(own, mine)]
    lost, more = [name for name in wanted if name not in sums.columns], [name for name in sums.columns if name not in wanted]
    if lost or more:
        which = f"has no column {lost[0]!r}" if lost else f"has a column {more[0]!r} too many"
        raise DataError(f"The table of sums {which}; it must be the result of covey sql for this formula and its categories.")
    bad = sums.filter(pl.col(own("bad")) != 0)
    if len(bad):
        n = int(bad[own("bad")].sum())
        clients = [] if spec.client is None else bad[spec.client].drop_nulls().to_list()
        where = f" (such as of client {clients[0]!r})" if clients else ""
        rows = "1 row" if n == 1 else f"{n:,} rows"
        what = "a missing or infinite value, an expression without one such as log(0), a category that is not in --categories"
        raise DataError(
            f"{rows}{where} cannot be summed: each has {what}, a negative weight, or a frequency that is no whole number >= 0. "
            "Correct these rows or leave them out, and run the query again."
        )
    numbers = sums.select(wanted[len(ids) :]).cast(pl.Float64).to_numpy()
    if len(sums) == 0 or not np.isfinite(numbers).all():
        raise DataError(
            "The table of sums has no rows, or sums that are missing or infinite; it must be the whole result of one query."
        )
    centre = sums.select(own(f"c{a}") for a in width).cast(pl.Float64).to_numpy()
    if not (centre == centre[0]).all():
        raise DataError("The table of sums has several centres of one column; it must be the result of one query.")
    products = aggregate_of_problem(problem, centre[0]).products(sums)
    client, cluster = (None if name is None else sums[name] for name in (spec.client, spec.cluster))
    return rows_from_sums(products, client, cluster, problem.terms, nested=bool(spec.nested)), problem
