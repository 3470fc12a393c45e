"""Differential privacy for every client: the private sweeps, and the epsilon that they cost.

**The mechanism.** With its clients at their best for given cluster models ``w``, the objective is a sum of Moreau envelopes
over clients,

    F_i(w) = min_theta f_i(theta) + gamma/2 |theta - w|^2        grad F_i = gamma (w - theta_i)
                                                                 Hessian  = C_i = (I + H_i/gamma)^-1 H_i <= gamma I

Newton's method on it needs two things of a client, both in units of the coefficients: ``C_i / gamma``, at most the identity for
any rows, and its distance from its cluster, ``theta_i - w``. Together they are its contribution ``v_i``.

    in each round
      coordinator   sends   ReleaseSums: w
      node          solves  theta_i, each client by itself, from its own rows
                    clips   v_i to length clip: a longer one is shortened as a whole
                    sends   sum of v_i + noise * clip * N(0, I), for each cluster of which it has clients
      coordinator   solves  one sweep of the two upper levels with these sums
    coordinator     sends   PlaceClients: w; each client moves to its best under w, and nothing comes back

A client is in one sum only, so its rows change all that is sent in a round by at most ``clip``, in Euclidean norm. A round is a
Gaussian mechanism (Dwork and Roth 2014, appendix A), and a run is the adaptive composition of ``rounds`` of them. For a
Gaussian loss the envelopes are quadratic, and one round finds the minimum. A second round is still worth its share of the
noise: it begins nearer, so that less is clipped and errors of ``C_i`` matter less.

Sums are whole multiples of ``2^-36 clip``: contributions are truncated to them, and noise is rounded to them. What is sent is
then the rounding of a Gaussian mechanism on integers, as exactly as floating-point numbers give the quantiles of the normal
distribution. It does not have the last digits of floating-point numbers, which could reveal the addends (Mironov 2012). Noise
comes from the system's randomness, not from the seed of the run.

**The accounting.** A release is a Gaussian mechanism of sensitivity ``clip`` and standard deviation ``noise * clip``. Adaptive
releases with noise ``z_1, z_2, ...`` cost as much as one release with ``1/z^2 = sum 1/z_t^2``. Its epsilon for a ``delta`` is
exact (Balle and Wang 2018, in the package dp-accounting).

Epsilon covers all rows of one client. With or without them, the probability of anything that leaves the nodes differs by at
most the factor ``exp(epsilon)``, up to a probability ``delta``. This holds against the coordinator, which sees the noisy sums
of each node, against the other sites, and against everybody who gets the model. Every node adds all the noise by itself, so
nothing depends on the honesty of other nodes, with masks or without.

Epsilon does not cover that a client takes part, in which cluster and at which site, nor the model of a client, which stays at
its node: ``docs/explanation/differential-privacy.md`` has the whole list. The costs of several runs on the same rows add up; a
site counts them in its ``privacy.json`` (:mod:`covey.federation.site.budget`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np
from scipy.special import ndtri

from covey._typing import Floats, Ints
from covey.errors import INSTALL_FLOWER, PenaltyError, SolverError, number
from covey.federation.wire.messages import Privacy
from covey.losses import FAMILIES, Gaussian
from covey.model.model import Fitted
from covey.model.summary import counted
from covey.nodes.network import Message, Network, Node, SetGamma, Sizes
from covey.objective.objective import Penalty
from covey.problem.problem import Spec
from covey.records import Axes, Reply
from covey.solvers.direct.elimination import Quadratic, Spread, descend, marginalise
from covey.solvers.direct.newton_node import LocalProblem
from covey.solvers.direct.sweep import solve_top
from covey.solvers.first_order.apgd import proximal_newton
from covey.solvers.ledger import Links
from covey.solvers.registry import first_order
from covey.solvers.result import Convergence, Fit

DELTA = 1e-6
CLIP = 1.0
_UP = 1 + 1e-9  # noise for an epsilon is rounded up, so that its epsilon is not above the target
_UNITS = 2.0**36  # units of a sum in one clip
_LAST = 1e-6  # the largest relative change of a client's coefficients in its last Newton step
_ROOT = float(np.sqrt(2.0))

Draw = Callable[[int], Floats]


# Messages


@dataclass(frozen=True)
class ReleaseSums(Message["NoisySums"], label="release sums"):
    """Send the sums of clipped contributions at the cluster models ``w (k, d)``, with noise."""

    w: Annotated[Floats, Axes("k d")]
    noise: float
    clip: float

    @property
    def sizes(self) -> Sizes:
        d = self.w.shape[1]
        return {"released": d * (d + 1) // 2 + d}

    def at(self, node: Node) -> NoisySums:
        v = node_contributions(node, self.w)
        sums = summed(clipped(v, self.clip), node.data.hierarchy.cluster_ptr)
        draw = system_normal if node.draw is None else node.draw
        # Everybody knows which clusters have no clients here, so their zero sums need no noise.
        full = node.data.hierarchy.sizes > 0
        sums[full] += np.rint(self.noise * _UNITS * draw(sums[full].size)).astype(np.int64).reshape(-1, sums.shape[1])
        return NoisySums(sums, full.astype(np.int64))


@dataclass(frozen=True)
class NoisySums(Reply):
    """Sums ``(k, d(d+1)/2 + d)`` with noise, in units of ``2^-36 clip``, and how many noises are in each."""

    sums: Annotated[Ints, Axes("k released")]
    draws: Annotated[Ints, Axes("k", "count")]


@dataclass(frozen=True)
class PlaceClients(Message[None], label="place clients", phase="finish"):
    """Move each client to its best under the cluster models ``w (k, d)``."""

    w: Annotated[Floats, Axes("k d")]

    def at(self, node: Node) -> None:
        node_settle(node, self.w)


# The node


def node_settle(node: Node, w: Floats) -> Floats:
    """Move each client to its best under its cluster's ``w``; returns the Hessians there ``(n, d, d)``."""
    tree = node.data.hierarchy
    if node.theta is None:
        node.theta = _near(node, w)
    theta, *_ = proximal_newton(node, w, np.zeros(tree.n_clients))  # until values of the objective do not fall any more
    here = node.loss.expand(node.data, theta)
    residual = here.gradient + node.gamma[:, None] * (theta - tree.down(w))
    step, _force = descend(here.hessian, -residual, LocalProblem.of(node).spread, tree.parent, np.zeros_like(w))
    node.theta = theta + np.where(np.abs(step) <= _LAST * (1.0 + np.abs(theta)), step, 0.0)  # twice as many digits
    return node.loss.expand(node.data, node.theta).hessian


def _near(node: Node, w: Floats) -> Floats:
    """Starting points of the clients: their cluster; if exp could overflow, the solution of a linear problem near the loss."""
    parent, linear = node.data.hierarchy.parent, node.loss.working_response(node.data)
    if linear is None:
        return w[parent]
    near = Gaussian(node.loss.reduction, node.loss.ridge).expand(linear, np.zeros((len(parent), w.shape[1])))
    return descend(near.hessian, -near.gradient, LocalProblem.of(node).spread, parent, w)[0]


def node_contributions(node: Node, w: Floats) -> Floats:
    """Contributions of the clients to the sums, ``(n, d(d+1)/2 + d)``: ``C_i / gamma`` as a vector, and ``theta_i - w``."""
    H = node_settle(node, w)
    tree, nothing = node.data.hierarchy, np.zeros(len(H))
    expanded = Quadratic(H, np.zeros(H.shape[:2]), nothing, nothing)
    own = marginalise(expanded, Spread.of_penalty(node.gamma, H.shape[1]), tree.cluster_ptr)
    return np.hstack([flat(own.C / node.gamma[:, None, None]), node.coefficients() - tree.down(w)])


def clipped(v: Floats, clip: float) -> Ints:
    """Contributions in whole units, shortened to length ``clip`` if they are longer, or zero if they are not finite."""
    v = np.where(np.isfinite(v).all(axis=1, keepdims=True), v, 0.0)
    largest = np.abs(v).max(axis=1, keepdims=True, initial=0.0)
    shape = v / np.where(largest > 0, largest, 1.0)  # so that no square overflows or vanishes
    norm = np.sqrt((shape**2).sum(axis=1, keepdims=True))
    with np.errstate(over="ignore"):
        length = largest / clip * norm
    # Slightly below the clip, so that rounding cannot bring a contribution above it.
    length = np.minimum(length, 1 - 1e-12)
    return np.asarray(np.trunc(shape / np.where(norm > 0, norm, 1.0) * (length * _UNITS)).astype(np.int64))


def summed(units: Ints, ptr: Ints) -> Ints:
    """Sums over the clients of each cluster; integers, so the order does not matter."""
    running = np.concatenate([np.zeros((1, units.shape[1]), dtype=np.int64), np.cumsum(units, axis=0)])
    return np.asarray(running[ptr[1:]] - running[ptr[:-1]])


def system_normal(n: int) -> Floats:
    """Standard normal numbers from the system's randomness, by the inverse of 129 bits, so that the tails are accurate too."""
    words = np.frombuffer(os.urandom(24 * n), dtype=np.uint64).reshape(n, 3)
    below_half = words[:, 0] * 2.0**-65 + (words[:, 1] + 1.0) * 2.0**-129
    sign = np.where(words[:, 2] & np.uint64(1), 1.0, -1.0)
    return np.asarray(sign * ndtri(below_half))


def seeded_normal(*seed: int) -> Draw:
    """Standard normal numbers from a seed, for tests and simulation, where nothing is secret."""
    return np.random.default_rng(seed).standard_normal


# Symmetric matrices as vectors of the same length


def flat(C: Floats) -> Floats:
    """The upper triangles of ``C (m, d, d)``, off-diagonals times the square root of two, so that norms stay the same."""
    rows, columns = np.triu_indices(C.shape[1])
    return np.asarray(C[:, rows, columns] * np.where(rows == columns, 1.0, _ROOT))


def square(v: Floats, d: int) -> Floats:
    """The reverse of :func:`flat`."""
    rows, columns = np.triu_indices(d)
    C = np.zeros((len(v), d, d))
    C[:, rows, columns] = C[:, columns, rows] = v / np.where(rows == columns, 1.0, _ROOT)
    return C


# The coordinator


def private_across(network: Network, penalty: Penalty, privacy: Privacy) -> Fit:
    """Private sweeps over any network; the models of the clients stay at their nodes.

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
    rounds = counted(privacy.rounds, "round")
    message = f"{rounds} of sums with noise; nothing is sent by which to tell how near the minimum this is"
    end = Convergence("private", False, privacy.rounds, privacy.rounds + 1, np.nan, np.nan, None, message)
    return Fit(np.empty((0, d)), w, wbar, end, None, ledger)


def next_top(
    reply: NoisySums, w: Floats, gamma: Floats, spread: Spread, sizes: Ints, privacy: Privacy
) -> tuple[Floats, Floats]:
    """The upper levels after a release: a Newton step with the noisy sums, whose matrices are made plausible first."""
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
    """Matrices with eigenvalues between the noise level and the number of clients, which bounds the true sum.

    An eigenvalue below the noise cannot be distinguished from zero, and a step divided by it would be noise.
    """
    values, vectors = np.linalg.eigh(C)
    low = np.minimum(sd * np.sqrt(C.shape[1]), sizes)[:, None]
    return np.asarray(np.einsum("jab,jb,jcb->jac", vectors, np.clip(values, low, sizes[:, None]), vectors))


def cluster_gammas(network: Network, penalty: Penalty) -> Floats:
    """The common ``gamma`` of the clients of each cluster ``(k,)``; different ones would need separate sums."""
    tree = network.tree
    gamma = np.ones(tree.n_clusters)
    gamma[tree.sizes > 0] = penalty.gamma[tree.cluster_ptr[:-1][tree.sizes > 0]]
    odd = np.flatnonzero((gamma[tree.parent] != penalty.gamma) | (penalty.gamma == 0))
    if len(odd):
        cluster = tree.cluster_ids[int(tree.parent[odd[0]])]
        raise PenaltyError(f"With differential privacy all clients of cluster {cluster!r} have one positive gamma; give that.")
    return gamma


# The accountant


def spent(releases: Iterable[tuple[float, int]], delta: float = DELTA) -> float:
    """The epsilon of releases, given as pairs of their noise and their number.

    >>> round(spent([(5.0, 1)], delta=1e-5), 3), round(spent([(5.0, 4)], delta=1e-5), 3)
    (0.726, 1.555)
    """
    gaussian = _accounting(delta).get_epsilon_gaussian
    made = [(noise, count) for noise, count in releases if count]
    if any(noise <= 0 for noise, _ in made):
        return math.inf
    precision = sum(count / noise**2 for noise, count in made)
    return float(gaussian(1 / math.sqrt(precision), delta)) if precision else 0.0


def noise_for(target: float, releases: int, delta: float = DELTA) -> float:
    """The least noise with which a number of releases cost at most the epsilon ``target``.

    >>> round(noise_for(1.0, releases=1, delta=1e-5), 2), round(noise_for(1.0, releases=4, delta=1e-5), 2)
    (3.73, 7.46)
    """
    sigma = _accounting(delta).get_sigma_gaussian
    return float(sigma(number("epsilon", target, above=0), delta)) * math.sqrt(releases) * _UP


def _accounting(delta: float) -> Any:
    """The package with the formulas, for a delta that they are valid for."""
    number("delta", delta, above=0, below=1)
    try:
        import dp_accounting
    except ImportError:
        raise SolverError(f"epsilon needs the package 'dp-accounting'; {INSTALL_FLOWER}.") from None
    return dp_accounting


# The operator


def privacy_of(settings: Mapping[str, Any], family: str) -> tuple[Privacy | None, float]:
    """The privacy that the settings ``epsilon``, ``delta``, ``clip`` and ``rounds`` ask for, or None; and delta."""
    given = {name: settings[name] for name in ("epsilon", "delta", "clip", "rounds") if settings.get(name) not in (None, "")}
    delta = given.get("delta", DELTA)
    if "epsilon" not in given:
        if given:
            raise SolverError(f"The setting {next(iter(given))!r} belongs to differential privacy; give epsilon too.")
        return None, delta
    rounds = given.get("rounds", FAMILIES[family].private_rounds if family in FAMILIES else 1)
    asked = Privacy(1.0, given.get("clip", CLIP), rounds)  # checks rounds and clip
    return replace(asked, noise=noise_for(given["epsilon"], rounds, delta)), delta


def check_spec(spec: Spec) -> None:
    """Refuse what cannot be fitted privately: learned penalties, and solvers that send more."""
    if spec.learns is not None:
        raise SolverError("Differential privacy needs given penalties, since learning them sends more; give gamma and lam.")
    other = f"baseline={spec.baseline!r}" if spec.baseline is not None else f"solver={spec.solver!r}"
    if spec.baseline is not None or spec.solver in first_order():
        raise SolverError(f"Differential privacy goes with solver 'auto', 'sweep' or 'newton'; leave out {other}.")
    if spec.trials is not None or (spec.formula or "").lstrip().startswith("cbind"):
        raise SolverError("Differential privacy does not go with numbers of trials; give one row for each trial.")
    if spec.standardize:
        raise SolverError("Differential privacy does not go with standardize=True, whose sums have no noise; scale columns.")
    if spec.james_stein:
        why = "which needs an estimate of the noise that a private run does not have"
        raise SolverError(f"Differential privacy does not go with james_stein=True, {why}; leave it out.")


def check_delta(delta: float, clients: int) -> None:
    """Refuse a delta so large that publishing the rows of one client would satisfy it."""
    if delta * clients >= 1:
        why = f"A delta of {delta:g} for {clients} clients is too large: publishing one client's rows would satisfy it"
        raise SolverError(f"{why}; give one well below 1/{clients}.")


def fit_privately(network: Network, spec: Spec, privacy: Privacy, stated: Mapping[str, Any]) -> Fitted:
    """Private sweeps with the penalties of the specification; the message of their convergence states the privacy."""
    penalty = Penalty.of(network.tree, gamma=1.0 if spec.gamma is None else spec.gamma, lam=spec.lam, alpha=spec.alpha)
    network.ask(SetGamma(cluster_gammas(network, penalty)))
    fit, many = private_across(network, penalty, privacy), counted(stated["releases"], "release")
    bound = f"(epsilon, delta) = ({stated['epsilon']:.4g}, {stated['delta']:.4g}) for every client"
    how = f"clip {stated['clip']:.4g}, noise {stated['noise']:.4g}, {many}"
    end = replace(fit.convergence, message=f"{fit.convergence.message}; differential privacy: {bound}, {how}")
    return Fitted(replace(fit, convergence=end), penalty)


def privacy_statement(privacy: Privacy, delta: float, starts: int = 1) -> dict[str, Any]:
    """Epsilon and delta of a fit; ``starts`` is how often it began, since each start may have released all its rounds."""
    releases = starts * privacy.rounds
    cost = spent([(privacy.noise, releases)], delta)
    return {"epsilon": cost, "delta": delta, "clip": privacy.clip, "noise": privacy.noise, "releases": releases}
