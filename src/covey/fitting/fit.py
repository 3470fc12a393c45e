"""``fit(network, problem) -> Model``: the one path from rows to models, wherever the rows are.

Penalties are given, cross-validated or learned from the likelihood; this is the one place that decides which of the three.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from covey._typing import Floats
from covey.errors import CoveyError, DataError, PenaltyError, SolverError, warn
from covey.fitting.selection import Count, fit_baseline, search
from covey.model.model import Elsewhere, Fitted, Model, assemble
from covey.nodes.network import Network, SetGamma
from covey.objective.objective import Penalty
from covey.problem.problem import Problem, Spec
from covey.solvers import Fit, Progress, solve
from covey.solvers.registry import check_options, first_order
from covey.tables.bars import Vary, vary_from_setting
from covey.tree.hierarchy import Hierarchy
from covey.variance.columns import ForgetCovariances
from covey.variance.components import LikelihoodRatio, Shape
from covey.variance.estimate import estimate, likelihood_ratios
from covey.variance.identify import survey

_EXTREME = "The coefficients are not finite; the columns are probably on extreme scales: standardise them."


def fit(
    network: Network,
    problem: Problem,
    *,
    elsewhere: Elsewhere | None = None,
    progress: Progress | None = None,
    count: Count | None = None,
) -> Model:
    """Fit a problem to the rows of a network.

    Parameters
    ----------
    network : holds the clients' rows, here (:class:`.InMemory`) or at other places
    problem : what to fit, from :func:`covey.problem.problem.resolve`
    elsewhere : who has the clients, if they are not in this process; the model is then without them
    progress : called now and then with the iteration, the objective and the gradient norm
    count : called during cross-validation with the number of fits done and to do

    >>> from covey.datasets import load_radon
    >>> from covey.nodes.network import InMemory
    >>> from covey.problem.problem import resolve
    >>> from covey.problem.reading import read_rows
    >>> from covey.problem.problem import Spec
    >>> data, problem = read_rows(load_radon(), resolve(Spec(formula="log_radon ~ floor + (1 | state/county)")))
    >>> fit(InMemory.of(data, problem.loss), problem).wbar.round(3).tolist()
    [0.941, -0.712]
    """
    fitted = learn(network, problem, progress=progress, count=count)
    node = network.clients()
    if node is not None:
        return assemble(problem, fitted, node.data.hierarchy, node.data.rows_per_client)
    return model_without_clients(problem, fitted, network.tree, elsewhere)


def model_without_clients(problem: Problem, fitted: Fitted, tree: Hierarchy, elsewhere: Elsewhere | None) -> Model:
    """The models of clusters and of the whole, where those of the clients are at other places."""
    return assemble(problem, without_clients(fitted), nobody(tree), np.empty(0, dtype=np.int64), elsewhere)


def learn(network: Network, problem: Problem, *, progress: Progress | None = None, count: Count | None = None) -> Fitted:
    """Coefficients and penalties, as :func:`fit` has them; the clients' only where the network has them in this process."""
    spec, tree, node = problem.spec, network.tree, network.clients()
    check_solver(spec)
    if node is None:
        check_elsewhere(spec)
    elif spec.baseline is not None:
        return Fitted(fit_baseline(spec.baseline, node.data, network.loss, seed=spec.seed, progress=progress))
    if spec.by_likelihood and tree.n_clients == 1:
        _refuse_one_client(network, problem)
    if spec.by_likelihood and tree.n_clients > 1 and not _in_two_steps(spec):
        return _by_likelihood(network, problem, progress)
    penalty = penalty_for(network, problem, progress=progress, count=count)
    found = _solve(network, penalty, spec, progress)
    if not all(np.isfinite(each).all() for each in (found.theta, found.w, found.wbar)):
        raise CoveyError(_EXTREME)
    return Fitted(found, penalty)


def penalty_for(network: Network, problem: Problem, *, progress: Progress | None = None, count: Count | None = None) -> Penalty:
    """One number for each client and cluster: as given, by cross-validation, or from the likelihood with isotropic spread."""
    spec, tree, node = problem.spec, network.tree, network.clients()
    if spec.learns == "cv" and node is not None:
        found = search(node.data, network.loss, seed=spec.seed, progress=count)
        return Penalty.of(tree, gamma=found.gamma, lam=found.lam)
    gamma, lam, learned = spec.gamma, spec.lam, spec.by_likelihood and tree.n_clients > 1
    if learned:
        gamma, lam = _isotropic(network, problem, progress)
    each = None if node is not None else _of_clusters(gamma, tree)
    if each is not None:
        gamma = each[tree.parent]
    penalty = Penalty.of(tree, gamma=1.0 if gamma is None else gamma, lam=lam, alpha=spec.alpha)
    if learned:
        network.ask(ForgetCovariances())
    if each is not None:
        network.ask(SetGamma(each))
    return penalty


def check_solver(spec: Spec) -> None:
    """Refuse a solver that is not there, options it does not have, and what it cannot be combined with."""
    check_options(spec.solver, spec.options)
    if spec.solver not in first_order():
        return
    if spec.baseline is not None:
        raise SolverError(f"A baseline is solved exactly; leave out solver={spec.solver!r} and its options.")
    if spec.james_stein:
        raise SolverError(
            f"james_stein=True shrinks the global model of an exact hierarchical fit; leave out solver={spec.solver!r}."
        )
    spec.check_isotropic(f"solver={spec.solver!r}")


def check_elsewhere(spec: Spec) -> None:
    """Refuse what cannot be fitted without all rows in this process, before any site is asked."""
    for asked, what in ((spec.baseline is not None, f"baseline={spec.baseline!r}"), (spec.learns == "cv", "penalty='cv'")):
        if asked:
            raise SolverError(
                f"{what} across sites is not supported: give gamma and lam, or let reml or ml learn them from the likelihood."
            )
    for name in ("checkpoint", "start"):
        if name in (spec.options or {}):
            raise SolverError(f"The option {name!r} is for clients that are all in memory; across sites leave it out.")


def nobody(tree: Hierarchy) -> Hierarchy:
    """The clusters of a hierarchy, without the clients."""
    return Hierarchy(np.zeros(tree.n_clusters + 1, dtype=np.int64), tree.client_ids[:0], tree.cluster_ids)


def without_clients(fitted: Fitted) -> Fitted:
    """The part of a fit that is not about single clients."""
    given = fitted.penalty
    penalty = None if given is None else Penalty(given.gamma[:0], given.lam, given.cluster_gamma)
    return replace(fitted, fit=replace(fitted.fit, theta=np.empty((0, len(fitted.fit.wbar)))), penalty=penalty)


# The solvers and the likelihood, over any network


def _solve(network: Network, penalty: Penalty, spec: Spec, progress: Progress | None) -> Fit:
    node = network.clients()
    if node is not None:
        node.gamma = penalty.gamma
    settings: dict[str, Any] = {"solver": spec.solver, "tol": spec.tol, "max_iter": spec.max_iter, "progress": progress}
    settings |= {"james_stein": spec.james_stein, "seed": spec.seed, "options": spec.options}
    return solve(network, penalty, **settings)


def _of_clusters(gamma: Any, tree: Hierarchy) -> Floats:
    """One value for each cluster, ``(k,)``; the ids of clients, for which there could be others, are not known here."""
    ids = tree.clusters.tolist()
    by_id = set(gamma) == set(ids) if isinstance(gamma, Mapping) else np.shape(gamma) in ((), (len(ids),))
    if not by_id:
        odd = sorted(set(gamma) ^ set(ids), key=repr) if isinstance(gamma, Mapping) else []
        which = "" if not odd else f" {'No gamma is given for' if odd[0] in ids else 'There is no'} cluster {odd[0]!r}."
        raise PenaltyError(
            "Across sites gamma is one number, or one for each cluster, since clients' ids stay at their sites; give it so."
            + which
        )
    alone = Hierarchy(np.arange(len(ids) + 1), tree.cluster_ids, tree.cluster_ids)
    return Penalty.of(alone, gamma=1.0 if gamma is None else gamma).gamma


def _by_likelihood(network: Network, problem: Problem, progress: Progress | None) -> Fitted:
    """Covariances from the likelihood, each level tested by a fit without it."""
    spec = problem.spec
    shape = shape_of(network.tree, network.terms, spec, _vary(problem, network.terms))
    asked: dict[str, Any] = {"reml": spec.learns == "reml", "progress": progress}
    known = survey(network, shape)
    found, learned = estimate(network, shape, surveyed=known, **asked)
    if spec.tests:
        tests = likelihood_ratios(known, learned, shape, **asked)
        if _worse_than_null(tests):
            found, learned = estimate(network, shape, thorough=True, surveyed=known, **asked)
            tests = likelihood_ratios(known, learned, shape, **asked)
        found, tests = _doubted(found, tests)
        found = replace(found, convergence=replace(found.convergence, exchanges=known.network.exchanges))
        learned = replace(learned, components=replace(learned.components, tests=tests))
    return Fitted(found, None, learned)


def _vary(problem: Problem, terms: Sequence[str]) -> Vary:
    """Which terms vary; of a draft, whose terms are those of the network, by its setting."""
    return vary_from_setting(problem.spec.vary, terms) if problem.draft else problem.vary


def _in_two_steps(spec: Spec) -> bool:
    """Whether learned penalties go to a solver that knows only numbers, not the likelihood's own fit."""
    return spec.solver in first_order() or bool(spec.james_stein)


def _isotropic(network: Network, problem: Problem, progress: Progress | None) -> tuple[Any, float]:
    """The likelihood's ``gamma``, one for all clients or for those of each cluster, and ``lam``, with isotropic spread."""
    spec, tree, terms = problem.spec, network.tree, network.terms
    vary = _vary(problem, terms)
    for level, varying in (("client", vary.client), ("cluster", vary.cluster if tree.n_clusters > 1 else terms)):
        if set(varying) != set(terms):
            why = f"solver={spec.solver!r}" if spec.solver in first_order() else "james_stein=True"
            raise PenaltyError(f"{why} lets every term vary; let all vary by {level}, or leave it out.")
    shape = shape_of(tree, terms, replace(spec, covariance="isotropic"), vary)
    learned = estimate(network, shape, reml=spec.learns == "reml", progress=progress)[1]
    scale = learned.dispersion
    client, cluster = (level.sd[:, :1] ** 2 / scale for level in (learned.components.client, learned.components.cluster))
    if (client == 0).any():
        raise DataError(
            "Clients do not vary within their clusters, so no gamma ties them; fit baseline='single-model', or give gamma."
        )
    # To eight digits: the last ones depend on who is at which node, and random choices that are seeded must not.
    gamma = _digits(1.0 / client[:, 0])
    lam = float(_digits(1.0 / cluster[:1, 0])[0]) if cluster.size and cluster[0, 0] > 0 else np.inf
    return gamma if len(gamma) > 1 else float(gamma[0]), float(lam)


def _digits(values: Floats) -> Floats:
    return np.array([float(f"{value:.7e}") for value in values.tolist()])


def shape_of(tree: Hierarchy, terms: Sequence[str], spec: Spec, vary: Vary) -> Shape:
    """Which terms vary, and how; levels of one unit, which cannot be told from the whole, are refused."""
    clustered = tree.n_clusters > 1
    if not clustered and tree.cluster_ids.to_list() != ["all"]:
        _refuse_one(tree.cluster_ids.to_list(), "cluster")
    asked = spec.kinds
    at = {term: index for index, term in enumerate(terms)}
    kind = {
        "client": asked["client"] or vary.client_kind or "diagonal",
        "cluster": asked["cluster"] or vary.cluster_kind or "diagonal",
    }
    client = tuple(at[term] for term in vary.client)
    cluster = tuple(at[term] for term in vary.cluster) if clustered else ()
    if not client and not cluster:
        raise DataError("Nothing varies, neither by client nor by cluster; let a term vary, or fit baseline='single-model'.")
    return Shape(client, cluster, kind["client"], kind["cluster"], bool(spec.per_cluster))  # type: ignore[arg-type]


def _refuse_one_client(network: Network, problem: Problem) -> None:
    """Refuse to learn how clients vary from one; one that nobody named is a plain regression."""
    if network.clients() is None:
        raise DataError(
            "There is one client only, so variation between clients cannot be told from the global model; give gamma and lam."
        )
    ids = network.tree.client_ids.to_list()
    if ids != ["all"] or problem.has_bars or problem.spec.penalty in ("reml", "ml"):
        _refuse_one(ids, "client")


def _refuse_one(ids: list[Any], level: str) -> None:
    if len(ids) == 1:
        raise DataError(
            f"There is one {level} only, {ids[0]!r}, so variation between {level}s cannot be told from the global model; "
            f"leave out {level}=, or give gamma and lam."
        )


def _doubted(fit: Fit, tests: tuple[LikelihoodRatio, ...]) -> tuple[Fit, tuple[LikelihoodRatio, ...]]:
    """A fit that does better without a level than with it has not found its optimum, and is not said to have."""
    worse = _worse_than_null(tests)
    if worse:
        message = f"not at its optimum: without variation between {worse[0].level}s the likelihood is higher; fit that model"
        warn(message)
        fit = replace(fit, convergence=replace(fit.convergence, converged=False, message=message))
    return fit, tuple(replace(test, statistic=max(test.statistic, 0.0)) for test in tests)


def _worse_than_null(tests: tuple[LikelihoodRatio, ...]) -> list[LikelihoodRatio]:
    return [test for test in tests if test.statistic < -1e-4]
