"""What the algorithms cost on a network: gap against exchanges and bytes, beside what their theorems promise.

And what their settings do: the chance of an exchange, ``tau`` between the two kinds of coin, clusters with schedules of their
own. The paper gives the theorems and leaves such a study to others. Checks, which only serve to see how far a run is, are not
counted.
"""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from covey._typing import Floats
from covey.datasets import simulate
from covey.errors import ConvergenceWarning
from covey.losses import loss_of
from covey.nodes.network import InMemory
from covey.objective.objective import Objective, Penalty
from covey.objective.theory import (
    Constants,
    Recipe,
    distance_bound,
    expected_smoothness,
    noise,
    switch,
    switching_bound,
)
from covey.reproduce.study import Say, Study, Table, generator, silent, whole
from covey.solvers import minimise
from covey.solvers.first_order import al2sgd_plus, l2gd, one_coin
from covey.solvers.first_order.curvature import constants
from covey.solvers.first_order.schedule import Schedule
from covey.solvers.ledger import Links, links, rates
from covey.solvers.registry import direct
from covey.solvers.result import Fit

CALL = "calL: the expected smoothness of a step, on which the iterations depend; cor. opt_conv_rate sets p0 and p by it."
COARSE, TARGET = 1e-2, 1e-6  # of the gap at zero
REPEATS = 10


class RaceProblem(NamedTuple):
    """One objective, with its minimum, its constants, and the gap at zero."""

    objective: Objective
    theta: Floats
    minimum: float
    gap: float
    known: Constants


def problem(seed: int) -> RaceProblem:
    """10 clusters of 10 clients, 20 rows and 5 coefficients, a Gaussian loss averaged over each client's rows."""
    data = simulate(
        clusters=10, clients=10, rows=20, d=5, wbar=1.0, cluster_sd=0.5, client_sd=0.5, seed=generator(seed, 8)
    ).data
    objective = Objective(data, loss_of("gaussian", "mean"), Penalty.of(data.hierarchy, gamma=1.0, lam=5.0))
    best = minimise(data, objective.loss, objective.penalty)
    gap = objective.value(np.zeros_like(best.theta)) - best.convergence.objective
    known = constants(InMemory.of(data, objective.loss, objective.penalty.gamma), objective.penalty)
    return RaceProblem(objective, best.theta, best.convergence.objective, gap, known)


def study(*, seed: int = 0, quick: bool = False, say: Say = silent) -> Study:
    """The race, then the settings; quick: one repeat instead of ten, shorter runs."""
    repeats, longest = (1, 2000) if quick else (REPEATS, 20_000)
    here = problem(seed)
    seeds = [whole(generator(seed, 9, repeat)) for repeat in range(repeats)]
    curves = race(here, longest, seeds[0], say)
    reached = arrivals(curves)
    chance = effect_of_chance(here, seeds, say)
    tau = effect_of_tau(here, seeds, say)
    schedules = unequal_schedules(here, seeds, say)
    known = here.known
    return Study(
        "communication",
        "Communication: gap against exchanges and bytes, and what the settings do",
        {"problem": "10 x 10 clients, 20 rows, d = 5, gamma = 1, lam = 5", "target": TARGET, "repeats": repeats, "seed": seed},
        (*_about_race(reached), _about_chance(chance), _about_tau(tau), _about_schedules(schedules)),
        (),
        (
            Table("race", "Exchanges of a client, and bytes of the network, to two gaps", reached, digits=0),
            Table("chance", "al2sgd_plus with p0 and p at a multiple of the best", chance, CALL),
            Table("tau", "al2sgd_plus by tau, at the best p0 and p", tau),
            Table("schedules", "al2sgd_plus, five clusters of ten on slow links that exchange less often", schedules),
            Table("curves", "Every point of the figure", curves, shown=False),
        ),
        (
            f"L = {known.L:.3g}, Ltilde = {known.L_row:.3g}, mu = {known.mu:.3g}, C1 = {known.C1:.3g}, C2 = {known.C2:.3g}.",
            "The gap is that of the objective to its minimum, as a share of the gap at zero; one is reached when first met. "
            "Promised: a bound on the expected gap, with the expected exchanges. For l2gd and one_coin that is "
            "thm. conv_rate, a bound on the squared distance, times half the smoothness of the objective; for al2sgd_plus "
            "L-Katyusha's potential with its constants, of which the paper states the order. Checks are not counted. "
            "l2gd switching: its steps shrink from a certain iteration on (Gower et al. 2019).",
        ),
        quick=quick,
    )


# The race


def race(here: RaceProblem, longest: int, seed: int, say: Say) -> pl.DataFrame:
    """Measured and promised gap of every solver, by exchanges and bytes."""
    data, loss, penalty = here.objective.data, here.objective.loss, here.objective.penalty
    watch: dict[str, Any] = {"seed": seed, "tol": 0.0, "minimum": here.minimum, "every": max(1, longest // 1000)}
    runs: dict[str, dict[str, Any]] = {
        "sweep": {},
        "newton": {},
        "al2sgd_plus": {"max_iter": 4000, **watch},
        "l2gd": {"max_iter": longest, **watch},
        "l2gd switching": {"steps": "switching", "max_iter": longest, **watch},
        "one_coin": {"max_iter": longest, **watch},
    }
    told = []
    for at, (name, settings) in enumerate(runs.items()):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # a race shows where a solver stalls
            fit = minimise(data, loss, penalty, solver=name.split()[0], **settings)
        told.append(_measured(here, name, fit, seed))
        if name not in direct():
            told.append(_promised(here, name, told[-1]["iteration"].to_numpy()))
        say("race", at + 1, len(runs))
    return pl.concat(told, how="vertical_relaxed")


def _measured(here: RaceProblem, name: str, fit: Fit, seed: int) -> pl.DataFrame:
    history = fit.history
    if history is None:
        raise TypeError("every solver in the race keeps a history")
    exchanges, size = history["exchanges"].to_numpy(), history["bytes"].to_numpy()
    if name not in direct():
        # A check may add an exchange; what the random choices alone ask for is counted from the schedule itself.
        schedule, network = _schedule(_recipe(here, name), seed), _links(here)
        spent = [network.of(schedule.rounds(0, t), t) if t else network.nothing for t in history["iteration"].to_list()]
        exchanges, size = np.array([each.exchanges for each in spent]), np.array([each.bytes for each in spent])
    rows = pl.DataFrame(
        {
            "iteration": history["iteration"],
            "exchanges": exchanges.astype(float),
            "bytes": size.astype(float),
            "gap": (history["objective"].to_numpy() - here.minimum) / here.gap,
        }
    ).filter(pl.col("exchanges") > 0)
    first = pl.DataFrame([{"iteration": 0, "exchanges": 0.0, "bytes": 0.0, "gap": 1.0}])
    told = pl.concat([first, rows], how="vertical_relaxed")
    return told.select(pl.lit(name).alias("solver"), pl.lit("measured").alias("kind"), *rows.columns)


def _recipe(here: RaceProblem, name: str) -> Recipe:
    if name == "al2sgd_plus":
        return al2sgd_plus.recipe(here.known)
    return one_coin.recipe(here.known) if name == "one_coin" else l2gd.recipe(here.known)


def _schedule(recipe: Recipe, seed: int) -> Schedule:
    """The choices of a run; consecutive steps of Algorithm 1 share an exchange, since ``gamma`` is the same for all."""
    return Schedule(recipe.probabilities, seed, merge=recipe.probabilities.rho == 0)


def _links(here: RaceProblem) -> Links:
    data = here.objective.data
    return links(data.hierarchy.sizes, data.n_terms)


def _promised(here: RaceProblem, name: str, iterations: Any) -> pl.DataFrame:
    """The theorem's bound on the expected gap, a share of that at zero, after some iterations."""
    known, distance = here.known, float((here.theta**2).sum())
    t = np.unique(np.round(np.geomspace(1, max(iterations[-1], 2), 200)).astype(int))
    recipe = _recipe(here, name)
    if name == "al2sgd_plus":
        katyusha = al2sgd_plus.Katyusha.of(known, recipe.smoothness, recipe.probabilities.rho)
        size = katyusha.potential(distance, here.gap)
        bound = katyusha.a1 / (2 * katyusha.b1 * katyusha.b2) * size * katyusha.contraction**t
    else:
        sigma2 = noise(here.objective, here.theta, recipe.probabilities)
        if name == "l2gd switching":
            t = t[t >= switch(recipe.smoothness, known.mu)]
            far = switching_bound(t, smoothness=recipe.smoothness, mu=known.mu, sigma2=sigma2, start=distance)
        else:
            far = distance_bound(t, eta=recipe.largest_step, mu=known.mu, sigma2=sigma2, start=distance)
        bound = 0.5 * (known.L + known.gamma_max) * far
    exchanges, size = _expected(here, recipe)
    return pl.DataFrame(
        {
            "solver": name,
            "kind": "promised",
            "iteration": t,
            "exchanges": exchanges * t,
            "bytes": size * t,
            "gap": bound / here.gap,
        }
    )


def _expected(here: RaceProblem, recipe: Recipe) -> tuple[float, float]:
    """Exchanges of a client and bytes of the network, expected in an iteration."""
    within, between = rates(_schedule(recipe, 0))
    spent = _links(here).count(within, between)
    return float(np.max(within)), float(spent.bytes)


def arrivals(curves: pl.DataFrame) -> pl.DataFrame:
    """The first point of each curve at each target; empty where it is not reached."""
    rows: list[dict[str, Any]] = []
    for name in curves["solver"].unique(maintain_order=True).to_list():
        row: dict[str, Any] = {"solver": name}
        for target in (COARSE, TARGET):
            for kind, suffix in (("measured", ""), ("promised", ", promised")):
                there = curves.filter(pl.col("solver") == name, pl.col("kind") == kind, pl.col("gap") <= target)
                row[f"exchanges to {target:g}{suffix}"] = float(there["exchanges"][0]) if len(there) else None
                row[f"bytes to {target:g}{suffix}"] = float(there["bytes"][0]) if len(there) else None
        rows.append(row)
    return pl.DataFrame(rows, infer_schema_length=None)


# The settings


def _run(here: RaceProblem, seed: int, **settings: Any) -> Fit:
    """al2sgd_plus until the target, stopped at the check that found it there."""
    data, loss, penalty = here.objective.data, here.objective.loss, here.objective.penalty
    watch: dict[str, Any] = {"seed": seed, "tol": 0.0, "minimum": here.minimum}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        most, history = 2000, None
        while history is None or history.is_empty():
            fit = minimise(data, loss, penalty, solver="al2sgd_plus", max_iter=most, every=25, **watch, **settings)
            history = fit.history.filter(pl.col("gap") <= TARGET * here.gap) if fit.history is not None else None
            most *= 4
        there = int(history["iteration"][0])
        return minimise(data, loss, penalty, solver="al2sgd_plus", max_iter=there, every=there, **watch, **settings)


def _average(here: RaceProblem, seeds: list[int], **settings: Any) -> dict[str, Any]:
    fits = [_run(here, seed, **settings) for seed in seeds]
    ledgers = [fit.ledger for fit in fits if fit.ledger is not None]
    return {
        "iterations": float(np.mean([fit.convergence.iterations for fit in fits])),
        "within": np.mean([ledger.within for ledger in ledgers], axis=0),
        "between": float(np.mean([ledger.between for ledger in ledgers])),
    }


def effect_of_chance(here: RaceProblem, seeds: list[int], say: Say) -> pl.DataFrame:
    """Iterations and exchanges to the target with the chances of an exchange at multiples of the best."""
    best = al2sgd_plus.recipe(here.known).probabilities
    rows = []
    factors = (0.1, 0.3, 1.0, 3.0, 10.0)
    for at, factor in enumerate(factors):
        p0, p = min(0.95, factor * best.p0), min(0.95, factor * float(best.p[0]))
        recipe = al2sgd_plus.recipe(here.known, p0=p0, p=p, rho=best.rho)
        told = _average(here, seeds, p0=p0, p=p, rho=best.rho)
        rows.append(
            {
                "multiple of the best": factor,
                "p0": p0,
                "p": p,
                "calL": recipe.smoothness,
                "iterations": told["iterations"],
                "iterations, promised": _katyusha_iterations(here, recipe),
                "exchanges": float(np.max(told["within"])),
            }
        )
        say("chance of an exchange", at + 1, len(factors))
    return pl.DataFrame(rows)


def effect_of_tau(here: RaceProblem, seeds: list[int], say: Say) -> pl.DataFrame:
    """Iterations and exchanges to the target with ``tau`` at 0, 1 and the best."""
    best = al2sgd_plus.recipe(here.known).probabilities
    rows = []
    for at, (name, tau) in enumerate((("0", 0.0), ("1", 1.0), ("tau*", float(best.tau[0])))):
        chances = {"p0": best.p0, "p": float(best.p[0]), "tau": tau, "rho": best.rho}
        recipe = al2sgd_plus.recipe(here.known, **chances)
        told = _average(here, seeds, **chances)
        psi = expected_smoothness(here.known, recipe.probabilities, 0.0)
        rows.append(
            {
                "tau": f"{name} = {tau:.2f}" if name == "tau*" else name,
                "calL of the penalty": psi,
                "calL": recipe.smoothness,
                "iterations": told["iterations"],
                "iterations, promised": _katyusha_iterations(here, recipe),
                "exchanges": float(np.max(told["within"])),
            }
        )
        say("tau", at + 1, 3)
    return pl.DataFrame(rows)


def unequal_schedules(here: RaceProblem, seeds: list[int], say: Say) -> pl.DataFrame:
    """Half of the clusters exchange less often among themselves: what they save, and what it costs all."""
    best = al2sgd_plus.recipe(here.known).probabilities
    k = len(best.p)
    slow = np.arange(k) >= k // 2
    rows = []
    factors = (1.0, 0.5, 0.25, 0.1)
    for at, factor in enumerate(factors):
        p = np.where(slow, factor * best.p, best.p)
        settings = {"p0": best.p0, "p": p, "rho": best.rho}
        recipe = al2sgd_plus.recipe(here.known, **settings)
        told = _average(here, seeds, **settings)
        alone = told["within"] - told["between"]
        rows.append(
            {
                "slow clusters' share of p": factor,
                "calL": recipe.smoothness,
                "iterations": told["iterations"],
                "exchanges within a fast cluster": float(alone[~slow].mean()),
                "exchanges within a slow cluster": float(alone[slow].mean()),
                "exchanges between clusters": told["between"],
            }
        )
        say("schedules", at + 1, len(factors))
    return pl.DataFrame(rows)


def _katyusha_iterations(here: RaceProblem, recipe: Recipe) -> float:
    """The theorem's number of iterations to the target, for the gap of the objective."""
    katyusha = al2sgd_plus.Katyusha.of(here.known, recipe.smoothness, recipe.probabilities.rho)
    size = katyusha.potential(float((here.theta**2).sum()), here.gap)
    start = katyusha.a1 / (2 * katyusha.b1 * katyusha.b2) * size / here.gap
    return float(np.ceil(np.log(start / TARGET) / -np.log(katyusha.contraction)))


# In words


def _about_race(reached: pl.DataFrame) -> list[str]:
    rows, column = {row["solver"]: row for row in reached.to_dicts()}, f"exchanges to {TARGET:g}"
    counts = [f"{name} {row[column]:,.0f}" for name, row in rows.items() if row[column] is not None]
    missed = [name for name, row in rows.items() if row[column] is None]
    said = [f"Exchanges of a client to a gap of {TARGET:g}: {', '.join(counts)}."]
    fast, promised = rows["al2sgd_plus"][column], rows["al2sgd_plus"][f"{column}, promised"]
    if fast is not None and promised is not None:
        kept = "which holds" if fast <= promised else "which this run exceeds"
        said.append(f"The bound for al2sgd_plus is {promised:,.0f} on average over the coins, {kept}.")
    if missed:
        said.append(f"Not reached in the run by {', '.join(missed)}.")
    return said


def _about_chance(chance: pl.DataFrame) -> str:
    fewest, quickest = chance.sort("exchanges").row(0, named=True), chance.sort("iterations").row(0, named=True)
    return (
        f"Fewest exchanges ({fewest['exchanges']:.0f}) at {fewest['multiple of the best']:g} x the chances of cor. "
        f"opt_conv_rate, fewest iterations at {quickest['multiple of the best']:g} x ({quickest['iterations']:.0f})."
    )


def _about_tau(tau: pl.DataFrame) -> str:
    said = [f"{row['tau']}: {row['calL of the penalty']:.3g} and {row['iterations']:,.0f} iterations" for row in tau.to_dicts()]
    return f"Expected smoothness of the penalty and iterations by tau: {'; '.join(said)}."


def _about_schedules(schedules: pl.DataFrame) -> str:
    equal, least = schedules.row(0, named=True), schedules.row(-1, named=True)
    share, inside = least["slow clusters' share of p"], "exchanges within a slow cluster"
    return (
        f"Clusters on slow links can exchange among themselves {1 / share:.0f} x less often: {least[inside]:.1f} times instead "
        f"of {equal[inside]:.1f}, for {least['iterations']:,.0f} iterations in all instead of {equal['iterations']:,.0f}."
    )
