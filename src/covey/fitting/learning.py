"""From a specification to penalties: given, cross-validated, or learned from the likelihood; and the fit with them.

The one place that decides which of the three it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from covey._typing import Floats
from covey.errors import CoveyError, DataError, PenaltyError, SolverError, warn
from covey.fitting.baselines import fit_baseline
from covey.fitting.selection import Count, search
from covey.nodes.messages import SetGamma
from covey.nodes.network import InMemory, Network
from covey.objective.penalty import Penalty
from covey.problem.spec import Spec
from covey.solvers import Fit, Progress, minimise, solve
from covey.solvers.registry import randomised
from covey.tables.bars import Vary, vary_from_setting
from covey.tables.rows import GroupedData
from covey.tree.hierarchy import Hierarchy
from covey.variance.components import Learned, LikelihoodRatio
from covey.variance.estimate import estimate
from covey.variance.frame import ForgetCovariances
from covey.variance.ratio import likelihood_ratios
from covey.variance.structure import Shape
from covey.variance.survey import survey


@dataclass(frozen=True)
class Fitted:
    """The models, and where their penalties come from: ``penalty`` as numbers, ``learned`` as covariances."""

    fit: Fit
    penalty: Penalty | None
    learned: Learned | None = None


def fit_data(
    data: GroupedData,
    spec: Spec,
    vary: Vary | None = None,
    *,
    progress: Progress | None = None,
    count: Count | None = None,
) -> Fitted:
    """Fit data that is already grouped, with penalties as the specification has them."""
    spec.check()
    if spec.baseline is not None:
        return Fitted(fit_baseline(spec.baseline, data, spec.loss, seed=spec.seed, progress=progress), None)
    vary = vary_from_setting(spec.vary, data.terms) if vary is None else vary
    loss, method = spec.loss, spec.learns
    named = data.hierarchy.client_ids.to_list() != ["all"] or bool(spec.bars) or spec.penalty in ("reml", "ml")
    if spec.by_likelihood and named:
        _refuse_one(data.hierarchy.client_ids.to_list(), "client")
    if method in ("reml", "ml") and data.n_clients > 1 and not spec.in_two_steps:
        network = InMemory.of(data, loss, np.ones(data.n_clients))
        return _by_likelihood(network, spec, vary, progress)
    penalty = penalty_for(data, spec, vary, progress=progress, count=count)
    settings: dict[str, Any] = {"tol": spec.tol, "max_iter": spec.max_iter, "seed": spec.seed, "options": spec.options}
    fit = minimise(data, loss, penalty, solver=spec.solver, james_stein=spec.james_stein, progress=progress, **settings)
    if not np.isfinite(fit.theta).all():
        raise CoveyError("The coefficients are not finite; the columns are probably on extreme scales: standardise them.")
    return Fitted(fit, penalty)


def penalty_for(
    data: GroupedData, spec: Spec, vary: Vary | None = None, *, progress: Progress | None = None, count: Count | None = None
) -> Penalty:
    """One number for each client and cluster: as given, by cross-validation, or from the likelihood with isotropic spread."""
    tree, method = data.hierarchy, spec.learns
    if method == "cv":
        found = search(data, spec.loss, seed=spec.seed, progress=count)
        return Penalty.of(tree, gamma=found.gamma, lam=found.lam)
    if method is None or data.n_clients == 1:
        return Penalty.of(tree, gamma=1.0 if spec.gamma is None else spec.gamma, lam=spec.lam, alpha=spec.alpha)
    vary = vary_from_setting(spec.vary, data.terms) if vary is None else vary
    network = InMemory.of(data, spec.loss, np.ones(data.n_clients))
    gamma, lam = _isotropic(network, spec, vary, progress)
    return Penalty.of(tree, gamma=gamma, lam=lam)


def fit_across(network: Network, spec: Spec, vary: Vary | None = None, *, progress: Progress | None = None) -> Fitted:
    """Fit over any network, as :func:`fit_data` does in memory; the clients' models stay at their nodes.

    What was learned comes without the clients' sums; :func:`covey.variance.frame.node_learned` joins them at each node.
    """
    spec.check()
    tree, method = network.tree, spec.learns
    check_across(spec)
    vary = vary_from_setting(spec.vary, network.terms) if vary is None else vary
    if spec.by_likelihood and tree.n_clients == 1:
        raise DataError(
            "There is one client only, so variation between clients cannot be told from the global model; give gamma and lam."
        )
    if method is not None and not spec.in_two_steps:
        return _by_likelihood(network, spec, vary, progress)
    gamma, lam = (spec.gamma, spec.lam) if method is None else _isotropic(network, spec, vary, progress)
    each = _of_clusters(gamma, tree)
    penalty = Penalty.of(tree, gamma=each[tree.parent], lam=lam, alpha=spec.alpha)
    if method is not None:
        network.ask(ForgetCovariances())
    network.ask(SetGamma(each))
    settings: dict[str, Any] = {"tol": spec.tol, "max_iter": spec.max_iter, "james_stein": spec.james_stein}
    if spec.solver in randomised():
        settings |= {"seed": spec.seed, "options": spec.options}
    fit = solve(network, penalty, solver=spec.solver, progress=progress, **settings)
    if not (np.isfinite(fit.w).all() and np.isfinite(fit.wbar).all()):
        raise CoveyError("The coefficients are not finite; the columns are probably on extreme scales: standardise them.")
    return Fitted(fit, penalty)


def check_across(spec: Spec) -> None:
    """Refuse what cannot be fitted across sites, before any of them is asked."""
    for asked, what in ((spec.baseline is not None, f"baseline={spec.baseline!r}"), (spec.learns == "cv", "penalty='cv'")):
        if asked:
            raise SolverError(
                f"{what} across sites is not supported: give gamma and lam, or let reml or ml learn them from the likelihood."
            )
    for name in ("checkpoint", "start"):
        if name in (spec.options or {}):
            raise SolverError(f"The option {name!r} is for clients that are all in memory; across sites leave it out.")


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


def _by_likelihood(network: Network, spec: Spec, vary: Vary, progress: Progress | None) -> Fitted:
    """Covariances from the likelihood, each level tested by a fit without it, over any network."""
    shape, reml = shape_of(network.tree, network.terms, spec, vary), spec.learns == "reml"
    known = survey(network, shape)
    asked: dict[str, Any] = {"reml": reml, "progress": progress}
    fit, learned = estimate(network, shape, known=known, **asked)
    if spec.tests:
        tests = likelihood_ratios(known, learned, shape, **asked)
        if _beaten(tests):
            fit, learned = estimate(network, shape, thorough=True, known=known, **asked)
            tests = likelihood_ratios(known, learned, shape, **asked)
        fit, tests = _doubted(fit, tests)
        fit = replace(fit, convergence=replace(fit.convergence, exchanges=known.network.exchanges))
        learned = replace(learned, components=replace(learned.components, tests=tests))
    return Fitted(fit, None, learned)


def _isotropic(network: Network, spec: Spec, vary: Vary, progress: Progress | None) -> tuple[Any, float]:
    """The likelihood's ``gamma``, one for all clients or for those of each cluster, and ``lam``, with isotropic spread."""
    tree, terms = network.tree, network.terms
    for level, varying in (("client", vary.client), ("cluster", vary.cluster if tree.n_clusters > 1 else terms)):
        if set(varying) != set(terms):
            why = f"solver={spec.solver!r}" if spec.solver in randomised() else "james_stein=True"
            raise PenaltyError(f"{why} lets every term vary; let all vary by {level}, or leave it out.")
    isotropic = replace(spec, covariance="isotropic", solver="auto", options=None, james_stein=False)
    shape = shape_of(tree, terms, isotropic, vary)
    learned = estimate(network, shape, reml=spec.learns == "reml", progress=progress)[1]
    scale = learned.dispersion
    client, cluster = (level.sd[:, :1] ** 2 / scale for level in (learned.components.client, learned.components.cluster))
    if (client == 0).any():
        raise DataError(
            "Clients do not vary within their clusters, so no gamma ties them; fit baseline='single-model', or give gamma."
        )
    # To eight digits: the last ones depend on who is at which node, and coins that are seeded must not.
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


def _refuse_one(ids: list[Any], level: str) -> None:
    if len(ids) == 1:
        raise DataError(
            f"There is one {level} only, {ids[0]!r}, so variation between {level}s cannot be told from the global model; "
            f"leave out {level}=, or give gamma and lam."
        )


def _doubted(fit: Fit, tests: tuple[LikelihoodRatio, ...]) -> tuple[Fit, tuple[LikelihoodRatio, ...]]:
    """A fit that does better without a level than with it has not found its optimum, and is not said to have."""
    beaten = _beaten(tests)
    if beaten:
        message = f"not at its optimum: without variation between {beaten[0].level}s the likelihood is higher; fit that model"
        warn(message)
        fit = replace(fit, convergence=replace(fit.convergence, converged=False, message=message))
    return fit, tuple(replace(test, statistic=max(test.statistic, 0.0)) for test in tests)


def _beaten(tests: tuple[LikelihoodRatio, ...]) -> list[LikelihoodRatio]:
    return [test for test in tests if test.statistic < -1e-4]
