"""Damped Newton for any loss: each step is one sweep with the clients' Hessians, so a fit takes a few exchanges.

The state holds forces, ``u_i = gamma_i (theta_i - w_j)`` and ``v_j = lam_j (w_j - wbar)``, so that nothing cancels under large
penalties. The gradient of the multi-task objective, Equation 2.3 (mtl_loss) of arXiv:2204.13619, is in these terms

    e_i = grad f_i(theta_i) + u_i        client i
    v_j - sum_{i in j} u_i               cluster j
    - sum_j v_j                          global

and the Newton step is the sweep with ``A_i`` the Hessian of ``f_i`` and minus these gradients as linear terms.

    coordinator -> node    NewtonStep: the clusters' step dw and its length t
    node                   moves theta_i and u_i along its direction; keeps the old point in case the step is refused
    node -> coordinator    NewtonReport: value, slope, squared gradient, its clients eliminated and summed for each cluster
    coordinator            checks sufficient decrease (Armijo) of the convex objective; halves t, or solves for the next step

A full step that is accepted costs one exchange, because its report already holds what the next step needs. This module is the
coordinator; :mod:`.newton_node` has the messages and the nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from operator import add
from pathlib import Path

import numpy as np

from covey._typing import Anything, Floats
from covey.errors import SolverError, listing, warn
from covey.nodes.network import InMemory, Network
from covey.objective.objective import Penalty
from covey.records import Record
from covey.solvers.direct.elimination import MANY, Spread
from covey.solvers.direct.james_stein import factor_of, shrunk
from covey.solvers.direct.newton_node import NewtonBegin, NewtonReport, NewtonStep, ReportAgain
from covey.solvers.direct.sweep import one_sweep, solve_top
from covey.solvers.registry import algorithm
from covey.solvers.result import Checkpoint, Convergence, Fit, Progress, after, begin_at, certified_gap, direct_history

_ARMIJO = 1e-4
_EPS = float(np.finfo(float).eps)
_SHORTEST = 1e-12
_SAMPLE = 16
_WORTH_SAMPLING = 1024, 1 << 20  # numbers of clients and of numbers in their rows


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
    """Value and gradient norm after an iteration, and the exchanges so far."""

    iteration: int
    value: float
    norm: float
    exchanges: int


@dataclass(frozen=True)
class NewtonProgress(Record):
    """The state of the coordinator: upper levels, a bound on the curvature, the path so far, and two counters for stopping.

    ``stalled`` counts steps in a row that rounding kept from making progress. ``adrift`` counts steps in a row after which the
    gradient was below the tolerance while coefficients still grew.
    """

    top: UpperLevels
    mu: float
    path: tuple[PathPoint, ...] = ()
    stalled: int = 0
    adrift: int = 0


@dataclass(frozen=True)
class Iterate:
    """A point that all nodes have reported on; with ``fixed`` the global model does not move."""

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
        """A bound on the rounding error of the value."""
        return 16 * _EPS * abs(self.value)

    @property
    def runaway(self) -> Anything:
        """Which terms the next full step would still change by more than a thousandth: mask ``(d,)``."""
        here, ahead = (np.abs(np.vstack([at.w, at.wbar])).max(axis=0) for at in (self.top, self.step))
        # A coefficient that is zero up to rounding changes by all of itself, which means nothing.
        return np.asarray((ahead > 1e-3 * here) & (ahead > 1e-9 * here.max()) & (ahead > 1e-10))


def coordinate(
    ask: Callable[[NewtonStep], NewtonReport],
    report: NewtonReport,
    progress: NewtonProgress,
    spread: Spread,
    *,
    tol: float,
    max_iter: int,
    fixed: bool = False,
    keep: Callable[[NewtonProgress], None] | None = None,
) -> tuple[NewtonProgress, Convergence, Anything]:
    """Run Newton; ``ask`` sends a message to all nodes and adds up their reports.

    Returns the last progress, how the run ended, and which terms have no finite optimum. With ``fixed`` the global model does
    not move. ``keep`` is called with the progress after each step; a run can continue from any of them.
    """
    here = Iterate(report, progress.top, spread, fixed)
    if not progress.path:
        progress = replace(progress, path=(PathPoint(0, here.value, here.norm, 1),))
    while progress.path[-1].iteration < max_iter and progress.stalled < 2:
        # If classes are separated, the gradient vanishes while coefficients grow without bound: three more steps show that.
        if here.norm <= tol and (progress.adrift >= 3 or not here.runaway.any()):
            break
        there, slope, asked = _line_search(ask, here, tol)
        # If a step changes the objective by no more than rounding, only a falling gradient counts as progress.
        stalled = progress.stalled + 1 if abs(slope) <= here.rounding and there.norm > 0.5 * here.norm else 0
        adrift = progress.adrift + 1 if there.norm <= tol else 0
        last, here = progress.path[-1], there
        point = PathPoint(last.iteration + 1, here.value, here.norm, last.exchanges + asked)
        progress = NewtonProgress(here.top, progress.mu, (*progress.path, point), stalled, adrift)
        if keep is not None:
            keep(progress)
    return _ended(here, progress, tol)


def _line_search(ask: Callable[[NewtonStep], NewtonReport], here: Iterate, tol: float) -> tuple[Iterate, float, int]:
    """Take Newton's step, halved until the objective falls enough; returns the new point, the slope and the exchanges."""
    length, asked = 1.0, 0
    while True:
        trial = ask(NewtonStep(here.step.w, length, retry=asked > 0))
        asked += 1
        there = Iterate(trial, here.top.moved(here.step, length), here.spread, here.fixed)
        slope = trial.slope + float((here.spread.moved(here.top.v) * here.step.v).sum())
        enough = there.value <= here.value + _ARMIJO * length * slope + here.rounding
        length = 0.5 * length
        # If the gradient has vanished, as in separated classes, no step lowers the objective and the last one will do.
        if enough or (length < _SHORTEST and here.norm <= tol):
            return there, slope, asked
        if length < _SHORTEST:
            raise SolverError(
                f"Newton found no decrease along its direction (objective {here.value:.6g}, gradient norm {here.norm:.1e}); "
                "the columns are probably on very different scales: standardise them."
            )


def _ended(here: Iterate, progress: NewtonProgress, tol: float) -> tuple[NewtonProgress, Convergence, Anything]:
    end, top = progress.path[-1], progress.top
    message = f"gradient norm {here.norm:.1e} after {end.iteration} Newton steps"
    if here.norm > tol:
        limit = "as small as float64 allows" if progress.stalled >= 2 else f"above the tolerance {tol:.1e}; raise max_iter"
        message = f"{message}, {limit}"
    converged = here.norm <= tol or progress.stalled >= 2
    runaway = here.runaway if here.norm <= tol else np.zeros_like(top.wbar, dtype=bool)
    if here.spread.detached.all() and not here.fixed:
        top = replace(top, wbar=top.w.mean(axis=0))
    # The bound uses the clients' gradient. It holds only if the levels above are at their best.
    balanced = here.upper_residual <= 1e-10 * (1.0 + float(np.linalg.norm(here.report.force)))
    gap = certified_gap(here.norm, progress.mu) if balanced and not here.fixed else None
    account = Convergence("newton", converged, end.iteration, end.exchanges, here.value, here.norm, gap, message)
    return replace(progress, top=top), account, runaway


@algorithm(place=2, refuses={"participation": "a Newton step needs the sums of every cluster; use solver='l2gd'."})
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
    """Minimise the objective for any loss by damped Newton.

    Parameters
    ----------
    network : Network
        The nodes that hold the clients' rows.
    penalty : Penalty
        ``gamma (n,)`` and ``lam (k,)``.
    centre : (d,) array, optional
        A given global model. The other models are then the best ones given it.
    start : Fit, optional
        A fit to begin at, such as that of a nearby penalty. By default Newton begins at zero, or for counts at a linear model
        of their logs.
    tol : float
        Gradient norm at which Newton stops.
    max_iter : int
        Largest number of Newton steps.
    checkpoint : path, optional
        File to write after each step. A run whose checkpoint exists continues from it, to the same bits.
    james_stein : bool
        Whether to shrink the global model (:mod:`covey.solvers.direct.james_stein`).
    progress : callable, optional
        Called after each step with the iteration, the objective and the gradient norm.

    Returns
    -------
    Fit
        Models of all levels, with a history and a ledger of the exchanges.

    Examples
    --------
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

    def keep(now: NewtonProgress) -> None:
        end = now.path[-1]
        saved.write(now)
        if progress is not None:
            progress(end.iteration, end.value, end.norm)

    before = 0
    if start is None and network.loss.linear_start:
        # From zero, large counts or exposures would take hundreds of steps, because exp grows faster than any quadratic.
        start, before = one_sweep(network, penalty, logs=True), 1
    elif start is None and checkpoint is None:
        start = _sampled(network, penalty, centre)
        before = 0 if start is None else start.convergence.exchanges
    report, begun = _resumed(saved) or _begin(network, penalty, start, centre)
    spread, fixed = Spread.of_penalty(penalty.lam, len(network.terms)), centre is not None
    last, account, runaway = coordinate(network.ask, report, begun, spread, tol=tol, max_iter=max_iter, fixed=fixed, keep=keep)
    account = replace(account, exchanges=account.exchanges + before)
    path = [(point.iteration, point.value, point.norm, point.exchanges + before) for point in last.path]
    separated = runaway.any() and network.loss.curvature[0] == 0.0
    if separated:
        terms = listing(np.array(network.terms)[runaway].tolist(), 3)
        message = (
            f"{account.message}; the responses are perfectly separated along {terms}: the coefficients grow without bound and "
            "were stopped where the gradient vanished; drop terms, merge categories or set ridge="
        )
        account = replace(account, message=message)
    if separated or not account.converged:
        warn(account.message)
    fit = Fit.of(network, last.top.w, last.top.wbar, account, *direct_history(network, path, last.mu))
    return _shrink(network, penalty, fit, tol, max_iter, progress) if james_stein else fit


def _shrink(network: Network, penalty: Penalty, fit: Fit, tol: float, max_iter: int, progress: Progress | None) -> Fit:
    """Shrink the global model of a fit by James-Stein, and fit the other models given it."""
    factor = factor_of(network, penalty, fit)
    second = newton(network, penalty, factor * fit.wbar, start=fit, tol=tol, max_iter=max_iter, progress=progress)
    both = after(fit, second)
    end = both.convergence
    message = f"gradient norm {end.gradient_norm:.1e} after {end.iterations} Newton steps"
    return shrunk(replace(both, convergence=replace(end, message=message)) if end.converged else both, factor)


def _resumed(saved: Checkpoint) -> tuple[NewtonReport, NewtonProgress] | None:
    """The saved progress, and the report of the nodes where it was saved."""
    progress = saved.resume(NewtonProgress)
    if progress is None:
        return None
    return reduce(add, saved.network.every(ReportAgain(progress.mu))), progress


def _sampled(network: Network, penalty: Penalty, centre: Floats | None) -> Fit | None:
    """Coefficients to begin at if there are many clients with few terms: the fit to every ``_SAMPLE``-th of them.

    Its steps cost next to nothing, and some of the steps with all clients are then unnecessary. None if the clients are few or
    in several nodes, or if the sample has no finite optimum.
    """
    node = network.clients()
    if node is None or node.theta is not None or network.loss.quadratic or len(network.terms) > MANY:
        return None
    if node.data.n_clients < _WORTH_SAMPLING[0] or node.data.X.size < _WORTH_SAMPLING[1]:
        return None
    part = InMemory.of(node.data.every(_SAMPLE), node.loss, np.ascontiguousarray(node.gamma[::_SAMPLE]))
    report, begun = _begin(part, penalty, None, centre)
    spread = Spread.of_penalty(penalty.lam, len(network.terms))
    tol = 1e-3 * float(np.sqrt(report.gradient_squared))
    last, account, runaway = coordinate(part.ask, report, begun, spread, tol=tol, max_iter=20, fixed=centre is not None)
    if not account.converged or runaway.any():
        return None
    node.theta = network.tree.down(last.top.w)
    return Fit(node.theta, last.top.w, last.top.wbar, account)


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
