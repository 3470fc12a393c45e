"""Posterior covariances and intervals against Henderson's equations, closed forms and simulation."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import optimize, stats

from covey import HierarchicalClassifier, HierarchicalPoissonRegressor, HierarchicalRegressor
from covey.datasets import simulate
from covey.losses.poisson import count_interval
from tests.henderson import beside, henderson

SETTINGS = [
    {},
    {"covariance": "full"},
    {"covariance": "isotropic", "penalty": "ml"},
    {"covariance": {"client": "full", "cluster": "diagonal"}, "per_cluster": True},
    {"vary": {"client": ["1"], "cluster": ["x0"]}},
    {"vary": {"client": ["x1", "x0"], "cluster": []}, "covariance": "full"},
]


@pytest.fixture(scope="module")
def drawn():
    return simulate(clusters=4, clients=6, rows=7, d=2, wbar=0.5, client_sd=0.6, cluster_sd=0.9, equal_rows=False, seed=4)


@pytest.fixture(scope="module")
def heavy(drawn):
    """Weights, an offset, and a row of ones beside the columns."""
    rng = np.random.default_rng(0)
    X = np.column_stack([np.ones(len(drawn.y)), drawn.X])
    return X, {"weights": rng.uniform(0.3, 2.0, len(drawn.y)), "offset": rng.normal(size=len(drawn.y))}


def fit(drawn, heavy=None, **settings):
    given = {} if heavy is None else {"sample_weight": heavy[1]["weights"], "offset": heavy[1]["offset"]}
    y = drawn.y if heavy is None else drawn.y + heavy[1]["offset"]
    model = HierarchicalRegressor(**{"tests": False, **settings})
    return model.fit(drawn.X, y, client=drawn.client, cluster=drawn.cluster, **given)


@pytest.mark.parametrize("settings", SETTINGS)
def test_covariances_are_those_of_hendersons_equations(drawn, heavy, settings):
    model = fit(drawn, heavy, **settings)
    X, given = heavy
    dense = beside(model, X, drawn.y + given["offset"], drawn.client, drawn.cluster, **given)
    posterior = model.model_.posterior
    for ours, theirs in ((model.global_coef_, dense.wbar), (model.cluster_coef_, dense.w), (model.coef_, dense.theta)):
        np.testing.assert_allclose(ours, theirs, atol=1e-8)
    for ours, theirs in (
        (posterior.learned.covariance, dense.whole),
        (posterior.clusters, dense.clusters),
        (posterior.clients, dense.clients),
    ):
        np.testing.assert_allclose(ours, theirs, atol=1e-9)
    found = model.components_
    own, above = found.client.embedded(model.terms_), found.cluster.embedded(model.terms_)
    np.testing.assert_allclose(posterior.new_clients[:-1], dense.clusters + own, atol=1e-9)
    np.testing.assert_allclose(posterior.new_clients[-1], dense.whole + above[0] + own.mean(axis=0), atol=1e-9)


def averaged(model, X, y, client, cluster, **settings):
    """Henderson's equations at each point of the model's sample of components, with the points' weights."""
    draws = model.model_.posterior.draws
    codes = [np.searchsorted(known, ids) for known, ids in ((model.clients_, client), (model.clusters_, cluster))]
    points = zip(draws.dispersion, draws.client, draws.cluster, strict=True)
    return draws, [henderson(X, y, *codes, *point, **settings) for point in points]


def mixture(weights, means, sds, coverage):
    """The ends of an interval of a mixture of normals, by root finding."""

    def quantile(p):
        ends = stats.norm.ppf(p, means, sds)
        return optimize.brentq(
            lambda at: weights @ stats.norm.cdf(at, means, sds) - p, ends.min() - 1, ends.max() + 1, xtol=1e-12
        )

    return quantile((1 - coverage) / 2), quantile((1 + coverage) / 2)


@pytest.mark.parametrize("level", ["client", "cluster", "global"])
@pytest.mark.parametrize("settings", [{}, {"covariance": "full"}, {"covariance": "isotropic", "penalty": "ml"}])
def test_the_frame_of_coefficients_has_standard_errors_and_intervals(drawn, heavy, level, settings):
    X, given = heavy
    model, y = fit(drawn, heavy, **settings), drawn.y + given["offset"]
    dense = beside(model, X, y, drawn.client, drawn.cluster, **given)
    spread = {"client": dense.clients, "cluster": dense.clusters, "global": dense.whole[None]}[level]
    error = np.sqrt(np.einsum("uaa->ua", spread)).ravel()
    frame = model.coef_frame(level, 0.8)
    np.testing.assert_allclose(frame["std_error"], error, atol=1e-9)
    if level == "global":
        reach = stats.t.ppf(0.9, frame["df"]) * error
        np.testing.assert_allclose(frame["upper"] - frame["estimate"], reach, atol=1e-9)
        np.testing.assert_allclose(frame["p_value"], 2 * stats.t.sf(np.abs(frame["estimate"] / error), frame["df"]), rtol=1e-9)
        return
    draws, points = averaged(model, X, y, drawn.client, drawn.cluster, **given)
    means, covariances = ("theta", "clients") if level == "client" else ("w", "clusters")
    for row in (0, 4, 11):
        at = np.unravel_index(row, dense.w.shape)
        mean = np.array([getattr(point, means)[at] for point in points])
        sd = np.sqrt([getattr(point, covariances)[at[0], at[1], at[1]] for point in points])
        found = frame["lower"][row], frame["upper"][row]
        np.testing.assert_allclose(found, mixture(draws.weights, mean, sd, 0.8), atol=1e-6)


def test_the_reliability_of_an_intercept_has_its_closed_form(drawn):
    model = HierarchicalRegressor(vary={"client": ["1"], "cluster": ["1"]}, tests=False)
    model.fit(drawn.X, drawn.y, client=drawn.client, cluster=drawn.cluster)
    found = model.components_
    tau2, s2, rows = found.client.sd[0, 0] ** 2, found.residual, np.bincount(drawn.client)
    frame = model.reliability()
    assert set(frame["term"]) == {"Intercept"}
    np.testing.assert_allclose(frame["reliability"], tau2 / (tau2 + s2 / rows), rtol=1e-10)


def test_reliability_lies_between_0_and_1_and_skips_what_does_not_vary(drawn):
    frame = fit(drawn, vary={"client": ["x0", "x1"]}, covariance="full").reliability()
    assert set(frame["term"]) == {"x0", "x1"}
    assert frame["reliability"].is_between(0, 1).all()


def test_intervals_of_predictions_by_hand(drawn, heavy):
    model = fit(drawn)
    X, rows, z = heavy[0], [0, 50, 120], 1.959963984540054
    client, cluster = drawn.client[rows], drawn.cluster[rows]
    dense, s2 = beside(model, X, drawn.y, drawn.client, drawn.cluster), model.components_.residual
    draws, points = averaged(model, X, drawn.y, drawn.client, drawn.cluster)
    own = draws.client[:, 0]
    pairs = list(zip(points, own, strict=True))
    new = [point.whole + S for point, S in zip(points, draws.cluster, strict=True)]
    cases = {  # ids, the level, and means and covariances by point
        "client": (client, cluster, "client", [(p.theta[client], p.clients[client]) for p in points]),
        "cluster": (client, cluster, "cluster", [(p.w[cluster], p.clusters[cluster]) for p in points]),
        "new client": ([99] * 3, cluster, "client", [(p.w[cluster], p.clusters[cluster] + S) for p, S in pairs]),
        "new cluster": ([99] * 3, [99] * 3, "cluster", [([p.wbar] * 3, [V] * 3) for p, V in zip(points, new, strict=True)]),
        "new": ([99] * 3, [99] * 3, "client", [([p.wbar] * 3, [V + S] * 3) for p, V, S in zip(points, new, own, strict=True)]),
    }  # fmt: skip
    for name, (clients, clusters, level, moments) in cases.items():
        means = np.array([np.einsum("ld,ld->l", X[rows], mean) for mean, _ in moments])
        variances = np.array([np.einsum("la,lab,lb->l", X[rows], V, X[rows]) for _, V in moments])
        for noise in (False, True):
            sds = np.sqrt(variances + noise * draws.dispersion[:, None])
            got = model.predict_interval(drawn.X[rows], clients, clusters, level=level, noise=noise, expected=False)
            for row in range(3):
                ends = mixture(draws.weights, means[:, row], sds[:, row], 0.95)
                np.testing.assert_allclose(got[row], ends, atol=1e-6, err_msg=name)
    # With expected=True, a new response of the cluster is one of an unknown client.
    got = model.predict_interval(drawn.X[rows], [99] * 3, cluster, level="cluster", noise=True)
    np.testing.assert_allclose(got, model.predict_interval(drawn.X[rows], [99] * 3, cluster, noise=True), rtol=1e-10)
    mean, variance = X[rows] @ dense.wbar, np.einsum("la,ab,lb->l", X[rows], dense.whole, X[rows])
    for noise in (False, True):
        reach = stats.t.ppf(0.975, model.model_.posterior.freedom(X[rows]))
        half = np.sqrt(reach**2 * variance + noise * z**2 * s2)
        got = model.predict_interval(drawn.X[rows], client, cluster, level="global", noise=noise, expected=False)
        np.testing.assert_allclose(got, np.column_stack([mean - half, mean + half]), atol=1e-8)


def test_intervals_are_wider_with_less_data(drawn):
    model = fit(drawn)
    few = drawn.X[:5]

    def width(client, cluster, **more):
        return np.ptp(model.predict_interval(few, client=[client] * 5, cluster=[cluster] * 5, **more), axis=1)

    seen, new_client, new_cluster = width(0, 0), width(99, 0), width(99, 99)
    assert (seen < new_client).all()
    assert (new_client < new_cluster).all()
    assert (seen < width(0, 0, noise=True)).all()
    assert (seen < width(0, 0, coverage=0.99)).all()
    np.testing.assert_array_equal(width(None, 0), new_client)


def test_rows_of_old_and_new_clients_together(drawn):
    model = fit(drawn)
    ask = {"client": [99, 0, 5, 99], "cluster": [0, 0, 0, 99]}
    together = model.predict_interval(drawn.X[:4], **ask)
    alone = [
        model.predict_interval(drawn.X[at : at + 1], client=[ask["client"][at]], cluster=[ask["cluster"][at]])[0]
        for at in range(4)
    ]
    np.testing.assert_allclose(together, alone, rtol=1e-12)


@pytest.mark.parametrize(("margin", "sd"), [(0.5, 0.4), (2.0, 1.0), (-3.0, 0.2), (5.0, 0.1), (1.0, 0.0)])
def test_intervals_of_counts_are_quantiles_of_simulated_ones(margin, sd):
    rng = np.random.default_rng(1)
    counts = rng.poisson(np.exp(margin + sd * rng.normal(size=400_000)))
    for coverage in (0.5, 0.9, 0.95):
        low, high = count_interval(np.array([margin]), np.array([sd]), coverage)[0]
        for found, tail in ((low, (1 - coverage) / 2), (high, (1 + coverage) / 2)):
            # The smallest count that reaches the tail, within the error of 400,000 draws.
            assert np.mean(counts < found) <= tail + 3e-3
            assert np.mean(counts <= found) >= tail - 3e-3
        assert low <= high


@pytest.mark.parametrize(("margin", "sd"), [(6.0, 1.0), (8.0, 0.5), (1.0, 2.0), (1.0, 3.0), (10.0, 0.3)])
def test_intervals_of_large_or_uncertain_counts(margin, sd):
    rng = np.random.default_rng(1)
    counts = rng.poisson(np.exp(margin + sd * rng.normal(size=400_000)))
    low, high = count_interval(np.array([margin]), np.array([sd]), 0.95)[0]
    assert low == pytest.approx(np.quantile(counts, 0.025), rel=0.03, abs=1)
    assert high == pytest.approx(np.quantile(counts, 0.975), rel=0.03, abs=1)


def test_huge_counts_have_intervals():
    got = count_interval(np.array([20.0, 60.0, 700.0, -50.0]), np.array([0.5, 2.0, 1.0, 1.0]), 0.95)
    assert np.isfinite(got).all()
    np.testing.assert_allclose(np.log(got[:2]), [[19.02, 20.98], [56.08, 63.92]], atol=0.01)
    np.testing.assert_array_equal(got[3], [0, 0])


def test_poisson_predictions_have_intervals_of_whole_counts():
    drawn = simulate("poisson", clusters=5, clients=6, rows=8, d=1, client_sd=0.3, cluster_sd=0.4, intercept=True, seed=2)
    model = HierarchicalPoissonRegressor(fit_intercept=False, tests=False)
    model.fit(drawn.X, drawn.y, client=drawn.client, cluster=drawn.cluster)
    ask = {"client": drawn.client, "cluster": drawn.cluster}
    mean, counts = model.predict_interval(drawn.X, **ask), model.predict_interval(drawn.X, **ask, noise=True)
    expected = model.predict(drawn.X, **ask)
    assert ((mean[:, 0] < expected) & (expected < mean[:, 1])).all()
    np.testing.assert_array_equal(counts, np.floor(counts))
    assert (np.ptp(counts, axis=1) >= np.ptp(mean, axis=1) - 1).all()
    assert 0.9 < np.mean((counts[:, 0] <= drawn.y) & (drawn.y <= counts[:, 1])) <= 1


def test_probabilities_have_intervals_within_0_and_1():
    drawn = simulate("bernoulli", clusters=5, clients=6, rows=15, d=2, wbar=2.0, client_sd=0.5, cluster_sd=0.5, seed=2)
    model = HierarchicalClassifier(fit_intercept=False, tests=False)
    model.fit(drawn.X, drawn.y, client=drawn.client, cluster=drawn.cluster)
    for client in (drawn.client, drawn.client + 1000):
        ask = {"client": client, "cluster": drawn.cluster}
        (low, high), p = model.predict_interval(drawn.X, **ask, coverage=0.99).T, model.predict_proba(drawn.X, **ask)[:, 1]
        assert ((low >= 0) & (low <= p) & (p <= high) & (high <= 1)).all()
    with pytest.raises(ValueError, match="no prediction interval") as caught:
        model.predict_interval(drawn.X, **ask, noise=True)
    one_sentence(caught)


@pytest.mark.parametrize("coverage", [0, 1, 1.5, -0.1, np.nan, True])
def test_a_coverage_outside_0_and_1_is_an_error(drawn, coverage):
    model = fit(drawn)
    for ask in (
        lambda: model.predict_interval(drawn.X[:1], [0], [0], coverage=coverage),
        lambda: model.coef_frame("client", coverage),
        lambda: model.summary(coverage).to_json(),
        lambda: model.summary(coverage),  # before it is printed, not after
        lambda: model.bootstrap(draws=2, coverage=coverage),
    ):
        with pytest.raises(ValueError, match="'coverage' parameter must lie between 0 and 1") as caught:
            ask()
        one_sentence(caught)


@pytest.mark.parametrize("coverage", ["0.9", None])
def test_a_coverage_that_is_not_a_number_is_an_error(drawn, coverage):
    with pytest.raises(ValueError, match="'coverage' parameter must lie between 0 and 1"):
        fit(drawn).predict_interval(drawn.X[:1], [0], [0], coverage=coverage)


def test_a_printed_summary_has_the_coverage_that_was_asked_for(drawn):
    model = fit(drawn)
    assert "80% interval" in str(model.summary(0.8))
    lower = model.summary(0.8).to_json()["global"][0]["lower"]
    assert f"{lower:.4g} to" in str(model.summary(0.8))


def one_sentence(caught):
    assert str(caught.value).endswith(".")
    assert "\n" not in str(caught.value)
