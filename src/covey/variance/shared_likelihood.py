"""REML and ML of a linear model with sparse shared columns.

At given covariances the best coefficients ``beta`` of these columns come from the profile
(:mod:`covey.solvers.direct.shared`). With ``Z beta`` as an offset, the criterion of :mod:`.linear_likelihood` is right but for
two things under REML: ``beta`` takes ``s`` degrees of freedom, and ``log|H|`` is added, where ``H (s, s)`` is the second
derivative of the profile. Its gradient in the covariance ``S`` of clients is ``-sum F_i H^-1 F_i'``, where ``F_i`` is the force
on client ``i`` for a unit of each coefficient:

    F_i = K_i^-1 (G_i + A_i W_j)      W_j = L_j^-T W - N_j H_j      W = -D^-1 R

For clusters it is the same with ``F_j = L_j^-1 (H_j + B_j W)``. Dense terms that do not vary are part of ``Z`` here; ``H`` is
what is left after they are eliminated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import linalg, sparse

from covey._typing import Bools, Floats, Ints
from covey.nodes.network import Node, Request
from covey.solvers.direct import shared_kernels as kernels
from covey.solvers.direct.profile import KEPT, Prepared, PutShared, shared_of
from covey.solvers.direct.shared import Entries, Layout, SharedSums, SharedTop, eliminate_upper, sum_shared
from covey.solvers.result import SharedCoefficients
from covey.threads import share
from covey.tree.hierarchy import segment_sum
from covey.variance.columns import Survey, client_rows, from_cache, working_columns
from covey.variance.linear_likelihood import Evaluation, FinishLinear, LinearCriterion
from covey.variance.parameters import Shape
from covey.variance.upper import UpperPosterior


@dataclass(frozen=True)
class SumLikelihood(Request[SharedSums]):
    """Eliminate the clients, given their covariances ``S (1 or k, q, q)``.

    ``order`` is the working order of terms, of which the first ``q`` vary. ``common`` says which of the others are fitted. The
    response is relative to the origin and to the coefficients ``start`` of the sparse columns.
    """

    S: Floats
    order: Ints
    common: Bools
    start: Floats

    def at(self, node: Node) -> SharedSums:
        data, q = client_rows(node, self.order), self.S.shape[1]
        origin = working_columns(node).origin[self.order]

        def layout() -> Layout:
            shared = shared_of(data)
            dense = data.X[:, q:][:, self.common]
            rest = data.y - shared.offset_with(self.start) - data.X @ origin
            parts = [sparse.csr_matrix(dense), shared.Z, sparse.csr_matrix(rest[:, None])]
            whole = sparse.hstack(parts, format="csr")
            return Layout.of(whole, whole.shape[1] - 1, data.client_ptr, data.hierarchy)

        key = self.order, np.array([q]), self.common, self.start, origin, working_columns(node).basis
        curves = np.ones(data.n_rows) if data.weights is None else data.weights
        S = self.S if len(self.S) == 1 else self.S[data.hierarchy.parent]
        return sum_shared(data, from_cache(node, KEPT, key, layout), curves, S, response=True)


class SharedCriterion(LinearCriterion):
    """REML or ML of a linear model with sparse columns."""

    def __init__(self, survey: Survey, shape: Shape, prepared: Prepared, *, reml: bool) -> None:
        super().__init__(survey, shape, reml=reml)
        self.prepared, self.more = prepared, len(prepared.start)
        self.q = max(self.parameters.client.width, self.parameters.cluster.width)
        self.common = self.free[self.q :]
        self._found: tuple[Floats, Floats, Floats] | None = None
        self._eliminated: tuple[SharedSums, SharedTop] | None = None

    def at_covariances(self, points: Sequence[tuple[Floats, Floats]]) -> list[Evaluation]:
        """One point at a time, because ``beta`` differs."""
        return [self._at_one(point) for point in points]

    def _at_one(self, point: tuple[Floats, Floats]) -> Evaluation:
        here = super().at_covariances([point])[0]
        if not self.reml or self._eliminated is None:
            return here
        sums, top = self._eliminated
        self._eliminated = None  # the factor becomes its inverse
        client, cluster = self._slopes(sums, top, self._uncertain(top), per_cluster=len(point[0]) > 1)
        width, q = here.client_slope.shape[1], self.q
        cluster_slope = here.cluster_slope.copy()
        cluster_slope[0, :q, :q] -= cluster
        return replace(here, client_slope=here.client_slope - client[:, :width, :width], cluster_slope=cluster_slope)

    def upper_levels(self, points: Sequence[tuple[Floats, Floats]]) -> list[UpperPosterior]:
        (point,) = points
        _, top = self._eliminated = self._eliminate(point)
        self._put(top)
        (upper,) = super().upper_levels(points)
        extra = top.log_determinant(int(self.common.sum())) if self.reml else 0.0
        return [replace(upper, criterion=upper.criterion + extra)]

    def _eliminate(self, point: tuple[Floats, Floats]) -> tuple[SharedSums, SharedTop]:
        v = slice(0, self.q)
        request = SumLikelihood(np.ascontiguousarray(point[0][:, v, v]), self.order.terms, self.common, self.prepared.start)
        (sums,) = self.network.network.every(request)
        return sums, eliminate_upper(sums, point[1][:, v, v], self.free[v])

    def _put(self, top: SharedTop) -> Floats:
        """Give the nodes the best coefficients of the sparse columns."""
        beta: Floats = self.prepared.start + top.solve(top.edge[:-1])[int(self.common.sum()) :]
        self.network.network.every(PutShared(beta))
        return beta

    def _uncertain(self, top: SharedTop) -> Floats:
        """The covariance of all columns of the profile that is due to the sparse ones, its lower triangle."""
        u = int(self.common.sum())
        given = linalg.cho_solve((np.tril(top.L[:u, :u]), True), np.eye(u)) if u else np.empty((0, 0))
        P = top.covariance()
        P[:u, :u] -= np.tril(given)
        return P

    def _slopes(self, sums: SharedSums, top: SharedTop, P: Floats, *, per_cluster: bool) -> tuple[Floats, Floats]:
        """The sums of ``F P F'`` over clients, ``(1 or k, q, q)``, and over clusters, ``(q, q)``."""
        layout, W, WP = sums.layout, top.response, symmetric_product(P, top.response)
        WPW, (HPH, HP), (GPG, _) = (
            WP @ W.T,
            forms_of(layout.clusters, sums.H, P),
            forms_of(layout.clients, sums.G, P, own=False),
        )
        own = np.zeros_like(sums.H)
        inside = layout.clusters.columns < len(P)
        own[inside] = WP.T[layout.clusters.columns[inside]]
        HPW = segment_sum(sums.H[:, :, None] * own[:, None, :], layout.clusters.ptr)
        J, N, B = top.inverse.swapaxes(1, 2), top.N, sums.B
        of_cluster = np.repeat(np.arange(len(B)), np.diff(layout.clusters.ptr))
        V = np.einsum("tab,tb->ta", J[of_cluster], own) - np.einsum("tab,tb->ta", N[of_cluster], HP)
        crossed = J @ HPW.swapaxes(1, 2) @ N
        VW = J @ WPW @ J.swapaxes(1, 2) - crossed - crossed.swapaxes(1, 2) + N @ HPH @ N
        F = top.inverse @ (HPH + HPW @ B + B @ HPW.swapaxes(1, 2) + B @ WPW @ B) @ J
        G = np.where((layout.clients.columns < len(P))[:, None], sums.G, 0.0)
        GV = segment_sum(G[:, :, None] * V[layout.clusters.place][:, None, :], layout.clients.ptr)
        A, parent = sums.A, self.tree.parent
        clients = GPG + GV @ A + A @ GV.swapaxes(1, 2) + A @ VW[parent] @ A
        clients = sums.inverse @ clients @ sums.inverse.swapaxes(1, 2)
        by_cluster = segment_sum(clients, self.tree.cluster_ptr)
        return by_cluster if per_cluster else by_cluster.sum(axis=0, keepdims=True), F.sum(axis=0)

    def finish_message(self, x: Floats, top: UpperPosterior) -> FinishLinear:
        """Put the coefficients of this point at the nodes, and keep them with their errors."""
        _, profile = self._eliminate(self.covariances(x))
        beta, u, d = self._put(profile), int(self.common.sum()), len(self.terms)
        P = self._uncertain(profile)
        M = np.zeros((d, len(P)))
        M[: self.q] = profile.response
        M[np.flatnonzero(self.common) + self.q, np.arange(u)] = 1.0
        self._found = beta, np.diag(P)[u:].copy(), symmetric_product(P, M) @ M.T
        return super().finish_message(x, top)

    def global_covariance(self, errors: Floats, top: UpperPosterior) -> Floats:
        given = super().global_covariance(errors, top)
        return given if self._found is None else given + top.dispersion * self._found[2]

    def shared(self, dispersion: float) -> SharedCoefficients | None:
        if self._found is None:
            return None
        beta, variances, _ = self._found
        return self.prepared.coefficients(beta, np.sqrt(dispersion * variances))


def symmetric_product(P: Floats, W: Floats) -> Floats:
    """``W P (q, s)``, for a symmetric ``P`` of which only the lower triangle counts."""
    if not W.size:
        return np.zeros_like(W)
    return np.asarray(linalg.blas.dsymm(1.0, P.T, W.T, side=0, lower=0)).T


def forms_of(units: Entries, G: Floats, P: Floats, *, own: bool = True) -> tuple[Floats, Floats]:
    """``G_i P G_i'`` of each unit, and ``G_i P`` at its own columns."""
    count, q = len(units.ptr) - 1, G.shape[1]
    out, GP = np.empty((count, q, q)), np.zeros_like(G) if own else np.empty((0, q))
    share(kernels.forms, count, units.ptr, units.columns, G, P, out, GP)
    return out, GP
