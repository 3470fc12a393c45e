"""Exchanges with the sites of a run over any transport: one message to each site concerned, and one reply from each.

This module decides that a site is lost. What can go wrong, and what happens then:

    no reply, or a late one       the same message is sent again, ``retries`` times; a site answers it with the same bytes
    a reply to another message    is ignored, as if there were no reply
    a site without its state      is lost: it has forgotten also what it has sent before
    a reply of a wrong form       the site is lost (:mod:`covey.federation.wire.schema`); nothing of it is added to others
    a site is lost                :class:`SiteLost`; the run stops, or starts again without it as another epoch
    the coordinator is killed     the same command continues from the journal
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from typing import Annotated, Any

import numpy as np

from covey._typing import Ints
from covey.errors import FederationError
from covey.exact import Exact
from covey.federation.operator.journal import Entry, Exchange, Halted, Journal
from covey.federation.operator.settings import RunSettings
from covey.federation.privacy.masking import unmask
from covey.federation.wire.codec import SAME_VERSION, Envelope, Refusal, join, printable
from covey.federation.wire.messages import Abandon
from covey.federation.wire.schema import Limits, Misfit, check_record
from covey.federation.wire.transport import Failure, Transport
from covey.nodes.network import Batch, Message, Phase
from covey.records import Axes, RecordError, checksum, decode, encode, outline

_LAST_WORD = 10.0  # seconds for sites to hear that a run has stopped
_ASK_OWNER_AGAIN = 2.0  # seconds before a site is asked again that waits for its owner

Check = Callable[[Any], None]
"""Raises :class:`~covey.federation.wire.schema.Misfit` if a reply does not fit its message."""
Gather = Callable[[dict[str, Any]], Any]
"""Combines the replies of the sites; the journal holds the result in place of the replies."""


class SiteLost(FederationError):  # noqa: N818 - an event
    """Sites that do not reply, or send unusable replies; ``in_journal`` if the run has continued without them before."""

    def __init__(self, sites: Mapping[str, str], *, in_journal: bool = False) -> None:
        self.sites, self.in_journal = dict(sites), in_journal
        super().__init__("; ".join(f"Site {site!r} is lost: {reason}" for site, reason in self.sites.items()) + ".")


@dataclass
class Exchanges:
    """The exchanges of one run. Each is in the journal before the next begins.

    Parameters
    ----------
    transport : connection to the sites
    roster : sites that take part, sorted
    journal : where exchanges are written
    settings : how long to wait for a reply, and how often to ask again
    say : called with a line about the current step

    Attributes
    ----------
    made : all exchanges, with their costs
    epoch : number of the current start of the run, from 0
    """

    transport: Transport
    roster: tuple[str, ...]
    journal: Journal
    settings: RunSettings
    say: Callable[[str], None] = lambda _: None
    made: list[Exchange] = field(default_factory=list)
    epoch: int = -1

    def begin_epoch(self) -> None:
        self.epoch += 1
        self._sent = 0  # exchanges of this epoch that change nodes
        self._last: dict[str, int] = {}  # the last of these to each site

    def ask(
        self,
        message: Message[Any] | Mapping[str, Message[Any]],
        gather: Gather,
        *,
        sites: tuple[str, ...] | None = None,
        phase: Phase | None = None,
        changes: bool = True,
    ) -> Any:
        """One exchange, from the journal or over the transport; returns what ``gather`` makes of the replies.

        Parameters
        ----------
        message : the same for all sites, or one for each
        sites : sites concerned; by default the whole roster
        phase : purpose of the exchange, if not the one that the message declares
        changes : whether it changes nodes, so that a site must answer it before the next
        """
        sites = self.roster if sites is None else sites
        by_site = message if isinstance(message, Mapping) else dict.fromkeys(sites, message)
        # Sites that had the same exchange before this one get the same bytes.
        encoded: dict[tuple[int, int], bytes] = {}
        messages = {site: self._encoded(by_site[site], self._last.get(site, -1), encoded) for site in sites}
        entry = self.journal.next()
        if entry is None:
            entry = self._carry_out(by_site[sites[0]], phase, messages, gather)
            self.journal.add(entry)
        if entry.lost is not None or entry.exchange is None:
            raise SiteLost(entry.lost or {}, in_journal=True)
        if entry.messages != _digest(messages):
            raise self.journal.foreign("messages")
        if changes:
            self._last |= dict.fromkeys(messages, self._sent)
            self._sent += 1
        self.made.append(entry.exchange)
        return decode(entry.total)

    def _encoded(self, body: Message[Any], after: int, encoded: dict[tuple[int, int], bytes]) -> bytes:
        if (id(body), after) not in encoded:
            envelope = Envelope(self.journal.head["run"], self.epoch, self._sent, body, after=after)
            encoded[id(body), after] = encode(envelope)
        return encoded[id(body), after]

    def _carry_out(self, message: Message[Any], phase: Phase | None, messages: dict[str, bytes], gather: Gather) -> Entry:
        """One exchange over the transport, with as many attempts as the settings allow."""
        declared = message.messages[-1] if isinstance(message, Batch) else message
        waiting, replies = dict(messages), dict[str, Any]()
        problems: dict[str, Unusable] = {}
        start, traffic = time.perf_counter(), np.zeros(2, dtype=np.int64)
        attempt, patience = 0, time.monotonic() + self.settings.patience
        while True:
            if attempt:
                time.sleep(self.settings.pause)
            again = f", again to {len(waiting)}" if attempt else ""
            sites = f"{len(messages)} of {len(self.roster)} sites"
            self.say(f"message {len(self.made) + 1} ({declared.label}) to {sites}{again}")
            found = self._send(waiting, traffic)
            replies |= {site: reply.body for site, reply in found.items() if isinstance(reply, Envelope)}
            problems = {site: reply for site, reply in found.items() if isinstance(reply, Unusable)}
            waiting = {site: messages[site] for site in problems}
            for site, problem in problems.items():
                if problem.final:
                    raise Halted(f"Site {site!r}: {problem.why}")
            if waiting and all(problem.waits for problem in problems.values()) and time.monotonic() < patience:
                time.sleep(_ASK_OWNER_AGAIN)
                continue
            attempt += 1
            if not waiting or attempt > self.settings.retries:
                break
        if waiting:
            raise SiteLost({site: problems[site].why for site in sorted(waiting)})
        seconds = time.perf_counter() - start
        total = gather({site: replies[site] for site in sorted(replies)})
        down, up = traffic.tolist()
        about = Exchange(declared.label, phase or declared.phase, len(messages), down, up, seconds)
        return Entry(_digest(messages), encode(total), about)

    def _send(self, messages: Mapping[str, bytes], traffic: Ints) -> dict[str, Envelope | Unusable]:
        """Send messages and read the replies; ``traffic`` counts the bytes down and up."""
        came = self.transport.exchange(messages, self.settings.timeout)
        for site, message in messages.items():
            reply = came.get(site)
            traffic += np.array([len(message), len(reply) if isinstance(reply, bytes) else 0])
        return {site: read_reply(message, came.get(site), self.settings.limits) for site, message in messages.items()}

    def abandon(self) -> None:
        """Tell all sites that the run has stopped for good; nothing depends on whether they hear it."""
        asked = encode(Envelope(self.journal.head["run"], max(self.epoch, 0), 0, Abandon()))
        with suppress(Exception):
            self.transport.exchange(dict.fromkeys(self.roster, asked), min(self.settings.timeout, _LAST_WORD))


# Replies


@dataclass(frozen=True)
class Unusable:
    """An unusable reply.

    Attributes
    ----------
    why : the reason, as a clause about the site: "it sent no reply"
    final : whether it is useless to ask again
    waits : whether the site waits for its owner's decision
    """

    why: str
    final: bool = False
    waits: bool = False


def read_reply(message: bytes, reply: bytes | Failure | None, limits: Limits) -> Envelope | Unusable:
    """The reply to a message, or why it cannot be used."""
    if reply is None:
        return Unusable("it sent no reply; see the log at the site")
    if isinstance(reply, Failure):
        return Unusable(printable(reply.why))
    if len(reply) > limits.bytes:
        return Unusable(f"it sent {len(reply):,} bytes, more than the limit of {limits.bytes:,}; raise it with --limits")
    try:
        found = decode(reply, limits.header)
    except RecordError as problem:
        return Unusable(printable(f"it sent bytes that cannot be read ({problem}){SAME_VERSION}"))
    if not isinstance(found, Envelope) or not found.well_formed:
        return Unusable(f"it sent bytes that are not a reply{SAME_VERSION}")
    asked, refusal = decode(message), found.body
    if isinstance(refusal, Refusal):
        sentence = printable(refusal.sentence)
        return {
            "behind": Unusable("it has lost its state of the run; put its home folder back, or start a new run"),
            "stale": Unusable(f"it is ahead of the coordinator ({sentence}); start a new run"),
            "waiting": Unusable(sentence, waits=True),
            "broken": Unusable(f"it failed while it answered ({sentence}); see the log at the site"),
        }.get(str(refusal.reason), Unusable(sentence, final=True))
    if (found.run, found.epoch, found.exchange) != (asked.run, asked.epoch, asked.exchange):
        return Unusable(f"it answered message {found.exchange} of epoch {found.epoch} instead; run only one node of this name")
    return found


def _digest(messages: Mapping[str, bytes]) -> str:
    """A digest of the messages of an exchange; most are the same bytes for all sites."""
    once = {id(message): checksum(message) for message in messages.values()}
    return checksum(*(site.encode() + once[id(message)] for site, message in sorted(messages.items()))).hex()


def check_each(replies: Mapping[str, Any], check: Check) -> None:
    """Make a site lost whose reply does not fit."""
    for site, reply in replies.items():
        try:
            check(reply)
        except Misfit as problem:
            raise SiteLost({site: f"{problem}; check its table and its version of covey"}) from None


def total_of(replies: Mapping[str, Any], roster: Collection[str], check: Check, *, secure: bool) -> Any:
    """The sum over sites, in the order of their names; a reply that cannot be added makes its site lost."""
    shown = {site: _visible_part(site, body) for site, body in replies.items()} if secure else replies
    check_each(shown, check)
    odd = unlike_most({site: outline(reply) for site, reply in shown.items()})
    if odd:
        raise SiteLost(dict.fromkeys(odd, f"it sent a reply of another form than the other sites{SAME_VERSION}"))
    if all(body is None for body in replies.values()):
        return None
    if not secure:
        return reduce(add, replies.values())
    skeleton = next(iter(replies.values()))[0]
    reply, ones = join(skeleton, unmask({site: body[1] for site, body in replies.items()}, roster))
    if ones != len(replies):
        raise FederationError(f"The masks of the sites do not cancel{SAME_VERSION} and start a new run.")
    try:
        check(reply)
    except Misfit as problem:
        raise FederationError(f"A site sent wrong sums, and masks hide which: {problem}; start a new run.") from None
    return reply


def unlike_most(values: Mapping[str, Any]) -> list[str]:
    """Sites whose value is not the most frequent one; all sites, if several values are equally frequent.

    >>> unlike_most({"north": "numbers", "south": "text", "west": "numbers"}), unlike_most({"north": 1, "south": 2})
    (['south'], ['north', 'south'])
    """
    often = Counter(values.values())
    usual = [value for value, times in often.items() if times == max(often.values())]
    return [site for site, value in values.items() if len(usual) > 1 or value != usual[0]]


def _visible_part(site: str, masked: Any) -> Any:
    """What a masked reply shows: its form, and which of its numbers are not finite; the others are zero here."""
    if masked is None:
        return None
    try:
        skeleton, numbers = masked
        check_record(numbers, Annotated[Exact, Axes("n")])
        reply, _ = join(skeleton, Exact(np.zeros_like(numbers.limbs), numbers.size))
        return reply
    except (RecordError, AttributeError, KeyError, OverflowError, TypeError, ValueError):
        raise SiteLost({site: f"it sent a masked reply that cannot be read{SAME_VERSION}"}) from None
