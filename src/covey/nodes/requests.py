"""Requests of the owner of all nodes: coefficients, penalties and states of each node's clients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from covey._typing import Anything, Floats, Ints
from covey.nodes.network import Network, Node, Request, Snapshot
from covey.records import Record, digest
from covey.tables.rows import GroupedData


@dataclass(frozen=True)
class TakeCoefficients(Request[Floats]):
    """Return the coefficients of the clients, ``(n, d)``."""

    def at(self, node: Node) -> Floats:
        return node.coefficients()


@dataclass(frozen=True)
class PutCoefficients(Request[None]):
    """Replace the coefficients of the clients by ``theta (n, d)``."""

    theta: Floats

    def at(self, node: Node) -> None:
        node.theta = self.theta


@dataclass(frozen=True)
class PutGamma(Request[None]):
    """Replace the penalties of the clients by ``gamma (n,)``."""

    gamma: Floats

    def at(self, node: Node) -> None:
        node.gamma = self.gamma


@dataclass(frozen=True)
class TakeState(Request[Record | None]):
    """Return the state of a class, given by its name; None if there is none."""

    kind: str

    def at(self, node: Node) -> Record | None:
        return node.find(Record.registered[self.kind])


@dataclass(frozen=True)
class TakeSnapshot(Request[Snapshot]):
    """Return the state of the node without its rows."""

    def at(self, node: Node) -> Snapshot:
        return node.snapshot()


@dataclass(frozen=True)
class PutSnapshot(Request[None]):
    """Continue from a snapshot."""

    snapshot: Snapshot

    def at(self, node: Node) -> None:
        node.restore(self.snapshot)


@dataclass(frozen=True)
class DigestRows(Request[str]):
    """Return a checksum of the rows."""

    def at(self, node: Node) -> str:
        return digest(*_rows_of(node.data))


def _rows_of(data: GroupedData) -> tuple[Anything | None, ...]:
    return data.X, data.y, data.weights, data.offset, data.client_ptr, data.hierarchy.cluster_ptr


def coefficients_of(network: Network) -> Floats:
    """The coefficients of all clients, ``(n, d)``; ``(0, d)`` if the nodes have other owners."""
    if not network.places:
        return np.empty((0, len(network.terms)))
    return joined(network.every(TakeCoefficients()), network.places)


def joined(parts: Sequence[Anything], places: Sequence[Ints]) -> Anything:
    """Arrays of all nodes as one, in the order of the tree."""
    if len(parts) == 1:
        return parts[0]
    whole = np.empty((sum(map(len, places)), *parts[0].shape[1:]), dtype=parts[0].dtype)
    for part, at in zip(parts, places, strict=True):
        whole[at] = part
    return whole
