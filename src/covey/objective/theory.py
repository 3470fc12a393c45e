"""Theory of the randomised algorithms: constants of a problem, probabilities, expected smoothness, rates and bounds.

The paper is "Personalized Federated Learning with Multiple Known Clusters" (arXiv:2204.13619). Its theorems use these constants
of a problem (:class:`Constants`):

    L, Ltilde    smoothness of the losses f_i of the clients, and of the functions f_il of single rows
                 (Assumptions 2.1 (smooth_and_convex) and 4.1 (strong_conv_smooth_ae))
    mu           strong convexity of the objective
    C1, C2       max alpha_j gamma_i and max (1 - alpha_j) gamma_i, the smoothness of the penalties
                 (Proposition 3.4 (reg_conv))

From these follow the formulas below, and those in the files of the algorithms:

    Proposition 3.3 (opt_tau)          best_tau
    Theorem 3.5 (conv_rate)            distance_bound, iterations
    Corollary 3.6 (opt_conv_rate)      best_probabilities; best_schedules with an L_j and a p_j for each cluster
    Lemma A.1 (es), Lemma 4.2 (al2sgd_gradient_oracle_expected_smoothness)    expected_smoothness
    Corollary A.2 (sm)                 noise
    Theorem 4.3 (al2sgd_conv_rate), Corollary 4.4 (async_al2sgd_plus_opt_conv_rate)    solvers/first_order/al2sgd_plus.py

With one cluster, ``tbar_j = tbar`` and every ``alpha`` gives the same objective. ``alpha`` is then set to 1, so that ``C2 = 0``
and the algorithm is the one for a single cluster.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from covey._typing import Floats
from covey.errors import SolverError, number, probability, warn
from covey.objective.objective import Objective, Penalty
from covey.tree.hierarchy import Hierarchy


@dataclass(frozen=True)
class Constants:
    """Constants of a problem that the theorems use.

    Attributes
    ----------
    L : smoothness of the loss of every client
    L_row : ``Ltilde``, smoothness of every ``f_il`` in ``f_i = 1/m_i sum_l f_il``
    mu : strong convexity of the objective
    gamma : (k,) largest penalty in each cluster
    alpha : (k,) mixing weight of each cluster; 1 if there is only one cluster
    single : (k,) clusters of one client, which is its own average, so that they need no exchange within; None if there are none
    L_j, L_row_j : (k,) ``L`` and ``L_row`` of the clients of each cluster; None if only the largest are known
    weights : (k,) weight of each cluster in the global average; None if not measured
    q : strong convexity of the objective if the unit of each client's curvature is its own smoothness; 0 if not measured
    note : how ``L`` and ``mu`` were measured; empty if they are bounds that hold everywhere
    proved : whether ``mu`` is a bound that holds everywhere
    """

    L: float
    L_row: float
    mu: float
    gamma: Floats
    alpha: Floats
    note: str = ""
    proved: bool = True
    single: npt.NDArray[np.bool_] | None = None
    L_j: Floats | None = None
    L_row_j: Floats | None = None
    q: float = 0.0
    weights: Floats | None = None

    @property
    def of_clients(self) -> Floats:
        """Smoothness of the clients' losses in each cluster, ``(k,)``."""
        return np.full(len(self.gamma), self.L) if self.L_j is None else self.L_j

    @property
    def of_rows(self) -> Floats:
        """Smoothness of the functions of single rows in each cluster, ``(k,)``."""
        return np.full(len(self.gamma), self.L_row) if self.L_row_j is None else self.L_row_j

    @property
    def pull(self) -> Floats:
        """``(1 - alpha_j) max gamma_i``, the smoothness of ``psi_j``, ``(k,)``; 0 in a cluster of one client."""
        pull = (1 - self.alpha) * self.gamma
        return pull if self.single is None else np.where(self.single, 0.0, pull)

    @property
    def C1(self) -> float:
        return float((self.alpha * self.gamma).max())

    @property
    def C2(self) -> float:
        return float(self.pull.max())

    @property
    def gamma_max(self) -> float:
        return float(self.gamma.max())

    def need_curvature(self) -> None:
        """Raise an error if no theorem gives a rate for this problem."""
        if not math.isfinite(self.L) or not self.mu > 0:
            flat = "in some direction it is flat (mu = 0) up to rounding"
            what = flat if math.isfinite(self.L) else "its curvature has no upper bound"
            raise SolverError(
                f"No rate is known for this problem: {what}. Standardise the columns, drop columns that are combinations of "
                "others, add a ridge, give mu=, or use solver='newton'."
            )


def largest_gamma(tree: Hierarchy, penalty: Penalty) -> Floats:
    """Return the largest penalty in each cluster, ``(k,)``; 0 for an empty cluster."""
    clusters = np.flatnonzero(tree.sizes)
    gamma = np.zeros(tree.n_clusters)
    gamma[clusters] = np.maximum.reduceat(penalty.gamma, tree.cluster_ptr[:-1][clusters])
    return gamma


def mixing(penalty: Penalty) -> Floats:
    """Return ``alpha`` as the algorithms use it, ``(k,)``; 1 if there is only one cluster."""
    return np.ones(1) if len(penalty.lam) == 1 else penalty.alpha


def alpha_weights(penalty: Penalty) -> Floats:
    """Return the weight of each cluster in the global average, ``(k,)``: its part of ``sum_j alpha_j Gamma_j``."""
    weights = mixing(penalty) * penalty.cluster_gamma
    weights = weights if weights.any() else np.ones_like(weights)
    return np.asarray(weights / weights.sum())


# Probabilities


class Shares(NamedTuple):
    """Strength of the steps towards averages, ``(k,)`` each.

    A step with ``xi_0 = 1`` uses ``whole`` and ``cluster``; a step with ``xi_j = 1`` uses ``within``.
    """

    whole: Floats
    cluster: Floats
    within: Floats


@dataclass(frozen=True)
class Probabilities:
    """Probabilities of exchanges: ``p0`` between clusters, ``p (k,)`` within each cluster, ``rho`` for a new anchor.

    ``tau (k,)`` is the share of ``psi_j`` in a step between clusters. ``present (k,)`` is the probability that a cluster takes
    part in an exchange between clusters; None if all always do.
    """

    p0: float
    p: Floats
    tau: Floats
    rho: float = 0.0
    present: Floats | None = None

    def shares(self, alpha: Floats) -> Shares:
        """Return the strength of each kind of step, before multiplication by ``eta``."""
        chance, p0 = (1 - self.p0) * self.p, self.reached
        whole, cluster = (np.where(p0 > 0, part / np.where(p0 > 0, p0, 1.0), 0.0) for part in (alpha, self.tau * (1 - alpha)))
        return Shares(whole, cluster, (1 - self.tau) * (1 - alpha) / np.where(chance > 0, chance, 1.0))

    @property
    def local(self) -> Floats:
        """Factor of a local step, ``1 / ((1 - p0)(1 - p_j))``, ``(k,)``."""
        return 1.0 / ((1.0 - self.p0) * (1.0 - self.p))

    @property
    def reached(self) -> Floats:
        """Probability that a cluster takes part in an exchange between clusters in an iteration, ``(k,)``."""
        return self.p0 * (np.ones_like(self.p) if self.present is None else self.present)


def best_tau(p0: float, p: Floats, present: Floats | float = 1.0) -> Floats:
    """Return ``p0 / (p0 + 2 (1 - p0) p_j)``, which has the least variance of steps on ``psi_j``: Proposition 3.3 (opt_tau).

    If a cluster takes part with probability ``present``, the first two ``p0`` are ``p0 present_j``.
    """
    reached = p0 * present
    share = reached + 2 * (1 - p0) * p
    return np.where(share > 0, reached / np.where(share > 0, share, 1.0), 0.0)


def psi_variance(p0: float, p: Floats, tau: Floats, present: Floats | float = 1.0) -> Floats:
    """Return ``2 tau^2 / (p0 present_j) + (1 - tau)^2 / ((1 - p0) p_j)``, the weight of ``psi_j`` in the variance of a step.

    At ``best_tau`` it is ``2 / (p0 present_j + 2 (1 - p0) p_j)``. It is infinite if part of ``psi_j`` belongs to an exchange
    with probability 0.
    """
    return _ratio(2 * tau**2, np.zeros_like(p) + p0 * present) + _ratio((1 - tau) ** 2, (1 - p0) * p)


def sampled_smoothness(known: Constants, present: Floats | None) -> float:
    """Return ``C1``, the expected smoothness of steps on ``phi`` if clusters take part with probability ``present (k,)``.

    It is ``max_j alpha_j gamma_j / present_j * (1 + 2 max_l omega_l (1 / present_l - 1))``, where ``omega_l`` is the weight of
    a cluster in the global average (docs/explanation/algorithms.md, "Partial participation").
    """
    if present is None or known.weights is None:
        return known.C1
    return float((known.alpha * known.gamma / present).max()) * (1 + 2 * float((known.weights * (1 / present - 1)).max()))


def best_probabilities(C1: float, C2: float, L: float) -> tuple[float, float]:
    """Return the ``p0`` and the common ``p_j`` with the least bound on ``calL``: Corollary 3.6 (opt_conv_rate).

    >>> best_probabilities(0.0, 1.0, 3.0)  # independent clusters: no exchange between them
    (0.0, 0.25)
    >>> best_probabilities(1.0, 0.0, 2.0)  # one cluster: no exchange within
    (0.5, 0.0)
    """
    if C2 > C1:
        return 2 * C1 / (C1 + C2 + L), (C2 - C1) / (C2 - C1 + L)
    return 2 * C1 / (2 * C1 + L), 0.0


def best_schedules(known: Constants, L: npt.ArrayLike, present: Floats | None = None) -> tuple[float, Floats]:
    """Return the ``p0`` and ``p (k,)`` with the least ``calL``, with the smallest such ``p_j``; ``L`` may differ by cluster.

    ``calL`` is at most some number ``x`` if ``p0 >= 2 C1 / x``, ``2 (1 - alpha_j) gamma_j / (p0 + 2 (1 - p0) p_j) <= x`` and
    ``L_j / ((1 - p0)(1 - p_j)) <= x`` for every cluster. Such a ``p_j`` exists if ``x`` is at least ``C1 + L_j + max(C1,
    (1 - alpha_j) gamma_j)``. So the least ``calL`` is the largest of these sums, at ``p0 = 2 C1 / calL``. If all ``L_j`` are
    equal, it is that of Corollary 3.6 (opt_conv_rate). With partial participation ``p0`` in the second condition is ``p0
    present_j``, and the sums are ``(2 - present_j) C1 + L_j + max(present_j C1, (1 - alpha_j) gamma_j)``.

    >>> known = Constants(1.0, 1.0, 0.1, np.array([0.1, 1.0, 10.0]), np.full(3, 0.1))
    >>> p0, p = best_schedules(known, 1.0)
    >>> round(p0, 3), p.round(3).tolist()
    (0.182, [0.0, 0.0, 0.889])
    """
    C1, q = sampled_smoothness(known, present), 1.0 if present is None else present
    calL = C1 + float((np.asarray(L) + (1 - q) * C1 + np.maximum(known.pull, q * C1)).max())
    p0 = 2 * C1 / calL
    return p0, own_schedules(known, L, p0, present)


def own_schedules(known: Constants, L: npt.ArrayLike, p0: float, present: Floats | None = None) -> Floats:
    """Return the smallest ``p_j`` with the least ``calL`` for a given ``p0``, ``(k,)``; see :func:`best_schedules`."""
    C1, q = sampled_smoothness(known, present), 1.0 if present is None else present
    across = 2 * C1 / p0 if C1 > 0 else 0.0
    inside = (known.pull + np.asarray(L)) / (1 - p0 * (1 - q / 2))
    calL = max(across, float(inside.max()), float(np.max(L)) / (1 - p0))
    return np.maximum((2 * known.pull / calL - p0 * q) / (2 * (1 - p0)), 0.0)


def probabilities(
    known: Constants,
    L: npt.ArrayLike,
    *,
    p0: float | None = None,
    p: npt.ArrayLike | None = None,
    tau: npt.ArrayLike | None = None,
    rho: float = 0.0,
    participation: npt.ArrayLike | None = None,
) -> Probabilities:
    """Return the given probabilities, by default the best ones; raise an error if steps would be biased.

    ``L`` is the smoothness of the losses, one number or ``(k,)``. By default each cluster has its own ``p_j``
    (:func:`best_schedules`). ``p="common"`` is the paper's common value.
    """
    k = len(known.gamma)
    present = None if participation is None else _participation(participation, k)
    ours = best_probabilities(sampled_smoothness(known, present), known.C2, float(np.max(L)))
    best = best_schedules(known, L, present)[0] if p is None else ours[0]
    chance = probability("p0", best if p0 is None else p0)
    if known.C1 > 0 and chance == 0:
        raise SolverError(
            "With p0 = 0 there is no exchange between clusters, but alpha > 0 needs one; give p0 > 0, or alpha = 0."
        )
    if isinstance(p, str) and p != "common":
        raise SolverError(f"The 'p' parameter must be a number, one number for each cluster, or 'common'. Got {p!r} instead.")
    given = ours[1] if isinstance(p, str) else p
    rare = given is None and chance < 1
    within = own_schedules(known, L, chance, present) if rare else _per_cluster("p", ours[1] if given is None else given, k)
    part: Any = 1.0 if present is None else present
    share = best_tau(chance, within, part) if tau is None else _per_cluster("tau", tau, k)
    if chance == 1 or (within == 1).any():
        raise SolverError("With a probability of 1 no client takes a step on its data; give p0 < 1 and p < 1.")
    lost = np.isinf(psi_variance(chance, within, share)) & (known.pull > 0)
    if lost.any():
        j = int(lost.argmax())
        raise SolverError(
            f"tau = {share[j]:g} leaves part of the pull to cluster number {j} to an exchange that never happens (p0 = "
            f"{chance:g}, p = {within[j]:g}), so the steps would be biased; leave tau out, or change the probabilities."
        )
    return Probabilities(chance, within, share, rho, present)


def _participation(value: npt.ArrayLike, k: int) -> Floats | None:
    """The probability of each cluster to take part, ``(k,)``; None if all are 1."""
    if isinstance(value, str):
        raise SolverError(
            f"participation={value!r} is not possible: the theorem needs clusters that are drawn independently of the data and "
            "of the run, and which clusters answer in time is not; give one probability, or one for each cluster."
        )
    present = _per_cluster("participation", value, k)
    if not (present > 0).all():
        j = int((present == 0).argmax())
        raise SolverError(
            f"With participation = 0 cluster number {j} would never learn from the others; give a number above 0."
        )
    return None if (present == 1).all() else present


def _per_cluster(name: str, value: Any, k: int) -> Floats:
    listed = value.tolist() if isinstance(value, np.ndarray) else value
    values = [probability(name, each) for each in (listed if isinstance(listed, list | tuple) else [listed])]
    if len(values) not in (1, k):
        raise SolverError(f"The {name!r} parameter must hold 1 or {k} values, one for each cluster. Got {len(values)} instead.")
    return np.full(k, values[0]) if len(values) == 1 else np.array(values)


# Rates and bounds of Algorithm 1 (async_l2gd), with two probabilities or one


def expected_smoothness(known: Constants, chances: Probabilities, L: npt.ArrayLike) -> float:
    """Return ``calL`` for any ``tau``: Lemma A.1 (es) with the smoothness of clients, Lemma 4.2 with that of rows.

    ``L`` is one number, or one for each cluster: the losses of different clusters are separate terms in both lemmas.
    """
    C1, pull = sampled_smoothness(known, chances.present), known.pull
    across = 2 * C1 / chances.p0 if C1 > 0 else 0.0
    present: Any = 1.0 if chances.present is None else chances.present
    weight = psi_variance(chances.p0, chances.p, chances.tau, present)
    within = np.where(pull > 0, pull * np.where(pull > 0, weight, 0.0), 0.0)
    return float(max(across, within.max(), (np.asarray(L) * chances.local).max()))


def noise(objective: Objective, theta: Floats, chances: Probabilities) -> float:
    """Return ``sigma^2``, the bound on the variance of a step at the minimiser ``theta``: Corollary A.2 (sm)."""
    tree, penalty = objective.data.hierarchy, objective.penalty
    alpha = mixing(penalty)[tree.parent]
    tbar_j, tbar = objective.means(theta)
    phi = ((alpha * penalty.gamma)[:, None] * (theta - tbar)) ** 2
    psi = (((1 - alpha) * penalty.gamma)[:, None] * (theta - tree.down(tbar_j))) ** 2
    f = objective.loss.gradient(objective.data, theta) ** 2
    present = np.ones(tree.n_clusters) if chances.present is None else chances.present
    if phi.any() and chances.present is not None:
        # A client sees the average of those present; the others' averages add their share of the variance.
        omega = alpha_weights(penalty)
        apart = ((theta[:, None] - tbar_j[None]) ** 2).sum(axis=2) * (omega**2 * (1 / present - 1))
        apart[np.arange(len(theta)), tree.parent] = 0.0
        phi = (phi.sum(axis=1) + (alpha * penalty.gamma) ** 2 * apart.sum(axis=1)) / present[tree.parent]
    across = 2 * phi.sum() / chances.p0 if phi.any() else 0.0
    weight = psi_variance(chances.p0, chances.p, chances.tau, present)[tree.parent]
    within = np.where(psi.sum(axis=1) > 0, np.where(np.isinf(weight), 0.0, weight) * psi.sum(axis=1), 0.0)
    return float(across + within.sum() + (chances.local[tree.parent] * f.sum(axis=1)).sum())


def distance_bound(t: npt.ArrayLike, *, eta: float, mu: float, sigma2: float, start: float) -> Floats:
    """Bound ``E|theta^t - theta_hat|^2`` for a constant step of at most ``1/(2 calL)``: Theorem 3.5 (conv_rate).

    ``start`` is the squared distance at ``t = 0``.
    """
    return (1 - eta * mu) ** np.asarray(t, dtype=np.float64) * start + 2 * eta * sigma2 / mu


def switching_steps(t: npt.ArrayLike, smoothness: float, mu: float) -> Floats:
    """Return the steps ``1/(2 calL)`` up to ``t = 4 ceil(calL/mu)``, then ``(2t + 1) / ((t + 1)^2 mu)``.

    With these the algorithm converges (Gower et al. 2019, SGD: General Analysis and Improved Rates, Theorem 3.2).
    """
    t = np.asarray(t, dtype=np.float64)
    return np.where(t <= switch(smoothness, mu), 1 / (2 * smoothness), (2 * t + 1) / ((t + 1) ** 2 * mu))


def switch(smoothness: float, mu: float) -> int:
    """Return the last iteration with the constant step."""
    return 4 * math.ceil(smoothness / mu)


def switching_bound(t: npt.ArrayLike, *, smoothness: float, mu: float, sigma2: float, start: float) -> Floats:
    """Bound ``E|theta^t - theta_hat|^2`` for switching steps, from iteration ``switch(...)`` on."""
    t = np.asarray(t, dtype=np.float64)
    bound: Floats = sigma2 / mu**2 * 8 / t + 16 * math.ceil(smoothness / mu) ** 2 / (math.e**2 * t**2) * start
    return bound


def iterations(accuracy: float, *, smoothness: float, mu: float, sigma2: float = 0.0, start: float = 1.0) -> tuple[int, float]:
    """Return the iterations of Algorithm 1 until ``E|theta^t - theta_hat|^2 <= accuracy * start``, and the constant step.

    Half of the accuracy is for the noise, which decreases with the step, and half for the distance from the start.
    """
    eta = 1 / (2 * smoothness)
    if sigma2 > 0:
        eta = min(eta, accuracy * start * mu / (4 * sigma2))
    return max(1, math.ceil(math.log(2 / accuracy) / -math.log1p(-min(eta * mu, 0.5)))), eta


def switching_iterations(accuracy: float, *, smoothness: float, mu: float, sigma2: float, start: float) -> int:
    """Return the iterations until ``switching_bound`` is below ``accuracy * start``."""
    linear, square = 8 * sigma2 / mu**2, 16 * math.ceil(smoothness / mu) ** 2 / math.e**2 * start
    target = accuracy * start
    t = (linear + math.sqrt(linear**2 + 4 * target * square)) / (2 * target)
    return max(switch(smoothness, mu), math.ceil(t))


@dataclass(frozen=True)
class Recipe:
    """Settings of an algorithm by theory: probabilities, expected smoothness, and the largest step with its formula.

    Solvers and plans both use it.
    """

    probabilities: Probabilities
    smoothness: float
    largest_step: float
    reason: str

    def step(self, eta: float | None) -> float:
        """Return the given step, by default the largest; warn if the given step is above the largest."""
        if eta is None:
            return self.largest_step
        given = number("eta", eta, above=0.0)
        if given > self.largest_step * (1 + 1e-12):
            warn(
                f"the step eta = {given:.3g} is above {self.largest_step:.3g} = {self.reason}, the largest step with proved "
                "convergence; the iterates may diverge"
            )
        return given


def _ratio(above: Floats, below: Floats) -> Floats:
    """Return ``above / below`` with ``0 / 0 = 0``."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(above == 0, 0.0, above / below)
