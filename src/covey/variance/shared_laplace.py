"""Laplace's approximation with sparse shared columns, for classes and counts.

The coefficients ``beta`` of these columns are parameters, like the global model. There may be thousands, so each evaluation
finds the best ones for its covariances and its global model, by steps that take the second derivative of the profile at the
mode (:mod:`covey.solvers.direct.shared`). The best ``beta`` needs no part in the gradient of the others. With the terms of
:mod:`.laplace_likelihood`, and ``t_i`` the solution of the second sweep, the gradient in ``beta`` is

    Z'(2 f' + f''' v - f'' X t)      v_l = x_l'P_i x_l

At the end of a search the standard errors of ``beta`` are those of the profile, without the determinants.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import sparse

from covey._typing import Bools, Floats, Ints
from covey.errors import SolverError
from covey.nodes.network import Node, Request
from covey.solvers.direct.elimination import absorb_leading, invert, posterior
from covey.solvers.direct.hessians import leading_products
from covey.solvers.direct.profile import KEPT, Prepared, PutShared, shared_of
from covey.solvers.direct.shared import Layout, SharedSums, SharedTop, eliminate_upper, sum_shared
from covey.solvers.result import SharedCoefficients
from covey.variance.columns import Survey, client_rows, from_cache
from covey.variance.laplace_likelihood import FinishMode, LaplaceCriterion, ModeState, SumBends, at_mode
from covey.variance.linear_likelihood import Criterion, Evaluation
from covey.variance.parameters import Shape
from covey.variance.shared_likelihood import symmetric_product
from covey.variance.upper import UpperPosterior

_EXACT = 1e-16  # of twice the log-likelihood, which a further step would gain
_SLOW = 0.1  # a step that leaves more than this share of the gain of the last needs a new second derivative
_MOST_STEPS = 60


@dataclass(frozen=True)
class ModeGradient(Request[Floats]):
    """Return the gradient in the coefficients of the sparse columns; ``P``, ``y`` as in :class:`.SlopeAtMode`."""

    P: Floats
    y: Floats
    dispersion: float

    def at(self, node: Node) -> Floats:
        clients, _, g, _ = at_mode(node, self.P)
        now, data, loss = node.state(ModeState).state.now, clients.data, node.loss
        curves, parent = loss.expand_rows(data, now.theta).curves, data.hierarchy.parent
        t, _ = clients.hessians(now).descend(g, clients.spread, parent, self.y)
        A = leading_products(data, curves, np.arange(data.n_terms))
        V = posterior(A, clients.spread, parent, self.P)
        owner, margin = data.client_of_row, data.margin(now.theta)
        variance = np.einsum("la,lab,lb->l", data.X, V[owner], data.X)
        weights = 1.0 if data.weights is None else data.weights
        parts = 2 * loss.slopes(margin, data.y) / self.dispersion + loss.thirds(margin, data.y) * variance
        moved = curves * np.einsum("la,la->l", data.X, t[owner])
        return np.asarray(shared_of(data).Z.T @ (weights * parts - moved))


@dataclass(frozen=True)
class ModeSums(Request[SharedSums]):
    """Eliminate the clients at the mode, whose first ``q`` terms vary. ``common`` says which other terms join the columns."""

    q: int
    order: Ints
    common: Bools

    def at(self, node: Node) -> SharedSums:
        data, mode, q = client_rows(node, self.order), node.state(ModeState), self.q

        def layout() -> Layout:
            whole = sparse.hstack([sparse.csr_matrix(data.X[:, q:][:, self.common]), shared_of(data).Z], format="csr")
            return Layout.of(whole, whole.shape[1], data.client_ptr, data.hierarchy)

        S = mode.S if len(mode.S) == 1 else mode.S[data.hierarchy.parent]
        curves = node.loss.expand_rows(data, mode.state.now.theta).curves
        found = from_cache(node, KEPT, (self.order, np.array([q]), self.common), layout)
        return sum_shared(data, found, curves, np.ascontiguousarray(S[:, :q, :q]), response=False)


class SharedLaplaceCriterion(LaplaceCriterion):
    """Laplace's approximation with sparse columns, at the best coefficients of these."""

    def __init__(self, survey: Survey, shape: Shape, prepared: Prepared) -> None:
        self.prepared, self.more, self.beta = prepared, len(prepared.start), np.zeros(len(prepared.start))
        self._factor: SharedTop | None = None
        self._found: tuple[Floats, Floats] | None = None
        super().__init__(survey, shape)
        x = self.start(0.5, 0.5)
        here = self.evaluate(x).top
        D, more = invert(here.D.sum(axis=0), self.free)[0], self._uncertain(x)[1]
        values, vectors = np.linalg.eigh((D + more)[np.ix_(self.free, self.free)])
        self.half = np.eye(len(self.terms))[:, self.free] @ (vectors * (np.sqrt(np.maximum(values, 0.0)) * self.scale))

    def evaluate(self, x: Floats) -> Evaluation:
        count, beta, step, before, last = self.evaluations + 1, self.beta, np.zeros(self.more), np.inf, np.inf
        for _ in range(_MOST_STEPS):
            self.network.network.every(PutShared(beta + step))
            here = super().evaluate(x)
            if here.value > before + 1e-9 * (1.0 + abs(before)) and last > 1e-6:
                step, self._factor = 0.5 * step, None  # too long
                continue
            beta, before = beta + step, here.value
            half = 0.5 * self._gradient(x, here.top)
            gain = self._gain(x, half)
            if gain > _SLOW * last:
                self._factor = None
                gain = self._gain(x, half)
            if gain <= _EXACT:
                self.beta, self.evaluations = beta, count
                return here
            last, step = gain, -self._step(x, half)
        raise SolverError(f"The coefficients of the sparse columns were not found in {_MOST_STEPS} steps.")

    def _gain(self, x: Floats, half: Floats) -> float:
        return 2.0 * float(half @ self._step(x, half))

    def _step(self, x: Floats, half: Floats) -> Floats:
        """The step for half of a gradient, with the second derivative at this mode or an earlier one."""
        if self._factor is None:
            none = np.zeros(len(self.free), dtype=bool)
            self._factor = self._eliminate(x, none)
        return self.scale**2 * self._factor.solve(half)

    def _eliminate(self, x: Floats, free: Bools) -> SharedTop:
        """Eliminate clients, clusters, and the global coefficients that are ``free``; the others are fixed."""
        q = max(self.parameters.client.width, self.parameters.cluster.width)
        (sums,) = self.network.network.every(ModeSums(q, self.order.terms, free[q:]))
        return eliminate_upper(sums, self.covariances(x)[1][:, :q, :q], free[:q])

    def _gradient(self, x: Floats, top: UpperPosterior) -> Floats:
        S, width = self.covariances(x)[1][0], self.parameters.cluster.width
        bends = self.network.ask(SumBends(top.P))
        p = absorb_leading(top.C, bends.lifted, S, width)[1]
        (found,) = self.network.network.every(ModeGradient(top.P, p @ S, top.dispersion))
        return np.asarray(found)

    def _uncertain(self, x: Floats) -> tuple[Floats, Floats]:
        """The variances of the sparse columns, and what these add to the covariance of the global model."""
        d, q = len(self.terms), max(self.parameters.client.width, self.parameters.cluster.width)
        top, common = self._eliminate(x, self.free), self.free[q:]
        u = int(common.sum())
        L = np.tril(top.L[:u, :u])
        P = top.covariance()
        variances = np.diag(P)[u:].copy()
        if u:
            root = np.linalg.inv(L)
            P[:u, :u] -= np.tril(root.T @ root)
        M = np.zeros((d, len(P)))
        M[:q] = top.response
        M[np.flatnonzero(common) + q, np.arange(u)] = 1.0
        return variances, symmetric_product(P, M) @ M.T

    def start_from(self, smaller: Criterion, x: Floats, level: str) -> Floats:
        if isinstance(smaller, SharedLaplaceCriterion):
            self.beta = smaller.beta
        return super().start_from(smaller, x, level)

    def finish_message(self, x: Floats, top: UpperPosterior) -> FinishMode:
        self._found = self.beta, self.scale * np.sqrt(self._uncertain(x)[0])
        return super().finish_message(x, top)

    def shared(self, dispersion: float) -> SharedCoefficients | None:
        return None if self._found is None else self.prepared.coefficients(*self._found)
