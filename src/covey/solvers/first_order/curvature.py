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

``L`` and ``L_row`` are the largest curvatures of any client and of any row. Nodes count their clients by the decimal exponent
of the curvature, then those with the highest exponent by four digits. The result is rounded up to these digits.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import numpy as np

from covey._typing import Anything, Floats, Ints
from covey.errors import ConvergenceWarning, DataError, SolverError, number
from covey.exact import Exact, segment_sum, total
from covey.nodes.network import Message, Network, Node, Sizes
from covey.objective.objective import Penalty
from covey.objective.theory import Constants, largest_gamma, mixing
from covey.records import Axes, Record, Reply
from covey.solvers.direct.elimination import Quadratic, Spread, descend, marginalise
from covey.solvers.direct.newton import NewtonState, newton
from covey.solvers.direct.sweep import solve_top
from covey.solvers.first_order.protocol import Centres, ClusterSums, node_sums
from covey.solvers.first_order.schedule import streams, uniforms

_MARGIN = 2.0  # an upper bound measured at two points is doubled
_POWERS = np.array([float(f"1e{exponent}") for exponent in range(-307, 309)])
_PRECISION = 1e-3  # of the smallest curvature
_FINE, _FEW = 1e-10, 32  # precision if there are fewer than this many dimensions, because Lanczos then covers all of them
_PROBES = 3  # random vectors that show whether the Hessian is singular
_MOST_STEPS = 500


def constants(
    network: Network, penalty: Penalty, *, mu: float | None = None, L: float | None = None, L_row: float | None = None
) -> Constants:
    """The constants of a problem; those given are taken as they are. The clients' coefficients do not change."""
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
    if elsewhere:
        network.ask(RestoreCoefficients())
    factor = 1.0 if loss.bounded else _MARGIN
    L, L_row = (factor * sizes[name] if value is None else value for name, value in (("client", L), ("row", L_row)))
    notes = [f"{' and '.join(measured)} measured near the minimiser, not proved"] if measured else []
    notes += [f"{' and '.join(given)} as given"] if given else []
    proved = mu is None and (loss.quadratic or loss.ridge > 0)
    gamma, alpha, single = largest_gamma(network.tree, penalty), mixing(penalty), network.tree.sizes == 1
    result = Constants(L, L_row, bound, gamma, alpha, "; ".join(notes), proved, single)
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
    """Begin with a random vector; ``number`` says which."""

    number: int

    def at(self, node: Node) -> KrylovVector:
        tree, d = node.data.hierarchy, node.data.n_terms
        first = 2.0 * uniforms(streams(0, tree), self.number * d, d) - 1.0
        return _keep(node, KrylovState(np.zeros_like(first), np.zeros_like(first), first))


@dataclass(frozen=True)
class ApplyInverse(Message[KrylovImage], label="apply inverse", phase="measure"):
    """Divide the last vector by its ``length`` and apply the inverse; ``w (k, d)`` is the clusters' part of the result."""

    w: Annotated[Floats, Axes("k d")]
    length: float
    total: Annotated[Floats, Axes("k")]

    def at(self, node: Node) -> KrylovImage:
        state = node.state(KrylovState)
        now = state.ahead / self.length
        ahead, _ = descend(_hessian(node), now, _spread(node), node.data.hierarchy.parent, self.w)
        node.keep(KrylovState(state.now, now, ahead))
        return KrylovImage(total(now * ahead), node_sums(node, self.total, ahead))


@dataclass(frozen=True)
class Orthogonalise(Message[KrylovVector], label="orthogonalise", phase="measure"):
    """Make the new vector orthogonal to the last two; ``along`` and ``before`` are its inner products with them."""

    along: float
    before: float

    def at(self, node: Node) -> KrylovVector:
        state = node.state(KrylovState)
        ahead = state.ahead - self.along * state.now - self.before * state.before
        return _keep(node, KrylovState(state.before, state.now, ahead))


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
    """The last two vectors, orthogonal and of length 1 over all nodes, and the next one; ``(n, d)`` each."""

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
    """What a cluster sees of each client: ``C (n, d, d)`` and ``r (n, d)``; zero for clients with ``gamma = 0``."""
    n = node.data.n_clients
    clients = marginalise(Quadratic(_hessian(node), b, np.zeros(n), np.zeros(n)), _spread(node), np.array([0, n]))
    tied = node.gamma > 0
    return np.where(tied[:, None, None], clients.C, 0.0), np.where(tied[:, None], clients.r, 0.0)


def _keep(node: Node, state: KrylovState) -> KrylovVector:
    node.keep(state)
    return KrylovVector(segment_sum(_eliminated(node, state.ahead)[1], node.data.hierarchy.cluster_ptr), total(state.ahead**2))


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


def rounded_down(value: float) -> float:
    """A number rounded down to four digits: further digits may depend on the linear algebra library of a machine."""
    if not (value > 0 and np.isfinite(value)):
        return value
    unit = _thousandth(int(np.searchsorted(_POWERS, value, side="right")))
    return float(np.floor(value / unit) * unit)


# The largest curvature, by counting


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
    """The largest number of each client's rows; ``least`` if it has none."""
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
