"""Check of Laplace's approximation at an optimum: the same integrals by quadrature.

The approximation takes the posterior of each client and each cluster for normal. It fails if rows say almost nothing about a
large variance, as with two rows of one class for most clients. The approximate likelihood can then rise where the likelihood
falls, and its optimum means nothing. So the integrals are computed again at the optimum.

With ``S = L L'`` a client has ``theta = w + L b``, and with dispersion ``phi`` its part of the likelihood is

    I(w) = integral of exp(-G(b)) (2 pi phi)^(-r/2) db         G(b) = (f(w + L b) + |b|^2 / 2) / phi

About any centre ``c``, and with any ``K``, ``b = c + sqrt(phi) K^(-1/2) z`` gives

    log I(w) = -G(c) - 1/2 log|K| + log E exp(G(c) - G(b) + |z|^2 / 2)         z standard normal

With the mode as centre and ``K = I + L'HL`` the first two terms are Laplace's approximation, and the last one is its error. The
expectation is a Gauss-Hermite rule if at most two directions vary (adaptive quadrature: Pinheiro and Bates 1995), and else
importance sampling with seeded draws. Clusters have the same integral one level up, with the clients' integrals inside:

    coordinator   sends   w (m, k, d): each cluster's coefficients at the m nodes of its rule
    node          sends   sums over each cluster's clients of log I(w) less Laplace's approximation to it at the mode, and of
                          their derivatives by the log of a factor of all standard deviations, which is E|b|^2 / phi - r

At the optimum the approximate likelihood is flat. So the derivative of the likelihood, divided by the curvature, estimates by
how much the approximation makes the standard deviations too small or too large.

With many clusters a seeded sample of them is enough. It doubles while the confidence interval of a result that decides includes
its limit. Laplace's approximation to each cluster's derivative has no sampling error, so only the difference is sampled.
Nearly normal integrands have a rule with few nodes; for clients, its error at the mode is corrected. If random draws were used,
their error is estimated by the jackknife: the result is computed again without each of some batches of draws. The draws of a
client depend on its rows, not on its node.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from covey._typing import Anything, Bools, Floats, Ints
from covey.errors import SolverError
from covey.losses import Loss
from covey.nodes.network import Message, Node, Sizes
from covey.records import Axes, Reply
from covey.solvers.direct.spaces import expand, hessians
from covey.tables.rows import GroupedData
from covey.tree.hierarchy import Hierarchy
from covey.variance.approximation import BIASED, NOTICED, OVERSTATED, TOO_LARGE, Approximation
from covey.variance.columns import client_rows
from covey.variance.laplace_likelihood import LaplaceCriterion, ModeState
from covey.variance.linear_likelihood import Criterion
from covey.variance.rules import CLIENTS, CLUSTERS, GRIDS, POOL, QUICK, Rule, factor
from covey.variance.search import Optimum
from covey.variance.upper import UpperPosterior

# The rough rule of a quick check has 3 nodes along one direction and 7 on the plane. It is enough for a client if it changes
# the log-integral at the mode by at most the first number, and that change is corrected. It is enough for a cluster if the log
# of the integrand's ratio to a normal density varies between nodes by at most the second number times the cluster's error.
_SMALL_CHANGE, _SMALL_RANGE = 0.01, 4.0
_FEW = 8  # clusters; fewer are not sampled
_SHARES = 0.05, 1.0  # the share of the fit's work for a first sample: of a quick check, and of a careful one
_PER_EXCHANGE = 1.5  # the work of an exchange of the fit, in evaluations of all rows' losses
_FARTHEST = 1e9  # a sum of log-integrals this far from the mode's contributes nothing


# The node


@dataclass(frozen=True)
class LogIntegrals(Reply):
    """Sums over each cluster's clients, at each point ``(m, k)``.

    ``total`` sums log-integrals less Laplace's at the mode. If clients have a rule with random draws, points are repeated for
    each set of its nodes. ``growth`` sums derivatives of the log-integrals by the log of a factor of standard deviations.
    """

    total: Annotated[Floats, Axes("n k")]
    growth: Annotated[Floats, Axes("centres k")]


@dataclass(frozen=True)
class IntegrateAtMode(Message[LogIntegrals], label="integrals at the mode", phase="learn"):
    """Integrate over the clients about the last mode, with clusters at ``w (m, k, d)``, for the clusters in ``asked (k,)``.

    If ``m`` is 1, clusters are where they were at the mode.
    """

    w: Annotated[Floats, Axes("n k order")]
    phi: float
    asked: Annotated[Bools, Axes("k")]
    careful: bool

    @property
    def cells(self) -> Anything:
        return self.asked

    @property
    def sizes(self) -> Sizes:
        return {"centres": len(self.w)}

    def at(self, node: Node) -> LogIntegrals:
        mode, tree = node.state(ModeState), node.data.hierarchy
        keep, L = self.asked[tree.parent], factor(mode.S)
        rule, shape = Rule.over(L.shape[2], CLIENTS if self.careful else QUICK), (len(self.w), tree.n_clusters)
        total, growth = np.zeros((len(rule.sets), *shape)), np.zeros(shape)
        if keep.any():
            data, now = _some_clients(client_rows(node, mode.order.terms), keep), mode.state.now
            L = L[tree.parent[keep]] if len(L) > 1 else np.broadcast_to(L, (data.n_clients, *L.shape[1:]))
            b = np.einsum("iar,ia->ir", L, now.u[keep])
            clients = _Clients.at_mode(data, node.loss, L, self.phi, now.theta[keep], b, mode.order.width)
            laplace, sum_up = clients.laplace, data.hierarchy.sum_up
            parts = clients.parts(rule) if len(self.w) > 1 and not self.careful else [clients.all_by(rule)]
            for m, w in enumerate(self.w):
                logs, by = np.empty((len(rule.sets), data.n_clients)), np.empty(data.n_clients)
                for part in parts:
                    there = w[data.hierarchy.parent[part.at]]
                    means, growths = part.clients.log_integrals(there, part.rule, len(self.w) > 1)
                    logs[:, part.at], by[part.at] = means + part.change[0], growths + part.change[1]
                total[:, m], growth[m] = [sum_up(each - laplace) for each in logs], sum_up(by)
        return LogIntegrals(_within_reach(total).reshape(-1, tree.n_clusters), _within_reach(growth))


@dataclass(frozen=True)
class _Clients:
    """Clients at their modes ``theta (n, d)`` and ``b (n, r)``, with ``L (n, d, r)`` that is zero where terms do not vary.

    ``hessian (n, q, d)`` are the rows of their Hessians that belong to the ``q`` terms that vary.
    """

    data: GroupedData
    loss: Loss
    L: Floats
    phi: float
    theta: Floats
    b: Floats
    hessian: Floats

    @classmethod
    def at_mode(cls, data: GroupedData, loss: Loss, L: Floats, phi: float, theta: Floats, b: Floats, q: int) -> _Clients:
        here = expand(data, loss, theta, q)
        return cls(data, loss, L, phi, theta, b, hessians(data, loss, here, q).leading(q))

    @property
    def q(self) -> int:
        return int(self.hessian.shape[1])

    @property
    def laplace(self) -> Floats:
        """Laplace's approximation to the log-integrals at the mode, ``(n,)``."""
        volume = np.linalg.slogdet(self.precision(self.hessian))[1]
        return np.asarray(-self.height(self.theta, self.b) - 0.5 * volume)

    def height(self, theta: Floats, b: Floats) -> Floats:
        """``G``, ``(n,)``."""
        return np.asarray((self.loss.value(self.data, theta) + 0.5 * (b**2).sum(axis=1)) / self.phi)

    def precision(self, hessian: Floats) -> Floats:
        """``K = I + L'HL``, ``(n, r, r)``."""
        L = self.L[:, : self.q]
        K: Floats = np.eye(L.shape[2]) + L.swapaxes(1, 2) @ hessian[:, :, : self.q] @ L
        return K

    def all_by(self, rule: Rule) -> _Part:
        """All clients by one rule."""
        return _Part(np.ones(len(self.b), dtype=bool), self, rule, np.zeros((2, len(self.b))))

    def parts(self, rule: Rule) -> list[_Part]:
        """Nearly normal clients by a rule with fewer nodes, and the others by ``rule``.

        A nearly normal client changes by the difference of the two rules at the mode, which is almost the same elsewhere.
        """
        rough = Rule.rough(rule.r)
        if rough.n == rule.n:
            return [self.all_by(rule)]
        w = self.theta - self.along(self.b)
        (logs, by), (logs_rough, by_rough) = (self.log_integrals(w, each, moved=False) for each in (rule, rough))
        change = np.stack([logs[0] - logs_rough[0], by - by_rough])
        normal = np.abs(change[0]) <= _SMALL_CHANGE
        return [
            _Part(at, self.some(at), each, change[:, at] * used)
            for at, each, used in ((normal, rough, 1.0), (~normal, rule, 0.0))
            if at.any()
        ]

    def some(self, at: Bools) -> _Clients:
        """The clients where ``at`` is true."""
        arrays = (self.theta[at], self.b[at], self.hessian[at])
        return _Clients(_some_clients(self.data, at), self.loss, self.L[at], self.phi, *arrays)

    @property
    def keys(self) -> Ints:
        """A number for each client that depends on its rows only, ``(n,)``."""
        bits = np.ascontiguousarray(self.data.X).view(np.uint64) >> np.uint64(20)
        mixed = (bits * (2 * np.arange(bits.shape[1], dtype=np.uint64) + np.uint64(0x9E3779B97F4A7C15))).sum(axis=1)
        return np.asarray(np.add.reduceat(np.append(mixed, np.uint64(0)), self.data.client_ptr[:-1]) % POOL).astype(np.int64)

    def log_integrals(self, w: Floats, rule: Rule, moved: bool) -> tuple[Floats, Floats]:
        """``log I(w)`` by each set of the rule ``(sets, n)``, and its derivative by the log of a factor of ``L``, ``(n,)``.

        ``w (n, d)`` is where each client's cluster is.
        """
        b, K = self.b, self.precision(self.hessian)
        if moved and rule.r:
            b, K, lowest = self._centre(w, K)
            theta = w + self.along(b)
        else:
            theta = w + self.along(b)
            lowest = self.height(theta, b)
        # Any square root of the inverse of K will do. This one is upper triangular.
        root = np.sqrt(self.phi) * np.linalg.inv(np.linalg.cholesky(K)).swapaxes(1, 2)
        logs, sizes = np.empty((rule.n, len(b))), np.empty((rule.n, len(b)))
        keys = self.keys if rule.r not in GRIDS else np.zeros(len(b), dtype=np.int64)
        for at in range(rule.n):
            z = rule.node(at, keys)
            if not z.any():
                logs[at], sizes[at] = 0.0, (b**2).sum(axis=1)
                continue
            step = (root @ z[:, :, None])[:, :, 0]
            logs[at] = lowest - self.height(theta + self.along(step), b + step) + 0.5 * (z**2).sum(axis=1)
            sizes[at] = ((b + step) ** 2).sum(axis=1)
        means, shares = rule.log_means(logs)
        return means - lowest - 0.5 * np.linalg.slogdet(K)[1], (shares * sizes).sum(axis=0) / self.phi - rule.r

    def along(self, b: Floats) -> Floats:
        """``L b``, ``(n, d)``."""
        return (self.L @ b[:, :, None])[:, :, 0]

    def _centre(self, w: Floats, K: Floats) -> tuple[Floats, Floats, Floats]:
        """A point near the mode of each client whose cluster moved to ``w``, ``K`` near it, and ``G`` there.

        It takes two Newton steps. The first uses the Hessian at the old mode. A second step that leads up is not taken.
        """
        away = np.einsum("iar,iab,ib->ir", self.L[:, : self.q], self.hessian, w - (self.theta - self.along(self.b)))
        b = self.b - np.linalg.solve(K, away[:, :, None])[:, :, 0]
        theta = w + self.along(b)
        here = expand(self.data, self.loss, theta, self.q)
        K = self.precision(hessians(self.data, self.loss, here, self.q).leading(self.q))
        slope = np.einsum("iar,ia->ir", self.L, here.gradient) + b
        ahead = b - np.linalg.solve(K, slope[:, :, None])[:, :, 0]
        height, height_ahead = (here.value + 0.5 * (b**2).sum(axis=1)) / self.phi, self.height(w + self.along(ahead), ahead)
        falls = height_ahead < height
        return np.where(falls[:, None], ahead, b), K, np.where(falls, height_ahead, height)


@dataclass(frozen=True)
class _Part:
    """The clients where ``at`` is true, the rule for them, and what is added to log-integrals and their growth ``(2, n)``."""

    at: Bools
    clients: _Clients
    rule: Rule
    change: Floats


def _within_reach(logs: Floats) -> Floats:
    """Replace what is not finite, or too far away to contribute, by numbers that add."""
    bounded: Floats = np.clip(np.nan_to_num(logs, nan=-_FARTHEST), -_FARTHEST, _FARTHEST)
    return bounded


def _some_clients(data: GroupedData, keep: Anything) -> GroupedData:
    """The clients where ``keep`` is true; all clusters are kept."""
    if keep.all():
        return data
    tree, rows = data.hierarchy, keep[data.client_of_row]
    ids, counts = tree.client_ids.filter(keep), np.bincount(tree.parent[keep], minlength=tree.n_clusters)
    hierarchy = Hierarchy(np.concatenate([[0], np.cumsum(counts)]), ids, tree.cluster_ids)
    client_ptr = np.concatenate([[0], np.cumsum(data.rows_per_client[keep])])
    weights, offset = (None if part is None else part[rows] for part in (data.weights, data.offset))
    return GroupedData(data.X[rows], data.y[rows], client_ptr, hierarchy, data.terms, weights, offset)


# The coordinator


@dataclass
class Watch:
    """Decides for a search with Laplace's approximation whether to give up. With an exact likelihood it never does.

    ``tested`` is the largest standard deviation of the margin at which the approximation was checked.
    """

    criterion: Criterion
    tested: float = 0.0

    def underway(self, x: Floats) -> bool:
        """Whether ``x`` is beyond hope: the approximation overstates the likelihood, and rises to even larger variances."""
        criterion = self.criterion
        size = criterion.largest_deviation(x)
        if not (isinstance(criterion, LaplaceCriterion) and criterion.is_doubtful(x)) or size < 1.5 * self.tested:
            return False
        self.tested = size
        return self._has_failed(x, growing=True)

    def at_end(self, x: Floats) -> bool:
        """Whether the approximation has failed where a search has ended."""
        return self.criterion.is_doubtful(x) and self._has_failed(x)

    def _has_failed(self, x: Floats, *, growing: bool = False) -> bool:
        criterion = self.criterion
        if not isinstance(criterion, LaplaceCriterion):
            return False
        if criterion.largest_deviation(x) > TOO_LARGE:
            return True
        try:
            here = criterion.evaluate(x)
            n = criterion.parameters.n_parameters
            if growing and criterion.gradient(x, here)[:n] @ x[:n] >= 0:
                return False
            return _overstates(criterion, error_at_mode(criterion, x, here.top)[0])
        except (SolverError, np.linalg.LinAlgError):
            return False


def check(criterion: Criterion, best: Optimum, top: UpperPosterior) -> Approximation | None:
    """Check the approximation at the end of a search, where it was last evaluated. None if the likelihood is exact."""
    if not isinstance(criterion, LaplaceCriterion):
        return None

    def undecided(total: Floats, *growth: Floats) -> bool:
        """Whether the confidence intervals leave open that standard deviations are biased."""
        away, within = np.abs(_bias(criterion, best, growth)).T
        possible, certain = (
            abs(total[0]) + by * total[1] > NOTICED and bool((away + by * within > BIASED).any()) for by in (2.0, -2.0)
        )
        return bool(possible != certain)

    total, *growth = error_at_mode(criterion, best.x, top, undecided)
    bias = _bias(criterion, best, growth)
    biased = abs(total[0]) > NOTICED and bool((np.abs(bias[:, 0]) > BIASED + 2 * bias[:, 1]).any())
    failed = best.failed or biased or criterion.largest_deviation(best.x) > TOO_LARGE or _overstates(criterion, total)
    return Approximation(float(total[0]), float(total[1]), (float(bias[0, 0]), float(bias[1, 0])), failed)


def _bias(criterion: LaplaceCriterion, best: Optimum, growth: Sequence[Floats]) -> Floats:
    """Steps to the likelihood's optimum in the logs of clients' and clusters' standard deviations, with standard errors."""
    steps = []
    for (_, at), slope in zip(criterion.parameters.split(np.arange(len(best.x))), growth, strict=True):
        x, H = best.x[at], best.hessian[np.ix_(at, at)]
        curvature = float(x @ H @ x)  # of the criterion, which is -2 log-likelihood, by the log of a factor
        steps.append(2 * slope / curvature if curvature > 0 else np.zeros(2))
    return np.array(steps)


def _overstates(criterion: LaplaceCriterion, total: Floats, errors: float = 2.0) -> bool:
    """Whether the approximation exceeds the log-likelihood by so much that an optimum of it means nothing.

    The estimate must do so by this many standard errors.
    """
    groups = criterion.tree.n_clients if criterion.shape.client else criterion.tree.n_clusters
    return bool(total[0] + errors * total[1] < -max(NOTICED, OVERSTATED * groups))


def error_at_mode(
    criterion: LaplaceCriterion, x: Floats, top: UpperPosterior, undecided: Callable[..., bool] = lambda *_: False
) -> tuple[Floats, Floats, Floats]:
    """The error of the approximation at ``x``, where it was last evaluated; ``top`` are the upper levels there.

    Returns three estimates with their standard errors: the log-likelihood by quadrature less Laplace's; and for clients and
    for clusters the derivative of the log-likelihood by the log of a factor of the level's standard deviations.

    The sample of clusters doubles while the estimates are ``undecided``, or may or may not be an overstatement.
    """
    quick = _ClusterIntegrals(criterion, x, top, careful=False)
    while not quick.asked.all():
        estimates = quick.estimates
        if _overstates(criterion, estimates[0], -2.0) == _overstates(criterion, estimates[0]) and not undecided(*estimates):
            break
        quick.extend(2 * int(quick.asked.sum()))
    if _overstates(criterion, quick.estimates[0]) or criterion.largest_deviation(x) > TOO_LARGE:
        return _ClusterIntegrals(criterion, x, top, careful=True).estimates
    return quick.estimates


class _ClusterIntegrals:
    """Integrals of a seeded sample of clusters, by quick rules or careful ones; ``asked (k,)`` are those in the sample."""

    def __init__(self, criterion: LaplaceCriterion, x: Floats, top: UpperPosterior, *, careful: bool) -> None:
        self.network, (S_client, (S_cluster,)) = criterion.network, criterion.covariances(x)
        self.top, self.careful, self.A = top, careful, factor(S_cluster)
        self.inner = Rule.over(factor(S_client).shape[2], CLIENTS if careful else QUICK)
        self.outer = Rule.over(self.A.shape[1], CLUSTERS if careful else QUICK)
        k = self.network.tree.n_clusters
        self.asked, self.errors = np.zeros(k, dtype=bool), np.zeros((max(len(self.inner.sets), len(self.outer.sets)), k))
        self.client, self.cluster = np.zeros(k), np.zeros(k)
        self.mode = top.force @ self.A
        precision = np.eye(self.outer.r) + self.A.T @ top.C @ self.A
        self.root = np.sqrt(top.dispersion) * np.linalg.inv(np.linalg.cholesky(precision)).swapaxes(1, 2)
        self.extend(self._first_sample())

    def _first_sample(self) -> int:
        """How many clusters keep the work a share of the fit's."""
        inner, outer = (rule if self.careful else Rule.rough(rule.r) for rule in (self.inner, self.outer))
        work = self.inner.n + (outer.n * (inner.n + 3) if outer.n > 1 else 0)
        exchanges = _SHARES[self.careful] * _PER_EXCHANGE * self.network.exchanges
        return max(_FEW, int(np.ceil(len(self.asked) * exchanges / work)))

    def extend(self, number: int) -> None:
        """Enlarge the sample to ``number`` clusters. A cluster in two directions has the rough rule if that is enough."""
        more = np.zeros(len(self.asked), dtype=bool)
        more[np.random.default_rng(0).permutation(len(more))[:number]] = True
        more &= ~self.asked
        if self.outer.r == 2 and not self.careful:
            span = self._integrate(Rule.rough(2), more)
            self.asked |= more
            more &= span > _SMALL_RANGE * np.abs(self.errors[0])
        if more.any():
            self._integrate(self.outer, more)
        self.asked |= more

    def _integrate(self, outer: Rule, asked: Bools) -> Floats:
        """Integrate ``asked`` clusters; return the range of the logs of each integrand's ratio to a normal density."""
        a, phi = self.mode, self.top.dispersion
        z = np.stack([outer.node(at, 7 * np.arange(len(a))) for at in range(outer.n)])
        points = a + np.einsum("jrs,mjs->mjr", self.root, z)
        reply = self.network.ask(IntegrateAtMode(self.top.wbar + points @ self.A.T, phi, asked, self.careful))
        sizes, totals = (points**2).sum(axis=2), reply.total.reshape(-1, outer.n, len(a))
        fall = ((a**2).sum(axis=1) - sizes) / (2 * phi) + 0.5 * (z**2).sum(axis=2)
        shares = outer.log_means(totals[0] + fall)[1]
        self.client[asked] = (shares * reply.growth).sum(axis=0)[asked]
        self.cluster[asked] = ((shares * sizes).sum(axis=0) / phi - outer.r)[asked]
        for s in range(len(self.errors)):
            means = outer.log_means(totals[s if len(totals) > 1 else 0] + fall)[0]
            self.errors[s, asked] = means[s if len(means) > 1 else 0][asked]
        span: Floats = np.ptp(totals[0] + fall, axis=0)
        return span

    @property
    def estimates(self) -> tuple[Floats, Floats, Floats]:
        """As :func:`error_at_mode`. All clusters have Laplace's approximation to ``cluster``, so only its error is sampled."""
        laplace = ((self.mode**2).sum(axis=1) + (self.root**2).sum(axis=(1, 2))) / self.top.dispersion - self.outer.r
        error, client, cluster = (
            _scaled_up(each[:, self.asked], len(self.asked))
            for each in (self.errors, self.client[None], (self.cluster - laplace)[None])
        )
        return error, client, cluster + np.array([laplace.sum(), 0.0])


def _scaled_up(errors: Floats, k: int) -> Floats:
    """The total over ``k`` clusters and its standard error, from estimates ``(sets, n)`` for some of them."""
    n, batches = errors.shape[1], len(errors) - 1
    totals = k * errors.mean(axis=1)
    variance = (k**2 / n) * (1 - n / k) * float(errors[0].var(ddof=1)) if 1 < n < k else 0.0
    if batches > 1:
        variance += (batches - 1) / batches * float(((totals[1:] - totals[1:].mean()) ** 2).sum())
    return np.array([totals[0], np.sqrt(variance)])
