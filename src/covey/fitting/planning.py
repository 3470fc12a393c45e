"""What each solver would cost on a network, before anything runs there; and, on demand, all of them in a race in memory."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import polars as pl

from covey.errors import ConvergenceWarning, SolverError, listing
from covey.fitting.fit import penalty_for
from covey.losses import Loss, family_of
from covey.model.summary import counted
from covey.nodes.network import InMemory
from covey.objective.objective import Objective
from covey.objective.theory import Constants
from covey.problem.problem import Problem, Spec, read_rows, resolve
from covey.solvers import Fit, minimise
from covey.solvers.costs import BANDWIDTH, LATENCY, Cost, check_network, costs
from covey.solvers.registry import direct, find, first_order
from covey.tables.rows import GroupedData

RACE_ITERATIONS = 20_000

_COLUMNS = ("formula", "client", "cluster", "weights", "offset", "fit_intercept", "standardize")
_SETTINGS = (*_COLUMNS, "gamma", "lam", "alpha", "reduction", "ridge")


@dataclass(frozen=True)
class Plan:
    """The cost of every solver to a given accuracy; ``print`` it, or take ``frame`` for the numbers."""

    costs: tuple[Cost, ...]
    known: Constants
    accuracy: float
    latency: float
    bandwidth: float
    shape: str

    @property
    def cheapest(self) -> str:
        """The solver that waits least."""
        return min(self.costs, key=lambda cost: cost.seconds).solver

    @property
    def frame(self) -> pl.DataFrame:
        """A row for each solver; numbers that are infinite belong to solvers that do not fit the problem."""
        return pl.DataFrame([asdict(cost) for cost in self.costs], infer_schema_length=None)

    def __str__(self) -> str:
        known = self.known
        width = max(12, *(len(cost.solver) + 1 for cost in self.costs))
        head = f"{'':{width + 2}}{'iterations':>13}{'exchanges':>13}{'between':>13}{'bytes':>11}{'time':>11}"
        lines = [
            f"{self.shape}; squared distance to the minimiser down to {self.accuracy:g} of what it is at zero",
            f"latency {1000 * self.latency:g} ms one way, bandwidth {self.bandwidth:g} MB/s",
            f"L = {known.L:.3g}, Ltilde = {known.L_row:.3g}, mu = {known.mu:.3g}, C1 = {known.C1:.3g}, C2 = {known.C2:.3g}"
            + (f" ({known.note})" if known.note else ""),
            head,
        ]
        for cost in self.costs:
            mark = "* " if cost.solver == self.cheapest else "  "
            if math.isinf(cost.seconds):
                lines.append(f"{mark}{cost.solver:{width}}{'':>3}does not fit: {cost.note}")
                continue
            counts = "".join(f"{large(number):>13}" for number in (cost.iterations, cost.within, cost.between))
            lines.append(f"{mark}{cost.solver:{width}}{counts}{size(cost.bytes):>11}{duration(cost.seconds):>11}  {cost.note}")
        lines.append("* waits least; exchanges are those of the client that has most")
        return "\n".join(lines)


def plan(
    data: Any,
    *,
    family: str | Loss = "gaussian",
    accuracy: float = 1e-6,
    latency: float = LATENCY,
    bandwidth: float = BANDWIDTH,
    **settings: Any,
) -> Plan:
    """Iterations, exchanges, bytes and time of each solver to a given accuracy; the cheapest is marked.

    Parameters
    ----------
    data : GroupedData, or a data frame with ``formula=``, ``client=`` and ``cluster=``
    family : "gaussian", "bernoulli", "poisson", "gamma", or a loss of one's own (:func:`covey.losses.from_functions`)
    accuracy : share of the squared distance from zero to the minimiser that may be left
    latency : seconds for a message, one way
    bandwidth : megabytes a second, each link
    **settings : the rest of the specification, as for the estimators: gamma, lam, alpha, reduction, ridge, weights, ...

    >>> from covey.datasets import load_radon
    >>> told = plan(load_radon(), formula="log_radon ~ floor", client="county", cluster="state", gamma=10.0)
    >>> told.cheapest, told.frame["solver"].to_list()[:2]
    ('sweep', ['sweep', 'newton'])
    """
    known_names = _SETTINGS[len(_COLUMNS) :] if isinstance(data, GroupedData) else _SETTINGS
    for name in settings:
        if name not in known_names:
            raise SolverError(f"The plan has no setting {name!r} here; it takes {listing(known_names, 20)}.")
    draft = resolve(Spec(family=family_of(family).name, **settings))
    return plan_for(data, draft, accuracy=accuracy, latency=latency, bandwidth=bandwidth)


def plan_for(data: Any, problem: Problem, *, accuracy: float, latency: float, bandwidth: float) -> Plan:
    """The plan of a problem, which may be a draft: for a data frame, or for rows that are grouped already."""
    check_network(accuracy, latency, bandwidth)
    if problem.has_bars:
        raise SolverError("A plan is for solvers that let every term vary; leave out the bars, and name client= and cluster=.")
    grouped, problem = (data, problem) if isinstance(data, GroupedData) else read_rows(data, problem)
    problem.loss.check(grouped.y, lambda row: f"row {row}")
    objective = _objective(grouped, problem)
    trials = _direct(objective)
    found, known = costs(objective, trials, accuracy=accuracy, latency=latency, bandwidth=bandwidth)
    sizes = ((grouped.n_clients, "client"), (grouped.n_clusters, "cluster"), (grouped.n_terms, "coefficient"))
    shape = "{} in {}, {} each".format(*(counted(count, noun) for count, noun in sizes))
    return Plan(tuple(found), known, accuracy, latency, bandwidth, shape)


def race(
    data: GroupedData,
    problem: Problem,
    *,
    accuracy: float = 1e-6,
    max_iter: int = RACE_ITERATIONS,
    progress: Callable[[str], None] | None = None,
) -> dict[str, pl.DataFrame]:
    """The measured histories of all solvers on one problem, in memory, each with its ``gap`` to the minimum.

    The gap is relative to that at zero. Randomised algorithms stop when theirs is certified to be below ``accuracy``, or after
    ``max_iter`` iterations; those that do not fit the problem are left out.
    """
    objective = _objective(data, problem)
    trials = _direct(objective)
    minimum = min(fit.convergence.objective for fit in trials)
    start = objective.value(np.zeros((data.n_clients, data.n_terms)))
    tol = accuracy * (start - minimum) / max(1.0, abs(minimum))
    at_zero = pl.DataFrame([{"exchanges": 0, "objective": start}])
    told = {fit.convergence.solver: pl.concat([at_zero, _history(fit)]) for fit in trials}
    for name, solver, options in _racers():
        if progress is not None:
            progress(name)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # a race shows where a solver stalls
            try:
                limits: dict[str, Any] = {"seed": problem.spec.seed, "tol": tol, "max_iter": max_iter}
                fit = minimise(data, problem.loss, objective.penalty, solver=solver, options=options, **limits)
            except SolverError:
                continue  # the plan says why
        told[name] = _history(fit)
    gap = (pl.col("objective") - minimum) / (start - minimum)
    return {name: path.with_columns(gap=gap) for name, path in told.items()}


def _objective(data: GroupedData, problem: Problem) -> Objective:
    return Objective(data, problem.loss, penalty_for(InMemory.of(data, problem.loss), problem))


def _direct(objective: Objective) -> list[Fit]:
    """The minimiser, by each solver that goes straight to it."""
    names = [name for name in direct() if objective.loss.quadratic or not find(name).quadratic]
    return [minimise(objective.data, objective.loss, objective.penalty, solver=name) for name in names]


def _history(fit: Fit) -> pl.DataFrame:
    return pl.DataFrame() if fit.history is None else fit.history.select("exchanges", "objective")


def _racers() -> list[tuple[str, str, Mapping[str, Any]]]:
    """The randomised algorithms and the variants they declare: the name in the race, the solver, its options."""
    return [
        (f"{name} {variant}".strip(), name, options)
        for name in first_order()
        for variant, options in {"": {}, **find(name).variants}.items()
    ]


_BYTES = (("B", 1.0), ("kB", 1e3), ("MB", 1e6), ("GB", 1e9), ("TB", 1e12))
_SECONDS = (("s", 1.0), ("min", 60.0), ("h", 3600.0), ("d", 86400.0), ("y", 3.156e7))


def large(number: float) -> str:
    """A number that may be too large to write out.

    >>> large(12345.0), large(2.5e9)
    ('12,345', '2.5e+09')
    """
    return f"{number:,.0f}" if number < 1e7 else f"{number:.1e}"


def size(number: float) -> str:
    """A number of bytes as text.

    >>> size(999.0), size(123_456.0)
    ('999 B', '123 kB')
    """
    return _in_units(number, _BYTES, 1000)


def duration(seconds: float) -> str:
    """Seconds as text, in a suitable unit.

    >>> duration(90.0), duration(7100.0)
    ('90 s', '118 min')
    """
    return _in_units(seconds, _SECONDS, 120)


def _in_units(number: float, units: tuple[tuple[str, float], ...], most: float) -> str:
    """Three digits, in the first unit in which the number is below ``most``."""
    unit, size = next(((unit, size) for unit, size in units if number < most * size), units[-1])
    return f"{number / size:.3g} {unit}" if number / size < 1000 else f"{number / size:.0e} {unit}"
