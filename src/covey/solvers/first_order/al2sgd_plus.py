"""Async-AL2SGD+, algorithm 2 of the paper with its oracle mended (PAPER.md, section 3 and errata 2 and 3).

L-Katyusha with this estimate of the gradient, unbiased by the term with ``tau_j`` that the paper leaves out:

    g_i = grad f_i(x_i) + alpha_j gamma_i (x_i - xbar) + (1 - alpha_j) gamma_i (x_i - xbar_j)
        + [xi_0 = 1]            gamma_i / p0 ( alpha_j D(tbar) + tau_j (1 - alpha_j) D(tbar_j) )
        + [xi_0 = 0, xi_j = 1]  gamma_i (1 - tau_j)(1 - alpha_j) / ((1 - p0) p_j) D(tbar_j)
        + [xi_0 = 0, xi_j = 0]  1 / ((1 - p0)(1 - p_j)) ( grad f_il(theta_i) - grad f_il(x_i) )
    D(c) = (theta_i - c(theta)) - (x_i - c(x)),   row l uniform for each client and iteration

    theta = a1 z + a2 x + (1 - a1 - a2) y
    y+    = theta - eta g
    z+    = b1 z + (1 - b1) theta + b2 / eta (y+ - theta)
    x+    = y+ with probability rho (then store grad f_i(x+) and the averages of x+), else x

The anchor ``x`` is the same between refreshes, so its part of ``g`` is one stored vector, and iterations with no exchange are
done for each client in one go. Every head needs an exchange here: the mean of ``theta`` moves with ``z`` and ``y``.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Unpack

import numpy as np
from numba import njit, prange

from covey._typing import Anything, Floats, Ints
from covey.exact import accumulate_rows
from covey.losses import Loss
from covey.losses.kernels import GAUSSIAN, exponent, slope
from covey.nodes.messages import Message
from covey.nodes.network import Network
from covey.nodes.node import Node
from covey.objective.objective import Objective
from covey.objective.penalty import Penalty
from covey.objective.theory import Coins, Katyusha, accelerated_recipe
from covey.records import Record
from covey.solvers.first_order import plain
from covey.solvers.first_order.curvature import constants_across
from covey.solvers.first_order.loop import Algorithm, Control, Keepers, Watch, in_memory, nobody, run
from covey.solvers.first_order.protocol import Centres, ClientBlocks, ClusterSums, Move, Pull, node_sums, shares
from covey.solvers.first_order.schedule import Round, streams
from covey.solvers.result import Fit
from covey.tables.rows import GroupedData

# What travels


@dataclass(frozen=True)
class KatyushaBegin(Message[None], label="al2sgd_plus begin", reply=False):
    """begin where you are; what a local step is multiplied by, ``local (k,)``, the steps, each cluster's sum of gamma."""

    local: Floats
    pace: Katyusha
    total: Floats
    seed: int

    def at(self, node: Node) -> None:
        node.theta = node.coefficients()
        node.keep(self)
        node.keep(RowStreams(streams(self.seed, node.data.hierarchy)))
        node.keep(node_start(node.loss, node.data, node.theta))
        node.cache.pop(KatyushaClients, None)


@dataclass(frozen=True)
class KatyushaMove(Message[ClusterSums], label="al2sgd_plus move"):
    """a move of all clients."""

    move: Move

    @property
    def cells(self) -> Anything:
        return self.move.cells

    def at(self, node: Node) -> ClusterSums:
        clients = node.cache.get(KatyushaClients)
        if clients is None:
            clients = node.cache[KatyushaClients] = KatyushaClients.of(node, node.state(KatyushaBegin))
        node.theta, points, sums = node_move(clients, node.coefficients(), node.state(KatyushaPoints), self.move)
        node.keep(points)
        return sums


# The node


@dataclass(frozen=True)
class KatyushaClients:
    """What a node holds for the whole run; ``streams (n,)`` are its clients' own sources of rows."""

    data: GroupedData
    loss: Loss
    operands: tuple[Any, ...]
    blocks: ClientBlocks
    gamma: Floats
    share: Floats
    local: Floats
    pace: Katyusha
    streams: Anything

    @classmethod
    def of(cls, node: Node, begin: KatyushaBegin) -> KatyushaClients:
        data, share, own = node.data, shares(node, begin.total), node.state(RowStreams).start
        blocks, operands = ClientBlocks.of(data.hierarchy), node.loss.operands(data)
        return cls(data, node.loss, operands, blocks, node.gamma, share, begin.local, begin.pace, own)


@dataclass(frozen=True)
class RowStreams(Record):
    """Where each client's source of rows begins, ``(n,)``."""

    start: Anything


@dataclass(frozen=True)
class KatyushaPoints(Record):
    """L-Katyusha's other points of each client, and the gradient of the objective at its anchor ``x``; all ``(n, d)``.

    The point ``y`` is the answer so far, where a node's clients are.
    """

    x: Floats
    z: Floats
    gradient: Floats


def node_start(loss: Loss, data: GroupedData, y: Floats) -> KatyushaPoints:
    """All points at the start; the anchor's part of the gradient that comes from the penalties follows with its centres."""
    return KatyushaPoints(y, y, loss.gradient(data, y))


def node_move(
    clients: KatyushaClients, before: Floats, points: KatyushaPoints, move: Move
) -> tuple[Floats, KatyushaPoints, ClusterSums]:
    """Finish the iteration that waited for an answer, go on locally, and send sums of ``theta``, or of a new anchor."""
    tree, blocks, pace = clients.data.hierarchy, clients.blocks, clients.pace
    if move.anchor is not None:
        pull = clients.gamma[:, None] * (points.x - tree.down(move.anchor))
        points = replace(points, gradient=points.gradient + pull)
    y, z, sums = np.empty_like(before), np.empty_like(before), blocks.empty(before.shape[1])
    move_clients: Any = plain.al2sgd_plus_move if isinstance(clients.operands[0], Loss) else _move
    move_clients(
        *clients.operands, clients.streams, blocks.ptr, blocks.owner, clients.gamma, clients.share, move.pull.strength,
        move.pull.force, move.heads, move.start, move.steps, clients.local, (pace.eta, pace.a1, pace.a2, pace.b1, pace.b2),
        move.wanted, points.x, points.gradient, before, points.z, y, z, sums,
    )  # fmt: skip
    if move.refresh:
        return y, KatyushaPoints(y, z, clients.loss.gradient(clients.data, y)), node_sums(tree, clients.share, y)
    return y, replace(points, z=z), blocks.total(sums)


# The coordinator


@dataclass(frozen=True)
class KatyushaGuide:
    """Heads of the coins as pulls, relative to the anchor."""

    top: Centres
    coins: Coins

    def answer(self, means: Floats, turn: Round, anchor: Floats) -> Pull:
        """The one head that follows a round's exchange: between clusters, or within some of them."""
        whole, cluster, within = self.coins.shares(self.top.alpha)
        moved = means - anchor
        if turn.between:
            return Pull(whole + cluster, whole[:, None] * self.top.whole(moved) + cluster[:, None] * moved)
        strength = np.where(turn.within > 0, within, 0.0)
        return Pull(strength, strength[:, None] * moved)


# In memory


def al2sgd_plus(
    data: GroupedData,
    loss: Loss,
    penalty: Penalty,
    *,
    eta: float | None = None,
    p0: float | None = None,
    p: Any = None,
    tau: Any = None,
    rho: float | None = None,
    mu: float | None = None,
    L_row: float | None = None,
    **watch: Unpack[Watch],
) -> Fit:
    """Async-AL2SGD+: accelerated and variance-reduced, one row a client and iteration, linear to the exact minimiser.

    Parameters
    ----------
    eta, p0, p, tau : as for ``l2gd``, by default the best by theory
    rho : probability of a refresh of the anchor; by default that of an exchange
    mu, L_row : strong convexity of the objective and smoothness of single rows' losses, in place of those found in the data
    **watch : seed, tol, max_iter, checkpoint and more: see :class:`~covey.solvers.first_order.loop.Control`

    >>> from covey import GroupedData, Penalty
    >>> from covey.losses import Gaussian
    >>> data = GroupedData.from_arrays([[1.0], [1.0], [1.0]], [0.0, 3.0, 9.0], ["a", "b", "c"], ["x", "x", "y"])
    >>> fit = al2sgd_plus(data, Gaussian(), Penalty.of(data.hierarchy), tol=1e-12)
    >>> fit.convergence.converged, fit.theta.ravel().round(5).tolist()
    (True, [1.5, 3.0, 7.5])
    """
    settings: dict[str, Any] = {"eta": eta, "p0": p0, "p": p, "tau": tau, "rho": rho, "mu": mu, "L_row": L_row}
    control = Control.of("al2sgd_plus", watch)
    return in_memory(partial(al2sgd_plus_across, **settings), Objective(data, loss, penalty), control)


# Across a network


def al2sgd_plus_across(
    network: Network,
    penalty: Penalty,
    control: Control,
    keepers: Keepers = nobody,
    *,
    eta: float | None = None,
    p0: float | None = None,
    p: Any = None,
    tau: Any = None,
    rho: float | None = None,
    mu: float | None = None,
    L_row: float | None = None,
) -> Fit:
    """Async-AL2SGD+ over any network, from where its nodes are; the clients' models stay there."""
    known = constants_across(network, penalty, mu=mu, L_row=L_row)
    known.need_curvature()
    recipe = accelerated_recipe(known, p0=p0, p=p, tau=tau, rho=rho)
    pace = Katyusha.of(known, recipe.smoothness, recipe.coins.rho, recipe.step(eta))
    top = Centres.of(penalty)
    algorithm = Algorithm(
        "al2sgd_plus",
        known,
        recipe,
        identity={"eta": pace.eta, "steps": asdict(pace), "probabilities": asdict(recipe.coins)},
        begin=KatyushaBegin(recipe.coins.local, pace, top.total, int(control.seed)),
        go=KatyushaMove,
        guide=KatyushaGuide(top, recipe.coins),
        merge=False,
        pace=-1 / math.log(pace.contraction),
        needed=lambda tol: pace.iterations(tol, gap=(known.L_row + known.gamma_max) / 2),
        advice="raise max_iter",
    )
    return run(network, penalty, algorithm, control, keepers)


@njit(parallel=True, cache=True, error_model="numpy")  # type: ignore[untyped-decorator]
def _move(
    family: int, X: Floats, target: Floats, weights: Floats, offset: Floats, scale: Floats, ridge: float, client_ptr: Ints,
    streams: Anything, blocks: Ints, owner: Ints, gamma: Floats, share: Floats, strength: Floats, force: Floats,
    heads: Anything, start: Ints, steps: Ints, local: Floats, pace: tuple[float, float, float, float, float],
    wanted: Anything, x: Floats, gradient: Floats, y: Floats, z: Floats, y_out: Floats, z_out: Floats, sums: Ints,
) -> None:  # fmt: skip
    """Each block of clients, all of one cluster, is moved by one thread; no bit depends on the threads, nor on the blocks."""
    d = x.shape[1]
    eta, a1, a2, b1, b2 = pace
    for block in prange(len(owner)):
        j = owner[block]
        first, last = blocks[block], blocks[block + 1]
        theta, g, ends = np.empty(d), np.empty(d), np.empty((last - first if wanted[j] else 0, d))
        for i in range(first, last):
            rows = client_ptr[i + 1] - client_ptr[i]
            for a in range(d):
                y_out[i, a] = y[i, a]
                z_out[i, a] = z[i, a]
            for s in range(-1 if heads[j] else 0, steps[j]):
                for a in range(d):
                    theta[a] = a1 * z_out[i, a] + a2 * x[i, a] + (1.0 - a1 - a2) * y_out[i, a]
                    g[a] = gradient[i, a]
                if s < 0:
                    for a in range(d):
                        g[a] += gamma[i] * (strength[j] * (theta[a] - x[i, a]) - force[j, a])
                else:
                    for a in range(d):
                        g[a] += local[j] * ridge * (theta[a] - x[i, a])
                    if rows > 0:
                        row = client_ptr[i] + _draw(streams[i], start[j] + s, rows)
                        shift = offset[row] if len(offset) > 0 else 0.0
                        at_theta, at_x = shift, shift
                        for a in range(d):
                            at_theta += X[row, a] * theta[a]
                            at_x += X[row, a] * x[i, a]
                        here = slope(family, at_theta, target[row], _power(family, at_theta))
                        there = slope(family, at_x, target[row], _power(family, at_x))
                        size = local[j] * rows * scale[i] * (weights[row] if len(weights) > 0 else 1.0)
                        for a in range(d):
                            g[a] += size * (here - there) * X[row, a]
                for a in range(d):
                    y_out[i, a] = theta[a] - eta * g[a]
                    z_out[i, a] = b1 * z_out[i, a] + (1.0 - b1) * theta[a] + b2 / eta * (y_out[i, a] - theta[a])
            if wanted[j]:
                for a in range(d):
                    ends[i - first, a] = a1 * z_out[i, a] + a2 * x[i, a] + (1.0 - a1 - a2) * y_out[i, a]
        if wanted[j]:
            accumulate_rows(sums[block], share[first:last], ends)


@njit(inline="always", error_model="numpy")  # type: ignore[untyped-decorator]
def _power(family: int, margin: float) -> float:
    return 1.0 if family == GAUSSIAN else math.exp(exponent(family, margin))


@njit(inline="always")  # type: ignore[untyped-decorator]
def _draw(stream: int, t: int, rows: int) -> int:
    """A row, uniform, from the client's stream at iteration ``t``: SplitMix64 read at any place."""
    state = stream + np.uint64(t + 1) * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    state = state ^ (state >> np.uint64(31))
    return int((state >> np.uint64(11)) * 2.0**-53 * rows)
