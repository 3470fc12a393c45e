"""The posterior of the coefficients: covariances, degrees of freedom and intervals.

Given the variance components, the covariances from the global model down to clusters and clients are

    V = s2 (sum D_j)^-1       V_j = s2 (I + S C_j)^-1 S + J_j V J_j'       V_i = s2 (I + S_i A_i)^-1 S_i + J_i V_j J_i'

where ``J_j = (I + S C_j)^-1`` and ``J_i = (I + S_i A_i)^-1`` (see :mod:`covey.variance.linear_likelihood` for the other
symbols). The first part of ``V_j`` and ``V_i`` is the variance about the parent that the data leaves open. The second is the
parent's variance, as far as the child depends on it. A client without training data has ``V_j + s2 S_i``; in a cluster without
training data it has ``V + s2 S + s2 S_i``. Standard errors are the roots of these variances.

Intervals of a linear model also include the uncertainty of the components (:mod:`covey.variance.uncertainty`). Those of the
global model use a t distribution with Satterthwaite's degrees of freedom. Those of clusters and clients, seen or new, are
between quantiles of the posterior averaged over the components. Intervals of other families use normal quantiles for clusters
and clients, for the global model a t distribution with the degrees of freedom of :mod:`covey.variance.freedom`, and for new
clusters one with ``k - 1``. Models whose components have more parameters than a Hessian is computed for, and models of older
files without sums, take the components as known, with containment degrees of freedom for the global model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from scipy import special

from covey._typing import Anything, Floats, Ints
from covey.errors import CoveyError, SolverError
from covey.solvers.direct.elimination import Spread, cluster_covariances, descend, eliminate, posterior
from covey.tables.sparse import NOT_SPARSE
from covey.tree.hierarchy import Level, Resolved, segment_sum
from covey.variance.components import Learned
from covey.variance.sampling import draws_of, satterthwaite_of
from covey.variance.uncertainty import Draws, Satterthwaite

_ROWS = 1 << 16  # rows whose covariances are in memory at the same time


@dataclass(frozen=True)
class Posterior:
    """Posterior covariances of the coefficients of a fitted hierarchy, in the units of the response."""

    learned: Learned

    def require_sums(self, *, all_clients: bool = False) -> Learned:
        """``learned``, if it has the sums of its clients; with ``all_clients``, those of every client of the fit."""
        if all_clients and self.learned.whole is not None:
            raise SolverError(
                "This model is one part of a fit across sites, and no site has the sums of all clients; fit across the sites "
                "again instead."
            )
        if self.learned.more:
            raise SolverError(NOT_SPARSE)
        if not self.learned.has_sums:
            raise SolverError(
                "This model was saved without the sums of its clients, which this needs: save the fitted model again with "
                "sums=True, or use the models at the sites."
            )
        return self.learned

    @property
    def _can_compute(self) -> bool:
        """Whether the sums here give the uncertainty of the components."""
        return self.learned.components.grouped and self.learned.whole is None and self.learned.has_sums

    @cached_property
    def satterthwaite(self) -> Satterthwaite | None:
        """Satterthwaite's degrees of freedom of the global coefficients. None if there are none."""
        if self.learned.satterthwaite is not None or not self._can_compute:
            return self.learned.satterthwaite
        return satterthwaite_of(self.learned)

    @cached_property
    def draws(self) -> Draws | None:
        """A sample of the variance components, with the upper levels at each point. None if there is none."""
        if self.learned.draws is not None or not self._can_compute or self.learned.components.method == "Laplace":
            return self.learned.draws
        return draws_of(self.learned)

    def freedom(self, L: Floats | None = None) -> Floats:
        """Degrees of freedom of combinations ``L (m, d)`` of the global coefficients, or of each coefficient."""
        if self.satterthwaite is None:
            return self.contained if L is None else np.full(len(L), self.contained.min())
        return self.satterthwaite.freedom(np.eye(len(self.learned.terms)) if L is None else L)

    @cached_property
    def contained(self) -> Floats:
        """Degrees of freedom of each global coefficient ``(d,)``, by containment.

        A term that varies by cluster, or is constant within clusters whose intercepts vary, has about as many degrees of
        freedom as there are clusters. The same holds for clients. Other terms have those of the rows. Without groups they are
        infinite, for normal quantiles, if the dispersion is not estimated.
        """
        components, whole, terms = self.learned.components, self.learned.whole, self.learned.terms
        tree, d = self.learned.tree, len(terms)
        n, k = tree.n_clients if whole is None else whole.clients, tree.n_clusters
        between, within = (np.isin(terms, level.terms) for level in (components.cluster, components.client))
        if whole is None:
            flat_cluster, flat_client = self._constant(tree.cluster_ptr), self._constant(np.arange(n + 1))
        else:
            flat_cluster, flat_client = whole.flat
        one = np.array([term == "Intercept" for term in terms])
        steady = flat_cluster & bool((between & one).any())
        settled = flat_client & ~(flat_cluster & (k > 1)) & bool((within & one).any())
        by_cluster = k - np.where(flat_cluster, flat_cluster.sum(), 1)
        by_client = n - (k if k > 1 else 0) - np.where(settled, settled.sum(), int(k == 1))
        if not components.grouped and components.residual is None:
            return np.full(d, np.inf)
        freedom = np.where(
            between | steady, by_cluster, np.where(within | settled, by_client, components.rows - d - self.learned.more)
        )
        return np.asarray(np.maximum(freedom, 1), dtype=np.float64)

    def _constant(self, ptr: Ints) -> Anything:
        """Which terms are constant within every unit, judging by the sums."""
        one = np.array([term == "Intercept" for term in self.learned.terms])
        if not self.learned.has_sums or not one.any():
            return one
        A, at = segment_sum(self.learned.units.C, ptr), int(one.argmax())
        full = np.einsum("iaa->ia", A) * A[:, at, at][:, None]
        return np.asarray((full - A[:, at] ** 2 <= 1e-10 * full).all(axis=0))

    def is_global(self, level: Level) -> bool:
        """Whether the models of a level are the global model."""
        one_cluster = level == "cluster" and self.learned.tree.n_clusters == 1
        return level == "global" or one_cluster or not self.learned.components.grouped

    def is_averaged(self, level: Level) -> bool:
        """Whether intervals of a level average over the components."""
        return not self.is_global(level) and self.draws is not None

    def reach(self, coverage: float, X: Floats, chosen: Resolved, level: Level) -> Floats:
        """The half width of each row's interval, in standard errors, if it is not averaged over the components.

        It is a quantile of the normal distribution in a cluster of the training data. In a new cluster, and for the global
        model, it is one of the t distribution. The variance of a new cluster is mostly that between the ``k`` clusters, which
        has about ``k - 1`` degrees of freedom.
        """
        if self.is_global(level):
            return np.asarray(quantile(coverage, self.freedom(X)))
        between = bool(self.learned.components.cluster.terms)
        new = float(max(self.learned.tree.n_clusters - 1, 1)) if between else self.freedom().min()
        return np.asarray(np.where(chosen.cluster < 0, quantile(coverage, new), quantile(coverage)))

    def averaged(
        self, X: Floats, chosen: Resolved, level: Level, coverage: float, noise: Floats | None = None
    ) -> tuple[Floats, Floats]:
        """Intervals for ``x'theta`` of each row, averaged over the components.

        With ``noise``, the dispersion of each row in units of the residual variance, they are for a new response.
        """
        draws, ends = self._draws, np.empty((2, len(X)))
        for start in range(0, len(X), _ROWS):
            rows = slice(start, start + _ROWS)
            x, client = X[rows], chosen.client[rows]
            clients = np.unique(client[client >= 0])
            place = np.where(client >= 0, np.searchsorted(clients, client), -1)
            which = Resolved(place, chosen.cluster[rows]).index(len(clients))
            means, variances = np.empty((2, len(draws.weights), len(x)))
            for point, (coefficients, covariances) in enumerate(self._points(clients, level)):
                means[point] = np.einsum("la,la->l", x, coefficients[which])
                variances[point] = np.einsum("la,lab,lb->l", x, covariances[which], x)
            if noise is not None:
                variances = variances + draws.dispersion[:, None] * (noise if noise.ndim == 0 else noise[rows])
            ends[:, rows] = draws.interval(means, variances, coverage)
        return ends[0], ends[1]

    def coefficient_intervals(self, level: Level, coverage: float) -> tuple[Floats, Floats]:
        """Intervals for each coefficient of clients ``(n, d)`` or clusters ``(k, d)``, averaged over the components."""
        draws, n = self._draws, self.learned.tree.n_clients
        if level == "cluster":
            return draws.interval(draws.w, np.einsum("mkaa->mka", draws.clusters), coverage)
        parts = []
        for start in range(0, max(n, 1), _ROWS // 4):
            clients = np.arange(start, min(start + _ROWS // 4, n))
            points = [self._clients_at(point, clients) for point in range(len(draws.weights))]
            variances = np.stack([np.einsum("iaa->ia", V) for _, V in points])
            parts.append(draws.interval(np.stack([theta for theta, _ in points]), variances, coverage))
        low, high = (np.concatenate(ends) for ends in zip(*parts, strict=True))
        return low, high

    @property
    def _draws(self) -> Draws:
        if self.draws is None:
            raise SolverError("This model has no sample of its variance components; fit it again.")
        return self.draws

    def _points(self, clients: Ints, level: Level) -> Iterator[tuple[Floats, Floats]]:
        """At each point, means and covariances of these clients, of clusters or their new clients, and of a new cluster."""
        draws = self._draws
        for at, (P, S, own) in enumerate(zip(draws.clusters, draws.cluster, draws.client, strict=True)):
            w, new = np.concatenate([draws.w[at], draws.wbar[at][None]]), (draws.covariance[at] + S)[None]
            if level == "cluster":
                yield w, np.concatenate([P, new])
            else:
                theta, V = self._clients_at(at, clients)
                yield np.concatenate([theta, w]), np.concatenate([V, P + own, new + own.mean(axis=0)])

    def _clients_at(self, at: int, clients: Ints) -> tuple[Floats, Floats]:
        """Means and covariances of the coefficients of clients at one point."""
        draws, d = self._draws, len(self.learned.terms)
        if not len(clients):
            return np.empty((0, d)), np.empty((0, d, d))
        learned, s2, own = self.require_sums(), draws.dispersion[at], draws.client[at]
        C, r, parent = learned.units.C[clients], learned.units.r[clients], learned.tree.parent[clients]
        spread = Spread.of_covariances((own if len(own) == 1 else own[parent]) / s2, len(clients))
        theta, _ = descend(C, r, spread, parent, draws.w[at] - learned.origin)
        return learned.origin + theta, s2 * posterior(C, spread, parent, draws.clusters[at] / s2)

    @cached_property
    def clusters(self) -> Floats:
        """The covariance of each cluster's coefficients, ``(k, d, d)``."""
        if self.learned.whole is not None:
            return self.learned.whole.clusters
        learned = self.require_sums()
        seen = eliminate(learned.units, learned.client, learned.tree.cluster_ptr)
        s2 = learned.dispersion
        return s2 * cluster_covariances(seen.C, learned.cluster.shape[0], learned.covariance / s2)

    @cached_property
    def clients(self) -> Floats:
        """The covariance of each client's coefficients, ``(n, d, d)``."""
        learned = self.require_sums()
        above = self.clusters / learned.dispersion
        return learned.dispersion * posterior(learned.units.C, learned.client, learned.tree.parent, above)

    @property
    def new_cluster(self) -> Floats:
        """The covariance of the coefficients of a cluster without training data, ``(d, d)``."""
        return np.asarray(self.learned.covariance + self.learned.dispersion * self.learned.cluster.shape[0])

    @cached_property
    def between_clients(self) -> Floats:
        """The covariance between the clients of each cluster, and of a new cluster, ``(k + 1, d, d)``."""
        S, k = self.learned.client_covariances, self.learned.tree.n_clusters
        return self.learned.dispersion * np.concatenate([np.broadcast_to(S, (k, *S.shape[1:])), S.mean(axis=0)[None]])

    @cached_property
    def new_clients(self) -> Floats:
        """The covariance of a client without training data in each cluster, and in a new cluster, ``(k + 1, d, d)``."""
        return np.concatenate([self.clusters, self.new_cluster[None]]) + self.between_clients

    def standard_errors(self, level: Level) -> Floats:
        """The standard error of every coefficient of a level: ``(n, d)``, ``(k, d)`` or ``(d,)``."""
        if level == "global":
            return np.asarray(np.sqrt(np.diag(self.learned.covariance)))
        covariance = self.clients if level == "client" else self.clusters
        return np.asarray(np.sqrt(np.maximum(np.einsum("iaa->ia", covariance), 0.0)))

    def margin_variance(self, X: Floats, chosen: Resolved, level: Level) -> Floats:
        """The variance of ``x'theta`` for each row, whose model is ``chosen``. A new client's variance is included."""
        return _forms(X, *self._table(chosen, level))

    def spread(self, X: Floats, chosen: Resolved, *, clusters: bool = True) -> Floats:
        """The variance of ``x'theta`` between the clients that a row may belong to; 0 if ``chosen`` has its client.

        If ``chosen`` does not have its cluster either, this includes the variance between clusters, unless ``clusters=False``.
        """
        out, client, cluster = np.zeros(len(X)), chosen.client < 0, chosen.cluster < 0
        out[client] = _forms(X[client], self.between_clients, chosen.index(0)[client])
        if clusters:
            S = self.learned.dispersion * self.learned.cluster.shape
            out[cluster] += _forms(X[cluster], S, np.zeros(int(cluster.sum()), dtype=np.int64))
        return out

    def _table(self, chosen: Resolved, level: Level) -> tuple[Floats, Ints]:
        """Covariances, and the position of each row's."""
        if level == "global":
            return self.learned.covariance[None], np.zeros(len(chosen.client), dtype=np.int64)
        if level == "cluster":
            return np.concatenate([self.clusters, self.new_cluster[None]]), chosen.index(0)
        if not (chosen.client >= 0).any():
            return self.new_clients, chosen.index(0)
        return np.concatenate([self.clients, self.new_clients]), chosen.index(self.learned.tree.n_clients)

    @cached_property
    def reliability(self) -> Floats:
        """The share of each coefficient's variance among clients that a client's rows resolve, ``(n, d)``.

        0: the client has its cluster's coefficient. 1: its coefficient comes from its rows alone. NaN if it does not vary.
        """
        learned, zero = self.require_sums(), np.zeros((self.learned.tree.n_clusters, *self.learned.covariance.shape))
        alone = posterior(learned.units.C, learned.client, learned.tree.parent, zero)
        before = np.einsum("iaa->ia", learned.client.shape)
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(before > 0, 1.0 - np.einsum("iaa->ia", alone) / before, np.nan)

    def deviation_variances(self, level: Level) -> Floats:
        """The covariance of each cluster's deviation from the global model, or of each client's from its cluster.

        They are conditional on the data, the global coefficients and the variance components, like ``condVar`` of lme4.
        """
        learned = self.require_sums(all_clients=True)
        s2, d = learned.dispersion, len(learned.terms)
        seen = eliminate(learned.units, learned.client, learned.tree.cluster_ptr)
        P = cluster_covariances(seen.C, learned.cluster.shape[0], np.zeros((d, d)))
        if level == "cluster":
            return s2 * P
        tree = learned.tree
        alone = posterior(learned.units.C, learned.client, tree.parent, np.zeros_like(P))
        K = alone @ learned.units.C  # how far a client's deviation falls if its cluster's coefficients rise
        return np.asarray(s2 * (alone + K @ P[tree.parent] @ K.swapaxes(1, 2)))


def _forms(X: Floats, table: Floats, which: Ints) -> Floats:
    """``x'Vx`` of each row, with the covariance ``V`` at its position in the table."""
    out = np.empty(len(X))
    for start in range(0, len(X), _ROWS):
        rows = slice(start, start + _ROWS)
        out[rows] = np.einsum("la,lab,lb->l", X[rows], table[which[rows]], X[rows])
    return np.maximum(out, 0.0)


def p_value(estimate: Floats, error: Floats, freedom: Floats) -> Floats:
    """The p-value of the hypothesis that a coefficient is zero, by a t distribution."""
    with np.errstate(divide="ignore", invalid="ignore"):
        z = -np.abs(estimate / error)
        return np.asarray(np.where(np.isinf(freedom), 2 * special.ndtr(z), 2 * special.stdtr(freedom, z)))


def quantile(coverage: float, freedom: Any = np.inf) -> Any:
    """The half width of an interval in standard errors, given degrees of freedom. Checks ``coverage``."""
    if not (isinstance(coverage, int | float | np.number) and 0 < coverage < 1):
        percent = f" For {coverage:g}% write {coverage / 100:g}." if isinstance(coverage, int | float) and coverage > 1 else ""
        raise CoveyError(f"The 'coverage' parameter must lie between 0 and 1. Got {coverage!r} instead.{percent}")
    return np.where(np.isinf(freedom), special.ndtri(0.5 + coverage / 2), special.stdtrit(freedom, 0.5 + coverage / 2))[()]
