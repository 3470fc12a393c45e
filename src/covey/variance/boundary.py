"""Where variances end at zero: whether they belong there, and what that means in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from covey._typing import Floats
from covey.errors import listing
from covey.solvers.result import Progress
from covey.variance.problem import Problem
from covey.variance.search import NEGLIGIBLE, Optimum, minimise
from covey.variance.structure import Kind, Variation

_ZERO = 1e-8  # a variance, in units of the columns and the residual, that is tried as none at all


def polished(problem: Problem, found: Optimum, progress: Progress | None) -> Optimum:
    """The point with negligible variances set to none, moved on if the likelihood rises from there."""
    for _ in range(4):
        found = _snapped(problem, found)
        out = _escape(problem, found)
        if out is None:
            return found
        again = minimise(problem.criterion, *problem.approach(out, 1), progress=progress)
        if again.value > found.value - NEGLIGIBLE:
            return found
        found = replace(again, evaluations=found.evaluations + again.evaluations)
    return found


def _scaled(level: Variation, x: Floats) -> tuple[Floats, Floats]:
    """Eigenvalues and vectors of a level's covariances in units of its columns."""
    L = level.factors(x) / level.size[:, None]
    values, vectors = np.linalg.eigh(L @ L.swapaxes(1, 2))
    return values, vectors


def _snapped(problem: Problem, found: Optimum) -> Optimum:
    parts, changed = [], False
    levels = (problem.structure.client, problem.structure.cluster)
    for level, x in zip(levels, problem.structure.split(found.x), strict=True):
        if level.q == 0:
            continue
        values, vectors = _scaled(level, x)
        small = values < _ZERO
        changed |= bool((small & (values > 0)).any())
        S = np.einsum("mab,mb,mcb->mac", vectors, np.where(small, 0.0, values), vectors)
        parts.append(level.of_covariances(S * level.size[:, None] * level.size))
    if not changed:
        return found
    x = np.concatenate([*parts, found.x[problem.structure.n_parameters :]])
    value, gradient = problem.criterion(x)
    if value > found.value + NEGLIGIBLE:
        return found
    return replace(found, x=x, value=value, gradient=gradient, evaluations=found.evaluations + 1)


def _escape(problem: Problem, found: Optimum) -> Floats | None:
    """Where variances are zero but the likelihood would rise if they were not: a point with some."""
    here = problem.evaluate(found.x)
    parts, moved = [], False
    levels = (problem.structure.client, problem.structure.cluster)
    slopes = here.client, here.cluster
    for level, x, slope in zip(levels, problem.structure.split(found.x), slopes, strict=True):
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


def singular(problem: Problem, best: Optimum) -> list[str]:
    """In words, what does not vary after all."""
    said = []
    names = (problem.structure.client, "clients"), (problem.structure.cluster, "clusters")
    for (level, units), x in zip(names, problem.structure.split(best.x), strict=True):
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
