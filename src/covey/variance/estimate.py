"""Estimate the covariances of clients and clusters: the best point of the likelihood, checked, and put in words."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from covey._typing import Floats
from covey.errors import DataError, SolverError, warn
from covey.nodes.network import Network
from covey.solvers.result import Fit, Progress
from covey.variance.boundary import polished, singular
from covey.variance.centring import uncentred
from covey.variance.components import Learned
from covey.variance.frame import node_learned, threads_of
from covey.variance.problem import START, Likelihood, LinearLikelihood, problem_for
from covey.variance.search import CONVERGED, NEGLIGIBLE, Optimum, minimise
from covey.variance.structure import Shape
from covey.variance.survey import Survey, survey

_OTHER_STARTS = ((5.0, 5.0), (0.05, 0.05), (20.0, 0.5), (0.5, 20.0))  # sds of clients and clusters, in units of the residual's
_FAR = 6.0  # the factor by which a level's standard deviations are changed, up and down, to look for better points
_ROUNDS = 4
_APPROACH = 4  # cheap steps before the search


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
        problem = problem_for(known, shape, reml=reml)
        best, notes = search_rows(problem, progress)
        if thorough or problem.doubtful(best.x):
            best, notes = _from_below(problem, best, notes, reml, progress)
        fit, learned = uncentred(*problem.finish(best, notes), known.frame, network.terms, network.tree)
    if not best.converged:
        warn(notes[-1])
    if not all(np.isfinite(each).all() for each in (fit.w, fit.wbar, learned.covariance)):
        raise DataError("The coefficients are not finite; the columns are probably on extreme scales: standardise them.")
    node = network.clients()
    if node is None:
        return fit, learned
    return replace(fit, theta=node.coefficients()), node_learned(node, learned.components, learned.covariance)


def _from_below(
    problem: Likelihood, best: Optimum, notes: tuple[str, ...], reml: bool, progress: Progress | None
) -> tuple[Optimum, tuple[str, ...]]:
    """Begin again at the best fits with one level less, where there are two."""
    for level, null in problem.shape.without().items():
        if null.client or null.cluster:
            smaller = problem_for(problem.known, null, reml=reml)
            found, _ = search_rows(smaller, progress)
            again, told = search(problem, progress, problem.joined(level, smaller, found.x))
            if again.value < best.value - NEGLIGIBLE:
                best, notes = again, told
    return best, notes


def search_rows(problem: Likelihood, progress: Progress | None = None) -> tuple[Optimum, tuple[str, ...]]:
    """As :func:`search`, with the rows at hand to go back to where their sums do not tell enough."""
    best, notes = search(problem, progress)
    if isinstance(problem, LinearLikelihood) and problem.blurred(best):
        problem.sharpened()
        best, notes = search(problem, progress)
    return best, notes


def search(
    problem: Likelihood, progress: Progress | None = None, start: Floats | None = None
) -> tuple[Optimum, tuple[str, ...]]:
    """The best point there is to be found, and what is to be said of it.

    One start is enough where it leads to a proven optimum than which no far point is better; else there are others.
    """
    best = _from(problem, problem.start(START, START) if start is None else start, progress)
    for _ in range(_ROUNDS):
        far = _elsewhere(problem, best) if problem.may_have_others(best.x) else None
        if far is None:
            break
        best = _better(best, _from(problem, far, progress))
    if not best.converged or (start is None and problem.doubtful(best.x)):
        for sds in _OTHER_STARTS:
            best = _better(best, _from(problem, problem.start(*sds), progress))
    if not np.isfinite(best.value):
        raise DataError("The likelihood could not be computed; the columns or counts are on extreme scales: rescale them.")
    notes = singular(problem, best)
    if not best.converged:
        sentence = (
            f"the variance components did not converge: {_left(best.decrement)}; let fewer terms vary, centre and scale the "
            "columns, or look for clients whose rows are all alike"
        )
        notes.append(sentence)
    return best, tuple(notes)


def _from(problem: Likelihood, x: Floats, progress: Progress | None) -> Optimum:
    """Search from one start; a start at which there is no likelihood leads nowhere."""
    try:
        x, curvature = problem.approach(x, _APPROACH)
    except (SolverError, np.linalg.LinAlgError):
        nothing = np.full((len(x), len(x)), np.nan)
        return Optimum(x, np.inf, np.full(len(x), np.nan), nothing, np.inf, 0)
    found = minimise(problem.criterion, x, curvature, criteria=problem.criteria, progress=progress)
    return polished(problem, replace(found, evaluations=found.evaluations + _APPROACH + 1), progress)


def _better(best: Optimum, other: Optimum) -> Optimum:
    """The lower of two, or of two as low the one that is proven; with the evaluations of both."""
    proven = other.converged and not best.converged and other.value < best.value + NEGLIGIBLE
    chosen = other if other.value < best.value - NEGLIGIBLE or proven else best
    return replace(chosen, evaluations=best.evaluations + other.evaluations)


def _elsewhere(problem: Likelihood, best: Optimum) -> Floats | None:
    """A far point that is better than the best: the likelihood of classes and counts can have several tops."""
    lowest, where = best.value - CONVERGED, None
    points = problem.far(best.x, _FAR)
    for x, (value, _) in zip(points, problem.criteria(points, afresh=True), strict=True):
        if value < lowest:
            lowest, where = value, x
    problem.forget()
    return where


def _left(decrement: float) -> str:
    if not np.isfinite(decrement):
        return "the likelihood still rises to some side"
    return f"by the curvature there, {decrement:.1e} of twice the log-likelihood is left to gain"
