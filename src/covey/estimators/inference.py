"""Methods of a fitted estimator for standard errors, intervals, tests, and for adding and removing clients."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from copy import copy
from typing import Any, Self

import polars as pl
from narwhals.typing import IntoDataFrame
from sklearn.utils.validation import check_is_fitted

from covey._typing import ArrayLike, Floats, TableLike
from covey.errors import DataError, SolverError, one_of
from covey.estimators.core import EstimatorCore
from covey.model.new_rows import group_rows
from covey.model.posterior import quantile
from covey.model.summary import Summary
from covey.model.updates import add_clients, remove_clients, update
from covey.problem.rows import Arrays
from covey.tables.rows import GroupedData
from covey.tree.hierarchy import Level
from covey.variance.bootstrap import bootstrap
from covey.variance.components import Components, LikelihoodRatio


class NoComponentsError(AttributeError, SolverError):
    """A model with given penalties has no variance components. As a missing attribute, it does not disturb ``hasattr``."""


class InferenceMethods(EstimatorCore):
    """Standard errors, intervals, tests and updates.

    All need variances that were learned by likelihood, but ``summary`` and ``coef_frame`` also work without.
    """

    @property
    def components_(self) -> Components:
        """Variance components of clients and clusters, with the log-likelihood and the tests."""
        try:
            return self._fitted.posterior.learned.components
        except SolverError as problem:
            raise NoComponentsError(str(problem)) from None

    def summary(self, coverage: float = 0.95) -> Summary:
        """Summarise the model in words and numbers.

        Parameters
        ----------
        coverage : float
            Coverage of the intervals.

        Returns
        -------
        Summary
            ``print`` shows it; ``to_json()`` has the numbers.

        Examples
        --------
        >>> from covey import HierarchicalRegressor, datasets
        >>> homes = datasets.load_radon()
        >>> model = HierarchicalRegressor(formula="log_radon ~ floor + (1 | state/county)").fit(homes)
        >>> {name: round(share, 2) for name, share in model.summary().to_json()["share_of_variance"].items()}
        {'cluster': 0.19, 'client': 0.11, 'residual': 0.7}
        """
        check_is_fitted(self, "model_")
        return Summary(self.model_, coverage)

    def coef_frame(self, level: Level = "client", coverage: float = 0.95) -> IntoDataFrame:
        """Tabulate coefficients, with standard errors and intervals if the penalties were learned by likelihood.

        Intervals of a linear model include the uncertainty of the variance components. For global coefficients they are those
        of a t distribution with Satterthwaite's degrees of freedom ``df``, as is ``p_value``, which tests the hypothesis that
        the coefficient is zero. Those of clients and clusters are between quantiles of the posterior, averaged over the
        components, so the estimate need not be in their middle. In other families global coefficients use
        Satterthwaite's degrees of freedom of the approximating linear model, and clients and clusters use normal quantiles.
        Standard errors always take the components as known.

        Parameters
        ----------
        level : {"client", "cluster", "global"}
            Whose coefficients.
        coverage : float
            Coverage of the intervals.

        Returns
        -------
        data frame
            One row for each client (or cluster) and term, in the library of the fitted frame.

        Examples
        --------
        >>> from covey import HierarchicalRegressor
        >>> model = HierarchicalRegressor(gamma=1.0).fit([[0.0], [1.0]], [1.0, 3.0], client=["a", "b"])
        >>> model.coef_frame("global")["term"].to_list()
        ['Intercept', 'x0']
        """
        check_is_fitted(self, "model_")
        return self._native(self.model_.coefficients(level, coverage))

    def reliability(self) -> IntoDataFrame:
        """Tabulate how much the rows of each client determine its coefficients.

        The reliability is ``1 - v / s``: ``s`` is the variance of the term between clients, and ``v`` is the posterior variance
        of the client's deviation from its cluster, with the cluster's coefficients taken as known.

        Returns
        -------
        data frame
            One row for each client and varying term. A reliability of 0 means that the client has the coefficient of its
            cluster, 1 that only its own rows count.

        Examples
        --------
        >>> from covey import HierarchicalRegressor, datasets
        >>> homes = datasets.load_radon()
        >>> model = HierarchicalRegressor(formula="log_radon ~ floor + (1 | state/county)").fit(homes)
        >>> model.reliability().filter(client="Apache, AZ")["reliability"].round(2).to_list()
        [0.64]
        """
        check_is_fitted(self, "model_")
        return self._native(self.model_.reliability())

    def predict_interval(
        self,
        X: TableLike,
        client: ArrayLike | None = None,
        cluster: ArrayLike | None = None,
        offset: ArrayLike | None = None,
        level: Level = "client",
        *,
        coverage: float = 0.95,
        noise: bool = False,
        expected: bool = True,
    ) -> Floats:
        """Predict an interval for the mean response of each row, or for a new response.

        - ``level="client"``: for the mean response of the row's client. Includes the variation between clients if the client is
          unseen, and that between clusters if the cluster is unseen.
        - ``level="cluster"``: for the mean response of all clients of the row's cluster. Includes the variation between
          clusters if the cluster is unseen.
        - ``level="global"``: for the mean response of clients of all clusters.

        The interval is computed for the linear predictor, and its ends are converted to the response. Where it is for a mean
        over clients, an end ``m`` is converted to the mean of ``g^-1(m + u)``: ``g`` is the link, and ``u`` is normal with the
        variance of the random effects. Intervals of a linear model include the uncertainty of the variance components. Those of
        other families do so only for ``level="global"`` and for unseen clusters; the others are too short with few groups.

        Parameters
        ----------
        X : data frame or (n_rows, n_features) array
            The rows.
        client, cluster, offset : (n_rows,) arrays, optional
            Ids and offsets, if they are not columns of ``X``.
        level : {"client", "cluster", "global"}
            The level of the model that predicts.
        coverage : float
            Coverage of the intervals.
        noise : bool
            Whether the interval is for a new response rather than for its mean; for linear, Poisson and Gamma models. With
            ``level="cluster"`` it is for a response of an unknown client of that cluster, with ``"global"`` of an unknown
            client of any cluster.
        expected : bool
            With ``level="cluster"`` or ``"global"``, whether the interval is for a mean over clients. False: for the response
            at a random effect of zero.

        Returns
        -------
        (n_rows, 2) array
            Lower and upper ends.

        Examples
        --------
        >>> from covey import HierarchicalRegressor, datasets
        >>> homes = datasets.load_radon()
        >>> model = HierarchicalRegressor(formula="log_radon ~ floor + (1 | state/county)").fit(homes)
        >>> model.predict_interval(homes[:1]).round(2).tolist(), model.predict_interval(homes[:1], noise=True).round(2).tolist()
        ([[-0.66, 0.21]], [[-2.05, 1.6]])
        """
        X, given = self._rows(X, client=client, cluster=cluster, offset=offset)
        return self.model_.intervals(
            X, coverage=coverage, noise=noise, expected=expected, level=level, unseen=self.unseen, **given
        )

    def likelihood_ratio(self, level: str) -> LikelihoodRatio:
        """Return the likelihood-ratio test of variation between clusters, or between the clients of a cluster.

        Parameters
        ----------
        level : {"client", "cluster"}
            The level whose variances are zero under the null hypothesis.

        Returns
        -------
        LikelihoodRatio
            Statistic, number of parameters and p-value. The p-value accounts for variances on the boundary. It is approximate:
            it holds in large samples, and takes the estimates of several variances as uncorrelated.

        Examples
        --------
        >>> from covey import HierarchicalRegressor, datasets
        >>> homes = datasets.load_radon()
        >>> model = HierarchicalRegressor(formula="log_radon ~ floor + (1 | state/county)").fit(homes)
        >>> model.likelihood_ratio("cluster").p_value < 1e-10
        True
        """
        if level not in ("client", "cluster"):
            raise one_of("level", level, ("client", "cluster"))
        found = {test.level: test for test in self.components_.tests}
        if level not in found:
            reason = f"no term varies by {level}" if not getattr(self.components_, level).terms else "tests=False left them out"
            raise SolverError(f"There is no test of the {level} level: {reason}.")
        return found[level]

    def bootstrap(
        self,
        X: TableLike | None = None,
        y: ArrayLike | None = None,
        client: ArrayLike | None = None,
        cluster: ArrayLike | None = None,
        sample_weight: ArrayLike | None = None,
        offset: ArrayLike | None = None,
        frequency: ArrayLike | None = None,
        trials: ArrayLike | None = None,
        *,
        draws: int = 200,
        coverage: float = 0.95,
        progress: Callable[[int, int], None] | None = None,
    ) -> IntoDataFrame:
        """Compute intervals for the standard deviations of clients, clusters and residual by parametric bootstrap.

        Each draw simulates responses from the model and estimates the components again. There are no intervals for
        correlations and fixed effects.

        Parameters
        ----------
        X, y, client, cluster, sample_weight, offset, frequency, trials : optional
            The rows, as they were passed to ``fit``. A linear model does not need them, all others do.
        draws : int
            The number of draws.
        coverage : float
            Coverage of the intervals.
        progress : callable, optional
            Called after each draw with the number of draws done and the number of all.

        Returns
        -------
        data frame
            One row for each standard deviation.

        Examples
        --------
        >>> from covey import HierarchicalRegressor, datasets
        >>> homes = datasets.load_radon()
        >>> model = HierarchicalRegressor(formula="log_radon ~ floor + (1 | state/county)", random_state=0).fit(homes)
        >>> model.bootstrap(draws=10)["level"].to_list()
        ['client', 'cluster', 'residual']
        """
        check_is_fitted(self, "model_")
        quantile(coverage)  # refuses an invalid coverage before the draws
        model, learned = self.model_, self.model_.posterior.require_sums(all_clients=True)
        data: GroupedData | None = None
        if not model.spec.loss.reml:
            if X is None:
                raise DataError(f"The bootstrap of a {model.spec.family} model needs the rows: pass X and y as to fit.")
            data = self._group(X, Arrays(y, client, cluster, sample_weight, offset, frequency, trials))
            if data.hierarchy.identities.tolist() != model.hierarchy.identities.tolist():
                raise DataError("The bootstrap needs the rows that the model was fitted to; these have other clients.")
        settings: dict[str, Any] = {"draws": draws, "seed": self._seed(), "progress": progress}
        drawn = bootstrap(learned, learned.shape, model.wbar, data=data, loss=model.problem.loss, **settings)
        ids = model.hierarchy.cluster_ids
        named = drawn.intervals(coverage).with_columns(
            pl.col("cluster").map_elements(lambda at: ids[at], return_dtype=ids.dtype, skip_nulls=True)
        )
        return self._native(named)

    def add_clients(
        self,
        X: TableLike,
        y: ArrayLike | None = None,
        client: ArrayLike | None = None,
        cluster: ArrayLike | None = None,
        sample_weight: ArrayLike | None = None,
        offset: ArrayLike | None = None,
        frequency: ArrayLike | None = None,
        trials: ArrayLike | None = None,
    ) -> Self:
        """Return a copy of the estimator with the rows of new clients, without a refit.

        The variance components stay as they are. Given these, the result is exact for a linear model. For other families the
        rows of the fit enter by a second-order expansion about its mode. Use ``update`` for more rows of clients that the model
        has.

        Parameters
        ----------
        X, y, client, cluster, sample_weight, offset, frequency, trials : optional
            The rows, as for ``fit``.

        Returns
        -------
        HierarchicalEstimator
            The copy.

        Examples
        --------
        >>> from covey import HierarchicalRegressor, datasets
        >>> homes = datasets.load_radon()
        >>> model = HierarchicalRegressor(formula="log_radon ~ floor + (1 | state/county)").fit(homes)
        >>> import polars as pl
        >>> few = homes[:3].with_columns(county=pl.lit("a new one"))
        >>> model.predict_interval(few[:1]).round(2).tolist()
        [[-0.85, 0.65]]
        >>> model.add_clients(few).predict_interval(few[:1]).round(2).tolist()
        [[-0.95, 0.26]]
        """
        rows = self._group(X, Arrays(y, client, cluster, sample_weight, offset, frequency, trials))
        return copy(self)._adopt(add_clients(self.model_, rows))

    def update(
        self,
        X: TableLike,
        y: ArrayLike | None = None,
        client: ArrayLike | None = None,
        cluster: ArrayLike | None = None,
        sample_weight: ArrayLike | None = None,
        offset: ArrayLike | None = None,
        frequency: ArrayLike | None = None,
        trials: ArrayLike | None = None,
        *,
        repeat: bool = False,
    ) -> Self:
        """Return a copy of the estimator with further rows, of clients that it has or of new ones, without a refit.

        The variance components stay as they are; see ``add_clients``. The model keeps hashes of the rows of its fit and of each
        update, also on disk with ``sums``, as a guard against adding the same table twice: an update is refused if every client
        in it brings exactly the rows of the fit, or of one earlier update. A part of the rows, or a mixture of old and new
        ones, is not recognised. Rows that came as sums, from a lazy table, have no hashes.

        Parameters
        ----------
        X, y, client, cluster, sample_weight, offset, frequency, trials : optional
            The rows, as for ``fit``.
        repeat : bool
            Add the rows even if the model already has exactly these rows.

        Returns
        -------
        HierarchicalEstimator
            The copy.

        Examples
        --------
        >>> from covey import HierarchicalRegressor, datasets
        >>> homes = datasets.load_radon()
        >>> model = HierarchicalRegressor(formula="log_radon ~ floor + (1 | state/county)").fit(homes[:-50])
        >>> later = model.update(homes[-50:])
        >>> model.model_.n_rows, later.model_.n_rows
        (11879, 11929)
        >>> later.update(homes[-50:])
        Traceback (most recent call last):
        covey.errors.DataError: All these rows (...) are in the model already...
        """
        rows = self._group(X, Arrays(y, client, cluster, sample_weight, offset, frequency, trials))
        return copy(self)._adopt(update(self.model_, rows, repeat=repeat))

    def remove_clients(self, clients: Sequence[Hashable]) -> Self:
        """Return a copy of the estimator as if these clients had never taken part, at the same variance components.

        Parameters
        ----------
        clients : sequence of ids
            The clients to remove: ids of ``clients_``, or pairs ``(cluster, client)``. An id that several clusters have must be
            in a pair.

        Returns
        -------
        HierarchicalEstimator
            The copy.

        Examples
        --------
        >>> from covey import HierarchicalRegressor, datasets
        >>> homes = datasets.load_radon()
        >>> model = HierarchicalRegressor(formula="log_radon ~ floor + (1 | state/county)").fit(homes)
        >>> len(model.remove_clients(["Apache, AZ"]).clients_)
        469
        """
        check_is_fitted(self, "model_")
        return copy(self)._adopt(remove_clients(self.model_, clients))

    def _group(self, X: Any, given: Arrays) -> GroupedData:
        X, arrays = self._rows(X, **vars(given))
        return group_rows(self.model_, X, Arrays(**arrays))
