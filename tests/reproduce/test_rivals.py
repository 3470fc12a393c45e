"""The rivals against computations of their own, and what the comparison counts."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from covey import GroupedData, Objective, Penalty
from covey.datasets import simulate
from covey.losses import Gaussian
from covey.reproduce import comparison, rivals
from covey.solvers import minimise
from tests.solvers.first_order.shared import quietly

ROOT = Path(__file__).parents[2]


def objective_of(clients=3, gamma=2.0, lam=3.0):
    data = simulate(clusters=3, clients=clients, rows=8, d=2, wbar=1.0, seed=4).data
    return Objective(data, Gaussian("mean"), Penalty.of(data.hierarchy, gamma=gamma, lam=lam))


def after(iterates, count):
    return next(islice(iterates, count - 1, count))


def test_nesterov_is_the_recursion_on_the_dense_hessian_and_keeps_its_bound():
    objective = objective_of()
    shape = (objective.data.n_clients, objective.data.n_terms)
    linear = objective.gradient(np.zeros(shape)).ravel()
    H = np.array([objective.gradient(row.reshape(shape)).ravel() - linear for row in np.eye(linear.size)])
    mu, *_, L = np.linalg.eigvalsh(H)
    x = y = np.zeros(linear.size)
    best = np.linalg.solve(H, -linear)

    def above(theta):
        return 0.5 * (theta - best) @ H @ (theta - best)

    beta = (np.sqrt(L) - np.sqrt(mu)) / (np.sqrt(L) + np.sqrt(mu))
    for t, theta in enumerate(islice(rivals.nesterov(objective, L=L, mu=mu), 40), 1):
        before, x = x, y - (H @ y + linear) / L
        y = x + beta * (x - before)
        np.testing.assert_allclose(theta.ravel(), x, atol=1e-12)
        assert above(x) <= (1 - np.sqrt(mu / L)) ** t * (above(0 * x) + mu / 2 * best @ best)


def permfl(objective, lam, gamma, **settings):
    L = float(np.linalg.eigvalsh(objective.loss.hessian(objective.data, np.zeros((objective.data.n_clients, 2)))).max())
    pace = {"alpha": 1 / (L + lam), "eta": 1 / (lam + gamma), "beta": 1 / gamma}
    return rivals.permfl(objective, lam=lam, gamma=gamma, **{**pace, **settings})


def test_permfl_is_its_algorithm_device_by_device():
    """Written out with loops: x and w of one global round, with steps that differ from the defaults."""
    objective = objective_of(clients=2)
    data, lam, gamma, alpha, eta, beta = objective.data, 0.7, 0.4, 0.1, 0.5, 0.9
    x, devices = np.zeros(2), {}
    for _ in range(2):
        teams = []
        for team in range(3):
            w = x.copy()
            for _ in range(3):
                ends = []
                for device in np.flatnonzero(data.hierarchy.parent == team):
                    rows = slice(data.client_ptr[device], data.client_ptr[device + 1])
                    theta = w.copy()
                    for _ in range(4):
                        slope = data.X[rows].T @ (data.X[rows] @ theta - data.y[rows]) / len(data.y[rows])
                        theta = theta - alpha * slope - alpha * lam * (theta - w)
                    ends.append(theta)
                    devices[device] = theta
                w = w - eta * lam * (w - np.mean(ends, axis=0)) - eta * gamma * (w - x)
            teams.append(w)
        x = x - beta * gamma * (x - np.mean(teams, axis=0))
    found = after(permfl(objective, lam, gamma, alpha=alpha, eta=eta, beta=beta, K=3, steps=4), 2)
    np.testing.assert_allclose(found, np.array([devices[i] for i in range(6)]), atol=1e-13)


def test_permfl_has_our_minimiser_for_equal_clusters_and_its_own_otherwise():
    objective = objective_of(gamma=2.0, lam=3.0)
    ours = minimise(objective.data, objective.loss, objective.penalty).theta
    found = after(permfl(objective, 2.0, 1.0, K=20, steps=60), 60)
    np.testing.assert_allclose(found, ours, atol=1e-5)

    drawn = simulate(clusters=2, clients=3, rows=8, d=2, wbar=1.0, seed=4)
    keep = drawn.client < 4  # a team of 3 devices and a team of 1
    data = GroupedData.from_arrays(drawn.X[keep], drawn.y[keep], drawn.client[keep], drawn.cluster[keep])
    objective = Objective(data, Gaussian("mean"), Penalty.of(data.hierarchy, gamma=2.0, lam=2.0))
    parent, sizes, lam, gamma = data.hierarchy.parent, data.hierarchy.sizes, 2.0, 1.0
    # The normal equations of PerMFL's objective in (theta, w, x), from its display.
    A, b = np.zeros((14, 14)), np.zeros(14)
    curvature, slope = objective.loss.hessian(data, np.zeros((4, 2))), objective.loss.gradient(data, np.zeros((4, 2)))

    def place(unit):
        return slice(2 * unit, 2 * unit + 2)

    def tie(one, two, weight):
        for i, j, sign in ((one, one, 1), (two, two, 1), (one, two, -1), (two, one, -1)):
            A[place(i), place(j)] += sign * weight * np.eye(2)

    for i, team in enumerate(parent):
        A[place(i), place(i)] += curvature[i] / (2 * sizes[team])
        b[place(i)] -= slope[i] / (2 * sizes[team])
        tie(i, 4 + team, lam / (2 * sizes[team]))
    for team in range(2):
        tie(4 + team, 6, gamma / 2)
    exact = np.linalg.solve(A, b)[:8].reshape(4, 2)
    np.testing.assert_allclose(after(permfl(objective, lam, gamma, K=20, steps=60), 80), exact, atol=1e-5)
    assert np.abs(minimise(data, objective.loss, objective.penalty).theta - exact).max() > 1e-3


def test_fedavg_with_one_step_is_gradient_descent_on_all_rows_and_fine_tuning_ends_at_the_clients_own_fits():
    objective = objective_of()
    data, eta = objective.data, 0.2
    x = np.zeros(2)
    for found in islice(rivals.fedavg(objective, eta=eta, steps=1), 30):
        x = x - eta * data.X.T @ (data.X @ x - data.y) / len(data.y)  # equal clients, losses averaged over rows
        np.testing.assert_allclose(found, x, atol=1e-13)
    alone = rivals.fine_tuned(objective, x, eta=eta, steps=3000)
    for i in range(data.n_clients):
        rows = slice(data.client_ptr[i], data.client_ptr[i + 1])
        np.testing.assert_allclose(alone[i], np.linalg.lstsq(data.X[rows], data.y[rows], rcond=None)[0], atol=1e-6)


@pytest.fixture(scope="module")
def wide():
    return comparison.contest("wide", 0, 0, quick=True)


@quietly
def test_exchanges_and_bytes_are_those_of_the_runs_themselves(wide):
    data, loss, penalty = wide.objective.data, wide.objective.loss, wide.objective.penalty
    for name, checks in (("l2gd", 1), ("al2sgd_plus", 1), ("proxskip", 1), ("apgd", 0)):
        found = comparison.trace(wide, name, 3, 40)
        t = found.seen[-1][0]
        settings = {} if name == "apgd" else {"seed": 3, "every": 10**6}
        ledger = minimise(data, loss, penalty, solver=name, tol=0.0, max_iter=t, **settings).ledger
        spent = found.cost(t)
        assert spent.exchanges == ledger.exchanges - 2 * checks  # at the start and at the end
        assert spent.bytes < ledger.bytes or name == "apgd"
    for name in ("sweep", "newton"):
        fit = minimise(data, loss, penalty, solver=name)
        found = comparison.trace(wide, name, 0, 1)
        assert found.cost(fit.ledger.exchanges).bytes == fit.ledger.bytes
        assert found.seen[-1][1] <= 1e-12


def test_seconds_of_exchanges_of_all_clusters(wide):
    """Nesterov's method: each exchange waits for the slowest cluster to compute, and for two messages up and two down."""
    found = comparison.trace(wide, "nesterov", 0, 3)
    d, rows = wide.objective.data.n_terms, wide.objective.data.rows_per_client.max()
    message = 0.5 + 8 * d / 1e6
    assert found.cost(3).seconds == pytest.approx(3 * (rows / 1e5 + 4 * message))


def test_the_comparison_of_one_problem(monkeypatch):
    monkeypatch.setattr(comparison, "PROBLEMS", {"wide": comparison.PROBLEMS["wide"]})
    table = comparison.compare(0, True, lambda *_: None)
    rows = {row["solver"]: row for row in table.to_dicts()}
    assert list(rows) == [*comparison.DIRECT, *comparison.VECTORS, *comparison.RIVALS]
    assert rows["sweep"]["exchanges to 1e-06"] == 1
    assert rows["apgd"]["exchanges to 1e-06"] < rows["nesterov"]["exchanges to 1e-06"]
    assert rows["fedavg, fine-tuned"]["exchanges to 1e-06"] is None
    assert rows["fedavg, fine-tuned"]["lowest gap"] > 1e-3
    won = comparison.winners(table).row(-1, named=True)
    assert won["fewest exchanges"] == "sweep 1"
    assert won["fewest exchanges, vectors only"].startswith(("apgd", "proxskip"))
    (sentence, about_fedavg) = comparison.findings(table)
    assert "against" in sentence
    assert "FedAvg" in about_fedavg
    assert comparison.shown(table).height == table.height


def test_the_page_about_solvers_has_the_winners_of_the_results():
    """docs/how-to/choose-a-solver.md repeats the table that follows from the CSV file."""
    found = comparison.winners(pl.read_csv(ROOT / "docs/results/communication/comparison-all.csv"))
    page = (ROOT / "docs/how-to/choose-a-solver.md").read_text(encoding="utf-8").replace(" (1)", "")  # a footnote
    for row in found.to_dicts():
        names = ("problem", "gap", "fewest exchanges", "fewest bytes", "fewest seconds", "fewest exchanges, vectors only")
        assert f"| {' | '.join(row[name] for name in names)} |" in page
