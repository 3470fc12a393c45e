"""Likelihood-ratio tests on the boundary of the parameter space, against closed forms and simulation."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from covey import GroupedData
from covey.datasets import simulate
from covey.losses import Bernoulli, Gaussian
from covey.variance.estimate import chi_bar_tail, estimate, likelihood_ratios
from covey.variance.identify import survey
from covey.variance.parameters import Shape
from tests.networks import in_memory


def ratios_of(data, loss, shape):
    """A fit, and the test of each level that varies in it."""
    network = in_memory(data, loss)
    known = survey(network, shape)
    fit, learned = estimate(network, shape, surveyed=known)
    return fit, learned, likelihood_ratios(known, learned, shape)


def mixture(statistic, weights):
    """A mixture of chi-squared tails with 0, 1, 2, ... degrees of freedom."""
    return sum(weight * stats.chi2.sf(statistic, p) for p, weight in enumerate(weights) if p)


@pytest.mark.parametrize("statistic", [0.1, 1.0, 2.71, 6.0, 15.0])
def test_the_tail_is_a_mixture_of_chi_squared_tails(statistic):
    assert chi_bar_tail(statistic, "isotropic", 5) == pytest.approx(mixture(statistic, [0.5, 0.5]))
    assert chi_bar_tail(statistic, "full", 1) == pytest.approx(mixture(statistic, [0.5, 0.5]))
    assert chi_bar_tail(statistic, "diagonal", 2) == pytest.approx(mixture(statistic, [0.25, 0.5, 0.25]))
    assert chi_bar_tail(statistic, "diagonal", 3) == pytest.approx(mixture(statistic, np.array([1, 3, 3, 1]) / 8))


@pytest.mark.parametrize("statistic", [0.5, 2.0, 5.0, 10.0])
def test_the_tail_of_a_full_covariance_of_two_terms(statistic):
    """2 x 2 covariances are a circular cone with an angle of 45 degrees in three dimensions, with weights in closed form."""
    root = np.sqrt(2)
    weights = np.array([2 - root, root, root, 2 - root]) / 4
    assert chi_bar_tail(statistic, "full", 2) == pytest.approx(mixture(statistic, weights), rel=0.05)


@pytest.mark.parametrize(("kind", "q", "count"), [("full", 3, 1), ("full", 2, 3), ("diagonal", 4, 1), ("isotropic", 2, 4)])
def test_the_tail_is_that_of_a_projection_on_the_cone(kind, q, count):
    """The limit of the statistic for much data: the squared length of a projected normal vector."""
    rng, draws = np.random.default_rng(1), 40_000
    if kind == "full":
        left = np.zeros(draws)
        for _ in range(count):
            Z = rng.normal(size=(draws, q, q))
            lower = np.tril(Z, -1) / np.sqrt(2)
            matrices = lower + lower.transpose(0, 2, 1) + np.einsum("maa->ma", Z)[:, :, None] * np.eye(q)
            left += (np.maximum(np.linalg.eigvalsh(matrices), 0.0) ** 2).sum(axis=1)
    else:
        left = (np.maximum(rng.normal(size=(draws, count * (q if kind == "diagonal" else 1))), 0.0) ** 2).sum(axis=1)
    for level in (0.5, 0.1, 0.02):
        statistic = float(np.quantile(left, 1 - level))
        if statistic > 0:
            assert chi_bar_tail(statistic, kind, q, count) == pytest.approx(level, rel=0.1)


def test_a_statistic_of_zero_has_a_p_value_of_one():
    assert chi_bar_tail(0.0, "full", 2) == 1.0


def anova(data, n, m):
    """F and the statistic that follows from it, of ``n`` clients of ``m`` rows: REML in closed form."""
    y = data.y.reshape(n, m)
    between, within = n - 1, n * (m - 1)
    F = m * y.mean(axis=1).var(ddof=1) / (((y - y.mean(axis=1, keepdims=True)) ** 2).sum() / within)
    return F, gain(max(F, 1.0), between, within)


def gain(F, between, within):
    return (between + within) * np.log((between * F + within) / (between + within)) - between * np.log(F)


def test_the_statistic_of_equal_clients_follows_from_the_analysis_of_variance():
    n, m, zeros = 8, 5, 0
    for seed in range(30):
        rng = np.random.default_rng(seed)
        client = np.repeat(np.arange(n), m)
        y = rng.normal(size=n * m) + (0.3 * rng.normal(size=n))[client]
        data = GroupedData.from_arrays(np.ones((n * m, 1)), y, client)
        shape = Shape((0,), ())
        fit, learned, (test,) = ratios_of(data, Gaussian(), shape)
        F, expected = anova(data, n, m)
        assert fit.convergence.converged
        assert (test.level, test.parameters) == ("client", 1)
        assert test.statistic == pytest.approx(expected, abs=1e-7)
        assert (learned.components.client.sd[0, 0] == 0) == (F <= 1)
        assert test.p_value == (1.0 if F <= 1 else pytest.approx(0.5 * stats.chi2.sf(expected, 1), rel=1e-4))
        zeros += F <= 1
    assert 5 < zeros < 25


def test_under_the_null_p_values_are_uniform_except_at_one():
    """The statistic in closed form allows many draws. The mixture of two halves holds for 40 clients."""
    between, within = 39, 160
    F = stats.f(between, within).rvs(size=20_000, random_state=2)
    p = np.array([chi_bar_tail(gain(max(each, 1.0), between, within), "diagonal", 1) for each in F])
    assert (p == 1).mean() == pytest.approx(0.5, abs=0.04)
    for level in (0.01, 0.05, 0.2):
        assert (p < level).mean() == pytest.approx(level, rel=0.2)


def test_under_the_null_two_terms_with_correlation():
    """Fits to clients without variation give about the nominal number of small p-values."""
    p = []
    for seed in range(60):
        data = simulate(clusters=1, clients=25, rows=8, d=2, client_sd=0.0, cluster_sd=0.0, seed=1000 + seed).data
        shape = Shape((0, 1), (), "full")
        p.append(ratios_of(data, Gaussian(), shape)[2][0].p_value)
    for level in (0.1, 0.3, 0.6):
        found = np.mean(np.array(p) < level)
        assert stats.binomtest(round(found * 60), 60, level).pvalue > 1e-3


@pytest.mark.parametrize("loss", [Gaussian(), Bernoulli()], ids=["gaussian", "bernoulli"])
def test_each_level_is_tested_by_a_fit_without_it(loss):
    data = simulate(loss.name, clusters=10, clients=6, rows=10, d=1, client_sd=0.0, cluster_sd=1.5, seed=2).data
    shape = Shape((0,), (0,))
    _, learned, ratios = ratios_of(data, loss, shape)
    tests = {test.level: test for test in ratios}
    for level, without in (("client", Shape((), (0,))), ("cluster", Shape((0,), ()))):
        other = estimate(in_memory(data, loss), without)[1].components.log_likelihood
        expected = max(2 * (learned.components.log_likelihood - other), 0.0)
        assert tests[level].statistic == pytest.approx(expected, abs=1e-6)
    assert tests["cluster"].p_value < 1e-6
    assert tests["client"].p_value > 0.01


def test_only_levels_that_vary_are_tested():
    data = simulate(clusters=4, clients=5, rows=6, d=2, seed=0).data
    shape = Shape((), (0, 1), cluster_kind="full")
    assert [(test.level, test.parameters) for test in ratios_of(data, Gaussian(), shape)[2]] == [("cluster", 3)]
