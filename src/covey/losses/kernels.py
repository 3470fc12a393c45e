"""Fused loops over clients: value, gradient and Hessian of every client's loss in one pass over its rows.

All families share one compiled loop; ``pointwise`` picks the family by its code. (A compiled function passed as an
argument would be recompiled in every process: numba cannot cache it.) Clients are independent and each
is summed by one thread, so the number of threads changes no bit. :mod:`.plain` has the same in numpy.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit, prange

from covey._typing import Floats, Ints

GAUSSIAN, BERNOULLI, POISSON, GAMMA = CODES = 0, 1, 2, 3

# Beyond this margin the exponential is continued by its second-order expansion: convex, twice differentiable and
# finite where exp overflows, and no count has a mean of exp(300).
LARGEST_LOG_MEAN = 300.0


# Clients handled by one thread in a row, and rows looked at together: small enough to stay in the fastest cache.
_BLOCK, _TILE = 256, 64

# Sums may be reordered to use vector registers, the same way on every run; infinities and NaN keep their meaning.
FASTMATH = {"reassoc", "contract", "nsz"}


@njit(inline="always", error_model="numpy")  # type: ignore[untyped-decorator]
def exponent(family: int, margin: float) -> float:
    """What ``slope`` and ``pointwise`` need the exponential of, as ``power``."""
    if family == BERNOULLI:
        return -abs(margin)
    return min(-margin if family == GAMMA else margin, LARGEST_LOG_MEAN)


@njit(inline="always", error_model="numpy")  # type: ignore[untyped-decorator]
def slope(family: int, margin: float, y: float, power: float) -> float:
    """The first derivative of one row's loss in the margin ``x'theta + offset``."""
    if family == GAUSSIAN:
        return margin - y
    if family == BERNOULLI:
        share = 1.0 / (1.0 + power)
        return (share if margin >= 0.0 else power * share) - y
    if family == GAMMA:
        return 1.0 - y * power * (1.0 + max(-margin - LARGEST_LOG_MEAN, 0.0))
    return power * (1.0 + max(margin - LARGEST_LOG_MEAN, 0.0)) - y


@njit(inline="always", error_model="numpy")  # type: ignore[untyped-decorator]
def pointwise(family: int, margin: float, y: float) -> tuple[float, float, float, float]:
    """One row's loss as ``plain + log(factor)``, and its first and second derivative in the margin.

    Factors lie in [1, 2] and are multiplied over rows, so that one logarithm serves many.
    """
    if family == GAUSSIAN:
        error = margin - y
        return 0.5 * error * error, 1.0, error, 1.0
    power = math.exp(exponent(family, margin))
    first = slope(family, margin, y, power)
    if family == BERNOULLI:
        share = 1.0 / (1.0 + power)
        return max(margin, 0.0) - y * margin, 1.0 + power, first, power * share * share
    if family == GAMMA:
        beyond = max(-margin - LARGEST_LOG_MEAN, 0.0)
        return y * power * (1.0 + beyond + 0.5 * beyond * beyond) + margin, 1.0, first, y * power
    beyond = max(margin - LARGEST_LOG_MEAN, 0.0)
    mean = power * (1.0 + beyond + 0.5 * beyond * beyond)
    return mean - y * margin, 1.0, first, power


# exp(x) = 2^n exp(x - n log 2): adding 1.5 * 2^52 leaves the whole number n in the low bits of the sum.
_LOG2_E, _LOG_2_HIGH, _LOG_2_LOW = 1.4426950408889634, 0.6931471803691238, 1.9082149292705877e-10
_ROUNDER = 6755399441055744.0


# Several rows at a time in vector registers, where math.exp takes them one by one. Sums keep their order: reordering
# them would cancel the rounder.
@njit(fastmath={"contract"}, error_model="numpy")  # type: ignore[untyped-decorator]
def exponentials(x: Floats, m: int, whole: Floats, power: Floats) -> None:
    """``power[r] = exp(x[r])`` for ``r < m``, to the last bit; ``whole`` is room to work in.

    ``x`` may be at most 709; below -708 it is set to -708; NaN stays NaN.
    """
    bits, scales = whole.view(np.int64), power.view(np.int64)
    for r in range(m):
        x[r] = -708.0 if x[r] < -708.0 else x[r]
        whole[r] = x[r] * _LOG2_E + _ROUNDER
    for r in range(m):
        scales[r] = (bits[r] + 1023) << 52
    for r in range(m):
        n = whole[r] - _ROUNDER
        f = (x[r] - n * _LOG_2_HIGH) - n * _LOG_2_LOW
        s = 1.0 / 6227020800.0
        s = s * f + 1.0 / 479001600.0
        s = s * f + 1.0 / 39916800.0
        s = s * f + 1.0 / 3628800.0
        s = s * f + 1.0 / 362880.0
        s = s * f + 1.0 / 40320.0
        s = s * f + 1.0 / 5040.0
        s = s * f + 1.0 / 720.0
        s = s * f + 1.0 / 120.0
        s = s * f + 1.0 / 24.0
        s = s * f + 1.0 / 6.0
        s = s * f + 0.5
        s = s * f + 1.0
        power[r] *= s * f + 1.0


@njit(parallel=True, cache=True, fastmath=FASTMATH, error_model="numpy")  # type: ignore[untyped-decorator]
def expand(
    family: int,
    order: int,
    X: Floats,
    y: Floats,
    weights: Floats,
    offset: Floats,
    scale: Floats,
    client_ptr: Ints,
    theta: Floats,
    value: Floats,
    gradient: Floats,
    hessian: Floats,
) -> None:
    """Fill ``value (n,)`` and, for ``order`` 1 and 2, ``gradient (n, d)`` and ``hessian (n, d, d)`` at ``theta (n, d)``.

    ``weights`` and ``offset`` may be empty; ``scale (n,)`` multiplies each client's loss.
    """
    n, d = theta.shape
    weighted, shifted = len(weights) > 0, len(offset) > 0
    for block in prange((n + _BLOCK - 1) // _BLOCK):
        first, second, part = np.empty(_TILE), np.empty(_TILE), np.empty(_TILE)
        columns = np.empty((d, _TILE))
        g, H = np.empty(d), np.empty((d, d))
        for i in range(block * _BLOCK, min(n, (block + 1) * _BLOCK)):
            total, product = 0.0, 1.0
            g[:] = 0.0
            H[:, :] = 0.0
            for start in range(client_ptr[i], client_ptr[i + 1], _TILE):
                m = min(_TILE, client_ptr[i + 1] - start)
                for r in range(m):
                    first[r] = offset[start + r] if shifted else 0.0
                for a in range(d):
                    for r in range(m):
                        x = X[start + r, a]
                        columns[a, r] = x
                        first[r] += theta[i, a] * x
                for r in range(m):
                    plain, factor, slope, curve = pointwise(family, first[r], y[start + r])
                    if weighted:
                        weight = weights[start + r]
                        plain, factor = weight * (plain + math.log(factor)), 1.0
                        slope *= weight
                        curve *= weight
                    total += plain
                    product *= factor
                    first[r] = slope
                    second[r] = curve
                if product > 1e200:
                    total += math.log(product)
                    product = 1.0
                if order >= 1:
                    for a in range(d):
                        s = 0.0
                        for r in range(m):
                            s += first[r] * columns[a, r]
                        g[a] += s
                if order >= 2:
                    for a in range(d):
                        for r in range(m):
                            part[r] = second[r] * columns[a, r]
                        for b in range(a + 1):
                            s = 0.0
                            for r in range(m):
                                s += part[r] * columns[b, r]
                            H[a, b] += s
            value[i] = scale[i] * (total + math.log(product))
            if order >= 1:
                for a in range(d):
                    gradient[i, a] = scale[i] * g[a]
            if order >= 2:
                for a in range(d):
                    for b in range(a + 1):
                        hessian[i, a, b] = scale[i] * H[a, b]
                        hessian[i, b, a] = scale[i] * H[a, b]


@njit(parallel=True, cache=True, error_model="numpy")  # type: ignore[untyped-decorator]
def bend(
    family: int, X: Floats, y: Floats, weights: Floats, offset: Floats, client_ptr: Ints, theta: Floats, P: Floats, out: Floats
) -> None:
    """``out[i] = sum_l f'''(margin_l) (x_l' P_i x_l) x_l``: how ``trace(P_i H_i)`` answers to ``theta_i``."""
    n, d = theta.shape
    for block in prange((n + _BLOCK - 1) // _BLOCK):
        for i in range(block * _BLOCK, min(n, (block + 1) * _BLOCK)):
            out[i] = 0.0
            for row in range(client_ptr[i], client_ptr[i + 1]):
                margin = offset[row] if len(offset) else 0.0
                size = 0.0
                for a in range(d):
                    margin += theta[i, a] * X[row, a]
                    inner = 0.5 * P[i, a, a] * X[row, a]
                    for b in range(a):
                        inner += P[i, a, b] * X[row, b]
                    size += 2.0 * inner * X[row, a]
                power = math.exp(exponent(family, margin))
                third = power if margin <= LARGEST_LOG_MEAN else 0.0
                if family == BERNOULLI:
                    share = 1.0 / (1.0 + power)
                    third = power * share * share * (power - 1.0) * share * (1.0 if margin >= 0.0 else -1.0)
                elif family == GAMMA:
                    third = -y[row] * power if -margin <= LARGEST_LOG_MEAN else 0.0
                third *= size * (weights[row] if len(weights) else 1.0)
                for a in range(d):
                    out[i, a] += third * X[row, a]


@njit(parallel=True, cache=True, error_model="numpy")  # type: ignore[untyped-decorator]
def curvature_floor(A: Floats, floor: Floats) -> None:
    """A lower bound on the smallest eigenvalue of each ``A (n, d, d)``: ``1 / trace(A^-1)``, within a factor ``d`` of it.

    Zero where elimination meets a pivot that rounding cannot tell from zero. Far cheaper than eigenvalues, and as certain.
    """
    n, d = A.shape[:2]
    for block in prange((n + _BLOCK - 1) // _BLOCK):
        L, inverse = np.empty((d, d)), np.empty(d)
        for i in range(block * _BLOCK, min(n, (block + 1) * _BLOCK)):
            trace, definite = 0.0, True
            for a in range(d):
                for b in range(a + 1):
                    rest = A[i, a, b]
                    for c in range(b):
                        rest -= L[a, c] * L[b, c]
                    if a > b:
                        L[a, b] = rest / L[b, b]
                    elif rest > 1e-13 * d * A[i, a, a]:
                        L[a, a] = math.sqrt(rest)
                    else:
                        definite = False
                        L[a, a] = 1.0
            # trace(A^-1) is the sum of squares of L^-1, taken column by column.
            for column in range(d):
                for a in range(column, d):
                    rest = 1.0 if a == column else 0.0
                    for c in range(column, a):
                        rest -= L[a, c] * inverse[c]
                    inverse[a] = rest / L[a, a]
                    trace += inverse[a] * inverse[a]
            floor[i] = 1.0 / trace if definite else 0.0
