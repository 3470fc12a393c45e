"""How curved the objective is where no bound says so: measured, and said to be.

The smallest eigenvalue of the objective's Hessian is one over the largest of its inverse; the sweep applies that inverse, a few
dozen Lanczos steps find its top. For a quadratic loss this is exact, and counts the curvature that clients with fewer rows than
columns get from the others. For other losses it is the curvature at one point, near the minimiser.
"""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np

from covey._typing import Floats
from covey.data import GroupedData
from covey.errors import ConvergenceWarning, DataError, SolverError
from covey.hierarchy import segment_sum
from covey.losses import Loss
from covey.objective import Objective, Penalty
from covey.solvers.elimination import Quadratic, Spread, descend, eliminate
from covey.solvers.newton import newton
from covey.solvers.protocol import Top, node_sums
from covey.solvers.sweep import solve_top
from covey.solvers.threads import threads_for
from covey.theory import Constants, number

_PRECISION = 1e-3
_MARGIN = 2.0  # an upper bound measured at two points is doubled


def constants(
    objective: Objective, *, mu: float | None = None, L: float | None = None, L_row: float | None = None
) -> Constants:
    """What the theorems need: bounds that hold everywhere where there are any, measured values where not."""
    given = {name: value for name, value in (("mu", mu), ("L", L), ("L_row", L_row)) if value is not None}
    for name, value in given.items():
        number(name, value, above=0.0)
    _refuse_weightless(objective.data)
    with threads_for(objective.data):
        known = _constants(objective, mu, L, L_row)
    if given:
        note = "; ".join(filter(None, [known.note, f"{' and '.join(given)} as given"]))
        known = replace(known, note=note)
    if mu is not None or (objective.loss.name != "gaussian" and objective.loss.ridge == 0):
        known = replace(known, proved=False)
    if mu is not None and mu > known.L + known.gamma_max:
        most = known.L + known.gamma_max
        raise SolverError(f"mu = {mu:g} cannot be: the objective is nowhere more curved than {most:.3g}; leave mu out.")
    return known


def _constants(objective: Objective, mu: float | None, L: float | None, L_row: float | None) -> Constants:
    data, loss, penalty = objective.data, objective.loss, objective.penalty
    zero, bounded = np.zeros((data.n_clients, data.n_terms)), np.isfinite(loss.curvature[1])
    if loss.name == "gaussian":
        A = loss.hessian(data, zero)
        mu = objective_curvature(data, penalty, A) if mu is None else mu
        return Constants.of(data, loss, penalty, L=_largest(A) if L is None else L, L_row=L_row, mu=mu)
    said = []
    if (mu is None and loss.ridge == 0) or not bounded:
        rough = near_minimiser(data, loss, penalty)
        A = loss.hessian(data, rough)
        if mu is None and loss.ridge == 0:
            mu = objective_curvature(data, penalty, A)
            said.append("mu")
        if not bounded and L is None:
            L = _MARGIN * max(_largest(A), _largest(loss.hessian(data, zero)))
            said.append("L")
        if not bounded and L_row is None:
            bend = loss.mean(np.maximum(data.margin(rough), data.margin(zero)))  # a count's variance is its mean
            L_row = _MARGIN * float(loss.row_smoothness(data, bend).max(initial=loss.ridge))
    note = f"{' and '.join(said)} measured near the minimiser, not proved" if said else ""
    return Constants.of(data, loss, penalty, L=L, L_row=L_row, mu=mu, note=note)


def _refuse_weightless(data: GroupedData) -> None:
    """A cluster whose rows count for nothing has nothing to exchange."""
    if data.weights is None:
        return
    rows = data.client_ptr[data.hierarchy.cluster_ptr]
    empty = (segment_sum(data.weights, rows) == 0) & (np.diff(rows) > 0)
    if empty.any():
        name = data.hierarchy.cluster_ids[int(empty.argmax())]
        raise DataError(f"All rows of cluster {name!r} have weight 0; leave the cluster out, or give a row a positive weight.")


def _largest(A: Floats) -> float:
    return _rounded(float(np.linalg.eigvalsh(A)[:, -1].max()), down=False)


def near_minimiser(data: GroupedData, loss: Loss, penalty: Penalty) -> Floats:
    """Where curvature is measured: a few steps from zero would be too far off where classes are nearly separated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return newton(data, loss, penalty, tol=1e-4).theta


def certificate(objective: Objective, theta: Floats, norm: float) -> tuple[float, float]:
    """A gap to the minimum that is certain, from the curvature where a run has ended; and that curvature.

    A quadratic has the same everywhere: ``norm^2 / (2 mu)``. The third derivative of the other losses is at most ``R`` times
    the second, ``R`` the longest row; where ``R norm <= mu / 2``, the gap is at most ``2 norm^2 / mu`` (Bach 2010,
    self-concordant analysis for logistic regression, prop. 2). Else nothing is certain, and it is infinite.
    """
    data, quadratic = objective.data, objective.loss.name == "gaussian"
    with threads_for(data):
        mu = objective_curvature(data, objective.penalty, objective.loss.hessian(data, theta))
    longest = 0.0 if quadratic else float(np.sqrt(np.einsum("la,la->l", data.X, data.X).max(initial=0.0)))
    if not mu > 0 or longest * norm > mu / 2:
        return np.inf, mu
    return norm**2 / (2 * mu) * (1 if quadratic else 4), mu


def objective_curvature(data: GroupedData, penalty: Penalty, A: Floats) -> float:
    """The smallest eigenvalue of the objective's Hessian, the clients' own being ``A (n, d, d)``; 0 where it is singular."""
    tree, top, (n, d) = data.hierarchy, Top.of(penalty), A.shape[:2]
    lam = penalty.lam if len(penalty.lam) > 1 else np.array([np.inf])  # one cluster: the same objective whatever its lam
    below, above, none = Spread.of_penalty(penalty.gamma, d), Spread.of_penalty(lam, d), np.zeros(n)

    def inverse(b: Floats) -> Floats:
        b = b.reshape(n, d)
        w, _, _ = solve_top(eliminate(Quadratic(A, b, none, none), below, tree.cluster_ptr), above)
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
        return _rounded(float(lowest[0]), down=True) if lowest[0] > 1e-13 * lowest[-1] else 0.0
    try:
        operator = LinearOperator((n * d, n * d), matvec=inverse, dtype=np.float64)
        found = eigsh(operator, k=1, v0=start, tol=_PRECISION, return_eigenvectors=False)
    except ArpackError:
        return 0.0
    # Where the Hessian is singular, the sweep's pseudo-inverse misses its null space: a random start shows that. One missed
    # direction is a share of about 1 / sqrt(n d) of it; rounding, with large penalties, may be 1e-4.
    missed = np.linalg.norm(hessian(inverse(start)) - start) / np.linalg.norm(start)
    largest = float(found[0])
    if largest <= 0 or missed > 0.1 / np.sqrt(n * d):
        return 0.0
    return _rounded((1 - 2 * _PRECISION) / largest, down=True)


def _rounded(value: float, *, down: bool) -> float:
    """To four digits: the last bits of an eigenvalue depend on the threads of the linear algebra, and iterates must not."""
    if not (value > 0 and np.isfinite(value)):
        return value
    unit = 10.0 ** (np.floor(np.log10(value)) - 3)
    return float((np.floor if down else np.ceil)(value / unit) * unit)
