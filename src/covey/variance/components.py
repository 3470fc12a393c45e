"""Which terms vary between clients and between clusters, and how: what is asked for, before any data is seen.

Covariances of clients and clusters as functions of a vector of parameters.

The covariance of a level is ``S = L L'``, in units of the columns' sizes. ``L`` is a multiple of the identity, diagonal, or
lower triangular; its entries are the parameters. lme4 uses the same Cholesky factor, but with bounds on its diagonal (Bates,
Maechler, Bolker and Walker 2015). Here an entry may have either sign, so the search has no constraints, and a level without
variation is a point like any other. At such a point every derivative in ``L`` is zero, whether it is an optimum or not. The
derivative in ``S`` decides (:mod:`.boundary`).

Results of an estimation: variances at each level, in the units of the response, and what reports and intervals need.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np

from covey._typing import Anything, Floats, Ints
from covey.solvers.direct.elimination import Quadratic, Spread
from covey.tree.hierarchy import Hierarchy

Kind = Literal["isotropic", "diagonal", "full"]
"""Of a covariance: one variance for all terms (as in the paper, arXiv:2204.13619), one for each, or with correlations."""


@dataclass(frozen=True)
class Shape:
    """Which terms vary at which level, by position, with which kind of covariance.

    With ``per_cluster`` the clients of each cluster have a covariance of their own.
    """

    client: tuple[int, ...]
    cluster: tuple[int, ...]
    client_kind: Kind = "diagonal"
    cluster_kind: Kind = "diagonal"
    per_cluster: bool = False

    def without(self) -> dict[str, Shape]:
        """The two smaller models, by the level that does not vary in them."""
        return {"client": replace(self, client=(), per_cluster=False), "cluster": replace(self, cluster=())}

    def order(self, d: int) -> Ints:
        """The working order of ``d`` terms: those that vary by client, those that vary by cluster only, the others.

        Elimination of a client costs next to nothing for terms that come after those that vary.
        """
        rank = [(a not in self.client and a not in self.cluster, a not in self.client, a) for a in range(d)]
        return np.array(sorted(range(d), key=rank.__getitem__), dtype=np.int64)


@dataclass(frozen=True)
class Variation:
    """The covariance of the clients about their cluster, or of the clusters about the global model.

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
        """How many of the first terms contain all that vary."""
        return int(self.terms.max()) + 1 if self.q else 0

    @property
    def each(self) -> int:
        """The number of parameters of one covariance."""
        if self.q == 0:
            return 0
        return {"isotropic": 1, "diagonal": self.q, "full": self.q * (self.q + 1) // 2}[self.kind]

    @property
    def n_parameters(self) -> int:
        return self.count * self.each

    @property
    def unit(self) -> Floats:
        """Each term's unit; one unit for all terms if they share a variance, so that it is the same in the user's units."""
        if self.kind == "isotropic" and self.q:
            return np.full(self.q, 1.0 / np.sqrt((self.size**-2).mean()))
        return self.size

    def factors(self, x: Floats) -> Floats:
        """``L (count, q, q)``, in the user's units."""
        L = np.zeros((self.count, self.q, self.q))
        values = x.reshape(self.count, self.each)
        at = np.arange(self.q)
        if self.kind == "full":
            rows, columns = np.tril_indices(self.q)
            L[:, rows, columns] = values
        else:
            L[:, at, at] = values
        return self.unit[:, None] * L

    def covariances(self, x: Floats, d: int) -> Floats:
        """``S (count, d, d)``, zero where a term does not vary."""
        L = self.factors(x)
        whole = np.zeros((self.count, d, d))
        whole[:, self.terms[:, None], self.terms] = L @ L.swapaxes(1, 2)
        return whole

    def gradient(self, x: Floats, G: Floats) -> Floats:
        """The gradient in ``x``, from ``G (count, q, q)``, the gradient in ``S``."""
        slope = 2.0 * self.unit[:, None] * (G @ self.factors(x))
        at = np.arange(self.q)
        if self.kind == "full":
            rows, columns = np.tril_indices(self.q)
            return np.asarray(slope[:, rows, columns]).ravel()
        diagonal = slope[:, at, at]
        return np.asarray(diagonal.sum(axis=1) if self.kind == "isotropic" and self.q else diagonal).ravel()

    def of_covariances(self, S: Floats) -> Floats:
        """The parameters of covariances ``(count, q, q)``; of the nearest of this kind if they are of another."""
        scaled = S / (self.unit[:, None] * self.unit)
        at = np.arange(self.q)
        if self.kind == "full":
            rows, columns = np.tril_indices(self.q)
            return np.asarray(_factor(scaled)[:, rows, columns]).ravel()
        variances = np.maximum(scaled[:, at, at], 0.0)
        if self.kind == "isotropic" and self.q:
            variances = variances.mean(axis=1, keepdims=True)
        return np.sqrt(variances).ravel()

    def even(self, sd: float) -> Floats:
        """The parameters when every term varies by ``sd`` of its unit."""
        S = np.diag((sd * self.size) ** 2)
        return self.of_covariances(np.broadcast_to(S, (self.count, self.q, self.q)))

    def pick(self, G: Floats) -> Floats:
        """The block of the varying terms in matrices ``(count, d, d)``."""
        return np.asarray(G[:, self.terms[:, None], self.terms])


@dataclass(frozen=True)
class Parameters:
    """The covariances of both levels as one vector: the clients' parameters, then the clusters'.

    A vector may go on after these, with parameters of the global model.
    """

    client: Variation
    cluster: Variation

    @classmethod
    def of(cls, shape: Shape, size: Floats, clusters: int) -> Parameters:
        """For columns whose coefficients have the units ``size (d,)``, in the data's order."""
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

    def split(self, x: Floats) -> list[tuple[Variation, Floats]]:
        """The clients' and the clusters' variation, each with its parameters."""
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
        """The parameters when every term varies by the same share of its unit at each level."""
        return np.concatenate([self.client.even(client), self.cluster.even(cluster)])

    def far(self, x: Floats, factor: float) -> list[Floats]:
        """Points far from ``x``: one level's variation ``factor`` times as large or small, or some instead of none."""
        points, first = [], 0
        for variation, part in self.split(x):
            if len(part):
                others = [factor * part, part / factor] if part.any() else [variation.even(1.0)]
                points += [np.concatenate([x[:first], other, x[first + len(part) :]]) for other in others]
            first += len(part)
        return points

    def free(self, x: Floats) -> Anything:
        """Which entries of ``x`` move anything: not a variance at zero, nor a full covariance that is zero as a whole."""
        free = np.ones(len(x), dtype=bool)
        first = 0
        for variation, part in self.split(x):
            parts = part.reshape(variation.count, -1)
            held = ~parts.any(axis=1, keepdims=True) if variation.kind == "full" else parts == 0
            free[first : first + len(part)] = ~np.broadcast_to(held, parts.shape).ravel()
            first += len(part)
        return free


def _factor(S: Floats) -> Floats:
    """Lower triangular ``L`` with ``L L' = S``, for semi-definite ``S (m, q, q)`` too."""
    L = np.zeros_like(S)
    for p in range(S.shape[1]):
        rest = S[:, p:, p] - np.einsum("mac,mc->ma", L[:, p:, :p], L[:, p, :p])
        pivot = np.sqrt(np.maximum(rest[:, 0], 0.0))
        L[:, p, p] = pivot
        good = rest[:, 0] > 1e-12 * np.maximum(S[:, p, p], 1e-300)
        L[:, p + 1 :, p] = np.where(good[:, None], rest[:, 1:] / np.where(good, pivot, 1.0)[:, None], 0.0)
    return L


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
