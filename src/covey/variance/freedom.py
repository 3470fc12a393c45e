"""Degrees of freedom for logistic, Poisson and Gamma models: Satterthwaite's, of the linear model at the mode.

To second order about its mode, a fit by Laplace's approximation is a linear model: its rows have the weights that the
clients' Hessians have at the mode. The degrees of freedom of the global coefficients are those of this linear model under
REML, from the formula that SAS has for a generalised linear mixed model (GLIMMIX with ddfm=satterthwaite). For balanced data
they are those of containment. Unlike these they do not jump if a covariate is not quite constant within groups.

With ``bend`` as in :mod:`.linear_likelihood`, the expected Hessian of -2 log-likelihood in the covariances is minus the
derivative of ``bend``. It needs no responses, and it is defined at a variance of zero too. So a variance that is estimated as
zero is uncertain like any other, and degrees of freedom do not jump there either. Derivatives are one-sided differences of
second order along covariances ``E``, so that every point is a covariance. A step is small beside the variance ``S + N`` of a
unit, where ``N`` is the variance with which the rows determine it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import numpy as np

from covey._typing import Floats
from covey.solvers.direct.elimination import invert
from covey.variance.linear_likelihood import AT_ONCE, LikelihoodSlope, LinearCriterion
from covey.variance.parameters import Variation
from covey.variance.uncertainty import Satterthwaite
from covey.variance.upper import UpperPosterior

_STEP = 1e-3

Point = tuple[Floats, Floats]
"""Covariances of clients and of clusters, in the working order of terms."""


def freedom_at_mode(linear: LinearCriterion, here: Point, turn: Floats, dispersion: float) -> Satterthwaite | None:
    """Degrees of freedom of the linear model at covariances ``here``. None if they are not finite.

    ``turn (d, d)`` converts coefficients to the user's units. Takes three exchanges, or more if clients are many.
    """
    S, T = here
    steps = _steps(linear, linear.upper_levels([here])[0])
    V, bends = _evaluated(linear, [here, *((S + n * E, T + n * F) for n in (1, 2) for E, F in steps)])
    p, turn = len(steps), turn[:, linear.order.terms]

    def slope(f: Floats) -> Floats:
        return np.asarray(0.5 * (4 * f[1 : p + 1] - f[p + 1 :] - 3 * f[0]))

    # Parameters are multiples of the steps.
    flat = np.array([np.concatenate([E.ravel(), F.ravel()]) for E, F in steps]).reshape(p, -1)
    change = slope(bends)
    information = -0.5 * (change @ flat.T + flat @ change.T)
    size = np.sqrt(np.maximum(np.diag(information), 1e-300))
    values, vectors = np.linalg.eigh(information / (size[:, None] * size))
    solid = values > 1e-7
    # The covariance of the parameters is twice the inverse of the expected Hessian of -2 log-likelihood.
    half = vectors[:, solid] * np.sqrt(2.0 / values[solid]) / size[:, None]
    dV = dispersion * (turn @ slope(V) @ turn.T)
    found = Satterthwaite(
        dispersion * (turn @ V[0] @ turn.T),
        np.einsum("pr,pab->rab", half, dV),
        np.array(float(max(linear.rows - int(linear.free.sum()), 1))),
    )
    return found if found.finite else None


def _evaluated(linear: LinearCriterion, points: list[Point]) -> tuple[Floats, Floats]:
    """At each point, the covariance of the global coefficients, and ``bend`` of clients and clusters as one vector."""
    k, d = linear.tree.n_clusters, len(linear.terms)
    size = int(max(1, AT_ONCE // (linear.tree.n_clients * d * (d + 1))))
    V, bends = [], []
    for at in range(0, len(points), size):
        tops = linear.upper_levels(points[at : at + size])
        slopes = linear.network.ask(LikelihoodSlope(np.zeros((len(tops), k, d)), np.stack([top.P for top in tops])))
        for top, bend in zip(tops, slopes.bend, strict=True):
            client, width = np.zeros((len(bend), d, d)), bend.shape[-1]
            client[:, :width, :width] = bend
            cluster = (top.D - top.D @ (top.P0 @ top.D)).sum(axis=0)
            V.append(invert(top.D.sum(axis=0), linear.free)[0])
            bends.append(np.concatenate([client.ravel(), cluster.ravel()]))
    return np.stack(V), np.stack(bends)


def _steps(linear: LinearCriterion, top: UpperPosterior) -> list[Point]:
    """Steps in the covariances of clients and of clusters, as many as these have parameters."""
    tree, parameters, d = linear.tree, linear.parameters, len(linear.terms)
    nothing = np.zeros((parameters.client.count, d, d)), np.zeros((1, d, d))
    units = tree.sizes if parameters.client.count > 1 else np.array([tree.n_clients]), np.array([tree.n_clusters])
    precisions = top.C if parameters.client.count > 1 else top.C.sum(axis=0)[None], top.D.sum(axis=0)[None]
    steps = []
    for level, variation in enumerate((parameters.client, parameters.cluster)):
        for m in range(variation.count):
            # The mean over units of 1 / (S + N).
            mean = np.diag(precisions[level][m])[variation.terms] / units[level][m]
            for E in _directions(variation, _STEP / np.maximum(mean, 1e-300)):
                step = [part.copy() for part in nothing]
                step[level][m][np.ix_(variation.terms, variation.terms)] = E
                steps.append((step[0], step[1]))
    return steps


def _directions(variation: Variation, variances: Floats) -> Iterator[Floats]:
    """Covariances that span those of one level, with variances of at most about ``variances (q,)``."""
    if variation.is_shared:
        yield np.diag(variation.unit**2) * float((variances / variation.unit**2).min())
        return
    sds = np.diag(np.sqrt(variances))
    yield from (np.outer(row, row) for row in sds)
    if variation.kind == "full":
        yield from (np.outer(a + b, a + b) for a, b in combinations(sds, 2))
