"""The Laplace approximation to the likelihood of a hierarchy of counts or classes, and its gradient.

Given the covariances and the global model ``wbar``, let ``theta, w`` be the mode of the penalised likelihood ``F``, which
Newton's method finds, and ``H_i`` each client's Hessian there. Twice the negative log-likelihood is then, to second order about
the mode,

    2 F + sum_i log|I + H_i S_j| + sum_j log|I + C_j S|

This is what glmer computes with nAGQ = 1: ``wbar`` is a parameter like the covariances (Bates et al. 2015; Pinheiro and Chao
2006). A family with a dispersion ``phi`` has ``F / phi`` for ``F`` and covariances relative to ``phi``: the mode and the
determinants do not depend on it, and its best value follows from ``F`` (``Loss.profile``). The gradient has two parts: that
of a linear model (:mod:`.linear_likelihood`) with the mode held fixed, and one because the mode moves. Let ``P_i`` be the
posterior covariance of ``theta_i``, and ``g_i = sum_l f'''(margin_l) (x_l'P_i x_l) x_l`` the gradient of the log-determinants
in ``theta_i``. The second part takes one more sweep, for the loss ``1/2 t'H_i t - g_i't``. With ``q_i`` and ``p_j`` the
forces in its solution, and ``u_i`` and ``v_j`` those at the mode, the gradient is

    S_j:  sum_i (C_i - C_i P_j C_i - u_i u_i' + (q_i u_i' + u_i q_i') / 2)   wbar:  sum_j (p_j - 2 v_j)
    S:    sum_j (D_j - v_j v_j' + (p_j v_j' + v_j p_j') / 2)

``pull`` is ``u_i u_i'`` and ``bend`` the rest, as in a linear model. Each is a sum over clients, and adds over nodes:

    BeginMode, StepToMode   node         takes Newton's steps to the mode; sends what its clusters see of the curvature
                            coordinator  solves  P, the covariance of w
    SumBends                node         gets    P; sends sums of log|I + H_i S_j| and of what its clusters see of g_i
                            coordinator  solves  p, and the clusters' solution y of the second sweep
    SlopeAtMode             node         gets    P, y; sends the sums of bend and of pull
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from covey._typing import Floats
from covey.errors import DataError, SolverError, listing
from covey.losses import loss_of
from covey.nodes.network import Message, Network, Node
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
from covey.variance.columns import LearningState, NonFiniteClients, TermOrder, cached, client_rows, client_spread, keep_results
from covey.variance.linear_likelihood import Evaluation, Slopes, UpperPosterior, cluster_covariances

_STEPS = 60  # of Newton to a mode, at most; a few suffice from the mode at a nearby point


# What a node does


def node_curvature(node: LocalProblem, at: NewtonPoint) -> Marginal:
    """Each client's ``C_i`` and log-determinant at the mode, and the sums of these by cluster."""
    H = at.here.hessian
    nothing = np.zeros(len(H))
    return marginalise(Quadratic(H, np.zeros_like(at.u), nothing, nothing), node.spread, node.data.hierarchy.cluster_ptr)


def node_bends(node: LocalProblem, at: NewtonPoint, P: Floats) -> tuple[Floats, Floats]:
    """Each client's ``g_i (n, d)``, which stays at the node, and what clusters see of it ``(k, d)``."""
    tree, H = node.data.hierarchy, at.here.hessian
    g = node.loss.bend(node.data, at.theta, posterior(H, node.spread, tree.parent, P))
    nothing = np.zeros(len(H))
    return g, eliminate(Quadratic(H, g, nothing, nothing), node.spread, tree.cluster_ptr).r


def node_slopes(
    node: LocalProblem, at: NewtonPoint, marginal: Marginal, g: Floats, P: Floats, y: Floats
) -> tuple[Floats, Floats]:
    """The sums of ``bend`` and ``pull`` by cluster; ``y (k, d)`` is the clusters' solution of the second sweep."""
    tree, width = node.data.hierarchy, node.spread.width
    _, q = descend(at.here.hessian, g, node.spread, tree.parent, y)
    bend, _ = sensitivity(marginal, width, tree.cluster_ptr, np.zeros_like(y), P)
    pull, moving = _pulls(at.u[:, :width], q[:, :width])
    return bend + tree.sum_up(moving), tree.sum_up(pull)


# Messages, and what the node keeps


@dataclass(frozen=True)
class ModeState(LearningState):
    """The mode of a node's clients, given covariances ``S``. The next search for a mode begins at its forces."""

    S: Floats
    order: TermOrder
    state: NewtonState


@dataclass(frozen=True)
class SumLogCounts(Message[Quadratic], label="logs of responses", phase="learn"):
    """What clusters see of the logs of the counts, as responses of a linear model about the global model ``centre (d,)``."""

    S: Floats
    order: TermOrder
    centre: Floats

    def at(self, node: Node) -> Quadratic:
        clients = _clients(node, self.S, self.order)
        return eliminate(_near(clients, self.centre), clients.spread, node.data.hierarchy.cluster_ptr)


@dataclass(frozen=True)
class FromLogs(Record):
    """The clusters' solution ``w (k, d)`` of the sweep for the logs of counts, relative to ``centre (d,)``."""

    centre: Floats
    w: Floats


@dataclass(frozen=True)
class BeginMode(Message[NewtonReport], label="begin mode", phase="learn"):
    """Begin Newton's method with clusters at ``w (k, d)`` and covariances ``S (1 or k, d, d)`` of clients about them.

    Clients begin at the forces of the last mode. If ``fresh``, they begin at the logs of their counts, or at their clusters.
    """

    S: Floats
    order: TermOrder
    w: Floats
    fresh: bool
    logs: FromLogs | None = None

    def at(self, node: Node) -> NewtonReport:
        clients, tree = _clients(node, self.S, self.order), node.data.hierarchy
        u, last = np.zeros((tree.n_clients, self.w.shape[1])), node.find(ModeState)
        if self.logs is not None:
            near = _near(clients, self.logs.centre)
            _, u = descend(near.C, near.r, clients.spread, tree.parent, self.logs.w)
        elif not self.fresh and last is not None and np.array_equal(last.order.terms, self.order.terms):
            u = last.state.now.u
        with np.errstate(over="ignore", invalid="ignore"):
            state, report = node_start(clients, tree.down(self.w) + clients.spread.moved(u), u)
        node.keep(ModeState(self.S, self.order, state))
        return report


@dataclass(frozen=True)
class StepToMode(Message[NewtonReport], label="step to mode", phase="learn"):
    """One step of Newton's method, as :class:`~covey.solvers.direct.newton.NewtonStep`."""

    move: NewtonStep

    def at(self, node: Node) -> NewtonReport:
        mode = node.state(ModeState)
        with np.errstate(over="ignore", invalid="ignore"):
            state, report = node_move(_clients(node, mode.S, mode.order), mode.state, self.move)
        node.keep(replace(mode, state=state))
        return report


@dataclass(frozen=True)
class SumBends(Message["BendSums"], label="bends", phase="learn"):
    """Sum what the log-determinants add to value and gradient; ``P (k, d, d)`` is the clusters' covariance at the mode."""

    P: Floats

    def at(self, node: Node) -> BendSums:
        _, marginal, _, lifted = _at_mode(node, self.P)
        return BendSums(float(marginal.volume.sum()), lifted)


@dataclass(frozen=True)
class BendSums(Reply):
    """The sum of log-determinants ``volume``, and what clusters see of their gradients ``g_i``, ``lifted (k, d)``."""

    volume: float
    lifted: Floats


@dataclass(frozen=True)
class SlopeAtMode(Message[Slopes], label="slope at the mode", phase="learn"):
    """Sum the gradient in ``S_j``; ``P`` as before, and ``y (k, d)`` is the clusters' solution of the second sweep."""

    P: Floats
    y: Floats

    def at(self, node: Node) -> Slopes:
        clients, marginal, g, _ = _at_mode(node, self.P)
        mode = node.state(ModeState)
        bend, pull = node_slopes(clients, mode.state.now, marginal, g, self.P, self.y)
        if len(mode.S) == 1:  # one covariance for all clusters: nothing is asked of each
            bend, pull = bend.sum(axis=0, keepdims=True), pull.sum(axis=0, keepdims=True)
        return Slopes(bend, pull)


@dataclass(frozen=True)
class FinishMode(Message[NonFiniteClients], label="finish at the mode", phase="learn"):
    """Keep the coefficients of the mode that was reached."""

    def at(self, node: Node) -> NonFiniteClients:
        mode = node.state(ModeState)
        back, now = mode.order.inverse, mode.state.now
        theta = now.theta[:, back]
        # To second order about the mode, where the loss's gradient is minus the force u: b = H theta + u.
        H = np.ascontiguousarray(now.here.hessian[:, back[:, None], back])
        b = np.einsum("iab,ib->ia", H, theta) + now.u[:, back]
        units = Quadratic(H, b, np.zeros(len(H)), node.data.rows_that_count)
        return keep_results(node, theta, units, np.zeros(theta.shape[1]))


def _clients(node: Node, S: Floats, order: TermOrder) -> LocalProblem:
    spread = cached(node, "spread", (S, *order.key), lambda: client_spread(node, S, order))
    return LocalProblem(client_rows(node, order.terms), node.loss, spread)


def _near(clients: LocalProblem, centre: Floats) -> Quadratic:
    """The linear problem near the loss, about the global model."""
    n, linear = clients.data.n_clients, clients.loss.working_response(clients.data)
    if linear is None:
        raise SolverError(f"The {clients.loss.name} loss has no linear problem to begin at.")
    here = loss_of("gaussian").expand(linear, np.tile(centre, (n, 1)))
    return Quadratic(here.hessian, -here.gradient, *clients.aside)


def _at_mode(node: Node, P: Floats) -> tuple[LocalProblem, Marginal, Floats, Floats]:
    """The clients, their curvature at the mode, their ``g_i``, and what clusters see of these."""
    mode = node.state(ModeState)
    clients, now = _clients(node, mode.S, mode.order), mode.state.now
    key = mode.S, *mode.order.key, now.theta, P
    marginal, (g, lifted) = cached(node, "at mode", key, lambda: (node_curvature(clients, now), node_bends(clients, now, P)))
    return clients, marginal, g, lifted


# The coordinator


@dataclass
class LaplaceLikelihood:
    """The criterion over a network whose nodes know their working columns. The search for a mode begins at the last one.

    ``width`` is how many of the first terms, in working order, may vary between clusters. ``weight`` is the sum of all rows'
    weights, ``perfect`` the lowest loss that they could have. ``v (k, d)`` are the clusters' forces at the last mode, and
    ``objective`` is the value there.
    """

    network: Network
    order: TermOrder
    width: int
    tol: float
    weight: float = 0.0
    perfect: float = 0.0
    v: Floats | None = field(init=False, default=None)
    objective: float = field(init=False, default=np.nan)

    def forget(self) -> None:
        """Search for the next mode without regard to the last."""
        self.v = None

    def __call__(self, S_client: Floats, S_cluster: Floats, wbar: Floats) -> Evaluation:
        """At given covariances, ``(1 or k, d, d)`` of clients and ``(1, d, d)`` of clusters, and global model."""
        S = S_cluster[0]
        above = Spread.of_covariances(S_cluster, self.network.tree.n_clusters, self.width)
        objective, upper, C = self._mode(S_client, above, wbar)

        K = np.eye(len(S)) + C @ S
        D = np.linalg.solve(K, C)
        P = cluster_covariances(C, S, np.zeros_like(S))
        bends = self.network.ask(SumBends(P))
        least, phi = self.network.loss.profile(objective, self.weight, self.perfect)
        value = 2 * least + bends.volume + float(np.linalg.slogdet(K)[1].sum())
        p = np.linalg.solve(K, bends.lifted[:, :, None])[:, :, 0]
        slopes = self.network.ask(SlopeAtMode(P, p @ S))

        cluster_pull, moving = (each.sum(axis=0, keepdims=True) for each in _pulls(upper.v, p))
        cluster_pull, client_pull = cluster_pull / phi, slopes.pull / phi
        cluster_bend = D.sum(axis=0, keepdims=True) + moving
        top = UpperPosterior(C, wbar, upper.w, upper.v, np.zeros_like(S), P, D, value, phi, np.inf)
        centre = (p - 2 * upper.v / phi).sum(axis=0)
        pull = client_pull, cluster_pull
        return Evaluation(value, slopes.bend - client_pull, cluster_bend - cluster_pull, centre, pull, top)

    def _mode(self, S_client: Floats, above: Spread, wbar: Floats) -> tuple[float, UpperLevels, Floats]:
        """The objective at the mode, the upper levels there, and what clusters see of the curvature."""
        try:
            return self._newton(S_client, above, wbar)
        except (SolverError, np.linalg.LinAlgError):  # the last mode was too far away to begin at
            self.forget()
            return self._newton(S_client, above, wbar)

    def _newton(self, S_client: Floats, above: Spread, wbar: Floats) -> tuple[float, UpperLevels, Floats]:
        v, logs = self.v, None
        if v is None:
            v, logs = self._first_guess(S_client, above, wbar)
        w = wbar + above.moved(v)
        report = last = self.network.ask(BeginMode(S_client, self.order, w, self.v is None, logs))

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

    def _first_guess(self, S_client: Floats, above: Spread, wbar: Floats) -> tuple[Floats, FromLogs | None]:
        """Where to begin without a last mode: at the global model, or for counts at the sweep for their logs.

        From a mean far below a count Newton's step would overflow.
        """
        if not self.network.loss.linear_start:
            return np.zeros((self.network.tree.n_clusters, len(wbar))), None
        seen = self.network.ask(SumLogCounts(S_client, self.order, wbar))
        w, v, _ = solve_top(seen, above, settle=lambda centre, *_: 0.0 * centre)
        return v, FromLogs(wbar, w)


def pooled(network: Network) -> Floats:
    """The one model of all rows, without any variation, ``(d,)``; an error if some coefficient has no finite estimate."""
    k, d = network.tree.n_clusters, len(network.terms)
    S, order, wbar = np.zeros((1, d, d)), TermOrder(np.arange(d), 0), np.zeros(d)
    if network.loss.linear_start:
        seen = network.ask(SumLogCounts(S, order, wbar))
        wbar = solve_symmetric(seen.C.sum(axis=0), seen.r.sum(axis=0))
    w, still, above = np.tile(wbar, (k, 1)), np.zeros((k, d)), Spread.of_covariances(S, k, 0)
    report = network.ask(BeginMode(S, order, w, True))

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
    """``u u'`` and ``(q u' + u q') / 2`` of each client or cluster."""
    crossed = q[:, :, None] * u[:, None, :]
    return u[:, :, None] * u[:, None, :], 0.5 * (crossed + crossed.swapaxes(1, 2))
