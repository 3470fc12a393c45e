"""What a solver leaves behind: the three levels of models, and an honest account of how well they solve the problem."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import polars as pl

from covey._typing import Floats
from covey.solvers.ledger import Ledger

Progress = Callable[[int, float, float], None]
"""Called now and then with the iteration, the objective and the gradient norm."""


@dataclass(frozen=True)
class Convergence:
    """How the solver stopped.

    Attributes
    ----------
    solver : its name
    converged : whether the gradient is below the tolerance, or as small as float64 allows
    iterations, exchanges : steps taken; messages up and down that a network would have needed
    objective : the value of the objective at the solution
    gradient_norm : Euclidean norm of the gradient in all clients' coefficients
    gap : ``gradient_norm**2 / (2 mu)``, a bound on the distance to the lowest objective; None without strong convexity
    message : the same in words
    """

    solver: str
    converged: bool
    iterations: int
    exchanges: int
    objective: float
    gradient_norm: float
    gap: float | None
    message: str


@dataclass(frozen=True)
class Fit:
    """Coefficients of every client ``theta (n, d)``, every cluster ``w (k, d)`` and the whole ``wbar (d,)``.

    Iterative solvers also leave their ``history``, a row for each check, and a ``ledger`` of what crossed each link.
    """

    theta: Floats
    w: Floats
    wbar: Floats
    convergence: Convergence
    history: pl.DataFrame | None = None
    ledger: Ledger | None = None


HISTORY = {
    "iteration": pl.Int64,
    "objective": pl.Float64,
    "gap": pl.Float64,
    "certified_gap": pl.Float64,
    "gradient_norm": pl.Float64,
    "exchanges": pl.Int64,
    "exchanges_between": pl.Int64,
    "bytes": pl.Int64,
}
"""A row for each check: ``gap`` is to the minimum where that is known, the last three are what it cost so far."""


def after(first: Fit, second: Fit) -> Fit:
    """The second of two fits, the second begun where the first ended, with the iterations and costs of both."""
    spent, end = first.convergence, second.convergence
    end = replace(end, iterations=spent.iterations + end.iterations, exchanges=spent.exchanges + end.exchanges)
    history, ledger = second.history, second.ledger
    if first.history is not None and history is not None:
        cost = first.history[-1].select("iteration", "exchanges", "exchanges_between", "bytes").row(0, named=True)
        history = pl.concat([first.history, history.with_columns(pl.col(name) + cost[name] for name in cost)])
    if first.ledger is not None and ledger is not None:
        ledger = first.ledger + ledger
    return replace(second, convergence=end, history=history, ledger=ledger)


def entry(
    t: int, value: float, norm: float, certain: float | None, ledger: Ledger, minimum: float | None = None
) -> dict[str, Any]:
    """One row of a history; ``certain`` is a certified gap, if there is one."""
    gaps = None if minimum is None else value - minimum, certain
    spent = ledger.exchanges, int(ledger.between), int(ledger.bytes)
    return dict(zip(HISTORY, (t, value, *gaps, norm, *spent), strict=True))


def certified_gap(gradient_norm: float, mu: float) -> float | None:
    """``|grad|^2 / (2 mu)`` where ``mu > 0``."""
    return gradient_norm**2 / (2 * mu) if mu > 0 else None
