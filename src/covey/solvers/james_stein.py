"""James-Stein (prop. JS): the global model drawn to zero by as much as its own uncertainty tells.

Under the hierarchical model ``wbar ~ N(wbar*, noise V)`` with ``V^-1 = sum_j D_j``, and the server, which solves for ``wbar``,
knows both. So it can shrink ``wbar`` and send that down the tree; no client has to tell it more. The positive-part factor is

    max(0, 1 - (e - 2) noise / (wbar' V^-1 wbar))        e = trace V / largest eigenvalue of V

where ``e`` is ``d`` when ``V`` is a multiple of the identity (Bock 1975 for any other ``V``). With ``e <= 2`` nothing is
to be gained and ``wbar`` stays. The noise of a Gaussian response is estimated from what the fit leaves, twice its objective
on ``N - d`` degrees of freedom (the divisor of least risk is two more); for counts and classes it is 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from covey._typing import Floats
from covey.data import GroupedData
from covey.errors import SolverError
from covey.losses import Loss
from covey.objective import Penalty
from covey.solvers.result import Fit
from covey.solvers.sweep import Quadratic, Spread, eliminate


def factor(wbar: Floats, precision: Floats, noise: float = 1.0) -> float:
    """What to multiply ``wbar`` by, given the matrix ``V^-1 (d, d)``.

    >>> factor(np.array([1.0, 1.0, 1.0, 1.0]), np.eye(4))
    0.5
    """
    eigenvalues = np.linalg.eigvalsh(precision)
    if not eigenvalues[0] > 1e-12 * eigenvalues[-1]:
        return 1.0  # some direction of wbar is not determined at all
    effective = float(eigenvalues[0] * (1.0 / eigenvalues).sum())
    size = float(wbar @ precision @ wbar)
    if effective <= 2 or size <= 0:
        return 1.0
    return max(0.0, 1.0 - (effective - 2) * noise / size)


@dataclass
class Shrink:
    """For the sweep, to ``settle`` the global model from nothing but what the server sees; remembers the factor it found."""

    data: GroupedData
    factor: float = 1.0

    def __call__(self, wbar: Floats, whole: Quadratic) -> Floats:
        minimum = float(whole.c[0] - 0.5 * whole.r[0] @ wbar)
        self.factor = factor(wbar, whole.C[0], _noise(minimum, _rows(self.data), len(wbar)))
        return self.factor * wbar


def factor_of(data: GroupedData, loss: Loss, penalty: Penalty, fit: Fit) -> float:
    """The factor for a fit at its minimum, whatever the loss: ``V`` is that of its Hessians there."""
    d, tree = data.n_terms, data.hierarchy
    here = loss.expand(data, fit.theta)
    below, above = Spread.of_penalty(penalty.gamma, d), Spread.of_penalty(penalty.lam, d)
    seen = eliminate(here.hessian, -here.gradient, here.value, below, tree.cluster_ptr)
    precision = eliminate(seen.C, seen.r, seen.c, above, np.array([0, tree.n_clusters])).C[0]
    noise = _noise(fit.convergence.objective, _rows(data), d) if loss.name == "gaussian" else 1.0
    return factor(fit.wbar, precision, noise)


def check(loss: Loss, penalty: Penalty) -> None:
    """Refuse what the distribution of ``wbar`` is not known for."""
    if loss.reduction != "sum" or loss.ridge > 0:
        raise SolverError(
            "james_stein=True needs the likelihood itself to say how sure the global model is; use reduction='sum' and ridge=0."
        )
    if not penalty.lam.any() or not penalty.gamma.any():
        raise SolverError("james_stein=True shrinks the global model, but no client is tied to it; give lam and gamma above 0.")


def _rows(data: GroupedData) -> int:
    """Rows that say anything."""
    return data.n_rows if data.weights is None else int((data.weights > 0).sum())


def _noise(minimum: float, n_rows: int, d: int) -> float:
    return max(2 * minimum, 0.0) / max(n_rows - d + 2, 1)
