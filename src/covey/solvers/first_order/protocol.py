"""What the randomised algorithms send over a network, and what its two ends know.

node          gets     Move: a step towards averages (Pull), then local steps
node          replies  ClusterSums: its clients' weighted coefficients, summed for each cluster
coordinator   turns    the sums over nodes, which are averages, into the next Pull

Sums are exact (:mod:`covey.exact`), so that no bit of a run depends on which node holds which client.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from covey._typing import Anything, Floats, Ints
from covey.exact import DIGITS, WIDE_DIGITS, Exact, from_digits, segment_sum, total
from covey.nodes.network import BLOCK, Blocks, Message, Node
from covey.objective.objective import Penalty
from covey.objective.theory import mixing
from covey.records import Record, Reply
from covey.solvers.first_order import kernels
from covey.solvers.first_order.schedule import Round
from covey.tree.hierarchy import Hierarchy

# What travels


@dataclass(frozen=True)
class Pull(Record):
    """A step towards averages: client ``i`` of cluster ``j`` moves by ``-gamma_i (strength_j theta_i - force_j)``."""

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
class Move(Record):
    """A pull in clusters that ``exchanged (k,)``, then ``steps (k,)`` local iterations from ``start (k,)`` on.

    After them the point becomes the anchor, if ``refresh``; ``anchor (k, d)`` are the centres of the last anchor, if it is new.
    Nodes reply for clusters that are ``wanted``.
    """

    pull: Pull
    exchanged: Anything
    start: Ints
    steps: Ints
    wanted: Anything
    refresh: bool = False
    anchor: Floats | None = None

    @property
    def cells(self) -> Anything:
        """Clusters that have something to do, or to reply; ``(k,)``. The others wait for the next exchange."""
        if self.refresh or self.anchor is not None:
            return np.ones(len(self.steps), dtype=bool)
        return (self.steps > 0) | self.exchanged | self.wanted


@dataclass(frozen=True)
class ClusterSums(Reply):
    """``sum of share_i theta_i`` over a node's clients, for each cluster, ``(k, d)``.

    ``share_i`` is a client's part of its cluster's sum of ``gamma``.
    """

    total: Exact


@dataclass(frozen=True)
class CheckReply(Reply):
    """Value and squared gradient of a node's clients, with the levels above at their best."""

    value: Exact
    gradient_squared: Exact


@dataclass(frozen=True)
class AskMeans(Message[ClusterSums], label="means"):
    """The averages of where the clients are; ``total (k,)`` is each cluster's sum of ``gamma``."""

    total: Floats

    def at(self, node: Node) -> ClusterSums:
        return node_sums(node.data.hierarchy, shares(node, self.total), node.coefficients())


@dataclass(frozen=True)
class CheckGap(Message[CheckReply], label="check", second=True):
    """Value and gradient where the clients are, given the clusters' centres ``w (k, d)``."""

    w: Floats

    def at(self, node: Node) -> CheckReply:
        here, theta = node.loss.expand(node.data, node.coefficients(), order=1), node.coefficients()
        blocks = -(-len(theta) // BLOCK)
        value, squared = (np.zeros((blocks, WIDE_DIGITS), dtype=np.int64) for _ in range(2))
        kernels.check(here.value, here.gradient, node.gamma, theta, node.data.hierarchy.parent, self.w, value, squared)
        return CheckReply(from_digits(value.sum(axis=0)), from_digits(squared.sum(axis=0)))


@dataclass(frozen=True)
class PerfectFit(Message[Exact], label="perfect fit", phase="measure"):
    """The value that a perfect fit of the clients would have."""

    def at(self, node: Node) -> Exact:
        return total(node.loss.perfect(node.data))


# The node


def empty_digits(blocks: Blocks, d: int) -> Ints:
    """Digits of exact sums, ``(blocks, d, DIGITS)``."""
    return np.zeros((blocks.count, d, DIGITS), dtype=np.int64)


def summed(blocks: Blocks, digits: Ints) -> ClusterSums:
    """The digits of all blocks of each cluster together."""
    if blocks.one_each:
        return ClusterSums(from_digits(digits))
    total = np.zeros((len(blocks.of_parent) - 1, *digits.shape[1:]), dtype=np.int64)
    filled = np.flatnonzero(np.diff(blocks.of_parent))
    if len(filled):
        total[filled] = np.add.reduceat(digits, blocks.of_parent[filled], axis=0)
    return ClusterSums(from_digits(total))


def shares(node: Node, total: Floats) -> Floats:
    """Each client's part of its cluster's sum of ``gamma``."""
    return node.gamma / total[node.data.hierarchy.parent]


def node_sums(tree: Hierarchy, share: Floats, theta: Floats) -> ClusterSums:
    """A node's part of the averages of its clients."""
    return ClusterSums(segment_sum(share[:, None] * theta, tree.cluster_ptr))


# The coordinator


@dataclass(frozen=True)
class Centres:
    """What the coordinator knows of the penalties: ``alpha``, each cluster's sum of ``gamma``, weights of the global mean."""

    alpha: Floats
    total: Floats
    weights: Floats

    @classmethod
    def of(cls, penalty: Penalty) -> Centres:
        alpha = mixing(penalty)
        weights = alpha * penalty.cluster_gamma
        weights = weights if weights.any() else np.ones_like(weights)
        return cls(alpha, np.where(penalty.cluster_gamma > 0, penalty.cluster_gamma, 1.0), weights / weights.sum())

    def means(self, sums: ClusterSums) -> Floats:
        return sums.total.floats()

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
