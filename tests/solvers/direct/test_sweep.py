"""The sweep against a dense solve of the joint system and against generalised least squares."""

from __future__ import annotations

import itertools
import sys

import numpy as np
import pytest
from hypothesis import given

from covey import GroupedData, Objective, Penalty
from covey.datasets import simulate
from covey.losses import Bernoulli, Gaussian
from covey.nodes.network import InMemory, Node
from covey.solvers import minimise
from covey.solvers.direct.elimination import Quadratic, Spread, descend, eliminate, solve_symmetric
from covey.solvers.direct.sweep import SweepDown, SweepUp, one_sweep, solve_top
from tests.conftest import Problem, dense_solution, gls_solution, random_problem, seeds
from tests.networks import strong_convexity


def assert_close(ours, theirs, tolerance=1e-10):
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * max(1.0, np.abs(b).max()))


@given(seeds)
def test_equals_dense_solve_of_the_joint_system(seed):
    problem = random_problem(seed)
    fit = minimise(problem.data, Gaussian(), problem.penalty, solver="sweep")
    assert_close((fit.theta, fit.w, fit.wbar), dense_solution(problem))


@given(seeds)
def test_equals_generalised_least_squares_at_the_true_variances(seed):
    """Errata 5: the costly estimator of prop. not_gls is the minimiser itself, for every design."""
    problem = random_problem(seed)
    fit = minimise(problem.data, Gaussian(), problem.penalty, solver="sweep")
    assert_close((fit.theta, fit.w, fit.wbar), gls_solution(problem))


@given(seeds)
def test_reports_a_true_account(seed):
    problem = random_problem(seed)
    objective = Objective(problem.data, Gaussian(), problem.penalty)
    fit = minimise(problem.data, Gaussian(), problem.penalty, solver="sweep")
    said = fit.convergence
    assert said.converged
    assert said.exchanges == 1
    assert said.objective == pytest.approx(objective.value(fit.theta), rel=1e-12)
    assert said.objective == pytest.approx(objective.multitask_value(fit.theta, fit.w, fit.wbar), rel=1e-12)
    assert np.linalg.norm(objective.gradient(fit.theta)) < 1e-10 * (1 + np.linalg.norm(problem.y))


def test_certified_gap_bounds_the_true_gap():
    drawn = simulate(clusters=3, clients=4, rows=12, d=3, seed=1)
    objective = Objective(drawn.data, Gaussian(), Penalty.of(drawn.data.hierarchy))
    fit = minimise(drawn.data, Gaussian(), objective.penalty, solver="sweep")
    mu = Gaussian().smallest_curvature(Gaussian().hessian(drawn.data, fit.theta))
    assert 0 < mu <= strong_convexity(Gaussian(), drawn.data).min()
    assert fit.convergence.gap == pytest.approx(fit.convergence.gradient_norm**2 / (2 * mu))
    away = fit.theta + 0.1
    gap = objective.value(away) - fit.convergence.objective
    assert 0 < gap <= np.sum(objective.gradient(away) ** 2) / (2 * mu)


def test_no_gap_is_claimed_without_strong_convexity():
    data = GroupedData.from_arrays(np.ones((4, 2)), np.arange(4.0), [0, 0, 1, 1])
    assert minimise(data, Gaussian(), Penalty.of(data.hierarchy), solver="sweep").convergence.gap is None


@given(seeds)
def test_nodes_of_any_clients_add_up_to_the_same_fit(seed):
    problem = random_problem(seed)
    data, penalty, loss = problem.data, problem.penalty, Gaussian()
    whole = minimise(data, loss, penalty, solver="sweep")
    cut = sorted({0, data.n_clients, *np.random.default_rng(seed).integers(0, data.n_clients + 1, size=2).tolist()})
    nodes = [Node(data.clients(a, b), loss, penalty.gamma[a:b]) for a, b in itertools.pairwise(cut)]
    seen = [SweepUp().at(node) for node in nodes]
    total = seen[0]
    for message in seen[1:]:
        total = total + message
    w, _, wbar = solve_top(total, Spread.of_penalty(penalty.lam, data.n_terms))
    for node in nodes:
        SweepDown(w).at(node)
    theta = np.concatenate([node.theta for node in nodes])
    assert_close((theta, w, wbar), (whole.theta, whole.w, whole.wbar))


@given(seeds)
def test_matrix_valued_covariances(seed):
    """Any positive semi-definite covariance, a zero variance (a shared coefficient) included."""
    rng = np.random.default_rng(seed)
    m, d = int(rng.integers(2, 6)), 3
    root = rng.normal(size=(m, d, d))
    A = root @ root.transpose(0, 2, 1)
    b, x = rng.normal(size=(m, d)), rng.normal(size=(1, d))
    factor = rng.normal(size=(m, d, d))
    S = factor @ factor.transpose(0, 2, 1)
    S[:, 0, :] = S[:, :, 0] = 0.0
    t, force = descend(A, b, Spread.of_covariances(S, m), np.zeros(m, dtype=np.int64), x)
    seen = eliminate(Quadratic(A, b, np.zeros(m), np.zeros(m)), Spread.of_covariances(S, m), np.array([0, m]))
    np.testing.assert_allclose(t[:, 0], x[0, 0])
    C, r = np.zeros((d, d)), np.zeros(d)
    for i in range(m):
        P = np.linalg.inv(S[i][1:, 1:])
        H = A[i][1:, 1:] + P
        rest = np.linalg.solve(H, b[i][1:] - A[i][1:, 0] * x[0, 0] + P @ x[0, 1:])
        np.testing.assert_allclose(t[i, 1:], rest, rtol=1e-7, atol=1e-8)
        marginal = np.linalg.inv(np.eye(d) + A[i] @ S[i])
        C += marginal @ A[i]
        r += marginal @ b[i]
    np.testing.assert_allclose(seen.C[0], C, rtol=1e-8, atol=1e-8)
    np.testing.assert_allclose(seen.r[0], r, rtol=1e-8, atol=1e-8)
    np.testing.assert_allclose(force, b - np.einsum("iab,ib->ia", A, t), rtol=1e-6, atol=1e-6)


def test_pseudo_inverse_where_the_matrix_is_singular():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(4, 2, 5))
    A, b = X.transpose(0, 2, 1) @ X, np.einsum("ila,il->ia", X, rng.normal(size=(4, 2)))
    for i, x in enumerate(solve_symmetric(A, b)):
        np.testing.assert_allclose(x, np.linalg.pinv(A[i]) @ b[i], atol=1e-10)


def test_scales_of_columns_do_not_look_like_collinearity():
    rng = np.random.default_rng(0)
    time = 1.6e9 + 1e7 * rng.normal(size=200)
    X = np.column_stack([np.ones(200), time])
    A, b = (X.T @ X)[None], (X.T @ (3.0 + 2e-9 * time))[None]
    np.testing.assert_allclose(X @ solve_symmetric(A, b)[0], 3.0 + 2e-9 * time, rtol=1e-6)


def test_the_account_sees_a_wrong_centre(monkeypatch):
    """Clients solve for any w they are sent; an error above them must show in the gradient norm."""
    module = sys.modules["covey.solvers.direct.sweep"]

    def wrong(*arguments, **named):
        w, force, wbar = solve_top(*arguments, **named)
        return w + 1.0, force, wbar + 1.0

    problem = random_problem(3)
    monkeypatch.setattr(module, "solve_top", wrong)
    fit = one_sweep(InMemory.of(problem.data, Gaussian(), problem.penalty.gamma), problem.penalty)
    assert not fit.convergence.converged


@pytest.mark.parametrize(("middle", "width"), [(2000, 10), (3e4, 1e4), (1e6, 1e5), (1e8, 1e7)])
def test_columns_in_their_own_units_are_solved_as_well_as_centred_ones(middle, width):
    """Years, incomes, prices: the fit on raw columns predicts what a dense solve on the scaled system predicts."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=300) * width + middle
    client = np.arange(300) % 6
    problem = Problem(
        np.c_[np.ones(300), x],
        (x - middle) / width + rng.normal(size=300),
        client,
        client // 3,
        None,
        None,
        np.ones(6),
        np.ones(2),
    )
    fit = minimise(problem.data, Gaussian(), problem.penalty)
    assert fit.convergence.converged
    theta, w, wbar = dense_solution(problem, scaled=True)
    for ours, theirs in ((fit.theta, theta), (fit.w, w), (fit.wbar[None], wbar[None])):
        np.testing.assert_allclose(ours[:, 1], theirs[:, 1], rtol=1e-8)
        np.testing.assert_allclose(ours[:, 0], theirs[:, 0], rtol=1e-6, atol=1e-8)


def test_a_million_clients_go_through_in_parts(monkeypatch):
    problem = random_problem(8)
    whole = minimise(problem.data, Gaussian(), problem.penalty, solver="sweep")
    monkeypatch.setattr(sys.modules["covey.solvers.direct.sweep"], "_CHUNK", 2)
    parts = minimise(problem.data, Gaussian(), problem.penalty, solver="sweep")
    assert_close((parts.theta, parts.w, parts.wbar), (whole.theta, whole.w, whole.wbar), 1e-13)
    assert parts.convergence.objective == pytest.approx(whole.convergence.objective, rel=1e-13)


def test_refuses_a_loss_that_is_not_quadratic():
    data = GroupedData.from_arrays(np.ones((4, 1)), [0, 1, 0, 1], [0, 0, 1, 1])
    with pytest.raises(ValueError, match=r"'sweep' needs a quadratic loss.*use solver='newton'"):
        minimise(data, Bernoulli(), Penalty.of(data.hierarchy), solver="sweep")
