"""Solvers. ``solve`` runs one by its name over any network, ``minimise`` for data in memory.

Each solver is one file: ``direct/sweep.py`` (exact, quadratic losses), ``direct/newton.py`` (any loss), and the randomised
algorithms of the paper (arXiv:2204.13619), ``first_order/l2gd.py``, ``first_order/one_coin.py`` and
``first_order/al2sgd_plus.py``. Their functions, ``f(network, penalty, *, ...) -> Fit``, are names of this package, and
``reference`` maps their names to the algorithms written out. Names load when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from covey.solvers.registry import check_options, find, names

if TYPE_CHECKING:
    from covey.solvers.direct.newton import newton
    from covey.solvers.direct.sweep import sweep
    from covey.solvers.first_order.al2sgd_plus import al2sgd_plus
    from covey.solvers.first_order.l2gd import l2gd
    from covey.solvers.first_order.one_coin import one_coin
    from covey.solvers.result import Convergence, Fit, Progress
    from covey.solvers.solving import minimise, solve

Solver = str
"""The name of a solver, or ``auto``."""

_HOMES = {"Convergence": "result", "Fit": "result", "Progress": "result", "minimise": "solving", "solve": "solving"}

__all__ = [
    "Convergence",
    "Fit",
    "Progress",
    "Solver",
    "al2sgd_plus",
    "check_options",
    "l2gd",
    "minimise",
    "newton",
    "one_coin",
    "solve",
    "sweep",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"covey.solvers.{_HOMES[name]}"), name)
    if name == "reference":
        return {each: find(each).reference for each in names() if find(each).reference is not None}
    if name in names():
        return find(name).run
    raise AttributeError(f"module 'covey.solvers' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "reference"])
