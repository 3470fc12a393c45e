"""Estimate the covariances of clients and clusters: search for the best point of the likelihood, and check it.

Laplace's approximation to the likelihood of classes and counts can have several optima. So the search also looks at points
far from an optimum, and begins again where one of them is better.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from covey._typing import Floats
from covey.errors import DataError, SolverError, warn
from covey.nodes.network import Network
from covey.solvers.result import Fit, Progress
from covey.variance.boundary import resolve_boundary, singular_notes
from covey.variance.centring import uncentred
from covey.variance.components import Learned
from covey.variance.criterion import START, Criterion, LinearCriterion, criterion_for
from covey.variance.frame import node_learned, threads_of
from covey.variance.mm import approach
from covey.variance.results import NOT_FINITE, finish
from covey.variance.search import CONVERGED, NEGLIGIBLE, Optimum, minimise
from covey.variance.structure import Shape
from covey.variance.survey import Survey, survey

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
