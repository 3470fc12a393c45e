"""Clients in the space of their rows, for clients with many varying terms.

A client's rows ``X (m, d)`` with curvatures ``h`` are ``R = diag(sqrt(h)) X``, so that its Hessian is ``A = R'R``. With the
covariance ``S`` of a client about its parent's ``x``, everything is solved with one matrix as large as its rows:

    K = I + R S R' = L L'        G = L^-1 R       C = (I + A S)^-1 A = R'K^-1 R = G'G       log|I + A S| = log|K|

    b = R'z (a linear model):    r = G'L^-1 z     c - 1/2 b'S r = 1/2 |L^-1 z|^2            t = x + S R'K^-1 (z - R x)
    any b (a step of Newton's):  r = b - R'K^-1 R S b                                       t = x + S (b - R'K^-1 R (S b + x))

Nothing cancels in a linear model as ``S`` goes from zero to infinity. A client with more rows than terms, or with a ridge, is
first reduced to ``d`` rows by a QR decomposition, which leaves ``R'R`` and ``R'z`` as they are. ``G`` is computed for some
clients at a time, so that temporary memory is bounded, and the sums of ``C`` by cell are products of tall matrices. Where
clients have about as many rows as terms, a linear model keeps each ``C`` (:mod:`.lanes`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np

from covey._typing import Floats, Ints
from covey.losses import Loss
from covey.solvers.direct import kernels, lanes
from covey.solvers.direct.elimination import ClientMarginal, Quadratic, Spread
from covey.solvers.direct.hessians import Hessians
from covey.solvers.direct.margins import Grams
from covey.tables.rows import GroupedData
from covey.threads import block_count, share
from covey.tree.hierarchy import segment_sum

_PIECE = 1 << 19  # numbers of the rows that are solved together, which a cache can hold


@dataclass(frozen=True)
class Factors:
    """The Cholesky factors ``L`` of the clients' matrices ``K``: client ``i``'s starts at ``place[i]``."""

    place: Ints
    L: Floats
    log_determinants: Floats


@dataclass(frozen=True)
class RowMarginal:
    """As :class:`.Marginal`, for clients in row space: what is kept of each client are its factors."""

    seen: Quadratic
    log_determinants: Floats
    clients: RowSpace
    spread: Spread
    b: Floats | None

    def sensitivity(self, width: int, ptr: Ints, x: Floats, P: Floats) -> tuple[Floats, Floats]:
        """As :func:`.elimination.sensitivity`."""
        clients, parent = self.clients, np.repeat(np.arange(len(ptr) - 1), np.diff(ptr))
        bend, pull = np.zeros((2, len(x), width, width))
        largest = int(clients.counts.max(initial=0))
        for piece in clients.pieces():
            rows, G = clients.forward(piece, self.spread)
            H, U = np.empty_like(G), np.empty_like(G)
            cells = list(_cells(piece, ptr, clients.ptr))
            for j, part in cells:
                H[part] = G[part] @ P[j]
            share(kernels.through_rows, piece.stop - piece.start, G, H, rows, largest, U)
            for j, part in cells:
                bend[j] += G[part, :width].T @ (G[part, :width] - U[part, :width])
        if self.b is not None or len(clients.z):
            force = clients.descend(self.b, self.spread, parent, x)[1][:, :width]
            for j in range(len(x)):
                mine = force[ptr[j] : ptr[j + 1]]
                pull[j] = mine.T @ mine
        return 0.5 * (bend + bend.swapaxes(1, 2)), pull


@dataclass(frozen=True)
class RowSpace(Hessians):
    """The rows ``diag(root) R`` of clients, ``R (rows, d)``; client ``i`` has the rows ``ptr[i]:ptr[i + 1]``.

    ``root`` and ``z`` may be empty: ones, and no responses. ``left (n,)`` is half the sum of squares that no coefficients can
    remove. The first ``q`` terms vary. ``grams`` are the products ``R_i R_i'``, if somebody has them already.
    """

    R: Floats
    root: Floats
    ptr: Ints
    z: Floats
    left: Floats
    q: int
    ridge: float
    grams: Grams | None = None
    kept: dict[str, tuple[Spread, Factors]] = field(default_factory=dict)

    @classmethod
    def of_rows(
        cls, data: GroupedData, curves: Floats, ridge: float, q: int, residual: Floats | None = None, grams: Grams | None = None
    ) -> RowSpace:
        """From rows with terms in the working order; ``residual (rows,)`` are the responses of a linear model."""
        root = np.empty(0) if (curves == 1.0).all() else np.sqrt(curves)
        z = np.empty(0) if residual is None else residual if not len(root) else root * residual
        n, d = data.n_clients, data.n_terms
        counts = data.rows_per_client + (d if ridge else 0)
        if (counts <= d).all():
            return cls(data.X, root, data.client_ptr, z, np.zeros(n), q, ridge, grams)
        ptr = np.concatenate([[0], np.cumsum(np.minimum(counts, d))])
        R, short, left = np.empty((ptr[-1], d)), np.zeros(ptr[-1] if len(z) else 0), np.zeros(n)
        for i in range(n):
            old, new = slice(data.client_ptr[i], data.client_ptr[i + 1]), slice(ptr[i], ptr[i + 1])
            both = np.concatenate([data.X[old], z[old, None] if len(z) else np.zeros((old.stop - old.start, 1))], axis=1)
            both[:, :d] *= root[old, None] if len(root) else 1.0
            if counts[i] > d:
                if ridge:
                    both = np.concatenate([both, np.sqrt(ridge) * np.eye(d, d + 1)])
                both = np.asarray(np.linalg.qr(both, mode="r"))
                left[i] = 0.5 * both[d, d] ** 2
            R[new] = both[:d, :d]
            if len(z):
                short[new] = both[:d, d]
        return cls(R, np.empty(0), ptr, short, left, q, ridge)

    @property
    def n(self) -> int:
        return len(self.ptr) - 1

    @cached_property
    def counts(self) -> Ints:
        """The number of rows of each client."""
        return np.diff(self.ptr)

    def pieces(self) -> Iterator[slice]:
        """Clients, some at a time: so many that their rows fit into a bounded part of memory."""
        most, start = max(1, _PIECE // max(self.R.shape[1], 1)), 0
        while start < self.n:
            stop = int(np.searchsorted(self.ptr, self.ptr[start] + most, side="right")) - 1
            stop = min(max(stop, start + 1), self.n)
            yield slice(start, stop)
            start = stop

    def rows_of(self, piece: slice) -> tuple[Floats, Ints]:
        """The rows of some clients, with their roots, and where each client's rows begin among them."""
        part = slice(self.ptr[piece.start], self.ptr[piece.stop])
        R = self.R[part] if not len(self.root) else self.root[part, None] * self.R[part]
        return R, self.ptr[piece.start : piece.stop + 1] - part.start

    def forward(self, piece: slice, spread: Spread) -> tuple[Ints, Floats]:
        """Where each client's rows begin, and ``G = L^-1 R``; zero for clients without a tie to their parent."""
        rows = slice(self.ptr[piece.start], self.ptr[piece.stop])
        ptr, counts = self.ptr[piece.start : piece.stop + 1] - rows.start, self.counts[piece]
        factors, starts = self.factors(piece, spread), np.cumsum(counts**2) - counts**2
        T, root = np.zeros(int((counts**2).sum())), self.root[rows] if len(self.root) else self.root
        share(kernels.invert_factors, len(counts), factors.L, factors.place, ptr, root, starts, T)
        for i in np.flatnonzero(spread.detached[piece]).tolist():
            T[starts[i] : starts[i] + counts[i] ** 2] = 0.0
        X, G = self.R[rows], np.empty((rows.stop - rows.start, self.R.shape[1]))
        # Clients that follow each other with as many rows are multiplied in one call of the library.
        edges = np.concatenate([[0], 1 + np.flatnonzero(np.diff(counts)), [len(counts)]]).tolist()
        for start, stop in pairwise(edges):
            m, part = int(counts[start]), slice(ptr[start], ptr[stop])
            left = T[starts[start] : starts[start] + (stop - start) * m * m].reshape(-1, m, m)
            np.matmul(left, X[part].reshape(-1, m, X.shape[1]), out=G[part].reshape(-1, m, X.shape[1]))
        return ptr, G

    def factors(self, piece: slice, spread: Spread) -> Factors:
        """The factors of some clients. Those of all clients are kept while they need no more memory than the rows."""
        if int((self.counts**2).sum()) > self.R.size:
            return self._factors(piece, spread)
        before = self.kept.get("factors")
        if before is None or not _same(before[0], spread):
            parts = [self._factors(each, spread) for each in self.pieces()]
            L, logs = (np.concatenate(part) for part in zip(*((each.L, each.log_determinants) for each in parts), strict=True))
            place = np.concatenate([[0], np.cumsum(self.counts**2)[:-1]])
            self.kept["factors"] = before = (spread, Factors(place, L, logs))
        whole = before[1]
        return Factors(whole.place[piece], whole.L, whole.log_determinants[piece])

    def _factors(self, piece: slice, spread: Spread) -> Factors:
        n, squares = piece.stop - piece.start, self.counts[piece] ** 2
        scale = np.where(spread.detached, 0.0, spread.scale)[piece]
        place, L, logs = np.cumsum(squares) - squares, np.empty(int(squares.sum())), np.empty(n)
        ptr = self.ptr[piece.start : piece.stop + 1] - self.ptr[piece.start]
        if self.grams is None or len(spread.shape):
            R, _ = self.rows_of(piece)
            share(kernels.gram_rows, n, _scaled(R, ptr, piece, spread), ptr, place, L)
            share(kernels.factor_rows, n, ptr, scale, np.empty(0), place, L, logs)
        else:
            first = self.grams.place[piece.start]
            L[:] = self.grams.K[first : first + len(L)]
            root = self.root[self.ptr[piece.start] : self.ptr[piece.stop]]
            share(kernels.factor_rows, n, ptr, scale, root, place, L, logs)
        return Factors(place, L, logs)

    def _margins(self, piece: slice, t: Floats) -> Floats:
        """``R t_i`` of some clients' rows, with coefficients ``t (clients of the piece, d)``."""
        part = slice(self.ptr[piece.start], self.ptr[piece.stop])
        out, ptr = np.empty(part.stop - part.start), self.ptr[piece.start : piece.stop + 1] - part.start
        share(kernels.margins_of_rows, piece.stop - piece.start, self.R[part], ptr, t, out)
        return out * self.root[part] if len(self.root) else out

    def _solved(self, piece: slice, spread: Spread, v: Floats, *, back: bool) -> Floats:
        """``L^-1 v``, or with ``back`` ``K^-1 v``, in place."""
        factors, ptr = self.factors(piece, spread), self.ptr[piece.start : piece.stop + 1] - self.ptr[piece.start]
        share(kernels.solve_rows, piece.stop - piece.start, factors.L, factors.place, ptr, v, back)
        return v

    def _sums(self, piece: slice, v: Floats) -> Floats:
        """``R'v`` of each client of a piece, ``(clients, d)``."""
        part = slice(self.ptr[piece.start], self.ptr[piece.stop])
        out, ptr = np.empty((piece.stop - piece.start, self.R.shape[1])), self.ptr[piece.start : piece.stop + 1] - part.start
        share(kernels.sums_of_rows, len(out), self.R[part], ptr, v * self.root[part] if len(self.root) else v, out)
        return out

    def linear_terms(self) -> Floats:
        """``b_i = R'z`` of each client, ``(n, d)``."""
        parts = [self._sums(piece, self.z[self.ptr[piece.start] : self.ptr[piece.stop]]) for piece in self.pieces()]
        return np.concatenate(parts)

    def marginalise(self, b: Floats | None, spread: Spread, ptr: Ints, aside: tuple[Floats, Floats]) -> ClientMarginal:
        d = self.R.shape[1]
        if b is not None or d > lanes.WIDEST or self.n * d > 2 * len(self.R) or spread.detached.any():
            return self._summed(b, spread, ptr, aside)
        whole = slice(0, self.n)
        R, row_ptr = self.rows_of(whole)
        Y = _scaled(R, row_ptr, whole, spread)
        if (spread.scale != 1.0).any():
            Y = Y * np.sqrt(np.repeat(spread.scale, self.counts))[:, None]
        return lanes.StackedMarginal.of_rows(R, Y, self.z, row_ptr, ptr, aside[0] + self.left, aside[1])

    def _summed(self, b: Floats | None, spread: Spread, ptr: Ints, aside: tuple[Floats, Floats]) -> RowMarginal:
        """Eliminate the clients ``ptr[j]:ptr[j + 1]`` of each parent; without ``b``, the linear terms are ``R'z``."""
        k, d = len(ptr) - 1, self.R.shape[1]
        C, r, logs = np.zeros((k, d, d)), np.zeros((k, d)), np.empty(self.n)
        c, n = aside[0].copy(), aside[1].copy()
        for piece in self.pieces():
            rows, G = self.forward(piece, spread)
            logs[piece] = np.where(spread.detached[piece], 0.0, self.factors(piece, spread).log_determinants)
            if b is None:
                y = self._solved(piece, spread, self.z[self.ptr[piece.start] : self.ptr[piece.stop]].copy(), back=False)
                c[piece] = self.left[piece] + 0.5 * segment_sum(y**2, rows)
            else:
                along = _part(spread, piece).moved(b[piece])
                y = self._solved(piece, spread, self._margins(piece, along), back=False)
                c[piece] -= 0.5 * (np.einsum("ia,ia->i", b[piece], along) - segment_sum(y**2, rows))
            for j, part in _cells(piece, ptr, self.ptr):
                C[j] += G[part].T @ G[part]
                r[j] += G[part].T @ y[part] if b is None else -(G[part].T @ y[part])
        if b is not None:
            r += segment_sum(np.where(spread.detached[:, None], 0.0, b), ptr)
        for i in np.flatnonzero(spread.detached).tolist():
            fit, rank, beside = self._alone(i, None if b is None else b[i])
            c[i] = beside if b is None else aside[0][i] - 0.5 * float(b[i] @ fit)
            n[i] -= rank
        seen = Quadratic(C, r, segment_sum(c, ptr), segment_sum(n, ptr))
        return RowMarginal(seen, segment_sum(logs, ptr), self, spread, b)

    def curvature(self, spread: Spread, ptr: Ints) -> RowMarginal:
        d = self.R.shape[1]
        logs = np.concatenate([self.factors(piece, spread).log_determinants for piece in self.pieces()])
        nothing = Quadratic(np.empty((0, d, d)), np.empty((0, d)), np.empty(0), np.empty(0))
        return RowMarginal(nothing, segment_sum(logs, ptr), self, spread, None)

    def eliminate(self, b: Floats | None, spread: Spread, ptr: Ints, aside: tuple[Floats, Floats]) -> Quadratic:
        return self._summed(b, spread, ptr, aside).seen

    def lift(self, b: Floats, spread: Spread, ptr: Ints, aside: tuple[Floats, Floats]) -> Floats:
        zero = np.zeros((1, b.shape[1]))
        return segment_sum(self.descend(b, spread, np.zeros(self.n, dtype=np.int64), zero)[1], ptr)

    def descend(self, b: Floats | None, spread: Spread, parent: Ints, x: Floats) -> tuple[Floats, Floats]:
        """Each client's solution given its parent's ``x[parent]``, and the force on it: one right-hand side for each."""
        d = self.R.shape[1]
        t, force = np.empty((self.n, d)), np.empty((self.n, d))
        for piece in self.pieces():
            at, tie = x[parent[piece]], _part(spread, piece)
            if b is None:
                v = self.z[self.ptr[piece.start] : self.ptr[piece.stop]] - self._margins(piece, at)
                force[piece] = self._sums(piece, self._solved(piece, spread, v, back=True))
            else:
                v = self._solved(piece, spread, self._margins(piece, tie.moved(b[piece]) + at), back=True)
                force[piece] = b[piece] - self._sums(piece, v)
            t[piece] = at + tie.moved(force[piece])
        for i in np.flatnonzero(spread.detached).tolist():
            t[i], force[i] = x[parent[i]], 0.0
            t[i] += self._alone(i, None if b is None else b[i], t[i])[0]
        return t, force

    def _alone(self, i: int, b: Floats | None, x: Floats | None = None) -> tuple[Floats, int, float]:
        """The shortest step from ``x`` to a minimum of one client's loss, the rank, and the loss that is left."""
        R = self.rows_of(slice(i, i + 1))[0]
        rows = slice(self.ptr[i], self.ptr[i + 1])
        x = np.zeros(R.shape[1]) if x is None else x
        u, size, vt = np.linalg.svd(R, full_matrices=False)
        size = np.where(size > 16 * R.shape[1] * np.finfo(float).eps * size.max(initial=0.0), size, np.inf)
        rank = int(np.isfinite(size).sum())
        if b is not None:
            return vt.T @ ((vt @ (b - R.T @ (R @ x))) / size**2), rank, 0.0
        v = self.z[rows] - R @ x
        along = np.where(np.isfinite(size), u.T @ v, 0.0)
        return vt.T @ (along / size), rank, float(self.left[i]) + 0.5 * float(((v - u @ along) ** 2).sum())

    def bend(self, data: GroupedData, loss: Loss, theta: Floats, spread: Spread, P: Floats) -> Floats:
        """The gradient of ``trace(P_i H_i)`` in ``theta_i``, from the posterior variance of each row's margin."""
        variance, parent = np.zeros(data.n_rows), data.hierarchy.parent
        for piece in self.pieces():
            R, ptr = self.rows_of(piece)
            Y = _scaled(R, ptr, piece, spread) * np.sqrt(np.repeat(spread.scale[piece], np.diff(ptr)))[:, None]
            for i in range(piece.start, piece.stop):
                own, rows = slice(ptr[i - piece.start], ptr[i - piece.start + 1]), slice(*data.client_ptr[i : i + 2])
                reduced = rows.stop - rows.start != own.stop - own.start or self.ridge > 0
                if reduced or self.ptr[-1] != data.n_rows:
                    variance[rows] = _variances(data.X[rows], R[own], _covariance(spread, i), P[parent[i]])
                    continue
                T = Y[own] @ Y[own].T
                K, h = np.eye(len(T)) + T, self.root[rows] ** 2 if len(self.root) else np.ones(len(T))
                solved = np.linalg.solve(K, np.concatenate([T, R[own]], axis=1))
                W, V = solved[:, : len(T)], solved[:, len(T) :]
                size = np.diag(W) + np.einsum("la,ab,lb->l", V, P[parent[i]], V)
                variance[rows] = np.where(h > 0, size / np.where(h > 0, h, 1.0), 0.0)
        return loss.bend(data, theta, variance=variance)

    def leading(self, q: int) -> Floats:
        A, curves = np.empty((self.n, q, self.R.shape[1])), self.root**2 if len(self.root) else np.ones(len(self.R))
        share(kernels.cross_products, block_count(self.n), self.R, curves, self.ptr, np.arange(q), A)
        return A

    def by_cell(self, ptr: Ints) -> Floats:
        return segment_sum(self.leading(self.R.shape[1]), ptr)

    def smallest_curvature(self, loss: Loss) -> float:
        d = self.R.shape[1]
        if not loss.quadratic or (self.counts < d).any():
            return loss.ridge
        values = [np.linalg.svd(self.rows_of(slice(i, i + 1))[0], compute_uv=False) for i in range(self.n)]
        floors = [1.0 / float((1.0 / size**2).sum()) if size[-1] > 1e-7 * size[0] else loss.ridge for size in values]
        return min(floors, default=np.inf)


def _same(one: Spread, other: Spread) -> bool:
    same = one.shape is other.shape or np.array_equal(one.shape, other.shape)
    return one is other or (same and np.array_equal(one.scale, other.scale))


def _part(spread: Spread, piece: slice) -> Spread:
    return Spread(spread.scale[piece], spread.shape[piece] if len(spread.shape) > 1 else spread.shape, spread.width)


def _covariance(spread: Spread, i: int) -> Floats:
    d = spread.shape.shape[1]
    shape = np.eye(d) if not len(spread.shape) else spread.shape[i if len(spread.shape) > 1 else 0]
    return np.asarray(spread.scale[i] * shape)


def _scaled(R: Floats, ptr: Ints, piece: slice, spread: Spread) -> Floats:
    """``Y = R F`` with ``F F'`` the shape of each client's covariance, so that ``R S R' = scale Y Y'``."""
    if not len(spread.shape):
        return R
    q, shapes = spread.width, spread.shape[piece] if len(spread.shape) > 1 else spread.shape
    shapes = shapes[:, :q, :q]
    sizes = np.sqrt(np.maximum(np.einsum("iaa->ia", shapes), 0.0))
    if not (shapes != shapes * np.eye(q)).any():
        return np.ascontiguousarray(R[:, :q] * (sizes[0] if len(sizes) == 1 else np.repeat(sizes, np.diff(ptr), axis=0)))
    values, vectors = np.linalg.eigh(shapes)
    F = vectors * np.sqrt(np.maximum(values, 0.0))[:, None, :]
    if len(F) == 1:
        return np.ascontiguousarray(R[:, :q] @ F[0])
    return np.concatenate([R[ptr[i] : ptr[i + 1], :q] @ F[i] for i in range(len(F))])


def _variances(X: Floats, R: Floats, S: Floats, P: Floats) -> Floats:
    """``x'(Sigma + J P J')x`` of rows ``X``, with ``Sigma = (I + S A)^-1 S``, ``J = I - Sigma A`` and ``A = R'R``."""
    A = R.T @ R
    sigma = np.linalg.solve(np.eye(len(S)) + S @ A, S)
    away = X - X @ sigma @ A
    variances: Floats = np.einsum("la,ab,lb->l", X, sigma, X) + np.einsum("la,ab,lb->l", away, P, away)
    return variances


def _cells(piece: slice, cell_ptr: Ints, row_ptr: Ints) -> Iterator[tuple[int, slice]]:
    """The cells that have clients in a piece, with the rows of these clients, counted from the first row of the piece."""
    first = int(np.searchsorted(cell_ptr, piece.start, side="right")) - 1
    for j in range(first, len(cell_ptr) - 1):
        start, stop = max(cell_ptr[j], piece.start), min(cell_ptr[j + 1], piece.stop)
        if cell_ptr[j] >= piece.stop:
            return
        if start < stop:
            yield j, slice(row_ptr[start] - row_ptr[piece.start], row_ptr[stop] - row_ptr[piece.start])
