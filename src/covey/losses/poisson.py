"""Counts with the log link: ``loss = exp(margin) - y margin``, y >= 0. The log of an exposure goes in as offset."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from scipy.special import gammaln

from covey._typing import Floats
from covey.errors import DataError
from covey.losses import kernels
from covey.losses.base import Loss
from covey.tables.rows import GroupedData, Place
from covey.tree.hierarchy import segment_sum


class Poisson(Loss):
    """Log-linear counts. The curvature ``exp(margin)`` has no bound over all margins, so ``smoothness`` is infinite."""

    name: ClassVar[str] = "poisson"
    code: ClassVar[int] = kernels.POISSON
    curvature: ClassVar[tuple[float, float]] = (0.0, np.inf)

    def mean(self, margin: Floats) -> Floats:
        return np.exp(np.minimum(margin, kernels.LARGEST_LOG_MEAN))

    def smoothness(self, data: GroupedData) -> Floats:
        return np.full(data.n_clients, np.inf)

    def perfect(self, data: GroupedData) -> Floats:
        lowest = data.y - data.y * np.log(np.where(data.y > 0, data.y, 1.0))
        return self.scale(data) * segment_sum(lowest if data.weights is None else data.weights * lowest, data.client_ptr)

    def constant(self, data: GroupedData) -> float:
        factorials = gammaln(data.y + 1.0)
        return float((factorials if data.weights is None else data.weights * factorials).sum())

    def residual(self, y: Floats) -> float:
        return float(np.log1p(1.0 / y.mean()))  # of a lognormal with the counts' mean and variance

    def draw(self, margin: Floats, rng: np.random.Generator) -> Floats:
        return rng.poisson(np.minimum(self.mean(margin), 1e9)).astype(np.float64)

    def check_values(self, y: Floats, place: Place) -> None:
        bad = y < 0
        if bad.any():
            row = int(bad.argmax())
            raise DataError(f"The response is {y[row]:g} in {place(row)}; the poisson family takes counts >= 0.")

    def check(self, y: Floats, place: Place) -> None:
        self.check_values(y, place)
        if not y.any():
            raise DataError(
                "The response is 0 in every row, so no rate can be fitted; the poisson family needs a positive count."
            )
