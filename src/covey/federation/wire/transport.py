"""Who carries letters: to some sites at once, and their replies back, or why there is none.

A letter is bytes, whatever carries it; sites are named by the operator, not by themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

Reason = Literal["late", "gone", "refused", "failed"]


@dataclass(frozen=True)
class Failure:
    """Why a site did not reply: ``late`` (no answer in time), ``gone`` (not connected), ``refused`` (not let in, or it does not
    let us in), ``failed`` (it broke while answering); ``detail`` in words.
    """

    reason: Reason
    detail: str


class Transport(Protocol):
    """A way to the sites."""

    def sites(self) -> tuple[str, ...]:
        """Who is connected now, sorted."""
        ...

    def exchange(self, letters: Mapping[str, bytes], timeout: float) -> dict[str, bytes | Failure]:
        """Send a letter to each of these sites and wait, at most ``timeout`` seconds, for all replies; one entry a site."""
        ...


class Answers(Protocol):
    """A site as a transport sees it: letters in, letters out. It never raises; what is wrong is in the reply."""

    def answer(self, letter: bytes) -> bytes: ...


class InProcess:
    """All sites in this process: for tests and for simulation on one machine."""

    def __init__(self, sites: Mapping[str, Answers]) -> None:
        self._sites = dict(sites)

    def sites(self) -> tuple[str, ...]:
        return tuple(sorted(self._sites))

    def exchange(self, letters: Mapping[str, bytes], timeout: float) -> dict[str, bytes | Failure]:
        return {name: self._carry(name, letter) for name, letter in letters.items()}

    def _carry(self, name: str, letter: bytes) -> bytes | Failure:
        if name not in self._sites:
            return Failure("gone", "it is not connected")
        return self._sites[name].answer(letter)
