"""What a coordinator writes down, so that one that was killed goes on to the same bits.

A coordinator is a function of the replies it got. Its journal holds, for every exchange, the letters that went out and what
came back, summed; run again, it reads its way to where it was and asks only what was not answered yet. A site that has lost
its memory is told all letters again, from the same journal.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from covey.errors import FederationError
from covey.records import RecordError, decode, encode


class ForeignJournal(FederationError):  # noqa: N818 - what it is, not that it is wrong
    """A journal that belongs to another run; it is left as it is."""


@dataclass(frozen=True)
class Entry:
    """One exchange.

    Attributes
    ----------
    letters : by site; one for all of them is under the empty name
    total : what the coordinator made of the replies, as bytes
    told : what it cost; or which sites were lost, and why
    """

    letters: Mapping[str, bytes]
    total: bytes
    told: Mapping[str, Any] = field(default_factory=dict)

    def to(self, site: str) -> bytes | None:
        """The letter to a site, if there was one."""
        return self.letters.get(site, self.letters.get(""))


class Journal:
    """The exchanges of one run, in order; with no path, in memory only.

    Parameters
    ----------
    path : file to append to; what it holds is taken up again
    about : what the run is: a file of another run is refused
    fresh : what is decided anew for each run, such as its name; a run that is taken up keeps its own
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
            self._append(encode(self.head))

    @property
    def resumes(self) -> int:
        """How many exchanges are still to be read rather than asked."""
        return len(self.entries) - self._read

    @property
    def begun(self) -> bool:
        """Whether sums of the fit itself are among them."""
        return any(entry.told.get("what") not in (None, "hello", "salt", "agree") for entry in self.entries)

    def next(self) -> Entry | None:
        """The entry that comes next in a run that is taken up; None where it goes on by itself."""
        if not self.resumes:
            return None
        self._read += 1
        return self.entries[self._read - 1]

    def add(self, entry: Entry) -> None:
        """Keep one exchange, on disk before anything else happens."""
        self.entries.append(entry)
        self._read += 1
        names = list(entry.letters)
        record = {"names": names, "sizes": [len(entry.letters[name]) for name in names], "told": dict(entry.told)}
        self._append(encode(record), b"".join(entry.letters[name] for name in names), entry.total)

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

    def _append(self, *parts: bytes) -> None:
        if self.path is None:
            return
        if self._file is None:
            # The sums in it are for the operator alone.
            self._file = os.fdopen(os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab")
        self._file.write(b"".join(len(part).to_bytes(8, "little") + part for part in parts))
        self._file.flush()
        os.fsync(self._file.fileno())

    def _take_up(self, path: Path, about: Mapping[str, Any]) -> None:
        text = path.read_bytes()
        parts = _records(text)
        try:
            self.head = dict(decode(parts[0]))
            for at in range(1, len(parts) - 2, 3):
                self.entries.append(_entry(*parts[at : at + 3]))
        except (IndexError, KeyError, TypeError, RecordError):
            raise FederationError(f"The journal {str(path)!r} cannot be read; delete it to start anew.") from None
        other = [name for name, value in about.items() if self.head.get(name) != value]
        if other:
            raise self.foreign(other[0])
        # What was being written when the coordinator died is cut off.
        kept = sum(8 + len(part) for part in parts[: 1 + 3 * len(self.entries)])
        if kept < len(text):
            with path.open("r+b") as file:
                file.truncate(kept)


def _entry(record: bytes, letters: bytes, total: bytes) -> Entry:
    told, by_site, start = decode(record), {}, 0
    for name, size in zip(told["names"], told["sizes"], strict=True):
        by_site[name] = letters[start : start + size]
        start += size
    return Entry(by_site, total, told["told"])


def _records(text: bytes) -> list[bytes]:
    """The records that are complete."""
    parts, at = [], 0
    while at + 8 <= len(text):
        size = int.from_bytes(text[at : at + 8], "little")
        if at + 8 + size > len(text):
            break
        parts.append(text[at + 8 : at + 8 + size])
        at += 8 + size
    return parts
