"""Profile-likelihood intervals of a hierarchy's parameters, and the maximum likelihood of a model that was fitted by REML.

The profile of a parameter is the criterion, minimised over all other parameters while that one is held fixed. The
interval has the values at which it exceeds its minimum by at most a quantile of chi-squared with one degree of freedom, as in
``profile`` of lme4. Standard deviations, correlations and penalties are profiled by the criterion of the fit, which after REML
is the restricted likelihood; lme4 profiles the full likelihood then too. Coefficients are always profiled by the full
likelihood, because restricted likelihoods with different numbers of coefficients cannot be compared.

The criterion of a linear model (:mod:`.linear_likelihood`) has the residual variance ``s2`` profiled out, with covariances
relative to it. At another value of ``s2`` it is

    criterion(x) + dof (log(s2 / best) + best / s2 - 1)            best = Q / dof, the residual variance of the criterion at x

:class:`Deviance` is this function of factors in the units of the response and of ``log s2``. The rows of a factor ``L`` have
the standard deviations of the terms as their lengths, and the cosine of the angle between two rows is a correlation.
:mod:`.holding` holds these fixed. A penalty is ``s2 / sd^2``: the criterion with ``s2`` profiled out has factors in units
of the residual, so that its rows have the lengths ``sd / s``. A coefficient of a linear model is held fixed by moving the
origin of the clients' sums to it and by leaving it out of the estimated coefficients.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from scipy import special

from covey._typing import Floats, Ints
from covey.errors import SolverError
from covey.solvers.direct.elimination import Quadratic
from covey.variance.components import Learned
from covey.variance.estimate import find_optimum, search
from covey.variance.holding import Along, Angle, Hold, Length, Profile, ends, minimise_from
from covey.variance.laplace_likelihood import LaplaceCriterion
from covey.variance.linear_likelihood import Criterion, LinearCriterion
from covey.variance.parameters import Variation
from covey.variance.sampling import criterion_of
from covey.variance.search import MANY

Parameter = Literal["sd", "correlation", "penalty", "coefficient"]


@dataclass(frozen=True)
class Interval:
    """A parameter with its profile interval. ``cluster``: position of the covariance; ``terms``: two for a correlation."""

    level: str
    cluster: int | None
    terms: tuple[str, ...]
    parameter: Parameter
    estimate: float
    lower: float
    upper: float


def maximum_likelihood(learned: Learned) -> float:
    """The log-likelihood at its maximum, from the sums of a linear model that was fitted by REML."""
    criterion, x, _ = criterion_of(learned, reml=False)
    return -0.5 * min(search(criterion, x).value, find_optimum(criterion).value)


class Deviance:
    """The criterion as a function of ``z``: factors in the units of the response, other parameters, and ``log s2`` last."""

    def __init__(self, criterion: Criterion) -> None:
        self.criterion, self.n = criterion, criterion.parameters.n_parameters
        self.linear = isinstance(criterion, LinearCriterion)

    def start(self, x: Floats) -> Floats:
        if not self.linear:
            return x.copy()
        s2 = self.criterion.evaluate(x).top.dispersion
        return np.append(np.sqrt(s2) * x, np.log(s2))

    def __call__(self, z: Floats) -> tuple[float, Floats]:
        if not self.linear:
            return self.criterion.value_and_gradient(z)
        log_s2 = float(np.clip(z[-1], -600, 600))
        s2, x = np.exp(log_s2), z[:-1] / np.exp(0.5 * log_s2)
        try:
            here = self.criterion.evaluate(x)
        except (SolverError, np.linalg.LinAlgError):
            return np.inf, np.zeros_like(z)
        best, dof = here.top.dispersion, here.top.dof
        log_best = self.criterion.log_dispersion(x, here)[0]
        slope = self.criterion.gradient(x, here) + dof * (best / s2 - 1.0) * log_best
        value = here.value + dof * (log_s2 - np.log(best) + best / s2 - 1.0)
        return float(value), np.append(slope / np.sqrt(s2), dof * (1.0 - best / s2) - 0.5 * float(slope @ x))


def of_components(criterion: Criterion, x: Floats, coverage: float) -> list[Interval]:
    """The intervals of standard deviations and correlations at an optimum ``x``, and last the residual's."""
    _check_size(x)
    deviance, found = Deviance(criterion), []
    z = deviance.start(x)

    def interval(hold: Hold) -> tuple[float, float, float]:
        return hold.of(z), *ends(Profile(deviance, hold, z), deviance(z)[0], _rise(coverage))

    for place in _places(criterion, x):
        found += [place.interval((a,), "sd", *interval(place.length(a))) for a in range(len(place.names))]
        if place.variation.kind == "full":
            pairs = [(a, b) for b in range(len(place.names)) for a in range(b)]
            found += [place.interval(pair, "correlation", *interval(place.angle(*pair))) for pair in pairs]
    if deviance.linear:
        log_s2 = Along(np.eye(len(z))[-1], 0.25)
        sd, lower, upper = (float(np.exp(0.5 * end)) for end in interval(log_s2))
        found.append(Interval("residual", None, (), "sd", sd, lower, upper))
    return found


def of_penalties(criterion: Criterion, x: Floats, coverage: float) -> list[Interval]:
    """The intervals of the penalties ``gamma`` of clients and ``lam`` of clusters, one for each term that varies."""
    _check_size(x)
    function, found = criterion.value_and_gradient, []
    lowest, rise = function(x)[0], _rise(coverage)
    for place in _places(criterion, x):
        for a in range(len(place.names)):
            hold = place.length(a)
            lower, upper = ends(Profile(function, hold, x), lowest, rise)
            with np.errstate(divide="ignore"):
                sd, most, least = (float(np.float64(end) ** -2) for end in (hold.of(x), lower, upper))
            found.append(place.interval((a,), "penalty", sd, least, most))
    return found


def of_coefficients(criterion: Criterion, x: Floats, coverage: float, learned: Learned) -> list[Interval]:
    """The intervals of the global coefficients that are estimated, by the full likelihood."""
    _check_size(x)
    rise, found = _rise(coverage), []
    top, lowest = criterion.evaluate(x).top, criterion.value_and_gradient(x)[0]
    for k in np.flatnonzero(learned.free).tolist():
        at, term = int(criterion.order.inverse[k]), learned.terms[k]
        if isinstance(criterion, LaplaceCriterion):
            working = criterion.survey.columns.basis[k, criterion.order.terms]  # the coefficients that make the user's
            row = np.concatenate([np.zeros(criterion.parameters.n_parameters), working @ criterion.half])
            hold = Along(row, float(np.linalg.norm(row)), float(working @ criterion.middle))
            best, profile = hold.of(x), Profile(criterion.value_and_gradient, hold, x)
        else:
            error = np.sqrt(criterion.global_covariance(np.empty((0, 0)), top)[at, at])
            best = float(learned.origin[k] + top.wbar[at])
            hold = Along(np.ones(1), float(error))
            profile = _CoefficientProfile(learned, k, best, hold, x)
        found.append(Interval("global", None, (term,), "coefficient", best, *ends(profile, lowest, rise)))
    return found


class _CoefficientProfile(Profile):
    """The full likelihood of a linear model as a function of the coefficient ``k``."""

    def __init__(self, learned: Learned, k: int, estimate: float, hold: Hold, x: Floats) -> None:
        self.learned, self.k, self.hold, self.estimate, self.best, self.z = learned, k, hold, estimate, x, x

    def at(self, value: float) -> float:
        learned, units, k = self.learned, self.learned.units, self.k
        move = value - float(learned.origin[k])
        c = units.c - move * units.r[:, k] + 0.5 * move**2 * units.C[:, k, k]
        moved = Quadratic(units.C, units.r - move * units.C[:, :, k], c, units.n)
        parts = replace(learned.components, zero=(*learned.components.zero, learned.terms[k]))
        origin = learned.origin + move * np.eye(len(learned.origin))[k]
        there = replace(learned, units=moved, components=parts, origin=origin)
        criterion = criterion_of(there, reml=False, centred=False)[0]
        lowest, self.z = minimise_from(criterion.value_and_gradient, self.z)
        return lowest


@dataclass(frozen=True)
class _Place:
    """One covariance of a level: its entries in the vector of parameters. ``rows``: its rows in the user's order of terms."""

    level: str
    cluster: int | None
    variation: Variation
    names: tuple[str, ...]
    rows: tuple[int, ...]
    first: int

    def length(self, a: int) -> Length:
        return Length(self._entries(self.rows[a]), float(self.variation.unit[self.rows[a]]))

    def angle(self, a: int, b: int) -> Angle:
        return Angle(*(self._entries(row) for row in sorted((self.rows[a], self.rows[b]))))

    def interval(self, at: tuple[int, ...], parameter: Parameter, *numbers: float) -> Interval:
        return Interval(self.level, self.cluster, tuple(self.names[a] for a in at), parameter, *numbers)

    def _entries(self, row: int) -> Ints:
        shared, rows = self.variation.is_shared, self.variation.entries[0]
        return np.asarray(self.first + (np.zeros(1, dtype=np.int64) if shared else np.flatnonzero(rows == row)))


def _places(criterion: Criterion, x: Floats) -> Iterator[_Place]:
    """The covariances of clients and of clusters."""
    first = 0
    for level, (variation, _) in zip(("client", "cluster"), criterion.parameters.split(x), strict=True):
        rows = tuple(np.argsort(criterion.order.terms[variation.terms]).tolist())
        names = tuple(criterion.names(variation.terms[list(rows)]))
        for m in range(variation.count if variation.q else 0):
            each = variation.n_parameters // variation.count
            yield _Place(level, m if variation.count > 1 else None, variation, names, rows, first + m * each)
        first += variation.n_parameters


def _rise(coverage: float) -> float:
    return float(special.chdtri(1, 1.0 - coverage))


def _check_size(x: Floats) -> None:
    if len(x) > MANY:
        raise SolverError(
            f"This model has {len(x)} parameters, too many for profile intervals; bootstrap has those of standard deviations."
        )
