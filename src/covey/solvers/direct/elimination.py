"""The algebra of one level of the tree: eliminate children into their parent, and come back down.

A child with loss ``1/2 t'At - b't``, tied to its parent's ``x`` by a covariance ``S`` (the paper: ``S = I / gamma``), is

    K = I + A S        C = K^-1 A        r = K^-1 b        t = x + S (r - C x)

where ``1/2 x'Cx - r'x + c``, ``c = -1/2 b'S r``, is what the parent sees of it and adds up. Nothing cancels when a penalty goes
to infinity (``S = 0``: the child is its parent) or to zero, and ``S`` may be any positive semi-definite matrix, so the
same functions serve scalar, diagonal and full covariances, shared coefficients (a zero on the diagonal) and deeper
trees. An infinite ``S`` (penalty 0) is a detached child: it passes nothing up and takes its own minimiser nearest
to its parent. ``log|K|`` is what integrating the child out adds to twice the negative log-likelihood.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numba import njit, prange

from covey._typing import Anything, Floats, Ints
from covey.records import Reply
from covey.tree.hierarchy import segment_sum

_BLOCK = 256  # clients summed by one thread before blocks are added in order: the same bits with any number of threads


@dataclass(frozen=True)
class Spread:
    """Covariances of children about their parents: child ``i`` has ``scale[i] * shape[i]``.

    Parameters
    ----------
    scale : (m,) in [0, inf]; ``1 / penalty`` in the paper's case
    shape : (m, d, d), or (1, d, d) for all children alike, or empty for the identity, as in the paper
    width : how many leading terms may vary; what follows them is shared, and elimination need not look at it
    """

    scale: Floats
    shape: Floats
    width: int

    @classmethod
    def of_penalty(cls, penalty: Floats, d: int) -> Spread:
        with np.errstate(divide="ignore"):
            return cls(1.0 / penalty, np.empty((0, d, d)), d)

    @classmethod
    def of_covariances(cls, shape: Floats, m: int, width: int | None = None) -> Spread:
        """For ``m`` children: one matrix for all of them ``(1, d, d)``, or one each."""
        return cls(np.ones(m), np.ascontiguousarray(shape), shape.shape[1] if width is None else width)

    @property
    def detached(self) -> Anything:
        """The children that nothing ties to their parent."""
        return np.isinf(self.scale)

    def moved(self, force: Floats) -> Floats:
        """How far each child is from its parent under a ``force (m, d)`` on it; nowhere, if it is detached."""
        scale = np.where(self.detached, 0.0, self.scale)[:, None]
        if len(self.shape) == 0:
            return np.asarray(scale * force)
        if len(self.shape) == 1:
            return np.asarray(scale * (force @ self.shape[0]))
        moved: Floats = scale * np.einsum("iab,ib->ia", self.shape, force)
        return moved


@dataclass(frozen=True)
class Quadratic(Reply):
    """``1/2 x'Cx - r'x + c`` for each unit, ``C (k, d, d)``, ``r (k, d)``, ``c (k,)``: what travels up.

    ``n (k,)`` counts the rows behind it, less the coefficients that were fitted to them without any tie to the parent.
    """

    C: Floats
    r: Floats
    c: Floats
    n: Floats


def eliminate(children: Quadratic, spread: Spread, ptr: Ints) -> Quadratic:
    """What each parent sees of its children ``ptr[j]:ptr[j + 1]``."""
    return _eliminated(children, spread, ptr, np.empty((0, 0, 0)), np.empty((0, 0)))[0]


class Marginal(NamedTuple):
    """What each parent sees of its children, the sum of their ``log|I + A S|``, and each child's own ``C`` and ``r``."""

    seen: Quadratic
    volume: Floats
    C: Floats
    r: Floats


def marginalise(children: Quadratic, spread: Spread, ptr: Ints) -> Marginal:
    """Eliminate, and keep what integrating the children out costs and what :func:`sensitivity` needs."""
    C, r = np.empty_like(children.C), np.empty_like(children.r)
    return Marginal(*_eliminated(children, spread, ptr, C, r), C, r)


def _eliminated(children: Quadratic, spread: Spread, ptr: Ints, each_C: Floats, each_r: Floats) -> tuple[Quadratic, Floats]:
    blocks, owner = blocks_of(ptr)
    d = children.r.shape[1]
    C, r, c, n = np.zeros((len(blocks) - 1, d, d)), np.zeros((len(blocks) - 1, d)), children.c.copy(), children.n
    volume = np.zeros(len(c))
    _eliminate(
        children.C, children.r, spread.scale, spread.shape, spread.width, blocks, C, r, c, volume, each_C, each_r
    )  # fmt: skip
    detached = np.flatnonzero(spread.detached)
    if len(detached):
        A, b = children.C[detached], children.r[detached]
        c[detached] -= 0.5 * np.einsum("ia,ia->i", b, solve_symmetric(A, b))
        n = n.copy()
        n[detached] -= np.linalg.matrix_rank(A, hermitian=True)
    by_parent = np.searchsorted(owner, np.arange(len(ptr)))
    seen = Quadratic(segment_sum(C, by_parent), segment_sum(r, by_parent), segment_sum(c, ptr), segment_sum(n, ptr))
    return seen, segment_sum(volume, ptr)


def descend(A: Floats, b: Floats, spread: Spread, parent: Ints, x: Floats) -> tuple[Floats, Floats]:
    """Each child's solution given its parent's ``x[parent]``, and the force ``r - C x`` that its parent exerts on it."""
    t, force = np.empty_like(b), np.empty_like(b)
    _descend(A, b, spread.scale, spread.shape, spread.width, parent, x, t, force)
    detached = np.flatnonzero(spread.detached)
    if len(detached):
        at, A, b = x[parent[detached]], A[detached], b[detached]
        t[detached] = at + solve_symmetric(A, b - np.einsum("iab,ib->ia", A, at))
        force[detached] = 0.0
    return t, force


def sensitivity(own: Marginal, width: int, ptr: Ints, x: Floats, P: Floats) -> tuple[Floats, Floats]:
    """For each parent, sums over its children of ``C - C P C`` and of ``f f'``, where ``f = r - C x`` is the force on a child.

    With ``x (k, d)`` the parents' posterior means and ``P (k, d, d)`` their covariances this is how the marginal likelihood
    answers to a change of the children's covariance. Of the first ``width`` terms only, those that vary.
    """
    blocks, owner = blocks_of(ptr)
    bend, pull = np.zeros((len(owner), width, width)), np.zeros((len(owner), width, width))
    _sensitivity(own.C, own.r, width, blocks, owner, x, P, bend, pull)
    by_parent = np.searchsorted(owner, np.arange(len(ptr)))
    return segment_sum(bend, by_parent), segment_sum(pull, by_parent)


def posterior(A: Floats, spread: Spread, parent: Ints, P: Floats) -> Floats:
    """The covariance of each child given its parent's ``P[parent]``: ``(I + S A)^-1 S + J P J'``, ``J = (I + S A)^-1``."""
    out = np.empty_like(A)
    _posterior(A, spread.scale, spread.shape, parent, P, out)
    return out


def solve_symmetric(A: Floats, b: Floats) -> Floats:
    """``A^+ b`` for positive semi-definite ``A (m, d, d)``: the shortest solution where there are many.

    The rank is judged after scaling to a unit diagonal, so that columns in different units do not look dependent.
    """
    size = np.sqrt(np.maximum(np.einsum("...aa->...a", A), 0.0))
    unit = np.where(size > 0, size, 1.0)
    scaled = A / (unit[..., :, None] * unit[..., None, :])
    d = A.shape[-1]
    values, vectors = np.linalg.eigh(scaled)
    cut = 16 * d * np.finfo(float).eps * np.maximum(values[..., -1:], 0.0)
    inverse = np.where(values > cut, 1.0 / np.where(values > cut, values, 1.0), 0.0)
    x: Floats = np.einsum("...ab,...b,...cb,...c->...a", vectors, inverse, vectors, b / unit) / unit
    deficient = (values[..., 0] <= cut[..., 0]).ravel()
    if deficient.any():
        flat_A, flat_b, flat_x = A.reshape(-1, d, d), b.reshape(-1, d), x.reshape(-1, d)
        pseudo = np.linalg.pinv(flat_A[deficient], rcond=16 * d * np.finfo(float).eps, hermitian=True)
        flat_x[deficient] = np.einsum("iab,ib->ia", pseudo, flat_b[deficient])
        x = flat_x.reshape(b.shape)
    return x


def blocks_of(ptr: Ints) -> tuple[Ints, Ints]:
    """Cut each parent's children into blocks of at most ``_BLOCK``; the cuts, and the parent of each block."""
    counts = -(-np.diff(ptr) // _BLOCK)
    owner = np.repeat(np.arange(len(counts)), counts)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    starts = ptr[:-1][owner] + _BLOCK * (np.arange(len(owner)) - first)
    return np.append(starts, ptr[-1]), owner


@njit(inline="always", error_model="numpy")  # type: ignore[untyped-decorator]
def _shape_of(shape: Floats, i: int, identity: Floats) -> Floats:
    if len(shape) == 0:
        return identity
    own: Floats = shape[i] if len(shape) > 1 else shape[0]
    return own


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _absorb(A: Floats, b: Floats, scale: float, shape: Floats, q: int, measure: bool, M: Floats) -> float:
    """Solve ``(I + scale A shape) [C | r] = [A | b]`` by elimination with row pivots; leaves ``[C | r]`` in ``M[:, d:]``.

    Columns of ``shape`` from ``q`` on are zero. Returns the logarithm of the determinant, if it is to be measured.
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
            M[a, d + c] = A[a, c]
        if a < q:
            M[a, a] += 1.0
        M[a, 2 * d] = b[a]
    volume = 0.0
    for p in range(q):
        best = p
        for a in range(p + 1, q):
            if abs(M[a, p]) > abs(M[best, p]):
                best = a
        if best != p:
            for c in range(p, q):
                M[p, c], M[best, c] = M[best, c], M[p, c]
            for c in range(d, 2 * d + 1):
                M[p, c], M[best, c] = M[best, c], M[p, c]
        if measure:
            volume += math.log(abs(M[p, p]))
        for a in range(p + 1, d):
            factor = M[a, p] / M[p, p]
            for c in range(p + 1, q):
                M[a, c] -= factor * M[p, c]
            for c in range(d, 2 * d + 1):
                M[a, c] -= factor * M[p, c]
    for p in range(q - 1, -1, -1):
        for c in range(d, 2 * d + 1):
            rest = M[p, c]
            for a in range(p + 1, q):
                rest -= M[p, a] * M[a, c]
            M[p, c] = rest / M[p, p]
    for a in range(d):
        for c in range(a):
            middle = 0.5 * (M[a, d + c] + M[c, d + a])
            M[a, d + c] = middle
            M[c, d + a] = middle
    return volume


@njit(parallel=True, cache=True, error_model="numpy")  # type: ignore[untyped-decorator]
def _eliminate(
    A: Floats, b: Floats, scale: Floats, shape: Floats, q: int, blocks: Ints, C: Floats, r: Floats, c: Floats, volume: Floats,
    each_C: Floats, each_r: Floats,
) -> None:  # fmt: skip
    d = b.shape[1]
    for block in prange(len(blocks) - 1):
        M, identity = np.empty((d, 2 * d + 1)), np.empty((0, 0))
        for i in range(blocks[block], blocks[block + 1]):
            if np.isinf(scale[i]):
                continue
            S = _shape_of(shape, i, identity)
            volume[i] = _absorb(A[i], b[i], scale[i], S, q, len(each_C) > 0, M)
            for a in range(d):
                for e in range(d):
                    C[block, a, e] += M[a, d + e]
                    if len(each_C):
                        each_C[i, a, e] = M[a, d + e]
                r[block, a] += M[a, 2 * d]
                if len(each_r):
                    each_r[i, a] = M[a, 2 * d]
                moved = M[a, 2 * d]
                if len(S):
                    moved = 0.0
                    for e in range(q):
                        moved += S[a, e] * M[e, 2 * d]
                c[i] -= 0.5 * scale[i] * b[i, a] * moved


@njit(parallel=True, cache=True, error_model="numpy")  # type: ignore[untyped-decorator]
def _descend(
    A: Floats, b: Floats, scale: Floats, shape: Floats, q: int, parent: Ints, x: Floats, t: Floats, force: Floats
) -> None:
    m, d = b.shape
    for block in prange((m + _BLOCK - 1) // _BLOCK):
        M, identity = np.empty((d, 2 * d + 1)), np.empty((0, 0))
        for i in range(block * _BLOCK, min((block + 1) * _BLOCK, m)):
            j = parent[i]
            if np.isinf(scale[i]):
                continue
            S = _shape_of(shape, i, identity)
            _absorb(A[i], b[i], scale[i], S, q, False, M)
            for a in range(d):
                pull = M[a, 2 * d]
                for c in range(d):
                    pull -= M[a, d + c] * x[j, c]
                force[i, a] = pull
            for a in range(d):
                moved = force[i, a]
                if len(S):
                    moved = 0.0
                    for c in range(d):
                        moved += S[a, c] * force[i, c]
                t[i, a] = x[j, a] + scale[i] * moved


@njit(parallel=True, cache=True, error_model="numpy")  # type: ignore[untyped-decorator]
def _sensitivity(
    C: Floats, r: Floats, q: int, blocks: Ints, owner: Ints, x: Floats, P: Floats, bend: Floats, pull: Floats
) -> None:
    d = r.shape[1]
    for block in prange(len(blocks) - 1):
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


@njit(parallel=True, cache=True, error_model="numpy")  # type: ignore[untyped-decorator]
def _posterior(A: Floats, scale: Floats, shape: Floats, parent: Ints, P: Floats, out: Floats) -> None:
    m, d = A.shape[:2]
    for block in prange((m + _BLOCK - 1) // _BLOCK):
        M, S, J, zero, identity = np.empty((d, 2 * d + 1)), np.empty((d, d)), np.empty((d, d)), np.zeros(d), np.eye(d)
        for i in range(block * _BLOCK, min((block + 1) * _BLOCK, m)):
            S[:, :] = scale[i] * _shape_of(shape, i, identity)
            # The roles of A and S exchanged: (I + S A) X = S, which nothing cancels in, be S singular or large.
            _absorb(S, zero, 1.0, A[i], d, False, M)
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
