"""Theory that the randomised algorithms share: constants of a problem, probabilities, expected smoothness, rates and bounds.

The paper is arXiv:2204.13619. What its theorems need to know of a problem is in :class:`Constants`:

    L, Ltilde    smoothness of the clients' losses f_i, and of the single-row functions they average
    mu           strong convexity of the objective
    C1, C2       max alpha_j gamma_i  and  max (1 - alpha_j) gamma_i

Everything else follows from those, by the formulas below and those in each algorithm's own file. With one cluster,
``tbar_j = tbar`` and any ``alpha`` gives the same objective, so ``alpha`` counts as 1 there: ``C2 = 0``, and the method is the
single-cluster one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from covey._typing import Floats
from covey.errors import SolverError, number, probability, warn
from covey.losses import Loss
from covey.objective.objective import Objective, Penalty
from covey.tables.rows import GroupedData
from covey.tree.hierarchy import Hierarchy


@dataclass(frozen=True)
class Constants:
    """What the theorems need to know of a problem.

    Attributes
    ----------
    L : smoothness of every client's loss
    L_row : ``Ltilde``, smoothness of every ``f_il`` in ``f_i = 1/m_i sum_l f_il``
    mu : strong convexity of the objective
    gamma : (k,) the largest penalty in each cluster
    alpha : (k,) mixing weight of each cluster; 1 where there is only one
    note : how ``L`` and ``mu`` were had, where they are not bounds that hold everywhere; else empty
    proved : whether ``mu`` is such a bound
    """

    L: float
    L_row: float
    mu: float
    gamma: Floats
    alpha: Floats
    note: str = ""
    proved: bool = True

    @classmethod
    def of(
        cls,
        data: GroupedData,
        loss: Loss,
        penalty: Penalty,
        *,
        L: float | None = None,
        L_row: float | None = None,
        mu: float | None = None,
        note: str = "",
    ) -> Constants:
        """From bounds that hold at every point, unless they are given.

        >>> from covey import GroupedData, Penalty
        >>> from covey.losses import Gaussian
        >>> data = GroupedData.from_arrays([[2.0], [1.0], [3.0]], [0.0, 1.0, 2.0], ["a", "b", "c"], ["x", "x", "y"])
        >>> known = Constants.of(data, Gaussian(), Penalty.of(data.hierarchy, gamma=1.0, alpha=0.25))
        >>> known.L, round(known.mu, 9), known.C1, known.C2
        (9.0, 1.0, 0.25, 0.75)
        """
        return cls(
            float(loss.smoothness(data).max()) if L is None else L,
            float(loss.row_smoothness(data).max(initial=loss.ridge)) if L_row is None else L_row,
            float(loss.strong_convexity(data).min()) if mu is None else mu,
            largest_gamma(data.hierarchy, penalty),
            mixing(penalty),
            note,
        )

    @property
    def C1(self) -> float:
        return float((self.alpha * self.gamma).max())

    @property
    def C2(self) -> float:
        return float(((1 - self.alpha) * self.gamma).max())

    @property
    def gamma_max(self) -> float:
        return float(self.gamma.max())

    def need_curvature(self) -> None:
        """Refuse a problem whose rate no theorem gives."""
        if not math.isfinite(self.L) or not self.mu > 0:
            what = "its curvature has no upper bound"
            if math.isfinite(self.L):
                what = "in some direction it is flat (mu = 0), or too nearly so to tell"
            raise SolverError(
                f"No rate is known for this problem: {what}. Standardise the columns, drop those that others explain, add a "
                "ridge, give mu=, or use solver='newton'."
            )


def largest_gamma(tree: Hierarchy, penalty: Penalty) -> Floats:
    """The largest penalty in each cluster, ``(k,)``; 0 where it is empty."""
    clusters = np.flatnonzero(tree.sizes)
    gamma = np.zeros(tree.n_clusters)
    gamma[clusters] = np.maximum.reduceat(penalty.gamma, tree.cluster_ptr[:-1][clusters])
    return gamma


def mixing(penalty: Penalty) -> Floats:
    """``alpha`` as the algorithms use it."""
    return np.ones(1) if len(penalty.lam) == 1 else penalty.alpha


# Probabilities


class Shares(NamedTuple):
    """The strength of steps towards averages, ``(k,)`` each.

    ``whole`` and ``cluster`` are those of a step with ``xi_0 = 1``, ``within`` that of one with ``xi_j = 1``.
    """

    whole: Floats
    cluster: Floats
    within: Floats


@dataclass(frozen=True)
class Probabilities:
    """Probabilities of an exchange: ``p0`` between clusters, ``p (k,)`` within each, ``rho`` of a refresh of the anchor.

    ``tau (k,)`` is the share of ``psi_j`` that a step between clusters takes.
    """

    p0: float
    p: Floats
    tau: Floats
    rho: float = 0.0

    def shares(self, alpha: Floats) -> Shares:
        """The strength of each kind of step, before ``eta``."""
        chance = (1 - self.p0) * self.p
        whole, cluster = (part / self.p0 if self.p0 > 0 else 0 * part for part in (alpha, self.tau * (1 - alpha)))
        return Shares(whole, cluster, (1 - self.tau) * (1 - alpha) / np.where(chance > 0, chance, 1.0))

    @property
    def local(self) -> Floats:
        """What a local step is multiplied by, ``1 / ((1 - p0)(1 - p_j))``; ``(k,)``."""
        return 1.0 / ((1.0 - self.p0) * (1.0 - self.p))


def best_tau(p0: float, p: Floats) -> Floats:
    """``p0 / (p0 + 2 (1 - p0) p_j)``: least variance of the steps on ``psi_j`` (prop. opt_tau)."""
    share = p0 + 2 * (1 - p0) * p
    return np.where(share > 0, p0 / np.where(share > 0, share, 1.0), 0.0)


def psi_variance(p0: float, p: Floats, tau: Floats) -> Floats:
    """``2 tau^2 / p0 + (1 - tau)^2 / ((1 - p0) p_j)``: the weight of ``psi_j`` in the variance of a step.

    At ``best_tau`` it is ``2 / (p0 + 2 (1 - p0) p_j)``; infinite where an exchange that never happens has to carry a share.
    """
    return _ratio(2 * tau**2, np.full_like(p, p0)) + _ratio((1 - tau) ** 2, (1 - p0) * p)


def best_probabilities(C1: float, C2: float, L: float) -> tuple[float, float]:
    """The ``p0`` and common ``p_j`` with the least bound on ``calL`` (cor. opt_conv_rate).

    >>> best_probabilities(0.0, 1.0, 3.0)  # independent clusters: no exchange between them
    (0.0, 0.25)
    >>> best_probabilities(1.0, 0.0, 2.0)  # one cluster: no exchange within
    (0.5, 0.0)
    """
    if C2 > C1:
        return 2 * C1 / (C1 + C2 + L), (C2 - C1) / (C2 - C1 + L)
    return 2 * C1 / (2 * C1 + L), 0.0


def probabilities(
    known: Constants, L: float, *, p0: Any = None, p: Any = None, tau: Any = None, rho: float = 0.0
) -> Probabilities:
    """Probabilities by theory, or as given, within what an unbiased step allows."""
    ours = best_probabilities(known.C1, known.C2, L)
    k = len(known.gamma)
    chance = probability("p0", ours[0] if p0 is None else p0)
    within = _per_cluster("p", ours[1] if p is None else p, k)
    share = best_tau(chance, within) if tau is None else _per_cluster("tau", tau, k)
    if known.C1 > 0 and chance == 0:
        raise SolverError("With p0 = 0 the clusters never meet, but alpha > 0 ties them together; give p0 > 0, or alpha = 0.")
    if chance == 1 or (within == 1).any():
        raise SolverError("With a probability of 1 no client ever takes a step on its own data; give p0 < 1 and p < 1.")
    lost = np.isinf(psi_variance(chance, within, share)) & ((1 - known.alpha) * known.gamma > 0)
    if lost.any():
        j = int(lost.argmax())
        raise SolverError(
            f"tau = {share[j]:g} leaves part of the pull to cluster number {j} to an exchange that never happens (p0 = "
            f"{chance:g}, p = {within[j]:g}), so the steps would be biased; leave tau out, or change the probabilities."
        )
    return Probabilities(chance, within, share, rho)


def _per_cluster(name: str, value: Any, k: int) -> Floats:
    listed = value.tolist() if isinstance(value, np.ndarray) else value
    values = [probability(name, each) for each in (listed if isinstance(listed, list | tuple) else [listed])]
    if len(values) not in (1, k):
        raise SolverError(f"The {name!r} parameter must hold 1 or {k} values, one for each cluster. Got {len(values)} instead.")
    return np.full(k, values[0]) if len(values) == 1 else np.array(values)


# Rates and bounds of Async-L2GD, with two probabilities or one


def expected_smoothness(known: Constants, chances: Probabilities, L: float) -> float:
    """``calL`` of the theorem (eq. es_l), for any ``tau``; ``L`` is ``known.L``, in algorithm 2 ``known.L_row``."""
    across = 2 * known.C1 / chances.p0 if known.C1 > 0 else 0.0
    pull = (1 - known.alpha) * known.gamma
    within = np.where(pull > 0, pull * np.where(pull > 0, psi_variance(chances.p0, chances.p, chances.tau), 0.0), 0.0)
    return float(max(across, within.max(), L * chances.local.max()))


def noise(objective: Objective, theta: Floats, chances: Probabilities) -> float:
    """``sigma^2``: the bound on the variance of a step at the minimiser ``theta`` (eq. es_sigma)."""
    tree, penalty = objective.data.hierarchy, objective.penalty
    alpha = mixing(penalty)[tree.parent]
    tbar_j, tbar = objective.means(theta)
    phi = ((alpha * penalty.gamma)[:, None] * (theta - tbar)) ** 2
    psi = (((1 - alpha) * penalty.gamma)[:, None] * (theta - tree.down(tbar_j))) ** 2
    f = objective.loss.gradient(objective.data, theta) ** 2
    across = 2 * phi.sum() / chances.p0 if phi.any() else 0.0
    weight = psi_variance(chances.p0, chances.p, chances.tau)[tree.parent]
    within = np.where(psi.sum(axis=1) > 0, np.where(np.isinf(weight), 0.0, weight) * psi.sum(axis=1), 0.0)
    return float(across + within.sum() + (chances.local[tree.parent] * f.sum(axis=1)).sum())


def distance_bound(t: Any, *, eta: float, mu: float, sigma2: float, start: float) -> Floats:
    """``E|theta^t - theta_hat|^2`` at most, for a constant step up to ``1/(2 calL)`` (thm. conv_rate); ``start`` at 0."""
    return (1 - eta * mu) ** np.asarray(t, dtype=np.float64) * start + 2 * eta * sigma2 / mu


def switching_steps(t: Any, smoothness: float, mu: float) -> Floats:
    """``1/(2 calL)`` up to ``4 ceil(calL/mu)``, then ``(2t + 1) / ((t + 1)^2 mu)``: converges (Gower et al. 2019, thm 3.2)."""
    t = np.asarray(t, dtype=np.float64)
    return np.where(t <= switch(smoothness, mu), 1 / (2 * smoothness), (2 * t + 1) / ((t + 1) ** 2 * mu))


def switch(smoothness: float, mu: float) -> int:
    """The last iteration with the constant step."""
    return 4 * math.ceil(smoothness / mu)


def switching_bound(t: Any, *, smoothness: float, mu: float, sigma2: float, start: float) -> Floats:
    """``E|theta^t - theta_hat|^2`` at most with switching steps, from ``switch(...)`` on."""
    t = np.asarray(t, dtype=np.float64)
    bound: Floats = sigma2 / mu**2 * 8 / t + 16 * math.ceil(smoothness / mu) ** 2 / (math.e**2 * t**2) * start
    return bound


def iterations(accuracy: float, *, smoothness: float, mu: float, sigma2: float = 0.0, start: float = 1.0) -> tuple[int, float]:
    """Iterations of algorithm 1 until ``E|theta^t - theta_hat|^2 <= accuracy * start``, and the constant step that gets there.

    Half of the accuracy is spent on the noise, which a smaller step makes smaller, half on the distance from the start.
    """
    eta = 1 / (2 * smoothness)
    if sigma2 > 0:
        eta = min(eta, accuracy * start * mu / (4 * sigma2))
    return max(1, math.ceil(math.log(2 / accuracy) / -math.log1p(-min(eta * mu, 0.5)))), eta


def switching_iterations(accuracy: float, *, smoothness: float, mu: float, sigma2: float, start: float) -> int:
    """Iterations until ``switching_bound`` is below ``accuracy * start``."""
    linear, square = 8 * sigma2 / mu**2, 16 * math.ceil(smoothness / mu) ** 2 / math.e**2 * start
    target = accuracy * start
    t = (linear + math.sqrt(linear**2 + 4 * target * square)) / (2 * target)
    return max(switch(smoothness, mu), math.ceil(t))


# A recipe is all that theory says of an algorithm, for the solver and for the plan


@dataclass(frozen=True)
class Recipe:
    """Probabilities, the expected smoothness of a step with them, and the largest step, with the reason for it in words."""

    probabilities: Probabilities
    smoothness: float
    largest_step: float
    reason: str

    def step(self, eta: Any) -> float:
        """The largest step the theorem allows, or the one given: positive, and with a warning where it is above that."""
        if eta is None:
            return self.largest_step
        given = number("eta", eta, above=0.0)
        if given > self.largest_step * (1 + 1e-12):
            warn(
                f"the step eta = {given:.3g} is above {self.largest_step:.3g} = {self.reason}, the largest with which "
                "convergence is proved; the iterates may diverge"
            )
        return given


def _ratio(above: Floats, below: Floats) -> Floats:
    """``above / below`` with ``0 / 0 = 0``."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(above == 0, 0.0, above / below)
