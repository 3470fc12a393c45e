"""Networks: all nodes at once, wherever they are, as a solver sees them.

A solver is a coordinator that sends messages and adds up the replies. In memory there is one node that holds all clients;
across sites (:mod:`covey.federation`) messages and replies travel as bytes. The solvers do not know the difference.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np

from covey._typing import Floats
from covey.losses import Loss
from covey.nodes.messages import Message, Phase
from covey.nodes.node import Node
from covey.tables.rows import GroupedData
from covey.tree.hierarchy import Hierarchy

R = TypeVar("R")


class Arrived(NamedTuple):
    """A message that was sent, and the sum of the replies to it."""

    message: Message[Any]
    reply: Any


class Network(ABC):
    """All nodes at once."""

    @property
    @abstractmethod
    def tree(self) -> Hierarchy:
        """The clusters, and how many clients each has; across sites the ids of the clients are not known."""

    @property
    @abstractmethod
    def terms(self) -> tuple[str, ...]:
        """Names of the coefficients."""

    @property
    @abstractmethod
    def loss(self) -> Loss:
        """The family."""

    @abstractmethod
    def send(self, message: Message[Any]) -> None:
        """Send a message to the nodes that have clients of its cells."""

    @abstractmethod
    def collect(self) -> list[Arrived]:
        """What has arrived since the last call, in the order in which it was asked for."""

    def ask(self, message: Message[R]) -> R:
        """Send one message to all nodes concerned; the sum of their replies."""
        self.send(message)
        reply: R = self.collect()[-1].reply
        return reply

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Count what is asked meanwhile to another phase than the messages declare, where exchanges are counted."""
        yield

    def clients(self) -> Node | None:
        """The node that holds all clients, if it is in this process; None where their models stay elsewhere."""
        return None


@dataclass
class InMemory(Network):
    """A network of one node that holds all clients."""

    node: Node
    _arrived: list[Arrived] = field(default_factory=list)

    @classmethod
    def of(cls, data: GroupedData, loss: Loss, gamma: Floats | None = None, theta: Floats | None = None) -> InMemory:
        return cls(Node(data, loss, np.ones(data.n_clients) if gamma is None else gamma, theta))

    @property
    def tree(self) -> Hierarchy:
        return self.node.data.hierarchy

    @property
    def terms(self) -> tuple[str, ...]:
        return self.node.data.terms

    @property
    def loss(self) -> Loss:
        return self.node.loss

    def send(self, message: Message[Any]) -> None:
        self._arrived.append(Arrived(message, message.at(self.node)))

    def collect(self) -> list[Arrived]:
        arrived, self._arrived = self._arrived, []
        return arrived

    def ask(self, message: Message[R]) -> R:
        return message.at(self.node)

    def clients(self) -> Node:
        return self.node
