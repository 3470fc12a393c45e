"""REML and ML of a linear hierarchy, with its coefficients integrated out, and the gradient.

    y_i = X_i theta_i + e,   theta_i ~ N(w_j, s2 S_j),   w_j ~ N(wbar, s2 S),   e ~ N(0, s2)

Covariances are relative to the residual variance ``s2``, which is profiled out: it is best at ``Q / dof`` (Pinheiro and Bates
2000, chapter 2). Twice the negative log-likelihood is then

    dof (log(2 pi s2) + 1) + sum_i log|I + A_i S_j| + sum_j log|I + C_j S| [+ log|sum_j D_j|, REML] - sum log(weights)

where ``Q`` is the least value of the penalised sum of squares, ``dof`` the number of rows [less the terms, REML], ``A_i`` is
``X_i'X_i``, ``C_i = (I + A_i S_j)^-1 A_i``, ``C_j`` the sum of the cluster's ``C_i``, and ``D_j = (I + C_j S)^-1 C_j``.
One sweep gives all of it. The gradient in ``S_j`` is the sum over the cluster's clients of

    bend - pull = (C_i - C_i P_j C_i) - f_i f_i' / s2

where ``f_i`` is the force ``S_j^-1 (theta_i - w_j)`` that ties a client to its cluster, and ``P_j`` the posterior covariance of
``w_j``. ``bend`` comes from the determinants and keeps variances small; ``pull`` comes from the sum of squares and makes them
grow. The gradient in ``S`` is the same one level up.

    IntegrateClients   node          gets    S_j; sends sums over its clients of (C_i, r_i, c_i, log|I + A_i S_j|), by cluster
                       coordinator   solves  w, P, s2
    LikelihoodSlope    node          gets    w, P; sends the sums of bend and of pull

Points that do not depend on each other, such as those of a Hessian by differences, go together: two exchanges for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from covey._typing import Floats
from covey.nodes.network import Message, Network, Node
from covey.records import Reply
from covey.solvers.direct.elimination import Marginal, Quadratic, descend, marginalise, sensitivity, solve_symmetric
from covey.variance.columns import (
    LearningState,
    NonFiniteClients,
    TermOrder,
    cached,
    client_losses,
    client_rows,
    client_spread,
    keep_results,
    working_columns,
)


@dataclass(frozen=True)
class Evaluation:
    """The criterion at one point, its derivatives, and the upper levels there. Terms are in working order.

    Attributes
    ----------
    value : twice the negative log-likelihood
    client, cluster : (1 or k, width, width) and (1, d, d), the derivatives in the covariances, ``bend - pull``
    centre : (d,) the derivative in the global model; (0,) for a linear model, which profiles it out
    pull : for clients and for clusters, the part of these derivatives that makes variances grow. In a linear model
        ``-pull / dof`` is the derivative of the logarithm of the residual variance
    top : the upper levels
    """

    value: float
    client: Floats
    cluster: Floats
    centre: Floats
    pull: tuple[Floats, Floats]
    top: UpperPosterior


@dataclass(frozen=True)
class UpperPosterior:
    """The upper levels given the covariances, which are relative to ``dispersion``.

    Attributes
    ----------
    C : (k, d, d) the precision with which the clients determine each cluster's model
    wbar, w : (d,) and (k, d), the posterior means
    force : (k, d) the forces ``S^-1 (w_j - wbar)``
    P0 : (d, d) the covariance of ``wbar``; zero for ML, which takes it as fixed
    P : (k, d, d) the posterior covariance of each cluster's model
    D : (k, d, d) the precision with which each cluster determines ``wbar``
    criterion : twice the negative log-likelihood
    dispersion, dof : the residual variance (1 for counts and classes), and its degrees of freedom
    """

    C: Floats
    wbar: Floats
    w: Floats
    force: Floats
    P0: Floats
    P: Floats
    D: Floats
    criterion: float
    dispersion: float
    dof: float


# Messages, and what a node does


@dataclass(frozen=True)
class IntegrateClients(Message["Integrated"], LearningState, label="integrate clients", phase="learn"):
    """Integrate the clients out, at each of ``m`` covariances ``S (m, 1 or k, d, d)`` of clients about their clusters.

    Where the residual is tiny beside what varies, ``c_i - 1/2 b_i'S r_i`` cancels to nothing. It equals half the sum of squares
    about the client's own fit ``t_i`` plus ``1/2 t_i'r_i``, which does not: ``about_client_fits`` asks for that.
    """

    S: Floats
    order: TermOrder
    about_client_fits: bool = False

    def at(self, node: Node) -> Integrated:
        node.keep(self)
        tree, parts = node.data.hierarchy, []
        for marginal in _integrated(node, self):
            seen = marginal.seen
            if self.about_client_fits:
                fits, squares = _client_fits(node, self.order)
                seen = replace(seen, c=tree.sum_up(0.5 * (squares + np.einsum("ia,ia->i", fits, marginal.r))))
            parts.append((seen.C, seen.r, seen.c, seen.n, marginal.volume.sum()))
        C, r, c, n, volume = (np.stack(each) for each in zip(*parts, strict=True))
        return Integrated(Quadratic(C, r, c, n), volume)


@dataclass(frozen=True)
class Integrated(Reply):
    """The sum over a node's clients of what each cluster sees of them, and of log-determinants (``volume``), by point."""

    seen: Quadratic
    volume: Floats

    def point(self, at: int) -> Quadratic:
        seen = self.seen
        return Quadratic(seen.C[at], seen.r[at], seen.c[at], seen.n[at])


@dataclass(frozen=True)
class LikelihoodSlope(Message["Slopes"], label="slope of the likelihood", phase="learn"):
    """The clusters' means ``w (m, k, d)`` and covariances ``P (m, k, d, d)``, at the points that were asked about last."""

    w: Floats
    P: Floats

    def at(self, node: Node) -> Slopes:
        asked = node.state(IntegrateClients)
        width, ptr = asked.order.width, node.data.hierarchy.cluster_ptr
        points = zip(_integrated(node, asked), self.w, self.P, strict=True)
        sums = [sensitivity(marginal, width, ptr, w, P) for marginal, w, P in points]
        bend, pull = (np.stack(each) for each in zip(*sums, strict=True))
        if asked.S.shape[1] == 1:  # one covariance for all clusters: nothing is asked of each
            bend, pull = bend.sum(axis=1, keepdims=True), pull.sum(axis=1, keepdims=True)
        return Slopes(bend, pull)


@dataclass(frozen=True)
class Slopes(Reply):
    """Sums over clients of ``bend`` and ``pull``, ``(m, 1 or k, width, width)``; the gradient in ``S_j`` is ``bend - pull``."""

    bend: Floats
    pull: Floats


@dataclass(frozen=True)
class FinishLinear(Message[NonFiniteClients], label="finish linear", phase="learn"):
    """Keep the clients' models, given their covariance ``S (1 or k, d, d)`` and their clusters' models ``w (k, d)``."""

    S: Floats
    order: TermOrder
    w: Floats

    def at(self, node: Node) -> NonFiniteClients:
        losses, origin = client_losses(node, self.order.terms), working_columns(node).origin
        spread = client_spread(node, self.S, self.order)
        theta, _ = descend(losses.C, losses.r, spread, node.data.hierarchy.parent, self.w)
        return keep_results(node, origin + theta[:, self.order.inverse], client_losses(node), origin)


def _integrated(node: Node, asked: IntegrateClients) -> tuple[Marginal, ...]:
    """Each client's part of the likelihood, at each point."""
    columns, order = working_columns(node), asked.order

    def make() -> tuple[Marginal, ...]:
        losses, ptr = client_losses(node, order.terms), node.data.hierarchy.cluster_ptr
        return tuple(marginalise(losses, client_spread(node, S, order), ptr) for S in asked.S)

    return cached(node, "integrated", (asked.S, *order.key, columns.shift, columns.origin), make)


def _client_fits(node: Node, order: TermOrder) -> tuple[Floats, Floats]:
    """Each client's own least-squares fit, relative to the origin, and the sum of squares about it."""
    columns = working_columns(node)

    def make() -> tuple[Floats, Floats]:
        losses = client_losses(node)
        fits = solve_symmetric(losses.C, losses.r)
        squares = 2 * node.loss.value(client_rows(node), columns.origin + fits)
        return np.ascontiguousarray(fits[:, order.terms]), squares

    return cached(node, "client fits", (columns.shift, columns.origin, order.terms), make)


# The coordinator


@dataclass(frozen=True)
class GaussianLikelihood:
    """The criterion over a network whose nodes know their working columns; ``log_weights`` is the sum over all rows."""

    network: Network
    order: TermOrder
    reml: bool
    log_weights: float
    about_client_fits: bool = False

    def __call__(self, S_client: Floats, S_cluster: Floats) -> Evaluation:
        """At given covariances, ``(1 or k, d, d)`` of clients and ``(1, d, d)`` of clusters."""
        return self.many([(S_client, S_cluster)])[0]

    def many(self, points: Sequence[tuple[Floats, Floats]]) -> list[Evaluation]:
        """At several of these, in two exchanges."""
        sums = self.network.ask(IntegrateClients(np.stack([S for S, _ in points]), self.order, self.about_client_fits))
        volume = sums.volume - self.log_weights
        tops = [upper(sums.point(at), float(volume[at]), S[0], self.reml) for at, (_, S) in enumerate(points)]
        slopes = self.network.ask(LikelihoodSlope(np.stack([top.w for top in tops]), np.stack([top.P for top in tops])))
        return [_evaluation(top, bend, pull) for top, bend, pull in zip(tops, slopes.bend, slopes.pull, strict=True)]


def _evaluation(top: UpperPosterior, bend: Floats, pull: Floats) -> Evaluation:
    cluster_bend = (top.D - top.D @ (top.P0 @ top.D)).sum(axis=0, keepdims=True)
    cluster_pull = (top.force.T @ top.force)[None]
    pull, cluster_pull = pull / top.dispersion, cluster_pull / top.dispersion
    return Evaluation(top.criterion, bend - pull, cluster_bend - cluster_pull, np.empty(0), (pull, cluster_pull), top)


def upper(seen: Quadratic, volume: float, S: Floats, reml: bool) -> UpperPosterior:
    """Solve for the upper levels, from what clusters see of their clients: the coordinator's part of the sweep."""
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
    P = cluster_covariances(seen.C, S, P0)
    return UpperPosterior(seen.C, wbar, wbar + force @ S, force, P0, P, D, float(criterion), dispersion, dof)


def cluster_covariances(C: Floats, S: Floats, P0: Floats) -> Floats:
    """The posterior covariance of each ``w_j``, given that of ``wbar``: ``J S + J P0 J'``, ``J = (I + S C_j)^-1``."""
    d = len(S)
    K = np.eye(d) + S @ C
    solved = np.linalg.solve(K, np.broadcast_to(np.concatenate([S, np.eye(d)], axis=1), (len(C), d, 2 * d)))
    JS, J = solved[:, :, :d], solved[:, :, d:]
    P: Floats = 0.5 * (JS + JS.swapaxes(1, 2)) + J @ P0 @ J.swapaxes(1, 2)
    return P


def invert(A: Floats) -> tuple[Floats, float]:
    """The inverse and the log-determinant of a positive definite matrix, accurate for columns of any units."""
    size = np.sqrt(np.diag(A))
    values, vectors = np.linalg.eigh(A / (size[:, None] * size))
    half = vectors / np.sqrt(np.maximum(values, np.finfo(float).tiny)) / size[:, None]
    return half @ half.T, float(np.log(np.maximum(values, np.finfo(float).tiny)).sum() + 2 * np.log(size).sum())
