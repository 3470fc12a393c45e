"""Successes of trials: ``cbind(successes, failures)`` in a formula, or a share with ``trials=``.

Provenance: glmmTMB 1.1.5 (R 4.2.2), ``glmmTMB(cbind(incidence, size - incidence) ~ period + (1 | herd), cbpp, binomial)``.
lme4 1.1.31 agrees to 1e-8 in the log-likelihood with ``glmerControl(tolPwrss = 1e-13)``; its default stops 3e-4 short.
"""

from __future__ import annotations

import json

import numpy as np
import polars as pl
import pytest

from covey import HierarchicalClassifier, HierarchicalRegressor, Spec, load, plan, simulate_sites
from covey.errors import CoveyError, DataError, FormulaError, SolverError
from covey.federation.operator.settings import RunSettings
from tests.cli.shell import inside
from tests.r_tables import cbpp

FORMULA = "cbind(incidence, size - incidence) ~ period + (1 | herd)"
SHARES = "share ~ period + (1 | herd)"
TABLE = cbpp().with_columns(share=pl.col("incidence") / pl.col("size"))


def one_row_for_each_trial(table):
    ones, zeros = (
        table.select(pl.all().repeat_by(count).explode()) for count in ("incidence", pl.col("size") - pl.col("incidence"))
    )
    return pl.concat([ones.with_columns(y=pl.lit(1)), zeros.with_columns(y=pl.lit(0))])


EXPANDED = one_row_for_each_trial(TABLE)


@pytest.fixture(scope="module")
def model():
    return HierarchicalClassifier(formula=FORMULA, random_state=0).fit(TABLE)


def test_cbpp_as_in_glmmtmb_and_lme4(model):
    found = model.components_
    assert found.log_likelihood == pytest.approx(-92.026281864762, abs=1e-6)
    assert (found.aic, found.bic) == pytest.approx((194.05256372952, 204.1793221832), abs=1e-6)
    assert model.global_coef_.tolist() == pytest.approx([-1.398532, -0.992333, -1.128672, -1.580314], abs=2e-6)
    assert found.client.sd[0, 0] == pytest.approx(0.6422615, abs=1e-6)
    assert found.rows == 56


def test_shares_and_repeated_rows_give_the_same_model(model):
    shares = HierarchicalClassifier(formula=SHARES, trials="size").fit(TABLE)
    assert shares.coef_ == pytest.approx(model.coef_, abs=1e-12)
    assert shares.components_.log_likelihood == pytest.approx(model.components_.log_likelihood, abs=1e-9)
    repeated = HierarchicalClassifier(formula="y ~ period + (1 | herd)").fit(EXPANDED)
    assert repeated.coef_ == pytest.approx(model.coef_, abs=1e-8)
    assert repeated.components_.client.sd == pytest.approx(model.components_.client.sd, abs=1e-7)
    assert shares.score(TABLE) == model.score(TABLE) == pytest.approx(repeated.score(EXPANDED))


@pytest.mark.parametrize(
    "settings", [{"gamma": 2.0}, {"baseline": "single-model"}, {"gamma": 2.0, "solver": "al2sgd_plus", "max_iter": 500}],
    ids=["given penalties", "baseline", "randomised"],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore::covey.errors.ConvergenceWarning")
def test_other_solvers_take_trials(settings):
    settings = {**settings, "client": "herd", "random_state": 0}
    counts = HierarchicalClassifier(formula="cbind(incidence, size - incidence) ~ period", **settings).fit(TABLE)
    repeated = HierarchicalClassifier(formula="y ~ period", **settings).fit(EXPANDED)
    # A randomised algorithm draws rows, which are others here, so it ends elsewhere within its tolerance.
    assert counts.coef_ == pytest.approx(repeated.coef_, abs=0.5 if "solver" in settings else 1e-7)


def test_cross_validation_takes_trials():
    fitted = HierarchicalClassifier(
        formula="cbind(incidence, size - incidence) ~ 1", client="herd", penalty="cv", random_state=0
    )
    assert np.isfinite(fitted.fit(TABLE).coef_).all()


def test_arrays_of_trials(model):
    X = np.column_stack([TABLE["period"] == f"p{at}" for at in (2, 3, 4)]).astype(float)
    given = {"client": TABLE["herd"].to_numpy(), "trials": TABLE["size"].to_numpy()}
    arrays = HierarchicalClassifier(vary=["1"]).fit(X, TABLE["share"].to_numpy(), **given)
    assert arrays.global_coef_ == pytest.approx(model.global_coef_, abs=1e-10)
    by_position = HierarchicalClassifier(vary=["1"], trials=3).fit(
        np.column_stack([X, given["trials"]]), TABLE["share"].to_numpy(), client=given["client"]
    )
    assert by_position.global_coef_ == pytest.approx(model.global_coef_, abs=1e-10)
    rows = np.column_stack([X, given["trials"]])
    assert by_position.score(rows, TABLE["share"].to_numpy(), client=given["client"]) == model.score(TABLE)
    assert arrays.score(X, TABLE["share"].to_numpy(), **given) == model.score(TABLE)


def test_predictions_are_probabilities_of_success(model):
    proba = model.predict_proba(TABLE[:1])[0]
    assert proba.tolist() == pytest.approx([0.6917923, 0.3082077], abs=1e-6)  # 2 of 14 cases in the first row, shrunk upwards
    assert model.classes_.tolist() == [0, 1]
    assert set(model.predict(TABLE).tolist()) <= {0, 1}


def test_saving_and_updating(model, tmp_path):
    again = load(model.save(tmp_path / "model"))
    assert (again.predict_proba(TABLE) == model.predict_proba(TABLE)).all()
    assert again.score(TABLE) == model.score(TABLE)
    shares = HierarchicalClassifier(formula=SHARES, trials="size").fit(TABLE)
    assert load(shares.save(tmp_path / "shares")).trials == "size"
    new, rows = (table.filter(pl.col("herd") == "h1").with_columns(herd=pl.lit("new")) for table in (TABLE, EXPANDED))
    repeated = HierarchicalClassifier(formula="y ~ period + (1 | herd)").fit(EXPANDED)
    expected = repeated.add_clients(rows).coef_
    assert again.add_clients(new).coef_ == pytest.approx(expected, abs=1e-8)
    assert shares.add_clients(new).coef_ == pytest.approx(expected, abs=1e-8)
    assert model.bootstrap(TABLE, draws=3)["sd"].is_finite().all()


@pytest.mark.parametrize("settings", [{"formula": FORMULA}, {"formula": SHARES, "trials": "size"}], ids=["counts", "shares"])
def test_across_sites(model, settings):
    run = simulate_sites(TABLE, Spec(family="bernoulli", **settings), sites=3)
    assert run.difference(model.model_) < 1e-9
    assert run.outcome.model.learned.components.bic == pytest.approx(model.components_.bic, abs=1e-8)


def test_a_site_may_have_failures_only():
    table = TABLE.with_columns(site=pl.when(pl.col("herd") == "h8").then(pl.lit("b")).otherwise(pl.lit("a")))
    table = table.with_columns(incidence=pl.when(pl.col("herd") == "h8").then(0.0).otherwise(pl.col("incidence")))
    run = simulate_sites(table, Spec(family="bernoulli", formula=FORMULA), sites="site")
    assert run.difference(HierarchicalClassifier(formula=FORMULA).fit(table).model_) < 1e-9


def test_the_command_line_takes_trials(model, tmp_path):
    path = tmp_path / "cbpp.parquet"
    TABLE.write_parquet(path)
    result = inside("fit", path, SHARES, "--family", "bernoulli", "--trials", "size", "--json", cwd=tmp_path)
    assert json.loads(result.stdout)["summary"]["aic"] == pytest.approx(model.components_.aic, abs=1e-8)


def test_a_plan_takes_trials():
    settings = {"formula": SHARES.partition(" + (")[0], "client": "herd", "family": "bernoulli", "gamma": 1.0}
    assert plan(TABLE, trials="size", **settings).cheapest == "newton"


@pytest.mark.parametrize(
    ("columns", "formula", "facts"),
    [
        ({"size": pl.col("size") - 0.5}, FORMULA, ["number of trials", "13.5", "row 0"]),
        ({"incidence": pl.col("incidence") + 0.25}, FORMULA, ["number of successes", "2.25", "row 0", "14"]),
        ({"incidence": -pl.col("incidence")}, FORMULA, ["number of successes", "-2", "row 0"]),
        ({"share": pl.col("incidence")}, SHARES, ["number of successes", "28", "row 0", "14 trials", "cbind"]),
        ({"share": pl.lit(0.111)}, SHARES, ["number of successes", "1.554", "row 0"]),
        ({"share": pl.lit(0.0)}, SHARES, ["same outcome"]),
        ({"incidence": pl.col("size")}, FORMULA, ["same outcome"]),
        ({"size": pl.lit(None, dtype=pl.Float64)}, SHARES, ["number of trials", "nan", "row 0"]),
    ],
)
def test_numbers_that_are_not_successes_of_trials(columns, formula, facts):
    trials = None if formula == FORMULA else "size"
    with pytest.raises(DataError) as caught:
        HierarchicalClassifier(formula=formula, trials=trials).fit(TABLE.with_columns(**columns))
    for fact in facts:
        assert fact in str(caught.value)


@pytest.mark.parametrize(
    ("call", "error", "fact"),
    [
        (lambda: HierarchicalRegressor(formula=SHARES, trials="size").fit(TABLE), SolverError, "trials= is for the bernoulli"),
        (lambda: HierarchicalRegressor(formula=FORMULA).fit(TABLE), DataError, "family 'bernoulli', not 'gaussian'"),
        (
            lambda: HierarchicalClassifier(formula=SHARES, trials="size", weights="t").fit(TABLE),
            SolverError,
            "leave out weights=",
        ),
        (lambda: HierarchicalClassifier(formula=FORMULA, weights="t").fit(TABLE), DataError, "leave out weights"),
        (lambda: HierarchicalClassifier(formula=FORMULA, trials="size").fit(TABLE), DataError, "leave out trials="),
        (
            lambda: HierarchicalClassifier(formula="cbind(incidence) ~ t", client="herd").fit(TABLE),
            FormulaError,
            "cbind(successes, failures)",
        ),
        (lambda: HierarchicalClassifier(formula="cbind(nothing, size) ~ t", client="herd").fit(TABLE), CoveyError, "'nothing'"),
    ],
)
def test_settings_that_contradict_each_other(call, error, fact):
    with pytest.raises(error) as caught:
        call()
    assert fact in str(caught.value)


def test_private_runs_do_not_take_trials():
    spec = Spec(family="bernoulli", formula="cbind(incidence, size - incidence) ~ t", client="herd", gamma=1.0)
    from covey.federation.privacy.differential import check_spec

    assert RunSettings().private is None
    with pytest.raises(SolverError, match="one row for each trial"):
        check_spec(spec)
