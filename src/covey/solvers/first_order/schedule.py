"""Coins, drawn ahead from a seed, and what they ask for: local runs and exchanges.

Each iteration flips ``xi_0`` for the network (heads: an exchange between clusters), else ``xi_j`` for each cluster (heads: an
exchange within it, tails: a local step), and ``xi'`` for a refresh of the anchor. The coins of an iteration depend on the seed
and its number alone, so a run can be replayed, cut anywhere and resumed.

:meth:`Schedule.rounds` groups them. A round is a run of local steps in each cluster, then one exchange, then the heads
that need no further exchange. Clusters wait for nobody but at an exchange between clusters: within, the r-th exchange of each
cluster since the last one between them goes into one round, whenever it falls.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numba import njit

from covey._typing import Anything, Floats, Ints
from covey.errors import one_of
from covey.objective.theory import Coins
from covey.tree.hierarchy import Hierarchy

Vote = Literal["central", "majority"]
VOTES = ("central", "majority")

_BLOCK = 1 << 16  # coins drawn together


@dataclass(frozen=True)
class Flips:
    """Coins of consecutive iterations: ``between (T,)``, ``within (T, k)`` read where that is tails, ``refresh (T,)``."""

    between: Anything
    within: Anything
    refresh: Anything


@dataclass(frozen=True)
class Round:
    """Local steps in each cluster, then one exchange.

    Attributes
    ----------
    start, steps : (k,) the iteration at which a cluster's local run begins, and its length; its heads follow without a gap
    between : heads of ``xi_0`` that follow; 0 where the exchange is within clusters
    within : (k,) heads of ``xi_j`` that follow those
    refresh : whether this is the exchange for a new anchor instead
    """

    start: Ints
    steps: Ints
    between: int
    within: Ints
    refresh: bool

    @property
    def everybody(self) -> bool:
        """Whether all clusters take part, through the link between them."""
        return self.between > 0 or self.refresh

    @property
    def takes_part(self) -> Anything:
        """Which clusters exchange; ``(k,)``."""
        return np.ones(len(self.steps), dtype=bool) if self.everybody else self.within > 0


@dataclass(frozen=True)
class Rounds:
    """Consecutive rounds, stacked; the last one is a local run with no exchange."""

    start: Ints
    steps: Ints
    between: Ints
    within: Ints
    refresh: Anything

    def __len__(self) -> int:
        return len(self.between)

    def __iter__(self) -> Iterator[Round]:
        refresh = self.refresh.tolist()
        for r, between in enumerate(self.between.tolist()):
            yield Round(self.start[r], self.steps[r], between, self.within[r], refresh[r])


@dataclass(frozen=True)
class Schedule:
    """The coins of a run.

    Parameters
    ----------
    coins : their probabilities
    seed : whole number
    merge : whether a run of heads needs one exchange only, because the averages stay known through it: true for algorithm 1
        where ``gamma`` is equal within each cluster, since a step to the mean then moves the mean by a known amount
    vote : who flips ``xi_0``: a central server, or the cluster servers by majority

    >>> import numpy as np
    >>> from covey.objective.theory import Coins
    >>> coins = Coins(p0=0.2, p=np.array([0.5, 0.5]), tau=np.array([0.3, 0.3]))
    >>> first = next(iter(Schedule(coins, seed=1).rounds(0, 50)))
    >>> first.start.tolist(), first.steps.tolist(), first.between
    ([0, 0], [0, 0], 1)
    """

    coins: Coins
    seed: int
    merge: bool = False
    vote: Vote = "central"

    def __post_init__(self) -> None:
        if self.vote not in VOTES:
            raise one_of("vote", self.vote, VOTES)

    def flips(self, start: int, stop: int) -> Flips:
        """The coins of iterations ``start`` to ``stop - 1``."""
        first, last = start // self._together, -(-stop // self._together)
        drawn = np.concatenate([self._uniforms(block) for block in range(first, last)])[start - first * self._together :]
        drawn = drawn[: stop - start]
        k = len(self.coins.p)
        within, refresh = drawn[:, :k] < self.coins.p, drawn[:, k] < self.coins.rho
        if self.vote == "central":
            return Flips(drawn[:, k + 1] < self.coins.p0, within, refresh)
        return Flips(majority(drawn[:, k + 1 :] < server_coin(self.coins.p0, k)), within, refresh)

    def rounds(self, start: int, stop: int) -> Rounds:
        """Iterations ``start`` to ``stop - 1`` as rounds; what is cut at ``stop`` goes on in the next call."""
        return group(self.flips(start, stop), start, self.merge)

    @property
    def _width(self) -> int:
        k = len(self.coins.p)
        return k + 1 + (k if self.vote == "majority" else 1)

    @property
    def _together(self) -> int:
        """Iterations whose coins are drawn in one go; by the number of clusters alone, so that a run can be cut anywhere."""
        return max(1, min(1024, _BLOCK // self._width))

    def _uniforms(self, block: int) -> Floats:
        stream = np.random.Generator(np.random.Philox(key=self.seed, counter=[0, 0, 0, block]))
        drawn: Floats = stream.random((self._together, self._width))
        return drawn


def group(coins: Flips, start: int = 0, merge: bool = False) -> Rounds:
    """Coins of iterations from ``start`` on as rounds; see :class:`Schedule` for ``merge``."""
    T, k = coins.within.shape
    most = 2 * T + 1
    first, steps, within = (np.zeros((most, k), dtype=np.int64) for _ in range(3))
    between, refresh = np.zeros(most, dtype=np.int64), np.zeros(most, dtype=np.bool_)
    used = _group(coins.between, coins.within, coins.refresh, merge, first, steps, between, within, refresh)
    first += start
    return Rounds(first[:used], steps[:used], between[:used], within[:used], refresh[:used])


def server_coin(p0: float, k: int) -> float:
    """The probability of heads at each of ``k`` servers for which their majority shows heads with probability exactly ``p0``.

    With ``k`` even, the first server has the casting vote in a tie; given a tie its coin is fair by symmetry, and the majority
    is then that of ``k - 1`` servers. For ``2m - 1`` servers the chance of at least ``m`` heads is the incomplete beta
    function ``I_q(m, m)``, which is inverted here.

    >>> round(server_coin(0.1, 5), 4), round(server_coin(0.1, 6), 4)
    (0.2466, 0.2466)
    """
    from scipy.special import betaincinv  # slow to import, and only needed here

    m = (k + 1) // 2
    return float(betaincinv(m, m, p0))


def majority(votes: Anything) -> Anything:
    """Whether more than half of the votes ``(T, k)`` are heads; in a tie, the first."""
    heads, k = votes.sum(axis=1), votes.shape[1]
    decided: Anything = (2 * heads > k) | ((2 * heads == k) & votes[:, 0])
    return decided


@njit  # type: ignore[untyped-decorator]
def _everybody(t: int, since: Ints, pending: Ints, place: Ints, start: Ints, steps: Ints) -> int:
    """A round for all clusters before iteration ``t``, after all their rounds so far."""
    row = place.max()
    for j in range(len(place)):
        start[row, j] = since[j] if pending[j] else t
        steps[row, j] = pending[j]
    pending[:], place[:] = 0, row + 1
    return row  # type: ignore[no-any-return]


@njit(cache=True)  # type: ignore[untyped-decorator]
def _group(
    xi0: Anything,
    xi: Anything,
    anchor: Anything,
    merge: bool,
    start: Ints,
    steps: Ints,
    between: Ints,
    within: Ints,
    refresh: Anything,
) -> int:
    """Fill the rounds of one stretch of coins; returns how many there are."""
    T, k = xi.shape
    since, pending = np.zeros(k, dtype=np.int64), np.zeros(k, dtype=np.int64)
    place = np.zeros(k, dtype=np.int64)  # the round in which each cluster's next exchange will be
    known = np.zeros(k, dtype=np.bool_)  # no local step since the cluster's last exchange: its mean is known
    in_run = False  # the last iteration was a head between clusters
    for t in range(T):
        if xi0[t] and merge and in_run:
            between[place[0] - 1] += 1
        elif xi0[t]:
            row = _everybody(t, since, pending, place, start, steps)
            between[row], known[:] = 1, True
        else:
            for j in range(k):
                if not xi[t, j]:
                    if pending[j] == 0:
                        since[j] = t
                    pending[j] += 1
                    known[j] = False
                elif merge and known[j]:
                    within[place[j] - 1, j] += 1
                else:
                    row = place[j]
                    start[row, j], steps[row, j], within[row, j] = (since[j] if pending[j] else t), pending[j], 1
                    pending[j], place[j], known[j] = 0, row + 1, True
        in_run = xi0[t]
        if anchor[t]:
            row = _everybody(t + 1, since, pending, place, start, steps)
            refresh[row], known[:], in_run = True, False, False
    last: int = _everybody(T, since, pending, place, start, steps)
    return last + 1


def streams(seed: int, tree: Hierarchy) -> Anything:
    """Where each client's own source of random numbers begins, ``(n,)``: by the ids of client and cluster alone.

    A client has the same stream wherever it is and whoever is beside it.

    >>> from covey import GroupedData
    >>> both = GroupedData.from_arrays([[1.0], [1.0]], [0.0, 0.0], ["a", "b"]).hierarchy
    >>> one = GroupedData.from_arrays([[1.0]], [0.0], ["b"]).hierarchy
    >>> int(streams(3, both)[1]) == int(streams(3, one)[0])
    True
    """
    start = np.empty(tree.n_clients, dtype=np.uint64)
    for j, (first, last) in enumerate(pairwise(tree.cluster_ptr.tolist())):
        cluster = _text(tree.cluster_ids[j])
        common = hashlib.blake2b(f"{seed} {len(cluster)} {cluster} ".encode(), digest_size=8)
        for i, label in enumerate(tree.client_ids[first:last].to_list(), first):
            own = common.copy()
            own.update(_text(label).encode())
            start[i] = int.from_bytes(own.digest(), "little")
    return start


def _text(label: Any) -> str:
    """An id, so that 1 and "1" differ."""
    return f"{type(label).__name__} {label}"


def uniforms(streams: Anything, first: int, count: int) -> Floats:
    """Numbers ``first`` to ``first + count - 1`` of each stream, uniform in [0, 1): ``(*streams.shape, count)``, SplitMix64."""
    state = streams[..., None] + np.arange(first + 1, first + count + 1).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    drawn: Floats = ((state ^ (state >> np.uint64(31))) >> np.uint64(11)) * 2.0**-53
    return drawn
