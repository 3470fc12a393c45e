"""The space in which each client is solved: :func:`space_of` decides, and nothing else does.

With ``d`` terms of which the first ``q`` vary between clients:

    terms      few terms: a client has its whole Hessian                                 :class:`.WholeHessians`
    leading    some terms are shared: the rows of the Hessian that belong to the others  :class:`.LeadingHessians`
    rows       many terms vary: a matrix as large as the client's rows, at most d        :class:`.RowSpace`
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from covey._typing import Floats
from covey.losses import Expansion, Loss
from covey.solvers.direct.elimination import MANY
from covey.solvers.direct.hessians import Hessians, LeadingHessians, WholeHessians
from covey.solvers.direct.margins import Grams
from covey.solvers.direct.row_space import RowSpace
from covey.tables.rows import GroupedData

Space = Literal["terms", "leading", "rows"]

_FEW = 8  # so few terms cost no more if all of them are treated as varying


def space_of(d: int, q: int) -> Space:
    """The space for clients with ``d`` terms, of which the first ``q`` vary."""
    if q > MANY:
        return "rows"
    return "leading" if q < d and d > _FEW else "terms"


def expand(data: GroupedData, loss: Loss, theta: Floats, q: int) -> Expansion:
    """The losses to second order about ``theta (n, d)``, as :func:`hessians` needs them."""
    return loss.expand(data, theta) if space_of(data.n_terms, q) == "terms" else loss.expand_rows(data, theta)


def hessians(
    data: GroupedData, loss: Loss, here: Expansion, q: int, cache: dict[Any, Any] | None = None, grams: Grams | None = None
) -> Hessians:
    """The Hessians of losses that :func:`expand` expanded; ``cache`` keeps those of the last expansion."""
    if len(here.hessian) or not len(here.curves):
        return WholeHessians(here.hessian)
    last = None if cache is None else cache.get("hessians")
    if last is not None and last[0] is here.curves and last[1] == q:
        found: Hessians = last[2]
        return found
    if space_of(data.n_terms, q) == "rows":
        H: Hessians = RowSpace.of_rows(data, here.curves, loss.ridge, q, grams=grams)
    else:
        H = LeadingHessians.of_rows(data, here.curves, loss.ridge, q)
    if cache is not None:
        cache["hessians"] = here.curves, q, H
    return H


def linear_clients(data: GroupedData, loss: Loss, origin: Floats, q: int) -> RowSpace:
    """The clients of a linear model in row space, with responses about the margins of the coefficients ``origin (d,)``."""
    residual = data.y - data.X @ origin
    residual = residual if data.offset is None else residual - data.offset
    curves = np.ones(data.n_rows) if data.weights is None else data.weights
    if loss.reduction != "sum":
        curves = curves * np.repeat(loss.scale(data), data.rows_per_client)
    return RowSpace.of_rows(data, curves, loss.ridge, q, residual)


def settled(here: Expansion, force: Floats, q: int) -> Floats:
    """The forces on clients, whose shared terms have exactly the force that balances the gradient of their loss.

    Newton's steps do not depend on it: what the shared terms of a client add to the gradient of its cell is the same.
    """
    return force if len(here.hessian) else np.concatenate([force[:, :q], -here.gradient[:, q:]], axis=1)
