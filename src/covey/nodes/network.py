"""A node: the rows of its clients, where their coefficients are, and what algorithms keep there between messages.

Messages: what a coordinator asks of nodes. Each says by itself how reports and plans are to count it.

A message is a frozen dataclass that travels down, ``message.at(node)`` is what a node does with it, and the reply, another
record, adds over nodes (:class:`~covey.records.Reply`). Subclasses register themselves, so that a new algorithm with its
messages is one new file.

Networks: all nodes at once, wherever they are, as a solver sees them.

A solver is a coordinator that sends messages and adds up the replies. In memory there is one node that holds all clients;
across sites (:mod:`covey.federation`) messages and replies travel as bytes. The solvers do not know the difference.

How many threads a problem is worth. No result depends on it.

Children in blocks of one parent each: what a thread takes at a time.

Blocks are summed in order, so that results have the same bits with any number of threads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Literal, NamedTuple, TypeVar

import numba
import numpy as np

from covey._typing import Anything, Floats, Ints
from covey.errors import SolverError
from covey.losses import Loss
from covey.records import Record
from covey.tables.rows import GroupedData
from covey.tables.scaling import Scale
from covey.tree.hierarchy import Hierarchy

R = TypeVar("R")
S = TypeVar("S", bound=Record)


@dataclass(frozen=True)
class Snapshot(Record):
    """All that a node needs, beside its rows, to go on: for checkpoints, journals and a site's own disk."""

    gamma: Floats
    theta: Floats | None
    states: tuple[Record, ...]


@dataclass
class Node:
    """The rows of some clients, under the clusters of the whole network.

    Attributes
    ----------
    data : its clients' rows; clusters of which it has no clients are there, empty
    loss : the family
    gamma : (n,) what ties its clients to their clusters
    theta : (n, d) the clients' coefficients; None before the first solver
    states : what algorithms keep between messages, one record of each class
    cache : what they may compute again
    draw : standard normal numbers, for noise; None draws them from the system's randomness, and only simulations do otherwise
    """

    data: GroupedData
    loss: Loss
    gamma: Floats
    theta: Floats | None = None
    states: dict[type[Record], Record] = field(default_factory=dict)
    cache: dict[Any, Any] = field(default_factory=dict)
    draw: Callable[[int], Floats] | None = None

    def coefficients(self) -> Floats:
        """The clients' coefficients; zero, if no solver has moved them yet."""
        if self.theta is None:
            return np.zeros((self.data.n_clients, self.data.n_terms))
        return self.theta

    def keep(self, state: Record) -> None:
        """Keep a state in place of the last one of its class."""
        self.states[type(state)] = state

    def state(self, kind: type[S]) -> S:
        """The state of a class, which an earlier message left."""
        found = self.find(kind)
        if found is None:
            raise SolverError(f"This node has no {kind.__name__}: a message came before the one that begins its algorithm.")
        return found

    def find(self, kind: type[S]) -> S | None:
        """The same, or None."""
        return self.states.get(kind)  # type: ignore[return-value]

    def drop(self, *kinds: type[Record]) -> None:
        """Forget states of these classes."""
        for kind in kinds:
            self.states.pop(kind, None)

    def snapshot(self) -> Snapshot:
        """The node as it is, but for its rows and what can be computed again."""
        return Snapshot(self.gamma, self.theta, tuple(self.states.values()))

    def restore(self, snapshot: Snapshot) -> None:
        """Go on from a snapshot."""
        self.gamma, self.theta = snapshot.gamma, snapshot.theta
        self.states = {type(state): state for state in snapshot.states}
        self.cache.clear()


Phase = Literal["set-up", "learn", "measure", "fit", "finish"]
"""What an exchange is for: to agree, to learn penalties, to measure constants of the problem, to solve, to hand out models."""


class Message(Record, Generic[R]):
    """What travels down, and what a node does with it.

    ``class Step(Message[Sums], label="step", phase="fit")`` declares how reports call it and what it is for. With
    ``reply=False`` it has no reply, and travels with the next message that has one; ``second=True`` marks the second half of
    an exchange that plans count once.
    """

    label: ClassVar[str] = ""
    phase: ClassVar[Phase] = "fit"
    reply: ClassVar[bool] = True
    second: ClassVar[bool] = False

    def __init_subclass__(
        cls, label: str = "", phase: Phase = "fit", reply: bool = True, second: bool = False, **settings: Any
    ) -> None:
        super().__init_subclass__(**settings)
        cls.label, cls.phase, cls.reply, cls.second = label or cls.__name__, phase, reply, second

    @property
    def cells(self) -> Anything | None:
        """Which clusters it concerns, ``(k,)``; None for all. Nodes without clients of these need not be asked."""
        return None

    def at(self, node: Node) -> R:
        """What a node does with it, and what it replies."""
        raise NotImplementedError


@dataclass(frozen=True)
class Batch(Message[Any], label="batch"):
    """Several messages in one exchange; the reply is that to the last."""

    messages: tuple[Message[Any], ...]

    def at(self, node: Node) -> Any:
        reply = None
        for message in self.messages:
            reply = message.at(node)
        return reply


@dataclass(frozen=True)
class Standardise(Message[None], label="standardise", phase="set-up", reply=False):
    """Put the terms of all rows about their means, in units of their standard deviations."""

    scale: Scale

    def at(self, node: Node) -> None:
        node.keep(self.scale)
        node.data = self.scale.rows(node.data)
        node.cache.clear()


@dataclass(frozen=True)
class SetGamma(Message[None], label="penalties", phase="set-up", reply=False):
    """What ties clients to their clusters, ``gamma (k,)``, one for all clients of each."""

    gamma: Floats

    def at(self, node: Node) -> None:
        node.gamma = self.gamma[node.data.hierarchy.parent]


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


_WORTH_SHARING = 1 << 18  # numbers to read


@contextmanager
def threads_for(work: GroupedData | int) -> Iterator[None]:
    """One thread for a small problem: where a call takes microseconds, threads mostly wait for each other.

    On a machine that is busy with other work that wait is a time slice of the system, and a run of thousands of such calls
    takes sixty times as long with two threads as with one.
    """
    numbers = work if isinstance(work, int) else work.n_rows * work.n_terms
    before = numba.get_num_threads()
    numba.set_num_threads(1 if numbers < _WORTH_SHARING else before)
    try:
        yield
    finally:
        numba.set_num_threads(before)


BLOCK = 256


@dataclass(frozen=True)
class Blocks:
    """Block ``b`` has the children ``ptr[b]:ptr[b + 1]`` of ``owner[b]``; parent ``j`` has ``of_parent[j]:of_parent[j + 1]``.

    ``one_each`` says that every parent has one block.
    """

    ptr: Ints
    owner: Ints
    of_parent: Ints
    one_each: bool

    @classmethod
    def of(cls, ptr: Ints) -> Blocks:
        """The children ``ptr[j]:ptr[j + 1]`` of each parent, at most ``BLOCK`` to a block."""
        counts = -(-np.diff(ptr) // BLOCK)
        owner = np.repeat(np.arange(len(counts)), counts)
        first = np.repeat(np.cumsum(counts) - counts, counts)
        starts = ptr[:-1][owner] + BLOCK * (np.arange(len(owner)) - first)
        parents = np.arange(len(ptr))
        return cls(np.append(starts, ptr[-1]), owner, np.searchsorted(owner, parents), np.array_equal(owner, parents[:-1]))

    @property
    def count(self) -> int:
        return len(self.owner)
