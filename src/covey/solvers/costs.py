"""The cost of each solver on a network, computed before anything is sent.

For the randomised algorithms, iterations and exchanges are bounds of their theorems (arXiv:2204.13619), with constants measured
on the data. The direct solvers are run in memory and counted. Time is the time of the links alone: an exchange within a cluster
takes one message up and one down, an exchange between clusters takes two more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from covey.errors import SolverError, number
from covey.nodes.network import InMemory
from covey.objective.objective import Objective
from covey.objective.theory import Constants
from covey.solvers import registry
from covey.solvers.first_order import curvature
from covey.solvers.first_order.loop import spacing
from covey.solvers.first_order.schedule import Schedule
from covey.solvers.ledger import Ledger, Links, links, quadratic_links, rates
from covey.solvers.result import Fit

LATENCY = 0.05
BANDWIDTH = 10.0


@dataclass(frozen=True)
class Cost:
    """What a solver needs to reach an accuracy.

    Attributes
    ----------
    solver : name of the solver
    iterations : number of iterations; infinite if the solver does not fit the problem
    within : exchanges of the client with the most exchanges
    between : exchanges between the clusters
    bytes : over all links, in both directions
    seconds : time of the links
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
    """The problem and the network for which costs are computed.

    Attributes
    ----------
    objective, constants : the problem and its constants
    best : its minimiser
    accuracy : ``E|theta - theta_hat|^2`` has to fall to this share of ``|theta_hat|^2``, from zero
    latency, bandwidth : seconds of a message in one direction, megabytes per second
    """

    objective: Objective
    constants: Constants
    best: Fit
    accuracy: float
    latency: float
    bandwidth: float

    @property
    def distance(self) -> float:
        """``|theta_hat|^2``, or 1 if the minimiser is zero."""
        return float((self.best.theta**2).sum()) or 1.0

    @property
    def gap(self) -> float:
        """The objective at zero less its minimum."""
        return self.objective.value(np.zeros_like(self.best.theta)) - self.best.convergence.objective

    def counted(self, trial: Fit) -> Cost:
        """The cost of a direct solver, from a run in memory."""
        data, end = self.objective.data, trial.convergence
        network = quadratic_links(data.hierarchy.sizes, data.n_terms)
        spent = network.count(np.full(data.n_clusters, end.exchanges), end.exchanges)
        return self._cost(end.solver, end.iterations, network, spent, "counted in memory")

    def bounded(self, solver: str, T: int, pace: float, schedule: Schedule, note: str) -> Cost:
        """The cost of ``T`` iterations of a randomised algorithm whose distance shrinks by e in ``pace`` iterations.

        It has the exchanges of the schedule and those of the checks, without which a run would not end.
        """
        data = self.objective.data
        network = links(data.hierarchy.sizes, data.n_terms)
        within, between = rates(schedule)
        # By default there is a check in each quarter of the pace, later in each twentieth of the iterations so far.
        every = spacing(pace)
        steady = min(T, 20 * every)
        checks = 1 + math.ceil(steady / every) + math.ceil(math.log(T / steady) / math.log(1.05))
        spent = network.count(within * T, between * T) + network.count(np.full(data.n_clusters, checks), checks)
        return self._cost(solver, T, network, spent, note)

    def exchanged(self, solver: str, T: int, more: int, note: str) -> Cost:
        """The cost of ``T`` exchanges of the whole network: vectors, and ``more`` numbers up."""
        data = self.objective.data
        network = replace(links(data.hierarchy.sizes, data.n_terms), up=data.n_terms + more, down=data.n_terms)
        return self._cost(solver, T, network, network.count(np.full(data.n_clusters, T), T), note)

    def _cost(self, solver: str, iterations: float, network: Links, spent: Ledger, note: str) -> Cost:
        """The cost with the time of the client that waits longest, for its own exchanges and those of its cluster."""
        transfer = 8 * (network.up + network.down) / (self.bandwidth * 1e6)
        within = np.max(spent.within).item()
        seconds = float((within + spent.between) * (2 * self.latency + transfer))
        return Cost(solver, iterations, within, float(spent.between), spent.bytes, seconds, note)


def costs(
    objective: Objective, trials: Sequence[Fit], *, accuracy: float, latency: float = LATENCY, bandwidth: float = BANDWIDTH
) -> tuple[list[Cost], Constants]:
    """What every solver needs, from zero, for ``E|theta - theta_hat|^2 <= accuracy * |theta_hat|^2``, and the constants.

    ``trials`` are fits of the direct solvers in memory. ``latency`` is in seconds for one direction, ``bandwidth`` in megabytes
    per second.
    """
    network = InMemory.of(objective.data, objective.loss, objective.penalty.gamma)
    constants = curvature.constants(network, objective.penalty, clusters=("client", "row"), relative=True)
    setting = Setting(objective, constants, trials[0], accuracy, latency, bandwidth)
    rows = [setting.counted(fit) for fit in trials]
    for solver in map(registry.find, registry.first_order()):
        if solver.cost is None:
            continue
        try:
            constants.need_curvature()
            rows.append(solver.cost(setting))
        except SolverError as problem:
            rows.append(Cost(solver.name, math.inf, math.inf, math.inf, math.inf, math.inf, str(problem)))
    return rows, constants


def check_network(accuracy: Any, latency: Any, bandwidth: Any) -> None:
    """Refuse an accuracy, a latency or a bandwidth that is out of range."""
    if number("accuracy", accuracy, above=0.0) >= 1:
        raise SolverError(f"The 'accuracy' parameter must be a number below 1. Got {accuracy!r} instead.")
    number("latency", latency, least=0.0)
    number("bandwidth", bandwidth, above=0.0)
