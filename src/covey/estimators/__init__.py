"""The scikit-learn estimators, one for each family, and the functions that make one from a table or from a folder."""

from __future__ import annotations

from inspect import cleandoc
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from narwhals.typing import IntoFrame
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import validate_data

from covey._typing import Anything, ArrayLike, Floats, TableLike
from covey.estimators.base import HierarchicalEstimator
from covey.estimators.core import SETTINGS, EstimatorCore
from covey.losses import family_of
from covey.model.files import load_model
from covey.model.model import Model
from covey.nodes.layout import column_names, is_shards
from covey.nodes.lazy import as_lazy
from covey.nodes.shards import check_engine, open_shards
from covey.problem.problem import Spec, resolve
from covey.problem.rows import two_values
from covey.tables.files import is_pattern, read_table, scan_table
from covey.tree.hierarchy import Level

__all__ = [
    "HierarchicalClassifier",
    "HierarchicalEstimator",
    "HierarchicalGammaRegressor",
    "HierarchicalPoissonRegressor",
    "HierarchicalRegressor",
    "fit",
    "load",
]


class HierarchicalRegressor(HierarchicalEstimator, RegressorMixin, BaseEstimator):
    """Linear mixed model: a linear regression for every client, every cluster and all rows together.

    Examples
    --------
    >>> from covey import HierarchicalRegressor, datasets
    >>> homes = datasets.load_radon()
    >>> model = HierarchicalRegressor(client="county", cluster="state")
    >>> model = model.fit(homes[["county", "state", "floor"]], homes["log_radon"])
    >>> model.coef_.shape, model.cluster_coef_.shape, model.global_coef_.round(3).tolist()
    ((470, 2), (9, 2), [0.935, -0.723])
    """

    _family = "gaussian"
    _metric = ("r2_score", {})


class HierarchicalClassifier(HierarchicalEstimator, ClassifierMixin, BaseEstimator):
    """Logistic mixed model: a logistic regression for every client, every cluster and all rows together.

    The response has two classes, of any type of label; or successes of trials, as ``cbind(successes, failures)`` in a formula
    or as a share with ``trials``. The classes are then 0 and 1, and ``predict_proba`` gives the probability of a success.

    Examples
    --------
    >>> from covey import HierarchicalClassifier, datasets
    >>> homes = datasets.load_radon()
    >>> model = HierarchicalClassifier(client="county", cluster="state", gamma=6.0)
    >>> model = model.fit(homes[["county", "state", "floor"]], homes["radon"] > 4)
    >>> model.predict_proba(homes[:2]).round(2).tolist()
    [[0.95, 0.05], [0.95, 0.05]]
    """

    _family = "bernoulli"
    _metric = ("accuracy_score", {})
    classes_: Anything

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
        """Predict the more probable class of each row.

        Parameters
        ----------
        X : data frame, lazy table or (n_rows, n_features) array
            The rows.
        client, cluster, offset : (n_rows,) arrays, optional
            Ids and offsets, if they are not columns of ``X``.
        level : {"client", "cluster", "global"}
            The level of the model that predicts.
        expected : bool
            As in :meth:`predict_proba`. It changes probabilities but no class, because the logit link is symmetric.

        Returns
        -------
        (n_rows,) array
            Classes, as they are in ``classes_``. For a lazy table of Polars, DuckDB or Spark: a lazy table with the columns
            ``prediction``, ``probability`` (of the second class) and ``answered_by``.

        Examples
        --------
        >>> from covey import HierarchicalClassifier
        >>> model = HierarchicalClassifier(gamma=1.0).fit([[0.0], [1.0], [2.0]], ["no", "yes", "no"], client=["a", "b", "b"])
        >>> model.predict([[1.0]], client=["b"]).tolist()
        ['no']
        """
        if as_lazy(X) is not None:
            return self._lazily(X, client, cluster, offset, level, expected)  # type: ignore[no-any-return]
        margin = self.decision_function(X, client, cluster, offset, level)
        return np.asarray(self.classes_[(margin > 0).astype(np.int64)])

    def predict_proba(
        self,
        X: TableLike,
        client: ArrayLike | None = None,
        cluster: ArrayLike | None = None,
        offset: ArrayLike | None = None,
        level: Level = "client",
        *,
        expected: bool = True,
    ) -> Floats:
        """Predict the probabilities of the two classes.

        For an unseen client or cluster, and at a coarser ``level``, they are means over the unknown groups, as in ``predict``
        of the other estimators.

        Parameters
        ----------
        X : data frame or (n_rows, n_features) array
            The rows.
        client, cluster, offset : (n_rows,) arrays, optional
            Ids and offsets, if they are not columns of ``X``.
        level : {"client", "cluster", "global"}
            The level of the model that predicts.
        expected : bool
            Whether to take the mean over unknown groups. False sets their effects to zero, as ``allow.new.levels = TRUE`` does
            in lme4. A model with given penalties has no estimated variances, so it always sets them to zero.

        Returns
        -------
        (n_rows, 2) array
            Probabilities, in the order of ``classes_``.

        Examples
        --------
        >>> from covey import HierarchicalClassifier
        >>> model = HierarchicalClassifier(gamma=1.0).fit([[0.0], [1.0], [2.0]], ["no", "yes", "no"], client=["a", "b", "b"])
        >>> model.predict_proba([[1.0]], client=["b"]).round(2).tolist()
        [[0.62, 0.38]]
        """
        p = self._response(X, client, cluster, offset, level, expected)
        return np.column_stack([1.0 - p, p])

    def predict_log_proba(
        self,
        X: TableLike,
        client: ArrayLike | None = None,
        cluster: ArrayLike | None = None,
        offset: ArrayLike | None = None,
        level: Level = "client",
        *,
        expected: bool = True,
    ) -> Floats:
        """Predict the logarithms of the probabilities of the two classes.

        Parameters
        ----------
        X, client, cluster, offset, level, expected
            As in :meth:`predict_proba`.

        Returns
        -------
        (n_rows, 2) array
            Logarithms of probabilities, in the order of ``classes_``; minus infinity for a probability of 0.

        Examples
        --------
        >>> from covey import HierarchicalClassifier
        >>> model = HierarchicalClassifier(gamma=1.0).fit([[0.0], [1.0], [2.0]], ["no", "yes", "no"], client=["a", "b", "b"])
        >>> model.predict_log_proba([[1.0]], client=["b"]).round(2).tolist()
        [[-0.48, -0.97]]
        """
        with np.errstate(divide="ignore"):
            return np.log(self.predict_proba(X, client, cluster, offset, level, expected=expected))

    def decision_function(
        self,
        X: TableLike,
        client: ArrayLike | None = None,
        cluster: ArrayLike | None = None,
        offset: ArrayLike | None = None,
        level: Level = "client",
    ) -> Floats:
        """Predict the log-odds of the second class: the linear predictor.

        For an unseen client or cluster, and at a coarser ``level``, they are those at a random effect of zero.

        Parameters
        ----------
        X : data frame or (n_rows, n_features) array
            The rows.
        client, cluster, offset : (n_rows,) arrays, optional
            Ids and offsets, if they are not columns of ``X``.
        level : {"client", "cluster", "global"}
            The level of the model that predicts.

        Returns
        -------
        (n_rows,) array
            Log-odds; positive where the second class is more probable.

        Examples
        --------
        >>> from covey import HierarchicalClassifier
        >>> model = HierarchicalClassifier(gamma=1.0).fit([[0.0], [1.0], [2.0]], ["no", "yes", "no"], client=["a", "b", "b"])
        >>> model.decision_function([[1.0]], client=["b"]).round(2).tolist()
        [-0.49]
        """
        return self._margin(X, client, cluster, offset, level)

    def _validate(self, X: Any, y: Any, shares: bool = False) -> tuple[Floats, Any]:
        X, y = validate_data(self, X, y, dtype=np.float64, accept_sparse="csr", ensure_all_finite=False)
        if not shares:
            pair = two_values(y)
            check_classification_targets(y if pair is None else pair)
        return X, y

    def _adopt(self, model: Model) -> Self:
        self.classes_ = np.asarray(model.classes)
        return super()._adopt(model)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_class = False
        return tags


class _LogLinear(HierarchicalEstimator, RegressorMixin, BaseEstimator):
    """Responses that are not negative, with a log link; scored by the share of deviance explained."""

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.positive_only = True
        return tags


class HierarchicalPoissonRegressor(_LogLinear):
    """Poisson mixed model of counts, with a log link.

    ``predict`` gives the expected count in a group; for an unseen group, the mean over groups. Pass the logarithm of an
    exposure as ``offset``.

    Examples
    --------
    >>> import numpy as np
    >>> from covey import HierarchicalPoissonRegressor
    >>> age, visits, ward = np.array([[2.0], [5.0], [3.0], [6.0]]), [1, 3, 0, 8], ["a", "a", "b", "b"]
    >>> model = HierarchicalPoissonRegressor(gamma=1.0).fit(age, visits, client=ward)
    >>> model.predict(age[:1], client=["a"]).round(2).tolist()
    [0.43]
    """

    _family = "poisson"
    _metric = ("d2_tweedie_score", {"power": 1})


class HierarchicalGammaRegressor(_LogLinear):
    """Gamma mixed model of positive responses, such as costs and durations, with a log link.

    The coefficient of variation is constant. Its square, the dispersion, is estimated with the penalties and is then in
    ``components_.residual``. A weight of 2 counts the log-likelihood of a row twice; the number of rows stays the same.

    Examples
    --------
    >>> import numpy as np
    >>> from covey import HierarchicalGammaRegressor
    >>> age, cost, ward = np.array([[2.0], [5.0], [3.0], [6.0]]), [1.5, 3.0, 0.5, 8.0], ["a", "a", "b", "b"]
    >>> model = HierarchicalGammaRegressor(gamma=1.0).fit(age, cost, client=ward)
    >>> model.predict(age[:1], client=["a"]).round(2).tolist()
    [1.01]
    """

    _family = "gamma"
    _metric = ("d2_tweedie_score", {"power": 2})


_ESTIMATORS: dict[str, type[HierarchicalEstimator]] = {
    estimator._family: estimator
    for estimator in (
        HierarchicalRegressor,
        HierarchicalClassifier,
        HierarchicalPoissonRegressor,
        HierarchicalGammaRegressor,
    )
}

for _estimator in _ESTIMATORS.values():  # the parameters are documented once, in the class that has them
    _summary, _, _examples = cleandoc(_estimator.__doc__ or "").partition("Examples\n")
    _parameters = cleandoc(EstimatorCore.__doc__ or "").partition("\n\n")[2]
    _estimator.__doc__ = f"{_summary}{_parameters}\n\nExamples\n{_examples}"


def fit(
    table: IntoFrame | str | Path, spec: Spec | str, *, engine: Literal["ray"] | None = None, address: str | None = None
) -> HierarchicalEstimator:
    """Fit the model that a specification describes.

    Parameters
    ----------
    table : data frame, lazy table, str or Path
        The rows: a frame of pandas, polars or pyarrow, or the path of a file that :func:`covey.read_table` reads. A linear
        model also takes a lazy table (a polars ``LazyFrame``, a DuckDB relation, a Spark DataFrame, an Ibis table), or a
        folder or pattern of Parquet files, such as ``"rows/*.parquet"``. The engine that holds the table then
        computes sums by client in two queries, and only these sums are read. Every model takes a folder of shards that
        ``covey shard`` wrote, whose rows are mapped from disk.
    spec : Spec or str
        The specification, or only its formula, such as ``"y ~ x + (1 | state/county)"``.
    engine : {None, "ray"}
        Where the shards are read: in this process, or each in an actor of a Ray cluster, whose machines share the folder.
    address : str, optional
        Address of the Ray cluster, such as ``"auto"`` or ``"ray://head:10001"``. The default is the cluster that this process
        is connected to, or the one in ``RAY_ADDRESS``, or else a new one on this machine.

    Returns
    -------
    HierarchicalEstimator
        The fitted estimator of the specified family, such as :class:`covey.HierarchicalRegressor`.

    Examples
    --------
    >>> import covey
    >>> homes = covey.datasets.load_radon()
    >>> model = covey.fit(homes, "log_radon ~ floor + (1 | state/county)")
    >>> model.global_coef_.round(2).tolist()
    [0.94, -0.71]
    >>> spec = covey.Spec(formula="log_radon ~ floor", client="county", cluster="state", gamma=6.0, lam=4.0)
    >>> covey.fit(homes, spec)
    HierarchicalRegressor(client='county', cluster='state', formula='log_radon ~ floor', gamma=6.0, lam=4.0, random_state=0)
    """
    draft = resolve(Spec(formula=spec) if isinstance(spec, str) else spec)
    check_engine(table, engine, address)
    if isinstance(table, str | Path) and is_shards(table):
        with open_shards(table, draft, engine=engine, address=address) as (network, problem):
            return _estimator_of(draft.spec)._fit_network(network, problem, column_names(table))
    if isinstance(table, str | Path):
        several = is_pattern(table)
        table = scan_table(table) if several else read_table(table, ids=[draft.spec.client, draft.spec.cluster])
    return _estimator_of(draft.spec)._fit(draft, table)


def load(path: str | Path) -> HierarchicalEstimator:
    """Read a model from the folder that :meth:`HierarchicalEstimator.save` or ``covey fit`` wrote. No code is executed.

    Parameters
    ----------
    path : str or Path
        The folder.

    Returns
    -------
    HierarchicalEstimator
        The estimator that was saved. Its predictions are the same to the last bit.

    Examples
    --------
    >>> import tempfile
    >>> from covey import HierarchicalRegressor, load
    >>> model = HierarchicalRegressor(gamma=1.0).fit([[0.0], [1.0]], [1.0, 3.0], client=["a", "b"])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     again = load(model.save(f"{folder}/model"))
    >>> bool((again.coef_ == model.coef_).all())
    True
    """
    model, extra = load_model(path)
    estimator = _estimator_of(model.spec, unseen=extra.get("unseen", "parent"), **extra.get("positions", {}))
    if extra.get("features") is not None:
        estimator.feature_names_in_ = np.array(extra["features"], dtype=object)
    site: dict[str, Any] = {name: extra[name] for name in ("run", "sites", "without", "privacy") if name in extra}
    estimator._federation_ = extra.get("federation") or site or None
    estimator.n_features_in_ = extra.get("n_features", len(model.terms))
    return estimator._adopt(model)


def _estimator_of(spec: Spec, **parameters: Any) -> HierarchicalEstimator:
    """The estimator of the family of a specification, with its settings as parameters; not fitted."""
    own = _ESTIMATORS.get(spec.family)
    kind = own or (HierarchicalClassifier if family_of(spec.family).two_classes else HierarchicalRegressor)
    settings = {name: getattr(spec, name) for name in SETTINGS}
    return kind(**{**settings, **parameters}, random_state=spec.seed, loss=None if own else spec.family)
