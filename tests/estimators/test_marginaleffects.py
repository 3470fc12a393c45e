"""The Python package marginaleffects on a model of covey, beside covey's means, contrasts and robust errors."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

import covey
from covey import CoveyError, HierarchicalClassifier
from tests.r_tables import sleepstudy

try:
    import marginaleffects
except ImportError:
    marginaleffects = None
needs_package = pytest.mark.skipif(
    marginaleffects is None or pl.__version__ >= "2", reason="needs marginaleffects, whose version 0.6 needs polars below 2"
)


@pytest.fixture(scope="module")
def model():
    return covey.fit(sleepstudy(), "Reaction ~ Days * half + C(z) + (Days | Subject)")


@needs_package
def test_comparisons_are_contrasts(model):
    """The difference between halves at day 3, and of the categories of a column of whole numbers."""
    grid = sleepstudy().with_columns(Days=pl.lit(3))
    theirs = marginaleffects.avg_comparisons(model.marginaleffects(sleepstudy()), variables="half", newdata=grid)
    ours = model.contrast("half", at={"Days": 3}, method="reference")
    np.testing.assert_allclose(theirs["estimate"][0], ours["estimate"][0], rtol=1e-9)
    np.testing.assert_allclose(theirs["std_error"][0], ours["std_error"][0], rtol=1e-5)
    theirs = marginaleffects.avg_comparisons(model.marginaleffects(sleepstudy()), variables="z").sort("contrast")
    ours = model.contrast("z", method="reference").sort("contrast")
    np.testing.assert_allclose(theirs["estimate"], ours["estimate"], rtol=1e-8)
    np.testing.assert_allclose(theirs["std_error"], ours["std_error"], rtol=1e-5)


@needs_package
def test_slopes_predictions_and_robust_errors(model):
    adapter, at = model.marginaleffects(sleepstudy()), list(model.terms_).index("Days")
    early = sleepstudy().filter(pl.col("half") == "early")
    for vcov, error in ((True, np.sqrt(model.cov_[at, at])), ("CR2", model.robust("CR2")["std_error"][at])):
        slope = marginaleffects.avg_slopes(adapter, variables="Days", newdata=early, vcov=vcov, eps_vcov=1e-2)
        np.testing.assert_allclose(slope["estimate"][0], model.global_coef_[at], rtol=1e-6)
        np.testing.assert_allclose(slope["std_error"][0], error, rtol=1e-4)
    predicted = marginaleffects.predictions(adapter)["estimate"]
    np.testing.assert_allclose(predicted, model.predict(sleepstudy(), level="global", expected=False), rtol=1e-12)


@needs_package
def test_a_classifier_predicts_probabilities_or_log_odds():
    rng = np.random.default_rng(0)
    client, x = np.repeat(np.arange(30), 20), rng.normal(size=600)
    y = rng.random(600) < 1 / (1 + np.exp(-(x + rng.normal(size=30)[client])))
    rows = pl.DataFrame({"y": y.astype(int), "x": x, "client": client})
    model = HierarchicalClassifier(formula="y ~ x + (1 | client)").fit(rows)
    shares = marginaleffects.predictions(model.marginaleffects(rows))["estimate"].to_numpy()
    np.testing.assert_allclose(shares, model.predict_proba(rows, level="global", expected=False)[:, 1], rtol=1e-12)
    log_odds = marginaleffects.predictions(model.marginaleffects(rows, scale="link"))["estimate"].to_numpy()
    np.testing.assert_allclose(log_odds, np.log(shares / (1 - shares)), rtol=1e-9)


@needs_package
def test_a_missing_column_is_named(model):
    with pytest.raises(CoveyError, match="half"):
        model.marginaleffects(sleepstudy().drop("half"))


@pytest.mark.skipif(marginaleffects is not None, reason="marginaleffects is installed")
def test_without_the_package_the_method_says_how_to_install_it(model):
    with pytest.raises(CoveyError, match="pip install marginaleffects"):
        model.marginaleffects(sleepstudy())


@pytest.mark.skipif(marginaleffects is None or pl.__version__ < "2", reason="needs marginaleffects beside polars 2")
def test_a_version_that_does_not_fit_polars_is_said(model):
    with pytest.raises(CoveyError, match="polars below 2"):
        model.marginaleffects(sleepstudy())
