"""How much of the variance a model explains: R2 of Nakagawa and Schielzeth (2013), with random slopes as Johnson (2014).

    marginal = V_f / V     conditional = (V_f + V_clusters + V_clients) / V     V = V_f + V_clusters + V_clients + V_residual

``V_f`` is the variance of ``x'wbar`` over rows, and that of groups is the mean over rows of ``x'S x``. ``V_residual`` is the
residual variance; for classes it is pi^2 / 3, for counts ``log(1 + 1 / mean)``, for the gamma family trigamma(1 / dispersion),
all on the scale of the linear predictor (Nakagawa, Johnson and Schielzeth 2017). A linear model needs no rows: its sums have
what is needed. With row weights these are weighted means.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from covey._typing import Floats
from covey.errors import DataError
from covey.model.new_rows import Observed
from covey.tables.sparse import NOT_SPARSE

if TYPE_CHECKING:
    from covey.model.model import Model


class R2(NamedTuple):
    """Shares of variance: ``marginal`` by the fixed effects, ``conditional`` by these and the groups."""

    marginal: float
    conditional: float


def r2(model: Model, rows: Observed | None = None) -> R2:
    """R2 of a model with learned variances. All but linear models need the ``rows`` of the fit."""
    learned = model.posterior.learned
    if model.shared is not None:
        raise DataError(NOT_SPARSE)
    if rows is None:
        n, mean, gram = _from_sums(model)
    else:
        n, mean, gram = float(len(rows.y)), rows.X.mean(axis=0), rows.X.T @ rows.X / len(rows.y)
    common = (float(model.wbar @ gram @ model.wbar) - float(mean @ model.wbar) ** 2) * n / max(n - 1.0, 1.0)
    levels = learned.components.client, learned.components.cluster
    groups = sum(float((level.embedded(learned.terms).mean(axis=0) * gram).sum()) for level in levels if level.terms)
    y = np.ones(1) if rows is None else rows.y
    residual = model.problem.loss.residual(y, learned.dispersion)
    total = common + groups + residual
    return R2(common / total, (common + groups) / total)


def _from_sums(model: Model) -> tuple[float, Floats, Floats]:
    """The number of rows, and the means over rows of ``x`` and of ``x x'``."""
    terms = list(model.terms)
    if not model.problem.loss.reml or "Intercept" not in terms:
        what = "without an intercept" if model.problem.loss.reml else f"of the {model.spec.family} family"
        raise DataError(f"R2 of a model {what} needs the rows: pass data=, the table that the model was fitted to.")
    units, at = model.posterior.require_sums(all_clients=True).units, terms.index("Intercept")
    whole = units.C.sum(axis=0)
    return float(units.n.sum()), whole[at] / whole[at, at], whole / whole[at, at]
