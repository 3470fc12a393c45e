"""The operator's list: which clusters and clients each site may contribute.

A table with the columns ``site``, ``cluster`` and, where the operator knows them, ``client``. Without a list every site may
contribute anything that no other site has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl

from covey._typing import Anything
from covey.errors import DataError, FederationError, listing
from covey.federation.wire.ids import plain_ids
from covey.tables.design import compose
from covey.tables.rows import read_table
from covey.tree.hierarchy import as_labels


@dataclass(frozen=True)
class Members:
    """Which clusters and clients each site may contribute; empty, if there is no list.

    Parameters
    ----------
    clusters : of each site, the ids of its clusters, as JSON has them
    clients : of each site, a table of ``cluster`` and ``client``; empty where the list does not name clients
    """

    clusters: Mapping[str, frozenset[Any]] = field(default_factory=dict)
    clients: Mapping[str, pl.DataFrame] = field(default_factory=dict)

    @classmethod
    def read(cls, path: str | Path | None) -> Members:
        """From a file; with no path there is no list."""
        if path is None:
            return cls()
        table = read_table(path, ids=["cluster", "client"], text=["site"])
        for name in ("site", "cluster"):
            if name not in table.columns:
                raise DataError(f"The list of members {str(path)!r} has no column {name!r}; it needs site and cluster.")
        labels = {name: as_labels(table[name], name) for name in ("cluster", "client") if name in table.columns}
        parts = {str(site): part for (site,), part in table.with_columns(**labels).group_by(["site"])}
        clusters = {site: frozenset(plain_ids(part["cluster"].drop_nulls())) for site, part in parts.items()}
        clients = (
            {site: part.select("cluster", "client").drop_nulls() for site, part in parts.items()} if "client" in labels else {}
        )
        return cls(clusters, clients)

    @property
    def sites(self) -> tuple[str, ...]:
        return tuple(sorted(self.clusters))

    def check_clusters(self, site: str, found: Iterable[Any]) -> None:
        """Refuse a site that is not listed, or clusters that are not its own."""
        if not self.clusters:
            return
        if site not in self.clusters:
            raise FederationError(f"Site {site!r} is not in the operator's list; add it there, or do not let it in.")
        foreign = [each for each in found if each not in self.clusters[site]]
        if foreign:
            raise FederationError(
                f"Site {site!r} has rows of cluster {foreign[0]!r}, but the operator's list gives it {_short(self, site)}; "
                "correct the cluster column there, or the list."
            )

    def check_clients(self, site: str, pairs: Anything, nested: bool, tag: Callable[[list[Any]], Anything]) -> None:
        """Refuse clients, or clusters of them, that the list does not give a site; ``tag`` turns ids into tags as it did."""
        if not self.clients:
            return
        own = self._tags(site, nested, tag)
        unknown = sum(tuple(each) not in own for each in pairs.tolist())
        if not unknown:
            return
        for other in self.sites:
            theirs = self._tags(other, nested, tag)
            claimed = sum(tuple(each) in theirs for each in pairs.tolist())
            if other != site and claimed:
                raise FederationError(
                    f"Site {site!r} claims {claimed} of the clients that the operator's list gives to site {other!r}; it is "
                    "refused: correct its client column, or the list."
                )
        raise FederationError(
            f"Site {site!r} has {unknown} clients that are not in the operator's list, or are there in another cluster; "
            "correct its columns, or the list."
        )

    def _tags(self, site: str, nested: bool, tag: Callable[[list[Any]], Anything]) -> set[Any]:
        """Tags of a site's clusters and clients, as it has them itself."""
        if site not in self.clients:
            return set()
        part = self.clients[site]
        clients = compose(part["cluster"], part["client"]) if nested else part["client"]
        return {tuple(each) for each in tag(list(zip(plain_ids(part["cluster"]), clients.to_list(), strict=True))).tolist()}


def _short(members: Members, site: str) -> str:
    return listing(sorted(members.clusters[site], key=repr), 4)
