"""Compute degrees of freedom and a sample of the variance components, from the criterion of a linear model.

:class:`Differences` differentiates the gradient of the criterion, and the covariance of the global coefficients, by differences
about the optimum.

:class:`Sample` draws from the posterior distribution of the components by importance sampling. The global model has a flat
prior, so the likelihood of the components is the restricted one. The prior of a covariance ``S`` of ``q`` terms is

    |D|^((q + 1) / 2)        D = mean over units of (S + N_u)^-1

where ``N_u`` is the variance with which the rows determine unit ``u``. With equal units this is the reference prior of Box and
Tiao (1973, chapters 5 and 8): flat in a variance that is small beside ``N``, so that zero has no special role, and flat in the
logarithm of a large one. Intervals with few groups are then close to those of a t distribution with as many degrees of freedom
as there are groups, less one.

With equal units the posterior of ``T = S + N`` is an inverse Wishart distribution, restricted to ``T >= N``. The proposal is
close to it: in the basis where ``N`` is the identity and the sum of squares of the units diagonal, the squared diagonal of the
factor of ``S`` plus 1 is inverse chi-squared, restricted to values above 1, and the other entries are normal. ``N`` and the
sum of squares come from ``bend`` and ``pull`` of the criterion at the optimum (:mod:`.linear_likelihood`): for ``nu``
independent units ``bend = nu T^-1`` and ``pull = T^-1 Q T^-1``. They are defined at a variance of zero too. The weights correct
for unequal units and for the dependence between levels. The residual variance is drawn from its posterior given the others.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import numpy as np
from scipy import special

from covey._typing import Floats
from covey.errors import SolverError
from covey.losses import loss_of
from covey.nodes.network import InMemory
from covey.solvers.direct.elimination import Quadratic, cluster_covariances, invert
from covey.tables.rows import GroupedData
from covey.variance.columns import ClientSums, CountingNetwork, Survey, WorkingColumns
from covey.variance.components import Learned
from covey.variance.freedom import Point, freedom_at_mode
from covey.variance.linear_likelihood import AT_ONCE, Criterion, Evaluation, LinearCriterion
from covey.variance.parameters import Variation
from covey.variance.search import MANY
from covey.variance.uncertainty import Draws, Satterthwaite
from covey.variance.upper import UpperPosterior

POINTS = 32
_STORED = 1 << 18  # with more numbers for all clusters, clusters are so many that their components are well determined
_EFFECTIVE = 0.25  # the least effective number of points, as a share of all
_STEP = 1e-3


def satterthwaite_of(learned: Learned) -> Satterthwaite | None:
    """Degrees of freedom, for a model with the sums of all its clients. None if they cannot be computed."""
    criterion, x, turn = criterion_of(learned)
    with suppress(SolverError, np.linalg.LinAlgError):
        if len(x) <= MANY and learned.components.method == "Laplace":
            return freedom_at_mode(criterion, criterion.covariances(x), turn, learned.dispersion)
        if len(x) <= MANY:
            plan = Differences(criterion, x, turn)
            return plan.result(_evaluated(criterion, plan.points))
    return None


def draws_of(learned: Learned) -> Draws | None:
    """A sample, for a linear model with the sums of all its clients. None if it cannot be drawn."""
    criterion, x, turn = criterion_of(learned)
    with suppress(SolverError, np.linalg.LinAlgError):
        if len(x) <= MANY:
            plan = Sample(criterion, x, turn)
            return plan.result(_tops(criterion, plan.points))
    return None


def uncertainty_at(criterion: LinearCriterion, x: Floats) -> tuple[Satterthwaite | None, Draws | None]:
    """Both at an optimum ``x``, in two exchanges. A model without the sums of all clients has to keep them."""
    k, d, turn = criterion.tree.n_clusters, len(criterion.terms), criterion.survey.columns.basis
    with suppress(SolverError, np.linalg.LinAlgError):
        if len(x) <= MANY:
            first = Differences(criterion, x, turn)
            second = Sample(criterion, x, turn) if POINTS * k * d * d <= _STORED else None
            here = _evaluated(criterion, [*first.points, *(() if second is None else second.points)])
            cut = len(first.points)
            return first.result(here[:cut]), None if second is None else second.result([one.top for one in here[cut:]])
    return None, None


def freedom_of_laplace(criterion: Criterion, x: Floats, dispersion: float) -> Satterthwaite | None:
    """Degrees of freedom after a fit by Laplace's approximation, whose nodes have kept their sums."""
    with suppress(SolverError, np.linalg.LinAlgError):
        if criterion.parameters.n_parameters <= MANY:
            linear = LinearCriterion(criterion.survey, criterion.shape, reml=True)
            linear.at_mode = True
            return freedom_at_mode(linear, criterion.covariances(x), criterion.survey.columns.basis, dispersion)
    return None


def criterion_of(learned: Learned, *, reml: bool | None = None, centred: bool = True) -> tuple[LinearCriterion, Floats, Floats]:
    """The criterion from a model's sums, its parameters, and the matrix that converts coefficients to the user's units.

    Columns are ``centred`` as in the fit. Otherwise an intercept far from the rows would make the problem ill-conditioned.
    ``reml`` is that of the fit unless it is given.
    """
    parts, d, basis = learned.components, len(learned.terms), learned.basis if centred else None
    turn = np.eye(d) if basis is None else basis
    back, units = np.linalg.inv(turn), learned.units
    turned = Quadratic(turn.T @ units.C @ turn, units.r @ turn, units.c, units.n) if basis is not None else units
    survey = survey_of_sums(ClientSums(turned, back @ learned.origin, learned.log_weights), learned)
    criterion = LinearCriterion(survey, learned.shape, reml=parts.method != "ML" if reml is None else reml)
    order, x = criterion.order.terms, []
    levels = (criterion.parameters.client, learned.client_covariances), (criterion.parameters.cluster, learned.cluster.shape)
    for variation, S in levels:
        x.append(variation.of_covariances(variation.pick((back @ S @ back.T)[:, order[:, None], order])))
    return criterion, np.concatenate(x), turn


def survey_of_sums(sums: ClientSums, learned: Learned) -> Survey:
    """The survey of a node that has its clients' sums but no rows."""
    tree, d = learned.tree, len(learned.terms)
    no_rows = GroupedData(np.empty((0, d)), np.empty(0), np.zeros(tree.n_clients + 1, dtype=np.int64), tree, learned.terms)
    network = InMemory.of(no_rows, loss_of("gaussian"))
    columns = replace(WorkingColumns.plain(d), origin=sums.origin)
    network.node.keep(columns)
    network.node.cache["losses"] = (columns.basis, columns.origin), sums.units
    cluster_sums = Quadratic(*(tree.sum_up(part) for part in (sums.units.C, sums.units.r, sums.units.c, sums.units.n)))
    nothing_constant = np.zeros((2, d), dtype=bool)
    return Survey(CountingNetwork(network), columns, cluster_sums, sums.log_weights, np.zeros(d), nothing_constant)


def _evaluated(criterion: LinearCriterion, points: list[Point]) -> list[Evaluation]:
    size = _at_once(criterion)
    return [one for at in range(0, len(points), size) for one in criterion.at_covariances(points[at : at + size])]


def _tops(criterion: LinearCriterion, points: list[Point]) -> list[UpperPosterior]:
    size = _at_once(criterion)
    return [top for at in range(0, len(points), size) for top in criterion.upper_levels(points[at : at + size])]


def _at_once(criterion: LinearCriterion) -> int:
    return max(1, AT_ONCE // criterion.numbers_kept)


class Differences:
    """Derivatives at an optimum ``x``, by central differences. ``turn (d, d)`` converts coefficients to the user's units."""

    def __init__(self, criterion: LinearCriterion, x: Floats, turn: Floats) -> None:
        self.criterion, self.turn = criterion, turn[:, criterion.order.terms]
        # At a variance of zero all derivatives in its root vanish, by symmetry.
        self.free = np.flatnonzero(criterion.parameters.free(x))
        self.steps = _STEP * np.maximum(np.abs(x[self.free]), 0.1 * np.abs(x).max(initial=0.0))
        ways = np.zeros((len(self.free), len(x)))
        ways[np.arange(len(self.free)), self.free] = self.steps
        self.at = [*(x + ways), *(x - ways), x]
        self.points = [criterion.covariances(at) for at in self.at]

    def result(self, here: list[Evaluation]) -> Satterthwaite | None:
        p = len(self.free)
        slopes = np.array([self.criterion.gradient(at, one)[self.free] for at, one in zip(self.at, here, strict=True)])
        V = np.array([one.top.dispersion * invert(one.top.D.sum(axis=0), self.criterion.free)[0] for one in here])
        # The residual variance is profiled out, so V changes with it too. Given the other parameters, its variance is 2 / dof.
        dV = self.turn @ (V[:p] - V[p : 2 * p]) @ self.turn.T / (2 * self.steps[:, None, None])
        H = (slopes[:p] - slopes[p : 2 * p]) / (2 * self.steps[:, None])
        values, vectors = np.linalg.eigh(0.5 * (H + H.T))
        solid = values > 1e-7 * values.max(initial=0.0)
        # The covariance of the parameters is twice the inverse of the Hessian of -2 log-likelihood.
        half = vectors[:, solid] * np.sqrt(2.0 / values[solid])
        covariance = self.turn @ V[-1] @ self.turn.T
        found = Satterthwaite(covariance, np.einsum("pr,pab->rab", half, dV), np.array(float(here[-1].top.dof)))
        return found if found.finite else None


class Sample:
    """Points near an optimum ``x``, and their weights. ``turn (d, d)`` converts coefficients to the user's units."""

    def __init__(self, criterion: LinearCriterion, x: Floats, turn: Floats) -> None:
        self.criterion, self.turn, tree, d = criterion, turn[:, criterion.order.terms], criterion.tree, len(criterion.terms)
        self.origin, here = turn @ criterion.survey.columns.origin, criterion.evaluate(x)
        below = criterion.parameters.client.count > 1
        above = tree.n_clusters if criterion.parameters.cluster.q else 1
        units = tree.sizes - 1.0 if below else np.array([tree.n_clients - above]), np.array([tree.n_clusters - 1.0])
        slopes = here.client_slope, here.cluster_slope
        parts = zip(criterion.parameters.split(x), slopes, here.pull, units, strict=True)
        self.levels = [
            Proposal(variation, part, variation.pick(slope), variation.pick(pull), np.maximum(nu, 1.0)) if variation.q else None
            for (variation, part), slope, pull, nu in parts
        ]
        # A Latin hypercube: in each coordinate, one point in each of equal strata.
        shape = 1 + sum(level.size for level in self.levels if level), POINTS
        strata = np.random.default_rng(0).permuted(np.broadcast_to(np.arange(POINTS), shape), axis=1)
        self.uniform, self.log_density = (strata.T + 0.5) / POINTS, np.zeros(POINTS)
        self.client, self.cluster = (np.zeros((POINTS, len(S), d, d)) for S in criterion.covariances(x))
        start = 1
        for level, whole in zip(self.levels, (self.client, self.cluster), strict=True):
            if level:
                S, log_density = level.draw(self.uniform[:, start : start + level.size])
                whole[:, :, level.variation.terms[:, None], level.variation.terms] = S
                self.log_density += log_density
                start += level.size
        self.points = list(zip(self.client, self.cluster, strict=True))

    def result(self, tops: list[UpperPosterior]) -> Draws | None:
        tree, free = self.criterion.tree, self.criterion.free
        C, D = (np.stack([getattr(top, name) for top in tops]) for name in "CD")
        inverse, log_whole = (np.array(part) for part in zip(*(invert(one, free) for one in D.sum(axis=1)), strict=True))
        reml = self.criterion.reml
        dof = tops[0].dof - (0 if reml else int(free.sum()))
        squares = np.array([top.dispersion * top.dof for top in tops])
        with np.errstate(divide="ignore", invalid="ignore"):
            profiled = [top.criterion - top.dof * (np.log(2 * np.pi * top.dispersion) + 1) for top in tops]
            twice = np.array(profiled) + dof * np.log(squares) + (0.0 if reml else log_whole)
            log_weights = -0.5 * twice - self.log_density
            by_client = C / np.maximum(tree.sizes, 1)[:, None, None] if self.client.shape[1] > 1 else C.sum(axis=1)[:, None]
            for level, means in zip(self.levels, (by_client, D.mean(axis=1)[:, None]), strict=True):
                log_weights += level.log_prior(level.variation.pick(means)) if level else 0.0
        if not np.isfinite(log_weights).all() or not dof > 0:  # the residual is zero, for example
            return None
        s2 = squares / (2 * special.gammaincinv(dof / 2, self.uniform[:, 0]))
        S = self.cluster[:, 0]
        clusters = np.stack([cluster_covariances(*each) for each in zip(C, S, inverse, strict=True)])
        wbar, w = (self.origin + np.stack([getattr(top, name) for top in tops]) @ self.turn.T for name in ("wbar", "w"))
        scaled = [
            (s2.reshape(-1, *[1] * (each.ndim - 1)) * (self.turn @ each @ self.turn.T))
            for each in (self.client, S, inverse, clusters)
        ]
        found = Draws(_weights(log_weights), s2, scaled[0], scaled[1], wbar, scaled[2], w, scaled[3])
        return found if found.finite else None


def _weights(logs: Floats) -> Floats:
    """Weights whose sum is 1. They are flattened if a few points would have almost all the weight."""
    power, logs = 1.0, logs - logs.max()
    while True:
        weights = np.exp(power * logs)
        weights /= weights.sum()
        if 1.0 / (weights**2).sum() >= _EFFECTIVE * len(weights) or power < 1e-3:
            return weights
        power *= 0.9


class Proposal:
    """The distribution from which one level's covariances are drawn, in blocks of ``g`` terms.

    A full covariance is one block. Other covariances have blocks of one variance: one for each term, or one for all terms.
    Parameters as :class:`.Variation`; ``slope`` and ``pull (count, q, q)`` as in :class:`.Evaluation`; ``nu (count,)`` the
    number of units less those that the level above takes up.
    """

    def __init__(self, variation: Variation, x: Floats, slope: Floats, pull: Floats, nu: Floats) -> None:
        self.variation = variation
        self.g = g = variation.q if variation.kind == "full" else 1
        bend, pull = self._blocks(slope + pull), self._blocks(pull)
        S = variation.matrices(x) / (variation.unit[:, None] * variation.unit)
        S = S[:, :1, :1] if variation.is_shared else S if g > 1 else np.einsum("maa->ma", S).reshape(-1, 1, 1)
        self.nu = np.repeat(nu, len(bend) // variation.count) * (variation.q if variation.is_shared else 1)
        self.size = len(bend) * g * (g + 1) // 2
        values, vectors = np.linalg.eigh(bend)
        floor = 1e-9 * (1.0 + values.max(axis=1, keepdims=True, initial=0.0))
        root = vectors * np.sqrt(self.nu[:, None] / np.maximum(values, floor))[:, None, :]  # T = root root'
        inverse = np.linalg.inv(root)
        values, vectors = np.linalg.eigh(np.eye(g) - inverse @ S @ inverse.swapaxes(1, 2))
        noise = root @ (vectors * np.sqrt(np.maximum(values, 1e-3))[:, None, :])  # N = noise noise'
        across = np.linalg.solve(noise, root @ root.swapaxes(1, 2))
        values, vectors = np.linalg.eigh(across @ pull @ across.swapaxes(1, 2))
        turn = vectors[:, :, ::-1]
        largest = np.take_along_axis(turn, np.abs(turn).argmax(axis=1, keepdims=True), 1)
        self.squares = np.maximum(values[:, ::-1], 1e-8)
        self.basis = noise @ (turn * np.sign(largest))  # the signs of eigenvectors are arbitrary

    def _blocks(self, M: Floats) -> Floats:
        """The blocks of derivatives in the covariance ``(..., count, q, q)``, in the variation's units."""
        M = M * (self.variation.unit[:, None] * self.variation.unit)
        if self.g > 1:
            return M
        diagonal = np.einsum("...aa->...a", M)
        if self.variation.is_shared:
            diagonal = diagonal.sum(axis=-1, keepdims=True)
        return np.asarray(diagonal.reshape(*M.shape[:-3], -1, self.g, self.g))

    def draw(self, uniform: Floats) -> tuple[Floats, Floats]:
        """Covariances ``(m, count, q, q)`` and the logarithms of their densities, from ``uniform (m, size)`` in (0, 1)."""
        m, g, variation, nu, Q = len(uniform), self.g, self.variation, self.nu[:, None], self.squares
        uniform = uniform.reshape(m, len(nu), -1)
        mass = special.gammainc(nu / 2, Q / 2)
        chi = np.clip(2 * special.gammaincinv(nu / 2, uniform[:, :, :g] * mass), 1e-8 * np.minimum(Q, 1), Q * (1 - 1e-9))
        t = Q / chi
        s = t - 1
        logs = (0.5 * nu - 1) * np.log(chi) - 0.5 * chi + np.log(Q / t**2) - np.log(mass)
        log_density, L = logs.sum(axis=(1, 2)), np.zeros((m, len(nu), g, g))
        at, (rows, columns) = np.arange(g), np.tril_indices(g, -1)
        L[..., at, at] = np.sqrt(s)
        # An entry of T has the variance t_a t_b / nu. Where S is almost singular, this would be too much for the diagonal.
        precision = nu * s[..., columns] / (t[..., rows] * t[..., columns]) + 1 / (s[..., rows] + 2 * t[..., rows] / nu)
        z = special.ndtri(uniform[:, :, g:])
        L[..., rows, columns] = z / np.sqrt(precision)
        log_density += 0.5 * (np.log(precision) - z**2).sum(axis=(1, 2))
        log_density -= 0.5 * ((g - 1 - at) * np.log(s)).sum(axis=(1, 2))  # from entries of L to entries of S
        L = self.basis @ L
        S, whole = L @ L.swapaxes(2, 3), np.zeros((m, variation.count, variation.q, variation.q))
        if g > 1:
            whole[:] = S
        else:
            whole[..., np.arange(variation.q), np.arange(variation.q)] = S.reshape(m, variation.count, -1)
        return whole * (variation.unit[:, None] * variation.unit), log_density

    def log_prior(self, D: Floats) -> Floats:
        """The logarithm of the prior, from the mean precisions ``(m, count, q, q)`` of the units."""
        _, logs = np.linalg.slogdet(self._blocks(D))
        return np.asarray(0.5 * (self.g + 1) * logs.sum(axis=1))
