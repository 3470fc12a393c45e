"""The sweep: eliminate clients, then clusters, solve the global block, go back down. Exact, in one exchange.

The closed form of the hierarchical linear model, in the covariances of :mod:`.elimination` instead of penalties:

    for each client    C_i, r_i = what its cluster sees of it     C_j, r_j = sums over the cluster
    for each cluster   D_j, q_j = what the whole sees of it       wbar = (sum D_j)^-1 sum q_j
    and back down      w_j = wbar + S (q_j - D_j wbar)            theta_i = w_j + S_i (r_i - C_i w_j)

    SweepUp       a node replies with a Quadratic: the sum of (C_i, r_i) over its clients, for each cluster
                  the coordinator solves for w and wbar with the sum over nodes
    SweepDown     a node gets w, computes its clients' theta, which stay there, and replies with a SweepReport on them
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import polars as pl

from covey._typing import Floats
from covey.errors import ConvergenceWarning, SolverError, warn
from covey.losses import Gaussian, Loss
from covey.nodes.network import Message, Network, Node
from covey.objective.objective import Penalty
from covey.records import Reply
from covey.solvers.direct.elimination import Quadratic, Spread, descend, eliminate, solve_symmetric
from covey.solvers.direct.james_stein import Shrink, shrunk
from covey.solvers.ledger import quadratic_links
from covey.solvers.registry import algorithm
from covey.solvers.result import HISTORY, Convergence, Fit, after, certified_gap, coefficients, entry
from covey.tables.rows import GroupedData

_CHUNK = 1 << 15  # clients whose matrices exist at the same time: a million clients need no more memory than this
_WORKING_PRECISION = 1e-13


Settle = Callable[[Floats, Quadratic, Quadratic], Floats]
"""Chooses the global model, given the minimiser ``wbar`` and what the server sees of each cluster and of the whole."""


@dataclass(frozen=True)
class SweepReport(Reply):
    """A solution as nodes see it, by which the coordinator can judge it.

    The value and squared gradient of their clients, the sum of forces on each cluster ``(k, d)``, the squared size of what
    cancels in the gradient, and a bound on the curvature.
    """

    value: float
    gradient_squared: float
    force: Floats
    size_squared: float
    mu: float = field(metadata={"least": True})


def solve_top(
    seen: Quadratic, spread: Spread, own: Floats | float = 0.0, settle: Settle | None = None
) -> tuple[Floats, Floats, Floats]:
    """The two upper levels: ``w (k, d)``, the force on each cluster, and ``wbar (d,)``.

    ``own`` is the linear term of the global model itself, zero but inside Newton; ``settle`` may put another global model in
    place of the minimiser before it goes down the tree.
    Without any tie between clusters (all ``lam = 0``) the global model is the plain mean of theirs.
    """
    k = len(seen.r)
    whole = eliminate(seen, spread, np.array([0, k]))
    wbar = solve_symmetric(whole.C, whole.r + own)[0]
    if settle is not None:
        wbar = settle(wbar, seen, whole)
    w, force = descend(seen.C, seen.r, spread, np.zeros(k, dtype=np.int64), wbar[None])
    if settle is None and spread.detached.all():
        wbar = w.mean(axis=0)
    return w, force, wbar


def node_up(data: GroupedData, loss: Loss, gamma: Floats) -> Quadratic:
    """What a node sends: its clients eliminated and summed, for each cluster."""
    k, d = data.n_clusters, data.n_terms
    total = Quadratic(np.zeros((k, d, d)), np.zeros((k, d)), np.zeros(k), np.zeros(k))
    for start, part in _parts(data):
        spread = Spread.of_penalty(gamma[start : start + part.n_clients], d)
        total += eliminate(_normal_equations(part, loss), spread, part.hierarchy.cluster_ptr)
    return total


def node_down(data: GroupedData, loss: Loss, gamma: Floats, w: Floats) -> tuple[Floats, SweepReport]:
    """What a node does with the answer: its clients' ``theta``, which stay, and an account of them."""
    theta = np.empty((data.n_clients, data.n_terms))
    account = SweepReport(0.0, 0.0, np.zeros_like(w), 0.0, np.inf)
    for start, part in _parts(data):
        at = slice(start, start + part.n_clients)
        tree = part.hierarchy
        own = _normal_equations(part, loss)
        spread = Spread.of_penalty(gamma[at], data.n_terms)
        theta[at], force = descend(own.C, own.r, spread, tree.parent, w)
        here = loss.expand(part, theta[at], order=1)
        value = here.value.sum() + 0.5 * (force * (theta[at] - tree.down(w))).sum()
        squared = ((here.gradient + force) ** 2).sum()
        size, mu = float((own.r**2).sum()), loss.smallest_curvature(own.C)
        account += SweepReport(float(value), float(squared), tree.sum_up(force), size, mu)
    return theta, account


@dataclass(frozen=True)
class SweepUp(Message[Quadratic], label="sweep up"):
    """What clusters see of a node's clients; with ``logs``, of the linear problem near their loss."""

    logs: bool = False

    def at(self, node: Node) -> Quadratic:
        data, loss = _responses(node, self.logs)
        return node_up(data, loss, node.gamma)


@dataclass(frozen=True)
class SweepDown(Message[SweepReport], label="sweep down", second=True):
    """The clusters' models ``w (k, d)``: each client moves to its best coefficients given these."""

    w: Floats
    logs: bool = False

    def at(self, node: Node) -> SweepReport:
        data, loss = _responses(node, self.logs)
        node.theta, account = node_down(data, loss, node.gamma, self.w)
        return account


def _responses(node: Node, logs: bool) -> tuple[GroupedData, Loss]:
    linear = node.loss.working_response(node.data) if logs else None
    return (node.data, node.loss) if linear is None else (linear, Gaussian(node.loss.reduction, node.loss.ridge))


@algorithm(place=1, quadratic=True)
def sweep(
    network: Network, penalty: Penalty, settle: Settle | None = None, *, tol: float = 1e-8, james_stein: bool = False
) -> Fit:
    """The exact minimiser for a quadratic loss.

    Where columns on very different scales leave a residual, further sweeps for it follow until rounding stops them.

    Parameters
    ----------
    settle : chooses another global model than the minimiser; the others are then the best given it
    tol : gradient norm at which further sweeps stop
    james_stein : shrink the global model (:mod:`.james_stein`)

    >>> from covey import GroupedData, InMemory, Penalty
    >>> from covey.losses import Gaussian
    >>> data = GroupedData.from_arrays([[1.0], [1.0], [1.0]], [0.0, 3.0, 9.0], ["a", "b", "c"], ["x", "x", "y"])
    >>> penalty = Penalty.of(data.hierarchy, gamma=1.0, lam=1.0)
    >>> fit = sweep(InMemory.of(data, Gaussian(), penalty.gamma), penalty)
    >>> fit.wbar.round(3).tolist(), fit.theta.ravel().round(3).tolist()
    ([4.5], [1.5, 3.0, 7.5])
    """
    if not network.loss.quadratic:
        raise SolverError(
            f"The solver 'sweep' needs a quadratic loss and the {network.loss.name} loss is not; use solver='newton', which "
            "runs a sweep at each of its few steps."
        )
    shrink = Shrink(penalty, network.tree) if james_stein else None
    fit = one_sweep(network, penalty, settle=settle if shrink is None else shrink)
    if not fit.convergence.converged:
        centre = None if settle is None and shrink is None else fit.wbar
        fit = _refined(network, penalty, fit, centre, tol)
    return fit if shrink is None else shrunk(fit, shrink.factor)


def one_sweep(network: Network, penalty: Penalty, *, settle: Settle | None = None, logs: bool = False) -> Fit:
    """One exchange; with ``logs``, of the linear problem near the loss."""
    tree, d = network.tree, len(network.terms)
    seen = network.ask(SweepUp(logs))
    w, force, wbar = solve_top(seen, Spread.of_penalty(penalty.lam, d), settle=settle)
    account = network.ask(SweepDown(w, logs))

    objective = account.value + 0.5 * float((force * (w - wbar)).sum())
    # Clients solve for whatever w they are sent; whether w and wbar are right shows in the balance of forces above them.
    upper = ((force - account.force) ** 2).sum() + ((force.sum(axis=0) ** 2).sum() if settle is None else 0.0)
    norm = float(np.sqrt(account.gradient_squared + upper))
    size = float(np.sqrt(account.size_squared)) + 1.0
    exact = norm <= _WORKING_PRECISION * size
    mu = account.mu if settle is None else 0.0  # given another global model no gap to the minimum is certain
    ledger = quadratic_links(tree.sizes, d).count(np.ones(tree.n_clusters, dtype=np.int64), 1)
    history = pl.DataFrame([entry(1, objective, norm, certified_gap(norm, mu), ledger)], schema=HISTORY)
    message = f"solved exactly in one exchange, gradient norm {norm:.1e}"
    end = Convergence("sweep", exact, 1, 1, objective, norm, certified_gap(norm, mu), message)
    return Fit(coefficients(network), w, wbar, end, history, ledger)


def _refined(network: Network, penalty: Penalty, fit: Fit, centre: Floats | None, tol: float) -> Fit:
    """Sweeps for what rounding has left: Newton, whose steps are sweeps, from where the first one ended."""
    from covey.solvers.direct.newton import newton  # which needs the sweep

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        finer = after(fit, newton(network, penalty, centre, start=fit, tol=tol, max_iter=20))
    end = finer.convergence
    message = f"solved in {end.exchanges} exchanges, rounding of the first refined away, gradient norm {end.gradient_norm:.1e}"
    if not end.converged:
        message = f"{end.message}; the columns are on very different scales: standardise them"
        warn(message)
    return replace(finer, convergence=replace(end, solver="sweep", message=message))


def _normal_equations(data: GroupedData, loss: Loss) -> Quadratic:
    """``A_i = X_i'W_i X_i``, ``b_i = X_i'W_i (y_i - offset_i)`` and half the sum of squares: the loss expanded at zero."""
    here = loss.expand(data, np.zeros((data.n_clients, data.n_terms)))
    return Quadratic(here.hessian, -here.gradient, here.value, data.rows_that_count)


def _parts(data: GroupedData) -> list[tuple[int, GroupedData]]:
    starts = range(0, data.n_clients, _CHUNK)
    return [(start, data.clients(start, min(start + _CHUNK, data.n_clients))) for start in starts]
