"""The mean response of each client, estimated from its own rows, by its cluster's model and by its own model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from covey._typing import Floats, Ints
from covey.errors import DataError
from covey.model.new_rows import Observed

if TYPE_CHECKING:
    from covey.model.model import Model


@dataclass(frozen=True)
class ClientMeans:
    """Means over the rows of each client, ``(n,)`` each; NaN for clients without rows.

    The rows of a client determine its mean, whatever covariates they have. They need not determine a coefficient.

    Attributes
    ----------
    alone : the mean of the client's responses
    cluster, overall : the mean of the predictions for these rows by the cluster's and by the global coefficients
    own : the mean of the predictions by the client's coefficients
    rows : the number of rows, or their total weight
    """

    alone: Floats
    cluster: Floats
    overall: Floats
    own: Floats
    rows: Floats

    def moved(self, which: Ints | Floats) -> float:
        """How far these clients move on average from their own mean to their cluster's: 0 not at all, 1 all the way."""
        a, b = self.alone[which] - self.cluster[which], self.own[which] - self.cluster[which]
        return float(1.0 - (a * b).sum() / max(float((a * a).sum()), 1e-300))


def client_means(model: Model, rows: Observed | None = None) -> ClientMeans:
    """From the sums of a linear model with an intercept; all others need their ``rows``."""
    parent, (theta, w) = model.hierarchy.parent, (model.theta, model.w)
    if rows is not None:
        return _from_rows(model, rows)
    terms, learned = list(model.terms), model.learned
    if learned is None or not learned.has_sums or not model.problem.loss.reml or "Intercept" not in terms:
        raise DataError("The means of clients are not part of this model; pass data=, the table that it was fitted to.")
    if model.problem.has_offset:
        raise DataError("The model has an offset, which its sums do not contain; pass data=, the table of the fit.")
    units, at = learned.units, terms.index("Intercept")
    total = units.C[:, at, at]
    averages = units.C[:, at] / total[:, None]
    alone = units.r[:, at] / total + averages @ learned.origin
    cluster, own = (np.einsum("ia,ia->i", averages, coefficients) for coefficients in (w[parent], theta))
    return ClientMeans(alone, cluster, averages @ model.wbar, own, model.rows.astype(np.float64))


def _from_rows(model: Model, rows: Observed) -> ClientMeans:
    seen = rows.chosen.client >= 0
    i, X, weight = rows.chosen.client[seen], rows.X[seen], rows.weights[seen]
    n, loss = model.hierarchy.n_clients, model.problem.loss
    offset = 0.0 if rows.offset is None else rows.offset[seen]
    total = np.bincount(i, weight, n)

    def mean(values: Floats) -> Floats:
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.asarray(np.bincount(i, weight * values, n) / total)

    cluster, overall, own = (
        mean(loss.mean(np.einsum("la,la->l", X, coefficients) + offset))
        for coefficients in (model.w[model.hierarchy.parent[i]], np.tile(model.wbar, (len(i), 1)), model.theta[i])
    )
    return ClientMeans(mean(rows.y[seen]), cluster, overall, own, np.bincount(i, minlength=n).astype(np.float64))
