"""The model that fitting a specification leaves behind: what predicts, prints and goes to disk.

The scikit-learn estimators and the command line are two faces of this; it needs neither of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import polars as pl

from covey._typing import Anything, Floats, Ints
from covey.errors import ModelError, SolverError, one_of
from covey.model.inference import Posterior, quantile
from covey.model.new_rows import new_rows
from covey.objective.objective import Penalty
from covey.problem.problem import Problem, Spec, as_frame
from covey.solvers.ledger import Ledger
from covey.solvers.result import Convergence, Fit
from covey.tables.design import numeric
from covey.tables.scaling import Design
from covey.tree.hierarchy import Hierarchy, Level, Resolved, Unseen
from covey.variance.components import Learned


@dataclass(frozen=True)
class Elsewhere:
    """Clients whose models are at their sites, and not here: how many each cluster has, ``(k,)``, and how many rows."""

    sites: tuple[str, ...]
    clients: Ints
    rows: Ints


@dataclass(frozen=True)
class Fitted:
    """Coefficients, and where their penalties come from: ``penalty`` as numbers, ``learned`` as covariances."""

    fit: Fit
    penalty: Penalty | None = None
    learned: Learned | None = None


@dataclass(frozen=True)
class Model:
    """A fitted hierarchy: coefficients at three levels, and what is needed to use and to explain them.

    Made by :func:`assemble`. The operator of a fit across sites has a model without clients; ``elsewhere`` then says where
    they are.

    Attributes
    ----------
    problem : what was fitted
    hierarchy : the clients in their clusters
    fitted : coefficients, penalties and what was learned
    rows : (n,) how many rows each client has
    """

    problem: Problem
    hierarchy: Hierarchy
    fitted: Fitted
    rows: Ints
    elsewhere: Elsewhere | None = None

    @property
    def spec(self) -> Spec:
        return self.problem.spec

    @property
    def design(self) -> Design:
        return self.problem.design

    @property
    def theta(self) -> Floats:
        """The clients' coefficients, ``(n, d)``."""
        return self.fitted.fit.theta

    @property
    def w(self) -> Floats:
        """The clusters' coefficients, ``(k, d)``."""
        return self.fitted.fit.w

    @property
    def wbar(self) -> Floats:
        """The global coefficients, ``(d,)``."""
        return self.fitted.fit.wbar

    @property
    def convergence(self) -> Convergence:
        return self.fitted.fit.convergence

    @property
    def history(self) -> pl.DataFrame | None:
        return self.fitted.fit.history

    @property
    def ledger(self) -> Ledger | None:
        return self.fitted.fit.ledger

    @property
    def penalty(self) -> Penalty | None:
        return self.fitted.penalty

    @property
    def learned(self) -> Learned | None:
        return self.fitted.learned

    @cached_property
    def classes(self) -> Anything | None:
        """The two classes of a binary response."""
        return None if self.problem.classes is None else self.problem.classes.array

    @property
    def has_offset(self) -> bool:
        return self.problem.has_offset

    @property
    def coefficient_table(self) -> Floats:
        """All models in one table: clients, clusters, the global one last, as :meth:`.Resolved.index` counts them."""
        return np.concatenate([self.theta, self.w, self.wbar[None]])

    @property
    def clients_of_cluster(self) -> Ints:
        """How many clients each cluster was fitted to, ``(k,)``."""
        return self.hierarchy.sizes if self.elsewhere is None else self.elsewhere.clients

    @property
    def n_rows(self) -> int:
        """How many rows it was fitted to."""
        return int((self.rows if self.elsewhere is None else self.elsewhere.rows).sum())

    @property
    def terms(self) -> tuple[str, ...]:
        return self.design.terms

    @cached_property
    def posterior(self) -> Posterior:
        """The posterior covariances of the coefficients."""
        if self.learned is None:
            raise SolverError(
                "Standard errors and intervals need penalties that were learned from the data of several clients; leave out "
                "gamma, lam, alpha, baseline, penalty='cv', james_stein and first-order solvers."
            )
        return Posterior(self.learned, self.hierarchy, self.terms)

    def margin(
        self,
        X: Any,
        *,
        client: Any = None,
        cluster: Any = None,
        offset: Any = None,
        level: Level = "client",
        unseen: Unseen = "parent",
    ) -> tuple[Floats, Resolved]:
        """``x'theta + offset`` of each row by the model that answers for it, and which one that is."""
        rows, chosen, shift = new_rows(self, X, client=client, cluster=cluster, offset=offset, level=level, unseen=unseen)
        return self._margin(rows, chosen, shift), chosen

    def _margin(self, rows: Floats, chosen: Resolved, shift: Floats | None) -> Floats:
        margin: Floats = np.einsum("ld,ld->l", rows, self.coefficient_table[chosen.index(len(self.theta))])
        return margin if shift is None else margin + shift

    def intervals(
        self,
        X: Any,
        *,
        coverage: float = 0.95,
        noise: bool = False,
        client: Any = None,
        cluster: Any = None,
        offset: Any = None,
        level: Level = "client",
        unseen: Unseen = "parent",
    ) -> Floats:
        """Where the expected response of each row lies, ``(rows, 2)``; with ``noise``, where a new response would."""
        where: dict[str, Any] = {"client": client, "cluster": cluster, "offset": offset, "level": level, "unseen": unseen}
        quantile(coverage)
        posterior = self.posterior
        rows, chosen, shift = new_rows(self, X, **where)
        margin, variance = self._margin(rows, chosen, shift), posterior.margin_variance(rows, chosen, level)
        reach = posterior.reach(coverage, chosen, level)
        if noise:
            return self.problem.loss.response_interval(margin, variance, reach, coverage, self._noise(X))
        half = np.sqrt(reach**2 * variance)
        return self.mean(np.column_stack([margin - half, margin + half]))

    def _noise(self, X: Any) -> Floats:
        """The dispersion of new rows; of a linear model less where the table says that they weigh more."""
        s2, name = self.posterior.learned.dispersion, self.spec.weights
        if name is None or not self.spec.loss.reml or name not in as_frame(X).columns:
            return np.asarray(s2)
        with np.errstate(divide="ignore"):
            return np.asarray(s2 / numeric(as_frame(X), name))

    def mean(self, margin: Floats) -> Floats:
        return self.problem.loss.mean(margin)

    def coefficients(self, level: Level = "client", coverage: float = 0.95) -> pl.DataFrame:
        """The coefficients of one level, a row for each unit and term; with standard errors and intervals if known."""
        tidy = self._coefficients(level)
        quantile(coverage)
        if self.learned is None or not self.learned.knows(level):
            return tidy
        error = self.posterior.standard_errors(level).ravel()
        alone = level == "global" or (level == "cluster" and self.hierarchy.n_clusters == 1)
        reach = error * (quantile(coverage, self.posterior.freedom) if alone else quantile(coverage))
        estimate = tidy["estimate"].to_numpy()
        bounds = {"lower": pl.Series(estimate - reach), "upper": pl.Series(estimate + reach)}
        return tidy.with_columns(std_error=pl.Series(error), **bounds)

    def reliability(self) -> pl.DataFrame:
        """How far each client stands on its own data: a row for each client and varying term, 0 to 1."""
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
            ids = {"cluster": tree.cluster_ids.gather(tree.parent), "client": tree.client_ids, "rows": self.rows}
            values = self.theta
        else:
            raise one_of("level", level, ("client", "cluster", "global"))
        index = pl.Series(np.repeat(np.arange(len(values)), d))
        tidy = pl.DataFrame(ids)[index]
        return tidy.with_columns(
            term=pl.Series(list(self.terms) * len(values), dtype=pl.String), estimate=pl.Series(values.ravel())
        )


def assemble(problem: Problem, fitted: Fitted, hierarchy: Hierarchy, rows: Ints, elsewhere: Elsewhere | None = None) -> Model:
    """The one way to a :class:`Model`: of a fit in memory, at a site, at an operator's, or from disk."""
    fit, d = fitted.fit, len(problem.terms)
    shapes = fit.theta.shape, fit.w.shape, fit.wbar.shape, np.shape(rows)
    n, k = hierarchy.n_clients, hierarchy.n_clusters
    if shapes != ((n, d), (k, d), (d,), (n,)):
        raise ModelError("The model is damaged: its coefficients do not fit its clients, clusters and terms; fit it again.")
    return Model(problem, hierarchy, fitted, rows, elsewhere)
