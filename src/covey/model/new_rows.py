"""New rows for a fitted model: their terms, coded as in training, and the client or cluster whose model predicts each row."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from covey._typing import Anything, Floats, Ints
from covey.errors import DataError
from covey.nodes.lazy import as_lazy, read_lazy
from covey.problem.problem import as_frame
from covey.problem.rows import Arrays, encode_known, shares_of, split, usable_rows
from covey.tables.design import Frame, column, numeric, response
from covey.tables.rows import GroupedData, refuse_infinite, side_by_side
from covey.tables.sparse import NOT_SPARSE, SparseColumns
from covey.tree.hierarchy import Level, Resolved, Unseen

if TYPE_CHECKING:
    from covey.model.model import Model


def new_rows(
    model: Model,
    X: Any,
    *,
    client: Any = None,
    cluster: Any = None,
    offset: Any = None,
    level: Level = "client",
    unseen: Unseen = "parent",
) -> tuple[Floats, Resolved, Floats | None]:
    """The terms of new rows ``(rows, d)``, the model that predicts each row, and the offsets.

    Parameters
    ----------
    client, cluster, offset : ids and offsets of the rows; by default from the columns of the table ``X``
    level : the models that predict: those of clients, of clusters, or the global one
    unseen : what to do with ids that are not in the model
    """
    frame = as_frame(X) if model.spec.named else None
    blocks, shared, n_rows = _blocks(model, X, frame)
    client, cluster = _ids_of(model, frame, client, cluster, level)
    _refuse_missing_ids(model, client, cluster, level)
    chosen = model.hierarchy.resolve(client, cluster, n_rows=n_rows, unseen=unseen, level=level)
    rows = side_by_side(blocks)
    refuse_infinite(rows, model.terms, lambda row: f"row {row}")
    shift = _offset_of(model, offset, frame, n_rows)
    if shared is None or model.shared is None:
        return rows, chosen, shift
    return rows, chosen, replace(shared, offset=shift).offset_with(model.shared.beta)


@dataclass(frozen=True)
class Observed:
    """Rows with responses, in the order of their table.

    Attributes
    ----------
    X, y : (rows, d) and (rows,), coded as in training
    weights : (rows,) weights; for successes of trials, the numbers of trials. Ones without weights
    offset : (rows,) or None
    chosen : the model that predicts each row
    numbers : (rows,) the place of each row in its table, which has ``n_rows`` rows; rows that do not count are left out
    """

    X: Floats
    y: Floats
    weights: Floats
    offset: Floats | None
    chosen: Resolved
    numbers: Ints
    n_rows: int

    def in_table(self, values: Floats) -> Floats:
        """Values for every row of the table: NaN for the rows that were left out."""
        whole = np.full((self.n_rows, *values.shape[1:]), np.nan)
        whole[self.numbers] = values
        return whole


def observed_rows(model: Model, X: Any, given: Arrays, *, level: Level = "client", unseen: Unseen = "parent") -> Observed:
    """Rows with responses, in the order of the table ``X``; ``given`` are arrays beside it."""
    X = as_frame(X) if model.spec.named else X
    total = X.shape[0]
    X, given, numbers, _ = usable_rows(X, model.problem, given, model.design.columns)
    frame = X if model.spec.named else None
    rows, chosen, offset = new_rows(
        model, X, client=given.client, cluster=given.cluster, offset=given.offset, level=level, unseen=unseen
    )
    y, weights, trials = _response_of(model, frame, given.y, given.weights, given.trials)
    shares = shares_of(y, trials, weights, model.problem)
    y = np.asarray(encode_known(y, model.classes) if shares is None else shares[0], dtype=np.float64)
    if y.shape != (len(rows),):
        raise DataError(f"The response has shape {y.shape} for {len(rows)} rows; give one value per row.")
    refuse_infinite(y[:, None], ["response"], lambda row: f"row {row}")
    given_weights = weights if shares is None else shares[1]
    weights = np.ones(len(y)) if given_weights is None else np.asarray(given_weights, dtype=np.float64)
    return Observed(rows, y, weights, offset, chosen, np.arange(total) if numbers is None else numbers, total)


def group_rows(model: Model, X: Any, given: Arrays) -> GroupedData:
    """Group new rows by client, coded as in training. Ids and responses are ``given``, or the table's columns."""
    lazy = as_lazy(X)
    if lazy is not None:
        return read_lazy(lazy, model.problem)[0]
    X = as_frame(X) if model.spec.named else X
    X, given, numbers, dropped = usable_rows(X, model.problem, given, model.design.columns)
    frame, frequency = X if model.spec.named else None, given.frequency
    if model.problem.sparse is not None:
        raise DataError(NOT_SPARSE)
    blocks, _, n_rows = _blocks(model, X, frame)
    client, cluster = _ids_of(model, frame, given.client, given.cluster, "client")
    if client is None and model.spec.client is None and model.hierarchy.n_clients == 1:  # a regression without groups
        client = pl.Series(model.hierarchy.client_ids.to_list() * n_rows)
    if client is None:
        raise DataError("New rows need the ids of their clients; pass client=, or a table with the column of clients.")
    if cluster is None and model.hierarchy.n_clusters > 1:
        raise DataError("New rows need the ids of their clusters; pass cluster=, or a table with the column of clusters.")
    if cluster is None:
        cluster = pl.Series(model.hierarchy.cluster_ids.to_list() * n_rows)
    y, weights, trials = _response_of(model, frame, given.y, given.weights, given.trials)
    shares = shares_of(y, trials, weights, model.problem)
    if frequency is None and frame is not None and model.spec.frequency is not None:
        frequency = numeric(frame, model.spec.frequency)
    data = GroupedData.from_blocks(
        blocks,
        n_rows,
        encode_known(y, model.classes) if shares is None else shares[0],
        client,
        cluster,
        weights=weights if shares is None else shares[1],
        offset=_offset_of(model, given.offset, frame, n_rows),
        frequency=frequency,
        terms=model.terms,
        nested=model.hierarchy.nested,
        checks=(model.problem.loss.check_values, model.problem.loss.check_grouped) if shares is None else (),
        numbers=numbers,
    )
    model.problem.loss.check_offset(data.offset)
    return replace(data, dropped=dropped)


def _blocks(model: Model, X: Any, frame: Frame | None) -> tuple[list[Anything], SparseColumns | None, int]:
    """The dense and the sparse columns of new rows, and the number of rows."""
    if frame is not None and len(frame) == 0:
        raise DataError("The table has no rows to predict.")
    rows = X if frame is None else frame
    return *split(model.problem, rows), rows.shape[0]


def ids_of(model: Model, X: Any, client: Any, cluster: Any) -> tuple[Any, Any]:
    """The clients and clusters of the rows of ``X``; None where there are none."""
    return _ids_of(model, as_frame(X) if model.spec.named else None, client, cluster, "client")


def _ids_of(model: Model, frame: Frame | None, client: Any, cluster: Any, level: Level) -> tuple[Any, Any]:
    """The clients and clusters of new rows: from the arguments, or from the table's columns."""
    client = _ids(client, frame, model.spec.client, needed=level == "client" and model.elsewhere is None)
    needed = level != "global" and (client is None or bool(model.spec.nested))
    return client, _ids(cluster, frame, model.spec.cluster, needed=needed)


def _ids(given: Any, frame: Frame | None, name: str | None, needed: bool) -> Any:
    if given is not None or frame is None or name is None:
        return given
    if name not in frame.columns and not needed:
        return None
    return column(frame, name)


def _refuse_missing_ids(model: Model, client: Any, cluster: Any, level: Level) -> None:
    """Raise an error for rows without ids. Predictions of the global model would hide the mistake."""
    if level == "client" and client is None and cluster is None and model.hierarchy.n_clients > 1:
        raise DataError("This model was fitted to several clients: pass client= (and cluster=) to predict, or level='global'.")
    if level == "cluster" and client is None and cluster is None and model.hierarchy.n_clusters > 1:
        raise DataError("This model was fitted to several clusters: pass cluster= to predict, or level='global'.")


def _response_of(model: Model, frame: Frame | None, y: Any, weights: Any, trials: Any) -> tuple[Any, Any, Any]:
    """The response, weights and trials of new rows: from the arguments, or from the table's columns."""
    formula = model.problem.formula
    if y is None:
        if frame is None or formula is None or formula.response is None:
            raise DataError("There is no response: pass y, or the column to the left of '~' in the formula.")
        y = response(formula, frame)
    if weights is None and frame is not None and model.spec.weights is not None:
        weights = numeric(frame, model.spec.weights)
    if trials is None and frame is not None and model.spec.trials is not None:
        trials = numeric(frame, model.spec.trials)
    return y, weights, trials


def _offset_of(model: Model, given: Any, frame: Frame | None, n_rows: int) -> Floats | None:
    """The offsets of new rows: from the argument, or from the table's column."""
    model.problem.check_offset(given)
    if given is None and frame is not None:
        given = model.problem.offset_of(frame)
    if given is None:
        if model.problem.has_offset:
            raise DataError("This model was fitted with an offset: pass offset= to predict, or zeros.")
        return None
    offset = np.asarray(given, dtype=np.float64)
    if offset.shape != (n_rows,):
        raise DataError(f"The offset has shape {offset.shape} for {n_rows} rows; give one value per row.")
    refuse_infinite(offset[:, None], ["offset"], lambda row: f"row {row}")
    return offset
