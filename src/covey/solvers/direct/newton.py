"""Damped Newton for any loss: each step is one sweep with the Hessians, so a handful of exchanges in all.

The state is kept as forces, ``u_i = gamma_i (theta_i - w_j)`` and ``v_j = lam_j (w_j - wbar)``, so that nothing cancels under
large penalties. In them the gradient of the multi-task form is

    e_i = grad f_i(theta_i) + u_i        client i
    v_j - sum_{i in j} u_i               cluster j
    - sum_j v_j                          global

and the Newton step is the sweep with ``A_i`` the Hessian of ``f_i`` and minus these as linear terms.

    coordinator   sends    NewtonStep: the clusters' step dw and its length t
    node          moves    theta_i, u_i along its direction, keeps the old point in case the step is refused
    node          replies  NewtonReport: value, slope, squared gradient, its clients eliminated and summed for each cluster
    coordinator   checks   sufficient decrease (Armijo) of the convex objective; halves t, or solves for the next step

A full step that is accepted costs one exchange, and its report already holds what the next step needs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from covey._typing import Anything, Floats
from covey.errors import SolverError, listing, warn
from covey.losses import Expansion, Loss
from covey.nodes.network import Message, Network, Node
from covey.objective.objective import Penalty
from covey.records import Record, Reply
from covey.solvers.direct.elimination import Quadratic, Spread, descend, eliminate
from covey.solvers.direct.james_stein import factor_of, shrunk
from covey.solvers.direct.sweep import one_sweep, solve_top
from covey.solvers.ledger import Ledger, quadratic_links
from covey.solvers.registry import algorithm
from covey.solvers.result import (
    HISTORY,
    Checkpoint,
    Convergence,
    Fit,
    Progress,
    after,
    begin_at,
    certified_gap,
    coefficients,
    entry,
)
from covey.tables.rows import GroupedData

_ARMIJO = 1e-4
_EPS = float(np.finfo(float).eps)
_SHORTEST = 1e-12


# What travels


@dataclass(frozen=True)
class NewtonBegin(Message["NewtonReport"], label="newton begin"):
    """Begin where the clients are, each held by the force from its cluster at ``w (k, d)``."""

    w: Floats

    def at(self, node: Node) -> NewtonReport:
        theta = node.coefficients()
        force = node.gamma[:, None] * (theta - node.data.hierarchy.down(self.w))
        state, report = node_start(LocalProblem.of(node), theta, force)
        node.keep(state)
        return report


@dataclass(frozen=True)
class NewtonStep(Message["NewtonReport"], label="newton step"):
    """Go ``length`` along the direction that ``dw (k, d)`` implies; from the old point if ``retry``."""

    dw: Floats
    length: float = 1.0
    retry: bool = False

    def at(self, node: Node) -> NewtonReport:
        state, report = node_move(LocalProblem.of(node), node.state(NewtonState), self)
        node.theta = state.now.theta
        node.keep(state)
        return report


@dataclass(frozen=True)
class NewtonReport(Reply):
    """Sums over a node's clients, for each cluster where they have a cluster."""

    seen: Quadratic
    force: Floats
    value: float = field(metadata={"overflows": True})
    slope: float
    gradient_squared: float
    mu: float = field(metadata={"least": True})


# The node


@dataclass(frozen=True)
class LocalProblem:
    """What a node holds for the whole run: its clients' rows, their loss and what ties them to their clusters."""

    data: GroupedData
    loss: Loss
    spread: Spread

    @classmethod
    def of(cls, node: Node) -> LocalProblem:
        return cls(node.data, node.loss, Spread.of_penalty(node.gamma, node.data.n_terms))

    @property
    def aside(self) -> tuple[Floats, Floats]:
        """A step needs neither the constant of a quadratic nor the rows behind it."""
        nothing = np.zeros(self.data.n_clients)
        return nothing, nothing


@dataclass(frozen=True)
class NewtonPoint(Record):
    """Where a node's clients are, and their losses expanded there."""

    theta: Floats
    u: Floats
    here: Expansion

    @property
    def residual(self) -> Floats:
        return self.here.gradient + self.u


@dataclass(frozen=True)
class NewtonState(Record):
    """The point last reported and the one before it, with the direction that led from one to the other."""

    now: NewtonPoint
    before: NewtonPoint
    dtheta: Floats
    du: Floats


def node_start(node: LocalProblem, theta: Floats, u: Floats) -> tuple[NewtonState, NewtonReport]:
    """Begin at given coefficients, each client held by a force ``u`` from its cluster: ``theta - w = S u``."""
    point = _point(node, theta, u)
    still = np.zeros_like(theta)
    mu = node.loss.smallest_curvature(point.here.hessian)
    return NewtonState(point, point, still, still), _report(node, point, still, still, point, mu)


def node_move(node: LocalProblem, state: NewtonState, move: NewtonStep) -> tuple[NewtonState, NewtonReport]:
    """Answer one :class:`NewtonStep`."""
    if not move.retry:
        origin = state.now
        dtheta, du = descend(origin.here.hessian, -origin.residual, node.spread, node.data.hierarchy.parent, move.dw)
        state = NewtonState(origin, origin, dtheta, du)
    origin = state.before
    point = _point(node, origin.theta + move.length * state.dtheta, origin.u + move.length * state.du)
    return replace(state, now=point), _report(node, point, state.dtheta, state.du, origin, np.inf)


def _point(node: LocalProblem, theta: Floats, u: Floats) -> NewtonPoint:
    return NewtonPoint(theta, u, node.loss.expand(node.data, theta))


def _report(node: LocalProblem, point: NewtonPoint, dtheta: Floats, du: Floats, origin: NewtonPoint, mu: float) -> NewtonReport:
    tree = node.data.hierarchy
    tied = 0.5 * float((node.spread.moved(point.u) * point.u).sum())
    slope = float((origin.here.gradient * dtheta).sum() + (node.spread.moved(origin.u) * du).sum())
    report = NewtonReport(
        eliminate(Quadratic(point.here.hessian, -point.residual, *node.aside), node.spread, tree.cluster_ptr),
        tree.sum_up(point.u),
        float(point.here.value.sum()) + tied,
        slope,
        float((point.residual**2).sum()),
        mu,
    )
    return _sound(report)


def _sound(report: NewtonReport) -> NewtonReport:
    """Of a step so far that numbers overflow nothing can be added; its value is infinite, so that it is refused."""
    sums = report.seen.C, report.seen.r, report.force, report.value, report.slope, report.gradient_squared
    if all(np.isfinite(each).all() for each in sums):
        return report
    seen = report.seen
    nothing = Quadratic(np.zeros_like(seen.C), np.zeros_like(seen.r), np.zeros_like(seen.c), np.zeros_like(seen.n))
    return NewtonReport(nothing, np.zeros_like(report.force), np.inf, 0.0, 0.0, report.mu)


# The coordinator


@dataclass(frozen=True)
class UpperLevels(Record):
    """The upper levels: ``w (k, d)``, forces ``v (k, d)``, ``wbar (d,)``."""

    w: Floats
    v: Floats
    wbar: Floats

    def moved(self, step: UpperLevels, length: float) -> UpperLevels:
        return UpperLevels(self.w + length * step.w, self.v + length * step.v, self.wbar + length * step.wbar)


@dataclass(frozen=True)
class PathPoint(Record):
    """One point of the path: exchanges are those so far."""

    iteration: int
    value: float
    norm: float
    exchanges: int


@dataclass(frozen=True)
class NewtonProgress(Record):
    """Where the coordinator is: the upper levels, a bound on the curvature, the path so far, and what decides when to stop."""

    top: UpperLevels
    mu: float
    path: tuple[PathPoint, ...] = ()
    stalled: int = 0
    adrift: int = 0


@dataclass(frozen=True)
class Iterate:
    """A point that all nodes have reported on; with ``fixed`` the global model stays where it is."""

    report: NewtonReport
    top: UpperLevels
    spread: Spread
    fixed: bool

    @cached_property
    def value(self) -> float:
        return self.report.value + 0.5 * float((self.spread.moved(self.top.v) * self.top.v).sum())

    @cached_property
    def norm(self) -> float:
        """Of the gradient at all levels."""
        return float(np.sqrt(self.report.gradient_squared + self.upper_residual**2))

    @property
    def upper_residual(self) -> float:
        """The norm of the gradient in ``w`` and, unless it is fixed, ``wbar``."""
        clusters, whole = self.top.v - self.report.force, self.top.v.sum(axis=0) * (not self.fixed)
        return float(np.sqrt((clusters**2).sum() + (whole**2).sum()))

    @cached_property
    def step(self) -> UpperLevels:
        """Newton's step of the upper levels."""
        seen = replace(self.report.seen, r=self.report.seen.r + self.report.force - self.top.v)
        stay = (lambda step, *_: 0.0 * step) if self.fixed else None
        return UpperLevels(*solve_top(seen, self.spread, own=self.top.v.sum(axis=0), settle=stay))

    @property
    def rounding(self) -> float:
        """What rounding may do to the value."""
        return 16 * _EPS * abs(self.value)

    @property
    def runaway(self) -> Anything:
        """Which terms the next full step would still move by more than a thousandth: mask ``(d,)``."""
        here, ahead = (np.abs(np.vstack([at.w, at.wbar])).max(axis=0) for at in (self.top, self.step))
        # A coefficient that is zero but for rounding moves by all of itself and means nothing.
        return np.asarray((ahead > 1e-3 * here) & (ahead > 1e-9 * here.max()) & (ahead > 1e-10))


def coordinate(
    ask: Callable[[NewtonStep], NewtonReport],
    report: NewtonReport,
    stage: NewtonProgress,
    spread: Spread,
    *,
    tol: float,
    max_iter: int,
    fixed: bool = False,
    keep: Callable[[NewtonProgress], None] | None = None,
) -> tuple[NewtonProgress, Convergence, Anything]:
    """Run Newton against ``ask``, which sends a message to all nodes and adds up their reports.

    Returns the last stage, the account, and which terms have no finite optimum. With ``fixed`` the global model stays where it
    is. ``keep`` gets each stage on the way; a run can go on from any of them.
    """
    mu, stalled, adrift = stage.mu, stage.stalled, stage.adrift
    here = Iterate(report, stage.top, spread, fixed)
    path = list(stage.path) or [PathPoint(0, here.value, here.norm, 1)]
    iterations, exchanges = path[-1].iteration, path[-1].exchanges

    # Where classes are separated the gradient vanishes while the coefficients go on growing: a few more steps will tell.
    while (here.norm > tol or here.runaway.any()) and stalled < 2 and adrift < 3 and iterations < max_iter:
        there, slope, asked = _line_search(ask, here, tol)
        # Once a step changes the objective by no more than its rounding, only a falling gradient counts as progress.
        stalled = stalled + 1 if abs(slope) <= here.rounding and there.norm > 0.5 * here.norm else 0
        adrift = adrift + 1 if there.norm <= tol else 0
        here, iterations, exchanges = there, iterations + 1, exchanges + asked
        path.append(PathPoint(iterations, here.value, here.norm, exchanges))
        if keep is not None:
            keep(NewtonProgress(here.top, mu, tuple(path), stalled, adrift))

    return _ended(here, NewtonProgress(here.top, mu, tuple(path), stalled, adrift), tol)


def _line_search(ask: Callable[[NewtonStep], NewtonReport], here: Iterate, tol: float) -> tuple[Iterate, float, int]:
    """Newton's step, halved until the objective falls enough: where it leads, its slope, and how many exchanges it took."""
    length, retry, asked = 1.0, False, 0
    while True:
        trial = ask(NewtonStep(here.step.w, length, retry))
        asked += 1
        there = Iterate(trial, here.top.moved(here.step, length), here.spread, here.fixed)
        slope = trial.slope + float((here.spread.moved(here.top.v) * here.step.v).sum())
        if there.value <= here.value + _ARMIJO * length * slope + here.rounding:
            return there, slope, asked
        length, retry = 0.5 * length, True
        if length < _SHORTEST and here.norm <= tol:
            return there, slope, asked  # the gradient has vanished and nothing is left to gain, in separated classes
        if length < _SHORTEST:
            raise SolverError(
                f"Newton found no decrease along its direction (objective {here.value:.6g}, gradient norm {here.norm:.1e}); "
                "the columns are probably on very different scales: standardise them."
            )


def _ended(here: Iterate, stage: NewtonProgress, tol: float) -> tuple[NewtonProgress, Convergence, Anything]:
    """The last stage, how well it solves the problem, and which terms have no finite optimum."""
    end, top = stage.path[-1], stage.top
    message = f"gradient norm {here.norm:.1e} after {end.iteration} Newton steps"
    if here.norm > tol:
        limit = "as small as float64 allows" if stage.stalled >= 2 else f"above the tolerance {tol:.1e}; raise max_iter"
        message = f"{message}, {limit}"
    converged = here.norm <= tol or stage.stalled >= 2
    runaway = here.runaway if here.norm <= tol else np.zeros_like(top.wbar, dtype=bool)
    if here.spread.detached.all() and not here.fixed:
        top = replace(top, wbar=top.w.mean(axis=0))
    # The bound is one on the clients' gradient, with the levels above at their best; else it would bound too little.
    balanced = here.upper_residual <= 1e-10 * (1.0 + float(np.linalg.norm(here.report.force)))
    gap = certified_gap(here.norm, stage.mu) if balanced and not here.fixed else None
    account = Convergence("newton", converged, end.iteration, end.exchanges, here.value, here.norm, gap, message)
    return replace(stage, top=top), account, runaway


@algorithm(place=2)
def newton(
    network: Network,
    penalty: Penalty,
    centre: Floats | None = None,
    *,
    start: Fit | None = None,
    tol: float = 1e-8,
    max_iter: int = 100,
    checkpoint: str | Path | None = None,
    james_stein: bool = False,
    progress: Progress | None = None,
) -> Fit:
    """The minimiser for any loss, to a gradient norm below ``tol``.

    Parameters
    ----------
    centre : (d,) the global model, if it is given; the others are then the best given it
    start : a fit to begin at, such as that of a nearby penalty; by default zero, or for counts their logs
    checkpoint : file to write after each step; a run that finds its own goes on from it, to the same bits
    james_stein : shrink the global model (:mod:`.james_stein`)
    progress : called after each step with the iteration, the objective and the gradient norm

    >>> from covey import GroupedData, InMemory, Penalty
    >>> from covey.losses import Poisson
    >>> data = GroupedData.from_arrays([[1.0]] * 4, [1, 3, 0, 9], ["a", "a", "b", "c"], ["x", "x", "x", "y"])
    >>> penalty = Penalty.of(data.hierarchy)
    >>> fit = newton(InMemory.of(data, Poisson(), penalty.gamma), penalty)
    >>> fit.convergence.converged, fit.theta.ravel().round(3).tolist()
    (True, [0.645, -0.291, 2.133])
    """
    begin_at(network, start)
    saved = Checkpoint.at(checkpoint, {"solver": "newton"}, network, penalty)

    def keep(stage: NewtonProgress) -> None:
        end = stage.path[-1]
        saved.write(stage)
        if progress is not None:
            progress(end.iteration, end.value, end.norm)

    d, before = len(network.terms), 0
    if start is None and network.loss.linear_start:
        # From zero, large counts or exposures would take hundreds of steps: exp grows out of any quadratic's reach.
        start, before = one_sweep(network, penalty, logs=True), 1
    report, stage = _resumed(saved) or _begin(network, penalty, start, centre)
    limits: dict[str, Any] = {"tol": tol, "max_iter": max_iter, "fixed": centre is not None, "keep": keep}
    stage, account, runaway = coordinate(network.ask, report, stage, Spread.of_penalty(penalty.lam, d), **limits)
    account = replace(account, exchanges=account.exchanges + before)
    history, ledger = _history(network, stage, before)
    separated = runaway.any() and network.loss.curvature[0] == 0.0
    if separated:
        terms = listing(np.array(network.terms)[runaway].tolist(), 3)
        sentence = (
            f"the responses are perfectly separated along {terms}: the coefficients grow without bound and were stopped where "
            "the gradient vanished; drop terms or merge categories"
        )
        account = replace(account, message=f"{account.message}; {sentence}")
    if separated or not account.converged:
        warn(account.message)
    fit = Fit(coefficients(network), stage.top.w, stage.top.wbar, account, history, ledger)
    return _below_a_shrunk(network, penalty, fit, tol, max_iter, progress) if james_stein else fit


def _below_a_shrunk(network: Network, penalty: Penalty, fit: Fit, tol: float, max_iter: int, progress: Progress | None) -> Fit:
    """Shrink the global model of a fit, and put the others where they are best given that."""
    factor = factor_of(network, penalty, fit)
    second = newton(network, penalty, factor * fit.wbar, start=fit, tol=tol, max_iter=max_iter, progress=progress)
    both = after(fit, second)
    end = both.convergence
    message = f"gradient norm {end.gradient_norm:.1e} after {end.iterations} Newton steps"
    return shrunk(replace(both, convergence=replace(end, message=message)) if end.converged else both, factor)


def _resumed(saved: Checkpoint) -> tuple[NewtonReport, NewtonProgress] | None:
    """The stage that was saved, and the report of its node on where it is."""
    stage = saved.resume(NewtonProgress)
    if stage is None or saved.node is None:
        return None
    state = saved.node.state(NewtonState)
    still = np.zeros_like(state.dtheta)
    return _report(LocalProblem.of(saved.node), state.now, still, still, state.now, stage.mu), stage


def _begin(network: Network, penalty: Penalty, start: Fit | None, centre: Floats | None) -> tuple[NewtonReport, NewtonProgress]:
    k, d = network.tree.n_clusters, len(network.terms)
    w, wbar = (np.zeros((k, d)), np.zeros(d)) if start is None else (start.w, start.wbar)
    wbar = wbar if centre is None else np.asarray(centre, dtype=np.float64)
    one = np.isinf(penalty.lam)[:, None]
    w = np.where(one, wbar, w)
    report = network.ask(NewtonBegin(w))
    with np.errstate(invalid="ignore"):
        v = np.where(one, report.force, penalty.lam[:, None] * (w - wbar))
    return report, NewtonProgress(UpperLevels(w, v, wbar), report.mu)


def _history(over: Network, stage: NewtonProgress, before: int) -> tuple[pl.DataFrame, Ledger]:
    """A row for each step, and what they cost; every exchange is one of the whole network."""
    network = quadratic_links(over.tree.sizes, len(over.terms))
    everybody = np.ones(over.tree.n_clusters, dtype=np.int64)
    rows, ledger = [], network.nothing
    for step in stage.path:
        ledger = network.count((step.exchanges + before) * everybody, step.exchanges + before)
        rows.append(entry(step.iteration, step.value, step.norm, certified_gap(step.norm, stage.mu), ledger))
    return pl.DataFrame(rows, schema=HISTORY), ledger
