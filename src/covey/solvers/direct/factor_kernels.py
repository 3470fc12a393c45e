"""Compiled loops over clients given by triangular factors; :mod:`.factors` has the algebra. Tests compare them with numpy.

``LANES`` clients are solved together: in arrays ``(..., LANES)`` each lane belongs to one client.
"""

from __future__ import annotations

import math

from numpy import empty

from covey._typing import Bools, Floats, Ints
from covey.compiling import njit
from covey.losses.kernels import FASTMATH
from covey.threads import BLOCK

LANES = 64
_ZERO_PIVOT = 1e-15  # of the diagonal: a smaller pivot is rounding
_LARGE = 1e30  # the product of eight determinants below this number is finite


@njit(nogil=True, cache=True, error_model="numpy")  # type: ignore[untyped-decorator]
def factorise(begin: int, end: int, A: Floats, b: Floats, R: Floats) -> None:
    """Set ``R (q, d + 1, n)`` to the first rows of clients' Cholesky factors, of ``A (n, q, d)`` bordered by ``b``."""
    n, q, d = A.shape
    for block in range(begin, end):
        M = empty((q, d + 1))
        for i in range(block * BLOCK, min((block + 1) * BLOCK, n)):
            for a in range(q):
                for c in range(a, d + 1):
                    rest = A[i, a, c] if c < d else b[i, a]
                    for e in range(a):
                        rest -= M[e, a] * M[e, c]
                    M[a, c] = rest
                pivot = M[a, a]
                inverse = 1.0 / math.sqrt(pivot) if pivot > _ZERO_PIVOT * A[i, a, a] else 0.0
                for c in range(a):
                    R[a, c, i] = 0.0
                for c in range(a, d + 1):
                    M[a, c] *= inverse
                    R[a, c, i] = M[a, c]


@njit(forceinline=True, fastmath=FASTMATH, error_model="numpy")  # type: ignore[untyped-decorator]
def _add_product(left: Floats, right: Floats, sign: float, width: int, out: Floats) -> None:
    for lane in range(width):
        out[lane] += sign * left[lane] * right[lane]


@njit(nogil=True, cache=True, fastmath=FASTMATH, error_model="numpy")  # type: ignore[untyped-decorator]
def absorb_factors(
    begin: int, end: int, R: Floats, S: Floats, which: Ints, ptr: Ints, G: Floats, squares: Floats, volume: Floats
) -> None:  # fmt: skip
    """Set ``G = L^-1 R`` with ``I + R_v S R_v' = L L'``, and by block the sums of ``G'G`` and of ``log|L L'|``."""
    q, e = R.shape[:2]
    rows, K, Y, total = empty((q, e, LANES)), empty((q, q, LANES)), empty((q, LANES)), empty((e, e, LANES))
    determinant = empty(LANES)
    for block in range(begin, end):
        shape = S[which[block]]
        total[:] = 0.0
        volume[block] = 0.0
        for first in range(ptr[block], ptr[block + 1], LANES):
            m = min(LANES, ptr[block + 1] - first)
            width = (m + 7) // 8 * 8  # in eights, as one instruction of a processor handles up to eight lanes
            for a in range(q):
                for c in range(e):
                    row = rows[a, c]
                    for lane in range(m):
                        row[lane] = R[a, c, first + lane]
                    for lane in range(m, width):
                        row[lane] = 0.0
            for lane in range(width):
                determinant[lane] = 1.0
            for a in range(q):
                for c in range(q):
                    along = Y[c]
                    for lane in range(width):
                        along[lane] = 0.0
                    for b in range(a, q):
                        factor, row = shape[b, c], rows[a, b]
                        for lane in range(width):
                            along[lane] += factor * row[lane]
                for b in range(a + 1):
                    entry = K[a, b]
                    for lane in range(width):
                        entry[lane] = 1.0 if a == b else 0.0
                    for c in range(b, q):
                        _add_product(rows[b, c], Y[c], 1.0, width, entry)
                    for c in range(b):
                        _add_product(K[a, c], K[b, c], -1.0, width, entry)
                    if b < a:
                        root = K[b, b]
                        for lane in range(width):
                            entry[lane] *= root[lane]
                    else:
                        for lane in range(width):
                            determinant[lane] *= entry[lane]
                            entry[lane] = 1.0 / math.sqrt(entry[lane])  # the inverse, as nothing else is needed
            for a in range(q):
                root = K[a, a]
                for c in range(e):
                    entry = rows[a, c]
                    for b in range(a):
                        _add_product(K[a, b], rows[b, c], -1.0, width, entry)
                    for lane in range(width):
                        entry[lane] *= root[lane]
                    for lane in range(m):
                        G[a, c, first + lane] = entry[lane]
            for c in range(e):
                for b in range(c + 1):
                    for a in range(q):
                        _add_product(rows[a, c], rows[a, b], 1.0, width, total[c, b])
            for start in range(0, width, 8):
                product, largest = 1.0, 0.0
                for lane in range(start, start + 8):
                    product *= determinant[lane]
                    largest = max(largest, determinant[lane])
                if largest < _LARGE:
                    volume[block] += math.log(product)
                else:
                    for lane in range(start, start + 8):
                        volume[block] += math.log(determinant[lane])
        for c in range(e):
            for b in range(c + 1):
                along = total[c, b]
                square = 0.0
                for lane in range(LANES):
                    square += along[lane]
                squares[block, c, b] = squares[block, b, c] = square


@njit(nogil=True, cache=True, fastmath=FASTMATH, error_model="numpy")  # type: ignore[untyped-decorator]
def factor_sensitivity(
    begin: int, end: int, G: Floats, ptr: Ints, owner: Ints, x: Floats, P: Floats, bend: Floats, pull: Floats
) -> None:  # fmt: skip
    """Sums by block of ``C - C P C`` and of ``f f'``, ``f = r - C x``, for the terms that vary, with ``[C | r] = G_v'G``."""
    q, e = G.shape[:2]
    d = e - 1
    rows, along, rest, half = empty((q, e, LANES)), empty((d, LANES)), empty((q, LANES)), empty((q, LANES))
    N, force, bends, pulls = empty((q, q, LANES)), empty((q, LANES)), empty((q, q, LANES)), empty((q, q, LANES))
    for block in range(begin, end):
        j = owner[block]
        bends[:] = 0.0
        pulls[:] = 0.0
        for first in range(ptr[block], ptr[block + 1], LANES):
            m = min(LANES, ptr[block + 1] - first)
            width = (m + 7) // 8 * 8
            for a in range(q):
                for c in range(e):
                    row = rows[a, c]
                    for lane in range(m):
                        row[lane] = G[a, c, first + lane]
                    for lane in range(m, width):
                        row[lane] = 0.0
            for a in range(q):  # N = I - G P G'
                gap = rest[a]
                for lane in range(width):
                    gap[lane] = rows[a, d, lane]
                for c in range(d):
                    factor, row = x[j, c], rows[a, c]
                    for lane in range(width):
                        gap[lane] -= factor * row[lane]
                for c in range(d):
                    through = along[c]
                    for lane in range(width):
                        through[lane] = 0.0
                    for b in range(d):
                        factor, row = P[j, b, c], rows[a, b]
                        for lane in range(width):
                            through[lane] += factor * row[lane]
                for b in range(a + 1):
                    entry = N[a, b]
                    for lane in range(width):
                        entry[lane] = 1.0 if a == b else 0.0
                    for c in range(d):
                        _add_product(along[c], rows[b, c], -1.0, width, entry)
                    for lane in range(width):
                        N[b, a, lane] = entry[lane]
            for a in range(q):
                pulled = force[a]
                for lane in range(width):
                    pulled[lane] = 0.0
                for b in range(q):
                    _add_product(rows[b, a], rest[b], 1.0, width, pulled)
            for a in range(q):
                for b in range(q):
                    entry = half[b]
                    for lane in range(width):
                        entry[lane] = 0.0
                    for c in range(q):
                        _add_product(N[b, c], rows[c, a], 1.0, width, entry)
                for c in range(a + 1):
                    for b in range(q):
                        _add_product(half[b], rows[b, c], 1.0, width, bends[a, c])
                    _add_product(force[a], force[c], 1.0, width, pulls[a, c])
        for a in range(q):
            for c in range(a + 1):
                bent, pulled = bends[a, c], pulls[a, c]
                one, two = 0.0, 0.0
                for lane in range(LANES):
                    one += bent[lane]
                    two += pulled[lane]
                bend[block, a, c] = bend[block, c, a] = one
                pull[block, a, c] = pull[block, c, a] = two


@njit(nogil=True, cache=True, error_model="numpy")  # type: ignore[untyped-decorator]
def solve_regular(begin: int, end: int, A: Floats, B: Floats, least: float, X: Floats, regular: Bools) -> None:
    """Solve ``A_i X_i = B_i`` by Cholesky where the product of the pivots is at least ``least``; mark these as ``regular``.

    The matrices have a unit diagonal, so that the product is a measure of how regular they are.
    """
    n, d, m = B.shape
    for block in range(begin, end):
        L = empty((d, d))
        for i in range(block * BLOCK, min((block + 1) * BLOCK, n)):
            product, a = 1.0, 0
            while a < d and product >= least:  # no pivot is above 1
                for c in range(a + 1):
                    rest = A[i, a, c]
                    for e in range(c):
                        rest -= L[a, e] * L[c, e]
                    if a == c:
                        product *= rest
                        L[a, a] = math.sqrt(max(rest, 0.0))
                    else:
                        L[a, c] = rest / L[c, c]
                a += 1
            regular[i] = product >= least
            if not regular[i]:
                continue
            for k in range(m):
                for a in range(d):
                    rest = B[i, a, k]
                    for e in range(a):
                        rest -= L[a, e] * X[i, e, k]
                    X[i, a, k] = rest / L[a, a]
                for a in range(d - 1, -1, -1):
                    rest = X[i, a, k]
                    for e in range(a + 1, d):
                        rest -= L[e, a] * X[i, e, k]
                    X[i, a, k] = rest / L[a, a]
