"""Async-L2GD, algorithm 1 of the paper (PAPER.md, section 2).

    each iteration: xi_0 = 1 with probability p0, then every client does
        theta_i -= eta gamma_i / p0 ( alpha_j (theta_i - tbar) + tau_j (1 - alpha_j)(theta_i - tbar_j) )
    else each cluster on its own: xi_j = 1 with probability p_j, then
        theta_i -= eta gamma_i (1 - tau_j)(1 - alpha_j) / ((1 - p0) p_j) (theta_i - tbar_j)
    else
        theta_i -= eta / ((1 - p0)(1 - p_j)) grad f_i(theta_i)

The tails between two exchanges are one local run, done for each client in one go; for a quadratic loss in closed form, in the
eigenbasis of its Hessian: s steps shrink the distance to its own minimiser by the product of ``1 - step * eigenvalue``.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple, Unpack

import numpy as np
from numba import njit, prange

from covey._typing import Anything, Floats, Ints
from covey.errors import one_of
from covey.exact import accumulate_rows
from covey.losses import Loss
from covey.losses.kernels import FASTMATH, GAUSSIAN, exponent, exponentials, slope
from covey.nodes.messages import Message
from covey.nodes.network import Network
from covey.nodes.node import Node
from covey.objective.objective import Objective
from covey.objective.penalty import Penalty
from covey.objective.theory import Coins, Constants, Recipe, Shares, iterations, l2gd_recipe, switch, switching_steps
from covey.records import Count, Record
from covey.solvers.first_order import plain
from covey.solvers.first_order.curvature import constants_across
from covey.solvers.first_order.loop import Algorithm, Control, Keepers, Watch, in_memory, nobody, run
from covey.solvers.first_order.protocol import Centres, ClientBlocks, ClusterSums, Move, Pull, shares
from covey.solvers.first_order.schedule import Round
from covey.solvers.result import Fit
from covey.tables.rows import GroupedData
from covey.tree.hierarchy import Hierarchy

Steps = Literal["constant", "switching"]
STEPS = ("constant", "switching")

_ROOM = 1024  # rows worked on together: they stay in the second-level cache through a local run
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
    """begin where you are; what a local step is multiplied by, ``local (k,)``, the steps, each cluster's sum of gamma.

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
    """a move of all clients."""

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
    """tell how many numbers the eigenbases of your clients have."""

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
    blocks: ClientBlocks
    gamma: Floats
    share: Floats
    local: Floats
    rate: StepSizes

    @classmethod
    def of(cls, node: Node, begin: L2gdBegin) -> L2gdClients:
        data, share = node.data, shares(node, begin.total)
        basis = _basis(data, node.loss) if begin.closed else _NO_BASIS
        blocks, operands = ClientBlocks.of(data.hierarchy), node.loss.operands(data)
        return cls(operands, begin.closed, basis, blocks, node.gamma, share, begin.local, begin.rate)


_NO_BASIS = Eigenbasis(np.zeros(1, dtype=np.int64), np.empty((0, 0)), np.empty(0), np.empty(0))


def node_move(clients: L2gdClients, theta: Floats, move: Move) -> tuple[Floats, ClusterSums]:
    """Pull, then local steps: where the clients are, and the sums of the clusters that are wanted."""
    out, sums = np.empty_like(theta), clients.blocks.empty(theta.shape[1])
    rate, blocks = clients.rate, clients.blocks
    move_clients: Any = plain.l2gd_move if isinstance(clients.operands[0], Loss) else _move
    move_clients(
        *clients.operands, clients.closed, *clients.basis, blocks.ptr, blocks.owner, clients.gamma, clients.share,
        move.pull.strength, move.pull.force, move.start, move.steps, clients.local, rate.eta, rate.mu, rate.last, move.wanted,
        theta, out, sums,
    )  # fmt: skip
    return out, blocks.total(sums)


def _ranks(data: GroupedData, loss: Loss) -> Ints:
    """The directions in which each client's loss is curved, at most."""
    return np.full(data.n_clients, data.n_terms) if loss.ridge else np.minimum(data.rows_per_client, data.n_terms)


def _basis(data: GroupedData, loss: Loss) -> Eigenbasis:
    n, d = data.n_clients, data.n_terms
    ptr = np.concatenate([[0], np.cumsum(_ranks(data, loss))])
    here = loss.expand(data, np.zeros((n, d)))
    values, vectors = np.linalg.eigh(here.hessian)
    basis = Eigenbasis(ptr, np.empty((ptr[-1], d)), np.empty(ptr[-1]), np.empty(ptr[-1]))
    _project(values, vectors, here.gradient, *basis)
    return basis


# The coordinator


@dataclass(frozen=True)
class L2gdGuide:
    """Heads of the coins as pulls: means of the clients become centres to move towards."""

    top: Centres
    coins: Coins
    rate: StepSizes
    gamma: Floats

    @cached_property
    def _shares(self) -> Shares:
        return self.coins.shares(self.top.alpha)

    def answer(self, means: Floats, turn: Round, anchor: Floats) -> Pull:
        """The heads that follow a round's exchange, as one pull: those between clusters, then those within each."""
        whole, cluster, within = self._shares
        pull, t, gamma = Pull.none(*means.shape), turn.start + turn.steps, self.gamma
        for i in range(turn.between):
            eta = self.rate.at(t + i)
            strength = eta * (whole + cluster)
            force = (eta * whole)[:, None] * self.top.whole(means) + (eta * cluster)[:, None] * means
            pull = pull.then(strength, force, gamma)
            means = means - gamma[:, None] * (strength[:, None] * means - force)
        for i in range(int(turn.within.max())):
            strength = np.where(turn.within > i, self.rate.at(t + turn.between + i) * within, 0.0)
            pull = pull.then(strength, strength[:, None] * means, gamma)
        return pull


# In memory


def l2gd(
    data: GroupedData,
    loss: Loss,
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

    >>> from covey import GroupedData, Penalty
    >>> from covey.losses import Gaussian
    >>> data = GroupedData.from_arrays([[1.0], [1.0], [1.0]], [0.0, 3.0, 9.0], ["a", "b", "c"], ["x", "x", "y"])
    >>> fit = l2gd(data, Gaussian(), Penalty.of(data.hierarchy), steps="switching", tol=1e-3, seed=1)
    >>> fit.convergence.converged, fit.history["objective"].round(2)[-1]
    (True, 6.75)
    """
    settings: dict[str, Any] = {"steps": steps, "eta": eta, "p0": p0, "p": p, "tau": tau, "mu": mu, "L": L}
    return in_memory(partial(l2gd_across, **settings), Objective(data, loss, penalty), Control.of("l2gd", watch))


# Across a network


def l2gd_across(
    network: Network,
    penalty: Penalty,
    control: Control,
    keepers: Keepers = nobody,
    *,
    steps: Steps = "constant",
    eta: float | None = None,
    p0: float | None = None,
    p: Any = None,
    tau: Any = None,
    mu: float | None = None,
    L: float | None = None,
) -> Fit:
    """Async-L2GD over any network, from where its nodes are; the clients' models stay there."""
    known = constants_across(network, penalty, mu=mu, L=L)
    known.need_curvature()
    recipe = l2gd_recipe(known, p0=p0, p=p, tau=tau)
    return descent("l2gd", network, penalty, known, recipe, eta, steps, control, keepers)


def descent(
    name: str,
    network: Network,
    penalty: Penalty,
    known: Constants,
    recipe: Recipe,
    eta: float | None,
    steps: Steps,
    control: Control,
    keepers: Keepers,
) -> Fit:
    """Gradient steps by coins, for any coins; what algorithm 1 and its one-coin variant come to."""
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
    top = Centres.of(penalty)
    closed = network.loss.quadratic and network.loss.compiled and network.ask(CountBasis()).number <= _LARGEST_BASIS
    algorithm = Algorithm(
        name,
        known,
        recipe,
        identity={"eta": rate.eta, "steps": [steps, rate.mu], "probabilities": asdict(recipe.coins)},
        begin=L2gdBegin(recipe.coins.local, rate, top.total, closed),
        go=L2gdMove,
        guide=L2gdGuide(top, recipe.coins, rate, gamma),
        merge=equal,
        pace=1 / (rate.eta * known.mu),
        needed=needed,
        advice=slow if switching else stalls,
    )
    return run(network, penalty, algorithm, control, keepers)


def equal_within(tree: Hierarchy, penalty: Penalty) -> tuple[bool, Floats]:
    """Whether ``gamma`` is equal within each cluster, and its (first) value there; 1 where a cluster is empty."""
    ptr = tree.cluster_ptr
    filled = np.diff(ptr) > 0
    gamma = np.ones(tree.n_clusters)
    gamma[filled] = penalty.gamma[ptr[:-1][filled]]
    return bool((penalty.gamma == gamma[tree.parent]).all()), gamma


@njit(parallel=True, cache=True, error_model="numpy")  # type: ignore[untyped-decorator]
def _project(
    values: Floats, vectors: Floats, gradient: Floats, ptr: Ints, own: Floats, curvature: Floats, minimiser: Floats
) -> None:
    """Fill a basis from each client's eigenvalues, ascending, and eigenvectors, in columns."""
    n, d = values.shape
    for i in prange(n):
        flat = 8 * d * 2.0**-52 * values[i, d - 1]
        for c in range(ptr[i], ptr[i + 1]):
            at = d - (ptr[i + 1] - c)
            along = 0.0
            for a in range(d):
                own[c, a] = vectors[i, a, at]
                along -= vectors[i, a, at] * gradient[i, a]
            # Directions in which a client has no rows do not move it; rounding must not make them look a little curved.
            curved = values[i, at] > flat
            curvature[c] = values[i, at] if curved else 0.0
            minimiser[c] = along / values[i, at] if curved else 0.0


@njit(parallel=True, cache=True, fastmath=FASTMATH, error_model="numpy")  # type: ignore[untyped-decorator]
def _move(
    family: int, X: Floats, y: Floats, weights: Floats, offset: Floats, scale: Floats, ridge: float, client_ptr: Ints,
    closed: bool, basis: Ints, vectors: Floats, curvature: Floats, minimiser: Floats, blocks: Ints, owner: Ints,
    gamma: Floats, share: Floats, strength: Floats, force: Floats, start: Ints, steps: Ints, local: Floats, step: float,
    mu: float, switch: int, wanted: Anything, theta: Floats, out: Floats, sums: Ints,
) -> None:  # fmt: skip
    """Each block of clients, all of one cluster, is moved by one thread; no bit depends on the threads, nor on the blocks."""
    d = theta.shape[1]
    for block in prange(len(owner)):
        j, first, last = owner[block], blocks[block], blocks[block + 1]
        for i in range(first, last):
            for a in range(d):
                out[i, a] = theta[i, a] - gamma[i] * (strength[j] * theta[i, a] - force[j, a])
        if steps[j] > 0:
            eta = np.empty(steps[j])
            for s in range(steps[j]):
                t = start[j] + s
                eta[s] = local[j] * (step if mu == 0.0 or t <= switch else (2.0 * t + 1.0) / ((t + 1.0) ** 2 * mu))
            if closed:
                _in_eigenbasis(basis, vectors, curvature, minimiser, eta, first, last, out)
            else:
                _step_by_step(family, X, y, weights, offset, scale, ridge, client_ptr, eta, first, last, out)
        if wanted[j]:
            accumulate_rows(sums[block], share[first:last], out[first:last])


@njit(fastmath=FASTMATH, error_model="numpy")  # type: ignore[untyped-decorator]
def _in_eigenbasis(
    ptr: Ints, vectors: Floats, curvature: Floats, minimiser: Floats, eta: Floats, first: int, last: int, theta: Floats
) -> None:
    """``theta += V' ((prod_s (1 - eta_s lambda) - 1) (V theta - minimiser))``."""
    d = theta.shape[1]
    keep = np.empty(d)
    for i in range(first, last):
        low, high = ptr[i], ptr[i + 1]
        V, curved, best, r = vectors[low:high], curvature[low:high], minimiser[low:high], high - low
        keep[:] = 1.0
        for s in range(len(eta)):
            for c in range(r):
                keep[c] *= 1.0 - eta[s] * curved[c]
        for c in range(r):
            along = 0.0
            for a in range(d):
                along += V[c, a] * theta[i, a]
            keep[c] = (keep[c] - 1.0) * (along - best[c])
        for c in range(r):
            for a in range(d):
                theta[i, a] += V[c, a] * keep[c]


@njit(fastmath=FASTMATH, error_model="numpy")  # type: ignore[untyped-decorator]
def _step_by_step(
    family: int, X: Floats, y: Floats, weights: Floats, offset: Floats, scale: Floats, ridge: float, client_ptr: Ints,
    eta: Floats, first: int, last: int, theta: Floats,
) -> None:  # fmt: skip
    """Gradient steps of some clients, as many at a time as fit the room, columns padded to fours for vector registers."""
    d = theta.shape[1]
    width = (d + 3) // 4 * 4
    room = _ROOM
    for i in range(first, last):
        room = max(room, client_ptr[i + 1] - client_ptr[i])
    x, target, weight, shift = np.zeros((room, width)), np.empty(room), np.ones(room), np.zeros(room)
    margin, argument, whole, power = np.empty(room), np.empty(room), np.empty(room), np.zeros(room)
    t = np.zeros((last - first, width))
    i = first
    while i < last:
        stop, base = i, client_ptr[i]
        while stop < last and client_ptr[stop + 1] - base <= room:
            stop += 1
        m = client_ptr[stop] - base
        for r in range(m):
            target[r] = y[base + r]
            for a in range(d):
                x[r, a] = X[base + r, a]
        if len(weights) > 0:
            weight[:m] = weights[base : base + m]
        if len(offset) > 0:
            shift[:m] = offset[base : base + m]
        for c in range(i, stop):
            for a in range(d):
                t[c - i, a] = theta[c, a]
        for s in range(len(eta)):
            for c in range(i, stop):
                low, high = client_ptr[c] - base, client_ptr[c + 1] - base
                t0, t1, t2, t3 = t[c - i, 0], t[c - i, 1], t[c - i, 2], t[c - i, 3]
                for r in range(low, high):
                    margin[r] = shift[r] + ((t0 * x[r, 0] + t1 * x[r, 1]) + (t2 * x[r, 2] + t3 * x[r, 3]))
                for a in range(4, width, 4):
                    t0, t1, t2, t3 = t[c - i, a], t[c - i, a + 1], t[c - i, a + 2], t[c - i, a + 3]
                    for r in range(low, high):
                        margin[r] += (t0 * x[r, a] + t1 * x[r, a + 1]) + (t2 * x[r, a + 2] + t3 * x[r, a + 3])
            if family != GAUSSIAN:
                for r in range(m):
                    argument[r] = exponent(family, margin[r])
                exponentials(argument, m, whole, power)
            for r in range(m):
                margin[r] = weight[r] * slope(family, margin[r], target[r], power[r])
            for c in range(i, stop):
                low, high = client_ptr[c] - base, client_ptr[c + 1] - base
                for a in range(0, width, 4):
                    g0, g1, g2, g3 = 0.0, 0.0, 0.0, 0.0
                    for r in range(low, high):
                        g0 += margin[r] * x[r, a]
                        g1 += margin[r] * x[r, a + 1]
                        g2 += margin[r] * x[r, a + 2]
                        g3 += margin[r] * x[r, a + 3]
                    t[c - i, a] -= eta[s] * (scale[c] * g0 + ridge * t[c - i, a])
                    t[c - i, a + 1] -= eta[s] * (scale[c] * g1 + ridge * t[c - i, a + 1])
                    t[c - i, a + 2] -= eta[s] * (scale[c] * g2 + ridge * t[c - i, a + 2])
                    t[c - i, a + 3] -= eta[s] * (scale[c] * g3 + ridge * t[c - i, a + 3])
        for c in range(i, stop):
            for a in range(d):
                theta[c, a] = t[c - i, a]
        i = stop
