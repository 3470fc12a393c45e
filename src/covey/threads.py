"""Compiled loops on several threads: :func:`share` divides the blocks of a kernel between them.

A kernel works on the blocks ``range(begin, end)`` of a problem and releases Python's lock (``nogil=True``). The result of a
block does not depend on who computes it, and sums over blocks are taken in the order of the blocks. So results have the same
bits for any number of threads.

The calling thread starts alone and measures how long a block takes. It asks for help if the rest would take longer than
:data:`WORTH_SHARING`. Whoever is free takes the next few blocks; the caller never waits for a thread that has not started,
and idle threads sleep. Unless the user sets the number of threads, there are as many as processors that this process may use
and that no other process uses at the moment.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import Any

import numba
from threadpoolctl import ThreadpoolController

from covey.errors import SolverError

BLOCK = 256  # clients that a thread takes at a time
WORTH_SHARING = 1e-3  # seconds of work from which another thread is asked for help
_PIECE = 5e-4  # seconds that a thread works before it looks for the next piece
_FIRST = 32  # the first piece is this share of the blocks

_chosen: ContextVar[int | None] = ContextVar("threads", default=None)
_inside = threading.local()  # a thread of the pool shares no work of its own


@contextmanager
def use_threads(count: int | None) -> Iterator[None]:
    """Use this number of threads in the context; None leaves the choice to ``COVEY_THREADS`` and to what is free.

    >>> with use_threads(2):
    ...     most_threads()
    2
    """
    before = _chosen.set(_chosen.get() if count is None else _checked("threads", count))
    try:
        yield
    finally:
        _chosen.reset(before)


def most_threads() -> int:
    """Return the largest number of threads that a kernel may use now."""
    chosen = _chosen.get()
    if chosen is not None:
        return chosen
    given = os.environ.get("COVEY_THREADS", "")
    if given:
        return _checked("COVEY_THREADS", given)
    return _usable_processors()


def share(kernel: Callable[..., Any], blocks: int, *arguments: Any) -> None:
    """Call ``kernel(begin, end, *arguments)`` for pieces that cover ``range(blocks)``, on several threads if that is faster."""
    most = 1 if blocks < 2 or getattr(_inside, "pool", False) else min(most_threads(), blocks)
    if most == 1:
        kernel(0, blocks, *arguments)
        return
    start, done = perf_counter(), -(-blocks // _FIRST)
    kernel(0, done, *arguments)
    each = (perf_counter() - start) / done
    most = 1 if each * (blocks - done) < WORTH_SHARING else _free(most)
    if most == 1:
        kernel(done, blocks, *arguments)
        return
    size = max(1, min(int(_PIECE / each), (blocks - done) // (2 * most)))
    pieces, lock = iter(range(done, blocks, size)), threading.Lock()

    def work() -> None:
        while True:
            with lock:
                first = next(pieces, blocks)
            if first >= blocks:
                return
            kernel(first, min(first + size, blocks), *arguments)

    helpers = list[Future[None]]()
    try:
        for _ in range(most - 1):
            helpers.append(_pool().submit(work))
        work()
    finally:
        # After a mistake or Ctrl-C in the caller nobody takes another piece, and nobody still writes to its arrays.
        with lock:
            deque(pieces, maxlen=0)
        started = [helper for helper in helpers if not helper.cancel()]
        wait(started)
    for helper in started:
        helper.result()


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Let each call of BLAS use one thread, while :func:`share` divides many small calls between threads of its own.

    The threads of BLAS wait for work in a loop, and so take the processors that they wait on.
    """
    with _libraries().limit(limits=1, user_api="blas"):
        yield


@cache
def _libraries() -> ThreadpoolController:
    return ThreadpoolController()


def block_count(clients: int) -> int:
    """Return the number of blocks of ``BLOCK`` clients."""
    return -(-clients // BLOCK)


def _checked(name: str, value: object) -> int:
    try:
        count = int(str(value))
    except ValueError:
        count = 0
    if count < 1:
        raise SolverError(f"The number of threads ({name}) must be a whole number from 1 on. Got {value!r} instead.")
    return count


def _free(most: int) -> int:
    """How many of ``most`` threads to use: all of them if the user chose the number, else those that find a free processor."""
    if _chosen.get() is not None or os.environ.get("COVEY_THREADS"):
        return most
    try:
        # The fourth field is 'threads that run now / all threads', over all processes. One of them is the caller.
        running = int(Path("/proc/loadavg").read_text().split()[3].split("/")[0])
    except (OSError, ValueError, IndexError):
        return most
    return max(1, min(most, (os.cpu_count() or 1) - (running - 1)))


@cache
def _usable_processors() -> int:
    """The processors that the system, a container's limit and ``NUMBA_NUM_THREADS`` leave to this process."""
    return max(1, min(int(numba.config.NUMBA_NUM_THREADS), _container_limit()))


def _container_limit(folder: Path = Path("/sys/fs/cgroup")) -> int:
    """The number of processors that a container may use, rounded up; large if it is not limited."""
    for files in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        try:
            quota, period = " ".join((folder / file).read_text() for file in files).split()
            if int(quota) > 0:
                return -(-int(quota) // int(period))
        except (OSError, ValueError, ZeroDivisionError):
            continue
    return 1 << 16


@cache
def _pool() -> ThreadPoolExecutor:
    def enter() -> None:
        _inside.pool = True

    return ThreadPoolExecutor(max(64, _usable_processors()), "covey", enter)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # threads do not survive a fork
