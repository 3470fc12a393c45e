"""The Laplace approximation to the likelihood of a hierarchy of counts or of yes and no, and its gradient.

At given covariances and global model ``wbar`` let ``theta, w`` be the mode of the penalised likelihood ``F`` (Newton finds
it) and ``H_i`` each client's Hessian there. Twice the negative logarithm is then, to second order about the mode,

    2 F + sum_i log|I + H_i S_j| + sum_j log|I + C_j S|

as glmer has it with nAGQ = 1: ``wbar`` is a parameter like the covariances. A family with a dispersion ``phi`` has the same
with ``F / phi`` for ``F`` and covariances relative to ``phi``, so that mode and determinants do not depend on it, and its best
value follows from ``F`` (``Loss.profile``). The gradient has the linear model's part at the
mode held still and one for the mode's own motion. With ``P_i`` the covariance of ``theta_i`` and ``g_i = sum_l f'''(margin_l)
(x_l'P_i x_l) x_l``, the determinants' slope in ``theta_i``, that part takes one sweep for the loss ``1/2 t'H_i t - g_i't``: let
``q_i`` and ``p_j`` be the forces in its solution, ``u_i`` and ``v_j`` those at the mode, then

    S_j:  sum_i (C_i - C_i P_j C_i - u_i u_i' + (q_i u_i' + u_i q_i') / 2)   wbar:  sum_j (p_j - 2 v_j)
    S:    sum_j (D_j - v_j v_j' + (p_j v_j' + v_j p_j') / 2)

Each of these is a sum over clients, and adds over nodes:

    Settle, Approach   node         goes with Newton to the mode; tells what its clusters see of the curvature there
                       coordinator  solves  P, the covariance of w
    Bend               node         gets    P; sends the sums of log|I + H_i S_j| and of what its clusters see of g_i
                       coordinator  solves  p and the clusters' solution of the second sweep
    SlopeAtMode        node         gets    that; sends the sums of C_i - C_i P C_i, of u_i u_i', of (q_i u_i' + u_i q_i') / 2
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from covey._typing import Floats
from covey.errors import DataError, SolverError, listing
from covey.losses import loss_of
from covey.nodes.messages import Message
from covey.nodes.network import Network
from covey.nodes.node import Node
from covey.records import Record, Reply
from covey.solvers.direct.elimination import (
    Marginal,
    Quadratic,
    Spread,
    descend,
    eliminate,
    marginalise,
    posterior,
    sensitivity,
    solve_symmetric,
)
from covey.solvers.direct.newton import (
    LocalProblem,
    NewtonPoint,
    NewtonProgress,
    NewtonReport,
    NewtonState,
    NewtonStep,
    UpperLevels,
    coordinate,
    node_move,
    node_start,
)
from covey.solvers.direct.sweep import solve_top
from covey.variance.frame import LearningState, NonFiniteClients, TermOrder, finish_at, kept, rows_at, spread_at
from covey.variance.gaussian import Evaluation, Slopes, UpperPosterior, below

_STEPS = 60  # of Newton to a mode, at most; a few suffice from that of a nearby point


# What a node does


def node_curvature(node: LocalProblem, at: NewtonPoint) -> Marginal:
    """What the clusters see of the curvature at the mode, and the sum of log-determinants; what is each client's own stays."""
    H = at.here.hessian
    nothing = np.zeros(len(H))
    return marginalise(Quadratic(H, np.zeros_like(at.u), nothing, nothing), node.spread, node.data.hierarchy.cluster_ptr)


def node_bends(node: LocalProblem, at: NewtonPoint, P: Floats) -> tuple[Floats, Floats]:
    """Each client's ``g_i``, which stays, and what its cluster sees of it, summed: ``(k, d)``."""
    tree, H = node.data.hierarchy, at.here.hessian
    g = node.loss.bend(node.data, at.theta, posterior(H, node.spread, tree.parent, P))
    nothing = np.zeros(len(H))
    return g, eliminate(Quadratic(H, g, nothing, nothing), node.spread, tree.cluster_ptr).r


def node_slopes(node: LocalProblem, at: NewtonPoint, own: Marginal, g: Floats, P: Floats, y: Floats) -> tuple[Floats, Floats]:
    """The sums of what holds variances down, and of what makes them grow, by cluster; ``y`` solves the second sweep above."""
    tree, width = node.data.hierarchy, node.spread.width
    _, q = descend(at.here.hessian, g, node.spread, tree.parent, y)
    bend, _ = sensitivity(own, width, tree.cluster_ptr, np.zeros_like(y), P)
    pull, moving = _pulls(at.u[:, :width], q[:, :width])
    return bend + tree.sum_up(moving), tree.sum_up(pull)


# What travels, and what the node keeps


@dataclass(frozen=True)
class ModeState(LearningState):
    """Where a node's clients are, given covariances ``S``; it stays there, and the next search begins at its forces."""

    S: Floats
    layout: TermOrder
    state: NewtonState


@dataclass(frozen=True)
class SumLogCounts(Message[Quadratic], label="logs of responses", phase="learn"):
    """tell what your clusters see of the logs of your counts, about the global model ``centre (d,)``."""

    S: Floats
    layout: TermOrder
    centre: Floats

    def at(self, node: Node) -> Quadratic:
        clients = _clients(node, self.S, self.layout)
        return eliminate(_near(clients, self.centre), clients.spread, node.data.hierarchy.cluster_ptr)


@dataclass(frozen=True)
class FromLogs(Record):
    """Where the sweep for the logs of counts about ``centre (d,)`` puts clusters, ``w (k, d)`` relative to it."""

    centre: Floats
    w: Floats


@dataclass(frozen=True)
class BeginMode(Message[NewtonReport], label="begin mode", phase="learn"):
    """begin Newton with clusters at ``w (k, d)`` and clients about them by covariances ``S (1 or k, d, d)``.

    Clients begin at the forces that the last search left, or ``fresh``: without any, or at those of the logs of their counts.
    """

    S: Floats
    layout: TermOrder
    w: Floats
    fresh: bool
    logs: FromLogs | None = None

    def at(self, node: Node) -> NewtonReport:
        clients, tree = _clients(node, self.S, self.layout), node.data.hierarchy
        u, last = np.zeros((tree.n_clients, self.w.shape[1])), node.find(ModeState)
        if self.logs is not None:
            near = _near(clients, self.logs.centre)
            _, u = descend(near.C, near.r, clients.spread, tree.parent, self.logs.w)
        elif not self.fresh and last is not None and np.array_equal(last.layout.order, self.layout.order):
            u = last.state.now.u
        with np.errstate(over="ignore", invalid="ignore"):
            state, report = node_start(clients, tree.down(self.w) + clients.spread.moved(u), u)
        node.keep(ModeState(self.S, self.layout, state))
        return report


@dataclass(frozen=True)
class StepToMode(Message[NewtonReport], label="step to mode", phase="learn"):
    """one step of Newton, as :class:`~covey.solvers.direct.newton.NewtonStep`."""

    move: NewtonStep

    def at(self, node: Node) -> NewtonReport:
        settled = node.state(ModeState)
        with np.errstate(over="ignore", invalid="ignore"):
            state, report = node_move(_clients(node, settled.S, settled.layout), settled.state, self.move)
        node.keep(replace(settled, state=state))
        return report


@dataclass(frozen=True)
class SumBends(Message["BendSums"], label="bends", phase="learn"):
    """the covariance ``P (k, d, d)`` of the clusters at the mode."""

    P: Floats

    def at(self, node: Node) -> BendSums:
        _, own, _, lifted = _bent(node, self.P)
        return BendSums(float(own.volume.sum()), lifted)


@dataclass(frozen=True)
class BendSums(Reply):
    """the sum of log-determinants, and what clusters see of their slopes, ``lifted (k, d)``."""

    volume: float
    lifted: Floats


@dataclass(frozen=True)
class SlopeAtMode(Message[Slopes], label="slope at the mode", phase="learn"):
    """the same ``P``, and the clusters' solution ``y (k, d)`` of the second sweep."""

    P: Floats
    y: Floats

    def at(self, node: Node) -> Slopes:
        clients, own, g, _ = _bent(node, self.P)
        settled = node.state(ModeState)
        bend, pull = node_slopes(clients, settled.state.now, own, g, self.P, self.y)
        if len(settled.S) == 1:  # one covariance for all clusters: nothing is asked of each
            bend, pull = bend.sum(axis=0, keepdims=True), pull.sum(axis=0, keepdims=True)
        return Slopes(bend, pull)


@dataclass(frozen=True)
class FinishMode(Message[NonFiniteClients], label="finish at the mode", phase="learn"):
    """the mode at which you are is the one to keep."""

    def at(self, node: Node) -> NonFiniteClients:
        settled = node.state(ModeState)
        back, now = settled.layout.back, settled.state.now
        theta = now.theta[:, back]
        # To second order about the mode, where the loss's slope is minus the force that holds a client: b = H theta + u.
        H = np.ascontiguousarray(now.here.hessian[:, back[:, None], back])
        b = np.einsum("iab,ib->ia", H, theta) + now.u[:, back]
        units = Quadratic(H, b, np.zeros(len(H)), node.data.rows_that_count)
        return finish_at(node, theta, units, np.zeros(theta.shape[1]))


def _clients(node: Node, S: Floats, layout: TermOrder) -> LocalProblem:
    spread = kept(node, "spread", (S, *layout.key), lambda: spread_at(node, S, layout))
    return LocalProblem(rows_at(node, layout.order), node.loss, spread)


def _near(clients: LocalProblem, centre: Floats) -> Quadratic:
    """The linear problem near the loss, about the global model."""
    n, linear = clients.data.n_clients, clients.loss.working_response(clients.data)
    if linear is None:
        raise SolverError(f"The {clients.loss.name} loss has no linear problem to begin at.")
    here = loss_of("gaussian").expand(linear, np.tile(centre, (n, 1)))
    return Quadratic(here.hessian, -here.gradient, *clients.aside)


def _bent(node: Node, P: Floats) -> tuple[LocalProblem, Marginal, Floats, Floats]:
    """At the mode: the clients, what is each one's own, their ``g_i``, and what their clusters see of these."""
    settled = node.state(ModeState)
    clients, now = _clients(node, settled.S, settled.layout), settled.state.now
    key = settled.S, *settled.layout.key, now.theta, P
    own, (g, lifted) = kept(node, "bent", key, lambda: (node_curvature(clients, now), node_bends(clients, now, P)))
    return clients, own, g, lifted


# The coordinator


@dataclass
class LaplaceLikelihood:
    """The criterion over any network, whose nodes know the frame. It remembers the last mode, to begin the next search there.

    ``width`` is how many of the first terms, in the layout's order, vary between clusters; ``weight`` is the sum of all rows'
    weights, ``perfect`` the lowest loss that they could have.
    """

    network: Network
    layout: TermOrder
    width: int
    tol: float
    weight: float = 0.0
    perfect: float = 0.0
    v: Floats | None = field(init=False, default=None)
    objective: float = field(init=False, default=np.nan)

    def forget(self) -> None:
        """Begin the next search anew."""
        self.v = None

    def __call__(self, S_client: Floats, S_cluster: Floats, wbar: Floats) -> Evaluation:
        """At given covariances, ``(1 or k, d, d)`` of clients and ``(1, d, d)`` of clusters, and global model."""
        S = S_cluster[0]
        above = Spread.of_covariances(S_cluster, self.network.tree.n_clusters, self.width)
        objective, upper, C = self._settle(S_client, above, wbar)

        K = np.eye(len(S)) + C @ S
        D = np.linalg.solve(K, C)
        P = below(C, S, np.zeros_like(S))
        bent = self.network.ask(SumBends(P))
        least, phi = self.network.loss.profile(objective, self.weight, self.perfect)
        value = 2 * least + bent.volume + float(np.linalg.slogdet(K)[1].sum())
        p = np.linalg.solve(K, bent.lifted[:, :, None])[:, :, 0]
        slopes = self.network.ask(SlopeAtMode(P, p @ S))

        pulled, moving = (each.sum(axis=0, keepdims=True) for each in _pulls(upper.v, p))
        pulled, pull = pulled / phi, slopes.pull / phi
        held = D.sum(axis=0, keepdims=True) + moving
        top = UpperPosterior(C, wbar, upper.w, upper.v, np.zeros_like(S), P, D, value, phi, np.inf)
        centre = (p - 2 * upper.v / phi).sum(axis=0)
        return Evaluation(value, slopes.bend - pull, held - pulled, centre, (pull, pulled), top)

    def _settle(self, S_client: Floats, above: Spread, wbar: Floats) -> tuple[float, UpperLevels, Floats]:
        """Find the mode: the objective there, the upper levels, and what clusters see of the curvature."""
        try:
            return self._newton(S_client, above, wbar)
        except (SolverError, np.linalg.LinAlgError):  # begun too far away, at forces that other covariances left behind
            self.forget()
            return self._newton(S_client, above, wbar)

    def _newton(self, S_client: Floats, above: Spread, wbar: Floats) -> tuple[float, UpperLevels, Floats]:
        v, logs = self.v, None
        if v is None:
            v, logs = self._first(S_client, above, wbar)
        w = wbar + above.moved(v)
        report = last = self.network.ask(BeginMode(S_client, self.layout, w, self.v is None, logs))

        if not np.isfinite(report.value):
            raise SolverError("There is no likelihood so far away.")

        def ask(move: NewtonStep) -> NewtonReport:
            nonlocal last
            last = self.network.ask(StepToMode(move))
            return last

        stage = NewtonProgress(UpperLevels(w, v, wbar), report.mu)
        stage, end, _ = coordinate(ask, report, stage, above, tol=self.tol, max_iter=_STEPS, fixed=True)
        if not end.converged:
            raise SolverError(f"No mode was found in {_STEPS} Newton steps.")
        self.v, self.objective = stage.top.v, end.objective
        return end.objective, stage.top, last.seen.C

    def _first(self, S_client: Floats, above: Spread, wbar: Floats) -> tuple[Floats, FromLogs | None]:
        """Where to begin when no mode is known: at the global model, or for counts at the sweep for their logs.

        From a mean far below a count Newton's step would go beyond all bounds.
        """
        if not self.network.loss.linear_start:
            return np.zeros((self.network.tree.n_clusters, len(wbar))), None
        seen = self.network.ask(SumLogCounts(S_client, self.layout, wbar))
        w, v, _ = solve_top(seen, above, settle=lambda centre, *_: 0.0 * centre)
        return v, FromLogs(wbar, w)


def pooled(network: Network) -> Floats:
    """The one model of all rows, where nothing varies, ``(d,)``; refused if some coefficient has no finite value."""
    k, d = network.tree.n_clusters, len(network.terms)
    S, layout, wbar = np.zeros((1, d, d)), TermOrder(np.arange(d), 0), np.zeros(d)
    if network.loss.linear_start:
        seen = network.ask(SumLogCounts(S, layout, wbar))
        wbar = solve_symmetric(seen.C.sum(axis=0), seen.r.sum(axis=0))
    w, still, above = np.tile(wbar, (k, 1)), np.zeros((k, d)), Spread.of_covariances(S, k, 0)
    report = network.ask(BeginMode(S, layout, w, True))

    def ask(move: NewtonStep) -> NewtonReport:
        return network.ask(StepToMode(move))

    with np.errstate(over="ignore", invalid="ignore"):
        stage, _, runaway = coordinate(
            ask, report, NewtonProgress(UpperLevels(w, still, wbar), report.mu), above, tol=1e-8, max_iter=100
        )
    if runaway.any() and network.loss.curvature[0] == 0.0:
        along = listing(np.array(network.terms)[runaway].tolist(), 3)
        raise DataError(
            f"The responses are perfectly separated along {along}: some coefficient is infinite, whatever varies; drop terms "
            "or merge categories, or give gamma and a ridge."
        )
    return stage.top.wbar


def _pulls(u: Floats, q: Floats) -> tuple[Floats, Floats]:
    """``u u'`` and ``(q u' + u q') / 2`` of each unit."""
    crossed = q[:, :, None] * u[:, None, :]
    return u[:, :, None] * u[:, None, :], 0.5 * (crossed + crossed.swapaxes(1, 2))
