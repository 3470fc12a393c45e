"""James-Stein against dense algebra, its exact risk, and what it must not do."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import poisson

from covey import GroupedData, HierarchicalClassifier, HierarchicalRegressor, InMemory, Objective, Penalty
from covey.datasets import simulate
from covey.errors import SolverError
from covey.losses import Gaussian, loss_of
from covey.nodes.network import Node
from covey.solvers import minimise, newton, sweep
from covey.solvers.direct.elimination import Spread, eliminate
from covey.solvers.direct.james_stein import factor, noise
from covey.solvers.direct.sweep import SweepUp
from tests.conftest import random_problem, seeds


def dense_marginal(problem):
    """``X'V^-1 X`` and the residual quadratic form of generalised least squares, the long way."""
    data, penalty = problem.data, problem.penalty
    parent, owner = data.hierarchy.parent, data.client_of_row
    weights = np.ones(data.n_rows) if data.weights is None else data.weights
    same_client = owner[:, None] == owner[None, :]
    same_cluster = parent[owner][:, None] == parent[owner][None, :]
    tie = same_client / penalty.gamma[owner] + same_cluster / penalty.lam[parent[owner]]
    V = np.diag(1 / weights) + tie * (data.X @ data.X.T)
    y = data.y if data.offset is None else data.y - data.offset
    inverse = np.linalg.inv(V)
    precision = data.X.T @ inverse @ data.X
    wbar = np.linalg.solve(precision, data.X.T @ inverse @ y)
    rest = y - data.X @ wbar
    return precision, wbar, float(rest @ inverse @ rest)


@pytest.mark.parametrize("seed", range(5))
def test_factor_is_that_of_dense_generalised_least_squares(seed):
    drawn = simulate(clusters=4, clients=3, rows=5, d=5, wbar=0.3, seed=seed)
    penalty = Penalty.of(drawn.data.hierarchy, gamma=2.0, lam=0.5)
    problem = type("Problem", (), {"data": drawn.data, "penalty": penalty})
    precision, wbar, rest = dense_marginal(problem)
    V = np.linalg.inv(precision)
    data, parent = drawn.data, drawn.data.hierarchy.parent
    A = Gaussian().hessian(data, np.zeros((12, 5)))
    shares = 2.0 * np.linalg.inv(A + 2.0 * np.eye(5))  # of each client in its cluster's model
    mean = np.array([shares[parent == j].mean(axis=0) for j in range(4)])
    C = 2.0 * (np.eye(5) - shares)
    up = [0.5 * np.linalg.inv(C[parent == j].sum(axis=0) + 0.5 * np.eye(5)) for j in range(4)]  # of each cluster in the whole
    Q = sum(3 * (mean[j] @ up[j]).T @ (mean[j] @ up[j]) for j in range(4))
    effective = min(np.trace(W) / np.linalg.eigvals(W).real.max() for W in (V, Q @ V))
    noise = rest / (drawn.data.n_rows - 5 + 2)
    expected = max(0.0, 1 - (effective - 2) * noise / (wbar @ precision @ wbar))
    fit = minimise(drawn.data, Gaussian(), penalty, james_stein=True)
    np.testing.assert_allclose(fit.wbar, expected * wbar, rtol=1e-9, atol=1e-12)
    assert 0 <= expected < 1


@given(seeds, st.booleans())
def test_the_coordinator_computes_the_minimum_from_the_replies(seed, loosely):
    problem = random_problem(seed)
    data, penalty, loss = problem.data, problem.penalty, Gaussian()
    if loosely and data.n_clusters > 1:
        # Clients and clusters that nothing ties to their parent: all but the first of each cluster, and the last cluster.
        first = np.isin(np.arange(data.n_clients), data.hierarchy.cluster_ptr)
        lam = np.append(penalty.lam[:-1], 0.0)
        penalty = Penalty.of(data.hierarchy, gamma=np.where(first, penalty.gamma, 0.0), lam=lam)
    seen = SweepUp().at(Node(data, loss, penalty.gamma))
    above = Spread.of_penalty(penalty.lam, data.n_terms)
    whole = eliminate(seen, above, np.array([0, data.n_clusters]))
    fit = minimise(data, loss, penalty, solver="sweep")
    value = whole.c[0] - 0.5 * whole.r[0] @ fit.wbar
    size = 1 + 0.5 * float((data.y**2).sum())
    assert value == pytest.approx(fit.convergence.objective, rel=1e-9, abs=1e-9 * size)


@pytest.mark.parametrize("how", ["tied", "clients", "clusters"])
def test_noise_is_estimated_on_the_rows_that_no_free_coefficient_used_up(how):
    """A client with gamma = 0 fits its rows by itself, a cluster with lam = 0 its clients'."""
    estimates = []
    for seed in range(20):
        drawn = simulate(clusters=4, clients=5, rows=8, d=4, noise_sd=2.0, client_sd=2.0, cluster_sd=2.0, seed=seed)
        gamma, lam = np.ones(20), np.ones(4)
        gamma[np.arange(20) % 5 > 0] = 0.0 if how == "clients" else 1.0
        lam[:3] = 0.0 if how == "clusters" else 1.0
        penalty = Penalty.of(drawn.data.hierarchy, gamma=gamma, lam=lam)
        seen = SweepUp().at(Node(drawn.data, Gaussian(), penalty.gamma))
        above = Spread.of_penalty(penalty.lam, 4)
        whole = eliminate(seen, above, np.array([0, 4]))
        estimates.append(noise(np.linalg.solve(whole.C[0], whole.r[0]), whole))
    left = 160 - 4 - {"tied": 0, "clients": 64, "clusters": 12}[how]
    assert np.mean(estimates) == pytest.approx(4.0 * left / (left + 2), rel=0.1)


@pytest.mark.parametrize("family", ["gaussian", "bernoulli", "poisson"])
def test_clusters_and_clients_are_the_best_given_the_shrunk_global_model(family):
    drawn = simulate(family, clusters=5, clients=4, rows=20, d=4, wbar=0.2, client_sd=0.3, cluster_sd=0.3, seed=3)
    loss, penalty = loss_of(family), Penalty.of(drawn.data.hierarchy, gamma=8.0, lam=5.0)
    plain, shrunk = minimise(drawn.data, loss, penalty), minimise(drawn.data, loss, penalty, james_stein=True)
    assert 0 < np.linalg.norm(shrunk.wbar) < np.linalg.norm(plain.wbar)
    np.testing.assert_allclose(shrunk.wbar / plain.wbar, (shrunk.wbar / plain.wbar)[0], rtol=1e-9)
    tree = drawn.data.hierarchy
    u = penalty.gamma[:, None] * (shrunk.theta - tree.down(shrunk.w))
    np.testing.assert_allclose(loss.gradient(drawn.data, shrunk.theta), -u, atol=1e-7)
    np.testing.assert_allclose(penalty.lam[:, None] * (shrunk.w - shrunk.wbar), tree.sum_up(u), atol=1e-7)
    assert shrunk.convergence.converged
    assert shrunk.convergence.gap is None, "it is not at the objective's minimum and must not claim to be near it"
    assert "James-Stein" in shrunk.convergence.message


def test_newton_and_the_sweep_agree():
    drawn = simulate(clusters=5, clients=4, rows=6, d=6, wbar=0.5, seed=1)
    penalty = Penalty.of(drawn.data.hierarchy, gamma=[2.0] * 10 + [1.0] * 10, lam=[1.0, 2.0, np.inf, 0.5, 1.0])
    one = minimise(drawn.data, Gaussian(), penalty, solver="sweep", james_stein=True)
    two = minimise(drawn.data, Gaussian(), penalty, solver="newton", james_stein=True)
    for a, b in ((one.theta, two.theta), (one.w, two.w), (one.wbar, two.wbar)):
        np.testing.assert_allclose(a, b, atol=1e-9)
    assert one.convergence.exchanges == 1, "it costs no exchange"
    assert two.history["exchanges"].to_list() == list(range(1, two.convergence.exchanges + 1))
    plain = minimise(drawn.data, Gaussian(), penalty, solver="newton")
    assert two.convergence.exchanges > plain.convergence.exchanges, "those of the first fit count too"
    assert two.ledger.bytes == pytest.approx(two.convergence.exchanges * plain.ledger.bytes / plain.convergence.exchanges)
    assert f"after {two.convergence.iterations} Newton steps" in two.convergence.message


def test_a_given_global_model_is_kept():
    drawn = simulate(clusters=4, clients=3, rows=4, d=3, seed=2)
    penalty = Penalty.of(drawn.data.hierarchy)
    known = np.array([1.0, -1.0, 0.5])
    by_sweep = sweep(InMemory.of(drawn.data, Gaussian(), penalty.gamma), penalty, known)
    by_newton = newton(InMemory.of(drawn.data, Gaussian(), penalty.gamma), penalty, known)
    np.testing.assert_array_equal(by_sweep.wbar, known)
    np.testing.assert_array_equal(by_newton.wbar, known)
    np.testing.assert_allclose(by_sweep.theta, by_newton.theta, atol=1e-10)
    objective = Objective(drawn.data, Gaussian(), penalty)
    rng = np.random.default_rng(0)
    least = objective.multitask_value(by_sweep.theta, by_sweep.w, known)
    for _ in range(20):
        away = by_sweep.theta + 0.1 * rng.standard_normal(by_sweep.theta.shape)
        assert objective.multitask_value(away, by_sweep.w + 0.1 * rng.standard_normal(by_sweep.w.shape), known) > least


@pytest.mark.parametrize(("d", "size"), [(3, 0.0), (5, 1.0), (20, 3.0)])
def test_risk_is_below_the_exact_risk_of_the_plain_estimator(d, size):
    """Without the positive part the risk is ``d - (d-2)^2 E[1/(d-2+2K)]``, K Poisson(|xi|^2/2); with it, no more."""
    rng = np.random.default_rng(0)
    xi = np.full(d, size / np.sqrt(d))
    draws = xi + rng.standard_normal((40_000, d))
    risk = np.array([np.sum((factor(x, np.eye(d)) * x - xi) ** 2) for x in draws])
    counts = np.arange(400)
    plain = d - (d - 2) ** 2 * float((poisson.pmf(counts, size**2 / 2) / (d - 2 + 2 * counts)).sum())
    error = risk.std() / np.sqrt(len(risk))
    assert risk.mean() < plain + 3 * error
    assert risk.mean() < d - 5 * error


def test_two_coefficients_or_very_unequal_ones_stay():
    assert factor(np.array([1.0, 1.0]), np.eye(2)) == 1.0
    assert factor(np.ones(3), np.diag([1.0, 1e6, 1e6])) == 1.0
    assert factor(np.zeros(4), np.eye(4)) == 1.0
    assert factor(0.1 * np.ones(4), np.eye(4)) == 0.0
    assert factor(np.ones(4), np.diag([1.0, 1.0, 1.0, 0.0])) == 1.0


def test_shrinkage_does_not_raise_the_error_of_clients():
    """Columns of very unequal precision: Bock's rule for the global model alone would raise the clients' error by 13%."""
    rng = np.random.default_rng(0)
    d, wbar, scale = 20, 8 * np.eye(20)[0], np.sqrt(np.append(0.3, np.full(19, 100.0)))
    plain, shrunk = [], []
    for _ in range(200):
        theta = wbar + rng.standard_normal((3, d))
        y = (theta * scale + rng.standard_normal((3, d))).ravel()
        data = GroupedData.from_arrays(np.tile(np.diag(scale), (3, 1)), y, np.repeat(np.arange(3), d))
        penalty = Penalty.of(data.hierarchy, gamma=1.0, lam=np.inf)
        for errors, option in ((plain, False), (shrunk, True)):
            errors.append(((minimise(data, Gaussian(), penalty, james_stein=option).theta - theta) ** 2).sum())
    assert np.mean(shrunk) < 1.01 * np.mean(plain)


def test_the_units_of_the_response_do_not_matter():
    drawn = simulate(clusters=4, clients=3, rows=6, d=5, wbar=0.3, seed=4)
    penalty = Penalty.of(drawn.data.hierarchy)
    one = minimise(drawn.data, Gaussian(), penalty, james_stein=True)
    thousand = minimise(replace(drawn.data, y=1000 * drawn.data.y), Gaussian(), penalty, james_stein=True)
    np.testing.assert_allclose(thousand.theta, 1000 * one.theta, rtol=1e-9, atol=1e-9)


def test_rows_with_weight_zero_change_nothing():
    drawn = simulate(clusters=4, clients=3, rows=6, d=5, wbar=0.3, seed=4)
    penalty = Penalty.of(drawn.data.hierarchy)
    one = minimise(drawn.data, Gaussian(), penalty, james_stein=True)
    X, y = np.vstack([drawn.X, drawn.X]), np.append(drawn.y, 99 + drawn.y)
    client, cluster = np.tile(drawn.client, 2), np.tile(drawn.cluster, 2)
    weights = np.repeat([1.0, 0.0], len(drawn.y))
    again = minimise(GroupedData.from_arrays(X, y, client, cluster, weights=weights), Gaussian(), penalty, james_stein=True)
    np.testing.assert_allclose(again.theta, one.theta, atol=1e-10)


@pytest.mark.parametrize("given_", ["yes", 1, 0.5, None])
def test_must_be_true_or_false(given_):
    with pytest.raises(SolverError, match="True or False"):
        HierarchicalRegressor(james_stein=given_).fit(np.eye(3), np.arange(3.0), client=[0, 0, 1])


def test_is_refused_where_it_means_nothing():
    drawn = simulate(clusters=3, clients=3, rows=4, d=3, seed=0)
    penalty = Penalty.of(drawn.data.hierarchy)
    with pytest.raises(SolverError, match="reduction='sum'"):
        minimise(drawn.data, Gaussian("mean"), penalty, james_stein=True)
    with pytest.raises(SolverError, match="no client is tied"):
        minimise(drawn.data, Gaussian(), Penalty.of(drawn.data.hierarchy, lam=0.0), james_stein=True)
    with pytest.raises(SolverError, match=r"needs the curvature.*solver='auto'"):
        minimise(drawn.data, Gaussian(), penalty, solver="l2gd", james_stein=True)
    with pytest.raises(SolverError, match="leave out baseline"):
        HierarchicalRegressor(baseline="single-model", james_stein=True).fit(drawn.X, drawn.y, client=drawn.client)


def test_as_an_option_of_an_estimator():
    drawn = simulate("bernoulli", clusters=4, clients=3, rows=20, d=4, seed=0)
    ids = {"client": drawn.client, "cluster": drawn.cluster}
    plain = HierarchicalClassifier(fit_intercept=False).fit(drawn.X, drawn.y, **ids)
    shrunk = HierarchicalClassifier(fit_intercept=False, james_stein=True).fit(drawn.X, drawn.y, **ids)
    assert np.linalg.norm(shrunk.global_coef_) < np.linalg.norm(plain.global_coef_)
    assert "James-Stein" in str(shrunk)
