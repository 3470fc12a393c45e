"""Solvers, one file each: ``sweep`` (exact, Gaussian) and ``newton`` (any loss). ``solve`` picks one by name."""

from __future__ import annotations

from typing import Literal

from covey.data import GroupedData
from covey.errors import one_of
from covey.losses import Loss
from covey.objective import Penalty
from covey.solvers.newton import Progress, newton
from covey.solvers.result import Convergence, Fit
from covey.solvers.sweep import sweep

Solver = Literal["auto", "sweep", "newton"]
SOLVERS = ("auto", "sweep", "newton")

__all__ = ["SOLVERS", "Convergence", "Fit", "Progress", "Solver", "newton", "solve", "sweep"]


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
        return sweep(data, loss, penalty)
    return newton(data, loss, penalty, start=start, tol=tol, max_iter=max_iter, progress=progress)
