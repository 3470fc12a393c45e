"""Messages: what a coordinator asks of nodes. Each says by itself how reports and plans are to count it.

A message is a frozen dataclass that travels down, ``message.at(node)`` is what a node does with it, and the reply, another
record, adds over nodes (:class:`~covey.records.Reply`). Subclasses register themselves, so that a new algorithm with its
messages is one new file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, TypeVar

from covey._typing import Anything, Floats
from covey.nodes.node import Node
from covey.records import Record
from covey.tables.scaling import Scale

R = TypeVar("R")

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
