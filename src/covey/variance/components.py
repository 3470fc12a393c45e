"""Results of an estimation: variances at each level, in the units of the response, and what reports and intervals need."""

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
    """How clients vary about their cluster, or clusters about the global model.

    Attributes
    ----------
    terms : the ``q`` terms that vary
    kind : of the covariance
    covariance : (1 or k, q, q) of the coefficients; one for all clusters or one for each
    sd_error : (1 or k, q) standard errors of the standard deviations; NaN at zero and where there is no estimate
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
        errors = [[None if np.isnan(value) else value for value in row] for row in self.sd_error.tolist()]
        return {"terms": list(self.terms), "kind": self.kind, "covariance": self.covariance.tolist(), "sd_error": errors}

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
    """A test of the hypothesis that one level's variances are zero (:mod:`.ratio`).

    Attributes
    ----------
    level : "client" (do clients differ within clusters?) or "cluster" (do clusters matter?)
    statistic : twice the gain in log-likelihood if the level varies
    parameters : the number of its variances and covariances
    p_value : corrected for zero being the boundary of the parameter space
    """

    level: str
    statistic: float
    parameters: int
    p_value: float


@dataclass(frozen=True)
class Components:
    """Variance components and their likelihood.

    Attributes
    ----------
    method : "REML", "ML" or "Laplace" (maximum likelihood, approximated to second order)
    client, cluster : how clients vary about their cluster, and clusters about the global model
    residual : the dispersion of a row of weight 1, in a linear model its variance; None where the mean determines it
    log_likelihood : the restricted one for REML
    parameters : the number of estimated parameters, global coefficients included
    rows : the number of rows of positive weight
    notes : sentences on what is singular and what did not converge
    tests : one for each level that varies
    shares : of clusters, clients and residual in the variance of a typical row's margin
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
        levels = {"client": self.client.to_json(), "cluster": self.cluster.to_json()}
        tests = [asdict(test) for test in self.tests]
        return {**plain, **levels, "notes": list(self.notes), "tests": tests, "shares": list(self.shares)}

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Components:
        levels = {level: LevelComponents.from_json(plain[level]) for level in ("client", "cluster")}
        tests = tuple(LikelihoodRatio(**test) for test in plain["tests"])
        return cls(**{**plain, **levels, "notes": tuple(plain["notes"]), "tests": tests, "shares": tuple(plain["shares"])})


@dataclass(frozen=True)
class Whole:
    """What intervals need of all clients, where the sums of some clients are at other nodes.

    Attributes
    ----------
    clients : the number of clients
    clusters : (k, d, d) the posterior covariance of each cluster's model
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
    """Variance components with all that intervals, tests and updates need.

    Attributes
    ----------
    each : (1 or k, d, d) the covariance of clients about their cluster, for all clusters or for each
    client, cluster : the same for each client and cluster; all relative to the residual variance (1 for counts and classes)
    covariance : (d, d) the posterior covariance of the global model
    units : each client's loss about ``origin (d,)``; for counts and classes to second order about the mode
    whole : after a fit across sites, the part that concerns the clients of all sites
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
        """For the clients and clusters of ``tree``; clusters that were added after the fit have the mean covariance."""
        scale = 1.0 if components.residual is None else components.residual
        each = components.client.embedded(terms) / scale
        if len(each) > 1:
            added = max(tree.n_clusters - len(each), 0)
            each = np.concatenate([each, np.broadcast_to(each.mean(axis=0), (added, *each.shape[1:]))])
        client = Spread.of_covariances(each if len(each) == 1 else each[tree.parent], tree.n_clients)
        cluster = Spread.of_covariances(components.cluster.embedded(terms) / scale, tree.n_clusters)
        return cls(components, each, client, cluster, covariance, units, origin, log_weights)

    @property
    def has_sums(self) -> bool:
        """Whether the clients' sums are there; a model may be saved without them."""
        return len(self.units.n) == len(self.client.scale)

    def knows(self, level: str) -> bool:
        """Whether there are standard errors of the coefficients at a level."""
        return level == "global" or self.has_sums or (level == "cluster" and self.whole is not None)

    @property
    def dispersion(self) -> float:
        """The variance that covariances are relative to."""
        return 1.0 if self.components.residual is None else self.components.residual
