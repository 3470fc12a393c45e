"""Partial participation in l2gd: unbiased, with the constants and the noise of the theory, by enumeration of all outcomes."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings

from covey import Objective, Penalty
from covey.datasets import simulate
from covey.errors import SolverError
from covey.losses import Gaussian, loss_of
from covey.nodes.network import InMemory
from covey.objective.theory import (
    Constants,
    Probabilities,
    best_schedules,
    best_tau,
    distance_bound,
    expected_smoothness,
    noise,
    probabilities,
)
from covey.solvers import minimise, reference, solve
from covey.solvers.clock import Durations, timeline
from covey.solvers.first_order import l2gd
from covey.solvers.first_order.l2gd import StepSizes
from covey.solvers.first_order.schedule import Choices, Schedule, group
from covey.solvers.ledger import links, rates
from tests.conftest import random_problem, seeds
from tests.solvers.first_order.shared import (
    Clients,
    begun,
    conditioned,
    constants_of,
    follow,
    l2gd_rounds,
    outcomes,
    quietly,
    some_probabilities,
)
from tests.solvers.first_order.test_l2gd import exact_distances
from tests.solvers.first_order.test_references import START, T, problem
from tests.solvers.test_across import Sharded


def sampled(k, rng, p0=0.3):
    """Probabilities that differ between clusters; the first cluster always takes part."""
    present = rng.uniform(0.2, 1.0, size=k)
    present[0] = 1.0
    return replace(some_probabilities(k, rng, p0), present=present)


@given(seed=seeds)
@settings(max_examples=8)
def test_steps_are_unbiased(seed):
    """The mean over every outcome, each computed by the solver itself, is the gradient of the objective."""
    rng = np.random.default_rng(seed)
    family = str(rng.choice(["gaussian", "bernoulli", "poisson"]))
    drawn_problem = random_problem(seed, family)
    data, penalty, loss = drawn_problem.data, drawn_problem.penalty, loss_of(family)
    drawn = sampled(data.n_clusters, rng)
    theta = rng.normal(size=(data.n_clients, data.n_terms))
    mean, total = np.zeros_like(theta), 0.0
    for chance, choices in outcomes(drawn, data.n_clusters):
        network = begun(data, loss, penalty, drawn, StepSizes(1.0), theta)
        l2gd_rounds(network, penalty, drawn, StepSizes(1.0), group(choices))
        mean, total = mean + chance * (theta - network.node.theta), total + chance
    exact = Objective(data, loss, penalty).gradient(theta)
    assert total == pytest.approx(1.0)
    np.testing.assert_allclose(mean, exact, atol=1e-12 * max(1.0, np.abs(exact).max()), rtol=0)


def dense(objective, drawn):
    """Every outcome as ``(probability, M, c)`` with step ``M theta - c``, written from the definition, client by client."""
    data, penalty = objective.data, objective.penalty
    n, d, parent, k = data.n_clients, data.n_terms, data.hierarchy.parent, data.n_clusters
    gamma, alpha, q = penalty.gamma, penalty.alpha, drawn.present
    a = alpha[parent] * gamma
    mean_of = np.array([gamma * (parent == j) / gamma[parent == j].sum() for j in range(k)])
    hessian, linear = objective.loss.hessian(data, np.zeros((n, d))), objective.loss.gradient(data, np.zeros((n, d)))
    for choice in product([False, True], repeat=k):
        S, zero = np.array(choice), np.zeros((n, n))
        for i, j in enumerate(parent):
            if not S[j]:
                continue
            away = np.zeros(n)
            for m in np.flatnonzero(S):  # pairs of clients, each weighted by the inverse of its probability
                both = q[j] if m == j else q[j] * q[m]
                away += a[parent == m].sum() / a.sum() / both * (np.eye(n)[i] - mean_of[m])
            inside = drawn.tau[j] * (1 - alpha[j]) / q[j] * (np.eye(n)[i] - mean_of[j])
            zero[i] = gamma[i] / drawn.p0 * (alpha[j] * away + inside)
        chance = drawn.p0 * np.prod(np.where(S, q, 1 - q))
        yield chance, np.kron(zero, np.eye(d)), np.zeros(n * d)
    for choice in product([False, True], repeat=k):
        chance = (1 - drawn.p0) * np.prod(np.where(choice, drawn.p, 1 - drawn.p))
        M, c = np.zeros((n * d, n * d)), np.zeros(n * d)
        if chance == 0:
            continue
        for i, j in enumerate(parent):
            rows = slice(i * d, (i + 1) * d)
            if choice[j]:
                share = gamma[i] * (1 - drawn.tau[j]) * (1 - alpha[j]) / ((1 - drawn.p0) * drawn.p[j])
                M[rows] = np.kron(share * (np.eye(n)[i] - mean_of[j]), np.eye(d))
            else:
                M[rows, rows] = hessian[i] / ((1 - drawn.p0) * (1 - drawn.p[j]))
                c[rows] = -linear[i] / ((1 - drawn.p0) * (1 - drawn.p[j]))
        yield chance, M, c


@pytest.mark.parametrize("seed", range(8))
def test_the_expected_smoothness_and_the_noise_bound_the_exact_ones(seed):
    """``E|step(theta) - step(theta_hat)|^2 <= 2 calL D`` for every theta, and ``E|step(theta_hat)|^2 <= sigma^2``."""
    rng = np.random.default_rng(seed)
    k = int(rng.integers(2, 5))
    data = simulate(clusters=k, clients=2, rows=4, d=2, seed=seed).data
    gamma, lam = 10 ** rng.uniform(-1, 1, size=2 * k), 10 ** rng.uniform(-1, 1, size=k)
    penalty = Penalty.of(data.hierarchy, gamma=gamma, lam=lam)
    objective = Objective(data, Gaussian("mean"), penalty)
    drawn = sampled(k, rng)
    drawn = replace(drawn, p=np.maximum(drawn.p, 0.1), tau=rng.uniform(0.1, 0.9, size=k))
    best = minimise(data, objective.loss, penalty).theta
    known = constants_of(objective)
    calL = expected_smoothness(known, drawn, known.of_clients)
    second, H, at_best = 0.0, 0.0, 0.0
    for chance, M, c in dense(objective, drawn):
        second, H = second + chance * M.T @ M, H + chance * M
        at_best += chance * ((M @ best.ravel() - c) ** 2).sum()
    np.testing.assert_allclose(H, H.T, atol=1e-9)  # the mean step is a gradient, with the Hessian of the objective
    assert np.linalg.eigvalsh(calL * H - second)[0] >= -1e-9 * calL**2
    assert at_best <= noise(objective, best, drawn) * (1 + 1e-9)
    exact_H = np.array([objective.gradient(row.reshape(best.shape)) for row in np.eye(best.size)])
    np.testing.assert_allclose(H, (exact_H - objective.gradient(0 * best)).reshape(best.size, -1), atol=1e-8)


def test_the_noise_of_steps_on_phi_is_exact():
    """Only ``phi``, no losses: the variance at a point is that of every outcome, not only a bound."""
    data = simulate(clusters=4, clients=1, rows=3, d=2, seed=3).data
    penalty = Penalty.of(data.hierarchy, gamma=[0.5, 1.0, 2.0, 4.0], alpha=1.0)
    drawn = Probabilities(0.4, np.zeros(4), np.ones(4), present=np.array([0.3, 0.6, 1.0, 0.8]))
    objective, theta = Objective(data, Gaussian(), penalty), np.random.default_rng(0).normal(size=(4, 2))
    between = [(chance, M @ theta.ravel()) for chance, M, c in dense(objective, drawn) if not c.any()]
    exact = sum(chance * (step**2).sum() for chance, step in between)
    f = ((Gaussian().gradient(data, theta) ** 2).sum(axis=1) * drawn.local).sum()
    assert noise(objective, theta, drawn) == pytest.approx(2 * exact + f, rel=1e-12)


@given(seed=seeds)
@settings(max_examples=40)
def test_the_best_probabilities_have_the_least_expected_smoothness(seed):
    """Against random probabilities, and the formula without participation."""
    rng = np.random.default_rng(seed)
    k = int(rng.integers(2, 6))
    gamma, alpha, L = 10 ** rng.uniform(-1, 1, size=k), rng.uniform(0.05, 0.95, size=k), rng.uniform(0.5, 3.0, size=k)
    known = Constants(L.max(), L.max(), 0.1, gamma, alpha, weights=rng.dirichlet(np.ones(k)))
    present = rng.uniform(0.1, 1.0, size=k)
    p0, p = best_schedules(known, L, present)
    best = Probabilities(p0, p, best_tau(p0, p, present), present=present)
    least = expected_smoothness(known, best, L)
    for _ in range(20):
        p0, p = float(rng.uniform(0.01, 0.95)), rng.uniform(0.0, 0.95, size=k)
        other = Probabilities(p0, p, best_tau(p0, p, present), present=present)
        assert expected_smoothness(known, other, L) >= least * (1 - 1e-9)
    everybody = best_schedules(known, L, np.ones(k))
    np.testing.assert_allclose(np.hstack(everybody), np.hstack(best_schedules(known, L)), rtol=1e-12)


def test_the_distance_stays_below_the_bound_of_the_theorem():
    """Exact second moments at the largest step of Theorem 3.5, and the solver's own runs."""
    data = simulate(clusters=3, clients=2, rows=4, d=2, seed=5).data
    small = Clients(data, Penalty.of(data.hierarchy, gamma=np.array([0.5, 1.5, 1.0, 1.0, 0.7, 0.7]), lam=1.0))
    objective = Objective(data, Gaussian(), small.penalty)
    known = constants_of(objective)
    drawn = probabilities(known, known.of_clients, participation=[0.4, 0.7, 1.0])
    eta = 1 / (2 * expected_smoothness(known, drawn, known.of_clients))
    best = minimise(data, Gaussian(), small.penalty).theta
    n = best.size
    maps = [(chance, np.eye(n) - eta * M, eta * c) for chance, M, c in dense(objective, drawn)]
    exact = exact_distances(maps, best, np.zeros_like(best), 300)
    sigma2 = noise(objective, best, drawn)
    assert (exact <= distance_bound(np.arange(301), eta=eta, mu=known.mu, sigma2=sigma2, start=exact[0])).all()
    times = np.array([50, 300])
    paths = np.array([follow(small, drawn, eta, np.zeros_like(best), seed, times) for seed in range(200)])
    squared = ((paths - best) ** 2).sum(axis=(2, 3))
    error = squared.std(axis=0) / np.sqrt(200)
    assert (np.abs(squared.mean(axis=0) - exact[times]) <= 5 * error).all()


def test_the_declared_rate_is_the_observed_one():
    """Exact second moments, far away along the direction of least curvature, for condition numbers from 10 to 10^4."""
    declared, observed = [], []
    for kappa in (10.0, 1e2, 1e3, 1e4):
        data, penalty = conditioned(kappa, common=True)
        objective = Objective(data, Gaussian(), penalty)
        known = constants_of(objective)
        drawn = probabilities(known, known.of_clients, participation=[0.4, 0.8])
        eta, best = 1 / (2 * expected_smoothness(known, drawn, known.of_clients)), minimise(data, Gaussian(), penalty).theta
        n = best.size
        steps = list(dense(objective, drawn))
        values, vectors = np.linalg.eigh(sum(chance * M for chance, M, _ in steps))
        assert values[0] == pytest.approx(1 / kappa)
        maps = [(chance, np.eye(n) - eta * M, eta * c) for chance, M, c in steps]
        curve = exact_distances(maps, best, best + 1e3 * vectors[:, 0].reshape(best.shape), 100)
        rate = (curve[-1] / curve[0]) ** (1 / 100)
        assert (1 - eta * values[0]) ** 2 <= rate <= 1 - eta * known.mu
        declared.append(eta * known.mu)
        observed.append(-np.log(rate))
    assert np.polyfit(np.log(declared), np.log(observed), 1)[0] == pytest.approx(1.0, abs=0.1)


@quietly
@pytest.mark.parametrize("family", ["gaussian", "bernoulli"])
@pytest.mark.parametrize("vote", ["central", "majority"])
def test_the_solver_is_the_algorithm_written_out(family, vote):
    (data, penalty), loss = problem(family), replace(loss_of(family, "mean"), ridge=0.05)
    known = constants_of(Objective(data, loss, penalty))
    chances = {"p0": 0.4, "p": [0.2, 0.5, 0.4], "tau": [0.3, 0.6, 0.5], "participation": [0.5, 0.8, 0.3]}
    best = l2gd.recipe(known, **chances)
    choices = Schedule(best.probabilities, 7, vote=vote).choices(0, T)
    slow = reference["l2gd"](Objective(data, loss, penalty), best.probabilities, choices, lambda t: best.largest_step, START)
    control = {"seed": 7, "tol": 0.0, "max_iter": T, "start": START, "vote": vote, "every": 50}
    fast = minimise(data, loss, penalty, solver="l2gd", **chances, **control)
    np.testing.assert_allclose(fast.theta, slow, rtol=0, atol=1e-10)
    everybody = minimise(data, loss, penalty, solver="l2gd", p0=0.4, p=[0.2, 0.5, 0.4], **control)
    always = minimise(data, loss, penalty, solver="l2gd", p0=0.4, p=[0.2, 0.5, 0.4], participation=1.0, **control)
    np.testing.assert_array_equal(everybody.theta, always.theta)
    assert (fast.ledger.within < everybody.ledger.within).any()


@quietly
def test_no_bit_depends_on_nodes_or_on_where_a_run_is_cut(tmp_path):
    (data, penalty), loss = problem("gaussian"), Gaussian("mean")
    settings_ = {"solver": "l2gd", "tol": 0.0, "every": 20, "seed": 4, "options": {"participation": 0.5}}
    straight = minimise(data, loss, penalty, max_iter=100, **settings_)
    network = Sharded(data, loss, penalty, np.arange(data.n_clients) % 2)
    parts = solve(network, penalty, max_iter=100, tol=0.0, seed=4, solver="l2gd", options={"participation": 0.5, "every": 20})
    np.testing.assert_array_equal(network.theta(), straight.theta)
    assert parts.history.equals(straight.history)
    minimise(data, loss, penalty, max_iter=47, checkpoint=tmp_path / "run", **settings_)
    resumed = minimise(data, loss, penalty, max_iter=100, checkpoint=tmp_path / "run", **settings_)
    np.testing.assert_array_equal(resumed.theta, straight.theta)


def test_who_is_absent_sends_nothing_and_waits_for_nobody():
    present = np.array([0.25, 0.5, 1.0])
    p = np.array([0.3, 0.2, 0.0])
    schedule, network = (
        Schedule(Probabilities(0.2, p, best_tau(0.2, p, present), present=present), 3),
        links(np.ones(3, int), 4),
    )
    rounds = schedule.rounds(0, 40_000)
    spent = network.of(rounds, 40_000)
    np.testing.assert_allclose(spent.within, rates(schedule)[0] * 40_000, rtol=0.03)
    np.testing.assert_allclose(rounds.together.sum(axis=0), 0.2 * present * 40_000, rtol=0.04)
    assert spent.bytes_between == 8 * 9 * rounds.together.sum()
    # Three local steps, then an exchange without the slow cluster 0: the others take 3 s and four messages.
    head, here = np.array([False, False, False, True]), np.array([[False, True, True]] * 4)
    choices = Choices(head, np.zeros((4, 3), dtype=bool), np.zeros(4, dtype=bool), here)
    lasts = Durations(np.array([5.0, 1.0, 1.0]), np.zeros(3), np.full(3, 0.1), np.full(3, 0.1))
    whole = timeline(group(choices), lasts, barriers=False)
    np.testing.assert_allclose((whole.computing + whole.sending + whole.waiting).sum(axis=0), [15.0, 3.4, 3.4])
    assert (whole.sending[:, 0] == 0).all()


def test_a_cluster_that_is_absent_keeps_its_own_order():
    present = np.array([0.5, 0.8, 0.3])
    schedule = Schedule(Probabilities(0.4, np.array([0.2, 0.5, 0.4]), np.full(3, 0.5), present=present), 5)
    choices, rounds = schedule.choices(0, 200), schedule.rounds(0, 200)
    for j in range(3):
        plain = "".join(
            ("b" if choices.present[t, j] else "") if choices.between[t] else "w" if choices.within[t, j] else "l"
            for t in range(200)
        )
        read = "".join(
            "l" * int(turn.steps[j]) + "b" * int(turn.between and turn.takes_part[j]) + "w" * int(turn.within[j])
            for turn in rounds
        )
        assert read == plain


@pytest.mark.parametrize("solver", ["sweep", "newton", "one_coin", "al2sgd_plus", "apgd", "proxskip"])
def test_other_solvers_refuse_it_with_the_reason(solver):
    data = simulate(clusters=2, clients=2, rows=4, d=2, seed=1).data
    with pytest.raises(SolverError, match=rf"{solver!r} has no option 'participation': .*(every|choice).*solver='l2gd'"):
        minimise(data, Gaussian(), Penalty.of(data.hierarchy), solver=solver, options={"participation": 0.5})


@pytest.mark.parametrize(
    ("settings_", "says"),
    [
        ({"participation": "available"}, "independently of the data and of the run"),
        ({"participation": 0.0}, "never learn from the others"),
        ({"participation": 1.5}, "'participation'"),
        ({"participation": [0.5, 0.5, 0.5]}, "1 or 2 values"),
        ({"participation": 0.5, "steps": "switching"}, "needs steps='constant'"),
    ],
)
def test_mistakes_name_the_reason(settings_, says):
    data = simulate(clusters=2, clients=2, rows=4, d=2, seed=1).data
    penalty = Penalty.of(data.hierarchy)
    with pytest.raises(SolverError, match=says):
        solve(InMemory.of(data, Gaussian(), penalty.gamma), penalty, solver="l2gd", options=settings_)
