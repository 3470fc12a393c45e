"""Transports: they carry encoded messages to several sites at once, and bring back the replies or the reason for no reply.

A transport sees bytes only. Sites go by the names that the operator gave them.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from covey.errors import FederationError, listing


@dataclass(frozen=True)
class Failure:
    """Why there is no usable reply from a site.

    Attributes
    ----------
    why : the reason, as a clause about the site: "it is not connected"
    final : whether it is useless to ask again
    waits : whether the site waits for its owner's decision
    """

    why: str
    final: bool = False
    waits: bool = False


class Transport(ABC):
    """A connection to the sites. A site has one message at a time."""

    @abstractmethod
    def sites(self) -> tuple[str, ...]:
        """Names of the sites that are connected now, sorted."""

    @abstractmethod
    def push(self, messages: Mapping[str, bytes], timeout: float) -> None:
        """Send each of these sites its message, in place of an earlier one; it has ``timeout`` seconds to reply."""

    @abstractmethod
    def pull(self, wait: float) -> dict[str, bytes | Failure]:
        """Wait until some sites have replied or failed, at most ``wait`` seconds; returns what has come from each of them."""

    def exchange(self, messages: Mapping[str, bytes], timeout: float) -> dict[str, bytes | Failure]:
        """Send each of these sites its message, and wait for all replies."""
        self.push(messages, timeout)
        came, until = dict[str, bytes | Failure](), time.monotonic() + timeout
        while len(came) < len(messages) and (left := until - time.monotonic()) > -_LATE:
            came |= {site: reply for site, reply in self.pull(max(left, 0.0)).items() if site in messages}
        return came


_LATE = 1.0  # seconds after the end of its time in which a transport says that a site is late


class Answers(Protocol):
    """A site as a transport sees it. ``answer`` never raises: an error is part of the reply."""

    def answer(self, message: bytes) -> bytes: ...


class InProcess(Transport):
    """A transport to sites in this process, for tests and simulation. They answer at once, one after the other."""

    def __init__(self, sites: Mapping[str, Answers]) -> None:
        self._sites, self._came = dict(sites), dict[str, bytes | Failure]()

    def sites(self) -> tuple[str, ...]:
        return tuple(sorted(self._sites))

    def push(self, messages: Mapping[str, bytes], timeout: float) -> None:
        self._came |= self.exchange(messages, timeout)

    def pull(self, wait: float) -> dict[str, bytes | Failure]:
        if not self._came:
            time.sleep(wait)
        came, self._came = self._came, {}
        return came

    def exchange(self, messages: Mapping[str, bytes], timeout: float) -> dict[str, bytes | Failure]:
        gone = Failure("it is not connected")
        return {name: self._sites[name].answer(message) if name in self._sites else gone for name, message in messages.items()}


def wait_for_sites(
    transport: Transport, expected: int | tuple[str, ...], patience: float, say: Callable[[str], None]
) -> tuple[str, ...]:
    """Wait until the expected sites are connected: a number of sites, or these names.

    Returns
    -------
    tuple of str
        The sites that take part: those that are named, or else all that are connected.

    Examples
    --------
    >>> wait_for_sites(InProcess({"north": None, "south": None}), ("north", "south"), 0.0, print)
    2 sites are connected: 'north', 'south'
    ('north', 'south')
    """
    start, before = time.monotonic(), None
    while True:
        here = transport.sites()
        if isinstance(expected, int):
            missing = f"{expected - len(here)} of {expected} sites" if len(here) < expected else ""
        else:
            missing = listing(name for name in expected if name not in here)
        if not missing:
            say(f"{len(here)} sites are connected: {listing(here)}")
            return here if isinstance(expected, int) else expected
        if here != before:
            say(f"waiting for {missing}; connected: {listing(here) or 'none'}")
            before = here
        if time.monotonic() - start >= patience:
            late = f"Not connected after {patience:g} seconds: {missing}"
            raise FederationError(f"{late}; start covey node there, or change --sites.")
        time.sleep(1.0)
