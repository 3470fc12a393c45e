"""Profile-likelihood intervals of standard deviations, and the maximum likelihood of a model that was fitted by REML.

The profile of a standard deviation is the criterion, minimised over all other parameters while that one is held fixed. The
interval has the values at which it exceeds its minimum by at most a quantile of chi-squared with one degree of freedom, as in
``profile`` of lme4. lme4 profiles the full likelihood also after REML; here it is the criterion of the fit.

The criterion of a linear model (:mod:`.linear_likelihood`) has the residual variance ``s2`` profiled out, with covariances
relative to it. At another value of ``s2`` it is

    criterion(x) + dof (log(s2 / best) + best / s2 - 1)            best = Q / dof, the residual variance of the criterion at x

:class:`Deviance` is this function of factors in the units of the response and of ``log s2``. A row of a factor ``L`` has the
length of its term's standard deviation. So a standard deviation is held fixed by fixing the length of a row: the function is
evaluated at the row divided by its length, times the fixed value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy import special

from covey._typing import Floats, Ints
from covey.errors import SolverError
from covey.variance.components import Learned
from covey.variance.estimate import find_optimum, search
from covey.variance.linear_likelihood import Criterion, LinearCriterion
from covey.variance.sampling import criterion_of
from covey.variance.search import MANY

_CLOSE = 1e-9  # of a standard deviation, relative
_FLAT = 1e-7  # a criterion that rises by less than this on the way to zero does not rise
_DOUBLINGS = 60


@dataclass(frozen=True)
class Interval:
    """A standard deviation with its profile interval. ``place``: level, position of the covariance, term; None: residual."""

    level: str
    cluster: int | None
    term: str | None
    sd: float
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


@dataclass(frozen=True)
class Held:
    """The entries ``at`` of ``z`` whose length, times ``unit``, is one standard deviation."""

    at: Ints
    unit: float

    def place(self, z: Floats, sd: float) -> tuple[Floats, Floats]:
        """``z`` with this standard deviation, and the direction of its entries."""
        length = float(np.linalg.norm(z[self.at]))
        direction = z[self.at] / length if length > 0 else np.eye(len(self.at))[0]
        moved = z.copy()
        moved[self.at] = sd / self.unit * direction
        return moved, direction

    def gradient(self, z: Floats, sd: float, slope: Floats) -> Floats:
        """The gradient in ``z``, from the one at the point with the fixed standard deviation."""
        length, out = float(np.linalg.norm(z[self.at])), slope.copy()
        direction = self.place(z, sd)[1]
        across = slope[self.at] - direction * float(direction @ slope[self.at])
        out[self.at] = sd / self.unit / max(length, 1e-300) * across
        return out


class _Profile:
    """The minimum of the deviance as a function of one standard deviation."""

    def __init__(self, deviance: Callable[[Floats], tuple[float, Floats]], held: Held | None, best: Floats) -> None:
        self.deviance, self.held, self.best, self.z = deviance, held, best, best.copy()

    def at(self, sd: float) -> float:
        from scipy.optimize import minimize

        held = self.held

        def function(z: Floats) -> tuple[float, Floats]:
            if held is None:  # the residual standard deviation, the last parameter
                value, slope = self.deviance(np.append(z, 2.0 * np.log(sd)))
                return value, slope[:-1]
            value, slope = self.deviance(held.place(z, sd)[0])
            return value, held.gradient(z, sd, slope)

        start = self.z[:-1] if held is None else held.place(self.z, max(sd, 1e-8))[0]
        if len(start) == 0:
            return function(start)[0]
        with np.errstate(all="ignore"):
            found = minimize(function, start, jac=True, method="BFGS", options={"gtol": 1e-7, "maxiter": 500})
        if np.isfinite(found.fun):
            self.z = np.append(found.x, 2.0 * np.log(sd)) if held is None else held.place(found.x, max(sd, 1e-8))[0]
        return float(found.fun)


def profile_intervals(criterion: Criterion, x: Floats, coverage: float) -> list[Interval]:
    """The intervals of all standard deviations at an optimum ``x``, in the order clients, clusters, residual."""
    if len(x) > MANY:
        raise SolverError(f"This model has {len(x)} parameters, too many for profile intervals; use bootstrap instead.")
    deviance = Deviance(criterion)
    best = deviance.start(x)
    lowest, rise = deviance(best)[0], float(special.chdtri(1, 1.0 - coverage))
    intervals, first = [], 0
    for level, (variation, _) in zip(("client", "cluster"), criterion.parameters.split(x), strict=True):
        per = variation.n_parameters // max(variation.count, 1)
        for m in range(variation.count if variation.q else 0):
            for a in np.argsort(criterion.order.terms[variation.terms]).tolist():
                own = np.arange(per) if variation.is_shared else np.flatnonzero(variation.entries[0] == a)
                held = Held(first + m * per + own, float(variation.unit[a]))
                sd = held.unit * float(np.linalg.norm(best[held.at]))
                ends = _ends(_Profile(deviance, held, best), sd, lowest, rise, typical=held.unit)
                name = criterion.names(variation.terms[[a]])[0]
                intervals.append(Interval(level, m if variation.count > 1 else None, name, sd, *ends))
        first += variation.n_parameters
    if deviance.linear:
        sd = float(np.exp(0.5 * best[-1]))
        intervals.append(Interval("residual", None, None, sd, *_ends(_Profile(deviance, None, best), sd, lowest, rise, sd)))
    return intervals


def _ends(profile: _Profile, sd: float, lowest: float, rise: float, typical: float) -> tuple[float, float]:
    """Where the profile has risen by ``rise``, below and above its minimum at ``sd``; 0 if it does not rise as far."""
    from scipy.optimize import brentq

    def excess(at: float) -> float:
        return profile.at(at) - lowest - rise

    lower = 0.0
    if sd > 0:
        profile.z = profile.best.copy()
        inner, outer = sd, sd
        for _ in range(_DOUBLINGS):
            outer = outer / 1.5 if outer > 1e-3 * sd else 0.0
            if outer == 0.0 and profile.held is None:
                break
            if excess(outer) > 0:
                lower = float(brentq(excess, outer, inner, xtol=_CLOSE * sd, rtol=_CLOSE))
                break
            if outer == 0.0:
                break
            inner = outer
    profile.z = profile.best.copy()
    inner = outer = max(sd, 1e-2 * typical)
    for _ in range(_DOUBLINGS):
        outer *= 1.4
        if excess(outer) > 0:
            return lower, float(brentq(excess, inner, outer, xtol=_CLOSE * outer, rtol=_CLOSE))
        inner = outer
    return lower, np.inf
