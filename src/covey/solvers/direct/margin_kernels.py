"""The compiled loop of :mod:`.margins`, which has the algebra."""

from __future__ import annotations

import math

import numpy as np

from covey._typing import Anything, Floats, Ints
from covey.compiling import njit
from covey.losses.kernels import FASTMATH, exponent, pointwise

_STEPS = 50
_ARMIJO = 1e-4


@njit(nogil=True, cache=True, fastmath=FASTMATH, error_model="numpy")  # type: ignore[untyped-decorator]
def solve_margins(
    begin: int, end: int, family: int, K: Floats, place: Ints, ptr: Ints, y: Floats, weights: Floats, factor: Floats,
    tie: Floats, start: Floats, largest: int, pull: Floats, done: Anything,
) -> None:  # fmt: skip
    """Solve ``a = -slope(start + tie K a)`` for each client, beginning at ``a = pull``, and store ``a`` there.

    ``done`` says which clients have a solution. ``factor`` multiplies the loss of a client.
    """
    slope, root, e, along, z = np.empty(largest), np.empty(largest), np.empty(largest), np.empty(largest), np.empty(largest)
    a, eta, new_a, new_eta = np.empty(largest), np.empty(largest), np.empty(largest), np.empty(largest)
    L = np.empty((largest, largest))
    for i in range(begin, end):
        first, m = ptr[i], ptr[i + 1] - ptr[i]
        G = K[place[i] : place[i] + m * m].reshape(m, m)
        value, length, last, done[i] = math.inf, 1.0, False, False
        for r in range(m):
            a[r], new_a[r] = 0.0, pull[first + r]
        for r in range(m):
            eta[r], new_eta[r] = start[first + r], start[first + r]
            for s in range(m):
                new_eta[r] += tie[i] * (G[r, s] if s <= r else G[s, r]) * new_a[s]
        descent, worst, size = 0.0, math.inf, 0.0
        for step in range(_STEPS):
            # The value at the new point; if it is not better, the step is halved, and from a bad start a = 0 is the next.
            new = 0.0
            for r in range(m):
                row = first + r
                power = math.exp(exponent(family, new_eta[r]))
                plain, share, one, two = pointwise(family, new_eta[r], y[row], power)
                weight = factor[i] * (weights[row] if len(weights) else 1.0)
                new += weight * (plain + math.log(share)) + 0.5 * new_a[r] * (new_eta[r] - start[row])
                z[r], along[r] = weight * one, weight * two
            if step == 0 and not math.isfinite(new):
                for r in range(m):
                    new_a[r], new_eta[r] = 0.0, eta[r]
                continue
            if not new <= value + _ARMIJO * length * descent + 1e-13 * abs(value):
                length *= 0.5
                for r in range(m):
                    new_a[r] = 0.5 * (a[r] + new_a[r])
                    new_eta[r] = 0.5 * (eta[r] + new_eta[r])
                last = False
                continue
            value, length, worst, size = new, 1.0, 0.0, 0.0
            for r in range(m):
                a[r], eta[r], slope[r], root[r] = new_a[r], new_eta[r], z[r], math.sqrt(along[r])
                e[r] = -(a[r] + slope[r])
                worst, size = max(worst, abs(e[r])), max(size, abs(slope[r]))
            if worst <= 1e-15 * size or (last and worst <= 1e-12 * size):
                done[i] = True
                break
            last = worst <= 1e-5 * size
            for r in range(m):
                along[r] = 0.0
                for s in range(m):
                    along[r] += tie[i] * (G[r, s] if s <= r else G[s, r]) * e[s]
                z[r] = root[r] * along[r]
            for r in range(m):
                for c in range(r):
                    rest = tie[i] * root[r] * root[c] * G[r, c]
                    for s in range(c):
                        rest -= L[r, s] * L[c, s]
                    L[r, c] = rest / L[c, c]
                rest = 1.0 + tie[i] * root[r] * root[r] * G[r, r]
                for s in range(r):
                    rest -= L[r, s] * L[r, s]
                L[r, r] = math.sqrt(rest)
            for r in range(m):
                for s in range(r):
                    z[r] -= L[r, s] * z[s]
                z[r] /= L[r, r]
            for r in range(m - 1, -1, -1):
                for s in range(r + 1, m):
                    z[r] -= L[s, r] * z[s]
                z[r] /= L[r, r]
            for r in range(m):
                e[r] -= root[r] * z[r]
                new_a[r] = a[r] + e[r]
            descent = 0.0
            for r in range(m):
                moved = 0.0
                for s in range(m):
                    moved += tie[i] * (G[r, s] if s <= r else G[s, r]) * e[s]
                new_eta[r] = eta[r] + moved
                descent += (a[r] + slope[r]) * moved
        done[i] = done[i] or worst <= 1e-8 * size  # as far as rounding allows
        for r in range(m):
            pull[first + r] = a[r]
