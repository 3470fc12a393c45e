"""The constants of a problem: bounds where there are any, and measured curvature elsewhere.

The smallest eigenvalue of the objective's Hessian is one over the largest of its inverse; the sweep applies that inverse, a few
dozen Lanczos steps find its top (:mod:`.lanczos`). For a quadratic loss this is exact, and counts the curvature that clients
with fewer rows than columns get from the others. For other losses it is the curvature at one point, near the minimiser.

The largest curvature of any client is found by counting, since nodes answer in sums: how many clients have one of each decimal
exponent, then, of those with the highest, how many have each four digits. It is rounded up to these digits.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace

import numpy as np

from covey._typing import Anything, Floats, Ints
from covey.errors import ConvergenceWarning, DataError, SolverError, number
from covey.nodes.network import Message, Network, Node
from covey.objective.objective import Penalty
from covey.objective.theory import Constants, largest_gamma, mixing
from covey.records import Record, Reply
from covey.solvers.direct.newton import NewtonState, newton
from covey.solvers.first_order.lanczos import POWERS, smallest_curvature

_MARGIN = 2.0  # an upper bound measured at two points is doubled


def constants(
    network: Network, penalty: Penalty, *, mu: float | None = None, L: float | None = None, L_row: float | None = None
) -> Constants:
    """What the theorems need: bounds that hold everywhere where there are any, measured values where not.

    The nodes end where they were.
    """
    given = {name: value for name, value in (("mu", mu), ("L", L), ("L_row", L_row)) if value is not None}
    for name, value in given.items():
        number(name, value, above=0.0)
    _refuse_weightless(network)
    known = _constants(network, penalty, mu, L, L_row)
    if given:
        note = "; ".join(filter(None, [known.note, f"{' and '.join(given)} as given"]))
        known = replace(known, note=note)
    if mu is not None or (not network.loss.quadratic and network.loss.ridge == 0):
        known = replace(known, proved=False)
    if mu is not None and mu > known.L + known.gamma_max:
        most = known.L + known.gamma_max
        raise SolverError(f"mu = {mu:g} cannot be: the objective is nowhere more curved than {most:.3g}; leave mu out.")
    return known


def _constants(network: Network, penalty: Penalty, mu: float | None, L: float | None, L_row: float | None) -> Constants:
    loss, said, factor = network.loss, [], 1.0
    bounded, quadratic = loss.bounded, loss.quadratic
    if mu is None and not quadratic and loss.ridge > 0:
        mu = loss.ridge
    elsewhere = not quadratic and (mu is None or not bounded)
    if elsewhere:
        network.ask(SaveCoefficients())
        near_minimiser(network, penalty)
    if mu is None:
        mu = smallest_curvature(network, penalty)
        said += [] if quadratic else ["mu"]
    if not bounded:
        factor = _MARGIN
        said += ["L"] if L is None else []
    wanted = [name for name, value in (("client", L), ("row", L_row)) if value is None]
    found = dict(zip(wanted, largest(network, tuple(wanted)), strict=True))
    if elsewhere:
        network.ask(RestoreCoefficients())
    note = f"{' and '.join(said)} measured near the minimiser, not proved" if said else ""
    L, L_row = (factor * found[name] if value is None else value for name, value in (("client", L), ("row", L_row)))
    return Constants(L, L_row, mu, largest_gamma(network.tree, penalty), mixing(penalty), note)


def near_minimiser(network: Network, penalty: Penalty) -> None:
    """To where curvature is measured: a few steps from zero would be too far off where classes are nearly separated."""
    with warnings.catch_warnings(), network.during("measure"):
        warnings.simplefilter("ignore", ConvergenceWarning)
        newton(network, penalty, tol=1e-4)


def certificate(network: Network, penalty: Penalty, norm: float) -> tuple[float, float]:
    """A gap to the minimum that is certain, from the curvature where a run has ended; and that curvature.

    A quadratic has the same everywhere: ``norm^2 / (2 mu)``. The third derivative of the other losses is at most ``R`` times
    the second, ``R`` the longest row times ``loss.third_per_second``; where ``R norm <= mu / 2``, the gap is at most
    ``2 norm^2 / mu`` (Bach 2010, self-concordant analysis for logistic regression, prop. 2). Else it is infinite.
    """
    quadratic = network.loss.quadratic
    mu = smallest_curvature(network, penalty)
    longest = 0.0 if quadratic else network.loss.third_per_second * largest(network, ("length",))[0]
    if not mu > 0 or longest * norm > mu / 2:
        return np.inf, mu
    return norm**2 / (2 * mu) * (1 if quadratic else 4), mu


# Measured elsewhere than where the clients are


@dataclass(frozen=True)
class SavedCoefficients(Record):
    """Where a node's clients were before they were sent elsewhere."""

    theta: Floats


@dataclass(frozen=True)
class SaveCoefficients(Message[None], label="save coefficients", phase="measure", reply=False):
    """Save where the clients are, and put them at zero."""

    def at(self, node: Node) -> None:
        node.keep(SavedCoefficients(node.coefficients()))
        node.theta = None


@dataclass(frozen=True)
class RestoreCoefficients(Message[None], label="restore coefficients", phase="measure", reply=False):
    """Restore the coefficients saved by :class:`SaveCoefficients`."""

    def at(self, node: Node) -> None:
        node.theta = node.state(SavedCoefficients).theta
        node.drop(SavedCoefficients, NewtonState)


# The largest of all clients, by counting


@dataclass(frozen=True)
class Counts(Reply):
    """How many clients, in bins."""

    number: Ints


@dataclass(frozen=True)
class CountExponents(Message[Counts], label="exponents", phase="measure"):
    """Count clients by the decimal exponent of each of some quantities; ``(names, exponents + 2)``.

    The first bin is for zero, the last for what is not finite.
    """

    names: tuple[str, ...]

    def at(self, node: Node) -> Counts:
        node.cache["sizes"] = sizes = tuple(_size(node, name) for name in self.names)
        return Counts(np.array([np.bincount(exponent_bin(size), minlength=len(POWERS) + 2) for size in sizes]))


@dataclass(frozen=True)
class CountMantissas(Message[Counts], label="mantissas", phase="measure"):
    """Of the clients in these bins of the exponent, count those with each four digits, rounded up; ``(names, 10001)``."""

    names: tuple[str, ...]
    bins: tuple[int, ...]

    def at(self, node: Node) -> Counts:
        sizes = node.cache.pop("sizes", None) or tuple(_size(node, name) for name in self.names)
        counts = np.zeros((len(sizes), 10_001), dtype=np.int64)
        for row, (size, at) in enumerate(zip(sizes, self.bins, strict=True)):
            if 0 < at <= len(POWERS):
                counts[row] += np.bincount(four_digits(size[exponent_bin(size) == at], at), minlength=10_001)
        return Counts(counts)


def largest(network: Network, names: tuple[str, ...]) -> list[float]:
    """The largest of each quantity over all clients, rounded up to four digits; 0 if there are no clients."""
    if not names:
        return []
    bins = tuple(_last(row) for row in network.ask(CountExponents(names)).number)
    digits = [_last(row) for row in network.ask(CountMantissas(names, bins)).number]
    return [_of_digits(at, digit) for at, digit in zip(bins, digits, strict=True)]


def _last(counts: Ints) -> int:
    filled = np.flatnonzero(counts)
    return int(filled[-1]) if len(filled) else 0


def exponent_bin(size: Floats) -> Ints:
    """0 for zero, ``i + 1`` from ``POWERS[i]`` on, the last one for infinities and NaN."""
    at: Ints = np.searchsorted(POWERS, size, side="right")
    return np.where(np.isfinite(size), np.where(size > 0, np.maximum(at, 1), 0), len(POWERS) + 1)


def four_digits(size: Floats, at: int) -> Ints:
    """Sizes of one exponent in thousandths of its power of ten, rounded up: 1000 to 10000."""
    return np.ceil(size / _thousandth(at)).astype(np.int64)


def _of_digits(at: int, digits: int) -> float:
    if at == 0:
        return 0.0
    return digits * _thousandth(at) if at <= len(POWERS) else np.inf


def _thousandth(at: int) -> float:
    return float(POWERS[max(at - 4, 0)])


def _size(node: Node, name: str) -> Floats:
    """For each client: an upper bound of its curvature, that of its rows, or the length of its longest row; ``(n,)``."""
    data, loss = node.data, node.loss
    bounded, zero = loss.bounded, np.zeros((data.n_clients, data.n_terms))
    if name == "length":
        return np.sqrt(_longest(node, np.einsum("la,la->l", data.X, data.X), 0.0))
    if name == "row" and bounded:
        return _longest(node, loss.row_smoothness(data), loss.ridge)
    if name == "row":
        bend = np.maximum(*(loss.curvatures(data.margin(at), data.y) for at in (node.coefficients(), zero)))
        return _longest(node, loss.row_smoothness(data, bend), loss.ridge)
    if bounded and not loss.quadratic:
        return loss.smoothness(data)
    tops = [np.linalg.eigvalsh(loss.hessian(data, at))[:, -1] for at in ([zero] if bounded else [zero, node.coefficients()])]
    return np.asarray(np.max(tops, axis=0))


def _longest(node: Node, rows: Floats, least: float) -> Floats:
    """The largest of each client's rows, and ``least`` where it has none."""
    ptr, most = node.data.client_ptr, np.full(node.data.n_clients, least)
    filled = np.flatnonzero(np.diff(ptr))
    if len(filled):
        most[filled] = np.maximum.reduceat(rows, ptr[filled])
    return np.asarray(np.maximum(most, least))


# Clusters that weigh nothing


@dataclass(frozen=True)
class CountRows(Message[Counts], label="rows", phase="measure"):
    """Count the rows of each cluster, ``(k, 2)``: all of them, and those with a weight above zero."""

    def at(self, node: Node) -> Counts:
        tree, per_client = node.data.hierarchy, np.column_stack([node.data.rows_per_client, node.data.rows_that_count])
        return Counts(tree.sum_up(per_client).astype(np.int64))


def _refuse_weightless(network: Network) -> None:
    """A cluster whose rows count for nothing has nothing to exchange."""
    rows, count = network.ask(CountRows()).number.T
    empty: Anything = (count == 0) & (rows > 0)
    if empty.any():
        name = network.tree.cluster_ids[int(empty.argmax())]
        raise DataError(f"All rows of cluster {name!r} have weight 0; leave the cluster out, or give a row a positive weight.")
