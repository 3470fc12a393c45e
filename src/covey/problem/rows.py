"""From a table to grouped rows: which columns and rows a problem reads, and how responses are coded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import narwhals as nw
import numpy as np
import polars as pl

from covey._typing import Anything, Floats, Ints
from covey.errors import DataError, FormulaError, listing
from covey.losses import Loss
from covey.problem.problem import Classes, Problem, Schema, as_frame
from covey.problem.settings import COLUMNS
from covey.problem.settings import Spec as Spec
from covey.tables.design import Formula, Frame, column, inspect, numeric, response
from covey.tables.rows import GroupedData
from covey.tables.scaling import Scale, moments
from covey.tables.sparse import SparseColumns, SparseMatrix, matrix_design
from covey.tables.values import Dropped, choose_rows, missing, take
from covey.tree.hierarchy import lookup


@dataclass(frozen=True)
class Arrays:
    """Arrays that are passed beside a table, with one value for each row; each replaces the column that a setting names."""

    y: Any = None
    client: Any = None
    cluster: Any = None
    weights: Any = None
    offset: Any = None
    frequency: Any = None
    trials: Any = None


def used_columns(problem: Problem) -> tuple[str, ...]:
    """The columns that a problem with a formula reads."""
    factors = [] if problem.formula is None else problem.formula.factors
    named = {name for factor in factors for name in factor.names()[0]}
    offset = () if problem.offset is None else problem.offset.names
    return tuple(sorted((named | {getattr(problem.spec, name) for name in COLUMNS} | set(offset)) - {None}))


def usable_rows(
    rows: Any, problem: Problem, given: Arrays, columns: Sequence[str] | None = None
) -> tuple[Any, Arrays, Ints | None, Dropped | None]:
    """The rows of a table, and of arrays beside it, that count: those of positive frequency, without missing values to drop.

    Also returns their numbers in the table (None: all rows), and what was dropped.
    """
    found: dict[str, Any]
    spec, beside = problem.spec, {name: values for name, values in vars(given).items() if values is not None}
    if isinstance(rows, nw.DataFrame):
        columns = used_columns(problem)
        if problem.formula is None:
            columns = tuple(rows.columns) if problem.draft else (*columns, *problem.design.columns)
        replaced = {getattr(spec, name) for name in COLUMNS if name in beside}
        found = {name: rows.get_column(name) for name in columns if name in rows.columns and name not in replaced}
        frequency = given.frequency
        if frequency is None and spec.frequency is not None:
            frequency = numeric(rows, spec.frequency)
    elif isinstance(rows, SparseMatrix):  # what a sparse matrix leaves out is zero, and no value of it may be missing
        found, frequency = {}, given.frequency
    else:
        found, frequency = {name: rows[:, at] for at, name in enumerate(columns or ())}, given.frequency
    if spec.na != "drop" and frequency is None:
        return rows, given, None, None
    kept, dropped = choose_rows({**found, **beside}, rows.shape[0], frequency, spec.na)
    fewer = Arrays(**{name: take(values, kept) for name, values in vars(given).items()})
    if isinstance(rows, SparseMatrix):
        return rows if kept is None else rows.tocsr()[kept], fewer, kept, dropped
    return take(rows, kept), fewer, kept, dropped


def read_rows(
    X: Any, draft: Problem, arrays: Arrays | None = None, columns: Sequence[str] | None = None
) -> tuple[GroupedData, Problem]:
    """Read the rows that a draft needs, and complete the draft.

    Parameters
    ----------
    X : a data frame; or a matrix, dense or sparse, with the names of its columns in ``columns``
    draft : the problem from :func:`resolve`
    arrays : columns that are not in ``X``

    Returns
    -------
    The rows, sorted and checked, and the problem.
    """
    given = Arrays() if arrays is None else arrays
    rows = as_frame(X) if columns is None else X
    if rows.shape[0] == 0:
        raise DataError("The table has no rows; covey needs at least one.")
    rows, given, numbers, dropped = usable_rows(rows, draft, given, columns)
    frame, y = rows if columns is None else None, given.y
    draft.check_offset(given.offset)
    if frame is not None:
        given, y = from_columns(frame, draft, given), response_of(frame, draft, y)
    names, categories = (tuple(columns or ()), {}) if frame is None else columns_of(frame, draft)
    shares = shares_of(y, given.trials, given.weights, draft)
    outcome, classes = encode_response(y, draft.loss) if shares is None else (shares[0], _SUCCESS)
    if shares is not None and shares[0] @ shares[1] in (0.0, shares[1].sum()):
        raise DataError("All trials have the same outcome. A classifier needs successes and failures.")
    schema = Schema(names, categories, Classes.of(classes), given.offset is not None)
    if isinstance(rows, SparseMatrix):
        design = matrix_design(names, draft.spec.vary, draft.spec.fit_intercept)
        problem = draft.of_design(design, schema.classes, schema.has_offset)
    else:
        problem = draft.agree(schema, sparse=True).learn_from(rows)
    blocks, shared = split(problem, rows)
    checks = (problem.loss.check,) if given.client is None else (problem.loss.check, problem.loss.check_grouped)
    data = GroupedData.from_blocks(
        blocks,
        rows.shape[0],
        outcome,
        given.client,
        given.cluster,
        weights=given.weights if shares is None else shares[1],
        offset=given.offset,
        frequency=given.frequency,
        terms=problem.terms,
        nested=bool(problem.spec.nested),
        checks=checks if shares is None else (),
        numbers=numbers,
        shared=shared,
    )
    data = replace(data, dropped=dropped)
    problem.loss.check_offset(data.offset)
    if not problem.spec.standardize:
        return data, problem
    scale = Scale.of(moments(data.X), data.n_rows, data.terms)
    return scale.rows(data), problem.scaled(scale)


def split(problem: Problem, rows: Any) -> tuple[list[Anything], SparseColumns | None]:
    """The dense columns of the terms, as blocks side by side, and the sparse ones, if there are any."""
    if problem.sparse is None:
        return problem.design.blocks(rows), None
    blocks, Z = problem.sparse.split(rows)
    return blocks, SparseColumns.of(Z, problem.sparse.sparse_terms)


def read_part(
    table: Any, problem: Problem, clusters: pl.Series, *, weighed: bool = True, learning: bool = False
) -> GroupedData:
    """The rows of a part of a table, coded as an agreed problem says, under the clusters of all parts.

    If ``weighed``, some row must have a positive weight. With ``learning`` the columns are those whose squares are added up for
    functions that are not yet agreed.
    """
    frame, _, numbers, dropped = usable_rows(as_frame(table), problem, Arrays())
    given, y = from_columns(frame, problem), response_of(frame, problem)
    shares = shares_of(y, given.trials, given.weights, problem)
    known = None if problem.classes is None else problem.classes.array
    blocks, terms = problem.design.blocks(frame), problem.terms
    if learning and isinstance(problem.design, Formula):
        columns = problem.design.learning_columns(frame)
        blocks, terms = list(columns.values()), tuple(columns)
    data = GroupedData.from_blocks(
        blocks,
        len(frame),
        encode_known(y, known) if shares is None else shares[0],
        given.client,
        given.cluster,
        weights=given.weights if shares is None else shares[1],
        offset=given.offset,
        frequency=given.frequency,
        terms=terms,
        nested=bool(problem.spec.nested),
        checks=(problem.loss.check_values, problem.loss.check_grouped) if shares is None else (),
        numbers=numbers,
        weighed=weighed,
    )
    problem.loss.check_offset(data.offset)
    return replace(under_clusters(data, clusters), dropped=dropped)


def under_clusters(data: GroupedData, clusters: pl.Series) -> GroupedData:
    """The rows of a part of a table under the clusters of all parts."""
    tree = data.hierarchy
    place, sizes = lookup(tree.cluster_ids, clusters, "cluster"), np.zeros(len(clusters), dtype=np.int64)
    if (place < 0).any():
        raise DataError("The table has a cluster that it did not have before; put the old table back, or start again.")
    sizes[place] = tree.sizes
    whole = replace(tree, cluster_ptr=np.concatenate([[0], np.cumsum(sizes)]), cluster_ids=clusters)
    return replace(data, hierarchy=whole)


def series_values(y: Any) -> Anything:
    """A column of any library, or a sequence, as an array."""
    series = nw.from_native(y, series_only=True, pass_through=True)
    return series.to_numpy() if isinstance(series, nw.Series) else np.asarray(y)


def encode_response(y: Any, loss: Loss) -> tuple[Any, Anything | None]:
    """The response as numbers; if the loss is for two classes, 0 and 1 for the sorted classes, and these classes."""
    values = series_values(y)
    if not loss.two_classes:
        return values, None
    absent = missing(values)
    if absent.any():
        raise DataError(f"The response is missing (NaN) in row {int(absent.argmax())}; fill the value or leave the row out.")
    values = values.ravel()
    try:
        pair = two_values(values)
        classes = np.unique(values if pair is None else pair)
    except TypeError:
        raise DataError("The response mixes types that cannot be compared; convert its classes to one type.") from None
    if len(classes) == 1:
        raise DataError(f"The response has one class only, {classes.tolist()[0]!r}; a classifier needs rows of two classes.")
    if len(classes) > 2:
        raise DataError(
            f"Only binary classification is supported. The type of the target is multiclass: {listing(classes.tolist(), 5)}; "
            "keep two classes, or fit one against the rest."
        )
    return (values == classes[1]).astype(np.float64), classes


def two_values(values: Anything) -> Anything | None:
    """The two values that an array ``(n,)`` has, found without sorting its rows; None if it has fewer or more."""
    other = values != values[:1]
    second = int(other.argmax()) if len(values) else 0
    if second == 0 or (other & (values != values[second])).any():
        return None
    return values[[0, second]]


_SUCCESS = np.array([0, 1])  # the classes of successes of trials


def shares_of(y: Any, trials: Any, weights: Any, problem: Problem) -> tuple[Floats, Floats] | None:
    """The share of successes and the number of trials of each row; None if the response is not one of trials.

    A row with ``n`` trials has the loss of ``n`` rows, but for the binomial coefficient, which the loss adds as a constant.
    """
    counts = problem.formula is not None and problem.formula.counts
    if not counts and trials is None:
        return None
    if not problem.loss.two_classes:
        raise DataError(
            f"Successes of trials are for the family 'bernoulli', not {problem.loss.name!r}; pass family='bernoulli' (in the "
            "shell --family bernoulli), or use HierarchicalClassifier."
        )
    if weights is not None or (counts and trials is not None):
        raise DataError(f"The numbers of trials are given, so leave out {'trials=' if weights is None else 'weights'}.")
    try:
        values = np.asarray(series_values(y), dtype=np.float64)
        n = values.sum(axis=1) if counts else np.asarray(series_values(trials), dtype=np.float64)
    except (TypeError, ValueError):
        raise DataError("Successes and trials must be numbers; convert the columns.") from None
    if values.shape[0] != len(n) or n.ndim != 1:
        raise DataError(f"There are {len(n)} numbers of trials for {len(values)} responses; give one for each row.")
    successes = values[:, 0] if counts else n * values
    whole = np.round(successes)
    for what, number, wrong in (
        ("number of trials", n, ~((n >= 0) & (n == np.round(n)) & np.isfinite(n))),
        ("number of successes", successes, ~((whole >= 0) & (whole <= n) & (np.abs(successes - whole) <= 1e-3))),
    ):
        for row in np.flatnonzero(wrong)[:1].tolist():
            raise DataError(
                f"The {what} is {number[row]:g} in row {row}, with {n[row]:g} trials; write cbind(successes, failures) with "
                "whole numbers, or give the share of successes as response and trials=."
            )
    return whole / np.where(n > 0, n, 1.0), n


def encode_known(y: Any, classes: Anything | None) -> Any:
    """New responses as numbers, with the classes of a fitted model."""
    values = series_values(y)
    if classes is None:
        return values
    known = np.isin(values, classes)
    if not known.all():
        shown = values.tolist()[int((~known).argmax())]
        raise DataError(f"The response is {shown!r}, which is neither of the model's classes {listing(classes.tolist(), 2)}.")
    return (values == classes[1]).astype(np.float64)


def from_columns(frame: Frame, draft: Problem, given: Arrays | None = None) -> Arrays:
    """Ids, weights and offset: as given, or from the columns that the settings name."""
    read = {"client": column, "cluster": column, "weights": numeric, "frequency": numeric, "trials": numeric}
    given = Arrays() if given is None else given
    named = {what: getattr(draft.spec, what) for what in read if getattr(given, what) is None}
    found: dict[str, Any] = {what: read[what](frame, name) for what, name in named.items() if name is not None}
    return replace(given, **found, offset=draft.offset_of(frame) if given.offset is None else given.offset)


def response_of(frame: Frame, draft: Problem, y: Any = None) -> Any:
    """The response: as given, or from the formula; if both have one they must be equal."""
    formula = draft.formula
    if formula is None or formula.response is None:
        if y is None:
            raise DataError("There is no response: pass y, or write it to the left of '~' in the formula.")
        return y
    named = response(formula, frame)
    if y is not None and not _same(y, named):  # cross-validation passes a response that the formula names too
        raise FormulaError(
            f"The response is given twice, as y and as {formula.response!r} in the formula, and they differ; leave one out."
        )
    return named if y is None else y


def columns_of(frame: Frame, draft: Problem) -> tuple[tuple[str, ...], dict[str, list[Any]]]:
    """The columns of the terms, and their categories."""
    spec, formula = draft.spec, draft.formula
    if formula is not None:
        columns, categories = inspect(formula.right, frame)
        if formula.response in columns:
            raise FormulaError(f"The response {formula.response!r} is also on the right of '~'; remove it there.")
        return columns, categories
    others = {getattr(spec, each) for each in COLUMNS} | set(() if draft.offset is None else draft.offset.names)
    features = tuple(name for name in frame.columns if name not in others)
    if "Intercept" in features and spec.fit_intercept:
        raise DataError(
            "The column 'Intercept' has the name that covey gives the intercept; rename it, or set fit_intercept=False."
        )
    if not features and not spec.fit_intercept:
        raise DataError("No column is left to learn from; add one, or keep the intercept.")
    return features, {}


def _same(first: Any, second: Any) -> bool:
    one, two = series_values(first), series_values(second)
    return one.shape == two.shape and bool((one == two).all())
