"""Transports: they carry encoded messages to several sites at once, and bring back the replies or the reason for no reply.

A transport sees bytes only. Sites go by the names that the operator gave them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from covey.errors import FederationError, listing


@dataclass(frozen=True)
class Failure:
    """Why there is no reply from a site, as a clause about it: "it is not connected"."""

    why: str


class Transport(Protocol):
    """A connection to the sites."""

    def sites(self) -> tuple[str, ...]:
        """Names of the sites that are connected now, sorted."""
        ...

    def exchange(self, messages: Mapping[str, bytes], timeout: float) -> dict[str, bytes | Failure]:
        """Send each of these sites its message, and wait at most ``timeout`` seconds for all replies."""
        ...


class Answers(Protocol):
    """A site as a transport sees it. ``answer`` never raises: an error is part of the reply."""

    def answer(self, message: bytes) -> bytes: ...


class InProcess:
    """A transport to sites in this process, for tests and simulation."""

    def __init__(self, sites: Mapping[str, Answers]) -> None:
        self._sites = dict(sites)

    def sites(self) -> tuple[str, ...]:
        return tuple(sorted(self._sites))

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
