"""Newton against scipy on an objective written out independently, and its own promises."""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from scipy.optimize import minimize

from covey import ConvergenceWarning, GroupedData, InMemory, Objective, Penalty
from covey.datasets import simulate
from covey.errors import SolverError
from covey.losses import Bernoulli, Gaussian, Poisson, loss_of
from covey.solvers import minimise, newton
from covey.solvers.direct.elimination import Spread
from covey.solvers.direct.newton import NewtonProgress, UpperLevels, coordinate
from covey.solvers.direct.newton_node import LocalProblem, node_move, node_start
from covey.threads import use_threads
from tests.conftest import random_problem, seeds
from tests.networks import shard

FAMILIES = ("gaussian", "bernoulli", "poisson")


def independent_objective(problem, family):
    """The multi-task form in plain numpy, as a function of one long vector (theta, w, wbar)."""
    d, n, k = problem.X.shape[1], len(problem.gamma), len(problem.lam)
    parent = np.array([problem.cluster[problem.client == i][0] for i in range(n)])

    def value(flat):
        theta, w, wbar = np.split(flat.reshape(-1, d), [n, n + k])
        margin = np.sum(problem.X * theta[problem.client], axis=1) + problem.offset
        loss = {
            "gaussian": 0.5 * (problem.y - margin) ** 2,
            "bernoulli": np.logaddexp(0, margin) - problem.y * margin,
            "poisson": np.exp(margin) - problem.y * margin,
        }[family]
        ties = np.sum(problem.gamma[:, None] * (theta - w[parent]) ** 2) + np.sum(problem.lam[:, None] * (w - wbar) ** 2)
        return np.sum(problem.weights * loss) + 0.5 * ties

    def gradient(flat):
        theta, w, wbar = np.split(flat.reshape(-1, d), [n, n + k])
        margin = np.sum(problem.X * theta[problem.client], axis=1) + problem.offset
        mean = {"gaussian": margin, "bernoulli": 1 / (1 + np.exp(-margin)), "poisson": np.exp(margin)}[family]
        g = np.zeros_like(theta)
        np.add.at(g, problem.client, (problem.weights * (mean - problem.y))[:, None] * problem.X)
        pull = problem.gamma[:, None] * (theta - w[parent])
        hold = problem.lam[:, None] * (w - wbar)
        gw = hold.copy()
        np.subtract.at(gw, parent, pull)
        return np.concatenate([(g + pull).ravel(), gw.ravel(), -hold.sum(axis=0)])

    return value, gradient, (n + k + 1) * d


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=8)
@given(seeds)
def test_matches_an_independent_minimiser(family, seed):
    problem = random_problem(seed, family)
    fit = minimise(problem.data, loss_of(family), problem.penalty, solver="newton")
    value, gradient, size = independent_objective(problem, family)
    found = minimize(
        value, np.zeros(size), jac=gradient, method="L-BFGS-B", options={"maxiter": 20000, "ftol": 0, "gtol": 1e-7}
    )
    ours = np.concatenate([fit.theta.ravel(), fit.w.ravel(), fit.wbar])
    assert fit.convergence.gradient_norm < 1e-8
    assert np.linalg.norm(gradient(ours)) < 1e-8
    assert value(ours) <= found.fun + 1e-10 * abs(found.fun)
    np.testing.assert_allclose(ours, found.x, atol=2e-5)


@given(seeds)
def test_gaussian_newton_is_the_sweep(seed):
    problem = random_problem(seed)
    exact = minimise(problem.data, Gaussian(), problem.penalty, solver="sweep")
    fit = minimise(problem.data, Gaussian(), problem.penalty, solver="newton")
    np.testing.assert_allclose(fit.theta, exact.theta, atol=1e-10)
    assert fit.convergence.iterations <= 2


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=8)
@given(seeds)
def test_nodes_add_up_to_the_same_fit(family, seed):
    """Clients assigned to three nodes at random, so that clusters are split, give the fit of one node."""
    problem = random_problem(seed, family)
    data, penalty, loss = problem.data, problem.penalty, loss_of(family)
    assume(family != "bernoulli" or 0 < data.y.sum() < data.n_rows)  # one class only has no finite optimum
    whole = minimise(data, loss, penalty, solver="newton")
    owner = np.random.default_rng(seed).integers(0, 3, size=data.n_clients)
    order, nodes = [], []
    for site in range(3):
        mine = np.flatnonzero(owner == site)
        if len(mine):
            order.append(mine)
            nodes.append(LocalProblem(shard(data, mine), loss, Spread.of_penalty(penalty.gamma[mine], data.n_terms)))
    zeros = np.zeros((data.n_clusters, data.n_terms))
    still = [np.zeros((node.data.n_clients, data.n_terms)) for node in nodes]
    begun = [node_start(node, here, here) for node, here in zip(nodes, still, strict=True)]
    states, reports = [state for state, _ in begun], [report for _, report in begun]

    def add(messages):
        total = messages[0]
        for message in messages[1:]:
            total = total + message
        return total

    def ask(move):
        answers = [node_move(node, state, move) for node, state in zip(nodes, states, strict=True)]
        states[:] = [state for state, _ in answers]
        return add([report for _, report in answers])

    begin = NewtonProgress(UpperLevels(zeros, zeros, np.zeros(data.n_terms)), mu=0.0)
    spread = Spread.of_penalty(penalty.lam, data.n_terms)
    stage, account, _ = coordinate(ask, add(reports), begin, spread, tol=1e-8, max_iter=100)
    theta = np.empty_like(whole.theta)
    theta[np.concatenate(order)] = np.concatenate([state.now.theta for state in states])
    assert account.converged
    np.testing.assert_allclose(theta, whole.theta, atol=1e-10)
    np.testing.assert_allclose(stage.top.wbar, whole.wbar, atol=1e-10)


def test_start_elsewhere_reaches_the_same_point():
    drawn = simulate("bernoulli", clusters=4, clients=6, rows=15, d=3, seed=2)
    near = minimise(drawn.data, Bernoulli(), Penalty.of(drawn.data.hierarchy, gamma=2.0, lam=3.0), solver="newton")
    penalty = Penalty.of(drawn.data.hierarchy, gamma=1.0, lam=1.0)
    cold, warm = (
        minimise(drawn.data, Bernoulli(), penalty, solver="newton"),
        minimise(drawn.data, Bernoulli(), penalty, solver="newton", start=near),
    )
    np.testing.assert_allclose(warm.theta, cold.theta, atol=1e-9)
    assert warm.convergence.iterations <= cold.convergence.iterations
    one = Penalty.of(drawn.data.hierarchy, gamma=1.0, alpha=1.0)
    np.testing.assert_allclose(
        minimise(drawn.data, Bernoulli(), one, solver="newton", start=near).theta,
        minimise(drawn.data, Bernoulli(), one, solver="newton").theta,
        atol=1e-9,
    )


def test_converges_from_far_away():
    """Large counts make the first full step overshoot by hundreds; damping brings it home."""
    rng = np.random.default_rng(0)
    data = GroupedData.from_arrays(
        np.ones((60, 1)), rng.poisson(1e5, 60), np.repeat(np.arange(12), 5), np.repeat(np.arange(3), 20)
    )
    penalty = Penalty.of(data.hierarchy)
    usual = minimise(data, Poisson(), penalty, solver="newton")
    nowhere = replace(usual, theta=0 * usual.theta, w=0 * usual.w, wbar=0 * usual.wbar)
    fit = minimise(data, Poisson(), penalty, solver="newton", start=nowhere)
    assert fit.convergence.converged
    np.testing.assert_allclose(fit.wbar, np.log(1e5), atol=0.01)
    np.testing.assert_allclose(fit.theta, usual.theta, atol=1e-8)
    assert fit.convergence.exchanges > fit.convergence.iterations + 1
    assert usual.convergence.iterations < 5


@pytest.mark.parametrize("exposure", [0.0, 700.0])
def test_large_counts_and_exposures(exposure):
    rng = np.random.default_rng(0)
    x = rng.normal(size=100)
    y = rng.poisson(1e4 * np.exp(0.3 * x))
    data = GroupedData.from_arrays(np.c_[np.ones(100), x], y, np.arange(100) % 5, offset=np.full(100, exposure))
    fit = minimise(data, Poisson(), Penalty.of(data.hierarchy), solver="newton")
    assert fit.convergence.converged
    # Provenance: scikit-learn's PoissonRegressor(alpha=0, solver="newton-cholesky") on the pooled rows: 9.2128, 0.2989.
    np.testing.assert_allclose(fit.wbar, [9.2128 - exposure, 0.2989], atol=2e-3)


def test_says_when_it_stops_early():
    drawn = simulate("bernoulli", clusters=3, clients=5, rows=10, d=2, seed=3)
    with pytest.warns(ConvergenceWarning, match=r"above the tolerance 1.0e-08; raise max_iter"):
        fit = minimise(drawn.data, Bernoulli(), Penalty.of(drawn.data.hierarchy), solver="newton", max_iter=1)
    assert not fit.convergence.converged
    objective = Objective(drawn.data, Bernoulli(), Penalty.of(drawn.data.hierarchy))
    assert fit.convergence.gradient_norm == pytest.approx(np.linalg.norm(objective.gradient(fit.theta)))


def test_says_that_separated_classes_have_no_finite_optimum():
    x = np.r_[-2.0, -1.0, 1.0, 2.0, -1.5, -0.5, 0.5, 1.5]
    data = GroupedData.from_arrays(x[:, None], (x > 0).astype(float), np.repeat([0, 1], 4), terms=["dose"])
    with pytest.warns(ConvergenceWarning, match="perfectly separated along 'dose'"):
        fit = minimise(data, Bernoulli(), Penalty.of(data.hierarchy), solver="newton")
    assert np.isfinite(fit.theta).all()


def test_says_so_for_one_independent_cluster_and_from_a_warm_start():
    x = np.r_[-2.0, -1.0, 1.0, 2.0, -1.5, -0.5, 0.5, 1.5]
    y = (x > 0).astype(float)
    y[5] = 1 - y[5]  # the second cluster is not separable
    data = GroupedData.from_arrays(x[:, None], y, np.repeat([0, 1], 4), np.repeat([0, 1], 4), terms=["dose"])
    with pytest.warns(ConvergenceWarning, match="perfectly separated along 'dose'"):
        fit = minimise(data, Bernoulli(), Penalty.of(data.hierarchy, lam=0.0), solver="newton")
    with pytest.warns(ConvergenceWarning, match="perfectly separated along 'dose'"):
        minimise(data, Bernoulli(), Penalty.of(data.hierarchy, lam=0.0), solver="newton", start=fit)


def test_a_flat_but_finite_optimum_is_not_called_separated():
    """Rates of one in a billion: the curvature falls by nine orders on the way to an optimum that exists."""
    counts = np.random.default_rng(0).poisson(5, 40)
    data = GroupedData.from_arrays(np.ones((40, 1)), counts, np.repeat(np.arange(8), 5), offset=np.full(40, np.log(1e9)))
    penalty = Penalty.of(data.hierarchy, gamma=1e8, lam=np.inf)
    usual = minimise(data, Poisson(), penalty, solver="newton")
    nowhere = replace(usual, theta=0 * usual.theta, w=0 * usual.w, wbar=0 * usual.wbar)
    for fit in (usual, minimise(data, Poisson(), penalty, solver="newton", start=nowhere)):
        assert fit.wbar[0] == pytest.approx(np.log(counts.mean() / 1e9), abs=1e-6)


def test_independent_clusters_have_the_same_mean_from_any_start():
    drawn = simulate("bernoulli", clusters=3, clients=5, rows=20, d=2, seed=3)
    tree = drawn.data.hierarchy
    near = minimise(drawn.data, Bernoulli(), Penalty.of(tree, lam=[5.0, 0.1, 1.0]), solver="newton")
    warm = minimise(drawn.data, Bernoulli(), Penalty.of(tree, lam=0.0), solver="newton", start=near)
    np.testing.assert_allclose(warm.wbar, warm.w.mean(axis=0))
    np.testing.assert_allclose(
        warm.wbar, minimise(drawn.data, Bernoulli(), Penalty.of(tree, lam=0.0), solver="newton").wbar, atol=1e-7
    )


def test_the_gap_is_claimed_only_when_it_bounds():
    """Stopped at a start whose centres are not at their best, the clients' curvature says nothing of the gap."""
    drawn = simulate("bernoulli", clusters=3, clients=5, rows=20, d=2, seed=3)
    penalty, loss = Penalty.of(drawn.data.hierarchy, gamma=1e-3, lam=1e-3), Bernoulli(ridge=10.0)
    best = minimise(drawn.data, loss, penalty, solver="newton")
    stopped = minimise(drawn.data, loss, penalty, solver="newton", start=replace(best, w=best.w + 1e-5), tol=1e-2)
    assert stopped.convergence.iterations == 0
    assert stopped.convergence.gap is None


def test_accepts_what_float64_allows():
    """Columns of size 1e6 put the smallest gradient above 1e-8; that is said, not hidden and not an error."""
    rng = np.random.default_rng(0)
    X = np.column_stack([np.ones(400), 1e6 * rng.normal(size=400)])
    y = (rng.random(400) < 0.4).astype(float)
    data = GroupedData.from_arrays(X, y, np.repeat(np.arange(20), 20))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit = minimise(data, Bernoulli(), Penalty.of(data.hierarchy), solver="newton")
    assert fit.convergence.converged
    assert fit.convergence.gradient_norm < 1e-4


def test_a_ridge_gives_a_certified_gap():
    drawn = simulate("bernoulli", clusters=3, clients=5, rows=10, d=2, seed=3)
    fit = minimise(drawn.data, Bernoulli(ridge=0.1), Penalty.of(drawn.data.hierarchy), solver="newton")
    assert fit.convergence.gap == pytest.approx(fit.convergence.gradient_norm**2 / 0.2)


@pytest.mark.parametrize("family", FAMILIES)
def test_threads_change_no_bit(family, always_share):
    drawn = simulate(family, clusters=5, clients=300, rows=7, d=3, cluster_sd=0.3, client_sd=0.3, equal_rows=False, seed=5)
    penalty = Penalty.of(drawn.data.hierarchy)
    with use_threads(4):
        many = newton(InMemory.of(drawn.data, loss_of(family), penalty.gamma), penalty)
    with use_threads(1):
        one = newton(InMemory.of(drawn.data, loss_of(family), penalty.gamma), penalty)
    assert (many.theta == one.theta).all()
    assert (many.wbar == one.wbar).all()


@pytest.mark.parametrize("family", ["gaussian", "bernoulli", "poisson"])
def test_a_run_stopped_after_any_step_resumes_to_the_same_bits(family, tmp_path):
    problem = random_problem(5, family)
    data, penalty, loss = problem.data, problem.penalty, loss_of(family)
    straight = minimise(data, loss, penalty, solver="newton")
    for steps in range(1, straight.convergence.iterations):
        path = tmp_path / f"{steps}.npz"
        with pytest.warns(ConvergenceWarning, match="raise max_iter"):
            minimise(data, loss, penalty, solver="newton", max_iter=steps, checkpoint=path)
        resumed = minimise(data, loss, penalty, solver="newton", checkpoint=path)
        np.testing.assert_array_equal(resumed.theta, straight.theta)
        np.testing.assert_array_equal(resumed.wbar, straight.wbar)
        assert resumed.convergence == straight.convergence
        assert resumed.history.equals(straight.history)
    minimise(data, loss, penalty, solver="newton", checkpoint=tmp_path / "done.npz")
    with pytest.raises(SolverError, match=r"of another run \(other penalties\)"):
        minimise(data, loss, Penalty.of(data.hierarchy, gamma=7.0), solver="newton", checkpoint=tmp_path / "done.npz")


def wide_problem(family, seed, d=18):
    """Clients with fewer rows than terms, of different sizes, with weights and offsets."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, 7, size=45)
    client = np.repeat(np.arange(45), counts)
    X, offset = rng.normal(size=(len(client), d)), 0.3 * rng.normal(size=len(client))
    loss, weights = loss_of(family, "mean" if seed % 3 == 0 else "sum"), rng.integers(1, 4, size=len(client)).astype(float)
    y = loss.draw(0.2 * X @ rng.normal(size=d) + offset, rng, 0.5)
    data = GroupedData.from_arrays(X, y, client, client // 15, weights=weights, offset=offset)
    return data, loss, Penalty.of(data.hierarchy, gamma=10.0 ** rng.uniform(-1, 3, size=45), lam=[0.5, 1.0, 50.0])


@pytest.mark.parametrize("family", ["bernoulli", "poisson", "gamma"])
@pytest.mark.parametrize("seed", range(4))
def test_clients_in_the_space_of_their_margins(family, seed, monkeypatch):
    """The same optimum as Newton on all coefficients, in no more exchanges, and each client is at its best at every step."""
    data, loss, penalty = wide_problem(family, seed)
    fit = minimise(data, loss, penalty, tol=1e-9)
    state, _ = node_start(
        LocalProblem(data, loss, Spread.of_penalty(penalty.gamma, 18)), fit.theta + 0.1, np.zeros_like(fit.theta)
    )
    assert np.abs(state.now.residual).max() < 1e-8 * (1.0 + np.abs(state.now.u).max())
    monkeypatch.setattr("covey.solvers.direct.margins.MANY", 100)
    plain = minimise(data, loss, penalty, tol=1e-9)
    assert fit.convergence.converged
    assert plain.convergence.converged
    assert fit.convergence.exchanges <= plain.convergence.exchanges
    assert fit.convergence.objective == pytest.approx(plain.convergence.objective, rel=1e-12)
    np.testing.assert_allclose(fit.theta, plain.theta, rtol=0, atol=1e-7 * np.abs(plain.theta).max())


def test_many_clients_begin_at_the_fit_of_a_sample(monkeypatch):
    """Fewer steps with all clients, and the same optimum."""
    drawn = simulate("bernoulli", clusters=3, clients=400, rows=5, d=2, wbar=[-2.0, 0.5], intercept=True, seed=1)
    penalty = Penalty.of(drawn.data.hierarchy, gamma=2.0, lam=3.0)
    plain = minimise(drawn.data, Bernoulli(), penalty, tol=1e-9)
    monkeypatch.setattr("covey.solvers.direct.newton._WORTH_SAMPLING", (100, 100))
    fit = minimise(drawn.data, Bernoulli(), penalty, tol=1e-9)
    assert fit.convergence.iterations < plain.convergence.iterations
    np.testing.assert_allclose(fit.theta, plain.theta, rtol=0, atol=1e-9)
    # A sample without ones has no finite optimum; then Newton begins at zero.
    one = GroupedData.from_arrays(np.ones((400, 1)), np.arange(400) % 16 == 3, np.arange(400))
    alone = minimise(one, Bernoulli(), Penalty.of(one.hierarchy))
    assert alone.convergence.converged
    assert alone.history["exchanges"][0] == 1
