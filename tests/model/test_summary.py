"""Summaries as text and as JSON, against closed forms and a dense likelihood."""

from __future__ import annotations

import json

import numpy as np
import pytest
from scipy import stats

from covey import HierarchicalClassifier, HierarchicalRegressor
from covey.datasets import load_radon, simulate
from covey.federation.simulate import simulate_sites as across_sites
from covey.model.summary import Summary, describe
from covey.problem.problem import Spec

DRAWN = simulate(clusters=7, clients=5, rows=6, d=2, wbar=0.5, intercept=True, cluster_sd=0.8, client_sd=0.5, seed=3)
FRAME = DRAWN.frame().drop("x0").rename({"x1": "x"})


def fit(formula, frame=FRAME, **settings):
    return HierarchicalRegressor(formula=formula, **settings).fit(frame)


def document(model):
    plain = json.loads(json.dumps(model.summary().to_json(), allow_nan=False))
    assert plain == model.summary().to_json()
    return plain


def dense_log_likelihood(model, reml):
    """From the joint normal law of all responses, the global coefficients at their best or integrated out."""
    found, X = model.components_, DRAWN.X
    own, above = found.client.embedded(model.terms_)[0], found.cluster.embedded(model.terms_)[0]
    V = found.residual * np.eye(len(X))
    V += (X @ own @ X.T) * (DRAWN.client[:, None] == DRAWN.client)
    V += (X @ above @ X.T) * (DRAWN.cluster[:, None] == DRAWN.cluster)
    result = stats.multivariate_normal(X @ model.global_coef_, V).logpdf(DRAWN.y)
    if reml:
        result += 0.5 * X.shape[1] * np.log(2 * np.pi) - 0.5 * np.linalg.slogdet(X.T @ np.linalg.solve(V, X))[1]
    return result


@pytest.mark.parametrize("penalty", ["reml", "ml"])
@pytest.mark.parametrize(
    ("formula", "parameters"),
    [
        ("y ~ x + (1 | cluster/client)", 2 + 2 + 1),
        ("y ~ x + (x || cluster/client)", 2 + 4 + 1),
        ("y ~ x + (x | cluster/client)", 2 + 6 + 1),
        ("y ~ x + (1 | cluster) + (x | cluster:client)", 2 + 4 + 1),
    ],
)
def test_log_likelihood_aic_and_bic_have_their_closed_forms(formula, penalty, parameters):
    model = fit(formula, penalty=penalty)
    result = document(model)
    log_likelihood = dense_log_likelihood(model, penalty == "reml")
    assert result["method"] == penalty.upper()
    assert result["log_likelihood"] == pytest.approx(log_likelihood, abs=1e-6)
    assert result["parameters"] == parameters
    assert result["aic"] == pytest.approx(-2 * log_likelihood + 2 * parameters, abs=1e-6)
    assert result["bic"] == pytest.approx(-2 * log_likelihood + np.log(210) * parameters, abs=1e-6)


def test_json_has_the_groups_the_components_the_shares_and_the_tests():
    model = fit("y ~ x + (1 | cluster/client)")
    result = document(model)
    assert (result["rows"], result["clients"], result["clusters"]) == (210, 35, 7)
    assert result["family"] == "gaussian"
    assert result["converged"] is True
    by_level = {row["level"]: row for row in result["variance_components"]}
    variances = {level: row["sd"] ** 2 for level, row in by_level.items()} | {"residual": result["residual_sd"] ** 2}
    # With intercepts only, shares of variance are intraclass correlations.
    for level, share in result["share_of_variance"].items():
        assert share == pytest.approx(variances[level] / sum(variances.values()))
    assert {row["term"] for row in result["variance_components"]} == {"Intercept"}
    assert all(row["sd_error"] > 0 for row in result["variance_components"])
    assert result["warnings"] == []
    for test in result["tests"]:
        without = fit({"client": "y ~ x + (1 | cluster)", "cluster": "y ~ x + (1 | cluster:client)"}[test["level"]],
                      client="client", cluster="cluster", tests=False)  # fmt: skip
        gain = 2 * (result["log_likelihood"] - without.components_.log_likelihood)
        assert test["statistic"] == pytest.approx(gain, abs=1e-5)
        assert test["p_value"] == pytest.approx(0.5 * stats.chi2.sf(gain, 1), rel=1e-3)
    for row in result["global"]:
        assert row["lower"] < row["estimate"] < row["upper"]


def test_shares_weigh_varying_terms_by_the_rows_they_have():
    model = fit("y ~ x + (x | cluster/client)")
    found, moments = model.components_, DRAWN.X.T @ DRAWN.X / 210
    parts = [(level.covariance[0] * moments).sum() for level in (found.cluster, found.client)] + [found.residual]
    np.testing.assert_allclose(found.shares, np.array(parts) / sum(parts))


def test_correlations_are_in_json_and_in_print():
    model = fit("y ~ x + (x | cluster/client)")
    result = document(model)
    slope = next(row for row in result["variance_components"] if (row["level"], row["term"]) == ("client", "x"))
    S = model.components_.client.covariance[0]
    assert slope["correlation"]["Intercept"] == pytest.approx(S[0, 1] / np.sqrt(S[0, 0] * S[1, 1]))
    assert f"correlation between clients: Intercept and x {slope['correlation']['Intercept']:.2f}" in str(model)


def test_print_has_all_results():
    model = fit("y ~ x + (1 | cluster/client)")
    result, text = document(model), str(model)
    assert text == str(model.summary())
    for part in (
        "Hierarchical linear model: y ~ x + (1 | cluster/client)",
        "210 rows of 35 clients (client) in 7 clusters (cluster)",
        f"REML: log-likelihood {result['log_likelihood']:.2f}, AIC {result['aic']:.1f}, BIC {result['bic']:.1f}, 5 parameters",
        "variation between clients: likelihood-ratio statistic",
        "variation between clusters: likelihood-ratio statistic",
        "sd between clusters",
        f"{result['residual_sd']:.4g}",
        f"share of variance, mean over rows: {100 * result['share_of_variance']['cluster']:.1f}% between clusters",
    ):
        assert part in text


@pytest.mark.parametrize("formula", ["y ~ x + (1 | cluster/client)", "y ~ x + (x | cluster/client)"])
def test_a_singular_fit_is_noted_and_is_valid_json(formula):
    rng = np.random.default_rng(0)
    model = fit(formula, FRAME.with_columns(y=rng.normal(size=len(FRAME))))
    result = document(model)
    assert any("singular" in note for note in result["warnings"])
    assert "singular" in str(model)
    assert all(row["sd"] >= 0 for row in result["variance_components"])


def test_per_cluster_covariances_are_listed_by_cluster():
    result = document(fit("y ~ x + (1 | cluster/client)", per_cluster=True))
    rows = [row for row in result["variance_components"] if row["level"] == "client"]
    assert [row["cluster"] for row in rows] == list(range(7))
    assert result["parameters"] == 2 + 7 + 1 + 1


def test_classes_have_no_residual_sd_but_a_share_of_variance():
    drawn = simulate("bernoulli", clusters=6, clients=6, rows=15, d=1, intercept=True, cluster_sd=0.8, client_sd=0.8, seed=1)
    given = {"client": drawn.client, "cluster": drawn.cluster}
    model = HierarchicalClassifier(fit_intercept=False).fit(drawn.X, drawn.y, **given)
    result = document(model)
    assert result["method"] == "Laplace"
    assert result["residual_sd"] is None
    tau2, sigma2 = (level.sd[0, 0] ** 2 for level in (model.components_.client, model.components_.cluster))
    # On the scale of the log-odds a logistic residual has variance pi^2 / 3.
    total = tau2 + sigma2 + np.pi**2 / 3
    assert result["share_of_variance"]["cluster"] == pytest.approx(sigma2 / total)
    assert result["share_of_variance"]["client"] == pytest.approx(tau2 / total)
    assert "log-odds of 1.0 against 0.0" in str(model)


def test_a_model_of_given_penalties_has_a_summary_too():
    model = HierarchicalRegressor(client="client", cluster="cluster", formula="y ~ x", gamma=1.0).fit(FRAME)
    result = document(model)
    assert result["method"] is None
    assert [row["term"] for row in result["global"]] == ["Intercept", "x"]
    assert "gamma 1 (client to cluster)" in str(model.summary())


@pytest.mark.parametrize("gamma", [0.1, 0.3, 1 / 3])
def test_one_gamma_for_all_is_printed_as_one_number_across_sites_too(gamma):
    """Across sites there are only sums of gamma by cluster. Dividing them gives other last digits in each cluster."""
    spec = Spec(formula="log_radon ~ floor", client="county", cluster="state", gamma=gamma, lam=1.0)
    model = across_sites(load_radon(), spec, 2).outcome.model
    assert f"penalties gamma {gamma:.4g} (client to cluster), lam 1 (cluster" in describe(model)
    low, high = Summary(model).to_json()["penalty"]["gamma"]
    assert low == high == pytest.approx(gamma)


def test_criteria_by_reml_carry_a_caution():
    formula = "y ~ x + (1 | cluster/client)"
    model, scaled = fit(formula, tests=False), fit(formula, tests=False, standardize=True)
    caution = next(line for line in str(model).splitlines() if "compare" in line)
    assert all(word in caution for word in ("REML", "AIC", "the same fixed effects"))
    assert "standardised" not in caution
    assert "standardised" in next(line for line in str(scaled).splitlines() if "compare" in line)
    # What the caution is about: the same model in other units has another restricted likelihood, but not another likelihood.
    apart = model.components_.log_likelihood - scaled.components_.log_likelihood
    assert apart == pytest.approx(-np.log(FRAME["x"].std(ddof=0)), abs=1e-6)
    ml = [fit(formula, tests=False, penalty="ml", standardize=how) for how in (False, True)]
    assert ml[0].components_.log_likelihood == pytest.approx(ml[1].components_.log_likelihood, abs=1e-6)
    assert "compare" not in str(ml[1])


def test_without_groups_nothing_is_said_to_be_learned():
    with pytest.warns(UserWarning, match="No clients were named"):
        model = HierarchicalRegressor().fit(FRAME[["x"]].to_numpy(), FRAME["y"])
    assert "REML" not in str(model)
    assert "plain regression" in str(model)
    assert document(model)["method"] == "least squares"
    assert document(model)["variance_components"] == []
    slope, intercept = np.polyfit(FRAME["x"], FRAME["y"], 1)
    np.testing.assert_allclose(model.global_coef_, [intercept, slope], rtol=1e-9)
