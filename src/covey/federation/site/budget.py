"""How much epsilon a site may spend.

A site counts by itself what its private runs have cost. ``home/privacy.json`` has every release of every run at the site, and
the epsilon of all of them together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from covey.errors import FederationError
from covey.federation.privacy.differential import DELTA, PlaceClients, ReleaseSums, spent
from covey.federation.site.state import Document
from covey.federation.wire.codec import SAME_VERSION
from covey.federation.wire.messages import Privacy
from covey.nodes.network import Message, SetGamma


@dataclass
class Budget:
    """How much epsilon a site may spend, and how much it has spent.

    Parameters
    ----------
    run : the most epsilon for one run; None for no limit. A site with a limit refuses runs without differential privacy
    total : the most epsilon for all runs together; None for no limit
    delta : the delta of these limits, whatever the operator's is
    file : keeps the releases over runs and restarts; None keeps them in this object
    unlimited : whether private runs are answered without a limit. Their noise, which the operator chooses, takes the place of
        other rules, so a real site answers them only within a limit; a simulation is one process and needs none
    """

    run: float | None = None
    total: float | None = None
    delta: float = DELTA
    file: Path | None = None
    unlimited: bool = True

    def __post_init__(self) -> None:
        self._file = Document(self.file, {"releases": {}})

    @property
    def releases(self) -> dict[str, Any]:
        """Noise and exchanges of all releases, by start of a run."""
        found: dict[str, Any] = self._file.read()["releases"]
        return found

    def admit(self, privacy: Privacy | None, run: str, epoch: int) -> None:
        """Refuse a run that would cost too much, before anything is sent."""
        if privacy is None:
            if self.run is not None or self.total is not None:
                most = f"epsilon {self.total if self.run is None else self.run:g} at most (delta {self.delta:g})"
                raise FederationError(
                    f"This site answers only under differential privacy, with {most}; give --epsilon (rules 'epsilon' and "
                    "'epsilon_total' of its site.toml)."
                )
            return
        if self.run is None and self.total is None and not self.unlimited:
            raise FederationError(
                "This site has set no limit of epsilon, and without one it answers no private run; leave out --epsilon, or ask "
                "the site's owner to set the rule 'epsilon' in its site.toml."
            )
        start = f"{run}.{epoch}"
        releases = {name: entry for name, entry in self.releases.items() if name != start}
        self._check(run, releases | {start: {"noise": privacy.noise, "exchanges": range(privacy.rounds)}})

    def charge(self, privacy: Privacy, run: str, epoch: int, exchange: int) -> None:
        """Count one release, on disk before it is sent; refuse to make it twice, or more releases than were agreed."""
        releases = self.releases
        entry = releases.setdefault(f"{run}.{epoch}", {"noise": privacy.noise, "exchanges": []})
        entry["noise"] = min(entry["noise"], privacy.noise)  # of two agreements, the one that costs more
        if exchange in entry["exchanges"]:
            lost = f"This site has answered message {exchange} before and lost its reply"
            raise FederationError(f"{lost}; it does not draw noise twice: start a new run.")
        if len(entry["exchanges"]) >= privacy.rounds:
            raise FederationError(f"This site agreed to {privacy.rounds} releases and has made them; start a new run.")
        entry["exchanges"].append(exchange)
        self._check(run, releases)
        self._file.write({"epsilon": self._cost(releases), "delta": self.delta, "releases": releases})

    def spent(self) -> float:
        """The epsilon of all releases that this site has made."""
        return self._cost(self.releases)

    def _cost(self, releases: Mapping[str, Any]) -> float:
        return spent([(entry["noise"], len(entry["exchanges"])) for entry in releases.values()], self.delta)

    def _check(self, run: str, releases: Mapping[str, Any]) -> None:
        """Refuse releases that cost more than this site allows."""
        of_run = {name: entry for name, entry in releases.items() if name.startswith(f"{run}.")}
        limits = (("for one run", "epsilon", self.run, of_run), ("for all runs", "epsilon_total", self.total, releases))
        for what, rule, most, made in limits:
            if most is not None and (cost := self._cost(made)) > most:
                limit = f"to {cost:.4g} (delta {self.delta:g}), but it allows {most:g} at most"
                fix = f"give a smaller --epsilon, or ask the site's owner to raise {rule!r} in its site.toml"
                raise FederationError(f"This would bring the site's epsilon {what} {limit}; {fix}.")


def check_private_message(message: Message[Any], privacy: Privacy | None) -> bool:
    """Refuse messages that a private run does not need; return whether this one asks for sums with noise."""
    asking = [part for part in message.parts if not isinstance(part, SetGamma | PlaceClients)] if privacy is not None else []
    for part in asking:
        if not isinstance(part, ReleaseSums):
            raise FederationError(f"This run is private: a site does not answer {part.label!r} in it{SAME_VERSION}.")
        if privacy is not None and (part.noise, part.clip) != (privacy.noise, privacy.clip):
            asked, agreed = (f"noise {each.noise:g} and clip {each.clip:g}" for each in (part, privacy))
            raise FederationError(f"The message asks for {asked}, but the sites agreed on {agreed}; start a new run.")
    return bool(asking)
