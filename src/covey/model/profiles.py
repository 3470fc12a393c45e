"""Profile-likelihood intervals of a fitted model: the criterion of its sums, or of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import polars as pl

from covey._typing import Floats
from covey.errors import DataError, SolverError, listing, one_of
from covey.model.posterior import quantile
from covey.nodes.network import InMemory
from covey.tables.rows import GroupedData
from covey.variance.columns import is_identity
from covey.variance.estimate import criterion_for, search
from covey.variance.identify import survey
from covey.variance.laplace_likelihood import LaplaceCriterion
from covey.variance.linear_likelihood import Criterion
from covey.variance.profile import Interval, of_coefficients, of_components, of_penalties
from covey.variance.sampling import criterion_of

if TYPE_CHECKING:
    from covey.model.model import Model


Which = Literal["components", "penalties", "coefficients"]
WHICH = get_args(Which)


def profile(model: Model, data: GroupedData | None = None, which: Which = "components", coverage: float = 0.95) -> pl.DataFrame:
    """Parameters with profile intervals. A linear model needs no rows; the gamma family has no profile."""
    quantile(coverage)
    if which not in WHICH:
        raise one_of("which", which, WHICH)
    learned = model.posterior.require_sums(all_clients=True)
    if not learned.components.grouped:
        raise SolverError("A regression without groups has no variance components to profile.")
    criterion: Criterion
    if model.problem.loss.reml:
        criterion, x, _ = criterion_of(learned, reml=False if which == "coefficients" else None, centred=False)
        x = search(criterion, x).x
    elif model.problem.loss.dispersion:
        fix = "bootstrap has intervals of standard deviations, coef_frame those of coefficients"
        raise SolverError(f"Profile intervals are not available for the {model.spec.family} family; {fix}.")
    elif data is None:
        raise DataError(f"The profile of a {model.spec.family} model needs the rows: pass X and y as to fit.")
    else:
        criterion, x = _from_rows(model, data)
    if which == "coefficients":
        found = of_coefficients(criterion, x, coverage, learned)
    else:
        found = (of_components if which == "components" else of_penalties)(criterion, x, coverage)
    return _table(found, model.hierarchy.cluster_ids)


def _table(intervals: Sequence[Interval], ids: pl.Series) -> pl.DataFrame:
    rows = [
        (each.level, None if each.cluster is None else ids[each.cluster], ", ".join(each.terms) or None, *_numbers(each))
        for each in intervals
    ]
    text: dict[str, Any] = {"level": pl.String, "cluster": ids.dtype, "term": pl.String, "parameter": pl.String}
    return pl.DataFrame(rows, schema={**text, **dict.fromkeys(("estimate", "lower", "upper"), pl.Float64)}, orient="row")


def _numbers(each: Interval) -> tuple[object, ...]:
    estimate = None if np.isnan(each.estimate) else each.estimate
    return each.parameter, estimate, each.lower, each.upper


def _from_rows(model: Model, data: GroupedData) -> tuple[Criterion, Floats]:
    """The criterion of the rows of the fit, and its optimum near the fitted model."""
    learned = model.posterior.learned
    if data.hierarchy.identities.tolist() != model.hierarchy.identities.tolist():
        raise DataError("The profile needs the rows that the model was fitted to; these have other clients.")
    criterion = criterion_for(survey(InMemory.of(data, model.problem.loss), learned.shape), learned.shape, reml=False)
    assert isinstance(criterion, LaplaceCriterion)  # the model is not linear
    basis = criterion.survey.columns.basis
    for level in (learned.components.client, learned.components.cluster):
        at = np.array([learned.terms.index(term) for term in level.terms], dtype=np.int64)
        if not is_identity(basis[at[:, None], at]):
            far = [learned.terms[b] for b in at if (basis[np.setdiff1d(at, b), b] != 0).any()]
            raise DataError(
                f"The profile needs columns near zero: subtract its mean from {listing(far, 3)}, which varies between "
                "groups together with the intercept, and fit again."
            )
    back, order, parts = np.linalg.inv(basis), criterion.order.terms, []
    levels = (criterion.parameters.client, learned.client_covariances), (criterion.parameters.cluster, learned.cluster.shape)
    for variation, S in levels:
        parts.append(variation.of_covariances(variation.pick(S[:, order[:, None], order])))
    start = np.concatenate([*parts, criterion.parameters_of((back @ model.wbar)[order])])
    return criterion, search(criterion, start).x
