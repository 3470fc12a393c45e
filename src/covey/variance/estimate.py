"""From an optimum of the criterion to a fit: coefficients, variances in the user's units, and their standard errors.

Standard errors of the parameters come from the curvature of the log-likelihood at the optimum; those of standard deviations
follow by the delta method.

Estimate the covariances of clients and clusters: search for the best point of the likelihood, and check it.

Laplace's approximation to the likelihood of classes and counts can have several optima. So the search also looks at points
far from an optimum, and begins again where one of them is better.

Do clusters matter, do clients differ? Likelihood-ratio tests of the hypothesis that a level's variances are zero.

Zero is the boundary of the parameter space, so under the null hypothesis the statistic is not chi-squared but chi-bar-squared
(Self and Liang 1987; Stram and Lee 1994): the squared length of a normal vector after projection on the cone of allowed
directions. For one variance that gives half the usual p-value, for ``p`` variances a binomial mixture, for a full covariance
the sum of squared positive eigenvalues of a symmetric normal matrix. Estimates of several variances are taken as uncorrelated.
The length of the vector is independent of its direction. So the p-value is a mean over directions ``u`` of chi-squared tails,
``P(chi2_p > t / h(u))``, where ``h`` is the share of the squared length that remains after projection.
"""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np
from scipy import special

from covey._typing import Floats
from covey.errors import ConvergenceWarning, DataError, SolverError, warn
from covey.nodes.network import Network
from covey.solvers.direct.elimination import Quadratic
from covey.solvers.result import Convergence, Fit, Progress
from covey.variance.columns import NonFiniteClients, node_learned, threads_of, uncentred
from covey.variance.components import (
    Components,
    Kind,
    Learned,
    LevelComponents,
    LikelihoodRatio,
    Method,
    Parameters,
    Shape,
    Whole,
)
from covey.variance.criterion import START, Criterion, LaplaceCriterion, LinearCriterion, criterion_for
from covey.variance.identify import Survey, survey
from covey.variance.laplace_likelihood import FinishMode
from covey.variance.linear_likelihood import Evaluation, FinishLinear, UpperPosterior, cluster_covariances, invert
from covey.variance.search import CONVERGED, MANY, NEGLIGIBLE, Optimum, approach, minimise, resolve_boundary, singular_notes

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


_OTHER_STARTS = ((5.0, 5.0), (0.05, 0.05), (20.0, 0.5), (0.5, 20.0))  # sds of clients and clusters, in units of the residual's
_FAR = 6.0  # the factor by which a level's standard deviations are changed, up and down, to look for better points
_ROUNDS = 4
_MM_STEPS = 4  # cheap steps before the search


def estimate(
    network: Network,
    shape: Shape,
    *,
    reml: bool = True,
    thorough: bool = False,
    progress: Progress | None = None,
    known: Survey | None = None,
) -> tuple[Fit, Learned]:
    """Learn the covariances of a hierarchy over a network, and fit it with them.

    Where the network holds all clients in memory, the fit has their coefficients and :class:`.Learned` has their sums.
    Elsewhere both stay at the nodes (:func:`.node_learned`), and the arrays of clients are empty.

    Parameters
    ----------
    network : the nodes
    shape : which terms vary at which level, and how
    reml : restricted maximum likelihood, for a linear model; else maximum likelihood
    thorough : begin also at the best fits with one level less; a doubtful optimum makes the search do so by itself
    progress : called with the number of evaluations, the criterion and the norm of its gradient
    known : the survey of the same network by an earlier fit, if there was one

    >>> from covey.datasets import simulate
    >>> from covey.losses import Gaussian
    >>> from covey.nodes.network import InMemory
    >>> data = simulate(clusters=30, clients=20, rows=10, d=1, client_sd=0.5, cluster_sd=1.0, seed=0).data
    >>> fit, learned = estimate(InMemory.of(data, Gaussian()), Shape((0,), (0,)))
    >>> learned.components.client.sd.round(2).tolist(), learned.components.cluster.sd.round(2).tolist()
    ([[0.52]], [[0.84]])
    """
    with threads_of(network):
        known = survey(network, shape) if known is None else known
        criterion = criterion_for(known, shape, reml=reml)
        best, notes = find_optimum(criterion, progress)
        if thorough or criterion.is_doubtful(best.x):
            best, notes = _from_smaller_models(criterion, best, notes, reml, progress)
        fit, learned = uncentred(*finish(criterion, best, notes), known.columns, network.terms, network.tree)
    if not best.converged:
        warn(notes[-1])
    if not all(np.isfinite(each).all() for each in (fit.w, fit.wbar, learned.covariance)):
        raise DataError(NOT_FINITE)
    node = network.clients()
    if node is None:
        return fit, learned
    return replace(fit, theta=node.coefficients()), node_learned(node, learned.components, learned.covariance)


def _from_smaller_models(
    criterion: Criterion, best: Optimum, notes: tuple[str, ...], reml: bool, progress: Progress | None
) -> tuple[Optimum, tuple[str, ...]]:
    """Search again from the optima of the models with one level less, if two levels vary."""
    for level, null in criterion.shape.without().items():
        if null.client or null.cluster:
            smaller = criterion_for(criterion.known, null, reml=reml)
            below, _ = find_optimum(smaller, progress)
            again, other_notes = search(criterion, progress, criterion.start_from(smaller, below.x, level))
            if again.value < best.value - NEGLIGIBLE:
                best, notes = again, other_notes
    return best, notes


def find_optimum(criterion: Criterion, progress: Progress | None = None) -> tuple[Optimum, tuple[str, ...]]:
    """As :func:`search`, and once more from the rows if the sums of a linear model have lost too many digits."""
    best, notes = search(criterion, progress)
    if isinstance(criterion, LinearCriterion) and criterion.has_lost_digits(best.x):
        criterion.use_client_fits()
        best, notes = search(criterion, progress)
    return best, notes


def search(
    criterion: Criterion, progress: Progress | None = None, start: Floats | None = None
) -> tuple[Optimum, tuple[str, ...]]:
    """The best point found, with notes on what is singular and what did not converge.

    One start is enough where it leads to a proven optimum and no far point is better. Otherwise there are other starts.
    """
    best = _search_from(criterion, criterion.start(START, START) if start is None else start, progress)
    for _ in range(_ROUNDS):
        far = _better_far_point(criterion, best) if criterion.may_have_other_optima(best.x) else None
        if far is None:
            break
        best = _better(best, _search_from(criterion, far, progress))
    if not best.converged or (start is None and criterion.is_doubtful(best.x)):
        for sds in _OTHER_STARTS:
            best = _better(best, _search_from(criterion, criterion.start(*sds), progress))
    if not np.isfinite(best.value):
        raise DataError("The likelihood could not be computed; the columns or counts are on extreme scales: rescale them.")
    notes = singular_notes(criterion, best)
    if not best.converged:
        left = "the likelihood still rises to some side"
        if np.isfinite(best.decrement):
            left = f"by the curvature there, {best.decrement:.1e} of twice the log-likelihood is left to gain"
        notes.append(
            f"the variance components did not converge: {left}; let fewer terms vary, centre and scale the columns, or look "
            "for clients whose rows are all alike"
        )
    return best, tuple(notes)


def _search_from(criterion: Criterion, x: Floats, progress: Progress | None) -> Optimum:
    """Search from one start. A start where the criterion cannot be computed gives an infinite value."""
    try:
        x, curvature = approach(criterion, x, _MM_STEPS)
    except (SolverError, np.linalg.LinAlgError):
        nothing = np.full((len(x), len(x)), np.nan)
        return Optimum(x, np.inf, np.full(len(x), np.nan), nothing, np.inf, 0)
    best = minimise(criterion.value_and_gradient, x, curvature, many=criterion.values_and_gradients, progress=progress)
    return resolve_boundary(criterion, replace(best, evaluations=best.evaluations + _MM_STEPS + 1), progress)


def _better(best: Optimum, other: Optimum) -> Optimum:
    """The lower of two, or of two as low the one that is proven; with the evaluations of both."""
    proven = other.converged and not best.converged and other.value < best.value + NEGLIGIBLE
    chosen = other if other.value < best.value - NEGLIGIBLE or proven else best
    return replace(chosen, evaluations=best.evaluations + other.evaluations)


def _better_far_point(criterion: Criterion, best: Optimum) -> Floats | None:
    """The lowest of some points far from ``best``, if it is lower."""
    lowest, where = best.value - CONVERGED, None
    points = criterion.parameters.far(best.x, _FAR)
    for x, (value, _) in zip(points, criterion.values_and_gradients(points, independent=True), strict=True):
        if value < lowest:
            lowest, where = value, x
    criterion.forget()
    return where


_DIRECTIONS = 4096


def likelihood_ratios(
    known: Survey, learned: Learned, shape: Shape, *, reml: bool = True, progress: Progress | None = None
) -> tuple[LikelihoodRatio, ...]:
    """Test every level that varies, each by a fit without it, over the network that was surveyed for the fit.

    What the nodes keep of the fit stays as it is. A statistic far below zero shows that the fit has missed its optimum.
    """
    tests, network = [], known.network
    whole = Parameters.of(shape, np.ones(len(network.terms)), network.tree.n_clusters)
    for level, null in shape.without().items():
        components = getattr(learned.components, level)
        if not components.terms:
            continue
        with warnings.catch_warnings(), threads_of(network):
            warnings.simplefilter("ignore", ConvergenceWarning)  # the fit itself has warned
            best, _ = find_optimum(criterion_for(known, null, reml=reml), progress)
        statistic = best.value + 2 * learned.components.log_likelihood
        p_value = chi_bar_tail(statistic, components.kind, len(components.terms), len(components.covariance))
        tests.append(LikelihoodRatio(level, statistic, getattr(whole, level).n_parameters, p_value))
    return tuple(tests)


def chi_bar_tail(statistic: float, kind: Kind, q: int, count: int = 1) -> float:
    """The probability of a statistic at least as large if all of ``count`` covariances of ``q`` terms are zero.

    >>> round(chi_bar_tail(2.706, "isotropic", 3), 3), round(chi_bar_tail(2.706, "diagonal", 1), 3)
    (0.05, 0.05)
    """
    if statistic <= 0:
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
