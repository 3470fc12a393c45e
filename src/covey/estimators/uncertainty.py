"""What an estimator says of its own certainty, and clients that come and go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import polars as pl
from sklearn.utils.validation import check_is_fitted, validate_data

from covey._typing import Floats
from covey.errors import DataError, SolverError, one_of
from covey.fitting.fit import shape_of
from covey.model.model import Model, quantile
from covey.model.new_rows import group_rows
from covey.model.summary import Summary, summary
from covey.model.updates import add_clients, remove_clients
from covey.tables.rows import GroupedData
from covey.tree.hierarchy import Level, Unseen
from covey.variance.bootstrap import bootstrap
from covey.variance.components import Components, LikelihoodRatio


class NoComponentsError(AttributeError, SolverError):
    """A model with given penalties has no variance components: a missing attribute, with the sentence that says why."""


class Uncertain:
    """Standard errors, intervals, tests and updates of a fitted estimator whose penalties were learned from the data."""

    model_: Model
    unseen: Unseen
    random_state: int
    _native: Callable[[Any], Any]
    _split_off: Callable[..., Any]
    _spec: Callable[[], Any]

    @property
    def _fitted(self) -> Model:
        if "model_" not in self.__dict__:
            raise AttributeError(f"This {type(self).__name__} is not fitted yet; call fit first.")
        return self.__dict__["model_"]  # type: ignore[no-any-return]

    @property
    def components_(self) -> Components:
        """The variance components: how clients and clusters vary, the log-likelihood, what is singular."""
        try:
            return self._fitted.posterior.learned.components
        except SolverError as problem:
            raise NoComponentsError(str(problem)) from None

    def summary(self, coverage: float = 0.95) -> Summary:
        """The model in words, for ``print``, and in numbers, by ``to_json()``.

        >>> from covey import HierarchicalRegressor, datasets
        >>> homes = datasets.load_radon()
        >>> model = HierarchicalRegressor(formula="log_radon ~ floor + (1 | state/county)").fit(homes)
        >>> {name: round(share, 2) for name, share in model.summary().to_json()["share_of_variance"].items()}
        {'cluster': 0.19, 'client': 0.11, 'residual': 0.7}
        """
        check_is_fitted(self, "model_")
        return summary(self.model_, coverage)

    def coef_frame(self, level: Level = "client", coverage: float = 0.95) -> Any:
        """Coefficients as a tidy frame, a row for each unit and term, in the library of the frame that was fitted.

        With penalties that were learned from the data, also standard errors and intervals of the given coverage.
        """
        check_is_fitted(self, "model_")
        return self._native(self.model_.coefficients(level, coverage))

    def reliability(self) -> Any:
        """How much of a coefficient's spread among clients each client's own rows resolve: 0 is its cluster's, 1 its own."""
        check_is_fitted(self, "model_")
        return self._native(self.model_.reliability())

    def predict_interval(
        self,
        X: Any,
        client: Any = None,
        cluster: Any = None,
        offset: Any = None,
        level: Level = "client",
        *,
        coverage: float = 0.95,
        noise: bool = False,
    ) -> Floats:
        """Where the expected response of each row lies, ``(n_rows, 2)``; with ``noise``, where a new response would.

        A client that training did not see has its cluster's model and the whole spread of clients about it; in a cluster
        that it did not see, the global model and the spread of clusters besides. The variance components count as known.

        >>> from covey import HierarchicalRegressor, datasets
        >>> homes = datasets.load_radon()
        >>> model = HierarchicalRegressor(formula="log_radon ~ floor + (1 | state/county)").fit(homes)
        >>> model.predict_interval(homes[:1]).round(2).tolist(), model.predict_interval(homes[:1], noise=True).round(2).tolist()
        ([[-0.66, 0.21]], [[-2.05, 1.6]])
        """
        check_is_fitted(self, "model_")
        X, client, cluster, offset, _ = self._plain_rows(X, client, cluster, offset)
        where: dict[str, Any] = {"client": client, "cluster": cluster, "offset": offset, "level": level}
        return self.model_.intervals(X, coverage=coverage, noise=noise, unseen=self.unseen, **where)

    def likelihood_ratio(self, level: str) -> LikelihoodRatio:
        """Whether clusters matter (``"cluster"``), or clients differ within them (``"client"``); the boundary is allowed for.

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
        X: Any = None,
        y: Any = None,
        client: Any = None,
        cluster: Any = None,
        sample_weight: Any = None,
        offset: Any = None,
        *,
        draws: int = 200,
        coverage: float = 0.95,
        progress: Callable[[int, int], None] | None = None,
    ) -> Any:
        """Intervals for the variance components by parametric bootstrap: draw from the model, estimate again, ``draws`` times.

        A linear model needs nothing but itself; a model of counts or classes needs the rows it was fitted to once more.
        """
        check_is_fitted(self, "model_")
        quantile(coverage)  # refused before the draws, not after them
        model, learned = self.model_, self.model_.posterior.require_sums(all_clients=True)
        data: GroupedData | None = None
        if not model.spec.loss.reml:
            if X is None:
                raise DataError("The bootstrap of counts or classes needs the rows: pass X and y as to fit.")
            X, client, cluster, offset, weights = self._plain_rows(X, client, cluster, offset, sample_weight)
            data = self._same_rows(X, y, client=client, cluster=cluster, weights=weights, offset=offset)
        shape = shape_of(model.hierarchy, model.terms, model.spec, model.problem.vary)
        settings: dict[str, Any] = {"draws": draws, "seed": self.random_state, "progress": progress}
        drawn = bootstrap(learned, shape, model.wbar, data=data, loss=model.problem.loss, **settings)
        ids = model.hierarchy.cluster_ids
        named = drawn.intervals(coverage).with_columns(
            pl.col("cluster").map_elements(lambda at: ids[at], return_dtype=ids.dtype, skip_nulls=True)
        )
        return self._native(named)

    def add_clients(
        self,
        X: Any,
        y: Any = None,
        client: Any = None,
        cluster: Any = None,
        sample_weight: Any = None,
        offset: Any = None,
    ) -> Any:
        """A copy of the estimator that knows these rows too, at once: of new clients, or more rows of those it has.

        Variance components stay as they were learned. For a linear model the rest is exact.

        >>> from covey import HierarchicalRegressor, datasets
        >>> homes = datasets.load_radon()
        >>> model = HierarchicalRegressor(formula="log_radon ~ floor + (1 | state/county)").fit(homes)
        >>> import polars as pl
        >>> few = homes[:3].with_columns(county=pl.lit("a new one"))
        >>> model.predict_interval(few[:1]).round(2).tolist()
        [[-0.85, 0.64]]
        >>> model.add_clients(few).predict_interval(few[:1]).round(2).tolist()
        [[-0.95, 0.26]]
        """
        check_is_fitted(self, "model_")
        X, client, cluster, offset, weights = self._plain_rows(X, client, cluster, offset, sample_weight)
        given: dict[str, Any] = {"client": client, "cluster": cluster, "weights": weights, "offset": offset}
        return self._with(add_clients(self.model_, group_rows(self.model_, X, y, **given)))

    def remove_clients(self, clients: Sequence[Any]) -> Any:
        """A copy of the estimator as if these clients had never taken part; see :meth:`add_clients`."""
        check_is_fitted(self, "model_")
        return self._with(remove_clients(self.model_, clients))

    def _same_rows(self, X: Any, y: Any, **given: Any) -> GroupedData:
        """Rows of the clients that the model was fitted to, and of no others, in its order."""
        model = self.model_
        data = group_rows(model, X, y, **given)
        if data.hierarchy.client_ids.to_list() != model.hierarchy.client_ids.to_list():
            raise DataError("The bootstrap needs the rows that the model was fitted to; the clients of these are others.")
        return data

    def _with(self, model: Model) -> Any:
        other = copy(self)
        other.model_ = model
        return other

    def _plain_rows(
        self, X: Any, client: Any, cluster: Any, offset: Any, weights: Any = None
    ) -> tuple[Any, Any, Any, Any, Any]:
        """Plain arrays with ids split off by position; a table as it is."""
        if self.model_.spec.named:
            return X, client, cluster, offset, weights
        X, given = self._split_off(X, client=client, cluster=cluster, weights=weights, offset=offset)
        X = validate_data(self, X, dtype="float64", ensure_all_finite=False, reset=False)
        return X, given["client"], given["cluster"], given["offset"], given["weights"]
