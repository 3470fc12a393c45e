"""A site's table that an engine holds: files that are scanned, or a table of DuckDB.

A linear fit needs sums by client only. The engine computes them, the site's node holds them, and the rules of the site are
checked on them. For any other fit the node reads the columns that the fit uses, as if the table were a file.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import narwhals as nw
import polars as pl

from covey.errors import FormulaError, unknown_column
from covey.nodes.lazy import MOST_COLUMNS, as_lazy, read_lazy
from covey.nodes.look import Lazy, LazyRows, collected
from covey.problem.problem import Problem, as_frame
from covey.problem.rows import Arrays, read_part, read_rows, under_clusters, usable_rows, used_columns
from covey.tables.rows import GroupedData

_BY_SUMS = ("auto", "sweep")  # solvers that the operator may name for a fit from sums; some others draw rows


def table_for(table: Any, problem: Problem, *, private: bool = False) -> Any:
    """What a site fits a problem from: the table itself, lazy if sums by client suffice; else its used columns, read."""
    lazy = as_lazy(table)
    if lazy is None or (not private and _sums_suffice(lazy, problem)):
        return table if lazy is None else lazy
    names, response = list(lazy.collect_schema()), None if problem.formula is None else problem.formula.response
    for name in used_columns(problem):
        if name not in names and name != response:
            raise unknown_column(name, names)
    return collected(lazy.select(*(name for name in used_columns(problem) if name in names)))


def _sums_suffice(table: Lazy, problem: Problem) -> bool:
    """Whether a fit needs no more than sums by client that an engine can compute, and the rules of a site no more either.

    Weights and an offset leave, by difference, in sums that a fit without them does not need, so the rules look at the rows.
    """
    spec, formula = problem.spec, problem.formula
    if formula is None or formula.right.transforms or not problem.loss.quadratic or spec.solver not in _BY_SUMS:
        return False
    if spec.weights is not None or spec.trials is not None or spec.standardize or problem.names_offset:
        return False
    rows = LazyRows(table, problem)
    try:
        _ = rows.parts, rows.response
    except FormulaError:  # a function that the engine does not have
        return False
    return problem.draft or len(problem.terms) < MOST_COLUMNS


def draft_rows(table: Any, draft: Problem) -> tuple[GroupedData, Problem]:
    """The rows, or sums by client, of a draft at one site alone, and the completed draft."""
    draft = draft if draft.spec.sparse else replace(draft, spec=replace(draft.spec, sparse=False))
    found = table_for(table, draft)
    return read_lazy(found, draft) if isinstance(found, nw.LazyFrame) else read_rows(found, draft)


def counted_rows(table: Any, problem: Problem) -> Any:
    """The rows that count of a table from :func:`table_for`; a lazy table stays lazy."""
    if isinstance(table, nw.LazyFrame):
        return LazyRows(table, problem).usable
    return usable_rows(as_frame(table), problem, Arrays())[0]


def site_part(table: Any, problem: Problem, clusters: pl.Series, *, learning: bool = False) -> GroupedData:
    """The rows, or sums by client, of a site, from :func:`table_for`, under the clusters of all sites."""
    if isinstance(table, nw.LazyFrame):
        return under_clusters(read_lazy(table, problem)[0], clusters)
    return read_part(table, problem, clusters, learning=learning)
