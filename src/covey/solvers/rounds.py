"""The loop that the algorithms by coins share: rounds from the schedule, checks, history, checkpoints.

    node          gets    Move: a pull towards the centres, then local steps
    node          sends   Sums: its clients' weighted coefficients, summed for each cluster
    coordinator   turns   the sums into means, and the means into the next pull

An algorithm is three things: ``node_move`` (what a node does with a Move), a guide (how the coordinator answers sums), and the
constants of ``theory``. Every so many iterations the loop stops for a check, a full gradient by all nodes, and ends when the
objective is certified to be close enough to its minimum.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Protocol, TypedDict

import numpy as np
import polars as pl

from covey._typing import Anything, Floats, Ints
from covey.data import GroupedData
from covey.errors import ConvergenceWarning, SolverError
from covey.hierarchy import Hierarchy, segment_sum
from covey.ledger import Ledger, Links
from covey.losses import Loss
from covey.objective import Penalty
from covey.schedule import Round, Rounds, Schedule
from covey.solvers.checkpoint import Checkpoint
from covey.solvers.result import HISTORY, Convergence, Fit, Progress, certified_gap, entry
from covey.solvers.sweep import blocks_of
from covey.solvers.threads import threads_for
from covey.theory import Constants, mixing

_STRETCH = 1 << 20  # coins grouped at a time, over all clusters
_MOST_ITERATIONS = 1_000_000  # unless max_iter says more


class Watch(TypedDict, total=False):
    """What all algorithms by coins understand besides their own settings.

    seed : of the coins and of the rows that are sampled
    tol : stop when the objective is certified to be within ``tol * max(1, |objective|)`` of its minimum
    max_iter : most iterations; by default twice what the theorem needs
    every : iterations between checks; by default a quarter of the time in which the distance shrinks by e, then ever more
    start : coefficients to begin at, (n, d); zero by default
    minimum : the lowest value of the objective, if it is known; the history then has the true gap
    checkpoint : file to write at each check; a run that finds its own goes on from it, to the same bits
    progress : called at each check with the iteration, the objective and the gradient norm
    """

    seed: int
    tol: float
    max_iter: int | None
    every: int | None
    start: Floats | None
    minimum: float | None
    checkpoint: str | Path | None
    progress: Progress | None


# What travels


@dataclass(frozen=True)
class Pull:
    """A step towards centres: client ``i`` of cluster ``j`` moves by ``-gamma_i (strength_j theta_i - force_j)``."""

    strength: Floats
    force: Floats

    @classmethod
    def none(cls, k: int, d: int) -> Pull:
        return cls(np.zeros(k), np.zeros((k, d)))

    def then(self, strength: Floats, force: Floats, gamma: Floats) -> Pull:
        """Followed by another, where all clients of a cluster have the same ``gamma (k,)``."""
        if not self.strength.any():
            return Pull(strength, force)
        keep = 1 - gamma * strength
        return Pull(self.strength * keep + strength, self.force * keep[:, None] + force)


@dataclass(frozen=True)
class Move:
    """Down: a pull in clusters that had ``heads (k,)``, then ``steps (k,)`` local iterations from ``start (k,)`` on.

    After them make an anchor of where you are, if ``refresh``; ``anchor (k, d)`` are the centres of the last one, if new. Nodes
    answer for clusters that are ``wanted``.
    """

    pull: Pull
    heads: Anything
    start: Ints
    steps: Ints
    wanted: Anything
    refresh: bool = False
    anchor: Floats | None = None


@dataclass(frozen=True)
class Sums:
    """Up: ``sum of gamma_i theta_i`` over a node's clients, for each cluster, ``(k, d)``. Adds over nodes."""

    total: Floats

    def __add__(self, other: Sums) -> Sums:
        return Sums(self.total + other.total)


@dataclass(frozen=True)
class Check:
    """Up: value and squared gradient of a node's clients, with the levels above at their best. Adds over nodes."""

    value: float
    gradient_squared: float

    def __add__(self, other: Check) -> Check:
        return Check(self.value + other.value, self.gradient_squared + other.gradient_squared)


# The node


@dataclass(frozen=True)
class Blocks:
    """Clients in blocks of one cluster each: what a thread takes at a time. Sums of blocks are added in order."""

    ptr: Ints
    owner: Ints
    of_cluster: Ints
    one_each: bool

    @classmethod
    def of(cls, tree: Hierarchy) -> Blocks:
        ptr, owner = blocks_of(tree.cluster_ptr)
        clusters = np.arange(tree.n_clusters + 1)
        return cls(ptr, owner, np.searchsorted(owner, clusters), np.array_equal(owner, clusters[:-1]))

    def empty(self, d: int) -> Floats:
        return np.zeros((len(self.owner), d))

    def total(self, sums: Floats) -> Sums:
        return Sums(sums if self.one_each else segment_sum(sums, self.of_cluster))


def node_sums(tree: Hierarchy, gamma: Floats, theta: Floats) -> Sums:
    """What a node tells of where its clients are."""
    return Sums(tree.sum_up(gamma[:, None] * theta))


def node_check(data: GroupedData, loss: Loss, gamma: Floats, theta: Floats, w: Floats) -> Check:
    """What a node tells of how good that is, given the clusters' centres."""
    away = theta - data.hierarchy.down(w)
    here = loss.expand(data, theta, order=1)
    value = here.value.sum() + 0.5 * (gamma * (away**2).sum(axis=1)).sum()
    return Check(float(value), float(((here.gradient + gamma[:, None] * away) ** 2).sum()))


# The coordinator


@dataclass(frozen=True)
class Top:
    """What the coordinator knows of the penalties: ``alpha``, each cluster's sum of ``gamma``, weights of the global mean."""

    alpha: Floats
    total: Floats
    weights: Floats

    @classmethod
    def of(cls, penalty: Penalty) -> Top:
        alpha = mixing(penalty)
        weights = alpha * penalty.cluster_gamma
        weights = weights if weights.any() else np.ones_like(weights)
        return cls(alpha, np.where(penalty.cluster_gamma > 0, penalty.cluster_gamma, 1.0), weights / weights.sum())

    def means(self, sums: Sums) -> Floats:
        return sums.total / self.total[:, None]

    def centres(self, means: Floats) -> tuple[Floats, Floats]:
        """``w`` and ``wbar`` that are best for the clients' means."""
        tbar = self.weights @ means
        return self.alpha[:, None] * tbar + (1 - self.alpha)[:, None] * means, tbar

    def tie(self, means: Floats) -> float:
        """What ties the clusters: ``1/2 sum_j lam_j |w_j - wbar|^2`` at the best centres."""
        # w_j - wbar = (1 - alpha_j) (tbar_j - tbar) and lam_j (1 - alpha_j) = alpha_j * total_j.
        apart = ((means - self.weights @ means) ** 2).sum(axis=1)
        return 0.5 * float((self.alpha * (1 - self.alpha) * self.total * apart).sum())


class Guide(Protocol):
    """How a coordinator answers: the means of those who took part in a round become a pull, and maybe a new anchor.

    ``begin`` makes the first anchor of the means at the start; ``memory`` is what must survive a restart.
    """

    @property
    def memory(self) -> dict[str, Floats]: ...

    def begin(self, means: Floats) -> Floats | None: ...
    def answer(self, means: Floats, turn: Round) -> tuple[Pull, Floats | None]: ...
    def recipe(self) -> dict[str, Any]: ...


class Network(Protocol):
    """All nodes at once, wherever they are; ``d`` coefficients a client."""

    d: int

    def move(self, move: Move) -> Sums: ...
    def sums(self) -> Sums: ...
    def check(self, w: Floats) -> Check: ...
    def culprit(self) -> str: ...
    def save(self) -> dict[str, Floats]: ...
    def restore(self, arrays: dict[str, Floats]) -> None: ...


@dataclass(frozen=True)
class Run:
    """What theory and user settle before the first iteration; ``advice`` is for a run that does not get there."""

    solver: str
    schedule: Schedule
    links: Links
    mu: float
    largest_step: float
    every: int
    growing: bool
    max_iter: int
    tol: float
    minimum: float | None
    note: str
    advice: str


def coordinate(
    network: Network, guide: Guide, top: Top, run: Run, checkpoint: Checkpoint, progress: Progress | None = None
) -> tuple[Floats, Floats, Convergence, pl.DataFrame, Ledger]:
    """Iterate until the gap is certified, or ``max_iter``; ``w``, ``wbar``, the account, the history and what it cost."""
    t, ledger, rows = 0, run.links.nothing, []
    found = checkpoint.read()
    if found is not None:
        t, ledger, rows = found.iteration, found.ledger, found.history
        network.restore(found.nodes)
        guide.memory.update(found.guide)
    while True:
        means = top.means(network.sums())
        w, wbar = top.centres(means)
        seen = network.check(w)
        value, norm = seen.value + top.tie(means), float(np.sqrt(seen.gradient_squared))
        if not np.isfinite(value + norm):
            raise _diverged(network, t, run, checkpoint)
        gap = certified_gap(norm, run.mu)
        done = gap is not None and gap <= run.tol * max(1.0, abs(value))
        anchor = guide.begin(means) if t == 0 else None
        if not rows or rows[-1]["iteration"] < t:
            ledger = ledger + run.links.check
            rows.append(entry(t, value, norm, run.mu, ledger, run.minimum))
            checkpoint.write(t, ledger, rows, network.save(), guide.memory)
        if progress is not None:
            progress(t, value, norm)
        if done or t >= run.max_iter:
            break
        stop = min(run.max_iter, t + (max(run.every, t // 20) if run.growing else run.every))
        ledger, t = ledger + _advance(network, guide, top, run, t, stop, anchor, checkpoint), stop
    message = f"gradient norm {norm:.1e} after {t:,} iterations and {ledger.exchanges:,} exchanges{run.note}"
    if not done:
        bound = "" if gap is None else f" with a certified gap of {gap:.1e}"
        message = f"stopped{bound}, above the tolerance: {message}; {run.advice}"
        warnings.warn(message, ConvergenceWarning, stacklevel=4)
    account = Convergence(run.solver, done, t, ledger.exchanges, value, norm, gap, message)
    return w, wbar, account, pl.DataFrame(rows, schema=HISTORY), ledger


def _advance(
    network: Network, guide: Guide, top: Top, run: Run, start: int, stop: int, anchor: Floats | None, checkpoint: Checkpoint
) -> Ledger:
    """Iterations ``start`` to ``stop - 1``; what they cost."""
    cost, stretch = run.links.nothing, max(16, _STRETCH // (1 + len(top.alpha)))
    for first in range(start, stop, stretch):
        last = min(stop, first + stretch)
        rounds = run.schedule.rounds(first, last)
        lost = play(network, guide, top, rounds, anchor)
        if lost is not None:
            raise _diverged(network, lost, run, checkpoint)
        cost, anchor = cost + run.links.of(rounds, last - first), None
    return cost


def play(network: Network, guide: Guide, top: Top, rounds: Rounds, anchor: Floats | None = None) -> int | None:
    """Some rounds; the iteration by which something is no longer finite, if that happens."""
    k = len(top.alpha)
    pull, heads = Pull.none(k, network.d), np.zeros(k, dtype=bool)
    for turn in rounds:
        part = turn.takes_part
        sums = network.move(Move(pull, heads, turn.start, turn.steps, part, turn.refresh, anchor))
        if not np.isfinite(sums.total).all():
            return int((turn.start + turn.steps).max())
        pull, anchor = guide.answer(top.means(sums), turn)
        heads = part & (not turn.refresh)
    return None


def _diverged(network: Network, t: int, run: Run, checkpoint: Checkpoint) -> SolverError:
    kept = checkpoint.kept()
    saved = "" if kept is None else f" Iteration {kept:,} is kept in {checkpoint.path}."
    return SolverError(
        f"The iterate of client {network.culprit()} is not finite at iteration {t:,}; give a smaller step eta (convergence is "
        f"proved up to {run.largest_step:.3g}).{saved}"
    )


def settle(
    watch: Watch,
    solver: str,
    schedule: Schedule,
    links: Links,
    known: Constants,
    largest_step: float,
    *,
    pace: float,
    needed: Callable[[float], int],
    advice: str,
) -> Run:
    """A run by what the user said, else by theory: ``pace`` iterations for a factor of e, ``needed`` ones for a tolerance."""
    seed, tol = watch.get("seed", 0), watch.get("tol", 1e-8)
    if not (isinstance(seed, int | np.integer) and seed >= 0):
        raise SolverError(f"The 'seed' parameter must be a whole number >= 0. Got {seed!r} instead.")
    if not (isinstance(tol, int | float) and tol >= 0):
        raise SolverError(f"The 'tol' parameter must be a number >= 0. Got {tol!r} instead.")
    for name in ("max_iter", "every"):
        given = watch.get(name)
        if not (given is None or (isinstance(given, int | np.integer) and given >= 1)):
            raise SolverError(f"The {name!r} parameter must be a whole number >= 1. Got {given!r} instead.")
    max_iter = watch.get("max_iter") or int(min(max(2 * needed(max(tol, 1e-16)), 1000), _MOST_ITERATIONS))
    every = watch.get("every") or int(np.clip(pace / 4, 16, max(16, max_iter // 20)))
    growing, note = watch.get("every") is None, f" ({known.note})" if known.note else ""
    return Run(
        solver, schedule, links, known.mu, largest_step, every, growing, max_iter, tol, watch.get("minimum"), note, advice
    )  # fmt: skip


def beginning(data: GroupedData, watch: Watch) -> Floats:
    """The clients' coefficients before the first iteration."""
    start, shape = watch.get("start"), (data.n_clients, data.n_terms)
    if start is None:
        return np.zeros(shape)
    theta = np.array(start, dtype=np.float64)
    if theta.shape != shape or not np.isfinite(theta).all():
        raise SolverError(
            f"The 'start' parameter must hold {shape[0]} x {shape[1]} finite coefficients. Got shape {theta.shape}."
        )
    return theta


# In memory: one node that holds everybody


class InMemory:
    """A network of one node. ``move`` is the algorithm's own ``node_move``; its state is a frozen dataclass of arrays."""

    def __init__(
        self, data: GroupedData, loss: Loss, gamma: Floats, state: Any, move: Callable[[Any, Move], tuple[Any, Sums]]
    ) -> None:
        self._data, self._loss, self._gamma, self._move = data, loss, gamma, move
        self.d = data.n_terms
        self.state = state

    def move(self, move: Move) -> Sums:
        self.state, sums = self._move(self.state, move)
        return sums

    def sums(self) -> Sums:
        return node_sums(self._data.hierarchy, self._gamma, self.state.theta)

    def check(self, w: Floats) -> Check:
        return node_check(self._data, self._loss, self._gamma, self.state.theta, w)

    def culprit(self) -> str:
        lost = np.flatnonzero(~np.isfinite(self.state.theta).all(axis=1))
        return repr(self._data.hierarchy.client_ids[int(lost[0]) if len(lost) else 0])

    def save(self) -> dict[str, Floats]:
        return {part.name: getattr(self.state, part.name) for part in fields(self.state)}

    def restore(self, arrays: dict[str, Floats]) -> None:
        self.state = type(self.state)(**arrays)


def solve_in_memory(
    data: GroupedData,
    loss: Loss,
    penalty: Penalty,
    state: Any,
    move: Callable[[Any, Move], tuple[Any, Sums]],
    guide: Guide,
    run: Run,
    watch: Watch,
) -> Fit:
    """Run an algorithm with all clients on one node."""
    recipe = {"solver": run.solver, "schedule": asdict(run.schedule), "every": run.every, **guide.recipe()}
    checkpoint = Checkpoint.at(watch.get("checkpoint"), recipe, data, penalty)
    network, top = InMemory(data, loss, penalty.gamma, state, move), Top.of(penalty)
    # What is not finite is reported by client and iteration, not by numpy.
    with threads_for(data), np.errstate(over="ignore", invalid="ignore"):
        w, wbar, account, history, ledger = coordinate(network, guide, top, run, checkpoint, watch.get("progress"))
    return Fit(network.state.theta, w, wbar, account, history, ledger)
