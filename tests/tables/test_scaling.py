"""Standardised terms: exact means and deviations, the same fit as scaling by hand, and predictions for unscaled rows."""

from __future__ import annotations

import json
import math
from fractions import Fraction

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.base import clone
from sklearn.model_selection import cross_validate
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer

from covey import HierarchicalClassifier, HierarchicalPoissonRegressor, HierarchicalRegressor, load, plan
from covey.datasets import simulate
from covey.errors import CoveyError, DataError, ModelError
from covey.tables.design import Columns
from covey.tables.scaling import Scale, Scaled, design_from_json, moments
from tests.conftest import seeds

ESTIMATORS = {
    "gaussian": HierarchicalRegressor, "bernoulli": HierarchicalClassifier, "poisson": HierarchicalPoissonRegressor
}  # fmt: skip
IDS = {"client": "client", "cluster": "cluster"}


def table(family="gaussian"):
    """Two terms in very different units."""
    drawn = simulate(family, clusters=4, clients=6, rows=12, d=2, cluster_sd=0.3, client_sd=0.4, seed=5)
    zone = pl.Series("zone", np.array(["a", "b", "c"])[np.arange(len(drawn.y)) % 3])
    return drawn.frame().with_columns(zone, x0=1e6 + 3e4 * pl.col("x0"), x1=1e-5 * pl.col("x1"))


def by_hand(frame, *names):
    return frame.with_columns(((pl.col(name) - pl.col(name).mean()) / pl.col(name).std(ddof=0)) for name in names)


# Mean and standard deviation


def reference(column):
    """Mean and deviation by exact fractions, rounded once at the end; the root is by Newton's iteration."""
    values = [Fraction(float(value)) for value in column]
    mean = sum(values) / len(values)
    variance = sum((value - mean) ** 2 for value in values) / len(values)
    root = Fraction(math.sqrt(variance))
    for _ in range(4):
        root = ((root + variance / root) / 2).limit_denominator(10**60) if root else root
    return float(mean), float(root)


@given(seed=seeds, size=st.integers(-80, 130), shift=st.integers(-10, 45))
def test_mean_and_deviation_are_correctly_rounded_at_any_scale(seed, size, shift):
    """The spread is ``2^size``; the mean is up to ``2^45`` times as large."""
    draws = np.random.default_rng(seed).normal(size=20)
    X = np.column_stack([np.ones(20), 2.0**size * (draws + 2.0 ** min(shift, 130 - size))])
    scale = Scale.of(moments(X), 20, ("Intercept", "x"))
    assert (scale.mean[0], scale.sd[0]) == (0.0, 1.0)
    assert (scale.mean[1], scale.sd[1]) == reference(X[:, 1])


@given(seed=seeds, parts=st.integers(1, 6))
def test_any_assignment_of_rows_gives_the_same_bits(seed, parts):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(40, 3)) * 10.0 ** rng.integers(-15, 15, size=3) + rng.normal(size=3)
    where = rng.integers(parts, size=40)
    added = moments(X[where == 0])
    for part in range(1, parts):
        added = added + moments(X[where == part])
    one, other = (Scale.of(found, 40, ("a", "b", "c")) for found in (moments(X), added))
    assert one.mean.tobytes() == other.mean.tobytes()
    assert one.sd.tobytes() == other.sd.tobytes()


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, -1 / 3, 1e-17, 2**-30 / 3, 1e9 + 0.1, 1.7e18, -1e23])
@pytest.mark.parametrize("rows", [1, 7, 70_000])
def test_equal_values_are_left_as_they_are(value, rows):
    X = np.column_stack([np.full(rows, value), np.arange(rows, dtype=float)])
    scale = Scale.of(moments(X), rows, ("same", "other"))
    assert (scale.mean[0], scale.sd[0]) == (0.0, 1.0)


def test_values_a_few_digits_apart_are_not_equal():
    X = np.column_stack([np.ones(2), [1.0, 1.0 + 2e-13]])
    scale = Scale.of(moments(X), 2, ("Intercept", "x"))
    assert (scale.mean[1], scale.sd[1]) == reference(X[:, 1])


@pytest.mark.parametrize(("size", "word"), [(1e-37, "small"), (1e-60, "small"), (1e43, "large"), (1e200, "large")])
def test_values_too_large_or_too_small_are_refused_by_name(size, word):
    X = np.column_stack([np.ones(3), size * np.array([1.0, 2.0, 4.0])])
    with pytest.raises(DataError, match=rf"The values of term 'x' are too {word} to standardise; put its column in a"):
        Scale.of(moments(X), 3, ("Intercept", "x"))


def test_without_a_constant_term_nothing_is_centred():
    """Otherwise a line through zero would become a line through the mean."""
    X = np.array([[1.0, 5.0, 0.0], [3.0, 9.0, 0.0]])
    scale = Scale.of(moments(X), 2, ("a", "b", "empty"))
    assert (scale.mean.tolist(), scale.sd.tolist()) == ([0.0, 0.0, 0.0], [1.0, 2.0, 1.0])


# Fits

FITS = [{"gamma": 2.0, "lam": 1.5}, {"gamma": 1.0, "ridge": 0.2}, {}, {"covariance": "isotropic"}]


@pytest.mark.parametrize(
    "settings", [{"gamma": 2.0, "lam": 1.5}, {}, {"covariance": "isotropic"}, {"gamma": 1.0, "ridge": 0.2}]
)
@pytest.mark.parametrize("family", ESTIMATORS)
def test_the_fit_is_that_of_a_table_standardised_by_hand(family, settings):
    if family != "gaussian" and "gamma" not in settings:
        settings = {**settings, "vary": ["Intercept"]}
    frame, given_ = table(family), {**IDS, "formula": "y ~ x0 + x1", "tol": 1e-11, **settings}
    ours = ESTIMATORS[family](standardize=True, **given_).fit(frame)
    hand = by_hand(frame, "x0", "x1")
    theirs = ESTIMATORS[family](**given_).fit(hand)
    # numpy's own mean and deviation are off by 1e-14 or so of x0's distance from zero.
    atol = 1e-12 if settings.get("gamma") else 1e-7
    for level in ("coef_", "cluster_coef_", "global_coef_"):
        np.testing.assert_allclose(getattr(ours, level), getattr(theirs, level), rtol=0, atol=atol)
    np.testing.assert_allclose(ours.predict(frame), theirs.predict(hand), rtol=atol, atol=atol)
    assert not hasattr(ours, "predict_proba") or np.allclose(ours.predict_proba(frame), theirs.predict_proba(hand), atol=atol)


def test_unpenalised_it_is_the_same_model_in_other_units():
    frame = table()
    given_ = {**IDS, "formula": "y ~ x0 + x1", "baseline": "single-model"}
    ours, plain = (HierarchicalRegressor(standardize=each, **given_).fit(frame) for each in (True, False))
    np.testing.assert_allclose(ours.predict(frame), plain.predict(frame), atol=1e-9)
    sds = [frame[name].std(ddof=0) for name in ("x0", "x1")]
    np.testing.assert_allclose(ours.global_coef_[1:], plain.global_coef_[1:] * sds, rtol=1e-9)


def test_a_penalty_no_longer_depends_on_units():
    frame = table()
    other = frame.with_columns(x0=pl.col("x0") * 1e-6 + 7.0, x1=pl.col("x1") * 1e9)
    one, two = (
        HierarchicalRegressor(**IDS, formula="y ~ x0 + x1", gamma=3.0, standardize=True).fit(each) for each in (frame, other)
    )
    np.testing.assert_allclose(one.coef_, two.coef_, atol=1e-9)
    np.testing.assert_allclose(one.predict(frame), two.predict(other), atol=1e-9)


def test_arrays_names_and_formulas_give_the_same_fit():
    frame = table()
    X, ids = frame[["x0", "x1"]].to_numpy(), {name: frame[name].to_numpy() for name in IDS}
    by_formula = HierarchicalRegressor(**IDS, formula="y ~ x0 + x1", gamma=1.0, standardize=True).fit(frame)
    by_name = HierarchicalRegressor(**IDS, gamma=1.0, standardize=True).fit(frame[["x0", "x1", *IDS]], frame["y"])
    by_array = HierarchicalRegressor(gamma=1.0, standardize=True).fit(X, frame["y"], **ids)
    for model in (by_name, by_array):
        np.testing.assert_array_equal(model.coef_, by_formula.coef_)
    np.testing.assert_array_equal(by_array.predict(X, client=ids["client"]), by_formula.predict(frame))
    assert isinstance(by_array.model_.design, Scaled)


def test_bars_and_intervals_work_with_standardised_terms():
    frame = table()
    bars = HierarchicalRegressor(formula="y ~ x0 + x1 + (1 + x0 || cluster/client)", standardize=True).fit(frame)
    hand = by_hand(frame, "x0", "x1")
    theirs = HierarchicalRegressor(formula="y ~ x0 + x1 + (1 + x0 || cluster/client)").fit(hand)
    assert bars.model_.learned.components.client.terms == ("Intercept", "x0")
    np.testing.assert_allclose(bars.predict_interval(frame), theirs.predict_interval(hand), atol=1e-6)


def test_coded_categories_are_standardised_too():
    frame = table()
    model = HierarchicalRegressor(**IDS, formula="y ~ zone", gamma=1.0, standardize=True).fit(frame)
    dummies = [frame["zone"].eq(zone).cast(pl.Float64).to_numpy() for zone in "bc"]
    np.testing.assert_allclose(model.model_.design.mean, [0.0, *(each.mean() for each in dummies)], rtol=1e-15)
    np.testing.assert_allclose(model.model_.design.sd, [1.0, *(each.std() for each in dummies)], rtol=1e-15)


def test_rows_added_later_use_the_scale_of_the_fit():
    frame = table()
    late = pl.col("client") == frame["client"].max()
    model = HierarchicalRegressor(**IDS, formula="y ~ x0 + x1", standardize=True, tests=False).fit(frame.filter(~late))
    grown = model.add_clients(frame.filter(late))
    assert grown.model_.design == model.model_.design
    np.testing.assert_allclose(grown.predict(frame.filter(~late)), model.predict(frame.filter(~late)), atol=0.2)
    residual = frame.filter(late)["y"].to_numpy() - grown.predict(frame.filter(late))
    assert np.abs(residual).mean() < np.abs(frame.filter(late)["y"].to_numpy()).mean()


# Models and faces


@pytest.mark.parametrize("rhs", ["x0 * zone", "0 + x0", "x1"])
def test_a_saved_model_predicts_the_same_bits(rhs, tmp_path):
    frame = table()
    model = HierarchicalRegressor(**IDS, standardize=True, formula=f"y ~ {rhs}").fit(frame)
    again = load(model.save(tmp_path / "model"))
    np.testing.assert_array_equal(again.predict(frame), model.predict(frame))
    assert again.get_params() == model.get_params() | {"random_state": model.model_.spec.seed}
    assert str(again) == str(model)
    assert "coefficients are per standard deviation" in str(again)
    assert json.loads((tmp_path / "model" / "model.json").read_text())["format"] == 3


def test_arrays_predict_the_same_bits_after_loading(tmp_path):
    drawn = simulate(clusters=2, clients=3, rows=9, d=2, seed=0)
    model = HierarchicalRegressor(gamma=1.0, standardize=True).fit(drawn.X, drawn.y, client=drawn.client)
    again = load(model.save(tmp_path / "model"))
    np.testing.assert_array_equal(again.predict(drawn.X, client=drawn.client), model.predict(drawn.X, client=drawn.client))


def test_a_model_of_an_older_version_is_read_as_not_standardised(tmp_path):
    frame = table()
    model = HierarchicalRegressor(**IDS, formula="y ~ x0", gamma=1.0).fit(frame)
    file = model.save(tmp_path / "model") / "model.json"
    document = json.loads(file.read_text())
    del document["spec"]["standardize"], document["spec"]["alpha"], document["checksum"]
    file.write_text(json.dumps(document))
    again = load(tmp_path / "model")
    assert again.standardize is False
    np.testing.assert_array_equal(again.predict(frame), model.predict(frame))


@pytest.mark.parametrize(
    "change", [{"mean": [0.0]}, {"sd": [1.0, 0.0]}, {"sd": [1.0, float("nan")]}, {"mean": [0.0, float("inf")]}]
)
def test_a_damaged_scale_is_refused(change):
    document = Scaled(Columns(("x",)), (0.0, 1.0), (1.0, 2.0)).to_json()
    assert design_from_json(json.loads(json.dumps(document))) == Scaled(Columns(("x",)), (0.0, 1.0), (1.0, 2.0))
    with pytest.raises(ModelError, match="means and standard deviations do not fit its terms"):
        design_from_json({**document, **change})


def test_clones_pipelines_and_cross_validation():
    frame = table()
    model = HierarchicalRegressor(**IDS, formula="y ~ x0 + x1", gamma=1.0, standardize=True)
    assert clone(model).get_params()["standardize"] is True
    piped = make_pipeline(FunctionTransformer(), clone(model)).fit(frame, frame["y"])
    np.testing.assert_array_equal(piped.predict(frame), model.fit(frame).predict(frame))
    scores = cross_validate(model, frame, frame["y"], cv=3)["test_score"]
    assert np.isfinite(scores).all()


def test_a_setting_that_is_no_boolean_is_refused():
    with pytest.raises(CoveyError, match=r"'standardize' parameter must be True or False\. Got 'yes'"):
        HierarchicalRegressor(**IDS, formula="y ~ x0", standardize="yes").fit(table())


def test_plan_uses_the_standardised_problem():
    frame, settings = table(), {**IDS, "formula": "y ~ x0 + x1", "gamma": 1.0}
    ours = plan(frame, standardize=True, **settings)
    theirs = plan(by_hand(frame, "x0", "x1"), **settings)
    np.testing.assert_allclose(ours.known.L, theirs.known.L, rtol=1e-10)
    assert plan(frame, **settings).known.L > 1e6 * ours.known.L
