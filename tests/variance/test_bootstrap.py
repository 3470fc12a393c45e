"""The parametric bootstrap: drawn sums have the distribution of sums of drawn rows, and depend on the seed only."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import polars as pl
import pytest
from scipy import stats

from covey import GroupedData
from covey.datasets import simulate
from covey.errors import SolverError
from covey.losses import Bernoulli, Gamma, Gaussian, Poisson
from covey.solvers.direct.elimination import Quadratic
from covey.variance.bootstrap import _draw_clients, _draw_sums, bootstrap
from covey.variance.estimate import estimate
from covey.variance.parameters import Shape
from tests.networks import in_memory

SHAPE = Shape((0, 1), (0,), "full", "diagonal")


@pytest.fixture(scope="module")
def fitted():
    """Weighted clients with 1 to 8 rows, some with fewer rows than terms."""
    rng = np.random.default_rng(3)
    counts = np.array([1, 2, 3, 8] * 10)
    client = np.repeat(np.arange(40), counts)
    X = np.c_[np.ones(len(client)), rng.normal(size=(len(client), 2))]
    y = 2.0 + 0.8 * rng.normal(size=40)[client] + rng.normal(size=5)[client // 8] + 1.5 * rng.normal(size=len(client))
    data = GroupedData.from_arrays(X, y, client, client // 8, weights=rng.uniform(0.3, 3.0, size=len(client)))
    return data, *estimate(in_memory(data, Gaussian()), SHAPE)


def test_drawn_sums_have_the_distribution_of_sums_of_rows(fitted):
    """For four clients, compare 20000 draws of sums with 20000 draws of rows."""
    data, fit, learned = fitted
    draws, rng, theta, s2 = 20_000, np.random.default_rng(0), fit.theta + 0.5, learned.dispersion
    for i in range(4):
        units = learned.units
        many = Quadratic(*(np.repeat(each[i : i + 1], draws, axis=0) for each in (units.C, units.r, units.c, units.n)))
        drawn = _draw_sums(replace(learned, units=many), np.tile(theta[i], (draws, 1)), rng).units
        rows = slice(data.client_ptr[i], data.client_ptr[i + 1])
        X, weights = data.X[rows], data.weights[rows]
        noise = rng.normal(size=(draws, len(X))) * np.sqrt(s2 / weights)
        away = X @ (theta[i] - learned.origin) + noise
        r, c = (away * weights) @ X, 0.5 * (away**2 * weights).sum(axis=1)
        error = np.sqrt(s2 * np.diag(units.C[i]) / draws)
        assert (np.abs(drawn.r.mean(axis=0) - r.mean(axis=0)) < 6 * error + 1e-9).all()
        scale = np.sqrt(np.diag(np.cov(r.T)))
        np.testing.assert_allclose(np.cov(drawn.r.T) / np.outer(scale, scale), np.cov(r.T) / np.outer(scale, scale), atol=0.05)
        assert stats.ks_2samp(drawn.c, c).pvalue > 1e-4
        assert np.corrcoef(drawn.c, drawn.r[:, 0])[0, 1] == pytest.approx(np.corrcoef(c, r[:, 0])[0, 1], abs=0.04)


def test_drawn_sums_keep_the_parts_without_the_response(fitted):
    _, fit, learned = fitted
    drawn = _draw_sums(learned, fit.theta, np.random.default_rng(0))
    np.testing.assert_array_equal(drawn.units.C, learned.units.C)
    np.testing.assert_array_equal(drawn.units.n, learned.units.n)
    assert drawn.log_weights == learned.log_weights


def test_drawn_clients_have_the_estimated_covariances(fitted):
    data, fit, learned = fitted
    drawn = np.array(list(_draw_clients(learned, fit.wbar, np.random.default_rng(1), 4000)))
    below = learned.components.client.embedded(data.terms)[0]
    above = learned.components.cluster.embedded(data.terms)[0]
    first, second = drawn[:, 0], drawn[:, 1]  # of one cluster
    np.testing.assert_allclose(first.mean(axis=0), fit.wbar, atol=0.15)
    np.testing.assert_allclose(np.cov(first.T), below + above, atol=0.12 * np.abs(below + above).max())
    np.testing.assert_allclose(np.cov((first - second).T), 2 * below, atol=0.12 * np.abs(2 * below).max())


def again(fitted, **settings):
    _, fit, learned = fitted
    return bootstrap(learned, SHAPE, fit.wbar, **settings)


def test_the_same_seed_gives_the_same_bits(fitted):
    one, two, other = (again(fitted, draws=3, seed=seed) for seed in (7, 7, 8))
    assert one.intervals().equals(two.intervals())
    assert not one.intervals().equals(other.intervals())


def test_more_draws_start_with_the_same_draws(fitted):
    few, more = again(fitted, draws=2, seed=1), again(fitted, draws=4, seed=1)
    assert few.draws[1].log_likelihood == more.draws[1].log_likelihood


def test_draws_centre_on_the_fit():
    """With many clients the mean of the draws is near the fitted values, and their spread near the standard errors."""
    data = simulate(clusters=1, clients=150, rows=6, d=1, client_sd=1.0, cluster_sd=0.0, seed=0).data
    shape = Shape((0,), ())
    fit, learned = estimate(in_memory(data, Gaussian()), shape)
    drawn = bootstrap(learned, shape, fit.wbar, draws=150, seed=1)
    table = drawn.intervals(0.9)
    assert table["level"].to_list() == ["client", "residual"]
    np.testing.assert_allclose(table["std_error"][0], learned.components.client.sd_error[0, 0], rtol=0.25)
    sds = np.array([each.client.sd[0, 0] for each in drawn.draws])
    assert sds.mean() == pytest.approx(learned.components.client.sd[0, 0], abs=4 * sds.std() / np.sqrt(150))
    inside = (table["lower"] < table["sd"]) & (table["sd"] < table["upper"])
    assert inside.all()
    assert np.mean((sds > table["lower"][0]) & (sds < table["upper"][0])) == pytest.approx(0.9, abs=0.02)


@pytest.mark.parametrize("loss", [Bernoulli(), Poisson()], ids=["bernoulli", "poisson"])
def test_counts_and_classes_are_drawn_as_rows(loss):
    drawn = simulate(loss.name, clusters=4, clients=8, rows=10, d=1, client_sd=0.7, cluster_sd=0.7, seed=5)
    offset = 0.3 * np.ones(len(drawn.y))
    data = GroupedData.from_arrays(drawn.X, drawn.y, drawn.client, drawn.cluster, offset=offset)
    shape = Shape((0,), (0,))
    fit, learned = estimate(in_memory(data, loss), shape)
    found = bootstrap(learned, shape, fit.wbar, data=data, loss=loss, draws=4, seed=0)
    assert {each.method for each in found.draws} == {"Laplace"}
    assert found.intervals()["level"].to_list() == ["client", "cluster"]
    assert (found.intervals()["std_error"] > 0).all()


def test_per_cluster_covariances_have_one_row_per_cluster():
    data = simulate(clusters=3, clients=10, rows=6, d=1, seed=5).data
    shape = Shape((0,), (), per_cluster=True)
    fit, learned = estimate(in_memory(data, Gaussian()), shape)
    table = bootstrap(learned, shape, fit.wbar, draws=3, seed=0).intervals()
    assert table["cluster"].to_list() == [0, 1, 2, None]
    assert table.filter(pl.col("level") == "client")["sd"].to_list() == learned.components.client.sd[:, 0].tolist()


def test_progress_is_called_after_each_draw(fitted):
    calls = []
    again(fitted, draws=2, progress=lambda *report: calls.append(report))
    assert calls == [(1, 2), (2, 2)]


@pytest.mark.parametrize("loss", [Gamma(), Poisson()], ids=["gamma", "poisson"])
def test_only_a_linear_model_is_drawn_with_weights_or_without_rows(loss, fitted):
    learned = replace(fitted[2], components=replace(fitted[2].components, method="Laplace"))
    data = GroupedData.from_arrays([[1.0], [1.0]], [1.0, 2.0], ["a", "b"], weights=[1.0, 2.0])
    for given, fix in ((data, "linear models only; repeat the rows"), (None, "needs the rows of the fit")):
        with pytest.raises(SolverError, match=fix) as caught:
            bootstrap(learned, SHAPE, np.zeros(2), data=given, loss=loss)
        assert "ounts or classes" not in str(caught.value)


def test_one_draw_is_an_error(fitted):
    with pytest.raises(SolverError, match=r"at least 2 draws .* Got 1 instead\."):
        again(fitted, draws=1)
