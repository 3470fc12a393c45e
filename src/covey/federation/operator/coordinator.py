"""The coordinator: a network of sites, as solvers ask it, over any transport.

Every exchange is one letter to each site of the roster and one reply from each, matched by run, epoch and exchange. What may go
wrong, and what then happens:

    no reply, or late          the same letter again, ``retries`` times; a site answers twice with the same bytes
    a reply to another letter  is not read; as if there were none
    a site without its memory  is told all letters of this epoch again, and goes on
    NaN, or a wrong shape      the site is lost: its numbers are never added
    a site that is lost        :class:`SiteLost`; the run stops, or begins anew as another epoch without it
    the coordinator dies       run again, it goes on from its journal
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import add
from typing import Any, TypeVar, cast

import numpy as np
import polars as pl

from covey import __version__
from covey._typing import Anything
from covey.errors import FederationError
from covey.federation.operator.agreement import (
    Agree,
    Deliver,
    DrawSalt,
    Hello,
    Joined,
    Profile,
    SiteTotals,
    agree,
    check_spread,
    check_tags,
    check_totals,
    cluster_ids,
    digests,
    owners,
    shared,
)
from covey.federation.operator.journal import Entry, Journal
from covey.federation.operator.members import Members
from covey.federation.operator.replies import SiteLost, Trouble, check_alike, read, seen
from covey.federation.privacy.accounting import DELTA, check_delta
from covey.federation.privacy.masking import check_roster, unmask
from covey.federation.privacy.sweeps import Privacy
from covey.federation.wire.letters import Letter, join
from covey.federation.wire.transport import Failure, Transport
from covey.losses import Loss
from covey.nodes.messages import Batch, Message, Standardise
from covey.problem.problem import resolve
from covey.problem.spec import Spec
from covey.records import decode, encode
from covey.tables.scaling import Scale
from covey.tree.hierarchy import Hierarchy

R = TypeVar("R")
Say = Callable[[str], None]


@dataclass(frozen=True)
class RunSettings:
    """What the operator decides of a run.

    Attributes
    ----------
    timeout : seconds to wait for a reply
    retries : how often a letter is sent again, each time after ``pause`` seconds
    secure : whether sums are masked, so that only totals are seen here
    categories : of columns, where a site may not bring others
    members : who may bring which clusters and clients
    private, delta : how private the fit is to be, if it is, and with which probability that may fail
    """

    timeout: float = 600.0
    retries: int = 2
    pause: float = 0.0
    secure: bool = False
    categories: Mapping[str, Any] | None = None
    members: Members = field(default_factory=Members)
    private: Privacy | None = None
    delta: float = DELTA


@dataclass(frozen=True)
class Exchange:
    """What one exchange was and cost: bytes down and up over all sites, and seconds until the last reply."""

    what: str
    sites: int
    down: int
    up: int
    seconds: float


class Halted(FederationError):  # noqa: N818 - an event, of which an error is only one outcome
    """The run cannot go on as things are; once they are put right it can, from its journal."""


class Federation:
    """The sites of one run as a :class:`~covey.nodes.network.Network`.

    Parameters
    ----------
    transport : the way to them
    roster : who takes part
    spec : what is fitted
    journal : where exchanges are written down
    terms : what the operator decides
    say : told of each exchange, for a live line
    """

    def __init__(
        self,
        transport: Transport,
        roster: Sequence[str],
        spec: Spec,
        journal: Journal,
        terms: RunSettings,
        say: Say = lambda _: None,
    ) -> None:
        self.roster = tuple(sorted(roster))
        self.spec, self.journal, self.how = spec, journal, terms
        self.exchanges: list[Exchange] = []
        self.epoch = -1
        self._transport, self._say = transport, say
        self._run: str = journal.head["run"]
        self._sent: list[Entry] = []
        self._last: dict[str, int] = {}
        self._rosters: list[tuple[str, ...]] = []
        self._profiles: dict[str, Profile] = {}
        self._held: tuple[Any, ...] = ()
        self.agreed: Agree
        self.totals: SiteTotals
        self.tree: Hierarchy
        self.scale: Scale | None = None

    @property
    def terms(self) -> tuple[str, ...]:
        return tuple(self.agreed.design["terms"])

    @property
    def loss(self) -> Loss:
        return self.spec.loss

    def open(self) -> None:
        """Let all sites of the roster agree; a new epoch of the run, if there was one before."""
        self._next_epoch()
        self._held = ()
        profiles = self._once("hello", {"": self._letter("hello", Hello(*self._greeting))}, _profiles)
        self._profiles |= profiles  # with those of sites that were lost: their sums are in earlier totals
        agreed = agree(profiles, self.spec, self.how.categories or {}, self.how.members, self.how.private)
        if self.how.secure:
            check_spread(profiles)
        seals: dict[str, str] = {}
        if self.how.secure:
            agreed = replace(agreed, keys={site: profile.key for site, profile in profiles.items()})
            maker = self.roster[0]
            sealed = self._once("salt", {maker: self._letter("salt", DrawSalt(agreed.keys))}, _by_site)[maker]
            seals = {site: f"{maker}:{text}" for site, text in sealed.items()}
        found = self._join(agreed, seals)
        if shared(_tags(found)) and resolve(self.spec).spec.nested and not agreed.spec["nested"]:
            # The same ids at two sites, in clusters of their own: the formula says that they are different clients.
            agreed = replace(agreed, spec={**agreed.spec, "nested": True})
            self._next_epoch()
            found = self._join(agreed, seals)
        check_tags(_tags(found))
        for site, own in found.items():
            named = bool(agreed.spec["nested"])
            if own.pairs is not None:
                self.how.members.check_clients(site, own.pairs, named, lambda ids: digests(ids, self.journal.head["salt"]))
        if self.how.private is None:
            check_totals(self.totals, self.spec.loss)
        else:
            check_delta(self.how.delta, int(self.totals.clients.sum()))
        self.tree = Hierarchy(
            np.concatenate([[0], np.cumsum(self.totals.clients)]),
            pl.Series(np.arange(int(self.totals.clients.sum()))),
            cluster_ids(agreed),
        )
        self.scale = None
        if self.totals.moments is not None:
            self.scale = Scale.of(self.totals.moments, int(self.totals.rows.sum()), self.terms)
            self.ask(Standardise(self.scale))

    def _next_epoch(self) -> None:
        self.epoch += 1
        self._sent, self._last = [], {}

    def _join(self, agreed: Agree, seals: Mapping[str, str]) -> dict[str, Joined]:
        """Tell every site what was agreed on; what each shows of its clients."""
        self.agreed = agreed
        self._rosters.append(self.roster)
        letters = {site: self._letter("agree", replace(agreed, salt=self._salt(seals, site))) for site in self.roster}
        found: dict[str, Joined]
        found, self.totals = self._once("agree", letters if self.how.secure else {"": letters[self.roster[0]]}, self._joined)
        return found

    def clients(self) -> None:
        """The clients' models stay at their sites."""
        return

    def ask(self, request: Message[R]) -> R:
        """One exchange with every site; the sum of their replies."""
        if not request.reply:
            self._held = (*self._held, request)
            return cast(R, None)
        whom, body = self._concerned(request), Batch((*self._held, request)) if self._held else request
        self._held = ()
        total: R = self._once(type(request).__name__.lower(), self._letters("ask", body, whom), self._summed)
        return total

    def _concerned(self, request: Message[R]) -> tuple[str, ...]:
        """The sites that a request has work for; all of them under masks, which would not cancel, and with what was held."""
        clusters = request.cells
        if clusters is None or self.how.secure or self._held:
            return self.roster
        busy = {cluster for cluster, concerned in zip(self.agreed.clusters, clusters.tolist(), strict=True) if concerned}
        return tuple(site for site in self.roster if not busy.isdisjoint(self._profiles[site].clusters)) or self.roster

    def leave_out(self, lost: SiteLost) -> None:
        """Go on without some sites, from the next :meth:`open` on; a run that is taken up later does the same."""
        left = tuple(site for site in self.roster if site not in lost.sites)
        if self.how.secure and self._rosters:
            self._check_left(left)
        if not lost.known:
            self.journal.add(Entry({}, b"", {"lost": lost.sites}))
        self.roster = left

    def _check_left(self, left: tuple[str, ...]) -> None:
        """Refuse to go on if totals of this start and of those before would show one site's part, of all or of a cluster."""
        try:
            check_roster(self._rosters, left)  # as the sites will: what they refuse is not begun
            for have in map(set, owners(self._profiles).values()):
                if have & set(left):
                    check_roster([have & set(roster) for roster in self._rosters], have & set(left))
        except FederationError as problem:
            raise Halted(str(problem)) from None

    def deliver(self, body: Deliver) -> None:
        """Tell every site the upper levels, so that it writes its clients' models."""
        if self._held:
            held, self._held = Batch(self._held), ()
            self._once("last", self._letters("ask", held, self.roster), self._summed)
        self._once("deliver", self._letters("deliver", body, self.roster), lambda _: None)

    # One exchange

    @property
    def _greeting(self) -> tuple[Any, ...]:
        return __version__, self.spec.to_json(), self.how.secure, self.how.private

    def _salt(self, seals: Mapping[str, str], site: str) -> str:
        return seals.get(site, "") if self.how.secure else str(self.journal.head["salt"])

    def _letter(self, kind: str, body: Any, after: int = -1) -> bytes:
        return encode(Letter(self._run, self.epoch, len(self._sent), kind, body, after=after))

    def _letters(self, kind: str, body: Any, whom: tuple[str, ...]) -> dict[str, bytes]:
        """By site; one for all of them, if all of them get it and had the one before."""
        before = {site: self._last[site] for site in whom}
        letters = {after: self._letter(kind, body, after) for after in set(before.values())}
        if whom == self.roster and len(letters) == 1:
            return {"": letters[before[whom[0]]]}
        return {site: letters[after] for site, after in before.items()}

    def _once(self, what: str, letters: Mapping[str, bytes], gather: Callable[[dict[str, Any]], Any]) -> Any:
        """One exchange: as the journal has it, or over the transport."""
        entry = self.journal.next()
        if entry is None:
            entry = self._exchange(what, letters, gather)
            self.journal.add(entry)
        if "lost" in entry.told:
            raise SiteLost(entry.told["lost"], known=True)
        if dict(entry.letters) != dict(letters):
            raise self.journal.foreign("letters")
        if what not in ("hello", "salt"):
            self._last |= {site: len(self._sent) for site in self.roster if entry.to(site) is not None}
            self._sent.append(entry)
        self.exchanges.append(Exchange(**entry.told))
        return decode(entry.total)

    def _exchange(self, what: str, letters: Mapping[str, bytes], gather: Callable[[dict[str, Any]], Any]) -> Entry:
        sites = self.roster if "" in letters else tuple(letters)
        waiting = {site: letters[""] if "" in letters else letters[site] for site in sites}
        replies: dict[str, Any] = {}
        trouble: dict[str, Trouble] = {}
        start, up, down = time.perf_counter(), 0, 0
        for attempt in range(1 + self.how.retries):
            if attempt:
                time.sleep(self.how.pause)
            again = "" if attempt == 0 else f", again to {len(waiting)}"
            self._say(f"exchange {len(self.exchanges) + 1} ({what}) with {len(sites)} of {len(self.roster)} sites{again}")
            came = self._transport.exchange(waiting, self.how.timeout)
            for site, letter in list(waiting.items()):
                down, up = down + len(letter), up + _size(came.get(site))
                found = read(letter, came.get(site))
                if isinstance(found, Trouble):
                    trouble[site] = found
                    continue
                replies[site] = found.body
                del waiting[site]
            for site in list(waiting):
                self._refuse(site, trouble[site])
                if trouble[site].behind is not None:
                    more = self._remind(site, trouble[site].behind or 0)
                    down, up = down + more[0], up + more[1]
            if not waiting:
                break
        if waiting:
            raise SiteLost({site: trouble[site].why for site in sorted(waiting)})
        seconds = time.perf_counter() - start
        total = gather({site: replies[site] for site in sorted(replies)})
        told = {"what": what, "sites": len(sites), "down": down, "up": up, "seconds": seconds}
        return Entry(dict(letters), encode(total), told)

    def _refuse(self, site: str, trouble: Trouble) -> None:
        """What no second letter can mend stops the run, with the site's own sentence."""
        if trouble.hopeless:
            raise Halted(f"Site {site!r}: {trouble.why}")

    def _remind(self, site: str, last: int) -> tuple[int, int]:
        """Tell a site all letters after its last, for it to catch up; bytes down and up.

        It does not send its sums a second time; that its rows are the same as before it proves by their hash.
        """
        down = up = 0
        for entry in self._sent[last + 1 :]:
            once = entry.to(site)
            if once is None:
                continue
            letter = encode(replace(decode(once), mute=True))
            came = self._transport.exchange({site: letter}, self.how.timeout)
            down, up = down + len(letter), up + _size(came.get(site))
            found = read(letter, came.get(site))
            if isinstance(found, Trouble):
                self._refuse(site, found)
                break  # it will be asked again, and lost if that does not help
            if entry.told["what"] == "agree" and found.body != decode(entry.total)[0][site].rows:
                raise Halted(
                    f"Site {site!r} has lost its memory of the run, and its table has changed since; put it back, or delete "
                    "the journal to start anew."
                )
        return down, up

    # What becomes of the replies

    def _joined(self, replies: dict[str, Any]) -> tuple[dict[str, Joined], SiteTotals]:
        for site, body in replies.items():
            if not (isinstance(body, tuple) and len(body) == 2 and isinstance(body[0], Joined)):
                raise SiteLost({site: "joined with a message of another form"})
            if not self.how.secure:
                self._check_told(site, body[1])
        total: SiteTotals = self._summed({site: body[1] for site, body in replies.items()})
        return {site: body[0] for site, body in replies.items()}, total

    def _check_told(self, site: str, found: Any) -> None:
        """Refuse clients of clusters that a site did not name before, and that were not looked up in the operator's list."""
        told = self._profiles[site].clusters
        if not (isinstance(found, SiteTotals) and found.clients.shape == (len(self.agreed.clusters),)):
            raise SiteLost({site: "joined with sums of another form"})
        for cluster, clients in zip(self.agreed.clusters, found.clients.tolist(), strict=True):
            if clients and cluster not in told:
                raise Halted(f"Site {site!r} has clients of cluster {cluster!r}, which it did not name; start a new run.")

    def _summed(self, replies: dict[str, Any]) -> Any:
        """The sum over sites, in the order of their names; what cannot be added is not."""
        if all(body is None for body in replies.values()):
            return None
        check_alike({site: seen(site, body) for site, body in replies.items()} if self.how.secure else replies)
        if self.how.secure:
            first = next(iter(replies.values()))
            total = unmask({site: body[1] for site, body in replies.items()}, self.roster)
            reply, ones = join(first[0], total)
            if ones != len(replies):
                raise FederationError("The masks of the sites do not cancel; start a new run.")
            return reply
        return reduce(add, replies.values())


def new_run() -> dict[str, Any]:
    """What is drawn for each run: its name, never used twice, and the key of the clients' tags."""
    return {"run": secrets.token_hex(8), "salt": secrets.token_hex(16)}


def _tags(found: Mapping[str, Joined]) -> dict[str, Anything]:
    return {site: own.tags for site, own in found.items()}


def _by_site(replies: dict[str, Any]) -> dict[str, Any]:
    return replies


def _profiles(replies: dict[str, Any]) -> dict[str, Profile]:
    for site, body in replies.items():
        if not isinstance(body, Profile):
            raise SiteLost({site: "introduced itself with a message of another form"})
    return replies


def _size(reply: bytes | Failure | None) -> int:
    return len(reply) if isinstance(reply, bytes) else 0
