"""Messages of the randomised algorithms, the sums that nodes reply with, and the averages of the coordinator.

The algorithms are those of Lyu, Hanzely and Kolar (2022), arXiv:2204.13619. One exchange works as follows:

    coordinator -> node    a Move: a step towards averages (a Pull), then local steps
    node -> coordinator    ClusterSums: for each cluster the weighted sum of the coefficients of the node's clients
    coordinator            adds the sums of all nodes, which gives the averages, and computes the next Pull

Sums are exact (:mod:`covey.exact`), so the result has the same bits for any assignment of clients to nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np

from covey._typing import Anything, Bools, Floats, Ints
from covey.exact import DIGITS, WIDE_DIGITS, Exact, from_digits, segment_sum, total
from covey.nodes.network import Blocks, Message, Node
from covey.objective.objective import Penalty
from covey.objective.theory import alpha_weights, mixing
from covey.records import Axes, Record, Reply
from covey.solvers.first_order import kernels
from covey.solvers.first_order.schedule import Round
from covey.threads import block_count, share

# Messages and replies


@dataclass(frozen=True)
class Pull(Record):
    """A step towards averages: client ``i`` of cluster ``j`` moves by ``-gamma_i (strength_j theta_i - force_j)``."""

    strength: Annotated[Floats, Axes("k")]
    force: Annotated[Floats, Axes("k d")]

    @classmethod
    def none(cls, k: int, d: int) -> Pull:
        return cls(np.zeros(k), np.zeros((k, d)))

    def then(self, strength: Floats, force: Floats, gamma: Floats) -> Pull:
        """Both this step and a later one, as one step, if all clients of a cluster have the same ``gamma (k,)``."""
        if not self.strength.any():
            return Pull(strength, force)
        keep = 1 - gamma * strength
        return Pull(self.strength * keep + strength, self.force * keep[:, None] + force)


NextPull = Callable[[Floats, Round, Floats], Pull]
"""How a coordinator computes the next step towards averages: ``(means, round, anchor) -> Pull``.

``means (k, d)`` are the averages of the clusters that took part in the round, ``anchor (k, d)`` those of the last anchor.
"""


@dataclass(frozen=True)
class Move(Record):
    """A step towards averages in clusters that ``exchanged (k,)``, then ``steps (k,)`` local iterations from ``start (k,)``.

    With ``refresh`` the clients' points become their anchors afterwards. ``anchor (k, d)`` are the cluster centres of the last
    anchor, sent once. Nodes reply with the sums of the clusters that are ``wanted``. The message is for the clusters of one
    ``lane (k,)`` only (:meth:`~covey.nodes.network.Network.lanes`), for all if it is None.
    """

    pull: Pull
    exchanged: Annotated[Bools, Axes("k")]
    start: Annotated[Ints, Axes("k")]
    steps: Annotated[Ints, Axes("k", "steps")]
    wanted: Annotated[Bools, Axes("k")]
    refresh: bool = False
    anchor: Annotated[Floats | None, Axes("k d")] = None
    lane: Annotated[Bools | None, Axes("k")] = None

    @property
    def cells(self) -> Anything:
        """Which clusters have work to do or sums to send, ``(k,)``; the others wait for the next exchange."""
        if self.refresh or self.anchor is not None:
            return np.ones(len(self.steps), dtype=bool) if self.lane is None else self.lane
        return (self.steps > 0) | self.exchanged | self.wanted


@dataclass(frozen=True)
class ClusterSums(Reply):
    """``sum of share_i theta_i`` over a node's clients, for each cluster, ``(k, d)``.

    ``share_i`` is the client's part of its cluster's sum of ``gamma``, so the sum over all nodes is the cluster's average.
    """

    total: Annotated[Exact, Axes("k d")]


@dataclass(frozen=True)
class CheckReply(Reply):
    """Value and squared gradient of a node's clients, given the best cluster and global models."""

    value: Annotated[Exact, Axes("")]
    gradient_squared: Annotated[Exact, Axes("", "square")]


@dataclass(frozen=True)
class AskMeans(Message[ClusterSums], label="means"):
    """Ask for the averages of the clients; ``total (k,)`` is each cluster's sum of ``gamma``."""

    total: Annotated[Floats, Axes("k")]

    def at(self, node: Node) -> ClusterSums:
        return node_sums(node, self.total, node.coefficients())


@dataclass(frozen=True)
class CheckGap(Message[CheckReply], label="check"):
    """Ask for value and gradient at the clients' coefficients, given the clusters' centres ``w (k, d)``."""

    w: Annotated[Floats, Axes("k d")]

    def at(self, node: Node) -> CheckReply:
        here, theta = node.loss.expand(node.data, node.coefficients(), order=1), node.coefficients()
        blocks = block_count(len(theta))
        value, squared = (np.zeros((blocks, WIDE_DIGITS), dtype=np.int64) for _ in range(2))
        operands = here.value, here.gradient, node.gamma, theta, node.data.hierarchy.parent
        share(kernels.check, blocks, *operands, self.w, value, squared)
        return CheckReply(from_digits(value.sum(axis=0)), from_digits(squared.sum(axis=0)))


@dataclass(frozen=True)
class PerfectFit(Message[Exact], label="perfect fit", phase="measure"):
    """Ask for the value that a perfect fit of the clients would have."""

    def at(self, node: Node) -> Exact:
        return perfect(node)


def perfect(node: Node) -> Exact:
    """The value that a perfect fit of a node's clients would have, computed once."""
    found: Exact | None = node.cache.get("perfect")
    if found is None:
        found = node.cache["perfect"] = total(node.loss.perfect(node.data))
    return found


# The node


@dataclass(frozen=True)
class ClientBlocks:
    """Arguments of the kernels that stay the same during a run: the rows, the blocks of clients, the clients' shares."""

    operands: tuple[Any, ...]
    blocks: Blocks
    share: Floats

    @classmethod
    def of(cls, node: Node, total: Floats) -> ClientBlocks:
        """Those of a node, computed once in a run; ``total (k,)`` is each cluster's sum of ``gamma``."""
        prepared = node.cache.get(cls)
        if prepared is None:
            blocks = Blocks.of(node.data.hierarchy.cluster_ptr)
            prepared = node.cache[cls] = cls(node.loss.operands(node.data), blocks, shares(node, total))
        return prepared

    @classmethod
    def begin(cls, node: Node, begin: Record) -> None:
        """Begin a run at the clients' coefficients, with the settings of the message ``begin``."""
        node.theta = node.coefficients()
        node.keep(begin)
        node.cache.pop(cls, None)


def empty_digits(blocks: Blocks, d: int) -> Ints:
    """Digits of exact sums, ``(blocks, d, DIGITS)``."""
    return np.zeros((blocks.count, d, DIGITS), dtype=np.int64)


def summed(blocks: Blocks, digits: Ints) -> ClusterSums:
    """The sums of all blocks of each cluster."""
    if blocks.one_each:
        return ClusterSums(from_digits(digits))
    total = np.zeros((len(blocks.of_parent) - 1, *digits.shape[1:]), dtype=np.int64)
    filled = np.flatnonzero(np.diff(blocks.of_parent))
    if len(filled):
        total[filled] = np.add.reduceat(digits, blocks.of_parent[filled], axis=0)
    return ClusterSums(from_digits(total))


def shares(node: Node, total: Floats) -> Floats:
    """Each client's part of its cluster's sum of ``gamma``, ``(n,)``."""
    return node.gamma / total[node.data.hierarchy.parent]


def node_sums(node: Node, total: Floats, theta: Floats) -> ClusterSums:
    """A node's part of the averages of ``theta (n, d)``."""
    return ClusterSums(segment_sum(shares(node, total)[:, None] * theta, node.data.hierarchy.cluster_ptr))


# The coordinator


@dataclass(frozen=True)
class Centres:
    """How the coordinator computes centres from averages.

    ``alpha (k,)`` are the mixing weights, ``total (k,)`` the clusters' sums of ``gamma``, ``weights (k,)`` those of the global
    average.
    """

    alpha: Floats
    total: Floats
    weights: Floats

    @classmethod
    def of(cls, penalty: Penalty) -> Centres:
        return cls(mixing(penalty), np.where(penalty.cluster_gamma > 0, penalty.cluster_gamma, 1.0), alpha_weights(penalty))

    def whole(self, means: Floats) -> Floats:
        """The global average, summed in order, because a BLAS product may depend on the number of threads."""
        mean: Floats = (self.weights[:, None] * means).sum(axis=0)
        return mean

    def centres(self, means: Floats) -> tuple[Floats, Floats]:
        """The best ``w (k, d)`` and ``wbar (d,)`` for the averages ``means (k, d)`` of the clients."""
        tbar = self.whole(means)
        return self.alpha[:, None] * tbar + (1 - self.alpha)[:, None] * means, tbar

    def tie(self, means: Floats) -> float:
        """The penalty between clusters, ``1/2 sum_j lam_j |w_j - wbar|^2``, at the best centres."""
        # w_j - wbar = (1 - alpha_j) (tbar_j - tbar) and lam_j (1 - alpha_j) = alpha_j * total_j.
        apart = ((means - self.whole(means)) ** 2).sum(axis=1)
        return 0.5 * float((self.alpha * (1 - self.alpha) * self.total * apart).sum())
