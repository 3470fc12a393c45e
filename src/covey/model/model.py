"""A fitted model: coefficients at three levels, predictions, intervals and posterior covariances.

The scikit-learn estimators and the command line both use :class:`Model`. :class:`Posterior` has the covariances of the
coefficients, given the variance components. From the global model down to clusters and clients they are

    V = s2 (sum D_j)^-1       V_j = s2 (I + S C_j)^-1 S + J_j V J_j'       V_i = s2 (I + S_i A_i)^-1 S_i + J_i V_j J_i'

where ``J_j = (I + S C_j)^-1`` and ``J_i = (I + S_i A_i)^-1`` (see :mod:`covey.variance.linear_likelihood` for the other
symbols). The first part of ``V_j`` and ``V_i`` is the variance about the parent that the data leaves open. The second is the
parent's variance, as far as the child depends on it. A client without training data has ``V_j + s2 S_i``; in a cluster without
training data it has ``V + s2 S + s2 S_i``. The variance components are treated as exact, so with few clusters intervals are a
little short. For the global model and new clusters, where that matters most, they use a t distribution.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import polars as pl
from scipy import special

from covey._typing import Anything, Floats, Ints
from covey.errors import ModelError, SolverError, listing, one_of
from covey.model.batches import Batches
from covey.model.new_rows import new_rows
from covey.objective.objective import Penalty
from covey.problem.problem import Problem, Spec, as_frame
from covey.solvers.direct.elimination import eliminate, posterior
from covey.solvers.registry import first_order
from covey.solvers.result import Fit
from covey.tables.design import numeric
from covey.tables.scaling import Design
from covey.tables.values import Dropped
from covey.tree.hierarchy import Hierarchy, Level, Resolved, segment_sum
from covey.variance.components import Learned
from covey.variance.linear_likelihood import cluster_covariances

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
        if not self.learned.has_sums:
            raise SolverError(
                "This model has no sums of its clients, which intervals and updates need: save it with sums=True, or use the "
                "models at the sites."
            )
        return self.learned

    @cached_property
    def freedom(self) -> Floats:
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
        freedom = np.where(between | steady, by_cluster, np.where(within | settled, by_client, components.rows - d))
        return np.asarray(np.maximum(freedom, 1), dtype=np.float64)

    def _constant(self, ptr: Ints) -> Anything:
        """Which terms are constant within every unit, judging by the sums."""
        one = np.array([term == "Intercept" for term in self.learned.terms])
        if not self.learned.has_sums or not one.any():
            return one
        A, at = segment_sum(self.learned.units.C, ptr), int(one.argmax())
        full = np.einsum("iaa->ia", A) * A[:, at, at][:, None]
        return np.asarray((full - A[:, at] ** 2 <= 1e-10 * full).all(axis=0))

    def reach(self, coverage: float, chosen: Resolved, level: Level) -> Floats:
        """The half width of each row's interval, in standard errors.

        It is a quantile of the normal distribution in a cluster of the training data. In a new cluster, and for the global
        model, it is one of the t distribution with as many degrees of freedom as the clusters give.
        """
        is_global = (chosen.cluster < 0) | (level == "global") | (level == "cluster" and self.learned.tree.n_clusters == 1)
        return np.asarray(np.where(is_global, quantile(coverage, self.freedom.min()), quantile(coverage)))

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


def _forms(X: Floats, table: Floats, which: Ints) -> Floats:
    """``x'Vx`` of each row, with the covariance ``V`` at its position in the table."""
    out = np.empty(len(X))
    for start in range(0, len(X), _ROWS):
        rows = slice(start, start + _ROWS)
        out[rows] = np.einsum("la,lab,lb->l", X[rows], table[which[rows]], X[rows])
    return np.maximum(out, 0.0)


def quantile(coverage: float, freedom: Any = np.inf) -> Any:
    """The half width of an interval in standard errors, given degrees of freedom. Checks ``coverage``."""
    if not (isinstance(coverage, int | float | np.number) and 0 < coverage < 1):
        raise SolverError(f"The 'coverage' parameter must lie between 0 and 1. Got {coverage!r} instead.")
    return np.where(np.isinf(freedom), special.ndtri(0.5 + coverage / 2), special.stdtrit(freedom, 0.5 + coverage / 2))[()]


@dataclass(frozen=True)
class Elsewhere:
    """The numbers of clients and of rows in each cluster, ``(k,)``, of clients whose models are at these sites.

    ``dropped`` are the rows that the sites left out.
    """

    sites: tuple[str, ...]
    clients: Ints
    rows: Ints
    dropped: Dropped | None = None


@dataclass(frozen=True)
class Fitted:
    """Coefficients, with their penalties: ``penalty`` if these are numbers, ``learned`` if they are covariances."""

    fit: Fit
    penalty: Penalty | None = None
    learned: Learned | None = None


@dataclass(frozen=True, kw_only=True)
class Model(Fit):
    """The fit of a problem, made by :func:`assemble`.

    Attributes
    ----------
    problem : the specification and the design that were fitted
    hierarchy : the clients in their clusters
    rows : (n,) the number of rows of each client
    penalty, learned : the penalties, as in :class:`Fitted`
    elsewhere : at the operator of a fit across sites, whose model has no clients, their numbers
    dropped : the rows with missing values that were left out
    batches : hashes of the rows, if the model can be updated
    """

    problem: Problem
    hierarchy: Hierarchy
    rows: Ints
    penalty: Penalty | None
    learned: Learned | None
    elsewhere: Elsewhere | None = None
    dropped: Dropped | None = None
    batches: Batches | None = None

    @property
    def spec(self) -> Spec:
        return self.problem.spec

    @property
    def design(self) -> Design:
        return self.problem.design

    @cached_property
    def classes(self) -> Anything | None:
        """The two classes of a binary response."""
        return None if self.problem.classes is None else self.problem.classes.array

    @property
    def coefficient_table(self) -> Floats:
        """The coefficients of clients, clusters and the global model, in the order of :meth:`.Resolved.index`."""
        return np.concatenate([self.theta, self.w, self.wbar[None]])

    @property
    def clients_of_cluster(self) -> Ints:
        """The number of clients in each cluster of the training data, ``(k,)``."""
        return self.hierarchy.sizes if self.elsewhere is None else self.elsewhere.clients

    @property
    def n_rows(self) -> int:
        """The number of rows of the training data."""
        return int((self.rows if self.elsewhere is None else self.elsewhere.rows).sum())

    @property
    def terms(self) -> tuple[str, ...]:
        return self.design.terms

    @cached_property
    def posterior(self) -> Posterior:
        """The posterior covariances of the coefficients."""
        if self.learned is None:
            raise SolverError(
                "Standard errors, intervals, components_, bootstrap, add_clients and remove_clients need variances that were "
                "learned from the data of several clients; leave out gamma, lam, alpha, baseline, penalty='cv', james_stein "
                f"and the solvers {listing(first_order())}. A plain regression without groups has standard errors if it is not "
                "perfect and its rows determine all coefficients."
            )
        return Posterior(self.learned)

    def margin(self, X: Any, **where: Any) -> tuple[Floats, Resolved]:
        """``x'theta + offset`` of each row, and the model that it comes from. ``where`` as in :func:`.new_rows`."""
        rows, chosen, shift = new_rows(self, X, **where)
        return self._margin(rows, chosen, shift), chosen

    def _margin(self, rows: Floats, chosen: Resolved, shift: Floats | None) -> Floats:
        margin: Floats = np.einsum("ld,ld->l", rows, self.coefficient_table[chosen.index(len(self.theta))])
        return margin if shift is None else margin + shift

    def response(self, X: Any, *, expected: bool = True, **where: Any) -> tuple[Floats, Floats, Resolved]:
        """The margin and the response of each row, and the model that they come from. ``where`` as in :func:`.new_rows`.

        With ``expected`` the response is a mean over all clients that a row may belong to, if its own is not in the model.
        Otherwise it is the response at the margin. Without variance components both are the same.
        """
        rows, chosen, shift = new_rows(self, X, **where)
        margin = self._margin(rows, chosen, shift)
        spread = self.posterior.spread(rows, chosen) if expected and self.learned is not None else np.zeros(len(rows))
        return margin, self._mean(margin, spread), chosen

    def _mean(self, margin: Floats, spread: Floats) -> Floats:
        """The expected response if margins have the variance ``spread``."""
        loss, varies = self.problem.loss, spread > 0
        if not varies.any():
            return loss.mean(margin)
        mean = np.array(loss.mean(margin))
        mean[varies] = loss.expected(margin[varies], spread[varies])
        return mean

    def intervals(self, X: Any, *, coverage: float = 0.95, noise: bool = False, expected: bool = True, **where: Any) -> Floats:
        """Intervals ``(rows, 2)`` for the expected response of each row; with ``noise``, for a new response.

        ``where`` says which client or cluster predicts each row, as in :func:`.new_rows`. At the client level the interval is
        for the response of the row's client, so it includes the variance of an unseen client. At the other levels it is for
        the mean over clients, as in :meth:`response`.
        """
        quantile(coverage)
        posterior, level = self.posterior, where.get("level", "client")
        rows, chosen, shift = new_rows(self, X, **where)
        margin, variance = self._margin(rows, chosen, shift), posterior.margin_variance(rows, chosen, level)
        reach = posterior.reach(coverage, chosen, level)
        average = expected and level != "client"
        spread = posterior.spread(rows, chosen, clusters=level == "global") if average else np.zeros(len(rows))
        if noise:
            return self.problem.loss.response_interval(margin, variance + spread, reach, coverage, self._noise(X, coverage))
        half = np.sqrt(reach**2 * variance)
        return np.column_stack([self._mean(margin - half, spread), self._mean(margin + half, spread)])

    def _noise(self, X: Any, coverage: float) -> Floats:
        """The dispersion of new rows. In a linear model it is divided by their weights, if the table has them."""
        s2, name = self.posterior.learned.dispersion, self.spec.weights
        if self.spec.loss.reml and not self.posterior.learned.components.grouped:
            # In a plain regression an exact interval has t quantiles for the noise too.
            s2 *= (quantile(coverage, self.posterior.freedom.min()) / quantile(coverage)) ** 2
        if name is None or not self.spec.loss.reml or name not in as_frame(X).columns:
            return np.asarray(s2)
        with np.errstate(divide="ignore"):
            return np.asarray(s2 / numeric(as_frame(X), name))

    def coefficients(self, level: Level = "client", coverage: float = 0.95) -> pl.DataFrame:
        """The coefficients of one level, one row per unit and term, with standard errors and intervals if there are any."""
        tidy = self._coefficients(level)
        quantile(coverage)
        if self.learned is None or not self.learned.has_standard_errors(level):
            return tidy
        error = self.posterior.standard_errors(level).ravel()
        is_global = level == "global" or (level == "cluster" and self.hierarchy.n_clusters == 1)
        is_global |= not self.learned.components.grouped
        reach = error * (quantile(coverage, self.posterior.freedom) if is_global else quantile(coverage))
        estimate = tidy["estimate"].to_numpy()
        bounds = {"lower": pl.Series(estimate - reach), "upper": pl.Series(estimate + reach)}
        return tidy.with_columns(std_error=pl.Series(error), **bounds)

    def reliability(self) -> pl.DataFrame:
        """The reliability of coefficients, 0 to 1: one row per client and varying term (:attr:`Posterior.reliability`)."""
        tidy = self._coefficients("client").drop("estimate")
        tidy = tidy.with_columns(reliability=pl.Series(self.posterior.reliability.ravel()))
        return tidy.filter(pl.col("reliability").is_not_nan())

    def _coefficients(self, level: Level) -> pl.DataFrame:
        d = len(self.terms)
        tree = self.hierarchy
        if level == "global":
            return pl.DataFrame({"term": self.terms, "estimate": self.wbar})
        if level == "cluster":
            ids = {"cluster": tree.cluster_ids, "clients": self.clients_of_cluster}
            values = self.w
        elif level == "client":
            ids = {"cluster": tree.cluster_of_client, "client": tree.client_ids, "rows": self.rows}
            values = self.theta
        else:
            raise one_of("level", level, ("client", "cluster", "global"))
        index = pl.Series(np.repeat(np.arange(len(values)), d))
        tidy = pl.DataFrame(ids)[index]
        return tidy.with_columns(
            term=pl.Series(list(self.terms) * len(values), dtype=pl.String), estimate=pl.Series(values.ravel())
        )


def assemble(
    problem: Problem,
    fitted: Fitted,
    hierarchy: Hierarchy,
    rows: Ints,
    *,
    elsewhere: Elsewhere | None = None,
    dropped: Dropped | None = None,
    batches: Batches | None = None,
) -> Model:
    """Make a :class:`Model`, and check the shapes of its arrays. All models are made here."""
    fit, d = fitted.fit, len(problem.terms)
    shapes = fit.theta.shape, fit.w.shape, fit.wbar.shape, np.shape(rows)
    n, k = hierarchy.n_clients, hierarchy.n_clusters
    if shapes != ((n, d), (k, d), (d,), (n,)):
        raise ModelError("The model is damaged: its coefficients do not fit its clients, clusters and terms; fit it again.")
    given = {"problem": problem, "hierarchy": hierarchy, "rows": rows, "elsewhere": elsewhere, "dropped": dropped}
    return Model(**vars(fit), **given, penalty=fitted.penalty, learned=fitted.learned, batches=batches)  # type: ignore[arg-type]
