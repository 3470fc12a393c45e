"""ProxSkip of Mishchenko, Malinovsky, Stich and Richtarik (2022), arXiv:2202.09357, with the penalty of known clusters.

    each iteration, every client:   x_i = theta_i - eta_i (grad f_i(theta_i) - h_i)
    with probability p:             theta = prox of penalty / p at x_i - (eta_i / p) h_i      (an exchange)
                                    h_i += (p / eta_i) (theta_i - x_i)
    otherwise:                      theta = x

The penalty is that of arXiv:2204.13619, the minimum over ``w`` and ``wbar`` of ``sum_i gamma_i/2 |theta_i - w_j|^2 + sum_j
lam_j/2 |w_j - wbar|^2``. Its proximal step at ``z`` with ``s_i = eta_i / p`` has a closed form: ``w`` and ``wbar`` are the best
ones for the averages of ``z`` with the weights ``gamma_i / (1 + s_i gamma_i)``, and ``theta_i = (z_i + s_i gamma_i w_j) / (1 +
s_i gamma_i)``. So an exchange sends one vector up and one down for each cluster, also if ``gamma`` or ``eta`` differ.

Each client has its own step, ``eta_i = 1 / L_i`` for its own smoothness ``L_i``. This is ProxSkip with step 1 in the norm
``|theta|^2 = sum_i L_i |theta_i|^2``, in which the sum of the ``f_i`` is 1-smooth and the proximal step is the one above. So
its theorem holds: if every ``f_i`` is ``mu_i``-strongly convex, the potential ``sum_i |theta_i - theta_hat_i|^2 / eta_i + eta_i
/ p^2 |h_i - grad f_i(theta_hat_i)|^2`` shrinks on average by ``1 - min(q, p^2)`` in each iteration, with ``q = min_i eta_i
mu_i``. The best ``p`` is ``sqrt(q)``: iterations grow with ``1 / q``, exchanges only with its root. A client with few rows
often has ``mu_i = 0``, and then the theorem gives no rate. So the default ``p`` uses the strong convexity of the whole
objective in this norm, which is a heuristic. A loss without a bound on its curvature, and a given ``eta``, have the same step
for all clients.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Unpack

import numpy as np

from covey._typing import Anything, Floats
from covey.errors import SolverError, probability
from covey.exact import Exact, segment_sum
from covey.nodes.network import Message, Network, Node
from covey.objective.objective import Objective, Penalty
from covey.objective.theory import Constants, Probabilities, Recipe
from covey.records import Axes, Record, Reply
from covey.solvers.costs import Cost, Setting
from covey.solvers.first_order import kernels
from covey.solvers.first_order.curvature import FLOOR
from covey.solvers.first_order.l2gd import Eigenbasis
from covey.solvers.first_order.loop import Control, ControlOptions, Setup, prepare, run
from covey.solvers.first_order.protocol import Centres, ClusterSums, Move, Pull
from covey.solvers.first_order.schedule import Choices, Round, Schedule
from covey.solvers.registry import algorithm
from covey.solvers.result import Fit
from covey.threads import block_count, share
from covey.tree.hierarchy import Hierarchy


def reference(objective: Objective, chances: Probabilities, choices: Choices, eta: Floats | float, theta: Floats) -> Floats:
    """Run ProxSkip in plain numpy, with given random choices.

    Parameters
    ----------
    objective : Objective
        Data, loss and penalties.
    chances : Probabilities
        The probability ``p`` of an exchange is its ``p0``.
    choices : Choices
        The random choices of all iterations.
    eta : float or (n,) array
        The step of all clients, or of each client.
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
    tree, h, eta = objective.data.hierarchy, np.zeros_like(theta), np.broadcast_to(eta, len(theta))[:, None]
    gamma, s = objective.penalty.gamma[:, None], eta / chances.p0
    weights = softened(objective.penalty, tree, s[:, 0])
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


def softened(penalty: Penalty, tree: Hierarchy, s: Floats | float) -> Penalty:
    """The penalty with ``gamma_i / (1 + s_i gamma_i)`` for ``gamma_i``, whose best centres are those of the proximal step."""
    return Penalty.of(tree, penalty.gamma / (1 + s * penalty.gamma), penalty.lam)


# Messages, and what a node does with them


@dataclass(frozen=True)
class ProxSkipSteps(Record):
    """The clients' steps: ``common`` if it is above 0, else one over each client's smoothness, if that is above ``floor``.

    ``p`` is the probability of an exchange.
    """

    p: float
    common: float
    floor: float

    def of(self, node: Node) -> Floats:
        """The steps ``eta_i`` of a node's clients, ``(n,)``."""
        if self.common > 0:
            return np.full(node.data.n_clients, self.common)
        steps: Floats | None = node.cache.get(ProxSkipSteps)
        if steps is None:
            steps = node.cache[ProxSkipSteps] = 1 / np.maximum(node.loss.smoothness(node.data), self.floor)
        return steps


@dataclass(frozen=True)
class ClusterWeights(Reply):
    """Sums of ``gamma_i / (1 + s_i gamma_i)`` over a node's clients, for each cluster, ``(k,)``."""

    total: Annotated[Exact, Axes("k")]


@dataclass(frozen=True)
class AskWeights(Message[ClusterWeights], label="proxskip weights", phase="measure"):
    """Ask for the weights of the clusters in a proximal step."""

    steps: ProxSkipSteps

    def at(self, node: Node) -> ClusterWeights:
        node.cache.pop(ProxSkipSteps, None)
        soft = node.gamma / (1 + self.steps.of(node) / self.steps.p * node.gamma)
        return ClusterWeights(segment_sum(soft, node.data.hierarchy.cluster_ptr))


@dataclass(frozen=True)
class ProxSkipBegin(Message[None], label="proxskip begin", reply=False):
    """Begin at the clients' coefficients with ``h = 0``; ``total (k,)`` are the sums of :class:`ClusterWeights`."""

    steps: ProxSkipSteps
    total: Annotated[Floats, Axes("k")]

    def at(self, node: Node) -> None:
        node.theta = node.coefficients()
        node.cache.pop(Eigenbasis, None)
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
        parent, eta = node.data.hierarchy.parent, begin.steps.of(node)[:, None]
        s, weight = eta / begin.steps.p, eta / begin.steps.p * node.gamma[:, None]
        if move.exchanged.any():
            ahead = (theta - s * h + weight * move.pull.force[parent]) / (1 + weight)
            theta, h = ahead, h + (ahead - theta) / s
        node.theta = theta = gradient_steps(node, theta, h, eta, int(move.steps.max()) + bool(move.wanted.any()))
        node.keep(ControlVariates(h))
        part = node.gamma[:, None] / (1 + weight) / begin.total[parent][:, None]
        return ClusterSums(segment_sum(part * (theta - s * h), node.data.hierarchy.cluster_ptr))


def gradient_steps(node: Node, theta: Floats, h: Floats, eta: Floats, steps: int) -> Floats:
    """``steps`` steps of every client from ``theta``; in closed form in its eigenbasis, if its loss is quadratic."""
    if node.loss.compiled:
        theta, blocks = theta.copy(), block_count(len(theta))
        if node.loss.quadratic:
            share(kernels.quadratic_steps, blocks, *Eigenbasis.of(node), eta[:, 0], steps, h, theta)
        else:
            share(kernels.controlled_steps, blocks, *node.loss.operands(node.data), eta, steps, h, theta)
        return theta
    for _ in range(steps):
        theta = theta - eta * (node.loss.gradient(node.data, theta) - h)
    return theta


# The coordinator


def next_pull(top: Centres, means: Floats, now: Round, anchor: Floats) -> Pull:
    """The centres of the proximal step, for the averages of an exchange."""
    return Pull(np.ones(len(means)), top.centres(means)[0])


# Theory


def recipe(constants: Constants, p: float | None = None, eta: float | None = None) -> Recipe:
    """``p`` unless given is ``sqrt(q)``; the largest common step is ``1 / L``, for which ``q = mu / L``."""
    q = constants.mu * (eta or 1 / constants.L) if eta is not None or constants.q == 0 else constants.q
    chance = min(1.0, math.sqrt(q)) if p is None else probability("p", p)
    if chance == 0:
        raise SolverError("With p = 0 clients never exchange; give 0 < p <= 1.")
    chances = Probabilities(chance, np.zeros_like(constants.gamma), np.ones_like(constants.gamma))
    return Recipe(chances, constants.L, 1 / constants.L, "1 / L")


def contraction(q: float, p: float) -> float:
    """The factor by which the potential shrinks on average in an iteration, at most, by the theorem; ``q = min eta_i mu_i``."""
    return 1 - min(q, p * p)


def cost(setting: Setting) -> Cost:
    """The iterations after which the bound of the theorem implies the accuracy of the distance."""
    objective, known = setting.objective, setting.constants
    data, loss, best = objective.data, objective.loss, setting.best.theta
    L = np.maximum(loss.smoothness(data), FLOOR * known.L) if known.q > 0 else np.full(data.n_clients, known.L)
    q = float((np.linalg.eigvalsh(loss.hessian(data, best))[:, 0] / L).min())
    if not q > 1e-12:
        raise SolverError("Its theorem needs the loss of every client to be strongly convex. The solver still runs.")
    found = recipe(known)
    p = found.probabilities.p0
    potential = (L[:, None] * best**2 + loss.gradient(data, best) ** 2 / (L[:, None] * p * p)).sum()
    pace = -1 / math.log(contraction(q, p))
    ratio = potential / (L.min() * setting.accuracy * setting.distance)
    T = max(1, math.ceil(pace * math.log(max(ratio, 1.0))))
    return setting.bounded("proxskip", T, pace, Schedule(found.probabilities, 0), "bound of its theorem")


# The solver


_WHOLE = (
    "its proximal step needs every client, and no theorem that we know covers partial participation with this penalty; use "
    "solver='l2gd'."
)


@algorithm(place=7, first_order=True, shared=Control, reference=reference, cost=cost, refuses={"participation": _WHOLE})
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
        The same step for all clients, at most ``1 / L``. By default each client has the step ``1 / L_i`` for its own
        smoothness; if the loss has no bound on its curvature, or if ``L`` is given, all have ``1 / L``.
    p : float, optional
        Probability of an exchange. With one step ``eta`` for all clients the default is ``sqrt(mu * eta)``. If each has its
        own, it is ``sqrt(q)``: ``q`` is the strong convexity of the whole objective, losses and penalty, in the norm
        ``|theta|^2 = sum_i L_i |theta_i|^2``.
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
    own = eta is None and L is None and network.loss.bounded
    control, constants = prepare("proxskip", network, penalty, options, relative=own, mu=mu, L=L)
    found = recipe(constants, p, eta)
    chance, step = found.probabilities.p0, found.step(eta)
    steps = ProxSkipSteps(chance, 0.0 if constants.q > 0 else step, FLOOR * constants.L)
    q = constants.q or step * constants.mu
    total = network.ask(AskWeights(steps)).total.floats()
    top = Centres.of(replace(penalty, cluster_gamma=total))
    pace = 1 / min(q, chance**2)
    setup = Setup(
        "proxskip",
        constants,
        found,
        identity={"eta": steps.common, "floor": steps.floor, "p": chance},
        begin=ProxSkipBegin(steps, top.total),
        move=ProxSkipMove,
        next_pull=partial(next_pull, top),
        merge=False,
        pace=pace,
        needed=lambda tol: math.ceil(pace * math.log(1 / tol)),
        advice="raise max_iter, or use solver='apgd'",
    )
    return run(network, penalty, setup, control)
