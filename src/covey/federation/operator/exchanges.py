"""Exchanges with the sites of a run, over any transport: one letter to each site concerned, one reply from each.

Replies are matched by run, epoch and exchange. What may go wrong, and what then happens:

    no reply, or late          the same letter again, ``retries`` times; a site answers twice with the same bytes
    a reply to another letter  is not read; as if there were none
    a site without its memory  gets all letters of this epoch again, and goes on
    NaN, or a wrong shape      the site is lost: its numbers are never added
    a site that is lost        :class:`~.replies.SiteLost`; the run stops, or begins anew as another epoch without it
    the coordinator dies       run again, it goes on from its journal
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from covey.errors import FederationError
from covey.federation.operator.journal import Entry, Exchange, Journal
from covey.federation.operator.replies import SiteLost, Unusable, read
from covey.federation.operator.settings import RunSettings
from covey.federation.wire.agreement import Agree
from covey.federation.wire.letters import Letter
from covey.federation.wire.transport import Failure, Transport
from covey.nodes.network import Batch, Message, Phase
from covey.records import decode, encode

Gather = Callable[[dict[str, Any]], Any]
"""What is made of the replies, by site; it is written to the journal in place of them."""


class Halted(FederationError):  # noqa: N818 - an event, of which an error is only one outcome
    """The run cannot go on as things are; once they are put right it can, from its journal."""


class Exchanges:
    """The exchanges of one run, each written down before the next begins.

    Parameters
    ----------
    transport : the way to the sites
    roster : who takes part
    journal : where exchanges are written down
    settings : how long to wait, and how often to ask again
    say : called with what is being done, for a live line

    Attributes
    ----------
    made : each exchange, with its cost
    epoch : how often the run has begun, from 0
    """

    def __init__(
        self, transport: Transport, roster: Sequence[str], journal: Journal, settings: RunSettings, say: Callable[[str], None]
    ) -> None:
        self.roster = tuple(sorted(roster))
        self.journal = journal
        self.made: list[Exchange] = []
        self.epoch = -1
        self._transport, self._settings, self._say = transport, settings, say
        self._sent: list[Entry] = []  # of this epoch, those that change nodes
        self._last: dict[str, int] = {}  # of these the last to each site

    def begin_epoch(self) -> None:
        self.epoch += 1
        self._sent, self._last = [], {}

    def ask(
        self,
        message: Message[Any] | Mapping[str, Message[Any]],
        gather: Gather,
        *,
        whom: tuple[str, ...] | None = None,
        phase: Phase | None = None,
        changes: bool = True,
    ) -> Any:
        """One exchange, as the journal has it or over the transport: what ``gather`` makes of the replies.

        Parameters
        ----------
        message : the same for all, or one for each site
        whom : the sites concerned; by default all
        phase : what it is for, if not what the message declares
        changes : whether it changes nodes, so that a site that lost its memory needs it again
        """
        letters = self._letters(message, self.roster if whom is None else whom)
        declared = next(iter(message.values())) if isinstance(message, Mapping) else message
        declared = declared.messages[-1] if isinstance(declared, Batch) else declared
        about = Exchange(declared.label, phase or declared.phase, declared.second, 0, 0, 0, 0.0)
        entry = self.journal.next()
        if entry is None:
            entry = self._carry(about, letters, gather)
            self.journal.add(entry)
        if entry.lost is not None or entry.exchange is None:
            raise SiteLost(entry.lost or {}, in_journal=True)
        if entry.letters != letters:
            raise self.journal.foreign("letters")
        if changes:
            self._last |= {site: len(self._sent) for site in self.roster if entry.to(site) is not None}
            self._sent.append(entry)
        self.made.append(entry.exchange)
        return decode(entry.total)

    def _letters(self, message: Message[Any] | Mapping[str, Message[Any]], whom: tuple[str, ...]) -> dict[str, bytes]:
        """By site; one for all of them, if all of them get it and had the one before."""
        after = {site: self._last.get(site, -1) for site in whom}
        if isinstance(message, Mapping):
            return {site: self._letter(each, after[site]) for site, each in message.items()}
        letters = {last: self._letter(message, last) for last in set(after.values())}
        if whom == self.roster and len(letters) == 1:
            return {"": letters[after[whom[0]]]}
        return {site: letters[last] for site, last in after.items()}

    def _letter(self, body: Message[Any], after: int) -> bytes:
        return encode(Letter(self.journal.head["run"], self.epoch, len(self._sent), body, after=after))

    def _carry(self, about: Exchange, letters: dict[str, bytes], gather: Gather) -> Entry:
        """One exchange over the transport, with as many attempts as the settings allow."""
        sites = self.roster if "" in letters else tuple(letters)
        waiting = {site: letters[""] if "" in letters else letters[site] for site in sites}
        replies: dict[str, Any] = {}
        problems: dict[str, Unusable] = {}
        start, up, down = time.perf_counter(), 0, 0
        for attempt in range(1 + self._settings.retries):
            if attempt:
                time.sleep(self._settings.pause)
            again = "" if attempt == 0 else f", again to {len(waiting)}"
            number, many = len(self.made) + 1, f"{len(sites)} of {len(self.roster)}"
            self._say(f"exchange {number} ({about.label}) with {many} sites{again}")
            came = self._transport.exchange(waiting, self._settings.timeout)
            for site, letter in list(waiting.items()):
                down, up = down + len(letter), up + _size(came.get(site))
                found = read(letter, came.get(site))
                if isinstance(found, Unusable):
                    problems[site] = found
                    continue
                replies[site] = found.body
                del waiting[site]
            for site in waiting:
                _check_final(site, problems[site])
                last = problems[site].last_exchange
                if last is not None:
                    more = self._remind(site, last)
                    down, up = down + more[0], up + more[1]
            if not waiting:
                break
        if waiting:
            raise SiteLost({site: problems[site].why for site in sorted(waiting)})
        seconds = time.perf_counter() - start
        total = gather({site: replies[site] for site in sorted(replies)})
        return Entry(letters, encode(total), replace(about, sites=len(sites), down=down, up=up, seconds=seconds))

    def _remind(self, site: str, last: int) -> tuple[int, int]:
        """Send a site all letters after its last, for it to catch up; bytes down and up.

        It does not send its sums a second time; that its rows are the same as before it proves by their hash.
        """
        down = up = 0
        for entry in self._sent[last + 1 :]:
            once = entry.to(site)
            if once is None:
                continue
            asked = replace(decode(once), mute=True)
            letter = encode(asked)
            came = self._transport.exchange({site: letter}, self._settings.timeout)
            down, up = down + len(letter), up + _size(came.get(site))
            found = read(letter, came.get(site))
            if isinstance(found, Unusable):
                _check_final(site, found)
                break  # it will be asked again, and lost if that does not help
            if isinstance(asked.body, Agree) and found.body != decode(entry.total)[0][site].rows:
                raise Halted(
                    f"Site {site!r} has lost its memory of the run, and its table has changed since; put it back, or delete "
                    "the journal to start anew."
                )
        return down, up


def _check_final(site: str, problem: Unusable) -> None:
    """What asking again cannot change stops the run, with the site's sentence."""
    if problem.final:
        raise Halted(f"Site {site!r}: {problem.why}")


def _size(reply: bytes | Failure | None) -> int:
    return len(reply) if isinstance(reply, bytes) else 0
