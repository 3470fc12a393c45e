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

from covey.errors import FederationError
from covey.exact import Exact
from covey.federation.operator.journal import Entry, Exchange, Halted, Journal
from covey.federation.operator.settings import RunSettings
from covey.federation.privacy.masking import unmask
from covey.federation.wire.codec import SAME_VERSION, Envelope, Refusal, join, printable
from covey.federation.wire.messages import Abandon
from covey.federation.wire.schema import Limits, Misfit, check_record
from covey.federation.wire.transport import Failure, Transport
from covey.nodes.network import Message, Phase
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


@dataclass(eq=False)
class UnderWay:
    """An exchange that has begun.

    Attributes
    ----------
    place : epoch and number of the exchange
    asked, phase : the last part of the message, or of one of them, and the purpose of the exchange
    messages : the encoded message to each site
    gather : combines the replies
    patience : until when to wait for owners
    replies, problems : usable replies, and problems of the last attempt, by site
    attempt : number of attempts that have ended
    again : when the next attempt begins; None while sites are asked
    began : when it began
    down, up : bytes
    entry : what the journal holds of it, once it has ended
    """

    place: tuple[int, int]
    asked: Message[Any]
    phase: Phase
    messages: dict[str, bytes]
    gather: Gather
    patience: float
    replies: dict[str, Any] = field(default_factory=dict)
    problems: dict[str, Failure] = field(default_factory=dict)
    attempt: int = 0
    again: float | None = None
    began: float = field(default_factory=time.perf_counter)
    down: int = 0
    up: int = 0
    entry: Entry | None = None

    @property
    def pending(self) -> list[str]:
        """Sites that have not answered the last attempt."""
        return [site for site in self.messages if site not in self.replies and site not in self.problems]

    def total(self) -> Any:
        """What was made of the replies."""
        return None if self.entry is None else decode(self.entry.total)


@dataclass
class Exchanges:
    """The exchanges of one run. Each is in the journal before a later one with the same sites begins.

    Exchanges with different sites may be under way at the same time. The number of an exchange is one more than the largest
    number that one of its sites has had, so it does not depend on which replies come first.

    Parameters
    ----------
    transport : connection to the sites
    roster : sites that take part, sorted
    journal : where exchanges are written
    settings : how long to wait for a reply, and how often to ask again
    say : called with a line about the current step

    Attributes
    ----------
    epoch : number of the current start of the run, from 0
    """

    transport: Transport
    roster: tuple[str, ...]
    journal: Journal
    settings: RunSettings
    say: Callable[[str], None] = lambda _: None
    epoch: int = -1
    _made: list[tuple[tuple[int, int], tuple[str, ...], Exchange]] = field(default_factory=list)
    _under_way: list[UnderWay] = field(default_factory=list)
    _begun: int = 0
    _last: dict[str, int] = field(default_factory=dict)  # the number of the last exchange of this epoch that changed a site

    @property
    def made(self) -> list[Exchange]:
        """All exchanges with their costs, in the order of their numbers."""
        return [made for *_, made in sorted(self._made, key=lambda each: each[:2])]

    def begin_epoch(self) -> None:
        self.epoch += 1
        self._under_way, self._last = [], {}

    def ask(self, message: Message[Any] | Mapping[str, Message[Any]], gather: Gather, **how: Any) -> Any:
        """One exchange (``how`` as for :meth:`begin`), while no other is under way; what ``gather`` makes of the replies."""
        asked = self.begin(message, gather, **how)
        while asked.entry is None:
            self.wait()
        return asked.total()

    def begin(
        self,
        message: Message[Any] | Mapping[str, Message[Any]],
        gather: Gather,
        *,
        sites: tuple[str, ...] | None = None,
        phase: Phase | None = None,
        changes: bool = True,
    ) -> UnderWay:
        """Begin an exchange with sites that take part in no other now: from the journal, or over the transport.

        Parameters
        ----------
        message : the same for all sites, or one for each
        gather : combines the replies
        sites : sites concerned; by default the whole roster
        phase : purpose of the exchange, if not the one that the message declares
        changes : whether it changes nodes, so that a site must answer it before the next
        """
        sites = self.roster if sites is None else sites
        by_site = message if isinstance(message, Mapping) else dict.fromkeys(sites, message)
        number = 1 + max(self._last.get(site, -1) for site in sites)
        # Sites that had the same exchange before this one get the same bytes.
        encoded: dict[tuple[int, int], bytes] = {}
        messages = {}
        for site in sites:
            body, after = by_site[site], self._last.get(site, -1)
            if (id(body), after) not in encoded:
                envelope = Envelope(self.journal.head["run"], self.epoch, number, body, after=after)
                encoded[id(body), after] = encode(envelope)
            messages[site] = encoded[id(body), after]
        asked, patience = by_site[sites[0]].parts[-1], time.monotonic() + self.settings.patience
        begun = UnderWay((self.epoch, number), asked, phase or asked.phase, messages, gather, patience)
        self._begun += 1
        entry = self.journal.next(sites)
        if entry is None:
            self._under_way.append(begun)
            self._attempt(begun)
        elif entry.lost is not None or entry.exchange is None:
            raise SiteLost(entry.lost or {}, in_journal=True)
        elif entry.messages != _digest(messages):
            raise self.journal.foreign("messages")
        else:
            self._end(begun, entry)
        if changes:
            self._last |= dict.fromkeys(messages, number)
        return begun

    def wait(self) -> None:
        """Wait until some exchange that is under way has ended."""
        ended = not self._under_way
        while not ended:
            now = time.monotonic()
            for each in self._under_way:
                if each.again is not None and each.again <= now:
                    self._attempt(each)
            again = [each.again for each in self._under_way if each.again is not None]
            longest = max(0.0, min(again) - time.monotonic()) if again else self.settings.timeout
            for site, reply in self.transport.pull(longest).items():
                for each in self._under_way:
                    if site in each.pending:
                        self._take(each, site, reply)
            answered = [each for each in self._under_way if each.again is None and not each.pending]
            ended = sum(map(self._settled, answered)) > 0

    def _attempt(self, each: UnderWay) -> None:
        """Send an exchange to the sites from which no usable reply has come."""
        each.again, each.problems = None, {}
        messages = {site: each.messages[site] for site in each.pending}
        again = f", again to {len(messages)}" if each.attempt else ""
        self.say(f"message {self._begun} ({each.asked.label}) to {len(each.messages)} of {len(self.roster)} sites{again}")
        each.down += sum(map(len, messages.values()))
        self.transport.push(messages, self.settings.timeout)

    def _take(self, each: UnderWay, site: str, reply: bytes | Failure) -> None:
        """What has come from a site."""
        each.up += len(reply) if isinstance(reply, bytes) else 0
        read = read_reply(each.messages[site], reply, self.settings.limits)
        if isinstance(read, Failure):
            each.problems[site] = read
        else:
            each.replies[site] = read.body

    def _settled(self, each: UnderWay) -> bool:
        """Whether an exchange has ended, now that all sites have answered an attempt; else there is another attempt."""
        for site, problem in sorted(each.problems.items()):
            if problem.final:
                raise Halted(f"Site {site!r}: {problem.why}")
        now = time.monotonic()
        if each.problems and now < each.patience and all(problem.waits for problem in each.problems.values()):
            each.again = now + _ASK_OWNER_AGAIN
        elif each.problems:
            each.attempt += 1
            if each.attempt > self.settings.retries:
                raise SiteLost({site: problem.why for site, problem in sorted(each.problems.items())})
            each.again = now + self.settings.pause
        else:
            seconds = time.perf_counter() - each.began
            total = each.gather(dict(sorted(each.replies.items())))
            about = Exchange(each.asked.label, each.phase, len(each.messages), each.down, each.up, seconds)
            entry = Entry(_digest(each.messages), encode(total), about, tuple(sorted(each.messages)))
            self.journal.add(entry)
            self._under_way.remove(each)
            self._end(each, entry)
        return each.entry is not None

    def _end(self, each: UnderWay, entry: Entry) -> None:
        each.entry = entry
        if entry.exchange is not None:
            self._made.append((each.place, entry.to, entry.exchange))

    def abandon(self) -> None:
        """Tell all sites that the run has stopped for good; nothing depends on whether they hear it."""
        asked = encode(Envelope(self.journal.head["run"], max(self.epoch, 0), 0, Abandon()))
        with suppress(Exception):
            self.transport.exchange(dict.fromkeys(self.roster, asked), min(self.settings.timeout, _LAST_WORD))


# Replies


def read_reply(message: bytes, reply: bytes | Failure, limits: Limits) -> Envelope | Failure:
    """The reply to a message, or why it cannot be used."""
    if isinstance(reply, Failure):
        return Failure(printable(reply.why))
    if len(reply) > limits.bytes:
        return Failure(f"it sent {len(reply):,} bytes, more than the limit of {limits.bytes:,}; raise it with --limits")
    try:
        found = decode(reply, limits.header)
    except RecordError as problem:
        return Failure(printable(f"it sent bytes that cannot be read ({problem}){SAME_VERSION}"))
    if not isinstance(found, Envelope) or not found.well_formed:
        return Failure(f"it sent bytes that are not a reply{SAME_VERSION}")
    asked, refusal = decode(message), found.body
    if isinstance(refusal, Refusal):
        sentence = printable(refusal.sentence)
        return {
            "behind": Failure("it has lost its state of the run; put its home folder back, or start a new run"),
            "stale": Failure(f"it is ahead of the coordinator ({sentence}); start a new run"),
            "waiting": Failure(sentence, waits=True),
            "broken": Failure(f"it failed while it answered ({sentence}); see the log at the site"),
        }.get(str(refusal.reason), Failure(sentence, final=True))
    if (found.run, found.epoch, found.exchange) != (asked.run, asked.epoch, asked.exchange):
        return Failure(f"it answered message {found.exchange} of start {found.epoch} instead; run only one node of this name")
    return found


def _digest(messages: Mapping[str, bytes]) -> str:
    """A digest of the messages of an exchange; most are the same bytes for all sites."""
    once = {id(message): checksum(message) for message in messages.values()}
    return checksum(*(site.encode() + once[id(message)] for site, message in sorted(messages.items()))).hex()


def check_each(replies: dict[str, Any], check: Check) -> dict[str, Any]:
    """The replies, if all fit; a site whose reply does not is lost."""
    for site, reply in replies.items():
        try:
            check(reply)
        except Misfit as problem:
            raise SiteLost({site: f"{problem}; check its table and its version of covey"}) from None
    return replies


def total_of(replies: dict[str, Any], roster: Collection[str], check: Check, *, secure: bool) -> Any:
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
