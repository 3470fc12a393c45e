"""Which rows a model holds: a hash of each client's rows, for each batch of rows that was added.

The rows of the fit are the first batch. A batch is not added if each of its clients had exactly these rows in an earlier one.
Hashes are saved with the sums of clients: like those, they reveal something about a client with very few rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl

from covey._typing import Ints
from covey.kernels import hash_rows
from covey.nodes.network import Node, Request
from covey.records import Record
from covey.tables.rows import GroupedData
from covey.tables.values import Dropped
from covey.threads import share

Codes = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Batches(Record):
    """Hashes ``code (m,)`` of the rows of clients at the places ``client (m,)``, one for each client of each batch."""

    client: Ints
    code: Codes

    @classmethod
    def of(cls, data: GroupedData) -> Batches:
        """The rows of one batch. The order of a client's rows does not matter. Sums of rows have no hashes."""
        if data.sums is not None:
            return cls(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.uint64))
        code = np.zeros(data.n_clients, dtype=np.uint64)
        weights = np.ones(1) if data.weights is None else data.weights
        offset = np.zeros(1) if data.offset is None else data.offset
        parts = (np.ascontiguousarray(part).view(np.uint64) for part in (data.X, data.y, weights, offset))
        share(hash_rows, len(code), *parts, data.client_ptr, code)
        return cls(np.arange(data.n_clients), code)

    @classmethod
    def from_table(cls, sums: pl.DataFrame | None) -> Batches:
        """The hashes in a table of sums; models of earlier versions have none."""
        if sums is None or "batches" not in sums.columns:
            return cls(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.uint64))
        lists = sums["batches"]
        at = np.repeat(np.arange(len(lists)), lists.list.len().to_numpy())
        return cls(at, lists.explode().drop_nulls().cast(pl.UInt64).to_numpy())

    def to_column(self, n_clients: int) -> pl.Series:
        """The hashes of each client, as a column of lists."""
        if np.array_equal(self.client, np.arange(n_clients)):  # one batch, as after a fit; a list of lists would be slow
            return pl.Series("batches", self.code[:, None]).cast(pl.List(pl.UInt64))
        ends = np.cumsum(np.bincount(self.client, minlength=n_clients))[:-1]
        parts = np.split(self.code[np.argsort(self.client, kind="stable")], ends)
        return pl.Series("batches", [part.tolist() for part in parts], dtype=pl.List(pl.UInt64))

    def moved(self, places: Ints) -> Batches:
        """The hashes with clients at new places; those of clients at -1 are forgotten."""
        at = places[self.client]
        return Batches(at[at >= 0], self.code[at >= 0])

    def joined(self, other: Batches) -> Batches:
        """The hashes of both."""
        return Batches(np.concatenate([self.client, other.client]), np.concatenate([self.code, other.code]))

    def holds(self, other: Batches) -> bool:
        """Whether every client of another batch has a batch with the same rows here."""
        return bool(len(other.client)) and set(_pairs(other)) <= set(_pairs(self))


@dataclass(frozen=True)
class HeldRows(Record):
    """What a model remembers of the rows of a node: their numbers ``(n,)``, what was dropped, and their hashes."""

    rows: Ints
    dropped: Dropped | None
    batches: Batches


@dataclass(frozen=True)
class TakeRows(Request[HeldRows]):
    """Return what a model remembers of the rows; ``hashes`` says whether to compute their hashes."""

    hashes: bool

    def at(self, node: Node) -> HeldRows:
        batches = Batches.of(node.data) if self.hashes else Batches.from_table(None)
        return HeldRows(node.data.rows_per_client, node.data.dropped, batches)


def _pairs(batches: Batches) -> Iterator[tuple[int, int]]:
    return zip(batches.client.tolist(), batches.code.tolist(), strict=True)
