"""The likelihood of a linear hierarchy with its coefficients integrated out, and its gradient: REML and ML.

    y_i = X_i theta_i + e,   theta_i ~ N(w_j, s2 S_j),   w_j ~ N(wbar, s2 S),   e ~ N(0, s2)

With everything relative to the residual variance ``s2``, which is then best at ``Q / dof``, twice the negative logarithm is

    dof (log(2 pi s2) + 1) + sum_i log|I + A_i S_j| + sum_j log|I + C_j S| [+ log|sum_j D_j|, REML] - sum log(weights)

where ``Q`` is the least value of the penalised sum of squares, ``dof`` the rows [less the terms, REML]. All of it comes out
of one sweep. So does the gradient: to a change of ``S_j`` the criterion answers with the sum over the cluster's clients of
``C_i - C_i P_j C_i - f_i f_i' / s2``, where ``f_i`` is the force that holds a client at its cluster and ``P_j`` the
covariance of ``w_j``; to a change of ``S`` with the same one level up.

    Integrate   node          gets    S_j; sends the sum of (C_i, r_i, c_i, log|I + A_i S_j|) over its clients, for each cluster
                coordinator   solves  w, P, s2
    Slope       node          gets    w, P; sends the sums of C_i - C_i P C_i and of f_i f_i'

Points that do not depend on each other, such as those of a Hessian by differences, go together: two exchanges for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from covey._typing import Floats
from covey.nodes.messages import Message
from covey.nodes.network import Network
from covey.nodes.node import Node
from covey.records import Reply
from covey.solvers.direct.elimination import Marginal, Quadratic, descend, marginalise, sensitivity, solve_symmetric
from covey.variance.frame import (
    LearningState,
    NonFiniteClients,
    TermOrder,
    finish_at,
    frame_at,
    kept,
    rows_at,
    spread_at,
    units_at,
)


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
    top: UpperPosterior


@dataclass(frozen=True)
class UpperPosterior:
    """The upper levels given the covariances: means, forces, covariances relative to ``dispersion``; ``C`` is what is seen."""

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


# What travels, and the node


@dataclass(frozen=True)
class IntegrateClients(Message["Integrated"], LearningState, label="integrate clients", phase="learn"):
    """integrate your clients out, at each of ``m`` covariances ``S (m, 1 or k, d, d)`` of clients about their clusters.

    Where the residual is tiny beside what varies, ``c_i - 1/2 b_i'S r_i`` cancels to nothing; it equals half the sum of squares
    about the client's own fit ``t_i`` plus ``1/2 t_i'r_i``, which does not: ``sharp`` asks for that.
    """

    S: Floats
    layout: TermOrder
    sharp: bool = False

    def at(self, node: Node) -> Integrated:
        node.keep(self)
        tree, parts = node.data.hierarchy, []
        for own in _integrated(node, self):
            seen = own.seen
            if self.sharp:
                fits, squares = _alone(node, self.layout)
                seen = replace(seen, c=tree.sum_up(0.5 * (squares + np.einsum("ia,ia->i", fits, own.r))))
            parts.append((seen.C, seen.r, seen.c, seen.n, own.volume.sum()))
        C, r, c, n, volume = (np.stack(each) for each in zip(*parts, strict=True))
        return Integrated(Quadratic(C, r, c, n), volume)


@dataclass(frozen=True)
class Integrated(Reply):
    """what each cluster sees of a node's clients, and the sum of log-determinants, at each point."""

    seen: Quadratic
    volume: Floats

    def point(self, at: int) -> Quadratic:
        seen = self.seen
        return Quadratic(seen.C[at], seen.r[at], seen.c[at], seen.n[at])


@dataclass(frozen=True)
class LikelihoodSlope(Message["Slopes"], label="slope of the likelihood", phase="learn"):
    """clusters' means ``w (m, k, d)`` and covariances ``P (m, k, d, d)`` at the points that were asked about last."""

    w: Floats
    P: Floats

    def at(self, node: Node) -> Slopes:
        asked = node.state(IntegrateClients)
        width, ptr = asked.layout.width, node.data.hierarchy.cluster_ptr
        points = zip(_integrated(node, asked), self.w, self.P, strict=True)
        sums = [sensitivity(own, width, ptr, w, P) for own, w, P in points]
        bend, pull = (np.stack(each) for each in zip(*sums, strict=True))
        if asked.S.shape[1] == 1:  # one covariance for all clusters: nothing is asked of each
            bend, pull = bend.sum(axis=1, keepdims=True), pull.sum(axis=1, keepdims=True)
        return Slopes(bend, pull)


@dataclass(frozen=True)
class Slopes(Reply):
    """sums of what holds variances down and of what makes them grow, ``(m, 1 or k, width, width)``."""

    bend: Floats
    pull: Floats


@dataclass(frozen=True)
class FinishLinear(Message[NonFiniteClients], label="finish linear", phase="learn"):
    """the covariance of your clients ``S (1 or k, d, d)`` and their clusters' models ``w (k, d)`` for good."""

    S: Floats
    layout: TermOrder
    w: Floats

    def at(self, node: Node) -> NonFiniteClients:
        units, origin = units_at(node, self.layout.order), frame_at(node).origin
        spread = spread_at(node, self.S, self.layout)
        theta, _ = descend(units.C, units.r, spread, node.data.hierarchy.parent, self.w)
        return finish_at(node, origin + theta[:, self.layout.back], units_at(node), origin)


def _integrated(node: Node, asked: IntegrateClients) -> tuple[Marginal, ...]:
    """Each client's own part at each point; kept from one request to the next, or made again."""
    frame, layout = frame_at(node), asked.layout

    def make() -> tuple[Marginal, ...]:
        units, ptr = units_at(node, layout.order), node.data.hierarchy.cluster_ptr
        return tuple(marginalise(units, spread_at(node, S, layout), ptr) for S in asked.S)

    return kept(node, "integrated", (asked.S, *layout.key, frame.shift, frame.origin), make)


def _alone(node: Node, layout: TermOrder) -> tuple[Floats, Floats]:
    """Each client's own fit, and the sum of squares about it."""
    frame = frame_at(node)

    def make() -> tuple[Floats, Floats]:
        units = units_at(node)
        fits = solve_symmetric(units.C, units.r)
        squares = 2 * node.loss.value(rows_at(node), frame.origin + fits)
        return np.ascontiguousarray(fits[:, layout.order]), squares

    return kept(node, "alone", (frame.shift, frame.origin, layout.order), make)


# The coordinator


@dataclass(frozen=True)
class GaussianLikelihood:
    """The criterion over any network, whose nodes know the frame; ``log_weights`` is the sum over all rows."""

    network: Network
    layout: TermOrder
    reml: bool
    log_weights: float
    sharp: bool = False

    def __call__(self, S_client: Floats, S_cluster: Floats) -> Evaluation:
        """At given covariances, ``(1 or k, d, d)`` of clients and ``(1, d, d)`` of clusters."""
        return self.many([(S_client, S_cluster)])[0]

    def many(self, points: Sequence[tuple[Floats, Floats]]) -> list[Evaluation]:
        """At several of these, in as many exchanges as at one."""
        told = self.network.ask(IntegrateClients(np.stack([S for S, _ in points]), self.layout, self.sharp))
        volume = told.volume - self.log_weights
        tops = [upper(told.point(at), float(volume[at]), S[0], self.reml) for at, (_, S) in enumerate(points)]
        slopes = self.network.ask(LikelihoodSlope(np.stack([top.w for top in tops]), np.stack([top.P for top in tops])))
        return [_evaluation(top, bend, pull) for top, bend, pull in zip(tops, slopes.bend, slopes.pull, strict=True)]


def _evaluation(top: UpperPosterior, bend: Floats, pull: Floats) -> Evaluation:
    above = (top.D - top.D @ (top.P0 @ top.D)).sum(axis=0, keepdims=True)
    pulled = (top.force.T @ top.force)[None]
    pull, pulled = pull / top.dispersion, pulled / top.dispersion
    return Evaluation(top.criterion, bend - pull, above - pulled, np.empty(0), (pull, pulled), top)


def upper(seen: Quadratic, volume: float, S: Floats, reml: bool) -> UpperPosterior:
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
    return UpperPosterior(seen.C, wbar, wbar + force @ S, force, P0, below(seen.C, S, P0), D, float(criterion), dispersion, dof)


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
