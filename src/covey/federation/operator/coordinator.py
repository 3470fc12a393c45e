"""The coordinator: the sites of one run as a network, as solvers ask it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from covey.federation.operator.exchanges import Exchanges
from covey.federation.operator.journal import Entry, Exchange, Journal
from covey.federation.operator.opening import Opened, Opening
from covey.federation.operator.replies import SiteLost, total_of
from covey.federation.operator.settings import RunSettings
from covey.federation.wire.agreement import Agree, Deliver, SiteTotals
from covey.federation.wire.transport import Transport
from covey.losses import Loss
from covey.nodes.network import Arrived, Batch, Message, Network, Phase, Standardise
from covey.problem.problem import Problem
from covey.tables.scaling import Scale
from covey.tree.hierarchy import Hierarchy


class Federation(Network):
    """The sites of one run.

    A transport waits for all replies to a letter, so :meth:`send` only puts a message in a queue and :meth:`collect` carries
    the queue out: one exchange after the other, each with the sites that have clients of the message's cells. A message
    without a reply travels with the next one that has a reply.

    Parameters
    ----------
    transport : the way to the sites
    roster : who takes part
    draft : what is fitted
    journal : where exchanges are written down
    settings : what the operator decides
    say : called with what is being done, for a live line
    """

    def __init__(
        self,
        transport: Transport,
        roster: Sequence[str],
        draft: Problem,
        journal: Journal,
        settings: RunSettings,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.draft, self.settings, self.journal = draft, settings, journal
        self._exchanges = Exchanges(transport, roster, journal, settings, say)
        self._opening = Opening(self._exchanges, draft, settings)
        self._opened: Opened
        self._queue: list[Message[Any]] = []
        self._held: tuple[Message[Any], ...] = ()
        self._phase: Phase | None = None

    # As a network

    @property
    def tree(self) -> Hierarchy:
        return self._opened.tree

    @property
    def terms(self) -> tuple[str, ...]:
        return self.problem.terms

    @property
    def loss(self) -> Loss:
        return self.draft.loss

    def send(self, message: Message[Any]) -> None:
        self._queue.append(message)

    def collect(self) -> list[Arrived]:
        queue, self._queue = self._queue, []
        return [Arrived(message, self._carry_out(message)) for message in queue]

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        before, self._phase = self._phase, phase
        try:
            yield
        finally:
            self._phase = before

    # As a run

    @property
    def problem(self) -> Problem:
        """What all sites agreed to solve."""
        return self._opened.problem

    @property
    def agreed(self) -> Agree:
        """What all sites agreed on."""
        return self._opened.agreed

    @property
    def totals(self) -> SiteTotals:
        """The first sums, over all sites."""
        return self._opened.totals

    @property
    def scale(self) -> Scale | None:
        """How terms are standardised, if they are."""
        return self._opened.scale

    @property
    def roster(self) -> tuple[str, ...]:
        """Who takes part."""
        return self._exchanges.roster

    @property
    def starts(self) -> int:
        """How often the run has begun."""
        return self._exchanges.epoch + 1

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        """Each, with its cost."""
        return tuple(self._exchanges.made)

    def open(self) -> None:
        """Let all sites of the roster agree; a new epoch of the run, if there was one before."""
        self._queue, self._held = [], ()
        self._opened = self._opening.open()
        if self.scale is not None:
            self.ask(Standardise(self.scale))

    def leave_out(self, lost: SiteLost) -> None:
        """Go on without some sites, from the next :meth:`open` on; a run that is taken up later does the same."""
        left = tuple(site for site in self.roster if site not in lost.sites)
        self._opening.check_left(left)
        if not lost.in_journal:
            self.journal.add(Entry({}, lost=lost.sites))
        self._exchanges.roster = left

    def deliver(self, body: Deliver) -> None:
        """Send every site the upper levels, so that it writes its clients' models."""
        if self._held:
            held, self._held = Batch(self._held), ()
            self._exchanges.ask(held, self._total, phase="finish")
        self._exchanges.ask(body, lambda _: None)

    def _carry_out(self, message: Message[Any]) -> Any:
        """One exchange, with what waited for it; the sum of the replies."""
        if not message.reply:
            self._held = (*self._held, message)
            return None
        whom, held = self._concerned(message), self._held
        self._held = ()
        return self._exchanges.ask(_together(held, message), self._total, whom=whom, phase=self._phase)

    def _total(self, replies: dict[str, Any]) -> Any:
        return total_of(replies, self.roster, secure=self.settings.secure)

    def _concerned(self, message: Message[Any]) -> tuple[str, ...]:
        """The sites that a message has work for; all of them under masks, which would not cancel, and with what was held."""
        cells = message.cells
        if cells is None or self.settings.secure or self._held:
            return self.roster
        busy = {cluster for cluster, concerned in zip(self.agreed.clusters, cells.tolist(), strict=True) if concerned}
        profiles = self._opening.profiles
        return tuple(site for site in self.roster if not busy.isdisjoint(profiles[site].clusters)) or self.roster


def _together(held: tuple[Message[Any], ...], message: Message[Any]) -> Message[Any]:
    return Batch((*held, message)) if held else message
