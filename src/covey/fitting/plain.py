"""Standard errors of a plain regression: a fit to rows without groups.

The covariance of the coefficients is the dispersion times the inverse Hessian of the loss. In a linear model the dispersion is
the residual sum of squares over the degrees of freedom, and the log-likelihood is the maximum, as for ``lm`` of R. In other
families the dispersion is 1 for counts and classes, as for ``glm``, and its maximum-likelihood estimate for Gamma.
"""

from __future__ import annotations

import numpy as np

from covey.errors import DataError
from covey.losses import Loss
from covey.solvers import Fit
from covey.solvers.direct.elimination import Quadratic
from covey.tables.rows import GroupedData
from covey.variance.columns import sum_log_weights
from covey.variance.components import Components, Learned, LevelComponents

_SINGULAR = 1e-12  # smallest eigenvalue of a Hessian with unit diagonal that determines all coefficients


def plain_regression(data: GroupedData, loss: Loss, found: Fit) -> Learned | None:
    """Return the likelihood and the covariance of the coefficients; None if the rows do not determine them.

    Parameters
    ----------
    data : the rows, all of one client
    loss : a likelihood, summed over rows
    found : the fit to these rows
    """
    here, d, rows = loss.expand(data, found.theta), data.n_terms, int(data.rows_that_count.sum())
    value, size = float(here.value[0]), np.sqrt(np.maximum(np.diag(here.hessian[0]), 1e-300))
    correlation = here.hessian[0] / (size[:, None] * size)
    if not found.convergence.converged or np.linalg.eigvalsh(correlation)[0] < _SINGULAR or (loss.dispersion and rows <= d):
        return None
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        if loss.reml:
            s2, volume = 2 * value / (rows - d), sum_log_weights(data)
            log_likelihood = 0.5 * volume - 0.5 * rows * (np.log(2 * np.pi * 2 * value / rows) + 1)
        else:
            weight = rows if data.weights is None else float(data.weights.sum())
            try:
                lowest, s2 = loss.profile(value, weight, float(loss.perfect(data)[0]))
            except DataError:  # a perfect fit has no dispersion
                return None
            volume, log_likelihood = 0.0, -lowest - loss.constant(data)
    if not (0 < s2 < np.inf and np.isfinite(log_likelihood)):
        return None
    nothing = LevelComponents((), "diagonal", np.empty((1, 0, 0)), np.empty((1, 0)))
    components = Components(
        "least squares" if loss.reml else "ML",
        nothing,
        nothing,
        residual=float(s2) if loss.dispersion else None,
        log_likelihood=float(log_likelihood),
        parameters=d + int(loss.dispersion),
        rows=rows,
        shares=(0.0, 0.0, 1.0),
    )
    covariance = s2 * np.linalg.inv(correlation) / (size[:, None] * size)
    units = Quadratic(here.hessian, -here.gradient, here.value, data.rows_that_count)
    return Learned(components, data.terms, data.hierarchy, covariance, units, found.theta[0], volume)
