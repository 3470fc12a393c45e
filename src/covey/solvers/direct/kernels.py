"""Compiled loops of elimination; :mod:`.elimination` has the algebra. Tests compare each of them with plain numpy."""

from __future__ import annotations

import math

import numpy as np

from covey._typing import Floats, Ints
from covey.compiling import njit
from covey.losses.kernels import FASTMATH
from covey.threads import BLOCK


@njit(forceinline=True, error_model="numpy")  # type: ignore[untyped-decorator]
def _absorb(A: Floats, b: Floats, scale: float, shape: Floats, q: int, measure: bool, M: Floats) -> float:
    """Solve ``(I + scale A shape) [C | r] = [A | b]`` by elimination with row pivots; leaves ``[C | r]`` in ``M[:, q:]``.

    Columns of ``shape`` from ``q`` on are zero. With ``measure`` it returns the logarithm of the determinant. Callers that do
    not need it write ``begin < 0``; for a constant, numba would compile the function once more.
    """
    d = len(b)
    for a in range(d):
        for c in range(q):
            product = A[a, c]
            if len(shape):
                product = 0.0
                for e in range(q):
                    product += A[a, e] * shape[e, c]
            M[a, c] = scale * product
        for c in range(d):
            M[a, q + c] = A[a, c]
        if a < q:
            M[a, a] += 1.0
        M[a, q + d] = b[a]
    volume = 0.0
    for p in range(q):
        best = p
        for a in range(p + 1, q):
            if abs(M[a, p]) > abs(M[best, p]):
                best = a
        if best != p:
            for c in range(p, q + d + 1):
                M[p, c], M[best, c] = M[best, c], M[p, c]
        if measure:
            volume += math.log(abs(M[p, p]))
        for a in range(p + 1, d):
            factor = M[a, p] / M[p, p]
            for c in range(p + 1, q + d + 1):
                M[a, c] -= factor * M[p, c]
    for p in range(q - 1, -1, -1):
        for c in range(q, q + d + 1):
            rest = M[p, c]
            for a in range(p + 1, q):
                rest -= M[p, a] * M[a, c]
            M[p, c] = rest / M[p, p]
    for a in range(d):
        for c in range(a):
            middle = 0.5 * (M[a, q + c] + M[c, q + a])
            M[a, q + c] = middle
            M[c, q + a] = middle
    return volume


@njit(nogil=True, cache=True, error_model="numpy")  # type: ignore[untyped-decorator]
def eliminate(
    begin: int, end: int, A: Floats, b: Floats, scale: Floats, shape: Floats, q: int, blocks: Ints, C: Floats, r: Floats,
    c: Floats, volume: Floats, each_C: Floats, each_r: Floats,
) -> None:  # fmt: skip
    """Sum the ``(C, r)`` of children by block; store those of each child in ``each_C``, ``each_r``, unless these are empty."""
    d = b.shape[1]
    # Named once: a choice between two arrays in the loop, or a second read of M, would cost a third of the time.
    M, shapes, step = np.empty((d, q + d + 1)), shape if len(shape) else np.empty((1, 0, 0)), 1 if len(shape) > 1 else 0
    for block in range(begin, end):
        total_C, total_r = C[block], r[block]
        for i in range(blocks[block], blocks[block + 1]):
            if np.isinf(scale[i]):
                continue
            S, own, kept = shapes[i * step], b[i], c[i]
            volume[i] = _absorb(A[i], own, scale[i], S, q, len(each_C) > 0, M)
            for a in range(d):
                for e in range(d):
                    value = M[a, q + e]
                    total_C[a, e] += value
                    if len(each_C):
                        each_C[i, a, e] = value
                value = M[a, q + d]
                total_r[a] += value
                if len(each_r):
                    each_r[i, a] = value
                moved = value
                if len(S):
                    moved = 0.0
                    for e in range(q):
                        moved += S[a, e] * M[e, q + d]
                kept -= 0.5 * scale[i] * own[a] * moved
            c[i] = kept


@njit(nogil=True, cache=True, error_model="numpy")  # type: ignore[untyped-decorator]
def descend(
    begin: int, end: int, A: Floats, b: Floats, scale: Floats, shape: Floats, q: int, parent: Ints, x: Floats, t: Floats,
    force: Floats,
) -> None:  # fmt: skip
    """Each child's solution ``t`` given its parent's ``x``, and the force on it."""
    m, d = b.shape
    M, shapes, step = np.empty((d, q + d + 1)), shape if len(shape) else np.empty((1, 0, 0)), 1 if len(shape) > 1 else 0
    for block in range(begin, end):
        for i in range(block * BLOCK, min((block + 1) * BLOCK, m)):
            j = parent[i]
            if np.isinf(scale[i]):
                continue
            S = shapes[i * step]
            _absorb(A[i], b[i], scale[i], S, q, begin < 0, M)
            for a in range(d):
                pull = M[a, q + d]
                for c in range(d):
                    pull -= M[a, q + c] * x[j, c]
                force[i, a] = pull
            for a in range(d):
                moved = force[i, a]
                if len(S):
                    moved = 0.0
                    for c in range(d):
                        moved += S[a, c] * force[i, c]
                t[i, a] = x[j, a] + scale[i] * moved


@njit(nogil=True, cache=True, error_model="numpy")  # type: ignore[untyped-decorator]
def sensitivity(
    begin: int, end: int, C: Floats, r: Floats, q: int, blocks: Ints, owner: Ints, x: Floats, P: Floats, bend: Floats,
    pull: Floats,
) -> None:  # fmt: skip
    """Sums by block of ``C - C P C`` and of ``f f'``, ``f = r - C x``, for the first ``q`` terms."""
    d = x.shape[1]
    for block in range(begin, end):
        force, half = np.empty(q), np.empty(d)
        j = owner[block]
        for i in range(blocks[block], blocks[block + 1]):
            for a in range(q):
                force[a] = r[i, a]
                for c in range(d):
                    force[a] -= C[i, a, c] * x[j, c]
            for a in range(q):
                half[:] = 0.0
                for e in range(d):
                    for c in range(d):
                        half[c] += C[i, a, e] * P[j, e, c]
                for c in range(a + 1):
                    through = 0.0
                    for e in range(d):
                        through += half[e] * C[i, c, e]
                    bend[block, a, c] += C[i, a, c] - through
                    pull[block, a, c] += force[a] * force[c]
        for a in range(q):
            for c in range(a):
                bend[block, c, a] = bend[block, a, c]
                pull[block, c, a] = pull[block, a, c]


@njit(nogil=True, cache=True, error_model="numpy")  # type: ignore[untyped-decorator]
def posterior(begin: int, end: int, A: Floats, scale: Floats, shape: Floats, parent: Ints, P: Floats, out: Floats) -> None:
    """``X + J P J'`` with ``X = (I + S A)^-1 S`` and ``J = I - X A``, for each child."""
    m, d = A.shape[:2]
    M, S, J, zero = np.empty((d, 2 * d + 1)), np.empty((d, d)), np.empty((d, d)), np.zeros(d)
    shapes, step = shape if len(shape) else np.eye(d).reshape(1, d, d), 1 if len(shape) > 1 else 0
    for block in range(begin, end):
        for i in range(block * BLOCK, min((block + 1) * BLOCK, m)):
            spread = shapes[i * step]
            for a in range(d):  # loops: an expression on whole arrays would take two seconds to compile
                for c in range(d):
                    S[a, c] = scale[i] * spread[a, c]
            # With the roles of A and S exchanged: (I + S A) X = S. Nothing cancels, even if S is singular or large.
            _absorb(S, zero, 1.0, A[i], d, begin < 0, M)
            for a in range(d):
                for c in range(d):
                    out[i, a, c] = M[a, d + c]
            for a in range(d):  # J = I - X A
                for c in range(d):
                    J[a, c] = 1.0 if a == c else 0.0
                    for e in range(d):
                        J[a, c] -= out[i, a, e] * A[i, e, c]
            for a in range(d):
                for c in range(d):
                    M[a, c] = 0.0
                    for e in range(d):
                        M[a, c] += J[a, e] * P[parent[i], e, c]
            for a in range(d):
                for c in range(d):
                    for e in range(d):
                        out[i, a, c] += M[a, e] * J[c, e]


# Clients of which only some terms vary: matrices A (n, q, d), the first q rows of each client's Hessian


@njit(nogil=True, cache=True, fastmath=FASTMATH, error_model="numpy")  # type: ignore[untyped-decorator]
def cross_products(begin: int, end: int, X: Floats, curves: Floats, ptr: Ints, which: Ints, A: Floats) -> None:
    """Set ``A[i, a]`` to the sum over the client's rows of ``curves[l] X[l, which[a]] X[l]``."""
    n, q, d = A.shape
    for block in range(begin, end):
        for i in range(block * BLOCK, min((block + 1) * BLOCK, n)):
            A[i] = 0.0
            for row in range(ptr[i], ptr[i + 1]):
                for a in range(q):
                    weight = curves[row] * X[row, which[a]]
                    for c in range(d):
                        A[i, a, c] += weight * X[row, c]


@njit(nogil=True, cache=True, fastmath=FASTMATH, error_model="numpy")  # type: ignore[untyped-decorator]
def products_by_cell(begin: int, end: int, left: Floats, right: Floats, weights: Floats, ptr: Ints, out: Floats) -> None:
    """Set ``out[j]`` to ``left' diag(weights) right`` of the rows ``ptr[j]:ptr[j + 1]``, if this is a symmetric matrix."""
    s = out.shape[1]
    for j in range(begin, end):
        out[j] = 0.0
        end = ptr[j + 1]
        for row in range(ptr[j], end, 4):  # four rows at a time, so that each entry is read and written less often
            one, two, three = min(row + 1, end - 1), min(row + 2, end - 1), min(row + 3, end - 1)
            w = weights[row]
            w1, w2, w3 = (weights[one] * (row + 1 < end), weights[two] * (row + 2 < end), weights[three] * (row + 3 < end))
            for a in range(s):
                x, x1, x2, x3 = w * left[row, a], w1 * left[one, a], w2 * left[two, a], w3 * left[three, a]
                for c in range(a + 1):
                    out[j, a, c] += x * right[row, c] + x1 * right[one, c] + x2 * right[two, c] + x3 * right[three, c]
        for a in range(s):
            for c in range(a):
                out[j, c, a] = out[j, a, c]


@njit(nogil=True, cache=True, error_model="numpy")  # type: ignore[untyped-decorator]
def absorb_leading(begin: int, end: int, A: Floats, b: Floats, S: Floats, C: Floats, r: Floats, volume: Floats) -> None:
    """Solve ``(I + A_vv S) [C | r] = [A | b_v]`` for each client, with ``S (1 or n, q, q)``, and set the log-determinants."""
    n, q, d = A.shape
    for block in range(begin, end):
        M = np.empty((q, q + d + 1))
        for i in range(block * BLOCK, min((block + 1) * BLOCK, n)):
            shape = S[i] if len(S) > 1 else S[0]
            for a in range(q):
                for c in range(q):
                    product = 1.0 if a == c else 0.0
                    for e in range(q):
                        product += A[i, a, e] * shape[e, c]
                    M[a, c] = product
                for c in range(d):
                    M[a, q + c] = A[i, a, c]
                M[a, q + d] = b[i, a]
            total = 0.0
            for p in range(q):
                best = p
                for a in range(p + 1, q):
                    if abs(M[a, p]) > abs(M[best, p]):
                        best = a
                if best != p:
                    for c in range(p, q + d + 1):
                        M[p, c], M[best, c] = M[best, c], M[p, c]
                total += math.log(abs(M[p, p]))
                for a in range(p + 1, q):
                    factor = M[a, p] / M[p, p]
                    for c in range(p + 1, q + d + 1):
                        M[a, c] -= factor * M[p, c]
            for p in range(q - 1, -1, -1):
                for a in range(p + 1, q):
                    for c in range(q, q + d + 1):
                        M[p, c] -= M[p, a] * M[a, c]
                for c in range(q, q + d + 1):
                    M[p, c] /= M[p, p]
            for a in range(q):
                for c in range(d):
                    C[i, a, c] = M[a, q + c]
                for c in range(a):
                    C[i, a, c] = C[i, c, a] = 0.5 * (M[a, q + c] + M[c, q + a])
                r[i, a] = M[a, q + d]
            volume[i] = total


@njit(nogil=True, cache=True, error_model="numpy")  # type: ignore[untyped-decorator]
def leading_variances(
    begin: int, end: int, X: Floats, ptr: Ints, A: Floats, S: Floats, parent: Ints, P: Floats, p: int, variance: Floats
) -> None:
    """Set ``variance[l]`` to ``x_l'P_i x_l`` with the posterior covariance ``P_i`` of its client (:func:`posterior`).

    Only the first ``p`` rows and columns of the parents' ``P`` are not zero.
    """
    n, q, _ = A.shape
    for block in range(begin, end):
        M, zero, along, rest = np.empty((q, 2 * q + 1)), np.zeros(q), np.empty(q), np.empty(p)
        for i in range(block * BLOCK, min((block + 1) * BLOCK, n)):
            _absorb(S[i] if len(S) > 1 else S[0], zero, 1.0, A[i, :, :q], q, begin < 0, M)
            for row in range(ptr[i], ptr[i + 1]):
                size = 0.0
                for a in range(q):
                    along[a] = 0.0
                    for c in range(q):
                        along[a] += M[a, q + c] * X[row, c]
                    size += along[a] * X[row, a]
                for c in range(p):
                    rest[c] = X[row, c]
                    for a in range(q):
                        rest[c] -= A[i, a, c] * along[a]
                for a in range(p):
                    for c in range(p):
                        size += rest[a] * P[parent[i], a, c] * rest[c]
                variance[row] = size


# Clients in the space of their rows: client i has the rows ptr[i]:ptr[i + 1], and its matrix starts at place[i] of a flat array


@njit(nogil=True, cache=True, fastmath=FASTMATH, error_model="numpy")  # type: ignore[untyped-decorator]
def gram_rows(begin: int, end: int, Y: Floats, ptr: Ints, place: Ints, out: Floats) -> None:
    """Set the lower triangle of ``out_i (m, m)`` to that of ``Y_i Y_i'``."""
    d = Y.shape[1]
    for i in range(begin, end):
        first, m = ptr[i], ptr[i + 1] - ptr[i]
        K = out[place[i] : place[i] + m * m].reshape(m, m)
        for a in range(m):
            for b in range(0, a + 1, 4):  # four products at a time, so that row a is read less often
                b1, b2, b3 = min(b + 1, a), min(b + 2, a), min(b + 3, a)
                s0 = s1 = s2 = s3 = 0.0
                for c in range(d):
                    y = Y[first + a, c]
                    s0 += y * Y[first + b, c]
                    s1 += y * Y[first + b1, c]
                    s2 += y * Y[first + b2, c]
                    s3 += y * Y[first + b3, c]
                K[a, b], K[a, b1], K[a, b2], K[a, b3] = s0, s1, s2, s3


@njit(nogil=True, cache=True, fastmath=FASTMATH, error_model="numpy")  # type: ignore[untyped-decorator]
def factor_rows(begin: int, end: int, ptr: Ints, scale: Floats, root: Floats, place: Ints, L: Floats, volume: Floats) -> None:
    """Replace Gram matrices by Cholesky factors of ``I + scale_i D Gram D``, with ``D = diag(root)``; ``root`` may be empty."""
    for i in range(begin, end):
        first, m = ptr[i], ptr[i + 1] - ptr[i]
        K = L[place[i] : place[i] + m * m].reshape(m, m)
        total = 0.0
        for a in range(m):
            weight = scale[i] * root[first + a] if len(root) else scale[i]
            for b in range(a):
                rest = (weight * root[first + b] if len(root) else weight) * K[a, b]
                for c in range(b):
                    rest -= K[a, c] * K[b, c]
                K[a, b] = rest / K[b, b]
            rest = 1.0 + (weight * root[first + a] if len(root) else weight) * K[a, a]
            for c in range(a):
                rest -= K[a, c] * K[a, c]
            K[a, a] = math.sqrt(rest)
            total += math.log(rest)
        volume[i] = total


@njit(nogil=True, cache=True, error_model="numpy")  # type: ignore[untyped-decorator]
def invert_factors(begin: int, end: int, L: Floats, place: Ints, ptr: Ints, root: Floats, starts: Ints, T: Floats) -> None:
    """Set ``T_i (m, m)``, which starts at ``starts[i]`` and is zero, to ``L_i^-1 diag(root)``; ``root`` may be empty."""
    for i in range(begin, end):
        first, m = ptr[i], ptr[i + 1] - ptr[i]
        K = L[place[i] : place[i] + m * m].reshape(m, m)
        inverse = T[starts[i] : starts[i] + m * m].reshape(m, m)
        for a in range(m):
            inverse[a, a] = root[first + a] if len(root) else 1.0
            for b in range(a):
                factor = K[a, b]
                for c in range(b + 1):
                    inverse[a, c] -= factor * inverse[b, c]
            for c in range(a + 1):
                inverse[a, c] /= K[a, a]


@njit(nogil=True, cache=True, error_model="numpy")  # type: ignore[untyped-decorator]
def solve_rows(begin: int, end: int, L: Floats, place: Ints, ptr: Ints, v: Floats, back: bool) -> None:
    """Replace ``v_i`` by ``L_i^-1 v_i``, and with ``back`` by ``K_i^-1 v_i``."""
    for i in range(begin, end):
        first, m = ptr[i], ptr[i + 1] - ptr[i]
        K = L[place[i] : place[i] + m * m].reshape(m, m)
        for a in range(m):
            rest = v[first + a]
            for b in range(a):
                rest -= K[a, b] * v[first + b]
            v[first + a] = rest / K[a, a]
        if back:
            for a in range(m - 1, -1, -1):
                rest = v[first + a]
                for b in range(a + 1, m):
                    rest -= K[b, a] * v[first + b]
                v[first + a] = rest / K[a, a]


@njit(nogil=True, cache=True, fastmath=FASTMATH, error_model="numpy")  # type: ignore[untyped-decorator]
def margins_of_rows(begin: int, end: int, X: Floats, ptr: Ints, t: Floats, out: Floats) -> None:
    """Set ``out[l] = x_l't_i`` for each row of client ``i``."""
    for i in range(begin, end):
        for row in range(ptr[i], ptr[i + 1]):
            total = 0.0
            for c in range(X.shape[1]):
                total += X[row, c] * t[i, c]
            out[row] = total


@njit(nogil=True, cache=True, fastmath=FASTMATH, error_model="numpy")  # type: ignore[untyped-decorator]
def sums_of_rows(begin: int, end: int, X: Floats, ptr: Ints, v: Floats, out: Floats) -> None:
    """Set ``out[i]`` to the sum of ``v[l] x_l`` over the rows of client ``i``."""
    for i in range(begin, end):
        out[i] = 0.0
        for row in range(ptr[i], ptr[i + 1]):
            for c in range(X.shape[1]):
                out[i, c] += v[row] * X[row, c]


@njit(nogil=True, cache=True, fastmath=FASTMATH, error_model="numpy")  # type: ignore[untyped-decorator]
def through_rows(begin: int, end: int, G: Floats, H: Floats, ptr: Ints, largest: int, out: Floats) -> None:
    """Set ``out_i = (H_i G_i') G_i``, where no client has more than ``largest`` rows."""
    d = G.shape[1]
    for i in range(begin, end):
        first, m = ptr[i], ptr[i + 1] - ptr[i]
        part = np.empty(largest)
        for a in range(m):
            for b in range(0, m, 4):
                b1, b2, b3 = min(b + 1, m - 1), min(b + 2, m - 1), min(b + 3, m - 1)
                s0 = s1 = s2 = s3 = 0.0
                for c in range(d):
                    h = H[first + a, c]
                    s0 += h * G[first + b, c]
                    s1 += h * G[first + b1, c]
                    s2 += h * G[first + b2, c]
                    s3 += h * G[first + b3, c]
                part[b], part[b1], part[b2], part[b3] = s0, s1, s2, s3
            for c in range(d):
                out[first + a, c] = 0.0
            for b in range(m):
                factor = part[b]
                for c in range(d):
                    out[first + a, c] += factor * G[first + b, c]
