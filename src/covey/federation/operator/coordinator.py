"""The coordinator: all sites of one run as a network, to which solvers send messages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np

from covey._typing import Bools
from covey.federation.operator.agreement import Agreement, SetUp
from covey.federation.operator.exchanges import Exchanges, Gather, SiteLost, UnderWay, total_of
from covey.federation.operator.journal import Entry
from covey.federation.operator.settings import RunSettings
from covey.federation.wire.messages import Deliver
from covey.federation.wire.schema import check_reply, merged_sizes
from covey.losses import Loss
from covey.nodes.network import Arrived, Batch, Message, Network, Phase, Standardise
from covey.problem.problem import Problem
from covey.tree.hierarchy import Hierarchy

R = TypeVar("R")


class Federation(Network):
    """The sites of one run as a network.

    A message goes to the sites that have clients of its cells, at once if none of them has another message to answer. A message
    without a reply travels with the next message that has one.

    Parameters
    ----------
    exchanges : exchanges with the sites, the roster and the epoch
    draft : the problem, without the categories and clusters of the sites
    settings : settings of the run

    Attributes
    ----------
    agreement : what the sites agreed on, after :meth:`open`
    """

    def __init__(self, exchanges: Exchanges, draft: Problem, settings: RunSettings) -> None:
        self.exchanges, self.draft, self.settings = exchanges, draft, settings
        self.agreement: Agreement
        self._setup = SetUp(exchanges, draft, settings)
        self._arrived: list[Arrived] = []
        self._under_way: list[tuple[UnderWay, Message[Any]]] = []
        self._held: tuple[Message[Any], ...] = ()  # messages without a reply, for the next exchange
        self._phase: Phase | None = None
        self._sizes: dict[str, Any] = {}  # lengths of the axes of replies

    @property
    def tree(self) -> Hierarchy:
        return self.agreement.tree

    @property
    def terms(self) -> tuple[str, ...]:
        return self.agreement.problem.terms

    @property
    def loss(self) -> Loss:
        return self.draft.loss

    def send(self, message: Message[Any]) -> None:
        if not message.reply:
            self._held = (*self._held, message)
            self._arrived.append(Arrived(message, None))
            return
        sites, held = self._concerned(message), self._held
        while any(not each.messages.keys().isdisjoint(sites) for each, _ in self._under_way):
            self._wait()
        self._held = ()
        together = Batch((*held, message)) if held else message
        begun = self.exchanges.begin(together, self._total(together), sites=sites, phase=self._phase)
        self._under_way.append((begun, message))

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
        clusters, profiles = self.agreement.agreed.clusters, self._setup.profiles
        lane_of = list(range(len(clusters)))  # the least cluster that is joined to each
        here = {cluster: at for at, cluster in enumerate(clusters)}
        for site in self.exchanges.roster:
            joined = {lane_of[here[cluster]] for cluster in profiles[site].clusters}
            lane_of = [min(joined) if lane in joined else lane for lane in lane_of]
        lanes = np.unique(lane_of)
        return None if len(lanes) == 1 else np.array([np.array(lane_of) == lane for lane in lanes])

    @property
    def vectors_only(self) -> bool:
        return any(self._setup.profiles[site].vectors for site in self.exchanges.roster)

    def _wait(self) -> None:
        """Wait until some messages are answered, if some are under way."""
        if any(each.entry is None for each, _ in self._under_way):
            self.exchanges.ended()
        done = [each for each in self._under_way if each[0].entry is not None]
        self._under_way = [each for each in self._under_way if each[0].entry is None]
        self._arrived += [Arrived(message, each.total()) for each, message in done]

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        before, self._phase = self._phase, phase
        try:
            yield
        finally:
            self._phase = before

    def open(self) -> None:
        """Let all sites of the roster agree on the problem; this starts a new epoch of the run."""
        self._under_way, self._arrived, self._held = [], [], ()
        self.agreement = self._setup.agree()
        self._sizes = {"k": self.tree.n_clusters, "terms": len(self.terms)}
        if self.agreement.scale is not None:
            self.ask(Standardise(self.agreement.scale))

    def leave_out(self, lost: SiteLost) -> None:
        """Continue without some sites after the next :meth:`open`; a run that continues from the journal does the same."""
        left = tuple(site for site in self.exchanges.roster if site not in lost.sites)
        self._setup.check_left(left)
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
        clusters = self.agreement.agreed.clusters
        busy = {cluster for cluster, concerned in zip(clusters, cells.tolist(), strict=True) if concerned}
        return tuple(site for site in roster if not busy.isdisjoint(self._setup.profiles[site].clusters)) or roster
