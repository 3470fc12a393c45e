"""What must come out at the ends of the penalties, under relabelling, and from awkward clients."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from hypothesis import given, settings

from covey import GroupedData, Objective, Penalty
from covey.datasets import simulate
from covey.fitting.selection import single_cluster, single_model
from covey.losses import loss_of
from covey.solvers import minimise
from tests.conftest import Problem, random_problem, seeds

FAMILIES = ("gaussian", "bernoulli", "poisson")


def problem_of(family, seed=0):
    return simulate(family, clusters=3, clients=4, rows=40, d=2, cluster_sd=0.5, client_sd=0.5, seed=seed).data


@pytest.mark.parametrize("family", FAMILIES)
def test_gamma_to_zero_gives_local_fits(family):
    data, loss = problem_of(family), loss_of(family)
    fit = minimise(data, loss, Penalty.of(data.hierarchy, gamma=1e-10))
    for i in range(data.n_clients):
        alone = data.clients(i, i + 1).pooled()
        local = minimise(alone, loss, Penalty.of(alone.hierarchy))
        np.testing.assert_allclose(fit.theta[i], local.wbar, atol=1e-7)


@pytest.mark.parametrize("family", FAMILIES)
def test_lam_to_infinity_gives_the_single_cluster_model(family):
    data, loss = problem_of(family), loss_of(family)
    merged = data.one_cluster()
    single = minimise(merged, loss, Penalty.of(merged.hierarchy, gamma=2.0))
    for penalty in (Penalty.of(data.hierarchy, gamma=2.0, lam=1e10), Penalty.of(data.hierarchy, gamma=2.0, lam=np.inf)):
        fit = minimise(data, loss, penalty)
        np.testing.assert_allclose(fit.theta, single.theta, atol=1e-7)
        np.testing.assert_allclose(fit.w, np.tile(single.wbar, (3, 1)), atol=1e-7)


@pytest.mark.parametrize("family", FAMILIES)
def test_both_to_infinity_gives_the_pooled_model(family):
    data, loss = problem_of(family), loss_of(family)
    pooled = single_model(data, loss)
    fit = minimise(data, loss, Penalty.of(data.hierarchy, gamma=1e10, lam=1e10))
    np.testing.assert_allclose(fit.theta, pooled.theta, atol=1e-6)
    assert fit.convergence.gradient_norm < 1e-8


@pytest.mark.parametrize("family", FAMILIES)
def test_lam_zero_makes_clusters_independent(family):
    data, loss = problem_of(family), loss_of(family)
    fit = minimise(data, loss, Penalty.of(data.hierarchy, gamma=1.5, lam=0.0))
    for j in range(data.n_clusters):
        a, b = data.hierarchy.cluster_ptr[j : j + 2]
        own = data.clients(int(a), int(b)).one_cluster()
        alone = minimise(own, loss, Penalty.of(own.hierarchy, gamma=1.5))
        np.testing.assert_allclose(fit.theta[a:b], alone.theta, atol=1e-8)
    np.testing.assert_allclose(fit.wbar, fit.w.mean(axis=0))


def test_a_client_with_gamma_zero_is_on_its_own():
    data, loss = problem_of("gaussian"), loss_of("gaussian")
    gamma = np.ones(data.n_clients)
    gamma[2] = 0.0
    fit = minimise(data, loss, Penalty.of(data.hierarchy, gamma=gamma))
    own = data.clients(2, 3)
    np.testing.assert_allclose(fit.theta[2], np.linalg.lstsq(own.X, own.y, rcond=None)[0], atol=1e-10)
    newton = minimise(data, loss, Penalty.of(data.hierarchy, gamma=gamma), solver="newton")
    np.testing.assert_allclose(newton.theta, fit.theta, atol=1e-9)
    np.testing.assert_allclose(newton.w, fit.w, atol=1e-9)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=10)
@given(seeds)
def test_order_and_names_of_rows_and_clients_do_not_matter(family, seed):
    problem = random_problem(seed, family)
    rng = np.random.default_rng(seed)
    n, k = len(problem.gamma), len(problem.lam)
    rows, names, groups = rng.permutation(len(problem.y)), rng.permutation(n), rng.permutation(k)
    gamma, lam = np.empty(n), np.empty(k)
    gamma[names], lam[groups] = problem.gamma, problem.lam
    moved = Problem(
        problem.X[rows], problem.y[rows], names[problem.client[rows]], groups[problem.cluster[rows]],
        problem.weights[rows], problem.offset[rows], gamma, lam,
    )  # fmt: skip
    first, second = _fit_named(problem, family), _fit_named(moved, family)
    back = [second[0].index(f"c{names[int(label[1:])]}") for label in first[0]]
    np.testing.assert_allclose(second[1].theta[back], first[1].theta, atol=1e-8)
    np.testing.assert_allclose(second[1].wbar, first[1].wbar, atol=1e-8)


def _fit_named(problem, family):
    """Fit with ids that are words, penalties by id; the clients' ids in the order of the fit, and the fit."""
    client, cluster = [f"c{i}" for i in problem.client], [f"g{j}" for j in problem.cluster]
    data = GroupedData.from_arrays(problem.X, problem.y, client, cluster, weights=problem.weights, offset=problem.offset)
    gamma = {f"c{i}": value for i, value in enumerate(problem.gamma)}
    lam = {f"g{j}": value for j, value in enumerate(problem.lam)}
    penalty = Penalty.of(data.hierarchy, gamma=gamma, lam=lam)
    return data.hierarchy.clients.tolist(), minimise(data, loss_of(family), penalty)


AWKWARD = {
    "one row a client": lambda rng: (rng.normal(size=(12, 2)), np.arange(12), np.arange(12) % 3),
    "more columns than rows": lambda rng: (rng.normal(size=(9, 12)), np.arange(9) // 3, np.zeros(9, dtype=int)),
    "a cluster of one client": lambda rng: (rng.normal(size=(20, 2)), np.arange(20) // 5, np.minimum(np.arange(20) // 5, 1)),
    "collinear columns": lambda rng: (
        np.tile(rng.normal(size=(20, 1)), (1, 3)) * [1, 2, -3],
        np.arange(20) // 4,
        np.arange(20) // 8,
    ),
    "a constant and a zero column": lambda rng: (
        np.c_[np.ones(20), np.ones(20), np.zeros(20)],
        np.arange(20) // 4,
        np.arange(20) // 8,
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("case", AWKWARD)
def test_awkward_data_fit_with_finite_coefficients(family, case):
    rng = np.random.default_rng(1)
    X, client, cluster = AWKWARD[case](rng)
    y = np.arange(len(X)) % 2 if family == "bernoulli" else rng.poisson(3, size=len(X))
    data = GroupedData.from_arrays(X, y.astype(float), client, cluster)
    penalty = Penalty.of(data.hierarchy)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit = minimise(data, loss_of(family), penalty)
    # Nine rows of twelve columns separate any two classes, and the fit must say so; nothing else is out of order.
    assert len(caught) == (1 if (family, case) == ("bernoulli", "more columns than rows") else 0)
    assert all(np.isfinite(level).all() for level in (fit.theta, fit.w, fit.wbar))
    assert np.linalg.norm(Objective(data, loss_of(family), penalty).gradient(fit.theta)) < 1e-6


def test_one_class_and_separable_clients():
    rng = np.random.default_rng(4)
    x = rng.normal(size=60)
    client = np.repeat(np.arange(6), 10)
    y = (x + 2 * rng.normal(size=60) > 0).astype(float)
    y[:10] = 1.0  # one class only
    y[10:20] = x[10:20] > 0  # perfectly separable
    data = GroupedData.from_arrays(np.c_[np.ones(60), x], y, client, client // 3)
    for gamma in (1.0, 1e-3):
        fit = minimise(data, loss_of("bernoulli"), Penalty.of(data.hierarchy, gamma=gamma))
        assert fit.convergence.converged
        assert np.abs(fit.theta).max() < 200


def test_single_cluster_takes_its_penalty_from_cross_validation():
    """Strong ties win where clients are alike, weak ones where they differ; the truth is not looked at."""
    alike = simulate(clusters=2, clients=30, rows=6, d=2, cluster_sd=0, client_sd=0.05, seed=0).data
    apart = simulate(clusters=2, clients=30, rows=30, d=2, cluster_sd=0, client_sd=5.0, seed=0).data
    spread = [np.std(single_cluster(data, loss_of("gaussian")).theta) for data in (alike, apart)]
    assert spread[0] < 0.2
    assert spread[1] > 3
