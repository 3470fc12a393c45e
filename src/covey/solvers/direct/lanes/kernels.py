"""A compiled loop that solves many clients at once; a test compares it with plain numpy."""

from __future__ import annotations

import math

from numpy import empty

from covey._typing import Floats, Ints
from covey.compiling import njit
from covey.losses.kernels import FASTMATH

LANES = 64  # clients that are solved together: arrays (..., LANES) have one lane for each of them


@njit(forceinline=True, fastmath=FASTMATH, error_model="numpy")  # type: ignore[untyped-decorator]
def _inner(left: Floats, right: Floats, count: int, out: Floats) -> None:
    """Set ``out[l]`` to the sum of ``left[e, l] right[e, l]`` over ``e < count``."""
    whole = count - count % 4
    for lane in range(len(out)):
        out[lane] = 0.0
    for e in range(0, whole, 4):  # four products at a time, so that a sum is read and written less often
        for lane in range(len(out)):
            two = left[e, lane] * right[e, lane] + left[e + 1, lane] * right[e + 1, lane]
            out[lane] += two + (left[e + 2, lane] * right[e + 2, lane] + left[e + 3, lane] * right[e + 3, lane])
    for e in range(whole, count):
        for lane in range(len(out)):
            out[lane] += left[e, lane] * right[e, lane]


@njit(nogil=True, cache=True, fastmath=FASTMATH, error_model="numpy")  # type: ignore[untyped-decorator]
def solve_lanes(
    begin: int, end: int, R: Floats, Y: Floats, z: Floats, ptr: Ints, C: Floats, r: Floats, square: Floats, volume: Floats
) -> None:
    """Set ``C = G'G``, ``r = G'u``, ``u'u`` and ``log|K|`` of clients: ``K = I + Y Y' = L L'``, ``[G | u] = L^-1 [R | z]``.

    Client ``i`` has the rows ``ptr[i]:ptr[i + 1]``. ``C (d, n, d)`` begins with the first rows of all clients' matrices.
    """
    n, d, q = len(ptr) - 1, R.shape[1], Y.shape[1]
    largest = 0
    for block in range(begin, end):
        for i in range(block * LANES, min((block + 1) * LANES, n)):
            largest = max(largest, (ptr[i + 1] - ptr[i] + 3) // 4 * 4)
    rows, G, K = empty((largest, q, LANES)), empty((d + 1, largest, LANES)), empty((largest, largest, LANES))
    products, total, log_determinant = empty((d + 1, d + 1, LANES)), empty(LANES), empty(LANES)
    for block in range(begin, end):
        first, last, m = block * LANES, min((block + 1) * LANES, n), 0
        for i in range(first, last):
            m = max(m, (ptr[i + 1] - ptr[i] + 3) // 4 * 4)  # in fours, so that no bit depends on the other clients
        for lane in range(LANES):  # a client with fewer rows than another gets rows of zeros
            i = first + lane
            here = ptr[i + 1] - ptr[i] if i < last else 0
            for a in range(here):
                row = ptr[i] + a
                for e in range(q):
                    rows[a, e, lane] = Y[row, e]
                for e in range(d):
                    G[e, a, lane] = R[row, e]
                G[d, a, lane] = z[row] if len(z) else 0.0
            for a in range(here, m):
                for e in range(q):
                    rows[a, e, lane] = 0.0
                for e in range(d + 1):
                    G[e, a, lane] = 0.0
            log_determinant[lane] = 0.0
        for a in range(m):
            for b in range(a + 1):
                entry, root = K[a, b], K[b, b]
                _inner(rows[a], rows[b], q, entry)
                _inner(K[a], K[b], b, total)
                if b < a:
                    for lane in range(LANES):
                        entry[lane] = (entry[lane] - total[lane]) * root[lane]
                else:
                    for lane in range(LANES):
                        rest = 1.0 + entry[lane] - total[lane]
                        log_determinant[lane] += math.log(rest)
                        entry[lane] = 1.0 / math.sqrt(rest)  # the inverse, as nothing else is needed
            root = K[a, a]
            for e in range(d + 1):
                entry = G[e, a]
                _inner(K[a], G[e], a, total)
                for lane in range(LANES):
                    entry[lane] = (entry[lane] - total[lane]) * root[lane]
        for a in range(d + 1):
            for e in range(a + 1):
                _inner(G[a], G[e], m, products[a, e])
                for lane in range(LANES):
                    products[e, a, lane] = products[a, e, lane]
        for a in range(d):
            for lane in range(last - first):
                for e in range(d):
                    C[a, first + lane, e] = products[a, e, lane]
        for lane in range(last - first):
            for e in range(d):
                r[first + lane, e] = products[d, e, lane]
            square[first + lane], volume[first + lane] = products[d, d, lane], log_determinant[lane]
