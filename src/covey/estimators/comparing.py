"""Compare fitted models: likelihood-ratio tests, AIC and BIC."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import polars as pl
from narwhals.typing import IntoDataFrame
from scipy import special

from covey.errors import DataError, SolverError
from covey.estimators.base import HierarchicalEstimator
from covey.model.model import Model
from covey.variance.components import Components, Learned, LevelComponents
from covey.variance.profile import maximum_likelihood


def compare(*models: HierarchicalEstimator) -> IntoDataFrame:
    """Compare models of the same rows by likelihood-ratio tests, AIC and BIC, as ``anova`` of lme4.

    Restricted likelihoods (REML) of models with different fixed effects cannot be compared. So linear models that were fitted
    by REML are first fitted again by maximum likelihood, from the sums that they keep; no rows are needed. Each model is
    tested against the one before it, in the order of their numbers of parameters.

    Parameters
    ----------
    *models : fitted estimators
        Two models or more with learned variances, fitted to the same rows.

    Returns
    -------
    data frame
        One row for each model, in order of the number of parameters: ``model``, ``parameters``, ``log_likelihood``, ``aic``,
        ``bic``, ``statistic``, ``df`` and ``p_value``. After REML, ``log_likelihood``, ``aic`` and ``bic`` differ from those in
        ``components_``, since they are of the fit by maximum likelihood. ``statistic``, ``df`` and ``p_value`` are missing in
        the first row, and where the smaller model is not nested in the larger: where the larger lacks a term of the smaller, or
        has a more restricted covariance. P-values are those of chi-squared. If models differ in variances, the p-value is too
        large, because zero is on the boundary; :meth:`HierarchicalRegressor.likelihood_ratio` allows for that.

    Examples
    --------
    >>> import covey
    >>> homes = covey.datasets.load_radon()
    >>> small = covey.fit(homes, "log_radon ~ 1 + (1 | state/county)")
    >>> large = covey.fit(homes, "log_radon ~ floor + (1 | state/county)")
    >>> covey.compare(small, large)["df"].to_list()
    [None, 1]
    """
    fitted = [_model_of(each) for each in models]
    if len(fitted) < 2:
        raise SolverError(f"A comparison needs at least two models. Got {len(fitted)} instead.")
    return models[0]._native(comparison(fitted))


def comparison(models: list[Model], names: Sequence[str] | None = None) -> pl.DataFrame:
    """The table of :func:`compare`; models are named by their formulas unless ``names`` are given."""
    learned = [model.posterior.learned for model in models]
    _refuse_other_rows(models, learned)
    by_size = sorted(range(len(models)), key=lambda at: learned[at].components.parameters)
    rows, before = [], None
    for at in by_size:
        parts, likelihood = learned[at].components, _likelihood(models[at], learned[at])
        aic = -2 * likelihood + 2 * parts.parameters
        bic = -2 * likelihood + float(np.log(parts.rows)) * parts.parameters
        test: tuple[float | None, int | None, float | None] = (None, None, None)
        if before is not None:
            smaller, least = before
            df = parts.parameters - smaller.parameters
            if df > 0 and _is_nested(smaller, parts, models[by_size[len(rows) - 1]], models[at]):
                statistic = max(2 * (likelihood - least), 0.0)
                test = statistic, df, float(special.chdtrc(df, statistic))
        name = (models[at].spec.formula or " + ".join(models[at].terms)) if names is None else names[at]
        rows.append((name, parts.parameters, likelihood, aic, bic, *test))
        before = parts, likelihood
    numbers = dict.fromkeys(("log_likelihood", "aic", "bic", "statistic"), pl.Float64)
    schema = {"model": pl.String, "parameters": pl.Int64, **numbers, "df": pl.Int64, "p_value": pl.Float64}
    return pl.DataFrame(rows, schema=schema, orient="row")


def _model_of(estimator: HierarchicalEstimator) -> Model:
    if not isinstance(estimator, HierarchicalEstimator):
        raise SolverError(f"Only fitted models of covey can be compared. Got {type(estimator).__name__} instead.")
    return estimator._fitted


def _likelihood(model: Model, learned: Learned) -> float:
    """The log-likelihood at its maximum; REML fits are fitted again."""
    if learned.components.method != "REML":
        return learned.components.log_likelihood
    return maximum_likelihood(model.posterior.require_sums(all_clients=True))


def _is_nested(small: Components, large: Components, first: Model, second: Model) -> bool:
    """Whether the larger model contains the smaller: its terms, and the covariances at both levels."""
    pairs = ((small.client, large.client), (small.cluster, large.cluster))
    fixed = set(first.terms) - set(small.zero) <= set(second.terms) - set(large.zero)
    return fixed and all(_allows(large, small) for small, large in pairs)


def _allows(large: LevelComponents, small: LevelComponents) -> bool:
    """Whether every covariance that one level may have is also possible for another."""
    if not set(small.terms) <= set(large.terms) or len(small.covariance) > len(large.covariance):
        return False
    if large.kind == "isotropic" and len(large.terms) > 1:
        return not small.terms or (small.kind == "isotropic" and small.terms == large.terms)
    return large.kind == "full" or small.kind != "full" or len(small.terms) <= 1


def _refuse_other_rows(models: list[Model], learned: list[Learned]) -> None:
    """Raise an error if models cannot be of the same rows and responses."""
    first = models[0]
    for model, own in zip(models[1:], learned[1:], strict=True):
        same = {
            "families": model.spec.family == first.spec.family,
            "numbers of rows": own.components.rows == learned[0].components.rows,
            "responses": _response(model) == _response(first),
        }
        squares = _squares(first, learned[0]), _squares(model, own)
        if None not in squares and not np.isclose(*squares, rtol=1e-6, atol=0.0):  # type: ignore[arg-type]
            same["responses"] = False
        for what in (what for what, equal in same.items() if not equal):
            raise DataError(f"The models have different {what}; only models of the same rows can be compared.")


def _response(model: Model) -> str | None:
    return None if model.problem.formula is None else model.problem.formula.response


def _squares(model: Model, learned: Learned) -> float | None:
    """The weighted sum of squares of the responses, which the sums of a linear model have."""
    if not model.problem.loss.reml or not learned.has_sums or learned.whole is not None or model.problem.has_offset:
        return None
    units, t = learned.units, -learned.origin
    return float(2 * units.c.sum() - 2 * units.r.sum(axis=0) @ t + t @ units.C.sum(axis=0) @ t)
