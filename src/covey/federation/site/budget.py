"""What a site lets itself spend of its clients' privacy, and has spent: it does not take the coordinator's word for it.

home/
  privacy.json   every release that this site has made, of any run, and the epsilon of all of them together
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from covey.errors import FederationError
from covey.federation.privacy.accounting import DELTA, spent
from covey.federation.privacy.sweeps import PlaceClients, ReleaseSums
from covey.federation.site.files import alone, own_folder, write_whole
from covey.federation.wire.agreement import Privacy
from covey.federation.wire.checks import check_number
from covey.nodes.network import Batch, Message, SetGamma


@dataclass
class Budget:
    """What a site lets itself spend, and has spent.

    Parameters
    ----------
    run : the most epsilon for one run; None for no limit. With one, runs without differential privacy are refused
    total : the most for all runs together
    delta : with which epsilon is measured here, whatever the operator's
    file : where what was spent is kept, over runs and restarts; None keeps it in this object
    """

    run: float | None = None
    total: float | None = None
    delta: float = DELTA
    file: Path | None = None
    kept: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, settings: Mapping[str, Any], home: Path) -> Budget:
        """From a node's settings: ``epsilon``, ``epsilon_total`` and ``delta``."""
        given = {
            name: settings.get(name, settings.get(name.replace("_", "-"))) for name in ("epsilon", "epsilon_total", "delta")
        }
        for name, value in given.items():
            if value not in (None, ""):
                check_number(f"node's setting {name!r}", value, above=0)
        limits = [float(value) if value not in (None, "") else None for value in given.values()]
        return cls(limits[0], limits[1], limits[2] or DELTA, home / "privacy.json")

    def admit(self, privacy: Privacy | None, run: str, epoch: int) -> None:
        """Refuse a run that would cost too much, before anything is sent."""
        if privacy is None:
            if self.run is not None or self.total is not None:
                most = self.total if self.run is None else self.run
                raise FederationError(
                    f"This site answers only under differential privacy, with epsilon {most:g} at most (delta {self.delta:g}); "
                    "start the run with an epsilon."
                )
            return
        self._check(run, [*self._of(lambda name: name != f"{run}.{epoch}"), (f"{run}.", privacy.noise, privacy.rounds)])

    def remember(self, privacy: Privacy, run: str, epoch: int, rows: str, *, again: bool) -> None:
        """Keep a digest of the rows of a run, which does not leave the site; ``again``, look that they are the same."""
        with self._alone():
            kept, name = self._read(), f"{run}.{epoch}"
            if again and kept.get(name, {}).get("rows") != rows:
                raise FederationError(
                    "This site has lost its memory of a private run, or its table has changed since; put both back, or start a "
                    "new run."
                )
            kept.setdefault(name, {"noise": privacy.noise, "exchanges": []})["rows"] = rows
            self._write(kept)

    def charge(self, privacy: Privacy, run: str, epoch: int, exchange: int) -> None:
        """Count one release, on disk before it is sent; one that was made before, or is not in the agreement, is refused."""
        with self._alone():
            self._charge(privacy, run, epoch, exchange)

    def _charge(self, privacy: Privacy, run: str, epoch: int, exchange: int) -> None:
        kept, name = self._read(), f"{run}.{epoch}"
        entry = kept.setdefault(name, {"noise": privacy.noise, "exchanges": []})
        entry["noise"] = min(entry["noise"], privacy.noise)  # of two agreements, were there two, the one that costs more
        if exchange in entry["exchanges"]:
            raise FederationError(
                f"This site has answered exchange {exchange} before and lost its answer; noise is not drawn twice: start a "
                "new run."
            )
        if len(entry["exchanges"]) >= privacy.rounds:
            raise FederationError(f"This site agreed to {privacy.rounds} releases and has made them; start a new run.")
        entry["exchanges"].append(exchange)
        self._check(run, _releases(kept))
        self._write(kept)

    def spent(self) -> float:
        """The epsilon of all releases that this site has made."""
        return spent([(noise, number) for _, noise, number in self._of(lambda _: True)], self.delta)

    def _check(self, run: str, releases: list[tuple[str, float, int]]) -> None:
        own = [(noise, number) for name, noise, number in releases if name.startswith(f"{run}.")]
        limits = {"for one run": (self.run, own), "for all runs": (self.total, [each[1:] for each in releases])}
        for what, (most, made) in limits.items():
            if most is None:
                continue
            cost = spent(made, self.delta)
            if cost > most:
                raise FederationError(
                    f"This would bring the site's epsilon {what} to {cost:.4g} (delta {self.delta:g}), and it allows {most:g} "
                    "at most; ask for less with epsilon."
                )

    def _of(self, chosen: Any) -> list[tuple[str, float, int]]:
        return [each for each in _releases(self._read()) if chosen(each[0])]

    def _alone(self) -> AbstractContextManager[None]:
        """Two runs at once must not read the same sum and each add to it."""
        if self.file is None:
            return alone(None)
        own_folder(self.file.parent)
        return alone(self.file.with_suffix(".lock"))

    def _read(self) -> dict[str, Any]:
        if self.file is None:
            return {name: {**one, "exchanges": list(one["exchanges"])} for name, one in self.kept.items()}
        if not self.file.exists():
            return {}
        try:
            found: dict[str, Any] = json.loads(self.file.read_text())["releases"]
        except (OSError, ValueError, KeyError, TypeError):
            raise FederationError("What this site has spent cannot be read: its privacy.json is damaged; restore it.") from None
        return found

    def _write(self, kept: dict[str, Any]) -> None:
        self.kept = kept
        if self.file is None:
            return
        made = [(noise, number) for _, noise, number in _releases(kept)]
        document = {"epsilon": spent(made, self.delta), "delta": self.delta, "releases": kept}
        write_whole(self.file, json.dumps(document, indent=2).encode())


def _releases(kept: Mapping[str, Any]) -> list[tuple[str, float, int]]:
    """Of each start of a run its noise, and how many releases were made."""
    return [(name, one["noise"], len(one["exchanges"])) for name, one in kept.items()]


def releases(request: Message[Any], privacy: Privacy | None) -> bool:
    """Whether a request is for sums with noise; what a private run has no need of is refused."""
    if privacy is None or isinstance(request, SetGamma | PlaceClients):
        return False
    if isinstance(request, Batch):
        asked = [releases(each, privacy) for each in request.messages]  # every one is looked at
        return any(asked)
    if not isinstance(request, ReleaseSums):
        raise FederationError(f"This run is private: a site does not answer {request.label!r} in it.")
    if (request.noise, request.clip) != (privacy.noise, privacy.clip):
        raise FederationError(
            f"Noise {request.noise:g} and clip {request.clip:g} were asked for, but {privacy.noise:g} and {privacy.clip:g} "
            "agreed on; start a new run."
        )
    return True
