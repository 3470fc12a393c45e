"""The scikit-learn interface: its own checks, pipelines and searches, unseen groups, every kind of input."""

from __future__ import annotations

import inspect
import warnings
from dataclasses import replace

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import sklearn
from sklearn.base import clone
from sklearn.compose import make_column_transformer
from sklearn.linear_model import LinearRegression, LogisticRegression, PoissonRegressor
from sklearn.model_selection import GridSearchCV, KFold, cross_val_score, cross_validate
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import covey
from covey import (
    CoveyError,
    HierarchicalClassifier,
    HierarchicalGammaRegressor,
    HierarchicalPoissonRegressor,
    HierarchicalRegressor,
    Spec,
    load,
)
from covey.datasets import load_radon, simulate
from covey.estimators.core import SETTINGS
from covey.problem.settings import declared

ESTIMATORS = (HierarchicalRegressor, HierarchicalClassifier, HierarchicalPoissonRegressor, HierarchicalGammaRegressor)


# No check is excluded. One is skipped by scikit-learn itself: check_array_api_input, which runs only under
# SCIPY_ARRAY_API=1 and would not apply, since covey computes with numpy arrays only.
@pytest.mark.filterwarnings("ignore:No clients were named:UserWarning")
@pytest.mark.filterwarnings("ignore::covey.errors.ConvergenceWarning")
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.SkipTestWarning")
@parametrize_with_checks([estimator() for estimator in ESTIMATORS])
def test_scikit_learn_checks(estimator, check):
    check(estimator)


@pytest.fixture(scope="module")
def drawn():
    return simulate(clusters=4, clients=8, rows=15, d=2, wbar=1.0, seed=1)


def table_of(drawn, library=pl.DataFrame):
    frame = drawn.frame().with_columns(pl.col("client").cast(pl.String), cluster="s" + pl.col("cluster").cast(pl.String))
    return library(frame.to_dict(as_series=False)), frame["y"].to_numpy()


@pytest.mark.parametrize("library", [pd.DataFrame, pl.DataFrame, pa.table])
def test_names_arrays_and_positions_give_the_same_fit(drawn, library):
    frame, y = table_of(drawn, library)
    by_name = HierarchicalRegressor(client="client", cluster="cluster", formula="y ~ x0 + x1").fit(frame)
    by_array = HierarchicalRegressor().fit(drawn.X, y, client=drawn.client.astype(str), cluster=drawn.cluster)
    stacked = np.column_stack([drawn.X[:, 0], drawn.client, drawn.cluster, drawn.X[:, 1]])
    by_position = HierarchicalRegressor(client=1, cluster=2).fit(stacked, y)
    np.testing.assert_allclose(by_array.predict(drawn.X, client=drawn.client.astype(str)), by_name.predict(frame), atol=1e-12)
    np.testing.assert_allclose(by_position.predict(stacked), by_name.predict(frame), atol=1e-12)
    assert by_position.terms_ == ("Intercept", "x0", "x3")
    tidy = by_name.coef_frame("cluster")
    assert isinstance(tidy, {pd.DataFrame: pd.DataFrame, pl.DataFrame: pl.DataFrame, pa.table: pa.Table}[library])


def test_one_client_is_ordinary_regression(drawn):
    with pytest.warns(UserWarning, match="No clients were named"):
        ours = HierarchicalRegressor().fit(drawn.X, drawn.y)
    theirs = LinearRegression().fit(drawn.X, drawn.y)
    np.testing.assert_allclose(ours.global_coef_, [theirs.intercept_, *theirs.coef_], atol=1e-10)


def test_single_model_baseline_is_scikit_learns(drawn):
    y = (drawn.y > 0).astype(int)
    model = HierarchicalClassifier(baseline="single-model").fit(drawn.X, y, client=drawn.client, cluster=drawn.cluster)
    theirs = LogisticRegression(C=np.inf, tol=1e-10, max_iter=1000).fit(drawn.X, y)
    np.testing.assert_allclose(model.global_coef_, [*theirs.intercept_, *theirs.coef_[0]], atol=1e-5)
    counts = np.random.default_rng(0).poisson(3, len(y))
    model = HierarchicalPoissonRegressor(baseline="single-model").fit(drawn.X, counts, client=drawn.client)
    theirs = PoissonRegressor(alpha=0, tol=1e-10, max_iter=1000).fit(drawn.X, counts)
    np.testing.assert_allclose(model.global_coef_, [theirs.intercept_, *theirs.coef_], atol=1e-5)
    assert model.score(drawn.X, counts, client=drawn.client) == pytest.approx(theirs.score(drawn.X, counts), abs=1e-6)


def test_locally_trained_baseline_is_the_pseudo_inverse():
    rng = np.random.default_rng(0)
    X, y, client = rng.normal(size=(30, 4)), rng.normal(size=30), np.repeat(np.arange(12), [1, 2, 3, 2, 2, 2, 2, 2, 3, 3, 3, 5])
    model = HierarchicalRegressor(baseline="locally-trained", fit_intercept=False).fit(X, y, client=client)
    for i in range(12):
        np.testing.assert_allclose(model.coef_[i], np.linalg.pinv(X[client == i]) @ y[client == i], atol=1e-9)


def test_levels_and_unseen_groups(drawn):
    frame, y = table_of(drawn)
    model = HierarchicalRegressor(client="client", cluster="cluster", formula="x0 + x1").fit(frame, y)
    row = frame[:1]
    client, cluster = row["client"][0], row["cluster"][0]
    i, j = model.clients_.tolist().index(client), model.clusters_.tolist().index(cluster)
    x = np.array([1.0, row["x0"][0], row["x1"][0]])
    new_client = row.with_columns(client=pl.lit("nobody"))
    new_cluster = new_client.with_columns(cluster=pl.lit("nowhere"))
    missing = row.with_columns(client=pl.lit(None, dtype=pl.String))
    assert model.predict(row)[0] == pytest.approx(x @ model.coef_[i])
    for other in (new_client, missing):
        assert model.predict(other)[0] == pytest.approx(x @ model.cluster_coef_[j])
    assert model.predict(new_cluster)[0] == pytest.approx(x @ model.global_coef_)
    assert model.predict(row, level="cluster")[0] == pytest.approx(x @ model.cluster_coef_[j])
    assert model.predict(row.drop("cluster"), level="cluster")[0] == pytest.approx(x @ model.cluster_coef_[j])
    assert model.predict(row.drop("client", "cluster"), level="global")[0] == pytest.approx(x @ model.global_coef_)
    model.set_params(unseen="raise")
    assert model.predict(row)[0] == pytest.approx(x @ model.coef_[i])
    with pytest.raises(ValueError, match=r"Client 'nobody' was not seen in training"):
        model.predict(new_client)
    with pytest.raises(ValueError, match=r"1 row has no client id \(first: row 0\)"):
        model.predict(missing)
    with pytest.raises(ValueError, match=r"Cluster 'nowhere' was not seen"):
        model.predict(new_cluster, level="cluster")


def test_a_client_that_moved_is_refused(drawn):
    frame, y = table_of(drawn)
    model = HierarchicalRegressor(client="client", cluster="cluster", formula="x0 + x1").fit(frame, y)
    with pytest.raises(ValueError, match=r"Client '0' was in cluster 's0' in training but row 0 puts it in 's3'"):
        model.predict(frame[:1].with_columns(client=pl.lit("0"), cluster=pl.lit("s3")))


def test_ids_of_another_kind_are_refused_not_taken_for_unseen(drawn):
    model = HierarchicalRegressor().fit(drawn.X, drawn.y, client=drawn.client, cluster=drawn.cluster)
    with pytest.raises(ValueError, match=r"client ids are text here \(such as '0'\) but were integers"):
        model.predict(drawn.X, client=drawn.client.astype(str))
    with pytest.raises(ValueError, match="fitted to several clients: pass client="):
        model.predict(drawn.X)


@pytest.mark.parametrize("labels", [("no", "yes"), (False, True), (-1, 1), (1.0, 2.0), (np.str_("a"), np.str_("b"))])
def test_two_classes_of_any_type(drawn, labels):
    truth = drawn.y > 0
    y = np.where(truth, labels[1], labels[0])
    X = pl.DataFrame({"client": drawn.client, "x": drawn.X[:, 0]})
    model = HierarchicalClassifier(client="client").fit(X, pl.Series(y.tolist()))
    assert set(model.predict(X).tolist()) <= set(model.classes_.tolist())
    p = model.predict_proba(X)
    np.testing.assert_allclose(p.sum(axis=1), 1)
    np.testing.assert_array_equal(model.predict(X) == labels[1], p[:, 1] > 0.5)
    np.testing.assert_allclose(p[:, 1], 1 / (1 + np.exp(-model.decision_function(X))))
    assert model.score(X, y) > 0.5


def test_pipeline_cross_validation_and_search(drawn):
    frame, y = table_of(drawn, pd.DataFrame)
    columns = make_column_transformer(
        (StandardScaler(), ["x0", "x1"]), remainder="passthrough", verbose_feature_names_out=False
    ).set_output(transform="pandas")
    model = make_pipeline(columns, HierarchicalRegressor(client="client", cluster="cluster"))
    X = frame.drop(columns="y")
    folds = KFold(3, shuffle=True, random_state=0)
    assert cross_validate(model, X, y, cv=folds)["test_score"].mean() > 0.7
    search = GridSearchCV(model, {"hierarchicalregressor__gamma": [0.1, 1.0, 1e4]}, cv=folds).fit(X, y)
    assert search.best_params_["hierarchicalregressor__gamma"] in (0.1, 1.0)
    baselines = GridSearchCV(model, {"hierarchicalregressor__baseline": [None, "single-model", "locally-trained"]}, cv=folds)
    assert baselines.fit(X, y).best_params_["hierarchicalregressor__baseline"] is None


def test_arrays_of_ids_are_routed_through_cross_validation(drawn):
    with sklearn.config_context(enable_metadata_routing=True):
        model = HierarchicalRegressor().set_fit_request(client=True, cluster=True).set_score_request(client=True, cluster=True)
        folds = KFold(3, shuffle=True, random_state=0)
        ids = {"client": drawn.client, "cluster": drawn.cluster}
        assert cross_validate(model, drawn.X, drawn.y, cv=folds, params=ids)["test_score"].mean() > 0.7


def test_weights_and_offset_as_columns_or_arrays(drawn):
    rng = np.random.default_rng(0)
    counts, exposure, weight = (
        rng.poisson(4, len(drawn.y)),
        rng.uniform(0.5, 2, len(drawn.y)),
        rng.uniform(0.5, 2, len(drawn.y)),
    )
    frame = drawn.frame().with_columns(counts=counts, weight=weight, log_exposure=np.log(exposure))
    named = HierarchicalPoissonRegressor(
        client="client", cluster="cluster", weights="weight", offset="log_exposure", formula="counts ~ x0 + x1"
    ).fit(frame)
    passed = HierarchicalPoissonRegressor().fit(
        drawn.X, counts, client=drawn.client, cluster=drawn.cluster, sample_weight=weight, offset=np.log(exposure)
    )
    np.testing.assert_allclose(named.coef_, passed.coef_, atol=1e-9)
    np.testing.assert_allclose(
        named.predict(frame), passed.predict(drawn.X, client=drawn.client, offset=np.log(exposure)), rtol=1e-8
    )


def test_integer_weights_are_repeated_rows(drawn):
    weight = np.random.default_rng(0).integers(0, 3, len(drawn.y))
    once = HierarchicalRegressor(reduction="mean", gamma=1.0).fit(
        drawn.X, drawn.y, client=drawn.client, cluster=drawn.cluster, sample_weight=weight
    )
    r = np.repeat(np.arange(len(weight)), weight)
    kept = np.isin(once.clients_, drawn.client[r])
    repeated = HierarchicalRegressor(reduction="mean", gamma=1.0).fit(
        drawn.X[r], drawn.y[r], client=drawn.client[r], cluster=drawn.cluster[r]
    )
    assert kept.all()
    np.testing.assert_allclose(once.coef_, repeated.coef_, atol=1e-9)


def test_prints_as_a_summary_and_represents_as_code(homes):
    model = HierarchicalRegressor(client="county", cluster="state", formula="log_radon ~ floor", gamma=1.0)
    assert str(model) == repr(model)
    model.fit(homes)
    assert repr(model).startswith("HierarchicalRegressor(client='county'")
    text = str(model)
    for part in (
        "log_radon ~ floor",
        "11,929 rows of 470 clients (county) in 9 clusters (state)",
        "gamma 1",
        "gradient norm",
        "floor",
    ):
        assert part in text


def test_quiet_when_all_is_well(drawn):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for estimator, y in ((HierarchicalRegressor, drawn.y), (HierarchicalClassifier, drawn.y > 0)):
            estimator().fit(drawn.X, y, client=drawn.client, cluster=drawn.cluster)


def test_tidy_frames(homes):
    model = HierarchicalRegressor(client="county", cluster="state", formula="log_radon ~ floor").fit(homes)
    clients = model.coef_frame()
    assert clients.columns == ["cluster", "client", "rows", "term", "estimate", "std_error", "lower", "upper"]
    assert len(clients) == 940
    one = clients.filter(client="Apache, AZ", term="floor")["estimate"].item()
    assert one == model.coef_[model.clients_.tolist().index("Apache, AZ"), 1]
    assert model.coef_frame("global")["estimate"].to_list() == model.global_coef_.tolist()


@pytest.mark.parametrize("solver", ["l2gd", "al2sgd_plus", "one_coin"])
def test_estimators_take_the_randomised_solvers(drawn, solver, tmp_path):
    frame, _ = table_of(drawn, pd.DataFrame)
    settings = {"client": "client", "cluster": "cluster", "formula": "y ~ x0 + x1", "gamma": 3.0}
    exact = HierarchicalRegressor(**settings).fit(frame)
    options = None if solver == "al2sgd_plus" else {"steps": "switching"}
    model = HierarchicalRegressor(**settings, solver=solver, options=options, tol=1e-4, random_state=3).fit(frame)
    assert model.convergence_.solver == solver
    assert model.convergence_.converged
    np.testing.assert_allclose(model.coef_, exact.coef_, atol=0.1)
    assert isinstance(model.history_, pd.DataFrame)
    assert model.ledger_.exchanges == model.convergence_.exchanges > 1
    again = load(model.save(tmp_path / "model"))
    assert (again.options, again.solver, again.history_) == (options, solver, None)
    np.testing.assert_array_equal(again.coef_, model.coef_)
    np.testing.assert_array_equal(clone(model).fit(frame).coef_, model.coef_)


def test_a_checkpoint_is_not_part_of_a_saved_model(drawn, tmp_path):
    frame, _ = table_of(drawn)
    path = tmp_path / "run.npz"
    model = HierarchicalRegressor(
        client="client", formula="y ~ x0", solver="al2sgd_plus", tol=1e-3, options={"checkpoint": path, "p0": np.float64(0.2)}
    ).fit(frame)
    assert path.exists()
    assert load(model.save(tmp_path / "model")).options == {"p0": 0.2}


def test_a_ridge_pulls_to_zero(drawn):
    plain, pulled = (
        HierarchicalRegressor(ridge=ridge, gamma=1.0).fit(drawn.X, drawn.y, client=drawn.client, cluster=drawn.cluster)
        for ridge in (0.0, 1e6)
    )
    assert np.abs(pulled.coef_).max() < 1e-2 * np.abs(plain.coef_).max()
    with pytest.raises(ValueError, match=r"The 'ridge' parameter must lie in \[0, inf\)\. Got -1 instead"):
        HierarchicalRegressor(ridge=-1).fit(drawn.X, drawn.y, client=drawn.client)


@pytest.mark.parametrize("settings", [{}, {"gamma": 1.0}, {"baseline": "single-model"}])
def test_looking_at_an_estimator_raises_nothing(settings):
    """Tab completion and hasattr ask for every attribute, of fitted estimators and others."""
    homes = load_radon()
    model = HierarchicalRegressor(formula="log_radon ~ floor", client="county", cluster="state", tests=False, **settings)
    for fitted in (False, True):
        if fitted:
            model.fit(homes)
        learned = fitted and not settings
        assert hasattr(model, "components_") == learned
        assert hasattr(model, "coef_") == fitted
        for name in dir(model):
            getattr(model, name, None)  # raises nothing but AttributeError
        if not learned:
            why = "need variances that were learned" if fitted else "not fitted yet"
            with pytest.raises(AttributeError, match=why):
                model.components_  # noqa: B018


def test_the_constructor_has_the_defaults_of_the_settings():
    shown = inspect.signature(HierarchicalRegressor).parameters
    declared_defaults = {name: declared()[name].default for name in SETTINGS}
    beside = {"loss": None, "unseen": "parent", "random_state": None, "threads": None}
    assert {name: parameter.default for name, parameter in shown.items()} == declared_defaults | beside


@pytest.mark.parametrize("family", ["gaussian", "bernoulli", "poisson", "gamma"])
def test_fit_by_a_specification_is_the_estimators_fit(drawn, family, tmp_path):
    frame, _ = table_of(drawn)
    y = {"bernoulli": pl.col("y") > 0, "gaussian": pl.col("y")}.get(family, pl.col("y").abs().round().clip(1, 9))
    frame = frame.with_columns(y)
    settings = {"client": "client", "cluster": "cluster", "formula": "y ~ x0", "gamma": 2.0}
    fitted = covey.fit(frame, Spec(family=family, **settings))
    again = type(fitted)(**settings).fit(frame)
    assert fitted._family == family
    np.testing.assert_array_equal(fitted.coef_, again.coef_)
    assert fitted.get_params() == again.get_params() | {"random_state": 0}
    frame.write_parquet(tmp_path / "rows.parquet")
    np.testing.assert_array_equal(covey.fit(tmp_path / "rows.parquet", fitted.model_.spec).coef_, fitted.coef_)
    assert type(load(fitted.save(tmp_path / "model"))) is type(fitted)


def test_fit_by_a_formula_reads_ids_with_leading_zeros_as_text(tmp_path):
    rows = "zip,x,y\n" + "".join(f"0{zip_code},{x},{zip_code + x * x}\n" for zip_code in range(1000, 1006) for x in range(4))
    (tmp_path / "rows.csv").write_text(rows)
    model = covey.fit(tmp_path / "rows.csv", "y ~ x + (1 | zip)")
    assert model.clients_[0] == "01000"
    with pytest.raises(CoveyError, match=r"requires y to be passed.*formula"):
        covey.fit(tmp_path / "rows.csv", "x + (1 | zip)")


def test_fit_respects_ids_that_are_nested():
    """Only a Spec can say this; client 'a' of one cluster is then another one than client 'a' of another."""
    rng = np.random.default_rng(0)
    frame = pl.DataFrame({"who": ["a", "a", "b", "b"] * 6, "where": ["p", "q"] * 12, "x": rng.normal(size=24)})
    frame = frame.with_columns(y=rng.normal(size=24))
    spec = Spec(formula="y ~ x", client="who", cluster="where", gamma=1.0)
    assert len(covey.fit(frame, replace(spec, nested=True)).clients_) == 4


def test_random_state_is_scikit_learns(drawn):
    settings = {"gamma": 1.0, "solver": "al2sgd_plus", "max_iter": 30, "tol": 1e-3}

    def drawn_by(random_state):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", covey.ConvergenceWarning)
            model = HierarchicalRegressor(**settings, random_state=random_state)
            return model.fit(drawn.X, drawn.y, client=drawn.client, cluster=drawn.cluster).coef_

    np.testing.assert_array_equal(drawn_by(3), drawn_by(3))
    np.testing.assert_array_equal(drawn_by(np.random.RandomState(3)), drawn_by(np.random.RandomState(3)))
    assert not np.array_equal(drawn_by(None), drawn_by(None))


def test_an_exact_fit_draws_no_random_numbers(drawn):
    before = np.random.get_state()[1].copy()  # noqa: NPY002 - the generator that None stands for
    models = [HierarchicalRegressor(gamma=1.0).fit(drawn.X, drawn.y, client=drawn.client).model_ for _ in range(2)]
    assert models[0].spec == models[1].spec
    np.testing.assert_array_equal(np.random.get_state()[1], before)  # noqa: NPY002


def test_the_formula_names_the_response_of_scores_too(drawn):
    frame, y = table_of(drawn)
    model = HierarchicalRegressor(client="client", cluster="cluster", formula="y ~ x0 + x1").fit(frame)
    assert model.score(frame) == model.score(frame, y) > 0.7
    assert cross_val_score(model, frame, cv=KFold(3, shuffle=True, random_state=0)).mean() > 0.7
    with pytest.raises(CoveyError, match="pass y"):
        HierarchicalRegressor(gamma=1.0).fit(drawn.X, y, client=drawn.client).score(drawn.X, client=drawn.client)


@pytest.mark.parametrize(
    ("estimator", "response", "values"),
    [
        (HierarchicalClassifier, "answer", pl.when(pl.col("y") > 0).then(pl.lit("yes")).otherwise(pl.lit("no"))),
        (HierarchicalPoissonRegressor, "count", pl.col("y").exp().clip(0, 20).round()),
        (HierarchicalGammaRegressor, "exp(y)", pl.col("y")),
    ],
)
def test_every_family_is_scored_without_y(drawn, estimator, response, values):
    frame, _ = table_of(drawn)
    frame = frame.with_columns(values.alias(response if response.isalpha() else "y"))
    model = estimator(formula=f"{response} ~ x0 + x1 + (1 | cluster/client)", tests=False).fit(frame)
    y = frame[response].to_numpy() if response.isalpha() else np.exp(frame["y"].to_numpy())
    assert model.score(frame) == model.score(frame, y) > 0.3
    scores = cross_val_score(model, frame, cv=3)
    np.testing.assert_allclose(scores, [clone(model).fit(frame[a]).score(frame[b]) for a, b in KFold(3).split(frame)])
