"""Clients at their best coefficients given their clusters' models, in the space of their margins.

A client with rows ``X (m, d)``, ``m <= d``, penalty ``gamma`` and its cluster at ``w`` minimises ``f(theta) + gamma/2 |theta -
w|^2``. The minimiser is ``theta = w + X'a / gamma``, where ``a (m,)`` is minus the derivative of each row's loss in its margin.
With the Gram matrix ``K = X X'``, which does not depend on ``theta``, the margins are ``eta = X w + offset + K a / gamma``.
Newton's method for ``a`` then costs ``m^3`` for each step, for any number of terms: with ``D^2`` the second derivatives and
``e = -(a + slope(eta))``,

    (I + D K D / gamma) z = D K e / gamma        step = e - D z

The rows with their ``d`` terms are read only for ``X w`` and ``X'a``. So clients are solved to the end before their sums go up
the tree, and the matrices ``(d, d)`` of clusters are needed only for the few steps of the clusters' models.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from covey._typing import Floats, Ints
from covey.losses import Loss
from covey.solvers.direct import kernels
from covey.solvers.direct.elimination import MANY
from covey.solvers.direct.margin_kernels import solve_margins
from covey.tables.rows import GroupedData
from covey.threads import share


@dataclass(frozen=True)
class Grams:
    """The lower triangle of ``K_i = X_i X_i'`` of each client; client ``i``'s starts at ``place[i]``."""

    place: Ints
    K: Floats

    @classmethod
    def of(cls, data: GroupedData, loss: Loss) -> Grams | None:
        """None if clients cannot be solved in the space of their margins, if there is only one, or if margins take more."""
        counts = np.diff(data.client_ptr)
        if data.n_clients == 1:  # nothing to gain; on separated classes the last bits decide where the fit ends
            return None
        if data.n_terms <= MANY or loss.quadratic or not loss.compiled or loss.ridge or (counts > data.n_terms).any():
            return None
        squares = counts**2
        if squares.sum() > data.X.size:
            return None
        place, K = np.cumsum(squares) - squares, np.empty(int(squares.sum()))
        share(kernels.gram_rows, data.n_clients, data.X, data.client_ptr, place, K)
        return cls(place, K)


def solve_clients(
    data: GroupedData, loss: Loss, grams: Grams, theta: Floats, u: Floats, tie: Floats, pull: Floats
) -> tuple[Floats, Floats, Floats]:
    """The best coefficients given ``w_i = theta_i - tie_i u_i``, the forces on them, and ``a``, with ``tie = 1 / gamma``.

    ``pull`` is ``a`` at a point nearby, or empty. A client for which no solution is found keeps ``theta`` and ``u``.
    """
    family, X, y, weights, _, scale, _, ptr = loss.operands(data)
    w, n = theta - tie[:, None] * u, data.n_clients
    start, done = np.empty(data.n_rows), np.zeros(n, dtype=np.bool_)
    share(kernels.margins_of_rows, n, X, ptr, w, start)
    start = start if data.offset is None else start + data.offset
    a = pull.copy() if len(pull) else np.zeros(data.n_rows)
    largest = int(np.diff(ptr).max(initial=0))
    share(solve_margins, n, family, grams.K, grams.place, ptr, y, weights, scale, tie, start, largest, a, done)
    force = np.empty_like(theta)
    share(kernels.sums_of_rows, n, X, ptr, a, force)
    found = w + tie[:, None] * force
    if done.all():
        return found, force, a
    return np.where(done[:, None], found, theta), np.where(done[:, None], force, u), a
