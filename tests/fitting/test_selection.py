"""Penalties by cross-validation, compared with loops and fits from zero."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from covey import Penalty
from covey.datasets import simulate
from covey.fitting.selection import client_losses, held_out_loss, search
from covey.losses import loss_of
from covey.solvers import minimise

GRID = np.array([0.1, 1.0, 10.0])


@pytest.mark.parametrize("family", ["gaussian", "bernoulli", "poisson"])
@pytest.mark.parametrize("score", ["row", "client"])
def test_scores_agree_with_fits_from_zero_scored_row_by_row(family, score):
    drawn = simulate(family, clusters=3, clients=4, rows=9, d=2, client_sd=0.4, cluster_sd=0.4, equal_rows=False, seed=5)
    data, loss = drawn.data, loss_of(family)
    found = search(data, loss, gammas=GRID, lams=GRID[:2], folds=3, score=score, seed=1)
    fold = data.folds(3, 1)
    for i, gamma in enumerate(GRID):
        for j, lam in enumerate(GRID[:2]):
            rows, owners = [], []
            for left_out in range(3):
                train, test = data.rows(fold != left_out), data.rows(fold == left_out)
                fit = minimise(train, loss, Penalty.of(data.hierarchy, gamma=gamma, lam=lam))
                each = loss.values(test.margin(fit.theta), test.y)
                rows.extend(each)
                owners.extend(test.client_of_row)
            clients = [np.mean([value for value, owner in zip(rows, owners, strict=True) if owner == i]) for i in set(owners)]
            assert found.scores[i, j] == pytest.approx(np.mean(rows if score == "row" else clients), rel=1e-6)
    i, j = np.unravel_index(found.scores.argmin(), found.scores.shape)
    assert (found.gamma, found.lam) == (GRID[i], GRID[j])


def test_weights_count_and_clients_without_rows_do_not():
    drawn = simulate(clusters=2, clients=3, rows=4, d=2, seed=0)
    weights = np.random.default_rng(0).uniform(0, 2, drawn.data.n_rows)
    weights[:4] = 0.0
    data = replace(drawn.data, weights=weights)
    fit = minimise(drawn.data, loss_of("gaussian"), Penalty.of(data.hierarchy))
    each = client_losses(fit.theta, data, loss_of("gaussian", "mean", 0.5))
    assert np.isnan(each[0])
    values = 0.5 * (data.y - data.margin(fit.theta)) ** 2
    assert each[1] == pytest.approx(np.average(values[4:8], weights=weights[4:8]))
    assert held_out_loss(fit, data, loss_of("gaussian")) == pytest.approx(np.average(values, weights=weights))
    assert held_out_loss(fit, data, loss_of("gaussian"), "client") == pytest.approx(np.nanmean(each))


def test_of_equal_scores_the_strongest_penalties_win():
    drawn = simulate(clusters=2, clients=2, rows=6, d=1, seed=0)
    data = replace(drawn.data, y=np.zeros(drawn.data.n_rows))
    found = search(data, loss_of("gaussian"), gammas=GRID, lams=GRID, folds=2)
    assert (found.gamma, found.lam) == (10.0, 10.0)
    alone = search(drawn.data.one_cluster(), loss_of("gaussian"), gammas=GRID, lams=GRID, folds=2)
    np.testing.assert_allclose(alone.scores[:, 0], alone.scores[:, 2], rtol=1e-9)


def test_progress_counts_every_fit():
    drawn = simulate(clusters=2, clients=2, rows=6, d=1, seed=0)
    calls = []
    settings = {"gammas": GRID, "lams": np.ones(1), "folds": 2, "progress": lambda done, todo: calls.append((done, todo))}
    search(drawn.data, loss_of("gaussian"), **settings)
    assert calls == [(at + 1, 6) for at in range(6)]
