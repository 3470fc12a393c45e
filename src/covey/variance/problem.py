"""A likelihood as a function of a vector of parameters, and the models and errors that belong to its best point.

The parameters are those of the clients' covariances, of the clusters', and, but for a linear model, of ``wbar``.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace

import numpy as np

from covey._typing import Anything, Floats, Ints
from covey.data import GroupedData
from covey.errors import ConvergenceWarning, DataError, SolverError
from covey.hierarchy import Hierarchy
from covey.losses import Loss, loss_of
from covey.objective import Penalty
from covey.solvers.elimination import Quadratic, solve_symmetric
from covey.solvers.newton import newton
from covey.solvers.result import Convergence, Fit
from covey.variance.components import Components, Learned, Level, Method
from covey.variance.gaussian import Evaluation, Gaussian, invert
from covey.variance.identify import check_classes, check_rank, check_told_apart
from covey.variance.laplace import Laplace
from covey.variance.search import MANY, Optimum
from covey.variance.structure import Shape, Structure, Variation

_BLURRED = 1e-7  # share of the squares about the pooled fit
_LARGE = 3.0  # standard deviation of log-odds or log-means
START = 0.5  # standard deviation of everything that varies, in units of the residual's


@dataclass(frozen=True)
class Sums:
    """All that a linear fit needs of the rows: each client's loss about ``origin (d,)``, sums of log weights and of squares.

    Rows are left behind: tests, bootstraps and updates start from here.
    """

    units: Quadratic
    origin: Floats
    log_weights: float
    squares: float = np.nan

    @classmethod
    def of(cls, data: GroupedData, loss: Loss) -> Sums:
        n, d = data.n_clients, data.n_terms
        at_zero = loss.expand(data, np.zeros((n, d)))
        gram = at_zero.hessian.sum(axis=0)
        check_rank(gram, data.terms)
        # About the pooled fit, so that sums of squares are of residuals and lose no digits to a large mean.
        origin = invert(gram)[0] @ -at_zero.gradient.sum(axis=0)
        here = loss.expand(data, np.tile(origin, (n, 1)))
        log_weights = 0.0 if data.weights is None else float(np.log(data.weights[data.weights > 0]).sum())
        units = Quadratic(here.hessian, -here.gradient, here.value, data.rows_that_count)
        return cls(units, origin, log_weights, 2 * float(at_zero.value.sum()))


class Problem:
    """What the search needs to know, whatever the family."""

    evaluations, exchanges = 0, 0

    def __init__(self, tree: Hierarchy, terms: tuple[str, ...], shape: Shape, rms: Floats) -> None:
        self.tree, self.terms, self.shape = tree, terms, shape
        self.order = shape.order(len(terms))
        self.back = np.argsort(self.order)
        self.structure = Structure.of(shape, 1.0 / np.where(rms > 0, rms, 1.0), tree.n_clusters)
        self.widths = (self.structure.client.width, self.structure.cluster.width)

    def evaluate(self, x: Floats) -> Evaluation:
        """The criterion at ``x`` with all that comes with it."""
        raise NotImplementedError

    def criterion(self, x: Floats) -> tuple[float, Floats]:
        """The value and gradient, for the search; infinite where no mode is found."""
        try:
            here = self.evaluate(x)
        except (SolverError, np.linalg.LinAlgError):
            return np.inf, np.zeros_like(x)
        return here.value, self.flat(x, here.client, here.cluster, here.centre)

    def covariances(self, x: Floats) -> tuple[Floats, Floats]:
        """Of clients and clusters, in the working order of terms."""
        own, above = self.structure.split(x)
        d = len(self.terms)
        return self.structure.client.covariances(own, d), self.structure.cluster.covariances(above, d)

    def flat(self, x: Floats, client: Floats, cluster: Floats, centre: Floats) -> Floats:
        """Derivatives in the covariances, and in ``wbar``, as derivatives in the parameters."""
        (own, above), (below, over) = self.structure.split(x), (self.structure.client, self.structure.cluster)
        slopes = below.gradient(own, below.pick(client)), over.gradient(above, over.pick(cluster))
        return np.concatenate([*slopes, self.centre_slope(centre)])

    def forget(self) -> None:
        """Evaluate the next point, far from the last, without regard to it."""

    def centre_slope(self, centre: Floats) -> Floats:
        return centre

    def start(self, client: float, cluster: float) -> Floats:
        """Everything that may vary does, by as much at each level."""
        return np.concatenate([self.structure.client.even(client), self.structure.cluster.even(cluster)])

    def approach(self, x: Floats, steps: int) -> tuple[Floats, Floats]:
        """Cheap steps from ``x``, as long as they lead down, and about how curved the criterion is where they end.

        There are ``steps`` of them, and more as long as variances still change by much.
        """
        here = self.evaluate(x)
        for step in range(5 * steps):
            moved = [level.nearer(own, G + up, up) for level, own, G, up in self._with_slopes(x, here)]
            ahead = np.concatenate([*moved, self.nearer_centre(x, here)])
            there = self.evaluate(ahead)
            if not there.value < here.value:
                break
            far = (np.abs(ahead) > 2.0 * np.abs(x))[: self.structure.n_parameters].any()
            x, here = ahead, there
            if step + 1 >= steps and not far:
                break
        units = self.tree.n_clients, self.tree.n_clusters
        parts = zip(self._with_slopes(x, here), units, strict=True)
        curves = [level.curvature(own, G + up, count) for (level, own, G, up), count in parts]
        return x, np.concatenate([*curves, np.full(len(x) - self.structure.n_parameters, 2.0)])

    def _with_slopes(self, x: Floats, here: Evaluation) -> list[tuple[Variation, Floats, Floats, Floats]]:
        parts = zip(self.by_level(x), (here.client, here.cluster), here.pull, strict=True)
        return [(level, own, level.pick(G), level.pick(up)) for (level, own), G, up in parts]

    def by_level(self, x: Floats) -> list[tuple[Variation, Floats]]:
        """Clients' and clusters' variation, each with its parameters."""
        return list(zip((self.structure.client, self.structure.cluster), self.structure.split(x), strict=True))

    def joined(self, level: str, other: Problem, x: Floats) -> Floats:
        """The parameters ``x`` of another problem, that without a level, with a little variation at it."""
        own = (self.structure.client if level == "client" else self.structure.cluster).even(0.1)
        rest = x[: other.structure.n_parameters]
        return np.concatenate([own, rest] if level == "client" else [rest, own])

    def may_have_others(self, x: Floats) -> bool:
        """Whether there may be other optima than one near ``x``."""
        return True

    def doubtful(self, x: Floats) -> bool:
        """Whether an optimum, proven as it may be, is probably not the only one."""
        return False

    def far(self, x: Floats, factor: float) -> list[Floats]:
        """Points far from ``x``: one level's variation much larger or smaller; much instead of none."""
        points, first = [], 0
        for level, own in self.by_level(x):
            if len(own):
                others = [factor * own, own / factor] if own.any() else [level.even(1.0)]
                points += [np.concatenate([x[:first], other, x[first + len(own) :]]) for other in others]
            first += len(own)
        return points

    def free(self, x: Floats) -> Anything:
        """Which parameters move anything: not those of variances at zero, a full covariance's only if all of it is zero."""
        free = np.ones(len(x), dtype=bool)
        at = 0
        for level, own in self.by_level(x):
            parts = own.reshape(level.count, -1)
            held = ~parts.any(axis=1, keepdims=True) if level.kind == "full" else parts == 0
            free[at : at + len(own)] = ~np.broadcast_to(held, parts.shape).ravel()
            at += len(own)
        return free

    def nearer_centre(self, x: Floats, here: Evaluation) -> Floats:
        return x[self.structure.n_parameters :]

    def names(self, terms: Ints) -> list[str]:
        """Of terms in the working order."""
        return [self.terms[at] for at in self.order[terms]]

    def finish(self, best: Optimum, notes: tuple[str, ...]) -> tuple[Fit, Learned]:
        """The models at the best point, and what is known of them."""
        raise NotImplementedError

    def levels(self, best: Optimum, scale: float, shift: Floats, errors: Floats) -> tuple[Level, Level]:
        """Both levels in the units of the response; ``shift`` is the gradient of the log of ``scale``."""
        return self._level(0, best, scale, shift, errors), self._level(1, best, scale, shift, errors)

    def _level(self, which: int, best: Optimum, scale: float, shift: Floats, errors: Floats) -> Level:
        level, x = (self.structure.client, self.structure.cluster)[which], self.structure.split(best.x)[which]
        L = level.factors(x)
        S = L @ L.swapaxes(1, 2)
        sd = np.sqrt(scale * np.einsum("maa->ma", S))
        first = which * self.structure.client.n_parameters
        sd_error = np.full(sd.shape, np.nan)
        known = np.nonzero(sd) if len(best.x) <= MANY else ((), ())  # without a Hessian there are no errors
        for m, a in zip(*known, strict=True):
            # log sd = (log S_aa + log scale) / 2, and its error follows from that of the parameters.
            G = np.zeros_like(S)
            G[m, a, a] = 0.5 / S[m, a, a]
            slope = 0.5 * shift
            slope[first : first + level.n_parameters] += level.gradient(x, G)
            sd_error[m, a] = sd[m, a] * np.sqrt(max(float(slope @ errors @ slope), 0.0))
        where = np.argsort(self.order[level.terms])
        names = tuple(self.names(level.terms[where]))
        return Level(names, level.kind, scale * S[:, where[:, None], where], sd_error[:, where])

    def shares(self, levels: tuple[Level, Level], moments: Floats, residual: float) -> tuple[float, float, float]:
        """How the variance of a row's margin divides, on average; ``moments (d, d)`` is the mean of ``x x'`` over rows."""
        client, cluster = (float((level.embedded(self.terms).mean(axis=0) * moments).sum()) for level in levels)
        total = client + cluster + residual
        return cluster / total, client / total, residual / total

    def account(self, best: Optimum, method: str) -> Convergence:
        message = f"{method} within {best.decrement:.0e} of its optimum after {self.evaluations} evaluations"
        gap = best.decrement if np.isfinite(best.decrement) else None
        norm = float(np.linalg.norm(best.gradient))
        return Convergence(method, best.converged, self.evaluations, self.exchanges, best.value, norm, gap, message)


class Linear(Problem):
    """REML or ML of a linear model, from its clients' sums."""

    def __init__(self, sums: Sums, tree: Hierarchy, terms: tuple[str, ...], shape: Shape, *, reml: bool) -> None:
        units = sums.units
        mean_squares = np.einsum("iaa->a", units.C) / max(float(units.n.sum()), 1.0)
        super().__init__(tree, terms, shape, np.sqrt(mean_squares))
        self.sums = sums
        order = self.order
        if (order != np.arange(len(order))).any():
            units = replace(
                units, C=np.ascontiguousarray(units.C[:, order[:, None], order]), r=np.ascontiguousarray(units.r[:, order])
            )
        self.marginal = Gaussian(units, tree, reml, sums.log_weights, self.widths)

    def evaluate(self, x: Floats) -> Evaluation:
        self.evaluations += 1
        self.exchanges += 2
        return self.marginal(*self.covariances(x))

    def blurred(self, best: Optimum) -> bool:
        """Whether so little is left over that the sums, which are of squares about the pooled fit, have lost its digits."""
        top = self.evaluate(best.x).top
        return bool(top.dispersion * top.dof < _BLURRED * 2 * float(self.sums.units.c.sum()))

    def sharpened(self, data: GroupedData, loss: Loss) -> None:
        """From now on by each client's own fit."""
        units = self.sums.units
        fits = solve_symmetric(units.C, units.r)
        squares = 2 * loss.value(data, self.sums.origin + fits)
        self.marginal = replace(self.marginal, alone=(np.ascontiguousarray(fits[:, self.order]), squares))

    def finish(self, best: Optimum, notes: tuple[str, ...]) -> tuple[Fit, Learned]:
        here, back, origin = self.evaluate(best.x), self.back, self.sums.origin
        top, s2 = here.top, here.top.dispersion
        theta = self.marginal.theta(self.covariances(best.x)[0], top)
        method: Method = "REML" if self.marginal.reml else "ML"
        end = self.account(best, method)
        fit = Fit(origin + theta[:, back], origin + top.w[:, back], origin + top.wbar[back], end)
        below, above = (-pull / top.dof for pull in here.pull)
        levels = self.levels(best, s2, self.flat(best.x, below, above, np.empty(0)), parameter_covariance(best))
        parameters = len(self.terms) + self.structure.n_parameters + 1
        rows = int(self.sums.units.n.sum())
        shares = self.shares(levels, self.sums.units.C.sum(axis=0) / rows, s2)
        components = Components(method, *levels, s2, -0.5 * best.value, parameters, rows, notes, shares=shares)
        covariance = s2 * invert(top.D.sum(axis=0))[0][back[:, None], back]
        units, log_weights = self.sums.units, self.sums.log_weights
        return fit, Learned.of(components, self.terms, self.tree, covariance, units, origin, log_weights)


class Generalised(Problem):
    """The Laplace approximation for any other family, from the rows."""

    def __init__(self, data: GroupedData, loss: Loss, shape: Shape, *, check: bool = True) -> None:
        weights = np.ones(data.n_rows) if data.weights is None else data.weights
        self.moments = (data.X.T * weights) @ data.X / weights.sum()
        self.residual = loss.residual(data.y)
        super().__init__(data.hierarchy, data.terms, shape, np.sqrt(np.diag(self.moments)))
        pooled, order, n, d = data.pooled(), self.order, data.n_clients, data.n_terms
        if check:
            gram = loss_of("gaussian").hessian(data, np.zeros((n, d)))
            check_rank(gram.sum(axis=0), data.terms)
            units = Quadratic(gram, np.zeros((n, d)), np.zeros(n), data.rows_that_count)
            check_told_apart(units, self.tree, self.terms, shape)
        if check and loss.name == "bernoulli":
            check_classes(data, shape)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # of a start
            alone = newton(pooled, loss, Penalty.of(pooled.hierarchy))
        if "separated" in alone.convergence.message:
            _refuse_separated(alone.convergence.message)
        self.rows = int(data.rows_that_count.sum())
        self.constant = 2 * loss.constant(data)
        if (order != np.arange(d)).any():
            data = replace(data, X=np.ascontiguousarray(data.X[:, order]), terms=tuple(data.terms[at] for at in order))
        self.marginal = Laplace(data, loss, self.widths, tol=1e-9 + 1e-10 * float(np.sqrt(data.n_rows)))
        # The global model in units of its own uncertainty, so that one step suits it and the covariances.
        self.middle, self.half = alone.wbar[order], np.eye(d)
        begin = self.evaluate(self.start(START, START)).top
        values, vectors = np.linalg.eigh(invert(begin.D.sum(axis=0))[0])
        self.half = vectors * np.sqrt(np.maximum(values, 0.0))

    def evaluate(self, x: Floats) -> Evaluation:
        self.evaluations += 1
        with np.errstate(over="ignore", invalid="ignore"):
            here = self.marginal(*self.covariances(x), self.centre(x))
        self.exchanges += self.marginal.exchanges
        return replace(here, value=here.value + self.constant)

    def centre(self, x: Floats) -> Floats:
        """The global model, in the working order of terms."""
        return np.asarray(self.middle + self.half @ x[self.structure.n_parameters :])

    def forget(self) -> None:
        self.marginal.forget()

    def centre_slope(self, centre: Floats) -> Floats:
        return np.asarray(centre @ self.half)

    def may_have_others(self, x: Floats) -> bool:
        """Clients with many rows for each of their coefficients leave Laplace's likelihood the shape of a Gaussian's."""
        return self.doubtful(x) or self.rows < 5 * self.tree.n_clients * max(self.structure.client.q, 1)

    def doubtful(self, x: Floats) -> bool:
        """With spreads so large that most clients are all but certain, Laplace's likelihood tends to have several tops."""
        return any(
            (np.abs(level.factors(own)) / level.size[:, None] > _LARGE).any() for level, own in self.by_level(x) if level.q
        )

    def nearer_centre(self, x: Floats, here: Evaluation) -> Floats:
        """A Newton step for the global model, but for what the determinants add."""
        whole, _ = invert(here.top.D.sum(axis=0))
        return np.asarray(np.linalg.solve(self.half, self.centre(x) + whole @ here.top.force.sum(axis=0) - self.middle))

    def joined(self, level: str, other: Problem, x: Floats) -> Floats:
        self.marginal.forget()
        wbar = other.centre(x)[other.back][self.order] if isinstance(other, Generalised) else self.middle
        return np.concatenate([super().joined(level, other, x), np.linalg.solve(self.half, wbar - self.middle)])

    def start(self, client: float, cluster: float) -> Floats:
        self.marginal.forget()
        return np.concatenate([super().start(client, cluster), np.zeros(len(self.terms))])

    def finish(self, best: Optimum, notes: tuple[str, ...]) -> tuple[Fit, Learned]:
        top, back = self.evaluate(best.x).top, self.back
        state, wbar = self.marginal.state.now, self.centre(best.x)[self.back]
        theta = state.theta[:, back]
        fit = Fit(theta, top.w[:, back], wbar, self.account(best, "Laplace"))
        cut = self.structure.n_parameters
        errors = parameter_covariance(best, cut)
        levels = self.levels(best, 1.0, np.zeros(len(best.x)), errors)
        shares = self.shares(levels, self.moments, self.residual)
        parameters = len(wbar) + cut
        components = Components("Laplace", *levels, None, -0.5 * best.value, parameters, self.rows, notes, shares=shares)
        spread = self.half @ errors[cut:, cut:] @ self.half.T if len(best.x) <= MANY else invert(top.D.sum(axis=0))[0]
        covariance = spread[back[:, None], back]
        # To second order about the mode, where the loss's slope is minus the force that holds a client: b = H theta + u.
        H = np.ascontiguousarray(state.here.hessian[:, back[:, None], back])
        b = np.einsum("iab,ib->ia", H, theta) + state.u[:, back]
        units = Quadratic(H, b, np.zeros(len(H)), self.marginal.data.rows_that_count)
        return fit, Learned.of(components, self.terms, self.tree, covariance, units, np.zeros(len(wbar)))


def _refuse_separated(message: str) -> None:
    along = message.split("separated ", 1)[1].split(":", 1)[0]
    raise DataError(
        f"The responses are perfectly separated {along}: some coefficient is infinite, whatever varies; drop terms or merge "
        "categories, or give gamma and a ridge."
    )


def parameter_covariance(best: Optimum, variances: int | None = None) -> Floats:
    """From the curvature of twice the negative log-likelihood; none along what is held at zero.

    Only the first ``variances`` parameters are held there: a flat direction of the others is one of which nothing is known.
    """
    if len(best.x) > MANY:
        return np.zeros_like(best.hessian)
    values, vectors = np.linalg.eigh(np.nan_to_num(best.hessian))
    floor = 1e-7 * max(float(values.max(initial=0.0)), 1e-30)
    unknown = (vectors[variances:] ** 2).sum(axis=0) > 0.5 if variances is not None else np.zeros(len(values), dtype=bool)
    inverse = np.where((values > floor) | unknown, 2.0 / np.maximum(values, 1e-7 * floor), 0.0)
    return np.asarray((vectors * inverse) @ vectors.T)
