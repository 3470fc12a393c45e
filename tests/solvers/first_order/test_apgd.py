"""APGD: the method written out, its bounds, its stopping rule, its exchanges, shards and checkpoints."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from covey import GroupedData, Objective, Penalty
from covey.datasets import load_radon, simulate
from covey.errors import ConvergenceWarning, SolverError
from covey.losses import Gaussian, from_functions, loss_of
from covey.nodes.network import InMemory
from covey.problem.problem import Spec, resolve
from covey.problem.rows import read_rows
from covey.reproduce.communication import problem as race_problem
from covey.solvers import minimise, reference, solve, solving
from covey.solvers.first_order import apgd
from covey.solvers.first_order.protocol import Centres
from tests.solvers.first_order.shared import conditioned, many_clients, quietly
from tests.solvers.first_order.test_references import problem
from tests.solvers.test_across import Sharded


def distance(objective, best):
    """``1/2 |c_0 - w_hat|^2`` from zero."""
    return 0.5 * float((Centres.of(objective.penalty).total * (best.w**2).sum(axis=1)).sum())


@quietly
@pytest.mark.parametrize("family", ["gaussian", "bernoulli", "poisson"])
def test_it_is_the_method_written_out(family, monkeypatch):
    """With unequal gamma and alpha, weights, offsets and a ridge; mu gives the steps of the theorem."""
    monkeypatch.setattr(apgd, "_INNER", 0.0)
    (data, penalty), loss = problem(family), replace(loss_of(family), ridge=0.05)
    for mu in (0.05, 2.0):
        fast = minimise(data, loss, penalty, solver="apgd", mu=mu, max_iter=9, tol=0.0)
        q = mu / (mu + penalty.gamma.max())
        slow = reference["apgd"](Objective(data, loss, penalty), 9, q)
        np.testing.assert_allclose(fast.theta, slow, atol=1e-7 if family != "gaussian" else 1e-11)


@pytest.mark.parametrize("seed", range(6))
def test_the_bounds_hold_for_the_clients_coefficients(seed):
    """The bound after T exchanges, and the certified gap at any time, with the exact strong convexity of the envelopes."""
    rng = np.random.default_rng(seed)
    data = simulate(clusters=int(rng.integers(1, 5)), clients=4, rows=int(rng.integers(2, 9)), d=3, seed=seed).data
    gamma, lam = 10.0 ** rng.uniform(-2, 2, size=data.n_clients), 10.0 ** rng.uniform(-2, 2, size=data.n_clusters)
    penalty = Penalty.of(data.hierarchy, gamma=gamma, lam=lam)
    objective = Objective(data, Gaussian(), penalty)
    best = minimise(data, Gaussian(), penalty)
    q = apgd.strong_convexity(objective, best.theta)
    mu = q / (1 - q) * gamma.max()  # so that the solver takes this q
    with pytest.warns(ConvergenceWarning):
        fit = minimise(data, Gaussian(), penalty, solver="apgd", mu=mu, max_iter=40, tol=0.0)
    gap = fit.history["objective"].to_numpy() - best.convergence.objective
    rounding = 1e-13 * abs(best.convergence.objective)
    assert (gap <= apgd.rate_bound(np.arange(1, 41), q) * distance(objective, best) + rounding).all()
    assert (gap <= fit.history["certified_gap"].to_numpy() + rounding).all()


@quietly
def test_values_and_gradients_are_those_of_the_objective():
    (data, penalty), loss = problem("bernoulli"), loss_of("bernoulli")
    objective = Objective(data, loss, penalty)
    fit = minimise(data, loss, penalty, solver="apgd", max_iter=3, tol=0.0)
    assert fit.convergence.objective == pytest.approx(objective.value(fit.theta), rel=1e-12)
    assert fit.convergence.gradient_norm == pytest.approx(np.linalg.norm(objective.gradient(fit.theta)), rel=1e-3)


@pytest.mark.parametrize("family", ["gaussian", "bernoulli", "poisson", "gamma"])
@pytest.mark.parametrize("gamma", [0.05, 1.0, 30.0])
def test_the_estimated_gap_stops_no_run_too_early(family, gamma):
    data = simulate(family, clusters=4, clients=8, rows=6, d=3, seed=3).data
    penalty, loss = Penalty.of(data.hierarchy, gamma=gamma, lam=1.0), loss_of(family)
    best = minimise(data, loss, penalty, tol=1e-10)
    for tol in (1e-3, 1e-6, 1e-9):
        fit = minimise(data, loss, penalty, solver="apgd", tol=tol)
        above = fit.convergence.objective - float(loss.perfect(data).sum())
        assert fit.convergence.converged
        assert fit.convergence.objective - best.convergence.objective <= tol * above


def test_exchanges_grow_with_the_root_of_the_condition_number():
    kappas, counts = np.array([10.0, 1e2, 1e3, 1e4]), []
    for kappa in kappas:
        data, penalty = conditioned(kappa, common=False)
        best = minimise(data, Gaussian(), penalty).convergence.objective
        gap = Objective(data, Gaussian(), penalty).value(np.zeros((6, 3))) - best
        fit = minimise(data, Gaussian(), penalty, solver="apgd", minimum=best, tol=1e-12)
        counts.append(int((fit.history["gap"] <= 1e-6 * gap).arg_max()) + 1)
    slope = np.polyfit(np.log(kappas), np.log(counts), 1)[0]
    assert slope <= 0.6


def test_few_exchanges_on_radon_and_on_the_simulated_problem():
    """al2sgd_plus takes 143 and 95 exchanges to the same gap of 1e-6, relative to the gap at zero."""
    spec = Spec(formula="log_radon ~ floor", client="county", cluster="state", gamma=1.0, lam=1.0)
    data, _ = read_rows(load_radon(), resolve(spec))
    radon = Objective(data, Gaussian(), Penalty.of(data.hierarchy))
    for objective in (radon, race_problem(0).objective):
        best = minimise(objective.data, objective.loss, objective.penalty).convergence.objective
        gap = objective.value(np.zeros((objective.data.n_clients, objective.data.n_terms))) - best
        fit = minimise(objective.data, objective.loss, objective.penalty, solver="apgd", tol=1e-6, minimum=best)
        assert fit.history["gap"][-1] <= 1e-6 * gap
        assert fit.convergence.exchanges <= 20


@pytest.mark.parametrize("family", ["gaussian", "bernoulli"])
def test_no_bit_depends_on_the_node_that_holds_a_client(family):
    data, penalty = many_clients(family, clients=30)
    whole = minimise(data, loss_of(family), penalty, solver="apgd", tol=1e-7)
    owner = np.random.default_rng(1).integers(0, 3, size=data.n_clients)
    network = Sharded(data, loss_of(family), penalty, owner, forget=0.3)
    parts = solve(network, penalty, solver="apgd", tol=1e-7)
    np.testing.assert_array_equal(parts.w, whole.w)
    np.testing.assert_array_equal(network.theta(), whole.theta)
    assert parts.history.equals(whole.history)


def test_auto_takes_it_across_a_network_with_large_matrices(monkeypatch):
    data, penalty = many_clients("gaussian", clients=5)
    network = Sharded(data, Gaussian(), penalty, np.arange(data.n_clients) % 2)
    assert solve(network, penalty).convergence.solver == "sweep"
    monkeypatch.setattr(solving, "LARGEST_MATRICES", 8 * 3 * 6 - 1)
    assert solve(network, penalty).convergence.solver == "apgd"
    assert minimise(data, Gaussian(), penalty).convergence.solver == "sweep"


@quietly
def test_a_saved_run_goes_on_to_the_same_bits(tmp_path):
    data, penalty = many_clients("bernoulli", clients=20)
    settings = {"solver": "apgd", "tol": 0.0}
    straight = minimise(data, loss_of("bernoulli"), penalty, max_iter=12, **settings)
    minimise(data, loss_of("bernoulli"), penalty, max_iter=5, checkpoint=tmp_path / "run", **settings)
    resumed = minimise(data, loss_of("bernoulli"), penalty, max_iter=12, checkpoint=tmp_path / "run", **settings)
    np.testing.assert_array_equal(resumed.theta, straight.theta)
    assert resumed.history.equals(straight.history)


def test_a_start_saves_exchanges():
    data, penalty = many_clients("gaussian", clients=20)
    best = minimise(data, Gaussian(), penalty)
    for start in (best, best.theta):
        fit = minimise(data, Gaussian(), penalty, solver="apgd", start=start)
        assert fit.convergence.exchanges <= 3


def test_a_loss_of_ones_own(monkeypatch):
    from covey.losses import base

    monkeypatch.setattr(base, "FAMILIES", dict(base.FAMILIES))
    loss = from_functions(
        "pseudo-huber",
        lambda m, y: np.sqrt(1 + (m - y) ** 2) - 1,
        lambda m, y: (m - y) / np.sqrt(1 + (m - y) ** 2),
        lambda m, y: (1 + (m - y) ** 2) ** -1.5,
        bounds=(0.0, 1.0),
    )
    loss = loss_of(loss) if isinstance(loss, str) else (loss() if isinstance(loss, type) else loss)
    data = simulate(clusters=3, clients=5, rows=8, d=2, seed=1).data
    penalty = Penalty.of(data.hierarchy)
    best = minimise(data, loss, penalty)
    fit = minimise(data, loss, penalty, solver="apgd", tol=1e-10)
    np.testing.assert_allclose(fit.theta, best.theta, atol=1e-3)


def test_the_proximal_step_is_the_solve_written_out():
    """With clients that have fewer rows than terms, and one whose penalty is tiny beside its loss."""
    drawn = simulate(clusters=2, clients=3, rows=4, d=3, seed=2)
    keep = (drawn.client != 1) | (np.arange(len(drawn.y)) % 4 < 2)
    data = GroupedData.from_arrays(drawn.X[keep], drawn.y[keep], drawn.client[keep], drawn.cluster[keep])
    gamma = np.array([0.5, 1e-9, 3.0, 1.0, 2.0, 9.0])
    node, centre = InMemory.of(data, Gaussian(), gamma).node, np.random.default_rng(0).normal(size=(2, 3))
    weight = np.array([gamma[:3].sum(), gamma[3:].sum()])
    reply, theta, cost = apgd.ProximalStep(centre, weight, 0.0).at(node), node.coefficients(), 0.0
    for i, (first, last) in enumerate(pairwise(data.client_ptr.tolist())):
        X, y, c = data.X[first:last], data.y[first:last], centre[data.hierarchy.parent[i]]
        away = np.linalg.lstsq(
            np.concatenate([X, np.sqrt(gamma[i]) * np.eye(3)]), np.concatenate([y - X @ c, np.zeros(3)]), rcond=None
        )[0]
        np.testing.assert_allclose(theta[i], c + away, atol=1e-8)
        cost += 0.5 * ((y - X @ (c + away)) ** 2).sum() + 0.5 * gamma[i] * (away**2).sum()
    assert float(reply.value) == pytest.approx(cost, rel=1e-9)
    averages = np.stack([gamma[:3] @ theta[:3], gamma[3:] @ theta[3:]]) / weight[:, None]
    np.testing.assert_allclose(reply.averages.floats(), averages, rtol=1e-12)
    node.gamma = np.full(6, 2.0)  # another penalty in a later run on the same node
    apgd.ProximalStep(centre, np.array([6.0, 6.0]), 0.0).at(node)
    assert not np.allclose(node.coefficients(), theta)


def test_mistakes():
    data = simulate(clusters=2, clients=3, rows=5, d=2, seed=3).data
    with pytest.raises(SolverError, match=r"0 < gamma < infinity .* cluster 0 has a client with gamma = 0"):
        minimise(data, Gaussian(), Penalty.of(data.hierarchy, gamma=[0.0, 1, 1, 1, 1, 1]), solver="apgd")
    with pytest.raises(SolverError, match="'mu'"):
        minimise(data, Gaussian(), Penalty.of(data.hierarchy), solver="apgd", mu=-1.0)
    with pytest.warns(ConvergenceWarning, match="raise max_iter"):
        minimise(data, Gaussian(), Penalty.of(data.hierarchy), solver="apgd", max_iter=2)
