"""What sites agree on before the first fit: columns, categories, clusters, classes; and who may bring whom.

    Hello   coordinator   sends   the specification and its own version
            site          sends   Profile: kinds of its columns, the categories and clusters it has; no counts, no clients
    Salt    one site      draws   the key of the tags, sealed for each other site; only if sums are masked
    Agree   coordinator   sends   what all have in common: the design with all categories, all clusters in order
            site          sends   Joined: tags of its clients, by which two sites with the same client are found; and Totals
    Scale   coordinator   sends   mean and standard deviation of each term, with its first request; only if asked for

A tag is a keyed hash of a client's id. The key is drawn by the coordinator, or with secure aggregation by the sites among
themselves: the coordinator then sees that two tags are equal, and cannot try ids.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from typing import Any

import numpy as np
import polars as pl

from covey._typing import Anything, Floats, Ints
from covey._version import __version__
from covey.errors import DataError, FederationError, FormulaError, listing
from covey.exact import Exact
from covey.federation.operator.members import Members, plain_ids
from covey.federation.privacy.sweeps import Privacy
from covey.losses import Loss
from covey.problem.problem import Problem, resolve
from covey.problem.spec import Spec
from covey.records import Record, Reply
from covey.tables.design import Formula
from covey.tables.formula import ParsedFormula

_TYPES: dict[str, Any] = {
    "integers": pl.Int64,
    "text": pl.String,
    "booleans": pl.Boolean,
    "floating-point numbers": pl.Float64,
    "dates": pl.Date,
}


# What travels


@dataclass(frozen=True)
class Hello(Record):
    """what is to be fitted, and by which version."""

    version: str
    spec: dict[str, Any]
    secure: bool = False
    private: Privacy | None = None


@dataclass(frozen=True)
class DrawSalt(Record):
    """draw the key of the tags, and seal it for each site whose public key is here."""

    keys: dict[str, str]


@dataclass(frozen=True)
class Profile(Record):
    """what a site's table is like.

    Attributes
    ----------
    version : of covey at the site
    kinds : of each column that the formula names, "numbers" or "categories"
    ids : kinds of the ids of "client" and "cluster", and of the values of the "response"
    levels : the categories of columns that hold some
    clusters : ids, in order
    classes : of a binary response, those that occur
    key : the site's public key of this run, if sums are to be masked
    repeated : whether the same id of a client occurs in two of its clusters
    """

    version: str
    kinds: dict[str, str]
    ids: dict[str, str]
    levels: dict[str, tuple[Any, ...]]
    clusters: tuple[Any, ...]
    classes: tuple[Any, ...] | None
    key: str = ""
    repeated: bool = False


@dataclass(frozen=True)
class Agree(Record):
    """what all sites have in common.

    Attributes
    ----------
    spec, design : as a model on disk has them
    clusters, cluster_kind : ids of all clusters, in order, and what kind they are
    classes : the two of a binary response
    roster : all sites
    keys : their public keys, if sums are to be masked
    salt : the key of the clients' tags; sealed for this site, if sums are to be masked
    private : how private the fit is to be, if it is
    listed : whether tags of clients and their clusters together are wanted too, for the operator's list
    """

    spec: dict[str, Any]
    design: dict[str, Any]
    clusters: tuple[Any, ...]
    cluster_kind: str
    classes: tuple[Any, ...] | None
    roster: tuple[str, ...]
    keys: dict[str, str]
    salt: str
    private: Privacy | None = None
    listed: bool = False


@dataclass(frozen=True)
class SiteTotals(Reply):
    """clients ``(k,)`` and rows ``(k,)`` of each cluster, and the sum of responses.

    If terms are to be standardised, also their :func:`~covey.tables.scaling.moments`.
    """

    clients: Ints
    rows: Ints
    response: Exact
    moments: Exact | None = None


@dataclass(frozen=True)
class Joined(Record):
    """what a site shows of its clients and rows.

    Attributes
    ----------
    tags : (n, 2) of its clients, in an order that says nothing; eight bytes times two for each
    rows : a keyed hash of all its rows, which shows later that a site without its memory has the same; "" in a private run
    pairs : (n, 2) tags of its clients with their clusters, if the operator has a list of them
    """

    tags: Anything
    rows: str
    pairs: Anything | None = None


@dataclass(frozen=True)
class Deliver(Record):
    """the upper levels, and all that a site needs to write its own clients' models.

    Attributes
    ----------
    w, wbar : models of clusters and of the whole
    lam : (k,) what ties clusters, if penalties were given
    convergence, learned, said : as a model on disk has them
    """

    w: Floats
    wbar: Floats
    lam: Floats | None
    convergence: dict[str, Any]
    learned: dict[str, Any] | None
    said: dict[str, Any]


# For both


def formula_of(problem: Problem) -> ParsedFormula:
    """The formula, which across sites names the response too."""
    if problem.formula is None or problem.formula.response is None:
        raise FormulaError("Across sites a formula names the response and the terms: write 'response ~ terms'.")
    return problem.formula


def digests(ids: Iterable[Any], salt: str) -> Anything:
    """Keyed hashes of ids, ``(n, 2)``, in an order that says nothing."""
    hashed = [bytes.fromhex(keyed(each, salt)) for each in ids]
    return np.frombuffer(b"".join(sorted(hashed)), dtype="<u8").reshape(-1, 2).copy()


def keyed(value: Any, salt: str) -> str:
    """A keyed hash of something, in hexadecimal."""
    return hashlib.blake2b(repr(value).encode(), digest_size=16, key=bytes.fromhex(salt)).hexdigest()


def in_order(values: Iterable[Any]) -> list[Any]:
    """Numbers, of whichever type, by value; then text."""
    return sorted(values, key=lambda value: (isinstance(value, str), value))


# The coordinator


def agree(
    profiles: Mapping[str, Profile],
    spec: Spec,
    categories: Mapping[str, Iterable[Any]],
    members: Members,
    private: Privacy | None = None,
) -> Agree:
    """What sites have in common; one that does not fit the others, or the operator's list, is refused by name.

    In a private run sites do not say which categories and classes they have: the operator's lists are all there is.
    """
    for site, profile in profiles.items():
        if profile.version != __version__:
            raise FederationError(
                f"Site {site!r} runs covey {profile.version} and the coordinator {__version__}; install the same version."
            )
        members.check_clusters(site, profile.clusters)
    _check_kinds(profiles)
    draft = resolve(spec)
    formula = formula_of(draft)
    first = next(iter(profiles.values()))
    columns = list(first.kinds)
    lhs = formula.response or ""
    if private is not None:
        _check_listed([lhs] * spec.loss.two_classes + [c for c in columns if first.kinds[c] == "categories"], categories)
    levels = {name: _levels(name, profiles, categories) for name in columns if first.kinds[name] == "categories"}
    design = Formula.of(formula.common, columns, levels)
    clusters = revive({each for profile in profiles.values() for each in profile.clusters}, first.ids["cluster"]).sort()
    settled = draft.spec
    if settled.nested:
        settled = replace(settled, nested=any(profile.repeated for profile in profiles.values()))
    classes = _classes(
        profiles if private is None else {"the operator": replace(first, classes=tuple(categories.get(lhs, ())))}
    )
    return Agree(
        settled.to_json(),
        design.to_json(),
        tuple(plain_ids(clusters)),
        first.ids["cluster"],
        classes if spec.loss.two_classes else None,
        tuple(sorted(profiles)),
        {},
        "",
        private,
        bool(members.clients),
    )


def cluster_ids(agreed: Agree) -> pl.Series:
    return revive(agreed.clusters, agreed.cluster_kind)


def owners(profiles: Mapping[str, Profile]) -> dict[tuple[str, Any], list[str]]:
    """The sites that have each cluster and each category, by which sums are told apart."""
    found: dict[tuple[str, Any], list[str]] = {}
    for site, profile in profiles.items():
        named = [("clusters", each) for each in profile.clusters]
        named += [(f"categories of {name!r}", each) for name, levels in profile.levels.items() for each in levels]
        for each in named:
            found.setdefault(each, []).append(site)
    return found


def check_spread(profiles: Mapping[str, Profile]) -> None:
    """Under masks, refuse a cluster or category that one site has alone: the total over sites would be that site's own sum."""
    found = owners(profiles)
    alone = [(what, value, sites[0]) for (what, value), sites in found.items() if len(sites) == 1]
    if alone:
        what, value, site = alone[0]
        many = sum(each[0] == what for each in alone), sum(each[0] == what for each in found)
        raise FederationError(
            f"{many[0]} of {many[1]} {what} are at one site only, such as {value!r} at {site!r}: masks would hide nothing "
            "there, the total being the site's own; choose such that sites share, or leave out --secure."
        )


def shared(found: Mapping[str, Anything]) -> list[tuple[str, str]]:
    """Pairs of sites that have the same tag."""
    sites = list(found)
    whose = np.repeat(np.arange(len(sites)), [len(found[site]) for site in sites])
    rows = np.concatenate([found[site] for site in sites])
    order = np.lexsort(rows.T)
    same = np.flatnonzero((rows[order[1:]] == rows[order[:-1]]).all(axis=1))
    return [(sites[whose[order[at]]], sites[whose[order[at + 1]]]) for at in same.tolist()]


def check_tags(found: Mapping[str, Anything]) -> None:
    """Refuse a client that two sites have."""
    same = shared(found)
    if same:
        one, two = sorted(same[0])
        both = len({tuple(each) for each in found[one].tolist()} & {tuple(each) for each in found[two].tolist()})
        many = f"{both} clients" if both > 1 else "A client"
        raise FederationError(
            f"{many} with the same id at sites {one!r} and {two!r}; a client belongs to one site: give each site's clients "
            "ids of their own, or remove the copy."
        )


def check_totals(found: SiteTotals, loss: Loss) -> None:
    """Refuse responses from which nothing can be learned."""
    loss.check_total(float(found.response.floats()))


def apart_from_most(told: Mapping[str, Any]) -> list[str]:
    """Sites that tell something else than most of them; all of them, if it is not clear what most tell.

    >>> apart_from_most({"north": "numbers", "south": "text", "west": "numbers"}), apart_from_most({"north": 1, "south": 2})
    (['south'], ['north', 'south'])
    """
    often = {value: list(told.values()).count(value) for value in told.values()}
    usual = [value for value, times in often.items() if times == max(often.values())]
    return [site for site, value in told.items() if len(usual) > 1 or value != usual[0]]


def _check_kinds(profiles: Mapping[str, Profile]) -> None:
    """All sites' columns, ids and responses must be of the kinds that most of them have."""
    words = {"client": "ids of clients are", "cluster": "ids of clusters are", "response": "response is"}
    told = {
        words[name]: {site: profile.ids.get(name, "missing") for site, profile in profiles.items()}
        for name in next(iter(profiles.values())).ids
    }
    for name in sorted({name for profile in profiles.values() for name in profile.kinds}):
        told[f"column {name!r} holds"] = {site: profile.kinds.get(name, "missing") for site, profile in profiles.items()}
    for what, kinds in told.items():
        odd = apart_from_most(kinds)
        if not odd:
            continue
        others = [site for site in kinds if kinds[site] != kinds[odd[0]]]
        elsewhere = f"at the other sites {kinds[others[0]]}" if len(odd) == 1 else f"at site {others[0]!r} {kinds[others[0]]}"
        raise FederationError(f"At site {odd[0]!r} the {what} {kinds[odd[0]]}, {elsewhere}; convert one of them.")


def _levels(name: str, profiles: Mapping[str, Profile], categories: Mapping[str, Iterable[Any]]) -> list[Any]:
    met = {site: set(profile.levels.get(name, ())) for site, profile in profiles.items()}
    if name in categories:
        listed = list(categories[name])
        for site, own in met.items():
            odd = sorted(own - set(listed), key=repr)
            if odd:
                raise FederationError(
                    f"At site {site!r} column {name!r} has the category {odd[0]!r}, which is not in the operator's list "
                    f"{listing(listed, 5)}; mend it there, or add it to the list."
                )
        return listed
    orders = [list(profile.levels.get(name, ())) for profile in profiles.values()]
    if all(own == in_order(own) for own in orders):
        return in_order(set().union(*met.values()))
    merged = _merged(orders)  # a table of pandas gives its categories an order of its own
    if merged is None:
        raise FederationError(
            f"The sites have the categories of column {name!r} in different orders; give one with --categories."
        )
    return merged


def _merged(orders: Sequence[Sequence[Any]]) -> list[Any] | None:
    """One order that keeps all of these; None if they contradict each other."""
    left, merged = [list(own) for own in orders if own], list[Any]()
    while left:
        heads = in_order({own[0] for own in left})
        free = [each for each in heads if not any(each in own[1:] for own in left)]
        if not free:
            return None
        merged.append(free[0])
        left = [rest for own in left if (rest := [each for each in own if each != free[0]])]
    return merged


def _check_listed(names: Iterable[str], categories: Mapping[str, Iterable[Any]]) -> None:
    for name in names:
        if name not in categories:
            raise FederationError(
                f"In a private run the operator lists what column {name!r} may hold, since what occurs tells of rows; give "
                "categories, as {" + f'"{name}": ["...", "..."]' + "}."
            )


def _classes(profiles: Mapping[str, Profile]) -> tuple[Any, ...]:
    found = in_order({each for profile in profiles.values() for each in profile.classes or ()})
    if len(found) == 1:
        raise DataError(f"The response has one class only, {found[0]!r}, at all sites; a classifier needs rows of two classes.")
    if len(found) > 2:
        usual = max((profile.classes or () for profile in profiles.values()), key=[p.classes for p in profiles.values()].count)
        odd = next((site for site, profile in profiles.items() if not set(profile.classes or ()) <= set(usual)), "?")
        raise FederationError(
            f"The sites' responses have {len(found)} classes, {listing(found, 5)}, of two at most; look at site {odd!r} first."
        )
    return tuple(found)


def revive(ids: Iterable[Any], what: str) -> pl.Series:
    """Ids from JSON, of their own kind."""
    if what not in _TYPES:
        raise FederationError(f"Cluster ids of kind {what!r} do not travel; convert the column to text.")
    plain = list(ids)
    if what == "dates":
        plain = [date.fromisoformat(each) for each in plain]
    return pl.Series(plain, dtype=_TYPES[what])
