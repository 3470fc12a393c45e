"""Async-L2GD, Algorithm 1 of the paper (arXiv:2204.13619).

    each iteration: xi_0 = 1 with probability p0, then every client does
        theta_i -= eta gamma_i / p0 ( alpha_j (theta_i - tbar) + tau_j (1 - alpha_j)(theta_i - tbar_j) )
    else each cluster on its own: xi_j = 1 with probability p_j, then
        theta_i -= eta gamma_i (1 - tau_j)(1 - alpha_j) / ((1 - p0) p_j) (theta_i - tbar_j)
    else
        theta_i -= eta / ((1 - p0)(1 - p_j)) grad f_i(theta_i)

:func:`reference` is that, written out. :func:`l2gd` does the same over a network: the local steps between two exchanges are one
run, done for each client in one go; for a quadratic loss in closed form, in the eigenbasis of its Hessian, where s steps
shrink the distance to its own minimiser by the product of ``1 - step * eigenvalue``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, Unpack

import numpy as np

from covey._typing import Anything, Floats, Ints
from covey.errors import one_of
from covey.losses import Loss
from covey.nodes.network import Blocks, Message, Network, Node
from covey.objective.objective import Penalty
from covey.objective.theory import (
    Constants,
    Probabilities,
    Recipe,
    Shares,
    expected_smoothness,
    iterations,
    mixing,
    noise,
    probabilities,
    switch,
    switching_iterations,
    switching_steps,
)
from covey.records import Count, Record
from covey.solvers.costs import Cost, Setting
from covey.solvers.first_order import kernels, plain
from covey.solvers.first_order.curvature import constants
from covey.solvers.first_order.loop import Control, Setup, Watch, run
from covey.solvers.first_order.protocol import Centres, ClusterSums, Move, Pull, empty_digits, shares, summed
from covey.solvers.first_order.schedule import Flips, Round, Schedule
from covey.solvers.registry import algorithm
from covey.solvers.result import Fit
from covey.tables.rows import GroupedData
from covey.tree.hierarchy import Hierarchy


def reference(
    data: GroupedData,
    loss: Loss,
    penalty: Penalty,
    chances: Probabilities,
    flips: Flips,
    eta: Callable[[int], float],
    theta: Floats,
) -> Floats:
    """Algorithm 1 with given random choices ``flips`` and a step ``eta(t)``, from ``theta (n, d)``."""
    gamma, alpha, parent = penalty.gamma, mixing(penalty), data.hierarchy.parent
    p0, p, tau = chances.p0, chances.p, chances.tau
    own, weight = [data.clients(i, i + 1) for i in range(data.n_clients)], alpha[parent] * gamma
    for t in range(len(flips.between)):  # line 2
        before, theta = theta, theta.copy()
        tbar_j = [np.average(before[parent == j], axis=0, weights=gamma[parent == j]) for j in range(len(p))]  # lines 5, 12
        if flips.between[t]:  # line 4: xi_0 = 1
            tbar = weight @ before / (weight.sum() or 1.0)  # line 6
            for i, j in enumerate(parent):  # line 7: a step towards both averages
                both = alpha[j] * (before[i] - tbar) + tau[j] * (1 - alpha[j]) * (before[i] - tbar_j[j])
                theta[i] = before[i] - eta(t) * gamma[i] / p0 * both
            continue
        for i, j in enumerate(parent):  # line 9
            if flips.within[t, j]:  # line 11: xi_j = 1
                share = (1 - tau[j]) * (1 - alpha[j]) / ((1 - p0) * p[j])
                theta[i] = before[i] - eta(t) * gamma[i] * share * (before[i] - tbar_j[j])  # line 13
            else:
                gradient = loss.gradient(own[i], before[i : i + 1])[0]
                theta[i] = before[i] - eta(t) / ((1 - p0) * (1 - p[j])) * gradient  # line 15
    return theta


# Theory


def recipe(known: Constants, *, p0: Any = None, p: Any = None, tau: Any = None) -> Recipe:
    """Probabilities and the largest step, by thm. conv_rate and cor. opt_conv_rate of the paper."""
    chances = probabilities(known, known.L, p0=p0, p=p, tau=tau)
    smoothness = expected_smoothness(known, chances, known.L)
    return Recipe(chances, smoothness, 1 / (2 * smoothness), "1 / (2 calL)")


def cost(setting: Setting) -> Cost:
    """What the theorem says for the plan."""
    return descent_cost("l2gd", recipe(setting.known), setting)


def descent_cost(name: str, recipe: Recipe, setting: Setting) -> Cost:
    """The smaller of the bounds with constant and with switching steps."""
    objective, known, best = setting.objective, setting.known, setting.best
    sigma2 = noise(objective, best.theta, recipe.probabilities)
    rate = {"smoothness": recipe.smoothness, "mu": known.mu, "sigma2": sigma2, "start": setting.distance}
    constant, eta = iterations(setting.accuracy, **rate)
    switching = switching_iterations(setting.accuracy, **rate)
    how = "steps='switching'" if switching < constant else f"eta={eta:.2g}"
    pace = 1 / (known.mu * (recipe.largest_step if switching < constant else eta))
    merge = equal_within(objective.data.hierarchy, objective.penalty)[0]
    schedule = Schedule(recipe.probabilities, 0, merge)
    return setting.bounded(name, min(constant, switching), pace, schedule, f"bound of its theorem, {how}")


Steps = Literal["constant", "switching"]
STEPS = ("constant", "switching")

_LARGEST_BASIS = 50_000_000  # numbers in the eigenbases of all clients


@dataclass(frozen=True)
class StepSizes(Record):
    """The step at each iteration: ``eta``, or with ``mu > 0`` switching to ``(2t + 1) / ((t + 1)^2 mu)`` after ``last``."""

    eta: float
    mu: float = 0.0

    @property
    def last(self) -> int:
        return switch(1 / (2 * self.eta), self.mu) if self.mu > 0 else 0

    def at(self, t: Any) -> Any:
        return self.eta if self.mu == 0 else switching_steps(t, 1 / (2 * self.eta), self.mu)


# What travels


@dataclass(frozen=True)
class L2gdBegin(Message[None], label="l2gd begin", reply=False):
    """Begin where the clients are.

    ``local (k,)`` is what a local step is multiplied by, ``rate`` the steps, ``total (k,)`` each cluster's sum of ``gamma``.
    With ``closed``, local runs are done in closed form.
    """

    local: Floats
    rate: StepSizes
    total: Floats
    closed: bool

    def at(self, node: Node) -> None:
        node.theta = node.coefficients()
        node.keep(self)
        node.cache.pop(L2gdClients, None)


@dataclass(frozen=True)
class L2gdMove(Message[ClusterSums], label="l2gd move"):
    """A move of all clients."""

    move: Move

    @property
    def cells(self) -> Anything:
        return self.move.cells

    def at(self, node: Node) -> ClusterSums:
        clients = node.cache.get(L2gdClients)
        if clients is None:
            clients = node.cache[L2gdClients] = L2gdClients.of(node, node.state(L2gdBegin))
        node.theta, sums = node_move(clients, node.coefficients(), self.move)
        return sums


@dataclass(frozen=True)
class CountBasis(Message[Count], label="size of eigenbases", phase="measure"):
    """How many numbers the eigenbases of the clients have."""

    def at(self, node: Node) -> Count:
        return Count(int(_ranks(node.data, node.loss).sum()) * node.data.n_terms)


# The node


class Eigenbasis(NamedTuple):
    """Each client's quadratic loss in its eigenbasis, one after the other.

    Client ``i`` has ``ptr[i]:ptr[i + 1]`` of ``vectors (r, d)``, ``curvature (r,)`` and ``minimiser (r,)``.
    """

    ptr: Ints
    vectors: Floats
    curvature: Floats
    minimiser: Floats


@dataclass(frozen=True)
class L2gdClients:
    """What a node holds for the whole run."""

    operands: tuple[Any, ...]
    closed: bool
    basis: Eigenbasis
    blocks: Blocks
    gamma: Floats
    share: Floats
    local: Floats
    rate: StepSizes

    @classmethod
    def of(cls, node: Node, begin: L2gdBegin) -> L2gdClients:
        data, share = node.data, shares(node, begin.total)
        basis = _basis(data, node.loss) if begin.closed else _NO_BASIS
        blocks, operands = Blocks.of(data.hierarchy.cluster_ptr), node.loss.operands(data)
        return cls(operands, begin.closed, basis, blocks, node.gamma, share, begin.local, begin.rate)


_NO_BASIS = Eigenbasis(np.zeros(1, dtype=np.int64), np.empty((0, 0)), np.empty(0), np.empty(0))


def node_move(clients: L2gdClients, theta: Floats, move: Move) -> tuple[Floats, ClusterSums]:
    """Pull, then local steps: where the clients are, and the sums of the clusters that are wanted."""
    rate, blocks = clients.rate, clients.blocks
    out, sums = np.empty_like(theta), empty_digits(blocks, theta.shape[1])
    move_clients: Any = plain.l2gd_move if isinstance(clients.operands[0], Loss) else kernels.l2gd_move
    move_clients(
        *clients.operands, clients.closed, *clients.basis, blocks.ptr, blocks.owner, clients.gamma, clients.share,
        move.pull.strength, move.pull.force, move.start, move.steps, clients.local, rate.eta, rate.mu, rate.last, move.wanted,
        theta, out, sums,
    )  # fmt: skip
    return out, summed(blocks, sums)


def _ranks(data: GroupedData, loss: Loss) -> Ints:
    """The directions in which each client's loss is curved, at most."""
    return np.full(data.n_clients, data.n_terms) if loss.ridge else np.minimum(data.rows_per_client, data.n_terms)


def _basis(data: GroupedData, loss: Loss) -> Eigenbasis:
    n, d = data.n_clients, data.n_terms
    ptr = np.concatenate([[0], np.cumsum(_ranks(data, loss))])
    here = loss.expand(data, np.zeros((n, d)))
    values, vectors = np.linalg.eigh(here.hessian)
    basis = Eigenbasis(ptr, np.empty((ptr[-1], d)), np.empty(ptr[-1]), np.empty(ptr[-1]))
    kernels.project(values, vectors, here.gradient, *basis)
    return basis


# The coordinator


@dataclass(frozen=True)
class L2gdGuide:
    """Averages of the clients become steps towards them; ``gamma (k,)`` is that of each cluster's clients, if it is one."""

    top: Centres
    probabilities: Probabilities
    rate: StepSizes
    gamma: Floats

    @cached_property
    def _shares(self) -> Shares:
        return self.probabilities.shares(self.top.alpha)

    def answer(self, means: Floats, turn: Round, anchor: Floats) -> Pull:
        """All steps towards averages that follow a round's exchange, as one pull: those between clusters, then within each."""
        pull, t, gamma = Pull.none(*means.shape), turn.start + turn.steps, self.gamma
        for i in range(turn.between):
            strength, force = self._towards_both(means, t + i)
            pull = pull.then(strength, force, gamma)
            means = means - gamma[:, None] * (strength[:, None] * means - force)
        for i in range(int(turn.within.max())):
            strength = np.where(turn.within > i, self._towards_cluster(t + turn.between + i), 0.0)
            pull = pull.then(strength, strength[:, None] * means, gamma)
        return pull

    def _towards_both(self, means: Floats, t: Ints) -> tuple[Floats, Floats]:
        """Line 7, the step towards both averages: ``eta/p0 (alpha_j (theta - tbar) + tau_j (1 - alpha_j)(theta - tbar_j))``."""
        eta, whole, cluster = self.rate.at(t), self._shares.whole, self._shares.cluster
        return eta * (whole + cluster), (eta * whole)[:, None] * self.top.whole(means) + (eta * cluster)[:, None] * means

    def _towards_cluster(self, t: Ints) -> Floats:
        """Line 13, the step towards the cluster's average: ``eta (1 - tau_j)(1 - alpha_j) / ((1 - p0) p_j)``."""
        strength: Floats = self.rate.at(t) * self._shares.within
        return strength


# The solver


@algorithm(
    place=3, first_order=True, shared=Control, reference=reference, cost=cost, variants={"switching": {"steps": "switching"}}
)
def l2gd(
    network: Network,
    penalty: Penalty,
    *,
    steps: Steps = "constant",
    eta: float | None = None,
    p0: float | None = None,
    p: Any = None,
    tau: Any = None,
    mu: float | None = None,
    L: float | None = None,
    **watch: Unpack[Watch],
) -> Fit:
    """Async-L2GD: to a neighbourhood of the minimiser with a constant step, to the minimiser itself with switching steps.

    Parameters
    ----------
    steps : "constant", or "switching" to ever smaller steps once the constant one has done its work
    eta, p0, p, tau : step, probabilities of an exchange between clusters and within each, share of the pull to the cluster that
        the former takes; by default the best by theory
    mu, L : strong convexity and smoothness, in place of those found in the data
    **watch : seed, tol, max_iter, checkpoint and more: see :class:`~covey.solvers.first_order.loop.Control`

    >>> from covey import GroupedData, InMemory, Penalty
    >>> from covey.losses import Gaussian
    >>> data = GroupedData.from_arrays([[1.0], [1.0], [1.0]], [0.0, 3.0, 9.0], ["a", "b", "c"], ["x", "x", "y"])
    >>> penalty = Penalty.of(data.hierarchy)
    >>> fit = l2gd(InMemory.of(data, Gaussian(), penalty.gamma), penalty, steps="switching", tol=1e-3, seed=1)
    >>> fit.convergence.converged, fit.history["objective"].round(2)[-1]
    (True, 6.75)
    """
    control = Control.begin("l2gd", watch, network)
    known = constants(network, penalty, mu=mu, L=L)
    known.need_curvature()
    setup = descent("l2gd", network, penalty, known, recipe(known, p0=p0, p=p, tau=tau), eta, steps)
    return run(network, penalty, setup, control)


def descent(
    name: str, network: Network, penalty: Penalty, known: Constants, recipe: Recipe, eta: float | None, steps: Steps
) -> Setup:
    """Algorithm 1 with any probabilities, for the loop; its one-coin variant is one such."""
    if steps not in STEPS:
        raise one_of("steps", steps, STEPS)
    switching = steps == "switching"
    rate = StepSizes(recipe.step(eta), known.mu if switching else 0.0)
    smoothness = 1 / (2 * rate.eta)

    def needed(tol: float) -> int:
        return math.ceil(rate.last / tol) if switching else iterations(tol, smoothness=smoothness, mu=known.mu)[0]

    stalls = "raise max_iter; a constant step ends in its noise, which steps='switching' and solver='al2sgd_plus' overcome"
    slow = "steps that shrink like 1/t are slow at the end: raise max_iter, or use solver='al2sgd_plus'"
    equal, gamma = equal_within(network.tree, penalty)
    top, chances = Centres.of(penalty), recipe.probabilities
    closed = network.loss.quadratic and network.loss.compiled and network.ask(CountBasis()).number <= _LARGEST_BASIS
    return Setup(
        name,
        known,
        recipe,
        identity={"eta": rate.eta, "steps": [steps, rate.mu], "probabilities": asdict(chances)},
        begin=L2gdBegin(chances.local, rate, top.total, closed),
        move=L2gdMove,
        guide=L2gdGuide(top, chances, rate, gamma),
        merge=equal,
        pace=1 / (rate.eta * known.mu),
        needed=needed,
        advice=slow if switching else stalls,
    )


def equal_within(tree: Hierarchy, penalty: Penalty) -> tuple[bool, Floats]:
    """Whether ``gamma`` is equal within each cluster, and its (first) value there; 1 where a cluster is empty."""
    ptr = tree.cluster_ptr
    filled = np.diff(ptr) > 0
    gamma = np.ones(tree.n_clusters)
    gamma[filled] = penalty.gamma[ptr[:-1][filled]]
    return bool((penalty.gamma == gamma[tree.parent]).all()), gamma
