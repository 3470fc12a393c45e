"""The smallest curvature of the objective by Lanczos steps on its inverse, whose largest eigenvalue is one over it.

Each client holds its part of the vectors, drawn from its own stream and never sent; inner products are sums over clients, and
the inverse is the sweep of :mod:`.elimination`, with the clients' Hessians eliminated once:

    v+ = P v       up    r_j = sum of what cluster j sees of v      down  w from the r of all clusters
    a = v'v+       v+ -= a v + b v_before      b = |v+|             up    a, then b with the next r

The recurrence keeps two vectors a client. Without reorthogonalisation it finds copies of eigenvalues, but no false ones, and
the largest is found as soon as with it (Paige 1980). Sums are exact: the answer does not depend on who shares a node.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from covey._typing import Floats
from covey.exact import Exact, segment_sum, total
from covey.nodes.network import Message, Network, Node
from covey.objective.objective import Penalty
from covey.records import Record, Reply
from covey.solvers.direct.elimination import Quadratic, Spread, descend, marginalise
from covey.solvers.direct.sweep import solve_top
from covey.solvers.first_order.protocol import Centres, ClusterSums, node_sums, shares
from covey.solvers.first_order.schedule import streams, uniforms

POWERS = np.array([float(f"1e{exponent}") for exponent in range(-307, 309)])

_PRECISION = 1e-3
_FINE = 1e-10  # where there are so few dimensions that all of them are looked at
_FEW = 32
_PROBES = 3  # directions in which a singular Hessian is looked for
_MOST_STEPS = 500


# What travels


@dataclass(frozen=True)
class SeenHessian(Reply):
    """What the clusters see of a node's clients, ``C (k, d, d)`` in units of the clusters' gamma."""

    C: Exact


@dataclass(frozen=True)
class KrylovVector(Reply):
    """What the clusters see of a vector, ``r (k, d)``, and its squared length."""

    r: Exact
    squared: Exact


@dataclass(frozen=True)
class KrylovImage(Reply):
    """Of ``v+ = P v``: the inner product with ``v`` and the clusters' sums."""

    along: Exact
    sums: ClusterSums


@dataclass(frozen=True)
class TakeHessians(Message[SeenHessian], label="take Hessians", phase="measure"):
    """Take the Hessians where the clients are; what clusters see of them. ``total (k,)`` are the clusters' gamma."""

    total: Floats

    def at(self, node: Node) -> SeenHessian:
        node.cache["hessian"] = node.loss.hessian(node.data, node.coefficients())
        tree, zero = node.data.hierarchy, np.zeros((node.data.n_clients, node.data.n_terms))
        return SeenHessian(segment_sum(_eliminated(node, zero)[0] / self.total[tree.parent][:, None, None], tree.cluster_ptr))


@dataclass(frozen=True)
class DrawVector(Message[KrylovVector], label="draw vector", phase="measure"):
    """Begin with a random vector, the one of this number."""

    number: int

    def at(self, node: Node) -> KrylovVector:
        tree, d = node.data.hierarchy, node.data.n_terms
        first = 2.0 * uniforms(streams(0, tree), self.number * d, d) - 1.0
        return _put(node, KrylovState(np.zeros_like(first), np.zeros_like(first), first))


@dataclass(frozen=True)
class ApplyInverse(Message[KrylovImage], label="apply inverse", phase="measure"):
    """Divide the last vector by its ``length`` and apply the inverse to it, given what it puts the clusters at."""

    w: Floats
    length: float
    total: Floats

    def at(self, node: Node) -> KrylovImage:
        tree, held = node.data.hierarchy, node.state(KrylovState)
        now = held.ahead / self.length
        ahead, _ = descend(_hessian(node), now, _spread(node), tree.parent, self.w)
        node.keep(KrylovState(held.now, now, ahead))
        return KrylovImage(total(now * ahead), node_sums(tree, shares(node, self.total), ahead))


@dataclass(frozen=True)
class Orthogonalise(Message[KrylovVector], label="orthogonalise", phase="measure"):
    """Make the new vector orthogonal to the last two; the inner products with them are these."""

    along: float
    before: float

    def at(self, node: Node) -> KrylovVector:
        held = node.state(KrylovState)
        return _put(node, KrylovState(held.before, held.now, held.ahead - self.along * held.now - self.before * held.before))


@dataclass(frozen=True)
class NullSpaceCheck(Message[Exact], label="null space", phase="measure"):
    """The Hessian times the image of a vector, less the vector; ``w (k, d)`` are its centres."""

    w: Floats

    def at(self, node: Node) -> Exact:
        held, tree = node.state(KrylovState), node.data.hierarchy
        bent = node.gamma[:, None] * (held.ahead - tree.down(self.w))
        for b in range(node.data.n_terms):
            bent += _hessian(node)[:, :, b] * held.ahead[:, b, None]
        return total((bent - held.now) ** 2)


# The node


@dataclass(frozen=True)
class KrylovState(Record):
    """The last two vectors, orthogonal and of length 1 over all nodes, and the one that comes after them; ``(n, d)`` each."""

    before: Floats
    now: Floats
    ahead: Floats


def _hessian(node: Node) -> Floats:
    if "hessian" not in node.cache:
        node.cache["hessian"] = node.loss.hessian(node.data, node.coefficients())
    A: Floats = node.cache["hessian"]
    return A


def _spread(node: Node) -> Spread:
    return Spread.of_penalty(node.gamma, node.data.n_terms)


def _eliminated(node: Node, b: Floats) -> tuple[Floats, Floats]:
    """What its cluster sees of each client: ``C (n, d, d)`` and ``r (n, d)``; nothing of those that are not tied to it."""
    n = node.data.n_clients
    own = marginalise(Quadratic(_hessian(node), b, np.zeros(n), np.zeros(n)), _spread(node), np.array([0, n]))
    tied = node.gamma > 0
    return np.where(tied[:, None, None], own.C, 0.0), np.where(tied[:, None], own.r, 0.0)


def _put(node: Node, vectors: KrylovState) -> KrylovVector:
    node.keep(vectors)
    return KrylovVector(
        segment_sum(_eliminated(node, vectors.ahead)[1], node.data.hierarchy.cluster_ptr), total(vectors.ahead**2)
    )


# The coordinator


def smallest_curvature(network: Network, penalty: Penalty) -> float:
    """The smallest eigenvalue of the objective's Hessian where the nodes are, rounded down; 0 where it is singular."""
    size = network.tree.n_clients * len(network.terms)
    top = Centres.of(penalty)
    C = network.ask(TakeHessians(top.total)).C.floats() * top.total[:, None, None]
    upper = partial(_upper, C, penalty)
    for probe in range(_PROBES):
        # Where the Hessian is singular, the sweep's pseudo-inverse misses its null space: random vectors show that. One missed
        # direction is a share of about 1 / sqrt(n d) of them; rounding, with large penalties, may be 1e-4.
        drawn = network.ask(DrawVector(_PROBES - 1 - probe))
        length = float(np.sqrt(float(drawn.squared)))
        image = network.ask(ApplyInverse(upper(drawn.r.floats() / length), length, top.total))
        missed = float(network.ask(NullSpaceCheck(top.centres(top.means(image.sums))[0])))
        if not np.sqrt(missed) <= 0.1 / np.sqrt(size):
            return 0.0
    precision = _FINE if size < _FEW else _PRECISION
    found = _largest(network, upper, image, top.total, min(size, _MOST_STEPS), precision)
    return rounded_down((1 - 2 * precision) / found) if found > 0 else 0.0


def _upper(C: Floats, penalty: Penalty, r: Floats) -> Floats:
    """Where a vector of which the clusters see ``r (k, d)`` puts them."""
    k, d = r.shape
    lam = penalty.lam if k > 1 else np.array([np.inf])  # one cluster: the same objective whatever its lam
    return solve_top(Quadratic(C, r, np.zeros(k), np.zeros(k)), Spread.of_penalty(lam, d))[0]


def _largest(
    network: Network, upper: Callable[[Floats], Floats], image: KrylovImage, total: Floats, most: int, precision: float
) -> float:
    """The largest eigenvalue of the inverse, from the image of the first vector on; 0 if it is not found to the precision."""
    diagonal: list[float] = []
    beside: list[float] = []
    before = 0.0
    for _ in range(most):
        diagonal.append(float(image.along))
        left = network.ask(Orthogonalise(diagonal[-1], before))
        before = float(np.sqrt(float(left.squared)))
        values, vectors = np.linalg.eigh(np.diag(diagonal) + np.diag(beside, 1) + np.diag(beside, -1))
        if not np.isfinite(values[-1]) or values[-1] <= 0:
            return 0.0
        if before * abs(vectors[-1, -1]) <= precision * values[-1]:
            return float(values[-1])
        beside.append(before)
        image = network.ask(ApplyInverse(upper(left.r.floats() / before), before, total))
    return float(values[-1]) if most < _MOST_STEPS else 0.0


def rounded_down(value: float) -> float:
    """To four digits: what is below them may depend on the linear algebra of a machine, and iterates must not."""
    if not (value > 0 and np.isfinite(value)):
        return value
    unit = POWERS[max(int(np.searchsorted(POWERS, value, side="right")) - 4, 0)]
    return float(np.floor(value / unit) * unit)
