"""Any table to ``GroupedData``: rows sorted by cluster, then client, and everything checked once.

Nothing is dropped or guessed in silence: what cannot be used is refused here, by column, client and row, so that
no later module has to look again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from covey._typing import Anything, Floats, Ints
from covey.errors import DataError
from covey.tables import kernels
from covey.tree.hierarchy import Hierarchy, encode, segment_sum

Place = Callable[[int], str]  # names a row for the person who has to correct it
Check = Callable[[Floats, Place], None]

_CHUNK = 1 << 18  # rows gathered at a time: bounds the temporary memory of a sort


@dataclass(frozen=True)
class GroupedData:
    """Rows of all clients, clients contiguous, clusters contiguous.

    Build it with :meth:`from_arrays`; solvers read it and never write.

    Parameters
    ----------
    X : (N, d) float64, C-contiguous
    y : (N,) float64
    client_ptr : (n + 1,); rows ``client_ptr[i]:client_ptr[i + 1]`` belong to client ``i``
    hierarchy : the ``n`` clients in their ``k`` clusters
    terms : the ``d`` column names
    weights, offset : (N,) float64 or None
    """

    X: Floats
    y: Floats
    client_ptr: Ints
    hierarchy: Hierarchy
    terms: tuple[str, ...]
    weights: Floats | None = None
    offset: Floats | None = None

    @classmethod
    def from_arrays(
        cls,
        X: Any,
        y: Any,
        client: Any = None,
        cluster: Any = None,
        *,
        weights: Any = None,
        offset: Any = None,
        terms: Sequence[str] | None = None,
    ) -> GroupedData:
        """Group plain arrays.

        Without ``client`` all rows belong to one client; without ``cluster`` all clients to one cluster.

        >>> data = GroupedData.from_arrays([[1.0], [2.0], [3.0]], [0.1, 0.2, 0.3], ["b", "a", "b"])
        >>> data.hierarchy.clients.tolist(), data.client_ptr.tolist(), data.X.ravel().tolist()
        (['a', 'b'], [0, 1, 3], [2.0, 1.0, 3.0])
        """
        X = np.asarray(X, dtype=np.float64)
        if X.ndim != 2:
            raise DataError(f"X must have two dimensions, rows and terms; got shape {X.shape}.")
        names = tuple(terms) if terms is not None else tuple(f"x{j}" for j in range(X.shape[1]))
        return cls.from_blocks([X], len(X), y, client, cluster, weights=weights, offset=offset, terms=names)

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
        terms: tuple[str, ...],
        check: Check | None = None,
    ) -> GroupedData:
        """Group columns or matrices that stand side by side; what every other way in comes to.

        ``check`` may refuse responses that a family cannot have; it is told how to name a row.
        """
        if n_rows == 0:
            raise DataError("The table has no rows; covey needs at least one.")
        columns = {"y": y, "weights": weights, "offset": offset}
        vectors = {name: _vector(values, name, n_rows) for name, values in columns.items() if values is not None}
        order, client_ptr, hierarchy = _group(client, cluster, n_rows)
        X = side_by_side(blocks, order)
        if X.shape[1] != len(terms):
            raise DataError(f"X has {X.shape[1]} columns but {len(terms)} terms are named; give one name a column.")
        sorted_ = {name: values if order is None else side_by_side([values], order)[:, 0] for name, values in vectors.items()}
        data = cls(X, sorted_.pop("y"), client_ptr, hierarchy, terms, **sorted_)

        def place(row: int) -> str:
            at = row if order is None else int(order[row])
            return f"row {at}{data._owner(row)}"

        data._refuse_bad_values(place)
        if check is not None:
            check(data.y, place)
        return data

    @property
    def n_rows(self) -> int:
        return len(self.y)

    @property
    def n_clients(self) -> int:
        return self.hierarchy.n_clients

    @property
    def n_clusters(self) -> int:
        return self.hierarchy.n_clusters

    @property
    def n_terms(self) -> int:
        return int(self.X.shape[1])

    @property
    def rows_per_client(self) -> Ints:
        return np.diff(self.client_ptr)

    @property
    def rows_that_count(self) -> Floats:
        """How many rows of each client have a weight above zero."""
        if self.weights is None:
            return self.rows_per_client.astype(np.float64)
        return segment_sum((self.weights > 0).astype(np.float64), self.client_ptr)

    def margin(self, theta: Floats) -> Floats:
        """``x'theta_i + offset`` of each row, ``theta (n, d)``."""
        margin: Floats = np.einsum("ld,ld->l", self.X, theta[self.client_of_row])
        return margin if self.offset is None else margin + self.offset

    @property
    def client_of_row(self) -> Ints:
        return np.repeat(np.arange(self.n_clients), self.rows_per_client)

    def clients(self, start: int, stop: int) -> GroupedData:
        """A view of some consecutive clients, under the same clusters."""
        rows = slice(int(self.client_ptr[start]), int(self.client_ptr[stop]))
        tree = self.hierarchy
        return replace(
            self,
            X=self.X[rows],
            y=self.y[rows],
            client_ptr=self.client_ptr[start : stop + 1] - self.client_ptr[start],
            hierarchy=Hierarchy(np.clip(tree.cluster_ptr, start, stop) - start, tree.client_ids[start:stop], tree.cluster_ids),
            weights=None if self.weights is None else self.weights[rows],
            offset=None if self.offset is None else self.offset[rows],
        )

    def rows(self, keep: Anything) -> GroupedData:
        """Some of the rows (a mask), all clients and clusters kept even where none of their rows is."""
        counts = np.add.reduceat(np.append(keep, 0), self.client_ptr[:-1], dtype=np.int64)
        counts[self.rows_per_client == 0] = 0
        return replace(
            self,
            X=self.X[keep],
            y=self.y[keep],
            client_ptr=np.concatenate([[0], np.cumsum(counts)]),
            weights=None if self.weights is None else self.weights[keep],
            offset=None if self.offset is None else self.offset[keep],
        )

    def split(self, test: float, seed: int | np.random.Generator) -> tuple[GroupedData, GroupedData]:
        """Hold out a share of the rows within each client, by a seed.

        A client of ``m`` rows gives ``test * m`` of them, rounded up or down by a coin so that small clients are
        tested too, and always keeps at least one row for training.
        """
        if not 0 < test < 1:
            raise DataError(f"The share of rows held out must be between 0 and 1; got {test!r}.")
        rng = np.random.default_rng(seed)
        rows = self.rows_per_client
        share = test * rows
        held = np.floor(share + rng.random(len(rows))).astype(np.int64)
        held = np.minimum(held, np.maximum(rows - 1, 0))
        out = self._rank_within_client(rng) < np.repeat(held, rows)
        return self.rows(~out), self.rows(out)

    def folds(self, count: int, seed: int | np.random.Generator) -> Ints:
        """A fold for each row, balanced within each client, by a seed."""
        if count < 2:
            raise DataError(f"Cross-validation needs at least 2 folds; got {count!r}.")
        rng = np.random.default_rng(seed)
        # A random first fold for each client, else fold 0 would hold the only row of every small client.
        start = np.repeat(rng.integers(count, size=self.n_clients), self.rows_per_client)
        return (self._rank_within_client(rng) + start) % count

    def pooled(self) -> GroupedData:
        """The same rows as those of one client in one cluster."""
        tree = Hierarchy(np.array([0, 1]), pl.Series(["all"]), pl.Series(["all"]))
        return replace(self, client_ptr=np.array([0, self.n_rows]), hierarchy=tree)

    def one_cluster(self) -> GroupedData:
        """The same clients, all in one cluster."""
        tree = Hierarchy(np.array([0, self.n_clients]), self.hierarchy.client_ids, pl.Series(["all"]))
        return replace(self, hierarchy=tree)

    def _rank_within_client(self, rng: np.random.Generator) -> Ints:
        """A random order of each client's rows, as ranks from 0."""
        shuffled = np.lexsort((rng.random(self.n_rows), self.client_of_row))
        rank = np.empty(self.n_rows, dtype=np.int64)
        rank[shuffled] = np.arange(self.n_rows) - np.repeat(self.client_ptr[:-1], self.rows_per_client)
        return rank

    def _refuse_bad_values(self, place: Place) -> None:
        refuse_infinite(self.X, self.terms, place)
        for name, values in (("the response", self.y), ("the weight", self.weights), ("the offset", self.offset)):
            if values is not None and not np.isfinite(values).all():
                row = int(np.flatnonzero(~np.isfinite(values))[0])
                raise _bad_value(name, values[row], place(row))
        if self.weights is not None:
            if (self.weights < 0).any():
                row = int(np.flatnonzero(self.weights < 0)[0])
                raise DataError(f"The weight {self.weights[row]:g} in {place(row)} is negative; weights must be >= 0.")
            if not self.weights.any():
                raise DataError("All weights are zero; give at least one row a positive weight.")

    def _owner(self, row: int) -> str:
        client = int(np.searchsorted(self.client_ptr, row, side="right")) - 1
        return "" if self.n_clients == 1 else f" (client {self.hierarchy.client_ids[client]!r})"


def refuse_infinite(X: Floats, terms: Sequence[str], place: Place) -> None:
    """Raise for the first value of ``X`` that is NaN or infinite, by column and place."""
    for start in range(0, len(X), _CHUNK):
        block = X[start : start + _CHUNK]
        if not np.isfinite(block.sum()) and not np.isfinite(block).all():
            row, column = np.argwhere(~np.isfinite(block))[0]
            raise _bad_value(f"column {terms[column]!r}", block[row, column], place(start + int(row)))


def _bad_value(what: str, value: float, place: str) -> DataError:
    word = "NaN" if np.isnan(value) else "infinite (inf)"
    return DataError(f"{what[0].upper()}{what[1:]} is {word} in {place}; fill the value or leave the row out.")


def read_table(path: str | Path, *, ids: Sequence[str | None] = (), text: Sequence[str | None] = ()) -> pl.DataFrame:
    """Read a Parquet or CSV file (``.parquet``, ``.csv``, ``.csv.gz``, ``.tsv``).

    CSV columns keep the types they show; empty fields and ``NA`` are missing values.

    Parameters
    ----------
    ids : columns of ids: numbers that would lose leading zeros (ZIP codes) stay text
    text : columns that are text whatever they look like
    """
    path = Path(path)
    suffix = "".join(path.suffixes[-2:]) if path.suffix == ".gz" else path.suffix
    if not path.exists():
        raise DataError(f"There is no file {str(path)!r}; check the path.")
    if path.is_dir():
        raise DataError(f"{str(path)!r} is a folder; give a file.")
    try:
        if suffix in (".parquet", ".pq"):
            return pl.read_parquet(path)
        if suffix in (".csv", ".csv.gz", ".tsv", ".tsv.gz"):
            return _read_csv(path, "\t" if "tsv" in suffix else ",", {*ids} - {None}, {*text} - {None})
    except (pl.exceptions.PolarsError, OSError) as problem:
        reason = str(problem).strip().splitlines()[0].rstrip(".")
        raise DataError(f"The file {str(path)!r} cannot be read: {reason}.") from None
    raise DataError(f"The file {str(path)!r} must end in .parquet, .csv, .csv.gz or .tsv; convert it first.")


def _read_csv(path: Path, separator: str, ids: set[Any], text: set[Any]) -> pl.DataFrame:
    names = pl.read_csv(path, separator=separator, n_rows=0).columns
    as_text = {name: pl.String for name in names if name in ids | text}
    frame = pl.read_csv(path, separator=separator, infer_schema_length=None, null_values=["NA"], schema_overrides=as_text)
    for name in set(as_text) - text:
        numbers = frame[name].cast(pl.Int64, strict=False)
        if (numbers.cast(pl.String).eq_missing(frame[name])).all():
            frame = frame.with_columns(numbers)
    return frame


def _vector(values: Any, name: str, n_rows: int) -> Floats:
    what = "the response" if name == "y" else f"the {name}"
    raw = np.asarray(values)
    text = raw.dtype.kind in "USMm" or (raw.dtype.kind == "O" and any(isinstance(value, str) for value in raw.flat))
    try:
        vector = raw.astype(np.float64, copy=False)
    except (TypeError, ValueError):
        text = True
    if text:
        raise DataError(f"{what.capitalize()} must be numbers; convert the column, or choose another family.")
    if vector.ndim != 1:
        raise DataError(f"{what.capitalize()} must be one column; got shape {vector.shape}.")
    if len(vector) != n_rows:
        raise DataError(f"There are {len(vector)} values of {what} for {n_rows} rows of X; they must match.")
    return vector


def _group(client: Any, cluster: Any, n_rows: int) -> tuple[Anything | None, Ints, Hierarchy]:
    """The order that sorts rows by cluster, then client (None if they are sorted), and the hierarchy."""
    if client is None and cluster is not None:
        raise DataError("Clusters were given without clients; say which column holds the clients with client=.")
    client_ids, i = _codes(client, "client", n_rows)
    cluster_ids, j = _codes(cluster, "cluster", n_rows)
    parent = np.full(len(client_ids), -1, dtype=np.int64)
    counts = np.zeros(len(client_ids), dtype=np.int64)
    row = kernels.find_parents(i, j, parent, counts)
    if row >= 0:
        raise DataError(
            f"Client {client_ids[int(i[row])]!r} is in clusters {cluster_ids[int(j[row])]!r} and "
            f"{cluster_ids[int(parent[i[row]])]!r}; a client belongs to one cluster: correct the column, or make the "
            "client ids unique, for example by joining cluster and client."
        )
    del j
    by_cluster = np.argsort(parent, kind="stable")
    rank = np.empty_like(by_cluster)
    rank[by_cluster] = np.arange(len(by_cluster))
    client_ptr = np.concatenate([[0], np.cumsum(counts[by_cluster])])
    cluster_ptr = np.concatenate([[0], np.cumsum(np.bincount(parent, minlength=len(cluster_ids)))])
    order = np.empty(n_rows, dtype=np.int32 if n_rows < 2**31 else np.int64)
    moved = kernels.counting_sort(i, rank, client_ptr, order)
    return order if moved else None, client_ptr, Hierarchy(cluster_ptr, client_ids.gather(by_cluster), cluster_ids)


def _codes(ids: Any, what: str, n_rows: int) -> tuple[pl.Series, Ints]:
    if ids is None:
        return pl.Series(["all"]), np.zeros(n_rows, dtype=np.int64)
    distinct, codes = encode(ids, what)
    if len(codes) != n_rows:
        raise DataError(f"There are {len(codes)} {what} ids for {n_rows} rows; give one id a row.")
    return distinct, codes


def side_by_side(blocks: Sequence[Anything], order: Anything | None = None) -> Floats:
    """Blocks side by side, rows in the given order, with no more than a chunk of temporaries."""
    if order is None and len(blocks) == 1 and blocks[0].ndim == 2:
        return np.ascontiguousarray(blocks[0], dtype=np.float64)
    matrices = [block if block.ndim == 2 else block[:, None] for block in blocks]
    n_rows = len(blocks[0])
    X = np.empty((n_rows, sum(matrix.shape[1] for matrix in matrices)))
    left = 0
    for matrix in matrices:
        part = X[:, left : left + matrix.shape[1]]
        if order is None:
            part[:] = matrix
        else:
            for start in range(0, n_rows, _CHUNK):
                rows = slice(start, start + _CHUNK)
                _take_rows(matrix, order[rows], part[rows])
        left += matrix.shape[1]
    return X


def _take_rows(source: Anything, rows: Anything, target: Floats) -> None:
    """``target[:] = source[rows]``; for plain matrices on all cores, since far-off rows cost a wait for memory each."""
    if source.dtype == np.float64 and source.flags.c_contiguous and target.flags.c_contiguous:
        kernels.take_rows(source, rows, target)
    else:
        target[:] = source[rows]
