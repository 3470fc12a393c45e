"""The messages of Newton's method and what a node does with them; :mod:`.newton` is the coordinator, and has the equations."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any

import numpy as np

from covey._typing import Floats
from covey.losses import Expansion, Loss
from covey.nodes.network import Message, Node, Request
from covey.records import Axes, Record, Reply
from covey.solvers.direct.elimination import Quadratic, Spread
from covey.solvers.direct.hessians import Hessians
from covey.solvers.direct.margins import Grams, solve_clients
from covey.solvers.direct.spaces import expand, hessians, settled
from covey.tables.rows import GroupedData

# Messages


@dataclass(frozen=True)
class NewtonBegin(Message["NewtonReport"], label="newton begin"):
    """Begin at the clients' coefficients, with the forces that clusters at ``w (k, d)`` exert on them."""

    w: Annotated[Floats, Axes("k d")]

    def at(self, node: Node) -> NewtonReport:
        theta = node.coefficients()
        force = node.gamma[:, None] * (theta - node.data.hierarchy.down(self.w))
        state, report = node_start(LocalProblem.of(node), theta, force)
        node.keep(state)
        return report


@dataclass(frozen=True)
class NewtonStep(Message["NewtonReport"], label="newton step"):
    """Go ``length`` along the direction that ``dw (k, d)`` implies; with ``retry``, from the old point and in its direction."""

    dw: Annotated[Floats, Axes("k d")]
    length: float = 1.0
    retry: bool = False

    def at(self, node: Node) -> NewtonReport:
        state, report = node_move(LocalProblem.of(node), node.state(NewtonState), self)
        node.theta = state.now.theta
        node.keep(state)
        return report


@dataclass(frozen=True)
class NewtonReport(Reply):
    """Sums over a node's clients: ``seen`` and ``force (k, d)`` by cluster, the others over all of them.

    ``slope`` is the derivative of the value along the direction of the last step, ``mu`` a lower bound on the curvature.
    """

    seen: Quadratic
    force: Annotated[Floats, Axes("k d")]
    value: float = field(metadata={"overflows": True})
    slope: float
    gradient_squared: Annotated[float, Axes("", "square")]
    mu: float = field(metadata={"least": True})


@dataclass(frozen=True)
class ReportAgain(Request[NewtonReport]):
    """Report on the point of a run that continues."""

    mu: float

    def at(self, node: Node) -> NewtonReport:
        return report_of(LocalProblem.of(node), node.state(NewtonState), self.mu)


# The node


@dataclass(frozen=True)
class LocalProblem:
    """The fixed data of a node: its clients' rows, their loss, and their covariances about their clusters."""

    data: GroupedData
    loss: Loss
    spread: Spread
    cache: dict[Any, Any] | None = None

    @classmethod
    def of(cls, node: Node) -> LocalProblem:
        return cls(node.data, node.loss, Spread.of_penalty(node.gamma, node.data.n_terms), node.cache)

    @property
    def aside(self) -> tuple[Floats, Floats]:
        """Zeros for the constants and row counts of a Quadratic, which a step does not need."""
        return (nothing := np.zeros(self.data.n_clients)), nothing

    @cached_property
    def grams(self) -> Grams | None:
        """The clients' matrices if they are solved in the space of their margins, kept from message to message."""
        if len(self.spread.shape) or self.spread.detached.any():
            return None
        cache = {} if self.cache is None else self.cache
        last = cache.get("grams")
        if last is None or last[0] is not self.data.X:
            cache["grams"] = last = self.data.X, Grams.of(self.data, self.loss)
        grams: Grams | None = last[1]
        return grams

    def at(self, theta: Floats, u: Floats, pull: Floats) -> NewtonPoint:
        """The point with coefficients ``theta (n, d)`` and forces ``u (n, d)``.

        Clients in the space of their margins go on to their best coefficients, given their clusters' models ``theta - S u``.
        """
        if self.grams is not None:
            theta, u, pull = solve_clients(self.data, self.loss, self.grams, theta, u, self.spread.scale, pull)
        here = expand(self.data, self.loss, theta, self.spread.width)
        return NewtonPoint(theta, settled(here, u, self.spread.width), here, pull)

    def direction(self, at: NewtonPoint, dw: Floats) -> tuple[Floats, Floats]:
        """How coefficients and forces move with the clusters' models."""
        parent = self.data.hierarchy.parent
        if self.grams is not None:  # clients are at their best coefficients, and :meth:`at` finds the next ones
            return dw[parent], np.zeros_like(at.u)
        return self.hessians(at).descend(-at.residual, self.spread, parent, dw)

    def hessians(self, point: NewtonPoint) -> Hessians:
        """The Hessians of the clients at a point."""
        return hessians(self.data, self.loss, point.here, self.spread.width, self.cache, self.grams)


@dataclass(frozen=True)
class NewtonPoint(Record):
    """Coefficients of a node's clients, the forces on them, and their losses expanded there.

    ``pull (rows,)`` gives the forces of clients that are solved in the space of their margins: ``u_i = X_i' pull_i``.
    """

    theta: Floats
    u: Floats
    here: Expansion
    pull: Floats

    @property
    def residual(self) -> Floats:
        return self.here.gradient + self.u


@dataclass(frozen=True)
class NewtonState(Record):
    """The point last reported, the point before it, and the direction from that one."""

    now: NewtonPoint
    before: NewtonPoint
    dtheta: Floats
    du: Floats


def node_start(node: LocalProblem, theta: Floats, u: Floats) -> tuple[NewtonState, NewtonReport]:
    """Begin at coefficients ``theta`` with a force ``u`` on each client: ``theta - w = S u``."""
    point, still = node.at(theta, u, np.empty(0)), np.zeros_like(theta)
    state = NewtonState(point, point, still, still)
    return state, report_of(node, state, node.hessians(point).smallest_curvature(node.loss))


def node_move(node: LocalProblem, state: NewtonState, move: NewtonStep) -> tuple[NewtonState, NewtonReport]:
    """Answer one :class:`NewtonStep`."""
    if not move.retry:
        now = state.now
        dtheta, du = node.direction(now, move.dw)
        state = NewtonState(now, now, dtheta, du)
    theta, u = state.before.theta + move.length * state.dtheta, state.before.u + move.length * state.du
    state = replace(state, now=node.at(theta, u, state.before.pull))
    return state, report_of(node, state, np.inf)


def report_of(node: LocalProblem, state: NewtonState, mu: float) -> NewtonReport:
    """The report on the point that a node is at."""
    tree, point, before = node.data.hierarchy, state.now, state.before
    seen = node.hessians(point).eliminate(-point.residual, node.spread, tree.cluster_ptr, node.aside)
    force = tree.sum_up(point.u)
    value = float(point.here.value.sum()) + 0.5 * float((node.spread.moved(point.u) * point.u).sum())
    slope = float((before.here.gradient * state.dtheta).sum() + (node.spread.moved(before.u) * state.du).sum())
    squared = float((point.residual**2).sum())
    if all(np.isfinite(part).all() for part in (seen.C, seen.r, force, value, slope, squared)):
        return NewtonReport(seen, force, value, slope, squared, mu)
    # The step is so long that numbers overflow. An infinite value makes the coordinator refuse it.
    nothing = Quadratic(np.zeros_like(seen.C), np.zeros_like(seen.r), np.zeros_like(seen.c), np.zeros_like(seen.n))
    return NewtonReport(nothing, np.zeros_like(force), np.inf, 0.0, 0.0, mu)
