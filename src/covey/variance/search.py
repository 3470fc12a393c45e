"""Minimise a smooth function of a few parameters, and prove that the result is a minimum.

A quasi-Newton run (BFGS) gets near. Newton steps, with a Hessian from differences of the gradient, finish. What is left to
gain is then about the decrement ``1/2 g'H^-1 g``. It is in units of the function, twice a log-likelihood, of which a millionth
does not matter, so the test of convergence needs no scale. Parameters are first put in units of about a standard error each,
by a guess at the curvature, so that one step length suits them all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from covey._typing import Floats
from covey.solvers.result import Progress

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
