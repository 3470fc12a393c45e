"""Async-L2GD and its one-coin variant: unbiased by enumeration, within the theorem's bound, step by step."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings

from covey import Objective, Penalty
from covey.datasets import simulate
from covey.losses import Gaussian, loss_of
from covey.objective.theory import (
    Probabilities,
    best_tau,
    distance_bound,
    expected_smoothness,
    noise,
    probabilities,
    switch,
    switching_steps,
)
from covey.solvers import minimise
from covey.solvers.first_order.l2gd import StepSizes, recipe
from covey.solvers.first_order.schedule import Choices, Schedule, group
from tests.conftest import random_problem, seeds
from tests.solvers.first_order.shared import (
    Clients,
    begun,
    constants_of,
    follow,
    l2gd_rounds,
    outcomes,
    quietly,
    some_probabilities,
)


@given(seed=seeds)
@settings(max_examples=15)
def test_async_l2gd_is_unbiased(seed):
    rng = np.random.default_rng(seed)
    family = str(rng.choice(["gaussian", "bernoulli", "poisson"]))
    problem = random_problem(seed, family)
    data, penalty, loss = problem.data, problem.penalty, loss_of(family)
    drawn, eta = some_probabilities(data.n_clusters, rng), 1.0
    theta = rng.normal(size=(data.n_clients, data.n_terms))
    mean = np.zeros_like(theta)
    for chance, choices in outcomes(drawn, data.n_clusters):
        network = begun(data, loss, penalty, drawn, StepSizes(eta), theta)
        l2gd_rounds(network, penalty, drawn, StepSizes(eta), group(choices))
        mean += chance * (theta - network.node.theta) / eta
    exact = Objective(data, loss, penalty).gradient(theta)
    np.testing.assert_allclose(mean, exact, atol=1e-12 * max(1.0, np.abs(exact).max()), rtol=0)


def dense(problem, drawn, eta):
    """Every outcome of one iteration as an affine map of all coefficients, written from the paper's display of the oracle."""
    data, penalty = problem.data, problem.penalty
    n, d = data.n_clients, data.n_terms
    eye, parent = np.eye(n), data.hierarchy.parent
    alpha, gamma = penalty.alpha, penalty.gamma
    to_cluster = np.array([[gamma[l] * (parent[l] == parent[i]) for l in range(n)] for i in range(n)])  # noqa: E741
    to_cluster = eye - to_cluster / to_cluster.sum(axis=1, keepdims=True)
    weights = alpha[parent] * gamma
    to_whole = eye - np.tile(weights / weights.sum(), (n, 1))
    a, tau, p = (np.diag(values[parent]) for values in (alpha, drawn.tau, drawn.p))
    G, I = np.diag(gamma), np.eye(n * d)  # noqa: E741

    def lift(M):
        return np.kron(M, np.eye(d))

    A = np.zeros((n * d, n * d))
    b = np.zeros(n * d)
    for i in range(n):
        rows = slice(data.client_ptr[i], data.client_ptr[i + 1])
        A[i * d : (i + 1) * d, i * d : (i + 1) * d] = data.X[rows].T @ data.X[rows]
        b[i * d : (i + 1) * d] = data.X[rows].T @ data.y[rows]
    between = lift(G @ (a @ to_whole + tau @ (eye - a) @ to_cluster)) / drawn.p0
    within = lift(G @ (eye - tau) @ (eye - a) @ np.linalg.inv((1 - drawn.p0) * p) @ to_cluster)
    local = lift(np.linalg.inv((1 - drawn.p0) * (eye - p)))
    maps = [(drawn.p0, I - eta * between, np.zeros(n * d))]
    for exchange in product([False, True], repeat=data.n_clusters):
        chance = (1 - drawn.p0) * np.prod(np.where(exchange, drawn.p, 1 - drawn.p))
        pick = lift(np.diag(np.array(exchange)[parent].astype(float)))
        maps.append((chance, I - eta * (pick @ within + (I - pick) @ local @ A), eta * (I - pick) @ local @ b))
    return maps


@pytest.fixture(scope="module")
def small():
    """Two clusters of two clients, two coefficients: small enough for exact second moments."""
    data = simulate(clusters=2, clients=2, rows=4, d=2, seed=5).data
    return Clients(data, Penalty.of(data.hierarchy, gamma=np.array([0.5, 1.5, 1.0, 1.0]), lam=1.0))


def exact_distances(maps, best, start, T):
    """``E|theta^t - theta_hat|^2`` for t = 0, ..., T, by the recursion of first and second moments."""
    r = (start - best).ravel()
    mean, second = r, np.outer(r, r)
    noise_at = [c - (np.eye(len(r)) - M) @ best.ravel() for _, M, c in maps]
    found = [np.trace(second)]
    for _ in range(T):
        moved = np.zeros_like(second)
        for (chance, M, _), c in zip(maps, noise_at, strict=True):
            cross = np.outer(M @ mean, c)
            moved += chance * (M @ second @ M.T + cross + cross.T + np.outer(c, c))
        mean = sum(chance * (M @ mean + c) for (chance, M, _), c in zip(maps, noise_at, strict=True))
        second = moved
        found.append(np.trace(second))
    return np.array(found)


def test_async_l2gd_stays_below_the_bound_and_decays_as_declared(small):
    data, penalty, loss = small.data, small.penalty, Gaussian()
    known = constants_of(Objective(data, loss, penalty))
    drawn = probabilities(known, known.L)
    assert drawn.p0 > 0
    drawn = replace(drawn, p=np.maximum(drawn.p, 0.2), tau=best_tau(drawn.p0, np.maximum(drawn.p, 0.2)))
    calL = expected_smoothness(known, drawn, known.L)
    eta, best = 1 / (2 * calL), minimise(data, loss, penalty, solver="sweep").theta
    maps = dense(small, drawn, eta)
    sigma2 = noise(Objective(data, loss, penalty), best, drawn)

    # The minimiser is where the mean map stands still: the dense maps and the solver speak of the same problem.
    stay = sum(chance * (M @ best.ravel() + c) for chance, M, c in maps)
    np.testing.assert_allclose(stay, best.ravel(), atol=1e-10)

    times, runs = np.arange(0, 301, 10), 300
    start = np.zeros_like(best)
    exact = exact_distances(maps, best, start, 300)
    bound = distance_bound(np.arange(301), eta=eta, mu=known.mu, sigma2=sigma2, start=exact[0])
    assert (exact <= bound).all()
    paths = np.array([follow(small, drawn, eta, start, seed, times) for seed in range(runs)])
    squared = ((paths - best) ** 2).sum(axis=(2, 3))
    error = squared.std(axis=0) / np.sqrt(runs)
    assert (squared.mean(axis=0) <= bound[times]).all()
    assert (np.abs(squared.mean(axis=0) - exact[times]) <= 5 * error + 1e-12).all()

    # Far away along the direction of least curvature the noise does not matter: the distance shrinks at the rate of
    # the theorem, (1 - eta mu), which a step may beat by no more than (1 - eta mu)^2, the rate of its mean.
    H = sum(chance * (np.eye(8) - M) / eta for chance, M, _ in maps)
    values, vectors = np.linalg.eigh((H + H.T) / 2)
    assert known.mu == pytest.approx(values[0], rel=5e-3)
    far = best + 1e6 * vectors[:, 0].reshape(best.shape)
    curve = exact_distances(maps, best, far, 100)
    rate = (curve[100] / curve[0]) ** (1 / 100)
    assert (1 - eta * values[0]) ** 2 <= rate <= 1 - eta * known.mu
    path = np.array([follow(small, drawn, eta, far, seed, [0, 100]) for seed in range(50)])
    seen = ((path - best) ** 2).sum(axis=(2, 3)).mean(axis=0)
    assert (seen[1] / seen[0]) ** (1 / 100) == pytest.approx(rate, rel=0.02)


@quietly
@pytest.mark.parametrize("solver", ["l2gd", "one_coin"])
def test_switching_steps_arrive_where_a_constant_step_stalls(solver):
    data = simulate(clusters=3, clients=3, rows=12, d=2, wbar=3.0, noise_sd=0.5, seed=2).data
    penalty = Penalty.of(data.hierarchy, gamma=1.0, lam=1.0)
    best = minimise(data, Gaussian(), penalty, solver="sweep").theta
    reached = {}
    for steps in ("constant", "switching"):
        fits = [
            minimise(data, Gaussian(), penalty, solver=solver, steps=steps, seed=seed, max_iter=60_000, tol=0.0)
            for seed in range(3)
        ]
        reached[steps] = np.sqrt(np.mean([((fit.theta - best) ** 2).sum() for fit in fits]) / (best**2).sum())
    assert reached["switching"] < 1e-3
    assert reached["constant"] > 5e-3


@quietly
def test_clusters_with_schedules_of_their_own_exchange_less():
    """Runs of equal length with gamma_j from 0.1 to 10: all exchanges of clusters together fall by at least 30%."""
    data = simulate(clusters=10, clients=4, rows=10, d=3, client_sd=0.5, seed=0).data
    gamma = np.geomspace(0.1, 10, 10)[data.hierarchy.parent]
    penalty, loss = Penalty.of(data.hierarchy, gamma=gamma, alpha=0.05), Gaussian("mean")
    best, objective, spent = minimise(data, loss, penalty).theta, Objective(data, loss, penalty), {}
    known, T = constants_of(objective), 5000
    for p in (None, "common"):
        fits = [minimise(data, loss, penalty, solver="l2gd", p=p, seed=seed, max_iter=T, tol=0.0) for seed in range(3)]
        spent[p] = np.mean([fit.ledger.within.sum() for fit in fits])
        theory = recipe(known, p=p)
        noises = {"sigma2": noise(objective, best, theory.probabilities), "start": float((best**2).sum())}
        bound = distance_bound(T, eta=theory.largest_step, mu=known.mu, **noises)
        assert np.mean([((fit.theta - best) ** 2).sum() for fit in fits]) <= bound
    assert spent[None] <= 0.7 * spent["common"]


@quietly
def test_merged_steps_use_the_step_size_of_their_iteration():
    """Switching steps and merged exchanges: the same as the algorithm written out, one iteration at a time."""
    data = simulate(clusters=2, clients=3, rows=6, d=2, seed=1).data
    tree, gamma = data.hierarchy, 0.5
    penalty = Penalty.of(tree, gamma=gamma, lam=1.0)
    T, p0, p = 400, 0.5, np.array([0.5, 0.6])
    fit = minimise(
        data, Gaussian(), penalty, solver="l2gd", steps="switching", p0=p0, p=p, mu=5.0, max_iter=T, every=T, tol=0.0, seed=2
    )
    chances = Probabilities(p0, p, best_tau(p0, p))
    objective = Objective(data, Gaussian(), penalty)
    best = recipe(constants_of(objective, mu=5.0), p0=p0, p=p)
    choices, theta, parent = Schedule(chances, 2).choices(0, T), np.zeros((6, 2)), tree.parent
    alpha, tau, exchange = penalty.alpha[parent][:, None], chances.tau[parent][:, None], choices.within
    assert switch(best.smoothness, 5.0) < T / 2
    for t in range(T):
        eta = float(switching_steps(t, best.smoothness, 5.0))
        tbar_j, tbar = objective.means(theta)
        to_cluster = theta - tbar_j[parent]
        if choices.between[t]:
            theta = theta - eta * gamma / p0 * (alpha * (theta - tbar) + tau * (1 - alpha) * to_cluster)
            continue
        pull = eta * gamma * (1 - tau) * (1 - alpha) / ((1 - p0) * p[parent][:, None]) * to_cluster
        local = eta / ((1 - p0) * (1 - p[parent][:, None])) * Gaussian().gradient(data, theta)
        theta = theta - np.where(exchange[t][parent][:, None], pull, local)
    np.testing.assert_allclose(fit.theta, theta, atol=1e-12)


@quietly
@pytest.mark.parametrize("family", ["gaussian", "bernoulli", "poisson"])
def test_local_runs_are_gradient_steps(family):
    """Closed form, vector kernels, weights, offsets, a ridge: the same as steps written out, for every client."""
    problem = random_problem(13, family)
    data, penalty, loss = problem.data, problem.penalty, replace(loss_of(family, "mean"), ridge=0.05)
    drawn = Probabilities(0.5, np.full(data.n_clusters, 0.5), np.full(data.n_clusters, 0.5))
    rng = np.random.default_rng(0)
    theta = 0.1 * rng.normal(size=(data.n_clients, data.n_terms))
    expected = theta
    choices = Choices(np.zeros(6, dtype=bool), np.zeros((6, data.n_clusters), dtype=bool), np.zeros(6, dtype=bool))
    rate = StepSizes(0.005, mu=0.3)
    for t in range(6):
        expected = expected - rate.at(t) * 4 * loss.gradient(data, expected)
    for closed in {family == "gaussian", False}:  # in the eigenbasis, and step by step
        network = begun(data, loss, penalty, drawn, rate, theta, closed)
        l2gd_rounds(network, penalty, drawn, rate, group(choices))
        np.testing.assert_allclose(network.node.theta, expected, atol=1e-12)


@quietly
def test_equal_and_unequal_gamma_give_the_same_iterates():
    """Merging exchanges changes what is sent, not what is computed."""
    drawn = simulate(clusters=3, clients=3, rows=6, d=2, seed=1)
    data = drawn.data
    merged = Penalty.of(data.hierarchy, gamma=2.0, lam=3.0)
    gamma = merged.gamma.copy()
    gamma[0] *= 1 + 1e-13
    apart = Penalty.of(data.hierarchy, gamma=gamma, lam=3.0)
    fits = [
        minimise(data, Gaussian(), penalty, solver="l2gd", p0=0.4, p=0.5, max_iter=500, tol=0.0) for penalty in (merged, apart)
    ]
    np.testing.assert_allclose(fits[0].theta, fits[1].theta, atol=1e-10)
    assert fits[0].ledger.between < 0.75 * fits[1].ledger.between
    assert (fits[0].ledger.within < fits[1].ledger.within).all()


@quietly
@pytest.mark.parametrize("one_cluster", [False, True])
def test_alpha_one_and_one_cluster_are_the_single_cluster_method(one_cluster):
    """L2GD of Hanzely and Richtarik, written out: one random choice, one mean."""
    data = random_problem(4, weighted=False).data
    data = data.one_cluster() if one_cluster else data
    k, T, eta = data.n_clusters, 300, 1e-3
    penalty = Penalty.of(data.hierarchy, gamma=2.0, alpha=0.3 if one_cluster else 1.0)
    fit = minimise(data, Gaussian(), penalty, solver="l2gd", eta=eta, p0=0.3, p=0.0, seed=7, max_iter=T, tol=0.0)
    exchanges = Schedule(Probabilities(0.3, np.zeros(k), np.ones(k)), 7).choices(0, T).between
    theta = np.zeros((data.n_clients, data.n_terms))
    for exchange in exchanges:
        if exchange:
            theta = theta - eta * 2.0 / 0.3 * (theta - theta.mean(axis=0))
        else:
            theta = theta - eta / 0.7 * Gaussian().gradient(data, theta)
    np.testing.assert_allclose(fit.theta, theta, atol=1e-12)
    np.testing.assert_allclose(fit.wbar, theta.mean(axis=0), atol=1e-12)
    assert (fit.ledger.between == 0) == one_cluster
