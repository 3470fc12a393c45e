"""Choose the working columns: centre columns, part columns that are almost dependent, and drop those that are.

Columns that are far from zero, such as a year, are centred. With ``x - c`` in place of ``x`` the intercept becomes
``t_0' = t_0 + c t_x``. The model is the same if the intercept varies wherever ``x`` does, with a full covariance. Centring
matters: where ``c`` is hundreds of times the spread of ``x``, the intercept (at the year 0) is almost a multiple of the slope,
and the search for their covariance is ill-conditioned.

In the same way a column that is almost a linear combination of earlier ones is replaced by the difference. If nothing is left
of it (``DEPENDENT``, the tolerance of lme4), its global coefficient is not identifiable and is set to zero.

    node          sends     RowTotals: sums and squares of columns, X'X, X'y, the number of ones in each column
    coordinator   chooses   the column of ones, if there is one, the columns to centre, and the columns to drop
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from covey._typing import Anything, Floats
from covey.variance.columns import CountingNetwork, RowTotals, SumRows, WorkingColumns, is_identity
from covey.variance.parameters import Shape

DEPENDENT = 1e-7  # a column is dropped if this share of its norm, or less, is left beside other columns
_NEARLY = 1e-9  # below this share of its squared norm, sums have lost digits of what is left of a column
_FAR = 5.0  # standard deviations
_LOST_DIGITS = 1e-6  # below this ratio of variance to squared mean, sums of squares about zero do not give the variance
_ROUNDING = 4 * float(np.finfo(float).eps)


def choose_columns(network: CountingNetwork, shape: Shape) -> tuple[WorkingColumns, RowTotals, tuple[int, ...]]:
    """Centre columns that are far from zero and part columns that are almost dependent, if the model stays the same.

    Returns the columns, the totals of their rows, and the terms that other terms determine.
    """
    d = len(network.terms)
    totals = first = network.ask(SumRows(np.eye(d)))
    one = next((a for a in range(d) if totals.ones[a] == totals.rows), -1)
    columns, mean = WorkingColumns.plain(d, one), totals.total / totals.rows
    far = _may_be_far(totals, mean) & np.array([one >= 0 and _may_add(a, {one}, shape) for a in range(d)])
    if far.any():
        mean = np.where(far, mean, 0.0)
        about = network.ask(SumRows(_shifted(mean, one)))
        spread = np.sqrt(np.maximum(about.squares / about.rows - (about.total / about.rows) ** 2, 0.0))
        shift = np.where((np.abs(mean) > _FAR * spread) & (spread > _ROUNDING * np.abs(mean)), mean, 0.0)
        if shift.any():
            columns = replace(columns, basis=_shifted(shift, one))
            totals = about if (shift == mean).all() else network.ask(SumRows(columns.basis))
    return _part(network, columns, totals, np.diag(first.gram), shape)


def _shifted(shift: Floats, one: int) -> Floats:
    """The basis that subtracts a shift ``(d,)`` from the columns."""
    basis = np.eye(len(shift))
    basis[one] -= shift
    return basis


def _part(
    network: CountingNetwork, columns: WorkingColumns, totals: RowTotals, size: Floats, shape: Shape
) -> tuple[WorkingColumns, RowTotals, tuple[int, ...]]:
    """Find the terms that earlier terms determine, as R's ``qr`` does; ``size (d,)`` has the squared norms of the columns.

    Where rounding of the sums hides what is left of a column, the nodes sum the differences themselves.
    """
    free = np.flatnonzero(shape.free(np.arange(len(size)))).tolist()
    if not is_identity(columns.basis):  # the other columns have multiples of the ones in them
        free = sorted(free, key=lambda a: a != columns.one)
    kept, near = list[int](), dict[int, dict[int, float]]()
    for a in free:
        onto, left = _projected(totals.gram, a, kept)
        if left > _NEARLY:
            kept.append(a)
        else:
            near[a] = dict(zip(kept, onto.tolist(), strict=True))
    if not near:
        return columns, totals, ()
    apart = np.eye(len(size))
    for a, others in near.items():
        apart[list(others), a] -= list(others.values())
    rest = network.ask(SumRows(columns.basis @ apart)).gram
    dropped = []
    for a in near:
        if _projected(rest, a, kept)[1] * rest[a, a] > DEPENDENT**2 * size[a]:
            kept.append(a)
        else:
            dropped.append(a)
    may = [a for a in near if a not in dropped and _may_add(a, set(near[a]), shape)]
    if not may:
        return columns, totals, tuple(dropped)
    basis = np.eye(len(size))
    basis[:, may] = apart[:, may]
    columns = replace(columns, basis=columns.basis @ basis)
    return columns, network.ask(SumRows(columns.basis)), tuple(dropped)


def _projected(gram: Floats, a: int, kept: list[int]) -> tuple[Floats, float]:
    """The projection of a column onto others, from ``X'X``, and the share of its squared norm that is left."""
    if gram[a, a] <= 0:
        return np.zeros(len(kept)), 0.0
    size = np.sqrt(np.diag(gram))[kept]
    scaled = gram[kept, a] / size
    onto = np.linalg.solve(gram[np.ix_(kept, kept)] / (size[:, None] * size), scaled)
    return onto / size, 1.0 - float(onto @ scaled) / float(gram[a, a])


def _may_be_far(totals: RowTotals, mean: Floats) -> Anything:
    """Which columns may be far from zero. Some sums of squares have lost the digits that would decide."""
    with np.errstate(over="ignore", invalid="ignore"):
        variance = totals.squares / totals.rows - mean**2
        return np.asarray((mean**2 > _FAR**2 * variance) | ((variance < _LOST_DIGITS * mean**2) & (mean != 0)))


def _may_add(a: int, onto: set[int], shape: Shape) -> bool:
    """Whether the model stays the same if multiples of the terms ``onto`` are added to term ``a``."""
    levels = (shape.client, shape.client_kind), (shape.cluster, shape.cluster_kind)
    varies = all(a not in varying or (kind == "full" and onto <= set(varying)) for varying, kind in levels)
    return a not in onto and varies and (a in shape.zero or not onto & set(shape.zero))
