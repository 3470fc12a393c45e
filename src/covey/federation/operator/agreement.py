"""What the coordinator makes of what sites say of their tables: what they have in common, and who does not fit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from covey._typing import Anything
from covey._version import __version__
from covey.errors import DataError, FederationError, listing
from covey.federation.operator.members import Members
from covey.federation.wire.agreement import Agree, Privacy, Profile, SiteTotals, formula_of
from covey.federation.wire.ids import in_order, plain_ids, revive
from covey.losses import Loss
from covey.problem.problem import Classes, Problem, Schema


def agree(
    profiles: Mapping[str, Profile],
    draft: Problem,
    categories: Mapping[str, Iterable[Any]],
    members: Members,
    private: Privacy | None = None,
) -> tuple[Problem, Agree]:
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
    spec, (_, response) = draft.spec, formula_of(draft)
    first, two_classes = next(iter(profiles.values())), draft.loss.two_classes
    columns = tuple(first.kinds)
    if private is not None:
        _check_listed([response] * two_classes + [c for c in columns if first.kinds[c] == "categories"], categories)
    levels = {name: _levels(name, profiles, categories) for name in columns if first.kinds[name] == "categories"}
    classes = None
    if two_classes:
        listed = {"the operator": replace(first, classes=tuple(categories.get(response, ())))}
        classes = Classes.of(np.array(_classes(profiles if private is None else listed)))
    nested = any(profile.repeated for profile in profiles.values()) if spec.nested else spec.nested
    problem = draft.agree(Schema(columns, levels, classes, nested, spec.offset is not None))
    clusters = revive({each for profile in profiles.values() for each in profile.clusters}, first.ids["cluster"]).sort()
    ids, sites = tuple(plain_ids(clusters)), tuple(sorted(profiles))
    return problem, Agree(problem.to_json(), ids, first.ids["cluster"], sites, {}, "", private, bool(members.clients))


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


def apart_from_most(values: Mapping[str, Any]) -> list[str]:
    """Sites whose value is not that of most of them; all of them, if no value is that of most.

    >>> apart_from_most({"north": "numbers", "south": "text", "west": "numbers"}), apart_from_most({"north": 1, "south": 2})
    (['south'], ['north', 'south'])
    """
    often = Counter(values.values())
    usual = [value for value, times in often.items() if times == max(often.values())]
    return [site for site, value in values.items() if len(usual) > 1 or value != usual[0]]


def _check_kinds(profiles: Mapping[str, Profile]) -> None:
    """All sites' columns, ids and responses must be of the kinds that most of them have."""
    words = {"client": "ids of clients are", "cluster": "ids of clusters are", "response": "response is"}
    compared = {
        words[name]: {site: profile.ids.get(name, "missing") for site, profile in profiles.items()}
        for name in next(iter(profiles.values())).ids
    }
    for name in sorted({name for profile in profiles.values() for name in profile.kinds}):
        compared[f"column {name!r} holds"] = {site: profile.kinds.get(name, "missing") for site, profile in profiles.items()}
    for what, kinds in compared.items():
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
                    f"{listing(listed, 5)}; correct it there, or add it to the list."
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
