"""Losses: Gaussian, Bernoulli (logit) and Poisson (log), each summed or averaged over a client's rows."""

from __future__ import annotations

from covey.errors import one_of
from covey.losses.base import Expansion, Loss, Reduction
from covey.losses.bernoulli import Bernoulli
from covey.losses.gaussian import Gaussian
from covey.losses.poisson import Poisson

FAMILIES: dict[str, type[Loss]] = {loss.name: loss for loss in (Gaussian, Bernoulli, Poisson)}

__all__ = ["FAMILIES", "Bernoulli", "Expansion", "Gaussian", "Loss", "Poisson", "Reduction", "loss_of"]


def loss_of(family: str, reduction: Reduction = "sum", ridge: float = 0.0) -> Loss:
    """The loss of a family by name.

    >>> loss_of("poisson").name
    'poisson'
    """
    if family not in FAMILIES:
        raise one_of("family", family, FAMILIES)
    return FAMILIES[family](reduction, ridge)
