"""The scikit-learn interface: one estimator a family, over one specification."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from sklearn.base import ClassifierMixin, RegressorMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import validate_data

from covey._typing import Anything, Floats
from covey.estimators.base import PARAMETERS, SETTINGS, Hierarchical
from covey.losses import family_of
from covey.model.files import load_model
from covey.model.model import Model
from covey.tree.hierarchy import Level

__all__ = [
    "HierarchicalClassifier",
    "HierarchicalGammaRegressor",
    "HierarchicalPoissonRegressor",
    "HierarchicalRegressor",
    "load",
]


class _Scored:
    """``score`` with ids as arrays; it stands before scikit-learn's mixins, whose own takes ``X`` and ``y`` only."""

    predict: Any
    _metric: Any

    def score(
        self, X: Any, y: Any, sample_weight: Any = None, client: Any = None, cluster: Any = None, offset: Any = None
    ) -> float:
        """R^2 of a linear model, accuracy of a classifier, share of deviance explained (D^2) of others."""
        return float(self._metric(y, self.predict(X, client, cluster, offset), sample_weight))


class HierarchicalRegressor(_Scored, RegressorMixin, Hierarchical):
    """Linear regression for every client, every cluster and the whole, in one exact fit.

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

    def _metric(self, y: Any, predicted: Anything, sample_weight: Any) -> Any:
        from sklearn.metrics import r2_score

        return r2_score(y, predicted, sample_weight=sample_weight)


class HierarchicalClassifier(_Scored, ClassifierMixin, Hierarchical):
    """Logistic regression with two classes of any label type.

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
    classes_: Anything

    def predict(self, X: Any, client: Any = None, cluster: Any = None, offset: Any = None, level: Level = "client") -> Anything:
        """The more probable class of each row."""
        margin = self._margin(X, client, cluster, offset, level)
        return np.asarray(self.classes_[(margin > 0).astype(np.int64)])

    def predict_proba(
        self, X: Any, client: Any = None, cluster: Any = None, offset: Any = None, level: Level = "client"
    ) -> Floats:
        """Probabilities of the two classes, ``(n_rows, 2)``, in the order of ``classes_``."""
        p = self._mean(X, client, cluster, offset, level)
        return np.column_stack([1.0 - p, p])

    def decision_function(
        self, X: Any, client: Any = None, cluster: Any = None, offset: Any = None, level: Level = "client"
    ) -> Floats:
        """The log-odds of the second class."""
        return self._margin(X, client, cluster, offset, level)

    def _metric(self, y: Any, predicted: Anything, sample_weight: Any) -> Any:
        from sklearn.metrics import accuracy_score

        return accuracy_score(y, predicted, sample_weight=sample_weight)

    def _validate(self, X: Any, y: Any) -> tuple[Floats, Any]:
        X, y = validate_data(self, X, y, dtype=np.float64, ensure_all_finite=False)
        check_classification_targets(y)
        return X, y

    def _adopt(self, model: Model) -> Any:
        self.classes_ = np.asarray(model.classes)
        return super()._adopt(model)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_class = False
        return tags


class _LogLinear(_Scored, RegressorMixin, Hierarchical):
    """Scored by the share of deviance explained; responses are not negative."""

    _power: ClassVar[int]

    def _metric(self, y: Any, predicted: Anything, sample_weight: Any) -> Any:
        from sklearn.metrics import d2_tweedie_score

        return d2_tweedie_score(y, predicted, sample_weight=sample_weight, power=self._power)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.positive_only = True
        return tags


class HierarchicalPoissonRegressor(_LogLinear):
    """Log-linear regression of counts; ``predict`` gives expected counts. An exposure's log goes in as ``offset``.

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
    _power = 1


class HierarchicalGammaRegressor(_LogLinear):
    """Log-linear regression of positive responses with a constant coefficient of variation, such as costs and durations.

    ``predict`` gives expected responses. With learned penalties the dispersion, the squared coefficient of variation, is
    estimated too (``components_.residual``). A row's weight counts it so many times.

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
    _power = 2


_ALL: tuple[type[Hierarchical], ...] = (
    HierarchicalRegressor,
    HierarchicalClassifier,
    HierarchicalPoissonRegressor,
    HierarchicalGammaRegressor,
)

for _estimator in _ALL:
    _estimator.__doc__ = (_estimator.__doc__ or "").replace("\n\n    Examples", f"\n{PARAMETERS}\n    Examples", 1)

_ESTIMATORS: dict[str, type[Hierarchical]] = {estimator._family: estimator for estimator in _ALL}


def load(path: str | Path) -> Any:
    """Read a model folder back as the estimator it came from; it predicts the same bits.

    >>> import tempfile
    >>> from covey import HierarchicalRegressor, load
    >>> model = HierarchicalRegressor(gamma=1.0).fit([[0.0], [1.0]], [1.0, 3.0], client=["a", "b"])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     again = load(model.save(f"{folder}/model"))
    >>> bool((again.coef_ == model.coef_).all())
    True
    """
    model, extra = load_model(path)
    spec = model.spec
    names = {name: getattr(spec, name) for name in SETTINGS}
    loss = family_of(spec.family)
    kind = _ESTIMATORS.get(spec.family, HierarchicalClassifier if loss.two_classes else HierarchicalRegressor)
    estimator = kind(
        **{**names, **extra.get("positions", {})},
        unseen=extra.get("unseen", "parent"),
        random_state=spec.seed,
        loss=None if spec.family in _ESTIMATORS else spec.family,
    )
    if extra.get("features") is not None:
        estimator.feature_names_in_ = np.array(extra["features"], dtype=object)
    estimator.n_features_in_ = extra.get("n_features", len(model.terms))
    return estimator._adopt(model)
