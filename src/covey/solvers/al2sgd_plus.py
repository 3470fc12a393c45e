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
from dataclasses import dataclass, field, replace
from typing import Any, Unpack

import numpy as np
from numba import njit, prange

from covey._typing import Anything, Floats, Ints
from covey.data import GroupedData
from covey.errors import SolverError
from covey.ledger import links
from covey.losses import Loss
from covey.losses.kernels import GAUSSIAN, exponent, slope
from covey.objective import Penalty
from covey.schedule import Round, Schedule, Vote, streams
from covey.solvers.curvature import constants
from covey.solvers.result import Fit
from covey.solvers.rounds import Blocks, Move, Pull, Sums, Top, Watch, beginning, node_sums, settle, solve_in_memory
from covey.theory import Coins, Katyusha, best_rho, coins, expected_smoothness, probability, step

# The node


@dataclass(frozen=True)
class Node:
    """What a node holds for the whole run; ``streams (n,)`` are its clients' own sources of rows."""

    data: GroupedData
    loss: Loss
    operands: tuple[Any, ...]
    blocks: Blocks
    gamma: Floats
    local: Floats
    pace: Katyusha
    streams: Anything


@dataclass(frozen=True)
class State:
    """L-Katyusha's points of each client, and the gradient of the objective at its anchor ``x``; all ``(n, d)``."""

    x: Floats
    y: Floats
    z: Floats
    gradient: Floats

    @property
    def theta(self) -> Floats:
        """The answer so far."""
        return self.y


def node_of(data: GroupedData, loss: Loss, gamma: Floats, drawn: Coins, pace: Katyusha, streams: Anything) -> Node:
    return Node(data, loss, loss.operands(data), Blocks.of(data.hierarchy), gamma, drawn.local, pace, streams)


def node_start(node: Node, theta: Floats) -> State:
    return State(theta, theta, theta, node.loss.gradient(node.data, theta))


def node_move(node: Node, state: State, move: Move) -> tuple[State, Sums]:
    """Finish the iteration that waited for an answer, go on locally, and send sums of ``theta``, or of a new anchor."""
    tree, pace = node.data.hierarchy, node.pace
    if move.anchor is not None:
        pull = node.gamma[:, None] * (state.x - tree.down(move.anchor))
        state = replace(state, gradient=state.gradient + pull)
    y, z, sums = np.empty_like(state.y), np.empty_like(state.z), node.blocks.empty(state.y.shape[1])
    _move(
        *node.operands, node.streams, node.blocks.ptr, node.blocks.owner, node.gamma, move.pull.strength, move.pull.force,
        move.heads, move.start, move.steps, node.local, (pace.eta, pace.a1, pace.a2, pace.b1, pace.b2), move.wanted, state.x,
        state.gradient, state.y, state.z, y, z, sums,
    )  # fmt: skip
    if move.refresh:
        return State(y, y, z, node.loss.gradient(node.data, y)), node_sums(tree, node.gamma, y)
    return replace(state, y=y, z=z), node.blocks.total(sums)


# The coordinator


@dataclass(frozen=True)
class Guide:
    """Heads of the coins as pulls, relative to the anchor, whose means the coordinator remembers."""

    top: Top
    coins: Coins
    pace: Katyusha
    memory: dict[str, Floats] = field(default_factory=dict)

    def begin(self, means: Floats) -> Floats:
        """Remember the anchor's means; its centres, for the nodes."""
        self.memory["anchor"] = means
        return self.top.centres(means)[0]

    def answer(self, means: Floats, turn: Round) -> tuple[Pull, Floats | None]:
        if turn.refresh:
            return Pull.none(*means.shape), self.begin(means)
        alpha, tau, p0 = self.top.alpha, self.coins.tau, self.coins.p0
        moved = means - self.memory["anchor"]
        if turn.between:
            to_whole, to_cluster = alpha / p0, tau * (1 - alpha) / p0
            force = to_whole[:, None] * (self.top.weights @ moved) + to_cluster[:, None] * moved
            return Pull(to_whole + to_cluster, force), None
        chance = (1 - p0) * self.coins.p
        strength = np.where(turn.within > 0, (1 - tau) * (1 - alpha) / np.where(chance > 0, chance, 1.0), 0.0)
        return Pull(strength, strength[:, None] * moved), None

    def recipe(self) -> dict[str, Any]:
        return {"eta": self.pace.eta, "mu": (1 - self.pace.b1) / self.pace.b2, "tau": self.coins.tau}


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
    L: float | None = None,
    vote: Vote = "central",
    **watch: Unpack[Watch],
) -> Fit:
    """Async-AL2SGD+: accelerated and variance-reduced, one row a client and iteration, linear to the exact minimiser.

    Parameters
    ----------
    eta, p0, p, tau : as for ``l2gd``, by default the best by theory
    rho : probability of a refresh of the anchor; by default that of an exchange
    mu, L : strong convexity of the objective and smoothness of single rows' losses, in place of those found in the data
    vote : who flips the coin of the exchanges between clusters: "central" or, without a server, "majority"
    **watch : see :class:`~covey.solvers.rounds.Watch`

    >>> from covey import GroupedData, Penalty
    >>> from covey.losses import Gaussian
    >>> data = GroupedData.from_arrays([[1.0], [1.0], [1.0]], [0.0, 3.0, 9.0], ["a", "b", "c"], ["x", "x", "y"])
    >>> fit = al2sgd_plus(data, Gaussian(), Penalty.of(data.hierarchy), tol=1e-12)
    >>> fit.convergence.converged, fit.theta.ravel().round(5).tolist()
    (True, [1.5, 3.0, 7.5])
    """
    known = constants(data, loss, penalty, mu=mu, L=L)
    if L is not None:
        known = replace(known, L_row=L)
    known.need_curvature()
    drawn = coins(known, known.L_row, p0=p0, p=p, tau=tau)
    drawn = replace(drawn, rho=best_rho(drawn) if rho is None else probability("rho", rho))
    if drawn.rho == 0:
        raise SolverError("With rho = 0 the anchor is never refreshed and the method does not converge; give rho > 0.")
    smoothness = expected_smoothness(known, drawn, known.L_row)
    largest = Katyusha.of(known, smoothness, drawn.rho).eta
    pace = Katyusha.of(known, smoothness, drawn.rho, step(eta, largest, "1 / (4 max(L_F, calL))"))
    schedule = Schedule(drawn, watch.get("seed", 0), vote=vote)
    run = settle(
        watch, "al2sgd_plus", schedule, links(data.hierarchy.sizes, data.n_terms, vote), known, largest,
        pace=1 / (pace.b2 * known.mu), needed=lambda tol: pace.iterations(tol, gap=(known.L_row + known.gamma_max) / 2),
        advice="raise max_iter",
    )  # fmt: skip
    node = node_of(data, loss, penalty.gamma, drawn, pace, streams(schedule.seed, data.n_clients))
    guide = Guide(Top.of(penalty), drawn, pace)
    return solve_in_memory(
        data, loss, penalty, node_start(node, beginning(data, watch)), lambda state, move: node_move(node, state, move), guide,
        run, watch,
    )  # fmt: skip


@njit(parallel=True, cache=True, error_model="numpy")  # type: ignore[untyped-decorator]
def _move(
    family: int, X: Floats, target: Floats, weights: Floats, offset: Floats, scale: Floats, ridge: float, client_ptr: Ints,
    streams: Anything, blocks: Ints, owner: Ints, gamma: Floats, strength: Floats, force: Floats, heads: Anything, start: Ints,
    steps: Ints, local: Floats, pace: tuple[float, float, float, float, float], wanted: Anything, x: Floats, gradient: Floats,
    y: Floats, z: Floats, y_out: Floats, z_out: Floats, sums: Floats,
) -> None:  # fmt: skip
    """Each block of clients, all of one cluster, is moved by one thread, and summed in order: no bit depends on the threads."""
    d = x.shape[1]
    eta, a1, a2, b1, b2 = pace
    for block in prange(len(owner)):
        j = owner[block]
        theta, g = np.empty(d), np.empty(d)
        for i in range(blocks[block], blocks[block + 1]):
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
                    sums[block, a] += gamma[i] * (a1 * z_out[i, a] + a2 * x[i, a] + (1.0 - a1 - a2) * y_out[i, a])


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
