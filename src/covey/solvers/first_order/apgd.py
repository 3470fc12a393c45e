"""APGD: accelerated proximal gradient with the clients' exact proximal steps. Few exchanges, and only vectors are sent.

Hanzely, Hanzely, Horvath and Richtarik (2020), "Lower bounds and optimal algorithms for personalized federated learning",
arXiv:2010.02372, take accelerated gradient steps on the penalty and proximal steps on the losses: APGD1, and IAPGD if the
proximal steps are inexact. This file extends their method to known clusters, for the objective of arXiv:2204.13619:

    each exchange    client i       theta_i = argmin f_i(x) + gamma_i/2 |x - c_j|^2
                     cluster j      tbar_j = sum gamma_i theta_i / Gamma_j,   Gamma_j = sum gamma_i
                     coordinator    v = the best w for these averages
                                    c = v + beta (v - v of the last exchange)

Why this is an accelerated gradient method: to minimise the objective is to minimise ``M(w) + Lambda(w)`` over ``w``. ``M`` is
the sum of the Moreau envelopes of the ``f_i``, with gradient ``Gamma_j (w_j - tbar_j)`` at ``w = c``, and is 1-smooth in the
norm ``|w|^2 = sum Gamma_j |w_j|^2``. ``Lambda = min over wbar of sum lam_j/2 |w_j - wbar|^2``, and ``v`` is its proximal step.
With steps of Chambolle and Pock (2016, Algorithm 5), where ``q`` is the strong convexity of ``M`` in this norm,

    F(theta) - F_hat <= min( (1 + sqrt q) (1 - sqrt q)^T, 4 / (T + 1)^2 ) 1/2 |c_0 - w_hat|^2      after T exchanges
    F(theta) - F_hat <= (1 - q) / (2 q) |c - v|^2                                                  at any time

The bounds hold for the clients' ``theta`` and not only for ``v``: given ``theta``, the value at ``w`` is the quadratic upper
bound of ``M`` at ``c`` that the proof uses. If every ``f_i`` is ``mu``-strongly convex, ``q = mu / (mu + max gamma)``. Without
``mu`` the steps are those for ``q = 0``, and start again whenever the last step points uphill (O'Donoghue and Candes 2015).
The gradient of the objective in ``theta_i`` is ``gamma_i (c_j - v_j)``, so checks cost no further exchange.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import polars as pl

from covey._typing import Floats
from covey.errors import SolverError, number, warn, whole
from covey.exact import WIDE_DIGITS, Exact, from_digits, total
from covey.nodes.network import Blocks, Message, Network, Node
from covey.objective.objective import Objective, Penalty
from covey.records import Axes, Record, Reply
from covey.solvers.costs import Cost, Setting
from covey.solvers.direct.elimination import Spread, descend, eliminate, expanded
from covey.solvers.first_order import kernels
from covey.solvers.first_order.protocol import AskMeans, Centres, empty_digits, node_sums, perfect, shares, summed
from covey.solvers.ledger import Ledger, Links, links
from covey.solvers.registry import algorithm
from covey.solvers.result import HISTORY, Checkpoint, Convergence, Fit, Progress, begin_at, entry
from covey.threads import block_count, share

_INNER = 1e-4  # errors of the clients' proximal steps, as a share of |c - v|^2 at the last exchange
_MOST_INNER = 100
_SAFETY = 4.0  # an estimate of q may be this many times too large
_UP = 3  # numbers in a reply besides the averages
_NO_ERROR = total(np.zeros(1))


def reference(objective: Objective, exchanges: int, q: float = 0.0) -> Floats:
    """Run the method from zero in plain numpy, without restarts.

    Parameters
    ----------
    objective : Objective
        Data, loss and penalties.
    exchanges : int
        The number of exchanges.
    q : float
        Strong convexity, as above.

    Returns
    -------
    (n, d) array
        The clients' coefficients after the last exchange.

    Examples
    --------
    >>> from covey import GroupedData, Objective, Penalty
    >>> from covey.losses import Gaussian
    >>> data = GroupedData.from_arrays([[1.0], [1.0], [1.0]], [0.0, 3.0, 9.0], ["a", "b", "c"], ["x", "x", "y"])
    >>> reference(Objective(data, Gaussian(), Penalty.of(data.hierarchy)), 40).ravel().round(3).tolist()
    [1.5, 3.0, 7.5]
    """
    data, loss, gamma = objective.data, objective.loss, objective.penalty.gamma[:, None]
    parent, top = data.hierarchy.parent, Centres.of(objective.penalty)
    theta, c, before, t = np.zeros((data.n_clients, data.n_terms)), np.zeros((data.n_clusters, data.n_terms)), None, 0.0
    for _ in range(exchanges):
        for _ in range(50):  # Newton's method for the proximal step of all clients
            here = loss.expand(data, theta)
            slope = here.gradient + gamma * (theta - c[parent])
            curvature = here.hessian + gamma[:, :, None] * np.eye(data.n_terms)
            theta = theta - np.linalg.solve(curvature, slope[:, :, None])[:, :, 0]
        v = top.centres(objective.means(theta)[0])[0]
        t, beta = momentum(t, q)
        c, before = v + beta * (v - (v if before is None else before)), v
    return theta


def momentum(t: float, q: float) -> tuple[float, float]:
    """The next ``t`` and the extrapolation ``beta`` after it: Chambolle and Pock (2016), Algorithm 5, from ``t = 0``."""

    def following(t: float) -> float:
        keep = 1 - q * t * t
        return 0.5 * (keep + math.sqrt(keep * keep + 4 * t * t))

    t = following(t)
    ahead = following(t)
    return t, (t - 1) / ahead * (1 - ahead * q) / (1 - q)


# Messages, and what a node does with them


@dataclass(frozen=True)
class ProximalStep(Message["ProximalReply"], label="proximal step"):
    """Solve each client's proximal step from the centres ``centre (k, d)``; ``total (k,)`` are the clusters' ``Gamma_j``.

    If the loss is not quadratic, ``|gradient|^2 / gamma_i`` of a client's problem may be its share of ``accuracy``.
    """

    centre: Annotated[Floats, Axes("k d")]
    total: Annotated[Floats, Axes("k")]
    accuracy: float

    def at(self, node: Node) -> ProximalReply:
        if node.loss.quadratic and node.loss.compiled:
            node.theta, averages, sum_of_values = QuadraticProx.of(node, self.total).step(self.centre)
            return ProximalReply(averages, sum_of_values, perfect(node), _NO_ERROR)
        node.theta, value, errors = proximal_newton(node, self.centre, self.accuracy * node.gamma / self.total.sum())
        return ProximalReply(node_sums(node, self.total, node.theta).total, total(value), perfect(node), total(errors))


@dataclass(frozen=True)
class ProximalReply(Reply):
    """Sums over a node's clients: their part of the averages ``(k, d)``, the values of their proximal problems.

    Also the losses of perfect fits, and the errors ``|gradient|^2 / gamma_i`` of the solutions.
    """

    averages: Annotated[Exact, Axes("k d")]
    value: Annotated[Exact, Axes("")]
    perfect: Annotated[Exact, Axes("")]
    error: Annotated[Exact, Axes("", "square")]


@dataclass(frozen=True)
class QuadraticProx:
    """The proximal steps of quadratic losses: ``theta_i = pull_i c_j + own_i``, computed once in a run.

    ``pull (n, d, d)`` is ``gamma_i (A_i + gamma_i I)^-1`` for the Hessian ``A_i``. ``own (n, d)`` is ``-pull_i g_i / gamma_i``
    for the gradient ``g (n, d)`` at zero, and ``value (n,)`` is the loss at zero. ``share (n,)`` are :func:`.protocol.shares`
    for the clusters' ``total (k,)``.
    """

    gamma: Floats
    total: Floats
    blocks: Blocks
    share: Floats
    pull: Floats
    own: Floats
    g: Floats
    value: Floats

    @classmethod
    def of(cls, node: Node, total: Floats) -> QuadraticProx:
        prepared: QuadraticProx | None = node.cache.get(cls)
        if prepared is not None and np.array_equal(prepared.gamma, node.gamma) and np.array_equal(prepared.total, total):
            return prepared
        n, d = node.data.n_clients, node.data.n_terms
        here, own = node.loss.expand(node.data, np.zeros((n, d))), np.empty((n, d))
        # Where the penalty is tiny and the loss is flat, only eigenvalues show what is curvature and what is rounding.
        weak = np.flatnonzero(node.gamma <= 1e-7 * np.trace(here.hessian, axis1=1, axis2=2))
        gamma, (values, vectors) = node.gamma[weak, None], np.linalg.eigh(here.hessian[weak])
        pull = here.hessian
        share(kernels.prepare_proximal, block_count(n), pull, node.gamma, here.gradient, own)
        curved = values > 8 * d * 2.0**-52 * values[:, -1:]
        strength = np.where(curved, values, 0.0) + gamma
        pull[weak] = np.einsum("iab,ib,icb->iac", vectors, gamma / strength, vectors)
        along = np.where(curved, np.einsum("iab,ia->ib", vectors, here.gradient[weak]) / strength, 0.0)
        own[weak] = -np.einsum("iab,ib->ia", vectors, along)
        part, blocks = shares(node, total), Blocks.of(node.data.hierarchy.cluster_ptr)
        prepared = node.cache[cls] = cls(node.gamma, total, blocks, part, pull, own, here.gradient, here.value)
        return prepared

    def step(self, centre: Floats) -> tuple[Floats, Exact, Exact]:
        """The proximal step of each client ``(n, d)``, the clusters' averages ``(k, d)``, and the value of all problems."""
        (n, d), blocks, fixed = self.own.shape, self.blocks, (self.pull, self.own, self.g, self.value, self.gamma, self.share)
        theta, sums = np.empty((n, d)), empty_digits(blocks, d)
        values = np.zeros((blocks.count, WIDE_DIGITS), dtype=np.int64)
        share(kernels.proximal_step, blocks.count, *fixed, blocks.ptr, blocks.owner, centre, theta, sums, values)
        return theta, summed(blocks, sums).total, from_digits(values.sum(axis=0))


def proximal_newton(node: Node, centre: Floats, limit: Floats) -> tuple[Floats, Floats, Floats]:
    """The same for any loss, by damped Newton from the last coefficients: steps, values ``(n,)`` and errors ``(n,)``.

    A client stops when its error is below its ``limit (n,)``, or when the rest is rounding. So its result does not depend on
    the other clients of its node.
    """
    data, loss, gamma, parent = node.data, node.loss, node.gamma, node.data.hierarchy.parent
    spread, at, theta = Spread.of_penalty(gamma, data.n_terms), centre[parent], node.coefficients()
    moving = np.ones(data.n_clients, dtype=bool)

    def values(theta: Floats) -> Floats:
        return np.asarray(loss.value(data, theta) + 0.5 * gamma * ((theta - at) ** 2).sum(axis=1))

    with np.errstate(over="ignore", invalid="ignore"):
        value = values(theta)
        for _ in range(_MOST_INNER):
            here = expanded(data, loss, theta)
            slope = gamma[:, None] * (theta - at) - here.r
            error = (slope**2).sum(axis=1) / gamma
            moving &= error > limit
            if not moving.any():
                break
            step = descend(here.C, here.r + np.einsum("iab,ib->ia", here.C, theta), spread, parent, centre)[0] - theta
            along, length, rounding = (slope * step).sum(axis=1), np.where(moving, 1.0, 0.0), 1e-15 * np.abs(value)
            while True:  # halve the steps of clients whose value does not fall enough
                ahead = values(theta + length[:, None] * step)
                refused = ~(ahead <= value + 1e-4 * length * along + rounding) & (length > 1e-12)
                if not refused.any():
                    break
                length[refused] *= 0.5
            better = moving & (ahead < value)
            theta, value = np.where(better[:, None], theta + length[:, None] * step, theta), np.where(better, ahead, value)
            moving &= better & (-along > rounding)
    return theta, value, error


# The coordinator


@dataclass(frozen=True)
class ApgdProgress(Record):
    """The state after an exchange: ``centre (k, d)`` is the next ``c``, ``sent`` the last one, ``means`` are its ``tbar_j``.

    ``t`` and ``q`` are those of the steps and of the stopping rule, ``squared`` is ``|c - v|^2``.
    """

    iteration: int
    centre: Floats
    sent: Floats
    v: Floats
    means: Floats
    t: float
    q: float
    squared: float
    ledger: Ledger
    history: tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class Coordinator:
    """What stays the same during a run; ``q`` is None if the strong convexity was not given."""

    network: Network
    penalty: Penalty
    top: Centres
    q: float | None
    links: Links
    minimum: float | None

    def norm2(self, w: Floats) -> float:
        """``sum Gamma_j |w_j|^2``."""
        return float((self.top.total * (w**2).sum(axis=1)).sum())

    def advance(self, last: ApgdProgress) -> tuple[ApgdProgress, float, float, Exact]:
        """One exchange; returns the new state, its estimated gap, the gradient norm, and the losses of perfect fits."""
        c, top = last.centre, self.top
        reply = self.network.ask(ProximalStep(c, top.total, max(_INNER * last.squared, 0.0)))
        means = reply.averages.floats()
        v, _ = top.centres(means)
        squared, error = self.norm2(c - v), float(reply.error)
        # From the value with w = c to that with w = v, for the same theta.
        value = float(reply.value) + 0.5 * (self.norm2(means - v) - self.norm2(means - c)) + top.tie(means)
        q = self._curvature(last, c, means)
        restart = self.q is None and last.iteration > 0 and float((top.total[:, None] * (c - v) * (v - last.v)).sum()) > 0
        t, beta = momentum(0.0 if restart else last.t, self.q or 0.0)
        ahead = v if last.iteration == 0 else v + beta * (v - last.v)
        estimate = (1 - q) / (2 * q) * squared + error if 0 < q < np.inf else np.inf
        norm = math.sqrt(float((self._gamma_squared * ((c - v) ** 2).sum(axis=1)).sum()))
        ledger = last.ledger + self.links.count(np.ones_like(self.links.clients), 1)
        row = entry(last.iteration + 1, value, norm, None if self.q is None else estimate, ledger, self.minimum)
        now = ApgdProgress(last.iteration + 1, ahead, c, v, means, t, q, squared, ledger, (*last.history, row))
        return now, estimate, norm, reply.perfect

    def _curvature(self, last: ApgdProgress, c: Floats, means: Floats) -> float:
        """``q`` if it is given, else the smallest curvature of ``M`` between two centres so far, divided by a margin."""
        if self.q is not None or last.iteration == 0:
            return self.q or np.inf
        step = self.norm2(c - last.sent)
        if step == 0:
            return last.q
        seen = 1 - float((self.top.total[:, None] * (means - last.means) * (c - last.sent)).sum()) / step
        return float(min(last.q, max(seen, 1e-12) / _SAFETY))

    @cached_property
    def _gamma_squared(self) -> Floats:
        return np.asarray(self.network.tree.sum_up(self.penalty.gamma**2))


# Theory


def rate_bound(T: Any, q: float) -> Any:
    """``min((1 + sqrt q) (1 - sqrt q)^T, 4 / (T + 1)^2)``, the factor of ``1/2 |c_0 - w_hat|^2`` in the bound on the gap."""
    T, root = np.asarray(T, dtype=np.float64), math.sqrt(q)
    return np.minimum((1 + root) * (1 - root) ** T, 4 / (T + 1) ** 2)


def strong_convexity(objective: Objective, theta: Floats) -> float:
    """``q`` of the objective at ``theta``: the smallest eigenvalue of the Hessian of ``M`` in any cluster, over ``Gamma_j``."""
    data, penalty = objective.data, objective.penalty
    spread = Spread.of_penalty(penalty.gamma, data.n_terms)
    seen = eliminate(expanded(data, objective.loss, theta), spread, data.hierarchy.cluster_ptr).C
    filled = data.hierarchy.sizes > 0
    smallest = np.linalg.eigvalsh(seen[filled] / penalty.cluster_gamma[filled][:, None, None])[:, 0].min()
    return float(np.clip(smallest, 0.0, 1 - 1e-12))


def cost(setting: Setting) -> Cost:
    """The exchanges after which the bound on the gap implies the accuracy of the distance."""
    q, best = strong_convexity(setting.objective, setting.best.theta), setting.best
    start = 0.5 * float((Centres.of(setting.objective.penalty).total * (best.w**2).sum(axis=1)).sum())
    target = 0.5 * setting.constants.mu * setting.accuracy * setting.distance
    linear = math.log(max((1 + math.sqrt(q)) * start / target, 1.0)) / -math.log1p(-math.sqrt(q)) if q > 0 else math.inf
    T = max(1, math.ceil(min(linear, math.sqrt(4 * start / target))))
    return setting.exchanged("apgd", T, _UP, f"bound of its theorem, q = {q:.2g}")


# The solver


_WHOLE = "its momentum needs the exact gradient, from every cluster; use solver='l2gd'."


@algorithm(place=6, first_order=True, reference=reference, cost=cost, refuses={"participation": _WHOLE})
def apgd(
    network: Network,
    penalty: Penalty,
    *,
    mu: float | None = None,
    start: Fit | Floats | None = None,
    tol: float = 1e-8,
    max_iter: int = 10_000,
    minimum: float | None = None,
    checkpoint: str | Path | None = None,
    progress: Progress | None = None,
) -> Fit:
    """Minimise the objective by accelerated proximal gradient steps. Every exchange sends one vector for each cluster.

    Parameters
    ----------
    network : Network
        The nodes that hold the clients' rows.
    penalty : Penalty
        ``gamma (n,)``, positive, and ``lam (k,)``.
    mu : float, optional
        Strong convexity of every client's loss. With it the steps are fixed and the gap is certified. Without it the steps are
        adaptive. After each exchange the curvature is measured along the last step, and the gap is estimated from the smallest
        curvature measured so far.
    start : Fit or (n, d) array, optional
        Models to begin at; by default zero.
    tol : float
        Stop when the bound or estimate of ``F - F*`` is at most ``tol * (F - F0)``: ``F`` is the objective, ``F*`` its minimum
        and ``F0`` its value if every row were fitted perfectly.
    max_iter : int
        Largest number of exchanges.
    minimum : float, optional
        The minimum of the objective, if you have it; the history then has the true gap.
    checkpoint : path, optional
        File to write after each exchange. A run whose checkpoint exists continues from it, to the same bits.
    progress : callable, optional
        Called after each exchange with its number, the objective and the gradient norm.

    Returns
    -------
    Fit
        Models of all levels, with a history of the exchanges and a ledger.

    Examples
    --------
    >>> from covey import GroupedData, InMemory, Penalty
    >>> from covey.losses import Gaussian
    >>> data = GroupedData.from_arrays([[1.0], [1.0], [1.0]], [0.0, 3.0, 9.0], ["a", "b", "c"], ["x", "x", "y"])
    >>> penalty = Penalty.of(data.hierarchy)
    >>> fit = apgd(InMemory.of(data, Gaussian(), penalty.gamma), penalty)
    >>> fit.convergence.converged, fit.theta.ravel().round(3).tolist()
    (True, [1.5, 3.0, 7.5])
    """
    largest = _check(network, penalty, tol, max_iter)
    q = None if mu is None else number("mu", mu, above=0.0) / (mu + largest)
    begin_at(network, start)
    saved = Checkpoint.at(checkpoint, {"solver": "apgd", "mu": mu}, network, penalty)
    top, d = Centres.of(penalty), len(network.terms)
    wires = links(network.tree.sizes, d, tied=bool(top.alpha.any()))
    coordinator = Coordinator(network, penalty, top, q, replace(wires, up=d + _UP, down=d), minimum)
    now = saved.resume(ApgdProgress, lambda before: before.iteration <= max_iter) or _begin(coordinator, start)
    done, norm = False, np.inf
    while now.iteration < max_iter and not done:
        now, gap, norm, perfect = coordinator.advance(now)
        value = now.history[-1]["objective"]
        if not np.isfinite(value + norm):
            raise SolverError(
                f"The objective is not finite after exchange {now.iteration:,}; standardise the columns, or give a start "
                "nearer to the minimum."
            )
        saved.write(now)
        if progress is not None:
            progress(now.iteration, value, norm)
        done = gap <= max(tol * (value - float(perfect)), 1e-22 * max(1.0, abs(value)) if tol > 0 else 0.0)
    return _fit(coordinator, now, done)


def _check(network: Network, penalty: Penalty, tol: float, max_iter: int) -> float:
    """Refuse settings that the method cannot use; returns the largest ``gamma``."""
    number("tol", tol, least=0.0)
    whole("max_iter", max_iter, least=1)
    bad = ~((penalty.gamma > 0) & np.isfinite(penalty.gamma))
    if bad.any():
        name = network.tree.cluster_ids[int(network.tree.parent[int(bad.argmax())])]
        raise SolverError(
            f"apgd needs 0 < gamma < infinity for every client, but cluster {name!r} has a client with gamma = "
            f"{penalty.gamma[bad][0]:g}; change gamma, or use solver='newton'."
        )
    return float(penalty.gamma.max())


def _begin(coordinator: Coordinator, start: Fit | Floats | None) -> ApgdProgress:
    k, d = network_shape = coordinator.network.tree.n_clusters, len(coordinator.network.terms)
    centre, nothing = np.zeros(network_shape), coordinator.links.nothing
    if isinstance(start, Fit):
        centre = start.w
    elif start is not None:
        means = coordinator.network.ask(AskMeans(coordinator.top.total)).total.floats()
        centre, nothing = coordinator.top.centres(means)[0], coordinator.links.count(np.ones(k, dtype=np.int64), 1)
    none = np.zeros((k, d))
    return ApgdProgress(0, centre, none, none, none, 0.0, np.inf, 0.0, nothing, ())


def _fit(coordinator: Coordinator, now: ApgdProgress, done: bool) -> Fit:
    value, norm, gap = (now.history[-1][name] for name in ("objective", "gradient_norm", "certified_gap"))
    message = f"gradient norm {norm:.1e} after {now.iteration:,} exchanges"
    if coordinator.q is None:
        message += "; its gap is estimated, not proved"
    if not done:
        message = f"stopped above the tolerance: {message}; raise max_iter, or use solver='newton'"
        warn(message)
    end = Convergence("apgd", done, now.iteration, now.ledger.exchanges, value, norm, gap, message)
    wbar = coordinator.top.centres(now.means)[1]
    return Fit.of(coordinator.network, now.v, wbar, end, pl.DataFrame(now.history, schema=HISTORY), now.ledger)
