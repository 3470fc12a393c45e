"""Gaussian responses: ``loss = (margin - y)^2 / 2``. The noise variance of a row enters as one over its weight."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from scipy import special

from covey._typing import Floats
from covey.losses import kernels
from covey.losses.base import Link, Loss
from covey.tables.rows import GroupedData


class Gaussian(Loss):
    """Least squares.

    Parameters
    ----------
    reduction : "sum" or "mean", optional
        Whether the loss of a client is the sum (default) or the weighted mean over its rows.
    ridge : float, optional
        Adds ``ridge/2 |theta_i|^2`` to the loss of every client. The default is 0.

    Examples
    --------
    >>> import numpy as np
    >>> from covey import GroupedData
    >>> data = GroupedData.from_arrays([[1.0], [1.0]], [1.0, 3.0])
    >>> Gaussian().gradient(data, theta=np.zeros((1, 1))).tolist()
    [[-4.0]]
    """

    name: ClassVar[str] = "gaussian"
    title: ClassVar[str] = "linear"
    error_name: ClassVar[str] = "root mean squared error"
    code: ClassVar[int | None] = kernels.GAUSSIAN
    curvature: ClassVar[tuple[float, float]] = (1.0, 1.0)
    third_per_second: ClassVar[float] = 0.0
    link: ClassVar[Link | None] = "identity"
    reml: ClassVar[bool] = True
    dispersion: ClassVar[bool] = True
    private_rounds: ClassVar[int] = 2  # the second release starts nearer to the minimum, so that it clips fewer rows

    def mean(self, margin: Floats) -> Floats:
        return margin

    def values(self, margin: Floats, y: Floats) -> Floats:
        return np.asarray(0.5 * (margin - y) ** 2)

    def slopes(self, margin: Floats, y: Floats) -> Floats:
        return np.asarray(margin - y)

    def curvatures(self, margin: Floats, y: Floats) -> Floats:
        return np.ones_like(margin)

    def thirds(self, margin: Floats, y: Floats) -> Floats:
        return np.zeros_like(margin)

    def residual(self, y: Floats, dispersion: float = 1.0) -> float:
        return dispersion

    def draw(self, margin: Floats, rng: np.random.Generator, dispersion: float = 1.0) -> Floats:
        return np.asarray(margin + np.sqrt(dispersion) * rng.standard_normal(len(margin)))

    def distribution(self, margin: Floats, y: Floats, weights: Floats, dispersion: float = 1.0) -> tuple[Floats, Floats]:
        below = special.ndtr((y - margin) * np.sqrt(weights / dispersion))
        return below, below

    def error(self, mean_loss: float, data: GroupedData) -> float:
        return float(np.sqrt(2 * mean_loss))

    def expected(self, margin: Floats, variance: Floats) -> Floats:
        return margin

    def response_interval(self, margin: Floats, variance: Floats, reach: Floats, coverage: float, noise: Floats) -> Floats:
        half = np.sqrt(reach**2 * variance + special.ndtri(0.5 + coverage / 2) ** 2 * noise)
        return np.column_stack([margin - half, margin + half])
