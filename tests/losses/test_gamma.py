"""The gamma family: given penalties compared with scipy, learned ones with glmmTMB."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
from scipy import optimize, stats

from covey import GroupedData, HierarchicalGammaRegressor, Penalty, load, plan
from covey.datasets import simulate
from covey.errors import CoveyError
from covey.losses import Gamma
from covey.solvers import minimise
from covey.variance.estimate import criterion_for, estimate
from covey.variance.identify import survey
from covey.variance.parameters import Shape
from tests.conftest import random_problem
from tests.networks import Sharded, in_memory


@pytest.fixture(scope="module")
def bills():
    rng = np.random.default_rng(7)
    client = np.repeat(np.arange(72), 8)
    cluster = client // 6
    x = rng.normal(size=576).round(3)
    above, own = rng.normal(size=(12, 2)) * [0.5, 0.3], rng.normal(size=(72, 2)) * [0.35, 0.25]
    margin = 1 + 0.4 * x + above[cluster, 0] + above[cluster, 1] * x + own[client, 0] + own[client, 1] * x
    y = rng.gamma(2.5, np.exp(margin) / 2.5).round(4)
    times, offset = rng.integers(1, 4, size=576), (0.5 * rng.normal(size=576)).round(3)
    assert y.sum() == pytest.approx(2172.5598)  # the same rows as in R
    return pl.DataFrame({"y": y, "x": x, "client": client, "cluster": cluster, "times": times, "off": offset})


# R 4.2.2, glmmTMB 1.1.5, family=Gamma(link="log"), data as above:
#   log-likelihood, coefficients, sigma, their standard errors, sds of clusters and clients, standard errors of log sds
REFERENCES = {
    # y ~ x + (1 | cluster/client)
    "intercepts": (
        "y ~ x + (1 | cluster/client)",
        {},
        -1217.86741208,
        [1.16489304, 0.38252510],
        0.73743306,
        [0.12696503, 0.03611776],
        [0.38810727],
        [0.42903214],
        [0.2626578962],
        [0.1272285518],
    ),
    # y ~ x + diag(1 + x | cluster) + diag(1 + x | client)
    "slopes": (
        "y ~ x + (1 + x || cluster/client)",
        {},
        -1178.49228076,
        [1.11969815, 0.35991308],
        0.66599300,
        [0.12385390, 0.10513584],
        [0.38217079, 0.33465802],
        [0.40608441, 0.19400597],
        [0.2588692282, 0.2412555221],
        [0.1264988458, 0.2788555978],
    ),
    # y ~ x + offset(off) + (1 | cluster/client), weights = times
    "weights and offset": (
        "y ~ x + (1 | cluster/client)",
        {"weights": "times", "offset": "off"},
        -2570.06045409,
        [1.26289692, 0.34678683],
        0.83155685,
        [0.13193354, 0.03032135],
        [0.38715573],
        [0.55438782],
        [0.286191103],
        [0.1050629267],
    ),
}


@pytest.mark.parametrize("case", REFERENCES)
def test_learned_penalties_agree_with_glmmtmb(bills, case):
    formula, columns, value, coefficients, sigma, errors, cluster, client, cluster_error, client_error = REFERENCES[case]
    model = HierarchicalGammaRegressor(formula=formula, tests=False, **columns).fit(bills)
    found = model.components_
    assert found.method == "Laplace"
    assert found.log_likelihood == pytest.approx(value, abs=1e-5)
    np.testing.assert_allclose(model.global_coef_, coefficients, rtol=1e-5)
    assert np.sqrt(found.residual) == pytest.approx(sigma, rel=1e-5)
    np.testing.assert_allclose(found.cluster.sd[0], cluster, rtol=1e-4)
    np.testing.assert_allclose(found.client.sd[0], client, rtol=1e-4)
    np.testing.assert_allclose(model.coef_frame("global")["std_error"].to_numpy(), errors, rtol=1e-3)
    np.testing.assert_allclose(found.cluster.sd_error[0] / found.cluster.sd[0], cluster_error, rtol=2e-3)
    np.testing.assert_allclose(found.client.sd_error[0] / found.client.sd[0], client_error, rtol=2e-3)
    assert found.parameters == 3 + len(cluster) + len(client)


def test_learned_full_covariance_agrees_with_glmmtmb(bills):
    # y ~ x + (1 + x | client), otherwise as above
    model = HierarchicalGammaRegressor(formula="y ~ x + (1 + x | client)", tests=False).fit(bills)
    assert model.components_.log_likelihood == pytest.approx(-1198.46839774, abs=1e-5)
    np.testing.assert_allclose(model.components_.client.sd[0], [0.55067797, 0.38510265], rtol=1e-4)


def test_predictions_intervals_and_files_of_a_fit(bills, tmp_path):
    model = HierarchicalGammaRegressor(formula="y ~ x + (1 | cluster/client)").fit(bills)
    text = str(model)
    assert "gamma model" in text
    assert "coefficient of variation 0.7374" in text
    assert model.likelihood_ratio("client").p_value < 1e-4
    assert sum(model.components_.shares) == pytest.approx(1.0)
    assert model.summary().to_json()["family"] == "gamma"

    inner, outer = model.predict_interval(bills), model.predict_interval(bills, noise=True)
    predicted, y = model.predict(bills), bills["y"].to_numpy()
    assert ((inner[:, 0] < predicted) & (predicted < inner[:, 1])).all()
    assert ((outer[:, 0] < inner[:, 0]) & (outer[:, 1] > inner[:, 1])).all()
    assert ((outer[:, 0] < y) & (y < outer[:, 1])).mean() > 0.93
    assert 0 < model.score(bills, y) < 1

    again = load(model.save(tmp_path / "bills"))
    assert isinstance(again, HierarchicalGammaRegressor)
    assert (again.predict_interval(bills, noise=True) == outer).all()
    assert str(again) == text

    more = bills[:4].with_columns(client=pl.lit(999))
    added = model.add_clients(more)
    assert added.coef_.shape == (73, 2)
    np.testing.assert_allclose(added.remove_clients([added.clients_[6]]).coef_, model.coef_, rtol=1e-6)
    drawn = model.bootstrap(bills, draws=3)
    assert drawn["level"].to_list() == ["client", "cluster", "residual"]
    assert (drawn["std_error"] > 0).all()


def test_the_gradient_of_the_likelihood_agrees_with_differences(bills):
    data = random_problem(5, "gamma", d=2, max_rows=30).data
    problem = criterion_for(survey(in_memory(data, Gamma()), Shape((0, 1), (0,)), check=False), Shape((0, 1), (0,)), reml=False)
    x = problem.start(0.4, 0.7) + 0.05
    _, gradient = problem.value_and_gradient(x)
    h = 1e-5
    for at in range(len(x)):
        step = h * np.eye(len(x))[at]
        difference = (problem.value_and_gradient(x + step)[0] - problem.value_and_gradient(x - step)[0]) / (2 * h)
        assert gradient[at] == pytest.approx(difference, rel=1e-4, abs=1e-5)


def test_the_likelihood_without_variation_agrees_with_scipy():
    """If nothing varies, the criterion is the ordinary likelihood at its best shape."""
    data = random_problem(6, "gamma", weighted=False, d=1, max_rows=30).data
    problem = criterion_for(survey(in_memory(data, Gamma()), Shape((0,), ()), check=False), Shape((0,), ()), reml=False)
    value, _ = problem.value_and_gradient(np.zeros_like(problem.start(0.0, 0.0)))
    mean = np.exp(data.X[:, 0] * problem.wbar(np.zeros(2))[0])

    def minus_twice(shape):
        return -2 * stats.gamma.logpdf(data.y, shape, scale=mean / shape).sum()

    best = optimize.minimize_scalar(minus_twice, bounds=(1e-2, 1e3), method="bounded", options={"xatol": 1e-9})
    assert value == pytest.approx(best.fun, rel=1e-9)


def test_penalties_learned_across_nodes_are_those_in_memory():
    data = simulate("gamma", clusters=8, clients=5, rows=8, d=2, cluster_sd=0.4, client_sd=0.3, noise_sd=0.5, seed=2).data
    shape = Shape((0, 1), (0,))
    fit, learned = estimate(in_memory(data, Gamma()), shape)
    network = Sharded.of(data, Gamma(), np.arange(data.n_clients) % 2)
    across, other = estimate(network, shape)
    np.testing.assert_allclose(across.wbar, fit.wbar, rtol=1e-6)
    assert other.components.residual == pytest.approx(learned.components.residual, rel=1e-6)


def test_given_penalties_have_the_minimiser_of_scipy():
    problem = random_problem(3, "gamma")
    data, n, k, d = problem.data, len(problem.gamma), len(problem.lam), problem.X.shape[1]
    penalty, tree = problem.penalty, problem.data.hierarchy

    def objective(flat):
        theta, w, wbar = np.split(flat.reshape(-1, d), [n, n + k])
        margin = data.margin(theta)
        rows = (data.weights * (data.y * np.exp(-margin) + margin)).sum()
        pull = (penalty.gamma[:, None] * (theta - w[tree.parent]) ** 2).sum() + (penalty.lam[:, None] * (w - wbar) ** 2).sum()
        return rows + 0.5 * pull

    best = optimize.minimize(objective, np.zeros((n + k + 1) * d), method="BFGS", options={"gtol": 1e-7})
    fit = minimise(data, Gamma(), penalty, solver="newton", tol=1e-9)
    assert fit.convergence.converged
    assert fit.convergence.objective == pytest.approx(best.fun, rel=1e-9)
    np.testing.assert_allclose(np.concatenate([fit.theta, fit.w, fit.wbar[None]]).ravel(), best.x, atol=1e-4)


@pytest.mark.parametrize("scale", [1e-8, 1.0, 1e8])
def test_newton_needs_few_steps_in_any_units(scale):
    """From zero, Newton would need one step for each factor of e. It starts at the logs of the responses."""
    problem = random_problem(8, "gamma", weighted=False, d=1)
    data = problem.data
    data = type(data)(np.ones_like(data.X), scale * data.y, data.client_ptr, data.hierarchy, data.terms)
    fit = minimise(data, Gamma(), problem.penalty, solver="newton")
    assert fit.convergence.converged
    assert fit.convergence.iterations < 12


@pytest.mark.parametrize("solver", ["l2gd", "one_coin", "al2sgd_plus"])
def test_randomised_algorithms_reach_the_minimum(solver):
    rng = np.random.default_rng(1)
    client = np.repeat(np.arange(8), 6)
    X = np.column_stack([np.ones(48), 0.5 * rng.normal(size=48)])
    data = GroupedData.from_arrays(X, rng.gamma(4.0, np.exp(X @ [0.3, 0.5]) / 4.0), client, client // 4)
    loss, penalty = Gamma("mean", 0.2), Penalty.of(data.hierarchy, gamma=0.5, lam=0.5)
    best = minimise(data, loss, penalty, solver="newton")
    settings = {} if solver == "al2sgd_plus" else {"steps": "switching"}
    fit = minimise(data, loss, penalty, solver=solver, tol=1e-3, max_iter=200_000, **settings)
    assert fit.convergence.converged
    np.testing.assert_allclose(fit.theta, best.theta, atol=0.1)


def test_the_plan_and_its_constants(bills):
    found = plan(bills, family="gamma", formula="y ~ x", client="client", cluster="cluster", gamma=5.0, ridge=0.1)
    assert found.cheapest == "newton"
    # The second derivative in the margin is y exp(-margin), at zero the response itself.
    assert found.known.L_row >= 2 * 8 * bills["y"].max()
    assert "measured" in found.known.note


def test_invalid_responses_and_settings_are_refused(bills):
    with pytest.raises(CoveyError, match="gamma family takes positive"):
        HierarchicalGammaRegressor(gamma=1.0).fit([[1.0], [2.0]], [1.0, 0.0], client=["a", "b"])
    with pytest.raises(CoveyError, match="reml"):
        HierarchicalGammaRegressor(formula="y ~ x + (1 | client)", penalty="reml").fit(bills)
    with pytest.raises(CoveyError, match=r"james_stein.*gamma"):
        HierarchicalGammaRegressor(client="client", formula="y ~ x", gamma=1.0, james_stein=True).fit(bills)
    same = bills.with_columns(y=pl.lit(2.0))
    with pytest.raises(CoveyError, match="dispersion is zero"):
        HierarchicalGammaRegressor(formula="y ~ x + (1 | client)").fit(same)
