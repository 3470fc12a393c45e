"""Gaussian responses: ``loss = (margin - y)^2 / 2``. The noise variance of a row enters as one over its weight."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from covey._typing import Floats
from covey.losses import kernels
from covey.losses.base import Loss
from covey.tables.rows import Place


class Gaussian(Loss):
    """Least squares.

    >>> import numpy as np
    >>> from covey.tables.rows import GroupedData
    >>> data = GroupedData.from_arrays([[1.0], [1.0]], [1.0, 3.0])
    >>> Gaussian().gradient(data, theta=np.zeros((1, 1))).tolist()
    [[-4.0]]
    """

    name: ClassVar[str] = "gaussian"
    code: ClassVar[int] = kernels.GAUSSIAN
    curvature: ClassVar[tuple[float, float]] = (1.0, 1.0)

    def mean(self, margin: Floats) -> Floats:
        return margin

    def residual(self, y: Floats) -> float:
        return 1.0

    def check_values(self, y: Floats, place: Place) -> None:
        """Every finite response will do."""

    def draw(self, margin: Floats, rng: np.random.Generator) -> Floats:
        return margin + rng.standard_normal(len(margin))
