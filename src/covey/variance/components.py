"""Variance components: the results of an estimation.

:class:`Components` has the estimates, their tests and notes. :class:`Learned` joins them with the sums that intervals and
updates need. :mod:`covey.variance.parameters` says which terms vary and how covariances follow from parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np

from covey._typing import Anything, Floats
from covey.solvers.direct.elimination import Quadratic, Spread
from covey.tree.hierarchy import Hierarchy
from covey.variance.approximation import Approximation
from covey.variance.parameters import Kind, Shape
from covey.variance.uncertainty import Draws, Satterthwaite

Method = Literal["REML", "ML", "Laplace", "least squares"]


@dataclass(frozen=True)
class LevelComponents:
    """The covariance of clients about their cluster, or of clusters about the global model.

    Attributes
    ----------
    terms : the ``q`` terms that vary
    kind : the form of the covariance
    covariance : (1 or k, q, q) the covariance of the coefficients, one for all clusters or one per cluster
    sd_error : (1 or k, q) standard errors of the standard deviations; NaN where the deviation is zero or has no estimate
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
        errors = np.array(plain["sd_error"], dtype=np.float64).reshape(count, q)
        return cls(tuple(plain["terms"]), plain["kind"], covariance, errors)


@dataclass(frozen=True)
class LikelihoodRatio:
    """A test of the hypothesis that one level's variances are zero (:func:`covey.variance.estimate.likelihood_ratios`).

    Attributes
    ----------
    level : "client" (variation between the clients of a cluster) or "cluster" (variation between clusters)
    statistic : twice the gain in log-likelihood if the level varies
    parameters : the number of its variances and covariances
    p_value : approximate; allows for zero being on the boundary of the parameter space
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
    method : "REML", "ML" or "Laplace" (maximum likelihood, approximated to second order); "least squares" without groups
    client, cluster : the covariances of clients about their cluster, and of clusters about the global model
    residual : the dispersion of a row of weight 1, which is the variance in a linear model; None for counts and classes
    log_likelihood : for REML the restricted log-likelihood
    parameters : the number of estimated parameters, global coefficients included
    rows : the number of rows of positive weight
    notes : sentences on singular covariances and on convergence
    tests : likelihood-ratio tests, one per level that varies
    shares : the shares of clusters, clients and residual in the variance of a row's margin, as a mean over rows
    approximation : the error of Laplace's approximation; None if the likelihood is exact
    zero : terms whose global coefficient is 0 and not estimated: they have none in the formula, or other terms determine them
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
    approximation: Approximation | None = None
    zero: tuple[str, ...] = ()

    @property
    def grouped(self) -> bool:
        """Whether a term varies between groups; otherwise the model is a plain regression."""
        return bool(self.client.terms or self.cluster.terms)

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
        check = None if self.approximation is None else asdict(self.approximation)
        lists = {name: list(getattr(self, name)) for name in ("notes", "shares", "zero") if name != "zero" or self.zero}
        return {**plain, **levels, **lists, "tests": tests, "approximation": check}

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Components:
        levels = {level: LevelComponents.from_json(plain[level]) for level in ("client", "cluster")}
        tests = tuple(LikelihoodRatio(**test) for test in plain["tests"])
        check = plain.get("approximation")  # models saved by earlier versions have none
        check = None if check is None else Approximation.from_json(check)
        tuples = {name: tuple(plain.get(name, ())) for name in ("notes", "shares", "zero")}
        return cls(**{**plain, **levels, **tuples, "tests": tests, "approximation": check})


@dataclass(frozen=True)
class Whole:
    """Sums over the clients of all sites that intervals need, for a model that has the sums of some clients or none.

    Attributes
    ----------
    clients : the number of clients
    clusters : (k, d, d) the posterior covariance of each cluster's model
    flat : (2, d) which terms are constant within every cluster, and within every client
    information, scores : (k, d, d) and (k, d), the precision with which each cluster determines the global model, and its
        score there, in units of the dispersion. Only the operator of a linear model whose clusters vary has them; None at sites
    """

    clients: int
    clusters: Floats
    flat: Anything
    information: Floats | None = None
    scores: Floats | None = None

    def to_json(self) -> dict[str, Any]:
        plain = {"clients": self.clients, "clusters": self.clusters.tolist(), "flat": self.flat.tolist()}
        sums = {"information": self.information, "scores": self.scores}
        return {**plain, **{name: value.tolist() for name, value in sums.items() if value is not None}}

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Whole:
        clusters, flat = np.array(plain["clusters"], dtype=np.float64), np.array(plain["flat"], dtype=bool)
        names = (name for name in ("information", "scores") if name in plain)
        return cls(int(plain["clients"]), clusters, flat, **{name: np.array(plain[name], dtype=np.float64) for name in names})

    def matches(self, clusters: int, d: int) -> bool:
        """Whether the shapes are those of a model with so many clusters and terms, and all numbers finite."""
        shapes = [(self.clusters, (clusters, d, d)), (self.information, (clusters, d, d)), (self.scores, (clusters, d))]
        given = [(value, shape) for value, shape in shapes if value is not None]
        return self.flat.shape == (2, d) and all(v.shape == shape and bool(np.isfinite(v).all()) for v, shape in given)

    def without_scores(self) -> Whole:
        """What the sites receive."""
        return replace(self, information=None, scores=None)

    def in_user_units(self, basis: Floats) -> Whole:
        """From coefficients of working columns to those of the user's, which are ``basis`` times the former."""
        back, clusters = np.linalg.inv(basis), basis @ self.clusters @ basis.T
        if self.information is None or self.scores is None:
            return replace(self, clusters=clusters)
        return replace(self, clusters=clusters, information=back.T @ self.information @ back, scores=self.scores @ back)


@dataclass(frozen=True)
class Learned:
    """Variance components, with the sums that intervals, tests and updates need.

    Attributes
    ----------
    terms, tree : the terms of the model, and its clients in their clusters
    covariance : (d, d) the posterior covariance of the global model
    units : each client's loss about ``origin (d,)``; for counts and classes to second order about the mode. Empty if the
        sums are at other sites or were not saved
    log_weights : the sum over all rows of the logarithms of their weights
    whole : after a fit across sites, the sums over the clients of all sites
    basis : (d, d) converts coefficients of the columns of the fit, some of them centred, to the user's; None if none was
    satterthwaite, draws : uncertainty of the components, if the sums in ``units`` do not determine it
    more : the number of global coefficients of sparse columns; a model that has some keeps no sums of clients
    """

    components: Components
    terms: tuple[str, ...]
    tree: Hierarchy
    covariance: Floats
    units: Quadratic
    origin: Floats
    log_weights: float = 0.0
    whole: Whole | None = None
    basis: Floats | None = None
    satterthwaite: Satterthwaite | None = None
    draws: Draws | None = None
    more: int = 0

    @property
    def shape(self) -> Shape:
        """Which terms vary, as it was fitted."""
        parts = self.components
        named = parts.client.terms, parts.cluster.terms, parts.zero
        client, cluster, zero = (tuple(map(self.terms.index, names)) for names in named)
        return Shape(client, cluster, parts.client.kind, parts.cluster.kind, len(parts.client.covariance) > 1, zero)

    @property
    def free(self) -> Anything:
        """Which terms have a global coefficient that is estimated, ``(d,)``."""
        return ~np.isin(self.terms, self.components.zero)

    @property
    def dispersion(self) -> float:
        """The variance that the covariances below are relative to: 1 for counts and classes."""
        return 1.0 if self.components.residual is None else self.components.residual

    @cached_property
    def client_covariances(self) -> Floats:
        """The covariance of clients about their cluster, ``(1 or k, d, d)``, relative to the dispersion.

        Clusters that were added after the fit have the mean over the other clusters.
        """
        S = self.components.client.embedded(self.terms) / self.dispersion
        if len(S) > 1:
            added = max(self.tree.n_clusters - len(S), 0)
            S = np.concatenate([S, np.broadcast_to(S.mean(axis=0), (added, *S.shape[1:]))])
        return S

    @cached_property
    def client(self) -> Spread:
        """The covariance of each client about its cluster, relative to the dispersion."""
        S, tree = self.client_covariances, self.tree
        return Spread.of_covariances(S if len(S) == 1 else S[tree.parent], tree.n_clients)

    @cached_property
    def cluster(self) -> Spread:
        """The covariance of each cluster about the global model, relative to the dispersion."""
        return Spread.of_covariances(self.components.cluster.embedded(self.terms) / self.dispersion, self.tree.n_clusters)

    @property
    def has_sums(self) -> bool:
        """Whether ``units`` holds the sums of every client of ``tree``."""
        return len(self.units.n) == self.tree.n_clients

    def has_standard_errors(self, level: str) -> bool:
        """Whether the coefficients of a level have standard errors."""
        return level == "global" or self.has_sums or (level == "cluster" and self.whole is not None)
