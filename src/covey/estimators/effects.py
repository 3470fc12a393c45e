"""Methods of a fitted estimator for residuals, random effects, means, contrasts, R2, profiles and robust errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import polars as pl
from narwhals.typing import IntoDataFrame
from sklearn.utils.validation import check_is_fitted

from covey._typing import ArrayLike, Floats, TableLike
from covey.errors import DataError, SolverError, one_of, whole
from covey.estimators.inference import InferenceMethods
from covey.model.explained import R2, r2
from covey.model.means import Adjust, Method, Scale, combinations_of, differences, estimates, grid_of, on_response
from covey.model.new_rows import Observed, observed_rows
from covey.model.posterior import p_value, quantile
from covey.model.profiles import Which, profile
from covey.model.residuals import Effects, ResidualKind, residuals, simulate
from covey.model.robust import Correction, sandwich
from covey.problem.rows import Arrays
from covey.tree.hierarchy import Level

if TYPE_CHECKING:
    from marginaleffects.classes import ModelAbstract


class EffectMethods(InferenceMethods):
    """What a fitted model says about its rows, its groups and its fixed effects."""

    @property
    def cov_(self) -> Floats:
        """Covariance of the global coefficients ``(n_terms, n_terms)``, in the order of ``terms_``."""
        self.components_  # noqa: B018 - an estimator without variances has no covariance, and says so
        return self._fitted.posterior.learned.covariance.copy()

    def residuals(
        self,
        X: TableLike,
        y: ArrayLike | None = None,
        client: ArrayLike | None = None,
        cluster: ArrayLike | None = None,
        sample_weight: ArrayLike | None = None,
        offset: ArrayLike | None = None,
        trials: ArrayLike | None = None,
        *,
        kind: ResidualKind = "response",
        level: Level = "client",
    ) -> Floats:
        """Compute the residuals of rows.

        Parameters
        ----------
        X, y, client, cluster, sample_weight, offset, trials : optional
            The rows, as for ``fit``.
        kind : {"response", "pearson", "deviance", "working", "scaled", "quantile"}
            The first four are those of lme4. ``"scaled"`` are Pearson residuals divided by the residual standard deviation.
            ``"quantile"`` are about standard normal for every family if the model is right; those of counts and classes have a
            random part, which ``random_state`` determines.
        level : {"client", "cluster", "global"}
            The level of the model that predicts, at a random effect of zero below it.

        Returns
        -------
        (n_rows,) array
            Residuals in the order of the rows; NaN for rows that ``na="drop"`` leaves out.

        Examples
        --------
        >>> from covey import HierarchicalRegressor, datasets
        >>> homes = datasets.load_radon()
        >>> model = HierarchicalRegressor(formula="log_radon ~ floor + (1 | state/county)").fit(homes)
        >>> model.residuals(homes)[:3].round(2).tolist()
        [-0.98, -0.47, -0.28]
        """
        rows = self._observed(X, Arrays(y, client, cluster, sample_weight, offset, None, trials), level)
        seed = self._seed() if kind == "quantile" else 0
        return rows.in_table(residuals(self.model_, rows, kind, seed))

    def random_effects(self, level: Level = "client") -> IntoDataFrame:
        """Tabulate deviations: of clients from their cluster, or of clusters from the global model (``ranef`` of lme4).

        Parameters
        ----------
        level : {"client", "cluster"}
            Whose deviations.

        Returns
        -------
        data frame
            One row for each client (or cluster) and term that varies. ``conditional_variance`` is the variance of the deviation
            given the data, the global coefficients and the variance components (``condVar`` of lme4). It needs the sums of all
            clients: at a site, and at the operator of a fit across sites, it is missing.

        Examples
        --------
        >>> from covey import HierarchicalRegressor, datasets
        >>> homes = datasets.load_radon()
        >>> model = HierarchicalRegressor(formula="log_radon ~ floor + (1 | state/county)").fit(homes)
        >>> model.random_effects("cluster").columns
        ['cluster', 'clients', 'term', 'deviation', 'conditional_variance']
        """
        check_is_fitted(self, "model_")
        return self._native(self.model_.random_effects(level))

    def simulate(
        self,
        X: TableLike,
        n: int = 1,
        client: ArrayLike | None = None,
        cluster: ArrayLike | None = None,
        offset: ArrayLike | None = None,
        *,
        sample_weight: ArrayLike | None = None,
        trials: ArrayLike | None = None,
        effects: Effects = "new",
    ) -> Floats:
        """Draw responses from the fitted model, with the random numbers of ``random_state``.

        Parameters
        ----------
        X : data frame or (n_rows, n_features) array
            The rows to draw responses for.
        n : int
            The number of draws.
        client, cluster, offset, sample_weight, trials : (n_rows,) arrays, optional
            Ids, offsets, row weights and numbers of trials, if they are not columns of ``X``. By default the
            weight, or the number of trials, of a row is 1.
        effects : {"new", "fitted"}
            ``"new"`` draws new random effects in each draw, from the variance components (the default of lme4; with
            ``per_cluster=True`` clients have the mean covariance of all clusters). ``"fitted"`` keeps the estimated random
            effects (``re.form = NULL`` of lme4).

        Returns
        -------
        (n_rows, n) array
            One column for each draw. Classes are 0 and 1; successes of trials are shares. If ``random_state`` is an int, as
            after :func:`covey.fit`, each call returns the same numbers.

        Examples
        --------
        >>> from covey import HierarchicalRegressor, datasets
        >>> homes = datasets.load_radon()
        >>> model = HierarchicalRegressor(formula="log_radon ~ floor + (1 | state/county)", random_state=0).fit(homes)
        >>> model.simulate(homes, n=2).shape
        (11929, 2)
        """
        X, given = self._rows(X, client=client, cluster=cluster, offset=offset, weights=sample_weight, trials=trials)
        return simulate(self.model_, X, whole("n", n, least=1), seed=self._seed(), effects=effects, **given)

    def means(
        self,
        terms: str | Sequence[str],
        *,
        by: str | Sequence[str] = (),
        at: Mapping[str, object] | None = None,
        data: TableLike | None = None,
        scale: Scale = "link",
        coverage: float = 0.95,
    ) -> IntoDataFrame:
        """Estimate the mean of each category by the global model, as linear predictor or as response (``emmeans`` of R).

        Combinations of the other categories count equally. Numeric columns are held at their mean over rows. In a model with
        weights this is the weighted mean; with ``data`` it is the plain mean of that table.

        Parameters
        ----------
        terms : str or sequence of str
            Columns of categories, or numeric columns that ``at`` has values for.
        by : str or sequence of str
            Further columns; the result has their combinations with ``terms``.
        at : mapping from columns to values, optional
            Values at which to hold columns: one or several for each.
        data : data frame, optional
            The rows of the fit, for the means of numeric columns. Often not needed: a linear model with an intercept and
            without ``standardize`` knows the mean of every numeric column that is itself a term and stands in no expression
            such as ``log(x)``. Otherwise an error names the column.
        scale : {"link", "response"}
            Linear predictor, or response at a random effect of zero. The offset is zero.
        coverage : float
            Coverage of the intervals.

        Returns
        -------
        data frame
            One row for each combination: estimate, standard error, degrees of freedom, interval, and the p-value of the
            hypothesis that the linear predictor is zero.

        Examples
        --------
        >>> from covey import HierarchicalRegressor, datasets
        >>> homes = datasets.load_radon()
        >>> model = HierarchicalRegressor(formula="log_radon ~ C(floor) + (1 | state/county)").fit(homes)
        >>> model.means("floor")["estimate"].round(2).to_list()
        [0.94, 0.23]
        """
        check_is_fitted(self, "model_")
        named = list(dict.fromkeys([*_listed(terms), *_listed(by)]))
        grid = grid_of(self.model_, named, dict(at or {}), data)
        found = estimates(self.model_, grid.labels, grid.L, coverage=coverage)
        return self._native(on_response(self.model_, found) if scale == "response" else found)

    def contrast(
        self,
        what: str | Mapping[str, float] | Sequence[Mapping[str, float]] | ArrayLike,
        *,
        method: Method = "pairwise",
        by: str | Sequence[str] = (),
        at: Mapping[str, object] | None = None,
        data: TableLike | None = None,
        adjust: Adjust = "none",
        coverage: float = 0.95,
    ) -> IntoDataFrame:
        """Estimate differences between means, or other combinations of the global coefficients.

        Parameters
        ----------
        what : str, mapping, sequence of mappings or (n_contrasts, n_terms) array
            A column whose means are compared, as in :meth:`means`; or weights of terms, ``{"x": 1, "z": -1}``.
        method : {"pairwise", "reference"}
            For a column: all pairs (first minus second), or each category minus the first.
        by : str or sequence of str
            Compare within each combination of these columns.
        at, data
            As in :meth:`means`.
        adjust : {"none", "bonferroni", "holm", "tukey"}
            Adjust p-values and intervals for the number of comparisons: Bonferroni and Holm for all in the table, Tukey for the
            means of each combination of ``by``. Intervals with ``"holm"`` are those of Bonferroni.
        coverage : float
            Coverage of the intervals.

        Returns
        -------
        data frame
            One row for each contrast, on the scale of the linear predictor.

        Examples
        --------
        >>> from covey import HierarchicalRegressor, datasets
        >>> homes = datasets.load_radon()
        >>> model = HierarchicalRegressor(formula="log_radon ~ C(floor) + (1 | state/county)").fit(homes)
        >>> model.contrast("floor", method="reference")["estimate"].round(2).to_list()
        [-0.71]
        >>> model.contrast({"Intercept": 1.0})["contrast"].to_list()
        ['+1 Intercept']
        """
        check_is_fitted(self, "model_")
        if isinstance(what, str):
            named, within = [what], _listed(by)
            grid = grid_of(self.model_, [*within, *named], dict(at or {}), data)
            labels, L, family = differences(grid, [*within, *named], within, method)
        else:
            if by or at or data is not None:
                raise DataError(
                    "by=, at= and data= apply only to a contrast of a column; leave them out with weights of terms."
                )
            (labels, L), family = combinations_of(self.model_, what), 0
            if adjust == "tukey":
                raise DataError("Tukey's adjustment is for comparisons of means; use adjust='holm' for other contrasts.")
        return self._native(estimates(self.model_, labels, L, coverage=coverage, adjust=adjust, family=family))

    def marginaleffects(self, data: TableLike, *, scale: Scale = "response") -> ModelAbstract:
        """Return an object that the functions of the Python package marginaleffects take in place of a model.

        Its predictions are those of the global model, at a random effect of zero, and its standard errors take the variance
        components as known. Intervals and p-values are by normal quantiles.

        Parameters
        ----------
        data : data frame
            Rows with the columns of the terms, such as those of the fit: marginaleffects averages over them.
        scale : {"response", "link"}
            What is predicted: the response or the linear predictor.

        Returns
        -------
        marginaleffects.classes.ModelAbstract
            For ``avg_predictions``, ``comparisons``, ``slopes``, ``hypotheses`` and the other functions. Their ``vcov=`` may be
            a correction of :meth:`robust`, such as ``"CR2"``. The package (0.6 or newer) must be installed.

        Examples
        --------
        >>> from covey import HierarchicalRegressor, datasets
        >>> homes = datasets.load_radon()
        >>> model = HierarchicalRegressor(formula="log_radon ~ floor + (1 | state/county)").fit(homes)
        >>> from marginaleffects import avg_slopes  # doctest: +SKIP
        >>> avg_slopes(model.marginaleffects(homes), variables="floor")  # doctest: +SKIP
        """
        from covey.estimators.marginal import adapter

        self.components_  # noqa: B018 - an estimator without variances has no covariance, and says so
        if scale not in get_args(Scale):
            raise one_of("scale", scale, get_args(Scale))
        return adapter(self.model_, data, scale)

    def r2(
        self,
        data: TableLike | None = None,
        y: ArrayLike | None = None,
        client: ArrayLike | None = None,
        cluster: ArrayLike | None = None,
    ) -> R2:
        """Compute the shares of variance that the fixed effects, and these and the groups, explain (Nakagawa and Schielzeth).

        Parameters
        ----------
        data : data frame or (n_rows, n_features) array, optional
            The rows of the fit. A linear model with an intercept does not need them.
        y, client, cluster : (n_rows,) arrays, optional
            Response and ids, if they are not columns of ``data``.

        Returns
        -------
        R2
            A pair: ``marginal`` and ``conditional``.

        Examples
        --------
        >>> from covey import HierarchicalRegressor, datasets
        >>> homes = datasets.load_radon()
        >>> model = HierarchicalRegressor(formula="log_radon ~ floor + (1 | state/county)").fit(homes)
        >>> [round(share, 2) for share in model.r2()]
        [0.09, 0.36]
        """
        check_is_fitted(self, "model_")
        rows = None if data is None else self._observed(data, Arrays(y, client, cluster), "client")
        return r2(self.model_, rows)

    def profile(
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
        which: Which = "components",
        coverage: float = 0.95,
    ) -> IntoDataFrame:
        """Compute profile-likelihood intervals of variance components, penalties or global coefficients.

        The components and penalties of a REML fit are profiled by its restricted likelihood. lme4 always profiles the full
        likelihood; to get its numbers, fit with ``penalty="ml"``. Coefficients always use the full likelihood, as in lme4.

        Parameters
        ----------
        X, y, client, cluster, sample_weight, offset, frequency, trials : optional
            The rows, as they were passed to ``fit``. A linear model does not need them, counts and classes do.
            A Gamma model has no profiles; use :meth:`bootstrap`.
        which : {"components", "penalties", "coefficients"}
            Standard deviations of clients, clusters and residual, with correlations if there are any; the learned penalties
            ``gamma`` of clients and ``lam`` of clusters for each term, which are the residual variance (1 for counts and
            classes) divided by the variance of the term; or the global coefficients.
        coverage : float
            Coverage of the intervals.

        Returns
        -------
        data frame
            One row for each parameter: its level, terms and kind, the estimate and the ends of the interval. A standard
            deviation with a lower end of 0 may be zero as far as the data tell; its penalty then has the upper end infinity.
            A correlation with a term whose variance is estimated as zero has no estimate, and the interval from -1 to 1.

        Examples
        --------
        >>> from covey import HierarchicalRegressor, datasets
        >>> homes = datasets.load_radon()
        >>> model = HierarchicalRegressor(formula="log_radon ~ floor + (1 | state/county)").fit(homes)
        >>> model.profile().select("level", "parameter").rows()
        [('client', 'sd'), ('cluster', 'sd'), ('residual', 'sd')]
        """
        check_is_fitted(self, "model_")
        data = None
        if X is not None:
            data = self._group(X, Arrays(y, client, cluster, sample_weight, offset, frequency, trials))
        return self._native(profile(self.model_, data, which, coverage))

    def robust(self, correction: Correction = "CR1", *, coverage: float = 0.95) -> IntoDataFrame:
        """Tabulate the global coefficients with cluster-robust (sandwich) standard errors; for linear models.

        They are valid with many groups, even if the covariances of the model are wrong. The groups are the clusters, or the
        clients if no term varies between clusters, and must be independent. Intervals and p-values are those of a t
        distribution with Satterthwaite's degrees of freedom, as in ``coef_test`` of clubSandwich. The operator of a fit across
        sites has the sums for this if terms vary between clusters.

        Parameters
        ----------
        correction : {"CR0", "CR1", "CR1p", "CR1S", "CR2", "CR3"}
            The correction for few groups, as in clubSandwich of R. ``"CR2"`` is unbiased if the model is right; it needs rows
            of weight 1, groups of not too many clients, and the sums of all clients. ``"CR3"`` is the jackknife.
        coverage : float
            Coverage of the intervals.

        Returns
        -------
        data frame
            One row for each term. It is computed from the sums of clients, without rows.

        Examples
        --------
        >>> from covey import HierarchicalRegressor, datasets
        >>> homes = datasets.load_radon()
        >>> model = HierarchicalRegressor(formula="log_radon ~ floor + (1 | state/county)").fit(homes)
        >>> model.robust()["std_error"].round(2).to_list()
        [0.17, 0.05]
        """
        check_is_fitted(self, "model_")
        quantile(coverage)
        model = self.model_
        V, freedom, _ = sandwich(model.posterior, model.wbar, correction)
        error = np.sqrt(np.diag(V))
        reach = error * quantile(coverage, freedom)
        ends = {"lower": model.wbar - reach, "upper": model.wbar + reach, "df": freedom}
        columns: dict[str, Any] = {"term": list(model.terms), "estimate": model.wbar, "std_error": error, **ends}
        return self._native(pl.DataFrame({**columns, "p_value": p_value(model.wbar, error, freedom)}))

    def _observed(self, X: Any, given: Arrays, level: Level) -> Observed:
        X, arrays = self._rows(X, **vars(given))
        return observed_rows(self.model_, X, Arrays(**arrays), level=level, unseen=self.unseen)


def _listed(names: str | Sequence[str]) -> list[str]:
    if not isinstance(names, str | Sequence):
        raise SolverError(f"Columns are named by a text or a list of texts. Got {names!r} instead.")
    return [names] if isinstance(names, str) else list(names)
