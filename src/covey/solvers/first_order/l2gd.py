"""Async-L2GD, Algorithm 1 (async_l2gd) of Lyu, Hanzely and Kolar (2022), arXiv:2204.13619.

    each iteration: xi_0 = 1 with probability p0, then every client does
        theta_i -= eta gamma_i / p0 ( alpha_j (theta_i - tbar) + tau_j (1 - alpha_j)(theta_i - tbar_j) )
    else each cluster on its own: xi_j = 1 with probability p_j, then
        theta_i -= eta gamma_i (1 - tau_j)(1 - alpha_j) / ((1 - p0) p_j) (theta_i - tbar_j)
    else
        theta_i -= eta / ((1 - p0)(1 - p_j)) grad f_i(theta_i)

:func:`reference` is this algorithm in plain numpy. :func:`l2gd` runs it over a network. It takes all local steps between two
exchanges in one call of a kernel. For a quadratic loss the kernel has a closed form in the eigenbasis of each client's Hessian:
along an eigenvector, each step multiplies the difference from the client's own minimiser by ``1 - step * eigenvalue``.

With partial participation each cluster takes part in an exchange between clusters with a probability of its own. Clusters
that take part use the averages of all clusters that take part, weighted so that the step is unbiased. The others do nothing in
that iteration.

Rate and largest step are those of Theorem 3.5 (conv_rate), the probabilities those of Corollary 3.6 (opt_conv_rate).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple, Unpack

import numpy as np

from covey._typing import Anything, Floats, Ints
from covey.errors import SolverError, one_of
from covey.kernels import accumulate_rows
from covey.nodes.network import Message, Network, Node
from covey.objective import theory
from covey.objective.objective import Objective, Penalty
from covey.objective.theory import Constants, Probabilities, Recipe, Shares, mixing
from covey.records import Axes, Count, Record
from covey.solvers.costs import Cost, Setting
from covey.solvers.first_order import kernels
from covey.solvers.first_order.loop import Control, ControlOptions, Setup, prepare, run
from covey.solvers.first_order.protocol import Centres, ClientBlocks, ClusterSums, Move, Pull, empty_digits, summed
from covey.solvers.first_order.schedule import Choices, PerCluster, Round, Schedule
from covey.solvers.registry import algorithm
from covey.solvers.result import Fit
from covey.threads import share
from covey.tree.hierarchy import Hierarchy


def reference(
    objective: Objective, chances: Probabilities, choices: Choices, eta: Callable[[int], float], theta: Floats
) -> Floats:
    """Run Algorithm 1 (async_l2gd) in plain numpy, with given random choices.

    Parameters
    ----------
    objective : Objective
        Data, loss and penalties.
    chances : Probabilities
        Probabilities ``p0`` and ``p (k,)`` of exchanges, and the shares ``tau (k,)``.
    choices : Choices
        The random choices of all iterations.
    eta : callable
        The step ``eta(t)`` of iteration ``t``.
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
    >>> chances = Probabilities(0.4, np.array([0.2, 0.2]), np.array([0.5, 0.5]))
    >>> choices = Schedule(chances, seed=0).choices(0, 5000)
    >>> reference(objective, chances, choices, lambda t: 1 / (t + 10), np.zeros((3, 1))).ravel().round(1).tolist()
    [1.5, 3.0, 7.5]
    """
    gamma, alpha, omega = objective.penalty.gamma, mixing(objective.penalty), theory.alpha_weights(objective.penalty)
    p0, p, tau = chances.p0, chances.p, chances.tau
    q = np.ones(len(p)) if chances.present is None else chances.present
    for t in range(len(choices.between)):  # line 2
        tbar_j = objective.means(theta)[0]  # lines 5, 6 and 12
        gradient, step = objective.loss.gradient(objective.data, theta), np.zeros_like(theta)
        present = np.ones(len(p), dtype=bool) if choices.present is None else choices.present[t]
        for i, j in enumerate(objective.data.hierarchy.parent):
            if choices.between[t] and present[j]:  # line 4: xi_0 = 1
                away = omega[j] * (theta[i] - tbar_j[j])  # theta_i - tbar, from the averages of those present
                for other in np.flatnonzero(present):
                    away = away + (other != j) * omega[other] / q[other] * (theta[i] - tbar_j[other])
                both = alpha[j] * away + tau[j] * (1 - alpha[j]) * (theta[i] - tbar_j[j])
                step[i] = gamma[i] / (p0 * q[j]) * both  # line 7
            elif choices.between[t]:
                continue
            elif choices.within[t, j]:  # line 11: xi_j = 1
                share = (1 - tau[j]) * (1 - alpha[j]) / ((1 - p0) * p[j])
                step[i] = gamma[i] * share * (theta[i] - tbar_j[j])  # line 13
            else:
                step[i] = gradient[i] / ((1 - p0) * (1 - p[j]))  # line 15
        theta = theta - eta(t) * step
    return theta


# Messages, and what a node does with them


@dataclass(frozen=True)
class StepSizes(Record):
    """The step of each iteration: ``eta``; with ``mu > 0``, ``(2t + 1) / ((t + 1)^2 mu)`` after iteration ``last``."""

    eta: float
    mu: float = 0.0

    @property
    def last(self) -> int:
        return theory.switch(1 / (2 * self.eta), self.mu) if self.mu > 0 else 0

    def at(self, t: Any) -> Any:
        return self.eta if self.mu == 0 else theory.switching_steps(t, 1 / (2 * self.eta), self.mu)


@dataclass(frozen=True)
class L2gdBegin(Message[None], label="l2gd begin", reply=False):
    """Begin at the clients' coefficients.

    ``local (k,)`` multiplies local steps, ``rate`` has the steps, ``total (k,)`` is each cluster's sum of ``gamma``. With
    ``closed`` local steps are taken in closed form.
    """

    local: Annotated[Floats, Axes("k")]
    rate: StepSizes
    total: Annotated[Floats, Axes("k")]
    closed: bool

    def at(self, node: Node) -> None:
        ClientBlocks.begin(node, self)
        node.cache.pop(Eigenbasis, None)


@dataclass(frozen=True)
class L2gdMove(Message[ClusterSums], label="l2gd move"):
    """Take a step towards averages (lines 7 and 13), then local steps (line 15)."""

    move: Move

    @property
    def cells(self) -> Anything:
        return self.move.cells

    def at(self, node: Node) -> ClusterSums:
        begin, move, theta = node.state(L2gdBegin), self.move, node.coefficients()
        clients, rate = ClientBlocks.of(node, begin.total), begin.rate
        blocks, basis = clients.blocks, Eigenbasis.of(node) if begin.closed else _NO_BASIS
        if node.loss.compiled:
            out, sums = np.empty_like(theta), empty_digits(blocks, theta.shape[1])
            share(
                kernels.l2gd_move, blocks.count, *clients.operands, begin.closed, *basis, blocks.ptr, blocks.owner, node.gamma,
                clients.share, move.pull.strength, move.pull.force, move.start, move.steps, begin.local, rate.eta, rate.mu,
                rate.last, move.wanted, theta, out, sums,
            )  # fmt: skip
        else:
            out, sums = numpy_move(node, clients, begin, move)
        node.theta = out
        return summed(blocks, sums)


def numpy_move(node: Node, clients: ClientBlocks, begin: L2gdBegin, move: Move) -> tuple[Floats, Ints]:
    """The move for a loss without compiled kernels; returns the new coefficients, and the digits of the sums."""
    theta, blocks = node.coefficients(), clients.blocks
    out, sums = np.empty_like(theta), empty_digits(blocks, theta.shape[1])
    for block, j in enumerate(blocks.owner.tolist()):
        first, last = blocks.ptr[block : block + 2].tolist()
        data, part = node.data.clients(first, last), slice(first, last)
        at = theta[part] - node.gamma[part, None] * (move.pull.strength[j] * theta[part] - move.pull.force[j])
        for t in range(move.start[j], move.start[j] + move.steps[j]):
            at = at - begin.local[j] * begin.rate.at(t) * node.loss.gradient(data, at)
        out[part] = at
        if move.wanted[j]:
            accumulate_rows(sums[block], clients.share[part], out[part])
    return out, sums


@dataclass(frozen=True)
class CountBasis(Message[Count], label="size of eigenbases", phase="measure"):
    """Ask how many numbers the eigenbases of the clients have."""

    def at(self, node: Node) -> Count:
        return Count(int(_ranks(node).sum()) * node.data.n_terms)


class Eigenbasis(NamedTuple):
    """The quadratic losses of all clients in their eigenbases, one client after the other.

    Client ``i`` has the rows ``ptr[i]:ptr[i + 1]`` of ``vectors (r, d)``, ``curvature (r,)`` and ``minimiser (r,)``.
    """

    ptr: Ints
    vectors: Floats
    curvature: Floats
    minimiser: Floats

    @classmethod
    def of(cls, node: Node) -> Eigenbasis:
        """That of a node's clients, computed once in a run."""
        basis: Eigenbasis | None = node.cache.get(cls)
        if basis is None:
            n, d = node.data.n_clients, node.data.n_terms
            ptr = np.concatenate([[0], np.cumsum(_ranks(node))])
            here = node.loss.expand(node.data, np.zeros((n, d)))
            values, vectors = np.linalg.eigh(here.hessian)
            basis = node.cache[cls] = cls(ptr, np.empty((ptr[-1], d)), np.empty(ptr[-1]), np.empty(ptr[-1]))
            share(kernels.project, n, values, vectors, here.gradient, *basis)
        return basis


_NO_BASIS = Eigenbasis(np.zeros(1, dtype=np.int64), np.empty((0, 0)), np.empty(0), np.empty(0))
_LARGEST_BASIS = 50_000_000  # numbers in the eigenbases of all clients


def _ranks(node: Node) -> Ints:
    """An upper bound on the rank of each client's Hessian."""
    data = node.data
    return np.full(data.n_clients, data.n_terms) if node.loss.ridge else np.minimum(data.rows_per_client, data.n_terms)


# The coordinator


def next_pull(
    top: Centres,
    shares: Shares,
    rate: StepSizes,
    gamma: Floats,
    present: Floats | None,
    means: Floats,
    now: Round,
    anchor: Floats,
) -> Pull:
    """All steps towards averages after the exchange of a round, combined: first those between clusters, then those within.

    ``gamma (k,)`` is the penalty of each cluster's clients. It matters only if several steps follow one exchange. ``present
    (k,)`` is the probability that a cluster takes part; None if all do.
    """
    if now.between and present is not None:
        return _partial_pull(top, shares, rate.at(now.start + now.steps), present, means, now.takes_part)
    pull, t = Pull.none(*means.shape), now.start + now.steps
    for i in range(now.between):  # line 7
        eta = rate.at(t + i)
        strength = eta * (shares.whole + shares.cluster)
        force = (eta * shares.whole)[:, None] * top.whole(means) + (eta * shares.cluster)[:, None] * means
        pull = pull.then(strength, force, gamma)
        means = means - gamma[:, None] * (strength[:, None] * means - force)
    for i in range(int(now.within.max())):  # line 13
        strength = np.where(now.within > i, rate.at(t + now.between + i) * shares.within, 0.0)
        pull = pull.then(strength, strength[:, None] * means, gamma)
    return pull


def _partial_pull(top: Centres, shares: Shares, eta: Floats, present: Floats, means: Floats, here: Anything) -> Pull:
    """The step of an exchange between the clusters ``here (k,)``; unbiased, as ``present`` is the probability to take part.

    A cluster knows its own average. The others' averages get the weight ``omega_l / present_l``, so that ``strength theta -
    force`` is on average ``theta - tbar`` for a cluster that is here.
    """
    inverse = np.where(here, top.weights / present, 0.0)
    known = inverse.sum() - inverse + top.weights
    centre = (inverse[:, None] * means).sum(axis=0) - (inverse - top.weights)[:, None] * means
    strength = eta * (shares.whole * known + shares.cluster)
    force = (eta * shares.whole)[:, None] * centre + (eta * shares.cluster)[:, None] * means
    return Pull(np.where(here, strength, 0.0), np.where(here[:, None], force, 0.0))


Steps = Literal["constant", "switching"]
STEPS = ("constant", "switching")


def l2gd_setup(
    name: str, network: Network, penalty: Penalty, constants: Constants, recipe: Recipe, eta: float | None, steps: Steps
) -> Setup:
    """Algorithm 1 with any probabilities, for the loop that all randomised algorithms share."""
    if steps not in STEPS:
        raise one_of("steps", steps, STEPS)
    switching, chances = steps == "switching", recipe.probabilities
    rate = StepSizes(recipe.step(eta), constants.mu if switching else 0.0)
    smoothness = 1 / (2 * rate.eta)

    def needed(tol: float) -> int:
        return math.ceil(rate.last / tol) if switching else theory.iterations(tol, smoothness=smoothness, mu=constants.mu)[0]

    stalls = "raise max_iter; a constant step ends in its noise, which steps='switching' and solver='al2sgd_plus' overcome"
    if chances.present is not None:
        stalls = "raise max_iter; a constant step ends in its noise, which a smaller eta makes smaller"
    slow = "steps that shrink like 1/t are slow at the end: raise max_iter, or use solver='al2sgd_plus'"
    equal, gamma = equal_within(network.tree, penalty)
    top = Centres.of(penalty)
    if chances.present is not None and switching:
        raise SolverError(
            "participation below 1 needs steps='constant', because steps='switching' needs all clusters to count the same "
            "iterations; give a smaller eta instead."
        )
    closed = network.loss.quadratic and network.loss.compiled and network.ask(CountBasis()).number <= _LARGEST_BASIS
    return Setup(
        name,
        constants,
        recipe,
        identity={
            "eta": rate.eta,
            "steps": [steps, rate.mu],
            "probabilities": {name: value for name, value in asdict(chances).items() if value is not None},
        },
        begin=L2gdBegin(chances.local, rate, top.total, closed),
        move=L2gdMove,
        next_pull=partial(next_pull, top, chances.shares(top.alpha), rate, gamma, chances.present),
        merge=equal and chances.present is None,
        pace=1 / (rate.eta * constants.mu),
        needed=needed,
        advice=slow if switching else stalls,
    )


def equal_within(tree: Hierarchy, penalty: Penalty) -> tuple[bool, Floats]:
    """Whether ``gamma`` is equal within each cluster, and its first value in each cluster ``(k,)``; 1 if it is empty."""
    ptr, filled, gamma = tree.cluster_ptr, tree.sizes > 0, np.ones(tree.n_clusters)
    gamma[filled] = penalty.gamma[ptr[:-1][filled]]
    return bool((penalty.gamma == gamma[tree.parent]).all()), gamma


# Theory


def recipe(constants: Constants, *, p0: Any = None, p: Any = None, tau: Any = None, participation: Any = None) -> Recipe:
    """Probabilities by Corollary 3.6 (opt_conv_rate), ``p_j`` as rare as its ``calL`` allows, and the step of Theorem 3.5."""
    chances = theory.probabilities(constants, constants.of_clients, p0=p0, p=p, tau=tau, participation=participation)
    smoothness = theory.expected_smoothness(constants, chances, constants.of_clients)
    return Recipe(chances, smoothness, 1 / (2 * smoothness), "1 / (2 calL)")


def cost(setting: Setting) -> Cost:
    """The cost by Theorem 3.5 (conv_rate)."""
    best = recipe(setting.constants)
    return descent_cost("l2gd", best, setting, theory.noise(setting.objective, setting.best.theta, best.probabilities))


def descent_cost(name: str, recipe: Recipe, setting: Setting, sigma2: float) -> Cost:
    """The smaller of the bounds for constant and for switching steps; ``sigma2`` is the noise of a step at the minimiser."""
    objective, mu = setting.objective, setting.constants.mu
    rate = {"smoothness": recipe.smoothness, "mu": mu, "sigma2": sigma2, "start": setting.distance}
    constant, eta = theory.iterations(setting.accuracy, **rate)
    switching = theory.switching_iterations(setting.accuracy, **rate)
    how = "steps='switching'" if switching < constant else f"eta={eta:.2g}"
    pace = 1 / (mu * (recipe.largest_step if switching < constant else eta))
    merge = equal_within(objective.data.hierarchy, objective.penalty)[0]
    schedule = Schedule(recipe.probabilities, 0, merge)
    return setting.bounded(name, min(constant, switching), pace, schedule, f"bound of its theorem, {how}")


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
    p: PerCluster | None = None,
    tau: PerCluster | None = None,
    participation: PerCluster | None = None,
    mu: float | None = None,
    L: float | None = None,
    **options: Unpack[ControlOptions],
) -> Fit:
    """Minimise the objective by Async-L2GD, Algorithm 1 (async_l2gd) of the paper.

    A constant step leads to a neighbourhood of the minimiser. Switching steps lead to the minimiser itself, slowly.

    Parameters
    ----------
    network : Network
        The nodes that hold the clients' rows.
    penalty : Penalty
        ``gamma (n,)`` and ``lam (k,)``.
    steps : {"constant", "switching"}
        With "switching" the steps shrink like 1/t after a number of iterations with a constant step.
    eta : float, optional
        The constant step; by default the largest of Theorem 3.5 (conv_rate).
    p0 : float, optional
        Probability that an iteration is an exchange between clusters; by default that of Corollary 3.6 (opt_conv_rate).
    p : float, (k,) array or "common", optional
        Probability of an exchange within each cluster, in an iteration without an exchange between clusters. By default each
        cluster has the smallest probability that still allows the largest step of Corollary 3.6 (opt_conv_rate); "common" is
        the paper's common value.
    tau : float or (k,) array, optional
        Both kinds of exchange pull a client towards the average of its cluster. The share ``tau`` of this pull comes in
        exchanges between clusters, the rest in exchanges within clusters. By default that of Proposition 3.3 (opt_tau).
    participation : float or (k,) array, optional
        Probability that a cluster takes part in an exchange between clusters, drawn for each cluster and exchange; by default
        1. Steps stay unbiased. The largest step of the theorem is then smaller, and so is the default ``eta``. Only for
        ``steps="constant"``.
    mu, L : float, optional
        Strong convexity of the objective and smoothness of the clients' losses; by default measured on the data.
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
    >>> fit = l2gd(InMemory.of(data, Gaussian(), penalty.gamma), penalty, steps="switching", tol=1e-3, seed=1)
    >>> fit.convergence.converged, fit.history["objective"].round(2)[-1]
    (True, 6.75)
    """
    control, constants = prepare("l2gd", network, penalty, options, clusters=("client",), mu=mu, L=L)
    best = recipe(constants, p0=p0, p=p, tau=tau, participation=participation)
    setup = l2gd_setup("l2gd", network, penalty, constants, best, eta, steps)
    return run(network, penalty, setup, control)
