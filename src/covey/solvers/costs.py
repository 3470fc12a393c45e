"""The cost of each solver on a network, computed before anything is sent.

For the randomised algorithms, iterations and exchanges are bounds of their theorems (arXiv:2204.13619), with constants measured
on the data. The direct solvers are run in memory and counted. Time is that of :mod:`.clock`: the rows that clients read, and
messages. An exchange within a cluster takes one message up and one down, an exchange between clusters takes two more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from covey._typing import Floats
from covey.errors import SolverError, number
from covey.nodes.network import InMemory
from covey.objective.objective import Objective
from covey.objective.theory import Constants
from covey.solvers import registry
from covey.solvers.clock import MODES, Durations, Speeds, durations, expected_seconds, most_rows
from covey.solvers.first_order import curvature
from covey.solvers.first_order.loop import spacing
from covey.solvers.first_order.schedule import Schedule
from covey.solvers.ledger import Ledger, Links, links, quadratic_links, rates
from covey.solvers.result import Fit


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
    seconds : time if clusters wait only at exchanges between clusters
    note : where the numbers come from, or why the solver does not fit
    rounds, lock_step : time if clusters wait for each other after every round, and after every iteration
        (:mod:`covey.solvers.clock`); None if they are the same
    """

    solver: str
    iterations: float
    within: float
    between: float
    bytes: float
    seconds: float
    note: str
    rounds: float | None = None
    lock_step: float | None = None


@dataclass(frozen=True)
class Setting:
    """The problem and the network for which costs are computed.

    Attributes
    ----------
    objective, constants : the problem and its constants
    best : its minimiser
    accuracy : ``E|theta - theta_hat|^2`` has to fall to this share of ``|theta_hat|^2``, from zero
    speeds : how fast the clusters compute and send
    """

    objective: Objective
    constants: Constants
    best: Fit
    accuracy: float
    speeds: Speeds

    @property
    def latency(self) -> float:
        """Seconds of a message in one direction, of the slowest cluster."""
        return float(self.speeds.latency.max())

    @property
    def rows(self) -> Floats:
        """The most rows that a client has in each cluster, ``(k,)``."""
        return most_rows(self.objective.data.hierarchy, self.objective.data.rows_per_client)

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
        # A row adds its products to a d x d matrix, and the matrix is solved.
        work = self.speeds.work(data.n_terms * (self.rows + data.n_terms))
        time = end.exchanges * self._whole(network, work)
        return self._cost(end.solver, end.iterations, spent, "counted in memory", (time, time, time))

    def bounded(
        self, solver: str, T: int, pace: float, schedule: Schedule, note: str, rows_per_step: float | None = None
    ) -> Cost:
        """The cost of ``T`` iterations of a randomised algorithm whose distance shrinks by e in ``pace`` iterations.

        It has the exchanges of the schedule and those of the checks, without which a run would not end. A local step reads
        ``rows_per_step`` rows, by default all of a client.
        """
        data = self.objective.data
        network = links(data.hierarchy.sizes, data.n_terms)
        within, between = rates(schedule)
        # By default there is a check in each quarter of the pace, later in each twentieth of the iterations so far.
        every = spacing(pace)
        steady = min(T, 20 * every)
        checks = 1 + math.ceil(steady / every) + math.ceil(math.log(T / steady) / math.log(1.05))
        spent = network.count(within * T, between * T) + network.count(np.full(data.n_clusters, checks), checks)
        lasts = durations(self.speeds, network, self.rows, rows_per_step)
        check = checks * self._whole(network, lasts.refresh)
        times = tuple(expected_seconds(schedule, T, lasts, mode) + check for mode in MODES)
        return self._cost(solver, T, spent, note, times)

    def exchanged(self, solver: str, T: int, more: int, note: str) -> Cost:
        """The cost of ``T`` exchanges of the whole network: vectors, and ``more`` numbers up, after a ``d x d`` solution."""
        data = self.objective.data
        network = replace(links(data.hierarchy.sizes, data.n_terms), up=data.n_terms + more, down=data.n_terms)
        # The first exchange forms the clients' matrices; each one multiplies by them, or repeats a step of Newton's method.
        first = self.speeds.work(data.n_terms * (self.rows + data.n_terms))
        again = self.speeds.work(data.n_terms) if self.objective.loss.quadratic else first
        time = self._whole(network, first) + (T - 1) * self._whole(network, again)
        spent = network.count(np.full(data.n_clusters, T), T)
        return self._cost(solver, T, spent, note, (time, time, time))

    def _whole(self, network: Links, work: Floats) -> float:
        """Seconds of an exchange of all clusters after some work, ``(k,)`` seconds."""
        return whole_exchange(durations(self.speeds, network, self.rows), work)

    def _cost(self, solver: str, T: float, spent: Ledger, note: str, times: tuple[float, ...]) -> Cost:
        lock_step, rounds, asynchronous = times
        within = np.max(spent.within).item()
        return Cost(solver, T, within, float(spent.between), spent.bytes, asynchronous, note, rounds, lock_step)


def whole_exchange(lasts: Durations, work: Floats) -> float:
    """Seconds of an exchange of all clusters after some work, ``(k,)`` seconds: two messages up, then two down."""
    return float((work + 2 * lasts.up).max() + (2 * lasts.down).max())


def costs(objective: Objective, trials: Sequence[Fit], *, accuracy: float, speeds: Speeds) -> tuple[list[Cost], Constants]:
    """What every solver needs, from zero, for ``E|theta - theta_hat|^2 <= accuracy * |theta_hat|^2``, and the constants.

    ``trials`` are fits of the direct solvers in memory.
    """
    network = InMemory.of(objective.data, objective.loss, objective.penalty.gamma)
    constants = curvature.constants(network, objective.penalty, clusters=("client", "row"), relative=True)
    setting = Setting(objective, constants, trials[0], accuracy, speeds)
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


def check_accuracy(accuracy: Any) -> None:
    """Refuse an accuracy that is out of range."""
    if number("accuracy", accuracy, above=0.0) >= 1:
        raise SolverError(f"The 'accuracy' parameter must be a number below 1. Got {accuracy!r} instead.")
