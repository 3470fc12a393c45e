"""What each solver would cost on a network, before anything runs there; and, on demand, all of them in a race in memory."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import polars as pl

from covey.data import GroupedData
from covey.errors import ConvergenceWarning
from covey.losses import Loss
from covey.model import Spec, read_frame
from covey.objective import Penalty
from covey.solvers import BY_COINS, Fit, Solver, solve
from covey.solvers.costs import BANDWIDTH, LATENCY, Cost, check_network, costs
from covey.theory import Constants

RACE_ITERATIONS = 20_000


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
        head = f"{'':14}{'iterations':>13}{'exchanges':>13}{'between':>13}{'bytes':>10}{'time':>10}"
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
                lines.append(f"{mark}{cost.solver:12}{'':>3}does not fit: {cost.note}")
                continue
            counts = "".join(f"{_count(number):>13}" for number in (cost.iterations, cost.within, cost.between))
            lines.append(f"{mark}{cost.solver:12}{counts}{_size(cost.bytes):>10}{_time(cost.seconds):>10}  {cost.note}")
        lines.append("* waits least; exchanges are those of the client that has most")
        return "\n".join(lines)


def plan(
    data: Any,
    *,
    family: str = "gaussian",
    accuracy: float = 1e-6,
    latency: float = LATENCY,
    bandwidth: float = BANDWIDTH,
    **settings: Any,
) -> Plan:
    """Iterations, exchanges, bytes and time of each solver to a given accuracy; the cheapest is marked.

    Parameters
    ----------
    data : GroupedData, or a data frame with ``formula=``, ``client=`` and ``cluster=``
    family : "gaussian", "bernoulli" or "poisson"
    accuracy : share of the squared distance from zero to the minimiser that may be left
    latency : seconds for a message, one way
    bandwidth : megabytes a second, each link
    **settings : the rest of the specification, as for the estimators: gamma, lam, alpha, reduction, ridge, ...

    >>> from covey.datasets import load_radon
    >>> told = plan(load_radon(), formula="log_radon ~ floor", client="county", cluster="state", gamma=10.0)
    >>> told.cheapest, told.frame["solver"].to_list()
    ('sweep', ['sweep', 'newton', 'l2gd', 'one_coin', 'al2sgd_plus'])
    """
    check_network(accuracy, latency, bandwidth)
    spec = Spec(family=family, **settings)
    spec.check()
    grouped = data if isinstance(data, GroupedData) else read_frame(data, spec)[0]
    penalty = Penalty.of(grouped.hierarchy, gamma=spec.gamma, lam=spec.lam, alpha=spec.alpha)
    trials = _direct(grouped, spec.loss, penalty)
    found, known = costs(grouped, spec.loss, penalty, trials, accuracy=accuracy, latency=latency, bandwidth=bandwidth)
    shape = f"{grouped.n_clients:,} clients in {grouped.n_clusters:,} clusters, {grouped.n_terms} coefficients each"
    return Plan(tuple(found), known, accuracy, latency, bandwidth, shape)


def race(
    data: GroupedData,
    spec: Spec,
    *,
    accuracy: float = 1e-6,
    max_iter: int = RACE_ITERATIONS,
    progress: Callable[[str], None] | None = None,
) -> dict[str, pl.DataFrame]:
    """The measured histories of all solvers on one problem, in memory, each with the true ``gap`` to the minimum.

    The gap is relative to that at zero. Solvers by coins stop at ``accuracy``, or after ``max_iter`` iterations.
    """
    penalty = Penalty.of(data.hierarchy, gamma=spec.gamma, lam=spec.lam, alpha=spec.alpha)
    trials = _direct(data, spec.loss, penalty)
    minimum, told = min(fit.convergence.objective for fit in trials), {}
    for name, options in _STARTERS.items():
        if progress is not None:
            progress(name)
        solver = name.split()[0]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # a race shows where a solver stalls
            # The certified gap is a bound; the race is run a little longer, to the accuracy itself.
            fit = BY_COINS[solver](
                data, spec.loss, penalty, seed=spec.seed, tol=accuracy * 1e-2, max_iter=max_iter, minimum=minimum, **options
            )
        told[name] = _history(fit)
    start = next(iter(told.values()))["objective"][0]
    at_zero = pl.DataFrame([{"exchanges": 0, "objective": start}])
    direct = {fit.convergence.solver: pl.concat([at_zero, _history(fit)]) for fit in trials}
    gap = (pl.col("objective") - minimum) / (start - minimum)
    return {name: path.with_columns(gap=gap) for name, path in {**direct, **told}.items()}


def _direct(data: GroupedData, loss: Loss, penalty: Penalty) -> list[Fit]:
    """The minimiser, by each solver that goes straight to it."""
    names: list[Solver] = ["sweep", "newton"] if loss.name == "gaussian" else ["newton"]
    return [solve(data, loss, penalty, solver=name) for name in names]


def _history(fit: Fit) -> pl.DataFrame:
    return pl.DataFrame() if fit.history is None else fit.history.select("exchanges", "objective")


_STARTERS: dict[str, dict[str, Any]] = {
    "l2gd": {},
    "l2gd switching": {"steps": "switching"},
    "one_coin": {},
    "al2sgd_plus": {},
}


def _count(number: float) -> str:
    return f"{number:,.0f}" if number < 1e7 else f"{number:.1e}"


def _size(number: float) -> str:
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if number < 1000 or unit == "TB":
            return f"{number:.3g} {unit}" if number < 1e5 else f"{number:.0e} {unit}"
        number /= 1000
    return ""


def _time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("min", 60.0), ("h", 3600.0), ("d", 86400.0)):
        if seconds < 120 * size or unit == "d":
            return f"{seconds / size:,.3g} {unit}" if seconds < 1e6 * size else f"{seconds / size:.0e} {unit}"
    return ""
