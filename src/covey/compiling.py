"""How covey compiles its loops: with numba, kept on disk where that is safe, with one line of progress on a terminal.

numba keeps compiled code beside the package or in the cache folder of the user. In a container both may be read-only; covey
then uses a private folder under the system's folder for temporary files, and compiles anew in each process if there is none.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numba
from numba.core import event


def _njit(function: Callable[..., Any] | None = None, /, *, cache: bool = False, **options: Any) -> Any:
    """Compile a function as :func:`numba.njit` does; with ``cache``, keep the result on disk if a folder can be written."""
    options = {"no_cfunc_wrapper": True, **options}  # nobody calls a kernel from C, and wrappers take time to compile
    if function is None:
        return lambda function: _njit(function, cache=cache, **options)
    if cache:
        with contextlib.suppress(RuntimeError):
            return numba.njit(cache=True, **options)(function)
        folder, before = private_folder(), numba.config.CACHE_DIR
        if folder is not None:
            # numba reads this setting while it decorates. Other packages keep their own folders.
            numba.config.CACHE_DIR = str(folder)
            try:
                return numba.njit(cache=True, **options)(function)
            except (RuntimeError, OSError):
                pass
            finally:
                numba.config.CACHE_DIR = before
        _Progress.kept = False
    return numba.njit(**options)(function)


njit: Any = _njit


@cache
def private_folder() -> Path | None:
    """A folder for compiled code under the system's temporary folder that nobody else can write to; None if there is none.

    Who can write to the folder can have their code run by this process. So it must belong to this user, with no rights for
    others, and nobody else may be able to replace it.
    """
    if not hasattr(os, "getuid"):
        return None
    try:
        parent = Path(tempfile.gettempdir()).resolve()
        folder, above, user = parent / f"covey-{os.getuid()}", parent.stat(), os.getuid()
        replaceable = above.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not above.st_mode & stat.S_ISVTX
        if replaceable or above.st_uid not in (0, user):
            return None
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return None
    private = stat.S_ISDIR(found.st_mode) and found.st_uid == user and not found.st_mode & 0o077
    return folder if private and os.access(folder, os.W_OK) else None


class _Progress(event.Listener):  # type: ignore[misc]
    """One line on a terminal when covey compiles for the first time in a process."""

    shown = False
    kept = True  # whether all loops that should be are kept on disk

    def on_start(self, started: Any) -> None:
        compiled = started.data["dispatcher"]
        if self.shown or not str(compiled.__module__).startswith("covey.") or not _is_terminal():
            return
        _Progress.shown = True
        often = "once for this machine" if self.kept else "at each start, as NUMBA_CACHE_DIR names no folder to keep them"
        print(f"covey: compiling loops, {often}; this takes about 5 seconds ...", file=sys.stderr, flush=True)

    def on_end(self, ended: Any) -> None:
        pass


def _is_terminal() -> bool:
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):  # closed, or replaced
        return False


event.register("numba:compile", _Progress())
