"""What the algorithms by coins send over a network, and what its two ends know.

node          gets    Move: a pull towards the centres, then local steps
node          sends   Sums: its clients' weighted coefficients, summed for each cluster
coordinator   turns   the sums over nodes, which are means, into the next pull

Sums are exact (:mod:`covey.exact`), so that no bit of a run depends on which node holds which client.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numba import njit, prange

from covey._typing import Anything, Floats, Ints
from covey.exact import DIGITS, WIDE_DIGITS, Exact, accumulate_in, from_digits, segment_sum, total
from covey.nodes.messages import Message
from covey.nodes.node import Node
from covey.objective.penalty import Penalty
from covey.objective.theory import mixing
from covey.records import Record, Reply
from covey.solvers.direct.elimination import blocks_of
from covey.solvers.first_order.schedule import Round
from covey.tree.hierarchy import Hierarchy

_BLOCK = 256  # clients checked by one thread at a time

# What travels


@dataclass(frozen=True)
class Pull(Record):
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
class Move(Record):
    """a pull in clusters that had ``heads (k,)``, then ``steps (k,)`` local iterations from ``start (k,)`` on.

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

    @property
    def cells(self) -> Anything:
        """Clusters that have something to do, or to tell; ``(k,)``. The others are where they wait for the next exchange."""
        if self.refresh or self.anchor is not None:
            return np.ones(len(self.steps), dtype=bool)
        return (self.steps > 0) | self.heads | self.wanted


@dataclass(frozen=True)
class ClusterSums(Reply):
    """``sum of share_i theta_i`` over a node's clients, for each cluster, ``(k, d)``.

    ``share_i`` is a client's part of its cluster's sum of ``gamma``.
    """

    total: Exact


@dataclass(frozen=True)
class CheckReply(Reply):
    """value and squared gradient of a node's clients, with the levels above at their best."""

    value: Exact
    gradient_squared: Exact


@dataclass(frozen=True)
class AskMeans(Message[ClusterSums], label="means"):
    """tell where your clients are; ``total (k,)`` is each cluster's sum of ``gamma``."""

    total: Floats

    def at(self, node: Node) -> ClusterSums:
        return node_sums(node.data.hierarchy, shares(node, self.total), node.coefficients())


@dataclass(frozen=True)
class CheckGap(Message[CheckReply], label="check", second=True):
    """tell how good it is where your clients are, given the clusters' centres ``w (k, d)``."""

    w: Floats

    def at(self, node: Node) -> CheckReply:
        here, theta = node.loss.expand(node.data, node.coefficients(), order=1), node.coefficients()
        blocks = -(-len(theta) // _BLOCK)
        value, squared = (np.zeros((blocks, WIDE_DIGITS), dtype=np.int64) for _ in range(2))
        _check(here.value, here.gradient, node.gamma, theta, node.data.hierarchy.parent, self.w, value, squared)
        return CheckReply(from_digits(value.sum(axis=0)), from_digits(squared.sum(axis=0)))


@dataclass(frozen=True)
class PerfectFit(Message[Exact], label="perfect fit", phase="measure"):
    """tell what a perfect fit of your clients would be worth."""

    def at(self, node: Node) -> Exact:
        return total(node.loss.perfect(node.data))


# The node


@dataclass(frozen=True)
class ClientBlocks:
    """Clients in blocks of one cluster each: what a thread takes at a time."""

    ptr: Ints
    owner: Ints
    of_cluster: Ints
    one_each: bool

    @classmethod
    def of(cls, tree: Hierarchy) -> ClientBlocks:
        ptr, owner = blocks_of(tree.cluster_ptr)
        clusters = np.arange(tree.n_clusters + 1)
        return cls(ptr, owner, np.searchsorted(owner, clusters), np.array_equal(owner, clusters[:-1]))

    def empty(self, d: int) -> Ints:
        """Digits of exact sums, ``(blocks, d, DIGITS)``."""
        return np.zeros((len(self.owner), d, DIGITS), dtype=np.int64)

    def total(self, digits: Ints) -> ClusterSums:
        if self.one_each:
            return ClusterSums(from_digits(digits))
        total = np.zeros((len(self.of_cluster) - 1, *digits.shape[1:]), dtype=np.int64)
        filled = np.flatnonzero(np.diff(self.of_cluster))
        if len(filled):
            total[filled] = np.add.reduceat(digits, self.of_cluster[filled], axis=0)
        return ClusterSums(from_digits(total))


def shares(node: Node, total: Floats) -> Floats:
    """Each client's part of its cluster's sum of ``gamma``."""
    return node.gamma / total[node.data.hierarchy.parent]


def node_sums(tree: Hierarchy, share: Floats, theta: Floats) -> ClusterSums:
    """What a node tells of where its clients are."""
    return ClusterSums(segment_sum(share[:, None] * theta, tree.cluster_ptr))


@njit(parallel=True, cache=True, error_model="numpy")  # type: ignore[untyped-decorator]
def _check(
    own: Floats, gradient: Floats, gamma: Floats, theta: Floats, parent: Ints, w: Floats, value: Ints, squared: Ints
) -> None:
    """Each client's value and squared gradient, in the order of its coefficients, go into the digits of its block."""
    n, d = theta.shape
    for block in prange(len(value)):
        for i in range(block * _BLOCK, min(n, (block + 1) * _BLOCK)):
            apart, steep = 0.0, 0.0
            for a in range(d):
                away = theta[i, a] - w[parent[i], a]
                apart += away * away
                steep += (gradient[i, a] + gamma[i] * away) ** 2
            accumulate_in(value, block, own[i] + 0.5 * gamma[i] * apart)
            accumulate_in(squared, block, steep)


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
