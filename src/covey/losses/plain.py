"""The kernels in plain numpy, for any loss: what losses that are not compiled use, and what tests compare kernels with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from covey._typing import Floats
from covey.tables.rows import GroupedData
from covey.tree.hierarchy import segment_sum

if TYPE_CHECKING:
    from covey.losses.base import Loss


def expand(loss: Loss, data: GroupedData, scale: Floats, theta: Floats, order: int) -> tuple[Floats, Floats, Floats]:
    """Value ``(n,)`` and, for ``order`` 1 and 2, gradient ``(n, d)`` and Hessian ``(n, d, d)``, without a ridge; else empty."""
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
    """``sum_l weight_l f'''(margin_l) (x_l' P_i x_l) x_l`` of each client, ``(n, d)``."""
    X, weights = data.X, 1.0 if data.weights is None else data.weights
    size = np.einsum("la,lab,lb->l", X, P[data.client_of_row], X)
    return _sum((weights * loss.thirds(data.margin(theta), data.y) * size)[:, None] * X, data)


def _sum(values: Floats, data: GroupedData) -> Floats:
    return np.asarray(segment_sum(values, data.client_ptr))
