"""A site's table: its profile, and the first sums over its rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import narwhals as nw
import numpy as np
import polars as pl

from covey._typing import Anything
from covey._version import __version__
from covey.errors import DataError, FederationError
from covey.exact import Exact, segment_sum
from covey.federation.site.policy import refusal
from covey.federation.wire.codec import client_tags, ids_to_json, in_order
from covey.federation.wire.messages import Joined, Profile, SiteTotals, check_knots, formula_of
from covey.nodes.look import Lazy, LazyRows, collected, own
from covey.problem.problem import Problem, Spec, as_frame
from covey.problem.rows import Arrays, columns_of, from_columns, response_of, series_values, shares_of, usable_rows
from covey.records import digest
from covey.tables.design import Formula, Frame, column
from covey.tables.rows import GroupedData
from covey.tables.scaling import moments
from covey.tables.values import missing
from covey.tree.hierarchy import as_labels, encode, kind


@dataclass(frozen=True)
class _Seen:
    """What a site's table holds: rows that count, columns of terms and their categories, ids, the response if it was read."""

    used: Any
    columns: tuple[str, ...]
    levels: Mapping[str, list[Any]]
    client: pl.Series
    cluster: pl.Series
    y: Anything | None = None
    counts: bool = False

    @classmethod
    def by_reading(cls, frame: Frame, draft: Problem) -> _Seen:
        if len(frame) == 0:
            raise DataError("The table has no rows; start the node with a table that has some.")
        frame, *_ = usable_rows(frame, draft, Arrays())
        columns, levels = columns_of(frame, draft)
        given, y = from_columns(frame, draft), series_values(response_of(frame, draft))
        counts = shares_of(y, given.trials, given.weights, draft) is not None
        clusters = pl.Series(["all"]) if given.cluster is None else encode(given.cluster, "cluster")[0]
        client = pl.Series(["all"]) if given.client is None else as_labels(given.client, "client")
        return cls(frame, columns, levels, client, clusters, y, counts)

    @classmethod
    def by_engine(cls, table: Lazy, draft: Problem) -> _Seen:
        rows, spec = LazyRows(table, draft), draft.spec
        look, everybody = rows.look(), pl.Series(["all"])
        columns, levels = columns_of(nw.from_native(look.frame(), eager_only=True), draft)
        ids = collected(rows.usable.select(*rows.ids).unique(), look.n_rows) if rows.ids else pl.DataFrame()
        clusters = everybody if spec.cluster is None else encode(ids[spec.cluster], "cluster")[0]
        client = everybody if spec.client is None else as_labels(ids[spec.client], "client")
        return cls(rows.usable, columns, levels, client, clusters)


def profile_of(table: Any, draft: Problem, key: str = "", minimum: int = 1, *, private: bool = False) -> Profile:
    """The profile of a site's table; columns that cannot be used are refused.

    A cluster or category that fewer than ``minimum`` clients have is refused, and such a class is not sent. A private run does
    not send the categories and classes that occur, since they reveal something about rows.
    """
    spec, (formula, _) = draft.spec, formula_of(draft)
    check_knots(formula.right, private=private)
    lazy = isinstance(table, nw.LazyFrame)
    seen = _Seen.by_engine(table, draft) if lazy else _Seen.by_reading(as_frame(table), draft)
    y, levels = seen.y, seen.levels
    kinds = {name: "categories" if name in levels else "numbers" for name in seen.columns}
    # Booleans count as numbers.
    text = y is not None and y.dtype.kind not in "biuf" and any(isinstance(value, str) for value in y.tolist())
    ids = {"client": kind(seen.client), "cluster": kind(seen.cluster), "response": "text" if text else "numbers"}
    check_shared(seen.used, spec, [*filter(None, (spec.cluster, *levels))], minimum)
    classes: tuple[Any, ...] | None = (0, 1) if seen.counts else None  # failures and successes, whether or not both occur here
    if draft.loss.two_classes and y is not None and not seen.counts:
        who = None if spec.client is None else _who(seen.used, spec)
        several = [value for value in _classes_of(y) if who is None or who.filter(pl.Series(y == value)).n_unique() >= minimum]
        classes = tuple(several)
    sent = {} if private else {name: tuple(values) for name, values in levels.items()}
    ids_of_clusters = tuple(ids_to_json(seen.cluster))
    return Profile(__version__, kinds, ids, sent, ids_of_clusters, None if private else classes, key)


def _classes_of(y: Anything) -> list[Any]:
    """The classes of a binary response."""
    absent, distinct = missing(y), set(y.tolist())
    if absent.any():
        raise DataError(f"The response is missing (NaN) in row {int(absent.argmax())}; fill the value or leave the row out.")
    if not all(isinstance(value, str | int | float) for value in distinct):
        raise FederationError("Classes of a response across sites are text, numbers or booleans; convert the column.")
    if len(distinct) > 2:
        many = f"The response has {len(distinct)} classes here, where the bernoulli family has two"
        raise FederationError(f"{many}; merge classes, or choose another --family.")
    return in_order(distinct)


def check_shared(table: Any, spec: Spec, names: Iterable[str], minimum: int) -> None:
    """Refuse a column of clusters or categories, if fewer clients than the minimum have one of its values."""
    for name in names if minimum > 1 and spec.client is not None else ():
        if min(_clients_by_value(table, spec, name)) < minimum:
            rare = f"Column {name!r} has a value that fewer than {minimum} clients here have"
            raise refusal("minimum", rare, "merge such values, leave their rows out, or lower the number")


def _clients_by_value(table: Any, spec: Spec, name: str) -> list[int]:
    """How many clients have each value of a column; an engine counts them in its table."""
    if isinstance(table, nw.LazyFrame):
        key = [each for each in (spec.cluster if spec.nested else None, spec.client) if each is not None]
        pairs = table.select(nw.col(name).alias(own("value")), *key).unique()
        return collected(pairs.group_by(own("value")).agg(nw.len().alias(own("rows"))))[own("rows")].to_list()
    frame = as_frame(table)
    shared = pl.DataFrame({"value": column(frame, name).to_list(), "client": _who(frame, spec)})
    return shared.group_by("value").agg(pl.col("client").n_unique())["client"].to_list()


def _who(frame: Any, spec: Spec) -> pl.Series:
    """What identifies the client of each row: its id, or the pair of ids if ids are unique only within a cluster."""
    names = [name for name in (spec.cluster if spec.nested else None, spec.client) if name is not None]
    return pl.DataFrame({name: as_labels(column(frame, name), "client") for name in names}).to_struct()


def check_design(problem: Problem, *, private: bool = False) -> Formula:
    """Refuse an agreed design that does not belong to the formula: the design says which columns are read, and how."""
    formula, _ = formula_of(problem)
    design = problem.design
    wanted = Formula.of(formula.common, design.columns, design.levels, formula.bars) if isinstance(design, Formula) else None
    if wanted is None or not isinstance(design, Formula) or replace(design, state=wanted.state) != wanted:
        text = problem.spec.formula
        raise FederationError(f"The design that was agreed on is not that of the formula {text!r}; start a new run.")
    check_knots(formula.right, private=private)
    return design


def rows_digest(data: GroupedData) -> str:
    """A digest of all rows and ids, which does not leave the site.

    Of sums by client, it is one of the ids, the numbers of rows and nine digits of the squares of each column: an engine may
    add up the same rows in another order.
    """
    tree = data.hierarchy
    ids = np.frombuffer(repr((tree.client_ids.to_list(), tree.cluster_ids.to_list())).encode(), dtype=np.uint8)
    if data.sums is not None:
        squares = ((data.X**2).sum(axis=0).tolist(), float(data.y @ data.y))
        rounded = np.frombuffer(" ".join(f"{each:.8e}" for each in (*squares[0], squares[1])).encode(), dtype=np.uint8)
        return digest(rounded, data.rows_per_client, tree.cluster_ptr, ids)
    return digest(data.X, data.y, data.weights, data.offset, data.client_ptr, tree.cluster_ptr, ids)


def totals(data: GroupedData, *, standardize: bool = False, private: bool = False, learning: Exact | None = None) -> SiteTotals:
    """The first sums that leave a site: those of terms only if they are needed, in a private run numbers of clients only."""
    tree = data.hierarchy
    if private:
        return SiteTotals(tree.sizes, np.zeros(data.n_clusters, dtype=np.int64), Exact.zeros())
    rows = tree.sum_up(data.rows_per_client.astype(np.float64)).astype(np.int64)
    y = data.y if data.sums is None else data.unit * data.y
    response_sum = segment_sum(y, np.array([0, data.n_rows]))[0]
    dropped = None if data.dropped is None else np.array([data.dropped.rows, data.dropped.of, *data.dropped.columns.values()])
    return SiteTotals(tree.sizes, rows, response_sum, moments(data.X) if standardize else None, learning, dropped)


def joined(data: GroupedData, salt: str, *, listed: bool) -> Joined:
    """Tags of a site's clients; if the operator has a list of clients, also of their pairs of cluster and client."""
    tree = data.hierarchy
    clients = tree.client_ids.to_list()
    pairs = client_tags(zip(ids_to_json(tree.cluster_of_client), clients, strict=True), salt)
    return Joined(pairs if tree.nested else client_tags(clients, salt), pairs if listed else None)
