"""What a site remembers of its runs, in memory or on its own disk."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from covey.errors import FederationError
from covey.federation.site.files import alone, own_folder, write_whole
from covey.federation.wire.agreement import Agree
from covey.nodes.network import Snapshot
from covey.records import Record, decode, encode


@dataclass(frozen=True)
class SiteRun(Record):
    """What a site remembers of one run.

    Attributes
    ----------
    key, salt : its private key, and the key of the clients' tags; in hexadecimal, only if sums are masked
    rosters : who took part in earlier starts of the fit, and now
    epoch, exchange : the last letter answered; ``digest`` of its bytes, and the ``reply``
    agreed, rows : what all sites agreed on, and a digest of the rows this was about
    node : where the node is
    """

    key: str = ""
    salt: str = ""
    rosters: tuple[tuple[str, ...], ...] = ()
    epoch: int = -1
    exchange: int = -1
    digest: str = ""
    reply: bytes = b""
    agreed: Agree | None = None
    rows: str = ""
    node: Snapshot | None = None


class RunStore:
    """The runs of a site, by name; without a home they are in this object only, for simulation."""

    def __init__(self, home: Path | None) -> None:
        self._home = home
        self._runs: dict[str, SiteRun] = {}

    def lock(self) -> AbstractContextManager[None]:
        """One process at a time: a transport may start one for every letter, and not notice that an older one still runs."""
        return alone(None if self._home is None else own_folder(self._home) / "lock")

    def load(self, name: str) -> SiteRun:
        """A run as it was left; a new one, if there is none of this name."""
        if not name.isalnum():
            raise FederationError(f"A run's name is letters and digits; got {name[:40]!r}.")
        if name not in self._runs:
            file = None if self._home is None else self._home / "runs" / f"{name}.state"
            self._runs[name] = _read(file) if file is not None and file.exists() else SiteRun()
        return self._runs[name]

    def save(self, name: str, run: SiteRun) -> None:
        """Keep a run in place of what was kept of it before."""
        self._runs[name] = run
        if self._home is not None:
            write_whole(own_folder(self._home / "runs") / f"{name}.state", encode(run))


def _read(file: Path) -> SiteRun:
    found = decode(file.read_bytes())
    if not isinstance(found, SiteRun):
        raise FederationError(f"What this site remembers of a run is damaged ({file.name}); start a new run.")
    return found
