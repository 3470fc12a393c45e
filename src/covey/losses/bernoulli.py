"""Binary responses with the logit link: ``loss = log(1 + exp(margin)) - y margin`` with ``y`` in {0, 1}.

A row of ``n`` trials has the share of successes as response ``y`` and the weight ``n``: its loss is that of ``n`` rows, up to
the binomial coefficient, which is part of :meth:`Bernoulli.constant`.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from scipy.special import bdtr, entr, expit, gammaln, ndtr

from covey._typing import Floats
from covey.errors import DataError, SolverError
from covey.losses import kernels
from covey.losses.base import Link, Loss
from covey.tables.rows import GroupedData, Place

_STEP = 0.75
_LATENT = np.arange(-40.0, 40.1, _STEP)  # values of a logistic variable, for the trapezoidal rule


class Bernoulli(Loss):
    """Logistic regression. The curvature ``p (1 - p)`` is at most 1/4 and has no positive lower bound.

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
    >>> data = GroupedData.from_arrays([[1.0], [1.0]], [1.0, 1.0])
    >>> Bernoulli().gradient(data, theta=np.zeros((1, 1))).tolist()
    [[-1.0]]
    """

    name: ClassVar[str] = "bernoulli"
    title: ClassVar[str] = "logistic"
    error_name: ClassVar[str] = "cross-entropy"
    code: ClassVar[int | None] = kernels.BERNOULLI
    curvature: ClassVar[tuple[float, float]] = (0.0, 0.25)
    third_per_second: ClassVar[float] = 1.0
    responses: ClassVar[str] = "0 and 1"
    two_classes: ClassVar[bool] = True
    link: ClassVar[Link | None] = "logit"

    def mean(self, margin: Floats) -> Floats:
        return np.asarray(expit(margin))

    def values(self, margin: Floats, y: Floats) -> Floats:
        return np.asarray(np.logaddexp(0.0, margin) - y * margin)

    def slopes(self, margin: Floats, y: Floats) -> Floats:
        return np.asarray(expit(margin) - y)

    def curvatures(self, margin: Floats, y: Floats) -> Floats:
        return np.asarray(expit(margin) * expit(-margin))

    def thirds(self, margin: Floats, y: Floats) -> Floats:
        return np.asarray(expit(margin) * expit(-margin) * -np.tanh(margin / 2))

    def lowest(self, y: Floats) -> Floats:
        return np.asarray(entr(y) + entr(1.0 - y))  # zero for classes

    def distribution(self, margin: Floats, y: Floats, weights: Floats, dispersion: float = 1.0) -> tuple[Floats, Floats]:
        n, p = np.round(weights).astype(np.int64), self.mean(margin)
        successes = np.round(n * y)
        below = np.where(successes > 0, bdtr(np.maximum(successes - 1.0, 0.0), n, p), 0.0)
        return below, np.asarray(bdtr(successes, n, p))

    def residual(self, y: Floats, dispersion: float = 1.0) -> float:
        return float(np.pi**2 / 3)  # variance of the latent logistic variable

    def expected(self, margin: Floats, variance: Floats) -> Floats:
        """Return ``E expit(margin + sd Z)`` for a normal ``Z``.

        It is also ``P(L < margin + sd Z) = E ndtr((margin - L) / sd)`` for a logistic ``L``, which is smoother for a large sd.
        """
        out, wide = np.empty(len(margin)), variance > 1.0
        out[~wide] = super().expected(margin[~wide], variance[~wide])
        m, sd = margin[wide], np.sqrt(variance[wide])
        out[wide] = sum(_STEP * expit(at) * expit(-at) * ndtr((m - at) / sd) for at in _LATENT)
        return out

    def draw(self, margin: Floats, rng: np.random.Generator, dispersion: float = 1.0) -> Floats:
        return (rng.random(len(margin)) < self.mean(margin)).astype(np.float64)

    def check_drawable(self, weights: Floats) -> None:
        if (weights != np.round(weights)).any():
            raise SolverError(
                "Weights must be numbers of trials to draw responses again; repeat rows instead of weighting them."
            )

    def draw_rows(self, margin: Floats, weights: Floats | None, rng: np.random.Generator, dispersion: float = 1.0) -> Floats:
        if weights is None:
            return self.draw(margin, rng)
        return np.asarray(rng.binomial(weights.astype(np.int64), self.mean(margin)) / np.where(weights > 0, weights, 1.0))

    def constant(self, data: GroupedData) -> float:
        """Return minus the sum of the logs of the binomial coefficients; it is zero for classes."""
        if data.weights is None:
            return 0.0
        n, successes = data.weights, data.weights * data.y
        return float((gammaln(successes + 1.0) + gammaln(n - successes + 1.0) - gammaln(n + 1.0)).sum())

    def check(self, y: Floats, place: Place) -> None:
        self.check_values(y, place)
        if (y == y[0]).all():
            raise DataError(f"The response is {y[0]:g} in every row. A classifier needs rows of both classes.")
