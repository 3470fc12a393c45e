"""Who is whose parent: clients in clusters in the whole; sums and means up, broadcast down.

Clients of one cluster are contiguous (``cluster_ptr``), so that everything here is a segment operation.
This is also the one place that decides which model answers for an id that training did not see.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import polars as pl

from covey._typing import Anything, Floats, Ints
from covey.errors import DataError, listing, one_of
from covey.tree.ids import as_labels, lookup, to_array

Level = Literal["client", "cluster", "global"]
Unseen = Literal["parent", "raise"]

LEVELS = ("client", "cluster", "global")
UNSEEN = ("parent", "raise")


@dataclass(frozen=True)
class Resolved:
    """For each row the client and cluster whose model answers for it; -1 where there is none."""

    client: Ints
    cluster: Ints

    def level(self) -> Anything:
        """For each row ``"client"``, ``"cluster"`` or ``"global"``: the finest level with a model for it."""
        return np.where(self.client >= 0, "client", np.where(self.cluster >= 0, "cluster", "global"))

    def index(self, n_clients: int) -> Ints:
        """For each row the place of its model in a table of ``n_clients`` clients, then all clusters, the global model last.

        >>> Resolved(np.array([1, -1, -1]), np.array([0, 2, -1])).index(5).tolist()
        [1, 7, -1]
        """
        return np.where(self.client >= 0, self.client, np.where(self.cluster >= 0, self.cluster + n_clients, -1))


@dataclass(frozen=True)
class Hierarchy:
    """Clients grouped in clusters.

    Parameters
    ----------
    cluster_ptr : (k + 1,) integers; clients ``cluster_ptr[j]:cluster_ptr[j + 1]`` are in cluster ``j``
    client_ids, cluster_ids : the labels, ``n`` and ``k`` of them, in that order
    """

    cluster_ptr: Ints
    client_ids: pl.Series
    cluster_ids: pl.Series

    @property
    def n_clients(self) -> int:
        return int(self.cluster_ptr[-1])

    @property
    def n_clusters(self) -> int:
        return len(self.cluster_ptr) - 1

    @cached_property
    def parent(self) -> Ints:
        """The cluster of each client."""
        return np.repeat(np.arange(self.n_clusters), np.diff(self.cluster_ptr))

    @property
    def sizes(self) -> Ints:
        """The number of clients of each cluster."""
        return np.diff(self.cluster_ptr)

    @property
    def clients(self) -> Anything:
        return to_array(self.client_ids)

    @property
    def clusters(self) -> Anything:
        return to_array(self.cluster_ids)

    def sum_up(self, values: Floats) -> Floats:
        """Sum over the clients of each cluster."""
        return segment_sum(values, self.cluster_ptr)

    def mean_up(self, values: Floats, weights: Floats) -> Floats:
        """Weighted mean over the clients of each cluster; ``values (n, d)``, ``weights (n,)``."""
        total = self.sum_up(weights)
        return self.sum_up(values * weights[:, None]) / np.where(total > 0, total, 1.0)[:, None]

    def down(self, values: Floats) -> Floats:
        """What each client gets from its cluster."""
        return values[self.parent]

    def resolve(
        self, client: Any, cluster: Any, *, n_rows: int, unseen: Unseen = "parent", level: Level = "client"
    ) -> Resolved:
        """Find the model that answers for each row.

        A client that was not seen in training, or whose id is missing, falls back to its cluster, and an
        unknown cluster to the global model; with ``unseen="raise"`` either is an error. A known client
        under another cluster than in training is always an error.
        """
        if unseen not in UNSEEN:
            raise one_of("unseen", unseen, UNSEEN)
        if level not in LEVELS:
            raise one_of("level", level, LEVELS)
        nobody = np.full(n_rows, -1, dtype=np.int64)
        if level == "global":
            return Resolved(nobody, nobody)
        i = nobody if client is None else self._find(client, self.client_ids, "client", n_rows)
        j = nobody if cluster is None else self._find(cluster, self.cluster_ids, "cluster", n_rows)
        if client is not None and cluster is not None and len(self.parent):  # an operator's model has no clients
            self._refuse_moved(i, j, client, cluster)
        j = np.where(i >= 0, self.parent[i], j) if len(self.parent) else j
        if unseen == "raise":
            if level == "client":
                _refuse_unseen(client, i, "client")
            else:
                _refuse_unseen(cluster, j, "cluster")
        return Resolved(i if level == "client" else nobody, j)

    def _find(self, values: Any, known: pl.Series, what: str, n_rows: int) -> Ints:
        labels = as_labels(values, what)
        if len(labels) != n_rows:
            raise DataError(f"There are {len(labels)} {what} ids for {n_rows} rows; give one id a row.")
        return lookup(labels, known, what)

    def _refuse_moved(self, i: Ints, j: Ints, client: Any, cluster: Any) -> None:
        named = as_labels(cluster, "cluster")
        moved = np.flatnonzero((i >= 0) & named.is_not_null().to_numpy() & (self.parent[i] != j))
        if len(moved):
            row = int(moved[0])
            raise DataError(
                f"Client {as_labels(client, 'client')[row]!r} was in cluster {self.cluster_ids[int(self.parent[i[row]])]!r} in "
                f"training but row {row} puts it in {named[row]!r}; correct the cluster column, or give the client a new id."
            )


def _refuse_unseen(values: Any, found: Ints, what: str) -> None:
    lost = np.flatnonzero(found < 0)
    if not len(lost):
        return
    if values is None:
        raise DataError(f"No {what} ids were given; pass {what}= or set unseen='parent'.")
    labels = as_labels(values, what).gather(lost)
    missing = labels.null_count()
    if missing:
        first = int(lost[int(labels.is_null().arg_max() or 0)])
        rows = "1 row has" if missing == 1 else f"{missing} rows have"
        raise DataError(f"{rows} no {what} id (first: row {first}); fill them in, or set unseen='parent'.")
    raise DataError(
        f"{what.capitalize()}s {listing(labels.unique(maintain_order=True).to_list(), 5)} were not seen in training; "
        f"leave their rows out, or set unseen='parent' to use the model one level up."
    )


def segment_sum(values: Floats, ptr: Ints) -> Floats:
    """Sums of ``values[ptr[j]:ptr[j + 1]]`` along the first axis; an empty segment gives zero."""
    total = np.zeros((len(ptr) - 1, *values.shape[1:]))
    filled = ptr[1:] > ptr[:-1]
    if filled.any():
        total[filled] = np.add.reduceat(values, ptr[:-1][filled], axis=0)
    return total
