"""Binary responses with the logit link: ``loss = log(1 + exp(margin)) - y margin``, y in {0, 1}."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from scipy.special import expit

from covey._typing import Floats
from covey.errors import DataError
from covey.losses import kernels
from covey.losses.base import Loss
from covey.tables.rows import Place


class Bernoulli(Loss):
    """Logistic regression. The curvature ``p (1 - p)`` is at most 1/4 and has no positive lower bound."""

    name: ClassVar[str] = "bernoulli"
    code: ClassVar[int] = kernels.BERNOULLI
    curvature: ClassVar[tuple[float, float]] = (0.0, 0.25)

    def mean(self, margin: Floats) -> Floats:
        return np.asarray(expit(margin))

    def residual(self, y: Floats) -> float:
        return float(np.pi**2 / 3)  # of the logistic distribution behind the classes

    def draw(self, margin: Floats, rng: np.random.Generator) -> Floats:
        return (rng.random(len(margin)) < self.mean(margin)).astype(np.float64)

    def check_values(self, y: Floats, place: Place) -> None:
        bad = (y != 0) & (y != 1)
        if bad.any():
            row = int(bad.argmax())
            raise DataError(f"The response is {y[row]:g} in {place(row)}; the bernoulli family takes 0 and 1.")

    def check(self, y: Floats, place: Place) -> None:
        self.check_values(y, place)
        if (y == y[0]).all():
            raise DataError(f"The response is {y[0]:g} in every row, one class only; a classifier needs rows of two classes.")
