"""What each solver would cost on a network, before anything crosses it.

Iterations and exchanges of the algorithms by coins are bounds of their theorems, at constants measured on the data; those of
the sweep and of Newton are counted in trials in memory. Time is that of the links alone: an exchange within a cluster waits
for one message up and one down, one between clusters for those and two more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from covey.data import GroupedData
from covey.errors import SolverError
from covey.ledger import Links, links, quadratic_links, rates
from covey.losses import Loss
from covey.objective import Objective, Penalty
from covey.schedule import Schedule
from covey.solvers.curvature import constants
from covey.solvers.l2gd import equal_within
from covey.solvers.result import Fit
from covey.theory import (
    Coins,
    Constants,
    Katyusha,
    best_one_coin,
    best_rho,
    coins,
    expected_smoothness,
    iterations,
    noise,
    one_coin_smoothness,
    switching_iterations,
)

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
    data: GroupedData,
    loss: Loss,
    penalty: Penalty,
    trials: Sequence[Fit],
    *,
    accuracy: float,
    latency: float = LATENCY,
    bandwidth: float = BANDWIDTH,
) -> tuple[list[Cost], Constants]:
    """What every solver needs, from zero, for ``E|theta - theta_hat|^2 <= accuracy * |theta_hat|^2``, and the constants.

    ``trials`` are the minimiser, found in memory by Newton and, if it can, by the sweep; ``latency`` is in seconds one way,
    ``bandwidth`` in megabytes a second.
    """
    speed = {"latency": latency, "bandwidth": bandwidth}
    found, trial = [_direct(data, fit, speed) for fit in trials], trials[0]
    known = constants(data, loss, penalty)
    try:
        known.need_curvature()
    except SolverError as problem:
        return [*found, *(_unfit(name, str(problem)) for name in ("l2gd", "one_coin", "al2sgd_plus"))], known
    objective = Objective(data, loss, penalty)
    start = float((trial.theta**2).sum())
    gap = objective.value(np.zeros_like(trial.theta)) - trial.convergence.objective
    k, merge = data.n_clusters, equal_within(data, penalty)[0]
    network = links(data.hierarchy.sizes, data.n_terms)

    drawn = coins(known, known.L)
    one = Coins(best_one_coin(known), np.zeros(k), np.ones(k))
    for name, used, smoothness in (
        ("l2gd", drawn, expected_smoothness(known, drawn, known.L)),
        ("one_coin", one, one_coin_smoothness(known, one.p0)),
    ):
        rate = {"smoothness": smoothness, "mu": known.mu, "sigma2": noise(objective, trial.theta, used), "start": start}
        constant, eta = iterations(accuracy, **rate)
        switching = switching_iterations(accuracy, **rate)
        how = "steps='switching'" if switching < constant else f"eta={eta:.2g}"
        schedule = Schedule(used, 0, merge)
        found.append(_by_coins(name, min(constant, switching), schedule, network, f"bound of its theorem, {how}", speed))

    found.append(_accelerated(data, known, accuracy, speed, start, gap))
    return found, known


def choose(
    data: GroupedData, loss: Loss, penalty: Penalty, *, accuracy: float, latency: float = LATENCY, bandwidth: float = BANDWIDTH
) -> str:
    """The solver a network would finish first: sweep or Newton, unless their d x d messages take longer than algorithm 2.

    However well conditioned a problem is, by its theorem that algorithm refreshes its anchor ``log(1 / accuracy)`` times, and
    exchanges as often again: where the direct solver beats that, which is up to hundreds of coefficients, nothing has to be
    measured. Without acceleration and variance reduction an algorithm is never first.
    """
    speed = {"latency": latency, "bandwidth": bandwidth}
    name, exchanges = ("sweep", 1) if loss.name == "gaussian" else ("newton", _NEWTON_EXCHANGES)
    sizes = data.hierarchy.sizes
    direct = _seconds(quadratic_links(sizes, data.n_terms), exchanges, exchanges, **speed)
    least = math.log(1 / accuracy)
    if direct <= _seconds(links(sizes, data.n_terms), 2 * least, least, **speed):
        return name
    known = constants(data, loss, penalty)
    if not (known.mu > 0 and math.isfinite(known.L_row)):
        return name
    return name if direct <= _accelerated(data, known, accuracy, speed).seconds else "al2sgd_plus"


def _accelerated(
    data: GroupedData, known: Constants, accuracy: float, speed: dict[str, float], start: float = 1.0, gap: float | None = None
) -> Cost:
    """Algorithm 2; where the gap at the start is not known, its bound by smoothness."""
    drawn = coins(known, known.L_row)
    drawn = replace(drawn, rho=best_rho(drawn))
    pace = Katyusha.of(known, expected_smoothness(known, drawn, known.L_row), drawn.rho)
    needed = pace.iterations(accuracy, start, (known.L_row + known.gamma_max) / 2 * start if gap is None else gap)
    network = links(data.hierarchy.sizes, data.n_terms)
    return _by_coins("al2sgd_plus", needed, Schedule(drawn, 0), network, "bound of its theorem", speed)


def _direct(data: GroupedData, trial: Fit, speed: dict[str, float]) -> Cost:
    network, end = quadratic_links(data.hierarchy.sizes, data.n_terms), trial.convergence
    spent = network.count(np.full(data.n_clusters, end.exchanges), end.exchanges)
    seconds = _seconds(network, end.exchanges, end.exchanges, **speed)
    return Cost(end.solver, end.iterations, end.exchanges, float(spent.between), spent.bytes, seconds, "counted in memory")


def _by_coins(name: str, T: int, schedule: Schedule, network: Links, note: str, speed: dict[str, float]) -> Cost:
    within, between = rates(schedule)
    spent = network.count(within * T, between * T)
    most = float(np.max(within * T))
    return Cost(name, T, most, float(spent.between), spent.bytes, _seconds(network, most, spent.between, **speed), note)


def _unfit(name: str, why: str) -> Cost:
    return Cost(name, math.inf, math.inf, math.inf, math.inf, math.inf, why)


def _seconds(network: Links, within: float, between: float, latency: float, bandwidth: float) -> float:
    """Waiting of the busiest client: its own exchanges, and those of its cluster with the others, if there are any."""
    transfer = 8 * (network.up + network.down) / (bandwidth * 1e6)
    return float((within + (between if network.pairs else 0)) * (2 * latency + transfer))


def check_network(accuracy: Any, latency: Any, bandwidth: Any) -> None:
    """Refuse an accuracy or a network that cannot be."""
    if not (isinstance(accuracy, int | float) and 0 < accuracy < 1):
        raise SolverError(f"The 'accuracy' parameter must lie between 0 and 1. Got {accuracy!r} instead.")
    if not (isinstance(latency, int | float) and 0 <= latency < math.inf):
        raise SolverError(f"The 'latency' parameter must be seconds >= 0. Got {latency!r} instead.")
    if not (isinstance(bandwidth, int | float) and 0 < bandwidth < math.inf):
        raise SolverError(f"The 'bandwidth' parameter must be megabytes a second > 0. Got {bandwidth!r} instead.")
