"""Profile-likelihood intervals of a fitted model: the criterion of its sums, or of its rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from covey._typing import Floats
from covey.errors import DataError, SolverError
from covey.model.posterior import quantile
from covey.nodes.network import InMemory
from covey.tables.rows import GroupedData
from covey.variance.estimate import criterion_for, search
from covey.variance.identify import survey
from covey.variance.laplace_likelihood import LaplaceCriterion
from covey.variance.linear_likelihood import Criterion
from covey.variance.profile import profile_intervals
from covey.variance.sampling import criterion_of

if TYPE_CHECKING:
    from covey.model.model import Model


def profile(model: Model, data: GroupedData | None = None, coverage: float = 0.95) -> pl.DataFrame:
    """Standard deviations with profile intervals. A linear model needs no rows; the gamma family has no profile."""
    quantile(coverage)
    learned = model.posterior.require_sums(all_clients=True)
    if not learned.components.grouped:
        raise SolverError("A regression without groups has no variance components to profile.")
    criterion: Criterion
    if model.problem.loss.reml:
        criterion, x, _ = criterion_of(learned, centred=False)
        x = search(criterion, x).x
    elif model.problem.loss.dispersion:
        raise SolverError(f"Profile intervals are not available for the {model.spec.family} family; use bootstrap instead.")
    elif data is None:
        raise DataError(f"The profile of a {model.spec.family} model needs the rows: pass X and y as to fit.")
    else:
        criterion, x = _from_rows(model, data)
    ids = model.hierarchy.cluster_ids
    rows = [
        (each.level, None if each.cluster is None else ids[each.cluster], each.term, each.sd, each.lower, each.upper)
        for each in profile_intervals(criterion, x, coverage)
    ]
    schema: Any = {
        "level": pl.String,
        "cluster": ids.dtype,
        "term": pl.String,
        **dict.fromkeys(("sd", "lower", "upper"), pl.Float64),
    }
    return pl.DataFrame(rows, schema=schema, orient="row")


def _from_rows(model: Model, data: GroupedData) -> tuple[Criterion, Floats]:
    """The criterion of the rows of the fit, and its optimum near the fitted model."""
    learned = model.posterior.learned
    if data.hierarchy.identities.tolist() != model.hierarchy.identities.tolist():
        raise DataError("The profile needs the rows that the model was fitted to; these have other clients.")
    criterion = criterion_for(survey(InMemory.of(data, model.problem.loss), learned.shape), learned.shape, reml=False)
    assert isinstance(criterion, LaplaceCriterion)  # the model is not linear
    order, parts = criterion.order.terms, []
    levels = (criterion.parameters.client, learned.client_covariances), (criterion.parameters.cluster, learned.cluster.shape)
    for variation, S in levels:
        parts.append(variation.of_covariances(variation.pick(S[:, order[:, None], order])))
    start = np.concatenate([*parts, criterion.parameters_of(model.wbar[order])])
    return criterion, search(criterion, start).x
