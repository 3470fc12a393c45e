"""From an optimum of the criterion to a fit: coefficients, variances in the user's units, and their standard errors.

Standard errors of the parameters come from the curvature of the log-likelihood at the optimum; those of standard deviations
follow by the delta method.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from covey._typing import Floats
from covey.errors import DataError
from covey.solvers.direct.elimination import Quadratic
from covey.solvers.result import Convergence, Fit
from covey.variance.components import Components, Learned, LevelComponents, Method, Whole
from covey.variance.criterion import Criterion, LaplaceCriterion, LinearCriterion
from covey.variance.frame import NonFiniteClients
from covey.variance.laplace_likelihood import FinishMode
from covey.variance.linear_likelihood import Evaluation, FinishLinear, UpperPosterior, cluster_covariances, invert
from covey.variance.search import MANY, Optimum

NOT_FINITE = "The coefficients are not finite; the columns are probably on extreme scales: standardise them."


def finish(criterion: Criterion, best: Optimum, notes: tuple[str, ...]) -> tuple[Fit, Learned]:
    """The fit at an optimum. Nodes keep the coefficients and sums of their clients, so these arrays are empty here."""
    if isinstance(criterion, LinearCriterion):
        return _finish_linear(criterion, best, notes)
    if isinstance(criterion, LaplaceCriterion):
        return _finish_laplace(criterion, best, notes)
    raise TypeError(f"There is no fit for a criterion of type {type(criterion).__name__}.")


def _finish_linear(criterion: LinearCriterion, best: Optimum, notes: tuple[str, ...]) -> tuple[Fit, Learned]:
    here, back, origin = criterion.evaluate(best.x), criterion.order.inverse, criterion.known.columns.origin
    top, s2, d = here.top, here.top.dispersion, len(criterion.terms)
    S_client, S_cluster = criterion.covariances(best.x)
    _require_finite(criterion.network.ask(FinishLinear(S_client, criterion.order, top.w)))
    method: Method = "REML" if criterion.likelihood.reml else "ML"
    fit = Fit(np.empty((0, d)), origin + top.w[:, back], origin + top.wbar[back], _convergence(criterion, best, method))
    client, cluster = (-pull / top.dof for pull in here.pull)
    log_scale_gradient = criterion.parameters.gradient(best.x, client, cluster)
    levels = _levels(criterion, best, s2, log_scale_gradient, parameter_covariance(best))
    n_parameters, rows = d + criterion.parameters.n_parameters + 1, int(criterion.rows)
    shares = _shares(criterion, levels, criterion.gram / rows, s2)
    components = Components(method, *levels, s2, -0.5 * best.value, n_parameters, rows, notes, shares=shares)
    covariance = s2 * invert(top.D.sum(axis=0))[0]
    return fit, _learned(criterion, components, covariance, top, S_cluster[0], origin)


def _finish_laplace(criterion: LaplaceCriterion, best: Optimum, notes: tuple[str, ...]) -> tuple[Fit, Learned]:
    here, back, d, loss = criterion.evaluate(best.x), criterion.order.inverse, len(criterion.terms), criterion.network.loss
    top, phi = here.top, here.top.dispersion
    _require_finite(criterion.network.ask(FinishMode()))
    fit = Fit(np.empty((0, d)), top.w[:, back], criterion.wbar(best.x)[back], _convergence(criterion, best, "Laplace"))
    cut = criterion.parameters.n_parameters
    errors = parameter_covariance(best, cut)
    log_scale_gradient, log_scale_variance = _log_dispersion(criterion, best.x, here)
    levels = _levels(criterion, best, phi, log_scale_gradient, errors, log_scale_variance)
    shares = _shares(criterion, levels, criterion.moments, loss.residual(np.array([criterion.mean_response]), phi))
    n_parameters, residual = d + cut + int(loss.dispersion), phi if loss.dispersion else None
    likelihood, rows = -0.5 * best.value, criterion.rows
    components = Components("Laplace", *levels, residual, likelihood, n_parameters, rows, notes, shares=shares)
    half = criterion.half
    covariance = half @ errors[cut:, cut:] @ half.T if len(best.x) <= MANY else phi * invert(top.D.sum(axis=0))[0]
    return fit, _learned(criterion, components, covariance, top, criterion.covariances(best.x)[1][0], np.zeros(d))


def _log_dispersion(criterion: LaplaceCriterion, x: Floats, here: Evaluation) -> tuple[Floats, float]:
    """The gradient of the log of the dispersion, and its variance at given parameters; zero where the dispersion is 1."""
    loss, likelihood, phi = criterion.network.loss, criterion.likelihood, here.top.dispersion
    if not loss.dispersion:
        return np.zeros(len(x)), 0.0
    # The dispersion depends on the objective alone, whose gradient is that of the criterion with the mode held fixed.
    step = 1e-5 * (likelihood.objective - likelihood.perfect)
    ends = [loss.profile(likelihood.objective + move, likelihood.weight, likelihood.perfect)[1] for move in (-step, step)]
    rate = float(np.log(ends[1] / ends[0])) / (2 * step)
    client, cluster = (-0.5 * rate * phi * pull for pull in here.pull)
    variances = criterion.parameters.gradient(x, client, cluster)
    return np.concatenate([variances, criterion.global_gradient(-rate * here.top.force.sum(axis=0))]), rate * phi


def _require_finite(clients: NonFiniteClients) -> None:
    if clients.n_nonfinite:
        raise DataError(NOT_FINITE)


def _convergence(criterion: Criterion, best: Optimum, method: str) -> Convergence:
    count = criterion.evaluations
    message = f"{method} within {best.decrement:.0e} of its optimum after {count} evaluations"
    gap = best.decrement if np.isfinite(best.decrement) else None
    norm = float(np.linalg.norm(best.gradient))
    return Convergence(method, best.converged, count, criterion.network.exchanges, best.value, norm, gap, message)


def parameter_covariance(best: Optimum, variances: int | None = None) -> Floats:
    """The covariance of the estimated parameters: twice the inverse of the criterion's Hessian, 0 where that is flat.

    A flat direction is that of a variance held at zero. Only the first ``variances`` parameters can be: a flat direction among
    the others has a large variance.
    """
    if len(best.x) > MANY:
        return np.zeros_like(best.hessian)
    values, vectors = np.linalg.eigh(np.nan_to_num(best.hessian))
    floor = 1e-7 * max(float(values.max(initial=0.0)), 1e-30)
    unknown = (vectors[variances:] ** 2).sum(axis=0) > 0.5 if variances is not None else np.zeros(len(values), dtype=bool)
    inverse = np.where((values > floor) | unknown, 2.0 / np.maximum(values, 1e-7 * floor), 0.0)
    return np.asarray((vectors * inverse) @ vectors.T)


def _levels(
    criterion: Criterion,
    best: Optimum,
    scale: float,
    log_scale_gradient: Floats,
    errors: Floats,
    log_scale_variance: float = 0.0,
) -> tuple[LevelComponents, LevelComponents]:
    """The components of both levels in the units of the response; covariances are relative to ``scale``.

    ``log_scale_variance`` is the variance of the log of the scale at given parameters.
    """
    first, levels = 0, []
    for variation, x in criterion.parameters.split(best.x):
        L = variation.factors(x)
        S = L @ L.swapaxes(1, 2)
        sd = np.sqrt(scale * np.einsum("maa->ma", S))
        sd_error = np.full(sd.shape, np.nan)
        positive = np.nonzero(sd) if len(best.x) <= MANY else ((), ())  # without a Hessian there are no standard errors
        for m, a in zip(*positive, strict=True):
            # The delta method for log sd = (log S_aa + log scale) / 2.
            G = np.zeros_like(S)
            G[m, a, a] = 0.5 / S[m, a, a]
            slope = 0.5 * log_scale_gradient
            slope[first : first + variation.n_parameters] += variation.gradient(x, G)
            sd_error[m, a] = sd[m, a] * np.sqrt(max(float(slope @ errors @ slope), 0.0) + 0.25 * log_scale_variance)
        first += variation.n_parameters
        where = np.argsort(criterion.order.terms[variation.terms])
        names = tuple(criterion.names(variation.terms[where]))
        levels.append(LevelComponents(names, variation.kind, scale * S[:, where[:, None], where], sd_error[:, where]))
    client, cluster = levels
    return client, cluster


def _shares(
    criterion: Criterion, levels: tuple[LevelComponents, LevelComponents], moments: Floats, residual: float
) -> tuple[float, float, float]:
    """Shares of clusters, clients and residual in the mean variance of a row; ``moments (d, d)`` is the mean of ``x x'``."""
    client, cluster = (float((level.embedded(criterion.terms).mean(axis=0) * moments).sum()) for level in levels)
    total = client + cluster + residual
    return cluster / total, client / total, residual / total


def _learned(
    criterion: Criterion, components: Components, covariance: Floats, top: UpperPosterior, S: Floats, origin: Floats
) -> Learned:
    """What the coordinator knows, without the clients' sums. ``covariance`` and ``S`` are in the working order of terms."""
    back, d, known = criterion.order.inverse, len(criterion.terms), criterion.known
    s2 = 1.0 if components.residual is None else components.residual
    clusters = s2 * cluster_covariances(top.C, S, covariance / s2)[:, back[:, None], back]
    nobody = Quadratic(np.empty((0, d, d)), np.empty((0, d)), np.empty(0), np.empty(0))
    learned = Learned.of(
        components, criterion.terms, criterion.tree, covariance[back[:, None], back], nobody, origin, known.log_weights
    )
    return replace(learned, whole=Whole(criterion.tree.n_clients, clusters, known.constant_within))
