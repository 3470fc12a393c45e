"""What was learned: variances at each level, in the units of the response, with what a report needs to know of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from covey._typing import Anything, Floats
from covey.solvers.direct.elimination import Quadratic, Spread
from covey.tree.hierarchy import Hierarchy
from covey.variance.structure import Kind

Method = Literal["REML", "ML", "Laplace"]


@dataclass(frozen=True)
class LevelComponents:
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

    def embedded(self, terms: Sequence[str]) -> Floats:
        """The covariances among all ``terms``, ``(1 or k, d, d)``: zero where one does not vary."""
        at = np.array([list(terms).index(term) for term in self.terms], dtype=np.int64)
        whole = np.zeros((len(self.covariance), len(terms), len(terms)))
        whole[:, at[:, None], at] = self.covariance
        return whole

    def to_json(self) -> dict[str, Any]:
        plain = asdict(self)
        return {**plain, "terms": list(self.terms), "covariance": self.covariance.tolist(), "sd_error": _nulls(self.sd_error)}

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> LevelComponents:
        q, count = len(plain["terms"]), len(plain["covariance"])
        covariance = np.array(plain["covariance"], dtype=np.float64).reshape(count, q, q)
        return cls(
            tuple(plain["terms"]),
            plain["kind"],
            covariance,
            np.array(plain["sd_error"], dtype=np.float64).reshape(count, q),
        )


@dataclass(frozen=True)
class LikelihoodRatio:
    """A test of one level's variances being zero; see :mod:`.ratio`.

    Attributes
    ----------
    level : "client" (do clients differ within clusters?) or "cluster" (do clusters matter?)
    statistic : twice the gain in log-likelihood from letting the level vary
    parameters : how many variances and covariances that took
    p_value : corrected for zero being the edge of what a variance can be
    """

    level: str
    statistic: float
    parameters: int
    p_value: float


@dataclass(frozen=True)
class Components:
    """Variance components and the likelihood that they reach.

    Attributes
    ----------
    method : "REML", "ML" or "Laplace" (maximum likelihood, approximated to second order)
    client, cluster : how clients vary about their cluster, and clusters about the whole
    residual : dispersion of a row of weight 1, in a linear model its variance; None for counts and classes, whose mean fixes it
    log_likelihood : restricted for REML
    parameters : how many were estimated, global coefficients included
    rows : that count
    notes : in words, what is singular and what did not converge
    tests : of each level that varies
    shares : of the variance of a typical row's margin that lie between clusters, between clients and in the residual
    """

    method: Method
    client: LevelComponents
    cluster: LevelComponents
    residual: float | None
    log_likelihood: float
    parameters: int
    rows: int
    notes: tuple[str, ...] = ()
    tests: tuple[LikelihoodRatio, ...] = ()
    shares: tuple[float, float, float] = (np.nan, np.nan, np.nan)

    @property
    def aic(self) -> float:
        return -2 * self.log_likelihood + 2 * self.parameters

    @property
    def bic(self) -> float:
        return -2 * self.log_likelihood + float(np.log(self.rows)) * self.parameters

    def to_json(self) -> dict[str, Any]:
        plain = {name: getattr(self, name) for name in ("method", "residual", "log_likelihood", "parameters", "rows")}
        return {**plain, "client": self.client.to_json(), "cluster": self.cluster.to_json(), **self._said()}

    def _said(self) -> dict[str, Any]:
        return {"notes": list(self.notes), "tests": [asdict(test) for test in self.tests], "shares": list(self.shares)}

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Components:
        levels = {level: LevelComponents.from_json(plain[level]) for level in ("client", "cluster")}
        tests = tuple(LikelihoodRatio(**test) for test in plain["tests"])
        return cls(**{**plain, **levels, "notes": tuple(plain["notes"]), "tests": tests, "shares": tuple(plain["shares"])})


@dataclass(frozen=True)
class Whole:
    """What intervals need to know of all clients where the sums of these are not, or not all, at hand.

    Attributes
    ----------
    clients : how many there are
    clusters : (k, d, d) the covariance of each cluster's model
    flat : (2, d) which terms are constant within every cluster, and within every client
    """

    clients: int
    clusters: Floats
    flat: Anything

    def to_json(self) -> dict[str, Any]:
        return {"clients": self.clients, "clusters": self.clusters.tolist(), "flat": self.flat.tolist()}

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Whole:
        flat = np.array(plain["flat"], dtype=bool)
        return cls(int(plain["clients"]), np.array(plain["clusters"], dtype=np.float64), flat)


@dataclass(frozen=True)
class Learned:
    """Components as the ties of a hierarchy, and what intervals, tests and updates are made of.

    Attributes
    ----------
    each : how the clients of all clusters, or of each, spread, ``(1 or k, d, d)``
    client, cluster : the same for each client and cluster; all relative to the residual variance (1 for counts and classes)
    covariance : (d, d) that of the global model
    units : each client's loss about ``origin (d,)``; of counts and classes to second order about the mode
    whole : after a fit across sites, what is known of the clients of all of them
    """

    components: Components
    each: Floats
    client: Spread
    cluster: Spread
    covariance: Floats
    units: Quadratic
    origin: Floats
    log_weights: float = 0.0
    whole: Whole | None = None

    @classmethod
    def of(
        cls,
        components: Components,
        terms: Sequence[str],
        tree: Hierarchy,
        covariance: Floats,
        units: Quadratic,
        origin: Floats,
        log_weights: float = 0.0,
    ) -> Learned:
        """For the clients and clusters of ``tree``; a cluster beyond those with covariances of their own has their mean."""
        scale = 1.0 if components.residual is None else components.residual
        below = components.client.embedded(terms) / scale
        if len(below) > 1:
            below = np.concatenate(
                [below, np.broadcast_to(below.mean(axis=0), (max(tree.n_clusters - len(below), 0), *below.shape[1:]))]
            )
        above = components.cluster.embedded(terms) / scale
        own = below if len(below) == 1 else below[tree.parent]
        client, cluster = Spread.of_covariances(own, tree.n_clients), Spread.of_covariances(above, tree.n_clusters)
        return cls(components, below, client, cluster, covariance, units, origin, log_weights)

    @property
    def has_sums(self) -> bool:
        """Whether the clients' sums are there; a model may be saved without them."""
        return len(self.units.n) == len(self.client.scale)

    def knows(self, level: str) -> bool:
        """Whether there are standard errors of the coefficients of a level."""
        return level == "global" or self.has_sums or (level == "cluster" and self.whole is not None)

    @property
    def dispersion(self) -> float:
        """What covariances are relative to."""
        return 1.0 if self.components.residual is None else self.components.residual


def _nulls(values: Floats) -> Any:
    return [[None if np.isnan(value) else value for value in row] for row in values.tolist()]
