"""Communication cost of the algorithms: gap against exchanges and bytes, beside the bounds of their theorems.

:mod:`.comparison` runs all solvers and their rivals on four problems.

The study also varies the settings: the probability of an exchange, ``tau``, and clusters that exchange less often. The bounds
are those of Theorem 3.5 (conv_rate) and Theorem 4.3 (al2sgd_conv_rate) of arXiv:2204.13619; the paper has no such experiment.
Checks only measure how far a run is, so their exchanges are not counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from covey._typing import Floats
from covey.datasets import simulate
from covey.losses import loss_of
from covey.nodes.network import InMemory
from covey.objective.objective import Objective, Penalty
from covey.objective.theory import Constants, Recipe, distance_bound, expected_smoothness, noise, switch, switching_bound
from covey.reproduce import comparison
from covey.reproduce.study import Say, Study, Table, generator, integer_seed, no_convergence_warnings, silent, tracked
from covey.solvers import minimise
from covey.solvers.clock import LATENCY, MODES, Durations, Mode, Speeds, durations, most_rows, seconds
from covey.solvers.first_order import al2sgd_plus, l2gd, one_coin
from covey.solvers.first_order.curvature import constants
from covey.solvers.first_order.schedule import Schedule
from covey.solvers.ledger import Links, links, rates
from covey.solvers.registry import direct
from covey.solvers.result import Fit

COARSE, TARGET = 1e-2, 1e-6  # relative to the gap at zero
REPEATS = 10
SLOW = 10.0  # how much longer a message of a cluster with slow links takes


class RaceProblem(NamedTuple):
    """An objective with its minimiser ``theta (n, d)``, its minimum, the gap at zero and its constants."""

    objective: Objective
    theta: Floats
    minimum: float
    gap: float
    constants: Constants

    def minimise(self, solver: str, **settings: Any) -> Fit:
        """Run a solver without warnings: the study shows which runs do not converge."""
        with no_convergence_warnings():
            return minimise(self.objective.data, self.objective.loss, self.objective.penalty, solver=solver, **settings)


def problem(seed: int) -> RaceProblem:
    """10 clusters of 10 clients with 20 rows and 5 coefficients; a Gaussian loss, averaged over the rows of each client."""
    data = simulate(
        clusters=10, clients=10, rows=20, d=5, wbar=1.0, cluster_sd=0.5, client_sd=0.5, seed=generator(seed, 8)
    ).data
    objective = Objective(data, loss_of("gaussian", "mean"), Penalty.of(data.hierarchy, gamma=1.0, lam=5.0))
    best = minimise(data, objective.loss, objective.penalty)
    gap = objective.value(np.zeros_like(best.theta)) - best.convergence.objective
    measured = constants(InMemory.of(data, objective.loss, objective.penalty.gamma), objective.penalty)
    return RaceProblem(objective, best.theta, best.convergence.objective, gap, measured)


def study(*, seed: int = 0, quick: bool = False, say: Say = silent) -> Study:
    """The race of all solvers, then the settings; ``quick`` takes one repeat instead of ten, and shorter runs."""
    repeats, longest = (1, 2000) if quick else (REPEATS, 20_000)
    here = problem(seed)
    seeds = [integer_seed(generator(seed, 9, repeat)) for repeat in range(repeats)]
    curves = race(here, longest, seeds[0], say)
    reached = arrivals(curves)
    chance = effect_of_probability(here, seeds, say)
    tau = effect_of_tau(here, seeds, say)
    schedules = unequal_schedules(here, seeds, say)
    known, compared = here.constants, comparison.compare(seed, quick, say)
    return Study(
        name="communication",
        title="Communication: gap against exchanges and bytes, and the effect of the settings",
        settings={"problem": "10 x 10 clients, 20 rows, d = 5, gamma = 1, lam = 5", "target": TARGET, "repeats": repeats}
        | {"seed": seed},
        findings=(*findings(reached, chance, tau, schedules), *comparison.findings(compared)),
        tables=(
            Table(
                "comparison",
                "All solvers and their rivals on four problems: means over the runs",
                comparison.shown(compared),
                comparison.NOTE,
            ),
            Table("winners", "Which solver of covey needs the least", comparison.winners(compared)),
            Table("comparison-all", "The comparison with standard deviations", compared, shown=False),
            Table("race", "Exchanges of a client, and bytes of the network, to reach two gaps", reached, digits=0),
            Table(
                "chance",
                "al2sgd_plus with p0 and p at a multiple of their best values",
                chance,
                "calL is the expected smoothness of a step, which determines the number of iterations. The best p0 and p are "
                "those of Corollary 4.4 (async_al2sgd_plus_opt_conv_rate), which minimise it.",
            ),
            Table("tau", "al2sgd_plus by tau, at the best p0 and p", tau),
            Table(
                "schedules",
                "al2sgd_plus if five of the ten clusters, whose links are slow, exchange less often within the cluster",
                schedules,
                f"Seconds to the gap by a clock: messages of the slow clusters take {SLOW * LATENCY:g} s one way, those of the "
                f"others {LATENCY:g} s. Asynchronous clusters wait for each other at exchanges between clusters only.",
            ),
            Table("curves", "All points of the figure", curves, shown=False),
        ),
        remarks=(
            f"L = {known.L:.3g}, Ltilde = {known.L_row:.3g}, mu = {known.mu:.3g}, C1 = {known.C1:.3g}, C2 = {known.C2:.3g}.",
            "The gap is the objective minus its minimum, divided by the same at zero. A gap is reached when a run is first at "
            "or below it. 'promised' is the theorem's bound on the expected gap, at the expected number of exchanges. For l2gd "
            "and one_coin the bound is that of Theorem 3.5 (conv_rate) on the squared distance, times half the smoothness of "
            "the objective. For al2sgd_plus it is the potential of L-Katyusha with its constants; the paper states its order "
            "only. 'l2gd switching' decreases its steps after a number of iterations (Gower et al. 2019). Checks are not "
            "counted.",
        ),
        quick=quick,
    )


# The race


def race(here: RaceProblem, longest: int, seed: int, say: Say) -> pl.DataFrame:
    """Measured and promised gap of every solver, by exchanges and bytes."""
    watch: dict[str, Any] = {"seed": seed, "tol": 0.0, "minimum": here.minimum, "every": max(1, longest // 1000)}
    runs: dict[str, dict[str, Any]] = {
        "sweep": {},
        "newton": {},
        "al2sgd_plus": {"max_iter": 4000, **watch},
        "l2gd": {"max_iter": longest, **watch},
        "l2gd switching": {"steps": "switching", "max_iter": longest, **watch},
        "one_coin": {"max_iter": longest, **watch},
    }
    curves = []
    for name in tracked(list(runs), "race", say):
        curves.append(_measured(here, name, here.minimise(name.split()[0], **runs[name]), seed))
        if name not in direct():
            curves.append(_promised(here, name, int(curves[-1]["iteration"][-1])))
    return pl.concat(curves, how="vertical_relaxed")


def _measured(here: RaceProblem, name: str, fit: Fit, seed: int) -> pl.DataFrame:
    history = fit.history
    if history is None:
        raise TypeError("every solver in the race keeps a history")
    exchanges, size = history["exchanges"].to_numpy(), history["bytes"].to_numpy()
    if name not in direct():
        # A check may add an exchange, so count from the schedule: it has only the exchanges of the random choices.
        schedule, network = _schedule(_recipe(here, name), seed), _links(here)
        spent = [network.of(schedule.rounds(0, t), t) if t else network.nothing for t in history["iteration"].to_list()]
        exchanges, size = (np.array([getattr(cost, kind) for cost in spent]) for kind in ("exchanges", "bytes"))
    rows = pl.DataFrame(
        {
            "iteration": history["iteration"],
            "exchanges": exchanges.astype(float),
            "bytes": size.astype(float),
            "gap": (history["objective"].to_numpy() - here.minimum) / here.gap,
        }
    ).filter(pl.col("exchanges") > 0)
    first = pl.DataFrame([{"iteration": 0, "exchanges": 0.0, "bytes": 0.0, "gap": 1.0}])
    return pl.concat([first, rows], how="vertical_relaxed").select(
        pl.lit(name).alias("solver"), pl.lit("measured").alias("kind"), *rows.columns
    )


def _recipe(here: RaceProblem, name: str) -> Recipe:
    if name == "al2sgd_plus":
        return al2sgd_plus.recipe(here.constants)
    return one_coin.recipe(here.constants) if name == "one_coin" else l2gd.recipe(here.constants)


def _schedule(recipe: Recipe, seed: int) -> Schedule:
    """The random choices of a run; in Algorithm 1 consecutive steps share an exchange, because ``gamma`` is equal for all."""
    return Schedule(recipe.probabilities, seed, merge=recipe.probabilities.rho == 0)


def _links(here: RaceProblem) -> Links:
    data = here.objective.data
    return links(data.hierarchy.sizes, data.n_terms)


def _promised(here: RaceProblem, name: str, iterations: int) -> pl.DataFrame:
    """The theorem's bound on the expected gap, relative to the gap at zero, up to a number of iterations."""
    known, distance, recipe = here.constants, float((here.theta**2).sum()), _recipe(here, name)
    t = np.unique(np.round(np.geomspace(1, max(iterations, 2), 200)).astype(int))
    if name == "al2sgd_plus":
        start, contraction = _katyusha_bound(here, recipe)
        bound = start * contraction**t
    else:
        sigma2 = noise(here.objective, here.theta, recipe.probabilities)
        if name == "l2gd switching":
            t = t[t >= switch(recipe.smoothness, known.mu)]
            far = switching_bound(t, smoothness=recipe.smoothness, mu=known.mu, sigma2=sigma2, start=distance)
        else:
            far = distance_bound(t, eta=recipe.largest_step, mu=known.mu, sigma2=sigma2, start=distance)
        bound = 0.5 * (known.L + known.gamma_max) * far
    within, between = rates(_schedule(recipe, 0))
    size = float(_links(here).count(within, between).bytes)
    counts = {"iteration": t, "exchanges": float(np.max(within)) * t, "bytes": size * t}
    return pl.DataFrame({"solver": name, "kind": "promised", **counts, "gap": bound / here.gap})


def _katyusha_bound(here: RaceProblem, recipe: Recipe) -> tuple[float, float]:
    """Start and contraction of the bound on the expected gap of ``al2sgd_plus``: start * contraction^t."""
    katyusha = al2sgd_plus.Katyusha.of(here.constants, recipe.smoothness, recipe.probabilities.rho)
    size = katyusha.potential(float((here.theta**2).sum()), here.gap)
    return katyusha.a1 / (2 * katyusha.b1 * katyusha.b2) * size, katyusha.contraction


def arrivals(curves: pl.DataFrame) -> pl.DataFrame:
    """Exchanges and bytes at the first point of each curve at or below each target; null if there is none."""
    rows: list[dict[str, Any]] = []
    for name in curves["solver"].unique(maintain_order=True).to_list():
        row: dict[str, Any] = {"solver": name}
        for target in (COARSE, TARGET):
            for kind, suffix in (("measured", ""), ("promised", ", promised")):
                below = curves.filter(pl.col("solver") == name, pl.col("kind") == kind, pl.col("gap") <= target)
                for unit in ("exchanges", "bytes"):
                    row[f"{unit} to {target:g}{suffix}"] = float(below[unit][0]) if len(below) else None
        rows.append(row)
    return pl.DataFrame(rows, infer_schema_length=None)


# The settings


class Trial(NamedTuple):
    """``al2sgd_plus`` with some settings, until it reaches the target: averages over seeds."""

    recipe: Recipe
    iterations: float
    within: Floats
    between: float
    lengths: tuple[int, ...]

    def row(self, here: RaceProblem) -> dict[str, float]:
        """The columns that several tables share."""
        start, contraction = _katyusha_bound(here, self.recipe)
        bound = float(np.ceil(np.log(start / here.gap / TARGET) / -np.log(contraction)))
        exchanges = float(np.max(self.within))
        smoothness = self.recipe.smoothness
        return {"calL": smoothness, "iterations": self.iterations, "iterations, promised": bound, "exchanges": exchanges}


def _trials(here: RaceProblem, seeds: list[int], step: str, tried: list[dict[str, Any]], say: Say) -> Iterator[Trial]:
    """Run ``al2sgd_plus`` with each of the settings."""
    for settings in tracked(tried, step, say):
        fits = [_run(here, seed, **settings) for seed in seeds]
        ledgers = [fit.ledger for fit in fits if fit.ledger is not None]
        yield Trial(
            al2sgd_plus.recipe(here.constants, **settings),
            float(np.mean([fit.convergence.iterations for fit in fits])),
            np.mean([ledger.within for ledger in ledgers], axis=0),
            float(np.mean([ledger.between for ledger in ledgers])),
            tuple(fit.convergence.iterations for fit in fits),
        )


def _run(here: RaceProblem, seed: int, **settings: Any) -> Fit:
    """Run ``al2sgd_plus`` to the first check at which it has reached the target."""
    settings |= {"seed": seed, "tol": 0.0, "minimum": here.minimum}
    most, history = 2000, None
    while history is None or history.is_empty():
        fit = here.minimise("al2sgd_plus", max_iter=most, every=25, **settings)
        history = fit.history.filter(pl.col("gap") <= TARGET * here.gap) if fit.history is not None else None
        most *= 4
    last = int(history["iteration"][0])
    return here.minimise("al2sgd_plus", max_iter=last, every=last, **settings)


def effect_of_probability(here: RaceProblem, seeds: list[int], say: Say) -> pl.DataFrame:
    """Iterations and exchanges to the target with ``p0`` and ``p`` at multiples of their best values."""
    best = al2sgd_plus.recipe(here.constants).probabilities
    factors = (0.1, 0.3, 1.0, 3.0, 10.0)
    chances = [{"p0": min(0.95, factor * best.p0), "p": min(0.95, factor * float(best.p[0]))} for factor in factors]
    trials = _trials(here, seeds, "probability of an exchange", [{**pair, "rho": best.rho} for pair in chances], say)
    rows = zip(factors, chances, trials, strict=True)
    return pl.DataFrame([{"multiple of the best": factor, **pair, **trial.row(here)} for factor, pair, trial in rows])


def effect_of_tau(here: RaceProblem, seeds: list[int], say: Say) -> pl.DataFrame:
    """Iterations and exchanges to the target with ``tau`` at 0, 1 and its best value."""
    best = al2sgd_plus.recipe(here.constants).probabilities
    taus = {"0": 0.0, "1": 1.0, f"tau* = {float(best.tau[0]):.2f}": float(best.tau[0])}
    tried = [{"p0": best.p0, "p": float(best.p[0]), "tau": tau, "rho": best.rho} for tau in taus.values()]
    rows = []
    for label, trial in zip(taus, _trials(here, seeds, "tau", tried, say), strict=True):
        penalty_smoothness = expected_smoothness(here.constants, trial.recipe.probabilities, 0.0)
        rows.append({"tau": label, "calL of the penalty": penalty_smoothness, **trial.row(here)})
    return pl.DataFrame(rows)


def unequal_schedules(here: RaceProblem, seeds: list[int], say: Say) -> pl.DataFrame:
    """Half of the clusters exchange less often within the cluster: what they save, and what it costs everybody."""
    best = al2sgd_plus.recipe(here.constants).probabilities
    slow, factors = np.arange(len(best.p)) >= len(best.p) // 2, (1.0, 0.5, 0.25, 0.1)
    tried = [{"p0": best.p0, "p": np.where(slow, factor * best.p, best.p), "rho": best.rho} for factor in factors]
    data, latency = here.objective.data, np.where(slow, SLOW * LATENCY, LATENCY)
    speeds = replace(Speeds.of(data.hierarchy), latency=latency)
    lasts, rows = durations(speeds, _links(here), most_rows(data.hierarchy, data.rows_per_client), 2), []
    for factor, trial in zip(factors, _trials(here, seeds, "schedules", tried, say), strict=True):
        inside = trial.within - trial.between
        rows.append(
            {
                "slow clusters' share of p": factor,
                "calL": trial.recipe.smoothness,
                "iterations": trial.iterations,
                "exchanges within a fast cluster": float(inside[~slow].mean()),
                "exchanges within a slow cluster": float(inside[slow].mean()),
                "exchanges between clusters": trial.between,
                **{f"seconds, {mode}": _mean_seconds(trial, seeds, lasts, mode) for mode in MODES},
            }
        )
    return pl.DataFrame(rows)


def _mean_seconds(trial: Trial, seeds: list[int], lasts: Durations, mode: Mode) -> float:
    runs = zip(seeds, trial.lengths, strict=True)
    return float(np.mean([seconds(_schedule(trial.recipe, seed), 0, length, lasts, mode) for seed, length in runs]))


def exchanges_to_gap(exchanges: Mapping[str, float | None], gap: float) -> str:
    """The number of exchanges with which each solver reaches a gap; None if it does not.

    >>> exchanges_to_gap({"newton": 2, "al2sgd_plus": 1095, "l2gd": None}, 1e-6)
    'Exchanges of a client to a gap of 1e-06: newton 2, al2sgd_plus 1,095; not reached by l2gd'
    """
    reached = [f"{name} {count:,.0f}" for name, count in exchanges.items() if count is not None]
    missed = [name for name, count in exchanges.items() if count is None]
    parts = [", ".join(reached)] * bool(reached) + [f"not reached by {', '.join(missed)}"] * bool(missed)
    return f"Exchanges of a client to a gap of {gap:g}: {'; '.join(parts)}"


def findings(reached: pl.DataFrame, chance: pl.DataFrame, tau: pl.DataFrame, schedules: pl.DataFrame) -> tuple[str, ...]:
    """Sentences about the tables."""
    column = f"exchanges to {TARGET:g}"
    measured, bounds = (dict(reached.select("solver", name).iter_rows()) for name in (column, f"{column}, promised"))
    bound = "beyond the end of the run" if bounds["al2sgd_plus"] is None else f"{bounds['al2sgd_plus']:,.0f}"
    fewest, quickest = (chance.sort(name).row(0, named=True) for name in ("exchanges", "iterations"))
    by_tau = [f"{row['tau']}: {row['calL of the penalty']:.3g} and {row['iterations']:,.0f}" for row in tau.to_dicts()]
    equal, least = schedules.row(0, named=True), schedules.row(-1, named=True)
    share, inside, between = "slow clusters' share of p", "exchanges within a slow cluster", "exchanges between clusters"
    total, before = least[inside] + least[between], equal[inside] + equal[between]
    slower = [f"{row['seconds, asynchronous']:.0f} s" for row in (least, equal)]
    helps = least["seconds, asynchronous"] < equal["seconds, asynchronous"]
    return (
        f"{exchanges_to_gap(measured, TARGET)}. The theorem's bound for al2sgd_plus, on average over the random choices, is "
        f"{bound}.",
        f"Fewest exchanges ({fewest['exchanges']:.0f}) at {fewest['multiple of the best']:g} times the probabilities of "
        f"Corollary 4.4 (async_al2sgd_plus_opt_conv_rate); fewest iterations ({quickest['iterations']:,.0f}) at "
        f"{quickest['multiple of the best']:g} times.",
        f"Expected smoothness of the penalty, and iterations, by tau: {'; '.join(by_tau)}.",
        f"When slow clusters exchange within the cluster with {least[share]:g} times the best "
        f"probability, they make {least[inside]:.1f} such exchanges, not {equal[inside]:.1f}. The run then needs "
        f"{least['iterations']:,.0f} iterations, not {equal['iterations']:,.0f}, and {least[between]:.1f} exchanges between "
        f"clusters, not {equal[between]:.1f}. In total a slow cluster exchanges {total:.1f} times, not {before:.1f}. If its "
        f"messages take ten times as long as those of the others, the run takes {slower[0]}, not {slower[1]}, even if clusters "
        f"wait for each other at exchanges between them only: it {'helps' if helps else 'does not help'} slow links.",
    )
