"""Counts with the log link: ``loss = exp(margin) - y margin`` with ``y >= 0``. The log of an exposure is an offset."""

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
from covey.tables.rows import GroupedData, Place

_COUNTABLE = 2.0**52  # above this, floating-point numbers do not represent every count


class Poisson(Loss):
    """Log-linear model of counts. The curvature ``exp(margin)`` has no upper bound, so ``smoothness`` is infinite.

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
    >>> data = GroupedData.from_arrays([[1.0], [1.0]], [0.0, 4.0])
    >>> Poisson().gradient(data, theta=np.zeros((1, 1))).tolist()
    [[-2.0]]
    """

    name: ClassVar[str] = "poisson"
    title: ClassVar[str] = "Poisson"
    error_name: ClassVar[str] = "mean Poisson deviance"
    code: ClassVar[int | None] = kernels.POISSON
    curvature: ClassVar[tuple[float, float]] = (0.0, np.inf)
    third_per_second: ClassVar[float] = 1.0
    link: ClassVar[Link | None] = "log"
    responses: ClassVar[str] = "counts >= 0"

    def mean(self, margin: Floats) -> Floats:
        return np.exp(np.minimum(margin, kernels.LARGEST_LOG_MEAN))

    def values(self, margin: Floats, y: Floats) -> Floats:
        beyond = np.maximum(margin - kernels.LARGEST_LOG_MEAN, 0.0)
        return np.asarray(self.mean(margin) * (1.0 + beyond + 0.5 * beyond**2) - y * margin)

    def slopes(self, margin: Floats, y: Floats) -> Floats:
        return np.asarray(self.mean(margin) * (1.0 + np.maximum(margin - kernels.LARGEST_LOG_MEAN, 0.0)) - y)

    def curvatures(self, margin: Floats, y: Floats) -> Floats:
        return self.mean(margin)  # the variance of a count is its mean

    def thirds(self, margin: Floats, y: Floats) -> Floats:
        return np.where(margin <= kernels.LARGEST_LOG_MEAN, self.mean(margin), 0.0)

    def working_response(self, data: GroupedData) -> GroupedData | None:
        """Return the logs of the counts, weighted by the counts: the usual first step of a log-linear fit."""
        counts = np.maximum(data.y, 0.5)
        target = np.log(counts) if data.offset is None else np.log(counts) - data.offset
        weights = counts if data.weights is None else counts * data.weights
        return replace(data, y=target, weights=weights, offset=None)

    def lowest(self, y: Floats) -> Floats:
        return np.asarray(y - y * np.log(np.where(y > 0, y, 1.0)))

    def constants(self, y: Floats) -> Floats:
        return np.asarray(special.gammaln(y + 1.0))

    def residual(self, y: Floats, dispersion: float = 1.0) -> float:
        return float(np.log1p(1.0 / y.mean()))  # of a lognormal variable with the mean and variance of the counts

    def draw(self, margin: Floats, rng: np.random.Generator, dispersion: float = 1.0) -> Floats:
        return rng.poisson(np.minimum(self.mean(margin), 1e9)).astype(np.float64)

    def distribution(self, margin: Floats, y: Floats, weights: Floats, dispersion: float = 1.0) -> tuple[Floats, Floats]:
        mean = self.mean(margin)
        return np.where(y > 0, special.pdtr(np.maximum(y - 1.0, 0.0), mean), 0.0), special.pdtr(y, mean)

    def impossible(self, y: Floats) -> npt.NDArray[np.bool_]:
        return y < 0

    def check(self, y: Floats, place: Place) -> None:
        self.check_values(y, place)
        if not y.any():
            raise DataError("The response is 0 in every row. The poisson family needs a positive count.")

    def check_grouped(self, y: Floats, place: Place) -> None:
        for row in np.flatnonzero(y != np.round(y))[:1].tolist():
            raise DataError(
                f"The response is {y[row]:g} in {place(row)}; counts are whole numbers. For rates, give the counts and the "
                "log of the exposure as offset."
            )

    def check_total(self, total: float) -> None:
        if not total > 0:
            raise DataError("The response is 0 in every row of every site. The poisson family needs a positive count.")

    def error(self, mean_loss: float, data: GroupedData) -> float:
        saturated = np.average(special.xlogy(data.y, data.y) - data.y, weights=data.weights)
        return float(2 * (mean_loss + saturated))

    def expected(self, margin: Floats, variance: Floats) -> Floats:
        return self.mean(margin + variance / 2)  # the mean of a lognormal variable

    def response_interval(self, margin: Floats, variance: Floats, reach: Floats, coverage: float, noise: Floats) -> Floats:
        return count_interval(margin, reach / special.ndtri(0.5 + coverage / 2) * np.sqrt(variance), coverage)


def count_interval(margin: Floats, sd: Floats, coverage: float) -> Floats:
    """Prediction intervals of Poisson counts whose log-mean is normal, ``(rows, 2)``.

    Each end is the smallest count whose cumulative probability reaches that of the tail; it is found by bisection.
    """
    z = special.ndtri(0.5 + coverage / 2)
    top = np.exp(np.minimum(margin + 8.0 * sd, 40.0))
    out = np.empty((len(margin), 2))
    for side, tail in enumerate((-z, z)):
        low, high = np.full(len(margin), -1.0), np.ceil(np.minimum(top + 10.0 * np.sqrt(top) + 20.0, _COUNTABLE))
        while (high - low > 1).any():
            middle = np.floor((low + high) / 2)
            enough = _count_below(middle, margin, sd) >= special.ndtr(tail)
            high, low = np.where(enough, middle, high), np.where(enough, low, middle)
        out[:, side] = np.where(high < _COUNTABLE, high, np.exp(np.minimum(margin + tail * sd, 700.0)))
    return out


def _count_below(k: Floats, margin: Floats, sd: Floats) -> Floats:
    """Return ``P(Y <= k)`` for a Poisson count ``Y`` whose log-mean is normal, by numerical integration.

    The integral is over the log-mean, or over a gamma variable of shape ``k + 1``: ``Y <= k`` has the same probability as
    "the mean is below that variable". The variable with the smoother integrand is used.
    """
    out, shape = np.empty(len(k)), k + 1.0
    flat = sd * np.sqrt(shape) < 1.0
    nodes, weights = np.polynomial.hermite_e.hermegauss(24)
    means = np.exp(margin[flat, None] + sd[flat, None] * nodes)
    out[flat] = special.pdtr(k[flat, None], means) @ (weights / weights.sum())
    steep, m, s = shape[~flat, None], margin[~flat, None], sd[~flat, None]
    lowest, highest = -9.0 / np.sqrt(steep) - 12.0 / steep, 9.0 / np.sqrt(steep)
    u = lowest + (highest - lowest) * np.linspace(0.0, 1.0, 64)  # values of log(gamma / shape)
    density = np.exp(steep * (u - np.expm1(u)))
    out[~flat] = (density * special.ndtr((np.log(steep) + u - m) / s)).sum(axis=1) / density.sum(axis=1)
    return out
