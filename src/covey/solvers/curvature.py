"""How curved the objective is where no bound says so: measured, and said to be.

The smallest eigenvalue of the objective's Hessian is one over the largest of its inverse; the sweep applies that inverse, a few
dozen Lanczos steps find its top. For a quadratic loss this is exact, and counts the curvature that clients with fewer rows than
columns get from the others. For other losses it is the curvature at one point, near the minimiser.
"""

from __future__ import annotations

import warnings

import numpy as np

from covey._typing import Floats
from covey.data import GroupedData
from covey.errors import ConvergenceWarning
from covey.losses import Loss
from covey.objective import Penalty
from covey.solvers.newton import newton
from covey.solvers.rounds import Top, node_sums
from covey.solvers.sweep import Spread, descend, eliminate, solve_top
from covey.solvers.threads import threads_for
from covey.theory import Constants

_PRECISION = 1e-3
_ROUGH = 3  # Newton steps to a point near enough to the minimiser to measure curvature at
_MARGIN = 2.0  # an upper bound measured at two points is doubled


def constants(data: GroupedData, loss: Loss, penalty: Penalty, *, mu: float | None = None, L: float | None = None) -> Constants:
    """What the theorems need: bounds that hold everywhere where there are any, measured values where not."""
    with threads_for(data):
        return _constants(data, loss, penalty, mu, L)


def _constants(data: GroupedData, loss: Loss, penalty: Penalty, mu: float | None, L: float | None) -> Constants:
    if loss.name == "gaussian":
        A = loss.hessian(data, np.zeros((data.n_clients, data.n_terms)))
        return Constants.of(data, loss, penalty, L=L, mu=objective_curvature(data, penalty, A) if mu is None else mu)
    bounded = np.isfinite(loss.curvature[1])
    if (mu is not None or loss.ridge > 0) and (bounded or L is not None):
        return Constants.of(data, loss, penalty, L=L, L_row=None if bounded else L, mu=mu)
    rough = near_minimiser(data, loss, penalty)
    A = loss.hessian(data, rough)
    said = []
    if mu is None and loss.ridge == 0:
        mu = objective_curvature(data, penalty, A)
        said.append("mu")
    L_row = None
    if L is None and not bounded:
        at_start = loss.hessian(data, np.zeros_like(rough))
        L = _MARGIN * max(float(np.linalg.eigvalsh(H)[:, -1].max()) for H in (A, at_start))
        said.append("L")
    if not bounded:
        bend = loss.mean(np.maximum(data.margin(rough), data.margin(np.zeros_like(rough))))  # a count's variance is its mean
        L_row = _MARGIN * float(loss.row_smoothness(data, bend).max(initial=loss.ridge))
    note = f"{' and '.join(said)} measured near the minimiser, not proved" if said else ""
    return Constants.of(data, loss, penalty, L=L, L_row=L_row, mu=mu, note=note)


def near_minimiser(data: GroupedData, loss: Loss, penalty: Penalty) -> Floats:
    """A few Newton steps."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return newton(data, loss, penalty, max_iter=_ROUGH).theta


def objective_curvature(data: GroupedData, penalty: Penalty, A: Floats) -> float:
    """The smallest eigenvalue of the objective's Hessian, the clients' own being ``A (n, d, d)``; 0 where it is singular."""
    tree, top, (n, d) = data.hierarchy, Top.of(penalty), A.shape[:2]
    lam = penalty.lam if len(penalty.lam) > 1 else np.array([np.inf])  # one cluster: the same objective whatever its lam
    below, above = Spread.of_penalty(penalty.gamma, d), Spread.of_penalty(lam, d)

    def inverse(b: Floats) -> Floats:
        b = b.reshape(n, d)
        w, _, _ = solve_top(eliminate(A, b, below, tree.cluster_ptr), above)
        solved: Floats = descend(A, b, below, tree.parent, w)[0].ravel()
        return solved

    def hessian(v: Floats) -> Floats:
        v = v.reshape(n, d)
        w, _ = top.centres(top.means(node_sums(tree, penalty.gamma, v)))
        bent: Floats = np.einsum("iab,ib->ia", A, v) + penalty.gamma[:, None] * (v - tree.down(w))
        return bent.ravel()

    from scipy.sparse.linalg import ArpackError, LinearOperator, eigsh  # slow to import, and only needed here

    start = np.random.default_rng(0).standard_normal(n * d)
    if n * d < 32:
        lowest = np.linalg.eigvalsh(np.column_stack([hessian(e) for e in np.eye(n * d)]))
        return float(lowest[0]) if lowest[0] > 1e-13 * lowest[-1] else 0.0
    try:
        _, vectors = eigsh(LinearOperator((n * d, n * d), matvec=inverse, dtype=np.float64), k=1, v0=start, tol=_PRECISION)
    except ArpackError:
        return 0.0
    v = vectors[:, 0]
    bent = hessian(v)
    mu = float(v @ bent)
    # Where the Hessian is singular, the sweep's pseudo-inverse misses its null space: a random start shows that.
    solved = hessian(inverse(start)) - start
    whole = np.linalg.norm(solved) <= 1e-6 * np.linalg.norm(start)
    return mu * (1 - 2 * _PRECISION) if whole and mu > 0 else 0.0
