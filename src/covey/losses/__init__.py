"""Losses, one family per file: Gaussian, Bernoulli (logit link), Poisson and gamma (log link), and user-defined losses.

Importing a file registers its family. This package imports every file in its folder.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from covey.losses.base import FAMILIES, Expansion, Loss, Reduction, family_of, loss_of
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
