"""The loop that the algorithms by coins share: rounds from the schedule, checks, history, checkpoints.

An algorithm is what theory set up for a problem, what nodes are asked to do, and a guide for the coordinator's answers. Every
so many iterations the loop stops for a check, a full gradient by all nodes, and ends when the objective is certified to be
close enough to its minimum.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import polars as pl

from covey._typing import Floats
from covey.errors import SolverError, listing, warn
from covey.nodes.messages import Message
from covey.nodes.network import InMemory, Network
from covey.nodes.node import Node
from covey.objective.objective import Objective
from covey.objective.penalty import Penalty
from covey.objective.theory import Constants, Recipe, number
from covey.records import Record
from covey.solvers.checkpoint import Checkpoint
from covey.solvers.first_order.curvature import certificate
from covey.solvers.first_order.protocol import AskMeans, Centres, CheckGap, ClusterSums, Guide, Move, PerfectFit, Pull
from covey.solvers.first_order.schedule import Rounds, Schedule, Vote
from covey.solvers.ledger import Ledger, Links, expected, links
from covey.solvers.result import HISTORY, Convergence, Fit, Progress, certified_gap, entry
from covey.solvers.threads import threads_for

_STRETCH = 1 << 20  # coins grouped at a time, over all clusters
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
    """What all algorithms by coins understand besides their own settings.

    Attributes
    ----------
    seed : of the coins and of the rows that are sampled
    tol : stop when the objective is certified to be within this share of its minimum, both above that of a perfect fit
    max_iter : most iterations; by default twice what the theorem needs, at most a million
    every : iterations between checks; by default a quarter of the time in which the distance shrinks by e, then ever more
    start : coefficients to begin at, (n, d); zero by default
    minimum : the lowest value of the objective, if it is known; the history then has the true gap
    checkpoint : file to write at each check; a run that finds its own goes on from it, to the same bits
    progress : called at each check with the iteration, the objective and the gradient norm
    vote : who flips the coin of the exchanges between clusters: "central" or, without a server, "majority"
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
        if not (isinstance(self.seed, int | np.integer) and 0 <= self.seed < 2**64):
            raise SolverError(f"The 'seed' parameter must be a whole number >= 0. Got {self.seed!r} instead.")
        number("tol", self.tol, least=0.0)
        for name in ("max_iter", "every"):
            given = getattr(self, name)
            if not (given is None or (isinstance(given, int | np.integer) and not isinstance(given, bool) and given >= 1)):
                raise SolverError(f"The {name!r} parameter must be a whole number >= 1. Got {given!r} instead.")
        if self.minimum is not None:
            number("minimum", self.minimum)
        if not isinstance(self.checkpoint, str | Path | None):
            raise SolverError(f"The 'checkpoint' parameter must be the path of a file. Got {self.checkpoint!r} instead.")

    @classmethod
    def of(cls, solver: str, watch: Watch) -> Control:
        """From the keywords of a solver; an unknown one is refused."""
        known = [each.name for each in fields(cls)]
        unknown = [name for name in watch if name not in known]
        if unknown:
            near = difflib.get_close_matches(unknown[0], known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"besides its own settings it takes {listing(known, 20)}."
            raise SolverError(f"The solver {solver!r} has no option {unknown[0]!r}; {hint}")
        return cls(**watch)

    def beginning(self, objective: Objective) -> Floats:
        """The clients' coefficients before the first iteration."""
        shape = (objective.data.n_clients, objective.data.n_terms)
        if self.start is None:
            return np.zeros(shape)
        want = f"The 'start' parameter must hold {shape[0]} x {shape[1]} finite numbers, a row for each client."
        try:
            theta = np.array(self.start, dtype=np.float64, order="C")
        except (TypeError, ValueError):
            raise SolverError(f"{want} Got {type(self.start).__name__} instead.") from None
        if theta.shape != shape:
            raise SolverError(f"{want} Got shape {theta.shape} instead.")
        lost = np.flatnonzero(~np.isfinite(theta).all(axis=1))
        if len(lost):
            client = objective.data.hierarchy.client_ids[int(lost[0])]
            raise SolverError(f"{want} Client {client!r} has {theta[lost[0]].tolist()} instead.")
        return theta


@dataclass(frozen=True)
class Algorithm:
    """An algorithm as the loop sees it, set up for one problem.

    Attributes
    ----------
    name, known, recipe : what theory says of it
    identity : numbers that, with the coins, determine its iterates: a checkpoint is good for these only
    begin, go : what nodes are asked to do: begin where they are, and make a move
    guide : how the coordinator answers
    merge : whether a run of heads needs one exchange only
    pace : iterations in which the distance shrinks by e, by its theorem
    needed : iterations to a tolerance, by its theorem
    advice : for a run that did not get there
    """

    name: str
    known: Constants
    recipe: Recipe
    identity: dict[str, Any]
    begin: Message[None]
    go: Callable[[Move], Message[ClusterSums]]
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
    """Where a run is: what the coordinator remembers between checks; ``anchor (k, d)`` are the means of the last one."""

    iteration: int
    ledger: Ledger
    history: tuple[dict[str, Any], ...]
    anchor: Floats


class Keeper:
    """Who keeps a run, and knows its clients: nobody, unless told otherwise."""

    def resume(self, most: int) -> RunProgress | None:
        """The stage that was kept last, with the nodes put where they were then; None if it is beyond ``most`` iterations."""
        return None

    def keep(self, stage: RunProgress) -> None:
        """Keep this stage, and the nodes as they are."""

    def kept(self) -> str:
        """A sentence that says what was kept."""
        return ""

    def culprit(self) -> str:
        """The client that has gone farthest; across sites nobody knows it."""
        return "some client"


Keepers = Callable[[dict[str, Any]], Keeper]
"""The keeper of a run, given what identifies it."""


def nobody(identity: dict[str, Any]) -> Keeper:
    """No run is kept."""
    return Keeper()


@dataclass(frozen=True)
class Loop:
    """One run."""

    algorithm: Algorithm
    control: Control
    network: Network
    penalty: Penalty
    top: Centres
    links: Links
    keeper: Keeper

    @property
    def schedule(self) -> Schedule:
        return Schedule(self.algorithm.recipe.coins, int(self.control.seed), self.algorithm.merge, self.control.vote)

    @property
    def max_iter(self) -> int:
        if self.control.max_iter is not None:
            return int(self.control.max_iter)
        return int(min(max(2 * self.algorithm.needed(max(self.control.tol, 1e-16)), 1000), _MOST_ITERATIONS))

    def next_check(self, t: int) -> int:
        """A function of ``t`` and the algorithm alone, whatever ``max_iter`` is: the cuts of a run are part of its bits."""
        if self.control.every is not None:
            return t + int(self.control.every)
        return t + max(spacing(self.algorithm.pace), t // 20)

    def run(self) -> tuple[Floats, Floats, Convergence, pl.DataFrame, Ledger]:
        """Iterate until the gap is certified, or ``max_iter``; ``w``, ``wbar``, the account, the history and what it cost."""
        control, mu, max_iter = self.control, self.algorithm.known.mu, self.max_iter
        proved = self.algorithm.known.proved
        perfect = float(self.network.ask(PerfectFit()))
        rows: list[dict[str, Any]] = []
        t, ledger, anchor, regular = 0, self.links.nothing, None, True
        self.network.ask(self.algorithm.begin)
        found = self.keeper.resume(max_iter)
        if found is not None:
            t, ledger, rows, anchor = found.iteration, found.ledger, list(found.history), found.anchor
        while True:
            means = self.top.means(self.network.ask(AskMeans(self.top.total)))
            w, wbar = self.top.centres(means)
            seen = self.network.ask(CheckGap(w))
            value, norm = float(seen.value) + self.top.tie(means), math.sqrt(float(seen.gradient_squared))
            if not np.isfinite(value + norm):
                raise self._diverged(t)
            gap = certified_gap(norm, mu)
            # Where a fit is perfect no share of it is small enough; rounding of the gradient hides a smaller gap than this.
            least = 1e-22 * max(1.0, abs(value)) if control.tol > 0 else 0.0
            target = max(control.tol * (value - perfect), least)
            done = gap is not None and gap <= target
            if done and not proved:
                # What was taken for mu is no bound: judge by the curvature here, and go on if that is not enough.
                gap, here = certificate(self.network, self.penalty, norm)
                done, mu = gap <= target, min(mu, here) or mu
            certain = gap if gap is not None and (done or (proved and np.isfinite(gap))) else None
            anchor = means if anchor is None else anchor
            if not rows or rows[-1]["iteration"] < t:
                ledger = ledger + self.links.check
                rows.append(entry(t, value, norm, certain, ledger, control.minimum))
                if regular:
                    self.keeper.keep(RunProgress(t, ledger, tuple(rows), anchor))
            if control.progress is not None:
                control.progress(t, value, norm)
            if done or t >= max_iter:
                break
            stop = self.next_check(t)
            regular = stop <= max_iter
            stop = min(stop, max_iter)
            cost, anchor = self._advance(t, stop, anchor)
            ledger, t = ledger + cost, stop
        note = f" ({self.algorithm.known.note})" if self.algorithm.known.note else ""
        message = f"gradient norm {norm:.1e} after {t:,} iterations and {ledger.exchanges:,} exchanges{note}"
        if not done:
            bound = "" if certain is None else f" with a certified gap of {certain:.1e}"
            worse = rows[0]["objective"] < value
            advice = "the objective has grown: give a smaller step eta" if worse else self.algorithm.advice
            message = f"stopped{bound} above the tolerance: {message}; {advice}"
            warn(message)
        account = Convergence(self.algorithm.name, done, t, ledger.exchanges, value, norm, certain, message)
        return w, wbar, account, pl.DataFrame(rows, schema=HISTORY), ledger

    def _advance(self, start: int, stop: int, anchor: Floats) -> tuple[Ledger, Floats]:
        """Iterations ``start`` to ``stop - 1``: what they cost, and the anchor after them."""
        cost, stretch = self.links.nothing, max(16, _STRETCH // (1 + len(self.top.alpha)))
        for first in range(start, stop, stretch):
            last = min(stop, first + stretch)
            rounds = self.schedule.rounds(first, last)
            ask = partial(play, self.network, self.algorithm.go, self.algorithm.guide, self.top)
            anchor, lost = ask(rounds, anchor, announce=first == 0)
            if lost is not None:
                raise self._diverged(lost)
            cost = cost + self.links.of(rounds, last - first) + expected(self.schedule, last - first)
        return cost, anchor

    def _diverged(self, t: int) -> SolverError:
        known, who = self.algorithm.known, self.keeper.culprit()
        if t == 0:
            return SolverError(f"The objective is not finite at the start, at {who} above all; give a smaller start.")
        bound = f"{self.algorithm.recipe.largest_step:.3g}" + (f"; {known.note}" if known.note else "")
        return SolverError(
            f"The iterate of {who} is no longer finite by iteration {t:,}; give a smaller step eta (theory: at most {bound}) "
            f"or start nearer.{self.keeper.kept()}"
        )


def play(
    network: Network,
    go: Callable[[Move], Message[ClusterSums]],
    guide: Guide,
    top: Centres,
    rounds: Rounds,
    anchor: Floats,
    announce: bool = False,
) -> tuple[Floats, int | None]:
    """Some rounds: the means of the anchor after them, and the iteration by which something is no longer finite, if so.

    ``announce`` tells the nodes the centres of the first anchor, which they cannot know.
    """
    k, d = len(top.alpha), len(network.terms)
    pull, heads = Pull.none(k, d), np.zeros(k, dtype=bool)
    centres = top.centres(anchor)[0] if announce else None
    for turn in rounds:
        part = turn.takes_part
        sums = network.ask(go(Move(pull, heads, turn.start, turn.steps, part, turn.refresh, centres)))
        means, centres = top.means(sums), None
        if not np.isfinite(means).all():
            return anchor, int((turn.start + turn.steps).max())
        if turn.refresh:
            anchor, centres, pull, heads = means, top.centres(means)[0], Pull.none(k, d), ~part
        else:
            pull, heads = guide.answer(means, turn, anchor), part
    return anchor, None


def run(network: Network, penalty: Penalty, algorithm: Algorithm, control: Control, keepers: Keepers) -> Fit:
    """Run an algorithm over any network, from where its nodes are; the clients' models stay there."""
    for name in ("checkpoint", "start"):
        if keepers is nobody and getattr(control, name) is not None:
            raise SolverError(f"The {name!r} parameter is for clients that are all in memory; across a network leave it out.")
    identity = {"solver": algorithm.name, "seed": int(control.seed), "vote": control.vote, "every": control.every}
    keeper = keepers({**identity, **algorithm.identity, "sums": "exact"})
    tree, d, top = network.tree, len(network.terms), Centres.of(penalty)
    wires = links(tree.sizes, d, control.vote, tied=bool(top.alpha.any()))
    loop = Loop(algorithm, control, network, penalty, top, wires, keeper)
    # What is not finite is reported by client and iteration, not by numpy.
    with np.errstate(over="ignore", invalid="ignore"):
        w, wbar, account, history, ledger = loop.run()
    return Fit(np.empty((0, d)), w, wbar, account, history, ledger)


# In memory: one node that holds everybody


@dataclass(frozen=True)
class OnDisk(Keeper):
    """A run in memory, and its file."""

    node: Node
    checkpoint: Checkpoint

    def resume(self, most: int) -> RunProgress | None:
        found = self.checkpoint.read()
        if found is None or not isinstance(found.progress, RunProgress) or found.progress.iteration > most:
            return None
        self.node.restore(found.node)
        return found.progress

    def keep(self, stage: RunProgress) -> None:
        self.checkpoint.write(stage, self.node)

    def kept(self) -> str:
        found = self.checkpoint.read()
        if found is None or not isinstance(found.progress, RunProgress):
            return ""
        return f" Iteration {found.progress.iteration:,} is kept in {self.checkpoint.path}."

    def culprit(self) -> str:
        size = np.abs(self.node.coefficients()).max(axis=1)
        worst = int(np.where(np.isfinite(size), size, np.inf).argmax())
        return f"client {self.node.data.hierarchy.client_ids[worst]!r}"


def in_memory(solver: Callable[..., Fit], objective: Objective, control: Control) -> Fit:
    """Run a solver with all clients on one node; ``solver`` takes a network, penalties, ``control`` and keepers."""
    data, start = objective.data, control.beginning(objective)
    network = InMemory.of(data, objective.loss, objective.penalty.gamma, start)

    def keepers(identity: dict[str, Any]) -> Keeper:
        return OnDisk(network.node, Checkpoint.at(control.checkpoint, identity, objective, start))

    with threads_for(data):
        fit = solver(network, objective.penalty, control, keepers)
    return replace(fit, theta=network.node.coefficients())
