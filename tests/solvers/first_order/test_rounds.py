"""What all randomised algorithms share: sharding, threads, history, certificates, special cases, mistakes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import polars as pl
import pytest
from threadpoolctl import threadpool_limits

from covey import GroupedData, Objective, Penalty
from covey.datasets import simulate
from covey.errors import ConvergenceWarning, DataError, PenaltyError, SolverError
from covey.losses import Gaussian, loss_of
from covey.records import decode
from covey.solvers import minimise
from covey.threads import use_threads
from tests.conftest import random_problem
from tests.solvers.first_order.shared import (
    SOLVERS,
    many_clients,
    quietly,
)


@quietly
@pytest.mark.parametrize("solver", SOLVERS)
def test_with_one_cluster_any_alpha_is_the_same_run(solver):
    data = random_problem(4).data.one_cluster()
    loss = Gaussian(ridge=0.1)
    first, second = (
        minimise(data, loss, Penalty.of(data.hierarchy, gamma=2.0, alpha=alpha), solver=solver, max_iter=200, tol=0.0).theta
        for alpha in (1.0, 0.2)
    )
    np.testing.assert_array_equal(first, second)


@quietly
@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("vote", ["central", "majority"])
def test_independent_clusters(solver, vote):
    """alpha = 0: no exchange between clusters but those that the one-coin variant asks for."""
    drawn = simulate(clusters=3, clients=4, rows=8, d=2, seed=3)
    data = drawn.data
    penalty = Penalty.of(data.hierarchy, gamma=1.0, alpha=0.0)
    fit = minimise(
        data,
        Gaussian(),
        penalty,
        solver=solver,
        max_iter=20_000,
        vote=vote,
        **({} if solver == "al2sgd_plus" else {"steps": "switching"}),
    )
    best = minimise(data, Gaussian(), penalty, solver="sweep")
    np.testing.assert_allclose(fit.theta, best.theta, atol=0.05)
    if solver == "l2gd":
        assert fit.ledger.between == 0


@quietly
@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("family", ["gaussian", "bernoulli"])
def test_the_number_of_threads_changes_no_bit(solver, family, always_share):
    """Neither our own threads nor those of the linear algebra that measures curvature; large enough for both to be used."""
    data, penalty = many_clients(family, clients=6000)
    fits = []
    for count in (1, 2):
        with threadpool_limits(count), use_threads(count):
            fits.append(minimise(data, loss_of(family), penalty, solver=solver, max_iter=60, tol=0.0, seed=5))
    np.testing.assert_array_equal(fits[0].theta, fits[1].theta)
    assert fits[0].history.equals(fits[1].history)


@quietly
def test_the_ledger_has_the_papers_numbers_beside_its_own():
    data = simulate(clusters=3, clients=3, rows=6, d=2, seed=1).data
    penalty = Penalty.of(data.hierarchy, gamma=2.0, lam=3.0)
    spent = minimise(data, Gaussian(), penalty, solver="l2gd", p0=0.3, p=0.4, max_iter=20_000, every=20_000, tol=0.0).ledger
    assert spent.paper_between == pytest.approx(0.3 * 0.7 * 20_000)
    np.testing.assert_allclose(spent.paper_within, 0.7 * 0.4 * 0.6 * 20_000)
    assert spent.between == pytest.approx(spent.paper_between, rel=0.05)
    np.testing.assert_allclose(spent.within - spent.between, 0.7 * spent.paper_within, rtol=0.08)


@quietly
@pytest.mark.parametrize("gamma", [0.01, 0.1, 1.0])
def test_a_gap_is_certified_or_not_claimed(gamma):
    """Nearly separable classes: curvature varies a lot, and no bound holds everywhere."""
    rng = np.random.default_rng(1)
    X = np.column_stack([np.ones(240), 3 * rng.normal(size=240)])
    y = (rng.random(240) < 1 / (1 + np.exp(-X @ [0.5, 4.0]))).astype(float)
    data = GroupedData.from_arrays(X, y, np.repeat(np.arange(12), 20), np.repeat(np.arange(3), 80))
    penalty, loss = Penalty.of(data.hierarchy, gamma=gamma, lam=gamma), loss_of("bernoulli")
    minimum = minimise(data, loss, penalty, solver="newton").convergence.objective
    for given_mu in (None, 0.5):
        end = minimise(data, loss, penalty, solver="al2sgd_plus", tol=1e-4, every=50, max_iter=100_000, mu=given_mu).convergence
        true = end.objective - minimum
        assert end.gap is None or true <= end.gap
        assert not end.converged or true <= 1e-4 * end.objective


def test_a_given_mu_is_checked_at_the_end():
    data = simulate(clusters=3, clients=4, rows=8, d=2, seed=3).data
    penalty = Penalty.of(data.hierarchy)
    best = minimise(data, Gaussian(), penalty, solver="sweep")
    fit = minimise(data, Gaussian(), penalty, solver="al2sgd_plus", mu=15.0, tol=1e-3)
    assert fit.convergence.iterations > 0
    assert fit.convergence.objective - best.convergence.objective <= fit.convergence.gap <= 1e-3 * fit.convergence.objective
    assert "mu as given" in fit.convergence.message


def test_the_tolerance_does_not_depend_on_the_zero_of_a_poisson_likelihood():
    """Counts of about a million: the likelihood is huge, and says nothing of how good the fit is."""
    rng = np.random.default_rng(0)
    client = np.repeat(np.arange(20), 20)
    X = np.column_stack([np.ones(400), 0.1 * rng.normal(size=400)])
    y = rng.poisson(np.exp(13.8 + X[:, 1])).astype(float)
    data = GroupedData.from_arrays(X, y, client, client // 5)
    penalty, loss = Penalty.of(data.hierarchy, gamma=100.0), loss_of("poisson")
    best = minimise(data, loss, penalty, solver="newton")
    start = np.tile([13.0, 0.0], (20, 1))
    fit = minimise(data, loss, penalty, solver="al2sgd_plus", tol=1e-6, start=start, max_iter=300_000)
    true = fit.convergence.objective - best.convergence.objective
    assert true <= 1e-6 * (best.convergence.objective - loss.perfect(data).sum()) * 1.01


def test_warnings_point_to_the_users_line():
    data, penalty = many_clients("gaussian")
    for solver in SOLVERS:
        with pytest.warns(ConvergenceWarning) as caught:
            minimise(data, Gaussian(), penalty, solver=solver, eta=1e-2, max_iter=3, tol=1e-9)
        assert {warning.filename for warning in caught} == {__file__}


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("every", [1, 20, None])
def test_the_client_that_diverges_is_named(solver, every):
    drawn = simulate(clusters=2, clients=3, rows=8, d=2, seed=3)
    X = np.where((drawn.client == 4)[:, None], 30 * drawn.X, drawn.X)
    data = GroupedData.from_arrays(X, drawn.y, drawn.client, drawn.cluster)
    with (
        pytest.warns(ConvergenceWarning, match="eta"),
        pytest.raises(SolverError, match=r"The iterate of client 4 is no longer"),
    ):
        minimise(data, Gaussian(), Penalty.of(data.hierarchy), solver=solver, eta=0.02, every=every, max_iter=100_000)


def test_a_run_that_only_grows_says_so():
    data = simulate(clusters=2, clients=3, rows=8, d=2, seed=3).data
    with pytest.warns(ConvergenceWarning) as caught:
        minimise(data, Gaussian(), Penalty.of(data.hierarchy), solver="l2gd", eta=1.0, max_iter=20)
    assert "the objective has grown: give a smaller step eta" in str(caught[-1].message)
    with pytest.raises(SolverError, match=r"The objective is not finite at the start, .*client 0"):
        minimise(data, Gaussian(), Penalty.of(data.hierarchy), solver="l2gd", start=np.full((6, 2), 1e200))


@quietly
@pytest.mark.parametrize("solver", SOLVERS)
def test_clusters_without_clients_and_without_ties(solver):
    data = simulate(clusters=3, clients=4, rows=8, d=2, seed=3).data
    tree = replace(data.hierarchy, cluster_ptr=np.array([0, 4, 4, 8, 12]), cluster_ids=pl.Series(["a", "empty", "b", "c"]))
    data = replace(data, hierarchy=tree)
    penalty = Penalty.of(tree, alpha=0.0)
    fit = minimise(data, Gaussian(), penalty, solver=solver, tol=1e-2, max_iter=30_000)
    assert np.abs(fit.theta - minimise(data, Gaussian(), penalty, solver="sweep").theta).max() < 0.5
    assert fit.ledger.between == fit.ledger.bytes_between == 0  # independent clusters have nothing to say to each other


def test_a_cluster_whose_rows_weigh_nothing():
    drawn = simulate(clusters=3, clients=4, rows=8, d=2, seed=3)
    data = GroupedData.from_arrays(drawn.X, drawn.y, drawn.client, drawn.cluster, weights=(drawn.cluster != 1) * 1.0)
    with pytest.raises(DataError, match="All rows of cluster 1 have weight 0; leave the cluster out"):
        minimise(data, Gaussian(), Penalty.of(data.hierarchy), solver="l2gd")


def test_a_non_finite_iterate_stops_and_keeps_the_last_good_checkpoint(tmp_path):
    drawn = simulate(clusters=2, clients=3, rows=8, d=2, seed=3)
    data, path = drawn.data, tmp_path / "run.npz"
    penalty = Penalty.of(data.hierarchy)
    with pytest.warns(ConvergenceWarning, match=r"the step eta = 50 is above .* = 1 / \(2 calL\)"):  # noqa: SIM117
        with pytest.raises(SolverError, match=r"The iterate of client \d is no longer finite by iteration [\d,]+; give a"):
            minimise(data, Gaussian(), penalty, solver="l2gd", eta=50.0, every=50, max_iter=100_000, checkpoint=path)
    assert np.isfinite(decode(path.read_bytes()).nodes[0].theta).all()
    with (
        pytest.warns(ConvergenceWarning, match="eta"),
        pytest.raises(SolverError, match=r"Iteration \d+ is kept in .*run\.npz"),
    ):
        minimise(data, Gaussian(), penalty, solver="l2gd", eta=50.0, every=50, max_iter=100_000, checkpoint=path)


@pytest.mark.parametrize(
    ("solver", "settings", "message"),
    [
        ("l2gd", {"p0": -0.1}, r"The 'p0' parameter must lie in \[0, 1\]"),
        ("l2gd", {"p": [0.1] * 5}, r"The 'p' parameter must hold 1 or 2 values, one for each cluster\. Got 5 instead"),
        ("l2gd", {"steps": "random"}, r"The 'steps' parameter must be one of 'constant', 'switching'"),
        ("l2gd", {"tol": -1}, r"The 'tol' parameter must be a number >= 0\. Got -1 instead"),
        ("l2gd", {"max_iter": 0}, r"The 'max_iter' parameter must be a whole number >= 1"),
        ("l2gd", {"every": 2.5}, r"The 'every' parameter must be a whole number >= 1"),
        ("l2gd", {"seed": -3}, r"The 'seed' parameter must be a whole number >= 0"),
        (
            "l2gd",
            {"start": np.zeros((2, 2))},
            r"The 'start' parameter must hold 6 x 2 finite numbers, .* Got shape \(2, 2\)",
        ),
        ("l2gd", {"start": np.full((6, 2), np.nan)}, r"finite numbers, a row for each client\. Client 0 has \[nan, nan\]"),
        ("l2gd", {"start": "a"}, r"The 'start' parameter must hold 6 x 2 .* Got str instead"),
        ("one_coin", {"p": 1.5}, r"The 'p' parameter must lie in \[0, 1\]"),
        ("one_coin", {"p": 0.0}, r"With p = 0 clients never exchange"),
        ("al2sgd_plus", {"rho": 0.0}, r"With rho = 0 the anchor is never refreshed"),
        ("al2sgd_plus", {"rho": 7}, r"The 'rho' parameter must lie in \[0, 1\]"),
        ("al2sgd_plus", {"mu": 0.0}, r"The 'mu' parameter must be a number > 0\. Got 0\.0 instead"),
        ("al2sgd_plus", {"mu": "a"}, r"The 'mu' parameter must be a number > 0\. Got 'a' instead"),
        ("l2gd", {"mu": 1e6}, r"mu = 1e\+06 is too large: .* at most"),
        ("l2gd", {"L": -5}, r"The 'L' parameter must be a number > 0\. Got -5 instead"),
        ("l2gd", {"eta": True}, r"The 'eta' parameter must be a number > 0\. Got True instead"),
        ("l2gd", {"minimum": "a"}, r"The 'minimum' parameter must be a number\. Got 'a' instead"),
        ("l2gd", {"checkpoint": 5}, r"The 'checkpoint' parameter must be the path of a file\. Got 5 instead"),
        ("l2gd", {"seed": 2**130}, r"The 'seed' parameter must be a whole number"),
        ("l2gd", {"p": [0.1, [0.2]]}, r"The 'p' parameter must lie in \[0, 1\]\. Got \[0\.2\] instead"),
        ("l2gd", {"maxiter": 5}, r"The solver 'l2gd' has no option 'maxiter'; did you mean 'max_iter'\?"),
        ("one_coin", {"rho": 0.1}, r"The solver 'one_coin' has no option 'rho'; it takes 'L', 'checkpoint', 'eta'"),
    ],
)
def test_settings_out_of_range(solver, settings, message):
    data = simulate(clusters=2, clients=3, rows=8, d=2, seed=3).data
    with pytest.raises(ValueError, match=message) as raised:
        minimise(data, Gaussian(), Penalty.of(data.hierarchy), solver=solver, **settings)
    assert len(str(raised.value)) < 260


def test_penalties_that_no_algorithm_can_use():
    tree = simulate(clusters=2, clients=3, rows=8, d=2, seed=3).data.hierarchy
    with pytest.raises(PenaltyError, match=r"The 'alpha' parameter must lie in \[0, 1\]\. Got 1\.2 instead"):
        Penalty.of(tree, alpha=1.2)
    with pytest.raises(PenaltyError, match="gamma is 0 for every client of cluster 0"):
        Penalty.of(tree, gamma={0: 0.0, 1: 1.0})


@quietly
def test_history_agrees_with_the_objective():
    problem = random_problem(8)
    data, penalty = problem.data, problem.penalty
    best = minimise(data, Gaussian(), penalty, solver="sweep")
    calls = []
    fit = minimise(
        data,
        Gaussian(),
        penalty,
        solver="al2sgd_plus",
        tol=1e-6,
        minimum=best.convergence.objective,
        progress=lambda *what: calls.append(what),
    )
    history = fit.history
    assert [row[0] for row in calls] == history["iteration"].to_list()
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
    blind = minimise(data, Gaussian(), penalty, solver="al2sgd_plus", tol=1e-6)
    assert blind.history["gap"].null_count() == len(blind.history)
