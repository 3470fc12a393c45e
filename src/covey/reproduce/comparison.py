"""All solvers and their rivals on four problems: exchanges, bytes and seconds to two gaps.

    simulation   the paper's simulation (arXiv:2204.13619): 20 clusters of 20 clients, 25 rows each, 20 coefficients
    radon        public measurements of homes, counties in states; gamma = lam = 1
    donors       a logistic model of simulated donors, 150 ZIP codes in income brackets; penalties as in the study of donors
    wide         5 clusters of 8 clients with 100 rows each and 200 coefficients

The penalties of the simulated linear problems are those of the true variances.

For each seed a fifth of the rows is held out, problems that are simulated are drawn again, and so are the random choices of the
algorithms. Seconds are those of a clock (:mod:`covey.solvers.clock`): every fifth cluster computes and sends ten times slower.
Neither checks nor messages that measure constants are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from covey._typing import Floats
from covey.datasets import load_radon, simulate
from covey.losses import Bernoulli, Gaussian, Loss
from covey.nodes.network import InMemory
from covey.objective.objective import Objective, Penalty
from covey.objective.theory import Constants
from covey.problem.problem import Spec, resolve
from covey.problem.rows import read_rows
from covey.reproduce import rivals
from covey.reproduce.mailings import simulated
from covey.reproduce.simulation import draw
from covey.reproduce.study import Say, generator, integer_seed, no_convergence_warnings, tracked
from covey.solvers import minimise, solve
from covey.solvers.clock import BANDWIDTH, LATENCY, ROWS_PER_SECOND, Speeds, durations, most_rows, seconds
from covey.solvers.costs import whole_exchange
from covey.solvers.first_order import al2sgd_plus, l2gd, one_coin, proxskip
from covey.solvers.first_order.curvature import constants
from covey.solvers.first_order.l2gd import equal_within
from covey.solvers.first_order.schedule import Schedule
from covey.solvers.ledger import Links, links, quadratic_links
from covey.solvers.result import Fit
from covey.tables.rows import GroupedData

GAPS = (1e-3, 1e-6)  # of the objective to its minimum, relative to the gap at zero
SEEDS = 5
HELD_OUT = 0.2
SLOW = 10.0
DIRECT = ("sweep", "newton")
VECTORS = ("apgd", "proxskip", "al2sgd_plus", "l2gd", "l2gd switching", "one_coin", "one_coin switching")
DEVICE_STEPS = 20  # local steps of PerMFL and FedAvg before an exchange; the default of PerMFL's authors
LONGEST_RANDOMISED = 10_000
LONGEST = {"al2sgd_plus": 100_000, "apgd": 1000, "permfl K=1": 500, "permfl K=10": 500, "fedavg, fine-tuned": 50}
RIVALS = ("nesterov", "permfl K=1", "permfl K=10", "fedavg, fine-tuned")


@dataclass(frozen=True)
class Contest:
    """A problem with what is known of it: minimiser ``theta (n, d)``, minimum, gap at zero, constants and held-out rows."""

    objective: Objective
    held: GroupedData
    theta: Floats
    minimum: float
    gap: float
    constants: Constants
    speeds: Speeds

    @classmethod
    def of(cls, data: GroupedData, loss: Loss, gamma: float, lam: float, rng: np.random.Generator) -> Contest:
        train, held = data.split(HELD_OUT, rng)
        objective = Objective(train, loss, Penalty.of(train.hierarchy, gamma=gamma, lam=lam))
        best = minimise(train, loss, objective.penalty, tol=1e-12)
        network = InMemory.of(train, loss, objective.penalty.gamma)
        known = constants(network, objective.penalty, clusters=("client", "row"), relative=True)
        gap = objective.value(np.zeros_like(best.theta)) - best.convergence.objective
        slow = np.where(np.arange(train.n_clusters) % 5 == 0, SLOW, 1.0)
        speeds = Speeds(ROWS_PER_SECOND / slow, LATENCY * slow, BANDWIDTH / slow)
        return cls(objective, held, best.theta, best.convergence.objective, gap, known, speeds)

    def minimise(self, solver: str) -> Fit:
        return minimise(self.objective.data, self.objective.loss, self.objective.penalty, solver=solver)

    def schedule(self, solver: str, seed: int) -> Schedule:
        """The random choices of a run of a randomised solver."""
        recipes = {"l2gd": l2gd, "one_coin": one_coin, "al2sgd_plus": al2sgd_plus, "proxskip": proxskip}
        merge = solver in ("l2gd", "one_coin") and equal_within(self.objective.data.hierarchy, self.objective.penalty)[0]
        return Schedule(recipes[solver].recipe(self.constants).probabilities, seed, merge)

    def gap_of(self, theta: Floats) -> float:
        return (self.objective.value(theta) - self.minimum) / self.gap

    def held_out(self, theta: Floats) -> float:
        """Mean loss of the held-out rows."""
        value = replace(self.objective.loss, reduction="sum").value(self.held, theta)
        return float(value.sum()) / self.held.n_rows


class Spent(NamedTuple):
    """Exchanges of the client with the most of them, bytes of all links, and seconds."""

    exchanges: float
    bytes: float
    seconds: float


class Trace(NamedTuple):
    """A run: its gap after some counts of iterations, what a count costs, and the mean loss of held-out rows at the end."""

    seen: list[tuple[int, float]]
    cost: Callable[[int], Spent]
    held_out: float


class ReachedError(Exception):
    """The last gap was reached, so that a run can end."""


# The problems


def contest(problem: str, seed: int, run: int, quick: bool) -> Contest:
    """One of the four problems, drawn and split anew for each run; ``quick`` takes smaller ones."""
    rng = generator(seed, 20, list(PROBLEMS).index(problem), run)
    return PROBLEMS[problem](seed, run, rng, quick)


def _simulation(seed: int, run: int, rng: np.random.Generator, quick: bool) -> Contest:
    shape: dict[str, Any] = {"clusters": 3, "clients": 4, "rows": 25, "d": 3}
    drawn = simulate(**shape, seed=rng) if quick else draw(25, seed, run)
    return Contest.of(drawn.data, Gaussian(), 1.0, 1.0, rng)


def _radon(seed: int, run: int, rng: np.random.Generator, quick: bool) -> Contest:
    spec = Spec(formula="log_radon ~ floor", client="county", cluster="state", gamma=1.0)
    data, _ = read_rows(load_radon(), resolve(spec))
    return Contest.of(data, Gaussian(), 1.0, 1.0, rng)


def _donors(seed: int, run: int, rng: np.random.Generator, quick: bool) -> Contest:
    zips, appeals = (30, 3000) if quick else (150, 30_000)
    data = simulated(zips=zips, appeals=appeals, seed=integer_seed(rng)).data
    return Contest.of(data, Bernoulli(), 100.0, 100.0, rng)


def _wide(seed: int, run: int, rng: np.random.Generator, quick: bool) -> Contest:
    clusters, clients, d = (2, 3, 20) if quick else (5, 8, 200)
    drawn = simulate(clusters=clusters, clients=clients, rows=100, d=d, client_sd=0.1, cluster_sd=0.3, seed=rng)
    return Contest.of(drawn.data, Gaussian(), 100.0, 10.0, rng)


PROBLEMS: dict[str, Callable[[int, int, np.random.Generator, bool], Contest]] = {
    "simulation": _simulation,
    "radon": _radon,
    "donors": _donors,
    "wide": _wide,
}


# Runs


def trace(here: Contest, name: str, seed: int, longest: int) -> Trace:
    """A run of a solver or rival, until the last gap is reached or for ``longest`` iterations."""
    if name in DIRECT:
        return _direct(here, name)
    return _rival(here, name, longest) if name in RIVALS else _first_order(here, name, seed, longest)


def _direct(here: Contest, name: str) -> Trace:
    """Matrices in every exchange; a row adds its products to a matrix, which is solved."""
    data, fit = here.objective.data, here.minimise(name)
    network, work = quadratic_links(data.hierarchy.sizes, data.n_terms), data.n_terms * (rows_of(data) + data.n_terms)
    history = fit.history.select("exchanges", "objective").rows() if fit.history is not None else []
    seen = [(count, (value - here.minimum) / here.gap) for count, value in history]
    return Trace(seen, lambda t: _together(here, network, t, work), here.held_out(fit.theta))


def _first_order(here: Contest, name: str, seed: int, longest: int) -> Trace:
    solver, *variant = name.split()
    data, penalty = here.objective.data, here.objective.penalty
    options: dict[str, Any] = {"steps": "switching"} if variant else {}
    if solver != "apgd":
        schedule = here.schedule(solver, seed)
        p0, p = schedule.probabilities.p0, schedule.probabilities.p
        exchanges = p0 + (1 - p0) * float(p.max()) + schedule.probabilities.rho
        options |= {"every": max(1, round(0.5 / exchanges), longest // 2000), "mu": here.constants.mu}
    seen: list[tuple[int, float]] = []

    def watch(t: int, value: float, norm: float) -> None:
        seen.append((t, (value - here.minimum) / here.gap))
        if seen[-1][1] <= GAPS[-1]:
            raise ReachedError

    network = InMemory.of(data, here.objective.loss, penalty.gamma)
    with suppress(ReachedError), no_convergence_warnings():
        solve(network, penalty, solver=solver, tol=0.0, seed=seed, max_iter=longest, progress=watch, options=options)
    end = here.held_out(network.node.coefficients())
    if solver == "apgd":
        wires = Links(data.hierarchy.sizes, data.n_terms + 3, data.n_terms)
        # The first exchange forms the clients' matrices; each one multiplies by them, or repeats a step of Newton's method.
        first = data.n_terms * (rows_of(data) + data.n_terms)
        again = np.full_like(first, data.n_terms) if here.objective.loss.quadratic else first
        return Trace(seen, lambda t: _together(here, wires, t, again, first), end)
    wires = links(data.hierarchy.sizes, data.n_terms)
    lasts = durations(here.speeds, wires, rows_of(data), 2 if solver == "al2sgd_plus" else None)

    def cost(t: int) -> Spent:
        spent = wires.of(schedule.rounds(0, t), t)
        return Spent(spent.exchanges, spent.bytes, seconds(schedule, 0, t, lasts, "asynchronous"))

    return Trace([(t, gap) for t, gap in seen if t > 0], cost, end)


def _rival(here: Contest, name: str, longest: int) -> Trace:
    objective, known, data = here.objective, here.constants, here.objective.data
    wires, rows = Links(data.hierarchy.sizes, data.n_terms, data.n_terms), rows_of(data)
    if name == "nesterov":
        L = known.L + known.gamma_max
        seen, theta = _follow(here, rivals.nesterov(objective, L=L, mu=known.mu), longest)
        return Trace(seen, lambda t: _together(here, wires, t, rows), here.held_out(theta))
    if name.startswith("permfl"):
        K = int(name.partition("=")[2])
        lam = known.gamma_max
        gamma = float(objective.penalty.lam.mean()) * data.n_clusters / data.n_clients
        pace = {"alpha": 1 / (known.L + lam), "eta": 1 / (lam + gamma), "beta": 1 / gamma}
        iterates = rivals.permfl(objective, lam=lam, gamma=gamma, **pace, K=K, steps=DEVICE_STEPS)
        seen, theta = _follow(here, iterates, longest // K)
        lasts = durations(here.speeds, wires, rows)
        busy = K * (DEVICE_STEPS * lasts.step + lasts.up + lasts.down)

        def cost(t: int) -> Spent:
            spent = wires.count(np.full(data.n_clusters, K * t), t)
            return Spent(K * t, spent.bytes, t * float((busy + lasts.up).max() + lasts.down.max()))

        return Trace(seen, cost, here.held_out(theta))
    eta, best, seen = 1 / known.L, (np.inf, here.theta), []
    for count, x in enumerate(islice(rivals.fedavg(objective, eta=eta, steps=DEVICE_STEPS), longest), 1):
        if count in (1, 2, 5, 10, 20, 50):
            # As many steps of fine-tuning as are best for covey's objective, up to 256.
            theta, tried = rivals.fine_tuned(objective, x, eta=eta, steps=0), []
            for more in (0, 1, 1, 2, 4, 8, 16, 32, 64, 128):
                theta = rivals.fine_tuned(objective, theta, eta=eta, steps=more)
                tried.append((here.gap_of(theta), theta))
            best = min(best, *tried, key=lambda pair: pair[0])
            seen.append((count, best[0]))
    return Trace(seen, lambda t: _together(here, wires, t, DEVICE_STEPS * rows), here.held_out(best[1]))


def _follow(here: Contest, iterates: Iterator[Floats], longest: int) -> tuple[list[tuple[int, float]], Floats]:
    """The gap after each exchange until the last gap is reached, and the last iterate."""
    seen: list[tuple[int, float]] = []
    for t, theta in enumerate(islice(iterates, longest), 1):
        seen.append((t, here.gap_of(theta)))
        if seen[-1][1] <= GAPS[-1]:
            break
    return seen, theta


def _together(here: Contest, network: Links, t: int, rows: Floats, first: Floats | None = None) -> Spent:
    """``t`` exchanges of all clusters, each after reading ``rows (k,)`` rows; before the first one they read ``first``."""
    k = len(network.clients)
    lasts = durations(here.speeds, network, rows)
    begin, again = (whole_exchange(lasts, here.speeds.work(each)) for each in (rows if first is None else first, rows))
    return Spent(t, network.count(np.full(k, t), t).bytes, begin + (t - 1) * again)


def rows_of(data: GroupedData) -> Floats:
    """The most rows of a client in each cluster, ``(k,)``."""
    return most_rows(data.hierarchy, data.rows_per_client)


# The tables


def compare(seed: int, quick: bool, say: Say) -> pl.DataFrame:
    """A row for each problem and solver: means over the seeds, and standard deviations, of what it takes to reach two gaps."""
    runs = range(2 if quick else SEEDS)
    names = (*DIRECT, *VECTORS, *RIVALS)
    results: dict[tuple[str, str], list[Trace]] = {}
    for problem, run in tracked([(problem, run) for problem in PROBLEMS for run in runs], "comparison", say):
        here = contest(problem, seed, run, quick)
        for name in names:
            if name == "sweep" and not here.objective.loss.quadratic:
                continue
            most = LONGEST.get(name, LONGEST_RANDOMISED)
            own = integer_seed(generator(seed, 21, run))
            results.setdefault((problem, name), []).append(trace(here, name, own, most // 10 if quick else most))
    return pl.DataFrame([{"problem": problem, "solver": name, **_row(found)} for (problem, name), found in results.items()])


def _row(traces: list[Trace]) -> dict[str, Any]:
    row: dict[str, Any] = {"runs": len(traces)}
    for gap in GAPS:
        at = [next((t for t, here in found.seen if here <= gap), None) for found in traces]
        spent = [found.cost(t) for found, t in zip(traces, at, strict=True) if t is not None]
        row[f"reached {gap:g}"] = len(spent)
        for unit in Spent._fields:
            values = [getattr(one, unit) for one in spent]
            row[f"{unit} to {gap:g}"] = float(np.mean(values)) if len(spent) == len(traces) else None
            row[f"{unit} to {gap:g}, sd"] = float(np.std(values, ddof=1)) if len(spent) == len(traces) else None
    row["lowest gap"] = float(np.mean([min(gap for _, gap in found.seen) for found in traces]))
    row["held-out loss"] = float(np.mean([found.held_out for found in traces]))
    return row


NOTE = (
    f"Means over {SEEDS} runs; empty if some run does not reach the gap, which is relative to that at zero. 'lowest gap' is "
    f"where runs end, after at most {LONGEST_RANDOMISED:,} iterations ({LONGEST['al2sgd_plus']:,} of al2sgd_plus), "
    f"{LONGEST['permfl K=1']} exchanges of PerMFL and {LONGEST['fedavg, fine-tuned']} of FedAvg. Exchanges are those of the "
    "client with the most of them. Every fifth cluster computes and sends ten times slower (1e5, not 1e6 rows a second; 0.5, "
    "not 0.05 s a message). Clusters wait for each other at exchanges between clusters only. PerMFL and FedAvg take "
    f"{DEVICE_STEPS} local steps before an exchange, as PerMFL's code does; K is the number of exchanges within a team in each "
    "round of PerMFL. The steps of PerMFL are the longest for which each update is an average. Where clusters differ in size "
    "(radon, donors), PerMFL's objective is another one. The sweep fits linear models only."
)


def shown(table: pl.DataFrame) -> pl.DataFrame:
    """The table for the page: numbers as text, with the standard deviation of the exchanges."""
    rows = []
    for row in table.to_dicts():
        cells = {"problem": row["problem"], "solver": row["solver"]}
        for name in (f"{unit} to {gap:g}" for gap in GAPS for unit in Spent._fields):
            spread = row[f"{name}, sd"] if name.startswith("exchanges") else 0
            cells[name] = "" if row[name] is None else _short(row[name]) + (f" (sd {_short(spread)})" if spread else "")
        rows.append({**cells, "lowest gap": f"{row['lowest gap']:.1e}", "held-out loss": f"{row['held-out loss']:.4f}"})
    return pl.DataFrame(rows)


def winners(table: pl.DataFrame) -> pl.DataFrame:
    """Which solver of covey needs the least of each, by problem and gap; of all, and of those that send vectors only."""
    rows = []
    for problem in table["problem"].unique(maintain_order=True).to_list():
        for gap in GAPS:
            here = table.filter(pl.col("problem") == problem, ~pl.col("solver").is_in(RIVALS))
            row = {"problem": problem, "gap": f"{gap:g}"}
            for words, some in (("", here), (", vectors only", here.filter(~pl.col("solver").is_in(DIRECT)))):
                for unit in Spent._fields:
                    column = f"{unit} to {gap:g}"
                    found = some.drop_nulls(column).sort(column, maintain_order=True)
                    row[f"fewest {unit}{words}"] = f"{found['solver'][0]} {_short(found[column][0])}" if len(found) else "none"
            rows.append(row)
    return pl.DataFrame(rows)


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def findings(table: pl.DataFrame) -> tuple[str, ...]:
    """Sentences about the comparison."""
    column = f"exchanges to {GAPS[-1]:g}"
    sentences = []
    for problem in table["problem"].unique(maintain_order=True).to_list():
        here = table.filter(pl.col("problem") == problem)
        by_solver = dict(here.select("solver", column).iter_rows())
        best = here.filter(pl.col("solver").is_in(VECTORS)).drop_nulls(column).sort(column, maintain_order=True)
        rival = by_solver["nesterov"]
        against = "which Nesterov's method does not reach" if rival is None else f"against {rival:.0f} of Nesterov's method"
        first = "no solver that sends vectors only reaches the gap"
        if len(best):
            first = f"{best['solver'][0]} needs the fewest exchanges of vectors ({best[column][0]:.1f}, {against})"
        missed = [name for name in by_solver if by_solver[name] is None]
        sentences.append(f"Gap {GAPS[-1]:g}, {problem}: {first}. Not reached in all runs: {', '.join(missed) or 'none'}.")
    tuned = table.filter(pl.col("solver") == RIVALS[-1])
    floors = ", ".join(f"{row['problem']} {row['lowest gap']:.2g}" for row in tuned.to_dicts())
    sentences.append(f"FedAvg with fine-tuning has another goal. Its lowest gaps to this objective are {floors}.")
    return tuple(sentences)
