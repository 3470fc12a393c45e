"""The coordinator's journal: a coordinator that was killed continues from it and computes the same bits.

A coordinator is a function of the replies it gets. For every exchange the journal holds the sum of the replies
and a digest of the messages. A coordinator that is started again reads these exchanges in place of asking for them, and asks
only for the rest.

The file has a line for each record (:mod:`covey.records`) in base64, the head of the run first. Records have checksums, and a
last line without its end is what the coordinator was writing when it was killed.
"""

from __future__ import annotations

import errno
import os
from base64 import b64decode, b64encode
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from covey.errors import FederationError
from covey.nodes.network import Phase
from covey.records import Record, RecordError, decode, encode


class Halted(FederationError):  # noqa: N818 - an event
    """The run cannot continue now. If the fit has begun, its journal is kept, and the same command continues from it later."""


class ForeignJournal(Halted):
    """The journal belongs to another run; covey does not delete it."""


@dataclass(frozen=True)
class Exchange(Record):
    """The purpose and the cost of one message to sites and of their replies.

    Attributes
    ----------
    label, phase : as the message declares them
    sites : number of sites that took part
    down, up : bytes over all sites
    seconds : until the last reply
    """

    label: str
    phase: Phase
    sites: int
    down: int
    up: int
    seconds: float


@dataclass(frozen=True)
class Entry(Record):
    """One exchange in the journal.

    Attributes
    ----------
    messages : digest of the encoded messages; a coordinator that would send others continues another run
    total : sum of the replies, or what else the coordinator made of them, encoded
    exchange : purpose and cost; None for an entry that says only which sites were ``lost``, and why
    to : the sites that took part
    """

    messages: str
    total: bytes = b""
    exchange: Exchange | None = None
    to: tuple[str, ...] = ()
    lost: dict[str, str] | None = None


class Journal:
    """The exchanges of one run in the order in which they ended, in a file or in memory.

    For each site this is the order in which it was asked. Exchanges of different sites may end in another order in each run.

    Parameters
    ----------
    path : file to append to, or to continue from; None for memory only
    about : description of the run; the file of another run is refused
    fresh : drawn for each run, such as its name; a run that continues keeps what it had
    """

    def __init__(self, path: Path | None, about: Mapping[str, Any], fresh: Mapping[str, Any]) -> None:
        about = decode(encode(dict(about)))  # as it is when it is read: lists become tuples
        self.path, self.entries, self.head = path, list[Entry](), {**about, **fresh}
        self._file: BinaryIO | None = None
        self._unread = list[Entry]()
        if path is not None and path.exists():
            self._continue(path, about)
        elif path is not None:
            with suppress(OSError):  # the file cannot be written then, which says more
                path.parent.mkdir(parents=True, exist_ok=True)
            self._append(self.head)

    @property
    def begun(self) -> bool:
        """Whether it holds sums of the fit itself."""
        return any(entry.exchange is not None and entry.exchange.phase != "set-up" for entry in self.entries)

    def next(self, sites: Collection[str]) -> Entry | None:
        """The next entry for some of these sites in a run that continues; None after the last."""
        for at, entry in enumerate(self._unread):
            if entry.lost is not None:  # what was under way has ended with it
                del self._unread[: at + 1]
                return entry
            if not set(entry.to).isdisjoint(sites):
                return self._unread.pop(at)
        return None

    def add(self, entry: Entry) -> None:
        """Write one exchange to the disk."""
        self.entries.append(entry)
        self._append(entry)

    def foreign(self, what: str) -> ForeignJournal:
        """The error for a journal of another run."""
        fix = "delete it to start a new run, or give another --out"
        return ForeignJournal(f"The journal {str(self.path)!r} is of another run (different {what}); {fix}.")

    def close(self, *, done: bool) -> None:
        """Stop writing, and delete the file if it is no longer needed."""
        if self._file is not None:
            self._file.close()
            self._file = None
        if done and self.path is not None:
            self.path.unlink(missing_ok=True)

    def _append(self, value: Any) -> None:
        if self.path is None:
            return
        line = b64encode(encode(value)) + b"\n"
        try:
            if self._file is None:
                # Readable by the operator only: it holds sums.
                self._file = os.fdopen(os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab", buffering=0)
            if self._file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(self._file.fileno())
        except OSError as problem:
            why = f"The journal {str(self.path)!r} cannot be written ({problem.strerror})"
            raise Halted(f"{why}; make room, and run the same command again to continue.") from None

    def _continue(self, path: Path, about: Mapping[str, Any]) -> None:
        *lines, _cut_off = path.read_bytes().split(b"\n")
        try:
            head, *self.entries = (decode(b64decode(line, validate=True)) for line in lines)
            self._unread = [*self.entries]
            self.head = dict(head)
            if not all(isinstance(entry, Entry) for entry in self.entries):
                raise RecordError("It holds another record.")
        except (TypeError, ValueError):
            raise FederationError(f"The journal {str(path)!r} cannot be read; delete it to start a new run.") from None
        other = [name for name, value in about.items() if self.head.get(name) != value]
        if other:
            raise self.foreign(other[0])
        os.truncate(path, sum(len(line) + 1 for line in lines))
