"""Tables that an engine holds: a linear fit from two queries, whatever the number of rows.

:func:`read_lazy` takes a lazy table of Polars, DuckDB, Spark or Ibis, which narwhals reads. The first query looks at the
table (:mod:`covey.nodes.look`). The second is one aggregate by client: sums of products of centred columns. Only these sums
reach this process. They become rows with the same products (:mod:`covey.tables.sums`), so the fit itself is
that of a table in memory.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import narwhals as nw
import numpy as np
import polars as pl

from covey._typing import Floats
from covey.errors import DataError, FormulaError
from covey.nodes.look import Lazy, LazyRows, Look, collected, own
from covey.problem.problem import Problem, Schema
from covey.problem.rows import columns_of
from covey.tables.design import Formula
from covey.tables.pushdown import Engine, TermColumn, product, pushed, term_columns
from covey.tables.rows import GroupedData
from covey.tables.scaling import Scale, Scaled
from covey.tables.sums import Products, rows_from_sums

MOST_COLUMNS = 64  # terms and response of one query, which has a sum for each pair of them
_ENGINE = Engine()


def as_lazy(table: Any) -> Lazy | None:
    """A lazy table as narwhals wraps it; None for anything else."""
    try:
        found = nw.from_native(table, pass_through=True)
    except Exception:  # narwhals refuses some tables, whose mistakes are reported elsewhere
        return None
    return found if isinstance(found, nw.LazyFrame) else None


@dataclass(frozen=True)
class Aggregate:
    """The second query: sums by client of products of these columns, less their centres, with weights.

    Attributes
    ----------
    names : names of the centred columns; the last one is the response
    values : expressions of the columns
    centre : (columns,) what is subtracted
    columns : for each term the place of its column and a factor, as in :class:`.Products`
    weights, frequency : names of these columns, or None
    """

    names: tuple[str, ...]
    values: tuple[TermColumn, ...]
    centre: Floats
    columns: tuple[tuple[int, float], ...]
    weights: str | None
    frequency: str | None

    def pairs(self) -> list[tuple[int, int]]:
        """The pairs of columns whose products are summed."""
        return [(a, b) for a in range(len(self.names)) for b in range(a, len(self.names))]

    def on(self, table: Lazy, ids: Sequence[str]) -> Lazy:
        """The query on a table; ``ids`` are the columns of clusters and clients."""
        one = nw.lit(1.0, dtype=nw.Float64())
        times = one if self.frequency is None else _ENGINE.column(self.frequency)
        weight = one if self.weights is None else _ENGINE.column(self.weights)
        plain = self.weights is None and self.frequency is None
        z = [own(f"z{at}") for at in range(len(self.names))]
        base = [nw.col(name) for name in ids]
        for name, value, centre in zip(z, self.values, self.centre.tolist(), strict=True):
            base.append((_ENGINE.term(value) - centre if centre else _ENGINE.term(value)).alias(name))
        asked = [nw.len().cast(nw.Float64()).alias(own("rows"))]
        if not plain:
            base += [times.alias(own("times")), weight.alias(own("one")), (weight * times).alias(own("weight"))]
            there = nw.col(own("one")) > 0
            asked = [
                nw.col(own("times")).sum().alias(own("rows")),
                nw.when(there).then(nw.col(own("times"))).otherwise(nw.lit(0.0)).sum().alias(own("counted")),
                nw.col(own("weight")).sum(),
                (nw.when(there).then(nw.col(own("one"))).otherwise(one).log() * nw.col(own("times"))).sum().alias(own("logs")),
            ]
        w = None if plain else nw.col(own("weight"))
        for a, name in enumerate(z):
            asked.append((nw.col(name) if w is None else w * nw.col(name)).sum().alias(own(f"s{a}")))
        for a, b in self.pairs():
            both = nw.col(z[a]) * nw.col(z[b])
            asked.append((both if w is None else w * both).sum().alias(own(f"s{a}_{b}")))
        rows = table.select(*base)
        return rows.group_by(*ids).agg(*asked) if ids else rows.select(*asked)

    def products(self, found: pl.DataFrame) -> Products:
        """The sums that the query returned."""
        q = 1 + len(self.names)

        def column(name: str) -> Floats:
            return found[own(name)].cast(pl.Float64).fill_null(0.0).to_numpy()

        rows = column("rows")
        plain = self.weights is None and self.frequency is None
        counted, weight, logs = (rows, rows, np.zeros(len(rows))) if plain else map(column, ("counted", "weight", "logs"))
        gram = np.empty((len(found), q, q))
        gram[:, 0, 0] = weight
        for a in range(q - 1):
            gram[:, 0, a + 1] = gram[:, a + 1, 0] = column(f"s{a}")
        for a, b in self.pairs():
            gram[:, a + 1, b + 1] = gram[:, b + 1, a + 1] = column(f"s{a}_{b}")
        centre = np.concatenate([[0.0], self.centre])
        return Products(gram, np.rint(rows).astype(np.int64), counted, weight, logs, centre, self.columns)


def read_lazy(table: Lazy, problem: Problem) -> tuple[GroupedData, Problem]:
    """Ask an engine for the sums by client that a linear fit needs, and complete the draft.

    Parameters
    ----------
    table : a lazy table, from :func:`as_lazy`
    problem : the draft from :func:`resolve`; or the problem of a model whose terms new rows have

    Returns
    -------
    Rows with the same sums of products as the table's rows, and the problem.

    Examples
    --------
    >>> from covey.datasets import load_radon
    >>> from covey.problem.problem import Spec, resolve
    >>> homes = as_lazy(load_radon().lazy())
    >>> data, problem = read_lazy(homes, resolve(Spec(formula="log_radon ~ floor + (1 | state/county)")))
    >>> data.n_clients, int(data.rows_per_client.sum()), data.terms
    (470, 11929, ('Intercept', 'floor'))
    """
    check_pushed(problem)
    rows = LazyRows(table, problem)
    look = rows.look()
    design, agreed = _agreed(look, problem)
    aggregate = aggregate_of(look, design, problem)
    found = collected(aggregate.on(rows.usable, rows.ids), look.n_rows)
    spec = problem.spec
    client, cluster = (None if name is None else found[name] for name in (spec.client, spec.cluster))
    data = rows_from_sums(aggregate.products(found), client, cluster, design.terms, nested=bool(spec.nested))
    data = replace(data, dropped=look.dropped)
    if isinstance(agreed.agreed_design, Scaled):  # new rows of a model with standardised terms
        scaled = agreed.agreed_design
        return Scale(np.array(scaled.mean), np.array(scaled.sd)).rows(data), agreed
    if not spec.standardize:
        return data, agreed
    scale = _scale(look, term_columns(design))
    return scale.rows(data), agreed.scaled(scale)


def check_pushed(problem: Problem) -> None:
    """Raise an error for what no engine can sum: the message names it, and what to do instead."""
    spec, fix = problem.spec, "lay the table out in shards (covey shard) and fit these"
    if not problem.loss.quadratic:
        raise DataError(f"The {spec.family} family needs the rows themselves, and a lazy table gives sums; {fix}.")
    if spec.learns == "cv":
        raise DataError("penalty='cv' needs a table in memory, and a lazy table gives sums; give gamma and lam, or learn them.")
    if spec.standardize and spec.frequency is not None and problem.draft:
        raise DataError(
            "standardize=True together with frequency= needs a table in memory, and a lazy table gives sums; leave one of them "
            "out, or pass a data frame."
        )
    if spec.trials is not None:
        raise DataError("Numbers of trials are for a classifier; leave out trials=.")


def _agreed(look: Look, problem: Problem) -> tuple[Formula, Problem]:
    """The design of the terms, without standardising, and the completed problem."""
    if not problem.draft:
        design = problem.design.inner if isinstance(problem.design, Scaled) else problem.design
        if not isinstance(design, Formula):
            raise DataError("This model was fitted without a formula; pass a data frame.")
        look.refuse_new_categories(design)
        return design, problem
    names, categories = columns_of(nw.from_native(look.frame(), eager_only=True), problem)
    problem = problem.agree(Schema(names, categories, None, look.rows.offset is not None))
    agreed = problem.design
    if not isinstance(agreed, Formula):
        raise DataError("A lazy table needs a formula that names the response, such as 'y ~ x + (1 | county)'.")
    state = dict(agreed.state)
    for text, (_, call) in agreed.transforms.items():
        mean, variance, low, high = look.statistics(pushed(call.argument))
        if call.name == "scale" and not low < high:
            raise DataError(f"{text} needs at least 2 different values of {ast.unparse(call.argument)}; leave it out.")
        n = float(look.found[own("usable")].sum())
        state[text] = (n, mean, variance * n, 0.0)[: call.size]
    agreed = replace(agreed, state=state)
    return agreed, replace(problem, agreed_design=agreed)


def aggregate_of(look: Look, design: Formula, problem: Problem) -> Aggregate:
    """Choose the columns of the second query and their centres; constant terms are multiples of the column of ones."""
    names, values, centres, columns = list[str](), list[TermColumn](), list[float](), list[tuple[int, float]]()
    for term in term_columns(design):
        constant, centre = term.constant, 0.0
        if constant is None and not _learned(term, look):
            mean, _, low, high = look.statistics(term.numeric, look.codes(term))
            constant, centre = (low, 0.0) if low == high else (None, mean)
        if constant is not None:
            columns.append((0, constant))
            continue
        names, values, centres = [*names, term.name], [*values, term], [*centres, centre]
        columns.append((len(names), 1.0))
    if len(names) >= MOST_COLUMNS:
        raise FormulaError(
            f"The formula has {len(names)} terms, and one query carries at most {MOST_COLUMNS - 1}; leave out terms or "
            "categories, or lay the table out in shards (covey shard)."
        )
    response, y = look.rows.response, look.statistics(look.rows.response)[0]
    spec = problem.spec
    return Aggregate(
        (*names, "response"),
        (*values, TermColumn("response", product([response]))),
        np.array([*centres, y]),
        tuple(columns),
        spec.weights,
        spec.frequency,
    )


def _learned(term: TermColumn, look: Look) -> bool:
    """Whether a term has functions such as ``scale(x)`` in it, whose product is near zero on average."""
    known = {ast.dump(tree) for tree in look.rows.parts}
    return not isinstance(term.numeric, ast.Constant) and ast.dump(term.numeric) not in known


def _scale(look: Look, terms: Sequence[TermColumn]) -> Scale:
    """How terms are standardised, as :meth:`.Scale.of` does for rows."""
    found = []
    for term in terms:
        if _learned(term, look):
            raise FormulaError(f"The term {term.name!r} has a function that learns from rows; leave out standardize=True.")
        found.append((1.0, 0.0, 1.0, 1.0) if term.constant is not None else look.statistics(term.numeric, look.codes(term)))
    constant = [low == high for _, _, low, high in found]
    centred = any(one and low != 0 for one, (_, _, low, _) in zip(constant, found, strict=True))
    means = [mean if centred and not one else 0.0 for one, (mean, *_) in zip(constant, found, strict=True)]
    sds = [1.0 if one else float(np.sqrt(variance)) for one, (_, variance, *_) in zip(constant, found, strict=True)]
    return Scale(np.array(means), np.array(sds))
