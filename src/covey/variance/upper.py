"""The levels above the clients, which the coordinator solves from sums by cluster, given the covariances of a linear model."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from covey._typing import Anything, Floats
from covey.solvers.direct.elimination import Quadratic, absorb_leading, cluster_covariances, invert, leading_width


@dataclass(frozen=True)
class UpperPosterior:
    """The upper levels given the covariances, which are relative to ``dispersion``.

    Attributes
    ----------
    C : (k, d, d) the precision with which the clients determine each cluster's model
    wbar, w : (d,) and (k, d), the posterior means
    force : (k, d) the forces ``S^-1 (w_j - wbar)``
    P0 : (d, d) the covariance of ``wbar``; zero for ML, which takes it as fixed
    P : (k, d, d) the posterior covariance of each cluster's model
    D : (k, d, d) the precision with which each cluster determines ``wbar``
    criterion : twice the negative log-likelihood
    dispersion, dof : the residual variance (1 for counts and classes), and its degrees of freedom
    """

    C: Floats
    wbar: Floats
    w: Floats
    force: Floats
    P0: Floats
    P: Floats
    D: Floats
    criterion: float
    dispersion: float
    dof: float


def upper(
    seen: Quadratic, log_determinants: float, S: Floats, reml: bool, free: Anything | None = None, more: int = 0
) -> UpperPosterior:
    """Solve for the upper levels, given the clients' losses as functions of ``w_j``: the coordinator's part of the sweep.

    The global coefficients of terms that are not ``free (d,)`` are zero. There are ``more`` coefficients, in the offset.
    """
    d = seen.r.shape[1]
    D, q, each = absorb_leading(seen.C, seen.r, S, leading_width(S))
    log_determinants += float(each.sum())
    whole, total = D.sum(axis=0), q.sum(axis=0)
    inverse, log_whole = invert(whole, free)
    wbar = inverse @ total
    rows = float(seen.n.sum())
    dof = rows - (d if free is None else int(free.sum())) - more if reml else rows
    squares = 2.0 * float(seen.c.sum()) - float(np.einsum("ja,ab,jb->", seen.r, S, q)) - float(wbar @ total)
    dispersion = max(squares, 0.0) / dof
    with np.errstate(divide="ignore"):
        criterion = dof * (np.log(2 * np.pi * dispersion) + 1.0) + log_determinants + (log_whole if reml else 0.0)
    force, P0 = q - D @ wbar, inverse if reml else np.zeros_like(inverse)
    P, value = cluster_covariances(seen.C, S, P0, leading_width(S)), float(criterion)
    return UpperPosterior(seen.C, wbar, wbar + force @ S, force, P0, P, D, value, dispersion, dof)
