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
from covey.data import GroupedData
from covey.errors import one_of
from covey.losses import Loss
from covey.losses.kernels import FASTMATH, GAUSSIAN, exponent, exponentials, slope
from covey.objective import Objective, Penalty
from covey.schedule import Round
from covey.solvers.curvature import constants
from covey.solvers.protocol import Blocks, Move, Pull, Sums, Top
from covey.solvers.result import Fit
from covey.solvers.rounds import Algorithm, Control, Watch, solve_in_memory
from covey.theory import Coins, Constants, Recipe, Shares, iterations, l2gd_recipe, switch, switching_steps

Steps = Literal["constant", "switching"]
STEPS = ("constant", "switching")

_ROOM = 1024  # rows worked on together: they stay in the second-level cache through a local run
_LARGEST_BASIS = 50_000_000  # numbers in the eigenbases of all clients


@dataclass(frozen=True)
class Rate:
    """The step at each iteration: ``eta``, or with ``mu > 0`` switching to ``(2t + 1) / ((t + 1)^2 mu)`` after ``last``."""

    eta: float
    mu: float = 0.0

    @property
    def last(self) -> int:
        return switch(1 / (2 * self.eta), self.mu) if self.mu > 0 else 0

    def at(self, t: Any) -> Any:
        return self.eta if self.mu == 0 else switching_steps(t, 1 / (2 * self.eta), self.mu)


# The node


class Basis(NamedTuple):
    """Each client's quadratic loss in its eigenbasis: ``vectors (n, r, d)``, ``curvature (n, r)``, ``minimiser (n, r)``."""

    vectors: Floats
    curvature: Floats
    minimiser: Floats


@dataclass(frozen=True)
class Node:
    """What a node holds for the whole run."""

    operands: tuple[Any, ...]
    basis: Basis
    blocks: Blocks
    gamma: Floats
    local: Floats
    rate: Rate


@dataclass(frozen=True)
class State:
    """Where a node's clients are."""

    theta: Floats


def node_of(data: GroupedData, loss: Loss, gamma: Floats, drawn: Coins, rate: Rate) -> Node:
    """Set up a node for its own clients."""
    return Node(loss.operands(data), _basis(data, loss), Blocks.of(data.hierarchy), gamma, drawn.local, rate)


def node_move(node: Node, state: State, move: Move) -> tuple[State, Sums]:
    """Pull, then local steps; the sums of the clusters that are wanted."""
    theta, sums = np.empty_like(state.theta), node.blocks.empty(state.theta.shape[1])
    _move(
        *node.operands, *node.basis, node.blocks.ptr, node.blocks.owner, node.gamma, move.pull.strength, move.pull.force,
        move.start, move.steps, node.local, node.rate.eta, node.rate.mu, node.rate.last, move.wanted, state.theta, theta, sums,
    )  # fmt: skip
    return State(theta), node.blocks.total(sums)


def _basis(data: GroupedData, loss: Loss) -> Basis:
    """Empty where the loss is not quadratic, or the bases would be too large."""
    n, d = data.n_clients, data.n_terms
    rank = d if loss.ridge else min(d, int(data.rows_per_client.max(initial=0)))
    if loss.name != "gaussian" or n * rank * d > _LARGEST_BASIS:
        return Basis(np.empty((0, 0, d)), np.empty((0, 0)), np.empty((0, 0)))
    here = loss.expand(data, np.zeros((n, d)))
    values, vectors = np.linalg.eigh(here.hessian)
    values, vectors = values[:, d - rank :], np.ascontiguousarray(vectors[:, :, d - rank :].transpose(0, 2, 1))
    # Directions in which a client has no rows do not move it; rounding must not make them look a little curved.
    flat = values <= 8 * d * np.finfo(float).eps * values[:, -1:]
    along = np.einsum("ira,ia->ir", vectors, -here.gradient)
    return Basis(vectors, np.where(flat, 0.0, values), np.where(flat, 0.0, along / np.where(flat, 1.0, values)))


# The coordinator


@dataclass(frozen=True)
class Guide:
    """Heads of the coins as pulls: means of the clients become centres to move towards."""

    top: Top
    coins: Coins
    rate: Rate
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
    **watch : seed, tol, max_iter, checkpoint and more: see :class:`~covey.solvers.rounds.Control`

    >>> from covey import GroupedData, Penalty
    >>> from covey.losses import Gaussian
    >>> data = GroupedData.from_arrays([[1.0], [1.0], [1.0]], [0.0, 3.0, 9.0], ["a", "b", "c"], ["x", "x", "y"])
    >>> fit = l2gd(data, Gaussian(), Penalty.of(data.hierarchy), steps="switching", tol=1e-3, seed=1)
    >>> fit.convergence.converged, fit.history["objective"].round(2)[-1]
    (True, 6.75)
    """
    control, objective = Control.of("l2gd", watch), Objective(data, loss, penalty)
    known = constants(objective, mu=mu, L=L)
    known.need_curvature()
    return descent("l2gd", objective, known, l2gd_recipe(known, p0=p0, p=p, tau=tau), eta, steps, control)


def descent(
    name: str, objective: Objective, known: Constants, recipe: Recipe, eta: float | None, steps: Steps, control: Control
) -> Fit:
    """Gradient steps by coins, for any coins; what algorithm 1 and its one-coin variant come to."""
    if steps not in STEPS:
        raise one_of("steps", steps, STEPS)
    switching = steps == "switching"
    rate = Rate(recipe.step(eta), known.mu if switching else 0.0)
    smoothness = 1 / (2 * rate.eta)

    def needed(tol: float) -> int:
        return math.ceil(rate.last / tol) if switching else iterations(tol, smoothness=smoothness, mu=known.mu)[0]

    stalls = "raise max_iter; a constant step ends in its noise, which steps='switching' and solver='al2sgd_plus' overcome"
    slow = "steps that shrink like 1/t are slow at the end: raise max_iter, or use solver='al2sgd_plus'"
    data, penalty = objective.data, objective.penalty
    equal, gamma = equal_within(data, penalty)
    algorithm = Algorithm(
        name,
        known,
        recipe,
        identity={"eta": rate.eta, "steps": [steps, rate.mu], "probabilities": asdict(recipe.coins)},
        begin=State,
        move=partial(node_move, node_of(data, objective.loss, penalty.gamma, recipe.coins, rate)),
        guide=Guide(Top.of(penalty), recipe.coins, rate, gamma),
        merge=equal,
        pace=1 / (rate.eta * known.mu),
        needed=needed,
        advice=slow if switching else stalls,
    )
    return solve_in_memory(objective, algorithm, control)


def equal_within(data: GroupedData, penalty: Penalty) -> tuple[bool, Floats]:
    """Whether ``gamma`` is equal within each cluster, and its (first) value there; 1 where a cluster is empty."""
    ptr = data.hierarchy.cluster_ptr
    filled = np.diff(ptr) > 0
    gamma = np.ones(data.n_clusters)
    gamma[filled] = penalty.gamma[ptr[:-1][filled]]
    return bool((penalty.gamma == gamma[data.hierarchy.parent]).all()), gamma


@njit(parallel=True, cache=True, fastmath=FASTMATH, error_model="numpy")  # type: ignore[untyped-decorator]
def _move(
    family: int, X: Floats, y: Floats, weights: Floats, offset: Floats, scale: Floats, ridge: float, client_ptr: Ints,
    vectors: Floats, curvature: Floats, minimiser: Floats, blocks: Ints, owner: Ints, gamma: Floats, strength: Floats,
    force: Floats, start: Ints, steps: Ints, local: Floats, step: float, mu: float, switch: int, wanted: Anything,
    theta: Floats, out: Floats, sums: Floats,
) -> None:  # fmt: skip
    """Each block of clients, all of one cluster, is moved by one thread, and summed in order: no bit depends on the threads."""
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
            if len(vectors) > 0:
                _in_eigenbasis(vectors, curvature, minimiser, eta, first, last, out)
            else:
                _step_by_step(family, X, y, weights, offset, scale, ridge, client_ptr, eta, first, last, out)
        if wanted[j]:
            for i in range(first, last):
                for a in range(d):
                    sums[block, a] += gamma[i] * out[i, a]


@njit(fastmath=FASTMATH, error_model="numpy")  # type: ignore[untyped-decorator]
def _in_eigenbasis(
    vectors: Floats, curvature: Floats, minimiser: Floats, eta: Floats, first: int, last: int, theta: Floats
) -> None:
    """``theta += V' ((prod_s (1 - eta_s lambda) - 1) (V theta - minimiser))``."""
    r, d = vectors.shape[1:]
    keep = np.empty(r)
    for i in range(first, last):
        keep[:] = 1.0
        for s in range(len(eta)):
            for c in range(r):
                keep[c] *= 1.0 - eta[s] * curvature[i, c]
        for c in range(r):
            along = 0.0
            for a in range(d):
                along += vectors[i, c, a] * theta[i, a]
            keep[c] = (keep[c] - 1.0) * (along - minimiser[i, c])
        for c in range(r):
            for a in range(d):
                theta[i, a] += vectors[i, c, a] * keep[c]


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
