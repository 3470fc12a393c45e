"""A likelihood as a function of a vector of parameters, and the models and errors that belong to its best point.

The parameters are those of the clients' covariances, of the clusters', and, but for a linear model, of ``wbar``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from covey._typing import Anything, Floats, Ints
from covey.errors import DataError, SolverError
from covey.solvers.direct.elimination import Quadratic
from covey.solvers.result import Convergence, Fit
from covey.variance.components import Components, Learned, LevelComponents, Method, Whole
from covey.variance.frame import NonFiniteClients, TermOrder
from covey.variance.gaussian import Evaluation, FinishLinear, GaussianLikelihood, UpperPosterior, below, invert
from covey.variance.laplace import FinishMode, LaplaceLikelihood
from covey.variance.search import MANY, Optimum
from covey.variance.structure import Shape, Structure, Variation
from covey.variance.survey import Survey

_BLURRED = 1e-7  # share of the squares about the pooled fit
_LARGE = 3.0  # standard deviation of log-odds or log-means
_AT_ONCE = 1 << 24  # numbers that nodes keep of their clients for points that are evaluated together
START = 0.5  # standard deviation of everything that varies, in units of the residual's


class Likelihood:
    """What the search needs to know, whatever the family."""

    evaluations = 0

    def __init__(self, known: Survey, shape: Shape, mean_squares: Floats) -> None:
        self.known, self.shape = known, shape
        self.network, self.tree, self.terms = known.network, known.network.tree, known.network.terms
        self.order = shape.order(len(self.terms))
        self.back = np.argsort(self.order)
        rms = np.sqrt(mean_squares)
        self.structure = Structure.of(shape, 1.0 / np.where(rms > 0, rms, 1.0), self.tree.n_clusters)
        self.layout = TermOrder(self.order, self.structure.client.width)

    def evaluate(self, x: Floats) -> Evaluation:
        """The criterion at ``x`` with all that comes with it."""
        raise NotImplementedError

    def criterion(self, x: Floats) -> tuple[float, Floats]:
        """The value and gradient, for the search; infinite where no mode is found."""
        try:
            here = self.evaluate(x)
        except (SolverError, np.linalg.LinAlgError):
            return np.inf, np.zeros_like(x)
        return self.told(x, here)

    def criteria(self, points: Sequence[Floats], *, afresh: bool = False) -> list[tuple[float, Floats]]:
        """The same at several points that do not depend on each other; ``afresh``, each without regard to the one before."""
        found = []
        for x in points:
            if afresh:
                self.forget()
            found.append(self.criterion(x))
        return found

    def told(self, x: Floats, here: Evaluation) -> tuple[float, Floats]:
        return here.value, self.flat(x, here.client, here.cluster, here.centre)

    def covariances(self, x: Floats) -> tuple[Floats, Floats]:
        """Of clients and clusters, in the working order of terms."""
        (own, above), d = self.structure.split(x), len(self.terms)
        S, T = self.structure.client.covariances(own, d), self.structure.cluster.covariances(above, d)
        if not (np.isfinite(S).all() and np.isfinite(T).all()):
            raise SolverError("There is no likelihood at covariances that are not finite.")
        return S, T

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

    def joined(self, level: str, other: Likelihood, x: Floats) -> Floats:
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

    def levels(
        self, best: Optimum, scale: float, shift: Floats, errors: Floats, doubt: float = 0.0
    ) -> tuple[LevelComponents, LevelComponents]:
        """Both levels in the units of the response.

        ``shift`` is the gradient of the log of ``scale``, ``doubt`` the variance that this log has at given parameters.
        """
        return self._level(0, best, scale, shift, errors, doubt), self._level(1, best, scale, shift, errors, doubt)

    def _level(self, which: int, best: Optimum, scale: float, shift: Floats, errors: Floats, doubt: float) -> LevelComponents:
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
            sd_error[m, a] = sd[m, a] * np.sqrt(max(float(slope @ errors @ slope), 0.0) + 0.25 * doubt)
        where = np.argsort(self.order[level.terms])
        names = tuple(self.names(level.terms[where]))
        return LevelComponents(names, level.kind, scale * S[:, where[:, None], where], sd_error[:, where])

    def shares(
        self, levels: tuple[LevelComponents, LevelComponents], moments: Floats, residual: float
    ) -> tuple[float, float, float]:
        """How the variance of a row's margin divides, on average; ``moments (d, d)`` is the mean of ``x x'`` over rows."""
        client, cluster = (float((level.embedded(self.terms).mean(axis=0) * moments).sum()) for level in levels)
        total = client + cluster + residual
        return cluster / total, client / total, residual / total

    def account(self, best: Optimum, method: str) -> Convergence:
        message = f"{method} within {best.decrement:.0e} of its optimum after {self.evaluations} evaluations"
        gap = best.decrement if np.isfinite(best.decrement) else None
        norm = float(np.linalg.norm(best.gradient))
        spent = self.network.exchanges
        return Convergence(method, best.converged, self.evaluations, spent, best.value, norm, gap, message)

    def learned(self, components: Components, covariance: Floats, top: UpperPosterior, S: Floats, origin: Floats) -> Learned:
        """What the coordinator knows, without the clients' sums; covariances in the working order."""
        back, d = self.back, len(self.terms)
        s2 = 1.0 if components.residual is None else components.residual
        told = s2 * below(top.C, S, covariance / s2)[:, back[:, None], back]
        nothing = Quadratic(np.empty((0, d, d)), np.empty((0, d)), np.empty(0), np.empty(0))
        whole = Whole(self.tree.n_clients, told, self.known.flat)
        learned = Learned.of(
            components, self.terms, self.tree, covariance[back[:, None], back], nothing, origin, self.known.log_weights
        )
        return replace(learned, whole=whole)


class LinearLikelihood(Likelihood):
    """REML or ML of a linear model, from its clients' sums."""

    def __init__(self, known: Survey, shape: Shape, *, reml: bool) -> None:
        self.rows = float(known.above.n.sum())
        self.gram = known.above.C.sum(axis=0)
        super().__init__(known, shape, np.diag(self.gram) / max(self.rows, 1.0))
        self.marginal = GaussianLikelihood(self.network, self.layout, reml, known.log_weights)
        self.seen: list[tuple[bytes, Evaluation]] = []

    def evaluate(self, x: Floats) -> Evaluation:
        for at, here in self.seen:
            if at == x.tobytes():
                return here
        return self._evaluate([x])[0]

    def criteria(self, points: Sequence[Floats], *, afresh: bool = False) -> list[tuple[float, Floats]]:
        """In as many exchanges as one of them, if there is a likelihood at all of them."""
        n, d = self.tree.n_clients, len(self.terms)
        size = max(1, _AT_ONCE // (n * d * (d + 1)))
        found: list[tuple[float, Floats]] = []
        for first in range(0, len(points), size):
            part = points[first : first + size]
            try:
                found += [self.told(x, here) for x, here in zip(part, self._evaluate(part), strict=True)]
            except (SolverError, np.linalg.LinAlgError):
                found += super().criteria(part)
        return found

    def _evaluate(self, points: Sequence[Floats]) -> list[Evaluation]:
        self.evaluations += len(points)
        found = self.marginal.many([self.covariances(x) for x in points])
        # The search comes back to the best point and to the last.
        both = [*self.seen, *((x.tobytes(), here) for x, here in zip(points, found, strict=True))]
        self.seen = [min(both, key=lambda each: each[1].value), both[-1]]
        return found

    def blurred(self, best: Optimum) -> bool:
        """Whether so little is left over that the sums, which are of squares about the pooled fit, have lost its digits."""
        top = self.evaluate(best.x).top
        return bool(top.dispersion * top.dof < _BLURRED * 2 * float(self.known.above.c.sum()))

    def sharpened(self) -> None:
        """From now on by each client's own fit."""
        self.marginal, self.seen = replace(self.marginal, sharp=True), []

    def finish(self, best: Optimum, notes: tuple[str, ...]) -> tuple[Fit, Learned]:
        here, back, origin = self.evaluate(best.x), self.back, self.known.frame.origin
        top, s2 = here.top, here.top.dispersion
        S_client, S_cluster = self.covariances(best.x)
        refuse_strange(self.network.ask(FinishLinear(S_client, self.layout, top.w)))
        method: Method = "REML" if self.marginal.reml else "ML"
        nowhere = np.empty((0, len(self.terms)))
        fit = Fit(nowhere, origin + top.w[:, back], origin + top.wbar[back], self.account(best, method))
        below, above = (-pull / top.dof for pull in here.pull)
        levels = self.levels(best, s2, self.flat(best.x, below, above, np.empty(0)), parameter_covariance(best))
        parameters = len(self.terms) + self.structure.n_parameters + 1
        shares = self.shares(levels, self.gram / int(self.rows), s2)
        components = Components(method, *levels, s2, -0.5 * best.value, parameters, int(self.rows), notes, shares=shares)
        covariance = s2 * invert(top.D.sum(axis=0))[0]
        return fit, self.learned(components, covariance, top, S_cluster[0], origin)


class GeneralisedLikelihood(Likelihood):
    """The Laplace approximation for any other family, from the rows."""

    def __init__(self, known: Survey, shape: Shape) -> None:
        totals = known.totals
        if totals is None:
            raise SolverError("A model of counts or classes needs the rows that it is to be fitted to.")
        self.moments = totals.gram / totals.weight
        self.mean_response = totals.response / totals.rows
        super().__init__(known, shape, np.diag(self.moments))
        self.rows, self.constant = int(totals.counted), 2 * totals.constant
        tol = 1e-9 + 1e-10 * float(np.sqrt(totals.rows))
        self.marginal = LaplaceLikelihood(
            self.network, self.layout, self.structure.cluster.width, tol, totals.weight, totals.perfect
        )
        self.scale = 1.0  # the standard deviation that covariances are relative to, at the last point
        # The global model in units of its own uncertainty, so that one step suits it and the covariances.
        self.middle, self.half = known.middle[self.order], np.eye(len(self.terms))
        begin = self.evaluate(self.start(START, START)).top
        values, vectors = np.linalg.eigh(invert(begin.D.sum(axis=0))[0])
        self.half = vectors * (np.sqrt(np.maximum(values, 0.0)) * self.scale)

    def evaluate(self, x: Floats) -> Evaluation:
        self.evaluations += 1
        with np.errstate(over="ignore", invalid="ignore"):
            here = self.marginal(*self.covariances(x), self.centre(x))
        self.scale = float(np.sqrt(here.top.dispersion))
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
            (self.scale * np.abs(level.factors(own)) / level.size[:, None] > _LARGE).any()
            for level, own in self.by_level(x)
            if level.q
        )

    def nearer_centre(self, x: Floats, here: Evaluation) -> Floats:
        """A Newton step for the global model, but for what the determinants add."""
        whole, _ = invert(here.top.D.sum(axis=0))
        return np.asarray(np.linalg.solve(self.half, self.centre(x) + whole @ here.top.force.sum(axis=0) - self.middle))

    def joined(self, level: str, other: Likelihood, x: Floats) -> Floats:
        self.marginal.forget()
        wbar = other.centre(x)[other.back][self.order] if isinstance(other, GeneralisedLikelihood) else self.middle
        return np.concatenate([super().joined(level, other, x), np.linalg.solve(self.half, wbar - self.middle)])

    def start(self, client: float, cluster: float) -> Floats:
        self.marginal.forget()
        return np.concatenate([super().start(client, cluster), np.zeros(len(self.terms))])

    def finish(self, best: Optimum, notes: tuple[str, ...]) -> tuple[Fit, Learned]:
        here, back, loss = self.evaluate(best.x), self.back, self.network.loss
        top, phi = here.top, here.top.dispersion
        refuse_strange(self.network.ask(FinishMode()))
        wbar = self.centre(best.x)[back]
        fit = Fit(np.empty((0, len(wbar))), top.w[:, back], wbar, self.account(best, "Laplace"))
        cut = self.structure.n_parameters
        errors = parameter_covariance(best, cut)
        shift, doubt = self._log_dispersion(best.x, here)
        levels = self.levels(best, phi, shift, errors, doubt)
        # Of the responses it needs their mean.
        shares = self.shares(levels, self.moments, loss.residual(np.array([self.mean_response]), phi))
        parameters, residual = len(wbar) + cut + int(loss.dispersion), phi if loss.dispersion else None
        components = Components("Laplace", *levels, residual, -0.5 * best.value, parameters, self.rows, notes, shares=shares)
        known = len(best.x) <= MANY
        covariance = self.half @ errors[cut:, cut:] @ self.half.T if known else phi * invert(top.D.sum(axis=0))[0]
        return fit, self.learned(components, covariance, top, self.covariances(best.x)[1][0], np.zeros(len(wbar)))

    def _log_dispersion(self, x: Floats, here: Evaluation) -> tuple[Floats, float]:
        """The gradient of the logarithm of the dispersion, and its variance at given parameters; zero where it is 1."""
        loss, marginal, phi = self.network.loss, self.marginal, here.top.dispersion
        if not loss.dispersion:
            return np.zeros(len(x)), 0.0
        # The dispersion depends on the objective alone, whose gradient is that of the criterion with the mode held still.
        step = 1e-5 * (marginal.objective - marginal.perfect)
        ends = [loss.profile(marginal.objective + move, marginal.weight, marginal.perfect)[1] for move in (-step, step)]
        rate = float(np.log(ends[1] / ends[0])) / (2 * step)
        client, cluster = (-0.5 * rate * phi * pull for pull in here.pull)
        return self.flat(x, client, cluster, -rate * here.top.force.sum(axis=0)), rate * phi


def problem_for(known: Survey, shape: Shape, *, reml: bool) -> Likelihood:
    """The likelihood of what was surveyed, with these levels and terms varying."""
    return LinearLikelihood(known, shape, reml=reml) if known.network.loss.reml else GeneralisedLikelihood(known, shape)


def refuse_strange(finished: NonFiniteClients) -> None:
    if finished.strange:
        raise DataError("The coefficients are not finite; the columns are probably on extreme scales: standardise them.")


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
