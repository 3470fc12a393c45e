"""The sweep: eliminate clients, then clusters, solve the global block, go back down. Exact, in one exchange.

PAPER.md's closed form of the hierarchical linear model, in the covariances of :mod:`.elimination` instead of penalties:

    for each client    C_i, r_i = what its cluster sees of it     C_j, r_j = sums over the cluster
    for each cluster   D_j, q_j = what the whole sees of it       wbar = (sum D_j)^-1 sum q_j
    and back down      w_j = wbar + S (q_j - D_j wbar)            theta_i = w_j + S_i (r_i - C_i w_j)

    Up     node          sends   Quadratic: sum of (C_i, r_i) over its clients, for each cluster
           coordinator   solves  w, wbar from the sum over nodes
    Down   node          gets    w, computes its clients' theta, which stay there; sends Account, by which to judge them
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import polars as pl

from covey._typing import Floats
from covey.errors import SolverError, warn
from covey.losses import Gaussian, Loss
from covey.nodes.messages import Message
from covey.nodes.network import InMemory, Network
from covey.nodes.node import Node
from covey.objective.penalty import Penalty
from covey.records import Reply
from covey.solvers.direct.elimination import Quadratic, Spread, descend, eliminate, solve_symmetric
from covey.solvers.ledger import quadratic_links
from covey.solvers.result import HISTORY, Convergence, Fit, certified_gap, entry
from covey.tables.rows import GroupedData

_CHUNK = 1 << 15  # clients whose matrices exist at the same time: a million clients need no more memory than this
_WORKING_PRECISION = 1e-13


Settle = Callable[[Floats, Quadratic, Quadratic], Floats]
"""What becomes of the global model: told the minimiser ``wbar`` and what the server sees, of each cluster and of the whole."""


@dataclass(frozen=True)
class SweepReport(Reply):
    """What nodes tell of a solution, so that the coordinator can judge it.

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
    """tell what your clusters see of your clients; with ``logs``, of the linear problem near their loss."""

    logs: bool = False

    def at(self, node: Node) -> Quadratic:
        data, loss = _responses(node, self.logs)
        return node_up(data, loss, node.gamma)


@dataclass(frozen=True)
class SweepDown(Message[SweepReport], label="sweep down", second=True):
    """the clusters' models ``w (k, d)``; move your clients to where these put them."""

    w: Floats
    logs: bool = False

    def at(self, node: Node) -> SweepReport:
        data, loss = _responses(node, self.logs)
        node.theta, account = node_down(data, loss, node.gamma, self.w)
        return account


def _responses(node: Node, logs: bool) -> tuple[GroupedData, Loss]:
    linear = node.loss.working_response(node.data) if logs else None
    return (node.data, node.loss) if linear is None else (linear, Gaussian(node.loss.reduction, node.loss.ridge))


def sweep(data: GroupedData, loss: Loss, penalty: Penalty, *, settle: Settle | None = None) -> Fit:
    """The exact minimiser for a Gaussian loss; with ``settle``, the minimiser given the global model that it chooses.

    >>> from covey import GroupedData, Penalty
    >>> from covey.losses import Gaussian
    >>> data = GroupedData.from_arrays([[1.0], [1.0], [1.0]], [0.0, 3.0, 9.0], ["a", "b", "c"], ["x", "x", "y"])
    >>> fit = sweep(data, Gaussian(), Penalty.of(data.hierarchy, gamma=1.0, lam=1.0))
    >>> fit.wbar.round(3).tolist(), fit.theta.ravel().round(3).tolist()
    ([4.5], [1.5, 3.0, 7.5])
    """
    network = InMemory.of(data, loss, penalty.gamma)
    return replace(sweep_across(network, penalty, settle=settle), theta=network.node.coefficients())


def sweep_across(network: Network, penalty: Penalty, *, settle: Settle | None = None, logs: bool = False) -> Fit:
    """The sweep over any network; the clients' models stay at their nodes."""
    if not network.loss.quadratic and not logs:
        raise SolverError(
            f"The solver 'sweep' needs a quadratic loss and the {network.loss.name} loss is not; use solver='newton', which "
            "runs a sweep at each of its few steps."
        )
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
    message = f"solved exactly in one exchange, gradient norm {norm:.1e}"
    mu = account.mu if settle is None else 0.0  # below a global model of one's own choice no gap to the minimum is certain
    if not exact:
        message = (
            f"the gradient norm is {norm:.1e} where rounding alone leaves about {_WORKING_PRECISION * size:.1e}; the "
            "columns are badly scaled: standardise them, or refine with solver='newton'"
        )
        warn(message)
    ledger = quadratic_links(tree.sizes, d).count(np.ones(tree.n_clusters, dtype=np.int64), 1)
    history = pl.DataFrame([entry(1, objective, norm, certified_gap(norm, mu), ledger)], schema=HISTORY)
    end = Convergence("sweep", exact, 1, 1, objective, norm, certified_gap(norm, mu), message)
    return Fit(np.empty((0, d)), w, wbar, end, history, ledger)


def _normal_equations(data: GroupedData, loss: Loss) -> Quadratic:
    """``A_i = X_i'W_i X_i``, ``b_i = X_i'W_i (y_i - offset_i)`` and half the sum of squares: the loss expanded at zero."""
    here = loss.expand(data, np.zeros((data.n_clients, data.n_terms)))
    return Quadratic(here.hessian, -here.gradient, here.value, data.rows_that_count)


def _parts(data: GroupedData) -> list[tuple[int, GroupedData]]:
    starts = range(0, data.n_clients, _CHUNK)
    return [(start, data.clients(start, min(start + _CHUNK, data.n_clients))) for start in starts]
