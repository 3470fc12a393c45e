"""Async-AL2SGD+, Algorithm 2 (async_al2sgd_plus) of Lyu, Hanzely and Kolar (2022), arXiv:2204.13619.

It is L-Katyusha with the gradient oracle of Equation 4.1 (async_al2sgd_plus_gradient_oracle). The paper's oracle lacks the term
with ``tau_j``, without which it is biased; covey adds it (docs/explanation/errata.md, sections 2 and 3):

    g_i = grad f_i(x_i) + alpha_j gamma_i (x_i - xbar) + (1 - alpha_j) gamma_i (x_i - xbar_j)
        + [xi_0 = 1]            gamma_i / p0 ( alpha_j D(tbar) + tau_j (1 - alpha_j) D(tbar_j) )
        + [xi_0 = 0, xi_j = 1]  gamma_i (1 - tau_j)(1 - alpha_j) / ((1 - p0) p_j) D(tbar_j)
        + [xi_0 = 0, xi_j = 0]  1 / ((1 - p0)(1 - p_j)) ( grad f_il(theta_i) - grad f_il(x_i) )
    D(c) = (theta_i - c(theta)) - (x_i - c(x)),   row l uniform for each client and iteration

With ``batch = b`` the last line is the mean over ``b`` rows, drawn with replacement. Then ``Ltilde / b + (1 - 1/b) L`` takes
the place of ``Ltilde`` in the constants: the second moment of a mean of ``b`` independent terms is ``1/b`` that of one term
plus ``1 - 1/b`` times the square of their expectation, which is at most ``2 L`` times the Bregman divergence of ``f_i``.

    theta = a1 z + a2 x + (1 - a1 - a2) y
    y+    = theta - eta g
    z+    = b1 z + (1 - b1) theta + b2 / eta (y+ - theta)
    x+    = y+ with probability rho (then store grad f_i(x+) and the averages of x+), else x

:func:`reference` is this algorithm in plain numpy. :func:`al2sgd_plus` runs it over a network. The anchor ``x`` stays the same
between refreshes, so its part of ``g`` is one stored vector. All iterations between two exchanges are one call of a kernel.
Each step towards averages needs its own exchange, because the average of ``theta`` moves with ``z`` and ``y``.

Constants and rate are those of Theorem 4.3 (al2sgd_conv_rate), the probabilities those of Corollary 4.4
(async_al2sgd_plus_opt_conv_rate).
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Annotated, Any, Unpack

import numpy as np

from covey._typing import Anything, Floats, Ints
from covey.errors import SolverError, probability, whole
from covey.kernels import accumulate_rows
from covey.nodes.network import Message, Network, Node
from covey.objective.objective import Objective, Penalty
from covey.objective.theory import Constants, Probabilities, Recipe, Shares, expected_smoothness, mixing, probabilities
from covey.records import Axes, Record
from covey.solvers.costs import Cost, Setting
from covey.solvers.first_order import kernels
from covey.solvers.first_order.loop import Control, ControlOptions, Setup, prepare, run
from covey.solvers.first_order.protocol import Centres, ClientBlocks, ClusterSums, Move, Pull, empty_digits, node_sums, summed
from covey.solvers.first_order.schedule import Choices, PerCluster, Round, Schedule, streams, uniforms
from covey.solvers.first_order.smoothness import Quantity
from covey.solvers.registry import algorithm
from covey.solvers.result import Fit
from covey.threads import share

_MOST_ROWS = 1 << 16  # in a minibatch


def reference(
    objective: Objective, chances: Probabilities, choices: Choices, pace: Katyusha, theta: Floats, seed: int, batch: int = 1
) -> Floats:
    """Run Algorithm 2 (async_al2sgd_plus) in plain numpy, with given random choices.

    The paper prints Algorithm 2 without line numbers; the comments count its lines from "Input".

    Parameters
    ----------
    objective : Objective
        Data, loss and penalties.
    chances : Probabilities
        Probabilities ``p0``, ``p (k,)`` and ``rho``, and the shares ``tau (k,)``.
    choices : Choices
        The random choices of all iterations.
    pace : Katyusha
        The constants of L-Katyusha.
    theta : (n, d) array
        The coefficients to begin at.
    seed : int
        Determines the rows that the clients draw.
    batch : int
        The number of rows that a client draws in an iteration.

    Returns
    -------
    (n, d) array
        The last ``y``.

    Examples
    --------
    >>> from covey import GroupedData, Objective, Penalty
    >>> from covey.losses import Gaussian
    >>> data = GroupedData.from_arrays([[1.0], [1.0], [1.0]], [0.0, 3.0, 9.0], ["a", "b", "c"], ["x", "x", "y"])
    >>> objective = Objective(data, Gaussian(), Penalty.of(data.hierarchy))
    >>> chances = Probabilities(0.4, np.array([0.2, 0.2]), np.array([0.5, 0.5]), rho=0.5)
    >>> choices = Schedule(chances, seed=0).choices(0, 500)
    >>> pace = Katyusha(eta=0.1, a1=0.2, a2=0.5, b1=0.9, b2=0.1, rho=0.5)
    >>> reference(objective, chances, choices, pace, np.zeros((3, 1)), seed=0).ravel().round(3).tolist()
    [1.5, 3.0, 7.5]
    """
    data, loss, gamma, alpha = objective.data, objective.loss, objective.penalty.gamma, mixing(objective.penalty)
    p0, p, tau, eta, rows = chances.p0, chances.p, chances.tau, pace.eta, data.rows_per_client
    # f_i is the mean over the client's rows l of f_il = share_i * (loss of row l) + ridge / 2 |.|^2.
    single, share = replace(loss, reduction="sum", ridge=0.0), (rows * loss.scale(data))[:, None]
    x = y = z = theta  # line 2
    for t in range(len(choices.between)):  # line 3
        theta = pace.a1 * z + pace.a2 * x + (1 - pace.a1 - pace.a2) * y  # line 4
        (tbar_j, tbar), (xbar_j, xbar) = objective.means(theta), objective.means(x)  # lines 7, 8, 15
        change = loss.ridge * (theta - x)
        for draw in uniforms(streams(seed, data.hierarchy), t * batch, batch).T:
            drawn = data.client_ptr[:-1] + (draw * rows).astype(int)
            one = data.rows(np.isin(np.arange(data.n_rows), drawn))
            change = change + share * (single.gradient(one, theta) - single.gradient(one, x)) / batch
        g = loss.gradient(data, x)
        for i, j in enumerate(data.hierarchy.parent):  # the estimate of lines 9, 16 and 19
            to_all, to_own = (theta[i] - tbar) - (x[i] - xbar), (theta[i] - tbar_j[j]) - (x[i] - xbar_j[j])
            g[i] += alpha[j] * gamma[i] * (x[i] - xbar) + (1 - alpha[j]) * gamma[i] * (x[i] - xbar_j[j])
            if choices.between[t]:  # line 6: xi_0 = 1; the paper's oracle lacks the term with tau_j
                g[i] += gamma[i] / p0 * (alpha[j] * to_all + tau[j] * (1 - alpha[j]) * to_own)
            elif choices.within[t, j]:  # line 14: xi_j = 1
                g[i] += gamma[i] * (1 - tau[j]) * (1 - alpha[j]) / ((1 - p0) * p[j]) * to_own
            else:  # line 18
                g[i] += change[i] / ((1 - p0) * (1 - p[j]))
        y = theta - eta * g  # lines 10, 17, 20
        z = pace.b1 * z + (1 - pace.b1) * theta + pace.b2 / eta * (y - theta)  # line 24
        x = y if choices.refresh[t] else x  # lines 26 to 29
    return y


# Messages, and what a node does with them


@dataclass(frozen=True)
class Katyusha(Record):
    """The constants of L-Katyusha by Theorem 4.3 (al2sgd_conv_rate), for ``eta`` at most ``1/(4 max(L_F, calL))``."""

    eta: float
    a1: float
    a2: float
    b1: float
    b2: float
    rho: float

    @classmethod
    def of(cls, constants: Constants, smoothness: float, rho: float, eta: float | None = None) -> Katyusha:
        top = max(constants.L_row + constants.gamma_max, smoothness)
        eta = 1 / (4 * top) if eta is None else eta
        a2 = smoothness / (2 * top)
        a1 = min(0.5, math.sqrt(eta * constants.mu * max(0.5, a2 / rho)))
        b2 = 1 / max(2 * constants.mu, 4 * a1 / eta)
        return cls(eta, a1, a2, 1 - b2 * constants.mu, b2, rho)

    def theta(self, x: Floats, y: Floats, z: Floats) -> Floats:
        """The point ``theta`` of line 4."""
        return self.a1 * z + self.a2 * x + (1.0 - self.a1 - self.a2) * y

    def potential(self, distance: float, gap: float) -> float:
        """The Lyapunov function at x = y = z: ``|z - theta_hat|^2`` plus the weighted objective gaps at y and x."""
        per_gap = self.b1 * self.b2 / self.a1 * (2 + (2 * self.a2 + self.a1) / self.rho)
        return distance + per_gap * gap

    @property
    def contraction(self) -> float:
        """The factor by which an iteration shrinks the potential: the largest of those of its parts at z, y and x."""
        return max(self.b1, 1 - self.a1 / 2, 1 - self.rho * self.a1 / (2 * self.a2 + self.a1))

    def iterations(self, accuracy: float, distance: float = 1.0, gap: float = 0.0) -> int:
        """Iterations until ``|y - theta_hat|^2 <= accuracy * distance``, by the potential and strong convexity."""
        # mu/2 |y - theta_hat|^2 <= F(y) - F* <= a1 / (2 b1 b2) potential, and mu = (1 - b1) / b2.
        answer = max(1.0, self.a1 / (self.b1 * (1 - self.b1)))
        ratio = answer * self.potential(distance, gap) / (accuracy * distance)
        return max(1, math.ceil(math.log(max(ratio, 1.0)) / -math.log(self.contraction)))


@dataclass(frozen=True)
class RowStreams(Record):
    """The start of each client's stream of random rows, ``(n,)``."""

    start: Anything


@dataclass(frozen=True)
class KatyushaPoints(Record):
    """The points ``x`` and ``z`` of each client, and the gradient of the objective at its anchor ``x``; all ``(n, d)``.

    The point ``y`` is where the node's clients are: the result so far.
    """

    x: Floats
    z: Floats
    gradient: Floats


@dataclass(frozen=True)
class KatyushaBegin(Message[None], label="al2sgd_plus begin", reply=False):
    """Begin with all points at the clients' coefficients (line 2).

    ``local (k,)`` multiplies local steps, ``pace`` has the constants, ``total (k,)`` is each cluster's sum of ``gamma``. The
    penalties' part of the gradient at the anchor follows with the anchor's centres. A local step draws ``batch`` rows.
    """

    local: Annotated[Floats, Axes("k")]
    pace: Katyusha
    total: Annotated[Floats, Axes("k")]
    seed: int
    batch: int = 1

    def __post_init__(self) -> None:
        whole("batch", self.batch, least=1, below=_MOST_ROWS)  # a site does not work without end

    def at(self, node: Node) -> None:
        node.data.need_rows("The solver 'al2sgd_plus' draws single rows, so it")
        ClientBlocks.begin(node, self)
        node.keep(RowStreams(streams(self.seed, node.data.hierarchy)))
        y = node.coefficients()
        node.keep(KatyushaPoints(y, y, node.loss.gradient(node.data, y)))


@dataclass(frozen=True)
class KatyushaMove(Message[ClusterSums], label="al2sgd_plus move"):
    """Finish the iteration that needed averages, take local iterations, and reply with sums of ``theta`` or of a new anchor."""

    move: Move

    @property
    def cells(self) -> Anything:
        return self.move.cells

    def at(self, node: Node) -> ClusterSums:
        begin, move, before = node.state(KatyushaBegin), self.move, node.coefficients()
        points, pace = node.state(KatyushaPoints), begin.pace
        if move.anchor is not None:
            pull = node.gamma[:, None] * (points.x - node.data.hierarchy.down(move.anchor))
            points = replace(points, gradient=points.gradient + pull)
        clients, rows = ClientBlocks.of(node, begin.total), node.state(RowStreams).start
        blocks = clients.blocks
        if node.loss.compiled:
            y, z, sums = np.empty_like(before), np.empty_like(before), empty_digits(blocks, before.shape[1])
            share(
                kernels.al2sgd_plus_move, blocks.count, *clients.operands, rows, blocks.ptr, blocks.owner, node.gamma,
                clients.share, move.pull.strength, move.pull.force, move.exchanged, move.start, move.steps, begin.local,
                begin.batch, (pace.eta, pace.a1, pace.a2, pace.b1, pace.b2), move.wanted, points.x, points.gradient, before,
                points.z, y, z, sums,
            )  # fmt: skip
        else:
            y, z, sums = numpy_move(node, clients, begin, points, rows, move)
        node.theta = y
        if move.refresh:  # lines 26 to 29
            node.keep(KatyushaPoints(y, z, node.loss.gradient(node.data, y)))
            return node_sums(node, begin.total, y)
        node.keep(replace(points, z=z))
        return summed(blocks, sums)


def numpy_move(
    node: Node, clients: ClientBlocks, begin: KatyushaBegin, points: KatyushaPoints, streams: Ints, move: Move
) -> tuple[Floats, Floats, Ints]:
    """The move for a loss without compiled kernels; returns the new ``y`` and ``z``, and the digits of the sums."""
    loss, X, target, weights, offset, scale, ridge, client_ptr = clients.operands
    y, z, pace, blocks = node.coefficients().copy(), points.z.copy(), begin.pace, clients.blocks
    sums = empty_digits(blocks, y.shape[1])
    for block, j in enumerate(blocks.owner.tolist()):
        part = slice(*blocks.ptr[block : block + 2].tolist())
        rows, local = node.data.rows_per_client[part], begin.local[j]
        filled, x = rows > 0, points.x[part]
        for s in range(-1 if move.exchanged[j] else 0, move.steps[j]):
            theta, g = pace.theta(x, y[part], z[part]), points.gradient[part].copy()
            if s < 0:
                g += node.gamma[part, None] * (move.pull.strength[j] * (theta - x) - move.pull.force[j])
            else:
                g += local * ridge * (theta - x)
                for draw in uniforms(streams[part], (int(move.start[j]) + s) * begin.batch, begin.batch).T:
                    row = (client_ptr[part] + (draw * rows).astype(np.int64))[filled]
                    shift = offset[row] if len(offset) else 0.0
                    margins = (shift + np.einsum("ia,ia->i", X[row], at[filled]) for at in (theta, x))
                    here, there = (loss.slopes(margin, target[row]) for margin in margins)
                    size = (local * rows * scale[part] / begin.batch)[filled] * (weights[row] if len(weights) else 1.0)
                    g[filled] += (size * (here - there))[:, None] * X[row]
            y[part] = theta - pace.eta * g
            z[part] = pace.b1 * z[part] + (1.0 - pace.b1) * theta + pace.b2 / pace.eta * (y[part] - theta)
        if move.wanted[j]:
            accumulate_rows(sums[block], clients.share[part], pace.theta(x, y[part], z[part]))
    return y, z, sums


# The coordinator


def next_pull(top: Centres, shares: Shares, means: Floats, now: Round, anchor: Floats) -> Pull:
    """The step after the exchange of a round: between clusters (lines 7 to 9), or within some of them (lines 15 and 16)."""
    moved = means - anchor
    if now.between:
        force = shares.whole[:, None] * top.whole(moved) + shares.cluster[:, None] * moved
        return Pull(shares.whole + shares.cluster, force)
    strength = np.where(now.within > 0, shares.within, 0.0)
    return Pull(strength, strength[:, None] * moved)


# Theory


def minibatched(constants: Constants, batch: int) -> Constants:
    """The constants with the expected smoothness of a mean over ``batch`` rows in place of that of one row."""
    rows = constants.of_rows / batch + (1 - 1 / batch) * constants.of_clients
    return constants if batch == 1 else replace(constants, L_row=float(rows.max()), L_row_j=rows)


def recipe(constants: Constants, *, p0: Any = None, p: Any = None, tau: Any = None, rho: Any = None) -> Recipe:
    """Probabilities by Corollary 4.4 (async_al2sgd_plus_opt_conv_rate), largest step by Theorem 4.3 (al2sgd_conv_rate).

    By default ``rho`` is the probability of an exchange. This balances refreshes and exchanges up to a factor of 2.
    """
    chances = probabilities(constants, constants.of_rows, p0=p0, p=p, tau=tau)
    exchange = float(np.clip(chances.p0 + (1 - chances.p0) * chances.p.max(), 1e-4, 1.0))
    rho = exchange if rho is None else probability("rho", rho)
    if rho == 0:
        raise SolverError("With rho = 0 the anchor is never refreshed and the method does not converge; give rho > 0.")
    smoothness = expected_smoothness(constants, chances, constants.of_rows)
    top = max(constants.L_row + constants.gamma_max, smoothness)
    return Recipe(replace(chances, rho=rho), smoothness, 1 / (4 * top), "1 / (4 max(L_F, calL))")


def cost(setting: Setting) -> Cost:
    """The cost by Theorem 4.3 (al2sgd_conv_rate)."""
    best = recipe(setting.constants)
    pace = Katyusha.of(setting.constants, best.smoothness, best.probabilities.rho)
    needed = pace.iterations(setting.accuracy, setting.distance, setting.gap)
    schedule = Schedule(best.probabilities, 0)
    pace_e = -1 / math.log(pace.contraction)
    return setting.bounded("al2sgd_plus", needed, pace_e, schedule, "bound of its theorem", rows_per_step=2)


# The solver


@algorithm(
    place=5,
    first_order=True,
    shared=Control,
    reference=reference,
    cost=cost,
    refuses={"participation": "its anchor needs the full gradient of every cluster; use solver='l2gd'."},
)
def al2sgd_plus(
    network: Network,
    penalty: Penalty,
    *,
    eta: float | None = None,
    p0: float | None = None,
    p: PerCluster | None = None,
    tau: PerCluster | None = None,
    rho: float | None = None,
    batch: int = 1,
    mu: float | None = None,
    L_row: float | None = None,
    **options: Unpack[ControlOptions],
) -> Fit:
    """Minimise the objective by Async-AL2SGD+, Algorithm 2 (async_al2sgd_plus) of the paper.

    It is accelerated and reduces the variance of its steps. A local step reads ``batch`` rows of each client, a refresh of
    the anchor all rows. It converges to the minimiser at a linear rate.

    Parameters
    ----------
    network : Network
        The nodes that hold the clients' rows.
    penalty : Penalty
        ``gamma (n,)`` and ``lam (k,)``.
    eta : float, optional
        The step; by default the largest of Theorem 4.3 (al2sgd_conv_rate).
    p0, p, tau
        As for :func:`~covey.solvers.first_order.l2gd.l2gd`; by default those of Corollary 4.4
        (async_al2sgd_plus_opt_conv_rate).
    rho : float, optional
        Probability of a refresh of the anchor; by default the probability of an exchange.
    batch : int
        Rows that each client draws for a local step, with replacement. More rows allow a longer step.
    mu, L_row : float, optional
        Strong convexity of the objective and smoothness of the losses of single rows; by default measured on the data.
    **options
        Seed, tolerance, checkpoint and more: see :class:`~covey.solvers.first_order.loop.Control`.

    Returns
    -------
    Fit
        Models of all levels, with a history and a ledger of the exchanges.

    Examples
    --------
    >>> from covey import GroupedData, InMemory, Penalty
    >>> from covey.losses import Gaussian
    >>> data = GroupedData.from_arrays([[1.0], [1.0], [1.0]], [0.0, 3.0, 9.0], ["a", "b", "c"], ["x", "x", "y"])
    >>> penalty = Penalty.of(data.hierarchy)
    >>> fit = al2sgd_plus(InMemory.of(data, Gaussian(), penalty.gamma), penalty, tol=1e-12)
    >>> fit.convergence.converged, fit.theta.ravel().round(5).tolist()
    (True, [1.5, 3.0, 7.5])
    """
    quantities: tuple[Quantity, ...] = ("row",) if whole("batch", batch, least=1, below=_MOST_ROWS) == 1 else ("row", "client")
    control, constants = prepare("al2sgd_plus", network, penalty, options, clusters=quantities, mu=mu, L_row=L_row)
    constants = minibatched(constants, batch)
    best = recipe(constants, p0=p0, p=p, tau=tau, rho=rho)
    chances, top = best.probabilities, Centres.of(penalty)
    pace = Katyusha.of(constants, best.smoothness, chances.rho, best.step(eta))
    setup = Setup(
        "al2sgd_plus",
        constants,
        best,
        identity={"eta": pace.eta, "batch": batch, "steps": asdict(pace), "probabilities": asdict(chances)},
        begin=KatyushaBegin(chances.local, pace, top.total, int(control.seed), batch),
        move=KatyushaMove,
        next_pull=partial(next_pull, top, chances.shares(top.alpha)),
        merge=False,
        pace=-1 / math.log(pace.contraction),
        needed=lambda tol: pace.iterations(tol, gap=(constants.L_row + constants.gamma_max) / 2),
        advice="raise max_iter",
        rows_per_step=2 * batch,  # each row's gradient at two points
    )
    return run(network, penalty, setup, control)
