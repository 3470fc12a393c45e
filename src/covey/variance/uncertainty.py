"""What the uncertainty of the variance components adds to that of the coefficients of a linear model.

:class:`Satterthwaite` has degrees of freedom for the global coefficients. The variance ``v = l'Vl`` of a combination ``l'wbar``
is a function of the components. Its estimate has about the distribution of ``v`` times a chi-squared with ``2 v^2 / var(v)``
degrees of freedom, divided by them (Satterthwaite 1946), and ``var(v)`` follows from the components' covariance by the delta
method. lmerTest computes the same (Kuznetsova, Brockhoff and Christensen 2017).

:class:`Draws` has a few points of the components, with weights: a sample of their posterior distribution
(:mod:`covey.variance.sampling`). Given a point, the posterior of every coefficient is normal. So the posterior of a coefficient
is a mixture of normals, whose quantiles are the ends of its interval. If a variance is estimated as zero, the sample still has
points where it is positive.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from scipy import special

from covey._typing import Floats

_CLOSE, _STEPS = 1e-9, 40


class _Arrays:
    """Arrays of numbers that go through JSON."""

    def to_json(self) -> dict[str, Any]:
        return {name: np.asarray(value).tolist() for name, value in vars(self).items()}

    @classmethod
    def from_json(cls, plain: Mapping[str, Any] | None) -> Self | None:
        return None if plain is None else cls(**{name: np.array(value, dtype=np.float64) for name, value in plain.items()})

    @property
    def finite(self) -> bool:
        return all(bool(np.isfinite(value).all()) for value in vars(self).values())


@dataclass(frozen=True)
class Satterthwaite(_Arrays):
    """Degrees of freedom of combinations of the global coefficients.

    Attributes
    ----------
    covariance : (d, d) the covariance of the coefficients
    slopes : (p, d, d) its derivatives in ``p`` uncorrelated directions of the variance parameters, for a step of one standard
        error
    dof : the degrees of freedom of the residual variance
    """

    covariance: Floats
    slopes: Floats
    dof: Floats

    def freedom(self, L: Floats) -> Floats:
        """Degrees of freedom of ``L (m, d)`` times the coefficients, at least 1."""
        v = np.einsum("ma,ab,mb->m", L, self.covariance, L)
        change = np.einsum("ma,pab,mb->mp", L, self.slopes, L)
        with np.errstate(invalid="ignore", divide="ignore"):
            freedom = np.where(v > 0, 2 * v**2 / ((change**2).sum(axis=1) + 2 * v**2 / self.dof), self.dof)
        return np.maximum(freedom, 1.0)

    def matches(self, d: int) -> bool:
        return self.finite and self.slopes.shape[1:] == self.covariance.shape == (d, d) and self.dof.shape == ()


@dataclass(frozen=True)
class Draws(_Arrays):
    """Points of the variance components, and the upper levels at each of ``m`` points. All in the units of the response.

    Attributes
    ----------
    weights : (m,) the weights of the points; their sum is 1
    dispersion : (m,) the residual variance
    client, cluster : (m, 1 or k, d, d) and (m, d, d), the covariances of clients about their cluster and of clusters
    wbar, covariance : (m, d) and (m, d, d), the mean and the covariance of the global model
    w, clusters : (m, k, d) and (m, k, d, d), the mean and the covariance of each cluster's model
    """

    weights: Floats
    dispersion: Floats
    client: Floats
    cluster: Floats
    wbar: Floats
    covariance: Floats
    w: Floats
    clusters: Floats

    def matches(self, k: int, d: int) -> bool:
        m, count = len(self.weights), self.client.shape[1] if self.client.ndim == 4 else 0
        wanted = [(m,), (m,), (m, count, d, d), (m, d, d), (m, d), (m, d, d), (m, k, d), (m, k, d, d)]
        return self.finite and count in (1, k) and [value.shape for value in vars(self).values()] == wanted

    def interval(self, means: Floats, variances: Floats, coverage: float) -> tuple[Floats, Floats]:
        """The interval between two quantiles of mixtures of normals, whose means and variances are ``(m, ...)``."""
        sds = np.sqrt(np.maximum(variances, 1e-300))
        tail = (1 - coverage) / 2
        return self._quantile(tail, means, sds), self._quantile(1 - tail, means, sds)

    def _quantile(self, p: float, means: Floats, sds: Floats) -> Floats:
        """By Newton's method. The quantile lies between the smallest and the largest of those of the normals."""
        ends = means + special.ndtri(p) * sds
        low, high, at = ends.min(axis=0), ends.max(axis=0), np.tensordot(self.weights, ends, 1)
        least = _CLOSE * sds.min(axis=0)
        for _ in range(_STEPS):
            z = (at - means) / sds
            above = np.tensordot(self.weights, special.ndtr(z), 1) - p
            density = np.tensordot(self.weights, np.exp(-0.5 * z**2) / sds, 1) / np.sqrt(2 * np.pi)
            low, high = np.where(above < 0, at, low), np.where(above < 0, high, at)
            ahead = at - above / np.maximum(density, 1e-300)
            ahead = np.where((ahead < low) | (ahead > high), 0.5 * (low + high), ahead)
            done = bool((np.abs(ahead - at) <= least + 4e-16 * np.abs(at)).all())
            at = ahead
            if done:
                break
        return np.asarray(at)
