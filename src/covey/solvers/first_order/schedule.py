"""The random choices of a run and the rounds of local steps and exchanges that follow from them.

Algorithms 1 (async_l2gd) and 2 (async_al2sgd_plus) of the paper (arXiv:2204.13619) choose in each iteration:

    xi_0 = 1   an exchange between all clusters, with probability p0
    xi_j = 1   otherwise, for each cluster: an exchange within it, with probability p_j; xi_j = 0 is a local step
    xi'  = 1   Algorithm 2 only: a refresh of the anchor, with probability rho

With partial participation each cluster also draws whether it takes part in an exchange between clusters. If it does not, it
does nothing in that iteration, and waits for nobody.

The choices of an iteration depend on the seed and the number of the iteration only. So a run can be repeated, or stopped
anywhere and resumed.

:meth:`Schedule.rounds` groups iterations into rounds. A round is a run of local steps in each cluster, one exchange, and the
steps towards averages that need no further exchange. A cluster waits for other clusters only at an exchange between clusters:
the r-th exchange within each cluster since the last exchange between clusters belongs to the same round.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
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

PerCluster = float | Sequence[float] | Floats | Literal["common"]
"""One number for all clusters, or one for each; "common" is the best common one."""

_TOGETHER = 1 << 16  # random numbers drawn at a time
_CHOICES = 1 << 20  # random choices grouped into rounds at a time, over all clusters


@dataclass(frozen=True)
class Choices:
    """Random choices of consecutive iterations, as booleans.

    ``between (T,)`` is xi_0, ``within (T, k)`` is xi_j and matters where xi_0 = 0, ``refresh (T,)`` is xi'. ``present (T, k)``
    says who takes part where xi_0 = 1; None if all do.
    """

    between: Anything
    within: Anything
    refresh: Anything
    present: Anything | None = None


@dataclass(frozen=True)
class Round:
    """Local steps in each cluster, one exchange, then the steps towards averages.

    Attributes
    ----------
    start, steps : (k,) first iteration and number of the local steps of each cluster
    between : number of iterations with ``xi_0 = 1`` after the local steps; 0 if the exchange is within clusters
    within : (k,) number of iterations with ``xi_j = 1`` after those
    refresh : whether the exchange is for a new anchor instead
    takes_part : (k,) which clusters exchange
    """

    start: Ints
    steps: Ints
    between: int
    within: Ints
    refresh: bool
    takes_part: Anything


@dataclass(frozen=True)
class Rounds:
    """Consecutive rounds as arrays with one row for each round. The last round has local steps only, and no exchange.

    ``present (rounds, k)`` says which clusters take part in an exchange between clusters; None if all do.
    """

    start: Ints
    steps: Ints
    between: Ints
    within: Ints
    refresh: Anything
    present: Anything | None = None

    @property
    def together(self) -> Anything:
        """Which clusters take part in an exchange between clusters, ``(rounds, k)``."""
        everybody = np.broadcast_to(((self.between > 0) | self.refresh)[:, None], self.steps.shape)
        return everybody if self.present is None else everybody & (self.present | self.refresh[:, None])

    def __iter__(self) -> Iterator[Round]:
        between, refresh, part = self.between.tolist(), self.refresh.tolist(), (self.within > 0) | self.together
        for row in zip(self.start, self.steps, between, self.within, refresh, part, strict=True):
            yield Round(*row)


@dataclass(frozen=True)
class Schedule:
    """The random choices of a run.

    Parameters
    ----------
    probabilities : probability of each choice
    seed : whole number
    merge : whether consecutive steps towards averages share one exchange. Algorithm 1 allows this if ``gamma`` is equal
        within each cluster: the coordinator can then compute how such a step moves the averages.
    vote : who draws ``xi_0``: "central", or "majority" for a majority vote of the clusters' servers

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
        if self.merge and self.probabilities.present is not None:
            raise ValueError("steps for which other clusters are present cannot share an exchange")

    def choices(self, start: int, stop: int) -> Choices:
        """The choices of iterations ``start`` to ``stop - 1``."""
        p0, p, k = self.probabilities.p0, self.probabilities.p, len(self.probabilities.p)
        width = k + 1 + (k if self.vote == "majority" else 1)
        # Iterations are drawn in blocks whose size depends on the number of clusters only: a run can be stopped anywhere.
        size = max(1, min(1024, _TOGETHER // width))
        first, last = start // size, -(-stop // size)
        sources = [np.random.Philox(key=self.seed, counter=[0, 0, 0, block]) for block in range(first, last)]
        drawn = np.concatenate([np.random.Generator(source).random((size, width)) for source in sources])
        drawn = drawn[start - first * size : stop - first * size]
        within, refresh = drawn[:, :k] < p, drawn[:, k] < self.probabilities.rho
        votes = drawn[:, k + 1] < p0 if self.vote == "central" else majority(drawn[:, k + 1 :] < server_probability(p0, k))
        return Choices(votes, within, refresh, self._present(start, stop))

    def _present(self, start: int, stop: int) -> Anything | None:
        """Which clusters would take part in an exchange of each iteration, from random numbers of their own."""
        chance = self.probabilities.present
        if chance is None:
            return None
        size = max(1, min(1024, _TOGETHER // len(chance)))
        first, last = start // size, -(-stop // size)
        sources = [np.random.Philox(key=self.seed, counter=[0, 0, 1, block]) for block in range(first, last)]
        drawn = np.concatenate([np.random.Generator(source).random((size, len(chance))) for source in sources])
        return drawn[start - first * size : stop - first * size] < chance

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Iterations ``start`` to ``stop - 1`` in pieces whose random choices fit in memory."""
        size = max(16, _CHOICES // (1 + len(self.probabilities.p)))
        return ((first, min(stop, first + size)) for first in range(start, stop, size))

    def rounds(self, start: int, stop: int) -> Rounds:
        """Iterations ``start`` to ``stop - 1`` as rounds. Local steps that reach ``stop`` continue in the next call."""
        return group(self.choices(start, stop), start, self.merge)


def group(choices: Choices, start: int = 0, merge: bool = False) -> Rounds:
    """Choices of iterations from ``start`` on as rounds; see :class:`Schedule` for ``merge``."""
    T, k = choices.within.shape
    most = 2 * T + 1
    first, steps, within = (np.zeros((most, k), dtype=np.int64) for _ in range(3))
    between, refresh, present = np.zeros(most, dtype=np.int64), np.zeros(most, dtype=np.bool_), choices.present
    here, there = np.ones((T, k), dtype=np.bool_) if present is None else present, np.ones((most, k), dtype=np.bool_)
    operands = choices.between, choices.within, choices.refresh, here, merge
    used = kernels.group(*operands, first, steps, between, within, refresh, there)
    first += start
    rounds = first[:used], steps[:used], between[:used], within[:used], refresh[:used]
    return Rounds(*rounds, None if present is None else there[:used])


def server_probability(p0: float, k: int) -> float:
    """The probability of a vote for an exchange at each of ``k`` servers, for which the majority has probability ``p0``.

    If ``k`` is even, the first server decides a tie. Its vote in a tie is fair by symmetry, so the majority of ``k`` servers
    has the same probability as that of ``k - 1``. For ``2m - 1`` servers the probability of at least ``m`` votes is the
    incomplete beta function ``I_q(m, m)``; this function inverts it.

    >>> round(server_probability(0.1, 5), 4), round(server_probability(0.1, 6), 4)
    (0.2466, 0.2466)
    """
    from scipy.special import betaincinv  # slow to import, and only needed here

    m = (k + 1) // 2
    return float(betaincinv(m, m, p0))


def majority(votes: Anything) -> Anything:
    """Whether more than half of the votes ``(T, k)`` are for an exchange; in a tie the first vote decides."""
    ayes, k = votes.sum(axis=1), votes.shape[1]
    decided: Anything = (2 * ayes > k) | ((2 * ayes == k) & votes[:, 0])
    return decided


def streams(seed: int, tree: Hierarchy) -> Anything:
    """The start of each client's stream of random numbers, ``(n,)``. It depends on the ids of client and cluster only.

    So a client has the same stream at any node and beside any other clients.

    >>> from covey import GroupedData
    >>> both = GroupedData.from_arrays([[1.0], [1.0]], [0.0, 0.0], ["a", "b"]).hierarchy
    >>> one = GroupedData.from_arrays([[1.0]], [0.0], ["b"]).hierarchy
    >>> int(streams(3, both)[1]) == int(streams(3, one)[0])
    True
    """
    start = np.empty(tree.n_clients, dtype=np.uint64)
    for j, (first, last) in enumerate(pairwise(tree.cluster_ptr.tolist())):
        cluster = _text(tree.cluster_ids[j])
        prefix = f"{seed} {len(cluster)} {cluster} "
        for i, label in enumerate(tree.client_ids[first:last].to_list(), first):
            digest = hashlib.blake2b(f"{prefix}{_text(label)}".encode(), digest_size=8).digest()
            start[i] = int.from_bytes(digest, "little")
    return start


def _text(label: Any) -> str:
    """An id with its type, so that 1 and "1" differ."""
    return f"{type(label).__name__} {label}"


def uniforms(streams: Anything, first: int, count: int) -> Floats:
    """Numbers ``first`` to ``first + count - 1`` of each stream, uniform in [0, 1): ``(*streams.shape, count)``, SplitMix64."""
    places = np.arange(first + 1, first + count + 1).astype(np.uint64)
    drawn: Floats = kernels.mix(streams[..., None] + places * kernels.GOLDEN) * 2.0**-53
    return drawn
