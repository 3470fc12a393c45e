"""Losses, one family a file: Gaussian, Bernoulli (logit), Poisson and gamma (log), and losses of one's own.

A family registers itself when its file is imported, and every file of this package is.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from covey.errors import CoveyError
from covey.losses.base import FAMILIES, Expansion, Loss, Reduction
from covey.losses.bernoulli import Bernoulli
from covey.losses.functions import from_functions
from covey.losses.gamma import Gamma
from covey.losses.gaussian import Gaussian
from covey.losses.poisson import Poisson

__all__ = [
    "FAMILIES",
    "Bernoulli",
    "Expansion",
    "Gamma",
    "Gaussian",
    "Loss",
    "Poisson",
    "Reduction",
    "family_of",
    "from_functions",
    "loss_of",
]

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")


def family_of(family: str | Loss) -> type[Loss]:
    """The class of a family, with its traits, by its name or one of its losses.

    >>> family_of("poisson").title
    'Poisson'
    """
    if isinstance(family, Loss):
        return type(family)
    if family not in FAMILIES:
        words = ", ".join(repr(name) for name in FAMILIES)
        raise CoveyError(
            f"The 'family' parameter must be one of {words}. Got {family!r} instead; a loss of one's own is registered with "
            "covey.losses.from_functions first, in every process that uses it."
        )
    return FAMILIES[family]


def loss_of(family: str, reduction: Reduction = "sum", ridge: float = 0.0) -> Loss:
    """The loss of a family by name.

    >>> loss_of("poisson").name
    'poisson'
    """
    return family_of(family)(reduction, ridge)
