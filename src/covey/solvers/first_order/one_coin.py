"""The one-coin variant of Async-L2GD, which the experiments of the paper use (arXiv:2204.13619).

    each iteration: with probability p, every client does
        theta_i -= eta gamma_i / p ( theta_i - (alpha_j tbar + (1 - alpha_j) tbar_j) )
    else
        theta_i -= eta / (1 - p) grad f_i(theta_i)

That is Algorithm 1 with ``p_j = 0`` and ``tau = 1``; the whole penalty is stepped on at once, which allows a longer step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Unpack

import numpy as np

from covey._typing import Floats
from covey.errors import SolverError, probability
from covey.losses import Loss
from covey.nodes.network import Network
from covey.objective.objective import Penalty
from covey.objective.theory import Constants, Probabilities, Recipe, mixing
from covey.solvers.costs import Cost, Setting
from covey.solvers.first_order.curvature import constants
from covey.solvers.first_order.l2gd import Steps, descent, descent_cost
from covey.solvers.first_order.loop import Control, Watch, run
from covey.solvers.first_order.schedule import Flips
from covey.solvers.registry import algorithm
from covey.solvers.result import Fit
from covey.tables.rows import GroupedData


def reference(
    data: GroupedData,
    loss: Loss,
    penalty: Penalty,
    chances: Probabilities,
    flips: Flips,
    eta: Callable[[int], float],
    theta: Floats,
) -> Floats:
    """The variant with given random choices ``flips`` and a step ``eta(t)``, from ``theta (n, d)``; ``p`` is ``chances.p0``."""
    gamma, alpha, parent, p = penalty.gamma, mixing(penalty), data.hierarchy.parent, chances.p0
    own, weight = [data.clients(i, i + 1) for i in range(data.n_clients)], alpha[parent] * gamma
    for t in range(len(flips.between)):
        before, theta = theta, theta.copy()
        if flips.between[t]:  # Algorithm 1, lines 5 to 7, with tau = 1
            tbar_j = [np.average(before[parent == j], axis=0, weights=gamma[parent == j]) for j in range(len(alpha))]
            tbar = weight @ before / (weight.sum() or 1.0)
            for i, j in enumerate(parent):
                centre = alpha[j] * tbar + (1 - alpha[j]) * tbar_j[j]
                theta[i] = before[i] - eta(t) * gamma[i] / p * (before[i] - centre)
        else:  # Algorithm 1, line 15, with p_j = 0
            for i in range(len(theta)):
                theta[i] = before[i] - eta(t) / (1 - p) * loss.gradient(own[i], before[i : i + 1])[0]
    return theta


# Theory


def smoothness(known: Constants, p: float) -> float:
    """``max(max gamma / p, L / (1 - p))``: one step takes the whole penalty, which is ``max gamma``-smooth, at once."""
    return max(known.gamma_max / p, known.L / (1 - p))


def best_probability(known: Constants) -> float:
    """The ``p`` with the least of that: ``max gamma / (max gamma + L)``."""
    return known.gamma_max / (known.gamma_max + known.L)


def recipe(known: Constants, p: Any = None) -> Recipe:
    """The probability of an exchange and the largest step."""
    chance = best_probability(known) if p is None else probability("p", p)
    if chance in (0, 1):
        raise SolverError(f"With p = {chance:g} clients never exchange, or never learn from their own rows; give 0 < p < 1.")
    calL = smoothness(known, chance)
    chances = Probabilities(chance, np.zeros_like(known.gamma), np.ones_like(known.gamma))
    return Recipe(chances, calL, 1 / (2 * calL), "1 / (2 calL)")


def cost(setting: Setting) -> Cost:
    """What theory says for the plan."""
    return descent_cost("one_coin", recipe(setting.known), setting)


# The solver


@algorithm(place=4, first_order=True, shared=Control, reference=reference, cost=cost)
def one_coin(
    network: Network,
    penalty: Penalty,
    *,
    steps: Steps = "constant",
    eta: float | None = None,
    p: float | None = None,
    mu: float | None = None,
    L: float | None = None,
    **watch: Unpack[Watch],
) -> Fit:
    """L2GD with one random choice for all: every exchange is one of the whole network. Parameters as for ``l2gd``.

    >>> from covey import GroupedData, InMemory, Penalty
    >>> from covey.losses import Gaussian
    >>> data = GroupedData.from_arrays([[1.0], [1.0], [1.0]], [0.0, 3.0, 9.0], ["a", "b", "c"], ["x", "x", "y"])
    >>> penalty = Penalty.of(data.hierarchy)
    >>> fit = one_coin(InMemory.of(data, Gaussian(), penalty.gamma), penalty, steps="switching", tol=1e-3)
    >>> fit.convergence.converged, fit.wbar.round(1).tolist()
    (True, [4.5])
    """
    control = Control.begin("one_coin", watch, network)
    known = constants(network, penalty, mu=mu, L=L)
    known.need_curvature()
    setup = descent("one_coin", network, penalty, known, recipe(known, p), eta, steps)
    return run(network, penalty, setup, control)
