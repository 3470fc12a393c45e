"""What was learned: variances at each level, in the units of the response, with what a report needs to know of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from covey._typing import Floats
from covey.solvers.elimination import Quadratic, Spread
from covey.variance.structure import Kind

Method = str  # "REML", "ML" or "Laplace"


@dataclass(frozen=True)
class Level:
    """How one level varies: covariances ``(1 or k, q, q)`` of its coefficients about those of the level above.

    ``sd_error (1 or k, q)`` are standard errors of the standard deviations, NaN at zero and where they are not known.
    """

    terms: tuple[str, ...]
    kind: Kind
    covariance: Floats
    sd_error: Floats

    @property
    def sd(self) -> Floats:
        """Standard deviations, ``(1 or k, q)``."""
        return np.asarray(np.sqrt(np.maximum(np.einsum("maa->ma", self.covariance), 0.0)))

    @property
    def correlation(self) -> Floats:
        """Correlations ``(1 or k, q, q)``; NaN beside a standard deviation of zero."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.asarray(self.covariance / (self.sd[:, :, None] * self.sd[:, None, :]))

    def to_json(self) -> dict[str, Any]:
        plain = asdict(self)
        return {**plain, "terms": list(self.terms), "covariance": self.covariance.tolist(), "sd_error": _nulls(self.sd_error)}

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Level:
        q = len(plain["terms"])
        covariance = np.array(plain["covariance"], dtype=np.float64).reshape(-1, q, q)
        return cls(
            tuple(plain["terms"]), plain["kind"], covariance, np.array(plain["sd_error"], dtype=np.float64).reshape(-1, q)
        )


@dataclass(frozen=True)
class Components:
    """Variance components and the likelihood that they reach.

    Attributes
    ----------
    method : "REML", "ML" or "Laplace" (maximum likelihood, approximated to second order)
    client, cluster : how clients vary about their cluster, and clusters about the whole
    residual : variance of a row of weight 1; None for counts and classes, whose mean fixes it
    log_likelihood : restricted for REML
    parameters : how many were estimated, global coefficients included
    rows : that count
    notes : in words, what is singular and what did not converge
    """

    method: Method
    client: Level
    cluster: Level
    residual: float | None
    log_likelihood: float
    parameters: int
    rows: int
    notes: tuple[str, ...] = ()

    @property
    def aic(self) -> float:
        return -2 * self.log_likelihood + 2 * self.parameters

    @property
    def bic(self) -> float:
        return -2 * self.log_likelihood + float(np.log(self.rows)) * self.parameters

    def to_json(self) -> dict[str, Any]:
        plain = {name: getattr(self, name) for name in ("method", "residual", "log_likelihood", "parameters", "rows")}
        return {**plain, "client": self.client.to_json(), "cluster": self.cluster.to_json(), "notes": list(self.notes)}

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Components:
        levels = {level: Level.from_json(plain[level]) for level in ("client", "cluster")}
        return cls(**{**plain, **levels, "notes": tuple(plain["notes"])})


@dataclass(frozen=True)
class Learned:
    """Components as the ties of a hierarchy, and what intervals, tests and updates are made of.

    Attributes
    ----------
    client, cluster : covariances relative to ``dispersion``, the residual variance (1 for counts and classes)
    covariance : (d, d) that of the global model
    units : each client's loss about ``origin (d,)``; of counts and classes to second order about the mode
    """

    components: Components
    client: Spread
    cluster: Spread
    dispersion: float
    covariance: Floats
    units: Quadratic
    origin: Floats
    log_weights: float = 0.0


def _nulls(values: Floats) -> Any:
    return [[None if np.isnan(value) else value for value in row] for row in values.tolist()]
