"""Networks for tests: one node that holds all clients, or several nodes in this process that share them."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import numpy as np

from covey.losses import loss_of
from covey.nodes.network import InMemory, Node
from covey.objective.theory import Constants, largest_gamma, mixing
from covey.tree.hierarchy import Hierarchy
from covey.variance.identify import survey
from covey.variance.parameters import Shape


def in_memory(data, loss):
    return InMemory.of(data, loss, np.ones(data.n_clients))


def strong_convexity(loss, data):
    """A lower bound of the curvature of each client's loss at any point."""
    if loss.curvature[0] == 0.0:
        return np.full(data.n_clients, loss.ridge)
    gram = loss_of("gaussian", loss.reduction).hessian(data, np.zeros((data.n_clients, data.n_terms)))
    eigenvalues = np.maximum(np.linalg.eigvalsh(gram), 0.0)
    # Rounding gives a rank-deficient client a small eigenvalue instead of zero; the bound is zero at that size.
    floor = 8 * data.n_terms * np.finfo(float).eps * eigenvalues[:, -1]
    lowest = eigenvalues[:, 0] - floor
    return loss.curvature[0] * np.where(lowest > floor, lowest, 0.0) + loss.ridge


def bounds_of(data, loss, penalty):
    """Constants of a problem from bounds that hold at every point."""
    return Constants(
        L=float(loss.smoothness(data).max()),
        L_row=float(loss.row_smoothness(data).max(initial=loss.ridge)),
        mu=float(strong_convexity(loss, data).min()),
        gamma=largest_gamma(data.hierarchy, penalty),
        alpha=mixing(penalty),
    )


def surveyed(data, loss):
    """The survey of a coordinator, without the check that the model is identified."""
    return survey(in_memory(data, loss), Shape((), ()), check=False)


def shard(data, clients):
    """Rows of some clients, with all clusters of the network."""
    clients = np.asarray(clients, dtype=np.int64)
    rows = np.concatenate([np.arange(0), *(np.arange(data.client_ptr[i], data.client_ptr[i + 1]) for i in clients)])
    counts = np.bincount(data.hierarchy.parent[clients], minlength=data.n_clusters)
    tree = Hierarchy(
        np.concatenate([[0], np.cumsum(counts)]), data.hierarchy.client_ids.gather(clients), data.hierarchy.cluster_ids
    )
    return replace(
        data,
        X=data.X[rows],
        y=data.y[rows],
        weights=None if data.weights is None else data.weights[rows],
        offset=None if data.offset is None else data.offset[rows],
        client_ptr=np.concatenate([[0], np.cumsum(data.rows_per_client[clients])]),
        hierarchy=tree,
    )


@dataclass
class Sharded:
    """Nodes in this process. Replies are added, and stored if ``listens``.

    With ``forgets`` every node loses its cache after each request, as if another process served the next.
    """

    held: list[Node]
    owned: list[np.ndarray]  # positions of the clients of each node
    tree: Hierarchy
    listens: bool = False
    forgets: bool = False
    asked: list[Any] = field(default_factory=list)
    exchanges: int = 0
    vectors_only: bool = False

    @classmethod
    def of(cls, data, loss, owner, **settings):
        """``owner`` is the node of each client."""
        clients = [np.flatnonzero(owner == site) for site in range(int(owner.max()) + 1)]
        nodes = [Node(shard(data, mine), loss, np.ones(len(mine))) for mine in clients]
        ids = data.hierarchy.client_ids.clear(len(data.hierarchy.client_ids))  # a coordinator does not see them
        return cls(nodes, clients, replace(data.hierarchy, client_ids=ids), **settings)

    @property
    def terms(self):
        return self.held[0].data.terms

    @property
    def loss(self):
        return self.held[0].loss

    def clients(self):
        return None

    @property
    def places(self):
        return []  # the nodes have other owners

    def ask(self, request):
        replies = [request.at(node) for node in self.held]
        self.exchanges += 1
        if self.listens:
            self.asked.append((request, replies))
        if self.forgets:
            for node in self.held:
                node.cache.clear()
        total = replies[0]
        for reply in replies[1:]:
            total = None if total is None else total + reply
        return total

    def gathered(self, name="theta"):
        """Collect an array of all clients from the nodes, in the order of the clients."""
        parts = [getattr(node, name) for node in self.held]
        whole = np.empty((sum(map(len, self.owned)), *parts[0].shape[1:]))
        whole[np.concatenate(self.owned)] = np.concatenate(parts)
        return whole


def leaves(value):
    """All values in a message."""
    if is_dataclass(value):
        for each in fields(value):
            yield from leaves(getattr(value, each.name))
    elif isinstance(value, tuple):
        for each in value:
            yield from leaves(each)
    else:
        yield value
