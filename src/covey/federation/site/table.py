"""A site's table: its profile, its rows as the sites agreed to code them, and the first sums over them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl

from covey._typing import Anything
from covey._version import __version__
from covey.errors import DataError, FederationError, FormulaError
from covey.exact import Exact, segment_sum
from covey.federation.site.policy import refusal
from covey.federation.wire.codec import client_tags, ids_to_json, in_order
from covey.federation.wire.messages import Joined, Profile, SiteTotals, check_knots, formula_of
from covey.problem.problem import Problem, Spec, as_frame
from covey.problem.rows import Arrays, encode_known, series_values, shares_of, usable_rows
from covey.records import digest
from covey.tables.design import Formula, column, inspect, numeric, response
from covey.tables.rows import GroupedData
from covey.tables.scaling import moments
from covey.tree.hierarchy import Hierarchy, as_labels, encode, is_missing, kind, lookup


def profile_of(table: Any, draft: Problem, key: str = "", minimum: int = 1, *, private: bool = False) -> Profile:
    """The profile of a site's table; columns that cannot be used are refused.

    A cluster or category that fewer than ``minimum`` clients have is refused, and such a class is not sent. A private run does
    not send the categories and classes that occur, since they reveal something about rows.
    """
    frame, spec, (formula, lhs) = as_frame(table), draft.spec, formula_of(draft)
    if len(frame) == 0:
        raise DataError("The table has no rows; start the node with a table that has some.")
    check_knots(formula.right, private=private)
    frame, *_ = usable_rows(frame, draft, Arrays())
    columns, levels = inspect(formula.right, frame)
    if lhs in columns:
        raise FormulaError(f"The response {lhs!r} is also on the right of '~'; leave it out there.")
    y = series_values(response(formula, frame))
    trials = numeric(frame, spec.trials) if spec.trials else None
    shares = shares_of(y, trials, None, draft)
    classes = _classes_of(y) if draft.loss.two_classes and shares is None else None
    clusters, _ = encode(column(frame, spec.cluster), "cluster") if spec.cluster else (pl.Series(["all"]), None)
    client = as_labels(column(frame, spec.client), "client") if spec.client else pl.Series(["all"])
    kinds = {name: "categories" if name in levels else "numbers" for name in columns}
    # Booleans count as numbers.
    text = y.dtype.kind not in "biuf" and any(isinstance(value, str) for value in y.tolist())
    ids = {"client": kind(client), "cluster": kind(clusters), "response": "text" if text else "numbers"}
    for name in filter(None, (spec.weights, spec.frequency)):
        numeric(frame, name)
    draft.offset_of(frame)
    check_shared(frame, spec, [*filter(None, (spec.cluster, *levels))], minimum)
    if classes is not None and spec.client is not None:
        pairs = _who(frame, spec)
        classes = tuple(value for value in classes if pairs.filter(pl.Series(y == value)).n_unique() >= minimum)
    if shares is not None:
        classes = (0, 1)  # failures and successes, whether or not both occur here
    sent = {} if private else {name: tuple(values) for name, values in levels.items()}
    ids_of_clusters = tuple(ids_to_json(clusters))
    return Profile(__version__, kinds, ids, sent, ids_of_clusters, None if private else classes, key)


def _classes_of(y: Anything) -> tuple[Any, ...]:
    """The classes of a binary response."""
    missing = np.array([is_missing(value) for value in y.tolist()])
    if missing.any():
        raise DataError(f"The response is missing (NaN) in row {int(missing.argmax())}; fill the value or leave the row out.")
    distinct = set(y.tolist())
    if not all(isinstance(value, str | int | float) for value in distinct):
        raise FederationError("Classes of a response across sites are text, numbers or booleans; convert the column.")
    if len(distinct) > 2:
        many = f"The response has {len(distinct)} classes here, where the bernoulli family has two"
        raise FederationError(f"{many}; merge classes, or choose another --family.")
    return tuple(in_order(distinct))


def check_shared(table: Any, spec: Spec, names: Iterable[str], minimum: int) -> None:
    """Refuse a column of clusters or categories, if fewer clients than the minimum have one of its values."""
    frame = as_frame(table)
    for name in names if minimum > 1 and spec.client is not None else ():
        shared = pl.DataFrame({"value": column(frame, name).to_list(), "client": _who(frame, spec)})
        if min(shared.group_by("value").agg(pl.col("client").n_unique())["client"].to_list()) < minimum:
            rare = f"Column {name!r} has a value that fewer than {minimum} clients here have"
            raise refusal("minimum", rare, "merge such values, leave their rows out, or lower the number")


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


def grouped(table: Any, problem: Problem, clusters: pl.Series, *, learning: bool = False) -> GroupedData:
    """A site's rows, coded as all sites agreed, under the clusters of all sites.

    With ``learning`` the columns are those whose squares are added up for functions that are not yet agreed.
    """
    spec, (formula, _) = problem.spec, formula_of(problem)
    frame, _, numbers, dropped = usable_rows(as_frame(table), problem, Arrays())
    client = column(frame, spec.client) if spec.client else None
    cluster = column(frame, spec.cluster) if spec.cluster else None
    y, trials = response(formula, frame), numeric(frame, spec.trials) if spec.trials else None
    shares = shares_of(y, trials, None, problem)
    blocks, terms = problem.design.blocks(frame), problem.terms
    if learning and isinstance(problem.design, Formula):
        columns = problem.design.learning_columns(frame)
        blocks, terms = list(columns.values()), tuple(columns)
    data = GroupedData.from_blocks(
        blocks,
        len(frame),
        encode_known(y, None if problem.classes is None else problem.classes.array) if shares is None else shares[0],
        client,
        cluster,
        weights=(numeric(frame, spec.weights) if spec.weights else None) if shares is None else shares[1],
        offset=problem.offset_of(frame),
        frequency=numeric(frame, spec.frequency) if spec.frequency else None,
        terms=terms,
        nested=bool(spec.nested),
        checks=(problem.loss.check_values, problem.loss.check_grouped) if shares is None else (),
        numbers=numbers,
    )
    problem.loss.check_offset(data.offset)
    tree = data.hierarchy
    place = lookup(tree.cluster_ids, clusters, "cluster")
    if (place < 0).any():
        new = "The table has a cluster that it did not have when the run began"
        raise FederationError(f"{new}; put the old table back, or start a new run.")
    sizes = np.zeros(len(clusters), dtype=np.int64)
    sizes[place] = tree.sizes
    whole = Hierarchy(np.concatenate([[0], np.cumsum(sizes)]), tree.client_ids, clusters, tree.nested)
    return replace(data, hierarchy=whole, dropped=dropped)


def rows_digest(data: GroupedData) -> str:
    """A digest of all rows and ids, which does not leave the site."""
    tree = data.hierarchy
    ids = np.frombuffer(repr((tree.client_ids.to_list(), tree.cluster_ids.to_list())).encode(), dtype=np.uint8)
    return digest(data.X, data.y, data.weights, data.offset, data.client_ptr, tree.cluster_ptr, ids)


def totals(data: GroupedData, *, standardize: bool = False, private: bool = False, learning: Exact | None = None) -> SiteTotals:
    """The first sums that leave a site: those of terms only if they are needed, in a private run numbers of clients only."""
    tree = data.hierarchy
    if private:
        return SiteTotals(tree.sizes, np.zeros(data.n_clusters, dtype=np.int64), Exact.zeros())
    rows = tree.sum_up(data.rows_per_client.astype(np.float64)).astype(np.int64)
    response_sum = segment_sum(data.y, np.array([0, data.n_rows]))[0]
    dropped = None if data.dropped is None else np.array([data.dropped.rows, data.dropped.of, *data.dropped.columns.values()])
    return SiteTotals(tree.sizes, rows, response_sum, moments(data.X) if standardize else None, learning, dropped)


def joined(data: GroupedData, salt: str, *, listed: bool) -> Joined:
    """Tags of a site's clients; if the operator has a list of clients, also of their pairs of cluster and client."""
    tree = data.hierarchy
    clients = tree.client_ids.to_list()
    pairs = client_tags(zip(ids_to_json(tree.cluster_of_client), clients, strict=True), salt)
    return Joined(pairs if tree.nested else client_tags(clients, salt), pairs if listed else None)
