"""The likelihood of a linear hierarchy with its coefficients integrated out, and its gradient: REML and ML.

    y_i = X_i theta_i + e,   theta_i ~ N(w_j, s2 S_j),   w_j ~ N(wbar, s2 S),   e ~ N(0, s2)

With everything relative to the residual variance ``s2``, which is then best at ``Q / dof``, twice the negative logarithm is

    dof (log(2 pi s2) + 1) + sum_i log|I + A_i S_j| + sum_j log|I + C_j S| [+ log|sum_j D_j|, REML] - sum log(weights)

where ``Q`` is the least value of the penalised sum of squares, ``dof`` the rows [less the terms, REML]. All of it comes out
of one sweep. So does the gradient: to a change of ``S_j`` the criterion answers with the sum over the cluster's clients of
``C_i - C_i P_j C_i - f_i f_i' / s2``, where ``f_i`` is the force that holds a client at its cluster and ``P_j`` the
covariance of ``w_j``; to a change of ``S`` with the same one level up.

    node          sends   sum of (C_i, r_i, c_i, log|I + A_i S_j|) over its clients, for each cluster
    coordinator   solves  w, P, s2
    node          gets    w, P; sends the sums of C_i - C_i P C_i and of f_i f_i'
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from covey._typing import Floats
from covey.hierarchy import Hierarchy
from covey.solvers.elimination import Quadratic, Spread, descend, marginalise, sensitivity


@dataclass(frozen=True)
class Evaluation:
    """The criterion at one point, its derivatives in the covariances and in the global model, and the models there.

    ``pull`` is, for clients and for clusters, the part of these derivatives that comes from the forces: what makes variances
    grow. ``-pull / dof`` is the derivative of the logarithm of the residual variance.
    """

    value: float
    client: Floats
    cluster: Floats
    centre: Floats
    pull: tuple[Floats, Floats]
    top: Top


@dataclass(frozen=True)
class Top:
    """The upper levels given the covariances: means, forces, covariances relative to ``dispersion``."""

    wbar: Floats
    w: Floats
    force: Floats
    P0: Floats
    P: Floats
    D: Floats
    criterion: float
    dispersion: float
    dof: float


@dataclass(frozen=True)
class Gaussian:
    """The criterion for clients whose normal equations are ``units``.

    Where the residual is tiny beside what varies, ``c_i - 1/2 b_i'S r_i`` cancels to nothing; it equals half the sum of squares
    about the client's own fit ``t_i`` plus ``1/2 t_i'r_i``, which does not. ``alone`` is these fits and sums, if needed.
    """

    units: Quadratic
    tree: Hierarchy
    reml: bool
    log_weights: float
    widths: tuple[int, int]
    alone: tuple[Floats, Floats] | None = None

    def __call__(self, S_client: Floats, S_cluster: Floats) -> Evaluation:
        """At given covariances, ``(1 or k, d, d)`` of clients and ``(1, d, d)`` of clusters."""
        own = marginalise(self.units, self.spread(S_client), self.tree.cluster_ptr)
        seen = own.seen
        if self.alone is not None:
            fits, squares = self.alone
            seen = replace(seen, c=self.tree.sum_up(0.5 * (squares + np.einsum("ia,ia->i", fits, own.r))))
        top = upper(seen, float(own.volume.sum()) - self.log_weights, S_cluster[0], self.reml)
        bend, pull = sensitivity(own, self.widths[0], self.tree.cluster_ptr, top.w, top.P)
        if len(S_client) == 1:
            bend, pull = bend.sum(axis=0, keepdims=True), pull.sum(axis=0, keepdims=True)
        above = (top.D - top.D @ (top.P0 @ top.D)).sum(axis=0, keepdims=True)
        pulled = (top.force.T @ top.force)[None]
        pull, pulled = pull / top.dispersion, pulled / top.dispersion
        return Evaluation(top.criterion, bend - pull, above - pulled, np.empty(0), (pull, pulled), top)

    def spread(self, S_client: Floats) -> Spread:
        shape = S_client if len(S_client) == 1 else S_client[self.tree.parent]
        return Spread.of_covariances(shape, self.tree.n_clients, self.widths[0])

    def theta(self, S_client: Floats, top: Top) -> Floats:
        return descend(self.units.C, self.units.r, self.spread(S_client), self.tree.parent, top.w)[0]


def upper(seen: Quadratic, volume: float, S: Floats, reml: bool) -> Top:
    """What the coordinator makes of the sum of the nodes' messages."""
    d = seen.r.shape[1]
    K = np.eye(d) + seen.C @ S
    solved = np.linalg.solve(K, np.concatenate([seen.C, seen.r[:, :, None]], axis=2))
    D, q = 0.5 * (solved[:, :, :d] + solved[:, :, :d].swapaxes(1, 2)), solved[:, :, d]
    volume += float(np.linalg.slogdet(K)[1].sum())
    whole, total = D.sum(axis=0), q.sum(axis=0)
    inverse, log_whole = invert(whole)
    wbar = inverse @ total
    rows = float(seen.n.sum())
    dof = rows - d if reml else rows
    squares = 2.0 * float(seen.c.sum()) - float(np.einsum("ja,ab,jb->", seen.r, S, q)) - float(wbar @ total)
    dispersion = max(squares, 0.0) / dof
    with np.errstate(divide="ignore"):
        criterion = dof * (np.log(2 * np.pi * dispersion) + 1.0) + volume + (log_whole if reml else 0.0)
    force = q - D @ wbar
    P0 = inverse if reml else np.zeros_like(inverse)
    return Top(wbar, wbar + force @ S, force, P0, below(seen.C, S, P0), D, float(criterion), dispersion, dof)


def below(C: Floats, S: Floats, P0: Floats) -> Floats:
    """The covariance of each ``w_j`` given that of ``wbar``: ``(I + S C_j)^-1 S + J P0 J'``, ``J = (I + S C_j)^-1``."""
    d = len(S)
    K = np.eye(d) + S @ C
    solved = np.linalg.solve(K, np.broadcast_to(np.concatenate([S, np.eye(d)], axis=1), (len(C), d, 2 * d)))
    own, J = solved[:, :, :d], solved[:, :, d:]
    P: Floats = 0.5 * (own + own.swapaxes(1, 2)) + J @ P0 @ J.swapaxes(1, 2)
    return P


def invert(A: Floats) -> tuple[Floats, float]:
    """The inverse of a positive definite matrix and the logarithm of its determinant, whatever the units of its columns."""
    size = np.sqrt(np.diag(A))
    values, vectors = np.linalg.eigh(A / (size[:, None] * size))
    half = vectors / np.sqrt(np.maximum(values, np.finfo(float).tiny)) / size[:, None]
    return half @ half.T, float(np.log(np.maximum(values, np.finfo(float).tiny)).sum() + 2 * np.log(size).sum())
