"""What each solver would cost on a network, before anything crosses it.

Iterations and exchanges of the algorithms by coins are bounds of their theorems, at constants measured on the data; those of
the sweep and of Newton are counted in trials in memory. Time is that of the links alone: an exchange within a cluster waits
for one message up and one down, one between clusters for those and two more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from covey.errors import SolverError
from covey.objective.objective import Objective
from covey.objective.theory import (
    Constants,
    Katyusha,
    accelerated_recipe,
    iterations,
    l2gd_recipe,
    noise,
    number,
    one_coin_recipe,
    switching_iterations,
)
from covey.solvers.first_order.curvature import constants
from covey.solvers.first_order.l2gd import equal_within
from covey.solvers.first_order.loop import spacing
from covey.solvers.first_order.schedule import Schedule
from covey.solvers.ledger import Links, links, quadratic_links, rates
from covey.solvers.result import Fit
from covey.tables.rows import GroupedData

LATENCY = 0.05
BANDWIDTH = 10.0

_NEWTON_EXCHANGES = 10  # for a choice before any trial; logistic and Poisson fits take 5 to 10


@dataclass(frozen=True)
class Cost:
    """What a solver needs to reach an accuracy.

    Attributes
    ----------
    solver, iterations : the latter infinite where it does not fit the problem
    within, between : exchanges of the client that has most of them, and between the clusters
    bytes : over all links, both ways
    seconds : waiting for the links
    note : how the numbers were had, or why the solver does not fit
    """

    solver: str
    iterations: float
    within: float
    between: float
    bytes: float
    seconds: float
    note: str


def costs(
    objective: Objective, trials: Sequence[Fit], *, accuracy: float, latency: float = LATENCY, bandwidth: float = BANDWIDTH
) -> tuple[list[Cost], Constants]:
    """What every solver needs, from zero, for ``E|theta - theta_hat|^2 <= accuracy * |theta_hat|^2``, and the constants.

    ``trials`` are the minimiser, found in memory by Newton and, if it can, by the sweep; ``latency`` is in seconds one way,
    ``bandwidth`` in megabytes a second.
    """
    data, speed = objective.data, {"latency": latency, "bandwidth": bandwidth}
    found, best = [_direct(data, fit, speed) for fit in trials], trials[0]
    known = constants(objective)
    try:
        known.need_curvature()
    except SolverError as problem:
        return [*found, *(_unfit(name, str(problem)) for name in ("l2gd", "one_coin", "al2sgd_plus"))], known
    start = float((best.theta**2).sum()) or 1.0  # where zero is the minimiser there is no distance to speak of
    gap = objective.value(np.zeros_like(best.theta)) - best.convergence.objective
    merge = equal_within(data.hierarchy, objective.penalty)[0]
    for name, recipe in (("l2gd", l2gd_recipe(known)), ("one_coin", one_coin_recipe(known))):
        sigma2 = noise(objective, best.theta, recipe.coins)
        rate = {"smoothness": recipe.smoothness, "mu": known.mu, "sigma2": sigma2, "start": start}
        constant, eta = iterations(accuracy, **rate)
        switching = switching_iterations(accuracy, **rate)
        how = "steps='switching'" if switching < constant else f"eta={eta:.2g}"
        pace = 1 / (known.mu * (recipe.largest_step if switching < constant else eta))
        needed, note = min(constant, switching), f"bound of its theorem, {how}"
        found.append(_by_coins(name, needed, pace, Schedule(recipe.coins, 0, merge), data, note, speed))
    found.append(_accelerated(data, known, accuracy, speed, start, gap))
    return found, known


def surely_direct(objective: Objective, *, accuracy: float, latency: float = LATENCY, bandwidth: float = BANDWIDTH) -> bool:
    """Whether the sweep or Newton is first, whatever the constants of the problem.

    A run by coins has to look how far it is: some exchanges of the whole network, if nothing else. Where a direct solver, with
    its d x d messages, is done before that, which is so up to hundreds of coefficients, nothing has to be measured.
    """
    data, exchanges = objective.data, 1 if objective.loss.quadratic else _NEWTON_EXCHANGES
    speed, sizes = {"latency": latency, "bandwidth": bandwidth}, data.hierarchy.sizes
    # No algorithm shrinks the distance by e in less than 1.4 iterations, nor is checked less often in its first 20 checks.
    least = min(20.0, 1.4 * math.log(1 / accuracy))
    direct = _seconds(quadratic_links(sizes, data.n_terms), exchanges, exchanges, **speed)
    return direct <= _seconds(links(sizes, data.n_terms), least, least, **speed)


def _checks(T: float, pace: float) -> float:
    """How often a run of ``T`` iterations is checked by default: each quarter of ``pace``, then each twentieth of the way."""
    every = spacing(pace)
    steady = min(T, 20 * every)
    return 1 + math.ceil(steady / every) + math.ceil(math.log(T / steady) / math.log(1.05))


def _accelerated(
    data: GroupedData, known: Constants, accuracy: float, speed: dict[str, float], start: float, gap: float
) -> Cost:
    recipe = accelerated_recipe(known)
    katyusha = Katyusha.of(known, recipe.smoothness, recipe.coins.rho)
    needed = katyusha.iterations(accuracy, start, gap)
    pace = -1 / math.log(katyusha.contraction)
    return _by_coins("al2sgd_plus", needed, pace, Schedule(recipe.coins, 0), data, "bound of its theorem", speed)


def _direct(data: GroupedData, trial: Fit, speed: dict[str, float]) -> Cost:
    network, end = quadratic_links(data.hierarchy.sizes, data.n_terms), trial.convergence
    spent = network.count(np.full(data.n_clusters, end.exchanges), end.exchanges)
    seconds = _seconds(network, end.exchanges, end.exchanges, **speed)
    return Cost(end.solver, end.iterations, end.exchanges, float(spent.between), spent.bytes, seconds, "counted in memory")


def _by_coins(
    name: str, T: int, pace: float, schedule: Schedule, data: GroupedData, note: str, speed: dict[str, float]
) -> Cost:
    """Exchanges that the coins ask for, and those of the checks without which a run would not know its end."""
    network = links(data.hierarchy.sizes, data.n_terms)
    within, between = rates(schedule)
    checks = _checks(T, pace)
    spent = network.count(within * T, between * T) + network.count(np.full(data.n_clusters, checks), checks)
    most = float(np.max(spent.within))
    return Cost(name, T, most, float(spent.between), spent.bytes, _seconds(network, most, spent.between, **speed), note)


def _unfit(name: str, why: str) -> Cost:
    return Cost(name, math.inf, math.inf, math.inf, math.inf, math.inf, why)


def _seconds(network: Links, within: float, between: float, latency: float, bandwidth: float) -> float:
    """Waiting of the busiest client: its own exchanges, and those of its cluster with the others, if there are any."""
    transfer = 8 * (network.up + network.down) / (bandwidth * 1e6)
    return float((within + (between if network.pairs else 0)) * (2 * latency + transfer))


def check_network(accuracy: Any, latency: Any, bandwidth: Any) -> None:
    """Refuse an accuracy or a network that cannot be."""
    if number("accuracy", accuracy, above=0.0) >= 1:
        raise SolverError(f"The 'accuracy' parameter must be a number below 1. Got {accuracy!r} instead.")
    number("latency", latency, least=0.0)
    number("bandwidth", bandwidth, above=0.0)
