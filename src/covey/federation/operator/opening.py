"""The set-up of a run: the sites describe their tables, agree on one design, and join with their first sums."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import polars as pl

from covey import __version__
from covey._typing import Anything
from covey.errors import FederationError
from covey.federation.operator.agreement import agree, check_spread, check_tags, check_totals, owners, shared
from covey.federation.operator.exchanges import Exchanges, Halted
from covey.federation.operator.replies import SiteLost, total_of
from covey.federation.operator.settings import RunSettings
from covey.federation.privacy.accounting import check_delta
from covey.federation.privacy.masking import check_roster
from covey.federation.wire.agreement import Agree, DrawSalt, Hello, Joined, Profile, SealedSalts, SiteTotals
from covey.federation.wire.ids import tags_of
from covey.problem.problem import Problem
from covey.tables.scaling import Scale
from covey.tree.hierarchy import Hierarchy


@dataclass(frozen=True)
class Opened:
    """What all sites agreed on, and their first sums.

    Attributes
    ----------
    problem : the problem that all sites solve, for rows as they are
    agreed : what was sent to them
    totals : clients and rows of each cluster, over all sites
    tree : the clusters; clients have numbers in place of ids
    scale : how terms are standardised, if they are
    """

    problem: Problem
    agreed: Agree
    totals: SiteTotals
    tree: Hierarchy
    scale: Scale | None


class Opening:
    """The set-up of a run and of each time that it begins anew, and what is remembered of all of them.

    Parameters
    ----------
    exchanges : with the sites
    draft : what is fitted
    settings : what the operator decides
    """

    def __init__(self, exchanges: Exchanges, draft: Problem, settings: RunSettings) -> None:
        self.profiles: dict[str, Profile] = {}  # also of sites that were lost: their sums are in earlier totals
        self._exchanges, self._draft, self._settings = exchanges, draft, settings
        self._rosters: list[tuple[str, ...]] = []

    def open(self) -> Opened:
        """Let all sites of the roster agree; a new epoch of the run, if there was one before."""
        draft, settings, exchanges = self._draft, self._settings, self._exchanges
        exchanges.begin_epoch()
        hello = Hello(__version__, draft.to_json(), settings.secure, settings.private)
        profiles: dict[str, Profile] = exchanges.ask(hello, _profiles, changes=False)
        self.profiles |= profiles
        problem, agreed = agree(profiles, draft, settings.categories or {}, settings.members, settings.private)
        if settings.secure:
            check_spread(profiles)
            agreed = replace(agreed, keys={site: profile.key for site, profile in profiles.items()})
        else:
            agreed = replace(agreed, salt=exchanges.journal.head["salt"])
        seals = self._sealed_salts(agreed)
        joined, totals = self._join(agreed, seals)
        if shared(_tags(joined)) and draft.spec.nested and not problem.spec.nested:
            # The same ids at two sites, in different clusters: the formula says that they are different clients.
            problem = replace(problem, spec=replace(problem.spec, nested=True))
            agreed = replace(agreed, problem=problem.to_json())
            exchanges.begin_epoch()
            joined, totals = self._join(agreed, seals)
        check_tags(_tags(joined))
        self._check_members(problem, joined)
        return self._opened(problem, agreed, totals)

    def check_left(self, left: tuple[str, ...]) -> None:
        """Under masks, refuse to go on if totals of this start and of those before would show one site's part.

        That is its part of all, or of a cluster or a category.
        """
        if not (self._settings.secure and self._rosters):
            return
        try:
            check_roster(self._rosters, left)  # as the sites will: what they refuse is not begun
            for have in map(set, owners(self.profiles).values()):
                if have & set(left):
                    check_roster([have & set(roster) for roster in self._rosters], have & set(left))
        except FederationError as problem:
            raise Halted(str(problem)) from None

    def _sealed_salts(self, agreed: Agree) -> dict[str, str]:
        """Under masks one site draws the key of the tags; by site, who drew it and the sealed key."""
        if not self._settings.secure:
            return {}
        maker = self._exchanges.roster[0]
        salts: SealedSalts = self._exchanges.ask(DrawSalt(agreed.keys), _salts, whom=(maker,), changes=False)
        return {site: f"{maker}:{text}" for site, text in salts.sealed.items()}

    def _join(self, agreed: Agree, seals: Mapping[str, str]) -> tuple[dict[str, Joined], SiteTotals]:
        """Send every site what was agreed on; what each shows of its clients, and the totals."""
        roster, secure = self._exchanges.roster, self._settings.secure
        self._rosters.append(roster)
        message = {site: replace(agreed, salt=seals.get(site, "")) for site in roster} if secure else agreed
        joined, totals = self._exchanges.ask(message, lambda replies: self._joined(agreed, replies))
        return joined, totals

    def _joined(self, agreed: Agree, replies: dict[str, Any]) -> tuple[dict[str, Joined], SiteTotals]:
        for site, body in replies.items():
            if not (isinstance(body, tuple) and len(body) == 2 and isinstance(body[0], Joined)):
                raise SiteLost({site: "joined with a message of another form"})
            if not self._settings.secure:
                _check_named(site, agreed, self.profiles[site], body[1])
        sums = {site: body[1] for site, body in replies.items()}
        totals: SiteTotals = total_of(sums, self._exchanges.roster, secure=self._settings.secure)
        return {site: body[0] for site, body in replies.items()}, totals

    def _check_members(self, problem: Problem, joined: Mapping[str, Joined]) -> None:
        salt, nested = self._exchanges.journal.head["salt"], bool(problem.spec.nested)
        for site, shown in joined.items():
            if shown.pairs is not None:
                self._settings.members.check_clients(site, shown.pairs, nested, lambda ids: tags_of(ids, salt))

    def _opened(self, problem: Problem, agreed: Agree, totals: SiteTotals) -> Opened:
        clients = int(totals.clients.sum())
        if self._settings.private is None:
            check_totals(totals, problem.loss)
        else:
            check_delta(self._settings.delta, clients)
        ptr = np.concatenate([[0], np.cumsum(totals.clients)])
        tree = Hierarchy(ptr, pl.Series(np.arange(clients)), agreed.cluster_ids())
        scale = None
        if totals.moments is not None:
            scale = Scale.of(totals.moments, int(totals.rows.sum()), problem.terms)
            problem = problem.scaled(scale)
        return Opened(problem, agreed, totals, tree, scale)


def _check_named(site: str, agreed: Agree, profile: Profile, found: Any) -> None:
    """Refuse clients of clusters that a site did not name before, and that were not looked up in the operator's list."""
    if not (isinstance(found, SiteTotals) and found.clients.shape == (len(agreed.clusters),)):
        raise SiteLost({site: "joined with sums of another form"})
    named = set(profile.clusters)
    for at in np.flatnonzero(found.clients).tolist():
        if agreed.clusters[at] not in named:
            raise Halted(
                f"Site {site!r} has clients of cluster {agreed.clusters[at]!r}, which it did not name; start a new run."
            )


def _profiles(replies: dict[str, Any]) -> dict[str, Profile]:
    for site, body in replies.items():
        if not isinstance(body, Profile):
            raise SiteLost({site: "introduced itself with a message of another form"})
    return replies


def _salts(replies: dict[str, Any]) -> SealedSalts:
    ((site, body),) = replies.items()
    if not isinstance(body, SealedSalts):
        raise SiteLost({site: "drew the key of the tags with a message of another form"})
    return body


def _tags(joined: Mapping[str, Joined]) -> dict[str, Anything]:
    return {site: shown.tags for site, shown in joined.items()}
