"""What a site lets itself spend of its clients' privacy, and has spent: it does not take the coordinator's word for it.

home/
  privacy.json   every release that this site has made, of any run, and the epsilon of all of them together
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from covey.errors import FederationError
from covey.federation.privacy import DELTA, spent
from covey.network import Batch, Tie
from covey.solvers.private import Place, Privacy, Release

try:
    import fcntl
except ImportError:  # a system without it: runs at the same time are then the administrator's to avoid
    fcntl = None  # type: ignore[assignment]


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
            if value not in (None, "") and not (isinstance(value, int | float) and value > 0):
                raise FederationError(f"The node's setting {name!r} must be a positive number. Got {value!r} instead.")
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
        self._check(run, [(each, one["noise"], len(one["exchanges"])) for each, one in kept.items()])
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
        return [(name, one["noise"], len(one["exchanges"])) for name, one in self._read().items() if chosen(name)]

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Two runs at once must not read the same sum and each add to it."""
        if self.file is None or fcntl is None:
            yield
            return
        self.file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with self.file.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

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
        made = [(one["noise"], len(one["exchanges"])) for one in kept.values()]
        document = {"epsilon": spent(made, self.delta), "delta": self.delta, "releases": kept}
        fresh = self.file.with_suffix(".part")
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump(document, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(self.file)


def releases(request: Any, privacy: Privacy | None) -> bool:
    """Whether a request is for sums with noise; what a private run has no need of is refused."""
    if privacy is None or isinstance(request, Tie | Place):
        return False
    if isinstance(request, Batch):
        asked = [releases(each, privacy) for each in request.requests]  # every one is looked at
        return any(asked)
    if not isinstance(request, Release):
        raise FederationError(f"This run is private: a site does not answer {type(request).__name__!r} in it.")
    if (request.noise, request.clip) != (privacy.noise, privacy.clip):
        raise FederationError(
            f"Noise {request.noise:g} and clip {request.clip:g} were asked for, but {privacy.noise:g} and {privacy.clip:g} "
            "agreed on; start a new run."
        )
    return True
