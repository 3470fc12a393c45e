"""Columns far from zero, such as a year, put about their mean while the covariances are learned.

With ``x - c`` for ``x`` the intercept is another, ``t_0' = t_0 + c t_x``, and the model is the same, if the intercept varies
wherever ``x`` does and with every correlation. But where ``c`` is hundreds of times the spread of ``x`` the old intercept is
that of the year 0, all but a multiple of the slope, and a search among such covariances ends anywhere.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from covey._typing import Floats
from covey.data import GroupedData
from covey.hierarchy import Hierarchy
from covey.solvers.elimination import Quadratic
from covey.solvers.result import Fit
from covey.variance.components import Learned, Level
from covey.variance.structure import Shape

_FAR = 5.0  # standard deviations


def shift_of(data: GroupedData, shape: Shape) -> Floats:
    """What is to be subtracted from each column: the mean of those far from zero, where that leaves the model as it is."""
    shift = np.zeros(data.n_terms)
    one = next((a for a in range(data.n_terms) if (data.X[:, a] == 1.0).all()), None)
    if one is None:
        return shift
    mean, sd = data.X.mean(axis=0), data.X.std(axis=0)
    levels = (shape.client, shape.client_kind), (shape.cluster, shape.cluster_kind)
    for a in np.flatnonzero((np.abs(mean) > _FAR * sd) & (sd > 0)).tolist():
        if all(a not in varying or (kind == "full" and one in varying) for varying, kind in levels):
            shift[a] = mean[a]
    return shift


def centred(data: GroupedData, shift: Floats) -> GroupedData:
    """The same rows with columns shifted."""
    return replace(data, X=data.X - shift) if shift.any() else data


def uncentred(fit: Fit, learned: Learned, data: GroupedData, shift: Floats) -> tuple[Fit, Learned]:
    """What was learned of shifted columns, told of the columns as they were."""
    if not shift.any():
        return fit, learned
    d = len(shift)
    one = next(a for a in range(d) if (data.X[:, a] == 1.0).all())
    back, forth = np.eye(d), np.eye(d)
    back[one] -= shift  # coefficients as they were, of those of shifted columns
    forth[one] += shift
    fit = replace(fit, theta=fit.theta @ back.T, w=fit.w @ back.T, wbar=back @ fit.wbar)
    units = learned.units
    sums = Quadratic(forth.T @ units.C @ forth, units.r @ forth, units.c, units.n)
    found = learned.components
    client, cluster = (_told(level, data.terms, back, one) for level in (found.client, found.cluster))
    covariance = back @ learned.covariance @ back.T
    origin = back @ learned.origin
    components = replace(found, client=client, cluster=cluster)
    tree: Hierarchy = data.hierarchy
    return fit, Learned.of(components, data.terms, tree, covariance, sums, origin, learned.log_weights)


def _told(level: Level, terms: tuple[str, ...], back: Floats, one: int) -> Level:
    at = np.array([terms.index(term) for term in level.terms], dtype=np.int64)
    if one not in at or not back[one, at].any():
        return level
    own = back[at[:, None], at]
    errors = level.sd_error.copy()
    errors[:, level.terms.index(terms[one])] = np.nan  # of an intercept so far away nothing of use is known
    return replace(level, covariance=own @ level.covariance @ own.T, sd_error=errors)
