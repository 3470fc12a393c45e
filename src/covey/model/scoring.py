"""Predictions where the rows are: one SQL statement that joins a table with the coefficients.

:class:`Scoring` writes the statement for DuckDB and Spark. :func:`scored` runs it on a lazy table of DuckDB or of Polars, whose
SQL is that of DuckDB, so nothing is computed before the result is read. Each row takes the coefficients of its client; those of
its cluster, if the client is new; or else the global ones. With ``expected`` the variance of the groups that are not in the
model is part of the tables of coefficients, and the mean over them is a closed form for the identity and the log link. For the
logit link it is a sum over a grid of ``E expit(m + sd Z)`` with a normal ``Z``. The trapezoidal rule is exact to
``exp(-2 pi^2 / (step sd))``, because the poles of the integrand are at a distance ``pi / sd`` from the real line.

Where :meth:`.Model.response` would raise an error for a row, such as a missing value or a new category, its prediction is null.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import narwhals as nw
import numpy as np
import polars as pl

from covey._typing import Floats
from covey.errors import DataError, ModelError, SolverError, one_of, unknown_column
from covey.losses.kernels import LARGEST_LOG_MEAN
from covey.nodes.look import own, sum_tree
from covey.tables.design import Columns, Formula
from covey.tables.pushdown import DIALECTS, Dialect, Sql, TermColumn, columns_in, term_columns
from covey.tables.scaling import Scaled
from covey.tables.sparse import NOT_SPARSE
from covey.tree.hierarchy import LEVELS, Level, Unseen, kind

if TYPE_CHECKING:
    from covey.model.model import Model

_ROWS, _CLIENTS, _CLUSTERS = own("rows"), own("clients"), own("clusters")
_CLIENT, _CLUSTER, _PARENT = own("client"), own("cluster"), own("parent")
_MARGIN, _SPREAD = own("margin"), own("spread")
_ONE = "1.0e0"
_FINITE = "1.7976931348623157e308"
_DIGITS = 23.0  # the rule is exact to exp(-23)
_WIDEST = 40.0  # the largest standard deviation for which a grid is written
_REACH = 6.7  # a normal variable is beyond it with a probability of 2e-11


@dataclass(frozen=True)
class Scoring:
    """The statement that scores new rows with a model.

    Attributes
    ----------
    model : the fitted model
    dialect : duckdb or spark; polars reads that of duckdb
    level, unseen, expected : as in :meth:`.Model.response`
    columns : the columns of the table, if they are known
    keys : columns to join by in place of those of the ids; they are left out of the result
    """

    model: Model
    dialect: Dialect = "duckdb"
    level: Level = "client"
    unseen: Unseen = "parent"
    expected: bool = True
    columns: Sequence[str] | None = None
    keys: tuple[tuple[str, str], ...] = ()

    def check(self) -> None:
        """Refuse a model, or a table, whose rows cannot be scored by an engine."""
        model, loss = self.model, self.model.problem.loss
        if model.shared is not None:
            raise DataError(NOT_SPARSE)
        if not model.spec.named or not isinstance(_inner(model.design), Formula | Columns):
            raise ModelError("This model was fitted to arrays, and an engine finds columns by name; fit it to a data frame.")
        if loss.link is None:
            raise SolverError(f"The mean of the {loss.name} loss is a function of Python; collect the rows to predict them.")
        if model.problem.has_offset and self._offset is None:
            raise ModelError("This model was fitted with an offset beside the table; name its column with offset= in the fit.")
        if self.columns is None:
            return
        ids = [name for name in (model.spec.client, model.spec.cluster) if name is not None]
        needed = [*columns_in_terms(model), *(ids if self.level == "client" or model.spec.nested else ())]
        lost = [
            name for name in needed if name not in self.columns and not (name == model.spec.cluster and not model.spec.nested)
        ]
        if lost:
            raise unknown_column(lost[0], list(self.columns))
        if self.level == "cluster" and not any(name in self.columns for name in ids) and ids:
            raise DataError(
                "This model was fitted to several clusters: the table needs the column of clusters, or level='global'."
            )
        for name in self.results:
            if name in self.columns:
                raise DataError(f"The table has a column {name!r} already, which predictions would replace; rename it.")

    @property
    def results(self) -> list[str]:
        """The columns that are added."""
        return ["prediction", *(["probability"] if self.model.classes is not None else []), "answered_by"]

    # The tables of coefficients

    @property
    def _by_client(self) -> bool:
        spec, tree = self.model.spec, self.model.hierarchy
        there = self.columns is None or spec.client in self.columns
        return self.level != "global" and spec.client is not None and tree.n_clients > 0 and there

    @property
    def _by_cluster(self) -> bool:
        spec = self.model.spec
        there = self.columns is None or spec.cluster in self.columns
        return self.level != "global" and spec.cluster is not None and there

    def _spreads(self) -> tuple[Floats, Floats]:
        """The variance between groups that a row may belong to: for each cluster ``(k, d, d)``, and for a new cluster."""
        model = self.model
        d, k = len(model.terms), model.hierarchy.n_clusters
        if not self.expected or model.learned is None or model.problem.loss.link == "identity":
            return np.zeros((k, d, d)), np.zeros((d, d))
        posterior, between = model.posterior, model.posterior.between_clients
        return between[:-1], between[-1] + posterior.learned.dispersion * posterior.learned.cluster.shape[0]

    def _pairs(self) -> list[tuple[int, int]]:
        of_cluster, new = self._spreads()
        varies = (new != 0) | (of_cluster != 0).any(axis=0)
        return [(a, b) for a in range(len(new)) for b in range(a, len(new)) if varies[a, b]]

    def tables(self) -> dict[str, pl.DataFrame]:
        """The coefficients of clients and of clusters, with the variances of what is not in the model."""
        model, found = self.model, dict[str, pl.DataFrame]()
        tree, (spreads, _) = model.hierarchy, self._spreads()
        if self._by_client:
            finest = self.level == "client"
            values = model.theta if finest else model.w[tree.parent]
            spread = np.zeros((1, *spreads.shape[1:])) if finest else spreads
            ids = {_CLIENT: tree.client_ids, _PARENT: tree.cluster_of_client}
            at = np.zeros(tree.n_clients, dtype=np.int64) if finest else tree.parent
            found[_CLIENTS] = pl.DataFrame({**ids, **self._numbers(values, spread, at)})
        if self._by_cluster:
            every = np.arange(tree.n_clusters)
            found[_CLUSTERS] = pl.DataFrame({_CLUSTER: tree.cluster_ids, **self._numbers(model.w, spreads, every, "k")})
        return found

    def _numbers(self, values: Floats, spreads: Floats, at: Any, mark: str = "c") -> dict[str, Floats]:
        columns = {own(f"{mark}{a}"): np.ascontiguousarray(values[:, a]) for a in range(values.shape[1])}
        return columns | {own(f"{mark}{a}_{b}"): spreads[at, a, b] for a, b in self._pairs()}

    # The statement

    @property
    def _offset(self) -> Any:
        problem, name = self.model.problem, self.model.spec.offset
        if problem.offset is not None and (name is None or self.columns is None or name not in self.columns):
            return sum_tree(problem.offset)
        if name is None:
            return None
        return ast.Name(name)

    def statement(self, table: str, sources: dict[str, str] | None = None) -> str:
        """The statement. ``table`` is quoted; ``sources`` are the tables of coefficients, by default with their own names."""
        sql, model, spec = Sql(self.dialect), self.model, self.model.spec
        keys, sources = dict(self.keys), sources or {}
        x = _values(sql, model.design)
        coefficient = [self._first(f"{a}", value) for a, value in enumerate(model.wbar)]
        products = [b if v == _ONE else f"{b} * {v}" for b, v in zip(coefficient, x, strict=True)]
        if self._offset is not None:
            products.append(sql.value(self._offset))
        new = self._spreads()[1]
        squares = []
        for a, b in self._pairs():
            factors = [each for each in (x[a], x[b]) if each != _ONE]
            twice = [sql.number(2.0)] if a != b else []
            squares.append(" * ".join([*twice, self._first(f"{a}_{b}", new[a, b]), *factors]))
        valid = [f"{sql.name(name)} IN ({', '.join(map(sql.literal, levels))})" for name, levels in _levels(model).items()]
        joins, level, moved = "", [], f"{own('c0')} IS NOT NULL"
        if self._by_client:
            on = [f"{_ROWS}.{sql.name(keys.get(spec.client or '', spec.client or ''))} = {_CLIENTS}.{_CLIENT}"]
            if self._by_cluster:
                cluster = f"{_ROWS}.{sql.name(keys.get(spec.cluster or '', spec.cluster or ''))}"
                if spec.nested:
                    on.append(f"{cluster} = {_CLIENTS}.{_PARENT}")
                else:
                    valid.append(f"({_PARENT} IS NULL OR {cluster} IS NULL OR {_PARENT} = {cluster})")
            joins += f"\n  LEFT JOIN {sources.get(_CLIENTS, _CLIENTS)} AS {_CLIENTS} ON {' AND '.join(on)}"
            level.append(f"WHEN {own('c0')} IS NOT NULL THEN '{self.level}'")
        if self._by_cluster:
            cluster = f"{_ROWS}.{sql.name(keys.get(spec.cluster or '', spec.cluster or ''))}"
            joins += f"\n  LEFT JOIN {sources.get(_CLUSTERS, _CLUSTERS)} AS {_CLUSTERS} ON {cluster} = {_CLUSTERS}.{_CLUSTER}"
            level.append(f"WHEN {own('k0')} IS NOT NULL THEN 'cluster'")
        if self.unseen == "raise" and self.level != "global":
            there = [moved] * self._by_client + [f"{own('k0')} IS NOT NULL"] * (self.level == "cluster" and self._by_cluster)
            valid.append(f"({' OR '.join(there) or '1 = 0'})")
        margin = " + ".join(products)
        margin = f"CASE WHEN {' AND '.join(valid)} THEN {margin} END" if valid else margin
        answered = f"CASE {' '.join(level)} ELSE 'global' END" if level else "'global'"
        spread = [f",\n    {' + '.join(squares)} AS {_SPREAD}"] if squares else []
        lines = [f"    {_ROWS}.*", f",\n    {margin} AS {_MARGIN}", *spread, f",\n    {answered} AS answered_by"]
        hidden = ", ".join([_MARGIN, *([_SPREAD] if squares else []), *(sql.name(key) for key in keys.values())])
        but = "EXCLUDE" if self.dialect == "duckdb" else "EXCEPT"
        shown = [f"{value} AS {name}" for name, value in self._responses(sql, bool(squares)).items()]
        return (
            f"WITH {own('scored')} AS (\n  SELECT\n{''.join(lines)}\n  FROM {table} AS {_ROWS}{joins}\n)\nSELECT\n"
            f"  * {but} ({hidden}),\n  " + ",\n  ".join(shown) + f"\nFROM {own('scored')}"
        )

    def _first(self, name: str, otherwise: float) -> str:
        """The number of a row's client, of its cluster, or of a new cluster."""
        found = [own(f"c{name}")] * self._by_client + [own(f"k{name}")] * self._by_cluster
        number = Sql(self.dialect).number(float(otherwise))
        return f"COALESCE({', '.join([*found, number])})" if found else number

    def _responses(self, sql: Sql, varies: bool) -> dict[str, str]:
        """The columns of the result."""
        mean, classes = self._mean(sql, varies), self.model.classes
        usable = f"ABS({_MARGIN}) <= {_FINITE}"
        if classes is None:
            return {"prediction": f"CASE WHEN {usable} THEN {mean} END"}
        negative, positive = map(sql.literal, classes.tolist())
        picked = f"CASE WHEN {usable} THEN CASE WHEN {_MARGIN} > 0 THEN {positive} ELSE {negative} END END"
        return {"prediction": picked, "probability": f"CASE WHEN {usable} THEN {mean} END"}

    def _mean(self, sql: Sql, varies: bool) -> str:
        """The expected response."""
        link = self.model.problem.loss.link
        if link == "identity":
            return _MARGIN
        if link == "log":
            inside = f"{_MARGIN} + {_SPREAD} / 2e0" if varies else _MARGIN
            return f"EXP(LEAST({inside}, {sql.number(LARGEST_LOG_MEAN)}))"
        plain = f"1e0 / (1e0 + EXP(-{_MARGIN}))"
        if not varies:
            return plain
        of_cluster, new = self._spreads()
        largest = max(float(np.einsum("jaa->j", of_cluster).max(initial=0.0)), float(np.trace(new)))
        limit = min(max(2.0 * np.sqrt(largest), 5.0), _WIDEST)
        step = 2.0 * np.pi**2 / (limit * _DIGITS)
        parts = [f"{sql.number(step / np.sqrt(2 * np.pi))} / (1e0 + EXP(-{_MARGIN}))"]
        for z in step * np.arange(1, int(np.ceil(_REACH / step)) + 1):
            weight, at = step * np.exp(-0.5 * z * z) / np.sqrt(2 * np.pi), f"{sql.number(float(z))} * SQRT({_SPREAD})"
            both = f"1e0 / (1e0 + EXP(-{_MARGIN} - {at})) + 1e0 / (1e0 + EXP(-{_MARGIN} + {at}))"
            parts.append(f"{sql.number(float(weight))} * ({both})")
        sums = " + ".join(parts)
        return f"CASE WHEN {_SPREAD} = 0e0 THEN {plain} WHEN {_SPREAD} <= {sql.number(float(limit**2))} THEN {sums} END"


def columns_in_terms(model: Model) -> list[str]:
    """The columns that the terms of a model read."""
    parts = term_columns(_inner(model.design))
    named = [name for part in parts for name in [*columns_in(part.numeric), *(name for name, _ in part.codes)]]
    return list(dict.fromkeys([*named, *_levels(model)]))


def _inner(design: Any) -> Any:
    return design.inner if isinstance(design, Scaled) else design


def _levels(model: Model) -> dict[str, list[Any]]:
    design = _inner(model.design)
    return {name: list(levels) for name, levels in design.levels.items()} if isinstance(design, Formula) else {}


def _values(sql: Sql, design: Any) -> list[str]:
    """The terms of a row."""
    columns: list[TermColumn] = term_columns(_inner(design))
    values = [sql.number(each.constant) if each.constant is not None else sql.term(each) for each in columns]
    if not isinstance(design, Scaled):
        return values
    found = []
    for value, mean, sd in zip(values, design.mean, design.sd, strict=True):
        found.append(value if (mean, sd) == (0.0, 1.0) else f"(({value} - {sql.number(mean)}) / {sql.number(sd)})")
    return found


# Lazy tables


def scored(model: Model, table: Any, *, level: Level = "client", unseen: Unseen = "parent", expected: bool = True) -> Any:
    """A lazy table of Polars, DuckDB or Spark with the columns of :attr:`Scoring.results`; nothing is computed yet."""
    if level not in LEVELS:
        raise one_of("level", level, LEVELS)
    lazy = nw.from_native(table)
    schema = dict(lazy.collect_schema())
    spark = lazy.implementation.is_pyspark() or lazy.implementation.is_pyspark_connect()
    scoring = Scoring(model, "spark" if spark else "duckdb", level, unseen, expected, tuple(schema))
    scoring.check()
    tree, ids = model.hierarchy, dict[str, pl.Series]()
    for name, known, what in (
        (model.spec.client, tree.client_ids, "client"),
        (model.spec.cluster, tree.cluster_ids, "cluster"),
    ):
        if name is not None and name in schema and level != "global":
            ids[name] = known
            if len(known) and _kind(schema[name]) != _kind(nw.from_native(known, series_only=True).dtype):
                raise DataError(
                    f"The {what} ids are {str(schema[name]).lower()} values here but were {kind(known)} in training (such as "
                    f"{known[0]!r}); convert the column to {kind(known)}."
                )
    if lazy.implementation.is_polars():
        keys = {name: own(f"key{at}") for at, name in enumerate(ids)}
        types = table.collect_schema()
        frame = table.with_columns(_key(name, types[name], known.dtype).alias(keys[name]) for name, known in ids.items())
        scoring = replace(scoring, keys=tuple(keys.items()))
        tables = {name: each.lazy() for name, each in scoring.tables().items()}
        return pl.SQLContext({_ROWS: frame, **tables}).execute(scoring.statement(_ROWS), eager=False)
    if lazy.implementation.is_duckdb():
        return _in_duckdb(table, scoring)
    if spark:
        return _in_spark(table, scoring)
    raise DataError(
        f"Predictions of a lazy table are for Polars, DuckDB and Spark; for {lazy.implementation.name.lower()} run the "
        "statement that model.to_sql writes."
    )


def _kind(dtype: Any) -> str:
    """Whether ids are numbers, text, or of another type."""
    if dtype.is_numeric():
        return "numbers"
    return "text" if dtype in (nw.String, nw.Categorical, nw.Enum) else str(dtype).split("(")[0]


def _key(name: str, dtype: pl.DataType, known: pl.DataType) -> pl.Expr:
    """Ids of a column of polars, in the type of the model's ids: ``12.0`` is client 12."""
    ids = pl.col(name)
    if dtype.is_float() and known == pl.Int64:
        ids = pl.when(ids == ids.floor()).then(ids)
    if isinstance(dtype, pl.Categorical | pl.Enum) or dtype.is_numeric():
        return ids.cast(known, strict=False)
    return ids


def _in_duckdb(relation: Any, scoring: Scoring) -> Any:
    """The statement on a relation, in its own connection, which finds the tables of coefficients by the names below."""
    tables = {name: each.to_arrow() for name, each in scoring.tables().items()}
    _covey_clients_here, _covey_clusters_here = tables.get(_CLIENTS), tables.get(_CLUSTERS)
    found = {_CLIENTS: "_covey_clients_here", _CLUSTERS: "_covey_clusters_here"}
    return relation.query(_ROWS, scoring.statement(_ROWS, found))


def _in_spark(frame: Any, scoring: Scoring) -> Any:
    """The statement in the session of a DataFrame. Braces stand for DataFrames, so those of the statement are doubled."""
    session = frame.sparkSession
    tables = {name: session.createDataFrame(each.to_arrow()) for name, each in scoring.tables().items()}
    statement = scoring.statement(_ROWS + "_here", {name: name + "_here" for name in tables})
    statement = statement.replace("{", "{{").replace("}", "}}")
    frames = {_ROWS: frame, **tables}
    for name in frames:
        statement = statement.replace(f" {name}_here AS ", f" {{{name}}} AS ")
    return session.sql(statement, **frames)


# Statements


def write_sql(model: Model, table: str, folder: Path | None, dialect: str, **where: Any) -> str:
    """The statement for a table of a database; the coefficients are written to ``folder``, or taken from tables."""
    if dialect not in DIALECTS:
        raise one_of("dialect", dialect, DIALECTS)
    scoring = Scoring(model, "spark" if dialect == "spark" else "duckdb", **where)
    scoring.check()
    sql, sources = Sql(scoring.dialect), dict[str, str]()
    if folder is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name, each in scoring.tables().items():
                path = folder.resolve() / f"{name}.parquet"
                each.write_parquet(path)
                sources[name] = (
                    f"read_parquet({sql.literal(str(path))})" if sql.dialect == "duckdb" else f"parquet.{sql.name(str(path))}"
                )
        except OSError as problem:
            raise ModelError(f"The coefficients cannot be written to {str(folder)!r}: {problem.strerror}.") from None
    return scoring.statement(".".join(sql.name(part) for part in table.split(".")), sources)
