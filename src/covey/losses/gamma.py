"""Positive responses with the log link and a constant coefficient of variation: ``loss = y exp(-margin) + margin``.

A response has mean ``exp(margin)`` and variance ``phi exp(2 margin)``; its distribution is gamma with shape ``a = 1 / phi``.
The negative log-likelihood of a row is

    a (loss - lowest loss) + a - a log a + log Gamma(a) + log y          lowest loss = 1 + log y

times the weight of the row, as if the table contained the row so many times.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from scipy import special

from covey._typing import Floats
from covey.errors import DataError
from covey.losses import kernels
from covey.losses.base import Link, Loss
from covey.tables.rows import GroupedData

_HALVINGS = 80  # bisection steps; enough for all digits


class Gamma(Loss):
    """Log-linear model of positive responses. The curvature ``y exp(-margin)`` has no upper bound.

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
    >>> data = GroupedData.from_arrays([[1.0], [1.0]], [0.5, 4.5])
    >>> Gamma().gradient(data, theta=np.zeros((1, 1))).tolist()
    [[-3.0]]
    """

    name: ClassVar[str] = "gamma"
    title: ClassVar[str] = "gamma"
    error_name: ClassVar[str] = "mean gamma deviance"
    code: ClassVar[int | None] = kernels.GAMMA
    curvature: ClassVar[tuple[float, float]] = (0.0, np.inf)
    third_per_second: ClassVar[float] = 1.0
    dispersion: ClassVar[bool] = True
    dispersion_name: ClassVar[str] = "coefficient of variation"
    link: ClassVar[Link | None] = "log"
    responses: ClassVar[str] = "positive numbers"

    def mean(self, margin: Floats) -> Floats:
        return np.exp(np.minimum(margin, kernels.LARGEST_LOG_MEAN))

    def values(self, margin: Floats, y: Floats) -> Floats:
        beyond = np.maximum(-margin - kernels.LARGEST_LOG_MEAN, 0.0)
        return np.asarray(self.curvatures(margin, y) * (1.0 + beyond + 0.5 * beyond**2) + margin)

    def slopes(self, margin: Floats, y: Floats) -> Floats:
        return np.asarray(1.0 - self.curvatures(margin, y) * (1.0 + np.maximum(-margin - kernels.LARGEST_LOG_MEAN, 0.0)))

    def curvatures(self, margin: Floats, y: Floats) -> Floats:
        return np.asarray(y * np.exp(np.minimum(-margin, kernels.LARGEST_LOG_MEAN)))

    def thirds(self, margin: Floats, y: Floats) -> Floats:
        return np.where(-margin <= kernels.LARGEST_LOG_MEAN, -self.curvatures(margin, y), 0.0)

    def working_response(self, data: GroupedData) -> GroupedData | None:
        """Return the logs of the responses. At its minimum the loss of each row has curvature 1."""
        target = np.log(data.y) if data.offset is None else np.log(data.y) - data.offset
        return replace(data, y=target, offset=None)

    def lowest(self, y: Floats) -> Floats:
        return np.asarray(1.0 + np.log(y))

    def constants(self, y: Floats) -> Floats:
        return np.log(y)

    def profile(self, objective: float, weight: float, perfect: float) -> tuple[float, float]:
        shape = _shape((objective - perfect) / weight)
        rest = shape - shape * np.log(shape) + special.gammaln(shape)
        return float(shape * (objective - perfect) + weight * rest), 1.0 / shape

    def residual(self, y: Floats, dispersion: float = 1.0) -> float:
        return float(special.polygamma(1, 1.0 / dispersion))  # variance of the log of a response

    def draw(self, margin: Floats, rng: np.random.Generator, dispersion: float = 1.0) -> Floats:
        # A response below the smallest floating-point number would be 0, which is not positive.
        return np.maximum(rng.gamma(1.0 / dispersion, dispersion * self.mean(margin)), np.finfo(float).tiny)

    def variances(self, margin: Floats) -> Floats:
        return self.mean(margin) ** 2

    def distribution(self, margin: Floats, y: Floats, weights: Floats, dispersion: float = 1.0) -> tuple[Floats, Floats]:
        below = special.gammainc(1.0 / dispersion, y / (dispersion * self.mean(margin)))
        return below, below

    def impossible(self, y: Floats) -> npt.NDArray[np.bool_]:
        return ~(y > 0)

    def error(self, mean_loss: float, data: GroupedData) -> float:
        return float(2 * (mean_loss - np.average(self.lowest(data.y), weights=data.weights)))

    def expected(self, margin: Floats, variance: Floats) -> Floats:
        return self.mean(margin + variance / 2)  # the mean of a lognormal variable

    def response_interval(self, margin: Floats, variance: Floats, reach: Floats, coverage: float, noise: Floats) -> Floats:
        sd = reach / special.ndtri(0.5 + coverage / 2) * np.sqrt(variance)
        shape = np.broadcast_to(1.0 / np.asarray(noise), margin.shape)
        # The log of a response divided by its mean lies in this interval, except with negligible probability.
        far = np.stack([-9.0 / np.sqrt(shape) - 40.0 / shape - 9.0 * sd, 9.0 / np.sqrt(shape) + 9.0 * sd])
        out = np.empty((len(margin), 2))
        for side, tail in enumerate((0.5 - coverage / 2, 0.5 + coverage / 2)):
            low, high = far
            for _ in range(_HALVINGS):
                middle = (low + high) / 2
                enough = _below(middle, sd, shape) >= tail
                low, high = np.where(enough, low, middle), np.where(enough, middle, high)
            out[:, side] = self.mean(margin + high)
        return out


def _shape(excess: float) -> float:
    """Solve ``log a - digamma(a) = excess`` for the shape ``a``; ``excess`` is the mean loss minus its lowest value."""
    if not excess > 1e-13:
        raise DataError(
            "The dispersion is zero because the terms predict every response exactly, so no penalty can be learned. Drop the "
            "term that determines the response, or set gamma."
        )
    # The solution lies between these two, because 1 / 2a < log a - digamma(a) < 1 / a.
    low, high = np.log(0.5 / excess), np.log(1.0 / excess)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if _gap(np.exp(middle)) > excess else (low, middle)
    return float(np.exp((low + high) / 2))


def _gap(shape: float) -> float:
    """Return ``log a - digamma(a)``, by its series where the difference would lose digits."""
    if shape < 1e3:
        return float(np.log(shape) - special.digamma(shape))
    return 1 / (2 * shape) + 1 / (12 * shape**2) - 1 / (120 * shape**4)


def _below(x: Floats, sd: Floats, shape: Floats) -> Floats:
    """Return ``P(Z + U <= x)`` for normal ``Z`` and gamma ``exp(U)`` with mean 1, integrated over the narrower of the two."""
    out = np.empty(len(x))
    flat = sd * np.sqrt(shape) < 1.0
    nodes, weights = np.polynomial.hermite_e.hermegauss(24)
    a = shape[flat, None]
    out[flat] = special.gammainc(a, a * np.exp(x[flat, None] - sd[flat, None] * nodes)) @ (weights / weights.sum())
    a = shape[~flat, None]
    lowest, highest = -9.0 / np.sqrt(a) - 40.0 / a, 9.0 / np.sqrt(a)
    u = lowest + (highest - lowest) * np.linspace(0.0, 1.0, 256)
    density = np.exp(a * (u - np.expm1(u)))
    out[~flat] = (density * special.ndtr((x[~flat, None] - u) / sd[~flat, None])).sum(axis=1) / density.sum(axis=1)
    return out
