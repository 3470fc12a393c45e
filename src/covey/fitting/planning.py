"""Plans: what each solver would cost on a network, before anything runs there; and a measured comparison in memory."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import polars as pl
from narwhals.typing import IntoDataFrame

from covey._typing import Floats
from covey.errors import ConvergenceWarning, SolverError, listing
from covey.fitting.fit import penalty_for
from covey.losses import Loss, family_of
from covey.model.model import Model
from covey.model.summary import counted
from covey.nodes.network import InMemory
from covey.objective.objective import Objective
from covey.objective.theory import Constants
from covey.problem.problem import Problem, Spec, as_frame, resolve
from covey.problem.rows import read_rows
from covey.solvers import Fit, minimise
from covey.solvers.clock import (
    BANDWIDTH,
    LATENCY,
    MODES,
    ROWS_PER_SECOND,
    Durations,
    Mode,
    Speeds,
    Timeline,
    durations,
    most_rows,
    run_seconds,
    timeline_of,
)
from covey.solvers.costs import Cost, check_accuracy, costs
from covey.solvers.first_order import l2gd
from covey.solvers.first_order.schedule import Schedule
from covey.solvers.ledger import Course, links
from covey.solvers.registry import direct, find, first_order
from covey.tables.rows import GroupedData
from covey.tree.hierarchy import Hierarchy

RACE_ITERATIONS = 20_000
_MOST_SHOWN = 300  # iterations in a figure of lock-step

_COLUMNS = ("formula", "client", "cluster", "weights", "offset", "frequency", "trials", "na", "fit_intercept", "standardize")
_SETTINGS = (*_COLUMNS, "gamma", "lam", "alpha", "reduction", "ridge")


@dataclass(frozen=True)
class Plan:
    """Cost of every solver to reach a given accuracy. ``print`` shows it as text, ``frame`` as a table."""

    costs: tuple[Cost, ...]
    known: Constants
    accuracy: float
    speeds: Speeds
    shape: str

    @property
    def cheapest(self) -> str:
        """The solver with the smallest ``seconds``."""
        return min(self.costs, key=lambda cost: cost.seconds).solver

    @property
    def frame(self) -> pl.DataFrame:
        """One row for each solver. Solvers that do not fit the problem have infinite costs."""
        return pl.DataFrame([asdict(cost) for cost in self.costs], infer_schema_length=None)

    def __str__(self) -> str:
        known = self.known
        width = max(12, *(len(cost.solver) + 1 for cost in self.costs))
        counts_head = f"{'iterations':>13}{'exchanges':>13}{'between':>13}{'bytes':>11}"
        head = f"{'':{width + 2}}{counts_head}{'time':>11}{'rounds':>11}{'lock-step':>11}"
        lines = [
            f"{self.shape}; squared distance to the minimiser down to {self.accuracy:g} of what it is at zero",
            f"latency {_range(1000 * self.speeds.latency)} ms one way, bandwidth {_range(self.speeds.bandwidth)} MB/s, "
            f"{_range(self.speeds.rows_per_second)} rows per second",
            f"L = {known.L:.3g}, Ltilde = {known.L_row:.3g}, mu = {known.mu:.3g}, C1 = {known.C1:.3g}, C2 = {known.C2:.3g}"
            + (f" ({known.note})" if known.note else ""),
            head,
        ]
        for cost in self.costs:
            mark = "* " if cost.solver == self.cheapest else "  "
            if math.isinf(cost.seconds):
                lines.append(f"{mark}{cost.solver:{width}}{'':>3}no estimate: {cost.note}")
                continue
            counts = "".join(f"{large(number):>13}" for number in (cost.iterations, cost.within, cost.between))
            modes = (cost.seconds, cost.rounds, cost.lock_step)
            times = "".join(f"{duration(cost.seconds if mode is None else mode):>11}" for mode in modes)
            lines.append(f"{mark}{cost.solver:{width}}{counts}{size(cost.bytes):>11}{times}  {cost.note}")
        lines.append("* shortest time; exchanges are those of the client with the most exchanges")
        lines.append(
            "time: clusters wait for each other at exchanges between clusters only; rounds: after every round; lock-step: "
            "after every iteration"
        )
        return "\n".join(lines)


def plan(
    table: GroupedData | IntoDataFrame,
    spec: Spec | None = None,
    *,
    family: str | Loss | None = None,
    accuracy: float = 1e-6,
    latency: float = LATENCY,
    bandwidth: float = BANDWIDTH,
    rows_per_second: float = ROWS_PER_SECOND,
    speeds: IntoDataFrame | None = None,
    **settings: Any,
) -> Plan:
    """Predict iterations, exchanges, bytes and time of each solver on a network; the one with the shortest time is marked.

    Parameters
    ----------
    table : GroupedData or data frame
        The rows. A data frame also needs ``spec``, or ``formula`` and ``client`` (and ``cluster`` if there are clusters).
    spec : Spec, optional
        The problem. Give either ``spec``, or ``family`` and ``settings``. If ``table`` is a GroupedData, the columns
        that ``spec`` names are ignored. Formulas have no bars here.
    family : str or Loss, optional
        "gaussian", "bernoulli", "poisson", "gamma", or a loss from :func:`covey.losses.from_functions`. The default is
        "gaussian".
    accuracy : float, optional
        Target: the squared distance to the minimiser, as a share of that at the start, where all coefficients are zero. The
        default is 1e-6.
    latency : float, optional
        Seconds that a message takes one way. The default is 0.05.
    bandwidth : float, optional
        Megabytes per second of each connection. The default is 10.
    rows_per_second : float, optional
        Rows whose gradient a client computes in a second. The default is a million.
    speeds : data frame, optional
        Clusters with other speeds: a column ``cluster`` with ids, and ``rows_per_second``, ``latency`` or ``bandwidth``.
    **settings
        Fields of :class:`Spec`, as for the estimators: gamma, lam, alpha, reduction, ridge, weights, ...

    Returns
    -------
    Plan
        Print it, or use its ``frame``.

    Examples
    --------
    >>> from covey.datasets import load_radon
    >>> found = plan(load_radon(), formula="log_radon ~ floor", client="county", cluster="state", gamma=10.0)
    >>> found.cheapest, found.frame["solver"].to_list()[:2]
    ('sweep', ['sweep', 'newton'])
    """
    accepted = _SETTINGS[len(_COLUMNS) :] if isinstance(table, GroupedData) else _SETTINGS
    for name in settings:
        if name not in accepted:
            raise SolverError(f"The plan has no setting {name!r} here; it takes {listing(accepted, 20)}.")
    if family is not None:
        settings["family"] = family_of(family).name
    if spec is not None and settings:
        raise SolverError(f"Give spec, or family and settings, not both; leave out {next(iter(settings))}=.")
    check_accuracy(accuracy)
    problem = resolve(Spec(**settings) if spec is None else spec)
    if problem.has_bars:
        raise SolverError("A plan does not read bars; write the formula without them, and name client= and cluster=.")
    data, problem = (table, problem) if isinstance(table, GroupedData) else read_rows(table, problem)
    if data.shared is not None:
        raise SolverError("A plan does not know sparse columns; leave out sparse=True.")
    if data is table:
        problem.loss.check(data.y, lambda row: f"row {row}")
    objective = _objective(data, problem)
    fast = _speeds_of(data.hierarchy, speeds, latency=latency, bandwidth=bandwidth, rows_per_second=rows_per_second)
    found, constants = costs(objective, _direct(objective), accuracy=accuracy, speeds=fast)
    sizes = ((data.n_clients, "client"), (data.n_clusters, "cluster"), (data.n_terms, "coefficient"))
    shape = "{} in {}, {} each".format(*(counted(count, noun) for count, noun in sizes))
    return Plan(tuple(found), constants, accuracy, fast, shape)


def example_timelines(data: GroupedData, planned: Plan, seed: int = 0) -> dict[Mode, Timeline]:
    """What each cluster does in ``l2gd``, until there have been about five exchanges, by mode of :mod:`covey.solvers.clock`.

    Lock-step is left out if a figure could not show its single iterations.
    """
    tree = data.hierarchy
    lasts = durations(planned.speeds, links(tree.sizes, data.n_terms), most_rows(tree, data.rows_per_client))
    chances = l2gd.recipe(planned.known).probabilities
    return _timelines(Schedule(chances, seed, merge=True), lasts)


def _timelines(schedule: Schedule, lasts: Durations, iterations: int | None = None) -> dict[Mode, Timeline]:
    chances = schedule.probabilities
    if iterations is None:
        iterations = int(np.clip(5 / (chances.p0 + (1 - chances.p0) * chances.p.max()), 20, 20_000))
    modes = [mode for mode in MODES if mode != "lock-step" or iterations <= _MOST_SHOWN]
    return {mode: timeline_of(schedule, iterations, lasts, mode) for mode in modes}


def _speeds_of(tree: Hierarchy, table: IntoDataFrame | None, **network: float) -> Speeds:
    own = table
    if table is not None:
        own = pl.DataFrame({column.name: column.to_list() for column in as_frame(table).iter_columns()})
    return Speeds.of(tree, own, **network)  # type: ignore[arg-type]


def clock_run(
    model: Model,
    *,
    speeds: IntoDataFrame | None = None,
    latency: float = LATENCY,
    bandwidth: float = BANDWIDTH,
    rows_per_second: float = ROWS_PER_SECOND,
) -> RunClock:
    """Find how long the run that fitted a model takes if its clusters have these speeds. Nothing is run again.

    The run may have been in memory or across sites. Its random choices say when each cluster computes and exchanges.

    Parameters
    ----------
    model : Model
        Fitted by a randomised algorithm, such as ``solver="l2gd"``.
    speeds, latency, bandwidth, rows_per_second
        As for :func:`plan`.

    Returns
    -------
    RunClock
        Print it, or use its ``frame`` and ``timelines``.

    Examples
    --------
    >>> import covey
    >>> from covey.datasets import load_radon
    >>> spec = Spec(formula="log_radon ~ floor", client="county", cluster="state", gamma=10.0, solver="one_coin", tol=0.1)
    >>> clock_run(covey.fit(load_radon(), spec).model_).frame.columns
    ['iteration', 'lock_step', 'rounds', 'asynchronous']
    """
    if model.course is None:
        raise SolverError(
            f"The run of {model.convergence.solver!r} has no clock: its clusters exchange all together, or the model was read "
            "from a folder. Fit with solver='l2gd' or another randomised algorithm; covey.plan has the times of all solvers."
        )
    tree, course = model.hierarchy, model.course
    fast = _speeds_of(tree, speeds, latency=latency, bandwidth=bandwidth, rows_per_second=rows_per_second)
    rows = most_rows(tree, model.rows)
    if model.elsewhere is not None:  # an operator knows the mean number of rows of a client
        rows = model.elsewhere.rows / np.maximum(model.elsewhere.clients, 1)
    return RunClock(course, durations(fast, course.links, rows, course.rows_per_step))


@dataclass(frozen=True)
class RunClock:
    """Times of one run; made by :func:`clock_run`."""

    course: Course
    durations: Durations

    @property
    def frame(self) -> pl.DataFrame:
        """A row for each check, with the seconds until its end in each mode of :mod:`covey.solvers.clock`."""
        times = run_seconds(self.course, self.durations)
        return pl.DataFrame({"iteration": self.course.checks} | {mode.replace("-", "_"): each for mode, each in times.items()})

    def timelines(self, iterations: int | None = None) -> dict[Mode, Timeline]:
        """What each cluster does in the first iterations of the run, without checks, by mode.

        By default there are about five exchanges. Lock-step is left out if a figure could not show its single iterations.
        """
        return _timelines(self.course.schedule, self.durations, iterations)

    def __str__(self) -> str:
        last = self.frame.row(-1, named=True)
        times = ", ".join(f"{mode} {duration(last[mode.replace('-', '_')])}" for mode in reversed(MODES))
        return f"on a clock, {last['iteration']:,} iterations with checks take: {times}"


def race(
    data: GroupedData,
    problem: Problem,
    *,
    accuracy: float = 1e-6,
    max_iter: int = RACE_ITERATIONS,
    progress: Callable[[str], None] | None = None,
) -> dict[str, pl.DataFrame]:
    """Run all solvers on one problem in memory and return their histories, each with its ``gap`` to the minimum.

    The gap is relative to the gap at zero. Randomised algorithms stop when their gap is certainly below ``accuracy``, or after
    ``max_iter`` iterations. Solvers that do not fit the problem are left out.
    """
    objective = _objective(data, problem)
    trials = _direct(objective)
    minimum = min(fit.convergence.objective for fit in trials)
    start = objective.value(np.zeros((data.n_clients, data.n_terms)))
    tol = accuracy * (start - minimum) / max(1.0, abs(minimum))
    at_zero = pl.DataFrame([{"exchanges": 0, "objective": start}])
    histories = {fit.convergence.solver: pl.concat([at_zero, _history(fit)]) for fit in trials}
    variants = {
        f"{solver} {variant}".strip(): (solver, options)
        for solver in first_order()
        for variant, options in {"": {}, **find(solver).variants}.items()
    }
    limits: dict[str, Any] = {"seed": problem.spec.seed, "tol": tol, "max_iter": max_iter}
    for name, (solver, options) in variants.items():
        if progress is not None:
            progress(name)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # the history shows it
            try:
                fit = minimise(data, problem.loss, objective.penalty, solver=solver, options=options, **limits)
            except SolverError:
                continue  # the plan gives the reason
        path = _history(fit)
        histories[name] = path if path["exchanges"][0] == 0 else pl.concat([at_zero, path])
    gap = (pl.col("objective") - minimum) / (start - minimum)
    return {name: path.with_columns(gap=gap) for name, path in histories.items()}


def _objective(data: GroupedData, problem: Problem) -> Objective:
    return Objective(data, problem.loss, penalty_for(InMemory.of(data, problem.loss), problem))


def _direct(objective: Objective) -> list[Fit]:
    """The minimiser, by each direct solver."""
    names = [name for name in direct() if objective.loss.quadratic or not find(name).quadratic]
    return [minimise(objective.data, objective.loss, objective.penalty, solver=name) for name in names]


def _history(fit: Fit) -> pl.DataFrame:
    return pl.DataFrame() if fit.history is None else fit.history.select("exchanges", "objective")


def _range(values: Floats) -> str:
    """The values of all clusters: one number, or the smallest and the largest."""
    low, high = float(values.min()), float(values.max())
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


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
