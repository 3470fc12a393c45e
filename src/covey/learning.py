"""From a specification to penalties: given, cross-validated, or learned from the likelihood; and the fit with them.

The one place that decides which of the three it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from covey.baselines import fit_baseline
from covey.data import GroupedData
from covey.errors import CoveyError, DataError, PenaltyError, warn
from covey.grouping import Vary, vary_from_setting
from covey.hierarchy import Hierarchy
from covey.network import Network, Tie
from covey.objective import Penalty
from covey.selection import Count, search
from covey.solvers import BY_COINS, Fit, Progress, solve, solve_across
from covey.spec import Spec
from covey.variance.components import Learned, LikelihoodRatio
from covey.variance.estimate import estimate
from covey.variance.ratio import likelihood_ratios
from covey.variance.structure import Shape


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
        shape = shape_of(data.hierarchy, data.terms, spec, vary)
        reml = method == "reml"
        fit, learned = estimate(data, loss, shape, reml=reml, progress=progress)
        if spec.tests:
            tests = likelihood_ratios(learned, shape, data, loss, reml=reml, progress=progress)
            if _beaten(tests):
                fit, learned = estimate(data, loss, shape, reml=reml, thorough=True, progress=progress)
                tests = likelihood_ratios(learned, shape, data, loss, reml=reml, progress=progress)
            fit, tests = _doubted(fit, tests)
            learned = replace(learned, components=replace(learned.components, tests=tests))
        return Fitted(fit, None, learned)
    penalty = penalty_for(data, spec, vary, progress=progress, count=count)
    settings: dict[str, Any] = {"tol": spec.tol, "max_iter": spec.max_iter, "seed": spec.seed, "options": spec.options}
    fit = solve(data, loss, penalty, solver=spec.solver, james_stein=spec.james_stein, progress=progress, **settings)
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
    for level, varying in (("client", vary.client), ("cluster", vary.cluster if data.n_clusters > 1 else data.terms)):
        if set(varying) != set(data.terms):
            why = f"solver={spec.solver!r}" if spec.solver in BY_COINS else "james_stein=True"
            raise PenaltyError(f"{why} lets every term vary; let all vary by {level}, or leave it out.")
    isotropic = replace(spec, covariance="isotropic", solver="auto", options=None, james_stein=False)
    learned = estimate(data, spec.loss, shape_of(tree, data.terms, isotropic, vary), reml=method == "reml", progress=progress)[
        1
    ]
    scale = learned.dispersion
    client, cluster = (level.sd[:, :1] ** 2 / scale for level in (learned.components.client, learned.components.cluster))
    if (client == 0).any():
        raise DataError(
            "Clients do not vary within their clusters, so no gamma ties them; fit baseline='single-model', or give gamma."
        )
    gamma = 1.0 / client[:, 0]
    lam = 1.0 / cluster[0, 0] if cluster.size and cluster[0, 0] > 0 else np.inf
    return Penalty.of(tree, gamma=gamma if len(gamma) > 1 else float(gamma[0]), lam=lam)


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


def fit_across(network: Network, spec: Spec, vary: Vary, *, progress: Progress | None = None) -> Fitted:
    """Fit over any network, the clients' models staying at their nodes."""
    tree = network.tree
    penalty = Penalty.of(tree, gamma=1.0 if spec.gamma is None else spec.gamma, lam=spec.lam, alpha=spec.alpha)
    gamma = np.ones(tree.n_clusters)
    gamma[tree.sizes > 0] = penalty.gamma[tree.cluster_ptr[:-1][tree.sizes > 0]]
    network.ask(Tie(gamma))
    fit = solve_across(network, penalty, solver=spec.solver, tol=spec.tol, max_iter=spec.max_iter, progress=progress)
    return Fitted(fit, penalty)
