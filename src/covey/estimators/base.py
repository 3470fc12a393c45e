"""The base class of the estimators: fitting, predicting, scoring and saving."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from narwhals import Implementation
from narwhals.typing import IntoDataFrame
from sklearn.utils.validation import check_is_fitted, validate_data

from covey._typing import Anything, ArrayLike, Floats, TableLike
from covey.errors import DataError
from covey.estimators.plotting import PlotMethods
from covey.fitting.fit import fit
from covey.fitting.planning import RunClock, clock_run
from covey.model.files import save_model
from covey.model.scoring import scored, write_sql
from covey.model.summary import describe
from covey.nodes.lazy import as_lazy, read_lazy
from covey.nodes.network import InMemory, Network
from covey.problem.problem import Problem, as_frame, refuse_odd_table, resolve
from covey.problem.rows import Arrays, read_rows, shares_of
from covey.solvers.clock import BANDWIDTH, LATENCY, ROWS_PER_SECOND
from covey.tables.design import numeric, response
from covey.tables.sparse import SparseMatrix
from covey.threads import use_threads
from covey.tree.hierarchy import Level


class HierarchicalEstimator(PlotMethods):
    """Base class of the estimators; :func:`covey.fit` and :func:`covey.load` return one of its subclasses."""

    _metric: ClassVar[tuple[str, dict[str, int]]]
    """Name of the score in ``sklearn.metrics``, and its options."""

    def fit(
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
        """Fit the models of all clients, of all clusters and of the whole.

        Parameters
        ----------
        X : data frame, or (n_rows, n_features) array or sparse matrix
            The rows, with the columns that the parameters name. The columns of a sparse matrix do not vary by group, unless
            ``vary`` names them as ``x0``, ``x1``, ...; the intercept does.
        y : (n_rows,) array, optional
            The response. Leave it out if the formula names it.
        client, cluster : (n_rows,) arrays, optional
            Ids of the client and cluster of each row, if they are not columns of ``X``.
        sample_weight, offset, frequency : (n_rows,) arrays, optional
            Row weights (precisions), offsets and frequencies (how often each row counts), if they are not columns of ``X``.
        trials : (n_rows,) array, optional
            The numbers of trials of a classifier, if they are not a column of ``X``. ``y`` is then the share of successes.

        Returns
        -------
        HierarchicalEstimator
            The estimator itself, fitted.

        Examples
        --------
        >>> from covey import HierarchicalRegressor
        >>> model = HierarchicalRegressor(gamma=1.0).fit([[0.0], [1.0], [2.0]], [1.0, 3.0, 2.0], client=["a", "b", "b"])
        >>> model.coef_.shape
        (2, 2)
        """
        draft = resolve(self._spec())
        if draft.spec.client is None and client is None and self.client is None and self.cluster is None and cluster is None:
            warnings.warn(
                "No clients were named, so this is a plain regression of all rows, without groups; name a column with client=, "
                "or pass client= to fit.",
                UserWarning,
                stacklevel=2,
            )
        beside = {"weights": sample_weight, "offset": offset, "frequency": frequency, "trials": trials}
        with use_threads(self.threads):
            return self._fit(draft, X, y, client=client, cluster=cluster, **beside)

    def _fit(self, draft: Problem, X: Any, y: Any = None, **given: Any) -> Self:
        """Fit a problem; ``given`` are arrays beside ``X``."""
        if y is None and (draft.formula is None or draft.formula.response is None):
            raise DataError(
                f"There is no response. {type(self).__name__} requires y to be passed, but the target y is None; or give a "
                "formula that names it, as in 'y ~ x'."
            )
        columns, lazy = None, as_lazy(X)
        if lazy is not None:
            if y is not None or any(values is not None for values in given.values()):
                raise DataError(
                    "A lazy table has its response, ids and weights in columns; name them instead of passing arrays."
                )
            data, problem = read_lazy(lazy, draft)
            return self._fit_network(InMemory.of(data, problem.loss), problem, lazy.collect_schema().names())
        if draft.spec.named:
            frame = as_frame(X)
            self.feature_names_in_ = np.array(frame.columns, dtype=object)
            self.n_features_in_ = len(frame.columns)
            self._library_ = frame.implementation
        else:
            if isinstance(X, SparseMatrix):
                self._check_sparse(given)
            else:
                refuse_odd_table(X)
            X, given = self._split_off(X, **given)
            if draft.spec.na == "drop":  # scikit-learn refuses responses that are missing
                X = validate_data(self, X, dtype=np.float64, accept_sparse="csr", ensure_all_finite=False)
            else:
                X, y = self._validate(X, y, given.get("trials") is not None)
            kept = [at for at in range(X.shape[1] + len(self._positions())) if at not in self._positions().values()]
            columns = getattr(self, "feature_names_in_", [f"x{at}" for at in kept])
        data, problem = read_rows(X, draft, Arrays(y, **given), columns)
        return self._adopt(fit(InMemory.of(data, problem.loss), problem))

    def _check_sparse(self, given: dict[str, Any]) -> None:
        """Raise an error if ids or weights are columns of a sparse matrix, or there are no ids."""
        if given.get("client") is None or self._positions():
            raise DataError(
                "X is a sparse matrix, so ids, weights and offset are arrays: pass client= (and cluster=) to fit, or pass "
                "X.toarray()."
            )

    def _fit_network(self, network: Network, problem: Problem, names: Sequence[str]) -> Self:
        """Fit a problem to the rows of a network, which come from a table with these columns."""
        self.feature_names_in_, self.n_features_in_ = np.array(names, dtype=object), len(names)
        self._library_ = Implementation.POLARS
        return self._adopt(fit(network, problem))

    def _validate(self, X: Any, y: Any, shares: bool = False) -> tuple[Floats, Any]:
        # Values that are not finite are refused later, by column and client.
        X, y = validate_data(self, X, y, dtype=np.float64, accept_sparse="csr", y_numeric=True, ensure_all_finite=False)
        return X, y

    def predict(
        self,
        X: TableLike,
        client: ArrayLike | None = None,
        cluster: ArrayLike | None = None,
        offset: ArrayLike | None = None,
        level: Level = "client",
        *,
        expected: bool = True,
    ) -> Anything:
        """Predict the expected response of each row.

        For a client of the training data this is the mean response given its coefficients, as in lme4. For an unseen client it
        is the mean over the clients of its cluster, and for an unseen cluster the mean over clients of all clusters:
        integrated over the normal distribution of their coefficients, given the variance components. The same holds for
        ``level="cluster"`` and ``level="global"``. Estimates are taken as exact. In a linear model the mean over groups is the
        response at a random effect of zero; with a log or logit link it is not.

        Parameters
        ----------
        X : data frame, lazy table, or (n_rows, n_features) array or sparse matrix
            The rows.
        client, cluster, offset : (n_rows,) arrays, optional
            Ids and offsets, if they are not columns of ``X``. A row with an unseen or missing client has the model of its
            cluster, and a row with an unseen cluster the global model (see ``unseen``).
        level : {"client", "cluster", "global"}
            The level of the model that predicts.
        expected : bool
            Whether to take the mean over unknown groups. False sets their effects to zero, as ``allow.new.levels = TRUE`` does
            in lme4, with ``level="global"`` as ``re.form = NA`` does. A model with given penalties has no estimated variances,
            so it always sets them to zero.

        Returns
        -------
        (n_rows,) array
            Predictions, in the units of the response. For a lazy table of Polars, DuckDB or Spark: a lazy table with the
            columns ``prediction``, for two classes ``probability``, and ``answered_by``. A row that would be an error in a data
            frame has nulls in these columns. The order of the rows may change.

        Examples
        --------
        >>> from covey import HierarchicalRegressor
        >>> model = HierarchicalRegressor(gamma=1.0).fit([[0.0], [1.0], [2.0]], [1.0, 3.0, 2.0], client=["a", "b", "b"])
        >>> model.predict([[1.0], [1.0]], client=["b", "a new one"]).round(2).tolist()
        [2.25, 1.88]
        """
        if as_lazy(X) is not None:
            return self._lazily(X, client, cluster, offset, level, expected)  # type: ignore[no-any-return]
        return self._response(X, client, cluster, offset, level, expected)

    def score(
        self,
        X: TableLike,
        y: ArrayLike | None = None,
        sample_weight: ArrayLike | None = None,
        client: ArrayLike | None = None,
        cluster: ArrayLike | None = None,
        offset: ArrayLike | None = None,
        trials: ArrayLike | None = None,
    ) -> float:
        """Compute R^2 of a linear model, accuracy of a classifier, or the share of deviance explained (D^2) of the others.

        Parameters
        ----------
        X : data frame or (n_rows, n_features) array
            The rows.
        y : (n_rows,) array, optional
            The response. Leave it out if the formula names it.
        sample_weight : (n_rows,) array, optional
            Weights of the rows in the score. A column named by the parameter ``weights`` does not count here.
        client, cluster, offset, trials : (n_rows,) arrays, optional
            Ids, offsets and numbers of trials, if they are not columns of ``X``.

        Returns
        -------
        float
            The score; 1.0 is the best.

        Examples
        --------
        >>> from covey import HierarchicalRegressor, datasets
        >>> homes = datasets.load_radon()
        >>> model = HierarchicalRegressor(formula="log_radon ~ floor + (1 | state/county)").fit(homes)
        >>> round(model.score(homes), 2)
        0.35
        """
        if y is None:
            formula = resolve(self._spec()).formula
            if formula is None or formula.response is None:
                raise DataError("There is no response to compare with; pass y, or write it to the left of '~' in the formula.")
            y = response(formula, as_frame(X))
        from sklearn import metrics

        predicted = self.predict(X, client, cluster, offset)
        trials = self._rows(X, trials=trials)[1]["trials"]
        if trials is None and self.model_.spec.trials is not None:
            trials = numeric(as_frame(X), self.model_.spec.trials)
        shares = shares_of(y, trials, None, self.model_.problem)
        if shares is not None:  # a row with successes and failures is two rows, with their numbers as weights
            (share, n), rows = shares, len(predicted)
            y, predicted = np.repeat([1, 0], rows), np.tile(predicted, 2)
            weights = np.concatenate([share, 1.0 - share]) * np.tile(n, 2)
            sample_weight = weights if sample_weight is None else weights * np.tile(np.asarray(sample_weight), 2)
        name, options = self._metric
        return float(getattr(metrics, name)(y, predicted, sample_weight=sample_weight, **options))

    def to_sql(
        self,
        table: str,
        folder: str | Path | None = None,
        *,
        dialect: str = "duckdb",
        level: Level = "client",
        expected: bool = True,
    ) -> str:
        """Write predictions as one SQL statement: a join of a table with the coefficients.

        Parameters
        ----------
        table : str
            The table to predict, such as ``visits`` or ``raw.visits``. It needs the columns of the formula and of the ids.
        folder : str or Path, optional
            Folder for the Parquet files with the coefficients, which the statement reads. Without it the statement reads
            tables ``covey_clients`` and ``covey_clusters``, into which the database has loaded these files before.
        dialect : {"duckdb", "spark"}
            The language of the database. Spark must be at least version 4.
        level, expected
            As in :meth:`predict`.

        Returns
        -------
        str
            The statement. Its result has the columns of the table, ``prediction``, for two classes ``probability``, and
            ``answered_by``. A row that ``predict`` refuses, for example because of a missing value or a new category, has a
            null prediction. For two classes the mean over groups is a sum that is exact to 1e-9 while their standard
            deviation in the linear predictor is at most five, or twice that of a row whose terms are all one; beyond it the
            prediction is null.

        Examples
        --------
        >>> import covey
        >>> homes = covey.datasets.load_radon()
        >>> model = covey.fit(homes, covey.Spec(formula="log_radon ~ floor", gamma=10.0))
        >>> print(model.to_sql("homes").splitlines()[-2].strip())
        CASE WHEN ABS(covey_margin) <= 1.7976931348623157e308 THEN covey_margin END AS prediction
        """
        where = {"level": level, "unseen": self.unseen, "expected": expected}
        return write_sql(self.model_, table, None if folder is None else Path(folder), dialect, **where)

    def _lazily(self, X: Any, client: Any, cluster: Any, offset: Any, level: Level, expected: bool) -> Any:
        if any(each is not None for each in (client, cluster, offset)):
            raise DataError("A lazy table must have ids and offset in columns; leave out client=, cluster= and offset=.")
        return scored(self.model_, X, level=level, unseen=self.unseen, expected=expected)

    def save(self, path: str | Path, *, sums: bool = True) -> Path:
        """Write the model to a folder of JSON and Parquet files. :func:`covey.load` reads it, without the solver's history.

        Parameters
        ----------
        path : str or Path
            The folder. An older model there is replaced; a folder with anything else is refused.
        sums : bool
            Include ``X'X`` and ``X'y`` of each client, which intervals and updates need. For a client with very few rows they
            reveal as much as the rows; leave them out of a model that you give away.

        Returns
        -------
        Path
            The folder.

        Examples
        --------
        >>> import tempfile
        >>> from covey import HierarchicalRegressor
        >>> model = HierarchicalRegressor(gamma=1.0).fit([[0.0], [1.0]], [1.0, 3.0], client=["a", "b"])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     sorted(file.name for file in model.save(f"{folder}/model").iterdir())
        ['clients.parquet', 'clusters.parquet', 'model.json']
        """
        check_is_fitted(self, "model_")
        names = getattr(self, "feature_names_in_", None)
        extra: dict[str, Any] = {"unseen": self.unseen, "n_features": int(self.n_features_in_), "positions": self._positions()}
        extra |= {"features": None if names is None else names.tolist()}
        extra |= {} if self._federation_ is None else {"federation": self._federation_}
        return save_model(self.model_, path, sums=sums, extra=extra)

    def clock(
        self,
        speeds: IntoDataFrame | None = None,
        *,
        latency: float = LATENCY,
        bandwidth: float = BANDWIDTH,
        rows_per_second: float = ROWS_PER_SECOND,
    ) -> RunClock:
        """Find how long this fit takes if its clusters have these speeds. Nothing is run again.

        It needs a randomised algorithm, such as ``solver="l2gd"``, whose clusters work between exchanges.

        Parameters
        ----------
        speeds : data frame, optional
            Clusters with other speeds: a column ``cluster`` with ids, and ``rows_per_second``, ``latency`` or ``bandwidth``.
        latency : float
            Seconds that a message takes one way.
        bandwidth : float
            Megabytes per second of each connection.
        rows_per_second : float
            Rows whose gradient a client computes in a second.

        Returns
        -------
        RunClock
            Print it, or use its ``frame``, with the seconds until each check, and its ``timelines()``.

        Examples
        --------
        >>> from covey import HierarchicalRegressor, datasets
        >>> asked = {"client": "county", "cluster": "state", "gamma": 10.0, "solver": "one_coin", "tol": 0.1}
        >>> model = HierarchicalRegressor(formula="log_radon ~ floor", **asked).fit(datasets.load_radon())
        >>> model.clock(latency=0.5).frame.columns
        ['iteration', 'lock_step', 'rounds', 'asynchronous']
        """
        check_is_fitted(self, "model_")
        network = {"latency": latency, "bandwidth": bandwidth, "rows_per_second": rows_per_second}
        return clock_run(self.model_, speeds=speeds, **network)

    def __str__(self) -> str:
        return describe(self.model_) if hasattr(self, "model_") else repr(self)
