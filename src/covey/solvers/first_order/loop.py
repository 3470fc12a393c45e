"""The loop that the randomised algorithms share: rounds from the schedule, checks, history, checkpoints.

An algorithm is a :class:`Setup`: what theory says for this problem, what nodes are asked to do, and a guide for the
coordinator. Every so many iterations the loop stops for a check, a full gradient by all nodes, and ends when the objective is
certified to be close enough to its minimum.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import numpy as np
import polars as pl

from covey._typing import Floats
from covey.errors import SolverError, number, warn, whole
from covey.nodes.network import Message, Network
from covey.objective.objective import Penalty
from covey.objective.theory import Constants, Recipe
from covey.records import Record
from covey.solvers.first_order.curvature import certificate
from covey.solvers.first_order.protocol import AskMeans, Centres, CheckGap, ClusterSums, Guide, Move, PerfectFit, Pull
from covey.solvers.first_order.schedule import Rounds, Schedule, Vote
from covey.solvers.ledger import Ledger, Links, expected, links
from covey.solvers.registry import unknown_option
from covey.solvers.result import HISTORY, Checkpoint, Convergence, Fit, Progress, begin_at, certified_gap, coefficients, entry

_STRETCH = 1 << 20  # random choices grouped at a time, over all clusters
_MOST_ITERATIONS = 1_000_000  # unless max_iter says more


class Watch(TypedDict, total=False):
    """The keywords of :class:`Control`, as the solvers take them."""

    seed: int
    tol: float
    max_iter: int | None
    every: int | None
    start: Any
    minimum: float | None
    checkpoint: str | Path | None
    progress: Progress | None
    vote: Vote


@dataclass(frozen=True)
class Control:
    """What all randomised algorithms take besides their own settings.

    Attributes
    ----------
    seed : of the random choices and of the rows that are sampled
    tol : stop when the objective is certified to be within this share of its minimum, both above that of a perfect fit
    max_iter : most iterations; by default twice what the theorem needs, at most a million
    every : iterations between checks; by default a quarter of the time in which the distance shrinks by e, then ever more
    start : a fit or coefficients (n, d) to begin at; zero by default
    minimum : the lowest value of the objective, if it is known; the history then has the true gap
    checkpoint : file to write at each check; a run that finds its own goes on from it, to the same bits
    progress : called at each check with the iteration, the objective and the gradient norm
    vote : who decides on an exchange between clusters: "central" or, without a server, "majority"
    """

    seed: int = 0
    tol: float = 1e-8
    max_iter: int | None = None
    every: int | None = None
    start: Any = None
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

    @classmethod
    def begin(cls, solver: str, watch: Watch, network: Network) -> Control:
        """From the keywords of a solver; an unknown one is refused. Clients are put where the run is to start."""
        known = [each.name for each in fields(cls)]
        for name in watch:
            if name not in known:
                raise unknown_option(solver, name)
        control = cls(**watch)
        begin_at(network, control.start)
        return control


@dataclass(frozen=True)
class Setup:
    """An algorithm as the loop sees it, set up for one problem.

    Attributes
    ----------
    name, known, recipe : what theory says of it
    identity : numbers that, with the random choices, determine its iterates: a checkpoint is good for these only
    begin, move : what nodes are asked to do: begin where they are, and make a move
    guide : how the coordinator turns averages into the next pull
    merge : whether consecutive steps towards averages need one exchange only
    pace : iterations in which the distance shrinks by e, by its theorem
    needed : iterations to a tolerance, by its theorem
    advice : for a run that did not get there
    """

    name: str
    known: Constants
    recipe: Recipe
    identity: dict[str, Any]
    begin: Message[None]
    move: Callable[[Move], Message[ClusterSums]]
    guide: Guide
    merge: bool
    pace: float
    needed: Callable[[float], int]
    advice: str


def spacing(pace: float) -> int:
    """Iterations between the first checks: a quarter of those in which the distance shrinks by e."""
    return max(1, int(min(pace / 4, 1e6)))


@dataclass(frozen=True)
class RunProgress(Record):
    """Where a run is: what the coordinator remembers between checks; ``anchor (k, d)`` are the averages of the last one."""

    iteration: int
    ledger: Ledger
    history: tuple[dict[str, Any], ...]
    anchor: Floats


class Check(NamedTuple):
    """What a check finds: the clients' averages ``(k, d)``, the best upper levels for them, value and gradient norm."""

    means: Floats
    w: Floats
    wbar: Floats
    value: float
    norm: float


class Verdict(NamedTuple):
    """Whether a run has arrived, the gap that is certain if there is one, and the curvature to judge by from here on."""

    done: bool
    gap: float | None
    mu: float


def run(network: Network, penalty: Penalty, setup: Setup, control: Control) -> Fit:
    """Run an algorithm over any network, from where its nodes are."""
    identity = {"solver": setup.name, "seed": int(control.seed), "vote": control.vote, "every": control.every}
    saved = Checkpoint.at(control.checkpoint, {**identity, **setup.identity, "sums": "exact"}, network, penalty)
    top = Centres.of(penalty)
    wires = links(network.tree.sizes, len(network.terms), control.vote, tied=bool(top.alpha.any()))
    # What is not finite is reported by client and iteration, not by numpy.
    with np.errstate(over="ignore", invalid="ignore"):
        return Loop(setup, control, network, penalty, top, wires, saved).run()


@dataclass(frozen=True)
class Loop:
    """One run."""

    setup: Setup
    control: Control
    network: Network
    penalty: Penalty
    top: Centres
    links: Links
    saved: Checkpoint

    @property
    def schedule(self) -> Schedule:
        return Schedule(self.setup.recipe.probabilities, int(self.control.seed), self.setup.merge, self.control.vote)

    @property
    def max_iter(self) -> int:
        if self.control.max_iter is not None:
            return int(self.control.max_iter)
        return int(min(max(2 * self.setup.needed(max(self.control.tol, 1e-16)), 1000), _MOST_ITERATIONS))

    def next_check(self, t: int) -> int:
        """A function of ``t`` and the algorithm alone, whatever ``max_iter`` is: the cuts of a run are part of its bits."""
        if self.control.every is not None:
            return t + int(self.control.every)
        return t + max(spacing(self.setup.pace), t // 20)

    def run(self) -> Fit:
        """Check and advance until the gap is certified, or ``max_iter``."""
        max_iter, mu, regular = self.max_iter, self.setup.known.mu, True
        perfect = float(self.network.ask(PerfectFit()))
        self.network.ask(self.setup.begin)
        t, ledger, rows, anchor = self._resumed(max_iter)
        while True:
            here = self._check(t)
            verdict = self._judge(here, mu, perfect)
            mu, anchor = verdict.mu, here.means if anchor is None else anchor
            if not rows or rows[-1]["iteration"] < t:
                ledger = ledger + self.links.check
                rows.append(entry(t, here.value, here.norm, verdict.gap, ledger, self.control.minimum))
                if regular:
                    self.saved.write(RunProgress(t, ledger, tuple(rows), anchor))
            if self.control.progress is not None:
                self.control.progress(t, here.value, here.norm)
            if verdict.done or t >= max_iter:
                return self._fit(here, verdict, ledger, rows)
            stop = self.next_check(t)
            regular, stop = stop <= max_iter, min(stop, max_iter)
            cost, anchor = self._advance(t, stop, anchor)
            ledger, t = ledger + cost, stop

    def _resumed(self, most: int) -> tuple[int, Ledger, list[dict[str, Any]], Floats | None]:
        """Where to go on: iteration, ledger, history and anchor."""
        found = self.saved.resume(RunProgress, lambda stage: stage.iteration <= most)
        if found is None:
            return 0, self.links.nothing, [], None
        return found.iteration, found.ledger, list(found.history), found.anchor

    def _check(self, t: int) -> Check:
        """Value and gradient by all nodes, with the upper levels at their best."""
        means = self.top.means(self.network.ask(AskMeans(self.top.total)))
        w, wbar = self.top.centres(means)
        seen = self.network.ask(CheckGap(w))
        value, norm = float(seen.value) + self.top.tie(means), math.sqrt(float(seen.gradient_squared))
        if not np.isfinite(value + norm):
            raise self._diverged(t)
        return Check(means, w, wbar, value, norm)

    def _judge(self, here: Check, mu: float, perfect: float) -> Verdict:
        """Whether the gap is certified to be below the tolerance."""
        tol, proved = self.control.tol, self.setup.known.proved
        gap = certified_gap(here.norm, mu)
        # Where a fit is perfect no share of it is small enough; rounding of the gradient hides a smaller gap than this.
        least = 1e-22 * max(1.0, abs(here.value)) if tol > 0 else 0.0
        target = max(tol * (here.value - perfect), least)
        done = gap is not None and gap <= target
        if done and not proved:
            # What was taken for mu is no bound: judge by the curvature here, and go on if that is not enough.
            gap, curved = certificate(self.network, self.penalty, here.norm)
            done, mu = gap <= target, min(mu, curved) or mu
        certain = gap if gap is not None and (done or (proved and np.isfinite(gap))) else None
        return Verdict(done, certain, mu)

    def _advance(self, start: int, stop: int, anchor: Floats) -> tuple[Ledger, Floats]:
        """Iterations ``start`` to ``stop - 1``: what they cost, and the anchor after them."""
        cost, stretch = self.links.nothing, max(16, _STRETCH // (1 + len(self.top.alpha)))
        for first in range(start, stop, stretch):
            last = min(stop, first + stretch)
            rounds = self.schedule.rounds(first, last)
            anchor, lost = play(self.network, self.setup.move, self.setup.guide, self.top, rounds, anchor, first == 0)
            if lost is not None:
                raise self._diverged(lost)
            cost = cost + self.links.of(rounds, last - first) + expected(self.schedule, last - first)
        return cost, anchor

    def _fit(self, here: Check, verdict: Verdict, ledger: Ledger, rows: list[dict[str, Any]]) -> Fit:
        """The models, and how well they solve the problem."""
        setup, t = self.setup, int(rows[-1]["iteration"])
        note = f" ({setup.known.note})" if setup.known.note else ""
        message = f"gradient norm {here.norm:.1e} after {t:,} iterations and {ledger.exchanges:,} exchanges{note}"
        if not verdict.done:
            bound = "" if verdict.gap is None else f" with a certified gap of {verdict.gap:.1e}"
            worse = rows[0]["objective"] < here.value
            advice = "the objective has grown: give a smaller step eta" if worse else setup.advice
            message = f"stopped{bound} above the tolerance: {message}; {advice}"
            warn(message)
        end = Convergence(setup.name, verdict.done, t, ledger.exchanges, here.value, here.norm, verdict.gap, message)
        return Fit(coefficients(self.network), here.w, here.wbar, end, pl.DataFrame(rows, schema=HISTORY), ledger)

    def _diverged(self, t: int) -> SolverError:
        known, who = self.setup.known, self._farthest()
        if t == 0:
            return SolverError(f"The objective is not finite at the start, at {who} above all; give a smaller start.")
        bound = f"{self.setup.recipe.largest_step:.3g}" + (f"; {known.note}" if known.note else "")
        found = self.saved.read()
        kept = found.progress if found is not None else None
        where = f" Iteration {kept.iteration:,} is kept in {self.saved.path}." if isinstance(kept, RunProgress) else ""
        return SolverError(
            f"The iterate of {who} is no longer finite by iteration {t:,}; give a smaller step eta (theory: at most {bound}) "
            f"or start nearer.{where}"
        )

    def _farthest(self) -> str:
        """The client that has gone farthest; it is not known where clients are not in this process."""
        node = self.network.clients()
        if node is None:
            return "some client"
        size = np.abs(node.coefficients()).max(axis=1)
        worst = int(np.where(np.isfinite(size), size, np.inf).argmax())
        return f"client {node.data.hierarchy.client_ids[worst]!r}"


def play(
    network: Network,
    move: Callable[[Move], Message[ClusterSums]],
    guide: Guide,
    top: Centres,
    rounds: Rounds,
    anchor: Floats,
    announce: bool = False,
) -> tuple[Floats, int | None]:
    """Some rounds: the averages of the anchor after them, and the iteration by which something is no longer finite, if so.

    With ``announce``, nodes get the centres of the first anchor.
    """
    k, d = len(top.alpha), len(network.terms)
    pull, exchanged = Pull.none(k, d), np.zeros(k, dtype=bool)
    centres = top.centres(anchor)[0] if announce else None
    for turn in rounds:
        part = turn.takes_part
        sums = network.ask(move(Move(pull, exchanged, turn.start, turn.steps, part, turn.refresh, centres)))
        means, centres = top.means(sums), None
        if not np.isfinite(means).all():
            return anchor, int((turn.start + turn.steps).max())
        if turn.refresh:
            anchor, centres, pull, exchanged = means, top.centres(means)[0], Pull.none(k, d), ~part
        else:
            pull, exchanged = guide.answer(means, turn, anchor), part
    return anchor, None
