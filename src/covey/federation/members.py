"""The operator's list: which site may bring which clusters, and which clients.

A table with the columns ``site``, ``cluster`` and, where the operator knows them, ``client``. Without a list every site may
bring anything that no other site has.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl

from covey._typing import Anything
from covey.data import read_table
from covey.errors import DataError, FederationError, listing


@dataclass(frozen=True)
class Members:
    """Who may bring whom; empty, if there is no list.

    Parameters
    ----------
    clusters : of each site, the ids of its clusters
    clients : of each site, the ids of its clients; empty where the list does not name them
    """

    clusters: Mapping[str, frozenset[Any]] = field(default_factory=dict)
    clients: Mapping[str, frozenset[Any]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: str | Path | None) -> Members:
        """From a file; with no path there is no list."""
        if path is None:
            return cls()
        table = read_table(path, ids=["cluster", "client"], text=["site"])
        for name in ("site", "cluster"):
            if name not in table.columns:
                raise DataError(f"The list of members {str(path)!r} has no column {name!r}; it needs site and cluster.")
        return cls(_by_site(table, "cluster"), _by_site(table, "client") if "client" in table.columns else {})

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
                "mend the cluster column there, or the list."
            )

    def check_clients(self, site: str, tags: Anything, tag: Any) -> None:
        """Refuse clients that the list does not give a site; ``tag`` turns ids into tags as the site did."""
        if not self.clients:
            return
        own = {tuple(each) for each in tag(self.clients.get(site, frozenset())).tolist()}
        unknown = sum(tuple(each) not in own for each in tags.tolist())
        if not unknown:
            return
        for other in self.sites:
            theirs = {tuple(each) for each in tag(self.clients.get(other, frozenset())).tolist()}
            claimed = sum(tuple(each) in theirs for each in tags.tolist())
            if other != site and claimed:
                raise FederationError(
                    f"Site {site!r} claims {claimed} of the clients that the operator's list gives to site {other!r}; it is "
                    "refused: mend its client column, or the list."
                )
        raise FederationError(
            f"Site {site!r} has {unknown} clients that are not in the operator's list; mend its client column, or the list."
        )


def _short(members: Members, site: str) -> str:
    return listing(sorted(members.clusters[site], key=repr), 4)


def _by_site(table: pl.DataFrame, name: str) -> dict[str, frozenset[Any]]:
    return {str(site): frozenset(part[name].drop_nulls().to_list()) for (site,), part in table.group_by(["site"])}
