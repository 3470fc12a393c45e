"""Columns far from zero, such as a year, put about their mean while the covariances are learned.

With ``x - c`` for ``x`` the intercept is another, ``t_0' = t_0 + c t_x``, and the model is the same, if the intercept varies
wherever ``x`` does and with every correlation. But where ``c`` is hundreds of times the spread of ``x`` the old intercept is
that of the year 0, all but a multiple of the slope, and a search among such covariances ends anywhere.

    node          sends   totals of its rows: sums and squares of columns, X'X, X'y, how many values of a column are 1
    coordinator   sees    whether there is a column of ones, and which columns are far from zero
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
_BLURRED = 1e-6  # variance over squared mean below which sums of squares about zero no longer tell the variance
_ROUNDING = 4 * float(np.finfo(float).eps)


@dataclass(frozen=True)
class RowTotals(Reply):
    """sums over all rows of a node, columns shifted as asked.

    ``rows`` counts all of them, ``counted`` those of positive weight, ``ones (d,)`` those where a column is 1; ``total (d,)``
    and ``squares (d,)`` are of the columns; ``gram (d, d)`` and ``rhs (d,)`` are ``X'WX`` and ``X'W(y - offset)``; ``response``
    and ``response_squares`` are sums of ``y`` and of ``W (y - offset)^2``; ``constant`` is what losses leave out and
    ``perfect`` the lowest loss that the rows could have, where a dispersion is estimated with the mode.
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
    """tell the totals of your rows, columns less ``shift (d,)``."""

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


def frame_for(network: Network, shape: Shape) -> tuple[WorkingColumns, RowTotals]:
    """The frame in which far columns are about their mean, where that leaves the model as it is, and totals in it."""
    d = len(network.terms)
    totals = network.ask(SumRows(np.zeros(d)))
    one = next((a for a in range(d) if totals.ones[a] == totals.rows), -1)
    frame, mean = WorkingColumns(np.zeros(d), one, np.zeros(d)), totals.total / totals.rows
    far = _far(totals, mean) & np.array([one >= 0 and _may_move(a, one, shape) for a in range(d)])
    if not far.any():
        return frame, totals
    mean = np.where(far, mean, 0.0)
    about = network.ask(SumRows(mean))
    spread = np.sqrt(np.maximum(about.squares / about.rows - (about.total / about.rows) ** 2, 0.0))
    shift = np.where((np.abs(mean) > _FAR * spread) & (spread > _ROUNDING * np.abs(mean)), mean, 0.0)
    if not shift.any():
        return frame, totals
    return replace(frame, shift=shift), about if (shift == mean).all() else network.ask(SumRows(shift))


def _far(totals: RowTotals, mean: Floats) -> Anything:
    """Which columns are, or may be: about zero the squares of some no longer tell their spread."""
    with np.errstate(over="ignore", invalid="ignore"):
        variance = totals.squares / totals.rows - mean**2
        return np.asarray((mean**2 > _FAR**2 * variance) | ((variance < _BLURRED * mean**2) & (mean != 0)))


def _may_move(a: int, one: int, shape: Shape) -> bool:
    levels = (shape.client, shape.client_kind), (shape.cluster, shape.cluster_kind)
    return a != one and all(a not in varying or (kind == "full" and one in varying) for varying, kind in levels)


def uncentred(
    fit: Fit, learned: Learned, frame: WorkingColumns, terms: tuple[str, ...], tree: Hierarchy
) -> tuple[Fit, Learned]:
    """What was learned of shifted columns, told of the columns as they were; but for the clients, whose nodes tell it."""
    if not frame.shift.any():
        return fit, learned
    back = frame.back
    fit = replace(fit, w=frame.told(fit.w), wbar=frame.told(fit.wbar))
    found, whole = learned.components, learned.whole
    client, cluster = (_told(level, terms, back, frame.one) for level in (found.client, found.cluster))
    covariance = back @ learned.covariance @ back.T
    components = replace(found, client=client, cluster=cluster)
    told = Learned.of(components, terms, tree, covariance, learned.units, frame.told(learned.origin), learned.log_weights)
    if whole is not None:
        whole = replace(whole, clusters=back @ whole.clusters @ back.T)
    return fit, replace(told, whole=whole)


def _told(level: LevelComponents, terms: tuple[str, ...], back: Floats, one: int) -> LevelComponents:
    at = np.array([terms.index(term) for term in level.terms], dtype=np.int64)
    if one not in at or not back[one, at].any():
        return level
    own = back[at[:, None], at]
    errors = level.sd_error.copy()
    errors[:, level.terms.index(terms[one])] = np.nan  # of an intercept so far away nothing of use is known
    return replace(level, covariance=own @ level.covariance @ own.T, sd_error=errors)
