"""The random choices of a run, drawn ahead from a seed, and what they ask for: local runs and exchanges.

Each iteration draws ``xi_0`` for the network (1: an exchange between clusters), else ``xi_j`` for each cluster (1: an exchange
within it, 0: a local step), and ``xi'`` for a refresh of the anchor. The choices of an iteration depend on the seed and its
number alone, so a run can be replayed, cut anywhere and resumed.

:meth:`Schedule.rounds` groups them. A round is a run of local steps in each cluster, then one exchange, then the steps towards
averages that need no further exchange. Clusters wait for nobody but at an exchange between clusters: within, the r-th exchange
of each cluster since the last one between them goes into one round, whenever it falls.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from covey._typing import Anything, Floats, Ints
from covey.errors import one_of
from covey.objective.theory import Probabilities
from covey.solvers.first_order import kernels
from covey.tree.hierarchy import Hierarchy

Vote = Literal["central", "majority"]
VOTES = ("central", "majority")

_TOGETHER = 1 << 16  # random numbers drawn at a time


@dataclass(frozen=True)
class Flips:
    """Choices of consecutive iterations: ``between (T,)``, ``within (T, k)`` read where that is false, ``refresh (T,)``."""

    between: Anything
    within: Anything
    refresh: Anything


@dataclass(frozen=True)
class Round:
    """Local steps in each cluster, then one exchange.

    Attributes
    ----------
    start, steps : (k,) the iteration at which a cluster's local run begins, and its length; steps towards
        averages follow without a gap
    between : iterations with ``xi_0 = 1`` that follow; 0 where the exchange is within clusters
    within : (k,) iterations with ``xi_j = 1`` that follow those
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
    """The random choices of a run.

    Parameters
    ----------
    probabilities : of each choice
    seed : whole number
    merge : whether consecutive steps towards averages need one exchange only, because these stay known: true for
        Algorithm 1 where ``gamma`` is equal within each cluster, since a step to the mean then moves the mean by a known amount
    vote : who draws ``xi_0``: a central server, or the cluster servers by majority

    >>> import numpy as np
    >>> from covey.objective.theory import Probabilities
    >>> chances = Probabilities(p0=0.2, p=np.array([0.5, 0.5]), tau=np.array([0.3, 0.3]))
    >>> first = next(iter(Schedule(chances, seed=1).rounds(0, 50)))
    >>> first.start.tolist(), first.steps.tolist(), first.between
    ([0, 0], [0, 0], 1)
    """

    probabilities: Probabilities
    seed: int
    merge: bool = False
    vote: Vote = "central"

    def __post_init__(self) -> None:
        if self.vote not in VOTES:
            raise one_of("vote", self.vote, VOTES)

    def flips(self, start: int, stop: int) -> Flips:
        """The choices of iterations ``start`` to ``stop - 1``."""
        first, last = start // self._together, -(-stop // self._together)
        drawn = np.concatenate([self._uniforms(block) for block in range(first, last)])[start - first * self._together :]
        drawn = drawn[: stop - start]
        k = len(self.probabilities.p)
        within, refresh = drawn[:, :k] < self.probabilities.p, drawn[:, k] < self.probabilities.rho
        if self.vote == "central":
            return Flips(drawn[:, k + 1] < self.probabilities.p0, within, refresh)
        return Flips(majority(drawn[:, k + 1 :] < server_probability(self.probabilities.p0, k)), within, refresh)

    def rounds(self, start: int, stop: int) -> Rounds:
        """Iterations ``start`` to ``stop - 1`` as rounds; what is cut at ``stop`` goes on in the next call."""
        return group(self.flips(start, stop), start, self.merge)

    @property
    def _width(self) -> int:
        k = len(self.probabilities.p)
        return k + 1 + (k if self.vote == "majority" else 1)

    @property
    def _together(self) -> int:
        """Iterations whose choices are drawn in one go; by the number of clusters alone, so that a run can be cut anywhere."""
        return max(1, min(1024, _TOGETHER // self._width))

    def _uniforms(self, block: int) -> Floats:
        stream = np.random.Generator(np.random.Philox(key=self.seed, counter=[0, 0, 0, block]))
        drawn: Floats = stream.random((self._together, self._width))
        return drawn


def group(flips: Flips, start: int = 0, merge: bool = False) -> Rounds:
    """Choices of iterations from ``start`` on as rounds; see :class:`Schedule` for ``merge``."""
    T, k = flips.within.shape
    most = 2 * T + 1
    first, steps, within = (np.zeros((most, k), dtype=np.int64) for _ in range(3))
    between, refresh = np.zeros(most, dtype=np.int64), np.zeros(most, dtype=np.bool_)
    used = kernels.group(flips.between, flips.within, flips.refresh, merge, first, steps, between, within, refresh)
    first += start
    return Rounds(first[:used], steps[:used], between[:used], within[:used], refresh[:used])


def server_probability(p0: float, k: int) -> float:
    """The probability of a vote for an exchange at each of ``k`` servers, so that the majority has probability exactly ``p0``.

    With ``k`` even, the first server has the casting vote in a tie; given a tie its vote is fair by symmetry, and the majority
    is then that of ``k - 1`` servers. For ``2m - 1`` servers the chance of at least ``m`` votes is the incomplete beta
    function ``I_q(m, m)``, which is inverted here.

    >>> round(server_probability(0.1, 5), 4), round(server_probability(0.1, 6), 4)
    (0.2466, 0.2466)
    """
    from scipy.special import betaincinv  # slow to import, and only needed here

    m = (k + 1) // 2
    return float(betaincinv(m, m, p0))


def majority(votes: Anything) -> Anything:
    """Whether more than half of the votes ``(T, k)`` are for it; in a tie, the first."""
    ayes, k = votes.sum(axis=1), votes.shape[1]
    decided: Anything = (2 * ayes > k) | ((2 * ayes == k) & votes[:, 0])
    return decided


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
    places = np.arange(first + 1, first + count + 1).astype(np.uint64)
    drawn: Floats = kernels.mix(streams[..., None] + places * kernels.GOLDEN) * 2.0**-53
    return drawn
