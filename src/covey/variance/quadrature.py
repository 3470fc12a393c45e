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

With many clusters a seeded sample of them is enough. If random draws were used, their error is estimated by the jackknife: the
result is computed again without each of some batches of draws. The draws of a client depend on its rows, not on its node.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from covey.variance.columns import CountingNetwork, client_rows
from covey.variance.laplace_likelihood import LaplaceCriterion, ModeState
from covey.variance.linear_likelihood import Criterion
from covey.variance.search import Optimum
from covey.variance.upper import UpperPosterior

# Nodes of a Gauss-Hermite rule along each of one or two directions, and draws if there are more. The first number is for a
# quick check. The others are for a careful one, which follows if the result looks bad: integrands are then far from normal. The
# second is for clusters, which need fewer nodes than clients, because they have more rows.
_NODES = {1: (7, 15, 41), 2: (5, 7, 15)}
_DRAWS = 24, 256, 1024
_BATCHES, _POOL = 8, 4093  # batches for the jackknife; the pool that the draws of a client are from
_FEW = 8  # clusters; fewer are not sampled
_SHARES = 0.2, 0.7  # the largest share of the fit's work: if one direction varies at each level, and otherwise
_PER_EXCHANGE = 1.5  # the work of an exchange of the fit, in evaluations of all rows' losses
_FARTHEST = 1e9  # a sum of log-integrals this far from the mode's contributes nothing


@dataclass(frozen=True)
class Rule:
    """Nodes for a mean over a standard normal distribution in ``r`` directions, with the logs of their weights ``(n,)``.

    ``z`` is ``(n, r)`` for a Gauss-Hermite rule. For a rule with random draws it is a pool of draws. Nodes belong to a
    ``batch (n,)``; a rule without random draws has one.
    """

    z: Floats
    log_weight: Floats
    batch: Ints

    @classmethod
    def over(cls, r: int, care: int = 0) -> Rule:
        if r == 0:
            return cls(np.zeros((1, 0)), np.zeros(1), np.zeros(1, dtype=np.int64))
        if r in _NODES:
            z, weight = np.polynomial.hermite_e.hermegauss(_NODES[r][care])
            grid = np.stack(np.meshgrid(*[z] * r), axis=-1).reshape(-1, r)
            weights = np.prod(np.stack(np.meshgrid(*[weight / weight.sum()] * r), axis=-1), axis=-1).ravel()
            return cls(grid, np.log(weights), np.zeros(len(grid), dtype=np.int64))
        pool, draws = np.random.default_rng(0).normal(size=(_POOL, r)), _DRAWS[care]
        return cls(pool, np.full(draws, -np.log(draws)), np.arange(draws) // 2 % _BATCHES)

    @property
    def n(self) -> int:
        return len(self.log_weight)

    @property
    def r(self) -> int:
        return int(self.z.shape[1])

    def node(self, at: int, keys: Ints) -> Floats:
        """Node ``at`` of each unit, ``(len(keys), r)``. Random draws depend on its key, and come in pairs ``z, -z``."""
        if len(self.z) == self.n:
            return np.broadcast_to(self.z[at], (len(keys), self.r))
        return np.asarray((1 - 2 * (at % 2)) * self.z[(keys + at // 2) % _POOL])

    @property
    def sets(self) -> list[Anything]:
        """Which nodes each estimate uses, boolean ``(n,)``: first all of them, then all but one batch each."""
        whole, count = np.ones(self.n, dtype=bool), int(self.batch.max()) + 1
        return [whole, *(self.batch != b for b in range(count))] if count > 1 else [whole]

    def log_means(self, logs: Floats) -> tuple[Floats, Floats]:
        """For ``logs (n, ...)``: the logs of the means of ``exp(logs)`` by each set, ``(sets, ...)``; each node's share."""
        added = logs + self.log_weight.reshape(-1, *[1] * (logs.ndim - 1))
        top = added.max(axis=0)
        parts = np.exp(added - top)
        means = [top + np.log(parts[used].sum(axis=0) * (len(used) / used.sum())) for used in self.sets]
        return np.stack(means), parts / parts.sum(axis=0)


def factor(S: Floats) -> Floats:
    """``L (..., d, r)`` with ``L L' = S``; ``r`` is the largest rank of the covariances ``S (..., d, d)``."""
    size = np.sqrt(np.maximum(np.einsum("...aa->...a", S), 0.0))
    unit = np.where(size > 0, size, 1.0)  # a rank must not depend on the units of the columns
    values, vectors = np.linalg.eigh(S / (unit[..., :, None] * unit[..., None, :]))
    values = np.where(values > 1e-12 * values.max(initial=0.0), values, 0.0)
    r = int((values > 0).sum(axis=-1).max(initial=0))
    d = S.shape[-1]
    return np.asarray((size[..., :, None] * vectors * np.sqrt(values)[..., None, :])[..., d - r :])


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
        rule, shape = Rule.over(L.shape[2], 2 * self.careful), (len(self.w), tree.n_clusters)
        total, growth = np.zeros((len(rule.sets), *shape)), np.zeros(shape)
        if keep.any():
            data, now = _some_clients(client_rows(node, mode.order.terms), keep), mode.state.now
            L = L[tree.parent[keep]] if len(L) > 1 else np.broadcast_to(L, (data.n_clients, *L.shape[1:]))
            b = np.einsum("iar,ia->ir", L, now.u[keep])
            clients = _Clients.at_mode(data, node.loss, L, self.phi, now.theta[keep], b, mode.order.width)
            laplace, sum_up = clients.laplace, data.hierarchy.sum_up
            for m, w in enumerate(self.w):
                logs, by = clients.log_integrals(w[data.hierarchy.parent], rule, len(self.w) > 1)
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

    @property
    def keys(self) -> Ints:
        """A number for each client that depends on its rows only, ``(n,)``."""
        bits = np.ascontiguousarray(self.data.X).view(np.uint64) >> np.uint64(20)
        mixed = (bits * (2 * np.arange(bits.shape[1], dtype=np.uint64) + np.uint64(0x9E3779B97F4A7C15))).sum(axis=1)
        return np.asarray(np.add.reduceat(np.append(mixed, 0), self.data.client_ptr[:-1]) % _POOL).astype(np.int64)

    def log_integrals(self, w: Floats, rule: Rule, moved: bool) -> tuple[Floats, Floats]:
        """``log I(w)`` by each set of the rule ``(sets, n)``, and its derivative by the log of a factor of ``L``, ``(n,)``.

        ``w (n, d)`` is where each client's cluster is.
        """
        b, K = self.b, self.precision(self.hessian)
        if moved and rule.r:
            b, K = self._centre(w, K)
        theta = w + self.along(b)
        lowest = self.height(theta, b)
        # Any square root of the inverse of K will do. This one is upper triangular.
        root = np.sqrt(self.phi) * np.linalg.inv(np.linalg.cholesky(K)).swapaxes(1, 2)
        logs, sizes = np.empty((rule.n, len(b))), np.empty((rule.n, len(b)))
        keys = self.keys if rule.r not in _NODES else np.zeros(len(b), dtype=np.int64)
        for at in range(rule.n):
            z = rule.node(at, keys)
            step = (root @ z[:, :, None])[:, :, 0]
            logs[at] = lowest - self.height(theta + self.along(step), b + step) + 0.5 * (z**2).sum(axis=1)
            sizes[at] = ((b + step) ** 2).sum(axis=1)
        means, shares = rule.log_means(logs)
        return means - lowest - 0.5 * np.linalg.slogdet(K)[1], (shares * sizes).sum(axis=0) / self.phi - rule.r

    def along(self, b: Floats) -> Floats:
        """``L b``, ``(n, d)``."""
        return (self.L @ b[:, :, None])[:, :, 0]

    def _centre(self, w: Floats, K: Floats) -> tuple[Floats, Floats]:
        """A point near the mode of each client whose cluster moved to ``w``, and ``K`` there.

        It takes two Newton steps. The first uses the Hessian at the old mode. A second step that leads up is not taken.
        """
        away = np.einsum("iar,iab,ib->ir", self.L[:, : self.q], self.hessian, w - (self.theta - self.along(self.b)))
        b = self.b - np.linalg.solve(K, away[:, :, None])[:, :, 0]
        theta = w + self.along(b)
        here = expand(self.data, self.loss, theta, self.q)
        K = self.precision(hessians(self.data, self.loss, here, self.q).leading(self.q))
        slope = np.einsum("iar,ia->ir", self.L, here.gradient) + b
        ahead = b - np.linalg.solve(K, slope[:, :, None])[:, :, 0]
        falls = self.height(w + self.along(ahead), ahead) < self.height(theta, b)
        return np.where(falls[:, None], ahead, b), K


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
    total, *growth = error_at_mode(criterion, best.x, top)
    bias = _bias(criterion, best, growth)
    if total[1] > 0 and (np.abs(bias[:, 0]) > BIASED).any():  # in a sample of clusters, perhaps by chance
        total, *growth = _integrated(criterion, best.x, top, careful=False, sample=False)
        bias = _bias(criterion, best, growth)
    biased = abs(total[0]) > NOTICED and bool((np.abs(bias[:, 0]) > BIASED + 2 * bias[:, 1]).any())
    failed = best.failed or biased or criterion.largest_deviation(best.x) > TOO_LARGE or _overstates(criterion, total)
    return Approximation(float(total[0]), float(total[1]), (float(bias[0, 0]), float(bias[1, 0])), failed)


def _bias(criterion: Criterion, best: Optimum, growth: Sequence[Floats]) -> Floats:
    """Steps to the likelihood's optimum in the logs of clients' and clusters' standard deviations, with standard errors."""
    steps = []
    for (_, at), slope in zip(criterion.parameters.split(np.arange(len(best.x))), growth, strict=True):
        x, H = best.x[at], best.hessian[np.ix_(at, at)]
        curvature = float(x @ H @ x)  # of the criterion, which is -2 log-likelihood, by the log of a factor
        steps.append(2 * slope / curvature if curvature > 0 else np.zeros(2))
    return np.array(steps)


def _overstates(criterion: Criterion, total: Floats) -> bool:
    """Whether the approximation exceeds the log-likelihood by so much that an optimum of it means nothing."""
    groups = criterion.tree.n_clients if criterion.shape.client else criterion.tree.n_clusters
    return bool(total[0] + 2 * total[1] < -max(NOTICED, OVERSTATED * groups))


def error_at_mode(criterion: LaplaceCriterion, x: Floats, top: UpperPosterior) -> tuple[Floats, Floats, Floats]:
    """The error of the approximation at ``x``, where it was last evaluated; ``top`` are the upper levels there.

    Returns three estimates with their standard errors: the log-likelihood by quadrature less Laplace's; and for clients and
    for clusters the derivative of the log-likelihood by the log of a factor of the level's standard deviations.
    """
    quick = _integrated(criterion, x, top, careful=False)
    if _overstates(criterion, quick[0]) or criterion.largest_deviation(x) > TOO_LARGE:
        return _integrated(criterion, x, top, careful=True)
    return quick


def _integrated(
    criterion: LaplaceCriterion, x: Floats, top: UpperPosterior, *, careful: bool, sample: bool = True
) -> tuple[Floats, Floats, Floats]:
    """As :func:`error_at_mode`, by a quick or a careful rule, from a sample of many clusters or from all of them."""
    network, (S_client, (S_cluster,)) = criterion.network, criterion.covariances(x)
    phi, k, A = top.dispersion, network.tree.n_clusters, factor(S_cluster)
    inner, outer = Rule.over(factor(S_client).shape[2], 2 * careful), Rule.over(A.shape[1], int(careful))
    asked = _sample(network, inner, outer, careful) if sample else np.ones(k, dtype=bool)

    z = np.stack([outer.node(at, 7 * np.arange(k)) for at in range(outer.n)])
    a = top.force @ A
    root = np.sqrt(phi) * np.linalg.inv(np.linalg.cholesky(np.eye(outer.r) + A.T @ top.C @ A)).swapaxes(1, 2)
    points = a + np.einsum("jrs,mjs->mjr", root, z)
    reply = network.ask(IntegrateAtMode(top.wbar + points @ A.T, phi, asked, careful))

    sizes, totals = (points**2).sum(axis=2), reply.total.reshape(-1, outer.n, k)
    fall = ((a**2).sum(axis=1) - sizes) / (2 * phi) + 0.5 * (z**2).sum(axis=2)
    shares = outer.log_means(totals[0] + fall)[1]
    client, cluster = ((shares * part).sum(axis=0)[None, asked] for part in (reply.growth, sizes / phi - outer.r))
    errors = np.empty((max(len(inner.sets), len(outer.sets)), k))
    for s in range(len(errors)):
        means = outer.log_means(totals[s if len(totals) > 1 else 0] + fall)[0]
        errors[s] = means[s if len(means) > 1 else 0]
    return _scaled_up(errors[:, asked], k), _scaled_up(client, k), _scaled_up(cluster, k)


def _sample(network: CountingNetwork, inner: Rule, outer: Rule, careful: bool) -> Anything:
    """The clusters to integrate, boolean ``(k,)``: all, or a seeded sample that keeps the work a share of the fit's."""
    k, asked = network.tree.n_clusters, np.zeros(network.tree.n_clusters, dtype=bool)
    work = outer.n * (inner.n + (4 if outer.n > 1 else 0))
    share = 1.0 if careful else _SHARES[int(max(inner.r, outer.r) > 1)]
    number = max(_FEW, int(np.ceil(k * share * _PER_EXCHANGE * network.exchanges / work)))
    asked[np.random.default_rng(0).permutation(k)[:number]] = True
    return asked


def _scaled_up(errors: Floats, k: int) -> Floats:
    """The total over ``k`` clusters and its standard error, from estimates ``(sets, n)`` for some of them."""
    n, batches = errors.shape[1], len(errors) - 1
    totals = k * errors.mean(axis=1)
    variance = (k**2 / n) * (1 - n / k) * float(errors[0].var(ddof=1)) if 1 < n < k else 0.0
    if batches > 1:
        variance += (batches - 1) / batches * float(((totals[1:] - totals[1:].mean()) ** 2).sum())
    return np.array([totals[0], np.sqrt(variance)])
