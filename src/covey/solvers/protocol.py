"""What the algorithms by coins send over a network, and what its two ends know.

node          gets    Move: a pull towards the centres, then local steps
node          sends   Sums: its clients' weighted coefficients, summed for each cluster
coordinator   turns   the sums into means, and the means into the next pull
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from covey._typing import Anything, Floats, Ints
from covey.hierarchy import Hierarchy, segment_sum
from covey.objective import Objective, Penalty
from covey.schedule import Round
from covey.solvers.elimination import blocks_of
from covey.theory import mixing

# What travels


@dataclass(frozen=True)
class Pull:
    """A step towards centres: client ``i`` of cluster ``j`` moves by ``-gamma_i (strength_j theta_i - force_j)``."""

    strength: Floats
    force: Floats

    @classmethod
    def none(cls, k: int, d: int) -> Pull:
        return cls(np.zeros(k), np.zeros((k, d)))

    def then(self, strength: Floats, force: Floats, gamma: Floats) -> Pull:
        """Followed by another, where all clients of a cluster have the same ``gamma (k,)``."""
        if not self.strength.any():
            return Pull(strength, force)
        keep = 1 - gamma * strength
        return Pull(self.strength * keep + strength, self.force * keep[:, None] + force)


@dataclass(frozen=True)
class Move:
    """Down: a pull in clusters that had ``heads (k,)``, then ``steps (k,)`` local iterations from ``start (k,)`` on.

    After them make an anchor of where you are, if ``refresh``; ``anchor (k, d)`` are the centres of the last one, if new. Nodes
    answer for clusters that are ``wanted``.
    """

    pull: Pull
    heads: Anything
    start: Ints
    steps: Ints
    wanted: Anything
    refresh: bool = False
    anchor: Floats | None = None


@dataclass(frozen=True)
class Sums:
    """Up: ``sum of gamma_i theta_i`` over a node's clients, for each cluster, ``(k, d)``. Adds over nodes."""

    total: Floats

    def __add__(self, other: Sums) -> Sums:
        return Sums(self.total + other.total)


@dataclass(frozen=True)
class Check:
    """Up: value and squared gradient of a node's clients, with the levels above at their best. Adds over nodes."""

    value: float
    gradient_squared: float

    def __add__(self, other: Check) -> Check:
        return Check(self.value + other.value, self.gradient_squared + other.gradient_squared)


# The node


@dataclass(frozen=True)
class Blocks:
    """Clients in blocks of one cluster each: what a thread takes at a time. Sums of blocks are added in order."""

    ptr: Ints
    owner: Ints
    of_cluster: Ints
    one_each: bool

    @classmethod
    def of(cls, tree: Hierarchy) -> Blocks:
        ptr, owner = blocks_of(tree.cluster_ptr)
        clusters = np.arange(tree.n_clusters + 1)
        return cls(ptr, owner, np.searchsorted(owner, clusters), np.array_equal(owner, clusters[:-1]))

    def empty(self, d: int) -> Floats:
        return np.zeros((len(self.owner), d))

    def total(self, sums: Floats) -> Sums:
        return Sums(sums if self.one_each else segment_sum(sums, self.of_cluster))


def node_sums(tree: Hierarchy, gamma: Floats, theta: Floats) -> Sums:
    """What a node tells of where its clients are."""
    return Sums(tree.sum_up(gamma[:, None] * theta))


def node_check(objective: Objective, theta: Floats, w: Floats) -> Check:
    """What a node tells of how good that is, given the clusters' centres; ``objective`` is that of its clients."""
    gamma, away = objective.penalty.gamma, theta - objective.data.hierarchy.down(w)
    here = objective.loss.expand(objective.data, theta, order=1)
    value = here.value.sum() + 0.5 * (gamma * (away**2).sum(axis=1)).sum()
    return Check(float(value), float(((here.gradient + gamma[:, None] * away) ** 2).sum()))


# The coordinator


@dataclass(frozen=True)
class Top:
    """What the coordinator knows of the penalties: ``alpha``, each cluster's sum of ``gamma``, weights of the global mean."""

    alpha: Floats
    total: Floats
    weights: Floats

    @classmethod
    def of(cls, penalty: Penalty) -> Top:
        alpha = mixing(penalty)
        weights = alpha * penalty.cluster_gamma
        weights = weights if weights.any() else np.ones_like(weights)
        return cls(alpha, np.where(penalty.cluster_gamma > 0, penalty.cluster_gamma, 1.0), weights / weights.sum())

    def means(self, sums: Sums) -> Floats:
        return sums.total / self.total[:, None]

    def whole(self, means: Floats) -> Floats:
        """The global mean, summed in order: a BLAS product may depend on its threads."""
        mean: Floats = (self.weights[:, None] * means).sum(axis=0)
        return mean

    def centres(self, means: Floats) -> tuple[Floats, Floats]:
        """``w`` and ``wbar`` that are best for the clients' means."""
        tbar = self.whole(means)
        return self.alpha[:, None] * tbar + (1 - self.alpha)[:, None] * means, tbar

    def tie(self, means: Floats) -> float:
        """What ties the clusters: ``1/2 sum_j lam_j |w_j - wbar|^2`` at the best centres."""
        # w_j - wbar = (1 - alpha_j) (tbar_j - tbar) and lam_j (1 - alpha_j) = alpha_j * total_j.
        apart = ((means - self.whole(means)) ** 2).sum(axis=1)
        return 0.5 * float((self.alpha * (1 - self.alpha) * self.total * apart).sum())


class Guide(Protocol):
    """How a coordinator answers: the means of those who took part in a round become a pull.

    ``anchor (k, d)`` are the means of the last anchor, in algorithms that have one.
    """

    def answer(self, means: Floats, turn: Round, anchor: Floats) -> Pull: ...


class Network(Protocol):
    """All nodes at once, wherever they are; ``d`` coefficients a client."""

    d: int

    def move(self, move: Move) -> Sums: ...
    def sums(self) -> Sums: ...
    def check(self, w: Floats) -> Check: ...
    def perfect(self) -> float: ...
    def certify(self, norm: float) -> tuple[float, float]: ...
    def culprit(self) -> str: ...
    def save(self) -> dict[str, Floats]: ...
    def restore(self, arrays: dict[str, Any]) -> None: ...
