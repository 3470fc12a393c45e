"""The lowest point of a smooth criterion in a few parameters, and proof that it is one.

A quasi-Newton run gets near; Newton steps with a Hessian from differences of the gradient finish. What is left to gain is
then about half the Newton decrement ``1/2 g'H^-1 g``, in the criterion's own units, so convergence needs no scale: a
millionth of a unit of log-likelihood is nothing to anybody.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from scipy import optimize

from covey._typing import Floats
from covey.solvers.result import Progress

Criterion = Callable[[Floats], tuple[float, Floats]]

NEGLIGIBLE = 1e-8  # of a decrement: the parameters are then within a ten-thousandth of a standard error of the best
_STEP = 1e-4  # of the differences
_MANY = 200  # parameters beyond which a Hessian is not worth its cost, and the quasi-Newton run's own has to do


@dataclass(frozen=True)
class Optimum:
    """A point, the criterion, gradient and Hessian there, what is left to gain, and the number of evaluations."""

    x: Floats
    value: float
    gradient: Floats
    hessian: Floats
    decrement: float
    evaluations: int

    @property
    def converged(self) -> bool:
        return bool(self.decrement <= NEGLIGIBLE)


def minimise(criterion: Criterion, x: Floats, *, progress: Progress | None = None) -> Optimum:
    """Search from ``x``."""
    count = 0

    def counted(at: Floats) -> tuple[float, Floats]:
        nonlocal count
        count += 1
        value, gradient = criterion(at)
        if progress is not None:
            progress(count, value, float(np.linalg.norm(gradient)))
        if not np.isfinite(value) or not np.isfinite(gradient).all():
            return np.inf, np.zeros_like(at)
        return value, gradient

    if len(x) == 0:
        return Optimum(x, counted(x)[0], x, np.empty((0, 0)), 0.0, count)
    with np.errstate(invalid="ignore", over="ignore"):
        found = optimize.minimize(counted, x, jac=True, method="BFGS", options={"gtol": 1e-3, "maxiter": 50 * len(x) + 100})
    value, gradient = counted(found.x)
    inverse = np.asarray(found.hess_inv)
    if len(x) > _MANY:
        return _coarse(counted, found.x, inverse, lambda: count)
    best = Optimum(found.x, value, gradient, np.linalg.pinv(inverse), np.inf, count)
    for _ in range(12):
        best = replace(best, hessian=_hessian(counted, best.x, best.gradient))
        step, decrement = _newton(best)
        best = replace(best, decrement=decrement, evaluations=count)
        if decrement <= 1e-2 * NEGLIGIBLE:
            break
        moved = _descend(counted, best, step)
        if moved is None:
            break
        # Near the optimum a step squares the error: what is left after it is far below what was left before it.
        small = decrement <= 1e-4 and _newton(moved)[1] <= NEGLIGIBLE
        best = moved
        if small:
            break
    step, decrement = _newton(best)
    return replace(best, decrement=decrement, evaluations=count)


def _coarse(criterion: Criterion, x: Floats, inverse: Floats, count: Callable[[], int]) -> Optimum:
    """With many parameters: a second run to a smaller gradient, judged by its own estimate of the Hessian."""
    found = optimize.minimize(criterion, x, jac=True, method="BFGS", options={"gtol": 1e-5, "maxiter": 20 * len(x)})
    value, gradient = criterion(found.x)
    inverse = np.asarray(found.hess_inv)
    decrement = max(0.5 * float(gradient @ inverse @ gradient), 0.0)
    return Optimum(found.x, value, gradient, np.asarray(np.linalg.pinv(inverse)), decrement, count())


def _hessian(criterion: Criterion, x: Floats, gradient: Floats) -> Floats:
    H = np.empty((len(x), len(x)))
    for a in range(len(x)):
        ahead = x.copy()
        ahead[a] += _STEP * max(1.0, abs(x[a]))
        H[a] = (criterion(ahead)[1] - gradient) / (ahead[a] - x[a])
    return 0.5 * (H + H.T)


def _newton(at: Optimum) -> tuple[Floats, float]:
    """The Newton step, made one of descent where the criterion is not convex, and what it promises to gain."""
    values, vectors = np.linalg.eigh(at.hessian)
    # A flat direction (the factor of a singular covariance has some) promises nothing and is not moved along.
    floor = 1e-7 * max(float(np.abs(values).max(initial=0.0)), 1e-12)
    slope = vectors.T @ at.gradient
    curve = np.where(np.abs(values) > floor, np.abs(values), np.inf)
    return -vectors @ (slope / curve), float(0.5 * (slope**2 / curve).sum())


def _descend(criterion: Criterion, at: Optimum, step: Floats) -> Optimum | None:
    """The first of ever shorter steps that lowers the criterion, or the gradient where rounding hides that."""
    noise = 1e-13 * abs(at.value)
    for halving in range(30):
        x = at.x + 0.5**halving * step
        value, gradient = criterion(x)
        lower = value < at.value - noise
        flat = abs(value - at.value) <= noise and np.linalg.norm(gradient) < np.linalg.norm(at.gradient)
        if lower or flat:
            return replace(at, x=x, value=value, gradient=gradient)
    return None
