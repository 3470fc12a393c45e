"""ProxSkip of Mishchenko, Malinovsky, Stich and Richtarik (2022), arXiv:2202.09357, with the penalty of known clusters.

    each iteration, every client:   x_i = theta_i - eta (grad f_i(theta_i) - h_i)
    with probability p:             theta = prox of (eta / p) penalty at x - (eta / p) h      (an exchange)
                                    h += (p / eta) (theta - x)
    otherwise:                      theta = x

The penalty is that of arXiv:2204.13619, the minimum over ``w`` and ``wbar`` of ``sum_i gamma_i/2 |theta_i - w_j|^2 + sum_j
lam_j/2 |w_j - wbar|^2``. Its proximal step at ``z`` with ``s = eta / p`` has a closed form: ``w`` and ``wbar`` are the best
ones for the averages of ``z`` with the weights ``gamma_i / (1 + s gamma_i)``, and ``theta_i = (z_i + s gamma_i w_j) / (1 + s
gamma_i)``. So an exchange sends one vector up and one down for each cluster, also if ``gamma`` differs between clients.

The theorem of ProxSkip: if every ``f_i`` is ``mu``-strongly convex and ``L``-smooth, and ``eta <= 1/L``, the potential
``|theta - theta_hat|^2 + (eta / p)^2 |h - grad f(theta_hat)|^2`` shrinks on average by ``1 - min(eta mu, p^2)`` in each
iteration. The best ``p`` is ``sqrt(mu / L)``: iterations grow with ``L / mu``, exchanges only with its root. Here ``p`` uses
the strong convexity of the whole objective, which is at least ``mu``: a client with few rows often has ``mu = 0``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Unpack

import numpy as np

from covey._typing import Anything, Floats
from covey.errors import SolverError, probability
from covey.exact import segment_sum
from covey.nodes.network import Message, Network, Node
from covey.objective.objective import Objective, Penalty
from covey.objective.theory import Constants, Probabilities, Recipe
from covey.records import Axes, Record
from covey.solvers.costs import Cost, Setting
from covey.solvers.first_order.loop import Control, ControlOptions, Setup, prepare, run
from covey.solvers.first_order.protocol import Centres, ClusterSums, Move, Pull
from covey.solvers.first_order.schedule import Choices, Round, Schedule
from covey.solvers.registry import algorithm
from covey.solvers.result import Fit
from covey.tree.hierarchy import Hierarchy


def reference(objective: Objective, chances: Probabilities, choices: Choices, eta: float, theta: Floats) -> Floats:
    """Run ProxSkip in plain numpy, with given random choices.

    Parameters
    ----------
    objective : Objective
        Data, loss and penalties.
    chances : Probabilities
        The probability ``p`` of an exchange is its ``p0``.
    choices : Choices
        The random choices of all iterations.
    eta : float
        The step.
    theta : (n, d) array
        The coefficients to begin at.

    Returns
    -------
    (n, d) array
        The last iterate.

    Examples
    --------
    >>> from covey import GroupedData, Objective, Penalty
    >>> from covey.losses import Gaussian
    >>> data = GroupedData.from_arrays([[1.0], [1.0], [1.0]], [0.0, 3.0, 9.0], ["a", "b", "c"], ["x", "x", "y"])
    >>> objective = Objective(data, Gaussian(), Penalty.of(data.hierarchy))
    >>> chances = Probabilities(0.5, np.zeros(2), np.ones(2))
    >>> choices = Schedule(chances, seed=0).choices(0, 100)
    >>> reference(objective, chances, choices, 0.5, np.zeros((3, 1))).ravel().round(3).tolist()
    [1.5, 3.0, 7.5]
    """
    tree, s, h = objective.data.hierarchy, eta / chances.p0, np.zeros_like(theta)
    gamma = objective.penalty.gamma[:, None]
    weights = softened(objective.penalty, tree, s)
    top = Centres.of(weights)
    for t in range(len(choices.between)):
        x = theta - eta * (objective.loss.gradient(objective.data, theta) - h)
        theta = x
        if choices.between[t]:
            z = x - s * h
            averages = tree.sum_up(weights.gamma[:, None] * z) / top.total[:, None]
            theta = (z + s * gamma * tree.down(top.centres(averages)[0])) / (1 + s * gamma)
            h = h + (theta - x) / s
    return theta


def softened(penalty: Penalty, tree: Hierarchy, s: float) -> Penalty:
    """The penalty with ``gamma_i / (1 + s gamma_i)`` for ``gamma_i``, whose best centres are those of the proximal step."""
    return Penalty.of(tree, penalty.gamma / (1 + s * penalty.gamma), penalty.lam)


# Messages, and what a node does with them


@dataclass(frozen=True)
class ProxSkipBegin(Message[None], label="proxskip begin", reply=False):
    """Begin at the clients' coefficients with ``h = 0``; ``total (k,)`` are sums of ``gamma_i / (1 + s gamma_i)``."""

    eta: float
    s: float
    total: Annotated[Floats, Axes("k")]

    def at(self, node: Node) -> None:
        node.theta = node.coefficients()
        node.keep(self)
        node.keep(ControlVariates(np.zeros_like(node.theta)))


@dataclass(frozen=True)
class ControlVariates(Record):
    """``h (n, d)``, which converges to the clients' gradients at the minimiser."""

    h: Floats


@dataclass(frozen=True)
class ProxSkipMove(Message[ClusterSums], label="proxskip move"):
    """The proximal step with the centres of the last exchange, then gradient steps, one more if an exchange follows."""

    move: Move

    @property
    def cells(self) -> Anything:
        return self.move.cells

    def at(self, node: Node) -> ClusterSums:
        begin, move, theta, h = node.state(ProxSkipBegin), self.move, node.coefficients(), node.state(ControlVariates).h
        parent, eta, s = node.data.hierarchy.parent, begin.eta, begin.s
        weight = s * node.gamma[:, None]
        if move.exchanged.any():
            ahead = (theta - s * h + weight * move.pull.force[parent]) / (1 + weight)
            theta, h = ahead, h + (ahead - theta) / s
        for _ in range(int(move.steps.max()) + bool(move.wanted.any())):
            theta = theta - eta * (node.loss.gradient(node.data, theta) - h)
        node.theta = theta
        node.keep(ControlVariates(h))
        share = node.gamma / (1 + s * node.gamma) / begin.total[parent]
        return ClusterSums(segment_sum(share[:, None] * (theta - s * h), node.data.hierarchy.cluster_ptr))


# The coordinator


def next_pull(top: Centres, means: Floats, now: Round, anchor: Floats) -> Pull:
    """The centres of the proximal step, for the averages of an exchange."""
    return Pull(np.ones(len(means)), top.centres(means)[0])


# Theory


def recipe(constants: Constants, p: float | None = None) -> Recipe:
    """``p = sqrt(mu / L)`` unless given, and the largest step ``1 / L``."""
    chance = min(1.0, math.sqrt(constants.mu / constants.L)) if p is None else probability("p", p)
    if chance == 0:
        raise SolverError("With p = 0 clients never exchange; give 0 < p <= 1.")
    chances = Probabilities(chance, np.zeros_like(constants.gamma), np.ones_like(constants.gamma))
    return Recipe(chances, constants.L, 1 / constants.L, "1 / L")


def contraction(eta: float, mu: float, p: float) -> float:
    """The factor by which the potential shrinks on average in an iteration, at most, by the theorem."""
    return 1 - min(eta * mu, p * p)


def cost(setting: Setting) -> Cost:
    """The iterations after which the bound of the theorem implies the accuracy of the distance."""
    data, loss, best = setting.objective.data, setting.objective.loss, setting.best.theta
    mu = float(np.linalg.eigvalsh(loss.hessian(data, best))[:, 0].min())
    if not mu > 1e-12 * setting.constants.L:
        raise SolverError(
            "The theorem of ProxSkip needs strongly convex losses, but the loss of some client is flat somewhere."
        )
    found = recipe(setting.constants)
    eta, p = found.largest_step, found.probabilities.p0
    potential = setting.distance + (eta / p) ** 2 * float((loss.gradient(data, best) ** 2).sum())
    pace = -1 / math.log(contraction(eta, mu, p))
    T = max(1, math.ceil(pace * math.log(potential / (setting.accuracy * setting.distance))))
    return setting.bounded("proxskip", T, pace, Schedule(found.probabilities, 0), "bound of its theorem")


# The solver


@algorithm(place=7, first_order=True, shared=Control, reference=reference, cost=cost)
def proxskip(
    network: Network,
    penalty: Penalty,
    *,
    eta: float | None = None,
    p: float | None = None,
    mu: float | None = None,
    L: float | None = None,
    **options: Unpack[ControlOptions],
) -> Fit:
    """Minimise the objective by ProxSkip: gradient steps at the clients, and an exchange with probability ``p``.

    Parameters
    ----------
    network : Network
        The nodes that hold the clients' rows.
    penalty : Penalty
        ``gamma (n,)`` and ``lam (k,)``.
    eta : float, optional
        The step; by default ``1 / L``, the largest with proved convergence.
    p : float, optional
        Probability of an exchange; by default ``sqrt(mu / L)``.
    mu, L : float, optional
        Strong convexity of the objective and smoothness of the clients' losses; measured by default.
    **options
        The attributes of :class:`~covey.solvers.first_order.loop.Control`.

    Returns
    -------
    Fit
        Models of all levels, with a history of checks and a ledger.

    Examples
    --------
    >>> from covey import GroupedData, InMemory, Penalty
    >>> from covey.losses import Gaussian
    >>> data = GroupedData.from_arrays([[1.0], [1.0], [1.0]], [0.0, 3.0, 9.0], ["a", "b", "c"], ["x", "x", "y"])
    >>> penalty = Penalty.of(data.hierarchy)
    >>> fit = proxskip(InMemory.of(data, Gaussian(), penalty.gamma), penalty, p=0.5, seed=1)
    >>> fit.convergence.converged, fit.theta.ravel().round(3).tolist()
    (True, [1.5, 3.0, 7.5])
    """
    control, constants = prepare("proxskip", network, penalty, options, mu=mu, L=L)
    found = recipe(constants, p)
    step, chance = found.step(eta), found.probabilities.p0
    top = Centres.of(softened(penalty, network.tree, step / chance))
    pace = 1 / min(step * constants.mu, chance**2)
    setup = Setup(
        "proxskip",
        constants,
        found,
        identity={"eta": step, "p": chance},
        begin=ProxSkipBegin(step, step / chance, top.total),
        move=ProxSkipMove,
        next_pull=partial(next_pull, top),
        merge=False,
        pace=pace,
        needed=lambda tol: math.ceil(pace * math.log(1 / tol)),
        advice="raise max_iter, or use solver='apgd'",
    )
    return run(network, penalty, setup, control)
