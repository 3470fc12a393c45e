"""The columns, rows and sums that a node works with while covariances are estimated.

A node works with combinations of columns (:mod:`.dependence`), with losses about an origin that all nodes share, and with
terms in a working order: terms that vary come first. Arrays that were computed for one message are cached for the next.
Several processes may serve a node in turn, so a cached value is used only if it was computed from equal arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, TypeVar

import numpy as np

from covey._typing import Anything, Floats, Ints
from covey.nodes.network import Message, Network, Node, R
from covey.nodes.requests import TakeState, joined
from covey.records import Axes, Record, Reply
from covey.solvers.direct.elimination import Quadratic, Spread
from covey.solvers.direct.hessians import Hessians, LeadingHessians, WholeHessians, by_cell
from covey.solvers.direct.profile import Prepared
from covey.solvers.direct.spaces import hessians, linear_clients, space_of
from covey.solvers.result import Fit
from covey.tables.rows import GroupedData
from covey.threads import share
from covey.variance import kernels
from covey.variance.components import Components, Learned, LevelComponents, Whole
from covey.variance.parameters import Shape

T = TypeVar("T")


class LearningState(Record):
    """State that a node keeps while covariances are estimated, and drops before a solver begins."""


@dataclass(frozen=True)
class WorkingColumns(LearningState):
    """The working columns are ``X basis``, with ``basis (d, d)``. Losses are about the coefficients ``origin (d,)``.

    ``one`` is the position of a column of ones; -1 if there is none.

    >>> columns = WorkingColumns(np.array([[1.0, -2000.0], [0.0, 1.0]]), 0, np.zeros(2))
    >>> columns.to_user_units(np.array([[5.0, 3.0]])).tolist()  # the intercept at the year 2000, then at the year 0
    [[-5995.0, 3.0]]
    """

    basis: Annotated[Floats, Axes("d d")]
    one: int
    origin: Annotated[Floats, Axes("d")]

    @classmethod
    def plain(cls, d: int, one: int = -1) -> WorkingColumns:
        """The user's columns as they are."""
        return cls(np.eye(d), one, np.zeros(d))

    def to_user_units(self, coefficients: Floats) -> Floats:
        """Convert coefficients ``(..., d)`` of working columns to those of the user's columns."""
        return coefficients if is_identity(self.basis) else coefficients @ self.basis.T

    def losses_to_user_units(self, losses: Quadratic) -> Quadratic:
        """Convert losses to functions of the coefficients of the user's columns."""
        if is_identity(self.basis):
            return losses
        inverse = np.linalg.inv(self.basis)
        return Quadratic(inverse.T @ losses.C @ inverse, losses.r @ inverse, losses.c, losses.n)


def is_identity(basis: Floats) -> bool:
    return np.array_equal(basis, np.eye(len(basis)))


@dataclass(frozen=True)
class TermOrder(Record):
    """The working order of terms: their positions in the data. Only the first ``width`` may vary between clients.

    Terms may be left out.
    """

    terms: Ints
    width: int

    @property
    def inverse(self) -> Ints:
        """The place of each term in the working order."""
        return np.argsort(self.terms)

    @property
    def key(self) -> tuple[Anything, ...]:
        """The arrays that identify the order, for :func:`from_cache`."""
        return self.terms, np.array([self.width])


@dataclass(frozen=True)
class ClientSums(LearningState):
    """Each client's loss about ``origin (d,)``, and the sum of log weights. A linear fit needs nothing else of the rows.

    Bootstraps and updates start from these sums, without rows.
    """

    units: Quadratic
    origin: Floats
    log_weights: float


class CountingNetwork:
    """A network whose exchanges are counted."""

    def __init__(self, network: Network) -> None:
        self.network, self.exchanges = network, 0
        self.tree, self.terms, self.loss = network.tree, network.terms, network.loss

    def ask(self, message: Message[R]) -> R:
        self.exchanges += 1
        return self.network.ask(message)


@dataclass(frozen=True)
class Survey:
    """What the coordinator asks of all nodes before a search. A fit, and the fits that test it, share one survey.

    Attributes
    ----------
    network : the nodes, which use ``columns`` from now on
    columns : the working columns of all nodes
    cluster_sums : each cluster's sum of its clients' losses about the origin
    log_weights : the sum over all rows of the logarithms of their weights
    middle : (d,) for counts and classes the coefficients of one model for all rows; zero for a linear model
    constant_within : (2, d) which terms are constant within every cluster, and within every client
    totals : the totals of all rows; None if there are only sums
    shape : which terms vary, after terms were left out that cannot vary or that other terms determine
    notes : sentences on these terms
    prepared : the sparse columns, if there are any
    """

    network: CountingNetwork
    columns: WorkingColumns
    cluster_sums: Quadratic
    log_weights: float
    middle: Floats
    constant_within: Anything
    totals: RowTotals | None = None
    shape: Shape | None = None
    notes: tuple[str, ...] = ()
    prepared: Prepared | None = None


# At the node


def working_columns(node: Node) -> WorkingColumns:
    """The working columns that the coordinator has set, or else the columns as they are."""
    return node.find(WorkingColumns) or WorkingColumns.plain(node.data.n_terms)


def from_cache(node: Node, name: str, key: tuple[Anything, ...], compute: Callable[[], T]) -> T:
    """The cached value of this name, computed anew unless it was computed from the same arrays ``key``."""
    entry = node.cache.get(name)
    if entry is None or not all(a is b or np.array_equal(a, b) for a, b in zip(entry[0], key, strict=True)):
        entry = node.cache[name] = (key, compute())
    value: T = entry[1]
    return value


def client_rows(node: Node, order: Ints | None = None) -> GroupedData:
    """The node's rows, with working columns in the working order."""
    data, basis = node.data, working_columns(node).basis
    order = np.arange(data.n_terms) if order is None else order
    permuted = not np.array_equal(order, np.arange(data.n_terms))
    if not permuted and is_identity(basis):
        return data

    def compute() -> GroupedData:
        X = _combined(data.X, basis)
        terms = tuple(data.terms[at] for at in order)
        return replace(data, X=np.ascontiguousarray(X[:, order]) if permuted else X, terms=terms)

    return from_cache(node, "rows", (basis, order), compute)


def _combined(X: Floats, basis: Floats) -> Floats:
    return X if is_identity(basis) else X @ basis


def client_losses(node: Node, order: Ints | None = None, *, at_mode: bool = False) -> Quadratic:
    """Each client's loss about the origin, with terms in the working order.

    With ``at_mode``, the curvature that a fit by Laplace's approximation has kept; the other parts are zero.
    """
    columns = working_columns(node)
    if at_mode:
        kept, basis = node.state(ClientSums).units, columns.basis if order is None else columns.basis[:, order]
        return Quadratic(np.ascontiguousarray(basis.T @ kept.C @ basis), np.zeros_like(kept.r), np.zeros_like(kept.c), kept.n)

    def compute() -> Quadratic:
        data = client_rows(node)
        here = node.loss.expand(data, np.tile(columns.origin, (data.n_clients, 1)))
        return Quadratic(here.hessian, -here.gradient, here.value, data.rows_that_count)

    losses = from_cache(node, "losses", (columns.basis, columns.origin), compute)
    if order is None or not (order != np.arange(len(order))).any():
        return losses

    def permute() -> Quadratic:
        C, r = losses.C[:, order[:, None], order], losses.r[:, order]
        return replace(losses, C=np.ascontiguousarray(C), r=np.ascontiguousarray(r))

    return from_cache(node, "losses in order", (columns.basis, columns.origin, order), permute)


def losses_in_space(node: Node, order: TermOrder) -> tuple[Hessians, Floats | None, tuple[Floats, Floats]]:
    """Each client's loss about the origin, not with whole Hessians but in the space where it is cheapest to solve.

    Returns the Hessians, the linear terms (None if the Hessians know them), and the constants and numbers of rows.
    """
    columns = working_columns(node)

    def compute() -> tuple[Hessians, Floats | None, tuple[Floats, Floats]]:
        rows = space_of(len(order.terms), order.width) == "rows"
        if not node.data.n_rows:  # there may be the sums of an earlier fit
            losses = client_losses(node, order.terms)
            aside, ptr = (losses.c, losses.n), node.data.hierarchy.cluster_ptr
            return WholeHessians(losses.C) if rows else LeadingHessians.of_matrices(losses.C, ptr, order.width), losses.r, aside
        data, origin = client_rows(node, order.terms), columns.origin[order.terms]
        if rows:
            return linear_clients(data, node.loss, origin, order.width), None, (np.zeros(data.n_clients), data.rows_that_count)
        here = node.loss.expand_rows(data, np.tile(origin, (data.n_clients, 1)))
        return hessians(data, node.loss, here, order.width), -here.gradient, (here.value, data.rows_that_count)

    return from_cache(node, "losses in space", (columns.basis, columns.origin, *order.key), compute)


def client_spread(node: Node, S: Floats, order: TermOrder) -> Spread:
    """The covariance of each of the node's clients about its cluster, from ``S (1 or k, d, d)``."""
    tree = node.data.hierarchy
    return Spread.of_covariances(S if len(S) == 1 else S[tree.parent], tree.n_clients, order.width)


@dataclass(frozen=True)
class NonFiniteClients(Reply):
    """The number of clients with coefficients that are not finite."""

    n_nonfinite: int


@dataclass(frozen=True)
class Slopes(Reply):
    """Sums over clients of ``bend`` and ``pull``, ``(m, 1 or k, width, width)``."""

    bend: Annotated[Floats, Axes("points groups width width")]
    pull: Annotated[Floats, Axes("points groups width width")]


@dataclass(frozen=True)
class BendSums(Reply):
    """``volume`` is the sum of log-determinants; ``lifted (k, d)`` the sums of ``(I + H_i S_j)^-1 g_i`` by cluster."""

    volume: float
    lifted: Annotated[Floats, Axes("k order")]


@dataclass(frozen=True)
class FromLogs(Record):
    """The clusters' solution ``w (k, d)`` of the sweep for the logs of counts, relative to ``centre (d,)``."""

    centre: Annotated[Floats, Axes("order")]
    w: Annotated[Floats, Axes("k order")]


def keep_results(node: Node, theta: Floats, losses: Quadratic, origin: Floats) -> NonFiniteClients:
    """Keep the coefficients and sums of the node's clients, in the user's units."""
    columns = working_columns(node)
    node.theta = columns.to_user_units(theta)
    node.keep(ClientSums(columns.losses_to_user_units(losses), columns.to_user_units(origin), sum_log_weights(node.data)))
    return NonFiniteClients(int((~np.isfinite(node.theta).all(axis=1)).sum()))


def sum_log_weights(data: GroupedData) -> float:
    """The sum over all rows of the logarithms of their weights."""
    if data.sums is not None:
        return float(data.sums.log_weights.sum())
    weights = data.weights
    return 0.0 if weights is None else float(np.log(weights[weights > 0]).sum())


def gathered_learned(network: Network, components: Components, covariance: Floats) -> Learned:
    """Join the estimates with the sums of the clients of all nodes, in the order of the tree."""
    node, places = network.clients(), network.places
    if node is not None:
        return node_learned(node, components, covariance)
    kept: Any = network.every(TakeState(ClientSums.__name__))
    names = [part.name for part in fields(Quadratic)]
    units = Quadratic(*(joined([getattr(each.units, name) for each in kept], places) for name in names))
    log_weights = float(sum(each.log_weights for each in kept))
    columns = network.every(TakeState(WorkingColumns.__name__))[0]
    basis = None if not isinstance(columns, WorkingColumns) or is_identity(columns.basis) else columns.basis
    return Learned(components, network.terms, network.tree, covariance, units, kept[0].origin, log_weights, None, basis)


def node_learned(node: Node, components: Components, covariance: Floats, whole: Whole | None = None) -> Learned:
    """Join the coordinator's estimates with the sums of one node's clients, so that these clients have intervals.

    ``components``, ``covariance`` and ``whole`` are fields of the coordinator's :class:`.Learned`. Leave out ``whole`` if the
    node holds all clients.
    """
    data, kept, columns = node.data, node.state(ClientSums), working_columns(node)
    sums, basis = (kept.units, kept.origin, kept.log_weights), None if is_identity(columns.basis) else columns.basis
    return Learned(components, data.terms, data.hierarchy, covariance, *sums, whole, basis)


@dataclass(frozen=True)
class ForgetCovariances(Message[None], label="forget covariances", phase="learn", reply=False):
    """Drop all state of the estimation of covariances, so that a solver starts from a clean node."""

    def at(self, node: Node) -> None:
        node.theta = None
        node.drop(*(kind for kind in node.states if issubclass(kind, LearningState)))
        node.cache.clear()


@dataclass(frozen=True)
class RowTotals(Reply):
    """Sums over all rows of a node, with working columns.

    Attributes
    ----------
    rows, counted : the number of rows, and of those with positive weight
    weight, log_weights : the sums of weights and of their logarithms
    ones : (d,) the number of rows where a column is 1
    total, squares : (d,) the sums of the columns and of their squares
    gram, rhs : ``X'WX (d, d)`` and ``X'W(y - offset) (d,)``
    response, response_squares : the sums of ``y`` and of ``W (y - offset)^2``
    constant : the part of the negative log-likelihood that losses leave out
    perfect : the lowest loss that the rows could have, if a dispersion is estimated
    """

    rows: int
    counted: Annotated[float, Axes("", "count")]
    weight: Annotated[float, Axes("", "square")]
    log_weights: float
    ones: Annotated[Floats, Axes("d", "count")]
    total: Annotated[Floats, Axes("d")]
    squares: Annotated[Floats, Axes("d", "square")]
    gram: Annotated[Floats, Axes("d d", "psd")]
    rhs: Annotated[Floats, Axes("d")]
    response: float
    response_squares: Annotated[float, Axes("", "square")]
    constant: float
    perfect: float


@dataclass(frozen=True)
class SumRows(Message[RowTotals], label="totals of rows", phase="learn"):
    """Sum the rows, with the columns ``X basis``."""

    basis: Annotated[Floats, Axes("d d")]

    def at(self, node: Node) -> RowTotals:
        data = replace(node.data, X=_combined(node.data.X, self.basis))
        rows, weight = int(data.rows_per_client.sum()), float(data.weight_of_client.sum())
        # Sums of rows with weights give means with weights, which serve to centre columns as well.
        per_row = 1.0 if data.sums is None else rows / weight
        ones, (total, squares, products) = _sum_rows(data)
        weights = np.ones(data.n_rows) if data.weights is None else data.weights
        starts = np.append(np.arange(0, data.n_rows, kernels.ROWS), data.n_rows)
        gram = by_cell(data.X, data.X, weights, starts).sum(axis=0)
        return RowTotals(
            rows,
            float(data.rows_that_count.sum()),
            weight,
            sum_log_weights(data),
            ones if data.X is node.data.X and data.sums is None else _ones(node.data),
            per_row * (total[:-1] if data.sums is None else data.unit @ data.X),
            per_row * squares[:-1],
            gram,
            products[:-1],
            float(total[-1]),
            float(products[-1]),
            float(node.loss.constant(data)),
            float(node.loss.perfect(data).sum()) if node.loss.dispersion else 0.0,
        )


def _ones(data: GroupedData) -> Floats:
    """The number of rows where a column is 1, ``(d,)``; if there are only sums, all rows or none."""
    if data.sums is None:
        return _sum_rows(data)[0]
    rows = float(data.rows_per_client.sum())
    return np.array([rows if np.array_equal(column, data.unit) else 0.0 for column in data.X.T])


def _sum_rows(data: GroupedData) -> tuple[Floats, Floats]:
    """The numbers of ones in the columns ``(d,)``, and the sums ``(3, d + 1)`` of :func:`.kernels.sum_rows` over all rows."""
    blocks, d = -(-data.n_rows // kernels.ROWS), data.n_terms
    ones, sums = np.empty((blocks, d), dtype=np.int64), np.empty((blocks, 3, d + 1))
    weights, offset = (np.empty(0) if values is None else values for values in (data.weights, data.offset))
    share(kernels.sum_rows, blocks, data.X, data.y, weights, offset, ones, sums)
    return ones.sum(axis=0).astype(np.float64), sums.sum(axis=0)


def uncentred(fit: Fit, learned: Learned, columns: WorkingColumns) -> tuple[Fit, Learned]:
    """Convert a fit to working columns to the user's units. The nodes convert the coefficients of their clients."""
    if is_identity(columns.basis):
        return fit, learned
    to_user, whole = columns.basis, learned.whole
    fit = replace(fit, w=columns.to_user_units(fit.w), wbar=columns.to_user_units(fit.wbar))
    parts = learned.components
    client, cluster = (_level_uncentred(level, learned.terms, columns) for level in (parts.client, parts.cluster))
    components = replace(parts, client=client, cluster=cluster)
    covariance, origin = to_user @ learned.covariance @ to_user.T, columns.to_user_units(learned.origin)
    if whole is not None:
        whole = whole.in_user_units(to_user)
    return fit, replace(learned, components=components, covariance=covariance, origin=origin, whole=whole)


def _level_uncentred(level: LevelComponents, terms: tuple[str, ...], columns: WorkingColumns) -> LevelComponents:
    at = np.array([terms.index(term) for term in level.terms], dtype=np.int64)
    to_user = columns.basis[at[:, None], at]
    # The variance of a term, such as the intercept, changes only if a combination with it varies at this level.
    changed = (to_user != np.eye(len(at))).any(axis=1)
    if not changed.any():
        return level
    errors = np.where(changed, np.nan, level.sd_error)  # an intercept so far from the rows has no useful estimate
    return replace(level, covariance=to_user @ level.covariance @ to_user.T, sd_error=errors)
