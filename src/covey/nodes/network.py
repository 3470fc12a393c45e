"""Nodes, messages and networks: how a solver reaches the rows of the clients, wherever they are.

A solver is a coordinator. It sends messages to a network of nodes and adds up their replies. A message is a frozen dataclass;
``message.at(node)`` is what a node does with it, and returns the reply (:class:`~covey.records.Reply`). Subclasses of
:class:`Message` register themselves, so a new algorithm with its messages is one new file.

In memory, one node holds all clients (:class:`InMemory`). Across sites (:mod:`covey.federation`), messages and replies are sent
as bytes. Solvers do not see the difference. Rows are summed in fixed blocks (:class:`Blocks`), so results have the same bits
with any number of threads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Generic, Literal, NamedTuple, TypeVar

import numpy as np

from covey._typing import Anything, Bools, Floats, Ints
from covey.errors import SolverError
from covey.losses import Loss
from covey.records import Axes, Record
from covey.tables.rows import GroupedData
from covey.tables.scaling import Scale
from covey.threads import BLOCK
from covey.tree.hierarchy import Hierarchy

R = TypeVar("R")
S = TypeVar("S", bound=Record)


@dataclass(frozen=True)
class Snapshot(Record):
    """The state of a node without its rows, for checkpoints, journals and the disk of a site."""

    gamma: Floats
    theta: Floats | None
    states: tuple[Record, ...]


@dataclass
class Node:
    """The rows of some clients, with their coefficients and the state of algorithms between messages.

    Attributes
    ----------
    data : rows of its clients, with all clusters of the network; a cluster without clients on this node is empty
    loss : loss of the clients
    gamma : (n,) penalty between each client and its cluster
    theta : (n, d) coefficients of the clients; None before the first solver
    states : records that algorithms keep between messages, one of each class
    cache : results that can be computed again
    draw : source of standard normal numbers for noise; None uses the randomness of the system. Only simulations set it.
    """

    data: GroupedData
    loss: Loss
    gamma: Floats
    theta: Floats | None = None
    states: dict[type[Record], Record] = field(default_factory=dict)
    cache: dict[Any, Any] = field(default_factory=dict)
    draw: Callable[[int], Floats] | None = None

    def coefficients(self) -> Floats:
        """Return the coefficients of the clients, ``(n, d)``; zero before the first solver."""
        if self.theta is None:
            return np.zeros((self.data.n_clients, self.data.n_terms))
        return self.theta

    def keep(self, state: Record) -> None:
        """Store a state; it replaces the last one of its class."""
        self.states[type(state)] = state

    def state(self, kind: type[S]) -> S:
        """Return the state of a class that an earlier message stored."""
        found = self.find(kind)
        if found is None:
            early = "a message arrived before the first message of its algorithm; start a new run"
            raise SolverError(f"This node has no {kind.__name__}: {early}.")
        return found

    def find(self, kind: type[S]) -> S | None:
        """Return the state of a class, or None."""
        return self.states.get(kind)  # type: ignore[return-value]

    def drop(self, *kinds: type[Record]) -> None:
        """Delete states of these classes."""
        for kind in kinds:
            self.states.pop(kind, None)

    def snapshot(self) -> Snapshot:
        """Return the state of the node, without its rows and its cache."""
        return Snapshot(self.gamma, self.theta, tuple(self.states.values()))

    def restore(self, snapshot: Snapshot) -> None:
        """Continue from a snapshot."""
        self.gamma, self.theta = snapshot.gamma, snapshot.theta
        self.states = {type(state): state for state in snapshot.states}
        self.cache.clear()


Sizes = Mapping[str, Any]
"""Lengths of the axes of a reply by name: a number, another name, or a tuple of these for several axes."""
Phase = Literal["set-up", "learn", "measure", "fit", "finish"]
"""Purpose of a message: agree on the problem, learn penalties, measure constants of the problem, solve, send models."""


class Message(Record, Generic[R]):
    """A message from the coordinator to nodes.

    ``class Step(Message[Sums], label="step", phase="fit")`` declares its name in reports and its purpose. A message with
    ``reply=False`` has no reply, and is sent together with the next message that has one.
    """

    label: ClassVar[str] = ""
    phase: ClassVar[Phase] = "fit"
    reply: ClassVar[bool] = True

    def __init_subclass__(cls, label: str = "", phase: Phase = "fit", reply: bool = True, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        cls.label, cls.phase, cls.reply = label or cls.__name__, phase, reply

    @property
    def cells(self) -> Anything | None:
        """The clusters that the message concerns, boolean ``(k,)``; None for all.

        Sites without these clusters get it only with masks, or if a message without a reply travels with it.
        """
        return None

    @property
    def sizes(self) -> Sizes:
        """Lengths of the axes of the reply (:class:`~covey.records.Axes`) other than those of clusters and of terms."""
        return {}

    @property
    def parts(self) -> tuple[Message[Any], ...]:
        """The messages that this one contains: itself, or those of a batch."""
        return (self,)

    def at(self, node: Node) -> R:
        """Carry out the message on a node and return the reply."""
        raise NotImplementedError


class Request(Record, Generic[R]):
    """What the owner of all nodes asks of each node by itself, such as the coefficients of its clients.

    Replies are not added. A site, whose owner is somebody else, answers no requests.
    """

    def at(self, node: Node) -> R:
        """Carry out the request on a node and return the reply."""
        raise NotImplementedError


@dataclass(frozen=True)
class Batch(Message[Any], label="batch"):
    """Several messages sent as one. The reply is the reply to the last message."""

    messages: tuple[Message[Any], ...]

    def __post_init__(self) -> None:
        if not isinstance(self.messages, tuple):
            raise TypeError("a batch holds a tuple of messages")

    @property
    def parts(self) -> tuple[Message[Any], ...]:
        return self.messages

    def at(self, node: Node) -> Any:
        reply = None
        for message in self.messages:
            reply = message.at(node)
        return reply


@dataclass(frozen=True)
class Standardise(Message[None], label="standardise", phase="set-up", reply=False):
    """Subtract the mean of each term from all rows and divide by its standard deviation."""

    scale: Scale

    def at(self, node: Node) -> None:
        node.keep(self.scale)
        node.data = self.scale.rows(node.data)
        node.cache.clear()


@dataclass(frozen=True)
class SetGamma(Message[None], label="penalties", phase="set-up", reply=False):
    """Set the penalty ``gamma (k,)`` of the clients of each cluster."""

    gamma: Annotated[Floats, Axes("k", "square")]

    def at(self, node: Node) -> None:
        node.keep(self)  # a site accepts no other penalties in the same run
        node.gamma = self.gamma[node.data.hierarchy.parent]


class Arrived(NamedTuple):
    """A message and the sum of the replies to it."""

    message: Message[Any]
    reply: Any


class Network(ABC):
    """All nodes, as a solver sees them."""

    @property
    @abstractmethod
    def tree(self) -> Hierarchy:
        """The clusters and their numbers of clients. Across sites, the ids of clients are numbers, not their real ids."""

    @property
    @abstractmethod
    def terms(self) -> tuple[str, ...]:
        """Names of the coefficients."""

    @property
    @abstractmethod
    def loss(self) -> Loss:
        """Loss of the clients."""

    @abstractmethod
    def send(self, message: Message[Any]) -> None:
        """Send a message to the nodes that have clients in the clusters that it concerns, without waiting for their replies."""

    @abstractmethod
    def collect(self) -> list[Arrived]:
        """Wait until at least one message is answered; return all that are, or an empty list if none is under way."""

    def ask(self, message: Message[R]) -> R:
        """Send one message, wait for all replies and return their sum. No other message may be under way."""
        self.send(message)
        reply: R = self.collect()[-1].reply
        return reply

    def lanes(self) -> Bools | None:
        """Sets of clusters such that no node has clients in two of them, as rows of booleans ``(lanes, k)``; None if there is
        only one set.

        A message to one lane does not wait for the replies of the others.
        """
        return None

    @property
    def vectors_only(self) -> bool:
        """Whether a node refuses replies of more than one number for each cluster and term."""
        return False

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Count the messages in the context under this phase, instead of the phase that they declare."""
        yield

    def clients(self) -> Node | None:
        """Return the node that holds all clients, or None if there are several nodes, or they are not in this process."""
        return None

    @property
    def places(self) -> Sequence[Ints]:
        """For each node that answers requests, the positions of its clients; empty if others own the nodes."""
        return []

    def each(self, requests: Sequence[Request[R]]) -> list[R]:
        """Send each node its request, and return the replies in the order of the nodes."""
        raise SolverError("The nodes of this network answer no requests about their clients.")

    def every(self, request: Request[R]) -> list[R]:
        """Send all nodes the same request."""
        return self.each([request] * len(self.places))


@dataclass
class InMemory(Network):
    """A network of one node that holds all clients in memory. Build it with :meth:`of`.

    Examples
    --------
    >>> from covey import GroupedData, Penalty
    >>> from covey.losses import Gaussian
    >>> from covey.solvers import solve
    >>> data = GroupedData.from_arrays([[1.0]] * 4, [0.0, 1.0, 2.0, 3.0], ["a", "a", "b", "b"])
    >>> penalty = Penalty.of(data.hierarchy, gamma=2.0)
    >>> solve(InMemory.of(data, Gaussian(), penalty.gamma), penalty).theta.round(3).tolist()
    [[1.0], [2.0]]
    """

    node: Node
    _arrived: list[Arrived] = field(default_factory=list)

    @classmethod
    def of(cls, data: GroupedData, loss: Loss, gamma: Floats | None = None, theta: Floats | None = None) -> InMemory:
        """Build a network from grouped rows.

        Parameters
        ----------
        data : GroupedData
            Rows of all clients.
        loss : Loss
            Loss of the clients.
        gamma : (n,) array, optional
            Penalty between each client and its cluster. The default is 1.
        theta : (n, d) array, optional
            Coefficients to start from. The default is zero.

        Returns
        -------
        InMemory
        """
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

    @property
    def places(self) -> Sequence[Ints]:
        return [np.arange(self.node.data.n_clients)]

    def each(self, requests: Sequence[Request[R]]) -> list[R]:
        return [request.at(self.node) for request in requests]


@dataclass(frozen=True)
class Blocks:
    """Children in blocks, each of one parent. A thread takes one block at a time; blocks are summed in order.

    Block ``b`` contains the children ``ptr[b]:ptr[b + 1]`` of parent ``owner[b]``. Parent ``j`` has the blocks
    ``of_parent[j]:of_parent[j + 1]``. ``one_each`` is True if every parent has exactly one block.
    """

    ptr: Ints
    owner: Ints
    of_parent: Ints
    one_each: bool

    @classmethod
    def of(cls, ptr: Ints) -> Blocks:
        """Divide the children ``ptr[j]:ptr[j + 1]`` of each parent into blocks of at most ``BLOCK``."""
        counts, parents = -(-np.diff(ptr) // BLOCK), np.arange(len(ptr))
        if (counts == 1).all():
            return cls(ptr, parents[:-1], parents, True)
        owner = np.repeat(np.arange(len(counts)), counts)
        first = np.repeat(np.cumsum(counts) - counts, counts)
        starts = ptr[:-1][owner] + BLOCK * (np.arange(len(owner)) - first)
        return cls(np.append(starts, ptr[-1]), owner, np.searchsorted(owner, parents), np.array_equal(owner, parents[:-1]))

    @property
    def count(self) -> int:
        return len(self.owner)
