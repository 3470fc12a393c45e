"""Rows without groups: a plain regression, with the standard errors, intervals and likelihood of R."""

from __future__ import annotations

import warnings

import numpy as np
import polars as pl
import pytest

import covey
from covey import (
    HierarchicalClassifier,
    HierarchicalGammaRegressor,
    HierarchicalPoissonRegressor,
    HierarchicalRegressor,
    load,
)
from covey.errors import SolverError

X = [0.3, -1.2, 0.8, 1.9, -0.4, 0.1, 2.2, -1.7, 0.6, -0.9, 1.4, -0.2]
Y = np.array([1.1, -0.7, 2.0, 3.9, 0.2, 1.3, 3.6, -2.1, 1.9, -0.4, 2.2, 0.5])
TABLE = pl.DataFrame(
    {
        "x": X,
        "y": Y,
        "weight": [1.0, 2.0, 1.0, 0.5, 3.0, 1.0, 1.0, 2.0, 1.0, 1.0, 0.5, 4.0],
        "count": [2, 0, 3, 9, 1, 1, 12, 0, 2, 1, 4, 1],
        "yes": [1, 0, 1, 1, 0, 0, 1, 0, 0, 1, 1, 0],
        "size": np.exp(Y / 2),
    }
)
NEW = pl.DataFrame({"x": [0.5]})

# R 4.2.2: estimates, standard errors, and log-likelihood, AIC and BIC, of lm(y ~ x), lm(y ~ x, weights = weight),
# glm(count ~ x, poisson) and glm(yes ~ x, binomial); and of glmmTMB(size ~ x, family = Gamma("log")), glmmTMB 1.1.5. For
# the last, AIC and BIC follow from the log-likelihood with 3 parameters.
REFERENCES = [
    (
        HierarchicalRegressor, {"formula": "y ~ x"},
        [0.781748284, 1.420351927], [0.0979393014, 0.0826509162], (-2.706991318, 11.41398264, 12.86870259),
    ),
    (
        HierarchicalRegressor, {"formula": "y ~ x", "weights": "weight"},
        [0.775896763, 1.447915324], [0.0794434003, 0.0776624817], (-1.47365253429, 8.947305069, 10.40202502),
    ),
    (
        HierarchicalPoissonRegressor, {"formula": "count ~ x"},
        [0.156107329, 1.050862317], [0.321103556, 0.190378678], (-14.9855315275, 33.97106305, 34.94087635),
    ),
    (
        HierarchicalClassifier, {"formula": "yes ~ x"},
        [-0.340235288, 1.534192734], [0.753845096, 0.887622425], (-5.67156192303, 15.34312385, 16.31293715),
    ),
    (
        HierarchicalGammaRegressor, {"formula": "size ~ x"},
        [0.40135762, 0.71311458], [0.044089540, 0.038192494], (-1.004034295, 8.00806859, 9.46278854),
    ),
]  # fmt: skip


def fitted(estimator, settings):
    with pytest.warns(UserWarning, match="plain regression"):
        return estimator(**settings).fit(TABLE)


@pytest.mark.parametrize(("estimator", "settings", "estimates", "errors", "criteria"), REFERENCES)
def test_without_groups_the_numbers_are_those_of_lm_and_glm(estimator, settings, estimates, errors, criteria, tmp_path):
    model = fitted(estimator, settings)
    frame, found = model.coef_frame("global"), model.components_
    np.testing.assert_allclose(frame["estimate"], estimates, rtol=1e-6)
    np.testing.assert_allclose(frame["std_error"], errors, rtol=1e-6)
    np.testing.assert_allclose([found.log_likelihood, found.aic, found.bic], criteria, rtol=1e-7)
    for level in ("client", "cluster"):  # there is one model
        np.testing.assert_allclose(model.coef_frame(level)["upper"], frame["upper"], rtol=1e-12)
    again = load(model.save(tmp_path / "model"))
    np.testing.assert_array_equal(again.predict_interval(NEW), model.predict_interval(NEW))
    assert str(again) == str(model)


def test_intervals_of_a_linear_model_are_those_of_lm():
    """confint(m), and predict(m, new, interval = "confidence") and "prediction"."""
    model = fitted(HierarchicalRegressor, {"formula": "y ~ x"})
    frame = model.coef_frame("global")
    np.testing.assert_allclose(frame["lower"], [0.563525922, 1.236194210], rtol=1e-7)
    np.testing.assert_allclose(frame["upper"], [0.999970647, 1.604509645], rtol=1e-7)
    np.testing.assert_allclose(model.predict_interval(NEW), [[1.2730553, 1.7107932]], rtol=1e-7)
    np.testing.assert_allclose(model.predict_interval(NEW, noise=True), [[0.720181089, 2.26366741]], rtol=1e-7)
    assert model.components_.residual**0.5 == pytest.approx(0.332141185)
    np.testing.assert_array_equal(model.predict(NEW), model.predict(NEW, level="global"))


@pytest.mark.parametrize(
    ("estimator", "formula", "low", "high"),
    [
        (HierarchicalPoissonRegressor, "count ~ x", [-0.473244075, 0.677726965], [0.785458733, 1.423997670]),
        (HierarchicalClassifier, "yes ~ x", [-1.81774453, -0.20551525], [1.13727395, 3.27390072]),
    ],
)
def test_intervals_of_counts_and_classes_are_walds(estimator, formula, low, high):
    """confint.default(m)."""
    frame = fitted(estimator, {"formula": formula}).coef_frame("global")
    np.testing.assert_allclose(frame["lower"], low, rtol=1e-6)
    np.testing.assert_allclose(frame["upper"], high, rtol=1e-6)


@pytest.mark.parametrize(("estimator", "settings"), [reference[:2] for reference in REFERENCES])
def test_the_summary_says_that_there_are_no_groups(estimator, settings):
    text = str(fitted(estimator, settings))
    assert "regression without groups" in text
    assert "no groups: a plain regression" in text
    assert all(word not in text for word in ("REML", "penalt", "between", "share of variance", "Hierarchical"))
    assert ("t with 10 degrees" in text) == (estimator in (HierarchicalRegressor, HierarchicalGammaRegressor))


def test_an_array_and_a_specification_give_the_same():
    with pytest.warns(UserWarning, match="No clients were named"):
        model = HierarchicalRegressor().fit(np.array(X)[:, None], Y)
    np.testing.assert_allclose(model.coef_frame("global")["std_error"], REFERENCES[0][3], rtol=1e-6)
    np.testing.assert_allclose(covey.fit(TABLE, "y ~ x").coef_frame("global")["std_error"], REFERENCES[0][3], rtol=1e-6)


def test_standardised_terms_have_the_same_likelihood():
    plain, scaled = (fitted(HierarchicalRegressor, {"formula": "y ~ x", "standardize": how}) for how in (False, True))
    assert scaled.components_.log_likelihood == pytest.approx(plain.components_.log_likelihood, rel=1e-12)
    t = [model.coef_frame("global")["estimate"][1] / model.coef_frame("global")["std_error"][1] for model in (plain, scaled)]
    assert t[0] == pytest.approx(t[1])


@pytest.mark.parametrize(
    ("estimator", "table"),
    [
        (HierarchicalRegressor, TABLE[:2]),
        (HierarchicalRegressor, TABLE.with_columns(y=pl.lit(0.0))),
        (HierarchicalRegressor, TABLE.with_columns(x=pl.lit(2.0))),
        (HierarchicalGammaRegressor, TABLE.with_columns(y=pl.col("x").exp())),
    ],
)
def test_rows_that_determine_no_standard_errors_still_have_a_fit(estimator, table):
    """As many terms as rows, a perfect fit, a term that is a multiple of another."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = estimator(formula="y ~ x").fit(table)
    assert np.isfinite(model.predict(table)).all()
    assert not hasattr(model, "components_")
    assert "plain regression" in str(model)
    with pytest.raises(SolverError, match="determine all coefficients"):
        model.predict_interval(table)
