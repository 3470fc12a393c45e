"""A fitted model: coefficients at three levels, predictions and intervals.

The scikit-learn estimators and the command line both use :class:`Model`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import polars as pl

from covey._typing import Anything, Floats, Ints
from covey.errors import DataError, ModelError, SolverError, listing, one_of
from covey.kernels import multiply_rows
from covey.model.batches import Batches
from covey.model.new_rows import new_rows
from covey.model.posterior import Posterior, p_value, quantile
from covey.objective.objective import Penalty
from covey.problem.problem import Problem, Spec, as_frame
from covey.solvers.registry import first_order
from covey.solvers.result import Fit
from covey.tables.design import numeric
from covey.tables.scaling import Design
from covey.tables.sparse import NOT_SPARSE
from covey.tables.values import Dropped
from covey.threads import share
from covey.tree.hierarchy import Hierarchy, Level, Resolved
from covey.variance.components import Learned


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
                f"and the solvers {listing(first_order())}. A plain regression without groups has standard errors if it does "
                "not fit the response exactly and its rows determine all coefficients."
            )
        return Posterior(self.learned)

    def margin(self, X: Any, **where: Any) -> tuple[Floats, Resolved]:
        """``x'theta + offset`` of each row, and the model that it comes from. ``where`` as in :func:`.new_rows`."""
        rows, chosen, shift = new_rows(self, X, **where)
        return self.margin_of(rows, chosen, shift), chosen

    def margin_of(self, rows: Floats, chosen: Resolved, shift: Floats | None) -> Floats:
        """``x'theta + shift`` of rows that :func:`.new_rows` has coded."""
        margin = np.empty(len(rows))
        share(multiply_rows, len(rows), rows, self.coefficient_table, chosen.index(len(self.theta)), margin)
        return margin if shift is None else margin + shift

    def response(self, X: Any, *, expected: bool = True, **where: Any) -> tuple[Floats, Floats, Resolved]:
        """The margin and the response of each row, and the model that they come from. ``where`` as in :func:`.new_rows`.

        With ``expected`` the response is a mean over all clients that a row may belong to, if its own is not in the model.
        Otherwise it is the response at the margin. Without variance components both are the same.
        """
        rows, chosen, shift = new_rows(self, X, **where)
        margin = self.margin_of(rows, chosen, shift)
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
        if self.shared is not None:
            raise DataError(NOT_SPARSE)
        posterior, level = self.posterior, where.get("level", "client")
        rows, chosen, shift = new_rows(self, X, **where)
        average = expected and level != "client"
        if posterior.is_averaged(level):  # a linear model, so a mean over clients differs for a new response only
            relative = self._noise(X, coverage) / posterior.learned.dispersion if noise else None
            ends = posterior.averaged(rows, chosen, "client" if noise and average else level, coverage, relative)
            return np.column_stack(ends if shift is None else [end + shift for end in ends])
        margin, variance = self.margin_of(rows, chosen, shift), posterior.margin_variance(rows, chosen, level)
        reach = posterior.reach(coverage, rows, chosen, level)
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
            s2 *= (quantile(coverage, self.posterior.freedom().min()) / quantile(coverage)) ** 2
        if name is None or not self.spec.loss.reml or name not in as_frame(X).columns:
            return np.asarray(s2)
        with np.errstate(divide="ignore"):
            return np.asarray(s2 / numeric(as_frame(X), name))

    def coefficients(self, level: Level = "client", coverage: float = 0.95) -> pl.DataFrame:
        """The coefficients of one level, one row per unit and term, with standard errors and intervals if there are any."""
        tidy = self._coefficients(level)
        quantile(coverage)
        if self.learned is None or not self.learned.has_standard_errors(level):
            return self._with_shared(tidy, level, coverage)
        posterior, estimate = self.posterior, tidy["estimate"].to_numpy()
        columns = {"std_error": posterior.standard_errors(level).ravel()}
        if posterior.is_averaged(level):
            ends = posterior.coefficient_intervals(level, coverage)
            columns["lower"], columns["upper"] = (end.ravel() for end in ends)
        else:
            freedom = posterior.freedom() if posterior.is_global(level) else np.full(len(estimate), np.inf)
            reach = columns["std_error"] * quantile(coverage, freedom)
            columns |= {"lower": estimate - reach, "upper": estimate + reach}
            if level == "global":
                columns |= {"df": freedom, "p_value": p_value(estimate, columns["std_error"], freedom)}
        return self._with_shared(
            tidy.with_columns(pl.Series(name, values) for name, values in columns.items()), level, coverage
        )

    def _with_shared(self, tidy: pl.DataFrame, level: Level, coverage: float) -> pl.DataFrame:
        """The global coefficients, with those of sparse columns after them."""
        if self.shared is None or level != "global":
            return tidy
        beta, errors = self.shared.beta, self.shared.errors
        rows = pl.DataFrame({"term": self.shared.terms, "estimate": beta})
        if self.learned is not None:
            freedom = np.full(len(beta), float(max(self.learned.components.rows - len(self.terms) - self.learned.more, 1)))
            reach = errors * quantile(coverage, freedom)
            known = {"std_error": errors, "lower": beta - reach, "upper": beta + reach}
            known |= {"df": freedom, "p_value": p_value(beta, errors, freedom)}
            rows = rows.with_columns(pl.Series(name, values) for name, values in known.items())
        return pl.concat([tidy, rows])

    def reliability(self) -> pl.DataFrame:
        """The reliability of coefficients, 0 to 1: one row per client and varying term (:attr:`Posterior.reliability`)."""
        tidy = self._coefficients("client").drop("estimate")
        tidy = tidy.with_columns(reliability=pl.Series(self.posterior.reliability.ravel()))
        return tidy.filter(pl.col("reliability").is_not_nan())

    def random_effects(self, level: Level = "client") -> pl.DataFrame:
        """Deviations of clients from their cluster, or of clusters from the global model, for the terms that vary.

        The conditional variances (:meth:`.Posterior.deviation_variances`) need the sums of all clients; else they are null.
        """
        if level not in ("client", "cluster"):
            raise one_of("level", level, ("client", "cluster"))
        centre = self.w[self.hierarchy.parent] if level == "client" else self.wbar[None]
        values = (self.theta if level == "client" else self.w) - centre
        tidy = self._coefficients(level).drop("estimate").with_columns(deviation=pl.Series(values.ravel()))
        learned = self.learned
        if learned is None:
            return tidy
        variances = pl.Series([None] * len(tidy), dtype=pl.Float64)
        if learned.has_sums and learned.whole is None:
            variances = pl.Series(np.einsum("iaa->ia", self.posterior.deviation_variances(level)).ravel())
        terms = getattr(learned.components, level).terms
        return tidy.with_columns(conditional_variance=variances).filter(pl.col("term").is_in(terms))

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
    sparse = () if problem.sparse is None else problem.sparse.sparse_terms
    if shapes != ((n, d), (k, d), (d,), (n,)) or sparse != (() if fit.shared is None else fit.shared.terms):
        raise ModelError("The model is damaged: its coefficients do not fit its clients, clusters and terms; fit it again.")
    given = {"problem": problem, "hierarchy": hierarchy, "rows": rows, "elsewhere": elsewhere, "dropped": dropped}
    return Model(**vars(fit), **given, penalty=fitted.penalty, learned=fitted.learned, batches=batches)  # type: ignore[arg-type]
