"""The second derivatives of clients' losses; :mod:`.spaces` chooses between the classes.

:class:`WholeHessians` has a matrix ``A (d, d)`` for each client; :mod:`.elimination` has the algebra. In
:class:`LeadingHessians` only the first ``q`` of ``d`` terms vary. With the varying terms ``v``, the shared terms ``s``, a
covariance ``S`` that is zero outside ``v``, and ``K = I + A_vv S``, elimination is

    C_v = K^-1 A_v      C_ss = A_ss - A_sv S C_vs      r_v = K^-1 b_v      r_s = b_s - A_sv S r_v      log|I + A S| = log|K|

A cell (cluster) needs the sum of ``C_ss`` only, so ``A_ss`` is summed over all rows of a cell at once. Time and memory for a
client grow with ``q d`` instead of ``d^2``. A client's shared coefficients are those of its cell. The force on them is
minus the gradient of its loss, which the caller knows (:func:`.spaces.settled`). :mod:`.row_space` has clients with many
varying terms.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from covey._typing import Floats, Ints
from covey.losses import Loss
from covey.solvers.direct import kernels
from covey.solvers.direct.elimination import (
    ClientMarginal,
    Marginal,
    Quadratic,
    Spread,
    descend,
    eliminate,
    marginalise,
    posterior,
)
from covey.tables.rows import GroupedData
from covey.threads import block_count, share
from covey.tree.hierarchy import segment_sum

_BLAS = 64  # from this number of columns on, a library's product of two matrices is faster than a loop
_PIECE = 1 << 20  # numbers of a temporary array


class Hessians(ABC):
    """The Hessians of a node's clients. ``b (n, d)`` is the linear term of their losses ``1/2 t'A_i t - b_i't``.

    Without ``b``, the linear term is the one of their responses, which only :class:`.RowSpace` knows.
    """

    @abstractmethod
    def marginalise(self, b: Floats | None, spread: Spread, ptr: Ints, aside: tuple[Floats, Floats]) -> ClientMarginal:
        """As :func:`.elimination.marginalise`; ``aside`` has the constants and the numbers of rows of the losses."""

    @abstractmethod
    def curvature(self, spread: Spread, ptr: Ints) -> ClientMarginal:
        """The same without linear terms, and ``seen`` may be empty."""

    @abstractmethod
    def eliminate(self, b: Floats | None, spread: Spread, ptr: Ints, aside: tuple[Floats, Floats]) -> Quadratic:
        """What each parent sees of its children ``ptr[j]:ptr[j + 1]``, as :func:`.elimination.eliminate`."""

    @abstractmethod
    def lift(self, b: Floats, spread: Spread, ptr: Ints, aside: tuple[Floats, Floats]) -> Floats:
        """The sums of ``r_i = (I + A_i S)^-1 b_i`` for each parent, ``(k, d)``."""

    @abstractmethod
    def descend(self, b: Floats | None, spread: Spread, parent: Ints, x: Floats) -> tuple[Floats, Floats]:
        """As :func:`.elimination.descend`. The force on terms that do not vary may be zero instead; see :meth:`settled`."""

    @abstractmethod
    def bend(self, data: GroupedData, loss: Loss, theta: Floats, spread: Spread, P: Floats) -> Floats:
        """The gradient of ``trace(P_i H_i)`` in ``theta_i``, ``P_i`` the posterior covariance given the parents' ``P``."""

    @abstractmethod
    def leading(self, q: int) -> Floats:
        """The first ``q`` rows of each Hessian, ``(n, q, d)``; the others must be shared."""

    @abstractmethod
    def by_cell(self, ptr: Ints) -> Floats:
        """The sums ``(k, d, d)`` by cell. If only leading rows are kept, only the block of the others need be right."""

    @abstractmethod
    def smallest_curvature(self, loss: Loss) -> float:
        """A lower bound on the curvature of all clients' losses at any point, given their Hessians at one."""


@dataclass(frozen=True)
class WholeHessians(Hessians):
    """One matrix for each client: ``A (n, d, d)``."""

    A: Floats

    def marginalise(self, b: Floats | None, spread: Spread, ptr: Ints, aside: tuple[Floats, Floats]) -> Marginal:
        return marginalise(Quadratic(self.A, given(b), *aside), spread, ptr)

    def curvature(self, spread: Spread, ptr: Ints) -> Marginal:
        nothing = np.zeros(len(self.A))
        return self.marginalise(np.zeros(self.A.shape[:2]), spread, ptr, (nothing, nothing))

    def eliminate(self, b: Floats | None, spread: Spread, ptr: Ints, aside: tuple[Floats, Floats]) -> Quadratic:
        return eliminate(Quadratic(self.A, given(b), *aside), spread, ptr)

    def lift(self, b: Floats, spread: Spread, ptr: Ints, aside: tuple[Floats, Floats]) -> Floats:
        return self.eliminate(b, spread, ptr, aside).r

    def descend(self, b: Floats | None, spread: Spread, parent: Ints, x: Floats) -> tuple[Floats, Floats]:
        return descend(self.A, given(b), spread, parent, x)

    def bend(self, data: GroupedData, loss: Loss, theta: Floats, spread: Spread, P: Floats) -> Floats:
        return loss.bend(data, theta, posterior(self.A, spread, data.hierarchy.parent, P))

    def leading(self, q: int) -> Floats:
        return self.A[:, :q]

    def by_cell(self, ptr: Ints) -> Floats:
        return segment_sum(self.A, ptr)

    def smallest_curvature(self, loss: Loss) -> float:
        return loss.smallest_curvature(self.A)


@dataclass(frozen=True)
class LeadingHessians(Hessians):
    """The rows of the varying terms for each client, ``A (n, q, d)``, and by cell the sum ``(k, s, s)`` of the other block."""

    A: Floats
    sum_shared: Callable[[], Floats]

    @classmethod
    def of_rows(cls, data: GroupedData, curves: Floats, ridge: float, q: int) -> LeadingHessians:
        """From rows with terms in the working order."""
        A = leading_products(data, curves, np.arange(q))
        A[:, np.arange(q), np.arange(q)] += ridge

        def shared() -> Floats:
            X, tree = data.X[:, q:], data.hierarchy
            total = by_cell(X, X, curves, data.client_ptr[tree.cluster_ptr])
            return total + ridge * tree.sizes[:, None, None] * np.eye(X.shape[1]) if ridge else total

        return cls(A, shared)

    @classmethod
    def of_matrices(cls, A: Floats, ptr: Ints, q: int) -> LeadingHessians:
        """From whole matrices ``A (n, d, d)`` of the clients ``ptr[j]:ptr[j + 1]`` of each cell."""
        return cls(np.ascontiguousarray(A[:, :q]), lambda: segment_sum(A[:, q:, q:], ptr))

    @cached_property
    def shared(self) -> Floats:
        return self.sum_shared()

    def marginalise(self, b: Floats | None, spread: Spread, ptr: Ints, aside: tuple[Floats, Floats]) -> Marginal:
        b = given(b)
        S, C, r, log_determinants = self._absorbed(b, spread)
        n, q, d = C.shape
        k = len(ptr) - 1
        seen_C, seen_r = np.empty((k, d, d)), np.empty((k, d))
        seen_C[:, :q] = segment_sum(C, ptr)
        seen_C[:, q:, :q] = seen_C[:, :q, q:].swapaxes(1, 2)
        seen_C[:, q:, q:] = self.shared
        if q:
            moved = np.ascontiguousarray((S @ C[:, :, q:]).reshape(n * q, d - q))
            seen_C[:, q:, q:] -= by_cell(self.A[:, :, q:].reshape(n * q, d - q), moved, np.ones(n * q), q * ptr)
        c, rows = aside
        along = np.einsum("iab,ib->ia", np.broadcast_to(S, (n, q, q)), r)
        seen_r[:] = self._lifted(b, r, along, ptr)
        c = c - 0.5 * np.einsum("ia,ia->i", b[:, :q], along)
        seen = Quadratic(seen_C, seen_r, segment_sum(c, ptr), segment_sum(rows, ptr))
        return Marginal(seen, segment_sum(log_determinants, ptr), C, r)

    def curvature(self, spread: Spread, ptr: Ints) -> Marginal:
        n, _, d = self.A.shape
        _, C, r, log_determinants = self._absorbed(np.zeros((n, d)), spread)
        nothing = Quadratic(np.empty((0, d, d)), np.empty((0, d)), np.empty(0), np.empty(0))
        return Marginal(nothing, segment_sum(log_determinants, ptr), C, r)

    def eliminate(self, b: Floats | None, spread: Spread, ptr: Ints, aside: tuple[Floats, Floats]) -> Quadratic:
        return self.marginalise(b, spread, ptr, aside).seen

    def lift(self, b: Floats, spread: Spread, ptr: Ints, aside: tuple[Floats, Floats]) -> Floats:
        S, _, r, _ = self._absorbed(b, spread)
        return self._lifted(b, r, np.einsum("iab,ib->ia", np.broadcast_to(S, (len(r), *S.shape[1:])), r), ptr)

    def _lifted(self, b: Floats, r: Floats, along: Floats, ptr: Ints) -> Floats:
        """Sums of ``r_i``, given those of the varying terms and ``S r_v``."""
        q = r.shape[1]
        rest = b[:, q:] - (along[:, None, :] @ self.A[:, :, q:])[:, 0]
        return np.concatenate([segment_sum(r, ptr), segment_sum(rest, ptr)], axis=1)

    def _absorbed(self, b: Floats, spread: Spread) -> tuple[Floats, Floats, Floats, Floats]:
        """The covariances ``(1 or n, q, q)``, and each client's ``C_v (n, q, d)``, ``r_v (n, q)`` and log-determinant."""
        n, q, _ = self.A.shape
        S = np.ascontiguousarray(spread.shape[:, :q, :q])
        C, r, log_determinants = np.empty_like(self.A), np.empty((n, q)), np.empty(n)
        share(kernels.absorb_leading, block_count(n), self.A, b, S, C, r, log_determinants)
        return S, C, r, log_determinants

    def descend(self, b: Floats | None, spread: Spread, parent: Ints, x: Floats) -> tuple[Floats, Floats]:
        b = given(b)
        S, C, r, _ = self._absorbed(b, spread)
        t, force = x[parent], np.zeros_like(b)
        q = r.shape[1]
        force[:, :q] = r - (C @ t[:, :, None])[:, :, 0]
        t[:, :q] += np.einsum("iab,ib->ia", np.broadcast_to(S, (len(r), q, q)), force[:, :q])
        return t, force

    def bend(self, data: GroupedData, loss: Loss, theta: Floats, spread: Spread, P: Floats) -> Floats:
        q, above = self.A.shape[1], np.flatnonzero(P.any(axis=(0, 1)))
        S, variance = np.ascontiguousarray(spread.shape[:, :q, :q]), np.empty(data.n_rows)
        p = int(above[-1]) + 1 if len(above) else 0
        rows, parent = (data.X, data.client_ptr), data.hierarchy.parent
        share(kernels.leading_variances, block_count(data.n_clients), *rows, self.A, S, parent, P, p, variance)
        return loss.bend(data, theta, variance=variance)

    def leading(self, q: int) -> Floats:
        return self.A

    def by_cell(self, ptr: Ints) -> Floats:
        (_, q, d), k = self.A.shape, len(ptr) - 1
        total = np.zeros((k, d, d))
        total[:, q:, q:] = self.shared
        return total

    def smallest_curvature(self, loss: Loss) -> float:
        return loss.ridge


def given(b: Floats | None) -> Floats:
    if b is None:
        raise TypeError("only clients in row space know their linear terms")
    return b


def leading_products(data: GroupedData, curves: Floats, terms: Ints) -> Floats:
    """The rows of some terms of each client's ``X' diag(curves) X``, ``(n, len(terms), d)``."""
    A = np.empty((data.n_clients, len(terms), data.n_terms))
    share(kernels.cross_products, block_count(len(A)), data.X, curves, data.client_ptr, terms, A)
    return A


def by_cell(left: Floats, right: Floats, weights: Floats, ptr: Ints) -> Floats:
    """``left' diag(weights) right`` for the rows ``ptr[j]:ptr[j + 1]`` of each cell, if these are symmetric: ``(k, s, s)``."""
    k, s = len(ptr) - 1, left.shape[1]
    out = np.zeros((k, s, s))
    if s < _BLAS:
        share(kernels.products_by_cell, k, left, right, weights, ptr, out)
        return out
    step = max(1, _PIECE // s)
    for j in range(k):
        for start in range(ptr[j], ptr[j + 1], step):
            rows = slice(start, min(start + step, ptr[j + 1]))
            out[j] += left[rows].T @ (weights[rows, None] * right[rows])
    return 0.5 * (out + out.swapaxes(1, 2))
