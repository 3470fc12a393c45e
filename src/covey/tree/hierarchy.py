"""Ids of clients and clusters, and the hierarchy: which client belongs to which cluster.

Ids are integers, text, booleans, dates or floats; all ids of a column have one type, and null is a missing id. They become
sorted lists of distinct ids and integer codes. Clients of one cluster are contiguous, so sums and means over the clients of a
cluster are segment operations. :meth:`Hierarchy.resolve` decides which model predicts for an id that training did not see.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, cast

import narwhals as nw
import numpy as np
import polars as pl

from covey._typing import Anything, Floats, Ints
from covey.errors import DataError, listing, one_of
from covey.kernels import find_in_table, find_pairs, rank_in_table
from covey.threads import share

_MOSTLY = 0.8  # from this share of distinct texts on, sorting all of them is faster than finding the distinct ones first
_KINDS = {
    pl.Int64: "integers",
    pl.String: "text",
    pl.Boolean: "booleans",
    pl.Float64: "floating-point numbers",
    pl.Date: "dates",
}


def as_labels(values: Any, what: str) -> pl.Series:
    """Convert any column or sequence of ids to a polars series of one type, with null for a missing id.

    >>> as_labels([3.0, float("nan"), 1.0], "client").to_list()
    [3, None, 1]
    """
    series = nw.from_native(values, series_only=True, pass_through=True)
    if isinstance(series, nw.Series):
        native = series.to_native()
        if isinstance(native, pl.Series):
            return _canonical(native, what)
        values = native.to_pylist() if hasattr(native, "to_pylist") else native
    if isinstance(values, str):
        raise DataError(f"The {what} ids are {values!r}; give one id for each row, or name the column in the constructor.")
    if not isinstance(values, np.ndarray):
        odd = next((value for value in values if isinstance(value, tuple | list)), None) if isinstance(values, list) else None
        if odd is not None:
            raise _compound(what, odd)
        values = np.asarray(values) if hasattr(values, "__array__") else np.array(values, dtype=object)
    if values.ndim != 1:
        raise DataError(f"The {what} ids must be one-dimensional; got an array of shape {values.shape}.")
    if values.dtype.kind == "O":
        return _from_objects(values, what)
    return _canonical(pl.Series(values), what)


def encode(values: Any, what: str) -> tuple[pl.Series, Ints]:
    """Return the sorted distinct ids, and for each row the position of its id among them. A missing id is an error.

    >>> ids, codes = encode(["b", "a", "b"], "client")
    >>> ids.to_list(), codes.tolist()
    (['a', 'b'], [1, 0, 1])
    """
    distinct, codes, runs = encode_runs(values, what)
    return distinct, np.repeat(codes, np.diff(runs)) if len(runs) else codes


def encode_runs(values: Any, what: str) -> tuple[pl.Series, Ints, Ints]:
    """Return the sorted distinct ids, the position of each run's id among them, and the runs of rows.

    Run ``r`` is the rows ``runs[r]:runs[r + 1]``. If few rows are in runs, ``runs`` is empty, and each row is one.

    >>> ids, codes, runs = encode_runs(["b", "b", "b", "a", "a"], "client")
    >>> codes.tolist(), runs.tolist()
    ([1, 0], [0, 3, 5])
    """
    rows = np.empty(0, dtype=np.int64)
    if isinstance(values, np.ndarray) and values.dtype == np.int64 and values.ndim == 1 and len(values):
        return *_encode_integers(values), rows  # without a copy: tables may have many millions of rows
    labels = as_labels(values, what)
    _refuse_missing(labels, None, what, "fill the column or leave the rows out")
    if labels.dtype == pl.Int64 and len(labels):
        return *_encode_integers(labels.to_numpy()), rows
    labels, lengths = _runs(labels)
    distinct, codes = _encode_text(labels) if labels.dtype == pl.String else _encode_any(labels, what)
    return distinct, codes, rows if lengths is None else np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


def _runs(labels: pl.Series) -> tuple[pl.Series, Ints | None]:
    """The values of runs of equal ids, and the lengths of the runs; the ids themselves if few rows are in runs."""
    runs = labels.rle()
    if 2 * len(runs) > len(labels):
        return labels, None
    return runs.struct.field("value"), runs.struct.field("len").to_numpy()


def _encode_text(labels: pl.Series) -> tuple[pl.Series, Ints]:
    if cast(int, labels.approx_n_unique()) > _MOSTLY * len(labels):
        return _encode_by_sorting(labels)
    # polars numbers the categories in the order in which it meets them. Only the distinct texts are sorted.
    met = labels.cast(pl.Categorical).to_physical().to_numpy().astype(np.int64)
    numbers, codes = _encode_integers(met)
    first = np.empty(len(numbers), dtype=np.int64)
    first[codes[::-1]] = np.arange(len(codes))[::-1]
    texts = labels.gather(first)
    order = texts.arg_sort().to_numpy()
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order))
    return texts.gather(order), rank[codes]


def _encode_by_sorting(labels: pl.Series) -> tuple[pl.Series, Ints]:
    order = labels.arg_sort()
    ordered = labels.gather(order)
    new = ordered.ne_missing(ordered.shift(1))
    codes = np.empty(len(labels), dtype=np.int64)
    codes[order.to_numpy()] = np.cumsum(new.to_numpy()) - 1
    return ordered.filter(new), codes


def _encode_any(labels: pl.Series, what: str) -> tuple[pl.Series, Ints]:
    distinct = labels.unique().sort()
    return distinct, lookup(labels, distinct, what)


def _refuse_missing(labels: pl.Series, rows: Ints | None, what: str, fix: str) -> None:
    """Raise an error if an id is missing; ``rows`` are the numbers of the rows, if they are not all rows."""
    missing = labels.null_count()
    if missing:
        at = int(labels.is_null().arg_max() or 0)
        first = at if rows is None else rows[at]
        raise DataError(f"{missing} {'row has' if missing == 1 else 'rows have'} no {what} id (first: row {first}); {fix}.")


def _encode_integers(values: Ints) -> tuple[pl.Series, Ints]:
    low, high = int(values.min()), int(values.max())
    if high - low < 4 * len(values) + 1024:
        # A lookup table over a compact range needs two passes; sorting millions of rows takes seconds.
        place = np.zeros(high - low + 1, dtype=np.int64)
        codes = np.empty(len(values), dtype=np.int64)
        rank_in_table(values, low, place, codes)
        return pl.Series(np.flatnonzero(place) + low), codes
    ids, inverse = np.unique(values, return_inverse=True)
    return pl.Series(ids), inverse.astype(np.int64, copy=False)


def lookup(labels: pl.Series, known: pl.Series, what: str) -> Ints:
    """Return for each row the position of its id in ``known``; -1 where it is absent or missing."""
    if labels.null_count() == len(labels) or len(known) == 0:
        return np.full(len(labels), -1, dtype=np.int64)
    if labels.dtype != known.dtype:
        if {labels.dtype, known.dtype} != {pl.Int64, pl.Float64}:
            shown = labels.drop_nulls()[0]
            raise DataError(
                f"The {what} ids are {kind(labels)} here (such as {shown!r}) but were {kind(known)} in training "
                f"(such as {known[0]!r}); convert the column to {kind(known)}."
            )
        if known.dtype == pl.Int64:
            labels = pl.Series(
                [int(value) if value is not None and value == int(value) else None for value in labels], dtype=pl.Int64
            )
        else:
            labels = labels.cast(pl.Float64)
    if labels.dtype == pl.Int64 and labels.null_count() == 0:
        numbers = known.to_numpy()
        low, high = int(numbers.min()), int(numbers.max())
        if high - low < 4 * (len(known) + len(labels)) + 1024:
            place = np.full(high - low + 1, -1, dtype=np.int64)
            place[numbers - low] = np.arange(len(known))
            codes = np.empty(len(labels), dtype=np.int64)
            find_in_table(labels.to_numpy(), low, place, codes)
            return codes
    labels, lengths = _runs(labels)
    position = pl.Series(np.arange(len(known)))
    found = labels.replace_strict(known, position, default=-1, return_dtype=pl.Int64).fill_null(-1).to_numpy()
    codes = found.astype(np.int64)  # a copy, because polars shares its memory for reading only
    return codes if lengths is None else np.repeat(codes, lengths)


def kind(labels: pl.Series) -> str:
    """Describe the type of ids in words."""
    return _KINDS.get(labels.dtype.base_type(), str(labels.dtype))


def to_array(labels: pl.Series) -> Anything:
    """Convert ids to a numpy array: of Python strings for text, otherwise of the matching dtype."""
    if labels.dtype == pl.String:
        return np.array(labels.to_list(), dtype=object)
    return cast(Anything, labels.to_numpy())


def _canonical(series: pl.Series, what: str) -> pl.Series:
    dtype = series.dtype
    if dtype.is_integer():
        if dtype == pl.UInt64 and (series.max() or 0) > 2**63 - 1:  # type: ignore[operator]
            raise _too_large(what)
        return series.cast(pl.Int64)
    if dtype.is_float():
        series = series.cast(pl.Float64).fill_nan(None)
        # A column of integers becomes one of floats when a value is missing: 12.0 is still client 12.
        known = series.drop_nulls()
        if bool((known == known.floor()).all()) and bool(known.is_finite().all()):
            if len(known) and float(known.abs().max()) > 2**53:  # type: ignore[arg-type]
                raise _too_large(what)
            return series.cast(pl.Int64)
        return series
    if isinstance(dtype, pl.Categorical | pl.Enum):
        return series.cast(pl.String)
    if dtype in (pl.String, pl.Boolean, pl.Date, pl.Null) or isinstance(dtype, pl.Datetime):
        return series
    raise DataError(f"The {what} ids must be integers, text, booleans or dates; got a column of type {dtype}.")


def _from_objects(values: Anything, what: str) -> pl.Series:
    present = [None if is_missing(value) else value for value in values]
    types = {type(value) for value in present if value is not None}
    if types & {tuple, list}:
        raise _compound(what, next(value for value in present if isinstance(value, tuple | list)))
    if types and all(issubclass(t, int | np.integer) and t is not bool for t in types):
        if max(abs(int(value)) for value in present if value is not None) > 2**63 - 1:
            raise _too_large(what)
        return pl.Series(present, dtype=pl.Int64)
    if types and all(issubclass(t, float | int | np.floating | np.integer) and t is not bool for t in types):
        return _canonical(pl.Series(present, dtype=pl.Float64), what)
    if types and all(issubclass(t, str) for t in types):
        return pl.Series([None if value is None else str(value) for value in present], dtype=pl.String)
    if len(types) > 1:
        kinds = " and ".join(sorted(t.__name__ for t in types))
        first = {type(value): value for value in reversed(present) if value is not None}
        shown = " and ".join(repr(value) for value in sorted(first.values(), key=present.index)[:2])
        raise DataError(f"The {what} ids mix {kinds} (such as {shown}); convert them to one type.")
    return _canonical(pl.Series(present), what)


def _compound(what: str, value: Any) -> DataError:
    kind = type(value).__name__
    return DataError(f"The {what} ids are {kind}s, such as {value!r}; join the parts of each to one text, such as 'a:b'.")


def _too_large(what: str) -> DataError:
    return DataError(f"The {what} ids are too large for 64-bit integers; convert the column to text.")


def is_missing(value: Any) -> bool:
    """Whether a value is missing: None, NaN, or NA and NaT of pandas."""
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return True
    return isinstance(value, float | np.floating) and bool(np.isnan(value))


Level = Literal["client", "cluster", "global"]
Unseen = Literal["parent", "raise"]

LEVELS = ("client", "cluster", "global")
UNSEEN = ("parent", "raise")


@dataclass(frozen=True)
class Resolved:
    """For each row, the client and the cluster whose models predict for it; -1 where there is none."""

    client: Ints
    cluster: Ints

    def level(self) -> Anything:
        """Return for each row the finest level that has a model: ``"client"``, ``"cluster"`` or ``"global"``."""
        return np.where(self.client >= 0, "client", np.where(self.cluster >= 0, "cluster", "global"))

    def index(self, n_clients: int) -> Ints:
        """Return for each row the position of its model in a table of ``n_clients`` clients, all clusters and the global model.

        >>> Resolved(np.array([1, -1, -1]), np.array([0, 2, -1])).index(5).tolist()
        [1, 7, -1]
        """
        return np.where(self.client >= 0, self.client, np.where(self.cluster >= 0, self.cluster + n_clients, -1))


@dataclass(frozen=True)
class Hierarchy:
    """Clients grouped in clusters.

    Parameters
    ----------
    cluster_ptr : (k + 1,) integers
        Clients ``cluster_ptr[j]:cluster_ptr[j + 1]`` belong to cluster ``j``.
    client_ids, cluster_ids : Series
        The ``n`` ids of the clients and the ``k`` ids of the clusters, in this order.
    nested : bool
        Whether a client id is unique only within its cluster. A client is then identified by the pair of both ids.
    """

    cluster_ptr: Ints
    client_ids: pl.Series
    cluster_ids: pl.Series
    nested: bool = False

    @property
    def n_clients(self) -> int:
        return int(self.cluster_ptr[-1])

    @property
    def n_clusters(self) -> int:
        return len(self.cluster_ptr) - 1

    @cached_property
    def parent(self) -> Ints:
        """Position of the cluster of each client, ``(n,)``."""
        return np.repeat(np.arange(self.n_clusters), np.diff(self.cluster_ptr))

    @property
    def sizes(self) -> Ints:
        """Number of clients of each cluster, ``(k,)``."""
        return np.diff(self.cluster_ptr)

    @cached_property
    def clients(self) -> Anything:
        return to_array(self.client_ids)

    @cached_property
    def clusters(self) -> Anything:
        return to_array(self.cluster_ids)

    @cached_property
    def clusters_of_clients(self) -> Anything:
        return to_array(self.cluster_of_client)

    @property
    def cluster_of_client(self) -> pl.Series:
        """The id of each client's cluster, ``(n,)``."""
        return self.cluster_ids.gather(self.parent)

    def identity(self, client: int) -> Any:
        """What identifies the client at this position: its id; or the pair of the ids of its cluster and its own, if nested."""
        own = self.client_ids[client]
        return (self.cluster_ids[int(self.parent[client])], own) if self.nested else own

    @property
    def identities(self) -> Anything:
        """What identifies each client, ``(n,)``: its id, or a pair of ids if they are nested."""
        if not self.nested:
            return self.clients
        pairs = np.empty(self.n_clients, dtype=object)
        pairs[:] = list(zip(self.cluster_of_client, self.client_ids, strict=True))
        return pairs

    def find(self, clients: pl.Series, clusters: Ints) -> Ints:
        """The positions of clients, given their ids and the positions of their clusters; -1 where there is no such client.

        >>> tree = Hierarchy(np.array([0, 2, 3]), pl.Series([1, 2, 1]), pl.Series(["a", "b"]), nested=True)
        >>> tree.find(pl.Series([1, 1, 2]), np.array([0, 1, 1])).tolist()
        [0, 2, -1]
        """
        if not self.nested or not self.n_clients:
            return lookup(clients, self.client_ids, "client")
        distinct, ptr, order = self._namesakes
        found = np.empty(len(clients), dtype=np.int64)
        share(find_pairs, len(found), lookup(clients, distinct, "client"), clusters, ptr, order, self.parent, found)
        return found

    @cached_property
    def _namesakes(self) -> tuple[pl.Series, Ints, Ints]:
        """The distinct client ids, and the clients that have each: ``order[ptr[a]:ptr[a + 1]]``, in the order of clusters."""
        distinct, codes = encode(self.client_ids, "client")
        ptr = np.concatenate([[0], np.cumsum(np.bincount(codes, minlength=len(distinct)))])
        return distinct, ptr, np.argsort(codes, kind="stable")

    def sum_up(self, values: Floats) -> Floats:
        """Sum over the clients of each cluster."""
        return segment_sum(values, self.cluster_ptr)

    def mean_up(self, values: Floats, weights: Floats) -> Floats:
        """Weighted mean over the clients of each cluster; ``values (n, d)``, ``weights (n,)``."""
        total = self.sum_up(weights)
        return self.sum_up(values * weights[:, None]) / np.where(total > 0, total, 1.0)[:, None]

    def down(self, values: Floats) -> Floats:
        """Copy the value of each cluster to its clients."""
        return values[self.parent]

    def resolve(
        self, client: Any, cluster: Any, *, n_rows: int, unseen: Unseen = "parent", level: Level = "client"
    ) -> Resolved:
        """Find the model that predicts for each row.

        The model of the cluster predicts for a client that was not in the training data or has no id. The global model
        predicts for an unknown cluster. With ``unseen="raise"`` both are errors. A known client in another cluster than in
        training is always an error; if ids are nested, it is a new client of that cluster.
        """
        if unseen not in UNSEEN:
            raise one_of("unseen", unseen, UNSEEN)
        if level not in LEVELS:
            raise one_of("level", level, LEVELS)
        nobody = np.full(n_rows, -1, dtype=np.int64)
        if level == "global":
            return Resolved(nobody, nobody)
        if self.nested and client is not None and cluster is None:
            raise DataError(
                "The model was fitted with cluster/client, so rows need the ids of their clusters and of their clients."
            )
        j = nobody if cluster is None else lookup(_labels(cluster, "cluster", n_rows), self.cluster_ids, "cluster")
        i = nobody if client is None else self.find(_labels(client, "client", n_rows), j)
        if client is not None and cluster is not None and len(self.parent):  # the model of an operator has no clients
            self._refuse_moved(i, j, client, cluster)
        j = np.where(i >= 0, self.parent[i], j) if len(self.parent) else j
        if unseen == "raise":
            if level == "client":
                _refuse_unseen(client, i, "client", cluster if self.nested else None)
            else:
                _refuse_unseen(cluster, j, "cluster")
        return Resolved(i if level == "client" else nobody, j)

    def _refuse_moved(self, i: Ints, j: Ints, client: Any, cluster: Any) -> None:
        named = as_labels(cluster, "cluster")
        moved = np.flatnonzero((i >= 0) & named.is_not_null().to_numpy() & (self.parent[i] != j))
        if len(moved):
            row = int(moved[0])
            raise DataError(
                f"Client {as_labels(client, 'client')[row]!r} was in cluster {self.cluster_ids[int(self.parent[i[row]])]!r} in "
                f"training but row {row} puts it in {named[row]!r}; correct the cluster column, or give the client a new id."
            )


def _labels(values: Any, what: str, n_rows: int) -> pl.Series:
    labels = as_labels(values, what)
    if len(labels) != n_rows:
        raise DataError(f"There are {len(labels)} {what} ids for {n_rows} rows; give one id for each row.")
    return labels


def _refuse_unseen(values: Any, found: Ints, what: str, cluster: Any = None) -> None:
    """Raise an error for rows without a model; with ``cluster``, a client is named by the ids of its cluster and its own."""
    lost = np.flatnonzero(found < 0)
    if not len(lost):
        return
    if values is None:
        raise DataError(f"No {what} ids were given; pass {what}= or set unseen='parent'.")
    labels = as_labels(values, what).gather(lost)
    _refuse_missing(labels, lost, what, "fill them in, or set unseen='parent'")
    above = None if cluster is None else as_labels(cluster, "cluster").gather(lost).to_list()
    ids = labels.to_list() if above is None else list(zip(above, labels, strict=True))
    ids = list(dict.fromkeys(ids))
    one = len(ids) == 1
    shown = repr(ids[0]) if above is None else f"{ids[0][1]!r} of cluster {ids[0][0]!r}"
    who = f"{what.capitalize()} {shown} was" if one else f"{what.capitalize()}s {listing(ids, 5)} were"
    raise DataError(
        f"{who} not seen in training; leave {'its' if one else 'their'} rows out, or set unseen='parent' to use the model one "
        "level up."
    )


def segment_sum(values: Floats, ptr: Ints) -> Floats:
    """Return the sums of ``values[ptr[j]:ptr[j + 1]]`` along the first axis; an empty segment sums to zero."""
    filled = ptr[1:] > ptr[:-1]
    if filled.all() and len(filled) and values.dtype == np.float64:
        return np.add.reduceat(values, ptr[:-1], axis=0)
    total = np.zeros((len(ptr) - 1, *values.shape[1:]))
    if filled.any():
        total[filled] = np.add.reduceat(values, ptr[:-1][filled], axis=0)
    return total
