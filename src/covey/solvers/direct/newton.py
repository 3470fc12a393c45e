"""Damped Newton for any loss: each step is one sweep with the Hessians, so a handful of exchanges in all.

The state is kept as forces, ``u_i = gamma_i (theta_i - w_j)`` and ``v_j = lam_j (w_j - wbar)``, so that nothing cancels under
large penalties. In them the gradient of the multi-task form is

    e_i = grad f_i(theta_i) + u_i        client i
    v_j - sum_{i in j} u_i               cluster j
    - sum_j v_j                          global

and the Newton step is the sweep with ``A_i`` the Hessian of ``f_i`` and minus these as linear terms.

    coordinator   sends   Move: the clusters' step dw and its length t
    node          moves   theta_i, u_i along its direction, keeps the old point in case the step is refused
    node          sends   Report: value, slope, squared gradient, and its clients eliminated and summed for each cluster
    coordinator   checks  sufficient decrease (Armijo) of the convex objective; halves t, or solves for the next step

A full step that is accepted costs one exchange, and its Report already holds what the next step needs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from covey._typing import Anything, Floats
from covey.errors import ConvergenceWarning, SolverError, listing, warn
from covey.losses import Expansion, Loss
from covey.nodes.messages import Message
from covey.nodes.network import InMemory, Network
from covey.nodes.node import Node
from covey.objective.objective import Objective
from covey.objective.penalty import Penalty
from covey.records import Record, Reply
from covey.solvers.checkpoint import Checkpoint
from covey.solvers.direct.elimination import Quadratic, Spread, descend, eliminate
from covey.solvers.direct.sweep import solve_top, sweep_across
from covey.solvers.ledger import Ledger, quadratic_links
from covey.solvers.result import HISTORY, Convergence, Fit, Progress, certified_gap, entry
from covey.tables.rows import GroupedData

_ARMIJO = 1e-4
_EPS = float(np.finfo(float).eps)
_SHORTEST = 1e-12


# What travels


@dataclass(frozen=True)
class NewtonBegin(Message["NewtonReport"], label="newton begin"):
    """begin where you are, each client held by the force from its cluster at ``w (k, d)``."""

    w: Floats

    def at(self, node: Node) -> NewtonReport:
        theta = node.coefficients()
        force = node.gamma[:, None] * (theta - node.data.hierarchy.down(self.w))
        state, report = node_start(LocalProblem.of(node), theta, force)
        node.keep(state)
        return report


@dataclass(frozen=True)
class NewtonStep(Message["NewtonReport"], label="newton step"):
    """go ``length`` along the direction that ``dw (k, d)`` implies; from the old point if ``retry``."""

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
    """sums over a node's clients, for each cluster where they have a cluster."""

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
    """One point of the way: exchanges are those so far."""

    iteration: int
    value: float
    norm: float
    exchanges: int


@dataclass(frozen=True)
class NewtonProgress(Record):
    """Where the coordinator is: the upper levels, a bound on the curvature, the way so far, and what decides when to stop."""

    top: UpperLevels
    mu: float
    path: tuple[PathPoint, ...] = ()
    stalled: int = 0
    adrift: int = 0


Keep = Callable[[int, NewtonProgress], None]


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
    """Run Newton against ``ask``, which sends a request to all nodes and adds up their reports.

    Returns the last stage, the account, and which terms have no finite optimum. With ``fixed`` the global model stays where it
    is. ``keep`` is told each stage on the way; a run can go on from any of them.
    """
    top, mu, stalled, adrift = stage.top, stage.mu, stage.stalled, stage.adrift
    value = report.value + 0.5 * float((spread.moved(top.v) * top.v).sum())
    norm = _gradient_norm(report, top, fixed)
    step = _newton_step(report, top, spread, fixed)
    path = list(stage.path) or [PathPoint(0, value, norm, 1)]
    iterations, exchanges = path[-1].iteration, path[-1].exchanges

    # Where classes are separated the gradient vanishes while the coefficients go on growing: a few more steps will tell.
    while (norm > tol or _runaway(step, top).any()) and stalled < 2 and adrift < 3 and iterations < max_iter:
        length, retry = 1.0, False
        while True:
            trial = ask(NewtonStep(step.w, length, retry))
            exchanges += 1
            there = top.moved(step, length)
            slope = trial.slope + float((spread.moved(top.v) * step.v).sum())
            reached = trial.value + 0.5 * float((spread.moved(there.v) * there.v).sum())
            noise = 16 * _EPS * abs(value)
            if reached <= value + _ARMIJO * length * slope + noise:
                break
            length, retry = 0.5 * length, True
            if length < _SHORTEST and norm <= tol:
                break  # the gradient has vanished and nothing is left to gain, in classes that are separated
            if length < _SHORTEST:
                raise SolverError(
                    f"Newton found no decrease along its direction (objective {value:.6g}, gradient norm {norm:.1e}); the "
                    "columns are probably on very different scales: standardise them."
                )
        # Once a step changes the objective by no more than its rounding, only a falling gradient counts as progress.
        reached_norm = _gradient_norm(trial, there, fixed)
        stalled = stalled + 1 if abs(slope) <= noise and reached_norm > 0.5 * norm else 0
        report, top, value, norm = trial, there, reached, reached_norm
        step = _newton_step(report, top, spread, fixed)
        adrift = adrift + 1 if norm <= tol else 0
        iterations += 1
        path.append(PathPoint(iterations, value, norm, exchanges))
        if keep is not None:
            keep(NewtonProgress(top, mu, tuple(path), stalled, adrift))

    message = f"gradient norm {norm:.1e} after {iterations} Newton steps"
    if norm > tol:
        limit = "as small as float64 allows" if stalled >= 2 else f"above the tolerance {tol:.1e}; raise max_iter"
        message = f"{message}, {limit}"
    converged = norm <= tol or stalled >= 2
    runaway = _runaway(step, top) if norm <= tol else np.zeros_like(top.wbar, dtype=bool)
    if spread.detached.all() and not fixed:
        top = replace(top, wbar=top.w.mean(axis=0))
    # The bound is one on the clients' gradient, with the levels above at their best; else it would bound too little.
    balanced = _upper_residual(report, top, fixed) <= 1e-10 * (1.0 + float(np.linalg.norm(report.force)))
    gap = certified_gap(norm, mu) if balanced and not fixed else None
    account = Convergence("newton", converged, iterations, exchanges, value, norm, gap, message)
    return NewtonProgress(top, mu, tuple(path), stalled, adrift), account, runaway


def _newton_step(report: NewtonReport, top: UpperLevels, spread: Spread, fixed: bool) -> UpperLevels:
    seen = replace(report.seen, r=report.seen.r + report.force - top.v)
    stay = (lambda step, *_: 0.0 * step) if fixed else None
    dw, dv, dwbar = solve_top(seen, spread, own=top.v.sum(axis=0), settle=stay)
    return UpperLevels(dw, dv, dwbar)


def _gradient_norm(report: NewtonReport, top: UpperLevels, fixed: bool) -> float:
    return float(np.sqrt(report.gradient_squared + _upper_residual(report, top, fixed) ** 2))


def _upper_residual(report: NewtonReport, top: UpperLevels, fixed: bool) -> float:
    """The norm of the gradient in ``w`` and, unless it is fixed, ``wbar``."""
    clusters, whole = top.v - report.force, top.v.sum(axis=0) * (not fixed)
    return float(np.sqrt((clusters**2).sum() + (whole**2).sum()))


def _runaway(step: UpperLevels, top: UpperLevels) -> Anything:
    """Which terms the next full step would still move by more than a thousandth: mask ``(d,)``."""
    here, ahead = (np.abs(np.vstack([at.w, at.wbar])).max(axis=0) for at in (top, step))
    # A coefficient that is zero but for rounding moves by all of itself and means nothing.
    return np.asarray((ahead > 1e-3 * here) & (ahead > 1e-9 * here.max()) & (ahead > 1e-10))


def newton_across(
    network: Network,
    penalty: Penalty,
    *,
    start: Fit | None = None,
    centre: Floats | None = None,
    tol: float = 1e-8,
    max_iter: int = 100,
    keep: Keep | None = None,
    resume: Callable[[int], tuple[NewtonReport, NewtonProgress] | None] = lambda _: None,
) -> Fit:
    """Newton over any network, its nodes beginning where they are; the clients' models stay at their nodes.

    ``start`` is where the upper levels are, zero by default; ``keep`` is told of each step; ``resume`` may know a stage to go
    on from. Both are told how many exchanges went before the first step.
    """
    d, before = len(network.terms), 0
    if start is None and network.loss.linear_start:
        start, before = _from_the_counts(network, penalty), 1
    report, stage = resume(before) or _begin(network, penalty, start, centre)
    limits: dict[str, Any] = {"tol": tol, "max_iter": max_iter, "fixed": centre is not None}
    told = None if keep is None else partial(keep, before)
    stage, account, runaway = coordinate(network.ask, report, stage, Spread.of_penalty(penalty.lam, d), **limits, keep=told)
    account = replace(account, exchanges=account.exchanges + before)
    history, ledger = _told(network, stage, before)
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
    return Fit(np.empty((0, d)), stage.top.w, stage.top.wbar, account, history, ledger)


def _from_the_counts(network: Network, penalty: Penalty) -> Fit:
    """From zero, large counts or exposures would take Newton hundreds of steps: exp grows out of any quadratic's reach."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # a start need not be exact
        return sweep_across(network, penalty, logs=True)


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


# In memory: one node that holds everybody


def newton(
    data: GroupedData,
    loss: Loss,
    penalty: Penalty,
    *,
    start: Fit | None = None,
    centre: Floats | None = None,
    tol: float = 1e-8,
    max_iter: int = 100,
    checkpoint: str | Path | None = None,
    progress: Progress | None = None,
) -> Fit:
    """The minimiser for any loss, to a gradient norm below ``tol``.

    Parameters
    ----------
    start : coefficients to begin at, such as those of a nearby penalty; by default zero, or for counts their logs
    centre : (d,) the global model, if it is known; the others are then the best given it
    checkpoint : file to write after each step; a run that finds its own goes on from it, to the same bits
    progress : called after each step with the iteration, the objective and the gradient norm

    >>> from covey import GroupedData, Penalty
    >>> from covey.losses import Poisson
    >>> data = GroupedData.from_arrays([[1.0]] * 4, [1, 3, 0, 9], ["a", "a", "b", "c"], ["x", "x", "x", "y"])
    >>> fit = newton(data, Poisson(), Penalty.of(data.hierarchy))
    >>> fit.convergence.converged, fit.theta.ravel().round(3).tolist()
    (True, [0.645, -0.291, 2.133])
    """
    theta = None if start is None else start.theta
    network = InMemory.of(data, loss, penalty.gamma, theta)
    nowhere = np.zeros((data.n_clients, data.n_terms))
    place = Checkpoint.at(checkpoint, {"solver": "newton"}, Objective(data, loss, penalty), nowhere if theta is None else theta)

    def keep(before: int, stage: NewtonProgress) -> None:
        end = stage.path[-1]
        place.write(stage, network.node)
        if progress is not None:
            progress(end.iteration, end.value, end.norm)

    def resume(before: int) -> tuple[NewtonReport, NewtonProgress] | None:
        found = place.read()
        if found is None or not isinstance(found.progress, NewtonProgress):
            return None
        network.node.restore(found.node)
        return _reported(network.node, found.progress.mu), found.progress

    fit = newton_across(network, penalty, start=start, centre=centre, tol=tol, max_iter=max_iter, keep=keep, resume=resume)
    return replace(fit, theta=network.node.coefficients())


def _reported(node: Node, mu: float) -> NewtonReport:
    """The report on the point where a node is."""
    state = node.state(NewtonState)
    still = np.zeros_like(state.dtheta)
    return _report(LocalProblem.of(node), state.now, still, still, state.now, mu)


def _told(over: Network, stage: NewtonProgress, before: int) -> tuple[pl.DataFrame, Ledger]:
    """The way as a history, and what it cost; every exchange is one of the whole network."""
    network = quadratic_links(over.tree.sizes, len(over.terms))
    everybody = np.ones(over.tree.n_clusters, dtype=np.int64)
    rows, ledger = [], network.nothing
    for step in stage.path:
        ledger = network.count((step.exchanges + before) * everybody, step.exchanges + before)
        rows.append(entry(step.iteration, step.value, step.norm, certified_gap(step.norm, stage.mu), ledger))
    return pl.DataFrame(rows, schema=HISTORY), ledger
