"""Variance components: which terms vary, covariances as functions of parameters, and the results of an estimation.

:class:`Shape` says which terms vary at which level, before any data is read. :class:`Parameters` maps a vector of parameters
to the covariances of clients and clusters. :class:`Components` and :class:`Learned` hold the estimates.

The covariance of a level is ``S = L L'``, in units of the columns' sizes. ``L`` is a multiple of the identity, diagonal, or
lower triangular; its entries are the parameters. lme4 uses the same Cholesky factor, with bounds on its diagonal (Bates,
Maechler, Bolker and Walker 2015). Here an entry may have either sign, so the search has no constraints, and a level without
variation is a point like any other. At such a point every derivative in ``L`` is zero, whether it is an optimum or not. The
derivative in ``S`` decides (:func:`.resolve_boundary`).

In the paper, arXiv:2204.13619, ``S`` is a multiple of the identity: ``I / gamma`` for clients, ``I / lam`` for clusters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np

from covey._typing import Anything, Floats, Ints
from covey.solvers.direct.elimination import Quadratic, Spread
from covey.tree.hierarchy import Hierarchy
from covey.variance.approximation import Approximation
from covey.variance.uncertainty import Draws, Satterthwaite

Kind = Literal["isotropic", "diagonal", "full"]
"""The form of a covariance: one variance for all terms (as in the paper), one per term, or one per term and correlations."""


@dataclass(frozen=True)
class Shape:
    """The positions of the terms that vary at each level, and the form of their covariance.

    With ``per_cluster`` there is one covariance of clients for each cluster, instead of one for all clusters. The terms of
    ``zero`` have the global coefficient 0: they vary about zero, or were dropped because other terms determine them.
    """

    client: tuple[int, ...]
    cluster: tuple[int, ...]
    client_kind: Kind = "diagonal"
    cluster_kind: Kind = "diagonal"
    per_cluster: bool = False
    zero: tuple[int, ...] = ()

    def free(self, order: Ints) -> Anything:
        """Which of the terms at these positions have a global coefficient that is estimated."""
        return ~np.isin(order, self.zero)

    def without(self) -> dict[str, Shape]:
        """The two models with one level less. The key is the level that does not vary."""
        return {"client": replace(self, client=(), per_cluster=False), "cluster": replace(self, cluster=())}

    def order(self, d: int) -> Ints:
        """The working order of ``d`` terms: first those that vary by client, then those that vary by cluster only.

        Eliminating a client costs almost nothing for the terms behind those that vary.
        """
        rank = [(a not in self.client and a not in self.cluster, a not in self.client, a) for a in range(d)]
        return np.array(sorted(range(d), key=rank.__getitem__), dtype=np.int64)


@dataclass(frozen=True)
class Variation:
    """The covariance of the clients about their cluster, or of the clusters about the global model, as a function.

    Parameters
    ----------
    terms : positions of the ``q`` terms that vary, in the working order of terms
    kind : "isotropic" (one variance for all of them), "diagonal" (one for each) or "full" (with correlations)
    size : (q,) the unit of each of these terms' coefficients: one over the root mean square of its column
    count : the number of covariances: one, or one for each cluster
    """

    terms: Ints
    kind: Kind
    size: Floats
    count: int = 1

    @property
    def q(self) -> int:
        return len(self.terms)

    @property
    def width(self) -> int:
        """The number of leading terms that contain all varying terms."""
        return int(self.terms.max()) + 1 if self.q else 0

    @property
    def entries(self) -> tuple[Ints, Ints]:
        """Rows and columns of the entries of ``L`` that may differ from zero."""
        return np.tril_indices(self.q) if self.kind == "full" else (np.arange(self.q), np.arange(self.q))

    @property
    def is_shared(self) -> bool:
        """Whether all terms share one parameter."""
        return self.kind == "isotropic" and self.q > 0

    @property
    def n_parameters(self) -> int:
        return self.count * (1 if self.is_shared else len(self.entries[0]))

    @property
    def unit(self) -> Floats:
        """The unit of each term. Terms that share a variance share one unit, so that they do so in the user's units too."""
        if self.is_shared:
            return np.full(self.q, 1.0 / np.sqrt((self.size**-2).mean()))
        return self.size

    def factors(self, x: Floats) -> Floats:
        """``L (count, q, q)``, in the user's units."""
        L = np.zeros((self.count, self.q, self.q))
        rows, columns = self.entries
        L[:, rows, columns] = x.reshape(self.count, -1)
        return self.unit[:, None] * L

    def matrices(self, x: Floats) -> Floats:
        """``S (count, q, q)`` of the varying terms, in the user's units."""
        L = self.factors(x)
        return np.asarray(L @ L.swapaxes(1, 2))

    def covariances(self, x: Floats, d: int) -> Floats:
        """``S (count, d, d)``, zero where a term does not vary."""
        whole = np.zeros((self.count, d, d))
        whole[:, self.terms[:, None], self.terms] = self.matrices(x)
        return whole

    def gradient(self, x: Floats, G: Floats) -> Floats:
        """The gradient in ``x``, from ``G (count, q, q)``, the gradient in ``S``."""
        rows, columns = self.entries
        slope = (2.0 * self.unit[:, None] * (G @ self.factors(x)))[:, rows, columns]
        return np.asarray(slope.sum(axis=1) if self.is_shared else slope).ravel()

    def of_covariances(self, S: Floats) -> Floats:
        """The parameters of covariances ``(count, q, q)``. Covariances of another form are first reduced to this one."""
        scaled = S / (self.unit[:, None] * self.unit)
        rows, columns = self.entries
        if self.kind == "full":
            return np.asarray(_factor(scaled)[:, rows, columns]).ravel()
        variances = np.maximum(scaled[:, rows, columns], 0.0)
        return np.sqrt(variances.mean(axis=1) if self.is_shared else variances).ravel()

    def even(self, sd: float) -> Floats:
        """The parameters if every term has the standard deviation ``sd``, in its unit."""
        return self.of_covariances(np.broadcast_to(np.diag((sd * self.size) ** 2), (self.count, self.q, self.q)))

    def pick(self, G: Floats) -> Floats:
        """The rows and columns of the varying terms of matrices ``(..., d, d)``."""
        return np.asarray(G[..., self.terms[:, None], self.terms])


@dataclass(frozen=True)
class Parameters:
    """The covariances of both levels as one vector: the clients' parameters, then the clusters'.

    A vector may have more entries: the parameters of the global model follow.
    """

    client: Variation
    cluster: Variation

    @classmethod
    def of(cls, shape: Shape, size: Floats, clusters: int) -> Parameters:
        """For columns whose coefficients have the units ``size (d,)``, in the order of the data."""
        order = shape.order(len(size))
        place = np.argsort(order)
        client, cluster = (np.sort(place[list(terms)]).astype(np.int64) for terms in (shape.client, shape.cluster))
        count = clusters if shape.per_cluster else 1
        below = Variation(client, shape.client_kind, size[order][client], count)
        return cls(below, Variation(cluster, shape.cluster_kind, size[order][cluster]))

    @property
    def n_parameters(self) -> int:
        """The number of parameters of both covariances."""
        return self.client.n_parameters + self.cluster.n_parameters

    def split(self, x: Anything) -> list[tuple[Variation, Anything]]:
        """The variation of clients and that of clusters, with the views of ``x`` that hold their parameters."""
        cut = self.client.n_parameters
        return [(self.client, x[:cut]), (self.cluster, x[cut : self.n_parameters])]

    def covariances(self, x: Floats, d: int) -> tuple[Floats, Floats]:
        """``(count, d, d)`` of clients and ``(1, d, d)`` of clusters."""
        client, cluster = (variation.covariances(part, d) for variation, part in self.split(x))
        return client, cluster

    def gradient(self, x: Floats, client: Floats, cluster: Floats) -> Floats:
        """The gradient in the parameters, from those in the covariances of clients and clusters."""
        parts = zip(self.split(x), (client, cluster), strict=True)
        return np.concatenate([variation.gradient(part, variation.pick(G)) for (variation, part), G in parts])

    def even(self, client: float, cluster: float) -> Floats:
        """The parameters if every term has these standard deviations between clients and between clusters, in its unit."""
        return np.concatenate([self.client.even(client), self.cluster.even(cluster)])

    def far(self, x: Floats, factor: float) -> list[Floats]:
        """Points far from ``x``. In each one level's standard deviations are multiplied or divided by ``factor``.

        A level without variation gets a standard deviation of 1 instead.
        """
        points = []
        for level, (variation, part) in enumerate(self.split(x)):
            if len(part):
                for other in [factor * part, part / factor] if part.any() else [variation.even(1.0)]:
                    points.append(x.copy())
                    self.split(points[-1])[level][1][:] = other
        return points

    def deviations(self, x: Floats) -> Anything:
        """Which entries of ``x`` are standard deviations: the criterion depends on them by their squares only."""
        mask = np.zeros(len(x), dtype=bool)
        for variation, part in self.split(mask):
            part[:] = variation.kind != "full" or variation.q == 1
        return mask

    def free(self, x: Floats) -> Anything:
        """Which entries of ``x`` change the criterion. A variance of zero, and a full covariance of zero, do not."""
        free = np.ones(len(x), dtype=bool)
        for (variation, part), (_, mask) in zip(self.split(x), self.split(free), strict=True):
            parts = part.reshape(variation.count, -1)
            held = ~parts.any(axis=1, keepdims=True) if variation.kind == "full" else parts == 0
            mask[:] = ~np.broadcast_to(held, parts.shape).ravel()
        return free


def _factor(S: Floats) -> Floats:
    """Lower triangular ``L`` with ``L L' = S``. ``S (m, q, q)`` may be singular."""
    L = np.zeros_like(S)
    for p in range(S.shape[1]):
        rest = S[:, p:, p] - np.einsum("mac,mc->ma", L[:, p:, :p], L[:, p, :p])
        pivot = np.sqrt(np.maximum(rest[:, 0], 0.0))
        L[:, p, p] = pivot
        good = rest[:, 0] > 1e-12 * np.maximum(S[:, p, p], 1e-300)
        L[:, p + 1 :, p] = np.where(good[:, None], rest[:, 1:] / np.where(good, pivot, 1.0)[:, None], 0.0)
    return L


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
    """

    clients: int
    clusters: Floats
    flat: Anything

    def to_json(self) -> dict[str, Any]:
        return {"clients": self.clients, "clusters": self.clusters.tolist(), "flat": self.flat.tolist()}

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Whole:
        return cls(int(plain["clients"]), np.array(plain["clusters"], dtype=np.float64), np.array(plain["flat"], dtype=bool))


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
