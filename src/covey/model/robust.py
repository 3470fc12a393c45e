"""Cluster-robust (sandwich) covariances of the global coefficients of a linear model, from the sums of its clients.

With the bread ``B = (sum_j D_j)^-1`` and the score ``f_j = X_j'V_j^-1 (y_j - X_j wbar)`` of a group, the covariance is

    B (sum_j a_j f_j f_j' a_j') B

``V_j`` is the covariance of the group's rows, and ``D_j = X_j'V_j^-1 X_j``, both by the fitted model. These are what a group
reports in the elimination of its clients, so no rows are needed. The corrections are those of clubSandwich (Pustejovsky and
Tipton 2018): ``CR0`` none; ``CR1``, ``CR1p`` and ``CR1S`` the factors ``m / (m - 1)``, ``m / (m - p)`` and
``m (N - 1) / ((m - 1) (N - p))`` for ``m`` groups, ``p`` coefficients and ``N`` rows; ``CR3`` the jackknife,
``a_j = (I - D_j B)^-1``. ``CR2`` needs the rows of a group and is not here.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from covey._typing import Floats
from covey.errors import SolverError, one_of
from covey.solvers.direct.elimination import Quadratic, eliminate, invert
from covey.variance.components import Learned

Correction = Literal["CR0", "CR1", "CR1p", "CR1S", "CR3"]
CORRECTIONS = ("CR0", "CR1", "CR1p", "CR1S", "CR3")


def sandwich(learned: Learned, wbar: Floats, correction: Correction = "CR1") -> tuple[Floats, int]:
    """The covariance ``(d, d)`` of the global coefficients, and the number of independent groups that it is based on.

    The groups are the clusters, if terms vary between clusters; otherwise the clients.
    """
    if correction not in CORRECTIONS:
        raise one_of("correction", correction, CORRECTIONS)
    if learned.components.method not in ("REML", "ML"):
        raise SolverError("Robust standard errors are for linear models with groups; use those of coef_frame('global').")
    seen = _groups(learned)
    m, rows, free, p = len(seen.r), float(seen.n.sum()), learned.free, int(learned.free.sum())
    if m <= (p if correction == "CR1p" else 1):
        raise SolverError(
            f"Robust standard errors of the kind {correction!r} need more than {max(p, 1)} groups; there are {m}."
        )
    total = seen.C.sum(axis=0)
    B = invert(total, free)[0]
    scores = seen.r - seen.C @ (wbar - learned.origin)
    if correction == "CR3":
        rest = [invert(total - D, free)[0] for D in seen.C]
        scores = np.stack([f + D @ (inverse @ f) for f, D, inverse in zip(scores, seen.C, rest, strict=True)])
    factors = {"CR1": m / (m - 1), "CR1p": m / max(m - p, 1), "CR1S": m * (rows - 1) / ((m - 1) * (rows - p))}
    return np.asarray(factors.get(correction, 1.0) * (B @ (scores.T @ scores) @ B)), m


def _groups(learned: Learned) -> Quadratic:
    """What each independent group reports about the global coefficients: ``D_j`` and ``X_j'V_j^-1 y_j``."""
    tree, n = learned.tree, learned.tree.n_clients
    if not learned.components.cluster.terms:
        return eliminate(learned.units, learned.client, np.arange(n + 1))
    seen = eliminate(learned.units, learned.client, tree.cluster_ptr)
    return eliminate(seen, learned.cluster, np.arange(tree.n_clusters + 1))
