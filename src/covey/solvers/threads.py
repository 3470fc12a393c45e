"""How many threads a problem is worth. No result depends on it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numba

from covey.tables.rows import GroupedData

_WORTH_SHARING = 1 << 18  # numbers to read


@contextmanager
def threads_for(work: GroupedData | int) -> Iterator[None]:
    """One thread for a small problem: where a call takes microseconds, threads mostly wait for each other.

    On a machine that is busy with other work that wait is a time slice of the system, and a run of thousands of such calls
    takes sixty times as long with two threads as with one.
    """
    numbers = work if isinstance(work, int) else work.n_rows * work.n_terms
    before = numba.get_num_threads()
    numba.set_num_threads(1 if numbers < _WORTH_SHARING else before)
    try:
        yield
    finally:
        numba.set_num_threads(before)
