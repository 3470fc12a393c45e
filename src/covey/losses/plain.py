"""The kernels in plain numpy, for losses that are not compiled. Tests compare the compiled kernels with these functions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from covey._typing import Floats
from covey.tables.rows import GroupedData
from covey.tree.hierarchy import segment_sum

if TYPE_CHECKING:
    from covey.losses.base import Loss


def expand(loss: Loss, data: GroupedData, scale: Floats, theta: Floats, order: int) -> tuple[Floats, Floats, Floats]:
    """Return value ``(n,)``, gradient ``(n, d)`` and Hessian ``(n, d, d)`` of each client's loss, without the ridge.

    Derivatives above ``order`` are empty.
    """
    d, X, y, margin = theta.shape[1], data.X, data.y, data.margin(theta)
    weights = np.ones(len(y)) if data.weights is None else data.weights
    value = scale * _sum(weights * loss.values(margin, y), data)
    gradient, hessian = np.empty((0, d)), np.empty((0, d, d))
    if order >= 1:
        gradient = scale[:, None] * _sum((weights * loss.slopes(margin, y))[:, None] * X, data)
    if order >= 2:
        products = X[:, :, None] * X[:, None, :]
        hessian = scale[:, None, None] * _sum((weights * loss.curvatures(margin, y))[:, None, None] * products, data)
    return value, gradient, hessian


def bend(loss: Loss, data: GroupedData, theta: Floats, P: Floats) -> Floats:
    """Return ``sum_l weight_l f'''(margin_l) (x_l' P_i x_l) x_l`` for each client, ``(n, d)``."""
    X, weights = data.X, 1.0 if data.weights is None else data.weights
    size = np.einsum("la,lab,lb->l", X, P[data.client_of_row], X)
    return _sum((weights * loss.thirds(data.margin(theta), data.y) * size)[:, None] * X, data)


def _sum(values: Floats, data: GroupedData) -> Floats:
    return np.asarray(segment_sum(values, data.client_ptr))
