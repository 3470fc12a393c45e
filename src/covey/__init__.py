"""covey: a model for every client, every known cluster of clients and the whole network at once.

Names load when they are first used, so that ``covey --help`` need not wait for numba and scikit-learn.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from covey._version import __version__ as __version__

if TYPE_CHECKING:
    from covey import datasets
    from covey.errors import ConvergenceWarning, CoveyError
    from covey.estimators import (
        HierarchicalClassifier,
        HierarchicalGammaRegressor,
        HierarchicalPoissonRegressor,
        HierarchicalRegressor,
        load,
    )
    from covey.nodes.network import InMemory
    from covey.objective.objective import Objective, Penalty
    from covey.problem.settings import Spec
    from covey.solvers import al2sgd_plus, l2gd, minimise, newton, one_coin, solve, sweep
    from covey.tables.rows import GroupedData, read_table

_HOMES = {
    "ConvergenceWarning": "covey.errors",
    "CoveyError": "covey.errors",
    "GroupedData": "covey.tables.rows",
    "HierarchicalClassifier": "covey.estimators",
    "HierarchicalGammaRegressor": "covey.estimators",
    "HierarchicalPoissonRegressor": "covey.estimators",
    "HierarchicalRegressor": "covey.estimators",
    "InMemory": "covey.nodes.network",
    "Objective": "covey.objective.objective",
    "Penalty": "covey.objective.objective",
    "Spec": "covey.problem.settings",
    "al2sgd_plus": "covey.solvers",
    "l2gd": "covey.solvers",
    "load": "covey.estimators",
    "minimise": "covey.solvers",
    "newton": "covey.solvers",
    "one_coin": "covey.solvers",
    "plan": "covey.fitting.planning",
    "read_table": "covey.tables.rows",
    "solve": "covey.solvers",
    "sweep": "covey.solvers",
}

__all__ = [
    "ConvergenceWarning",
    "CoveyError",
    "GroupedData",
    "HierarchicalClassifier",
    "HierarchicalGammaRegressor",
    "HierarchicalPoissonRegressor",
    "HierarchicalRegressor",
    "InMemory",
    "Objective",
    "Penalty",
    "Spec",
    "al2sgd_plus",
    "datasets",
    "l2gd",
    "load",
    "minimise",
    "newton",
    "one_coin",
    "plan",
    "read_table",
    "solve",
    "sweep",
]


def __getattr__(name: str) -> Any:
    if name == "datasets":
        return import_module("covey.datasets")
    if name not in _HOMES:
        raise AttributeError(f"module 'covey' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
