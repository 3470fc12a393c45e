"""What the sites of a run must have in common before a fit begins: checks of their replies, and the problem that fits them all.

A site that does not fit the others, or the operator's lists, is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from covey._typing import Anything
from covey._version import __version__
from covey.errors import DataError, FederationError, listing
from covey.federation.operator.exchanges import unlike_most
from covey.federation.operator.journal import Halted
from covey.federation.operator.settings import RunSettings
from covey.federation.privacy.masking import check_roster
from covey.federation.wire.codec import SAME_VERSION, ids_from_json, ids_to_json, in_order
from covey.federation.wire.messages import Agree, Profile, SiteTotals, formula_of
from covey.federation.wire.schema import Limits, Misfit, check_record
from covey.problem.problem import Classes, Problem, Schema


def check_profile(profile: Profile, draft: Problem, limits: Limits) -> None:
    """Refuse a profile that is not one of the table of this problem, or that is larger than the limits."""
    check_record(profile, Profile)
    formula, _ = formula_of(draft)
    if set(profile.ids) != {"client", "cluster", "response"} or not set(profile.kinds.values()) <= {"numbers", "categories"}:
        raise Misfit("it sent types of columns that covey does not know")
    if set(profile.kinds) != set(formula.right.names) or not profile.levels.keys() <= profile.kinds.keys():
        raise Misfit(f"it sent the columns {listing(sorted(profile.kinds), 4)}, but the formula names others")
    named = {"clusters": profile.clusters, **{f"categories of {name!r}": each for name, each in profile.levels.items()}}
    for what, values in {**named, "classes": profile.classes or ()}.items():
        most = limits.clusters if what == "clusters" else limits.categories
        if len(values) > most:
            raise Misfit(f"it sent {len(values):,} {what}, more than the limit of {most:,}; raise it with --limits")
        if len(set(values)) < len(values):
            raise Misfit(f"it sent some {what} twice")
    try:
        ids_from_json(profile.clusters, profile.ids["cluster"])
    except FederationError as problem:
        raise Misfit(f"it sent ids that cannot be used: {str(problem).rstrip('.')}") from None


def check_announced(site: str, agreed: Agree, profile: Profile, found: SiteTotals) -> None:
    """Refuse clients in clusters that are not in the profile of a site, and so were not checked against the allow-list."""
    announced = set(profile.clusters)
    for at in np.flatnonzero(found.clients).tolist():
        if agreed.clusters[at] not in announced:
            unnamed = f"clients of cluster {agreed.clusters[at]!r}, which it did not name in its first reply"
            raise Halted(f"Site {site!r} has {unnamed}; do not change its table during a run, and start a new run.")


# What the sites have in common


def common_problem(profiles: Mapping[str, Profile], draft: Problem, settings: RunSettings) -> tuple[Problem, Agree]:
    """The problem that fits the tables of all sites, and the message about it.

    In a private run the sites do not send their categories and classes, so the operator must list them.
    """
    categories, private = settings.categories or {}, settings.private
    for site, profile in profiles.items():
        if profile.version != __version__:
            raise FederationError(f"Site {site!r} has covey {profile.version}, the coordinator {__version__}{SAME_VERSION}.")
        settings.members.check_clusters(site, profile.clusters)
    _check_kinds(profiles)
    _, response = formula_of(draft)
    first, two_classes = next(iter(profiles.values())), draft.loss.two_classes
    columns = tuple(first.kinds)
    factors = [name for name in columns if first.kinds[name] == "categories"]
    unlisted = [name for name in [response] * two_classes + factors if name not in categories]
    if private is not None and unlisted:
        why = f"In a private run sites may not say which values column {unlisted[0]!r} has; list all its values"
        raise FederationError(f"{why}: --categories '" + "{" + f'"{unlisted[0]}": ["...", "..."]' + "}'.")
    levels = {name: _levels(name, profiles, categories) for name in factors}
    classes = None
    if two_classes:
        listed = {"the operator": replace(first, classes=tuple(categories.get(response, ())))}
        classes = Classes.of(np.array(_classes(profiles if private is None else listed)))
    problem = draft.agree(Schema(columns, levels, classes, draft.names_offset))
    cluster_kind = first.ids["cluster"]
    clusters = ids_from_json({cluster for profile in profiles.values() for cluster in profile.clusters}, cluster_kind).sort()
    if len(clusters) > settings.limits.clusters:
        most = f"more than the limit of {settings.limits.clusters:,}; raise it with --limits"
        raise FederationError(f"The sites have {len(clusters):,} clusters in all, {most}.")
    ids, sites, listed_clients = tuple(ids_to_json(clusters)), tuple(sorted(profiles)), bool(settings.members.clients)
    return problem, Agree(problem.to_json(), ids, cluster_kind, sites, {}, "", private, listed_clients)


def _owners(profiles: Mapping[str, Profile]) -> dict[tuple[str, Any], list[str]]:
    """The sites that have each cluster and each category."""
    found: dict[tuple[str, Any], list[str]] = {}
    for site, profile in profiles.items():
        named = [("clusters", cluster) for cluster in profile.clusters]
        named += [(f"categories of {name!r}", level) for name, levels in profile.levels.items() for level in levels]
        for value in named:
            found.setdefault(value, []).append(site)
    return found


def check_spread(profiles: Mapping[str, Profile]) -> None:
    """Under masks, refuse a cluster or category that one site has alone: its total would be the sum of that site."""
    found = _owners(profiles)
    alone = [(what, value, sites[0]) for (what, value), sites in found.items() if len(sites) == 1]
    if alone:
        what, value, site = alone[0]
        many = f"{sum(other[0] == what for other in alone)} of {sum(other[0] == what for other in found)} {what}"
        why = f"such as {value!r} at {site!r}: there the total is the sum of that site, and masks hide nothing"
        raise FederationError(f"{many} are at one site only, {why}; choose groups that sites share, or leave out --secure.")


def check_left(profiles: Mapping[str, Profile], rosters: Sequence[tuple[str, ...]], left: tuple[str, ...]) -> None:
    """Under masks, refuse to continue if the totals of all starts together would show the sums of one site.

    This holds for all its sums, and for those of one cluster or one category.
    """
    try:
        check_roster(rosters, left)  # the sites check the same
        for have in map(set, _owners(profiles).values()):
            if have & set(left):
                check_roster([have & set(roster) for roster in rosters], have & set(left))
    except FederationError as problem:
        raise Halted(str(problem)) from None


def check_tags(tags: Mapping[str, Anything]) -> None:
    """Refuse a client that two sites have."""
    sites, rows = list(tags), np.concatenate(list(tags.values()))
    owner, order = np.repeat(np.arange(len(sites)), [len(found) for found in tags.values()]), np.lexsort(rows.T)
    same = np.flatnonzero((rows[order[1:]] == rows[order[:-1]]).all(axis=1))
    if len(same):
        one, two = sorted(sites[owner[order[at]]] for at in (same[0], same[0] + 1))
        both = len({tuple(tag) for tag in tags[one].tolist()} & {tuple(tag) for tag in tags[two].tolist()})
        many = f"{both} clients" if both > 1 else "A client"
        what = f"{many} with the same id at sites {one!r} and {two!r}, but a client belongs to one site"
        raise FederationError(f"{what}; give the clients of each site ids of their own, or remove the copy.")


def _check_kinds(profiles: Mapping[str, Profile]) -> None:
    """Refuse a site whose columns, ids or response have another type than those of most sites."""
    texts = {"client": "ids of clients are", "cluster": "ids of clusters are", "response": "response is"}
    compared = {text: {site: each.ids[name] for site, each in profiles.items()} for name, text in texts.items()}
    for name in sorted({name for profile in profiles.values() for name in profile.kinds}):
        compared[f"column {name!r} holds"] = {site: profile.kinds.get(name, "missing") for site, profile in profiles.items()}
    for what, kinds in compared.items():
        odd = unlike_most(kinds)
        if not odd:
            continue
        others = [site for site in kinds if kinds[site] != kinds[odd[0]]]
        elsewhere = f"at the other sites {kinds[others[0]]}" if len(odd) == 1 else f"at site {others[0]!r} {kinds[others[0]]}"
        raise FederationError(f"At site {odd[0]!r} the {what} {kinds[odd[0]]}, {elsewhere}; convert one of them.")


def _levels(name: str, profiles: Mapping[str, Profile], categories: Mapping[str, Iterable[Any]]) -> list[Any]:
    """The categories of a column in one order: the operator's list, or else those of all sites."""
    orders = {site: list(profile.levels.get(name, ())) for site, profile in profiles.items()}
    if name in categories:
        listed = list(categories[name])
        for site, order in orders.items():
            odd = sorted(set(order) - set(listed), key=repr)
            if odd:
                wrong = f"At site {site!r} column {name!r} has the category {odd[0]!r}, which is not in the operator's list"
                raise FederationError(f"{wrong} {listing(listed, 5)}; correct it there, or add it to the list.")
        return listed
    if all(order == in_order(order) for order in orders.values()):
        return in_order(set().union(*orders.values()))
    left, merged = [order for order in orders.values() if order], list[Any]()
    while left:  # categories of pandas have an order of their own: find one that agrees with those of all sites
        heads = in_order({order[0] for order in left})
        free = [head for head in heads if not any(head in order[1:] for order in left)]
        if not free:
            raise FederationError(f"Sites have the categories of column {name!r} in different orders; give --categories.")
        merged.append(free[0])
        left = [rest for order in left if (rest := [level for level in order if level != free[0]])]
    return merged


def _classes(profiles: Mapping[str, Profile]) -> tuple[Any, ...]:
    """The two classes of a binary response over all sites."""
    found = in_order({value for profile in profiles.values() for value in profile.classes or ()})
    if len(found) == 1:
        raise DataError(f"The response has one class only, {found[0]!r}, at all sites; a classifier needs rows of two classes.")
    if len(found) > 2:
        usual = max((profile.classes or () for profile in profiles.values()), key=[p.classes for p in profiles.values()].count)
        odd = next((site for site, profile in profiles.items() if not set(profile.classes or ()) <= set(usual)), "?")
        many = f"The responses of the sites have {len(found)} classes, {listing(found, 5)}, but two at most are possible"
        raise FederationError(f"{many}; look at site {odd!r} first.")
    return tuple(found)
