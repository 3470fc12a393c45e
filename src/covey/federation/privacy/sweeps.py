"""Private sweeps: the fit with differential privacy for every client, by clipping and Gaussian noise at the nodes.

With its clients at their best for given clusters' models ``w``, the objective is a sum over clients of Moreau envelopes,

    F_i(w) = min_theta f_i(theta) + gamma/2 |theta - w|^2        grad F_i = gamma (w - theta_i)
                                                                 Hessian  = C_i = (I + H_i/gamma)^-1 H_i <= gamma I

and Newton on it needs two things of a client, which are in units of coefficients: ``C_i / gamma``, at most the identity
whatever its rows, and how far it is from its cluster, ``theta_i - w``. Both together are its contribution ``v_i``.

    for each of some rounds
      coordinator   sends   ReleaseSums: w
      node          solves  theta_i, each client by itself, from its own rows
                    clips   v_i to length clip: a client that is longer counts for less, with both its parts
                    sends   sum of v_i + noise * clip * N(0, I), for each cluster of which it has clients
      coordinator   solves  one sweep of the two upper levels with these sums
    coordinator     sends   PlaceClients: w, and clients go where it puts them; nothing comes back

One client is in one sum only, so its rows move all that is sent in a round by ``clip`` at most, in Euclidean norm: a round is
a Gaussian mechanism (Dwork and Roth 2014, appendix A) and a run the composition of ``rounds`` of them, each chosen in the
knowledge of those before. The envelopes of a Gaussian loss are quadratic and one round finds the minimum, but a second is
worth its share of the noise: it begins nearer, so that less is clipped and errors of ``C_i`` weigh less.

Sums are of whole multiples of ``2^-36 clip``: contributions are cut to them, towards zero, and noise is rounded to them. What
is sent is then the rounding of a true Gaussian mechanism on integers, and the last digits of floating-point numbers, which
could give the addends away (Mironov 2012), are not there. Noise is from the system's randomness, not from a run's seed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtri

from covey._typing import Floats, Ints
from covey.errors import PenaltyError
from covey.federation.wire.messages import Privacy
from covey.losses import Gaussian
from covey.nodes.network import Message, Network, Node
from covey.objective.objective import Penalty
from covey.records import Reply
from covey.solvers.direct.elimination import Quadratic, Spread, descend, marginalise
from covey.solvers.direct.newton import LocalProblem
from covey.solvers.direct.sweep import solve_top
from covey.solvers.ledger import Links
from covey.solvers.result import Convergence, Fit

_UNITS = 2.0**36  # in a clip
_STEPS, _HALVINGS = 100, 60  # of a client's own Newton, at most
_ROOT = float(np.sqrt(2.0))

Draw = Callable[[int], Floats]


# What travels


@dataclass(frozen=True)
class ReleaseSums(Message["NoisySums"], label="release sums"):
    """The clusters' models ``w (k, d)``: send the sums of clipped contributions there, with noise."""

    w: Floats
    noise: float
    clip: float

    def at(self, node: Node) -> NoisySums:
        v = node_contributions(node, self.w)
        sums = summed(clipped(v, self.clip), node.data.hierarchy.cluster_ptr)
        draw = system_normal if node.draw is None else node.draw
        # That a cluster has no clients here is known to all, so there is nothing to hide.
        full = node.data.hierarchy.sizes > 0
        sums[full] += np.rint(self.noise * _UNITS * draw(sums[full].size)).astype(np.int64).reshape(-1, sums.shape[1])
        return NoisySums(sums, full.astype(np.int64))


@dataclass(frozen=True)
class NoisySums(Reply):
    """Sums ``(k, d(d+1)/2 + d)`` with noise, in units of ``2^-36 clip``, and how often noise went in."""

    sums: Ints
    draws: Ints


@dataclass(frozen=True)
class PlaceClients(Message[None], label="place clients", phase="finish"):
    """The clusters' models ``w (k, d)``: put each client at its best under its cluster's."""

    w: Floats

    def at(self, node: Node) -> None:
        node_settle(node, self.w)


# The node


def node_settle(node: Node, w: Floats) -> Floats:
    """Put each client at its own best under its cluster's ``w``, by damped Newton; its Hessian there ``(n, d, d)``."""
    clients, tree = LocalProblem.of(node), node.data.hierarchy
    target, still = tree.down(w), np.zeros_like(w)
    theta = _near(node, w) if node.theta is None else node.theta
    here = node.loss.expand(node.data, theta)
    for _ in range(_STEPS):
        residual = here.gradient + node.gamma[:, None] * (theta - target)
        step, _force = descend(here.hessian, -residual, clients.spread, tree.parent, still)
        length = _lengths(node, theta, target, step, -np.einsum("ia,ia->i", residual, step))
        moved = length[:, None] * step
        theta = theta + moved
        here = node.loss.expand(node.data, theta)
        if (np.abs(moved) <= 1e-12 * (1.0 + np.abs(theta))).all():
            break
    node.theta = theta
    return here.hessian


def _lengths(node: Node, theta: Floats, target: Floats, step: Floats, decrease: Floats) -> Floats:
    """How far each client goes along its step: half as far, until its own objective falls."""

    def value(at: Floats) -> Floats:
        with np.errstate(over="ignore", invalid="ignore"):
            tied = 0.5 * node.gamma * ((at - target) ** 2).sum(axis=1)
            found: Floats = node.loss.value(node.data, at) + tied
            return found

    length, now = np.ones(len(theta)), value(theta)
    slack = 1e-14 * (1.0 + np.abs(now))
    for _ in range(_HALVINGS):
        fell = value(theta + length[:, None] * step) <= now - 1e-4 * length * decrease + slack
        if fell.all():
            break
        length = np.where(fell, length, 0.5 * length)
    return np.where(fell, length, 0.0)


def _near(node: Node, w: Floats) -> Floats:
    """Where clients begin: at their cluster, or where a linear problem near the loss puts them, since exp outgrows any step."""
    parent, linear = node.data.hierarchy.parent, node.loss.working_response(node.data)
    if linear is None:
        return w[parent]
    near = Gaussian(node.loss.reduction, node.loss.ridge).expand(linear, np.zeros((len(parent), w.shape[1])))
    return descend(near.hessian, -near.gradient, LocalProblem.of(node).spread, parent, w)[0]


def node_contributions(node: Node, w: Floats) -> Floats:
    """What each client would add to its cluster's sum, ``(n, d(d+1)/2 + d)``: ``C_i / gamma`` as a vector, ``theta_i - w``."""
    H = node_settle(node, w)
    tree, nothing = node.data.hierarchy, np.zeros(len(H))
    own = marginalise(
        Quadratic(H, np.zeros(H.shape[:2]), nothing, nothing), Spread.of_penalty(node.gamma, H.shape[1]), tree.cluster_ptr
    )
    return np.hstack([flat(own.C / node.gamma[:, None, None]), node.coefficients() - tree.down(w)])


def clipped(v: Floats, clip: float) -> Ints:
    """Contributions shortened to length ``clip`` where they are longer, in whole units; what is not finite is nothing."""
    v = np.where(np.isfinite(v).all(axis=1, keepdims=True), v, 0.0)
    largest = np.abs(v).max(axis=1, keepdims=True, initial=0.0)
    shape = v / np.where(largest > 0, largest, 1.0)  # so that no square overflows or vanishes
    norm = np.sqrt((shape**2).sum(axis=1, keepdims=True))
    with np.errstate(over="ignore"):
        length = largest / clip * norm
    # A hair below the clip, so that rounding cannot carry a contribution above it.
    length = np.minimum(length, 1 - 1e-12)
    whole: Ints = np.trunc(shape / np.where(norm > 0, norm, 1.0) * (length * _UNITS)).astype(np.int64)
    return whole


def summed(units: Ints, ptr: Ints) -> Ints:
    """Sums over the clients of each cluster, exact in whatever order."""
    running = np.concatenate([np.zeros((1, units.shape[1]), dtype=np.int64), np.cumsum(units, axis=0)])
    return np.asarray(running[ptr[1:]] - running[ptr[:-1]])


def system_normal(n: int) -> Floats:
    """Standard normal numbers from the system's randomness, with all digits in the tails too: by the inverse, from 129 bits."""
    words = np.frombuffer(os.urandom(24 * n), dtype=np.uint64).reshape(n, 3)
    below_half = words[:, 0] * 2.0**-65 + (words[:, 1] + 1.0) * 2.0**-129
    sign = np.where(words[:, 2] & np.uint64(1), 1.0, -1.0)
    return np.asarray(sign * ndtri(below_half))


def seeded_normal(*seed: int) -> Draw:
    """The same numbers each time: for tests and simulation, where nothing is secret."""
    return np.random.default_rng(seed).standard_normal


# Symmetric matrices as vectors of the same length


def flat(C: Floats) -> Floats:
    """The upper triangles of ``C (m, d, d)``, off-diagonals times the square root of two: the norms are the same."""
    rows, columns = np.triu_indices(C.shape[1])
    return np.asarray(C[:, rows, columns] * np.where(rows == columns, 1.0, _ROOT))


def square(v: Floats, d: int) -> Floats:
    """The reverse."""
    rows, columns = np.triu_indices(d)
    C = np.zeros((len(v), d, d))
    C[:, rows, columns] = C[:, columns, rows] = v / np.where(rows == columns, 1.0, _ROOT)
    return C


# The coordinator


def private_across(network: Network, penalty: Penalty, privacy: Privacy) -> Fit:
    """Private sweeps over any network; the clients' models stay at their nodes.

    >>> from covey import GroupedData, Penalty
    >>> from covey.losses import Gaussian
    >>> from covey.nodes.network import InMemory
    >>> data = GroupedData.from_arrays([[1.0], [1.0], [1.0]], [0.0, 3.0, 9.0], ["a", "b", "c"], ["x", "x", "y"])
    >>> penalty = Penalty.of(data.hierarchy, gamma=1.0, lam=1.0)
    >>> fit = private_across(InMemory.of(data, Gaussian(), penalty.gamma), penalty, Privacy(noise=0.0, clip=9.0, rounds=1))
    >>> fit.wbar.round(3).tolist()
    [4.5]
    """
    tree, d = network.tree, len(network.terms)
    gamma = cluster_gammas(network, penalty)
    spread = Spread.of_penalty(penalty.lam, d)
    w, wbar = np.zeros((tree.n_clusters, d)), np.zeros(d)
    for _ in range(privacy.rounds):
        reply = network.ask(ReleaseSums(w, privacy.noise, privacy.clip))
        w, wbar = next_top(reply, w, gamma, spread, tree.sizes, privacy)
    network.ask(PlaceClients(w))
    links = Links(tree.sizes, d * (d + 1) // 2 + d, d + 2)
    ledger = links.count(privacy.rounds * np.ones(tree.n_clusters, dtype=np.int64), privacy.rounds)
    message = (
        f"{privacy.rounds} {'round' if privacy.rounds == 1 else 'rounds'} of sums with noise; nothing is sent by which to tell "
        "how near the minimum this is"
    )
    end = Convergence("private", False, privacy.rounds, privacy.rounds + 1, np.nan, np.nan, None, message)
    return Fit(np.empty((0, d)), w, wbar, end, None, ledger)


def next_top(
    reply: NoisySums, w: Floats, gamma: Floats, spread: Spread, sizes: Ints, privacy: Privacy
) -> tuple[Floats, Floats]:
    """The upper levels after a release: Newton's step with what it says, made a matrix that could be."""
    d = w.shape[1]
    sums = reply.sums.astype(np.float64) * (privacy.clip / _UNITS)
    C, away = square(sums[:, :-d], d), sums[:, -d:]
    C = plausible(C, sizes, privacy.noise * privacy.clip * np.sqrt(reply.draws))
    C, away = gamma[:, None, None] * C, gamma[:, None] * away
    nothing = np.zeros(len(w))
    seen = Quadratic(C, away + np.einsum("jab,jb->ja", C, w), nothing, nothing)
    w, _, wbar = solve_top(seen, spread)
    return w, wbar


def plausible(C: Floats, sizes: Ints, sd: Floats) -> Floats:
    """The nearest matrices with eigenvalues that sums over so many clients can have; none that noise alone could make up.

    An eigenvalue below the noise cannot be told from zero, and a step divided by it would be noise.
    """
    values, vectors = np.linalg.eigh(C)
    low = np.minimum(sd * np.sqrt(C.shape[1]), sizes)[:, None]
    kept = np.clip(values, low, sizes[:, None])
    fixed: Floats = np.einsum("jab,jb,jcb->jac", vectors, kept, vectors)
    return fixed


def cluster_gammas(network: Network, penalty: Penalty) -> Floats:
    """The one ``gamma`` of each cluster's clients ``(k,)``; others would need sums of their own."""
    tree = network.tree
    gamma = np.ones(tree.n_clusters)
    gamma[tree.sizes > 0] = penalty.gamma[tree.cluster_ptr[:-1][tree.sizes > 0]]
    odd = np.flatnonzero((gamma[tree.parent] != penalty.gamma) | (penalty.gamma == 0))
    if len(odd):
        cluster = tree.cluster_ids[int(tree.parent[odd[0]])]
        raise PenaltyError(f"With differential privacy all clients of cluster {cluster!r} have one positive gamma; give that.")
    return gamma
