"""Variances at zero: whether the likelihood has its optimum there, and notes that say so.

With ``S = L L'`` every derivative in ``L`` is zero where ``L`` is, so a search can stop there by mistake, or end with a tiny
variance that is zero but for rounding. So tiny variances are set to zero where that costs nothing, and the derivative in
``S`` decides whether the likelihood would rise if they were not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from covey._typing import Floats
from covey.errors import listing
from covey.solvers.result import Progress
from covey.variance.criterion import Criterion
from covey.variance.mm import approach
from covey.variance.parameters import Variation
from covey.variance.search import MANY, NEGLIGIBLE, Optimum, minimise
from covey.variance.structure import Kind

# Variances, in units of the columns and the residual, that are tried as zero; the second are zero for all purposes.
_SMALL, _ZERO = 1e-4, 1e-8


def resolve_boundary(criterion: Criterion, best: Optimum, progress: Progress | None) -> Optimum:
    """Set negligible variances to zero; search again from a nearby point if the likelihood rises from there."""
    for _ in range(6):
        zeroed = _set_small_to_zero(criterion, best)
        if zeroed is not None:
            best = _minimise_others(criterion, zeroed, progress)
        out = _leave_zero(criterion, best)
        if out is None:
            return best
        x, curvature = approach(criterion, out, 1)
        again = minimise(criterion.value_and_gradient, x, curvature, many=criterion.values_and_gradients, progress=progress)
        if again.value > best.value - NEGLIGIBLE:
            return best
        best = replace(again, evaluations=best.evaluations + again.evaluations + 2)
    return best


def _minimise_others(criterion: Criterion, best: Optimum, progress: Progress | None) -> Optimum:
    """The optimum among the parameters that are not held at zero."""
    free = criterion.parameters.free(best.x)

    def whole(part: Floats) -> Floats:
        x = best.x.copy()
        x[free] = part
        return x

    def one(part: Floats) -> tuple[float, Floats]:
        value, gradient = criterion.value_and_gradient(whole(part))
        return value, gradient[free]

    def many(parts: Sequence[Floats]) -> list[tuple[float, Floats]]:
        points = [whole(part) for part in parts]
        return [(value, gradient[free]) for value, gradient in criterion.values_and_gradients(points)]

    guess = approach(criterion, best.x, 0)[1] if len(best.x) > MANY else np.diag(best.hessian)
    rest = minimise(one, best.x[free], np.maximum(guess[free], 1e-3), many=many, progress=progress)
    x, gradient, hessian = best.x.copy(), np.zeros(len(free)), np.zeros((len(free), len(free)))
    x[free], gradient[free] = rest.x, rest.gradient
    hessian[np.ix_(free, free)] = rest.hessian
    return Optimum(x, rest.value, gradient, hessian, rest.decrement, best.evaluations + rest.evaluations)


def _set_small_to_zero(criterion: Criterion, best: Optimum) -> Optimum | None:
    """The point with small variances at zero, if that costs nothing; None if there are none to set."""
    for limit in (_SMALL, _ZERO):
        x = _without_small(criterion, best.x, limit)
        if x is None:
            return None
        value, gradient = criterion.value_and_gradient(x)
        if value <= best.value + NEGLIGIBLE:
            return replace(best, x=x, value=value, gradient=gradient, evaluations=best.evaluations + 1)
    return None


def _without_small(criterion: Criterion, x: Floats, limit: float) -> Floats | None:
    """The parameters with variances below ``limit`` at zero; None if all of these are zero already."""
    parts, changed = [], False
    for variation, part in criterion.parameters.split(x):
        if variation.q == 0:
            continue
        values, vectors = _eigen(variation, part)
        small = values < limit
        rounding = 1e-15 if variation.kind == "full" and values.max() >= limit else 0.0
        changed |= bool((small & (values > rounding)).any())
        S = np.einsum("mab,mb,mcb->mac", vectors, np.where(small, 0.0, values), vectors)
        parts.append(variation.of_covariances(S * variation.size[:, None] * variation.size))
    return np.concatenate([*parts, x[criterion.parameters.n_parameters :]]) if changed else None


def _eigen(variation: Variation, x: Floats) -> tuple[Floats, Floats]:
    """Eigenvalues and vectors of a level's covariances, in units of its columns."""
    L = variation.factors(x) / variation.size[:, None]
    values, vectors = np.linalg.eigh(L @ L.swapaxes(1, 2))
    return values, vectors


def _leave_zero(criterion: Criterion, best: Optimum) -> Floats | None:
    """A point with some variance where it is zero but the likelihood would rise with it; None if there is no such place."""
    here = criterion.evaluate(best.x)
    parts, moved = [], False
    for (variation, x), slope in zip(criterion.parameters.split(best.x), (here.client, here.cluster), strict=True):
        if variation.q == 0:
            continue
        L = variation.factors(x)
        S = L @ L.swapaxes(1, 2)
        G = variation.pick(slope) * variation.size[:, None] * variation.size
        for m in range(variation.count):
            way = _descent_direction(S[m] / (variation.size[:, None] * variation.size), G[m], variation.kind)
            if way is not None:
                S[m] += 1e-3 * way * variation.size[:, None] * variation.size
                moved = True
        parts.append(variation.of_covariances(S))
    return np.concatenate([*parts, best.x[criterion.parameters.n_parameters :]]) if moved else None


def _descent_direction(S: Floats, G: Floats, kind: Kind) -> Floats | None:
    """A direction in which a singular ``S`` may grow and the criterion, whose gradient in ``S`` is ``G``, falls."""
    steep = -1e-4
    if kind == "isotropic":
        return np.eye(len(S)) if S[0, 0] == 0 and np.trace(G) < steep else None
    if kind == "diagonal":
        falls = (np.diag(S) == 0) & (np.diag(G) < steep)
        return np.diag(falls.astype(np.float64)) if falls.any() else None
    values, vectors = np.linalg.eigh(S)
    null = vectors[:, values < _ZERO]
    if not null.shape[1]:
        return None
    slopes, ways = np.linalg.eigh(null.T @ G @ null)
    way = null @ ways[:, 0]
    return np.outer(way, way) if slopes[0] < steep else None


def singular_notes(criterion: Criterion, best: Optimum) -> list[str]:
    """A sentence for each covariance that is singular: what does not vary, or varies in perfect correlation."""
    notes = []
    for (variation, x), units in zip(criterion.parameters.split(best.x), ("clients", "clusters"), strict=True):
        if variation.q == 0:
            continue
        values, _ = _eigen(variation, x)
        is_zero = (variation.factors(x) ** 2).sum(axis=2) == 0
        terms = criterion.names(variation.terms)
        for m in np.flatnonzero((values < _ZERO).any(axis=1)):
            where = f" of cluster {criterion.tree.clusters.tolist()[m]!r}" if variation.count > 1 else ""
            notes.append(f"singular: {_what(terms, is_zero[m])} between {units}{where}")
    if len(notes) > 5:
        notes = [*notes[:4], f"singular: and {len(notes) - 4} more of the kind"]
    return notes


def _what(terms: Sequence[str], is_zero: Sequence[bool]) -> str:
    none = [term for term, zero in zip(terms, is_zero, strict=True) if zero]
    if len(none) == len(terms):
        return "no variation"
    if none:
        return f"no variation of {listing(none, 5)}"
    return f"the coefficients of {listing(terms, 5)} vary in perfect correlation"
