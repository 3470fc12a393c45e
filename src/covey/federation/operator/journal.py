"""What a coordinator writes down, so that one that was killed goes on to the same bits.

A coordinator is a function of the replies it got. Its journal holds, for every exchange, the letters that went out and what
came back, summed; run again, it reads its way to where it was and asks only what was not answered yet. A site that has lost
its memory gets all letters again, from the same journal.

The file is a list of records (:mod:`covey.records`), the head first, each after its length and a checksum.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from covey.errors import FederationError
from covey.nodes.network import Phase
from covey.records import Record, RecordError, decode, encode

_LENGTH, _CHECKSUM = 8, 16  # bytes before each record


class ForeignJournal(FederationError):  # noqa: N818 - what it is, not that it is wrong
    """A journal that belongs to another run; it is left as it is."""


@dataclass(frozen=True)
class Exchange(Record):
    """What one exchange was and cost.

    Attributes
    ----------
    label, phase, second : as its message declares them
    sites : how many took part
    down, up : bytes over all sites
    seconds : until the last reply
    """

    label: str
    phase: Phase
    second: bool
    sites: int
    down: int
    up: int
    seconds: float


@dataclass(frozen=True)
class Entry(Record):
    """One exchange as it is written down.

    Attributes
    ----------
    letters : by site; one for all of them is under the empty name
    total : what the coordinator made of the replies
    exchange : what it was and cost; None for an entry that only says which sites were ``lost``, and why
    """

    letters: dict[str, bytes]
    total: bytes = b""
    exchange: Exchange | None = None
    lost: dict[str, str] | None = None

    def to(self, site: str) -> bytes | None:
        """The letter to a site, if there was one."""
        return self.letters.get(site, self.letters.get(""))


class Journal:
    """The exchanges of one run, in order; with no path, in memory only.

    Parameters
    ----------
    path : file to append to; what it holds is taken up again
    about : what the run is: a file of another run is refused
    fresh : what is decided anew for each run, such as its name; a run that is taken up keeps what it had
    """

    def __init__(self, path: Path | None, about: Mapping[str, Any], fresh: Mapping[str, Any]) -> None:
        about = decode(encode(dict(about)))  # as it is read again: lists are tuples there
        self.path, self.entries, self.head = path, list[Entry](), {**about, **fresh}
        self._file: BinaryIO | None = None
        self._read = 0
        if path is not None and path.exists():
            self._take_up(path, about)
        elif path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._append(self.head)

    @property
    def begun(self) -> bool:
        """Whether sums of the fit itself are among them."""
        return any(entry.exchange is not None and entry.exchange.phase != "set-up" for entry in self.entries)

    def next(self) -> Entry | None:
        """The entry that comes next in a run that is taken up; None where it goes on by itself."""
        if self._read == len(self.entries):
            return None
        self._read += 1
        return self.entries[self._read - 1]

    def add(self, entry: Entry) -> None:
        """Keep one exchange, on disk before anything else happens."""
        self.entries.append(entry)
        self._read += 1
        self._append(entry)

    def foreign(self, what: str) -> ForeignJournal:
        """For something in which this run differs from the one that is written down here."""
        where = str(self.path)
        return ForeignJournal(
            f"The journal {where!r} is of another run (other {what}); delete it to start anew, or write elsewhere."
        )

    def close(self, *, done: bool) -> None:
        """Stop writing; a run that is done needs no journal."""
        if self._file is not None:
            self._file.close()
            self._file = None
        if done and self.path is not None:
            self.path.unlink(missing_ok=True)

    def _append(self, value: Any) -> None:
        if self.path is None:
            return
        if self._file is None:
            # The sums in it are for the operator alone.
            self._file = os.fdopen(os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab")
        text = encode(value)
        self._file.write(len(text).to_bytes(_LENGTH, "little") + _checksum(text) + text)
        self._file.flush()
        os.fsync(self._file.fileno())

    def _take_up(self, path: Path, about: Mapping[str, Any]) -> None:
        content = path.read_bytes()
        try:
            parts = _complete(content)
            self.head = dict(decode(parts[0]))
            for part in parts[1:]:
                entry = decode(part)
                if not isinstance(entry, Entry):
                    raise RecordError("It is another record.")
                self.entries.append(entry)
        except (IndexError, TypeError, ValueError):
            raise FederationError(f"The journal {str(path)!r} cannot be read; delete it to start anew.") from None
        other = [name for name, value in about.items() if self.head.get(name) != value]
        if other:
            raise self.foreign(other[0])
        # What was being written when the coordinator died is cut off.
        kept = sum(_LENGTH + _CHECKSUM + len(part) for part in parts)
        if kept < len(content):
            with path.open("r+b") as file:
                file.truncate(kept)


def _complete(content: bytes) -> list[bytes]:
    """The records that are complete; one that is, and is not as it was written, makes all of them unusable."""
    parts, at = [], 0
    while at + _LENGTH + _CHECKSUM <= len(content):
        start = at + _LENGTH + _CHECKSUM
        size = int.from_bytes(content[at : at + _LENGTH], "little")
        text = content[start : start + size]
        if len(text) < size:
            break
        if _checksum(text) != content[at + _LENGTH : start]:
            raise RecordError("A record is not as it was written.")
        parts.append(text)
        at = start + size
    return parts


def _checksum(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=_CHECKSUM).digest()
