"""The criterion for logistic, Poisson and Gamma models: the Laplace approximation to the likelihood, with its gradient.

Given the covariances and the global model ``wbar``, let ``theta, w`` be the mode of the penalised likelihood ``F``, found by
Newton's method, and ``H_i`` each client's Hessian there. Twice the negative log-likelihood is then, to second order about the
mode,

    2 F + sum_i log|I + H_i S_j| + sum_j log|I + C_j S|

This is what glmer computes with nAGQ = 1: ``wbar`` is a parameter like the covariances (Bates et al. 2015; Pinheiro and Chao
2006). A family with a dispersion ``phi`` has ``F / phi`` in place of ``F``, and covariances relative to ``phi``. The mode and
the determinants do not depend on ``phi``, and its best value follows from ``F`` (``Loss.profile``). The gradient has two parts:
the gradient of a linear model (:mod:`.linear_likelihood`) with the mode held fixed, and a part because the mode moves. Let
``P_i`` be the posterior covariance of ``theta_i``, and ``g_i = sum_l f'''(margin_l) (x_l'P_i x_l) x_l`` the gradient of the
log-determinants in ``theta_i``. The second part takes one more sweep, for the loss ``1/2 t'H_i t - g_i't``. With ``q_i`` and
``p_j`` the forces in its solution, and ``u_i`` and ``v_j`` the forces at the mode, the gradient is

    S_j:  sum_i (C_i - C_i P_j C_i - u_i u_i' + (q_i u_i' + u_i q_i') / 2)   wbar:  sum_j (p_j - 2 v_j)
    S:    sum_j (D_j - v_j v_j' + (p_j v_j' + v_j p_j') / 2)

``pull`` is ``u_i u_i'`` and ``bend`` the rest, as in a linear model. Both are sums over clients, so they add over nodes:

    BeginMode, StepToMode   node         takes Newton's steps to the mode; sends the sums of C_i by cluster
                            coordinator  solves  P, the covariance of w
    SumBends                node         gets    P; sends sums of log|I + H_i S_j|, and of (I + H_i S_j)^-1 g_i by cluster
                            coordinator  solves  p, and the clusters' solution y of the second sweep
    SlopeAtMode             node         gets    P, y; sends the sums of bend and of pull
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated

import numpy as np

from covey._typing import Anything, Floats
from covey.errors import SolverError
from covey.losses import loss_of
from covey.nodes.network import Message, Node, Sizes
from covey.records import Axes
from covey.solvers.direct import newton, newton_node
from covey.solvers.direct.elimination import (
    ClientMarginal,
    Quadratic,
    Spread,
    absorb_leading,
    cluster_covariances,
    invert,
)
from covey.solvers.direct.hessians import Hessians
from covey.solvers.direct.spaces import expand, hessians
from covey.solvers.direct.sweep import solve_top
from covey.solvers.result import Convergence
from covey.variance.columns import (
    BendSums,
    CountingNetwork,
    FromLogs,
    LearningState,
    NonFiniteClients,
    Slopes,
    Survey,
    TermOrder,
    client_rows,
    client_spread,
    from_cache,
    keep_results,
)
from covey.variance.linear_likelihood import Criterion, Evaluation
from covey.variance.parameters import Shape
from covey.variance.upper import UpperPosterior

START = 0.5  # the first standard deviation of everything that varies, in units of the residual's
_STEPS = 60  # Newton steps to a mode, at most; a few suffice from the mode at a nearby point
_LARGE = 3.0  # standard deviation of log-odds or log-means


# The work of a node


def node_curvature(node: newton_node.LocalProblem, at: newton_node.NewtonPoint) -> ClientMarginal:
    """Each client's ``C_i`` at the mode, and the sums of log-determinants by cluster."""
    return node.hessians(at).curvature(node.spread, node.data.hierarchy.cluster_ptr)


def node_bends(node: newton_node.LocalProblem, at: newton_node.NewtonPoint, P: Floats) -> tuple[Floats, Floats]:
    """Each client's ``g_i (n, d)``, which stays at the node, and the sums ``(k, d)`` of ``(I + H_i S_j)^-1 g_i`` by cluster."""
    H = node.hessians(at)
    g = H.bend(node.data, node.loss, at.theta, node.spread, P)
    return g, H.lift(g, node.spread, node.data.hierarchy.cluster_ptr, node.aside)


def node_slopes(
    node: newton_node.LocalProblem, at: newton_node.NewtonPoint, marginal: ClientMarginal, g: Floats, P: Floats, y: Floats
) -> tuple[Floats, Floats]:
    """The sums of ``bend`` and ``pull`` by cluster; ``y (k, d)`` is the clusters' solution of the second sweep."""
    tree, width = node.data.hierarchy, node.spread.width
    _, q = node.hessians(at).descend(g, node.spread, tree.parent, y)
    bend, _ = marginal.sensitivity(width, tree.cluster_ptr, np.zeros_like(y), P)
    pull, moving = _pulls(at.u[:, :width], q[:, :width])
    return bend + tree.sum_up(moving), tree.sum_up(pull)


# Messages, and the state that a node keeps


@dataclass(frozen=True)
class ModeState(LearningState):
    """The mode of a node's clients, given covariances ``S``. The next search for a mode starts from its forces."""

    S: Floats
    order: TermOrder
    state: newton_node.NewtonState


@dataclass(frozen=True)
class SumLogCounts(Message[Quadratic], label="logs of responses", phase="learn"):
    """Eliminate clients from the linear model of the logs of their counts, about the global model ``centre (d,)``."""

    S: Annotated[Floats, Axes("1|k d d", "covariance")]
    order: TermOrder
    centre: Annotated[Floats, Axes("d")]

    def at(self, node: Node) -> Quadratic:
        clients = _clients(node, self.S, self.order)
        H, b = _linear_problem(clients, self.centre)
        return H.eliminate(b, clients.spread, node.data.hierarchy.cluster_ptr, clients.aside)


@dataclass(frozen=True)
class BeginMode(Message[newton_node.NewtonReport], label="begin mode", phase="learn"):
    """Start Newton's method with clusters at ``w (k, d)`` and covariances ``S (1 or k, d, d)`` of clients about them.

    Clients start from the forces of the last mode. If ``fresh``, they start from ``logs`` if given, else from their clusters.
    """

    S: Annotated[Floats, Axes("1|k d d", "covariance")]
    order: TermOrder
    w: Annotated[Floats, Axes("k d")]
    fresh: bool
    logs: FromLogs | None = None

    @property
    def sizes(self) -> Sizes:
        return {"groups": len(self.S), "width": self.order.width}

    def at(self, node: Node) -> newton_node.NewtonReport:
        clients, tree = _clients(node, self.S, self.order), node.data.hierarchy
        u, last = np.zeros((tree.n_clients, self.w.shape[1])), node.find(ModeState)
        if self.logs is not None:
            H, b = _linear_problem(clients, self.logs.centre)
            _, u = H.descend(b, clients.spread, tree.parent, self.logs.w)
        elif not self.fresh and last is not None and np.array_equal(last.order.terms, self.order.terms):
            u = last.state.now.u
        with np.errstate(over="ignore", invalid="ignore"):
            state, report = newton_node.node_start(clients, tree.down(self.w) + clients.spread.moved(u), u)
        node.keep(ModeState(self.S, self.order, state))
        return report


@dataclass(frozen=True)
class StepToMode(Message[newton_node.NewtonReport], label="step to mode", phase="learn"):
    """One step of Newton's method, as :class:`~covey.solvers.direct.newton_node.NewtonStep`."""

    move: newton_node.NewtonStep

    @property
    def sizes(self) -> Sizes:
        return {"d": "order"}

    def at(self, node: Node) -> newton_node.NewtonReport:
        mode = node.state(ModeState)
        with np.errstate(over="ignore", invalid="ignore"):
            state, report = newton_node.node_move(_clients(node, mode.S, mode.order), mode.state, self.move)
        node.keep(replace(mode, state=state))
        return report


@dataclass(frozen=True)
class SumBends(Message[BendSums], label="bends", phase="learn"):
    """Sum the log-determinants and their gradients; ``P (k, d, d)`` is the clusters' covariance at the mode."""

    P: Annotated[Floats, Axes("k order order")]

    def at(self, node: Node) -> BendSums:
        _, marginal, _, lifted = at_mode(node, self.P)
        return BendSums(float(marginal.log_determinants.sum()), lifted)


@dataclass(frozen=True)
class SlopeAtMode(Message[Slopes], label="slope at the mode", phase="learn"):
    """Sum the gradient in ``S_j``; ``P`` as in :class:`SumBends`, ``y (k, d)`` the clusters' solution of the second sweep."""

    P: Annotated[Floats, Axes("k order order")]
    y: Annotated[Floats, Axes("k order")]

    def at(self, node: Node) -> Slopes:
        clients, marginal, g, _ = at_mode(node, self.P)
        mode = node.state(ModeState)
        bend, pull = node_slopes(clients, mode.state.now, marginal, g, self.P, self.y)
        if len(mode.S) == 1:  # one covariance for all clusters, so only the sum over clusters is needed
            bend, pull = bend.sum(axis=0, keepdims=True), pull.sum(axis=0, keepdims=True)
        return Slopes(bend, pull)


@dataclass(frozen=True)
class FinishMode(Message[NonFiniteClients], label="finish at the mode", phase="learn"):
    """Keep the coefficients of the mode that was reached."""

    def at(self, node: Node) -> NonFiniteClients:
        mode = node.state(ModeState)
        back, now = mode.order.inverse, mode.state.now
        theta, H = now.theta[:, back], now.here.hessian
        if not len(H):
            H = node.loss.hessian(client_rows(node, mode.order.terms), now.theta)
        # To second order about the mode. The gradient of the loss is minus the force u there, so b = H theta + u.
        H = np.ascontiguousarray(H[:, back[:, None], back])
        b = np.einsum("iab,ib->ia", H, theta) + now.u[:, back]
        units = Quadratic(H, b, np.zeros(len(H)), node.data.rows_that_count)
        return keep_results(node, theta, units, np.zeros(theta.shape[1]))


def _clients(node: Node, S: Floats, order: TermOrder) -> newton_node.LocalProblem:
    spread = from_cache(node, "spread", (S, *order.key), lambda: client_spread(node, S, order))
    return newton_node.LocalProblem(client_rows(node, order.terms), node.loss, spread, node.cache)


def _linear_problem(clients: newton_node.LocalProblem, centre: Floats) -> tuple[Hessians, Floats]:
    """The linear model of the logs of the counts, about the global model: the Hessians and the linear terms."""
    n, linear = clients.data.n_clients, clients.loss.working_response(clients.data)
    if linear is None:
        raise SolverError(f"The {clients.loss.name} loss has no linear problem to start from.")
    width, gaussian = clients.spread.width, loss_of("gaussian")
    here = expand(linear, gaussian, np.tile(centre, (n, 1)), width)
    return hessians(linear, gaussian, here, width), -here.gradient


def at_mode(node: Node, P: Floats) -> tuple[newton_node.LocalProblem, ClientMarginal, Floats, Floats]:
    """The clients, their curvature at the mode, their ``g_i``, and the sums of ``(I + H_i S_j)^-1 g_i`` by cluster."""
    mode = node.state(ModeState)
    clients, now = _clients(node, mode.S, mode.order), mode.state.now
    key = mode.S, *mode.order.key, now.theta, P
    marginal, (g, lifted) = from_cache(
        node, "at mode", key, lambda: (node_curvature(clients, now), node_bends(clients, now, P))
    )
    return clients, marginal, g, lifted


# The coordinator


@dataclass
class LaplaceLikelihood:
    """Twice the negative log-likelihood, but for a constant. The search for a mode starts from the last mode.

    Attributes
    ----------
    width : the number of leading terms, in the working order, that may vary between clusters
    weight, perfect : the sum of all rows' weights, and the lowest loss that the rows could have
    v : (k, d) the clusters' forces at the last mode
    objective : the penalised loss at the last mode
    """

    network: CountingNetwork
    order: TermOrder
    width: int
    tol: float
    weight: float = 0.0
    perfect: float = 0.0
    v: Floats | None = field(init=False, default=None)
    objective: float = field(init=False, default=np.nan)

    def forget(self) -> None:
        """Search for the next mode without starting values from the last."""
        self.v = None

    def __call__(self, S_client: Floats, S_cluster: Floats, wbar: Floats) -> Evaluation:
        """Evaluate covariances, ``(1 or k, d, d)`` of clients and ``(1, d, d)`` of clusters, and a global model."""
        S = S_cluster[0]
        above = Spread.of_covariances(S_cluster, self.network.tree.n_clusters, self.width)
        upper, C = self._mode(S_client, above, wbar)

        P = cluster_covariances(C, S, np.zeros_like(S), self.width)
        bends = self.network.ask(SumBends(P))
        least, phi = self.network.loss.profile(self.objective, self.weight, self.perfect)
        D, p, log_determinants = absorb_leading(C, bends.lifted, S, self.width)
        value = 2 * least + bends.volume + float(log_determinants.sum())
        slopes = self.network.ask(SlopeAtMode(P, p @ S))

        cluster_pull, moving = (sums.sum(axis=0, keepdims=True) for sums in _pulls(upper.v, p))
        cluster_bend, pull = D.sum(axis=0, keepdims=True) + moving, (slopes.pull / phi, cluster_pull / phi)
        top = UpperPosterior(C, wbar, upper.w, upper.v, np.zeros_like(S), P, D, value, phi, np.inf)
        centre = (p - 2 * upper.v / phi).sum(axis=0)
        return Evaluation(value, slopes.bend - pull[0], cluster_bend - pull[1], centre, pull, top)

    def _mode(self, S_client: Floats, above: Spread, wbar: Floats) -> tuple[newton.UpperLevels, Floats]:
        """The upper levels at the mode, and the sums of ``C_i`` by cluster."""
        try:
            return self._newton(S_client, above, wbar)
        except (SolverError, np.linalg.LinAlgError):  # the last mode was too far away to start from
            self.forget()
            return self._newton(S_client, above, wbar)

    def _newton(self, S_client: Floats, above: Spread, wbar: Floats) -> tuple[newton.UpperLevels, Floats]:
        v, logs = (self.v, None) if self.v is not None else self._first_guess(S_client, above, wbar)
        start = newton.UpperLevels(wbar + above.moved(v), v, wbar)
        begin = BeginMode(S_client, self.order, start.w, self.v is None, logs)
        top, end, _, last = run_newton(self.network, begin, start, above, tol=self.tol, max_iter=_STEPS, fixed=True)
        if not end.converged:
            raise SolverError(f"Newton's method did not reach the mode in {_STEPS} steps.")
        self.v, self.objective = top.v, end.objective
        return top, last.seen.C

    def _first_guess(self, S_client: Floats, above: Spread, wbar: Floats) -> tuple[Floats, FromLogs | None]:
        """A start without a last mode: the global model, or for counts the linear model of their logs.

        Newton's step would overflow from a mean far below a count.
        """
        if not self.network.loss.linear_start:
            return np.zeros((self.network.tree.n_clusters, len(wbar))), None
        seen = self.network.ask(SumLogCounts(S_client, self.order, wbar))
        w, v, _ = solve_top(seen, above, settle=lambda centre, *_: 0.0 * centre)
        return v, FromLogs(wbar, w)


class LaplaceCriterion(Criterion):
    """The Laplace approximation for counts and classes, from the rows.

    The global model is ``wbar = middle + half z``. Its parameters ``z`` are in units of about a standard error, so that one
    step length suits them and the parameters of the covariances. Only coefficients that are estimated have one.
    """

    method = "Laplace"

    def __init__(self, survey: Survey, shape: Shape) -> None:
        totals = survey.totals
        if totals is None:
            raise SolverError("A model of counts or classes needs the rows that it is to be fitted to.")
        super().__init__(survey, shape, totals.gram / totals.weight, totals.counted)
        self.mean_response, self.constant = totals.response / totals.rows, 2 * totals.constant
        tol = 1e-9 + 1e-10 * float(np.sqrt(totals.rows))
        width, weight = self.parameters.cluster.width, totals.weight
        self.likelihood = LaplaceLikelihood(self.network, self.order, width, tol, weight, totals.perfect)
        self.scale = 1.0  # the root of the dispersion at the last point
        self.middle, self.half = survey.middle[self.order.terms], np.eye(len(self.terms))[:, self.free]
        begin = self.evaluate(self.start(START, START)).top
        values, vectors = np.linalg.eigh(invert(begin.D.sum(axis=0), self.free)[0][np.ix_(self.free, self.free)])
        self.half = self.half @ (vectors * (np.sqrt(np.maximum(values, 0.0)) * self.scale))

    def evaluate(self, x: Floats) -> Evaluation:
        self.evaluations += 1
        with np.errstate(over="ignore", invalid="ignore"):
            here = self.likelihood(*self.covariances(x), self.wbar(x))
        self.scale = float(np.sqrt(here.top.dispersion))
        return replace(here, value=here.value + self.constant)

    def wbar(self, x: Floats) -> Floats:
        """The global model, in the working order of terms."""
        return np.asarray(self.middle + self.half @ x[self.parameters.n_parameters :])

    def start(self, client: float, cluster: float) -> Floats:
        self.forget()
        return np.concatenate([super().start(client, cluster), np.zeros(self.half.shape[1])])

    def parameters_of(self, wbar: Floats) -> Floats:
        """The parameters of a global model, in the working order of terms."""
        return np.asarray(np.linalg.solve(self.half[self.free], (wbar - self.middle)[self.free]))

    def start_from(self, smaller: Criterion, x: Floats, level: str) -> Floats:
        self.forget()
        wbar = self.middle
        if isinstance(smaller, LaplaceCriterion):
            wbar = smaller.wbar(x)[smaller.order.inverse][self.order.terms]
        return np.concatenate([super().start_from(smaller, x, level), self.parameters_of(wbar)])

    def global_gradient(self, centre: Floats) -> Floats:
        return np.asarray(centre @ self.half)

    def global_step(self, x: Floats, here: Evaluation) -> Floats:
        """A Newton step that neglects the determinants."""
        return self.parameters_of(self.wbar(x) + invert(here.top.D.sum(axis=0), self.free)[0] @ here.top.force.sum(axis=0))

    def global_covariance(self, errors: Floats, top: UpperPosterior) -> Floats:
        """From the Hessian of the criterion, if it was computed."""
        return np.asarray(self.half @ errors @ self.half.T) if errors.any() else super().global_covariance(errors, top)

    def log_dispersion(self, x: Floats, here: Evaluation) -> tuple[Floats, float]:
        loss, likelihood, phi = self.network.loss, self.likelihood, here.top.dispersion
        if not loss.dispersion:
            return np.zeros(len(x)), 0.0
        # The dispersion depends on the objective alone, whose gradient is that of the criterion with the mode held fixed.
        step = 1e-5 * (likelihood.objective - likelihood.perfect)
        ends = [loss.profile(likelihood.objective + move, likelihood.weight, likelihood.perfect)[1] for move in (-step, step)]
        rate = float(np.log(ends[1] / ends[0])) / (2 * step)
        variances = self.parameters.gradient(x, *(-0.5 * rate * phi * pull for pull in here.pull))
        return np.concatenate([variances, self.global_gradient(-rate * here.top.force.sum(axis=0))]), rate * phi

    def finish_message(self, x: Floats, top: UpperPosterior) -> FinishMode:
        return FinishMode()

    def forget(self) -> None:
        self.likelihood.forget()

    def may_have_other_optima(self, x: Floats) -> bool:
        """With many rows per client and coefficient, the approximation has the shape of a Gaussian likelihood."""
        return self.is_doubtful(x) or self.rows < 5 * self.tree.n_clients * max(self.parameters.client.q, 1)

    def is_doubtful(self, x: Floats) -> bool:
        """Several optima are common if standard deviations are so large that most clients' classes are almost certain."""
        return self.largest_deviation(x) > _LARGE

    def largest_deviation(self, x: Floats) -> float:
        parts = [(np.abs(each.factors(part)) / each.size[:, None]).max(initial=0.0) for each, part in self.parameters.split(x)]
        return self.scale * float(max(parts))


def run_newton(
    network: CountingNetwork,
    begin: BeginMode,
    top: newton.UpperLevels,
    above: Spread,
    *,
    tol: float,
    max_iter: int,
    fixed: bool = False,
) -> tuple[newton.UpperLevels, Convergence, Anything, newton_node.NewtonReport]:
    """Newton's method over the network; with ``fixed`` the global model stays as it is.

    Returns the upper levels at the end, the account, which terms grow without bound, and the last report.
    """
    first = last = network.ask(begin)
    if fixed and not np.isfinite(first.value):
        raise SolverError("The likelihood cannot be computed: the loss is not finite.")

    def ask(move: newton_node.NewtonStep) -> newton_node.NewtonReport:
        nonlocal last
        last = network.ask(StepToMode(move))
        return last

    with np.errstate(over="ignore", invalid="ignore"):
        start = newton.NewtonProgress(top, first.mu)
        stage, end, runaway = newton.coordinate(ask, first, start, above, tol=tol, max_iter=max_iter, fixed=fixed)
    return stage.top, end, runaway, last


def _pulls(u: Floats, q: Floats) -> tuple[Floats, Floats]:
    """``u u'`` and ``(q u' + u q') / 2`` of each client or cluster."""
    crossed = q[:, :, None] * u[:, None, :]
    return u[:, :, None] * u[:, None, :], 0.5 * (crossed + crossed.swapaxes(1, 2))
