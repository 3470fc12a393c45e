"""Search for a minimum of the criterion, and check numerically that it is a local minimum, also if variances are zero.

:func:`approach` takes cheap steps to the neighbourhood of an optimum. They are those of the MM algorithm for variance
components (Zhou, Hu, Zhou and Lange 2019, J. Comput. Graph. Stat. 28). The criterion's gradient in a covariance ``S`` is
``bend - pull`` (:class:`.Evaluation`), both positive semi-definite. A step solves ``T bend T = S pull S`` for the next
covariance ``T``; a single variance is multiplied by ``sqrt(pull / bend)``. By the argument of MM algorithms (each step
minimises an upper bound) a step does not raise the criterion of a linear model, except by rounding.

:func:`minimise` first runs a quasi-Newton method (BFGS), then takes Newton steps with a Hessian ``H`` from differences of the
gradient ``g``. The decrement ``1/2 g'H^-1 g`` estimates how far the function can still fall. It has the unit of the function,
-2 log-likelihood, where a millionth does not matter. So the test of convergence does not depend on the units of the parameters.
Before the search a guess at the curvature puts each parameter in units of about a standard error. One step length then suits
all parameters.

If these steps do not converge, Newton steps in the variances follow. A column far from zero, such as a year, with a variance of
its slope and one of the intercept but no correlation, determines little but the sum of two variances. Points of equal sum lie
on a straight line in the variances, but on an arc in the standard deviations, along which straight steps are short. With the
variance as coordinate, in units that make its slope at a standard deviation ``z`` equal to that of ``z``, the gradient ``g`` is
the same and the Hessian is ``H - g / z`` on the diagonal. A step ends where a variance reaches zero.

:func:`resolve_boundary` treats variances at zero. With ``S = L L'`` the derivative in ``L`` is zero wherever ``L`` is zero. So
a search can stop there although the likelihood would rise. It can also end at a tiny variance that is zero up to rounding.
Therefore tiny variances are set to zero if that does not raise the criterion. The derivative in ``S`` then shows whether the
likelihood would rise if they were positive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from covey._typing import Anything, Floats
from covey.errors import listing
from covey.solvers.result import Progress
from covey.variance.linear_likelihood import Criterion, Evaluation
from covey.variance.parameters import Kind, Variation

Function = Callable[[Sequence[Floats]], list[tuple[float, Floats]]]
"""Values and gradients at several points. Across a network several points together cost no more than one."""


class SearchWatch(Protocol):
    """Says whether to give up a search, at a point on its way and at its end."""

    def underway(self, x: Floats) -> bool: ...
    def at_end(self, x: Floats) -> bool: ...


# Limits of the decrement. The search stops below the first: parameters are then about a ten-thousandth of a standard error from
# the optimum. Below the second it still counts as converged, because rounding may not allow better.
NEGLIGIBLE, CONVERGED = 1e-8, 1e-6
_NEAR = 1e-2  # the gradient, in units of standard errors, at which the quasi-Newton run ends
_STEP = 1e-3  # the step of the differences
_NEGATIVE = 1e-3  # a negative curvature beyond this share of the largest curvature is not rounding
MANY = 200  # with more parameters a Hessian is not worth its cost


@dataclass(frozen=True)
class Optimum:
    """A point, with value, gradient and Hessian there. The function can still fall by about ``decrement``.

    ``failed`` says that the search gave up because the function approximates no likelihood there. Then the Hessian is zero.
    """

    x: Floats
    value: float
    gradient: Floats
    hessian: Floats
    decrement: float
    failed: bool = False

    @property
    def has_hessian(self) -> bool:
        return len(self.x) <= MANY and not self.failed

    @property
    def converged(self) -> bool:
        return bool(self.decrement <= CONVERGED and np.isfinite(self.value))


def minimise(
    function: Function,
    x: Floats,
    curvature: Floats,
    *,
    deviations: Anything | None = None,
    watch: SearchWatch | None = None,
    progress: Progress | None = None,
) -> Optimum:
    """Search from ``x``, where the second derivatives are about ``curvature``.

    ``deviations`` says which parameters are standard deviations that the function knows by their squares only. The ``watch``
    may end the search during its quasi-Newton run, or after it.
    """
    count, unit = 0, 1.0 / np.sqrt(np.maximum(0.5 * curvature, 1e-12))

    def scaled(points: Sequence[Floats]) -> list[tuple[float, Floats]]:
        nonlocal count
        results = []
        for value, gradient in function([z * unit for z in points]):
            count += 1
            if progress is not None:
                progress(count, value, float(np.linalg.norm(gradient * unit)))
            finite = np.isfinite(value) and np.isfinite(gradient).all()
            results.append((value, gradient * unit) if finite else (np.inf, np.zeros_like(x)))
        return results

    if len(x) == 0:
        return Optimum(x, scaled([x])[0][0], x, np.empty((0, 0)), 0.0)
    best = _quasi_newton(scaled, x / unit, lambda z: watch is not None and watch.underway(z * unit))
    if watch is not None and watch.at_end(best.x * unit):
        return replace(best, x=best.x * unit, gradient=best.gradient / unit, hessian=np.zeros_like(best.hessian), failed=True)
    best = _newton_steps(scaled, best)
    if not best.converged and deviations is not None:
        best = _newton_steps(scaled, best, deviations)
    hessian = best.hessian / (unit[:, None] * unit)
    return replace(best, x=best.x * unit, gradient=best.gradient / unit, hessian=hessian)


def _quasi_newton(function: Function, z: Floats, give_up: Callable[[Floats], bool]) -> Optimum:
    """BFGS; for many parameters L-BFGS without a Hessian, whose decrement uses the curvature 2 that the units imply."""
    from scipy.optimize import minimize  # slow to import, and only needed here

    many = len(z) > MANY
    options: dict[str, Any] = {"gtol": _NEAR, "maxiter": 20 * len(z) + 100, "hess_inv0": 0.5 * np.eye(len(z))}
    if many:
        options = {"maxcor": 30, "ftol": 1e-16, "gtol": 1e-5, "maxiter": 2000, "maxfun": 4000}

    def stop(point: Floats) -> None:
        if give_up(point):
            raise StopIteration

    settings: dict[str, Any] = {"method": "L-BFGS-B" if many else "BFGS", "options": options, "callback": stop}
    with np.errstate(invalid="ignore", over="ignore"):
        end = minimize(lambda point: function([point])[0], z, jac=True, **settings)
    gradient = np.asarray(end.jac)
    hessian = np.zeros((len(z), len(z))) if many else np.asarray(np.linalg.pinv(np.asarray(end.hess_inv)))
    decrement = 0.25 * float(gradient @ gradient) if many else np.inf
    return Optimum(np.asarray(end.x), float(end.fun), gradient, hessian, decrement)


def _newton_steps(function: Function, best: Optimum, deviations: Anything | None = None) -> Optimum:
    """Newton steps until the decrement is negligible; in variances for those parameters that are ``deviations``."""
    if len(best.x) > MANY:
        return best
    for _ in range(12):
        best = replace(best, hessian=_hessian(function, best.x, best.gradient))
        step, decrement = _newton(best, deviations)
        best = replace(best, decrement=decrement)
        if decrement <= 1e-2 * NEGLIGIBLE:
            return best
        moved = _descend(function, best, step, deviations)
        if moved is None:
            return best
        # A full step near the optimum squares the error, so the Hessian before it is as good as the one at the optimum.
        best = replace(moved, decrement=_newton(moved, deviations)[1])
        if decrement <= 1e-2 and best.decrement <= NEGLIGIBLE:
            return best
    return best


def _hessian(function: Function, z: Floats, gradient: Floats) -> Floats:
    ahead = function([z + step for step in _STEP * np.eye(len(z))])
    H = np.array([(slope - gradient) / _STEP for _, slope in ahead])
    return np.asarray(0.5 * (H + H.T))


def _newton(at: Optimum, deviations: Anything | None = None) -> tuple[Floats, float]:
    """The Newton step and the decrement. Curvatures count by their absolute values, so that the step descends."""
    hessian = at.hessian
    if deviations is not None:
        curved = deviations & (at.x != 0)
        hessian = hessian - np.diag(np.where(curved, at.gradient / np.where(curved, at.x, 1.0), 0.0))
    values, vectors = np.linalg.eigh(hessian)
    # The factor of a singular covariance has flat directions, where the gradient is zero too. If the gradient is not zero in a
    # flat direction, the direction gets the curvature 1, so that a slope is never taken for an optimum.
    floor = 1e-7 * max(float(np.abs(values).max(initial=0.0)), 1e-12)
    slope = vectors.T @ at.gradient
    curve = np.where(np.abs(values) > floor, np.abs(values), 1.0)
    step, decrement = -vectors @ (slope / curve), float(0.5 * (slope**2 / curve).sum())
    if values.min(initial=0.0) < -_NEGATIVE * np.abs(values).max(initial=0.0):
        # A saddle or a ridge: the function falls on both sides of it.
        down = vectors[:, 0] * (1.0 if slope[0] <= 0 else -1.0)
        return step + down, np.inf
    return step, decrement


def _descend(function: Function, at: Optimum, step: Floats, deviations: Anything | None = None) -> Optimum | None:
    """Halve the step until the function falls. If it changes by rounding only, until the norm of its gradient falls."""
    noise = 1e-13 * abs(at.value)
    curved = np.zeros(len(at.x), dtype=bool) if deviations is None else deviations & (at.x != 0)
    old, change = at.x[curved] ** 2, 2.0 * at.x[curved] * step[curved]
    # The step ends where the first variance is zero.
    longest = min(1.0, float((-old[change < 0] / change[change < 0]).min(initial=1.0)))
    for halving in range(30):
        length = longest * 0.5**halving
        x, left = at.x + length * step, old + length * change
        x[curved] = np.sign(at.x[curved]) * np.sqrt(np.where(left > 1e-15 * old, left, 0.0))
        ((value, gradient),) = function([x])
        lower = value < at.value - noise
        flat = abs(value - at.value) <= noise and np.linalg.norm(gradient) < np.linalg.norm(at.gradient)
        if lower or flat:
            return replace(at, x=x, value=value, gradient=gradient)
    return None


def approach(criterion: Criterion, x: Floats, steps: int) -> tuple[Floats, Floats]:
    """Take cheap steps from ``x`` while the criterion falls. Returns the last point and a guess at the curvature there.

    It takes ``steps`` steps, and up to ``5 * steps`` as long as each step more than doubles some parameter.
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
    """For clients and for clusters: the variation, its parameters, ``bend`` and ``pull``."""
    parts = zip(criterion.parameters.split(x), (here.client_slope, here.cluster_slope), here.pull, strict=True)
    return [(level, part, level.pick(slope) + level.pick(pull), level.pick(pull)) for (level, part), slope, pull in parts]


def mm_step(variation: Variation, x: Floats, bend: Floats, pull: Floats) -> Floats:
    """The parameters of one level after one step from ``x``."""
    if variation.q == 0:
        return x
    S = variation.matrices(x)
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

    ``bend`` is a sum over ``units`` clients or clusters, which are taken to contribute equally.
    """
    L = variation.factors(x) / variation.unit[:, None]
    at = np.arange(variation.q)
    down = variation.unit**2 * np.maximum(bend[:, at, at], 1e-12)
    size = np.maximum((L**2).sum(axis=2), 1e-4)
    second = 4.0 * size * down**2 * variation.count / max(units, 1)
    if variation.is_shared:
        total = down.sum(axis=1, keepdims=True)
        return np.asarray(4.0 * size[:, :1] * total**2 * variation.count / (units * variation.q)).ravel()
    return np.asarray(second[:, variation.entries[0]]).ravel()


def _recomposed(vectors: Floats, values: Floats) -> Floats:
    return np.asarray(np.einsum("mab,mb,mcb->mac", vectors, values, vectors))


# Variances below the first limit, in units of the columns and the residual, are tried as zero. Those below the second are zero.
_SMALL, _ZERO = 1e-4, 1e-8


def resolve_boundary(criterion: Criterion, best: Optimum) -> Optimum:
    """Set negligible variances to zero; search again from a nearby point if the likelihood rises from there."""
    if best.failed:
        return best
    for _ in range(6):
        zeroed = _set_small_to_zero(criterion, best)
        if zeroed is not None:
            best = _minimise_others(criterion, zeroed)
        out = _leave_zero(criterion, best)
        if out is None:
            return best
        x, curvature = approach(criterion, out, 1)
        deviations = criterion.parameters.deviations(x)
        again = minimise(criterion.values_and_gradients, x, curvature, deviations=deviations, progress=criterion.progress)
        if again.value > best.value - NEGLIGIBLE:
            return best
        best = again
    return best


def _minimise_others(criterion: Criterion, best: Optimum) -> Optimum:
    """Search over the parameters that are not held at zero."""
    free = criterion.parameters.free(best.x)

    def whole(part: Floats) -> Floats:
        x = best.x.copy()
        x[free] = part
        return x

    def function(parts: Sequence[Floats]) -> list[tuple[float, Floats]]:
        points = [whole(part) for part in parts]
        return [(value, gradient[free]) for value, gradient in criterion.values_and_gradients(points)]

    guess = approach(criterion, best.x, 0)[1] if len(best.x) > MANY else np.diag(best.hessian)
    deviations = criterion.parameters.deviations(best.x)[free]
    guess = np.maximum(guess[free], 1e-3)
    rest = minimise(function, best.x[free], guess, deviations=deviations, progress=criterion.progress)
    gradient, hessian = np.zeros(len(free)), np.zeros((len(free), len(free)))
    gradient[free], hessian[np.ix_(free, free)] = rest.gradient, rest.hessian
    return Optimum(whole(rest.x), rest.value, gradient, hessian, rest.decrement)


def _set_small_to_zero(criterion: Criterion, best: Optimum) -> Optimum | None:
    """Set small variances to zero, if that costs nothing. None if there are none, or if it does."""
    for limit in (_SMALL, _ZERO):
        x = _without_small(criterion, best.x, limit)
        if x is None:
            return None
        value, gradient = criterion.value_and_gradient(x)
        if value <= best.value + NEGLIGIBLE:
            return replace(best, x=x, value=value, gradient=gradient)
    return None


def _without_small(criterion: Criterion, x: Floats, limit: float) -> Floats | None:
    """The parameters with variances below ``limit`` set to zero. None if all of these are zero already."""
    x, changed = x.copy(), False
    for variation, part in criterion.parameters.split(x):
        if variation.q == 0:
            continue
        values, vectors = _eigen(variation, part)
        small = values < limit
        rounding = 1e-15 if variation.kind == "full" and values.max() >= limit else 0.0
        changed |= bool((small & (values > rounding)).any())
        S = _recomposed(vectors, np.where(small, 0.0, values))
        part[:] = variation.of_covariances(S * variation.size[:, None] * variation.size)
    return x if changed else None


def _eigen(variation: Variation, x: Floats) -> tuple[Floats, Floats]:
    """Eigenvalues and eigenvectors of a level's covariances, in units of its columns."""
    L = variation.factors(x) / variation.size[:, None]
    values, vectors = np.linalg.eigh(L @ L.swapaxes(1, 2))
    return values, vectors


def _leave_zero(criterion: Criterion, best: Optimum) -> Floats | None:
    """A point with a little variance in every place where it is zero but the likelihood would rise. None if there is none."""
    here, x, moved = criterion.evaluate(best.x), best.x.copy(), False
    for (variation, part), slope in zip(criterion.parameters.split(x), (here.client_slope, here.cluster_slope), strict=True):
        if variation.q == 0:
            continue
        S = variation.matrices(part)
        G = variation.pick(slope) * variation.size[:, None] * variation.size
        for m in range(variation.count):
            way = _descent_direction(S[m] / (variation.size[:, None] * variation.size), G[m], variation.kind)
            if way is not None:
                S[m] += 1e-3 * way * variation.size[:, None] * variation.size
                moved = True
        part[:] = variation.of_covariances(S)
    return x if moved else None


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


def notes_at(criterion: Criterion, best: Optimum) -> list[str]:
    """Sentences on singular covariances (terms that do not vary, or in perfect correlation), and last on convergence."""
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
        notes = [*notes[:4], f"singular: {len(notes) - 4} more covariances"]
    if not best.converged and not best.failed:
        left = "the likelihood still rises in some direction"
        if np.isfinite(best.decrement):
            left = f"judging by the curvature, twice the log-likelihood can still rise by {best.decrement:.1e}"
        notes.append(
            f"the estimation of the variance components did not converge: {left}; let fewer terms vary, centre and scale the "
            "columns, or look for clients whose rows are all equal"
        )
    return notes


def _what(terms: Sequence[str], is_zero: Sequence[bool]) -> str:
    none = [term for term, zero in zip(terms, is_zero, strict=True) if zero]
    if len(none) == len(terms):
        return "no variation"
    if none:
        return f"no variation of {listing(none, 5)}"
    return f"the coefficients of {listing(terms, 5)} vary in perfect correlation"
