"""``fit(network, problem) -> Model``: the only path from rows to a model, for rows in memory and across sites.

fit                         learn coefficients, then build the model
  learn                     baseline, likelihood, or a solver with given penalties
    check_solver            refuse settings that contradict each other
    check_elsewhere         refuse settings that need all rows in this process
    fit_baseline            a model without the hierarchy (selection.py)
    _by_likelihood          learn covariances and test each level
    penalty_for             penalties: given, by cross-validation, or learned with isotropic covariances
    solve                   minimise the objective (covey.solvers)
    plain_regression        standard errors if there are no groups (plain.py)
  assemble                  the model (covey.model)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from covey._typing import Floats
from covey.errors import CoveyError, DataError, FormulaError, PenaltyError, SolverError, listing, warn
from covey.fitting.plain import plain_regression
from covey.fitting.selection import Count, fit_baseline, search
from covey.fitting.sparse import begin, check_sparse, finished, penalised
from covey.model.batches import Batches, TakeRows
from covey.model.model import Elsewhere, Fitted, Model, assemble
from covey.nodes.network import Network, SetGamma
from covey.nodes.requests import PutGamma, joined
from covey.objective.objective import Penalty, PenaltyLike
from covey.problem.problem import Problem, Spec
from covey.solvers import Progress, solve
from covey.solvers.registry import check_options, first_order
from covey.tables.design import Vary, vary_from_setting
from covey.tree.hierarchy import Hierarchy
from covey.variance.columns import ForgetCovariances
from covey.variance.components import LikelihoodRatio
from covey.variance.estimate import NOT_FINITE, estimate, likelihood_ratios
from covey.variance.identify import survey
from covey.variance.parameters import Shape
from covey.variance.shared_evidence import check_determined

_IMPLAUSIBLE = 1e30  # size of a coefficient


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
    network : Network
        Holds the rows of the clients, in memory (:class:`.InMemory`) or across sites.
    problem : Problem
        The problem, from :func:`covey.problem.problem.resolve`.
    elsewhere : Elsewhere, optional
        Which sites hold the clients, if they are not in this process. The model then contains no clients.
    progress : callable, optional
        Called from time to time with the iteration, the objective and the norm of the gradient.
    count : callable, optional
        Called during cross-validation with the number of finished fits and of all fits.

    Returns
    -------
    Model

    Examples
    --------
    >>> from covey.datasets import load_radon
    >>> from covey.nodes.network import InMemory
    >>> from covey.problem.problem import Spec, resolve
    >>> from covey.problem.rows import read_rows
    >>> data, problem = read_rows(load_radon(), resolve(Spec(formula="log_radon ~ floor + (1 | state/county)")))
    >>> fit(InMemory.of(data, problem.loss), problem).wbar.round(3).tolist()
    [0.941, -0.712]
    """
    fitted = _with_sanity_check(learn(network, problem, progress=progress, count=count))
    places = network.places
    if not places:
        return model_without_clients(problem, fitted, network.tree, elsewhere)
    batches, dropped, held = Batches.from_table(None), None, network.every(TakeRows(hashes=fitted.learned is not None))
    for each, at in zip(held, places, strict=True):
        dropped = each.dropped if dropped is None else dropped + each.dropped
        batches = batches.joined(each.batches.moved(at))
    rows, kept = joined([each.rows for each in held], places), None if fitted.learned is None else batches
    return assemble(problem, fitted, network.tree, rows, dropped=dropped, batches=kept)


def learn(network: Network, problem: Problem, *, progress: Progress | None = None, count: Count | None = None) -> Fitted:
    """Return coefficients and penalties; those of clients only if the clients are in this process."""
    spec, node = problem.spec, network.clients()
    check_solver(spec)
    shared = node is not None and node.data.shared is not None
    if shared:
        check_sparse(spec, network.tree.n_clients)
    if not network.places:
        check_elsewhere(spec)
    elif node is None:
        _check_several(spec)
    elif spec.baseline is not None:
        return Fitted(fit_baseline(spec.baseline, node.data, network.loss, seed=spec.seed, progress=progress))
    if spec.by_likelihood and network.tree.n_clients == 1:
        _refuse_one_client(network, problem)
    elif spec.by_likelihood and not (spec.solver in first_order() or spec.james_stein):
        return _by_likelihood(network, problem, progress)
    penalty = penalty_for(network, problem, progress=progress, count=count)
    settings: dict[str, Any] = {"solver": spec.solver, "options": spec.options, "seed": spec.seed, "progress": progress}
    settings |= {"tol": spec.tol, "max_iter": spec.max_iter, "james_stein": spec.james_stein}
    found = penalised(network, penalty, spec, settings) if shared else solve(network, penalty, **settings)
    if not all(np.isfinite(part).all() for part in (found.theta, found.w, found.wbar)):
        raise CoveyError(NOT_FINITE)
    given = spec.james_stein or spec.solver in first_order() or not spec.by_likelihood
    if node is not None and network.tree.n_clients == 1 and not given:
        learned = plain_regression(node.data, network.loss, found)
        return Fitted(found, penalty if learned is None else None, learned)
    return Fitted(found, penalty)


def _with_sanity_check(fitted: Fitted) -> Fitted:
    """Do not call a fit converged whose coefficients nobody can have meant, whatever the gradient says."""
    fit = fitted.fit
    beta = np.empty(0) if fit.shared is None else fit.shared.beta
    largest = max(float(np.abs(part).max(initial=0.0)) for part in (fit.theta, fit.w, fit.wbar, beta))
    if largest < _IMPLAUSIBLE or not fit.convergence.converged:
        return fitted
    why = f"a coefficient of {largest:.0e} is not plausible: look for damaged values, or put columns in other units"
    end = replace(fit.convergence, converged=False, message=f"{fit.convergence.message}; {why}")
    warn(end.message)
    return replace(fitted, fit=replace(fit, convergence=end))


def model_without_clients(problem: Problem, fitted: Fitted, tree: Hierarchy, elsewhere: Elsewhere | None) -> Model:
    """Build the model of the operator of a fit across sites: clusters and the global model, but no clients."""
    no_clients = replace(tree, cluster_ptr=np.zeros(tree.n_clusters + 1, dtype=np.int64), client_ids=tree.client_ids[:0])
    given = fitted.penalty
    penalty = None if given is None else Penalty(given.gamma[:0], given.lam, given.cluster_gamma)
    without = replace(fitted, fit=replace(fitted.fit, theta=np.empty((0, len(fitted.fit.wbar)))), penalty=penalty)
    dropped = None if elsewhere is None else elsewhere.dropped
    return assemble(problem, without, no_clients, np.empty(0, dtype=np.int64), elsewhere=elsewhere, dropped=dropped)


# Settings that exclude each other


def check_solver(spec: Spec) -> None:
    """Raise an error for an unknown solver or option, and for settings that the solver cannot be combined with."""
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
    """Raise an error for settings that need all rows in this process, before any site receives a message."""
    for asked, what in ((spec.baseline is not None, f"baseline={spec.baseline!r}"), (spec.learns == "cv", "penalty='cv'")):
        if asked:
            raise SolverError(f"{what} is not supported across sites; leave it out, and give or learn gamma and lam.")
    for name, why in (("checkpoint", "the coordinator's journal resumes a run there"), ("start", "clients are at the sites")):
        if name in (spec.options or {}):
            raise SolverError(f"The option {name!r} is not supported across sites; leave it out: {why}.")


def _check_several(spec: Spec) -> None:
    """Raise an error for settings that need all rows in one node."""
    for asked, what in ((spec.baseline is not None, f"baseline={spec.baseline!r}"), (spec.learns == "cv", "penalty='cv'")):
        if asked:
            raise SolverError(f"{what} is not supported on shards; leave it out, and give or learn gamma and lam.")


# Penalties as numbers


def penalty_for(network: Network, problem: Problem, *, progress: Progress | None = None, count: Count | None = None) -> Penalty:
    """Return penalties as given, by cross-validation, or learned with isotropic covariances; nodes receive theirs."""
    spec, tree, node = problem.spec, network.tree, network.clients()
    gamma, lam = spec.gamma, spec.lam
    if spec.learns == "cv" and node is not None:
        chosen = search(node.data, network.loss, seed=spec.seed, progress=count)
        gamma, lam = chosen.gamma, chosen.lam
    elif spec.by_likelihood and tree.n_clients > 1:
        gamma, lam = _isotropic(network, problem, progress)
        network.ask(ForgetCovariances())
    gamma = 1.0 if gamma is None else gamma
    if network.places:
        penalty = Penalty.of(tree, gamma=gamma, lam=lam, alpha=spec.alpha)
        network.each([PutGamma(penalty.gamma if node is not None else penalty.gamma[at]) for at in network.places])
        return penalty
    by_cluster = _gamma_by_cluster(gamma, tree)
    penalty = Penalty.of(tree, gamma=by_cluster[tree.parent], lam=lam, alpha=spec.alpha)
    network.ask(SetGamma(by_cluster))
    return penalty


def _isotropic(network: Network, problem: Problem, progress: Progress | None) -> tuple[Any, float]:
    """Learn ``gamma``, one for all clients or one for each cluster, and ``lam`` from the likelihood.

    Covariances are isotropic, because the solver has one penalty for all terms.
    """
    spec, tree, terms = problem.spec, network.tree, network.terms
    vary, why = _vary(problem, terms), f"solver={spec.solver!r}" if spec.solver in first_order() else "james_stein=True"
    for level, varying in (("client", vary.client), ("cluster", vary.cluster if tree.n_clusters > 1 else terms)):
        if set(varying) != set(terms):
            raise PenaltyError(f"{why} needs every term to vary by {level}; let all terms vary, or leave out {why}.")
    shape = shape_of(tree, terms, replace(spec, covariance="isotropic"), vary, () if problem.draft else problem.zero)
    learned = estimate(network, shape, reml=spec.learns == "reml", progress=progress, uncertainty=False)[1]
    if learned.components.zero:
        without = listing(learned.components.zero, 5)
        raise PenaltyError(f"{why} estimates every global coefficient, but {without} cannot have one; leave out {why}.")
    levels = learned.components.client, learned.components.cluster
    client, cluster = (level.sd[:, :1].ravel() ** 2 / learned.dispersion for level in levels)
    if (client == 0).any():
        raise DataError(
            f"The estimated variance between clients is zero, so gamma would be infinite; give gamma, or leave out {why}."
        )
    # Eight digits: the last ones depend on the assignment of clients to nodes, and seeded random choices must not.
    gamma = [float(f"{1.0 / variance:.7e}") for variance in client]
    lam = float(f"{1.0 / cluster[0]:.7e}") if cluster.size and cluster[0] > 0 else np.inf
    return np.array(gamma) if len(gamma) > 1 else gamma[0], lam


def _gamma_by_cluster(gamma: PenaltyLike, tree: Hierarchy) -> Floats:
    """Return one ``gamma`` for each cluster, ``(k,)``. Across sites the ids of clients are unknown here."""
    clusters = Hierarchy(np.arange(tree.n_clusters + 1), tree.cluster_ids, tree.cluster_ids)
    try:
        return Penalty.of(clusters, gamma=gamma).gamma
    except PenaltyError as problem:
        raise PenaltyError(
            "Across sites gamma is one number, or one for each cluster, because the ids of clients stay at their sites. "
            f"{problem}"
        ) from None


# Covariances from the likelihood


def _by_likelihood(network: Network, problem: Problem, progress: Progress | None) -> Fitted:
    """Learn covariances from the likelihood, and test each level by a fit without it."""
    spec = problem.spec
    zero = () if problem.draft else problem.zero
    if spec.standardize and "Intercept" in zero:
        raise FormulaError("standardize=True centres terms and needs a common intercept; add 1 outside the bars.")
    shape = shape_of(network.tree, network.terms, spec, _vary(problem, network.terms), zero)
    settings: dict[str, Any] = {"reml": spec.learns == "reml", "progress": progress}
    prepared = None if problem.sparse is None else begin(network)
    known = replace(survey(network, shape, settle=spec.vary is None and not problem.has_bars), prepared=prepared)
    shape = known.shape or shape
    if prepared is not None:
        check_determined(network, shape)
    found, learned = estimate(network, shape, surveyed=known, **settings)
    learned = learned if prepared is None else finished(learned, prepared)
    if not spec.tests:
        return Fitted(found, None, learned)
    tests = likelihood_ratios(known, learned, shape, **settings)
    if _worse_than_null(tests):
        found, learned = estimate(network, shape, thorough=True, surveyed=known, **settings)
        learned = learned if prepared is None else finished(learned, prepared)
        tests = likelihood_ratios(known, learned, shape, **settings)
    convergence = replace(found.convergence, exchanges=known.network.exchanges)
    if _worse_than_null(tests):  # the search has not reached the optimum
        level = _worse_than_null(tests)[0].level
        message = (
            f"the search did not reach the optimum: a fit without variation between {level}s has a higher likelihood, which is "
            "impossible at the optimum; fit that smaller model, or rescale the columns"
        )
        warn(message)
        convergence = replace(convergence, converged=False, message=message)
    tests = tuple(replace(test, statistic=max(test.statistic, 0.0)) for test in tests)
    learned = replace(learned, components=replace(learned.components, tests=tests))
    return Fitted(replace(found, convergence=convergence), None, learned)


def _worse_than_null(tests: tuple[LikelihoodRatio, ...]) -> list[LikelihoodRatio]:
    """Return the tests whose model without the level has a higher likelihood."""
    return [test for test in tests if test.statistic < -1e-4]


def _vary(problem: Problem, terms: Sequence[str]) -> Vary:
    """Return the terms that vary; the terms of a draft are those of the network."""
    return vary_from_setting(problem.spec.vary, terms) if problem.draft else problem.vary


def shape_of(tree: Hierarchy, terms: Sequence[str], spec: Spec, vary: Vary, zero: Sequence[str] = ()) -> Shape:
    """Return which terms vary at each level, and the kind of covariance; raise an error for a level with one unit.

    The terms of ``zero`` vary about zero.
    """
    clustered = tree.n_clusters > 1
    if not clustered and tree.cluster_ids.to_list() != ["all"]:
        raise _only_one("cluster", f", {tree.cluster_ids[0]!r}")
    at = {term: index for index, term in enumerate(terms)}
    client = tuple(at[term] for term in vary.client)
    cluster = tuple(at[term] for term in vary.cluster) if clustered else ()
    if not client and not cluster:
        raise DataError("Nothing varies, neither by client nor by cluster; let a term vary, or fit baseline='single-model'.")
    kinds = spec.kinds["client"] or vary.client_kind or "diagonal", spec.kinds["cluster"] or vary.cluster_kind or "diagonal"
    return Shape(client, cluster, *kinds, bool(spec.per_cluster), tuple(at[term] for term in zero))  # type: ignore[arg-type]


def _refuse_one_client(network: Network, problem: Problem) -> None:
    """Raise an error if variation between clients is asked for; without named clients the fit is a plain regression."""
    if not network.places:
        raise _only_one("client", "")
    only = network.tree.client_ids[0]
    if only != "all" or problem.has_bars or problem.spec.penalty in ("reml", "ml"):
        raise _only_one("client", f", {only!r}")


def _only_one(level: str, named: str) -> DataError:
    return DataError(
        f"There is only one {level}{named}, so a variance between {level}s cannot be estimated; leave out {level}=, or its "
        "name in the bars of the formula. With given penalties (gamma, lam) and no bars, one is enough."
    )
