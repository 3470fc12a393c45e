"""Estimate the covariances of clients and clusters, their standard errors, and likelihood-ratio tests of both levels.

:func:`estimate` searches for the optimum of the likelihood, checks it, and turns it into a fit. The Laplace approximation to
the likelihood of logistic, Poisson and Gamma models can have several optima. So the search also evaluates points far from an
optimum, and starts again from a point that is better. Standard errors of the parameters come from the curvature of the
log-likelihood at the optimum. Those of standard deviations follow by the delta method.

:func:`likelihood_ratios` tests the hypothesis that the variances of a level are zero. Zero is on the boundary of the parameter
space. The test assumes a large sample, and that the estimates of several variances are uncorrelated, so its p-values are
approximate. Under the null hypothesis the statistic is then not chi-squared but chi-bar-squared (Self and Liang 1987; Stram and
Lee 1994): the squared length of a normal vector after projection on the cone of allowed directions. For one variance this
halves the p-value of a positive statistic. For ``p`` variances it is a binomial mixture of chi-squared distributions, and for a
full covariance the sum of squared positive eigenvalues of a symmetric normal matrix. The length of the vector is independent of
its direction. So the p-value is a mean over directions ``u`` of chi-squared tails, ``P(chi2_p > t / h(u))``, where ``h`` is the
share of the squared length that remains after projection.
"""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np
from scipy import special

from covey._typing import Floats
from covey.errors import ConvergenceWarning, DataError, SolverError, warn
from covey.nodes.network import Network
from covey.nodes.requests import coefficients_of
from covey.solvers.direct.elimination import Quadratic, cluster_covariances
from covey.solvers.result import Convergence, Fit, Progress
from covey.variance.approximation import Approximation
from covey.variance.columns import Survey, gathered_learned, uncentred
from covey.variance.components import Components, Learned, LevelComponents, LikelihoodRatio, Whole
from covey.variance.identify import survey
from covey.variance.laplace_likelihood import START, LaplaceCriterion
from covey.variance.linear_likelihood import Criterion, LinearCriterion
from covey.variance.parameters import Kind, Parameters, Shape
from covey.variance.quadrature import Watch, check
from covey.variance.sampling import freedom_of_laplace, uncertainty_at
from covey.variance.search import CONVERGED, NEGLIGIBLE, Optimum, approach, minimise, notes_at, resolve_boundary
from covey.variance.shared_laplace import SharedLaplaceCriterion
from covey.variance.shared_likelihood import SharedCriterion
from covey.variance.uncertainty import Draws, Satterthwaite

NOT_FINITE = "The coefficients are not finite, probably because columns have extreme scales; standardise them."
_OTHER_STARTS = ((5.0, 5.0), (0.05, 0.05), (20.0, 0.5), (0.5, 20.0))  # sds of clients and clusters, in units of the residual's
_FAR = 6.0  # the factor by which a level's standard deviations are changed, up and down, to look for better points
_ROUNDS = 4
_MM_STEPS = 4  # cheap steps before the search
_DIRECTIONS = 4096


def estimate(
    network: Network,
    shape: Shape,
    *,
    reml: bool = True,
    thorough: bool = False,
    progress: Progress | None = None,
    surveyed: Survey | None = None,
    uncertainty: bool = True,
) -> tuple[Fit, Learned]:
    """Estimate the covariances of a hierarchy over a network, and fit the hierarchy with them.

    Parameters
    ----------
    network : the nodes
    shape : which terms vary at which level, and the form of their covariances
    reml : restricted maximum likelihood, for a linear model; else maximum likelihood
    thorough : also search from the optima of the models without one of the two levels, as if the first optimum were doubtful
    progress : called with the number of evaluations, the criterion and the norm of its gradient
    surveyed : the survey of the same network by an earlier fit, if there was one
    uncertainty : also compute what intervals need of the uncertainty of the components, if clients are not in this process

    Returns
    -------
    The fit and the estimates. If the network holds all clients in memory, they have the coefficients and the sums of the
    clients. Otherwise these stay at the nodes (:func:`.node_learned`), and the arrays of clients are empty.

    Examples
    --------
    >>> from covey.datasets import simulate
    >>> from covey.losses import Gaussian
    >>> from covey.nodes.network import InMemory
    >>> data = simulate(clusters=30, clients=20, rows=10, d=1, client_sd=0.5, cluster_sd=1.0, seed=0).data
    >>> fit, learned = estimate(InMemory.of(data, Gaussian()), Shape((0,), (0,)))
    >>> learned.components.client.sd.round(2).tolist(), learned.components.cluster.sd.round(2).tolist()
    ([[0.52]], [[0.84]])
    """
    surveyed = survey(network, shape) if surveyed is None else surveyed
    shape = surveyed.shape or shape
    criterion = criterion_for(surveyed, shape, reml=reml, progress=progress)
    best = find_optimum(criterion)
    if not best.failed and (thorough or criterion.is_doubtful(best.x)):
        best = _from_smaller_models(criterion, best)
    satterthwaite, draws = _uncertainty(criterion, best) if uncertainty else (None, None)
    fit, learned = uncentred(*finish(criterion, best), surveyed.columns)
    if uncertainty and network.clients() is None and isinstance(criterion, LaplaceCriterion):
        satterthwaite = freedom_of_laplace(criterion, best.x, learned.dispersion)
        fit = replace(fit, convergence=replace(fit.convergence, exchanges=criterion.network.exchanges))
    learned = replace(learned, satterthwaite=satterthwaite, draws=draws)
    if not fit.convergence.converged:
        warn(learned.components.notes[-1])
    if not all(np.isfinite(values).all() for values in (fit.w, fit.wbar, learned.covariance)):
        raise DataError(NOT_FINITE)
    if not network.places:
        return fit, learned
    here = gathered_learned(network, learned.components, learned.covariance)
    return replace(fit, theta=coefficients_of(network)), replace(here, satterthwaite=satterthwaite, draws=draws)


def _uncertainty(criterion: Criterion, best: Optimum) -> tuple[Satterthwaite | None, Draws | None]:
    """The uncertainty of the components, if it cannot be computed on demand from the sums that the model keeps."""
    if not isinstance(criterion, LinearCriterion) or not (not criterion.network.network.places or criterion.about_client_fits):
        return None, None
    return uncertainty_at(criterion, best.x)


def criterion_for(surveyed: Survey, shape: Shape, *, reml: bool, progress: Progress | None = None) -> Criterion:
    """The criterion for the family of a surveyed network. ``reml`` matters for a linear model only."""
    linear, prepared = surveyed.network.loss.reml, surveyed.prepared
    criterion: Criterion
    if prepared is None:
        criterion = LinearCriterion(surveyed, shape, reml=reml) if linear else LaplaceCriterion(surveyed, shape)
    elif linear:
        criterion = SharedCriterion(surveyed, shape, prepared, reml=reml)
    else:
        criterion = SharedLaplaceCriterion(surveyed, shape, prepared)
    criterion.progress = progress
    return criterion


def _from_smaller_models(criterion: Criterion, best: Optimum) -> Optimum:
    """Search again from the optima of the models with one level less, if two levels vary."""
    for level, null in criterion.shape.without().items():
        if null.client or null.cluster:
            reml = criterion.method == "REML"
            smaller = criterion_for(criterion.survey, null, reml=reml, progress=criterion.progress)
            again = search(criterion, criterion.start_from(smaller, find_optimum(smaller).x, level))
            best = again if again.value < best.value - NEGLIGIBLE else best
    return best


def find_optimum(criterion: Criterion) -> Optimum:
    """As :func:`search`. If the sums of a linear model lost too many digits, search again with sums about clients' fits."""
    best = search(criterion)
    return search(criterion) if criterion.change_to_client_fits(best.x) else best


def search(criterion: Criterion, start: Floats | None = None) -> Optimum:
    """Search for the optimum, from ``start`` or from the usual starting point.

    One start is enough if the search converges and no far point is better. Otherwise other starting points are tried. If
    Laplace's approximation fails, no other point is tried, because a higher approximate likelihood would mean nothing.
    """
    best = _search_from(criterion, criterion.start(START, START) if start is None else start)
    if best.failed:
        return best
    for _ in range(_ROUNDS):
        far = _better_far_point(criterion, best) if criterion.may_have_other_optima(best.x) else None
        if far is None:
            break
        best = _better(best, _search_from(criterion, far))
    if not best.converged or (start is None and criterion.is_doubtful(best.x)):
        for sds in _OTHER_STARTS:
            best = _better(best, _search_from(criterion, criterion.start(*sds)))
    if not np.isfinite(best.value):
        raise DataError("The likelihood could not be computed; the columns or counts are on extreme scales: rescale them.")
    return best


def _search_from(criterion: Criterion, x: Floats) -> Optimum:
    """Search from one start. A start where the criterion cannot be computed gives an infinite value."""
    try:
        x, curvature = approach(criterion, x, _MM_STEPS)
    except (SolverError, np.linalg.LinAlgError):
        nothing = np.full((len(x), len(x)), np.nan)
        return Optimum(x, np.inf, np.full(len(x), np.nan), nothing, np.inf)
    function, deviations = criterion.values_and_gradients, criterion.parameters.deviations(x)
    best = minimise(function, x, curvature, deviations=deviations, watch=Watch(criterion), progress=criterion.progress)
    return resolve_boundary(criterion, best)


def _better(best: Optimum, other: Optimum) -> Optimum:
    """The lower of two points. If both are equally low, the one where the search converged."""
    only_other = other.converged and not best.converged and other.value < best.value + NEGLIGIBLE
    return other if other.value < best.value - NEGLIGIBLE or only_other else best


def _better_far_point(criterion: Criterion, best: Optimum) -> Floats | None:
    """The lowest of some points far from ``best``, if it is lower."""
    lowest, where = best.value - CONVERGED, None
    points = criterion.parameters.far(best.x, _FAR)
    for x, (value, _) in zip(points, criterion.values_and_gradients(points, independent=True), strict=True):
        if value < lowest:
            lowest, where = value, x
    criterion.forget()
    return where


def finish(criterion: Criterion, best: Optimum) -> tuple[Fit, Learned]:
    """The fit at an optimum. Nodes keep the coefficients and sums of their clients, so these arrays are empty here."""
    here, back, d, loss = criterion.evaluate(best.x), criterion.order.inverse, len(criterion.terms), criterion.network.loss
    top, s2, origin = here.top, here.top.dispersion, criterion.survey.columns.origin
    approximation = check(criterion, best, top)
    if criterion.network.ask(criterion.finish_message(best.x, top)).n_nonfinite:
        raise DataError(NOT_FINITE)
    models = np.empty((0, d)), origin + top.w[:, back], origin + top.wbar[back]
    fit = Fit(*models, _convergence(criterion, best, approximation), shared=criterion.shared(s2))
    cut = criterion.parameters.n_parameters
    errors = parameter_covariance(best, cut)
    levels = _levels(criterion, best, s2, criterion.log_dispersion(best.x, here), errors)
    # The shares of clusters, clients and residual in the mean variance of a row.
    client, cluster = (float((level.embedded(criterion.terms).mean(axis=0) * criterion.moments).sum()) for level in levels)
    residual = loss.residual(np.array([criterion.mean_response]), s2)
    total = client + cluster + residual
    notes = notes_at(criterion, best)
    if approximation is not None and approximation.failed:
        notes.append(approximation.failure(-0.5 * best.value))
    components = Components(
        criterion.method,
        *levels,
        residual=s2 if loss.dispersion else None,
        log_likelihood=-0.5 * best.value,
        parameters=int(criterion.free.sum()) + criterion.more + cut + int(loss.dispersion),
        rows=criterion.rows,
        notes=(*criterion.survey.notes, *notes),
        shares=(cluster / total, client / total, residual / total),
        approximation=approximation,
        zero=tuple(criterion.terms[at] for at in criterion.shape.zero),
    )
    covariance = criterion.global_covariance(errors[cut:, cut:], top)
    clusters = s2 * cluster_covariances(top.C, criterion.covariances(best.x)[1][0], covariance / s2)[:, back[:, None], back]
    whole = Whole(criterion.tree.n_clients, clusters, criterion.survey.constant_within)
    if isinstance(criterion, LinearCriterion) and criterion.shape.cluster:
        whole = replace(whole, information=top.D[:, back[:, None], back], scores=top.force[:, back])
    no_clients = Quadratic(np.empty((0, d, d)), np.empty((0, d)), np.empty(0), np.empty(0))
    sums = no_clients, origin, criterion.survey.log_weights
    return fit, Learned(components, criterion.terms, criterion.tree, covariance[back[:, None], back], *sums, whole)


def _convergence(criterion: Criterion, best: Optimum, approximation: Approximation | None) -> Convergence:
    count, method = criterion.evaluations, criterion.method
    message = f"-2 log-likelihood is within about {best.decrement:.0e} of its local minimum, after {count} evaluations"
    if best.failed:
        message = f"the search stopped after {count} evaluations"
    failed = approximation is not None and approximation.failed
    if approximation is not None:
        message += f"; {approximation}"
    gap = best.decrement if np.isfinite(best.decrement) else None
    norm = float(np.linalg.norm(best.gradient))
    converged = best.converged and not failed
    return Convergence(method, converged, count, criterion.network.exchanges, best.value, norm, gap, message)


def parameter_covariance(best: Optimum, n_variances: int) -> Floats:
    """The covariance of the estimated parameters: twice the inverse of the criterion's Hessian.

    The first ``n_variances`` parameters belong to covariances. A flat direction among these is not estimated, because a
    variance is held at zero, and its result is 0. A flat direction among the others gets a large variance.
    """
    if not best.has_hessian:
        return np.zeros_like(best.hessian)
    values, vectors = np.linalg.eigh(np.nan_to_num(best.hessian))
    floor = 1e-7 * max(float(values.max(initial=0.0)), 1e-30)
    is_global = (vectors[n_variances:] ** 2).sum(axis=0) > 0.5
    inverse = np.where((values > floor) | is_global, 2.0 / np.maximum(values, 1e-7 * floor), 0.0)
    return np.asarray((vectors * inverse) @ vectors.T)


def _levels(
    criterion: Criterion, best: Optimum, scale: float, log_scale: tuple[Floats, float], errors: Floats
) -> tuple[LevelComponents, LevelComponents]:
    """The components of both levels in the units of the response. The criterion's covariances are relative to ``scale``.

    ``log_scale`` holds the gradient of the logarithm of the scale in the parameters, and its variance at given parameters.
    """
    split, levels = criterion.parameters.split, []
    for level, (variation, x) in enumerate(split(best.x)):
        S = variation.matrices(x)
        sd = np.sqrt(scale * np.einsum("maa->ma", S))
        sd_error = np.full(sd.shape, np.nan)
        positive = np.nonzero(sd) if best.has_hessian else ((), ())  # without a Hessian there are no standard errors
        for m, a in zip(*positive, strict=True):
            # The delta method for log sd = (log S_aa + log scale) / 2.
            G = np.zeros_like(S)
            G[m, a, a] = 0.5 / S[m, a, a]
            slope = 0.5 * log_scale[0]
            split(slope)[level][1][:] += variation.gradient(x, G)
            sd_error[m, a] = sd[m, a] * np.sqrt(max(float(slope @ errors @ slope), 0.0) + 0.25 * log_scale[1])
        where = np.argsort(criterion.order.terms[variation.terms])
        names = tuple(criterion.names(variation.terms[where]))
        levels.append(LevelComponents(names, variation.kind, scale * S[:, where[:, None], where], sd_error[:, where]))
    return levels[0], levels[1]


def likelihood_ratios(
    surveyed: Survey, learned: Learned, shape: Shape, *, reml: bool = True, progress: Progress | None = None
) -> tuple[LikelihoodRatio, ...]:
    """Test every level that varies, by a fit without it over the network that was surveyed for the fit.

    The state of the nodes after the fit does not change. A statistic far below zero shows that the fit missed its optimum.
    There are no tests if Laplace's approximation failed.
    """
    if learned.components.approximation is not None and learned.components.approximation.failed:
        return ()
    tests, network = [], surveyed.network
    whole = Parameters.of(shape, np.ones(len(network.terms)), network.tree.n_clusters)
    for level, null in shape.without().items():
        components = getattr(learned.components, level)
        if not components.terms:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # the fit itself has warned
            best = find_optimum(criterion_for(surveyed, null, reml=reml, progress=progress))
        statistic = best.value + 2 * learned.components.log_likelihood
        p_value = chi_bar_tail(statistic, components.kind, len(components.terms), len(components.covariance))
        tests.append(LikelihoodRatio(level, statistic, getattr(whole, level).n_parameters, p_value))
    return tuple(tests)


def chi_bar_tail(statistic: float, kind: Kind, q: int, count: int = 1) -> float:
    """The probability of a statistic at least as large if all of ``count`` covariances of ``q`` terms are zero.

    >>> round(chi_bar_tail(2.706, "isotropic", 3), 3), round(chi_bar_tail(2.706, "diagonal", 1), 3)
    (0.05, 0.05)
    """
    if statistic < 1e-9:  # zero, up to the rounding of two log-likelihoods
        return 1.0
    if kind == "full" and q > 1:
        share, p = _cone_shares(q, count)
        with np.errstate(divide="ignore"):
            return float(special.chdtrc(p, statistic / share).mean())
    p = count * (1 if kind == "isotropic" else q)
    k = np.arange(1, p + 1)
    # Binomial weights; scipy.stats has them too, and takes a second to import.
    weights = np.exp(special.gammaln(p + 1) - special.gammaln(k + 1) - special.gammaln(p - k + 1) - p * np.log(2))
    return float(weights @ special.chdtrc(k, statistic))


def _cone_shares(q: int, count: int) -> tuple[Floats, int]:
    """For random symmetric matrices, the share of squared length in positive eigenvalues; and the number of dimensions."""
    rng = np.random.default_rng(0)
    draws = rng.normal(size=(_DIRECTIONS, count, q, q))
    # A symmetric matrix whose coordinates, in an orthonormal basis of such matrices, are independent standard normals.
    symmetric = (draws + draws.swapaxes(2, 3)) / 2
    values = np.linalg.eigvalsh(symmetric)
    positive, whole = (np.maximum(values, 0.0) ** 2).sum(axis=(1, 2)), (values**2).sum(axis=(1, 2))
    return positive / whole, count * q * (q + 1) // 2
