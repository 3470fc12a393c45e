"""Clients in row space that have about as many rows as terms: the matrix ``C`` of each of them is kept.

Many clients are solved at once, one in each lane of an array (:mod:`.kernels`). With the matrices of all clients one below the
other, the sums over clients that a gradient needs are products of large matrices, which a library computes fast.

A search asks for many points where the covariances ``S`` differ in one or two variances. If ``Delta`` is the change of the
variances of the terms ``E``, the new matrices follow from the old ones (Woodbury's identity):

    M = (Delta^-1 + C_EE)^-1        C - C_E' M C_E        r - C_E' M r_E        log|K| + log|I + Delta C_EE|

No digits are lost where ``Delta`` is small beside ``S``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from covey._typing import Floats, Ints
from covey.solvers.direct.elimination import Quadratic
from covey.solvers.direct.lanes import kernels
from covey.threads import one_blas_thread, share
from covey.tree.hierarchy import segment_sum

WIDEST = 48  # terms; the arrays of wider clients would not fit into a processor's cache
_PIECE = 1 << 21  # numbers of a temporary array
_SMALL = 0.25  # the largest change of a variance, in units of the variance


@dataclass(frozen=True)
class StackedMarginal:
    """As :class:`.Marginal`, with the matrices ``C (d, n, d)`` of all clients one below the other, and ``r (n, d)``."""

    seen: Quadratic
    log_determinants: Floats
    C: Floats
    r: Floats

    @classmethod
    def of_rows(
        cls, R: Floats, Y: Floats, z: Floats, ptr: Ints, cell_ptr: Ints, constants: Floats, rows: Floats
    ) -> StackedMarginal:
        """From rows ``R (rows, d)``, ``Y = R S^(1/2)`` and responses ``z``; the clients' constants and numbers of rows."""
        n, d = len(ptr) - 1, R.shape[1]
        C, r, squares, logs = np.empty((d, n, d)), np.empty((n, d)), np.empty(n), np.empty(n)
        share(kernels.solve_lanes, -(-n // kernels.LANES), R, Y, z, ptr, C, r, squares, logs)
        sums = np.stack([C[:, part].sum(axis=1) for part in _cells(cell_ptr)])
        parts = (segment_sum(each, cell_ptr) for each in (r, constants + 0.5 * squares, rows))
        return cls(Quadratic(sums, *parts), segment_sum(logs, cell_ptr), C, r)

    def sensitivity(self, width: int, ptr: Ints, x: Floats, P: Floats) -> tuple[Floats, Floats]:
        """As :func:`.elimination.sensitivity`."""
        bend, pull = self.seen.C[:, :width, :width].copy(), np.zeros((len(x), width, width))

        def add(begin: int, end: int) -> None:
            for j, part in _pieces(ptr, self.C.shape[2] ** 2, begin, end):
                C = self.C[:width, part]
                force = self.r[part, :width] - (C @ x[j]).T
                bend[j] -= C.reshape(width, -1) @ (C @ P[j]).reshape(width, -1).T
                pull[j] += force.T @ force

        with one_blas_thread():
            share(add, len(x))
        return 0.5 * (bend + bend.swapaxes(1, 2)), pull

    def changed(self, before: Floats, after: Floats, ptr: Ints) -> ChangedMarginal | None:
        """The same at the covariance ``after`` instead of ``before (d, d)``, unless one must solve anew."""
        change = after - before
        at = np.flatnonzero(np.diag(change))
        by = np.diag(change)[at]
        if (
            len(at) not in (1, 2)
            or (change != np.diag(np.diag(change))).any()
            or (np.abs(by) > _SMALL * np.diag(before)[at]).any()
        ):
            return None
        B, r = self.C[at], self.r[:, at]
        E = 1.0 + by * np.stack([B[k, :, a] for k, a in enumerate(at)], axis=1)  # the diagonal of I + Delta C_EE
        determinant, M = E.prod(axis=1), np.zeros((len(at), len(at), len(r)))
        if len(at) == 2:
            both = by.prod() * B[0, :, at[1]]
            determinant = determinant - both * B[0, :, at[1]]
            M[0, 1] = M[1, 0] = -both / determinant
        for k in range(len(at)):
            M[k, k] = by[k] * np.delete(E, k, axis=1).prod(axis=1) / determinant
        W = np.einsum("kln,lnb->knb", M, B)
        C, r_sums, c = self.seen.C.copy(), self.seen.r.copy(), np.einsum("nk,kln,nl->n", r, M, r)

        def subtract(begin: int, end: int) -> None:
            for j, part in _pieces(ptr, 1, begin, end):
                for k in range(len(at)):
                    C[j] -= B[k, part].T @ W[k, part]
                    r_sums[j] -= r[part, k] @ W[k, part]

        with one_blas_thread():
            share(subtract, len(C))
        seen = Quadratic(0.5 * (C + C.swapaxes(1, 2)), r_sums, self.seen.c - 0.5 * segment_sum(c, ptr), self.seen.n)
        return ChangedMarginal(seen, self.log_determinants + segment_sum(np.log(determinant), ptr), self, at, B, W)


@dataclass(frozen=True)
class ChangedMarginal:
    """As :class:`StackedMarginal`, with a change of some variances: ``C - B'W`` with ``B, W (k, n, d)``, ``k`` at most 2."""

    seen: Quadratic
    log_determinants: Floats
    base: StackedMarginal
    at: Ints
    B: Floats
    W: Floats

    def sensitivity(self, width: int, ptr: Ints, x: Floats, P: Floats) -> tuple[Floats, Floats]:
        """As :func:`.elimination.sensitivity`: ``C P C - C P B'W - W'B P C + W'B P B'W`` in place of ``C P C``."""
        bend, pull = self.seen.C[:, :width, :width].copy(), np.zeros((len(x), width, width))

        def add(begin: int, end: int) -> None:
            for j, part in _pieces(ptr, self.base.C.shape[2] ** 2, begin, end):
                C, B, W = self.base.C[:width, part], self.B[:, part], self.W[:, part, :width]
                CP, force = C @ P[j], self.base.r[part, :width] - (C @ x[j]).T
                twice = np.einsum("kia,lia->kli", B @ P[j], B)
                across = np.einsum("aie,kie->kai", CP, B) - 0.5 * np.einsum("kli,lia->kai", twice, W)
                through = C.reshape(width, -1) @ CP.reshape(width, -1).T
                for one in across @ W:
                    through -= one + one.T
                moved = force - np.einsum("kia,ik->ia", W, force[:, self.at])
                bend[j] -= through
                pull[j] += moved.T @ moved

        with one_blas_thread():
            share(add, len(x))
        return 0.5 * (bend + bend.swapaxes(1, 2)), pull


def _cells(ptr: Ints) -> list[slice]:
    return [slice(start, stop) for start, stop in pairwise(ptr)]


def _pieces(ptr: Ints, size: int, begin: int, end: int) -> Iterator[tuple[int, slice]]:
    """Each of the cells ``begin:end`` and clients of it, some at a time if they have ``size`` numbers each."""
    step = max(1, _PIECE // size)
    for j in range(begin, end):
        for start in range(ptr[j], ptr[j + 1], step):
            yield j, slice(start, min(start + step, int(ptr[j + 1])))
