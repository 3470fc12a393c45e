"""Centre columns that are far from zero, such as a year, while the covariances are learned.

With ``x - c`` in place of ``x`` the intercept becomes ``t_0' = t_0 + c t_x``. The model is the same if the intercept varies
wherever ``x`` does, with a full covariance. Centring matters: where ``c`` is hundreds of times the spread of ``x``, the
intercept (at the year 0) is almost a multiple of the slope, and the search for their covariance is ill-conditioned.

    node          sends     totals of its rows: sums and squares of columns, X'X, X'y, how many values of a column are 1
    coordinator   chooses   the column of ones, if there is one, and the columns to centre
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from covey._typing import Anything, Floats
from covey.losses import loss_of
from covey.nodes.messages import Message
from covey.nodes.network import Network
from covey.nodes.node import Node
from covey.records import Reply
from covey.solvers.result import Fit
from covey.tree.hierarchy import Hierarchy
from covey.variance.components import Learned, LevelComponents
from covey.variance.frame import WorkingColumns
from covey.variance.structure import Shape

_FAR = 5.0  # standard deviations
_LOST_DIGITS = 1e-6  # variance over squared mean below which sums of squares about zero do not give the variance
_ROUNDING = 4 * float(np.finfo(float).eps)


@dataclass(frozen=True)
class RowTotals(Reply):
    """Sums over all rows of a node, with shifted columns.

    Attributes
    ----------
    rows, counted : the number of rows, and of those with positive weight
    weight, log_weights : the sums of weights and of their logarithms
    ones : (d,) the number of rows where a column is 1
    total, squares : (d,) the sums of the columns and of their squares
    gram, rhs : ``X'WX (d, d)`` and ``X'W(y - offset) (d,)``
    response, response_squares : the sums of ``y`` and of ``W (y - offset)^2``
    constant : the part of the negative log-likelihood that losses leave out
    perfect : the lowest loss that the rows could have, where a dispersion is estimated
    """

    rows: int
    counted: float
    weight: float
    log_weights: float
    ones: Floats
    total: Floats
    squares: Floats
    gram: Floats
    rhs: Floats
    response: float
    response_squares: float
    constant: float
    perfect: float


@dataclass(frozen=True)
class SumRows(Message[RowTotals], label="totals of rows", phase="learn"):
    """Sum the rows, with columns less ``shift (d,)``."""

    shift: Floats

    def at(self, node: Node) -> RowTotals:
        data = node.data
        weights = data.weights
        if self.shift.any():
            data = replace(data, X=data.X - self.shift)
        here = loss_of("gaussian").expand(data, np.zeros((data.n_clients, data.n_terms)))
        return RowTotals(
            data.n_rows,
            float(data.rows_that_count.sum()),
            float(data.n_rows if weights is None else weights.sum()),
            0.0 if weights is None else float(np.log(weights[weights > 0]).sum()),
            (node.data.X == 1.0).sum(axis=0).astype(np.float64),
            data.X.sum(axis=0),
            np.einsum("la,la->a", data.X, data.X),
            here.hessian.sum(axis=0),
            -here.gradient.sum(axis=0),
            float(data.y.sum()),
            2 * float(here.value.sum()),
            float(node.loss.constant(data)),
            float(node.loss.perfect(data).sum()) if node.loss.dispersion else 0.0,
        )


def choose_columns(network: Network, shape: Shape) -> tuple[WorkingColumns, RowTotals]:
    """Working columns that centre far columns, where that leaves the model the same, and the totals of their rows."""
    d = len(network.terms)
    totals = network.ask(SumRows(np.zeros(d)))
    one = next((a for a in range(d) if totals.ones[a] == totals.rows), -1)
    columns, mean = WorkingColumns(np.zeros(d), one, np.zeros(d)), totals.total / totals.rows
    far = _may_be_far(totals, mean) & np.array([one >= 0 and _may_centre(a, one, shape) for a in range(d)])
    if not far.any():
        return columns, totals
    mean = np.where(far, mean, 0.0)
    about = network.ask(SumRows(mean))
    spread = np.sqrt(np.maximum(about.squares / about.rows - (about.total / about.rows) ** 2, 0.0))
    shift = np.where((np.abs(mean) > _FAR * spread) & (spread > _ROUNDING * np.abs(mean)), mean, 0.0)
    if not shift.any():
        return columns, totals
    return replace(columns, shift=shift), about if (shift == mean).all() else network.ask(SumRows(shift))


def _may_be_far(totals: RowTotals, mean: Floats) -> Anything:
    """Which columns may be far from zero; the sums of squares of some have lost the digits that say."""
    with np.errstate(over="ignore", invalid="ignore"):
        variance = totals.squares / totals.rows - mean**2
        return np.asarray((mean**2 > _FAR**2 * variance) | ((variance < _LOST_DIGITS * mean**2) & (mean != 0)))


def _may_centre(a: int, one: int, shape: Shape) -> bool:
    """Whether the model is the same with term ``a`` centred."""
    levels = (shape.client, shape.client_kind), (shape.cluster, shape.cluster_kind)
    return a != one and all(a not in varying or (kind == "full" and one in varying) for varying, kind in levels)


def uncentred(
    fit: Fit, learned: Learned, columns: WorkingColumns, terms: tuple[str, ...], tree: Hierarchy
) -> tuple[Fit, Learned]:
    """A fit to shifted columns in the user's units. The nodes do the same for their clients."""
    if not columns.shift.any():
        return fit, learned
    to_user, whole = columns.to_user, learned.whole
    fit = replace(fit, w=columns.to_user_units(fit.w), wbar=columns.to_user_units(fit.wbar))
    components = replace(
        learned.components,
        client=_level_uncentred(learned.components.client, terms, columns),
        cluster=_level_uncentred(learned.components.cluster, terms, columns),
    )
    covariance, origin = to_user @ learned.covariance @ to_user.T, columns.to_user_units(learned.origin)
    result = Learned.of(components, terms, tree, covariance, learned.units, origin, learned.log_weights)
    if whole is not None:
        whole = replace(whole, clusters=to_user @ whole.clusters @ to_user.T)
    return fit, replace(result, whole=whole)


def _level_uncentred(level: LevelComponents, terms: tuple[str, ...], columns: WorkingColumns) -> LevelComponents:
    at = np.array([terms.index(term) for term in level.terms], dtype=np.int64)
    # Only a column that is centred and varies at this level changes the variance of the intercept.
    if columns.one not in at or not columns.shift[at].any():
        return level
    to_user = columns.to_user[at[:, None], at]
    errors = level.sd_error.copy()
    errors[:, level.terms.index(terms[columns.one])] = np.nan  # an intercept so far from the rows has no useful estimate
    return replace(level, covariance=to_user @ level.covariance @ to_user.T, sd_error=errors)
