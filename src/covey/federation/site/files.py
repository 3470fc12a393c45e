"""Files of a site that are its own: readable by nobody else, whole or not at all, and one process at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:  # a system without it: two processes at the same time are then the administrator's to avoid
    fcntl = None  # type: ignore[assignment]


@contextmanager
def alone(lock: Path | None) -> Iterator[None]:
    """Wait until no other process holds this lock, and hold it; with no path there is nobody else."""
    if lock is None or fcntl is None:
        yield
        return
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def own_folder(path: Path) -> Path:
    """A folder that only its owner can look into."""
    path.mkdir(parents=True, exist_ok=True)
    path.chmod(0o700)
    return path


def write_whole(path: Path, content: bytes) -> None:
    """Write aside, to the disk itself, and move into place."""
    fresh = path.with_suffix(".part")
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
