"""What a site remembers of a run: in memory, or on its own disk, so that a site that restarts goes on where it was.

A file is readable by its owner only, and written by one process at a time.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from covey.errors import FederationError
from covey.federation.wire.messages import Agree
from covey.nodes.network import Snapshot
from covey.records import Record, RecordError, decode, encode, write_file

try:
    import fcntl
except ImportError:  # a system without file locks: its administrator must not start two nodes with one home
    fcntl = None  # type: ignore[assignment]


@dataclass(frozen=True)
class SiteRun(Record):
    """What a site remembers of one run.

    Attributes
    ----------
    key, salt : private key of the site and key of the client tags, in hexadecimal; only if sums are masked
    rosters : sites that took part in each start of the run
    epoch, exchange, digest, reply : the last message answered: its place, a digest of its bytes, and the reply
    operator, agreed, rows : who asks, what all sites agreed on, and a digest of the rows at that time
    node : state of the node
    """

    key: str = ""
    salt: str = ""
    rosters: tuple[tuple[str, ...], ...] = ()
    epoch: int = -1
    exchange: int = -1
    digest: str = ""
    reply: bytes = b""
    operator: str = ""
    agreed: Agree | None = None
    rows: str = ""
    node: Snapshot | None = None


class Document:
    """A small JSON file of a site; without a path it is kept in this object."""

    def __init__(self, path: Path | None, empty: dict[str, Any]) -> None:
        self.path, self._kept = path, empty

    def read(self) -> dict[str, Any]:
        """A copy of what it holds."""
        if self.path is None or not self.path.exists():
            return copy.deepcopy(self._kept)
        try:
            found: dict[str, Any] = json.loads(self.path.read_text(encoding="utf-8"))
            whole = found.keys() >= self._kept.keys()
        except (OSError, ValueError, AttributeError):
            whole = False
        if not whole:
            raise FederationError(f"The site's {self.path.name} is damaged, so what it holds is unknown; restore it.")
        return found

    def write(self, content: dict[str, Any]) -> None:
        """Replace what it holds."""
        if self.path is None:
            self._kept = content
        else:
            write_file(private_folder(self.path.parent) / self.path.name, json.dumps(content, indent=1).encode())


class RunStore:
    """The runs of a site by name: in files below ``home``, or in this object if there is no home."""

    def __init__(self, home: Path | None) -> None:
        self.home = home
        self._runs: dict[str, SiteRun] = {}

    def load(self, name: str) -> SiteRun:
        """A run as it was saved, or a new one."""
        file = self._file(name)
        if name not in self._runs and file is not None and file.exists():
            try:
                found = decode(file.read_bytes())
            except RecordError:
                found = None
            if not isinstance(found, SiteRun):
                raise FederationError(f"The site's file runs/{name}.state is damaged; start a new run.")
            self._runs[name] = found
        return self._runs.get(name, SiteRun())

    def save(self, name: str, run: SiteRun) -> None:
        """Replace what was saved of a run before."""
        file, self._runs[name] = self._file(name), run
        if file is not None:
            write_file(private_folder(file.parent) / file.name, encode(run))

    def drop(self, name: str) -> None:
        """Delete what was saved of a run."""
        file, _ = self._file(name), self._runs.pop(name, None)
        if file is not None:
            file.unlink(missing_ok=True)

    def _file(self, name: str) -> Path | None:
        if not name.isalnum():
            raise FederationError(f"The name of a run consists of letters and digits. Got {name[:40]!r} instead.")
        return None if self.home is None else self.home / "runs" / f"{name}.state"

    def forget(self, days: int | None) -> None:
        """Delete what was saved of runs without a message for so many days."""
        if days is None or self.home is None:
            return
        for file in (self.home / "runs").glob("*.state"):
            if file.stat().st_mtime < time.time() - 86400 * days:
                file.unlink()
                self._runs.pop(file.stem, None)


@contextmanager
def locked(folder: Path | None, name: str = "lock") -> Iterator[None]:
    """Wait until no other process, such as ``covey site approve``, holds the lock of this folder; then hold it.

    Without a folder there is nothing to lock.
    """
    if folder is None:
        yield
        return
    with (private_folder(folder) / name).open("w") as file:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def private_folder(path: Path) -> Path:
    """Make a folder that only its owner can read."""
    path.mkdir(parents=True, exist_ok=True)
    path.chmod(0o700)
    return path
