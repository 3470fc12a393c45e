"""James-Stein (prop. JS): the global model drawn to zero by as much as its own uncertainty tells.

Under the hierarchical model ``wbar ~ N(wbar*, noise V)`` with ``V^-1 = sum_j D_j``, and the server, which solves for ``wbar``,
knows both. So it can shrink ``wbar`` and send that down the tree; no client has to tell it more. The positive-part factor is

    max(0, 1 - (e - 2) noise / (wbar' V^-1 wbar))        e = trace V / largest eigenvalue of V

where ``e`` is ``d`` when ``V`` is a multiple of the identity (Bock 1975 for any other ``V``). With ``e <= 2`` nothing is
to be gained and ``wbar`` stays. The noise of a Gaussian response is estimated from what the fit leaves, twice its objective
on ``N - d`` degrees of freedom (the divisor of least risk is two more); for counts and classes it is 1. Weights are precisions.

What is proved is that the *global model's* expected squared error falls. Clients take their share of ``wbar`` through their own
data, so with very unequal columns theirs may rise a little; ``covey reproduce limits`` measures both.
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

    factor: float = 1.0

    def __call__(self, wbar: Floats, whole: Quadratic) -> Floats:
        self.factor = factor(wbar, whole.C[0], noise(wbar, whole))
        return self.factor * wbar


def noise(wbar: Floats, whole: Quadratic) -> float:
    """The variance of a Gaussian response: what the fit leaves, over the rows less the coefficients that nothing holds."""
    left = float(2 * whole.c[0] - whole.r[0] @ wbar)
    return max(left, 0.0) / max(float(whole.n[0]) - len(wbar) + 2, 1.0)


def factor_of(data: GroupedData, loss: Loss, penalty: Penalty, fit: Fit) -> float:
    """The factor for a fit at its minimum, whatever the loss: ``V`` is that of its Hessians there."""
    d, tree = data.n_terms, data.hierarchy
    # A Gaussian loss is its own expansion, taken at zero to be the one of the sweep.
    here = loss.expand(data, np.zeros_like(fit.theta) if loss.name == "gaussian" else fit.theta)
    own = Quadratic(here.hessian, -here.gradient, here.value, data.rows_that_count)
    below, above = Spread.of_penalty(penalty.gamma, d), Spread.of_penalty(penalty.lam, d)
    whole = eliminate(eliminate(own, below, tree.cluster_ptr), above, np.array([0, tree.n_clusters]))
    return factor(fit.wbar, whole.C[0], noise(fit.wbar, whole) if loss.name == "gaussian" else 1.0)


def check(loss: Loss, penalty: Penalty) -> None:
    """Refuse what the distribution of ``wbar`` is not known for."""
    if loss.reduction != "sum" or loss.ridge > 0:
        raise SolverError(
            "james_stein=True needs the likelihood itself to say how sure the global model is; use reduction='sum' and ridge=0."
        )
    if not penalty.lam.any() or not penalty.gamma.any():
        raise SolverError("james_stein=True shrinks the global model, but no client is tied to it; give lam and gamma above 0.")
