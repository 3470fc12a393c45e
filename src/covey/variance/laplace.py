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

Each of these is a sum over clients: a node sends it as such.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from covey._typing import Floats
from covey.data import GroupedData
from covey.errors import SolverError
from covey.losses import Loss
from covey.solvers.elimination import Quadratic, Spread, descend, eliminate, marginalise, posterior, sensitivity
from covey.solvers.newton import Move, Node, NodeState, Report, Stage, coordinate, node_move, node_start
from covey.solvers.newton import Top as Upper
from covey.variance.gaussian import Evaluation, Top, below

_STEPS = 60  # of Newton to a mode, at most; a few suffice from that of a nearby point


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
    mode: Mode = field(init=False)
    state: NodeState = field(init=False)

    def __post_init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin the next search at the global model itself."""
        d = self.data.n_terms
        self.mode = Mode(np.zeros((self.data.n_clients, d)), np.zeros((self.data.n_clusters, d)))

    def __call__(self, S_client: Floats, S_cluster: Floats, wbar: Floats) -> Evaluation:
        """At given covariances, ``(1 or k, d, d)`` of clients and ``(1, d, d)`` of clusters, and global model."""
        data, tree, S = self.data, self.data.hierarchy, S_cluster[0]
        shape = S_client if len(S_client) == 1 else S_client[tree.parent]
        below_cluster = Spread.of_covariances(shape, data.n_clients, self.widths[0])
        below_whole = Spread.of_covariances(S_cluster, data.n_clusters, self.widths[1])
        objective, upper = self._settle(below_cluster, below_whole, wbar)
        u, H = self.state.now.u, self.state.now.here.hessian

        nothing = np.zeros(data.n_clients)
        clients = Quadratic(H, np.zeros_like(u), nothing, nothing)
        own = marginalise(clients, below_cluster, tree.cluster_ptr)
        seen = own.seen
        K = np.eye(len(S)) + seen.C @ S
        D = np.linalg.solve(K, seen.C)
        G = below(seen.C, S, np.zeros_like(S))
        value = 2 * objective + float(own.volume.sum()) + float(np.linalg.slogdet(K)[1].sum())

        bend, _ = sensitivity(own, self.widths[0], tree.cluster_ptr, np.zeros_like(upper.w), G)
        g = self.loss.bend(data, self.state.now.theta, posterior(H, below_cluster, tree.parent, G))
        lifted = eliminate(Quadratic(H, g, nothing, nothing), below_cluster, tree.cluster_ptr).r
        p = np.linalg.solve(K, lifted[:, :, None])[:, :, 0]
        _, q = descend(H, g, below_cluster, tree.parent, p @ S)

        width = self.widths[0]
        pull, moving = _pulls(u[:, :width], q[:, :width])
        bend, pull = bend + tree.sum_up(moving), tree.sum_up(pull)
        if len(S_client) == 1:
            bend, pull = bend.sum(axis=0, keepdims=True), pull.sum(axis=0, keepdims=True)
        pulled, moving = (each.sum(axis=0, keepdims=True) for each in _pulls(upper.v, p))
        above = D.sum(axis=0, keepdims=True) + moving
        top = Top(wbar, upper.w, upper.v, np.zeros_like(S), G, D, value, 1.0, np.inf)
        return Evaluation(value, bend - pull, above - pulled, (p - 2 * upper.v).sum(axis=0), (pull, pulled), top)

    def _settle(self, below_cluster: Spread, below_whole: Spread, wbar: Floats) -> tuple[float, Upper]:
        """Find the mode: the objective there, and the upper levels."""
        try:
            return self._newton(below_cluster, below_whole, wbar)
        except SolverError:
            self.forget()
            return self._newton(below_cluster, below_whole, wbar)

    def _newton(self, below_cluster: Spread, below_whole: Spread, wbar: Floats) -> tuple[float, Upper]:
        data, tree = self.data, self.data.hierarchy
        node = Node(data, self.loss, below_cluster)
        w = wbar + below_whole.moved(self.mode.v)
        theta = tree.down(w) + below_cluster.moved(self.mode.u)
        self.state, report = node_start(node, theta, self.mode.u)

        def ask(move: Move) -> Report:
            self.state, answer = node_move(node, self.state, move)
            return answer

        stage = Stage(Upper(w, self.mode.v, wbar), report.mu)
        stage, end, _ = coordinate(ask, report, stage, below_whole, tol=self.tol, max_iter=_STEPS, fixed=True)
        self.mode = Mode(self.state.now.u, stage.top.v)
        return end.objective, stage.top


def _pulls(u: Floats, q: Floats) -> tuple[Floats, Floats]:
    """``u u'`` and ``(q u' + u q') / 2`` of each unit."""
    crossed = q[:, :, None] * u[:, None, :]
    return u[:, :, None] * u[:, None, :], 0.5 * (crossed + crossed.swapaxes(1, 2))
