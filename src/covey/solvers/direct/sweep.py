"""The sweep: the exact minimiser for a quadratic loss, in one exchange: sums up, centres down.

It computes the best linear unbiased estimator of the hierarchical linear model: Equation 5.2 (hlm_loss) and Theorem 5.1 (blue)
of arXiv:2204.13619. It eliminates clients, then clusters, solves for the global model, and goes back down the tree, with the
covariances of :mod:`covey.solvers.direct.elimination` in place of penalties:

    for each client    C_i, r_i = what its cluster sees of it            C_j, r_j = sums over the cluster
    for each cluster   D_j, q_j = what the global model sees of it       wbar = (sum D_j)^-1 sum q_j
    and back down      w_j = wbar + S (q_j - D_j wbar)                   theta_i = w_j + S_i (r_i - C_i w_j)

    SweepUp       a node replies with a Quadratic: the sum of (C_i, r_i) over its clients, for each cluster
                  the coordinator solves for w and wbar with the sum over nodes
    SweepDown     a node gets w, computes its clients' theta, which stay there, and replies with a SweepReport
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Annotated

import numpy as np

from covey._typing import Floats
from covey.errors import ConvergenceWarning, SolverError, warn
from covey.losses import Gaussian, Loss
from covey.nodes.network import Message, Network, Node
from covey.objective.objective import Penalty
from covey.records import Axes, Reply
from covey.solvers.direct.elimination import Quadratic, Spread, descend, eliminate, expanded, solve_symmetric
from covey.solvers.direct.james_stein import Shrink, shrunk
from covey.solvers.direct.row_space import RowSpace
from covey.solvers.direct.spaces import linear_clients, space_of
from covey.solvers.registry import algorithm
from covey.solvers.result import Convergence, Fit, after, certified_gap, direct_history
from covey.tables.rows import GroupedData

_CHUNK = 1 << 15  # clients whose matrices are in memory at the same time
_WORKING_PRECISION = 1e-13
_WORSE = 1e-6  # by how much rounding can make an objective larger than it is

Settle = Callable[[Floats, Quadratic, Quadratic], Floats]
"""Chooses another global model, given the minimiser ``wbar`` and the quadratics of the clusters and of the whole network."""


def solve_top(
    seen: Quadratic, spread: Spread, own: Floats | float = 0.0, settle: Settle | None = None
) -> tuple[Floats, Floats, Floats]:
    """Solve the two upper levels: ``w (k, d)``, the force on each cluster ``(k, d)``, and ``wbar (d,)``.

    ``own`` is a linear term of the global model itself, which only Newton has. ``settle`` may replace the global model before
    it goes down the tree. If no cluster is tied to the global model (all ``lam = 0``), that is the plain mean of the clusters.
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


@dataclass(frozen=True)
class SweepUp(Message[Quadratic], label="sweep up"):
    """Ask what clusters see of a node's clients; with ``logs``, for the linear problem near their loss."""

    logs: bool = False

    def at(self, node: Node) -> Quadratic:
        k, d = node.data.n_clusters, node.data.n_terms
        if space_of(d, d) == "rows":
            clients, data = _in_row_space(node, self.logs)
            aside = np.zeros(data.n_clients), data.rows_that_count
            return clients.eliminate(None, Spread.of_penalty(node.gamma, d), data.hierarchy.cluster_ptr, aside)
        total = Quadratic(np.zeros((k, d, d)), np.zeros((k, d)), np.zeros(k), np.zeros(k))
        for at, part, loss in _parts(node, self.logs):
            total += eliminate(_normal_equations(part, loss), Spread.of_penalty(node.gamma[at], d), part.hierarchy.cluster_ptr)
        return total


@dataclass(frozen=True)
class SweepReport(Reply):
    """How good a solution is, as a node sees it.

    The value and squared gradient of its clients, the sum of forces on each cluster ``(k, d)``, the squared size of the terms
    that cancel in the gradient, and a lower bound on the curvature.
    """

    value: float
    gradient_squared: Annotated[float, Axes("", "square")]
    force: Annotated[Floats, Axes("k d")]
    size_squared: Annotated[float, Axes("", "square")]
    mu: float = field(metadata={"least": True})


@dataclass(frozen=True)
class SweepDown(Message[SweepReport], label="sweep down"):
    """Put each client at its best coefficients, given the clusters' models ``w (k, d)``."""

    w: Annotated[Floats, Axes("k d")]
    logs: bool = False

    def at(self, node: Node) -> SweepReport:
        d = node.data.n_terms
        theta = np.empty((node.data.n_clients, d))
        report = SweepReport(0.0, 0.0, np.zeros_like(self.w), 0.0, np.inf)
        for at, part, loss in _parts(node, self.logs):
            tree, spread = part.hierarchy, Spread.of_penalty(node.gamma[at], d)
            if space_of(d, d) == "rows":  # then there is one part
                clients, _ = _in_row_space(node, self.logs)
                theta[at], force = clients.descend(None, spread, tree.parent, self.w)
                b, mu = clients.linear_terms(), clients.smallest_curvature(loss)
            else:
                equations = _normal_equations(part, loss)
                theta[at], force = descend(equations.C, equations.r, spread, tree.parent, self.w)
                b, mu = equations.r, loss.smallest_curvature(equations.C)
            here = loss.expand(part, theta[at], order=1)
            value = here.value.sum() + 0.5 * (force * (theta[at] - tree.down(self.w))).sum()
            squared = ((here.gradient + force) ** 2).sum()
            report += SweepReport(float(value), float(squared), tree.sum_up(force), float((b**2).sum()), mu)
        node.theta = theta
        node.cache.pop("row space", None)
        return report


def _parts(node: Node, logs: bool) -> Iterator[tuple[slice, GroupedData, Loss]]:
    """The clients of a node, some at a time, so that a million clients need little memory. Row space divides its own work."""
    data, loss = _linear(node, logs)
    step = data.n_clients if space_of(data.n_terms, data.n_terms) == "rows" else _CHUNK
    for start in range(0, data.n_clients, step):
        stop = min(start + step, data.n_clients)
        yield slice(start, stop), data.clients(start, stop), loss


def _linear(node: Node, logs: bool) -> tuple[GroupedData, Loss]:
    """The rows and the loss of a node; with ``logs``, of the linear problem near its loss."""
    linear = node.loss.working_response(node.data) if logs else None
    return (node.data, node.loss) if linear is None else (linear, Gaussian(node.loss.reduction, node.loss.ridge))


def _in_row_space(node: Node, logs: bool) -> tuple[RowSpace, GroupedData]:
    """The clients in row space, and their rows. They are kept from the way up to the way down."""
    last = node.cache.get("row space")
    if last is None or last[0] != logs:
        data, loss = _linear(node, logs)
        d = data.n_terms
        last = node.cache["row space"] = logs, linear_clients(data, loss, np.zeros(d), d), data
    clients: RowSpace = last[1]
    return clients, last[2]


def _normal_equations(data: GroupedData, loss: Loss) -> Quadratic:
    """``A_i = X_i'W_i X_i``, ``b_i = X_i'W_i (y_i - offset_i)`` and half the sum of squares: the loss expanded at zero."""
    return expanded(data, loss, np.zeros((data.n_clients, data.n_terms)))


@algorithm(
    place=1, quadratic=True, refuses={"participation": "its one exchange needs the sums of every cluster; use solver='l2gd'."}
)
def sweep(
    network: Network, penalty: Penalty, centre: Floats | None = None, *, tol: float = 1e-8, james_stein: bool = False
) -> Fit:
    """Compute the exact minimiser for a quadratic loss.

    If columns are on very different scales, rounding leaves a residual. Newton steps then remove it.

    Parameters
    ----------
    network : Network
        The nodes that hold the clients' rows.
    penalty : Penalty
        ``gamma (n,)`` and ``lam (k,)``.
    centre : (d,) array, optional
        A given global model. The other models are then the best ones given it.
    tol : float
        Gradient norm at which these Newton steps stop.
    james_stein : bool
        Whether to shrink the global model (:mod:`covey.solvers.direct.james_stein`).

    Returns
    -------
    Fit
        Models of all levels, with a history and a ledger of the exchanges.

    Examples
    --------
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
            f"The solver 'sweep' needs a quadratic loss, and the {network.loss.name} loss is not quadratic; use "
            "solver='newton', which runs a sweep at each of its few steps."
        )
    shrink = Shrink(penalty, network.tree) if james_stein else None
    settle = shrink if shrink is not None or centre is None else lambda *_: centre
    fit = one_sweep(network, penalty, settle=settle)
    if not fit.convergence.converged:
        fit = _refined(network, penalty, fit, None if settle is None else fit.wbar, tol)
    return fit if shrink is None else shrunk(fit, shrink.factor)


def one_sweep(network: Network, penalty: Penalty, *, settle: Settle | None = None, logs: bool = False) -> Fit:
    """One sweep; with ``logs``, for the linear problem near the loss."""
    seen = network.ask(SweepUp(logs))
    w, force, wbar = solve_top(seen, Spread.of_penalty(penalty.lam, len(network.terms)), settle=settle)
    report = network.ask(SweepDown(w, logs))

    objective = report.value + 0.5 * float((force * (w - wbar)).sum())
    # Clients solve for any w that they get. The balance of forces above them shows whether w and wbar are right.
    upper = ((force - report.force) ** 2).sum() + ((force.sum(axis=0) ** 2).sum() if settle is None else 0.0)
    norm = float(np.sqrt(report.gradient_squared + upper))
    size = float(np.sqrt(report.size_squared)) + 1.0
    mu = report.mu if settle is None else 0.0  # with another global model there is no certified gap to the minimum
    message = f"solved exactly in one exchange (sums up, centres down), gradient norm {norm:.1e}"
    # All models at zero are a solution, too, and the best one is not worse.
    worse = settle is None and objective > float(seen.c.sum()) + _WORSE * float(np.abs(seen.c).sum() + size)
    exact = norm <= _WORKING_PRECISION * size and not worse
    end = Convergence("sweep", exact, 1, 1, objective, norm, certified_gap(norm, mu), message)
    return Fit.of(network, w, wbar, end, *direct_history(network, [(1, objective, norm, 1)], mu))


def _refined(network: Network, penalty: Penalty, fit: Fit, centre: Floats | None, tol: float) -> Fit:
    """Remove the rounding error of a sweep by Newton, whose steps are sweeps, from the end of the first sweep."""
    from covey.solvers.direct.newton import newton  # imported here because newton imports this module

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        finer = after(fit, newton(network, penalty, centre, start=fit, tol=tol, max_iter=20))
    end = finer.convergence
    message = f"solved in {end.exchanges} exchanges, rounding of the first refined away, gradient norm {end.gradient_norm:.1e}"
    if not end.converged:
        message = f"{end.message}; the columns are on very different scales: standardise them"
        warn(message)
    return replace(finer, convergence=replace(end, solver="sweep", message=message))
