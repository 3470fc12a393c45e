"""Async-AL2SGD+, Algorithm 2 of the paper (arXiv:2204.13619), with its oracle corrected (docs/explanation/errata.md, 2 and 3).

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

:func:`reference` is that, written out. :func:`al2sgd_plus` does the same over a network. The anchor ``x`` is the same between
refreshes, so its part of ``g`` is one stored vector, and iterations with no exchange are done for each client in one go. Each
step towards averages needs an exchange here: the average of ``theta`` moves with ``z`` and ``y``.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any, Unpack

import numpy as np

from covey._typing import Anything, Floats
from covey.errors import SolverError, probability
from covey.losses import Loss
from covey.nodes.network import Blocks, Message, Network, Node
from covey.objective.objective import Penalty
from covey.objective.theory import Constants, Probabilities, Recipe, expected_smoothness, mixing, probabilities
from covey.records import Record
from covey.solvers.costs import Cost, Setting
from covey.solvers.first_order import kernels, plain
from covey.solvers.first_order.curvature import constants
from covey.solvers.first_order.loop import Control, Setup, Watch, run
from covey.solvers.first_order.protocol import Centres, ClusterSums, Move, Pull, empty_digits, node_sums, shares, summed
from covey.solvers.first_order.schedule import Flips, Round, Schedule, streams, uniforms
from covey.solvers.registry import algorithm
from covey.solvers.result import Fit
from covey.tables.rows import GroupedData


def reference(
    data: GroupedData,
    loss: Loss,
    penalty: Penalty,
    chances: Probabilities,
    flips: Flips,
    pace: Katyusha,
    theta: Floats,
    seed: int,
) -> Floats:
    """Algorithm 2 with given random choices ``flips``, from ``theta (n, d)``; rows are those of the clients' streams.

    The paper prints it without line numbers; these count its lines from "Input".
    """
    gamma, alpha, parent, rows = penalty.gamma, mixing(penalty), data.hierarchy.parent, data.rows_per_client
    p0, p, tau, eta = chances.p0, chances.p, chances.tau, pace.eta
    own, single = [data.clients(i, i + 1) for i in range(data.n_clients)], replace(loss, reduction="sum", ridge=0.0)

    def row_gradient(i: int, row: int, at: Floats) -> Floats:  # of f_il, where f_i is the mean of f_il over the client's rows
        one = own[i].rows(np.arange(rows[i]) == row)
        share = rows[i] * loss.scale(data)[i]
        return np.asarray(share * single.gradient(one, at[None])[0] + loss.ridge * at)

    def averages(at: Floats) -> tuple[Floats, Floats]:
        within = [np.average(at[parent == j], axis=0, weights=gamma[parent == j]) for j in range(len(p))]
        weight = alpha[parent] * gamma
        return np.array(within), weight @ at / (weight.sum() or 1.0)

    x = y = z = theta  # line 2
    for t in range(len(flips.between)):  # line 3
        theta, g = pace.a1 * z + pace.a2 * x + (1 - pace.a1 - pace.a2) * y, np.empty_like(y)  # line 4
        (tbar_j, tbar), (xbar_j, xbar) = averages(theta), averages(x)  # lines 7, 8, 15
        drawn = (uniforms(streams(seed, data.hierarchy), t, 1)[:, 0] * rows).astype(int)
        for i, j in enumerate(parent):  # the estimate of lines 9, 16 and 19
            to_all, to_own = (theta[i] - tbar) - (x[i] - xbar), (theta[i] - tbar_j[j]) - (x[i] - xbar_j[j])
            g[i] = loss.gradient(own[i], x[i : i + 1])[0]
            g[i] += alpha[j] * gamma[i] * (x[i] - xbar) + (1 - alpha[j]) * gamma[i] * (x[i] - xbar_j[j])
            if flips.between[t]:  # line 6: xi_0 = 1; the paper's oracle lacks the term with tau_j
                g[i] += gamma[i] / p0 * (alpha[j] * to_all + tau[j] * (1 - alpha[j]) * to_own)
            elif flips.within[t, j]:  # line 14: xi_j = 1
                g[i] += gamma[i] * (1 - tau[j]) * (1 - alpha[j]) / ((1 - p0) * p[j]) * to_own
            else:  # line 18
                change = row_gradient(i, drawn[i], theta[i]) - row_gradient(i, drawn[i], x[i])
                g[i] += change / ((1 - p0) * (1 - p[j]))
        y = theta - eta * g  # lines 10, 17, 20
        z = pace.b1 * z + (1 - pace.b1) * theta + pace.b2 / eta * (y - theta)  # line 24
        x = y if flips.refresh[t] else x  # lines 26 to 29
    return y


# Theory


@dataclass(frozen=True)
class Katyusha(Record):
    """L-Katyusha's constants (thm. al2sgd_conv_rate), for ``eta`` at most ``1/(4 max(L_F, calL))``."""

    eta: float
    a1: float
    a2: float
    b1: float
    b2: float
    rho: float

    @classmethod
    def of(cls, known: Constants, smoothness: float, rho: float, eta: float | None = None) -> Katyusha:
        top = max(known.L_row + known.gamma_max, smoothness)
        eta = 1 / (4 * top) if eta is None else eta
        a2 = smoothness / (2 * top)
        a1 = min(0.5, math.sqrt(eta * known.mu * max(0.5, a2 / rho)))
        b2 = 1 / max(2 * known.mu, 4 * a1 / eta)
        return cls(eta, a1, a2, 1 - b2 * known.mu, b2, rho)

    def potential(self, distance: float, gap: float) -> float:
        """The Lyapunov function where x = y = z: ``|z - theta_hat|^2`` and gaps of the objective at y and x, weighted."""
        per_gap = self.b1 * self.b2 / self.a1 * (2 + (2 * self.a2 + self.a1) / self.rho)
        return distance + per_gap * gap

    @property
    def contraction(self) -> float:
        """What an iteration leaves of the potential: the most of its three parts, those at z, y and x."""
        return max(self.b1, 1 - self.a1 / 2, 1 - self.rho * self.a1 / (2 * self.a2 + self.a1))

    def iterations(self, accuracy: float, distance: float = 1.0, gap: float = 0.0) -> int:
        """Iterations until ``|y - theta_hat|^2 <= accuracy * distance``, by the potential and strong convexity."""
        # mu/2 |y - theta_hat|^2 <= F(y) - F* <= a1 / (2 b1 b2) potential, and mu = (1 - b1) / b2.
        answer = max(1.0, self.a1 / (self.b1 * (1 - self.b1)))
        ratio = answer * self.potential(distance, gap) / (accuracy * distance)
        return max(1, math.ceil(math.log(max(ratio, 1.0)) / -math.log(self.contraction)))


def best_rho(chances: Probabilities) -> float:
    """Refresh as often as there is an exchange: balances the two kinds of communication (up to a factor of 2)."""
    return float(np.clip(chances.p0 + (1 - chances.p0) * chances.p.max(), 1e-4, 1.0))


def recipe(known: Constants, *, p0: Any = None, p: Any = None, tau: Any = None, rho: Any = None) -> Recipe:
    """Probabilities and the largest step."""
    chances = probabilities(known, known.L_row, p0=p0, p=p, tau=tau)
    rho = best_rho(chances) if rho is None else probability("rho", rho)
    if rho == 0:
        raise SolverError("With rho = 0 the anchor is never refreshed and the method does not converge; give rho > 0.")
    smoothness = expected_smoothness(known, chances, known.L_row)
    top = max(known.L_row + known.gamma_max, smoothness)
    return Recipe(replace(chances, rho=rho), smoothness, 1 / (4 * top), "1 / (4 max(L_F, calL))")


def cost(setting: Setting) -> Cost:
    """What the theorem says for the plan."""
    best = recipe(setting.known)
    katyusha = Katyusha.of(setting.known, best.smoothness, best.probabilities.rho)
    needed = katyusha.iterations(setting.accuracy, setting.distance, setting.gap)
    pace = -1 / math.log(katyusha.contraction)
    return setting.bounded("al2sgd_plus", needed, pace, Schedule(best.probabilities, 0), "bound of its theorem")


# What travels


@dataclass(frozen=True)
class KatyushaBegin(Message[None], label="al2sgd_plus begin", reply=False):
    """Begin where the clients are.

    ``local (k,)`` is what a local step is multiplied by, ``pace`` the steps, ``total (k,)`` each cluster's sum of ``gamma``.
    """

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
    """A move of all clients."""

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
    """What a node holds for the whole run; ``streams (n,)`` are its clients' own sources of random rows."""

    data: GroupedData
    loss: Loss
    operands: tuple[Any, ...]
    blocks: Blocks
    gamma: Floats
    share: Floats
    local: Floats
    pace: Katyusha
    streams: Anything

    @classmethod
    def of(cls, node: Node, begin: KatyushaBegin) -> KatyushaClients:
        data, share, own = node.data, shares(node, begin.total), node.state(RowStreams).start
        blocks, operands = Blocks.of(data.hierarchy.cluster_ptr), node.loss.operands(data)
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
    y, z, sums = np.empty_like(before), np.empty_like(before), empty_digits(blocks, before.shape[1])
    move_clients: Any = plain.al2sgd_plus_move if isinstance(clients.operands[0], Loss) else kernels.al2sgd_plus_move
    move_clients(
        *clients.operands, clients.streams, blocks.ptr, blocks.owner, clients.gamma, clients.share, move.pull.strength,
        move.pull.force, move.exchanged, move.start, move.steps, clients.local, (pace.eta, pace.a1, pace.a2, pace.b1, pace.b2),
        move.wanted, points.x, points.gradient, before, points.z, y, z, sums,
    )  # fmt: skip
    if move.refresh:
        return y, KatyushaPoints(y, z, clients.loss.gradient(clients.data, y)), node_sums(tree, clients.share, y)
    return y, replace(points, z=z), summed(blocks, sums)


# The coordinator


@dataclass(frozen=True)
class KatyushaGuide:
    """Averages become steps towards them, relative to those of the anchor."""

    top: Centres
    probabilities: Probabilities

    def answer(self, means: Floats, turn: Round, anchor: Floats) -> Pull:
        """The one step that follows a round's exchange: between clusters (lines 7 to 9), or within some (lines 15, 16)."""
        whole, cluster, within = self.probabilities.shares(self.top.alpha)
        moved = means - anchor
        if turn.between:
            return Pull(whole + cluster, whole[:, None] * self.top.whole(moved) + cluster[:, None] * moved)
        strength = np.where(turn.within > 0, within, 0.0)
        return Pull(strength, strength[:, None] * moved)


# The solver


@algorithm(place=5, first_order=True, shared=Control, reference=reference, cost=cost)
def al2sgd_plus(
    network: Network,
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

    >>> from covey import GroupedData, InMemory, Penalty
    >>> from covey.losses import Gaussian
    >>> data = GroupedData.from_arrays([[1.0], [1.0], [1.0]], [0.0, 3.0, 9.0], ["a", "b", "c"], ["x", "x", "y"])
    >>> penalty = Penalty.of(data.hierarchy)
    >>> fit = al2sgd_plus(InMemory.of(data, Gaussian(), penalty.gamma), penalty, tol=1e-12)
    >>> fit.convergence.converged, fit.theta.ravel().round(5).tolist()
    (True, [1.5, 3.0, 7.5])
    """
    control = Control.begin("al2sgd_plus", watch, network)
    known = constants(network, penalty, mu=mu, L_row=L_row)
    known.need_curvature()
    best = recipe(known, p0=p0, p=p, tau=tau, rho=rho)
    chances, top = best.probabilities, Centres.of(penalty)
    pace = Katyusha.of(known, best.smoothness, chances.rho, best.step(eta))
    setup = Setup(
        "al2sgd_plus",
        known,
        best,
        identity={"eta": pace.eta, "steps": asdict(pace), "probabilities": asdict(chances)},
        begin=KatyushaBegin(chances.local, pace, top.total, int(control.seed)),
        move=KatyushaMove,
        guide=KatyushaGuide(top, chances),
        merge=False,
        pace=-1 / math.log(pace.contraction),
        needed=lambda tol: pace.iterations(tol, gap=(known.L_row + known.gamma_max) / 2),
        advice="raise max_iter",
    )
    return run(network, penalty, setup, control)
