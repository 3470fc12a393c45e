"""The smoothness of the clients' losses: the largest curvature of any client and of any row, by counting.

Nodes count their clients by the decimal exponent of the curvature, then those with the highest exponent by four digits. The
result is rounded up to these digits. The largest curvatures in each cluster are shares of it, rounded up to a power of the
fourth root of 1/2. Only counts are sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np

from covey._typing import Floats, Ints
from covey.nodes.network import Message, Network, Node, Sizes
from covey.records import Axes, Reply

_POWERS = np.array([float(f"1e{exponent}") for exponent in range(-307, 309)])
_SHARES = 2.0 ** (-np.arange(64) / 4)  # of the largest curvature
_MOST_CLUSTERS = 4096  # whose own curvatures are measured

Quantity = Literal["client", "row"]


@dataclass(frozen=True)
class Counts(Reply):
    """Numbers of clients or rows, in bins."""

    number: Annotated[Ints, Axes("bins", "count")]


@dataclass(frozen=True)
class CountExponents(Message[Counts], label="exponents", phase="measure"):
    """Count clients by the decimal exponent of each quantity in ``names``; ``(names, exponents + 2)``.

    The first bin is for zero, the last for numbers that are not finite.
    """

    names: tuple[str, ...]

    @property
    def sizes(self) -> Sizes:
        return {"bins": (len(self.names), len(_POWERS) + 2)}

    def at(self, node: Node) -> Counts:
        node.cache["sizes"] = sizes = tuple(_size(node, name) for name in self.names)
        return Counts(np.array([np.bincount(exponent_bin(size), minlength=len(_POWERS) + 2) for size in sizes]))


@dataclass(frozen=True)
class CountMantissas(Message[Counts], label="mantissas", phase="measure"):
    """Count the clients in these bins of the exponent by four digits, rounded up; ``(names, 10001)``."""

    names: tuple[str, ...]
    bins: tuple[int, ...]

    @property
    def sizes(self) -> Sizes:
        return {"bins": (len(self.names), 10_001)}

    def at(self, node: Node) -> Counts:
        sizes = node.cache.pop("sizes", None) or tuple(_size(node, name) for name in self.names)
        counts = np.zeros((len(sizes), 10_001), dtype=np.int64)
        for row, (size, at) in enumerate(zip(sizes, self.bins, strict=True)):
            if 0 < at <= len(_POWERS):
                digits = np.ceil(size[exponent_bin(size) == at] / _thousandth(at)).astype(np.int64)
                counts[row] += np.bincount(digits, minlength=10_001)
        return Counts(counts)


def largest(network: Network, names: tuple[str, ...]) -> list[float]:
    """The largest value of each quantity over all clients, rounded up to four digits; 0 if there are no clients."""
    if not names:
        return []
    bins = tuple(_last(row) for row in network.ask(CountExponents(names)).number)
    digits = [_last(row) for row in network.ask(CountMantissas(names, bins)).number]
    most = len(_POWERS)
    return [np.inf if at > most else digit * _thousandth(at) if at else 0.0 for at, digit in zip(bins, digits, strict=True)]


@dataclass(frozen=True)
class CountShares(Message[Counts], label="shares of the curvature", phase="measure"):
    """Count the clients of each cluster by the share that their curvature has of the largest, ``(names, k, 64)``."""

    names: tuple[str, ...]
    largest: tuple[float, ...]

    @property
    def sizes(self) -> Sizes:
        return {"bins": (len(self.names), "k", len(_SHARES))}

    def at(self, node: Node) -> Counts:
        tree = node.data.hierarchy
        counts = np.zeros((len(self.names), tree.n_clusters, len(_SHARES)), dtype=np.int64)
        for row, (name, top) in enumerate(zip(self.names, self.largest, strict=True)):
            # The last bin whose share is at least that of the client.
            at = len(_SHARES) - np.searchsorted(top * _SHARES[::-1], _size(node, name)) - 1
            np.add.at(counts[row], (tree.parent, np.clip(at, 0, len(_SHARES) - 1)), 1)
        return Counts(counts)


def largest_by_cluster(network: Network, largest: dict[Quantity, float]) -> dict[Quantity, Floats]:
    """The largest value of each quantity in each cluster, rounded up; empty for one cluster and for very many."""
    if not largest or not 1 < network.tree.n_clusters <= _MOST_CLUSTERS or not all(map(np.isfinite, largest.values())):
        return {}
    counts = network.ask(CountShares(tuple(largest), tuple(largest.values()))).number
    first = np.where(counts.any(axis=2), (counts > 0).argmax(axis=2), len(_SHARES) - 1)
    return {name: top * _SHARES[at] for (name, top), at in zip(largest.items(), first, strict=True)}


def rounded_down(value: float) -> float:
    """A number rounded down to four digits: further digits may depend on the linear algebra library of a machine."""
    if not (value > 0 and np.isfinite(value)):
        return value
    unit = _thousandth(int(np.searchsorted(_POWERS, value, side="right")))
    return float(np.floor(value / unit) * unit)


def _last(counts: Ints) -> int:
    filled = np.flatnonzero(counts)
    return int(filled[-1]) if len(filled) else 0


def exponent_bin(size: Floats) -> Ints:
    """0 for zero, ``i + 1`` from ``_POWERS[i]`` on, the last bin for infinities and NaN."""
    at: Ints = np.searchsorted(_POWERS, size, side="right")
    return np.where(np.isfinite(size), np.where(size > 0, np.maximum(at, 1), 0), len(_POWERS) + 1)


def _thousandth(at: int) -> float:
    """The unit of the fourth digit of numbers in bin ``at`` of the exponent."""
    return float(_POWERS[max(at - 4, 0)])


def _size(node: Node, name: str) -> Floats:
    """For each client: an upper bound of its curvature, that of its rows, or the length of its longest row; ``(n,)``."""
    data, loss = node.data, node.loss
    zero, here = np.zeros((data.n_clients, data.n_terms)), node.coefficients()
    if name == "length":
        return np.sqrt(_largest_row(node, np.einsum("la,la->l", data.X, data.X), 0.0))
    if name == "row":
        bend = None if loss.bounded else np.maximum(*(loss.curvatures(data.margin(at), data.y) for at in (here, zero)))
        return _largest_row(node, loss.row_smoothness(data, bend), loss.ridge)
    if loss.bounded and not loss.quadratic:
        return loss.smoothness(data)
    tops = [np.linalg.eigvalsh(loss.hessian(data, at))[:, -1] for at in ([zero] if loss.bounded else [zero, here])]
    return np.asarray(np.max(tops, axis=0))


def _largest_row(node: Node, rows: Floats, least: float) -> Floats:
    """The largest number of each client's rows; ``least`` if it has none, infinite if only sums of its rows are here."""
    if node.data.sums is not None:  # nothing is known about single rows
        return np.full(node.data.n_clients, np.inf)
    ptr, most = node.data.client_ptr, np.full(node.data.n_clients, least)
    filled = np.flatnonzero(np.diff(ptr))
    if len(filled):
        most[filled] = np.maximum.reduceat(rows, ptr[filled])
    return np.asarray(np.maximum(most, least))


@dataclass(frozen=True)
class CountRows(Message[Counts], label="rows", phase="measure"):
    """Count the rows of each cluster, ``(k, 2)``: all of them, and those with a weight above zero."""

    @property
    def sizes(self) -> Sizes:
        return {"bins": ("k", 2)}

    def at(self, node: Node) -> Counts:
        tree, per_client = node.data.hierarchy, np.column_stack([node.data.rows_per_client, node.data.rows_that_count])
        return Counts(tree.sum_up(per_client).astype(np.int64))
