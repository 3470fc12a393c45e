"""The algebra of one level of the tree: eliminate children into their parent, and go back down.

A child has the loss ``1/2 t'At - b't`` and a covariance ``S`` about its parent's ``x``; in the paper (arXiv:2204.13619)
``S = I / gamma``. Then

    K = I + A S        C = K^-1 A        r = K^-1 b        t = x + S (r - C x)

The parent sees ``1/2 x'Cx - r'x + c`` with ``c = -1/2 b'S r``, and adds these up over its children. Nothing cancels when a
penalty goes to infinity (``S = 0``, the child equals its parent) or to zero. ``S`` may be any positive semi-definite matrix, so
the same functions serve scalar, diagonal and full covariances, shared coefficients (a zero on the diagonal) and deeper trees.
A child with an infinite ``S`` (penalty 0) is detached: it passes nothing up, and takes the one of its own minimisers that is
nearest to its parent. ``log|K|`` is what integrating the child out adds to twice the negative log-likelihood.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, Protocol

import numpy as np

from covey._typing import Anything, Floats, Ints
from covey.losses import Loss
from covey.nodes.network import Blocks
from covey.records import Axes, Reply
from covey.solvers.direct import factor_kernels, kernels
from covey.tables.rows import GroupedData
from covey.threads import BLOCK, block_count, share
from covey.tree.hierarchy import segment_sum

MANY = 16  # varying terms; from more on, matrices are solved by LAPACK, and clients in the space of their rows
_TOGETHER = 1 << 16  # numbers in the matrices that LAPACK solves in one call
_REGULAR = 1e-4  # the product of the pivots of a matrix with a unit diagonal from which it has full rank for certain


@dataclass(frozen=True)
class Spread:
    """Covariances of children about their parents: child ``i`` has ``scale[i] * shape[i]``.

    Parameters
    ----------
    scale : (m,) in [0, inf]; ``1 / penalty`` in the paper's case
    shape : (m, d, d), or (1, d, d) for all children alike, or empty for the identity, as in the paper
    width : how many of the first terms may vary; the others are shared, and elimination skips them
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
        """For ``m`` children: one matrix for all of them ``(1, d, d)``, or one for each ``(m, d, d)``."""
        return cls(np.ones(m), np.ascontiguousarray(shape), shape.shape[1] if width is None else width)

    @property
    def detached(self) -> Anything:
        """Which children have no tie to their parent, ``(m,)``."""
        return np.isinf(self.scale)

    def moved(self, force: Floats) -> Floats:
        """The distance of each child from its parent under a ``force (m, d)`` on it; zero if it is detached."""
        scale = np.where(self.detached, 0.0, self.scale)[:, None]
        if len(self.shape) == 0:
            return np.asarray(scale * force)
        if len(self.shape) == 1:
            if self.width == force.shape[1]:
                return np.asarray(scale * (force @ self.shape[0]))
            v, along = slice(0, self.width), np.zeros_like(force)
            along[:, v] = scale * (force[:, v] @ self.shape[0, v, v])
            return along
        moved: Floats = scale * np.einsum("iab,ib->ia", self.shape, force)
        return moved


@dataclass(frozen=True)
class Quadratic(Reply):
    """``1/2 x'Cx - r'x + c`` for each unit: ``C (k, d, d)``, ``r (k, d)``, ``c (k,)``.

    ``n (k,)`` is the number of rows less the number of coefficients that were fitted to them without a tie to the parent.
    """

    C: Annotated[Floats, Axes("points k d d", "psd")]
    r: Annotated[Floats, Axes("points k d")]
    c: Annotated[Floats, Axes("points k")]
    n: Annotated[Floats, Axes("points k")]


def expanded(data: GroupedData, loss: Loss, theta: Floats) -> Quadratic:
    """The loss of each client to second order about ``theta (n, d)``."""
    here = loss.expand(data, theta)
    return Quadratic(here.hessian, -here.gradient, here.value, data.rows_that_count)


def eliminate(children: Quadratic, spread: Spread, ptr: Ints) -> Quadratic:
    """What each parent sees of its children ``ptr[j]:ptr[j + 1]``."""
    return _eliminated(children, spread, ptr, np.empty((0, 0, 0)), np.empty((0, 0)))[0]


class Marginal(NamedTuple):
    """What each parent sees of its children, the sum of their ``log|I + A S|``, and the ``C`` and ``r`` of each child."""

    seen: Quadratic
    log_determinants: Floats
    C: Floats
    r: Floats

    def sensitivity(self, width: int, ptr: Ints, x: Floats, P: Floats) -> tuple[Floats, Floats]:
        """As the function :func:`sensitivity`."""
        return sensitivity(self, width, ptr, x, P)


class ClientMarginal(Protocol):
    """What :class:`Marginal` and :class:`.RowMarginal` have in common."""

    @property
    def seen(self) -> Quadratic: ...
    @property
    def log_determinants(self) -> Floats: ...
    def sensitivity(self, width: int, ptr: Ints, x: Floats, P: Floats) -> tuple[Floats, Floats]: ...


def marginalise(children: Quadratic, spread: Spread, ptr: Ints) -> Marginal:
    """Eliminate, and keep the log-determinants and what :func:`sensitivity` needs."""
    C, r = np.empty_like(children.C), np.empty_like(children.r)
    return Marginal(*_eliminated(children, spread, ptr, C, r), C, r)


def _eliminated(children: Quadratic, spread: Spread, ptr: Ints, each_C: Floats, each_r: Floats) -> tuple[Quadratic, Floats]:
    blocks, d = Blocks.of(ptr), children.r.shape[1]
    C, r, c, n = np.zeros((blocks.count, d, d)), np.zeros((blocks.count, d)), children.c.copy(), children.n
    log_determinants = np.zeros(len(c))
    arrays = C, r, c, log_determinants, each_C, each_r
    if spread.width > MANY:
        _eliminate_wide(children, spread, blocks, *arrays)
    else:
        given = children.C, children.r, spread.scale, spread.shape, spread.width
        share(kernels.eliminate, blocks.count, *given, blocks.ptr, *arrays)
    detached = np.flatnonzero(spread.detached)
    if len(detached):
        A, b = children.C[detached], children.r[detached]
        c[detached] -= 0.5 * np.einsum("ia,ia->i", b, solve_symmetric(A, b))
        n = n.copy()
        n[detached] -= np.linalg.matrix_rank(A, hermitian=True)
    by_parent = blocks.of_parent
    seen = Quadratic(segment_sum(C, by_parent), segment_sum(r, by_parent), segment_sum(c, ptr), segment_sum(n, ptr))
    return seen, segment_sum(log_determinants, ptr)


def _eliminate_wide(
    children: Quadratic, spread: Spread, blocks: Blocks, C: Floats, r: Floats, c: Floats, volume: Floats, each_C: Floats,
    each_r: Floats,
) -> None:  # fmt: skip
    """As :func:`kernels.eliminate`, by LAPACK: for matrices that are large enough."""
    d, owner = children.r.shape[1], np.repeat(np.arange(blocks.count), np.diff(blocks.ptr))
    for i in np.flatnonzero(~spread.detached).tolist():
        A, b, K = children.C[i], children.r[i], _pivots(children.C[i], spread, i)
        solved = np.linalg.solve(K, np.concatenate([A, b[:, None]], axis=1))
        one_C, one_r = 0.5 * (solved[:, :d] + solved[:, :d].T), solved[:, d]
        C[owner[i]] += one_C
        r[owner[i]] += one_r
        c[i] -= 0.5 * float(b @ _moved(spread, i, one_r))
        if len(each_C):
            each_C[i], each_r[i], volume[i] = one_C, one_r, np.linalg.slogdet(K)[1]


def _pivots(A: Floats, spread: Spread, at: Any) -> Floats:
    """``I + A S`` of child ``at``, or of several children."""
    S = spread.shape[at if len(spread.shape) > 1 else 0] if len(spread.shape) else None
    K: Floats = spread.scale[at, None, None] * (A if S is None else A @ S)
    diagonal = np.arange(A.shape[-1])
    K[..., diagonal, diagonal] += 1.0
    return K.reshape(A.shape)


def _moved(spread: Spread, i: int, force: Floats) -> Floats:
    """``S`` of child ``i`` times a force on it."""
    S = spread.shape[i if len(spread.shape) > 1 else 0] if len(spread.shape) else None
    return np.asarray(spread.scale[i] * (force if S is None else S @ force))


def descend(A: Floats, b: Floats, spread: Spread, parent: Ints, x: Floats) -> tuple[Floats, Floats]:
    """Each child's solution given its parent's ``x[parent]``, and the force ``r - C x`` that its parent exerts on it."""
    t, force = np.empty_like(b), np.empty_like(b)
    if spread.width > MANY:
        held, step = np.flatnonzero(~spread.detached), max(1, _TOGETHER // b.shape[1] ** 2)
        for some in np.split(held, range(step, len(held), step)):
            # r - C x = K^-1 (b - A x): one right-hand side
            right = b[some, :, None] - A[some] @ x[parent[some], :, None]
            force[some] = np.linalg.solve(_pivots(A[some], spread, some), right)[:, :, 0]
        t = x[parent] + spread.moved(force)
    else:
        share(kernels.descend, block_count(len(b)), A, b, spread.scale, spread.shape, spread.width, parent, x, t, force)
    detached = np.flatnonzero(spread.detached)
    if len(detached):
        at, A, b = x[parent[detached]], A[detached], b[detached]
        t[detached] = at + solve_symmetric(A, b - np.einsum("iab,ib->ia", A, at))
        force[detached] = 0.0
    return t, force


def sensitivity(children: Marginal, width: int, ptr: Ints, x: Floats, P: Floats) -> tuple[Floats, Floats]:
    """For each parent, sums over its children of ``C - C P C`` and of ``f f'``, where ``f = r - C x`` is the force on a child.

    With ``x (k, d)`` the parents' posterior means and ``P (k, d, d)`` their covariances, this is the derivative of the marginal
    likelihood by the children's covariance. Only the first ``width`` terms count, those that vary.
    """
    blocks = Blocks.of(ptr)
    bend, pull = np.zeros((blocks.count, width, width)), np.zeros((blocks.count, width, width))
    share(kernels.sensitivity, blocks.count, children.C, children.r, width, blocks.ptr, blocks.owner, x, P, bend, pull)
    return segment_sum(bend, blocks.of_parent), segment_sum(pull, blocks.of_parent)


def posterior(A: Floats, spread: Spread, parent: Ints, P: Floats) -> Floats:
    """The covariance of each child given its parent's ``P[parent]``: ``(I + S A)^-1 S + J P J'``, ``J = (I + S A)^-1``."""
    out = np.empty_like(A)
    share(kernels.posterior, block_count(len(A)), A, spread.scale, spread.shape, parent, P, out)
    return out


def leading_width(S: Floats) -> int:
    """The number of leading rows and columns outside which ``S (..., d, d)`` is zero."""
    some = np.flatnonzero(S.reshape(-1, S.shape[-1]).any(axis=0))
    return int(some[-1]) + 1 if len(some) else 0


def absorb_leading(C: Floats, r: Floats, S: Floats, width: int) -> tuple[Floats, Floats, Floats]:
    """``D = K^-1 C``, ``q = K^-1 r`` and ``log|K|`` of each unit, with ``K = I + C S`` for ``C (k, d, d)`` and ``r (k, d)``.

    ``S (d, d)`` is zero outside its first ``width`` rows and columns, so only these are solved for.
    """
    d, v = r.shape[1], slice(0, width)
    K = np.eye(width) + C[:, v, v] @ S[v, v]
    solved = np.linalg.solve(K, np.concatenate([C[:, v], r[:, v, None]], axis=2))
    Dv, qv = solved[:, :, :d], solved[:, :, d]
    if width < d:
        across = C[:, width:, v] @ S[v, v]
        q = np.concatenate([qv, r[:, width:] - (across @ qv[:, :, None])[:, :, 0]], axis=1)
        D = np.empty_like(C)
        D[:, v], D[:, width:, v] = Dv, Dv[:, :, width:].swapaxes(1, 2)
        D[:, width:, width:] = C[:, width:, width:] - across @ Dv[:, :, width:]
    else:
        D, q = Dv, qv
    return 0.5 * (D + D.swapaxes(1, 2)), q, np.linalg.slogdet(K)[1]


def cluster_covariances(C: Floats, S: Floats, P0: Floats, width: int | None = None) -> Floats:
    """The posterior covariance of each ``w_j``, given that of ``wbar``: ``J S + J P0 J'``, ``J = (I + S C_j)^-1``.

    ``S (d, d)`` is zero outside its first ``width`` rows and columns. ``J`` is the identity in the other rows.
    """
    d = len(S)
    v, q = slice(0, width), d if width is None else width
    inverse = np.linalg.solve(
        np.eye(q) + S[v, v] @ C[:, v, v], np.broadcast_to(np.concatenate([S[v, v], np.eye(q)], axis=1), (len(C), q, 2 * q))
    )
    JS, J = inverse[:, :, :q], inverse[:, :, q:]
    if q < d:
        J = np.concatenate([J, -(JS @ C[:, v, q:])], axis=2)
    P = np.repeat(P0[None], len(C), axis=0)
    P[:, v] = J @ P0
    P[:, v, v] = P[:, v] @ J.swapaxes(1, 2) + 0.5 * (JS + JS.swapaxes(1, 2))
    P[:, q:, v] = P[:, v, q:].swapaxes(1, 2)
    return P


def solve_symmetric(A: Floats, b: Floats) -> Floats:
    """``A^+ b`` for positive semi-definite ``A (..., d, d)`` and ``b (..., d)``: the shortest solution if there are many."""
    return solve_columns(A, b[..., None])[0][..., 0]


def solve_columns(A: Floats, B: Floats) -> tuple[Floats, Ints]:
    """``A^+ B`` for positive semi-definite ``A (..., d, d)`` and ``B (..., d, r)``, and the rank of each ``A``.

    The rank is determined after scaling to a unit diagonal, so that columns in different units do not look dependent.
    """
    size = np.sqrt(np.maximum(np.einsum("...aa->...a", A), 0.0))
    unit = np.where(size > 0, size, 1.0)
    scaled = A / (unit[..., :, None] * unit[..., None, :])
    X, rank = _solve_scaled(scaled.reshape(-1, *A.shape[-2:]), (B / unit[..., None]).reshape(-1, *B.shape[-2:]))
    X = X.reshape(B.shape) / unit[..., None]
    deficient = rank < A.shape[-1]
    if deficient.any():
        flat_A, flat_B, flat_X = A.reshape(-1, *A.shape[-2:]), B.reshape(-1, *B.shape[-2:]), X.reshape(-1, *B.shape[-2:])
        pseudo = np.linalg.pinv(flat_A[deficient], rcond=_cut(A.shape[-1]), hermitian=True)
        flat_X[deficient] = pseudo @ flat_B[deficient]
        X = flat_X.reshape(B.shape)
    return X, rank.reshape(A.shape[:-2])


def _cut(d: int) -> float:
    """Eigenvalues of ``(d, d)`` matrices below this share of the largest are zero but for rounding."""
    return 16 * d * float(np.finfo(float).eps)


def _solve_scaled(A: Floats, B: Floats) -> tuple[Floats, Ints]:
    """``A^-1 B`` and the rank of each ``A (m, d, d)`` with a unit diagonal; ``X`` is right where the rank is ``d``."""
    X, d = np.empty_like(B), A.shape[-1]
    rank, regular = np.full(len(A), d), np.zeros(len(A), dtype=bool)
    if d <= MANY:
        share(factor_kernels.solve_regular, block_count(len(A)), A, B, _REGULAR, X, regular)
    others = np.flatnonzero(~regular)

    def decompose(begin: int, end: int) -> None:
        rest = others[begin * BLOCK : end * BLOCK]
        values, vectors = np.linalg.eigh(A[rest])
        above = values > _cut(d) * np.maximum(values[:, -1:], 0.0)
        along = np.where(above, 1.0 / np.where(above, values, 1.0), 0.0)[:, :, None] * (vectors.swapaxes(1, 2) @ B[rest])
        X[rest], rank[rest] = vectors @ along, above.sum(axis=1)

    if len(others):
        share(decompose, block_count(len(others)))
    return X, rank


def invert(A: Floats, free: Anything | None = None) -> tuple[Floats, float]:
    """The inverse and the log-determinant of a positive definite matrix, accurate for columns of any units.

    With ``free (d,)``, of its rows and columns where ``free`` is true; the others of the inverse are zero.
    """
    if free is not None and not free.all():
        inverse, within = np.zeros_like(A), np.ix_(free, free)
        inverse[within], log_determinant = invert(A[within])
        return inverse, log_determinant
    size = np.sqrt(np.diag(A))
    values, vectors = np.linalg.eigh(A / (size[:, None] * size))
    half = vectors / np.sqrt(np.maximum(values, np.finfo(float).tiny)) / size[:, None]
    return half @ half.T, float(np.log(np.maximum(values, np.finfo(float).tiny)).sum() + 2 * np.log(size).sum())
