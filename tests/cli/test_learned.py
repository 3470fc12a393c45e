"""The command line with learned penalties: bars, settings, JSON, one-line errors."""

from __future__ import annotations

import json
from functools import partial

import numpy as np
import polars as pl
import pytest

from covey import HierarchicalPoissonRegressor, HierarchicalRegressor
from covey import fit as fit_by_formula
from covey.datasets import simulate
from covey.fitting.selection import search

from .shell import inside

DRAWN = simulate(clusters=6, clients=5, rows=10, d=2, wbar=0.5, intercept=True, cluster_sd=0.8, client_sd=0.5, seed=3)
FRAME = DRAWN.frame().drop("x0").rename({"x1": "x", "client": "h", "cluster": "g"})
BARS = "y ~ x + (1 + x | g/h)"


@pytest.fixture
def shell(tmp_path):
    FRAME.write_csv(tmp_path / "t.csv")

    def run(*arguments, code=0):
        done = inside(*arguments, cwd=tmp_path, check=False)
        assert done.returncode == code, done.stderr
        return done.stdout if code == 0 else done.stderr

    return run


def fit(shell, *arguments):
    return json.loads(shell("fit", "t.csv", *arguments, "--json", "--holdout", "0"))


def test_a_formula_with_bars_needs_no_other_setting(shell):
    document = json.loads(shell("fit", "t.csv", BARS, "--json"))
    model = HierarchicalRegressor(formula=BARS).fit(FRAME)
    assert document["summary"] == json.loads(json.dumps(model.summary().to_json(), allow_nan=False))
    assert document["global"] == pytest.approx(dict(zip(("Intercept", "x"), model.global_coef_.tolist(), strict=True)))
    assert set(document["held_out"]["errors"]) == {"single-model", "locally-trained", "single-cluster", "hierarchical"}


def test_repeated_client_ids_are_different_clients(shell, tmp_path):
    FRAME.with_columns(h=pl.col("h") % 5).write_csv(tmp_path / "t.csv")
    document = fit(shell, BARS, "--out", "model")
    assert document["clients"] == 30
    table = pl.read_csv(shell("predict", "model", "t.csv").encode())
    assert set(table["answered_by"]) == {"client"}


@pytest.mark.parametrize(
    ("flags", "settings"),
    [
        (("--penalty", "ml"), {"penalty": "ml"}),
        (("--vary", "1"), {"vary": ["1"]}),
        (("--vary", "1", "--vary", "x", "--covariance", "full"), {"covariance": "full"}),
        (("--covariance", "isotropic", "--no-tests"), {"covariance": "isotropic", "tests": False}),
        (("--per-cluster", "--vary", "1"), {"per_cluster": True, "vary": ["1"]}),
    ],
)
def test_settings_are_those_of_the_estimators(shell, flags, settings):
    document = fit(shell, "y ~ x", "--client", "h", "--cluster", "g", *flags)
    model = HierarchicalRegressor(client="h", cluster="g", formula="y ~ x", **settings).fit(FRAME)
    assert document["summary"]["log_likelihood"] == pytest.approx(model.components_.log_likelihood, abs=1e-9)
    assert document["summary"]["parameters"] == model.components_.parameters
    assert len(document["summary"]["tests"]) == len(model.components_.tests)


def test_cross_validated_penalties(shell, monkeypatch):
    monkeypatch.setattr("covey.fitting.fit.search", partial(search, gammas=np.array([0.1, 1.0]), lams=np.array([1.0])))
    document = fit(shell, "y ~ x", "--client", "h", "--cluster", "g", "--penalty", "cv")
    assert document["summary"]["method"] == "cv"
    assert document["summary"]["penalty"]["lam"] == [1.0, 1.0]
    printed = shell("fit", "t.csv", "y ~ x", "--client", "h", "--cluster", "g", "--penalty", "cv", "--holdout", "0")
    assert "by cross-validation" in printed


def test_learned_variances_are_printed_by_fit_and_show(shell):
    printed = shell("fit", "t.csv", BARS, "--out", "model", "--holdout", "0")
    shown = shell("show", "model", "--level", "client", "--limit", "3")
    for part in ("REML: log-likelihood", "AIC", "BIC", "share of variance", "between clusters: likelihood", "between clients"):
        assert part in printed
        assert part in shown
    document = json.loads(shell("show", "model", "--level", "client", "--json"))
    model = HierarchicalRegressor(formula=BARS).fit(FRAME)
    np.testing.assert_allclose(
        [row["std_error"] for row in document["coefficients"]], model.coef_frame("client")["std_error"], atol=1e-9
    )
    assert {"lower", "upper"} <= set(document["coefficients"][0])


def test_a_formula_without_groups_is_a_plain_regression(shell):
    document = fit(shell, "y ~ x", "--out", "model")
    model = fit_by_formula(FRAME, "y ~ x")
    assert document["summary"] == json.loads(json.dumps(model.summary().to_json()))
    assert "no groups: a plain regression" in shell("fit", "t.csv", "y ~ x")
    table = pl.read_csv(shell("predict", "model", "t.csv", "--interval", "0.9").encode())
    np.testing.assert_allclose(
        table.select("lower", "upper").to_numpy(), model.predict_interval(FRAME, coverage=0.9), atol=1e-12
    )


def test_predictions_for_new_groups_are_means_or_at_effect_zero(shell, tmp_path):
    counts = FRAME.with_columns(y=pl.col("y").exp().clip(0, 50).round())
    counts.write_csv(tmp_path / "t.csv")
    new = counts[:5].with_columns(h=pl.lit(99))
    new.write_csv(tmp_path / "new.csv")
    model = HierarchicalPoissonRegressor(formula=BARS).fit(counts)
    fit(shell, BARS, "--family", "poisson", "--out", "model")
    for flags, how in (((), {}), (("--no-expected",), {"expected": False}), (("--level", "global"), {"level": "global"})):
        table = pl.read_csv(shell("predict", "model", "new.csv", "--interval", "0.95", *flags).encode())
        np.testing.assert_allclose(table["prediction"], model.predict(new, **how), rtol=1e-9)
        np.testing.assert_allclose(table.select("lower", "upper").to_numpy(), model.predict_interval(new, **how), rtol=1e-9)
    assert (model.predict(new) > 1.01 * model.predict(new, expected=False)).all()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("y ~ x + (1 | g/h)", "--gamma", "1"), "The formula's bars say what to learn"),
        (("y ~ x + (1 | g/h)", "--penalty", "cv"), "penalty='cv'"),
        (("y ~ x + (1 | g/h)", "--vary", "x"), "leave one out"),
        (("y ~ x + (1 | g/h", ), "parentheses"),
        (("y ~ x + (z | g/h)", ), "There is no column 'z'"),
        (("y ~ x + (1 | nowhere/h)", ), "There is no column 'nowhere'"),
        (("y ~ x", "--client", "h", "--cluster", "g", "--penalty", "ml", "--gamma", "2"), "leave out gamma="),
        (("y ~ x", "--client", "h", "--cluster", "g", "--penalty", "best"), "must be one of 'auto', 'reml', 'ml', 'cv'"),
        (("y ~ x", "--client", "h", "--cluster", "g", "--covariance", "round"), "must be one of 'isotropic'"),
        (("y ~ x", "--client", "h", "--cluster", "g", "--vary", "z"), "'vary' parameter names 'z'"),
        (("y ~ x", "--client", "h", "--cluster", "g", "--reduction", "mean"), "no likelihood to learn penalties from"),
        (("y ~ x", "--client", "h", "--cluster", "g", "--gamma", "lots"), "--gamma"),
        (("y ~ x", "--client", "h", "--cluster", "h"), "Every cluster has one client"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_and_exit_code_2(shell, arguments, sentence):
    err = shell("fit", "t.csv", *arguments, code=2)
    assert err.startswith("covey: ")
    assert err.count("\n") == 1
    assert sentence in err


def test_an_offset_may_be_an_expression_and_functions_are_saved(shell, tmp_path):
    """The model predicts with the offset and the polynomials of its training rows; ids of clients stay numbers."""
    document = fit(shell, "y ~ poly(x, 2) + (1 | g/h)", "--offset", "2 * abs(x)", "--out", "model")
    model = HierarchicalRegressor(formula="y ~ poly(x, 2) + offset(2 * abs(x)) + (1 | g/h)").fit(FRAME)
    assert list(document["global"].values()) == pytest.approx(model.global_coef_.tolist())
    FRAME[:3].write_csv(tmp_path / "few.csv")
    lines = [json.loads(line) for line in shell("predict", "model", "few.csv", "--json").splitlines()]
    assert [line["prediction"] for line in lines] == pytest.approx(model.predict(FRAME[:3]).tolist())
    assert "no column 'xx'" in shell("fit", "t.csv", BARS, "--offset", "log(xx)", code=2)
    assert "write log(x)" in shell("fit", "t.csv", BARS, "--offset", "np.log(x)", code=2)
