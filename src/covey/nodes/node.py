"""A node: the rows of its clients, where their coefficients are, and what algorithms keep there between messages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from covey._typing import Floats
from covey.errors import SolverError
from covey.losses import Loss
from covey.records import Record
from covey.tables.rows import GroupedData

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
