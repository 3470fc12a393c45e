"""What each solver would cost on a network, before anything crosses it.

Iterations and exchanges of the randomised algorithms are bounds of their theorems, at constants measured on the data; those of
the direct solvers are counted in trials in memory. Time is that of the links alone: an exchange within a cluster waits for one
message up and one down, one between clusters for those and two more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from covey.errors import SolverError, number
from covey.nodes.network import InMemory, threads_for
from covey.objective.objective import Objective
from covey.objective.theory import Constants
from covey.solvers import registry
from covey.solvers.first_order.curvature import constants
from covey.solvers.first_order.loop import spacing
from covey.solvers.first_order.schedule import Schedule
from covey.solvers.ledger import Links, links, quadratic_links, rates
from covey.solvers.result import Fit

LATENCY = 0.05
BANDWIDTH = 10.0


@dataclass(frozen=True)
class Cost:
    """What a solver needs to reach an accuracy.

    Attributes
    ----------
    solver, iterations : the latter infinite where it does not fit the problem
    within, between : exchanges of the client that has most of them, and between the clusters
    bytes : over all links, both ways
    seconds : waiting for the links
    note : where the numbers come from, or why the solver does not fit
    """

    solver: str
    iterations: float
    within: float
    between: float
    bytes: float
    seconds: float
    note: str


@dataclass(frozen=True)
class Setting:
    """What the cost of a solver depends on.

    Attributes
    ----------
    objective, constants : the problem and its constants
    best : its minimiser
    accuracy : share of ``|theta_hat|^2`` to which ``E|theta - theta_hat|^2`` has to fall, from zero
    latency, bandwidth : seconds for a message one way, megabytes a second
    """

    objective: Objective
    constants: Constants
    best: Fit
    accuracy: float
    latency: float
    bandwidth: float

    @property
    def distance(self) -> float:
        """``|theta_hat|^2``; 1 where zero is the minimiser and there is no distance to speak of."""
        return float((self.best.theta**2).sum()) or 1.0

    @property
    def gap(self) -> float:
        """Of the objective at zero."""
        return self.objective.value(np.zeros_like(self.best.theta)) - self.best.convergence.objective

    def counted(self, trial: Fit) -> Cost:
        """The cost of a direct solver, from a run in memory."""
        data, end = self.objective.data, trial.convergence
        network = quadratic_links(data.hierarchy.sizes, data.n_terms)
        spent = network.count(np.full(data.n_clusters, end.exchanges), end.exchanges)
        seconds = self._seconds(network, end.exchanges, end.exchanges)
        return Cost(end.solver, end.iterations, end.exchanges, float(spent.between), spent.bytes, seconds, "counted in memory")

    def bounded(self, solver: str, T: int, pace: float, schedule: Schedule, note: str) -> Cost:
        """The cost of ``T`` iterations of a randomised algorithm that shrinks the distance by e in ``pace``.

        Exchanges that the schedule asks for, and those of the checks without which a run would not know its end.
        """
        data = self.objective.data
        network = links(data.hierarchy.sizes, data.n_terms)
        within, between = rates(schedule)
        checks = _checks(T, pace)
        spent = network.count(within * T, between * T) + network.count(np.full(data.n_clusters, checks), checks)
        most = float(np.max(spent.within))
        return Cost(solver, T, most, float(spent.between), spent.bytes, self._seconds(network, most, spent.between), note)

    def _seconds(self, network: Links, within: float, between: float) -> float:
        """Waiting of the busiest client: its own exchanges, and those of its cluster with the others, if there are any."""
        transfer = 8 * (network.up + network.down) / (self.bandwidth * 1e6)
        return float((within + (between if network.pairs else 0)) * (2 * self.latency + transfer))


def costs(
    objective: Objective, trials: Sequence[Fit], *, accuracy: float, latency: float = LATENCY, bandwidth: float = BANDWIDTH
) -> tuple[list[Cost], Constants]:
    """What every solver needs, from zero, for ``E|theta - theta_hat|^2 <= accuracy * |theta_hat|^2``, and the constants.

    ``trials`` are the minimiser, found in memory by each direct solver; ``latency`` is in seconds one way, ``bandwidth`` in
    megabytes a second.
    """
    with threads_for(objective.data):
        network = InMemory.of(objective.data, objective.loss, objective.penalty.gamma)
        known = constants(network, objective.penalty)
    setting = Setting(objective, known, trials[0], accuracy, latency, bandwidth)
    found = [setting.counted(fit) for fit in trials]
    for solver in map(registry.find, registry.first_order()):
        if solver.cost is None:
            continue
        try:
            known.need_curvature()
            found.append(solver.cost(setting))
        except SolverError as problem:
            found.append(Cost(solver.name, math.inf, math.inf, math.inf, math.inf, math.inf, str(problem)))
    return found, known


def _checks(T: float, pace: float) -> float:
    """How often a run of ``T`` iterations is checked by default: each quarter of ``pace``, then each twentieth of the way."""
    every = spacing(pace)
    steady = min(T, 20 * every)
    return 1 + math.ceil(steady / every) + math.ceil(math.log(T / steady) / math.log(1.05))


def check_network(accuracy: Any, latency: Any, bandwidth: Any) -> None:
    """Refuse an accuracy or a network that cannot be."""
    if number("accuracy", accuracy, above=0.0) >= 1:
        raise SolverError(f"The 'accuracy' parameter must be a number below 1. Got {accuracy!r} instead.")
    number("latency", latency, least=0.0)
    number("bandwidth", bandwidth, above=0.0)
