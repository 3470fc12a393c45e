"""How a node sees its rows while covariances are learned, and how it keeps what can be made of them again.

Columns may be shifted (see :mod:`.centring`), sums are about an origin that all nodes share, and terms are put in the order
in which they are worked on. What was made for one request serves the next, as long as it was made of the same numbers: nodes
may be served by one process or by several, so a cache is trusted only after a look at what it was made of.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from covey._typing import Anything, Floats, Ints
from covey.losses import Loss
from covey.nodes.messages import Message, R
from covey.nodes.network import Arrived, Network
from covey.nodes.node import Node
from covey.records import Record, Reply
from covey.solvers.direct.elimination import Quadratic, Spread
from covey.solvers.threads import threads_for
from covey.tables.rows import GroupedData
from covey.tree.hierarchy import Hierarchy
from covey.variance.components import Components, Learned, Whole

T = TypeVar("T")


class LearningState(Record):
    """What nodes keep while covariances are learned, and forget before a solver begins."""


@dataclass(frozen=True)
class WorkingColumns(LearningState):
    """Columns less ``shift (d,)``, which the column ``one`` of ones takes up, and losses about ``origin (d,)``.

    >>> frame = WorkingColumns(np.array([0.0, 2000.0]), 0, np.zeros(2))
    >>> frame.told(np.array([[5.0, 3.0]])).tolist()  # the intercept of the year 2000, as that of the year 0
    [[-5995.0, 3.0]]
    """

    shift: Floats
    one: int
    origin: Floats

    @classmethod
    def plain(cls, d: int) -> WorkingColumns:
        return cls(np.zeros(d), -1, np.zeros(d))

    def told(self, coefficients: Floats) -> Floats:
        """Coefficients ``(..., d)`` of shifted columns as those of the columns as they were."""
        return coefficients @ self.back.T if self.shift.any() else coefficients

    @property
    def back(self) -> Floats:
        """The matrix that does so."""
        matrix = np.eye(len(self.shift))
        if self.shift.any():
            matrix[self.one] -= self.shift
        return matrix

    @property
    def forth(self) -> Floats:
        """Its inverse."""
        return 2.0 * np.eye(len(self.shift)) - self.back

    def sums_told(self, units: Quadratic) -> Quadratic:
        """Losses of shifted columns as those of the columns as they were."""
        if not self.shift.any():
            return units
        return Quadratic(self.forth.T @ units.C @ self.forth, units.r @ self.forth, units.c, units.n)


@dataclass(frozen=True)
class TermOrder(Record):
    """The order in which terms are worked on, ``(d,)``, and how many of the first may vary between clients."""

    order: Ints
    width: int

    @property
    def back(self) -> Ints:
        return np.argsort(self.order)

    @property
    def key(self) -> tuple[Anything, ...]:
        return self.order, np.array([self.width])


@dataclass(frozen=True)
class ClientSums(LearningState):
    """All that a linear fit needs of the rows: each client's loss about ``origin (d,)``, and the sum of log weights.

    Rows are left behind: bootstraps and updates start from here.
    """

    units: Quadratic
    origin: Floats
    log_weights: float


@dataclass
class CountingNetwork(Network):
    """A network that counts the exchanges asked of it."""

    network: Network
    exchanges: int = 0

    @property
    def tree(self) -> Hierarchy:
        return self.network.tree

    @property
    def terms(self) -> tuple[str, ...]:
        return self.network.terms

    @property
    def loss(self) -> Loss:
        return self.network.loss

    def send(self, message: Message[Any]) -> None:
        self.exchanges += 1
        self.network.send(message)

    def collect(self) -> list[Arrived]:
        return self.network.collect()

    def ask(self, message: Message[R]) -> R:
        self.exchanges += 1
        return self.network.ask(message)

    def clients(self) -> Node | None:
        return self.network.clients()


def threads_of(network: Network) -> AbstractContextManager[None]:
    """As many threads as an evaluation is worth where all clients are in memory; elsewhere that is the nodes' affair."""
    node = network.clients()
    if node is None:
        return nullcontext()
    data = node.data
    # An evaluation reads the rows, and does a few operations on each client's matrix.
    return threads_for(data.n_rows * data.n_terms + data.n_clients * data.n_terms**3 // 8)


# At the node


def frame_at(node: Node) -> WorkingColumns:
    """The frame that the coordinator has set; without one, the columns as they are."""
    return node.find(WorkingColumns) or WorkingColumns.plain(node.data.n_terms)


def kept(node: Node, name: str, key: tuple[Anything, ...], make: Callable[[], T]) -> T:
    """What was made of the arrays ``key``, made again if the cache has it not, or has what was made of others."""
    found = node.cache.get(name)
    if found is None or not all(a is b or np.array_equal(a, b) for a, b in zip(found[0], key, strict=True)):
        found = node.cache[name] = (key, make())
    value: T = found[1]
    return value


def rows_at(node: Node, order: Ints | None = None) -> GroupedData:
    """The node's rows, columns shifted and put in order."""
    data, shift = node.data, frame_at(node).shift
    order = np.arange(data.n_terms) if order is None else order
    turned = bool((order != np.arange(data.n_terms)).any())
    if not (turned or shift.any()):
        return data

    def make() -> GroupedData:
        X = data.X - shift if shift.any() else data.X
        terms = tuple(data.terms[at] for at in order)
        return replace(data, X=np.ascontiguousarray(X[:, order]) if turned else X, terms=terms)

    return kept(node, "rows", (shift, order), make)


def units_at(node: Node, order: Ints | None = None) -> Quadratic:
    """Each client's loss about the origin, terms put in order; of a linear model, where that is all there is to know."""
    frame = frame_at(node)

    def make() -> Quadratic:
        data = rows_at(node)
        here = node.loss.expand(data, np.tile(frame.origin, (data.n_clients, 1)))
        return Quadratic(here.hessian, -here.gradient, here.value, data.rows_that_count)

    units = kept(node, "units", (frame.shift, frame.origin), make)
    if order is None or not (order != np.arange(len(order))).any():
        return units

    def turn() -> Quadratic:
        C, r = units.C[:, order[:, None], order], units.r[:, order]
        return replace(units, C=np.ascontiguousarray(C), r=np.ascontiguousarray(r))

    return kept(node, "units in order", (frame.shift, frame.origin, order), turn)


def without_rows(node: Node, sums: ClientSums) -> None:
    """Give a node its clients' sums instead of rows."""
    d = len(sums.origin)
    frame = WorkingColumns(np.zeros(d), -1, sums.origin)
    node.keep(frame)
    node.cache["units"] = (frame.shift, frame.origin), sums.units


def spread_at(node: Node, S: Floats, layout: TermOrder) -> Spread:
    """How the node's clients spread about their clusters, given ``S``, one for all ``(1, d, d)`` or for each cluster's."""
    tree = node.data.hierarchy
    return Spread.of_covariances(S if len(S) == 1 else S[tree.parent], tree.n_clients, layout.width)


@dataclass(frozen=True)
class NonFiniteClients(Reply):
    """how many clients have coefficients that are not finite."""

    strange: int


def finish_at(node: Node, theta: Floats, units: Quadratic, origin: Floats) -> NonFiniteClients:
    """Keep what was found at the node, where it belongs: coefficients and sums of its clients, told of its own columns."""
    frame, weights = frame_at(node), node.data.weights
    node.theta = frame.told(theta)
    log_weights = 0.0 if weights is None else float(np.log(weights[weights > 0]).sum())
    node.keep(ClientSums(frame.sums_told(units), frame.told(origin), log_weights))
    return NonFiniteClients(int((~np.isfinite(node.theta).all(axis=1)).sum()))


def node_learned(node: Node, components: Components, covariance: Floats, whole: Whole | None = None) -> Learned:
    """What was learned, for the clients of one node: with their sums, which it has kept, so that it can tell intervals.

    ``components``, ``covariance`` and ``whole`` are those of the coordinator's :class:`.Learned`; without ``whole`` the node
    is taken to hold everybody.
    """
    sums = node.state(ClientSums)
    tree, terms = node.data.hierarchy, node.data.terms
    learned = Learned.of(components, terms, tree, covariance, sums.units, sums.origin, sums.log_weights)
    return replace(learned, whole=whole)


@dataclass(frozen=True)
class ForgetCovariances(Message[None], label="forget covariances", phase="learn", reply=False):
    """forget what was found while covariances were learned, so that a solver begins as if nothing had been."""

    def at(self, node: Node) -> None:
        node.theta = None
        node.drop(*(kind for kind in node.states if issubclass(kind, LearningState)))
        node.cache.clear()
