"""The algorithms by coins: unbiased by enumeration, within the theorems' bounds, as fast as declared, the same bits."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, product

import numba
import numpy as np
import pytest
from hypothesis import given, settings

from covey import GroupedData, Objective, Penalty, newton, sweep
from covey.datasets import simulate
from covey.errors import ConvergenceWarning, PenaltyError, SolverError
from covey.losses import Gaussian, loss_of
from covey.schedule import Flips, Schedule, group, streams
from covey.solvers import al2sgd_plus, l2gd, one_coin
from covey.solvers.curvature import constants
from covey.solvers.l2gd import Guide, Rate, State, equal_within, node_move, node_of
from covey.solvers.protocol import Pull, Top
from covey.solvers.rounds import InMemory, play
from covey.solvers.threads import threads_for
from covey.theory import Coins, Katyusha, best_tau, coins, distance_bound, expected_smoothness, noise

from ..conftest import random_problem, seeds

accelerated = sys.modules["covey.solvers.al2sgd_plus"]  # the package's own name for it is the function
SOLVERS = [l2gd, one_coin, al2sgd_plus]
NOWHERE = np.zeros((1, 1))  # the anchor of an algorithm that has none
quietly = pytest.mark.filterwarnings("ignore::covey.errors.ConvergenceWarning")


# Unbiased, by enumeration of all outcomes


def outcomes(drawn, k):
    """Every outcome of one iteration's coins, with its probability."""
    if drawn.p0 > 0:
        yield drawn.p0, Flips(np.array([True]), np.zeros((1, k), dtype=bool), np.array([False]))
    for heads in product([False, True], repeat=k):
        chance = np.prod(np.where(heads, drawn.p, 1 - drawn.p))
        if chance > 0:
            yield (1 - drawn.p0) * chance, Flips(np.array([False]), np.array([heads]), np.array([False]))


def some_coins(k, rng, p0=0.3):
    """Probabilities that differ between clusters, one of them zero; tau not the best."""
    p = rng.uniform(0.1, 0.8, size=k)
    p[0] = 0.0
    tau = np.where(p > 0, rng.uniform(0.1, 0.9, size=k), 1.0)
    return Coins(p0, p, tau)


@given(seed=seeds)
@settings(max_examples=15)
def test_async_l2gd_is_unbiased(seed):
    rng = np.random.default_rng(seed)
    family = str(rng.choice(["gaussian", "bernoulli", "poisson"]))
    problem = random_problem(seed, family)
    data, penalty, loss = problem.data, problem.penalty, loss_of(family)
    drawn, eta = some_coins(data.n_clusters, rng), 1.0
    theta = rng.normal(size=(data.n_clients, data.n_terms))
    top, (_, gamma) = Top.of(penalty), equal_within(data, penalty)
    node, guide = node_of(data, loss, penalty.gamma, drawn, Rate(eta)), Guide(top, drawn, Rate(eta), gamma)
    mean = np.zeros_like(theta)
    for chance, flips in outcomes(drawn, data.n_clusters):
        network = InMemory(Objective(data, loss, penalty), State(theta), partial(node_move, node))
        assert play(network, guide, top, group(flips), NOWHERE)[1] is None
        mean += chance * (theta - network.state.theta) / eta
    exact = Objective(data, loss, penalty).gradient(theta)
    np.testing.assert_allclose(mean, exact, atol=1e-12 * max(1.0, np.abs(exact).max()), rtol=0)


def oracle_mean(problem, loss, drawn, guide_of, rng):
    """The mean of algorithm 2's estimate over coins and rows, from the solver's own functions; and the gradient it is of."""
    data, penalty = problem.data, problem.penalty
    top, n, d = Top.of(penalty), data.n_clients, data.n_terms
    pace = Katyusha(eta=1.0, a1=0.3, a2=0.4, b1=0.9, b2=0.05, rho=0.2)
    node = accelerated.node_of(data, loss, penalty.gamma, drawn, pace, streams(1, n))
    x, y, z = rng.normal(size=(3, n, d))
    guide, anchor = guide_of(top, drawn), data.hierarchy.mean_up(x, penalty.gamma)
    theta = pace.a1 * z + pace.a2 * x + (1 - pace.a1 - pace.a2) * y

    def estimate(flips, t=0):
        state = accelerated.State(x, y, z, loss.gradient(data, x))
        network = InMemory(Objective(data, loss, penalty), state, partial(accelerated.node_move, node))
        assert play(network, guide, top, group(flips, t), anchor, announce=True)[1] is None
        return (theta - network.state.y) / pace.eta

    k = data.n_clusters
    local = Flips(np.array([False]), np.zeros((1, k), dtype=bool), np.array([False]))
    # Each client's estimate depends on its own row alone: find iterations that draw each of its rows, and average over those.
    by_row = {}
    for t in range(400):
        rows = [accelerated._draw(node.streams[i], t, data.rows_per_client[i]) for i in range(n)]
        if any((i, row) not in by_row for i, row in enumerate(rows)):
            g = estimate(local, t)
            by_row.update({(i, row): g[i] for i, row in enumerate(rows)})
    assert len(by_row) == data.n_rows, "every row of every client was drawn"
    over_rows = np.array([np.mean([by_row[i, row] for row in range(data.rows_per_client[i])], axis=0) for i in range(n)])
    mean = np.zeros((n, d))
    for chance, flips in outcomes(drawn, k):
        heads = flips.between[0] | flips.within[0][data.hierarchy.parent]
        mean += chance * np.where(heads[:, None], estimate(flips), over_rows)
    return mean, Objective(data, loss, penalty).gradient(theta)


@given(seed=seeds)
@settings(max_examples=12)
def test_async_al2sgd_plus_is_unbiased(seed):
    rng = np.random.default_rng(seed)
    family = str(rng.choice(["gaussian", "bernoulli", "poisson"]))
    problem = random_problem(seed, family)
    loss = replace(loss_of(family, "mean"), ridge=0.2)
    drawn = some_coins(len(problem.lam), rng)
    mean, exact = oracle_mean(problem, loss, drawn, accelerated.Guide, rng)
    np.testing.assert_allclose(mean, exact, atol=1e-12 * max(1.0, np.abs(exact).max()), rtol=0)


@dataclass(frozen=True)
class Printed(accelerated.Guide):
    """Errata 2: the oracle as the paper prints it, without the term in tau when xi_0 = 1."""

    def answer(self, means, turn, anchor):
        if not turn.between:
            return super().answer(means, turn, anchor)
        share = self.top.alpha / self.coins.p0
        return Pull(share, share[:, None] * self.top.whole(means - anchor))


def test_the_printed_oracle_of_algorithm_2_is_biased():
    problem = random_problem(21)
    k = len(problem.lam)
    assert k > 1
    drawn = Coins(0.3, np.full(k, 0.4), best_tau(0.3, np.full(k, 0.4)))
    mean, exact = oracle_mean(problem, Gaussian(), drawn, Printed, np.random.default_rng(0))
    assert np.abs(mean - exact).max() > 1e-2 * np.abs(exact).max()
    for guide in (accelerated.Guide, Printed):  # with tau = 0 there is nothing to leave out
        mean, exact = oracle_mean(problem, Gaussian(), replace(drawn, tau=np.zeros(k)), guide, np.random.default_rng(0))
        np.testing.assert_allclose(mean, exact, atol=1e-12 * max(1.0, np.abs(exact).max()), rtol=0)


# Async-L2GD against the theorem


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
    for heads in product([False, True], repeat=data.n_clusters):
        chance = (1 - drawn.p0) * np.prod(np.where(heads, drawn.p, 1 - drawn.p))
        pick = lift(np.diag(np.array(heads)[parent].astype(float)))
        maps.append((chance, I - eta * (pick @ within + (I - pick) @ local @ A), eta * (I - pick) @ local @ b))
    return maps


@dataclass(frozen=True)
class Clients:
    data: GroupedData
    penalty: Penalty


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


def follow(problem, drawn, eta, start, seed, times):
    """The iterates of one run at some times."""
    data, penalty, loss = problem.data, problem.penalty, Gaussian()
    top, (equal, gamma) = Top.of(penalty), equal_within(data, penalty)
    node, guide = node_of(data, loss, penalty.gamma, drawn, Rate(eta)), Guide(top, drawn, Rate(eta), gamma)
    network = InMemory(Objective(data, loss, penalty), State(start), partial(node_move, node))
    schedule, t, path = Schedule(drawn, seed, equal), 0, []
    with threads_for(data):
        for until in times:
            if until > t:
                assert play(network, guide, top, schedule.rounds(t, until), NOWHERE)[1] is None
            t = until
            path.append(network.state.theta)
    return np.array(path)


def test_async_l2gd_stays_below_the_bound_and_decays_as_declared(small):
    data, penalty, loss = small.data, small.penalty, Gaussian()
    known = constants(Objective(data, loss, penalty))
    drawn = coins(known, known.L)
    assert drawn.p0 > 0
    drawn = replace(drawn, p=np.maximum(drawn.p, 0.2), tau=best_tau(drawn.p0, np.maximum(drawn.p, 0.2)))
    calL = expected_smoothness(known, drawn, known.L)
    eta, best = 1 / (2 * calL), sweep(data, loss, penalty).theta
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
@pytest.mark.parametrize("solver", [l2gd, one_coin])
def test_switching_steps_arrive_where_a_constant_step_stalls(solver):
    data = simulate(clusters=3, clients=3, rows=12, d=2, wbar=3.0, noise_sd=0.5, seed=2).data
    penalty = Penalty.of(data.hierarchy, gamma=1.0, lam=1.0)
    best = sweep(data, Gaussian(), penalty).theta
    reached = {}
    for steps in ("constant", "switching"):
        fits = [solver(data, Gaussian(), penalty, steps=steps, seed=seed, max_iter=60_000, tol=0.0) for seed in range(3)]
        reached[steps] = np.sqrt(np.mean([((fit.theta - best) ** 2).sum() for fit in fits]) / (best**2).sum())
    assert reached["switching"] < 1e-3
    assert reached["constant"] > 5e-3


# Async-AL2SGD+


@pytest.mark.parametrize("family", ["gaussian", "bernoulli", "poisson"])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_async_al2sgd_plus_converges_to_the_minimiser(family, reduction):
    drawn = simulate(family, clusters=3, clients=4, rows=6, d=2, cluster_sd=0.4, client_sd=0.3, equal_rows=False, seed=8)
    data, loss = drawn.data, loss_of(family, reduction)
    gamma = np.random.default_rng(0).uniform(0.3, 3.0, size=data.n_clients)
    penalty = Penalty.of(data.hierarchy, gamma=gamma, lam=[0.5, 1.0, 2.0])
    best = newton(data, loss, penalty, tol=1e-11)
    fit = al2sgd_plus(data, loss, penalty, tol=1e-18, minimum=best.convergence.objective, max_iter=3_000_000)
    assert fit.convergence.converged
    np.testing.assert_allclose(fit.theta, best.theta, atol=1e-8 * max(1.0, np.abs(best.theta).max()))
    np.testing.assert_allclose(fit.w, best.w, atol=1e-8 * max(1.0, np.abs(best.w).max()))
    np.testing.assert_allclose(fit.wbar, best.wbar, atol=1e-8 * max(1.0, np.abs(best.wbar).max()))
    # Linear: the logarithm of the gradient falls on a line; and the gap is certified, also without a ridge.
    seen = fit.history.filter(fit.history["gradient_norm"] > 0)
    assert np.corrcoef(seen["iteration"], np.log(seen["gradient_norm"]))[0, 1] < -0.97
    assert 0 <= fit.convergence.objective - best.convergence.objective + 1e-12 <= fit.convergence.gap + 2e-12


def conditioned(kappa, common):
    """Clients whose Hessians are all diag(1/kappa, ..., 1): moving all of them along the first axis costs 1/kappa and no
    penalty, so that the smallest curvature is attained. With ``common`` one model explains every row: no noise."""
    rng = np.random.default_rng(0)
    n, d = 6, 3
    X = np.tile(np.diag(np.sqrt([1 / kappa, 1 / np.sqrt(kappa), 1.0])), (n, 1))
    theta = np.ones((n, d)) if common else 1.0 + rng.normal(size=(n, d))
    y = np.einsum("la,la->l", X, np.repeat(theta, d, axis=0))
    data = GroupedData.from_arrays(X, y, np.repeat(np.arange(n), d), np.repeat(np.arange(2), 3 * d))
    return data, Penalty.of(data.hierarchy, gamma=0.1, alpha=0.4)


@quietly
def test_declared_rates_are_the_observed_ones():
    """On log scales: iterations against the condition number, slope about 1/2 for algorithm 2 and 1 for algorithm 1."""
    kappas = np.array([10.0, 100.0, 1000.0, 10000.0])
    needed = {"al2sgd_plus": [], "l2gd": []}
    for kappa in kappas:
        data, penalty = conditioned(kappa, common=False)
        known = constants(Objective(data, Gaussian(), penalty))
        assert known.mu == pytest.approx(1 / kappa, rel=5e-3)
        best = sweep(data, Gaussian(), penalty)
        counts = []
        for seed in range(3):
            fit = al2sgd_plus(data, Gaussian(), penalty, seed=seed, tol=1e-16, every=10, minimum=best.convergence.objective)
            gap = fit.history["gap"].to_numpy()
            counts.append(fit.history["iteration"][int(np.argmax(gap <= 1e-8 * gap[0]))])
        needed["al2sgd_plus"].append(np.mean(counts))
        data, penalty = conditioned(kappa, common=True)
        drawn = coins(known, known.L)
        eta, times = 1 / (2 * expected_smoothness(known, drawn, known.L)), np.arange(0, 20 * kappa, kappa // 5).astype(int)
        path = follow(Clients(data, penalty), drawn, eta, np.zeros_like(best.theta), 0, times)
        away = ((path - 1.0) ** 2).sum(axis=(1, 2))
        assert (away <= 1e-2 * away[0]).any()
        needed["l2gd"].append(times[int(np.argmax(away <= 1e-2 * away[0]))])
    slope = {name: np.polyfit(np.log(kappas), np.log(counts), 1)[0] for name, counts in needed.items()}
    assert slope["al2sgd_plus"] <= 0.65, needed
    assert slope["l2gd"] >= 0.85, needed


def test_the_potential_shrinks_at_least_as_fast_as_declared():
    data, penalty = conditioned(100.0, common=False)
    known = constants(Objective(data, Gaussian(), penalty))
    best = sweep(data, Gaussian(), penalty)
    drawn = coins(known, known.L_row)
    calL = expected_smoothness(known, drawn, known.L_row)
    pace = Katyusha.of(known, calL, 0.2)
    start = float((best.theta**2).sum())
    objective = Objective(data, Gaussian(), penalty)
    gap0 = objective.value(np.zeros_like(best.theta)) - best.convergence.objective
    T = pace.iterations(1e-6, start, gap0)
    far = []
    for seed in range(5):
        with pytest.warns(ConvergenceWarning, match="raise max_iter"):
            fit = al2sgd_plus(data, Gaussian(), penalty, rho=0.2, seed=seed, tol=0.0, max_iter=T)
        # From the potential at y: F(y) - F* <= a1 / (2 b1 b2) times the potential.
        far.append((objective.value(fit.theta) - best.convergence.objective) * 2 * pace.b1 * pace.b2 / pace.a1)
    assert np.mean(far) <= pace.contraction**T * pace.potential(start, gap0)


# Special cases


@quietly
def test_alpha_one_is_the_single_cluster_method():
    """L2GD of Hanzely and Richtarik, written out: one coin, one mean."""
    problem = random_problem(4, weighted=False)
    data = problem.data
    tree, T, eta = data.hierarchy, 300, 1e-3
    penalty = Penalty.of(tree, gamma=2.0, alpha=1.0)
    fit = l2gd(data, Gaussian(), penalty, eta=eta, p0=0.3, p=0.0, seed=7, max_iter=T, tol=0.0)
    heads = Schedule(Coins(0.3, np.zeros(data.n_clusters), np.ones(data.n_clusters)), 7).flips(0, T).between
    theta = np.zeros((data.n_clients, data.n_terms))
    for head in heads:
        if head:
            theta = theta - eta * 2.0 / 0.3 * (theta - theta.mean(axis=0))
        else:
            theta = theta - eta / 0.7 * Gaussian().gradient(data, theta)
    np.testing.assert_allclose(fit.theta, theta, atol=1e-12)
    np.testing.assert_allclose(fit.wbar, theta.mean(axis=0), atol=1e-12)
    single = Penalty.of(data.one_cluster().hierarchy, gamma=2.0, lam=5.0)
    one = l2gd(data.one_cluster(), Gaussian(), single, eta=eta, p0=0.3, seed=7, max_iter=T, tol=0.0, every=T)
    # Coins of one cluster are other draws than those of several; the objective and the method are the same.
    np.testing.assert_allclose(one.convergence.objective, Objective(data, Gaussian(), penalty).value(one.theta), rtol=1e-12)
    assert one.ledger.between == 0


@quietly
@pytest.mark.parametrize("solver", SOLVERS)
def test_with_one_cluster_any_alpha_is_the_same_run(solver):
    data = random_problem(4).data.one_cluster()
    loss = Gaussian(ridge=0.1)
    first, second = (
        solver(data, loss, Penalty.of(data.hierarchy, gamma=2.0, alpha=alpha), max_iter=200, tol=0.0).theta
        for alpha in (1.0, 0.2)
    )
    np.testing.assert_array_equal(first, second)


@quietly
@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("vote", ["central", "majority"])
def test_independent_clusters(solver, vote):
    """alpha = 0: no exchange between clusters but, in the one-coin variant, for its coin."""
    drawn = simulate(clusters=3, clients=4, rows=8, d=2, seed=3)
    data = drawn.data
    penalty = Penalty.of(data.hierarchy, gamma=1.0, alpha=0.0)
    fit = solver(
        data, Gaussian(), penalty, max_iter=20_000, vote=vote, **({} if solver is al2sgd_plus else {"steps": "switching"})
    )
    best = sweep(data, Gaussian(), penalty)
    np.testing.assert_allclose(fit.theta, best.theta, atol=0.05)
    if solver is l2gd:
        assert fit.ledger.between == 0


@quietly
def test_equal_and_unequal_gamma_give_the_same_iterates():
    """Merging heads changes what is sent, not what is computed."""
    drawn = simulate(clusters=3, clients=3, rows=6, d=2, seed=1)
    data = drawn.data
    merged = Penalty.of(data.hierarchy, gamma=2.0, lam=3.0)
    gamma = merged.gamma.copy()
    gamma[0] *= 1 + 1e-13
    apart = Penalty.of(data.hierarchy, gamma=gamma, lam=3.0)
    fits = [l2gd(data, Gaussian(), penalty, p0=0.4, p=0.5, max_iter=500, tol=0.0) for penalty in (merged, apart)]
    np.testing.assert_allclose(fits[0].theta, fits[1].theta, atol=1e-10)
    assert fits[0].ledger.between < 0.75 * fits[1].ledger.between
    assert (fits[0].ledger.within < fits[1].ledger.within).all()


@quietly
@pytest.mark.parametrize("family", ["gaussian", "bernoulli", "poisson"])
def test_local_runs_are_gradient_steps(family, monkeypatch):
    """Closed form, vector kernels, weights, offsets, a ridge: the same as steps written out, for every client."""
    problem = random_problem(13, family)
    data, penalty, loss = problem.data, problem.penalty, replace(loss_of(family, "mean"), ridge=0.05)
    drawn = Coins(0.5, np.full(data.n_clusters, 0.5), np.full(data.n_clusters, 0.5))
    rng = np.random.default_rng(0)
    theta = 0.1 * rng.normal(size=(data.n_clients, data.n_terms))
    expected = theta
    flips = Flips(np.zeros(6, dtype=bool), np.zeros((6, data.n_clusters), dtype=bool), np.zeros(6, dtype=bool))
    rate = Rate(0.005, mu=0.3)
    for t in range(6):
        expected = expected - rate.at(t) * 4 * loss.gradient(data, expected)
    for largest in (50_000_000, 0):  # in the eigenbasis, and step by step
        monkeypatch.setattr(sys.modules["covey.solvers.l2gd"], "_LARGEST_BASIS", largest)
        node = node_of(data, loss, penalty.gamma, drawn, rate)
        network = InMemory(Objective(data, loss, penalty), State(theta), partial(node_move, node))
        play(network, Guide(Top.of(penalty), drawn, rate, np.ones(data.n_clusters)), Top.of(penalty), group(flips), NOWHERE)
        np.testing.assert_allclose(network.state.theta, expected, atol=1e-12)


# Sharding, threads, restarts


class Sharded:
    """Several nodes, each with some consecutive clients."""

    def __init__(self, nodes):
        self.nodes, self.d = nodes, nodes[0].d

    def move(self, move):
        answers = [node.move(move) for node in self.nodes]
        return sum(answers[1:], answers[0])


@pytest.mark.parametrize("accelerate", [False, True])
def test_any_sharding_of_clients_gives_the_same_run(accelerate):
    problem = random_problem(31, "bernoulli")
    data, penalty, loss = problem.data, problem.penalty, loss_of("bernoulli")
    drawn = replace(some_coins(data.n_clusters, np.random.default_rng(1)), rho=0.2 if accelerate else 0.0)
    top, n = Top.of(penalty), data.n_clients
    start = np.random.default_rng(2).normal(size=(n, data.n_terms))
    pace, rate = Katyusha(1e-2, 0.3, 0.4, 0.9, 0.05, 0.2), Rate(1e-2)

    def run(cuts):
        nodes = []
        for a, b in pairwise(cuts):
            part, gamma = data.clients(a, b), penalty.gamma[a:b]
            if accelerate:
                node = accelerated.node_of(part, loss, gamma, drawn, pace, streams(3, n)[a:b])
                state, move = accelerated.node_start(node, start[a:b]), partial(accelerated.node_move, node)
            else:
                state, move = State(start[a:b]), partial(node_move, node_of(part, loss, gamma, drawn, rate))
            nodes.append(InMemory(Objective(part, loss, replace(penalty, gamma=gamma)), state, move))
        guide = accelerated.Guide(top, drawn) if accelerate else Guide(top, drawn, rate, np.ones(len(penalty.lam)))
        anchor = data.hierarchy.mean_up(start, penalty.gamma)
        assert play(Sharded(nodes), guide, top, Schedule(drawn, 3).rounds(0, 120), anchor, announce=True)[1] is None
        return np.concatenate([node.state.theta for node in nodes])

    whole = run([0, n])
    for cuts in ([0, n // 2, n], [0, 1, n // 3, n]):
        np.testing.assert_allclose(run(cuts), whole, atol=1e-10)


def many_clients(family):
    drawn = simulate(family, clusters=3, clients=400, rows=5, d=3, equal_rows=False, client_sd=0.5, cluster_sd=0.5, seed=1)
    data = drawn.data
    return data, Penalty.of(data.hierarchy, gamma=2.0, lam=2.0)


@quietly
@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("family", ["gaussian", "bernoulli"])
def test_the_number_of_threads_changes_no_bit(solver, family):
    data, penalty = many_clients(family)
    fits = []
    before = numba.get_num_threads()
    try:
        for threads in (1, before):
            numba.set_num_threads(threads)
            fits.append(solver(data, loss_of(family), penalty, mu=0.1, max_iter=150, tol=0.0, seed=5))
    finally:
        numba.set_num_threads(before)
    np.testing.assert_array_equal(fits[0].theta, fits[1].theta)
    assert fits[0].history.equals(fits[1].history)


def kept(path):
    with np.load(path) as file:
        return int(file["iteration"])


KILLED = """
import sys
from covey import Penalty, solvers
from covey.datasets import simulate
from covey.losses import Bernoulli
data = simulate("bernoulli", clusters=3, clients=40, rows=5, d=3, seed=1).data
penalty = Penalty.of(data.hierarchy, gamma=2.0, lam=2.0)
solver = getattr(solvers, sys.argv[1])
solver(data, Bernoulli(), penalty, seed=5, tol=0.0, max_iter=10_000_000, checkpoint=sys.argv[2])
"""


@quietly
@pytest.mark.parametrize("solver", SOLVERS)
def test_a_killed_run_resumes_to_the_same_bits(solver, tmp_path):
    """Killed wherever it is, with checks as theory spaces them, then taken further than it was asked to go at first."""
    path = tmp_path / "run.npz"
    with subprocess.Popen([sys.executable, "-W", "ignore", "-c", KILLED, solver.__name__, str(path)]) as process:
        for _ in range(600):
            time.sleep(0.1)
            if path.exists() and kept(path) >= 300:
                break
        process.kill()
    reached = kept(path)
    assert reached >= 300
    data = simulate("bernoulli", clusters=3, clients=40, rows=5, d=3, seed=1).data
    penalty = Penalty.of(data.hierarchy, gamma=2.0, lam=2.0)
    settings = {"seed": 5, "tol": 0.0, "max_iter": reached + 250}
    straight = solver(data, loss_of("bernoulli"), penalty, **settings)
    resumed = solver(data, loss_of("bernoulli"), penalty, checkpoint=path, **settings)
    np.testing.assert_array_equal(resumed.theta, straight.theta)
    np.testing.assert_array_equal(resumed.wbar, straight.wbar)
    assert resumed.history.equals(straight.history)
    np.testing.assert_array_equal(resumed.ledger.within, straight.ledger.within)


@quietly
def test_a_checkpoint_belongs_to_its_run(tmp_path):
    data, penalty = many_clients("gaussian")
    path = tmp_path / "run.npz"

    def run(**changes):
        return l2gd(data, Gaussian(), penalty, **{"max_iter": 100, "tol": 0.0, "seed": 1, "checkpoint": path, **changes})

    run()
    for changes, message in (
        ({"seed": 2}, "other seed"),
        ({"eta": 1e-4}, "other eta"),
        ({"steps": "switching"}, "other steps"),
        ({"p0": 0.3, "eta": 1e-3}, "other eta"),
        ({"vote": "majority"}, "other vote"),
        ({"every": 7}, "other every"),
        ({"start": np.ones((1200, 3))}, "other start"),
    ):
        with pytest.raises(SolverError, match=rf"is of another run \({message}\); give another path"):
            run(**changes)
    fixed = {"p0": 0.2, "p": 0.2, "eta": 1e-4, "mu": 0.1, "L": 90.0, "max_iter": 100, "tol": 0.0, "checkpoint": path}
    path.unlink()
    l2gd(data, Gaussian(), penalty, **fixed)
    other = replace(data, hierarchy=replace(data.hierarchy, cluster_ptr=np.array([0, 100, 800, 1200])))
    for changed, loss, ties, message in (
        (data, Gaussian(), Penalty.of(data.hierarchy, gamma=2.0, lam=2.5), "other penalties"),
        (data, Gaussian("mean"), penalty, "other loss"),
        (data, Gaussian(ridge=0.1), penalty, "other loss"),
        (replace(data, y=(data.y > 0) * 1.0), loss_of("bernoulli"), penalty, "other loss"),
        (other, Gaussian(), penalty, "other data"),
        (replace(data, weights=np.full(data.n_rows, 0.5)), Gaussian(), penalty, "other data"),
    ):
        with pytest.raises(SolverError, match=message):
            l2gd(changed, loss, ties, **fixed)
    for damage in (b"nothing", b"", path.read_bytes()[:500]):
        path.write_bytes(damage)
        with pytest.raises(SolverError, match="cannot be read; delete it to start anew"):
            run()
    with pytest.raises(SolverError, match="must be a file in a folder that exists"):
        run(checkpoint=tmp_path / "nowhere" / "run.npz")


# What a user may get wrong


def test_a_non_finite_iterate_stops_and_keeps_the_last_good_checkpoint(tmp_path):
    drawn = simulate(clusters=2, clients=3, rows=8, d=2, seed=3)
    data, path = drawn.data, tmp_path / "run.npz"
    penalty = Penalty.of(data.hierarchy)
    with pytest.warns(ConvergenceWarning, match=r"the step eta = 50 is above .* = 1 / \(2 calL\)"):  # noqa: SIM117
        with pytest.raises(SolverError, match=r"The iterate of client \d is no longer finite by iteration [\d,]+; give a"):
            l2gd(data, Gaussian(), penalty, eta=50.0, every=50, max_iter=100_000, checkpoint=path)
    kept = np.load(path)
    assert np.isfinite(kept["node.theta"]).all()
    with (
        pytest.warns(ConvergenceWarning, match="eta"),
        pytest.raises(SolverError, match=r"Iteration \d+ is kept in .*run\.npz"),
    ):
        l2gd(data, Gaussian(), penalty, eta=50.0, every=50, max_iter=100_000, checkpoint=path)


@pytest.mark.parametrize(
    ("solver", "settings", "message"),
    [
        (l2gd, {"p0": -0.1}, r"The 'p0' parameter must lie in \[0, 1\]"),
        (l2gd, {"p": [0.1] * 5}, r"The 'p' parameter must hold 1 or 2 values, one for each cluster\. Got 5 instead"),
        (l2gd, {"steps": "random"}, r"The 'steps' parameter must be one of 'constant', 'switching'"),
        (l2gd, {"tol": -1}, r"The 'tol' parameter must be a number >= 0\. Got -1 instead"),
        (l2gd, {"max_iter": 0}, r"The 'max_iter' parameter must be a whole number >= 1"),
        (l2gd, {"every": 2.5}, r"The 'every' parameter must be a whole number >= 1"),
        (l2gd, {"seed": -3}, r"The 'seed' parameter must be a whole number >= 0"),
        (
            l2gd,
            {"start": np.zeros((2, 2))},
            r"The 'start' parameter must hold 6 x 2 finite numbers, .* Got shape \(2, 2\)",
        ),
        (l2gd, {"start": np.full((6, 2), np.nan)}, r"finite numbers, a row for each client\. Client 0 has \[nan, nan\]"),
        (l2gd, {"start": "a"}, r"The 'start' parameter must hold 6 x 2 .* Got str instead"),
        (one_coin, {"p": 1.5}, r"The 'p' parameter must lie in \[0, 1\]"),
        (one_coin, {"p": 0.0}, r"With p = 0 clients never exchange"),
        (al2sgd_plus, {"rho": 0.0}, r"With rho = 0 the anchor is never refreshed"),
        (al2sgd_plus, {"rho": 7}, r"The 'rho' parameter must lie in \[0, 1\]"),
        (al2sgd_plus, {"mu": 0.0}, r"The 'mu' parameter must be a number > 0\. Got 0\.0 instead"),
        (al2sgd_plus, {"mu": "a"}, r"The 'mu' parameter must be a number > 0\. Got 'a' instead"),
        (l2gd, {"mu": 1e6}, r"mu = 1e\+06 cannot be: the objective is nowhere more curved than"),
        (l2gd, {"L": -5}, r"The 'L' parameter must be a number > 0\. Got -5 instead"),
        (l2gd, {"eta": True}, r"The 'eta' parameter must be a number > 0\. Got True instead"),
        (l2gd, {"minimum": "a"}, r"The 'minimum' parameter must be a number\. Got 'a' instead"),
        (l2gd, {"checkpoint": 5}, r"The 'checkpoint' parameter must be the path of a file\. Got 5 instead"),
        (l2gd, {"seed": 2**130}, r"The 'seed' parameter must be a whole number"),
        (l2gd, {"p": [0.1, [0.2]]}, r"The 'p' parameter must lie in \[0, 1\]\. Got \[0\.2\] instead"),
        (l2gd, {"maxiter": 5}, r"The solver 'l2gd' has no option 'maxiter'; did you mean 'max_iter'\?"),
        (one_coin, {"rho": 0.1}, r"The solver 'one_coin' has no option 'rho'; besides its own settings it takes 'seed'"),
    ],
)
def test_settings_out_of_range(solver, settings, message):
    data = simulate(clusters=2, clients=3, rows=8, d=2, seed=3).data
    with pytest.raises(ValueError, match=message) as raised:
        solver(data, Gaussian(), Penalty.of(data.hierarchy), **settings)
    assert len(str(raised.value)) < 260


def test_penalties_that_no_algorithm_can_use():
    tree = simulate(clusters=2, clients=3, rows=8, d=2, seed=3).data.hierarchy
    with pytest.raises(PenaltyError, match=r"The 'alpha' parameter must lie in \[0, 1\]\. Got 1\.2 instead"):
        Penalty.of(tree, alpha=1.2)
    with pytest.raises(PenaltyError, match="gamma is 0 for every client of cluster 0, so nothing ties them to it"):
        Penalty.of(tree, gamma={0: 0.0, 1: 1.0})


@quietly
def test_history_is_a_frame_of_honest_numbers():
    problem = random_problem(8)
    data, penalty = problem.data, problem.penalty
    best = sweep(data, Gaussian(), penalty)
    told = []
    fit = al2sgd_plus(
        data, Gaussian(), penalty, tol=1e-6, minimum=best.convergence.objective, progress=lambda *what: told.append(what)
    )
    history = fit.history
    assert [row[0] for row in told] == history["iteration"].to_list()
    assert history.columns[:5] == ["iteration", "objective", "gap", "certified_gap", "gradient_norm"]
    assert (history["certified_gap"] >= history["gap"] - 1e-9).all()
    assert history["exchanges"].is_sorted()
    assert history["bytes"].is_sorted()
    objective = Objective(data, Gaussian(), penalty)
    assert history["objective"][-1] == pytest.approx(objective.value(fit.theta), rel=1e-12)
    assert history["gradient_norm"][-1] == pytest.approx(np.linalg.norm(objective.gradient(fit.theta)), rel=1e-9)
    assert fit.convergence.gap == history["certified_gap"][-1] <= 1e-6 * max(1, abs(fit.convergence.objective))
    assert fit.ledger.checks == len(history)
    assert fit.convergence.exchanges == int(fit.ledger.within.max()) + fit.ledger.checks == history["exchanges"][-1]
    blind = al2sgd_plus(data, Gaussian(), penalty, tol=1e-6)
    assert blind.history["gap"].null_count() == len(blind.history)
