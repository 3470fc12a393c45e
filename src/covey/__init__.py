"""Hierarchical (mixed) models for groups in known clusters, in memory or across sites that keep their rows.

One call fits a model for every group (a school, a county, a patient), for every cluster of groups (a district, a state) and for
the whole. The method is that of "Personalized Federated Learning with Multiple Known Clusters" (Lyu, Hanzely, Kolar 2022,
arXiv:2204.13619), where a group is called a client. Names load when they are first used, so that ``import covey`` is quick.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from covey._version import __version__ as __version__

if TYPE_CHECKING:
    from covey import datasets, losses, solvers
    from covey.errors import ConvergenceWarning, CoveyError
    from covey.estimators import (
        HierarchicalClassifier,
        HierarchicalGammaRegressor,
        HierarchicalPoissonRegressor,
        HierarchicalRegressor,
        fit,
        load,
    )
    from covey.estimators.comparing import compare
    from covey.federation.simulate import simulate_sites
    from covey.fitting.planning import plan
    from covey.nodes.network import InMemory
    from covey.objective.objective import Objective, Penalty
    from covey.problem.problem import Spec
    from covey.tables.files import read_table
    from covey.tables.rows import GroupedData

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
    "compare",
    "datasets",
    "fit",
    "load",
    "losses",
    "plan",
    "read_table",
    "simulate_sites",
    "solvers",
]

_MODULES = {
    "covey.errors": ("ConvergenceWarning", "CoveyError"),
    "covey.estimators.comparing": ("compare",),
    "covey.federation.simulate": ("simulate_sites",),
    "covey.fitting.planning": ("plan",),
    "covey.nodes.network": ("InMemory",),
    "covey.objective.objective": ("Objective", "Penalty"),
    "covey.problem.problem": ("Spec",),
    "covey.tables.files": ("read_table",),
    "covey.tables.rows": ("GroupedData",),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> object:
    if name in ("datasets", "losses", "solvers"):
        return import_module(f"covey.{name}")
    if name not in __all__:
        raise AttributeError(f"module 'covey' has no attribute {name!r}")
    return getattr(import_module(_HOMES.get(name, "covey.estimators")), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
