"""Where variances end at zero: whether they belong there, and what that means in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from covey._typing import Floats
from covey.errors import listing
from covey.solvers.result import Progress
from covey.variance.problem import Likelihood
from covey.variance.search import MANY, NEGLIGIBLE, Optimum, minimise
from covey.variance.structure import Kind, Variation

# Variances, in units of the columns and the residual, that are tried as none at all; the second are none for all purposes.
_SMALL, _ZERO = 1e-4, 1e-8


def polished(problem: Likelihood, found: Optimum, progress: Progress | None) -> Optimum:
    """The point with negligible variances set to none, moved on if the likelihood rises from there."""
    for _ in range(6):
        snapped = _snapped(problem, found)
        if snapped is not None:
            found = _settled(problem, snapped, progress)
        out = _escape(problem, found)
        if out is None:
            return found
        again = minimise(problem.criterion, *problem.approach(out, 1), criteria=problem.criteria, progress=progress)
        if again.value > found.value - NEGLIGIBLE:
            return found
        found = replace(again, evaluations=found.evaluations + again.evaluations + 2)
    return found


def _settled(problem: Likelihood, found: Optimum, progress: Progress | None) -> Optimum:
    """The best point of the parameters that are left, those at zero held there."""
    free = problem.free(found.x)

    def whole(part: Floats) -> Floats:
        x = found.x.copy()
        x[free] = part
        return x

    def among_free(part: Floats) -> tuple[float, Floats]:
        value, gradient = problem.criterion(whole(part))
        return value, gradient[free]

    def many_free(parts: Sequence[Floats]) -> list[tuple[float, Floats]]:
        return [(value, gradient[free]) for value, gradient in problem.criteria([whole(part) for part in parts])]

    guess = problem.approach(found.x, 0)[1] if len(found.x) > MANY else np.diag(found.hessian)
    curvature = np.maximum(guess[free], 1e-3)
    rest = minimise(among_free, found.x[free], curvature, criteria=many_free, progress=progress)
    x, gradient, hessian = found.x.copy(), np.zeros(len(free)), np.zeros((len(free), len(free)))
    x[free], gradient[free] = rest.x, rest.gradient
    hessian[np.ix_(free, free)] = rest.hessian
    return Optimum(x, rest.value, gradient, hessian, rest.decrement, found.evaluations + rest.evaluations)


def _scaled(level: Variation, x: Floats) -> tuple[Floats, Floats]:
    """Eigenvalues and vectors of a level's covariances in units of its columns."""
    L = level.factors(x) / level.size[:, None]
    values, vectors = np.linalg.eigh(L @ L.swapaxes(1, 2))
    return values, vectors


def _snapped(problem: Likelihood, found: Optimum) -> Optimum | None:
    """With small variances at none, if that costs nothing; None if there are none to set."""
    for limit in (_SMALL, _ZERO):
        x = _without(problem, found.x, limit)
        if x is None:
            return None
        value, gradient = problem.criterion(x)
        if value <= found.value + NEGLIGIBLE:
            return replace(found, x=x, value=value, gradient=gradient, evaluations=found.evaluations + 1)
    return None


def _without(problem: Likelihood, x: Floats, limit: float) -> Floats | None:
    """The parameters without variances below ``limit``; None if there are none but those at zero."""
    parts, changed = [], False
    for level, own in problem.by_level(x):
        if level.q == 0:
            continue
        values, vectors = _scaled(level, own)
        small = values < limit
        rounding = 1e-15 if level.kind == "full" and values.max() >= limit else 0.0
        changed |= bool((small & (values > rounding)).any())
        S = np.einsum("mab,mb,mcb->mac", vectors, np.where(small, 0.0, values), vectors)
        parts.append(level.of_covariances(S * level.size[:, None] * level.size))
    return np.concatenate([*parts, x[problem.structure.n_parameters :]]) if changed else None


def _escape(problem: Likelihood, found: Optimum) -> Floats | None:
    """Where variances are zero but the likelihood would rise if they were not: a point with some."""
    here = problem.evaluate(found.x)
    parts, moved = [], False
    for (level, x), slope in zip(problem.by_level(found.x), (here.client, here.cluster), strict=True):
        if level.q == 0:
            continue
        L = level.factors(x)
        S = L @ L.swapaxes(1, 2)
        G = level.pick(slope) * level.size[:, None] * level.size
        for m in range(level.count):
            way = _way_up(S[m] / (level.size[:, None] * level.size), G[m], level.kind)
            if way is not None:
                S[m] += 1e-3 * way * level.size[:, None] * level.size
                moved = True
        parts.append(level.of_covariances(S))
    return np.concatenate([*parts, found.x[problem.structure.n_parameters :]]) if moved else None


def _way_up(S: Floats, G: Floats, kind: Kind) -> Floats | None:
    """A direction in which a singular ``S`` may grow and the criterion, whose slope in it is ``G``, would fall."""
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


def singular(problem: Likelihood, best: Optimum) -> list[str]:
    """In words, what does not vary after all."""
    said = []
    for (level, x), units in zip(problem.by_level(best.x), ("clients", "clusters"), strict=True):
        if level.q == 0:
            continue
        values, _ = _scaled(level, x)
        L = level.factors(x)
        flat = (L**2).sum(axis=2) == 0
        of = problem.tree.clusters.tolist() if level.count > 1 else [None]
        for m in np.flatnonzero((values < _ZERO).any(axis=1)):
            where = "" if of[m] is None else f" of cluster {of[m]!r}"
            terms = problem.names(level.terms)
            said.append(f"singular: {_what(terms, flat[m])} between {units}{where}")
    if len(said) > 5:
        said = [*said[:4], f"singular: and {len(said) - 4} more of the kind"]
    return said


def _what(terms: Sequence[str], flat: Sequence[bool]) -> str:
    none = [term for term, zero in zip(terms, flat, strict=True) if zero]
    if len(none) == len(terms):
        return "no variation"
    if none:
        return f"no variation of {listing(none, 5)}"
    return f"the coefficients of {listing(terms, 5)} vary in perfect correlation"
