"""The loop that the randomised algorithms of arXiv:2204.13619 share: rounds, checks, history and checkpoints.

An algorithm describes itself by a :class:`Setup`: what the theory says about the problem, the messages to the nodes, and how
the coordinator computes the next step towards averages. After a number of iterations the loop makes a check, for which all
nodes compute the full gradient. It stops when the objective is certified to be close enough to its minimum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import numpy as np
import polars as pl

from covey._typing import Bools, Floats
from covey.errors import SolverError, number, warn, whole
from covey.nodes.network import Message, Network
from covey.objective.objective import Penalty
from covey.objective.theory import Constants, Recipe
from covey.records import Record
from covey.solvers.first_order import curvature
from covey.solvers.first_order.protocol import AskMeans, Centres, CheckGap, ClusterSums, Move, NextPull, PerfectFit, Pull
from covey.solvers.first_order.schedule import Round, Rounds, Schedule, Vote
from covey.solvers.first_order.smoothness import Quantity
from covey.solvers.ledger import Course, Ledger, Links, expected, links
from covey.solvers.registry import unknown_option
from covey.solvers.result import HISTORY, Checkpoint, Convergence, Fit, Progress, begin_at, certified_gap, entry

_MOST_ITERATIONS = 1_000_000  # by default


class ControlOptions(TypedDict, total=False):
    """The fields of :class:`Control` as keywords of the solvers."""

    seed: int
    tol: float
    max_iter: int | None
    every: int | None
    start: Fit | Floats | None
    minimum: float | None
    checkpoint: str | Path | None
    progress: Progress | None
    vote: Vote


@dataclass(frozen=True)
class Control:
    """Options that all randomised algorithms have.

    Attributes
    ----------
    seed : determines the random choices and the rows that are sampled
    tol : stop when the gap of the objective to its minimum is certified to be at most ``tol`` times the objective, measured
        above that of a perfect fit
    max_iter : largest number of iterations; by default twice what the theorem needs, at most a million
    every : iterations between checks; by default a quarter of the iterations in which the theorem shrinks the distance by a
        factor of e, and more later in a run
    start : a fit or coefficients (n, d) to begin at; by default zero
    minimum : the minimum of the objective, if you have it; the history then has the true gap
    checkpoint : file to write at each check, in memory and on shards; a run whose checkpoint exists continues from it, to the
        same bits
    progress : called at each check with the iteration, the objective and the gradient norm
    vote : how an exchange between clusters is decided: one draw ("central"), or the majority of one draw for each cluster
        ("majority"), as if there were no central server
    """

    seed: int = 0
    tol: float = 1e-8
    max_iter: int | None = None
    every: int | None = None
    start: Fit | Floats | None = None
    minimum: float | None = None
    checkpoint: str | Path | None = None
    progress: Progress | None = None
    vote: Vote = "central"

    def __post_init__(self) -> None:
        whole("seed", self.seed, below=2**64)
        number("tol", self.tol, least=0.0)
        for name in ("max_iter", "every"):
            if getattr(self, name) is not None:
                whole(name, getattr(self, name), least=1)
        if self.minimum is not None:
            number("minimum", self.minimum)


@dataclass(frozen=True)
class Setup:
    """An algorithm, set up for one problem.

    Attributes
    ----------
    name : name of the solver
    constants, recipe : what the theory needs to know about the problem, and what follows for the algorithm
    identity : numbers that, with the random choices, determine the iterates; a checkpoint is valid for the same numbers only
    begin, move : messages to the nodes: begin a run, and make a move
    next_pull : computes the next step towards averages
    merge : whether consecutive steps towards averages share one exchange
    pace : iterations in which the distance to the minimiser shrinks by e, by the theorem
    needed : iterations to a tolerance, by the theorem
    advice : what to try if a run stops above its tolerance
    rows_per_step : rows that a client reads for a local step; None for all
    """

    name: str
    constants: Constants
    recipe: Recipe
    identity: dict[str, Any]
    begin: Message[None]
    move: Callable[[Move], Message[ClusterSums]]
    next_pull: NextPull
    merge: bool
    pace: float
    needed: Callable[[float], int]
    advice: str
    rows_per_step: int | None = None


def prepare(
    solver: str,
    network: Network,
    penalty: Penalty,
    options: ControlOptions,
    clusters: tuple[Quantity, ...] = (),
    relative: bool = False,
    **given: float | None,
) -> tuple[Control, Constants]:
    """Check the options of a solver, put the clients at the start, and measure the constants that are not ``given``.

    ``clusters`` and ``relative`` say what else is measured (:func:`~.curvature.constants`).
    """
    for name in options:
        if name not in {part.name for part in fields(Control)}:
            raise unknown_option(solver, name)
    control = Control(**options)
    begin_at(network, control.start)
    constants = curvature.constants(network, penalty, clusters=clusters, relative=relative, **given)
    constants.need_curvature()
    return control, constants


def spacing(pace: float) -> int:
    """Iterations between the first checks: a quarter of those in which the distance shrinks by e."""
    return max(1, int(min(pace / 4, 1e6)))


@dataclass(frozen=True)
class RunProgress(Record):
    """What the coordinator has to remember at a check; ``anchor (k, d)`` are the averages of the last anchor."""

    iteration: int
    ledger: Ledger
    history: tuple[dict[str, Any], ...]
    anchor: Floats


class Check(NamedTuple):
    """The result of a check: averages ``(k, d)`` of the clients, the best upper levels for them, value and gradient norm."""

    means: Floats
    w: Floats
    wbar: Floats
    value: float
    norm: float


def run(network: Network, penalty: Penalty, setup: Setup, control: Control) -> Fit:
    """Run an algorithm over a network, from the coefficients that its nodes have."""
    identity = {"solver": setup.name, "seed": int(control.seed), "vote": control.vote, "every": control.every}
    saved = Checkpoint.at(control.checkpoint, {**identity, **setup.identity, "sums": "exact"}, network, penalty)
    schedule = Schedule(setup.recipe.probabilities, int(control.seed), setup.merge, control.vote)
    top = Centres.of(penalty)
    wires = links(network.tree.sizes, len(network.terms), control.vote, tied=bool(top.alpha.any()))
    # Numbers that are not finite are reported by client and iteration, not by numpy.
    with np.errstate(over="ignore", invalid="ignore"):
        return Loop(setup, control, network, penalty, schedule, top, wires, saved).run()


@dataclass(frozen=True)
class Loop:
    """One run."""

    setup: Setup
    control: Control
    network: Network
    penalty: Penalty
    schedule: Schedule
    top: Centres
    links: Links
    saved: Checkpoint

    def run(self) -> Fit:
        """Check and advance until the gap is certified, or until ``max_iter``."""
        setup, control, mu, regular = self.setup, self.control, self.setup.constants.mu, True
        max_iter = control.max_iter
        if max_iter is None:
            max_iter = min(max(2 * setup.needed(max(control.tol, 1e-16)), 1000), _MOST_ITERATIONS)
        max_iter = int(max_iter)
        perfect = float(self.network.ask(PerfectFit()))
        self.network.ask(setup.begin)
        last = self.saved.resume(RunProgress, lambda progress: progress.iteration <= max_iter)
        rows = [] if last is None else list(last.history)
        t, ledger, anchor = (0, self.links.nothing, None) if last is None else (last.iteration, last.ledger, last.anchor)
        while True:
            here = self._check(t)
            done, gap, mu = self._judge(here, mu, perfect)
            anchor = here.means if anchor is None else anchor
            if not rows or rows[-1]["iteration"] < t:
                ledger = ledger + self.links.check
                rows.append(entry(t, here.value, here.norm, gap, ledger, control.minimum))
                if regular:
                    self.saved.write(RunProgress(t, ledger, tuple(rows), anchor))
            if control.progress is not None:
                control.progress(t, here.value, here.norm)
            if done or t >= max_iter:
                return self._fit(here, done, gap, ledger, rows)
            # The next check must not depend on max_iter, because the last bits of a run depend on where it is cut.
            stop = t + (max(spacing(setup.pace), t // 20) if control.every is None else int(control.every))
            regular, stop = stop <= max_iter, min(stop, max_iter)
            cost, anchor = self._advance(t, stop, anchor)
            ledger, t = ledger + cost, stop

    def _check(self, t: int) -> Check:
        """Ask all nodes for sums of coefficients by cluster; then, given the centres, for the loss and its squared gradient."""
        means = self.network.ask(AskMeans(self.top.total)).total.floats()
        w, wbar = self.top.centres(means)
        seen = self.network.ask(CheckGap(w))
        value, norm = float(seen.value) + self.top.tie(means), math.sqrt(float(seen.gradient_squared))
        if not np.isfinite(value + norm):
            raise self._diverged(t)
        return Check(means, w, wbar, value, norm)

    def _judge(self, here: Check, mu: float, perfect: float) -> tuple[bool, float | None, float]:
        """Whether the gap is certified to be below the tolerance, the certified gap, and the curvature to use from now on."""
        tol, proved = self.control.tol, self.setup.constants.proved
        gap = certified_gap(here.norm, mu)
        # If a fit is perfect, no share of its value is small enough. Rounding of the gradient hides any gap below this one.
        least = 1e-22 * max(1.0, abs(here.value)) if tol > 0 else 0.0
        target = max(tol * (here.value - perfect), least)
        done = gap is not None and gap <= target
        if done and not proved:
            # This mu is not a bound. Measure the curvature here, and go on if it is too small for the tolerance.
            gap, measured = curvature.certificate(self.network, self.penalty, here.norm)
            done, mu = gap <= target, min(mu, measured) or mu
        certain = gap if gap is not None and (done or (proved and np.isfinite(gap))) else None
        return done, certain, mu

    def _advance(self, start: int, stop: int, anchor: Floats) -> tuple[Ledger, Floats]:
        """Run iterations ``start`` to ``stop - 1``; returns their cost and the averages of the anchor after them."""
        cost = self.links.nothing
        for first, last in self.schedule.pieces(start, stop):
            rounds = self.schedule.rounds(first, last)
            anchor, nonfinite = run_rounds(self.network, self.setup, self.top, rounds, anchor, first == 0)
            if nonfinite is not None:
                raise self._diverged(nonfinite)
            cost = cost + self.links.of(rounds, last - first) + expected(self.schedule, last - first)
        return cost, anchor

    def _fit(self, here: Check, done: bool, gap: float | None, ledger: Ledger, rows: list[dict[str, Any]]) -> Fit:
        setup, t = self.setup, int(rows[-1]["iteration"])
        note = f" ({setup.constants.note})" if setup.constants.note else ""
        message = f"gradient norm {here.norm:.1e} after {t:,} iterations and {ledger.exchanges:,} exchanges{note}"
        if not done:
            bound = "" if gap is None else f" (the gap to the minimum is at most {gap:.1e})"
            worse = rows[0]["objective"] < here.value
            advice = "the objective has grown: give a smaller step eta" if worse else setup.advice
            message = f"stopped before it reached the tolerance{bound}: {message}; {advice}"
            warn(message)
        end = Convergence(setup.name, done, t, ledger.exchanges, here.value, here.norm, gap, message)
        fit = Fit.of(self.network, here.w, here.wbar, end, pl.DataFrame(rows, schema=HISTORY), ledger)
        checks = tuple(int(row["iteration"]) for row in rows)
        return replace(fit, course=Course(self.schedule, self.links, checks, setup.rows_per_step))

    def _diverged(self, t: int) -> SolverError:
        """The error for numbers that are not finite by iteration ``t``. It names a client only if it is in this process."""
        client, node, note = "some client", self.network.clients(), self.setup.constants.note
        if node is not None:
            size = np.abs(node.coefficients()).max(axis=1)
            worst = int(np.where(np.isfinite(size), size, np.inf).argmax())
            client = f"client {node.data.hierarchy.identity(worst)!r}"
        if t == 0:
            return SolverError(f"The objective is not finite at the start, above all for {client}; give a smaller start.")
        bound = f"{self.setup.recipe.largest_step:.3g}" + (f"; {note}" if note else "")
        saved = self.saved.read()
        kept = saved.progress if saved is not None else None
        where = f" Iteration {kept.iteration:,} is kept in {self.saved.path}." if isinstance(kept, RunProgress) else ""
        return SolverError(
            f"The iterate of {client} is no longer finite by iteration {t:,}; give a smaller step eta (theory: at most "
            f"{bound}) or a start nearer to the minimum.{where}"
        )


@dataclass
class Lane:
    """The clusters of a lane, the rounds that are before them, and what their next message says of the last exchange."""

    clusters: Bools | None
    rounds: Iterator[tuple[int, Round]]
    pull: Pull
    exchanged: Bools
    centres: Floats | None

    def next_move(self) -> tuple[int, Round, Move] | None:
        """The next round in which these clusters have something to do, with its row and the move; None if none is left."""
        for row, now in self.rounds:
            steps, part = now.steps, now.takes_part
            if self.clusters is not None:
                last, steps, part = not part.any(), steps * self.clusters, part & self.clusters
                if not (last or part.any() or steps.any()):
                    continue
            move = Move(self.pull, self.exchanged, now.start, steps, part, now.refresh, self.centres, self.clusters)
            if self.clusters is None or move.cells.any():
                return row, now, move
        return None

    def go_on(self, pull: Pull, exchanged: Bools, centres: Floats | None = None) -> None:
        """Remember the result of an exchange for the next message."""
        if self.clusters is not None:
            rows = self.clusters[:, None]
            pull, exchanged = Pull(pull.strength * self.clusters, pull.force * rows), exchanged & self.clusters
            centres = None if centres is None else centres * rows
        self.pull, self.exchanged, self.centres = pull, exchanged, centres


def run_rounds(
    network: Network, setup: Setup, top: Centres, rounds: Rounds, anchor: Floats, announce: bool = False
) -> tuple[Floats, int | None]:
    """Run some rounds; returns the averages of the anchor, and the iteration by which a number is not finite, if any.

    The clusters of a lane get their next message as soon as their sums are in. Lanes wait for each other at an exchange
    between clusters, and at the end. With ``announce`` the nodes get the centres of the first anchor.
    """
    k, d = len(top.alpha), len(network.terms)
    found, nobody = network.lanes(), np.zeros(k, dtype=bool)
    sets: list[Bools | None] = [None] if found is None else [*found]
    lanes = [Lane(clusters, enumerate(rounds), Pull.none(k, d), nobody, None) for clusters in sets]
    under_way: dict[int, tuple[Message[ClusterSums], Lane, int, Round]] = {}
    met: dict[int, tuple[Floats, list[Lane]]] = {}  # by round: averages at an exchange between clusters, and who is there
    nonfinite: list[int] = []

    def send(lane: Lane) -> None:
        following = lane.next_move()
        if following is not None:
            row, now, move = following
            message = setup.move(move)
            under_way[id(message)] = message, lane, row, now
            network.send(message)

    for lane in lanes:
        lane.go_on(lane.pull, nobody, top.centres(anchor)[0] if announce else None)
        send(lane)
    while under_way:
        for arrived in network.collect():
            _, lane, row, now = under_way.pop(id(arrived.message))
            means = arrived.reply.total.floats()
            if not np.isfinite(means).all():
                ends = now.start + now.steps
                nonfinite.append(int((ends if lane.clusters is None else ends[lane.clusters]).max()))
                continue
            together = [lane]
            if found is not None and (now.between or now.refresh):
                sums, together = met.setdefault(row, (np.zeros((k, d)), []))
                sums[lane.clusters], means = means[lane.clusters], sums
                together.append(lane)
                if len(together) < sum(bool((now.takes_part & clusters).any()) for clusters in found):
                    continue
                del met[row]
            if now.refresh:
                anchor, pull, exchanged, centres = means, Pull.none(k, d), nobody, top.centres(means)[0]
            else:
                pull, exchanged, centres = setup.next_pull(means, now, anchor), now.takes_part, None
            for each in together:
                each.go_on(pull, exchanged, centres)
                send(each)
    return anchor, min(nonfinite) if nonfinite else None
