"""Solvers, one file each: ``sweep`` (exact, Gaussian) and ``newton`` (any loss). ``solve`` picks one by name."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Literal

from covey.data import GroupedData
from covey.errors import ConvergenceWarning, one_of
from covey.losses import Loss
from covey.objective import Penalty
from covey.solvers.al2sgd_plus import al2sgd_plus
from covey.solvers.l2gd import l2gd
from covey.solvers.newton import newton
from covey.solvers.one_coin import one_coin
from covey.solvers.result import Convergence, Fit, Progress
from covey.solvers.sweep import sweep

Solver = Literal["auto", "sweep", "newton"]
SOLVERS = ("auto", "sweep", "newton")

__all__ = [
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
    max_iter: int = 100,
    progress: Progress | None = None,
) -> Fit:
    """Minimise the objective; ``auto`` takes the sweep for a Gaussian loss and Newton for any other."""
    if solver not in SOLVERS:
        raise one_of("solver", solver, SOLVERS)
    if solver == "sweep" or (solver == "auto" and loss.name == "gaussian"):
        return _refined(data, loss, penalty, tol)
    return newton(data, loss, penalty, start=start, tol=tol, max_iter=max_iter, progress=progress)


def _refined(data: GroupedData, loss: Loss, penalty: Penalty, tol: float) -> Fit:
    """One sweep; where columns on very different scales leave a residual, further sweeps for it until rounding stops them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        fit = sweep(data, loss, penalty)
        if fit.convergence.converged:
            return fit
        finer = newton(data, loss, penalty, start=fit, tol=tol, max_iter=20)
    end = finer.convergence
    exchanges = fit.convergence.exchanges + end.exchanges
    message = f"solved in {exchanges} exchanges, rounding of the first refined away, gradient norm {end.gradient_norm:.1e}"
    if not end.converged:
        message = f"{end.message}; the columns are on very different scales: standardise them"
        warnings.warn(message, ConvergenceWarning, stacklevel=3)
    return replace(finer, convergence=replace(end, solver="sweep", exchanges=exchanges, message=message))
