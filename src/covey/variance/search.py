"""Minimise a smooth function of a few parameters, and prove that the result is a minimum.

A quasi-Newton run (BFGS) gets near. Newton steps, with a Hessian from differences of the gradient, finish. What is left to
gain is then about the decrement ``1/2 g'H^-1 g``. It is in units of the function, twice a log-likelihood, of which a millionth
does not matter, so the test of convergence needs no scale. Parameters are first put in units of about a standard error each,
by a guess at the curvature, so that one step length suits them all.

Cheap steps to the neighbourhood of an optimum, and a guess at the curvature there.

The steps are those of the MM algorithm for variance components (Zhou, Hu, Zhou and Lange 2019, J. Comput. Graph. Stat. 28).
The criterion's gradient in a covariance ``S`` is ``bend - pull`` (:class:`.Evaluation`), both positive semi-definite. A step
solves ``T bend T = S pull S`` for the next covariance ``T``; for a single variance that multiplies it by
``sqrt(pull / bend)``. It never raises the criterion of a linear model.

Variances at zero: whether the likelihood has its optimum there, and notes that say so.

With ``S = L L'`` every derivative in ``L`` is zero where ``L`` is, so a search can stop there by mistake, or end with a tiny
variance that is zero but for rounding. So tiny variances are set to zero where that costs nothing, and the derivative in
``S`` decides whether the likelihood would rise if they were not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from covey._typing import Floats
from covey.errors import listing
from covey.solvers.result import Progress
from covey.variance.components import Kind, Variation
from covey.variance.criterion import Criterion
from covey.variance.linear_likelihood import Evaluation

Function = Callable[[Floats], tuple[float, Floats]]
"""Value and gradient at a point."""

Functions = Callable[[Sequence[Floats]], list[tuple[float, Floats]]]
"""The same at several points at once, which across a network costs no more than at one."""

# Decrements: where the search stops, with parameters within a ten-thousandth of a standard error of the optimum; and what
# still counts as converged, where rounding allows no better.
NEGLIGIBLE, CONVERGED = 1e-8, 1e-6
_NEAR = 1e-2  # the gradient, in these units, at which the quasi-Newton run hands over
_STEP = 1e-3  # of the differences
_NEGATIVE = 1e-3  # of the largest curvature: a negative one beyond this is not rounding
MANY = 200  # parameters beyond which a Hessian is not worth its cost


@dataclass(frozen=True)
class Optimum:
    """A point, value, gradient and Hessian there, what is left to gain (``decrement``), and the number of evaluations."""

    x: Floats
    value: float
    gradient: Floats
    hessian: Floats
    decrement: float
    evaluations: int

    @property
    def converged(self) -> bool:
        return bool(self.decrement <= CONVERGED and np.isfinite(self.value))


def minimise(
    function: Function,
    x: Floats,
    curvature: Floats,
    *,
    many: Functions | None = None,
    progress: Progress | None = None,
) -> Optimum:
    """Search from ``x``, where the second derivatives are about ``curvature``; ``many`` evaluates several points at once."""
    count, unit = 0, 1.0 / np.sqrt(np.maximum(0.5 * curvature, 1e-12))

    def counted(value: float, gradient: Floats) -> tuple[float, Floats]:
        nonlocal count
        count += 1
        if progress is not None:
            progress(count, value, float(np.linalg.norm(gradient * unit)))
        if not np.isfinite(value) or not np.isfinite(gradient).all():
            return np.inf, np.zeros_like(x)
        return value, gradient * unit

    def scaled(z: Floats) -> tuple[float, Floats]:
        return counted(*function(z * unit))

    def scaled_many(points: Sequence[Floats]) -> list[tuple[float, Floats]]:
        if many is None:
            return [scaled(z) for z in points]
        return [counted(*result) for result in many([z * unit for z in points])]

    if len(x) == 0:
        return Optimum(x, scaled(x)[0], x, np.empty((0, 0)), 0.0, count)
    best = _newton_steps(scaled, scaled_many, _quasi_newton(scaled, x / unit))
    hessian = best.hessian / (unit[:, None] * unit)
    return replace(best, x=best.x * unit, gradient=best.gradient / unit, hessian=hessian, evaluations=count)


def _quasi_newton(function: Function, z: Floats) -> Optimum:
    from scipy.optimize import minimize  # slow to import, and only needed here

    if len(z) > MANY:
        return _limited_memory(function, z)
    options = {"gtol": _NEAR, "maxiter": 20 * len(z) + 100, "hess_inv0": 0.5 * np.eye(len(z))}
    with np.errstate(invalid="ignore", over="ignore"):
        found = minimize(function, z, jac=True, method="BFGS", options=options)
    hessian = np.asarray(np.linalg.pinv(np.asarray(found.hess_inv)))
    return Optimum(np.asarray(found.x), float(found.fun), np.asarray(found.jac), hessian, np.inf, 0)


def _limited_memory(function: Function, z: Floats) -> Optimum:
    """L-BFGS for many parameters: no Hessian, and a decrement by the curvature of 2 that these units stand for."""
    from scipy.optimize import minimize

    options = {"maxcor": 30, "ftol": 1e-16, "gtol": 1e-5, "maxiter": 2000, "maxfun": 4000}
    found = minimize(function, z, jac=True, method="L-BFGS-B", options=options)
    gradient = np.asarray(found.jac)
    hessian = np.zeros((len(z), len(z)))
    return Optimum(np.asarray(found.x), float(found.fun), gradient, hessian, 0.25 * float(gradient @ gradient), 0)


def _newton_steps(function: Function, many: Functions, best: Optimum) -> Optimum:
    """Newton steps until nothing is left to gain."""
    if len(best.x) > MANY:
        return best
    for _ in range(12):
        best = replace(best, hessian=_hessian(many, best.x, best.gradient))
        step, decrement = _newton(best)
        best = replace(best, decrement=decrement)
        if decrement <= 1e-2 * NEGLIGIBLE:
            return best
        moved = _descend(function, best, step)
        if moved is None:
            return best
        # A full step near the optimum squares the error, and the Hessian is then that of the optimum for all purposes.
        best = replace(moved, decrement=_newton(moved)[1])
        if decrement <= 1e-2 and best.decrement <= NEGLIGIBLE:
            return best
    return best


def _hessian(many: Functions, z: Floats, gradient: Floats) -> Floats:
    ahead = many([z + step for step in _STEP * np.eye(len(z))])
    H = np.array([(slope - gradient) / _STEP for _, slope in ahead])
    return np.asarray(0.5 * (H + H.T))


def _newton(at: Optimum) -> tuple[Floats, float]:
    """The Newton step, with absolute values of the curvature so that it descends, and the decrement."""
    values, vectors = np.linalg.eigh(at.hessian)
    # Along a flat direction (the factor of a singular covariance has some) the gradient is zero too. If it is not, a
    # curvature of 1 gives its worth, so that a slope is never taken for an optimum.
    floor = 1e-7 * max(float(np.abs(values).max(initial=0.0)), 1e-12)
    slope = vectors.T @ at.gradient
    curve = np.where(np.abs(values) > floor, np.abs(values), 1.0)
    step, decrement = -vectors @ (slope / curve), float(0.5 * (slope**2 / curve).sum())
    if values.min(initial=0.0) < -_NEGATIVE * np.abs(values).max(initial=0.0):
        # A saddle, or a ridge: the function falls to either side of it.
        down = vectors[:, 0] * (1.0 if slope[0] <= 0 else -1.0)
        return step + down, np.inf
    return step, decrement


def _descend(function: Function, at: Optimum, step: Floats) -> Optimum | None:
    """The first of ever shorter steps that lowers the function, or its gradient where rounding hides that."""
    noise = 1e-13 * abs(at.value)
    for halving in range(30):
        x = at.x + 0.5**halving * step
        value, gradient = function(x)
        lower = value < at.value - noise
        flat = abs(value - at.value) <= noise and np.linalg.norm(gradient) < np.linalg.norm(at.gradient)
        if lower or flat:
            return replace(at, x=x, value=value, gradient=gradient)
    return None


def approach(criterion: Criterion, x: Floats, steps: int) -> tuple[Floats, Floats]:
    """Step from ``x`` as long as the criterion falls; where that ends, and a guess at the second derivatives there.

    There are ``steps`` steps, and up to five times as many while some parameter still more than doubles.
    """
    n = criterion.parameters.n_parameters
    here = criterion.evaluate(x)
    for step in range(5 * steps):
        moved = [mm_step(variation, part, bend, pull) for variation, part, bend, pull in _by_level(criterion, x, here)]
        ahead = np.concatenate([*moved, criterion.global_step(x, here)])
        there = criterion.evaluate(ahead)
        if not there.value < here.value:
            break
        doubled = (np.abs(ahead) > 2.0 * np.abs(x))[:n].any()
        x, here = ahead, there
        if step + 1 >= steps and not doubled:
            break
    units = criterion.tree.n_clients, criterion.tree.n_clusters
    parts = zip(_by_level(criterion, x, here), units, strict=True)
    curves = [curvature(variation, part, bend, count) for (variation, part, bend, _), count in parts]
    return x, np.concatenate([*curves, np.full(len(x) - n, 2.0)])


def _by_level(criterion: Criterion, x: Floats, here: Evaluation) -> list[tuple[Variation, Floats, Floats, Floats]]:
    """Of clients and of clusters: the variation, its parameters, bend and pull."""
    levels = []
    for (variation, part), G, pull in zip(criterion.parameters.split(x), (here.client, here.cluster), here.pull, strict=True):
        pull_here = variation.pick(pull)
        levels.append((variation, part, variation.pick(G) + pull_here, pull_here))
    return levels


def mm_step(variation: Variation, x: Floats, bend: Floats, pull: Floats) -> Floats:
    """The parameters of one level after one step from ``x``."""
    if variation.q == 0:
        return x
    L = variation.factors(x)
    S = L @ L.swapaxes(1, 2)
    if variation.kind == "full":
        values, vectors = np.linalg.eigh(bend)
        root = np.sqrt(np.maximum(values, 1e-12 * np.abs(values).max(axis=1, keepdims=True) + 1e-300))
        half, inverse_half = _recomposed(vectors, root), _recomposed(vectors, 1.0 / root)
        values, vectors = np.linalg.eigh(half @ S @ pull @ S @ half)
        middle = _recomposed(vectors, np.sqrt(np.maximum(values, 0.0)))
        return variation.of_covariances(inverse_half @ middle @ inverse_half)
    at = np.arange(variation.q)
    down, up = np.maximum(bend[:, at, at], 0.0), np.maximum(pull[:, at, at], 0.0)
    if variation.kind == "isotropic":
        down, up = down.sum(axis=1, keepdims=True), up.sum(axis=1, keepdims=True)
    ratio = np.clip(up / np.where(down > 0, down, 1.0), 1e-4, 1e4)
    return np.asarray(x * ratio.ravel() ** 0.25)


def curvature(variation: Variation, x: Floats, bend: Floats, units: int) -> Floats:
    """A guess at the second derivative in each parameter of one level.

    ``bend`` is a sum over ``units`` clients or clusters, and is taken to be made of equal parts.
    """
    L = variation.factors(x) / variation.unit[:, None]
    at = np.arange(variation.q)
    down = variation.unit**2 * np.maximum(bend[:, at, at], 1e-12)
    size = np.maximum((L**2).sum(axis=2), 1e-4)
    each = 4.0 * size * down**2 * variation.count / max(units, 1)
    if variation.kind == "full":
        rows, _ = np.tril_indices(variation.q)
        return np.asarray(each[:, rows]).ravel()
    if variation.kind == "isotropic" and variation.q:
        total = down.sum(axis=1, keepdims=True)
        return np.asarray(4.0 * size[:, :1] * total**2 * variation.count / (units * variation.q)).ravel()
    return np.asarray(each).ravel()


def _recomposed(vectors: Floats, values: Floats) -> Floats:
    return np.asarray(np.einsum("mab,mb,mcb->mac", vectors, values, vectors))


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
