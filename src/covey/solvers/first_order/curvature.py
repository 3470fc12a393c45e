"""The constants of a problem: strong convexity ``mu`` and smoothness ``L`` and ``L_row``.

The theorems of the paper (arXiv:2204.13619) need them; see its Assumption 2.1 (smooth_and_convex). Constants are bounds if the
loss has bounds, and measured values otherwise. Nodes send only sums over their clients. The sums are exact, so the constants do
not depend on the assignment of clients to nodes.

``mu`` is the smallest eigenvalue of the objective's Hessian, that is, one over the largest eigenvalue of its inverse. Lanczos
steps find the latter. Each client holds its part of the vectors, drawn from its own stream of random numbers and never sent.
The sweep of :mod:`covey.solvers.direct.elimination` applies the inverse ``P``, with the clients' Hessians eliminated once:

    v+ = P v       up    r_j = sum of what cluster j sees of v      down  w from the r of all clusters
    a = v'v+       v+ -= a v + b v_before      b = |v+|             up    a, then b with the next r

The recurrence keeps two vectors for each client. Without reorthogonalisation it finds copies of eigenvalues but no false ones,
and it finds the largest one as early as with reorthogonalisation (Paige 1980). For a quadratic loss the result is exact, and it
counts the curvature that clients with fewer rows than columns get from the others. For other losses it is the curvature at one
point, near the minimiser.

``L`` and ``L_row`` are the largest curvatures of any client and of any row (:mod:`.smoothness`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated

import numpy as np

from covey._typing import Anything, Floats
from covey.errors import ConvergenceWarning, DataError, SolverError, number
from covey.exact import Exact, segment_sum, total
from covey.nodes.network import Message, Network, Node
from covey.objective.objective import Penalty
from covey.objective.theory import Constants, alpha_weights, largest_gamma, mixing
from covey.records import Axes, Record, Reply
from covey.solvers.direct.elimination import Quadratic, Spread, descend, marginalise
from covey.solvers.direct.newton import newton
from covey.solvers.direct.newton_node import NewtonState
from covey.solvers.direct.sweep import solve_top
from covey.solvers.first_order.protocol import Centres, ClusterSums, node_sums
from covey.solvers.first_order.schedule import streams, uniforms
from covey.solvers.first_order.smoothness import CountRows, Quantity, largest, largest_by_cluster, rounded_down

_MARGIN = 2.0  # an upper bound measured at two points is doubled
_PRECISION = 1e-3  # of the smallest curvature
_FINE, _FEW = 1e-10, 32  # precision if there are fewer than this many dimensions, because Lanczos then covers all of them
_PROBES = 3  # random vectors that show whether the Hessian is singular
_MOST_STEPS = 500
FLOOR = 1e-6  # the smoothness of a client is at least this share of the largest, where it is a unit


def constants(
    network: Network,
    penalty: Penalty,
    *,
    mu: float | None = None,
    L: float | None = None,
    L_row: float | None = None,
    clusters: tuple[Quantity, ...] = (),
    relative: bool = False,
) -> Constants:
    """The constants of a problem; those given are taken as they are. The clients' coefficients do not change.

    With ``clusters=("client",)`` the smoothness of the clients' losses is also measured in each cluster, with ``"row"`` that of
    single rows. With ``relative`` and a loss with bounded curvature, ``q`` is measured.
    """
    given = {name: value for name, value in (("mu", mu), ("L", L), ("L_row", L_row)) if value is not None}
    for name, value in given.items():
        number(name, value, above=0.0)
    rows, weighted = network.ask(CountRows()).number.T
    weightless: Anything = (weighted == 0) & (rows > 0)
    if weightless.any():
        name = network.tree.cluster_ids[int(weightless.argmax())]
        raise DataError(f"All rows of cluster {name!r} have weight 0; leave the cluster out, or give a row a positive weight.")
    loss = network.loss
    bound = loss.ridge if mu is None and not loss.quadratic and loss.ridge > 0 else mu
    measured = ["mu"] if bound is None and not loss.quadratic else []
    measured += ["L"] if L is None and not loss.bounded else []
    elsewhere = not loss.quadratic and (bound is None or not loss.bounded)
    if elsewhere:
        network.ask(SaveCoefficients())
        # A few steps from zero would still be too far from the minimiser if classes are nearly separated.
        with warnings.catch_warnings(), network.during("measure"):
            warnings.simplefilter("ignore", ConvergenceWarning)
            newton(network, penalty, tol=1e-4)
    bound = smallest_curvature(network, penalty) if bound is None else bound
    wanted = tuple(name for name, value in (("client", L), ("row", L_row)) if value is None)
    sizes = dict(zip(wanted, largest(network, wanted), strict=True))
    own = largest_by_cluster(network, {name: sizes[name] for name in clusters if name in sizes})
    most = sizes["client"] if L is None else L
    if "row" in clusters and sizes.get("row") == np.inf and np.isfinite(most):
        raise DataError(
            "The solver 'al2sgd_plus' draws single rows, so it needs the rows of the table, and only sums of them are here; "
            "use shards (covey shard) or another solver."
        )
    q = relative_curvature(network, penalty, FLOOR * most) if relative and loss.bounded and bound > 0 else 0.0
    if elsewhere:
        network.ask(RestoreCoefficients())
    factor = 1.0 if loss.bounded else _MARGIN
    L, L_row = (factor * sizes[name] if value is None else value for name, value in (("client", L), ("row", L_row)))
    notes = [f"{' and '.join(measured)} measured near the minimiser, not proved"] if measured else []
    notes += [f"{' and '.join(given)} as given"] if given else []
    proved = mu is None and (loss.quadratic or loss.ridge > 0)
    gamma, alpha, single = largest_gamma(network.tree, penalty), mixing(penalty), network.tree.sizes == 1
    of_clients, of_rows = (None if own.get(name) is None else factor * own[name] for name in ("client", "row"))
    why, weights = "; ".join(notes), alpha_weights(penalty)
    result = Constants(L, L_row, bound, gamma, alpha, why, proved, single, of_clients, of_rows, q, weights)
    most = result.L + result.gamma_max
    if mu is not None and mu > most:
        raise SolverError(f"mu = {mu:g} is too large: the curvature of the objective is at most {most:.3g}; leave mu out.")
    return result


def certificate(network: Network, penalty: Penalty, norm: float) -> tuple[float, float]:
    """A certified gap to the minimum, from the curvature at the end of a run; and that curvature.

    For a quadratic loss the gap is ``norm^2 / (2 mu)``. The third derivative of the other losses is at most ``R`` times the
    second, where ``R`` is the longest row times ``loss.third_per_second``. If ``R norm <= mu / 2``, the gap is at most
    ``2 norm^2 / mu`` (Bach 2010, self-concordant analysis for logistic regression, proposition 2). Otherwise it is infinite.
    """
    quadratic = network.loss.quadratic
    mu = smallest_curvature(network, penalty)
    longest = 0.0 if quadratic else network.loss.third_per_second * largest(network, ("length",))[0]
    if not mu > 0 or longest * norm > mu / 2:
        return np.inf, mu
    return norm**2 / (2 * mu) * (1 if quadratic else 4), mu


@dataclass(frozen=True)
class SavedCoefficients(Record):
    """The coefficients of a node's clients before the curvature is measured near the minimiser."""

    theta: Floats


@dataclass(frozen=True)
class SaveCoefficients(Message[None], label="save coefficients", phase="measure", reply=False):
    """Save the clients' coefficients, and set them to zero."""

    def at(self, node: Node) -> None:
        node.keep(SavedCoefficients(node.coefficients()))
        node.theta = None


@dataclass(frozen=True)
class RestoreCoefficients(Message[None], label="restore coefficients", phase="measure", reply=False):
    """Restore the coefficients saved by :class:`SaveCoefficients`."""

    def at(self, node: Node) -> None:
        node.theta = node.state(SavedCoefficients).theta
        node.drop(SavedCoefficients, NewtonState)


# The smallest curvature, by Lanczos steps


@dataclass(frozen=True)
class SeenHessian(Reply):
    """What the clusters see of the Hessians of a node's clients, ``C (k, d, d)`` in units of the clusters' gamma."""

    C: Annotated[Exact, Axes("k d d", "psd")]


@dataclass(frozen=True)
class KrylovVector(Reply):
    """What the clusters see of a vector, ``r (k, d)``, and its squared length."""

    r: Annotated[Exact, Axes("k d")]
    squared: Annotated[Exact, Axes("", "square")]


@dataclass(frozen=True)
class KrylovImage(Reply):
    """The inner product of ``v+ = P v`` with ``v``, and the sums of ``v+`` by cluster."""

    along: Annotated[Exact, Axes("")]
    sums: ClusterSums


@dataclass(frozen=True)
class TakeHessians(Message[SeenHessian], label="take Hessians", phase="measure"):
    """Compute the Hessians at the clients' coefficients; ``total (k,)`` are the clusters' sums of gamma."""

    total: Annotated[Floats, Axes("k")]

    def at(self, node: Node) -> SeenHessian:
        node.cache.pop("hessian", None)
        tree, zero = node.data.hierarchy, np.zeros((node.data.n_clients, node.data.n_terms))
        return SeenHessian(segment_sum(_eliminated(node, zero)[0] / self.total[tree.parent][:, None, None], tree.cluster_ptr))


@dataclass(frozen=True)
class DrawVector(Message[KrylovVector], label="draw vector", phase="measure"):
    """Begin with a random vector; ``number`` says which.

    With ``floor > 0`` curvature is measured relative to each client's smoothness, at least ``floor``.
    """

    number: int
    floor: float = 0.0

    def at(self, node: Node) -> KrylovVector:
        tree, d = node.data.hierarchy, node.data.n_terms
        first = 2.0 * uniforms(streams(0, tree), self.number * d, d) - 1.0
        unit = np.ones(len(first)) if self.floor == 0 else np.sqrt(np.maximum(node.loss.smoothness(node.data), self.floor))
        return _keep(node, KrylovState(np.zeros_like(first), np.zeros_like(first), first, unit))


@dataclass(frozen=True)
class ApplyInverse(Message[KrylovImage], label="apply inverse", phase="measure"):
    """Divide the last vector by its ``length`` and apply the inverse; ``w (k, d)`` is the clusters' part of the result."""

    w: Annotated[Floats, Axes("k d")]
    length: float
    total: Annotated[Floats, Axes("k")]

    def at(self, node: Node) -> KrylovImage:
        state = node.state(KrylovState)
        now = state.ahead / self.length
        unit = state.unit[:, None]
        image, _ = descend(_hessian(node), unit * now, _spread(node), node.data.hierarchy.parent, self.w)
        node.keep(KrylovState(state.now, now, unit * image, state.unit))
        return KrylovImage(total(now * unit * image), node_sums(node, self.total, image))


@dataclass(frozen=True)
class Orthogonalise(Message[KrylovVector], label="orthogonalise", phase="measure"):
    """Make the new vector orthogonal to the last two; ``along`` and ``before`` are its inner products with them."""

    along: float
    before: float

    def at(self, node: Node) -> KrylovVector:
        state = node.state(KrylovState)
        ahead = state.ahead - self.along * state.now - self.before * state.before
        return _keep(node, replace(state, ahead=ahead))


@dataclass(frozen=True)
class NullSpaceCheck(Message[Exact], label="null space", phase="measure"):
    """Ask for the squared length of ``H P v - v``, with ``H`` the Hessian; ``w (k, d)`` are the centres of ``P v``."""

    w: Annotated[Floats, Axes("k d")]

    def at(self, node: Node) -> Exact:
        state, tree = node.state(KrylovState), node.data.hierarchy
        product = node.gamma[:, None] * (state.ahead - tree.down(self.w))
        for b in range(node.data.n_terms):
            product += _hessian(node)[:, :, b] * state.ahead[:, b, None]
        return total((product - state.now) ** 2)


@dataclass(frozen=True)
class KrylovState(Record):
    """The last two vectors, orthogonal and of length 1 over all nodes, and the next one; ``(n, d)`` each.

    ``unit (n,)`` is the unit of length of each client's coefficients.
    """

    before: Floats
    now: Floats
    ahead: Floats
    unit: Floats


def _hessian(node: Node) -> Floats:
    if "hessian" not in node.cache:
        node.cache["hessian"] = node.loss.hessian(node.data, node.coefficients())
    A: Floats = node.cache["hessian"]
    return A


def _spread(node: Node) -> Spread:
    return Spread.of_penalty(node.gamma, node.data.n_terms)


def _eliminated(node: Node, b: Floats) -> tuple[Floats, Floats]:
    """What a cluster sees of each client: ``C (n, d, d)`` and ``r (n, d)``; zero for clients with ``gamma = 0``."""
    n = node.data.n_clients
    clients = marginalise(Quadratic(_hessian(node), b, np.zeros(n), np.zeros(n)), _spread(node), np.array([0, n]))
    tied = node.gamma > 0
    return np.where(tied[:, None, None], clients.C, 0.0), np.where(tied[:, None], clients.r, 0.0)


def _keep(node: Node, state: KrylovState) -> KrylovVector:
    node.keep(state)
    seen = _eliminated(node, state.unit[:, None] * state.ahead)[1]
    return KrylovVector(segment_sum(seen, node.data.hierarchy.cluster_ptr), total(state.ahead**2))


def smallest_curvature(network: Network, penalty: Penalty) -> float:
    """The smallest eigenvalue of the objective's Hessian at the clients' coefficients, rounded down; 0 if it is singular."""
    size = network.tree.n_clients * len(network.terms)
    top = Centres.of(penalty)
    C = network.ask(TakeHessians(top.total)).C.floats() * top.total[:, None, None]
    upper = partial(_upper, C, penalty)
    for probe in range(_PROBES):
        # If the Hessian is singular, the sweep's pseudo-inverse misses its null space, and random vectors show that. One missed
        # direction is a share of about 1 / sqrt(n d) of such a vector. Rounding, with large penalties, may be 1e-4.
        drawn = network.ask(DrawVector(_PROBES - 1 - probe))
        length = float(np.sqrt(float(drawn.squared)))
        image = network.ask(ApplyInverse(upper(drawn.r.floats() / length), length, top.total))
        missed = float(network.ask(NullSpaceCheck(top.centres(image.sums.total.floats())[0])))
        if not np.sqrt(missed) <= 0.1 / np.sqrt(size):
            return 0.0
    precision = _FINE if size < _FEW else _PRECISION
    value = _largest_of_inverse(network, upper, image, top.total, min(size, _MOST_STEPS), precision)
    return rounded_down((1 - 2 * precision) / value) if value > 0 else 0.0


def relative_curvature(network: Network, penalty: Penalty, floor: float) -> float:
    """The smallest curvature at the clients' coefficients if that of client ``i`` is divided by ``L_i``, at least ``floor``.

    It is in (0, 1]: the strong convexity of the objective in the norm ``sum_i L_i |theta_i|^2``, at most 1.
    """
    top = Centres.of(penalty)
    C = network.ask(TakeHessians(top.total)).C.floats() * top.total[:, None, None]
    upper, size = partial(_upper, C, penalty), network.tree.n_clients * len(network.terms)
    drawn = network.ask(DrawVector(0, floor))
    length = float(np.sqrt(float(drawn.squared)))
    image = network.ask(ApplyInverse(upper(drawn.r.floats() / length), length, top.total))
    value = _largest_of_inverse(network, upper, image, top.total, min(size, _MOST_STEPS), 1e-2)
    return min(1.0, rounded_down((1 - 2e-2) / value)) if value > 0 else 1e-8


def _upper(C: Floats, penalty: Penalty, r: Floats) -> Floats:
    """The clusters' part of ``P v``, if they see ``r (k, d)`` of ``v``."""
    k, d = r.shape
    lam = penalty.lam if k > 1 else np.array([np.inf])  # with one cluster the objective does not depend on lam
    return solve_top(Quadratic(C, r, np.zeros(k), np.zeros(k)), Spread.of_penalty(lam, d))[0]


def _largest_of_inverse(
    network: Network, upper: Callable[[Floats], Floats], image: KrylovImage, total: Floats, most: int, precision: float
) -> float:
    """The largest eigenvalue of the inverse, from the image of the first vector on; 0 if ``most`` steps are not enough."""
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
