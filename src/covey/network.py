"""One node or many: what a solver asks of them, and what they answer, summed.

A solver is a coordinator that asks. A request is a small frozen dataclass that travels down, ``request.at(node)`` is what a
node does with it, and the reply, another one, adds over nodes. In memory there is one node that holds everybody; across
sites (:mod:`covey.federation`) requests and replies travel as bytes. The solvers do not know the difference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np

from covey._typing import Floats
from covey.data import GroupedData
from covey.hierarchy import Hierarchy
from covey.losses import Loss

Reply = TypeVar("Reply", covariant=True)


@dataclass
class Node:
    """A node: the rows of its clients, under the clusters of the whole network, and where solvers have got to there.

    Attributes
    ----------
    data : its clients' rows; clusters of which it has no clients are there, empty
    loss : the family
    gamma : (n,) what ties its clients to their clusters
    theta : (n, d) where its clients are; None before the first solver
    memory : what solvers keep between requests, by name: dataclasses of arrays, so that a node can be put aside on disk
    cache : what they may compute again
    draw : standard normal numbers, for noise; None draws them from the system's randomness, and only simulations do otherwise
    """

    data: GroupedData
    loss: Loss
    gamma: Floats
    theta: Floats | None = None
    memory: dict[str, Any] = field(default_factory=dict)
    cache: dict[str, Any] = field(default_factory=dict)
    draw: Callable[[int], Floats] | None = None

    def where(self) -> Floats:
        """Where its clients are: at zero, if no solver has moved them yet."""
        if self.theta is None:
            return np.zeros((self.data.n_clients, self.data.n_terms))
        return self.theta


class Request(Protocol[Reply]):
    """What travels down.

    One that has no answer may say so, ``quiet``, and travels with the next; one that not all clusters have work for may say
    for which it is, ``concerns (k,)``, and goes to nodes that have clients of these.
    """

    def at(self, node: Node) -> Reply:
        """What a node does with it, and what it answers; answers add over nodes."""
        ...


R = TypeVar("R")


class Network(Protocol):
    """All nodes at once, wherever they are.

    Attributes
    ----------
    tree : the clusters, and how many clients each has; across sites the ids of the clients are not known
    terms : names of the coefficients
    loss : the family
    """

    @property
    def tree(self) -> Hierarchy: ...
    @property
    def terms(self) -> tuple[str, ...]: ...
    @property
    def loss(self) -> Loss: ...

    def ask(self, request: Request[R]) -> R:
        """Send one request to every node; the sum of their replies."""
        ...


@dataclass
class InMemory:
    """A network of one node that holds everybody."""

    node: Node

    @classmethod
    def of(cls, data: GroupedData, loss: Loss, gamma: Floats, theta: Floats | None = None) -> InMemory:
        return cls(Node(data, loss, gamma, theta))

    @property
    def tree(self) -> Hierarchy:
        return self.node.data.hierarchy

    @property
    def terms(self) -> tuple[str, ...]:
        return self.node.data.terms

    @property
    def loss(self) -> Loss:
        return self.node.loss

    def ask(self, request: Request[R]) -> R:
        return request.at(self.node)


@dataclass(frozen=True)
class Batch:
    """Down: several requests in one exchange; the answer is that to the last."""

    requests: tuple[Any, ...]

    def at(self, node: Node) -> Any:
        answer = None
        for request in self.requests:
            answer = request.at(node)
        return answer


@dataclass(frozen=True)
class Tie:
    """Down: what ties clients to their clusters, ``gamma (k,)``, one for all clients of each."""

    gamma: Floats
    quiet: ClassVar[bool] = True  # has no answer, so it can travel with the next request

    def at(self, node: Node) -> None:
        node.gamma = self.gamma[node.data.hierarchy.parent]


@dataclass(frozen=True)
class Count:
    """Up: how many of something a node has. Adds over nodes."""

    number: int

    def __add__(self, other: Count) -> Count:
        return Count(self.number + other.number)
