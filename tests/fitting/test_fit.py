"""From settings to models: penalties that are learned, cross-validated or given."""

from __future__ import annotations

from functools import partial

import numpy as np
import polars as pl
import pytest
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV, KFold

from covey import HierarchicalClassifier, HierarchicalPoissonRegressor, HierarchicalRegressor, load
from covey.datasets import simulate
from covey.fitting.selection import search
from covey.losses import loss_of
from tests.model.test_inference import one_sentence

DRAWN = simulate(clusters=6, clients=5, rows=8, d=2, wbar=0.5, intercept=True, cluster_sd=0.8, client_sd=0.5, seed=3)
FRAME = DRAWN.frame().drop("x0").rename({"x1": "x"})
REPEATED = FRAME.with_columns(client=pl.col("client") % 5)
NAMED = {"client": "client", "cluster": "cluster", "formula": "y ~ x"}


def test_with_no_setting_penalties_are_learned():
    model = HierarchicalRegressor(client="client", cluster="cluster").fit(FRAME.drop("y"), FRAME["y"])
    assert model.components_.method == model.convergence_.solver == "REML"
    assert model.model_.penalty is None
    assert {test.level for test in model.components_.tests} == {"client", "cluster"}
    assert HierarchicalRegressor(**NAMED, penalty="ml").fit(FRAME).components_.method == "ML"


@pytest.mark.parametrize("estimator", [HierarchicalClassifier, HierarchicalPoissonRegressor])
def test_classes_and_counts_are_learned_by_laplace(estimator):
    frame = FRAME.with_columns(y=(pl.col("y") > 0.5).cast(pl.Int64))
    model = estimator(**NAMED, vary=["1"]).fit(frame)
    assert model.components_.method == "Laplace"
    assert model.components_.residual is None
    assert model.model_.spec.learns == "ml"


def test_given_penalties_are_used_unchanged():
    model = HierarchicalRegressor(**NAMED, gamma=3.0).fit(FRAME)
    assert set(model.model_.penalty.gamma) == {3.0}
    assert set(model.model_.penalty.lam) == {1.0}
    for ask in (lambda: model.components_, lambda: model.predict_interval(FRAME), lambda: model.likelihood_ratio("client")):
        with pytest.raises(ValueError, match="need variances that were learned from the data") as caught:
            ask()
        one_sentence(caught)
        for name in ("components_", "bootstrap", "remove_clients", "'al2sgd_plus'"):
            assert name in str(caught.value)


def test_penalty_cv_uses_the_search(monkeypatch):
    few = partial(search, gammas=np.array([0.1, 1.0, 10.0]), lams=np.array([0.5, 5.0]))
    monkeypatch.setattr("covey.fitting.fit.search", few)
    drawn = simulate(clusters=3, clients=3, rows=6, d=1, seed=0)
    frame, settings = drawn.frame(), {"client": "client", "cluster": "cluster", "formula": "y ~ 0 + x0"}
    model = HierarchicalRegressor(**settings, penalty="cv", random_state=4).fit(frame)
    found = few(drawn.data, loss_of("gaussian"), seed=4)
    by_hand = HierarchicalRegressor(**settings, gamma=found.gamma, lam=found.lam).fit(frame)
    np.testing.assert_array_equal(model.coef_, by_hand.coef_)
    assert set(model.model_.penalty.gamma) == {found.gamma}


def test_ratios_of_learned_variances_are_the_penalties():
    """The likelihood with isotropic covariances gives the fit with gamma = s2 / tau2 and lam = s2 / sigma2."""
    learned = HierarchicalRegressor(**NAMED, covariance="isotropic").fit(FRAME)
    found = learned.components_
    gamma, lam = (found.residual / level.sd[0, 0] ** 2 for level in (found.client, found.cluster))
    given = HierarchicalRegressor(**NAMED, gamma=gamma, lam=lam).fit(FRAME)
    for name in ("coef_", "cluster_coef_", "global_coef_"):
        np.testing.assert_allclose(getattr(given, name), getattr(learned, name), atol=1e-9)


@pytest.mark.parametrize("per_cluster", [False, True])
def test_a_randomised_algorithm_learns_its_penalties_and_agrees_with_the_exact_fit(per_cluster):
    exact = HierarchicalRegressor(**NAMED, covariance="isotropic", per_cluster=per_cluster).fit(FRAME)
    randomised = HierarchicalRegressor(
        **NAMED, per_cluster=per_cluster, solver="l2gd", options={"steps": "switching"}, tol=1e-3, max_iter=60_000
    ).fit(FRAME)
    assert randomised.model_.penalty is not None
    np.testing.assert_allclose(randomised.coef_, exact.coef_, atol=0.1)
    assert np.abs(randomised.coef_ - exact.coef_).mean() < 0.02


def test_james_stein_shrinks_the_global_model_of_learned_penalties():
    drawn = simulate(clusters=6, clients=5, rows=8, d=4, wbar=0.1, cluster_sd=0.5, client_sd=0.5, seed=1)
    given = {"client": drawn.client, "cluster": drawn.cluster}
    exact = HierarchicalRegressor(fit_intercept=False, covariance="isotropic").fit(drawn.X, drawn.y, **given)
    shrunk = HierarchicalRegressor(fit_intercept=False, james_stein=True).fit(drawn.X, drawn.y, **given)
    ratio = shrunk.global_coef_ / exact.global_coef_
    assert 0 <= ratio.min() <= ratio.max() <= 1
    assert np.linalg.norm(shrunk.global_coef_) < np.linalg.norm(exact.global_coef_)


@pytest.mark.parametrize(
    "settings",
    [
        {"solver": "l2gd", "vary": ["x"]},
        {"james_stein": True, "vary": {"cluster": ["x"]}},
        {"james_stein": True, "formula": "y ~ x + (1 | cluster/client)", "client": None, "cluster": None},
    ],
)
def test_a_solver_in_which_every_term_varies_refuses_a_selection(settings):
    # It would use the variance of these few terms for all terms.
    with pytest.raises(ValueError, match="needs every term to vary by") as caught:
        HierarchicalRegressor(**{**NAMED, **settings}).fit(FRAME)
    one_sentence(caught)


def test_ids_that_repeat_in_every_cluster_are_different_clients(tmp_path):
    formula = "y ~ x + (1 + x || cluster/client)"
    repeated, unique = (HierarchicalRegressor(formula=formula).fit(frame) for frame in (REPEATED, FRAME))
    assert len(repeated.clients_) == 30
    assert repeated.components_.log_likelihood == pytest.approx(unique.components_.log_likelihood, abs=1e-9)
    few = slice(0, 240, 17)
    for model in (repeated, load(repeated.save(tmp_path / "model"))):
        np.testing.assert_allclose(model.predict(REPEATED), unique.predict(FRAME), atol=1e-9)
        np.testing.assert_allclose(model.predict_interval(REPEATED), unique.predict_interval(FRAME), atol=1e-9)
        more, same = (fitted.update(rows[few], repeat=True) for fitted, rows in ((model, REPEATED), (unique, FRAME)))
        assert len(more.clients_) == 30
        np.testing.assert_allclose(more.predict_interval(REPEATED), same.predict_interval(FRAME), atol=1e-9)
        fresh = REPEATED[:4].with_columns(client=pl.lit(7))
        added = model.add_clients(fresh)
        assert len(added.clients_) == 31
        assert np.ptp(added.predict_interval(fresh), axis=1).max() < np.ptp(model.predict_interval(fresh), axis=1).max()


@pytest.mark.parametrize(
    ("frame", "settings", "sentence"),
    [
        (FRAME.with_columns(cluster=pl.lit("z")), NAMED, "There is only one cluster, 'z'"),
        (
            FRAME.with_columns(cluster=pl.lit("z")),
            {"formula": "y ~ x + (1 | cluster/client)"},
            "There is only one cluster, 'z'",
        ),
        (FRAME.with_columns(client=pl.lit(1)), {"formula": "y ~ x + (1 | client)"}, "There is only one client, 1"),
        (
            FRAME.with_columns(client=pl.lit(1)).drop("cluster"),
            {"client": "client", "formula": "y ~ x", "penalty": "reml"},
            "There is only one client, 1",
        ),
        (FRAME, {**NAMED, "vary": []}, "Nothing varies, neither by client nor by cluster"),
        (FRAME, {**NAMED, "vary": {"client": [], "cluster": []}}, "Nothing varies, neither by client nor by cluster"),
        (FRAME, {**NAMED, "vary": ["z"]}, "'vary' parameter names 'z', which is not a term"),
        (FRAME.with_columns(cluster="client"), NAMED, "Every cluster has one client"),
        (FRAME, {**NAMED, "client": "cluster", "cluster": "client"}, "a client belongs to one cluster"),
    ],
)
def test_models_that_cannot_be_identified_are_refused(frame, settings, sentence):
    with pytest.raises(ValueError, match=sentence) as caught:
        HierarchicalRegressor(**settings).fit(frame)
    one_sentence(caught)


def test_one_named_client_is_refused_and_no_client_is_a_regression():
    one = FRAME.with_columns(client=pl.lit(1)).drop("cluster")
    with pytest.raises(ValueError, match="There is only one client, 1, so a variance between clients cannot be estimated"):
        HierarchicalRegressor(client="client", formula="y ~ x").fit(one)
    with pytest.warns(UserWarning, match="No clients were named"):
        model = HierarchicalRegressor(formula="y ~ x").fit(one)
    x = np.column_stack([np.ones(len(one)), one["x"]])
    np.testing.assert_allclose(model.global_coef_, np.linalg.lstsq(x, one["y"].to_numpy(), rcond=None)[0], atol=1e-8)


def test_clones_keep_every_setting():
    model = HierarchicalRegressor(**NAMED, vary={"client": ["x"]}, covariance={"client": "full"}, per_cluster=True, tests=False)
    assert clone(model).get_params() == model.get_params()
    np.testing.assert_array_equal(clone(model).fit(FRAME).coef_, model.fit(FRAME).coef_)


def test_a_grid_over_what_varies_and_how():
    grid = GridSearchCV(
        HierarchicalRegressor(**{**NAMED, "formula": "x"}, tests=False),
        {"vary": [None, ["1"], {"client": ["x"]}], "covariance": ["isotropic", "full"]},
        cv=KFold(3, shuffle=True, random_state=0),
        error_score="raise",
    )
    grid.fit(FRAME.drop("y").to_pandas(), FRAME["y"].to_numpy())
    assert len(grid.cv_results_["params"]) == 6
    assert grid.best_estimator_.components_.client.kind in ("isotropic", "full")


def test_the_fit_is_the_same_for_any_order_of_rows():
    model, other = (HierarchicalRegressor(**NAMED, covariance="full").fit(frame) for frame in (FRAME, FRAME[::-1]))
    np.testing.assert_allclose(other.coef_, model.coef_, atol=1e-6)
    assert other.components_.log_likelihood == pytest.approx(model.components_.log_likelihood, abs=1e-8)


def test_cross_validation_may_pass_the_response_that_the_formula_names():
    from sklearn.model_selection import cross_validate

    model = HierarchicalRegressor(formula="y ~ x + (1 | cluster/client)", tests=False)
    scores = cross_validate(model, FRAME.to_pandas(), FRAME["y"].to_pandas(), cv=3, error_score="raise")
    assert np.isfinite(scores["test_score"]).all()
    with pytest.raises(ValueError, match=r"given twice, as y and as 'y' in the formula, and they differ"):
        model.fit(FRAME, FRAME["y"] + 1.0)
