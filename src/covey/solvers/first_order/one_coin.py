"""The one-coin variant of Async-L2GD, from Section 6 of Lyu, Hanzely and Kolar (2022), arXiv:2204.13619.

    each iteration: with probability p, every client does
        theta_i -= eta gamma_i / p ( theta_i - (alpha_j tbar + (1 - alpha_j) tbar_j) )
    else
        theta_i -= eta / (1 - p) grad f_i(theta_i)

This is Algorithm 1 (async_l2gd) with ``p_j = 0`` and ``tau = 1``. One step takes the whole penalty, which allows a longer step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Unpack

import numpy as np

from covey._typing import Floats
from covey.errors import SolverError, probability
from covey.nodes.network import Network
from covey.objective.objective import Objective, Penalty
from covey.objective.theory import Constants, Probabilities, Recipe, mixing
from covey.solvers.costs import Cost, Setting
from covey.solvers.first_order.l2gd import Steps, descent_cost, l2gd_setup
from covey.solvers.first_order.loop import Control, ControlOptions, prepare, run
from covey.solvers.first_order.schedule import Choices
from covey.solvers.registry import algorithm
from covey.solvers.result import Fit


def reference(
    objective: Objective, chances: Probabilities, choices: Choices, eta: Callable[[int], float], theta: Floats
) -> Floats:
    """Run the one-coin variant in plain numpy, with given random choices.

    Parameters
    ----------
    objective : Objective
        Data, loss and penalties.
    chances : Probabilities
        The probability ``p`` of an exchange is its ``p0``.
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
    >>> from covey.solvers.first_order.schedule import Schedule
    >>> data = GroupedData.from_arrays([[1.0], [1.0], [1.0]], [0.0, 3.0, 9.0], ["a", "b", "c"], ["x", "x", "y"])
    >>> objective = Objective(data, Gaussian(), Penalty.of(data.hierarchy))
    >>> chances = Probabilities(0.5, np.zeros(2), np.ones(2))
    >>> choices = Schedule(chances, seed=0).choices(0, 5000)
    >>> reference(objective, chances, choices, lambda t: 1 / (t + 10), np.zeros((3, 1))).ravel().round(1).tolist()
    [1.5, 3.0, 7.5]
    """
    gamma, alpha, p = objective.penalty.gamma[:, None], mixing(objective.penalty)[:, None], chances.p0
    for t in range(len(choices.between)):
        if choices.between[t]:  # Algorithm 1, lines 5 to 7, with tau = 1
            tbar_j, tbar = objective.means(theta)
            centre = alpha * tbar + (1 - alpha) * tbar_j
            theta = theta - eta(t) * gamma / p * (theta - objective.data.hierarchy.down(centre))
        else:  # Algorithm 1, line 15, with p_j = 0
            theta = theta - eta(t) / (1 - p) * objective.loss.gradient(objective.data, theta)
    return theta


# Theory


def smoothness(constants: Constants, p: float) -> float:
    """``max(max gamma / p, L / (1 - p))``: one step takes the whole penalty, which is ``max gamma``-smooth."""
    return max(constants.gamma_max / p, constants.L / (1 - p))


def best_probability(constants: Constants) -> float:
    """The ``p`` with the smallest :func:`smoothness`: ``max gamma / (max gamma + L)``."""
    return constants.gamma_max / (constants.gamma_max + constants.L)


def recipe(constants: Constants, p: float | None = None) -> Recipe:
    """The probability of an exchange and the largest step."""
    chance = best_probability(constants) if p is None else probability("p", p)
    if chance in (0, 1):
        raise SolverError(f"With p = {chance:g} clients never exchange, or never learn from their own rows; give 0 < p < 1.")
    calL = smoothness(constants, chance)
    chances = Probabilities(chance, np.zeros_like(constants.gamma), np.ones_like(constants.gamma))
    return Recipe(chances, calL, 1 / (2 * calL), "1 / (2 calL)")


def cost(setting: Setting) -> Cost:
    """The cost by Theorem 3.5 (conv_rate), with the exact noise of this variant."""
    best = recipe(setting.constants)
    return descent_cost("one_coin", best, setting, noise(setting.objective, setting.best.theta, best.probabilities.p0))


def noise(objective: Objective, theta: Floats, p: float) -> float:
    """``|grad f|^2 (1/p + 1/(1 - p))`` at the minimiser ``theta``, where the gradient of the penalty is ``-grad f``."""
    return float((objective.loss.gradient(objective.data, theta) ** 2).sum()) * (1 / p + 1 / (1 - p))


# The solver


_WHOLE = (
    "all clusters share one random choice. Use solver='l2gd' with p=0 and tau=1, which is the same algorithm and has this "
    "option."
)


@algorithm(place=4, first_order=True, shared=Control, reference=reference, cost=cost, refuses={"participation": _WHOLE})
def one_coin(
    network: Network,
    penalty: Penalty,
    *,
    steps: Steps = "constant",
    eta: float | None = None,
    p: float | None = None,
    mu: float | None = None,
    L: float | None = None,
    **options: Unpack[ControlOptions],
) -> Fit:
    """Minimise the objective by Async-L2GD with one random choice for all clusters, from Section 6 of the paper.

    Every exchange is one of the whole network.

    Parameters
    ----------
    network : Network
        The nodes that hold the clients' rows.
    penalty : Penalty
        ``gamma (n,)`` and ``lam (k,)``.
    steps, eta, mu, L
        As for :func:`~covey.solvers.first_order.l2gd.l2gd`.
    p : float, optional
        Probability of an exchange; by default ``max gamma / (max gamma + L)``, which allows the longest step.
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
    >>> fit = one_coin(InMemory.of(data, Gaussian(), penalty.gamma), penalty, steps="switching", tol=1e-3)
    >>> fit.convergence.converged, fit.wbar.round(1).tolist()
    (True, [4.5])
    """
    control, constants = prepare("one_coin", network, penalty, options, mu=mu, L=L)
    setup = l2gd_setup("one_coin", network, penalty, constants, recipe(constants, p), eta, steps)
    return run(network, penalty, setup, control)
