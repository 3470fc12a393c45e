"""Children in blocks of one parent each: what a thread takes at a time.

Blocks are summed in order, so that results have the same bits with any number of threads.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from covey._typing import Ints

BLOCK = 256


@dataclass(frozen=True)
class Blocks:
    """Block ``b`` has the children ``ptr[b]:ptr[b + 1]`` of ``owner[b]``; parent ``j`` has ``of_parent[j]:of_parent[j + 1]``.

    ``one_each`` says that every parent has one block.
    """

    ptr: Ints
    owner: Ints
    of_parent: Ints
    one_each: bool

    @classmethod
    def of(cls, ptr: Ints) -> Blocks:
        """The children ``ptr[j]:ptr[j + 1]`` of each parent, at most ``BLOCK`` to a block."""
        counts = -(-np.diff(ptr) // BLOCK)
        owner = np.repeat(np.arange(len(counts)), counts)
        first = np.repeat(np.cumsum(counts) - counts, counts)
        starts = ptr[:-1][owner] + BLOCK * (np.arange(len(owner)) - first)
        parents = np.arange(len(ptr))
        return cls(np.append(starts, ptr[-1]), owner, np.searchsorted(owner, parents), np.array_equal(owner, parents[:-1]))

    @property
    def count(self) -> int:
        return len(self.owner)
