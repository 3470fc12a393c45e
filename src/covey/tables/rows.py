"""Rows grouped by client and cluster: from any table to :class:`GroupedData`.

Rows are sorted by cluster, then by client, and all values are checked here, once. A value that cannot be used raises an error
that names its column, client and row. No row is dropped silently.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
from numpy.typing import ArrayLike

from covey._typing import Anything, Floats, Ints
from covey.errors import DataError
from covey.kernels import counting_sort, find_parents, rank_in_segments, take_rows
from covey.tables.values import Dropped, choose_rows, repeats_of, take
from covey.threads import share
from covey.tree.hierarchy import Hierarchy, encode, encode_runs, segment_sum

if TYPE_CHECKING:
    from covey.tables.sparse import SparseColumns
    from covey.tables.sums import RowSums

Place = Callable[[int], str]  # names a row in an error message
Check = Callable[[Floats, Place], None]

_CHUNK = 1 << 18  # rows that are copied at a time, which bounds the temporary memory
_LONG = 256  # rows of a client from which on its rows are ranked by sorting


@dataclass(frozen=True)
class GroupedData:
    """Rows of all clients; the rows of a client and the clients of a cluster are contiguous.

    Build it with :meth:`from_arrays`. Solvers read it and never write to it.

    Parameters
    ----------
    X : (N, d) float64, C-contiguous
        One row for each observation, one column for each term.
    y : (N,) float64
        The response.
    client_ptr : (n + 1,) int64
        Rows ``client_ptr[i]:client_ptr[i + 1]`` belong to client ``i``.
    hierarchy : Hierarchy
        The ``n`` clients in their ``k`` clusters, with their ids.
    terms : tuple of str
        The names of the ``d`` columns.
    weights : (N,) float64 or None
        Weights of the rows; None means that every row has weight 1.
    offset : (N,) float64 or None
        A known part of the linear predictor; None means zero.
    dropped : Dropped or None
        The rows that were left out because values were missing.
    sums : RowSums or None
        If given, the rows are not those of the table: they are a few rows of each client with the same sums of products
        (:mod:`covey.tables.sums`).
    shared : SparseColumns or None
        Sparse columns of terms that do not vary. Once they have coefficients, their part of the linear predictor is in
        ``offset``.

    Examples
    --------
    >>> from covey import GroupedData
    >>> data = GroupedData.from_arrays([[1.0], [2.0], [3.0]], [0.1, 0.2, 0.3], ["b", "a", "b"])
    >>> data.n_rows, data.n_clients, data.n_clusters, data.terms
    (3, 2, 1, ('x0',))
    """

    X: Floats
    y: Floats
    client_ptr: Ints
    hierarchy: Hierarchy
    terms: tuple[str, ...]
    weights: Floats | None = None
    offset: Floats | None = None
    dropped: Dropped | None = None
    sums: RowSums | None = None
    shared: SparseColumns | None = None

    @classmethod
    def from_arrays(
        cls,
        X: ArrayLike,
        y: ArrayLike,
        client: ArrayLike | None = None,
        cluster: ArrayLike | None = None,
        *,
        weights: ArrayLike | None = None,
        offset: ArrayLike | None = None,
        frequency: ArrayLike | None = None,
        terms: Sequence[str] | None = None,
    ) -> GroupedData:
        """Group the rows of plain arrays.

        Parameters
        ----------
        X : (N, d) numbers
        y : (N,) numbers
        client, cluster : (N,) ids or None
            The client of each row and the cluster of that client. Without ``client`` all rows belong to one client; without
            ``cluster`` all clients belong to one cluster.
        weights, offset : (N,) numbers or None
        frequency : (N,) whole numbers or None
            How often each row counts: a row with frequency 3 is three equal rows.
        terms : the ``d`` names of the columns; ``x0``, ``x1``, ... by default

        Returns
        -------
        GroupedData
            The rows, sorted by cluster and client.

        Examples
        --------
        >>> data = GroupedData.from_arrays([[1.0], [2.0], [3.0]], [0.1, 0.2, 0.3], ["b", "a", "b"])
        >>> data.hierarchy.clients.tolist(), data.client_ptr.tolist(), data.X.ravel().tolist()
        (['a', 'b'], [0, 1, 3], [2.0, 1.0, 3.0])
        """
        X = np.asarray(X, dtype=np.float64)
        if X.ndim != 2:
            raise DataError(f"X must have two dimensions, rows and terms; got shape {X.shape}.")
        names = tuple(terms) if terms is not None else tuple(f"x{j}" for j in range(X.shape[1]))
        rows, _ = choose_rows({}, len(X), frequency)
        X, y, client, cluster = (take(values, rows) for values in (X, y, client, cluster))
        beside: dict[str, Any] = {"weights": weights, "offset": offset, "frequency": frequency}
        beside = {name: take(values, rows) for name, values in beside.items()}
        return cls.from_blocks([np.asarray(X)], len(np.asarray(X)), y, client, cluster, **beside, terms=names, numbers=rows)

    @classmethod
    def from_blocks(
        cls,
        blocks: Sequence[Anything],
        n_rows: int,
        y: Any,
        client: Any,
        cluster: Any,
        *,
        weights: Any = None,
        offset: Any = None,
        frequency: Any = None,
        terms: tuple[str, ...],
        nested: bool = False,
        checks: Sequence[Check] = (),
        numbers: Ints | None = None,
        weighed: bool = True,
        shared: SparseColumns | None = None,
    ) -> GroupedData:
        """Group columns or matrices that stand side by side; every other constructor calls this one.

        If ``nested``, client ids are unique only within their cluster. ``checks`` refuse responses that are outside the range
        of a family. If ``weighed``, some row must have a positive weight. A ``frequency`` is at least 1. ``numbers`` are the
        numbers of the rows in the user's table, if some were left out. ``shared`` are sparse columns.
        """
        if n_rows == 0:
            raise DataError("The table has no rows; covey needs at least one.")
        columns = {"y": y, "weights": weights, "offset": offset}
        vectors = {name: _vector(values, name, n_rows) for name, values in columns.items() if values is not None}
        repeats = None if frequency is None else repeats_of(frequency, n_rows)
        order, client_ptr, hierarchy = group_ids(client, cluster, n_rows, nested)
        if repeats is not None:
            order = np.arange(n_rows, dtype=np.int32 if n_rows < 2**31 else np.int64) if order is None else order
            client_ptr = np.concatenate([[0], np.cumsum(repeats[order])])[client_ptr]
            order = np.repeat(order, repeats[order])
        X = side_by_side(blocks, order)
        if X.shape[1] != len(terms):
            raise DataError(f"X has {X.shape[1]} columns, but {len(terms)} terms are named; give one name for each column.")
        sorted_ = {name: values if order is None else side_by_side([values], order)[:, 0] for name, values in vectors.items()}
        y, weights, offset = (sorted_.get(name) for name in ("y", "weights", "offset"))
        beside = None if shared is None else shared.sorted(order, offset)
        data = cls(X, y, client_ptr, hierarchy, terms, weights, offset, shared=beside)

        def place(row: int) -> str:
            owner = hierarchy.identity(int(np.searchsorted(client_ptr, row, side="right")) - 1)
            at = row if order is None else int(order[row])
            at = at if numbers is None else int(numbers[at])
            return f"row {at}" if data.n_clients == 1 else f"row {at} (client {owner!r})"

        data._refuse_bad_values(place, weighed)
        for each in checks:
            each(data.y, place)
        return data

    @property
    def n_rows(self) -> int:
        """The number of rows in ``X``."""
        return len(self.y)

    @property
    def n_clients(self) -> int:
        """The number of clients."""
        return self.hierarchy.n_clients

    @property
    def n_clusters(self) -> int:
        """The number of clusters."""
        return self.hierarchy.n_clusters

    @property
    def n_terms(self) -> int:
        """The number of terms."""
        return int(self.X.shape[1])

    @property
    def rows_per_client(self) -> Ints:
        """The number of rows of each client in the table."""
        return np.diff(self.client_ptr) if self.sums is None else self.sums.rows

    @property
    def rows_that_count(self) -> Floats:
        """The number of rows with a positive weight, of each client."""
        if self.sums is not None:
            return self.sums.counted
        if self.weights is None:
            return self.rows_per_client.astype(np.float64)
        return segment_sum((self.weights > 0).astype(np.float64), self.client_ptr)

    @property
    def weight_of_client(self) -> Floats:
        """The sum of the weights of each client's rows."""
        if self.sums is not None:
            return self.sums.weight
        return self.rows_per_client.astype(np.float64) if self.weights is None else segment_sum(self.weights, self.client_ptr)

    @property
    def unit(self) -> Floats:
        """The column of ones, ``(N,)``."""
        return np.ones(self.n_rows) if self.sums is None else self.sums.unit

    @property
    def client_of_row(self) -> Ints:
        """The position of each row's client."""
        return np.repeat(np.arange(self.n_clients), np.diff(self.client_ptr))

    def margin(self, theta: Floats) -> Floats:
        """The linear predictor ``x'theta_i + offset`` of each row, for coefficients ``theta (n, d)``."""
        margin: Floats = np.einsum("ld,ld->l", self.X, theta[self.client_of_row])
        return margin if self.offset is None else margin + self.offset

    def clients(self, start: int, stop: int) -> GroupedData:
        """A view of clients ``start:stop``; all clusters are kept."""
        tree = self.hierarchy
        return self._select(
            slice(int(self.client_ptr[start]), int(self.client_ptr[stop])),
            self.client_ptr[start : stop + 1] - self.client_ptr[start],
            replace(tree, cluster_ptr=np.clip(tree.cluster_ptr, start, stop) - start, client_ids=tree.client_ids[start:stop]),
            None if self.sums is None else self.sums.clients(start, stop, self.client_ptr),
        )

    def every(self, step: int) -> GroupedData:
        """The first client of every ``step`` clients; all clusters are kept."""
        kept, tree = np.arange(0, self.n_clients, step), self.hierarchy
        ptr = np.concatenate([[0], np.cumsum(self.rows_per_client[kept])])
        tree = replace(tree, cluster_ptr=-(-tree.cluster_ptr // step), client_ids=tree.client_ids.gather(kept))
        rows = np.flatnonzero(np.repeat(np.arange(self.n_clients) % step == 0, np.diff(self.client_ptr)))
        return self._select(rows, ptr, tree)

    def rows(self, keep: Anything) -> GroupedData:
        """The rows where the mask ``keep`` is true; clients and clusters without rows are kept."""
        self.need_rows("A choice of rows")
        counts = np.add.reduceat(np.append(keep, 0), self.client_ptr[:-1], dtype=np.int64)
        counts[self.rows_per_client == 0] = 0
        return self._select(keep, np.concatenate([[0], np.cumsum(counts)]), self.hierarchy)

    def need_rows(self, what: str) -> None:
        """Raise an error if only sums of the table's rows are here."""
        if self.sums is not None:
            raise DataError(f"{what} needs the rows of the table, and only sums of them are here; use shards (covey shard).")

    def _select(
        self, rows: slice | Anything, client_ptr: Ints, hierarchy: Hierarchy, sums: RowSums | None = None
    ) -> GroupedData:
        weights, offset = (None if values is None else values[rows] for values in (self.weights, self.offset))
        return GroupedData(self.X[rows], self.y[rows], client_ptr, hierarchy, self.terms, weights, offset, sums=sums)

    def split(self, test: float, seed: int | np.random.Generator) -> tuple[GroupedData, GroupedData]:
        """Split into rows for training and rows for testing, at random within each client.

        A client with ``m`` rows gives ``test * m`` of them for testing. This number is rounded up or down at random, so that
        small clients are tested too. Every client keeps at least one row for training.
        """
        if not 0 < test < 1:
            raise DataError(f"The share of rows held out must be between 0 and 1; got {test!r}.")
        self.need_rows("A comparison on held-out rows")
        rng = np.random.default_rng(seed)
        rows = self.rows_per_client
        held = np.floor(test * rows + rng.random(len(rows))).astype(np.int64)
        held = np.minimum(held, np.maximum(rows - 1, 0))
        out = self._rank_within_client(rng) < np.repeat(held, rows)
        return self.rows(~out), self.rows(out)

    def folds(self, count: int, seed: int | np.random.Generator) -> Ints:
        """A random fold for each row; the folds are balanced within each client."""
        if count < 2:
            raise DataError(f"Cross-validation needs at least 2 folds; got {count!r}.")
        self.need_rows("Cross-validation")
        rng = np.random.default_rng(seed)
        # Each client starts at a random fold. Otherwise fold 0 would hold the only row of every small client.
        start = np.repeat(rng.integers(count, size=self.n_clients), self.rows_per_client)
        return (self._rank_within_client(rng) + start) % count

    def pooled(self) -> GroupedData:
        """The same rows, all of one client in one cluster."""
        tree = Hierarchy(np.array([0, 1]), pl.Series(["all"]), pl.Series(["all"]))
        sums = None if self.sums is None else self.sums.pooled()
        return replace(self, client_ptr=np.array([0, self.n_rows]), hierarchy=tree, sums=sums)

    def one_cluster(self) -> GroupedData:
        """The same clients, all in one cluster."""
        tree = Hierarchy(np.array([0, self.n_clients]), self.hierarchy.client_ids, pl.Series(["all"]))
        return replace(self, hierarchy=tree)

    def _rank_within_client(self, rng: np.random.Generator) -> Ints:
        """The position of each row in a random order of its client's rows."""
        drawn, rank = rng.random(self.n_rows), np.empty(self.n_rows, dtype=np.int64)
        share(rank_in_segments, self.n_clients, drawn, self.client_ptr, _LONG, rank)
        for i in np.flatnonzero(self.rows_per_client > _LONG).tolist():
            rows = slice(self.client_ptr[i], self.client_ptr[i + 1])
            rank[rows][np.argsort(drawn[rows], kind="stable")] = np.arange(self.rows_per_client[i])
        return rank

    def _refuse_bad_values(self, place: Place, weighed: bool) -> None:
        refuse_infinite(self.X, self.terms, place)
        for name, values in (("The response", self.y), ("The weight", self.weights), ("The offset", self.offset)):
            if values is not None and not np.isfinite(values).all():
                row = int(np.flatnonzero(~np.isfinite(values))[0])
                raise _bad_value(name, values[row], place(row))
        if self.weights is not None:
            if (self.weights < 0).any():
                row = int(np.flatnonzero(self.weights < 0)[0])
                raise DataError(f"The weight {self.weights[row]:g} in {place(row)} is negative; weights must be >= 0.")
            if weighed and not self.weights.any():
                raise DataError("All weights are zero; give at least one row a positive weight.")


def refuse_infinite(X: Floats, terms: Sequence[str], place: Place) -> None:
    """Raise an error for the first value of ``X`` that is NaN or infinite."""
    for start in range(0, len(X), _CHUNK):
        block = X[start : start + _CHUNK]
        if not np.isfinite(block.sum()) and not np.isfinite(block).all():
            row, column = np.argwhere(~np.isfinite(block))[0]
            raise _bad_value(f"Column {terms[column]!r}", block[row, column], place(start + int(row)))


def _bad_value(what: str, value: float, place: str) -> DataError:
    word = "NaN" if np.isnan(value) else "infinite (inf)"
    drop = " A fit can drop such rows: na='drop' (in the shell --na drop)." if np.isnan(value) else ""
    return DataError(f"{what} is {word} in {place}; fill the value or leave the row out.{drop}")


def _vector(values: Any, name: str, n_rows: int) -> Floats:
    what = "the response" if name == "y" else f"the {name}"
    raw = np.asarray(values)
    try:
        if raw.dtype.kind in "USMm" or (raw.dtype.kind == "O" and any(isinstance(value, str) for value in raw.flat)):
            raise TypeError
        vector = raw.astype(np.float64, copy=False)
    except (TypeError, ValueError):
        raise DataError(
            f"{what.capitalize()} must be numbers{_first_text(raw)}; convert the column, or choose another family."
        ) from None
    if vector.ndim != 1:
        raise DataError(f"{what.capitalize()} must be one column; got shape {vector.shape}.")
    if len(vector) != n_rows:
        raise DataError(f"There are {len(vector)} values of {what} for {n_rows} rows of X; they must match.")
    return vector


def _first_text(raw: Any) -> str:
    """The first value that is no number, as a clause, if there is one."""
    for row, value in enumerate(raw.tolist() if raw.ndim == 1 else ()):
        try:
            float(value)
        except (TypeError, ValueError):
            return f", but is {value!r} in row {row}"
    return ""


def group_ids(client: Any, cluster: Any, n_rows: int, nested: bool) -> tuple[Anything | None, Ints, Hierarchy]:
    """The order that sorts rows by cluster and client (None if they are sorted), ``client_ptr``, and the hierarchy."""
    if client is None and cluster is not None:
        raise DataError("Clusters were given without clients; name the column of the clients with client=.")
    # Clusters first: a client id that is made of both is missing where the cluster is.
    cluster_ids, j, whole = _codes(cluster, "cluster", n_rows)
    j = np.repeat(j, np.diff(whole)) if len(j) > 1 and len(whole) else j
    client_ids, i, runs = _codes(client, "client", n_rows)
    parent = np.full(len(client_ids), -1, dtype=np.int64)
    counts = np.zeros(len(client_ids), dtype=np.int64)
    row = find_parents(i, runs, j, parent, counts)
    if row >= 0:
        i, runs = (np.repeat(i, np.diff(runs)) if len(runs) else i), runs[:0]
    if row >= 0 and nested:  # an id repeats in several clusters: a client is a pair of both ids
        pairs, i = encode(j * len(client_ids) + i, "client")
        parent, which = np.divmod(pairs.to_numpy(), len(client_ids))
        client_ids, counts = client_ids.gather(which), np.bincount(i, minlength=len(pairs))
    elif row >= 0:
        raise DataError(
            f"Client {client_ids[int(i[row])]!r} is in clusters {cluster_ids[int(j[row])]!r} and "
            f"{cluster_ids[int(parent[i[row]])]!r}, but a client belongs to one cluster; correct the column, or make the "
            "client ids unique, for example by joining cluster and client."
        )
    del j
    by_cluster = np.argsort(parent, kind="stable")
    rank = np.empty_like(by_cluster)
    rank[by_cluster] = np.arange(len(by_cluster))
    client_ptr = np.concatenate([[0], np.cumsum(counts[by_cluster])])
    cluster_ptr = np.concatenate([[0], np.cumsum(np.bincount(parent, minlength=len(cluster_ids)))])
    order = np.empty(n_rows, dtype=np.int32 if n_rows < 2**31 else np.int64)
    moved = counting_sort(i, runs, rank, client_ptr, order)
    return (
        order if moved else None,
        client_ptr,
        Hierarchy(cluster_ptr, client_ids.gather(by_cluster), cluster_ids, nested and cluster is not None),
    )


def _codes(ids: Any, what: str, n_rows: int) -> tuple[pl.Series, Ints, Ints]:
    """The distinct ids, the code of each run, and the runs, as from :func:`encode_runs`; one id for all rows if None."""
    if ids is None:
        return pl.Series(["all"]), np.zeros(1, dtype=np.int64), np.array([0, n_rows])
    distinct, codes, runs = encode_runs(ids, what)
    count = int(runs[-1]) if len(runs) else len(codes)
    if count != n_rows:
        raise DataError(f"There are {count} {what} ids for {n_rows} rows; give one id for each row.")
    return distinct, codes, runs


def side_by_side(blocks: Sequence[Anything], order: Anything | None = None) -> Floats:
    """Join blocks side by side, with the rows in the given order; temporary memory is one chunk."""
    if order is None and len(blocks) == 1 and blocks[0].ndim == 2:
        return np.ascontiguousarray(blocks[0], dtype=np.float64)
    matrices = [block if block.ndim == 2 else block[:, None] for block in blocks]
    n_rows = len(blocks[0] if order is None else order)
    X = np.empty((n_rows, sum(matrix.shape[1] for matrix in matrices)))
    left = 0
    for matrix in matrices:
        part = X[:, left : left + matrix.shape[1]]
        if order is None or matrix.strides[0] == 0:  # in this order, or the same in all rows
            part[:] = matrix if order is None else matrix[:1]
        elif matrix.dtype == np.float64 and matrix.flags.c_contiguous:
            share(take_rows, len(order), matrix, order, X, left)
        else:
            for start in range(0, n_rows, _CHUNK):
                part[start : start + _CHUNK] = matrix.take(order[start : start + _CHUNK], axis=0)
        left += matrix.shape[1]
    return X
