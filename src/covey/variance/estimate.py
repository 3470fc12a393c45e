"""Estimate the covariances of clients and clusters: the best point of the likelihood, checked, and put in words."""

from __future__ import annotations

from dataclasses import replace

from covey.data import GroupedData
from covey.errors import warn
from covey.losses import Loss
from covey.solvers.result import Fit, Progress
from covey.solvers.threads import threads_for
from covey.variance.boundary import polished, singular
from covey.variance.components import Learned
from covey.variance.identify import check_told_apart
from covey.variance.problem import START, Generalised, Linear, Problem, Sums
from covey.variance.search import NEGLIGIBLE, Optimum, minimise
from covey.variance.structure import Shape

_OTHER_STARTS = (0.05, 2.0)
_FEW = 16  # parameters with which a singular fit, proven as it may be, is tried from other starts too
_APPROACH = 4  # cheap steps before the search


def estimate(
    data: GroupedData, loss: Loss, shape: Shape, *, reml: bool = True, progress: Progress | None = None
) -> tuple[Fit, Learned]:
    """Learn the covariances of a hierarchy from its data, and fit it with them.

    >>> from covey.datasets import simulate
    >>> from covey.losses import Gaussian
    >>> data = simulate(clusters=30, clients=20, rows=10, d=1, client_sd=0.5, cluster_sd=1.0, seed=0).data
    >>> fit, learned = estimate(data, Gaussian(), Shape((0,), (0,)))
    >>> learned.components.client.sd.round(2).tolist(), learned.components.cluster.sd.round(2).tolist()
    ([[0.52]], [[0.84]])
    """
    with threads_for(data.n_rows * data.n_terms + data.n_clients * data.n_terms**3 // 8):
        problem: Problem
        if loss.name == "gaussian":
            sums = Sums.of(data, loss)
            check_told_apart(sums.units, data.hierarchy, data.terms, shape, squares=sums.squares)
            problem = Linear(sums, data.hierarchy, data.terms, shape, reml=reml)
        else:
            problem = Generalised(data, loss, shape)
        best, notes = search(problem, progress)
        return problem.finish(best, notes)


def search(problem: Problem, progress: Progress | None = None) -> tuple[Optimum, tuple[str, ...]]:
    """The best point from one start, or, where that ends in doubt, from several; and what is to be said of it."""
    best = _from(problem, START, progress)
    spent = best.evaluations
    if not best.converged or (singular(problem, best) and len(best.x) <= _FEW):
        for sd in _OTHER_STARTS:
            other = _from(problem, sd, progress)
            spent += other.evaluations
            proven = other.converged and not best.converged and other.value < best.value + NEGLIGIBLE
            best = other if other.value < best.value - NEGLIGIBLE or proven else best
    best = replace(best, evaluations=spent)
    notes = [*problem.notes, *singular(problem, best)]
    for note in problem.notes:
        warn(note)
    if not best.converged:
        sentence = (
            f"the variance components did not converge: by the curvature there, {best.decrement:.1e} of twice the "
            "log-likelihood is left to gain; let fewer terms vary, or standardise the columns"
        )
        warn(sentence)
        notes.append(sentence)
    return best, tuple(notes)


def _from(problem: Problem, sd: float, progress: Progress | None) -> Optimum:
    x, curvature = problem.approach(problem.start(sd), _APPROACH)
    found = minimise(problem.criterion, x, curvature, progress=progress)
    return polished(problem, replace(found, evaluations=found.evaluations + _APPROACH + 1), progress)
