"""The coordinator: all sites of one run as a network, to which solvers send messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import polars as pl

from covey._typing import Bools
from covey._version import __version__
from covey.federation.operator.agreement import (
    check_announced,
    check_left,
    check_profile,
    check_spread,
    check_tags,
    common_problem,
)
from covey.federation.operator.exchanges import Exchanges, Gather, SiteLost, UnderWay, check_each, total_of
from covey.federation.operator.journal import Entry
from covey.federation.privacy.differential import check_delta
from covey.federation.wire.messages import (
    Agree,
    Deliver,
    DrawSalt,
    Hello,
    Joined,
    Profile,
    SiteTotals,
    check_knots,
    formula_of,
)
from covey.federation.wire.schema import Misfit, check_record, check_reply, merged_sizes
from covey.losses import Loss
from covey.nodes.network import Arrived, Batch, Message, Network, Phase, Standardise
from covey.problem.problem import Problem
from covey.problem.rows import used_columns
from covey.tables.design import Formula
from covey.tables.scaling import Scale
from covey.tree.hierarchy import Hierarchy

R = TypeVar("R")


class Federation(Network):
    """The sites of one run as a network.

    A message goes to the sites that have clients of its cells, at once if none of them has another message to answer. A message
    without a reply travels with the next message that has one.

    Parameters
    ----------
    exchanges : exchanges with the sites, the roster, the epoch and the settings of the run
    draft : the problem, without the categories and clusters of the sites

    Attributes
    ----------
    profiles : descriptions of the tables, also of lost sites, whose sums are in earlier totals
    agreed : the message about the problem that was sent to all sites
    problem : the problem that all sites solve, in the units of the tables
    totals : numbers of clients and rows of each cluster, and the other first sums, over all sites
    """

    agreed: Agree
    problem: Problem
    totals: SiteTotals

    def __init__(self, exchanges: Exchanges, draft: Problem) -> None:
        self.exchanges, self.draft, self.settings = exchanges, draft, exchanges.settings
        self.profiles: dict[str, Profile] = {}
        self._tree: Hierarchy
        self._rosters: list[tuple[str, ...]] = []  # of all starts
        self._arrived: list[Arrived] = []
        self._under_way: list[UnderWay] = []
        self._held: tuple[Message[Any], ...] = ()  # messages without a reply, for the next exchange
        self._phase: Phase | None = None
        self._sizes: dict[str, Any] = {}  # lengths of the axes of replies

    @property
    def tree(self) -> Hierarchy:
        return self._tree

    @property
    def terms(self) -> tuple[str, ...]:
        return self.problem.terms

    @property
    def loss(self) -> Loss:
        return self.draft.loss

    def send(self, message: Message[Any]) -> None:
        if not message.reply:
            self._held = (*self._held, message)
            self._arrived.append(Arrived(message, None))
            return
        sites, held = self._concerned(message), self._held
        while any(not each.messages.keys().isdisjoint(sites) for each in self._under_way):
            self._wait()
        self._held = ()
        together = Batch((*held, message)) if held else message
        self._under_way.append(self.exchanges.begin(together, self._total(together), sites=sites, phase=self._phase))

    def collect(self) -> list[Arrived]:
        if not self._arrived:
            self._wait()
        arrived, self._arrived = self._arrived, []
        return arrived

    def ask(self, message: Message[R]) -> R:
        self.send(message)
        while self._under_way:
            self._wait()
        reply: R = self.collect()[-1].reply
        return reply

    def lanes(self) -> Bools | None:
        """Groups of clusters that share no site with others; with masks a sum needs all sites, so all are one lane."""
        if self.settings.secure:
            return None
        clusters, profiles = self.agreed.clusters, self.profiles
        lane_of = list(range(len(clusters)))  # the least cluster that is joined to each
        here = {cluster: at for at, cluster in enumerate(clusters)}
        for site in self.exchanges.roster:
            joined = {lane_of[here[cluster]] for cluster in profiles[site].clusters}
            lane_of = [min(joined) if lane in joined else lane for lane in lane_of]
        lanes = np.unique(lane_of)
        return None if len(lanes) == 1 else np.array([np.array(lane_of) == lane for lane in lanes])

    @property
    def vectors_only(self) -> bool:
        return any(self.profiles[site].vectors for site in self.exchanges.roster)

    def _wait(self) -> None:
        """Wait until some messages are answered, if some are under way."""
        if any(each.entry is None for each in self._under_way):
            self.exchanges.wait()
        self._arrived += [Arrived(each.asked, each.total()) for each in self._under_way if each.entry is not None]
        self._under_way = [each for each in self._under_way if each.entry is None]

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        before, self._phase = self._phase, phase
        try:
            yield
        finally:
            self._phase = before

    def open(self) -> None:
        """Let all sites of the roster agree on the problem and send their first sums; this starts a new epoch of the run."""
        draft, settings, exchanges = self.draft, self.settings, self.exchanges
        self._under_way, self._arrived, self._held = [], [], ()
        check_knots(formula_of(draft)[0].right, private=settings.private is not None)
        exchanges.begin_epoch()
        hello = Hello(__version__, draft.to_json(), settings.secure, settings.private)

        def check(profile: Any) -> None:
            check_profile(profile, draft, settings.limits)

        profiles: dict[str, Profile] = exchanges.ask(hello, lambda replies: check_each(replies, check), changes=False)
        self.profiles |= profiles
        self.problem, self.agreed = common_problem(profiles, draft, settings)
        if settings.secure:
            check_spread(profiles)
            keys, signatures = ({site: getattr(each, name) for site, each in profiles.items()} for name in ("key", "signature"))
            self.agreed = replace(self.agreed, keys=keys, signatures=signatures)
            salts = self._sealed_salts(DrawSalt(keys, signatures))
        else:
            self.agreed = replace(self.agreed, salt=exchanges.journal.head["salt"])
            salts = {}
        joined = self._join(salts)
        while self.totals.learning is not None:
            self.problem = self.problem.learn(self.totals.learning)
            self.agreed = replace(self.agreed, problem=self.problem.to_json())
            exchanges.begin_epoch()
            joined = self._join(salts)
        check_tags({site: hashes.tags for site, hashes in joined.items()})
        for site in joined if self.agreed.listed else ():
            settings.members.check_clients(site, joined[site].pairs, self.agreed.salt)
        self._begin()

    def _sealed_salts(self, draw: DrawSalt) -> dict[str, str]:
        """Under masks one site draws the key of the tags; by site, the name of that site and the sealed key."""

        def check(reply: Any) -> None:
            check_reply(draw, reply, {})

        first = self.exchanges.roster[0]
        reply = self.exchanges.ask(draw, lambda found: check_each(found, check), sites=(first,), changes=False)
        return {site: f"{first}:{text}" for site, text in reply[first].sealed.items()}

    def _join(self, salts: Mapping[str, str]) -> dict[str, Joined]:
        """Send every site the agreed problem and the key of the tags; the tags of each site. The totals are kept."""
        roster, secure, agreed, problem = self.exchanges.roster, self.settings.secure, self.agreed, self.problem
        sizes = {"k": len(agreed.clusters), "d": len(problem.terms), "dropped": 2 + len(used_columns(problem))}
        sizes["learning"] = len(problem.agreed_design.unlearned) if isinstance(problem.agreed_design, Formula) else 0
        asked = {"moments": bool(problem.spec.standardize), "dropped": problem.spec.na == "drop", "learning": problem.learning}
        self._rosters.append(roster)

        def check(found: SiteTotals) -> None:
            check_record(found, SiteTotals, sizes)
            for name, wanted in asked.items():
                if (getattr(found, name) is not None) != (wanted and agreed.private is None):
                    raise Misfit(f"it sent sums that were not asked for, or left some out (SiteTotals.{name})")
            if found.clients.max() > self.settings.limits.clients:
                most = f"{self.settings.limits.clients:,}; raise it with --limits"
                raise Misfit(f"it sent {found.clients.max():,} clients of one cluster, more than the limit of {most}")

        def gather(replies: dict[str, Any]) -> tuple[dict[str, Any], SiteTotals]:
            check_each(replies, lambda body: check_record(body, tuple[Joined, object]))
            joined, sums = ({site: body[at] for site, body in replies.items()} for at in (0, 1))
            total: SiteTotals = total_of(sums, roster, check, secure=secure)
            for site, found in {}.items() if secure else sums.items():
                check_announced(site, agreed, self.profiles[site], found)
            # One tag for each client: a number without its clients would take memory that nobody has sent.
            for sites, found in [(roster, total)] if secure else [((site,), found) for site, found in sums.items()]:
                tags = sum(len(joined[site].tags) for site in sites)
                if tags != found.clients.sum():
                    who = "the sites together" if secure else "it"
                    counted = f"{who} sent {tags:,} tags of clients and counted {found.clients.sum():,} clients"
                    raise SiteLost(dict.fromkeys(sites, f"{counted}; check the version of covey"))
            return joined, total

        message = {site: replace(agreed, salt=salts.get(site, "")) for site in roster} if secure else agreed
        joined: dict[str, Joined]
        joined, self.totals = self.exchanges.ask(message, gather)
        return joined

    def _begin(self) -> None:
        """Check the totals, and let the sites standardise their terms, if that is asked for."""
        totals, clients = self.totals, int(self.totals.clients.sum())
        if self.settings.private is None:
            self.problem.loss.check_total(float(totals.response.floats()))
        else:
            check_delta(self.settings.delta, clients)
        ptr = np.concatenate([[0], np.cumsum(totals.clients)])
        self._tree = Hierarchy(ptr, pl.Series(np.arange(clients)), self.agreed.cluster_ids())
        self._sizes = {"k": self.tree.n_clusters, "terms": len(self.terms)}
        if totals.moments is not None:
            scale = Scale.of(totals.moments, int(totals.rows.sum()), self.terms)
            self.problem = self.problem.scaled(scale)
            self.ask(Standardise(scale))

    def leave_out(self, lost: SiteLost) -> None:
        """Continue without some sites after the next :meth:`open`; a run that continues from the journal does the same."""
        left = tuple(site for site in self.exchanges.roster if site not in lost.sites)
        if self.settings.secure and self._rosters:
            check_left(self.profiles, self._rosters, left)
        if not lost.in_journal:
            self.exchanges.journal.add(Entry("", lost=lost.sites))
        self.exchanges.roster = left

    def deliver(self, body: Deliver) -> None:
        """Send every site the upper levels, from which it writes its clients' models."""
        if self._held:
            held, self._held = Batch(self._held), ()
            self.exchanges.ask(held, self._total(held), phase="finish")
        self.exchanges.ask(body, lambda _: None)

    def _total(self, message: Message[Any]) -> Gather:
        """How the replies to a message are checked and added."""
        self._sizes = sizes = merged_sizes(message, self._sizes)

        def check(reply: Any) -> None:
            check_reply(message, reply, sizes)

        return lambda replies: total_of(replies, self.exchanges.roster, check, secure=self.settings.secure)

    def _concerned(self, message: Message[Any]) -> tuple[str, ...]:
        """The sites that have work to do; all sites, if masks must cancel or a held message goes to all of them."""
        roster, cells = self.exchanges.roster, message.cells
        if cells is None or self.settings.secure or self._held:
            return roster
        clusters = self.agreed.clusters
        busy = {cluster for cluster, concerned in zip(clusters, cells.tolist(), strict=True) if concerned}
        return tuple(site for site in roster if not busy.isdisjoint(self.profiles[site].clusters)) or roster
