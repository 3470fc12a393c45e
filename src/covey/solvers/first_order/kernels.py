"""Compiled loops of the first-order algorithms. Tests compare each of them with plain numpy.

``group`` turns random choices into rounds. ``l2gd_move`` and ``al2sgd_plus_move`` move a node's clients.
``prepare_proximal`` and ``proximal_step`` solve their proximal problems. ``check`` sums their values and squared gradients.
``project`` fills eigenbases, and ``draw_row`` draws random rows.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from covey._typing import Anything, Floats, Ints
from covey.compiling import njit
from covey.kernels import accumulate_in, accumulate_rows
from covey.losses.kernels import FASTMATH, GAUSSIAN, combine, exponent, exponentials, margins, slope
from covey.threads import BLOCK

_NARROW = 4  # columns up to which all columns of a row are handled together
_ROOM = 1024  # rows handled together, which stay in the second-level cache during local steps


# Random numbers by SplitMix64, at any place of a stream

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix(state: Any) -> Any:
    """53 random bits from ``stream + place * GOLDEN``, for numbers and arrays of ``uint64``."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (state ^ (state >> np.uint64(31))) >> np.uint64(11)


_mix = njit(inline="always")(mix)


@njit(inline="always")  # type: ignore[untyped-decorator]
def draw_row(stream: int, t: int, rows: int) -> int:
    """A uniform random row, from the client's stream at iteration ``t``."""
    return int(_mix(stream + np.uint64(t + 1) * GOLDEN) * 2.0**-53 * rows)


# Rounds


@njit  # type: ignore[untyped-decorator]
def _together(t: int, present: Anything, since: Ints, pending: Ints, place: Ints, start: Ints, steps: Ints) -> int:
    """Add a round of the clusters that are present before iteration ``t``; returns its row."""
    row = int(place.max())
    for j in range(len(place)):
        if present[j]:
            start[row, j] = since[j] if pending[j] else t
            steps[row, j] = pending[j]
            pending[j], place[j] = 0, row + 1
        elif place[j] == row:
            place[j] = row + 1
    return row


@njit(cache=True)  # type: ignore[untyped-decorator]
def group(
    xi0: Anything, xi: Anything, xi_anchor: Anything, present: Anything, merge: bool, start: Ints, steps: Ints, between: Ints,
    within: Ints, refresh: Anything, takes_part: Anything,
) -> int:  # fmt: skip
    """Fill the rounds of some random choices; returns the number of rounds."""
    T, k = xi.shape
    everybody = np.ones(k, dtype=np.bool_)
    since, pending = np.zeros(k, dtype=np.int64), np.zeros(k, dtype=np.int64)
    place = np.zeros(k, dtype=np.int64)  # the round of each cluster's next exchange
    current = np.zeros(k, dtype=np.bool_)  # no local step since the cluster's last exchange: its average is up to date
    in_run = False  # the last iteration was an exchange between clusters
    for t in range(T):
        if xi0[t] and merge and in_run:
            between[place[0] - 1] += 1
        elif xi0[t]:
            row = _together(t, present[t], since, pending, place, start, steps)
            between[row], takes_part[row], current[:] = 1, present[t], True
        else:
            for j in range(k):
                if not xi[t, j]:
                    if pending[j] == 0:
                        since[j] = t
                    pending[j] += 1
                    current[j] = False
                elif merge and current[j]:
                    within[place[j] - 1, j] += 1
                else:
                    row = place[j]
                    while between[row] > 0:  # an exchange in which the cluster did not take part
                        row += 1
                    start[row, j], steps[row, j], within[row, j] = (since[j] if pending[j] else t), pending[j], 1
                    pending[j], place[j], current[j] = 0, row + 1, True
        in_run = xi0[t]
        if xi_anchor[t]:
            row = _together(t + 1, everybody, since, pending, place, start, steps)
            refresh[row], current[:], in_run = True, False, False
    last: int = _together(T, everybody, since, pending, place, start, steps)
    return last + 1


# Async-L2GD


@njit(nogil=True, cache=True, error_model="numpy")  # type: ignore[untyped-decorator]
def project(
    begin: int, end: int, values: Floats, vectors: Floats, gradient: Floats, ptr: Ints, basis: Floats, curvature: Floats,
    minimiser: Floats,
) -> None:  # fmt: skip
    """Fill an eigenbasis from each client's eigenvalues, in ascending order, and eigenvectors, in columns."""
    d = values.shape[1]
    for i in range(begin, end):
        flat = 8 * d * 2.0**-52 * values[i, d - 1]
        for c in range(ptr[i], ptr[i + 1]):
            at = d - (ptr[i + 1] - c)
            along = 0.0
            for a in range(d):
                basis[c, a] = vectors[i, a, at]
                along -= vectors[i, a, at] * gradient[i, a]
            # In directions without rows a client does not move. Rounding must not give them a little curvature.
            curved = values[i, at] > flat
            curvature[c] = values[i, at] if curved else 0.0
            minimiser[c] = along / values[i, at] if curved else 0.0


@njit(nogil=True, cache=True, fastmath=FASTMATH, error_model="numpy")  # type: ignore[untyped-decorator]
def l2gd_move(
    begin: int, end: int, family: int, X: Floats, y: Floats, weights: Floats, offset: Floats, scale: Floats, ridge: float,
    client_ptr: Ints, closed: bool, basis: Ints, vectors: Floats, curvature: Floats, minimiser: Floats, blocks: Ints,
    owner: Ints, gamma: Floats, share: Floats, strength: Floats, force: Floats, start: Ints, steps: Ints, local: Floats,
    step: float, mu: float, switch: int, wanted: Anything, theta: Floats, out: Floats, sums: Ints,
) -> None:  # fmt: skip
    """Move the clients; one thread moves a block of clients of one cluster. No bit depends on threads or blocks."""
    d = theta.shape[1]
    for block in range(begin, end):
        j, first, last = owner[block], blocks[block], blocks[block + 1]
        for i in range(first, last):  # lines 7 and 13: the step towards averages
            for a in range(d):
                out[i, a] = theta[i, a] - gamma[i] * (strength[j] * theta[i, a] - force[j, a])
        if steps[j] > 0:
            eta = np.empty(steps[j])
            for s in range(steps[j]):
                t = start[j] + s
                eta[s] = local[j] * (step if mu == 0.0 or t <= switch else (2.0 * t + 1.0) / ((t + 1.0) ** 2 * mu))
            if closed:
                _in_eigenbasis(basis, vectors, curvature, minimiser, eta, first, last, out)
            else:
                none = np.empty((0, 0))
                _step_by_step(family, X, y, weights, offset, scale, ridge, client_ptr, eta, none, none, first, last, out)
        if wanted[j]:
            accumulate_rows(sums[block], share[first:last], out[first:last])


@njit(fastmath=FASTMATH, error_model="numpy")  # type: ignore[untyped-decorator]
def _in_eigenbasis(
    ptr: Ints, vectors: Floats, curvature: Floats, minimiser: Floats, eta: Floats, first: int, last: int, theta: Floats
) -> None:
    """``theta += V' ((prod_s (1 - eta_s lambda) - 1) (V theta - minimiser))``."""
    d = theta.shape[1]
    keep = np.empty(d)
    for i in range(first, last):
        low, high = ptr[i], ptr[i + 1]
        V, curved, best, r = vectors[low:high], curvature[low:high], minimiser[low:high], high - low
        keep[:] = 1.0
        for s in range(len(eta)):
            for c in range(r):
                keep[c] *= 1.0 - eta[s] * curved[c]
        for c in range(r):
            along = 0.0
            for a in range(d):
                along += V[c, a] * theta[i, a]
            keep[c] = (keep[c] - 1.0) * (along - best[c])
        for c in range(r):
            for a in range(d):
                theta[i, a] += V[c, a] * keep[c]


@njit(forceinline=True, fastmath=FASTMATH, error_model="numpy")  # type: ignore[untyped-decorator]
def _combine_four(x: Floats, low: int, high: int, slopes: Floats) -> tuple[float, float, float, float]:
    """The sum of :func:`combine` for four columns, in registers; four rows at a time, because one sum waits for the last."""
    g0, g1, g2, g3, whole = 0.0, 0.0, 0.0, 0.0, low + (high - low) // 4 * 4
    for r in range(low, whole, 4):
        s0, s1, s2, s3 = slopes[r], slopes[r + 1], slopes[r + 2], slopes[r + 3]
        g0 += (s0 * x[r, 0] + s1 * x[r + 1, 0]) + (s2 * x[r + 2, 0] + s3 * x[r + 3, 0])
        g1 += (s0 * x[r, 1] + s1 * x[r + 1, 1]) + (s2 * x[r + 2, 1] + s3 * x[r + 3, 1])
        g2 += (s0 * x[r, 2] + s1 * x[r + 1, 2]) + (s2 * x[r + 2, 2] + s3 * x[r + 3, 2])
        g3 += (s0 * x[r, 3] + s1 * x[r + 1, 3]) + (s2 * x[r + 2, 3] + s3 * x[r + 3, 3])
    for r in range(whole, high):
        g0 += slopes[r] * x[r, 0]
        g1 += slopes[r] * x[r, 1]
        g2 += slopes[r] * x[r, 2]
        g3 += slopes[r] * x[r, 3]
    return g0, g1, g2, g3


@njit(fastmath=FASTMATH, error_model="numpy")  # type: ignore[untyped-decorator]
def _step_by_step(
    family: int, X: Floats, y: Floats, weights: Floats, offset: Floats, scale: Floats, ridge: float, client_ptr: Ints,
    eta: Floats, units: Floats, h: Floats, first: int, last: int, theta: Floats,
) -> None:  # fmt: skip
    """Gradient steps of clients, as many at a time as fit in the cache. Rows of up to four columns are padded to four.

    If ``units (n, 1)`` and ``h (n, d)`` are not empty, client ``i`` steps by ``units_i eta`` along its gradient less ``h_i``.
    """
    d, own, narrow, room = theta.shape[1], len(units) > 0, theta.shape[1] <= _NARROW, _ROOM
    for i in range(first, last):
        room = max(room, client_ptr[i + 1] - client_ptr[i])
    padded, target, weight, shift = np.zeros((room, _NARROW)), np.empty(room), np.ones(room), np.zeros(room)
    margin, argument, whole, power = np.empty(room), np.empty(room), np.empty(room), np.zeros(room)
    t, g = np.zeros((last - first, max(d, _NARROW))), np.empty(d)
    i = first
    while i < last:
        stop, base = i, client_ptr[i]
        while stop < last and client_ptr[stop + 1] - base <= room:
            stop += 1
        m = client_ptr[stop] - base
        x = X[base : base + m]
        target[:m] = y[base : base + m]
        if narrow:
            padded[:m, :d] = x
        if len(weights) > 0:
            weight[:m] = weights[base : base + m]
        if len(offset) > 0:
            shift[:m] = offset[base : base + m]
        t[: stop - i, :d] = theta[i:stop]
        for s in range(len(eta)):
            for c in range(i, stop):
                low, high = client_ptr[c] - base, client_ptr[c + 1] - base
                if narrow:
                    t0, t1, t2, t3 = t[c - i, 0], t[c - i, 1], t[c - i, 2], t[c - i, 3]
                    for r in range(low, high):
                        across = (t0 * padded[r, 0] + t1 * padded[r, 1]) + (t2 * padded[r, 2] + t3 * padded[r, 3])
                        margin[r] = shift[r] + across
                else:
                    margins(x, low, high, shift, t, c - i, margin)
            if family != GAUSSIAN:
                for r in range(m):
                    argument[r] = exponent(family, margin[r])
                exponentials(argument, m, whole, power)
            for r in range(m):
                margin[r] = weight[r] * slope(family, margin[r], target[r], power[r])
            for c in range(i, stop):
                low, high = client_ptr[c] - base, client_ptr[c + 1] - base
                step = eta[s] * units[c, 0] if own else eta[s]
                keep, move = 1.0 - step * ridge, step * scale[c]
                if narrow:
                    g0, g1, g2, g3 = _combine_four(padded, low, high, margin)
                    t[c - i, 0] = keep * t[c - i, 0] - move * g0
                    t[c - i, 1] = keep * t[c - i, 1] - move * g1
                    t[c - i, 2] = keep * t[c - i, 2] - move * g2
                    t[c - i, 3] = keep * t[c - i, 3] - move * g3
                else:
                    combine(x, low, high, margin, g)
                    for a in range(d):
                        t[c - i, a] = keep * t[c - i, a] - move * g[a]
                if own:
                    for a in range(d):
                        t[c - i, a] += step * h[c, a]
        theta[i:stop] = t[: stop - i, :d]
        i = stop


# APGD


@njit(nogil=True, cache=True, fastmath=FASTMATH, error_model="numpy")  # type: ignore[untyped-decorator]
def prepare_proximal(begin: int, end: int, A: Floats, gamma: Floats, g: Floats, own: Floats) -> None:
    """Replace ``A_i``, of which only the lower triangle is read, by ``pull_i = gamma_i (A_i + gamma_i I)^-1``; fill ``own``.

    ``own_i`` is ``-pull_i g_i / gamma_i``. Each step exchanges one unknown of ``(A_i + gamma_i I) x = b`` with one number of
    ``b`` (Gauss and Jordan), without pivots, because the matrix is positive definite.
    """
    n, d = g.shape
    for block in range(begin, end):
        column = np.empty(d)
        for i in range(block * BLOCK, min(n, (block + 1) * BLOCK)):
            M = A[i]
            for a in range(d):
                M[a, a] += gamma[i]
            for p in range(d):
                for a in range(p):
                    column[a] = M[p, a]
                for a in range(p, d):
                    column[a] = M[a, p]
                inverse = 1.0 / column[p]
                for a in range(d):
                    factor = column[a] * inverse
                    for b in range(a + 1):
                        M[a, b] -= factor * column[b]
                for a in range(p):
                    M[p, a] = column[a] * inverse
                for a in range(p + 1, d):
                    M[a, p] = column[a] * inverse
                M[p, p] = -inverse
            for a in range(d):
                for b in range(a + 1):
                    M[a, b] *= -gamma[i]
                    M[b, a] = M[a, b]
            for a in range(d):
                along = 0.0
                for b in range(d):
                    along += M[a, b] * g[i, b]
                own[i, a] = -along / gamma[i]


@njit(nogil=True, cache=True, fastmath=FASTMATH, error_model="numpy")  # type: ignore[untyped-decorator]
def proximal_step(
    begin: int, end: int, pull: Floats, own: Floats, g: Floats, zero: Floats, gamma: Floats, share: Floats, blocks: Ints,
    owner: Ints, centre: Floats, theta: Floats, sums: Ints, values: Ints,
) -> None:  # fmt: skip
    """``theta_i = pull_i c + own_i``; add ``share_i theta_i`` and the values to the digits of a block.

    The value of a client is ``g'theta / 2 + gamma_i (c - theta_i)'c / 2`` above its loss at ``zero``.
    """
    n, d = theta.shape
    rows, shift, out = pull.reshape(n * d, d), own.reshape(n * d), theta.reshape(n * d)
    for block in range(begin, end):
        j, first, last = owner[block], blocks[block], blocks[block + 1]
        for i in range(first, last):
            margins(rows, i * d, (i + 1) * d, shift, centre, j, out)
            above = 0.0
            for a in range(d):
                above += g[i, a] * theta[i, a] + gamma[i] * (centre[j, a] - theta[i, a]) * centre[j, a]
            accumulate_in(values, block, zero[i] + 0.5 * above)
        accumulate_rows(sums[block], share[first:last], theta[first:last])


# ProxSkip


@njit(nogil=True, cache=True, fastmath=FASTMATH, error_model="numpy")  # type: ignore[untyped-decorator]
def controlled_steps(
    begin: int, end: int, family: int, X: Floats, y: Floats, weights: Floats, offset: Floats, scale: Floats, ridge: float,
    client_ptr: Ints, units: Floats, steps: int, h: Floats, theta: Floats,
) -> None:  # fmt: skip
    """``steps`` times ``theta_i -= units_i (grad f_i(theta_i) - h_i)``."""
    n, eta = len(theta), np.ones(steps)
    for block in range(begin, end):
        first, last = block * BLOCK, min(n, (block + 1) * BLOCK)
        _step_by_step(family, X, y, weights, offset, scale, ridge, client_ptr, eta, units, h, first, last, theta)


@njit(nogil=True, cache=True, error_model="numpy")  # type: ignore[untyped-decorator]
def quadratic_steps(
    begin: int, end: int, ptr: Ints, vectors: Floats, curvature: Floats, minimiser: Floats, eta: Floats, steps: int,
    h: Floats, theta: Floats,
) -> None:  # fmt: skip
    """``steps`` times ``theta_i -= eta_i (grad f_i(theta_i) - h_i)``, in the eigenbases of quadratic losses."""
    n, d = theta.shape
    for block in range(begin, end):
        move = np.empty(d)
        for i in range(block * BLOCK, min(n, (block + 1) * BLOCK)):
            for a in range(d):
                move[a] = steps * eta[i] * h[i, a]  # the loss is flat in directions outside the basis
            for c in range(ptr[i], ptr[i + 1]):
                if curvature[c] > 0.0:
                    along, push = 0.0, 0.0
                    for a in range(d):
                        along += vectors[c, a] * theta[i, a]
                        push += vectors[c, a] * h[i, a]
                    keep = (1.0 - eta[i] * curvature[c]) ** steps
                    step = (keep - 1.0) * (along - minimiser[c] - push / curvature[c]) - steps * eta[i] * push
                    for a in range(d):
                        move[a] += vectors[c, a] * step
            for a in range(d):
                theta[i, a] += move[a]


# Async-AL2SGD+


@njit(nogil=True, cache=True, error_model="numpy")  # type: ignore[untyped-decorator]
def al2sgd_plus_move(
    begin: int, end: int, family: int, X: Floats, target: Floats, weights: Floats, offset: Floats, scale: Floats, ridge: float,
    client_ptr: Ints, streams: Anything, blocks: Ints, owner: Ints, gamma: Floats, share: Floats, strength: Floats,
    force: Floats, exchanged: Anything, start: Ints, steps: Ints, local: Floats, batch: int,
    pace: tuple[float, float, float, float, float], wanted: Anything, x: Floats, gradient: Floats, y: Floats, z: Floats,
    y_out: Floats, z_out: Floats, sums: Ints,
) -> None:  # fmt: skip
    """Move the clients; one thread moves a block of clients of one cluster. No bit depends on threads or blocks."""
    d = x.shape[1]
    eta, a1, a2, b1, b2 = pace
    for block in range(begin, end):
        j = owner[block]
        first, last = blocks[block], blocks[block + 1]
        theta, g, ends = np.empty(d), np.empty(d), np.empty((last - first if wanted[j] else 0, d))
        y_out[first:last], z_out[first:last] = y[first:last], z[first:last]
        for i in range(first, last):
            rows = client_ptr[i + 1] - client_ptr[i]
            for s in range(-1 if exchanged[j] else 0, steps[j]):
                for a in range(d):
                    theta[a] = a1 * z_out[i, a] + a2 * x[i, a] + (1.0 - a1 - a2) * y_out[i, a]
                    g[a] = gradient[i, a]
                if s < 0:
                    for a in range(d):
                        g[a] += gamma[i] * (strength[j] * (theta[a] - x[i, a]) - force[j, a])
                else:
                    for a in range(d):
                        g[a] += local[j] * ridge * (theta[a] - x[i, a])
                    for draw in range(batch if rows > 0 else 0):
                        row = client_ptr[i] + draw_row(streams[i], (start[j] + s) * batch + draw, rows)
                        shift = offset[row] if len(offset) > 0 else 0.0
                        at_theta, at_x = shift, shift
                        for a in range(d):
                            at_theta += X[row, a] * theta[a]
                            at_x += X[row, a] * x[i, a]
                        here = slope(family, at_theta, target[row], _power(family, at_theta))
                        there = slope(family, at_x, target[row], _power(family, at_x))
                        size = local[j] * rows * scale[i] / batch * (weights[row] if len(weights) > 0 else 1.0)
                        for a in range(d):
                            g[a] += size * (here - there) * X[row, a]
                for a in range(d):
                    y_out[i, a] = theta[a] - eta * g[a]
                    z_out[i, a] = b1 * z_out[i, a] + (1.0 - b1) * theta[a] + b2 / eta * (y_out[i, a] - theta[a])
            if wanted[j]:
                for a in range(d):
                    ends[i - first, a] = a1 * z_out[i, a] + a2 * x[i, a] + (1.0 - a1 - a2) * y_out[i, a]
        if wanted[j]:
            accumulate_rows(sums[block], share[first:last], ends)


@njit(inline="always", error_model="numpy")  # type: ignore[untyped-decorator]
def _power(family: int, margin: float) -> float:
    return 1.0 if family == GAUSSIAN else math.exp(exponent(family, margin))


# Checks


@njit(nogil=True, cache=True, error_model="numpy")  # type: ignore[untyped-decorator]
def check(
    begin: int, end: int, loss: Floats, gradient: Floats, gamma: Floats, theta: Floats, parent: Ints, w: Floats, value: Ints,
    squared: Ints,
) -> None:  # fmt: skip
    """Add each client's value and squared gradient to the digits of its block."""
    n, d = theta.shape
    for block in range(begin, end):
        for i in range(block * BLOCK, min(n, (block + 1) * BLOCK)):
            apart, steep = 0.0, 0.0
            for a in range(d):
                away = theta[i, a] - w[parent[i], a]
                apart += away * away
                steep += (gradient[i, a] + gamma[i] * away) ** 2
            accumulate_in(value, block, loss[i] + 0.5 * gamma[i] * apart)
            accumulate_in(squared, block, steep)
