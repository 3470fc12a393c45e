"""Solvers. :func:`solve` runs one by its name over any network, :func:`minimise` for data in memory.

Each solver is one file: ``direct/sweep.py`` (exact, for quadratic losses), ``direct/newton.py`` (for any loss), the randomised
algorithms of Lyu, Hanzely and Kolar (2022), arXiv:2204.13619, ``first_order/l2gd.py``, ``first_order/one_coin.py`` and
``first_order/al2sgd_plus.py``, and two other methods that usually need fewer exchanges, ``first_order/apgd.py`` and
``first_order/proxskip.py``. Their functions ``f(network, penalty, *, ...) -> Fit`` are names of this package.
``reference`` is a dictionary: it maps the name of each first-order algorithm to the same algorithm in plain numpy. Names are
loaded when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from covey.solvers.registry import find, names

if TYPE_CHECKING:
    from collections.abc import Callable

    from covey._typing import Floats
    from covey.solvers.direct.newton import newton
    from covey.solvers.direct.sweep import sweep
    from covey.solvers.first_order.al2sgd_plus import al2sgd_plus
    from covey.solvers.first_order.apgd import apgd
    from covey.solvers.first_order.l2gd import l2gd
    from covey.solvers.first_order.one_coin import one_coin
    from covey.solvers.first_order.proxskip import proxskip
    from covey.solvers.result import Convergence, Fit, Progress
    from covey.solvers.solving import minimise, solve

    reference: dict[str, Callable[..., Floats]]

_MODULES = {"Convergence": "result", "Fit": "result", "Progress": "result", "minimise": "solving", "solve": "solving"}

__all__ = [
    "Convergence", "Fit", "Progress", "al2sgd_plus", "apgd", "l2gd", "minimise", "newton", "one_coin", "proxskip", "solve",
    "sweep",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"covey.solvers.{_MODULES[name]}"), name)
    if name == "reference":
        return {solver: find(solver).reference for solver in names() if find(solver).reference is not None}
    if name in names():
        return find(name).run
    raise AttributeError(f"module 'covey.solvers' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "reference"])
