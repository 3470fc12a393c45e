"""Solvers, one file each, in reading order: ``sweep`` (exact, Gaussian), ``newton`` (any loss), and the paper's algorithms by
coins, ``l2gd``, ``one_coin`` and ``al2sgd_plus``, which share the loop in ``rounds``. ``solve`` picks one by name.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any, Literal

from covey.errors import ConvergenceWarning, SolverError, listing, one_of, warn
from covey.losses import Loss
from covey.nodes.network import InMemory, Network
from covey.objective.objective import Objective
from covey.objective.penalty import Penalty
from covey.solvers.costs import costs, surely_direct
from covey.solvers.direct import james_stein as js
from covey.solvers.direct.newton import NewtonProgress, newton, newton_across
from covey.solvers.direct.sweep import Settle, sweep, sweep_across
from covey.solvers.first_order.al2sgd_plus import al2sgd_plus, al2sgd_plus_across
from covey.solvers.first_order.l2gd import l2gd, l2gd_across
from covey.solvers.first_order.loop import Control, Watch
from covey.solvers.first_order.one_coin import one_coin, one_coin_across
from covey.solvers.result import Convergence, Fit, Progress, after
from covey.solvers.threads import threads_for
from covey.tables.rows import GroupedData

Solver = Literal["auto", "sweep", "newton", "l2gd", "al2sgd_plus", "one_coin"]
SOLVERS = ("auto", "sweep", "newton", "l2gd", "al2sgd_plus", "one_coin")
DIRECT = ("sweep", "newton")
BY_COINS: dict[str, Callable[..., Fit]] = {"l2gd": l2gd, "one_coin": one_coin, "al2sgd_plus": al2sgd_plus}
ACROSS: dict[str, Callable[..., Fit]] = {"l2gd": l2gd_across, "one_coin": one_coin_across, "al2sgd_plus": al2sgd_plus_across}

__all__ = [
    "BY_COINS",
    "DIRECT",
    "SOLVERS",
    "Convergence",
    "Fit",
    "Progress",
    "Solver",
    "al2sgd_plus",
    "l2gd",
    "newton",
    "one_coin",
    "solve",
    "solve_across",
    "sweep",
]


def solve(
    data: GroupedData,
    loss: Loss,
    penalty: Penalty,
    *,
    solver: Solver = "auto",
    start: Fit | None = None,
    tol: float = 1e-8,
    max_iter: int | None = None,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
    james_stein: bool = False,
    progress: Progress | None = None,
) -> Fit:
    """Minimise the objective.

    ``auto`` takes what a network would finish first: the sweep for a Gaussian loss and Newton for any other, unless their d x d
    messages are so large that an algorithm by coins, by its theorem, is done earlier. ``options`` are keywords of those
    algorithms, and ``checkpoint`` of Newton. ``tol`` is the gradient norm at which Newton stops, and the share of the objective
    to which the others have to be certified. With ``james_stein`` the global model is shrunk (see :mod:`.james_stein`) and the
    others are the best given that; it needs the sweep or Newton.
    """
    check_options(solver, options)
    if james_stein:
        js.check(loss, penalty)
        if solver in BY_COINS:
            raise _no_curvature(solver)
        if solver == "auto":
            solver = "sweep" if loss.quadratic else "newton"
    if solver == "auto":
        objective, accuracy = Objective(data, loss, penalty), min(max(tol, 1e-16), 0.5)
        solver = "sweep" if loss.quadratic else "newton"
        if not surely_direct(objective, accuracy=accuracy):
            trial = solve(data, loss, penalty, solver=solver, start=start, tol=tol, max_iter=max_iter, progress=progress)
            best = min(costs(objective, [trial], accuracy=accuracy)[0], key=lambda cost: cost.seconds)
            if best.solver == solver:
                return trial
            solver = best.solver  # type: ignore[assignment]
    if solver in DIRECT:
        network = InMemory.of(data, loss, penalty.gamma)
        limits: dict[str, Any] = {"tol": tol, "max_iter": max_iter}
        with threads_for(data):
            if solver == "newton":
                limits["max_iter"] = max_iter or 100
                fit = newton(data, loss, penalty, start=start, progress=progress, **limits, **(options or {}))
                if not james_stein:
                    return fit
                network.node.theta = fit.theta
                fit = _below_a_shrunk(network, penalty, fit, limits)
            else:
                fit = solve_across(network, penalty, solver=solver, james_stein=james_stein, **limits)
        return replace(fit, theta=network.node.coefficients())
    watch: Watch = {"seed": seed, "tol": tol, "max_iter": max_iter, "progress": progress}
    watch["start"] = None if start is None else start.theta
    return BY_COINS[solver](data, loss, penalty, **{**watch, **(options or {})})


def solve_across(
    network: Network,
    penalty: Penalty,
    *,
    solver: Solver = "auto",
    tol: float = 1e-8,
    max_iter: int | None = None,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
    james_stein: bool = False,
    progress: Progress | None = None,
) -> Fit:
    """Minimise the objective of any network, from where its nodes are; the clients' models stay there.

    ``auto`` is the sweep for a Gaussian loss and Newton for any other. Of the algorithms by coins, ``options`` are keywords.
    Which node holds which client changes no bit of their result, and of the others' no more than rounding.
    """
    check_options(solver, options)
    if solver in ACROSS:
        if james_stein:
            raise _no_curvature(solver)
        own, watch = dict(options or {}), {"seed": seed, "tol": tol, "max_iter": max_iter, "progress": progress}
        watch |= {each.name: own.pop(each.name) for each in fields(Control) if each.name in own}
        return ACROSS[solver](network, penalty, Control.of(solver, watch), **own)  # type: ignore[arg-type]
    if james_stein:
        js.check(network.loss, penalty)
    if solver == "auto":
        solver = "sweep" if network.loss.quadratic else "newton"
    if solver == "sweep":
        shrink = js.Shrink(penalty, network.tree) if james_stein else None
        fit = _refined(network, penalty, tol, shrink)
        return fit if shrink is None else _shrunk(fit, shrink.factor)

    def keep(_: int, stage: NewtonProgress) -> None:
        if progress is not None:
            end = stage.path[-1]
            progress(end.iteration, end.value, end.norm)

    limits: dict[str, Any] = {"tol": tol, "max_iter": max_iter or 100, "keep": keep}
    fit = newton_across(network, penalty, **limits)
    return _below_a_shrunk(network, penalty, fit, limits) if james_stein else fit


def _no_curvature(solver: str) -> SolverError:
    return SolverError(f"james_stein=True needs the curvature that {solver!r} never sees; use solver='auto'.")


def _below_a_shrunk(network: Network, penalty: Penalty, fit: Fit, limits: dict[str, Any]) -> Fit:
    """Shrink the global model of a fit, and put the others where they are best given that."""
    factor = js.factor_of(network, penalty, fit)
    both = after(fit, newton_across(network, penalty, start=fit, centre=factor * fit.wbar, **limits))
    end = both.convergence
    message = f"gradient norm {end.gradient_norm:.1e} after {end.iterations} Newton steps"
    return _shrunk(replace(both, convergence=replace(end, message=message)) if end.converged else both, factor)


def _shrunk(fit: Fit, factor: float) -> Fit:
    message = f"{fit.convergence.message}; of the global model James-Stein keeps {100 * factor:.3g}%"
    return replace(fit, convergence=replace(fit.convergence, message=message))


def check_options(solver: str, options: Mapping[str, Any] | None) -> None:
    """Refuse a solver that is not there, and options it does not know."""
    if solver not in SOLVERS:
        raise one_of("solver", solver, SOLVERS)
    if options is not None and not isinstance(options, Mapping):
        raise SolverError(f"The 'options' parameter must map names to values. Got {options!r} instead.")
    known = {"checkpoint"} if solver == "newton" else set()
    if solver in BY_COINS:
        named = inspect.signature(BY_COINS[solver]).parameters.values()
        known = {each.name for each in named if each.kind is each.KEYWORD_ONLY}
        known |= {each.name for each in fields(Control)} - {"seed", "tol", "max_iter", "progress", "start"}
    unknown = [name for name in options or {} if name not in known]
    own = [name for name in unknown if name in ("seed", "tol", "max_iter")]
    if own:
        raise SolverError(f"{own[0]!r} is no option of a solver but a parameter beside it; give it there.")
    if unknown:
        takes = f"takes {listing(sorted(known), 20)}" if known else "takes no options"
        raise SolverError(f"The solver {solver!r} has no option {unknown[0]!r}; it {takes}.")


def _refined(network: Network, penalty: Penalty, tol: float, settle: Settle | None) -> Fit:
    """One sweep; where columns on very different scales leave a residual, further sweeps for it until rounding stops them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        fit = sweep_across(network, penalty, settle=settle)
        if fit.convergence.converged:
            return fit
        centre = None if settle is None else fit.wbar
        finer = newton_across(network, penalty, start=fit, centre=centre, tol=tol, max_iter=20)
    finer = after(fit, finer)
    end = finer.convergence
    message = f"solved in {end.exchanges} exchanges, rounding of the first refined away, gradient norm {end.gradient_norm:.1e}"
    if not end.converged:
        message = f"{end.message}; the columns are on very different scales: standardise them"
        warn(message)
    return replace(finer, convergence=replace(end, solver="sweep", message=message))
