"""Constants and bounds of the theorems, compared with minimisation and enumeration that do not use their formulas."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize, minimize_scalar

from covey import GroupedData, Objective, Penalty
from covey.datasets import simulate
from covey.errors import ConvergenceWarning, SolverError
from covey.losses import Bernoulli, Gaussian, Poisson, loss_of
from covey.nodes.network import InMemory
from covey.objective.theory import (
    Constants,
    Probabilities,
    best_probabilities,
    best_tau,
    distance_bound,
    expected_smoothness,
    iterations,
    noise,
    probabilities,
    psi_variance,
    switch,
    switching_bound,
    switching_steps,
)
from covey.solvers import minimise, reference
from covey.solvers.first_order import l2gd, one_coin
from covey.solvers.first_order.al2sgd_plus import Katyusha
from covey.solvers.first_order.curvature import constants
from covey.solvers.first_order.schedule import Schedule
from covey.solvers.ledger import rates
from tests.conftest import random_problem, seeds
from tests.networks import bounds_of
from tests.solvers.first_order.shared import constants_of, outcomes, quietly

inside = st.floats(min_value=0.01, max_value=0.99)
positive = st.floats(min_value=1e-3, max_value=1e3)


def known(C1=0.5, C2=1.0, L=3.0, mu=0.1):
    """Two clusters with these constants."""
    gamma = C1 + C2
    return Constants(L, L, mu, np.array([gamma, gamma]), np.array([C1, C1]) / gamma)


@given(p0=inside, p=inside)
def test_best_tau_has_the_least_variance(p0, p):
    found = minimize_scalar(lambda tau: psi_variance(p0, np.array([p]), np.array([tau]))[0], bounds=(0, 1), method="bounded")
    best = best_tau(p0, np.array([p]))
    assert best[0] == pytest.approx(found.x, abs=1e-4)
    assert psi_variance(p0, np.array([p]), best)[0] == pytest.approx(2 / (p0 + 2 * (1 - p0) * p), rel=1e-12)
    assert psi_variance(p0, np.array([p]), best)[0] <= found.fun * (1 + 1e-12)


@given(C1=positive, C2=positive, L=positive)
def test_best_probabilities_have_the_least_bound(C1, C2, L):
    """The bound, minimised by brute force, is not lower than at the probabilities of Corollary 3.6 (opt_conv_rate)."""

    def bound(p0, p):
        return max(2 * C1 / p0, 2 * C2 / (p0 + 2 * (1 - p0) * p), L / ((1 - p0) * (1 - p)))

    p0, p = best_probabilities(C1, C2, L)
    ours = bound(p0, p)
    assert ours == pytest.approx(C1 + C2 + L if C2 > C1 else 2 * C1 + L, rel=1e-9)
    grid = np.linspace(1e-3, 1 - 1e-3, 60)
    start = min(((bound(a, b), a, b) for a in grid for b in [1e-12, *grid]), key=lambda trial: trial[0])

    def free(u):
        a, b = 1 / (1 + np.exp(-u))
        return np.log(bound(a, b)) if 0 < a < 1 and 0 < b < 1 else 1e3

    better = minimize(free, np.log(np.array(start[1:]) / (1 - np.array(start[1:]))), method="Nelder-Mead")
    assert np.exp(better.fun) >= ours * (1 - 1e-6)
    if C2 > C1:
        assert best_tau(p0, np.array([p]))[0] == pytest.approx(C1 / C2, rel=1e-9)


@given(p=inside, L=positive, gamma=positive)
def test_best_one_coin(p, L, gamma):
    problem = Constants(L, L, 0.1, np.array([gamma]), np.ones(1))
    assert one_coin.smoothness(problem, one_coin.best_probability(problem)) == pytest.approx(gamma + L)
    assert one_coin.smoothness(problem, p) >= (gamma + L) * (1 - 1e-12)


@given(seed=seeds)
def test_expected_smoothness_covers_the_oracle(seed):
    """``E|G(theta) - G(theta_hat)|^2 <= 2 calL (F(theta) - F(theta_hat))``, for all outcomes of the random choices."""
    problem = random_problem(seed, max_rows=6)
    data, penalty, loss = problem.data, problem.penalty, Gaussian(ridge=0.1)
    objective = Objective(data, loss, penalty)
    here = bounds_of(data, loss, penalty)
    drawn = probabilities(here, here.L)
    best = minimise(data, loss, penalty, solver="newton").theta
    theta = best + np.random.default_rng(seed).normal(size=best.shape)
    calL = expected_smoothness(here, drawn, here.L)
    away, at_best = (_steps(objective, point, drawn, here.alpha) for point in (theta, best))
    spread = variance = 0.0
    for chance, there, still in zip(_chances(drawn, data), away, at_best, strict=True):
        spread += chance @ ((there - still) ** 2).sum(axis=1)
        variance += chance @ (still**2).sum(axis=1)
    assert spread <= 2 * calL * (objective.value(theta) - objective.value(best)) * (1 + 1e-9)
    assert variance <= noise(objective, best, drawn) * (1 + 1e-9)


def _steps(objective, theta, drawn, alpha):
    """The three kinds of step in the paper: between clusters, within clusters, local."""
    tree, gamma = objective.data.hierarchy, objective.penalty.gamma[:, None]
    tbar_j, tbar = objective.means(theta)
    alpha, tau, p = (values[tree.parent][:, None] for values in (alpha, drawn.tau, drawn.p))
    to_cluster, p0 = theta - tree.down(tbar_j), drawn.p0
    between = gamma / p0 * (alpha * (theta - tbar) + tau * (1 - alpha) * to_cluster) if p0 else 0 * theta
    within = gamma * (1 - tau) * (1 - alpha) / ((1 - p0) * np.where(p > 0, p, 1)) * to_cluster
    local = objective.loss.gradient(objective.data, theta) / ((1 - p0) * (1 - p))
    return between, within, local


def _chances(drawn, data):
    """The probability of each kind of step for each client (squared norms add over clients, so marginals are enough)."""
    p, n = drawn.p[data.hierarchy.parent], data.n_clients
    return np.full(n, drawn.p0), (1 - drawn.p0) * p, (1 - drawn.p0) * (1 - p)


def test_extreme_probabilities():
    independent = probabilities(known(C1=0.0), 3.0)
    assert (independent.p0, independent.tau.tolist()) == (0.0, [0.0, 0.0])
    assert independent.p[0] == pytest.approx(1 / 4)
    assert expected_smoothness(known(C1=0.0), independent, 3.0) == pytest.approx(1 + 3)
    one = probabilities(known(C2=0.0), 3.0)
    assert (one.p.tolist(), one.tau.tolist()) == ([0.0, 0.0], [1.0, 1.0])
    assert expected_smoothness(known(C2=0.0), one, 3.0) == pytest.approx(2 * 0.5 + 3)


def test_constants_of_a_small_problem():
    data = GroupedData.from_arrays([[2.0], [1.0], [3.0]], [0.0, 1.0, 2.0], ["a", "b", "c"], ["x", "x", "y"])
    here = bounds_of(data, Gaussian(), Penalty.of(data.hierarchy, gamma=1.0, alpha=0.25))
    assert (here.L, here.C1, here.C2) == (9.0, 0.25, 0.75)
    assert here.mu == pytest.approx(1.0)


def test_one_cluster_counts_as_alpha_one():
    problem = random_problem(3)
    data = problem.data.one_cluster()
    here = bounds_of(data, Gaussian(), Penalty.of(data.hierarchy, gamma=1.0, lam=0.3))
    assert (here.C1, here.C2) == (1.0, 0.0)


@pytest.mark.parametrize("family", ["gaussian", "bernoulli", "poisson"])
def test_measured_curvature_is_that_of_the_dense_hessian(family):
    problem = random_problem(11, family)
    data, penalty, loss = problem.data, problem.penalty, loss_of(family)
    here = constants_of(Objective(data, loss, penalty))
    theta = (
        np.zeros((data.n_clients, data.n_terms))
        if family == "gaussian"
        else minimise(data, loss, penalty, solver="newton").theta
    )
    objective, size = Objective(data, loss, penalty), 1e-5
    columns = []
    for at in range(theta.size):
        bump = np.zeros(theta.size)
        bump[at] = size
        up, down = (objective.gradient(theta + sign * bump.reshape(theta.shape)) for sign in (1, -1))
        columns.append((up - down).ravel() / (2 * size))
    lowest = np.linalg.eigvalsh(np.array(columns))[0]
    assert here.mu == pytest.approx(lowest, rel=5e-3)
    assert ("measured" in here.note) == (family != "gaussian")
    assert np.inf > here.L


def test_curvature_of_a_problem_without_a_unique_minimiser_is_zero():
    problem = random_problem(5, d=3)
    X = problem.X.copy()
    X[:, 2] = X[:, 1]  # two equal columns
    equal = replace(problem, X=X)
    assert constants_of(Objective(equal.data, Gaussian(), equal.penalty)).mu == 0
    with pytest.raises(SolverError, match=r"in some direction it is flat \(mu = 0\).*Standardise"):
        constants_of(Objective(equal.data, Gaussian(), equal.penalty)).need_curvature()


def test_a_ridge_gives_a_bound_that_holds_everywhere():
    problem = random_problem(7, "bernoulli")
    here = constants_of(Objective(problem.data, Bernoulli(ridge=0.3), problem.penalty))
    assert (here.mu, here.note) == (0.3, "")
    given = constants_of(Objective(problem.data, Bernoulli(), problem.penalty), mu=0.2)
    assert (given.mu, given.note, given.proved) == (0.2, "mu as given", False)


@given(seed=seeds)
def test_row_smoothness_is_the_curvature_of_a_row(seed):
    problem = random_problem(seed, "bernoulli")
    data, loss = problem.data, Bernoulli("mean")
    bound = loss.row_smoothness(data)
    # f_i is the mean of the f_il, so its Hessian is at most the mean of their bounds.
    top = np.linalg.eigvalsh(loss.hessian(data, np.zeros((data.n_clients, data.n_terms))))[:, -1]
    mean = np.add.reduceat(bound, data.client_ptr[:-1]) / data.rows_per_client
    assert (top <= mean * (1 + 1e-9)).all()
    assert np.isinf(Poisson().row_smoothness(data)).all()


def test_bounds_and_iterations_agree():
    drawn = probabilities(known(), 3.0)
    calL = expected_smoothness(known(), drawn, 3.0)
    assert distance_bound(0, eta=1 / (2 * calL), mu=0.1, sigma2=0.0, start=7.0) == 7.0
    for sigma2 in (0.0, 5.0):
        t, eta = iterations(1e-3, smoothness=calL, mu=0.1, sigma2=sigma2, start=7.0)
        reached = distance_bound([t, t - 10], eta=eta, mu=0.1, sigma2=sigma2, start=7.0)
        assert reached[0] <= 1e-3 * 7.0 * (1 + 1e-9)
        assert sigma2 == 0 or reached[1] > 1e-3 * 7.0 * 0.9


def test_switching_steps_fall_like_one_over_t():
    last = switch(4.5, 0.1)
    steps = switching_steps(np.array([0, last, last + 1, 10 * last]), 4.5, 0.1)
    assert steps[0] == steps[1] == 1 / 9
    assert steps[2] <= 1 / 9
    assert steps[3] == pytest.approx(2 / (10 * last * 0.1), rel=0.01)
    assert switching_bound(1e9, smoothness=4.5, mu=0.1, sigma2=1.0, start=1.0) == pytest.approx(8 / 0.01 / 1e9, rel=1e-3)


def test_katyusha_follows_the_theorem():
    here = known(mu=1e-3)
    pace = Katyusha.of(here, smoothness=6.0, rho=0.25)
    top = max(3.0 + 1.5, 6.0)
    assert pace.eta == 1 / (4 * top)
    assert pace.a2 == 6.0 / (2 * top)
    assert pace.a1 == pytest.approx(np.sqrt(pace.eta * 1e-3 * pace.a2 / 0.25))
    assert pace.b2 == pytest.approx(pace.eta / (4 * pace.a1))
    assert pace.b1 == 1 - pace.b2 * 1e-3
    assert pace.contraction == pace.b1
    t = pace.iterations(1e-6)
    answer = pace.a1 / (pace.b1 * (1 - pace.b1))  # from the potential to the distance of y
    assert answer * pace.b1**t <= 1e-6 < answer * pace.b1 ** (t - 1)
    assert pace.iterations(1e-6, 1.0, gap=100.0) > t
    seldom = Katyusha.of(known(mu=1.0), smoothness=6.0, rho=1e-4)
    assert seldom.contraction > 1 - 1e-4  # convergence is not faster than the refresh of the anchor


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"p0": 1.5}, r"The 'p0' parameter must lie in \[0, 1\]\. Got 1\.5 instead\."),
        ({"p": [0.1, -0.2]}, r"The 'p' parameter must lie in \[0, 1\]\. Got -0\.2 instead\."),
        ({"tau": 2}, r"The 'tau' parameter must lie in \[0, 1\]\."),
        ({"p0": "often"}, r"The 'p0' parameter must lie in \[0, 1\]\. Got 'often' instead\."),
        ({"p0": 0.0}, r"no exchange between clusters, but alpha > 0 needs one"),
        ({"p0": 1.0}, r"no client takes a step on its data"),
        ({"p": 1.0}, r"no client takes a step on its data"),
        ({"p": 0.0, "tau": 0.5}, r"tau = 0\.5 leaves part of the pull .* would be biased"),
    ],
)
def test_probabilities_with_biased_steps_are_refused(given, message):
    with pytest.raises(SolverError, match=message):
        probabilities(known(), 3.0, **given)


def test_a_step_above_the_bound_warns_with_the_bound_and_its_reason():
    recipe = l2gd.recipe(known())
    assert recipe.step(None) == recipe.largest_step == 1 / (2 * (0.5 + 1.0 + 3.0))
    with pytest.warns(ConvergenceWarning, match=r"eta = 0\.5 is above 0\.111 = 1 / \(2 calL\), the largest step") as caught:
        assert recipe.step(0.5) == 0.5
    assert caught[0].filename == __file__
    for bad in (0, -1.0, np.inf, "long"):
        with pytest.raises(SolverError, match=r"The 'eta' parameter must be a number > 0"):
            recipe.step(bad)


def test_the_variance_at_the_minimiser_is_zero_if_one_model_explains_all_rows():
    """If one model explains all rows without error, every step at the minimiser is zero for any random choice."""
    problem = random_problem(2, weighted=False)
    exact = replace(problem, y=problem.X @ np.ones(problem.X.shape[1]))
    data, penalty = exact.data, exact.penalty
    theta = minimise(data, Gaussian(), penalty, solver="sweep").theta
    drawn = Probabilities(0.3, np.full(data.n_clusters, 0.2), best_tau(0.3, np.full(data.n_clusters, 0.2)))
    assert noise(Objective(data, Gaussian(), penalty), theta, drawn) < 1e-20


def test_each_cluster_has_its_own_schedule():
    """With gamma from 0.1 to 10, exchanges fall by more than 30% at the same expected smoothness, so at equal iterations."""
    gamma = np.geomspace(0.1, 10, 10)
    known = Constants(4.0, 4.0, 0.1, gamma, np.full(10, 0.05))
    own, common = probabilities(known, 4.0), probabilities(known, 4.0, p="common")
    assert expected_smoothness(known, own, 4.0) == pytest.approx(expected_smoothness(known, common, 4.0))
    totals = [np.mean(rates(Schedule(chances, 0, merge=True))[0]) for chances in (own, common)]
    assert totals[0] <= 0.7 * totals[1]
    with pytest.raises(SolverError, match=r"'p' parameter must be .* or 'common'"):
        probabilities(known, 4.0, p="rare")


amounts = st.lists(st.floats(0.01, 10), min_size=3, max_size=3)


@given(gamma=amounts, alpha=st.lists(st.floats(0.0, 0.95), min_size=3, max_size=3), L=amounts)
def test_the_least_expected_smoothness_if_clusters_differ(gamma, alpha, L):
    """Against bisection on calL: a calL is possible if every cluster has a p_j that keeps both of its terms below it."""
    known, L = Constants(max(L), max(L), 0.1, np.array(gamma), np.array(alpha)), np.array(L)
    best = probabilities(known, L)

    def possible(calL):
        p0 = 2 * known.C1 / calL
        if p0 >= 1:
            return False
        lower = np.maximum(0.0, (2 * known.pull / calL - p0) / (2 * (1 - p0)))
        return bool((lower <= 1 - L / ((1 - p0) * calL)).all())

    low, high = 0.0, 100.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if possible(middle) else (middle, high)
    assert expected_smoothness(known, best, L) == pytest.approx(high)
    less = replace(best, p=np.maximum(best.p * 0.99, 0.0))
    fewer = replace(less, tau=best_tau(less.p0, less.p))
    moved = best.p > 1e-6
    if moved.any():  # no cluster can exchange less at this calL
        assert expected_smoothness(known, fewer, L) > expected_smoothness(known, best, L) * (1 + 1e-9)


@quietly
def test_the_smoothness_of_each_cluster():
    """Rounded up by at most the fourth root of 2; the expected smoothness with it covers the oracle, by all outcomes."""
    drawn = simulate(clusters=3, clients=3, rows=8, d=2, seed=1)
    X = drawn.X * np.array([1.0, 3.0, 0.5])[drawn.cluster][:, None]
    data = GroupedData.from_arrays(X, drawn.y, drawn.client, drawn.cluster)
    penalty, loss = Penalty.of(data.hierarchy, gamma=[1.0, 0.2, 60.0], alpha=0.1), Gaussian()
    objective = Objective(data, loss, penalty)
    known = constants(InMemory.of(data, loss, penalty.gamma), penalty, clusters=("client", "row"))
    largest = np.maximum.reduceat(loss.smoothness(data), data.hierarchy.cluster_ptr[:-1])
    rows = np.maximum.reduceat(loss.row_smoothness(data), data.client_ptr[data.hierarchy.cluster_ptr[:-1]])
    for found, exact in ((known.L_j, largest), (known.L_row_j, rows)):
        assert (exact <= found * (1 + 1e-12)).all()
        assert (found <= 1.2 * exact).all()
    chances = probabilities(known, known.of_clients)
    calL = expected_smoothness(known, chances, known.of_clients)
    assert calL < expected_smoothness(known, probabilities(known, known.L), known.L) * 0.95
    best = minimise(data, loss, penalty).theta
    for seed in range(20):
        theta = best + np.random.default_rng(seed).normal(size=best.shape) * 10.0 ** (seed % 4)
        spread = 0.0
        for chance, choices in outcomes(chances, 3):
            steps = [at - reference["l2gd"](objective, chances, choices, lambda t: 1.0, at) for at in (theta, best)]
            spread += chance * ((steps[0] - steps[1]) ** 2).sum()
        assert spread <= 2 * calL * (objective.value(theta) - objective.value(best)) * (1 + 1e-9)


@quietly
def test_a_cluster_of_one_client_never_exchanges_with_itself():
    """Its client is its own average: the step towards it is zero, and its penalty does not enter calL."""
    rng = np.random.default_rng(0)
    drawn = simulate(clusters=3, clients=3, rows=6, d=2, seed=1)
    keep = (drawn.cluster != 0) | (drawn.client == 0)
    data = GroupedData.from_arrays(drawn.X[keep], drawn.y[keep], drawn.client[keep], drawn.cluster[keep])
    penalty = Penalty.of(data.hierarchy, gamma=[50.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0], alpha=[0.1, 0.3, 0.3])
    objective, loss = Objective(data, Gaussian(), penalty), Gaussian()
    known = constants_of(objective)
    chances = probabilities(known, known.L)
    assert chances.p[0] == 0
    assert pytest.approx(1.4) == known.C2
    theta = rng.normal(size=(7, 2))
    mean = np.zeros_like(theta)
    for chance, choices in outcomes(chances, 3):
        mean += chance * (theta - reference["l2gd"](objective, chances, choices, lambda t: 1.0, theta))
    np.testing.assert_allclose(mean, objective.gradient(theta), atol=1e-9)
    fit = minimise(data, loss, penalty, solver="l2gd", max_iter=300, tol=0.0)
    assert fit.ledger.within[0] == fit.ledger.between  # only exchanges of all clusters
