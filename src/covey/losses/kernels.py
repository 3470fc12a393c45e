"""Compiled loops over clients: value, gradient and Hessian of each client's loss in one pass over its rows.

All families but least squares share one compiled loop, and ``exponent``, ``slope`` and ``pointwise`` select the family by its
code. The functions of a family cannot be arguments of the loop: numba caches no function that takes or encloses compiled
functions, so every process would compile it again. One thread sums all rows of a client, so results have the same bits with any
number of threads. Losses without a code are evaluated with numpy (:mod:`.base`); tests compare the two.
"""

from __future__ import annotations

import math

import numpy as np

from covey._typing import Floats, Ints
from covey.compiling import njit
from covey.threads import BLOCK

GAUSSIAN, BERNOULLI, POISSON, GAMMA = CODES = 0, 1, 2, 3

# Beyond this margin the second-order expansion replaces the exponential. It is convex, twice differentiable, and finite where
# exp overflows. No count has a mean of exp(300).
LARGEST_LOG_MEAN = 300.0

_TILE = 128  # rows that fit into the fastest cache together

# The compiler may reorder sums to use vector registers; the order is the same in every run. Infinities and NaN stay valid.
FASTMATH = {"reassoc", "contract", "nsz"}


@njit(forceinline=True, error_model="numpy")  # type: ignore[untyped-decorator]
def exponent(family: int, margin: float) -> float:
    """Return the number whose exponential is the argument ``power`` of ``slope``."""
    if family == BERNOULLI:
        return -abs(margin)
    return min(-margin if family == GAMMA else margin, LARGEST_LOG_MEAN)


@njit(forceinline=True, error_model="numpy")  # type: ignore[untyped-decorator]
def slope(family: int, margin: float, y: float, power: float) -> float:
    """Return the first derivative of one row's loss in the margin ``x'theta + offset``."""
    if family == GAUSSIAN:
        return margin - y
    if family == BERNOULLI:
        share = 1.0 / (1.0 + power)
        return (share if margin >= 0.0 else power * share) - y
    if family == GAMMA:
        return 1.0 - y * power * (1.0 + max(-margin - LARGEST_LOG_MEAN, 0.0))
    return power * (1.0 + max(margin - LARGEST_LOG_MEAN, 0.0)) - y


@njit(forceinline=True, error_model="numpy")  # type: ignore[untyped-decorator]
def pointwise(family: int, margin: float, y: float, power: float) -> tuple[float, float, float, float]:
    """Return ``plain`` and ``factor``, with the loss of one row ``plain + log(factor)``, and its first two derivatives.

    ``power`` is the exponential of :func:`exponent`. Factors lie in [1, 2]. Callers multiply the factors of many rows and
    take one logarithm.
    """
    if family == GAUSSIAN:
        error = margin - y
        return 0.5 * error * error, 1.0, error, 1.0
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


# exp(x) = 2^n exp(x - n log 2). Adding 1.5 * 2^52 puts the integer n into the low bits of the sum.
_LOG2_E, _LOG_2_HIGH, _LOG_2_LOW = 1.4426950408889634, 0.6931471803691238, 1.9082149292705877e-10
_ROUNDER = 6755399441055744.0


# This function computes several rows at a time in vector registers; math.exp computes one at a time. Sums must keep their
# order here, because reordering would cancel _ROUNDER.
@njit(fastmath={"contract"}, error_model="numpy")  # type: ignore[untyped-decorator]
def exponentials(x: Floats, m: int, whole: Floats, power: Floats) -> None:
    """Set ``power[r] = exp(x[r])`` for ``r < m``, correct to about one unit in the last place; ``whole`` is a work array.

    ``x`` may be at most 709. Values below -708 are set to -708, and NaN stays NaN.
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


# One client's rows with many columns, four rows at a time, so that the other operand is read and written less often. A slice of
# an array for each client would take as long as the sums, so these functions get whole arrays and the places of the rows.


@njit(forceinline=True, fastmath=FASTMATH, error_model="numpy")  # type: ignore[untyped-decorator]
def margins(x: Floats, low: int, high: int, shift: Floats, theta: Floats, i: int, margin: Floats) -> None:
    """``margin[r] = x[r]'theta[i] + shift[r]`` for ``low <= r < high``."""
    d, whole = x.shape[1], low + (high - low) // 4 * 4
    for r in range(low, whole, 4):
        m0, m1, m2, m3 = 0.0, 0.0, 0.0, 0.0
        for a in range(d):
            m0 += x[r, a] * theta[i, a]
            m1 += x[r + 1, a] * theta[i, a]
            m2 += x[r + 2, a] * theta[i, a]
            m3 += x[r + 3, a] * theta[i, a]
        margin[r], margin[r + 1] = shift[r] + m0, shift[r + 1] + m1
        margin[r + 2], margin[r + 3] = shift[r + 2] + m2, shift[r + 3] + m3
    for r in range(whole, high):
        along = shift[r]
        for a in range(d):
            along += x[r, a] * theta[i, a]
        margin[r] = along


@njit(forceinline=True, fastmath=FASTMATH, error_model="numpy")  # type: ignore[untyped-decorator]
def combine(x: Floats, low: int, high: int, slopes: Floats, g: Floats) -> None:
    """``g = sum of slopes[r] x[r]`` over ``low <= r < high``."""
    d, whole = x.shape[1], low + (high - low) // 4 * 4
    for a in range(d):
        g[a] = 0.0
    for r in range(low, whole, 4):
        s0, s1, s2, s3 = slopes[r], slopes[r + 1], slopes[r + 2], slopes[r + 3]
        for a in range(d):
            g[a] += (s0 * x[r, a] + s1 * x[r + 1, a]) + (s2 * x[r + 2, a] + s3 * x[r + 3, a])
    for r in range(whole, high):
        for a in range(d):
            g[a] += slopes[r] * x[r, a]


# Clients in tiles: the rows of several clients, so that the loops over rows are long enough for vector registers


@njit(forceinline=True, error_model="numpy")  # type: ignore[untyped-decorator]
def end_of_tile(i: int, last: int, client_ptr: Ints) -> int:
    """Return where the tile ends that begins with client ``i``: it has whole clients, or one with more rows than fit."""
    stop = i + 1
    while stop < last and client_ptr[stop + 1] - client_ptr[i] <= _TILE:
        stop += 1
    return stop


@njit(forceinline=True, error_model="numpy")  # type: ignore[untyped-decorator]
def fill_tile(
    i: int, stop: int, start: int, m: int, X: Floats, offset: Floats, client_ptr: Ints, theta: Floats, columns: Floats,
    margin: Floats,
) -> None:  # fmt: skip
    """Set ``columns (d, m)`` and ``margin (m,)`` to those of the rows from ``start`` on, of the clients ``i:stop``."""
    for r in range(m):
        margin[r] = offset[start + r] if len(offset) else 0.0
    for a in range(X.shape[1]):
        for r in range(m):
            columns[a, r] = X[start + r, a]
    for c in range(i, stop):
        low, high = max(client_ptr[c] - start, 0), min(client_ptr[c + 1] - start, m)
        eta, x = margin[low:high], columns[:, low:high]
        for a in range(X.shape[1]):
            t = theta[c, a]
            for r in range(high - low):
                eta[r] += t * x[a, r]


@njit(fastmath=FASTMATH, error_model="numpy")  # type: ignore[untyped-decorator]
def raise_tile(family: int, margin: Floats, m: int, argument: Floats, whole: Floats, power: Floats) -> None:
    """Set ``power`` to the exponential of :func:`exponent` for the first ``m`` margins of a tile."""
    for r in range(m):
        argument[r] = exponent(family, margin[r])
    argument[m:] = 0.0
    exponentials(argument, _TILE, whole, power)


@njit(nogil=True, cache=True, fastmath=FASTMATH, error_model="numpy")  # type: ignore[untyped-decorator]
def expand_quadratic(
    begin: int, end: int, X: Floats, y: Floats, weights: Floats, offset: Floats, scale: Floats, client_ptr: Ints,
    theta: Floats, value: Floats, gradient: Floats, hessian: Floats,
) -> None:  # fmt: skip
    """As :func:`expand` for least squares. It compiles in a quarter of the time, and a first linear fit needs no other."""
    n, d = theta.shape
    weighted, shifted = len(weights) > 0, len(offset) > 0
    for block in range(begin, end):
        for i in range(block * BLOCK, min(n, (block + 1) * BLOCK)):
            total = 0.0
            gradient[i], hessian[i] = 0.0, 0.0
            for row in range(client_ptr[i], client_ptr[i + 1]):
                error = (offset[row] if shifted else 0.0) - y[row]
                for a in range(d):
                    error += theta[i, a] * X[row, a]
                weight = scale[i] * weights[row] if weighted else scale[i]
                pull = weight * error
                total += pull * error
                for a in range(d):
                    x = weight * X[row, a]
                    gradient[i, a] += error * x
                    for b in range(a + 1):
                        hessian[i, a, b] += x * X[row, b]
            value[i] = 0.5 * total
            for a in range(d):
                for b in range(a):
                    hessian[i, b, a] = hessian[i, a, b]


@njit(nogil=True, cache=True, fastmath=FASTMATH, error_model="numpy")  # type: ignore[untyped-decorator]
def expand(
    begin: int, end: int, family: int, order: int, X: Floats, y: Floats, weights: Floats, offset: Floats, scale: Floats,
    client_ptr: Ints, theta: Floats, value: Floats, gradient: Floats, hessian: Floats,
) -> None:  # fmt: skip
    """Fill ``value (n,)``, for ``order >= 1`` also ``gradient (n, d)``, for ``order >= 2`` also ``hessian (n, d, d)``.

    ``weights`` and ``offset`` may be empty; ``scale (n,)`` multiplies the loss of each client.
    """
    n, d = theta.shape
    weighted = len(weights) > 0
    first, second, part, whole, power = np.empty(_TILE), np.empty(_TILE), np.empty(_TILE), np.empty(_TILE), np.ones(_TILE)
    plain, factor, columns = np.empty(_TILE), np.ones(_TILE), np.empty((d, _TILE))
    for block in range(begin, end):
        i, last = block * BLOCK, min(n, (block + 1) * BLOCK)
        while i < last:
            stop = end_of_tile(i, last, client_ptr)
            value[i:stop], gradient[i:stop], hessian[i:stop] = 0.0, 0.0, 0.0
            for start in range(client_ptr[i], client_ptr[stop], _TILE):
                m = min(_TILE, client_ptr[stop] - start)
                fill_tile(i, stop, start, m, X, offset, client_ptr, theta, columns, first)
                raise_tile(family, first, m, part, whole, power)
                for r in range(m):
                    plain[r], factor[r], first[r], second[r] = pointwise(family, first[r], y[start + r], power[r])
                if weighted:
                    for r in range(m):
                        weight = weights[start + r]
                        plain[r], factor[r] = weight * (plain[r] + math.log(factor[r])), 1.0
                        first[r] *= weight
                        second[r] *= weight
                for c in range(i, stop):
                    low, high = max(client_ptr[c] - start, 0), min(client_ptr[c + 1] - start, m)
                    rows, x, slopes, seconds = high - low, columns[:, low:high], first[low:high], second[low:high]
                    losses, factors, total, product = plain[low:high], factor[low:high], 0.0, 1.0
                    for r in range(rows):
                        total += losses[r]
                        product *= factors[r]
                    value[c] += scale[c] * (total + math.log(product))
                    if order >= 1:
                        for a in range(d):
                            s = 0.0
                            for r in range(rows):
                                s += slopes[r] * x[a, r]
                            gradient[c, a] += scale[c] * s
                    if order >= 2:
                        for a in range(d):
                            for r in range(rows):
                                part[r] = seconds[r] * x[a, r]
                            for b in range(a + 1):
                                s = 0.0
                                for r in range(rows):
                                    s += part[r] * x[b, r]
                                hessian[c, a, b] += scale[c] * s
            if order >= 2:
                for c in range(i, stop):
                    for a in range(d):
                        for b in range(a):
                            hessian[c, b, a] = hessian[c, a, b]
            i = stop


@njit(nogil=True, cache=True, fastmath=FASTMATH, error_model="numpy")  # type: ignore[untyped-decorator]
def expand_rows(
    begin: int, end: int, family: int, X: Floats, y: Floats, weights: Floats, offset: Floats, scale: Floats, client_ptr: Ints,
    theta: Floats, value: Floats, gradient: Floats, curves: Floats,
) -> None:  # fmt: skip
    """As :func:`expand`, row by row, which is faster for wide rows. In place of Hessians fill ``curves``, unless it is empty.

    ``curves (rows,)`` is the second derivative of each row's loss in its margin.
    """
    n, d = theta.shape
    weighted, shifted = len(weights) > 0, len(offset) > 0
    for block in range(begin, end):
        g = np.empty(d)
        for i in range(block * BLOCK, min(n, (block + 1) * BLOCK)):
            total, product = 0.0, 1.0
            g[:] = 0.0
            for row in range(client_ptr[i], client_ptr[i + 1]):
                margin = 0.0
                for a in range(d):
                    margin += theta[i, a] * X[row, a]
                if shifted:
                    margin += offset[row]
                power = math.exp(exponent(family, margin)) if family != GAUSSIAN else 1.0
                plain, factor, slope, curve = pointwise(family, margin, y[row], power)
                if weighted:
                    weight = weights[row]
                    plain, factor = weight * (plain + math.log(factor)), 1.0
                    slope *= weight
                    curve *= weight
                total += plain
                product *= factor
                if product > 1e200:
                    total += math.log(product)
                    product = 1.0
                for a in range(d):
                    g[a] += slope * X[row, a]
                if len(curves) > 0:
                    curves[row] = scale[i] * curve
            value[i] = scale[i] * (total + math.log(product))
            for a in range(d):
                gradient[i, a] = scale[i] * g[a]


@njit(forceinline=True, error_model="numpy")  # type: ignore[untyped-decorator]
def third_derivative(family: int, margin: float, y: float, power: float) -> float:
    """Return the third derivative of one row's loss in the margin; ``power`` is the exponential of :func:`exponent`."""
    if family == BERNOULLI:
        share = 1.0 / (1.0 + power)
        return power * share * share * (power - 1.0) * share * (1.0 if margin >= 0.0 else -1.0)
    if family == GAMMA:
        return -y * power if -margin <= LARGEST_LOG_MEAN else 0.0
    return power if margin <= LARGEST_LOG_MEAN else 0.0


@njit(nogil=True, cache=True, fastmath=FASTMATH, error_model="numpy")  # type: ignore[untyped-decorator]
def bend(
    begin: int, end: int, family: int, X: Floats, y: Floats, weights: Floats, offset: Floats, client_ptr: Ints, theta: Floats,
    P: Floats, variance: Floats, out: Floats,
) -> None:  # fmt: skip
    """Set ``out[i] = sum_l f'''(margin_l) (x_l' P_i x_l) x_l``, the gradient of ``trace(P_i H_i)`` in ``theta_i``.

    If ``P`` is empty, ``variance[l]`` is ``x_l' P_i x_l``.
    """
    n, d = theta.shape
    margin, third, part, whole, power = np.empty(_TILE), np.empty(_TILE), np.empty(_TILE), np.empty(_TILE), np.empty(_TILE)
    columns = np.empty((d, _TILE))
    for block in range(begin, end):
        i, last = block * BLOCK, min(n, (block + 1) * BLOCK)
        while i < last:
            stop = end_of_tile(i, last, client_ptr)
            out[i:stop] = 0.0
            for start in range(client_ptr[i], client_ptr[stop], _TILE):
                m = min(_TILE, client_ptr[stop] - start)
                fill_tile(i, stop, start, m, X, offset, client_ptr, theta, columns, margin)
                raise_tile(family, margin, m, part, whole, power)
                for r in range(m):
                    weight = weights[start + r] if len(weights) else 1.0
                    third[r] = weight * third_derivative(family, margin[r], y[start + r], power[r])
                for c in range(i, stop):
                    low, high = max(client_ptr[c] - start, 0), min(client_ptr[c + 1] - start, m)
                    rows, x, thirds, size = high - low, columns[:, low:high], third[low:high], part[low:high]
                    if len(P):
                        size[:] = 0.0
                        for a in range(d):
                            for b in range(a + 1):
                                double = P[c, a, b] * (1.0 if a == b else 2.0)
                                for r in range(rows):
                                    size[r] += double * x[a, r] * x[b, r]
                    else:
                        for r in range(rows):
                            size[r] = variance[start + low + r]
                    for r in range(rows):
                        thirds[r] *= size[r]
                    for a in range(d):
                        s = 0.0
                        for r in range(rows):
                            s += thirds[r] * x[a, r]
                        out[c, a] += s
            i = stop


@njit(nogil=True, cache=True, error_model="numpy")  # type: ignore[untyped-decorator]
def curvature_floor(begin: int, end: int, A: Floats, floor: Floats) -> None:
    """Set ``floor`` to ``1 / trace(A^-1)`` for each ``A (n, d, d)``: a lower bound on its smallest eigenvalue.

    The bound is within a factor ``d`` of the eigenvalue and much cheaper. It is zero where a pivot of the Cholesky
    factorisation is zero up to rounding.
    """
    n, d = A.shape[:2]
    for block in range(begin, end):
        L, inverse = np.empty((d, d)), np.empty(d)
        for i in range(block * BLOCK, min(n, (block + 1) * BLOCK)):
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
            # trace(A^-1) is the sum of squares of L^-1, computed column by column.
            for column in range(d):
                for a in range(column, d):
                    rest = 1.0 if a == column else 0.0
                    for c in range(column, a):
                        rest -= L[a, c] * inverse[c]
                    inverse[a] = rest / L[a, a]
                    trace += inverse[a] * inverse[a]
            floor[i] = 1.0 / trace if definite else 0.0
