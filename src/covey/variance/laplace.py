"""The Laplace approximation to the likelihood of a hierarchy of counts or of yes and no, and its gradient.

At given covariances and global model ``wbar`` let ``theta, w`` be the mode of the penalised likelihood ``F`` (Newton finds
it) and ``H_i`` each client's Hessian there. Twice the negative logarithm is then, to second order about the mode,

    2 F + sum_i log|I + H_i S_j| + sum_j log|I + C_j S|

as glmer has it with nAGQ = 1: ``wbar`` is a parameter like the covariances. The gradient has the linear model's part at the
mode held still and one for the mode's own motion. With ``P_i`` the covariance of ``theta_i`` and ``g_i = sum_l f'''(margin_l)
(x_l'P_i x_l) x_l``, the determinants' slope in ``theta_i``, that part takes one sweep for the loss ``1/2 t'H_i t - g_i't``: let
``q_i`` and ``p_j`` be the forces in its solution, ``u_i`` and ``v_j`` those at the mode, then

    S_j:  sum_i (C_i - C_i P_j C_i - u_i u_i' + (q_i u_i' + u_i q_i') / 2)   wbar:  sum_j (p_j - 2 v_j)
    S:    sum_j (D_j - v_j v_j' + (p_j v_j' + v_j p_j') / 2)

Each of these is a sum over clients, and adds over nodes:

    node          goes with Newton to the mode; sends the sums of C_i and log|I + H_i S_j|, for each cluster
    coordinator   solves  P, the covariance of w
    node          gets    P; sends the sums of what its clients' clusters see of g_i
    coordinator   solves  p and the clusters' solution of the second sweep
    node          gets    that; sends the sums of C_i - C_i P C_i, of u_i u_i' and of (q_i u_i' + u_i q_i') / 2
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from covey._typing import Floats
from covey.data import GroupedData
from covey.errors import SolverError
from covey.losses import Loss, loss_of
from covey.solvers.elimination import Marginal, Quadratic, Spread, descend, eliminate, marginalise, posterior, sensitivity
from covey.solvers.newton import Clients, Move, NodeState, Point, Report, Stage, coordinate, node_move, node_start
from covey.solvers.newton import Top as Upper
from covey.solvers.sweep import logs_of_counts, solve_top
from covey.variance.gaussian import Evaluation, Top, below

_STEPS = 60  # of Newton to a mode, at most; a few suffice from that of a nearby point


# The node


def node_curvature(node: Clients, at: Point) -> Marginal:
    """What the clusters see of the curvature at the mode, and the sum of log-determinants; what is each client's own stays."""
    H = at.here.hessian
    nothing = np.zeros(len(H))
    return marginalise(Quadratic(H, np.zeros_like(at.u), nothing, nothing), node.spread, node.data.hierarchy.cluster_ptr)


def node_bends(node: Clients, at: Point, P: Floats) -> tuple[Floats, Floats]:
    """Each client's ``g_i``, which stays, and what its cluster sees of it, summed: ``(k, d)``."""
    tree, H = node.data.hierarchy, at.here.hessian
    g = node.loss.bend(node.data, at.theta, posterior(H, node.spread, tree.parent, P))
    nothing = np.zeros(len(H))
    return g, eliminate(Quadratic(H, g, nothing, nothing), node.spread, tree.cluster_ptr).r


def node_slopes(node: Clients, at: Point, own: Marginal, g: Floats, P: Floats, y: Floats) -> tuple[Floats, Floats]:
    """The sums of what holds variances down, and of what makes them grow, by cluster; ``y`` solves the second sweep above."""
    tree, width = node.data.hierarchy, node.spread.width
    _, q = descend(at.here.hessian, g, node.spread, tree.parent, y)
    bend, _ = sensitivity(own, width, tree.cluster_ptr, np.zeros_like(y), P)
    pull, moving = _pulls(at.u[:, :width], q[:, :width])
    return bend + tree.sum_up(moving), tree.sum_up(pull)


# The coordinator, with one node that holds everybody


@dataclass
class Mode:
    """Where the last search ended: the forces, from which any other covariances begin."""

    u: Floats
    v: Floats


@dataclass
class Laplace:
    """The criterion for the rows themselves. It remembers the last mode, to begin the next search there."""

    data: GroupedData
    loss: Loss
    widths: tuple[int, int]
    tol: float
    mode: Mode | None = field(init=False, default=None)
    exchanges: int = field(init=False, default=0)
    state: NodeState = field(init=False)

    def forget(self) -> None:
        """Begin the next search anew."""
        self.mode = None

    def __call__(self, S_client: Floats, S_cluster: Floats, wbar: Floats) -> Evaluation:
        """At given covariances, ``(1 or k, d, d)`` of clients and ``(1, d, d)`` of clusters, and global model."""
        data, tree, S = self.data, self.data.hierarchy, S_cluster[0]
        shape = S_client if len(S_client) == 1 else S_client[tree.parent]
        node = Clients(data, self.loss, Spread.of_covariances(shape, data.n_clients, self.widths[0]))
        above = Spread.of_covariances(S_cluster, data.n_clusters, self.widths[1])
        objective, upper = self._settle(node, above, wbar)
        at = self.state.now

        own = node_curvature(node, at)
        K = np.eye(len(S)) + own.seen.C @ S
        D = np.linalg.solve(K, own.seen.C)
        P = below(own.seen.C, S, np.zeros_like(S))
        value = 2 * objective + float(own.volume.sum()) + float(np.linalg.slogdet(K)[1].sum())
        g, lifted = node_bends(node, at, P)
        p = np.linalg.solve(K, lifted[:, :, None])[:, :, 0]
        bend, pull = node_slopes(node, at, own, g, P, p @ S)

        if len(S_client) == 1:
            bend, pull = bend.sum(axis=0, keepdims=True), pull.sum(axis=0, keepdims=True)
        pulled, moving = (each.sum(axis=0, keepdims=True) for each in _pulls(upper.v, p))
        held = D.sum(axis=0, keepdims=True) + moving
        top = Top(wbar, upper.w, upper.v, np.zeros_like(S), P, D, value, 1.0, np.inf)
        return Evaluation(value, bend - pull, held - pulled, (p - 2 * upper.v).sum(axis=0), (pull, pulled), top)

    def _settle(self, node: Clients, above: Spread, wbar: Floats) -> tuple[float, Upper]:
        """Find the mode: the objective there, and the upper levels."""
        try:
            return self._newton(node, above, wbar)
        except (SolverError, np.linalg.LinAlgError):  # begun too far away, at forces that other covariances left behind
            self.forget()
            return self._newton(node, above, wbar)

    def _newton(self, node: Clients, above: Spread, wbar: Floats) -> tuple[float, Upper]:
        mode = _first_mode(node, above, wbar) if self.mode is None else self.mode
        w = wbar + above.moved(mode.v)
        theta = self.data.hierarchy.down(w) + node.spread.moved(mode.u)
        self.state, report = node_start(node, theta, mode.u)

        def ask(move: Move) -> Report:
            self.state, answer = node_move(node, self.state, move)
            return answer

        stage = Stage(Upper(w, mode.v, wbar), report.mu)
        stage, end, _ = coordinate(ask, report, stage, above, tol=self.tol, max_iter=_STEPS, fixed=True)
        if not end.converged:
            raise SolverError(f"No mode was found in {_STEPS} Newton steps.")
        self.mode = Mode(self.state.now.u, stage.top.v)
        self.exchanges = end.exchanges + 3
        return end.objective, stage.top


def _first_mode(node: Clients, above: Spread, wbar: Floats) -> Mode:
    """Where to begin when no mode is known: at the global model, or for counts at the sweep for their logs.

    From a mean far below a count Newton's step would go beyond all bounds.
    """
    data, tree = node.data, node.data.hierarchy
    if node.loss.name != "poisson":
        return Mode(np.zeros((data.n_clients, data.n_terms)), np.zeros((data.n_clusters, data.n_terms)))
    near = loss_of("gaussian").expand(logs_of_counts(data), np.tile(wbar, (data.n_clients, 1)))
    nothing = np.zeros(data.n_clients)
    seen = eliminate(Quadratic(near.hessian, -near.gradient, nothing, nothing), node.spread, tree.cluster_ptr)
    w, v, _ = solve_top(seen, above, settle=lambda centre, *_: 0.0 * centre)
    _, u = descend(near.hessian, -near.gradient, node.spread, tree.parent, w)
    return Mode(u, v)


def _pulls(u: Floats, q: Floats) -> tuple[Floats, Floats]:
    """``u u'`` and ``(q u' + u q') / 2`` of each unit."""
    crossed = q[:, :, None] * u[:, None, :]
    return u[:, :, None] * u[:, None, :], 0.5 * (crossed + crossed.swapaxes(1, 2))
