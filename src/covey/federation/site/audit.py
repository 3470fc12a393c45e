"""The audit log of a site: one line of JSON for each decision and each message, each with the hash of the line before it.

A line says when, what kind of message, of which run and operator, how many bytes came and left, over how many cells, and what
the site did. It holds no value of the table. A line that is changed, removed or inserted breaks the chain. A change of the
last line does not, nor do lines that are cut off at the end: compare the last hash with one written down elsewhere.
"""

from __future__ import annotations

import hashlib
import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from covey.errors import FederationError
from covey.federation.site.state import locked, private_folder

_START = "0" * 64


class AuditLog:
    """The log in ``home/audit.jsonl``; without a home nothing is kept.

    >>> import tempfile
    >>> log = AuditLog(Path(tempfile.mkdtemp()))
    >>> log.add("message", kind="sweep up", out=812)
    >>> log.add("approved", by="owner")
    >>> log.verify()[0]
    2
    """

    def __init__(self, home: Path | None) -> None:
        self.home, self.file = home, None if home is None else home / "audit.jsonl"
        self._end: tuple[int, str] = (0, _START)  # size of the file after the last line written here, and its hash

    def add(self, event: str, **about: Any) -> None:
        """Append one line and flush it to the disk."""
        if self.file is None or self.home is None:
            return
        private_folder(self.home)
        with locked(self.home, "audit.lock"), os.fdopen(os.open(self.file, os.O_RDWR | os.O_CREAT, 0o600), "r+b") as file:
            size = file.seek(0, os.SEEK_END)
            if size != self._end[0]:  # another process has written, such as covey site approve
                file.seek(0)
                self._end = size, _last_hash(file.read())
            file.seek(size)
            time = datetime.now(UTC).isoformat(timespec="milliseconds")
            line = json.dumps({"time": time, "event": event, **about, "before": self._end[1]})
            file.write(line.encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
            self._end = file.tell(), _hash(line)

    def lines(self) -> list[str]:
        return [] if self.file is None or not self.file.exists() else self.file.read_text(encoding="utf-8").splitlines()

    def verify(self) -> tuple[int, str]:
        """The number of lines and the hash of the last one; an error, if the chain is broken."""
        before, lines = _START, self.lines()
        for at, line in enumerate(lines, start=1):
            try:
                named = json.loads(line)["before"]
            except (ValueError, KeyError, TypeError):
                named = None
            if named != before:
                broken = f"Line {at} of {str(self.file)!r} does not follow from the line before it"
                raise FederationError(f"{broken}: a line was changed, removed or inserted; compare the file with a copy.")
            before = _hash(line)
        return len(lines), before


def _hash(line: str) -> str:
    return hashlib.sha256(line.encode()).hexdigest()


def _last_hash(content: bytes) -> str:
    lines = content.decode().splitlines()
    return _hash(lines[-1]) if lines else _START
