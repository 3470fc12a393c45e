"""Clients of a linear model given by triangular factors, for a search over covariances.

A client has the loss ``1/2 t'At - b't + c``. Of its Cholesky factor, with the varying terms ``v`` first and bordered by ``b``,

    A = R'R + (a part of the shared terms alone)      b = R'z + (a part of the shared terms alone)

only the first ``q`` rows ``[R | z]`` depend on the varying terms. The rest is the same for all covariances ``S`` and is summed
once by cell. At a covariance ``S``, elimination (:mod:`.elimination`) becomes

    I + R_v S R_v' = L L'      [G | u] = L^-1 [R | z]
    C = G'G      r = G'u      b'S r = z'z - u'u      log|I + A S| = log|L L'|

plus the rest. ``I + R_v S R_v'`` has no eigenvalue below 1, so nothing cancels for any ``S``, and no pivots are needed. A pivot
of ``A`` that is zero (a client with a constant column) gives a row of zeros.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from covey._typing import Floats, Ints
from covey.nodes.network import Blocks
from covey.solvers.direct import factor_kernels as kernels
from covey.solvers.direct.elimination import Quadratic
from covey.threads import block_count, share
from covey.tree.hierarchy import segment_sum


@dataclass(frozen=True)
class Factors:
    """The rows ``[R | z] (q, d + 1, n)`` of clients, and by cell the sum of the rest of their losses."""

    R: Floats
    rest: Quadratic
    blocks: Blocks

    @classmethod
    def of(cls, A: Floats, total: Floats, b: Floats, aside: tuple[Floats, Floats], ptr: Ints) -> Factors:
        """From the first rows ``A (n, q, d)`` of clients' matrices, and the sums ``total (k, d, d)`` of the matrices by cell.

        ``aside`` has the constants ``c (n,)`` of the losses and their numbers of rows.
        """
        (n, q, d), blocks = A.shape, Blocks.of(ptr)
        R = np.empty((q, d + 1, n))
        share(kernels.factorise, block_count(n), A, b, R)
        _, (C, r, c), _ = _absorbed(R, np.zeros((1, q, q)), blocks)
        constants, rows = (segment_sum(part, ptr) for part in aside)
        rest = Quadratic(total - C, segment_sum(b, ptr) - r, constants - c, rows)
        # The part of the varying terms is zero but for rounding.
        rest.C[:, :q] = rest.C[:, :, :q] = rest.r[:, :q] = 0.0
        return cls(R, rest, blocks)

    def marginalise(self, S: Floats) -> FactorMarginal:
        """Eliminate at covariances ``S (1 or k, d, d)`` of clients about their cells; as :func:`.elimination.marginalise`."""
        q, rest = len(self.R), self.rest
        G, (C, r, c), log_determinants = _absorbed(self.R, np.ascontiguousarray(S[:, :q, :q]), self.blocks)
        return FactorMarginal(Quadratic(rest.C + C, rest.r + r, rest.c + c, rest.n), log_determinants, G, self.blocks)


def _absorbed(R: Floats, S: Floats, blocks: Blocks) -> tuple[Floats, tuple[Floats, Floats, Floats], Floats]:
    """``[G | u]``, and by cell the sums of ``G'G``, ``G'u`` and ``u'u / 2`` and of the log-determinants."""
    (_, e, _), which = R.shape, blocks.owner if len(S) > 1 else np.zeros_like(blocks.owner)
    G, squares, volume = np.empty_like(R), np.empty((blocks.count, e, e)), np.empty(blocks.count)
    share(kernels.absorb_factors, blocks.count, R, S, which, blocks.ptr, G, squares, volume)
    sums = segment_sum(squares, blocks.of_parent)
    return G, (sums[:, :-1, :-1], sums[:, :-1, -1], 0.5 * sums[:, -1, -1]), segment_sum(volume, blocks.of_parent)


@dataclass(frozen=True)
class FactorMarginal:
    """As :class:`.Marginal`, with ``[G | u] (q, d + 1, n)`` in place of each client's ``C`` and ``r``."""

    seen: Quadratic
    log_determinants: Floats
    G: Floats
    blocks: Blocks

    def sensitivity(self, width: int, ptr: Ints, x: Floats, P: Floats) -> tuple[Floats, Floats]:
        """As :func:`.elimination.sensitivity`."""
        blocks, q = self.blocks, len(self.G)
        bend, pull = np.empty((blocks.count, q, q)), np.empty((blocks.count, q, q))
        share(kernels.factor_sensitivity, blocks.count, self.G, blocks.ptr, blocks.owner, x, P, bend, pull)
        return segment_sum(bend, blocks.of_parent), segment_sum(pull, blocks.of_parent)
