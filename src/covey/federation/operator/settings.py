"""Settings of a run, as the operator gives them on a command line or to Flower, and the allow-list of sites."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import polars as pl

from covey._typing import Anything
from covey.errors import DataError, FederationError, did_you_mean, listing, number, whole
from covey.federation.privacy.differential import DELTA, check_spec, privacy_of
from covey.federation.wire.codec import client_tags, ids_to_json
from covey.federation.wire.messages import Privacy
from covey.federation.wire.schema import Limits
from covey.fitting.fit import check_elsewhere, check_solver
from covey.problem.problem import Problem, Spec
from covey.tables.files import read_table
from covey.tree.hierarchy import as_labels


@dataclass(frozen=True)
class Members:
    """The operator's allow-list: which clusters and clients each site may contribute. It is empty if there is no list.

    Without a list, a site may contribute everything that no other site has.

    Parameters
    ----------
    clusters : ids of the clusters of each site, as JSON has them
    clients : for each site a table of ``cluster`` and ``client``; empty, if the list does not name clients
    """

    clusters: Mapping[str, frozenset[Any]] = field(default_factory=dict)
    clients: Mapping[str, pl.DataFrame] = field(default_factory=dict)

    @classmethod
    def read(cls, path: str | Path | None) -> Members:
        """From a file with the columns ``site``, ``cluster`` and optionally ``client``; None for no list."""
        if path is None:
            return cls()
        table = read_table(path, ids=["cluster", "client"], text=["site"])
        for name in ("site", "cluster"):
            if name not in table.columns:
                raise DataError(f"The list of members {str(path)!r} has no column {name!r}; it needs site and cluster.")
        labels = {name: as_labels(table[name], name) for name in ("cluster", "client") if name in table.columns}
        parts = {str(site): part for (site,), part in table.with_columns(**labels).group_by(["site"])}
        clusters = {site: frozenset(ids_to_json(part["cluster"].drop_nulls())) for site, part in parts.items()}
        if "client" not in labels:
            return cls(clusters)
        return cls(clusters, {site: part.select("cluster", "client").drop_nulls() for site, part in parts.items()})

    @property
    def sites(self) -> tuple[str, ...]:
        return tuple(sorted(self.clusters))

    def check_clusters(self, site: str, found: Iterable[Any]) -> None:
        """Refuse a site that is not listed, or clusters that are not listed for it."""
        if not self.clusters:
            return
        if site not in self.clusters:
            raise FederationError(f"Site {site!r} is not in the operator's list; add it there, or do not let it in.")
        foreign = [cluster for cluster in found if cluster not in self.clusters[site]]
        if foreign:
            listed = listing(sorted(self.clusters[site], key=repr), 4)
            rows = f"rows of cluster {foreign[0]!r}, but the operator's list gives it {listed}"
            raise FederationError(f"Site {site!r} has {rows}; correct the cluster column there, or the list.")

    def check_clients(self, site: str, pairs: Anything | None, salt: str) -> None:
        """Refuse pairs of cluster and client, given by their tags, that are not listed for a site, and a site without tags."""
        if pairs is None:
            why = f"Site {site!r} sent no keyed hashes of its clients, so they cannot be compared with the list --members"
            raise FederationError(f"{why}; install the same version of covey there.")
        tags = {other: self._tags(other, salt) for other in dict.fromkeys((site, *self.sites))}
        unknown = {tuple(pair) for pair in pairs.tolist()} - tags[site]
        for other in tags if unknown else ():
            if claimed := len(unknown & tags[other]):
                whose = f"{claimed} of the clients that the operator's list gives to site {other!r}"
                raise FederationError(f"Site {site!r} claims {whose}; correct its client column, or the list.")
        if unknown:
            where = "that are not in the operator's list, or are there in another cluster"
            raise FederationError(f"Site {site!r} has {len(unknown)} clients {where}; correct its columns, or the list.")

    def _tags(self, site: str, salt: str) -> set[Any]:
        """Tags of the listed pairs of cluster and client, as the site itself computes them."""
        part = self.clients.get(site, pl.DataFrame({"cluster": [], "client": []}))
        pairs = zip(ids_to_json(part["cluster"]), part["client"].to_list(), strict=True)
        return {tuple(tag) for tag in client_tags(pairs, salt).tolist()}


@dataclass(frozen=True)
class RunSettings:
    """Settings of a run, beside the specification of the model.

    Attributes
    ----------
    timeout : seconds to wait for a reply
    retries : how often a message is sent again, each time after ``pause`` seconds
    patience : seconds to wait for sites to connect, and for their owners to approve the run
    secure : whether sums are masked: a coordinator that follows the protocol sees only their totals
    categories : allowed categories by column
    members : allow-list of clusters and clients by site
    limits : the most that one site may send
    private, delta : differential privacy of the fit, if any, and the probability with which its bound may fail
    """

    timeout: float = 600.0
    retries: int = 2
    pause: float = 0.0
    secure: bool = False
    categories: Mapping[str, Any] | None = None
    members: Members = field(default_factory=Members)
    private: Privacy | None = None
    delta: float = DELTA
    patience: float = 0.0
    limits: Limits = field(default_factory=Limits)

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> RunSettings:
        """The settings of the run among those of a command; one that is None is not given.

        By default a site has 20 seconds to come back before it is asked again, and all sites have 60 to connect.
        """
        given = {"timeout": cls.timeout, "retries": cls.retries, "pause": 20.0, "wait": 60.0, **_given(settings)}
        private, delta = privacy_of(given, str(given.get("family", "gaussian")))
        categories = _mapping(given, "categories", '{"zone": ["a", "b"]}', list)
        for name, values in categories.items():
            if len({repr(value) for value in values}) < len(values):
                raise FederationError(f"The 'categories' of column {name!r} have a value twice; list each value once.")
        return cls(
            timeout=number("setting 'timeout', in seconds,", given["timeout"], above=0),
            retries=whole("setting 'retries'", given["retries"]),
            pause=number("setting 'pause', in seconds,", given["pause"], least=0),
            secure=given.get("secure", False),
            categories=categories,
            members=Members.read(given.get("members")),
            private=private,
            delta=delta,
            patience=number("setting 'wait', in seconds,", given["wait"], least=0),
            limits=Limits.of(_mapping(given, "limits", '{"clusters": 200000}', int)),
        )

    def check(self, draft: Problem) -> None:
        """Refuse a problem that sites cannot fit with these settings."""
        check_solver(draft.spec)
        check_elsewhere(draft.spec)
        if self.private is not None:
            check_spec(draft.spec)
        if self.secure and self.members.clients:
            why = "Under masks the coordinator cannot check clients' ids against the operator's list"
            raise FederationError(f"{why}; leave the column client out of the list, or leave out --secure.")
        factors = [] if draft.formula is None else draft.formula.factors
        words = [[each.expression] if each.kind == "lookup" else re.findall(r"[^\W\d]\w*", each.expression) for each in factors]
        columns = [name for found in words for name in found]
        for name in self.categories or ():
            if name not in columns:
                meant = did_you_mean(name, columns)
                raise FederationError(f"The column {name!r} of 'categories' is not in the formula; {meant}")


def _given(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if value is not None}


def spec_of(settings: Mapping[str, Any]) -> Spec:
    """The specification of the model among the settings of a command."""
    known = [option.name for option in fields(Spec)]
    return Spec(**{name: value for name, value in _given(settings).items() if name in known})


def _mapping(settings: Mapping[str, Any], name: str, example: str, kind: Any) -> dict[str, Any]:
    """A setting that has values of a kind by name, given as JSON text."""
    text = settings.get(name, "{}")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not (isinstance(found, Mapping) and all(isinstance(value, kind) for value in found.values())):
        raise FederationError(f"The setting {name!r} must be given as in {example}. Got {text[:80]!r} instead.")
    return dict(found)


def expected_sites(wanted: str | int | None, members: Members) -> tuple[str, ...] | int:
    """The sites that must take part: those named in ``wanted``, else those of the allow-list, else a number of sites (1)."""
    text, listed = "" if wanted is None else str(wanted).strip(), members.sites
    if text and not text.isdecimal():
        return tuple(dict.fromkeys(name for name in map(str.strip, text.split(",")) if name))
    if text == "0":
        raise FederationError("The setting 'sites' must be the least number of sites, or their names: a,b,c. Got 0 instead.")
    if text and listed and int(text) != len(listed):
        raise FederationError(f"The setting 'sites' is {text}, and the list of members has {len(listed)}; leave out 'sites'.")
    return listed or int(text or 1)
