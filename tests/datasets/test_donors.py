"""The simulated charity has the requested sizes and share of success, and its rows follow the stated model."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from covey import HierarchicalClassifier
from covey.datasets import simulate_donors
from covey.errors import DataError
from covey.reproduce.solicitations import solicitations

BRACKETS = {"poor or near-poor", "lower-middle", "middle", "upper-middle"}


@pytest.fixture(scope="module")
def small():
    return simulate_donors(zips=300, appeals=30_000, seed=1)


@pytest.fixture(scope="module")
def large():
    return simulate_donors(zips=1500, appeals=255_000, seed=2)


@pytest.fixture(scope="module")
def rows(large):
    return solicitations(large.appeals, large.gifts, large.zips).rows


def test_tables_have_the_shape_of_the_pipeline(small):
    assert small.appeals.schema == {"id": pl.Int64, "date": pl.Date}
    assert small.gifts.schema == {"id": pl.Int64, "date": pl.Date, "zip": pl.String}
    assert small.zips.schema == {"zip": pl.String, "cluster": pl.String}
    assert set(small.zips["cluster"]) == BRACKETS
    assert small.zips["zip"].is_unique().all()
    assert small.zips["zip"].str.contains(r"^\d{5}$").all()
    assert small.coefficients.columns == ["zip", "cluster", "intercept", "log_recency", "log_frequency"]
    assert set(small.coefficients["cluster"]) == BRACKETS | {"unknown"}
    recorded = small.coefficients.filter(pl.col("cluster") != "unknown").select("zip", "cluster")
    assert recorded.equals(small.zips)
    assert set(small.gifts["zip"]) <= set(small.coefficients["zip"])


def test_the_same_seed_gives_the_same_tables(small):
    again, other = (simulate_donors(zips=300, appeals=30_000, seed=seed) for seed in (1, 2))
    for name in ("appeals", "gifts", "zips", "coefficients"):
        assert getattr(small, name).equals(getattr(again, name))
        assert not getattr(small, name).equals(getattr(other, name))
    assert simulate_donors(zips=9, appeals=900, seed=np.random.default_rng(3)).gifts.equals(
        simulate_donors(zips=9, appeals=900, seed=3).gifts
    )


@pytest.mark.parametrize(
    ("zips", "appeals", "success"),
    [(300, 30_000, 0.06), (300, 60_000, 0.3), (1, 4000, 0.1), (200, 2000, 0.06), (3000, 90_000, 0.06)],
)
def test_sizes_and_success_are_those_asked_for(zips, appeals, success):
    for seed in range(3):
        tables = simulate_donors(zips=zips, appeals=appeals, success=success, seed=seed)
        result = solicitations(tables.appeals, tables.gifts, tables.zips)
        counts = result.counts
        assert counts["zips"] == zips
        assert counts["small_zips"] == round(0.02 * zips)
        assert tables.appeals.height == pytest.approx(appeals, rel=0.03)
        noise = 4 * np.sqrt(success * (1 - success) / counts["rows"])
        assert counts["successes"] / counts["rows"] == pytest.approx(success, abs=0.003 + noise)
        # Nothing but the small ZIPs is lost: every appeal follows a gift, every later gift answers an appeal.
        assert counts["rows"] == counts["appeals"] - counts["small_zip_appeals"]
        assert counts["gifts_never_appealed"] == counts["appeals_same_day"] == 0


def test_success_is_close_at_some_size(rows):
    assert rows["success"].mean() == pytest.approx(0.06, abs=0.005)


def test_counts_by_zip_are_skewed(rows):
    sizes = rows.group_by("zip").len()["len"]
    assert sizes.mean() == pytest.approx(170, rel=0.03)
    assert sizes.median() == pytest.approx(80, rel=0.15)
    assert 5 <= sizes.min() < 12
    assert sizes.max() > 10 * sizes.mean()


def test_the_calendar(large):
    waves = large.appeals["date"].unique().sort()
    assert 15 <= len(waves) <= 20
    assert 4 < (waves[-1] - waves[0]).days / 365 < 6
    assert waves.diff().drop_nulls().dt.total_days().min() > 80
    asked = large.appeals.group_by("id").agg(first=pl.col("date").min())
    given = large.gifts.group_by("id").agg(first_gift=pl.col("date").min(), zips=pl.col("zip").n_unique())
    both = asked.join(given, on="id", how="full")
    assert both.null_count().sum_horizontal().item() == 0
    assert (both["first_gift"] < both["first"]).all()
    # A donor in a hundred moves; only those who give again afterwards show it.
    assert 0.0005 < (both["zips"] > 1).mean() < 0.01


def test_unrecorded_zips_are_about_one_in_25(large):
    assert 1 - large.zips.height / large.coefficients.height == pytest.approx(0.04, abs=0.015)


def test_answers_follow_the_law_on_the_pipelines_covariates(large, rows):
    """With the true coefficients of each ZIP, residuals are white in every direction that the model has."""
    joined = rows.join(large.coefficients, on="zip")
    margin = (
        joined["intercept"]
        + joined["log_recency"] * joined["recency"].log()
        + joined["log_frequency"] * joined["frequency"].log()
    ).to_numpy()
    chance = 1 / (1 + np.exp(-margin))
    residual = joined["success"].to_numpy() - chance
    deviation = margin - margin.mean()
    for direction in (
        np.ones(len(residual)),
        joined["recency"].log().to_numpy(),
        joined["frequency"].log().to_numpy(),
        deviation,
    ):
        score = residual @ direction / np.sqrt((chance * (1 - chance)) @ direction**2)
        assert abs(score) < 4
    # The scatter between ZIPs is really there: the residuals of one law for all follow it.
    pooled = np.asarray(joined["success"]) - rows["success"].mean()
    assert pooled @ deviation / np.sqrt(0.06 * 0.94 * (deviation @ deviation)) > 20


def test_the_global_slopes_are_found_again(rows):
    frame = rows.with_columns(r=pl.col("recency").log(), f=pl.col("frequency").log()).sample(60_000, seed=0)
    model = HierarchicalClassifier(client="zip", cluster="cluster", formula="success ~ r + f", baseline="single-model").fit(
        frame
    )
    slopes = dict(zip(model.terms_, model.global_coef_, strict=True))
    assert slopes["r"] == pytest.approx(-0.5, abs=0.12)
    assert slopes["f"] == pytest.approx(0.4, abs=0.12)


def test_coefficients_have_the_given_standard_deviation():
    spread = {}
    for zip_sd in (0.25, 0.0):
        truth = simulate_donors(zips=2000, appeals=20_000, zip_sd=zip_sd).coefficients
        names = ["intercept", "log_recency", "log_frequency"]
        within = truth.select(pl.col(name) - pl.col(name).mean().over("cluster") for name in names)
        spread[zip_sd] = [within[name].std() for name in names]
    assert spread[0.25] == pytest.approx([0.25, 0.05, 0.05], rel=0.06)
    assert spread[0.0] == pytest.approx([0, 0, 0], abs=1e-12)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"zips": 0}, r"'zips' parameter must lie between 1 and 90000. Got 0 instead"),
        ({"zips": 90_001}, r"'zips' parameter must lie between 1 and 90000"),
        ({"zips": 2.5}, r"'zips' parameter must be a whole number. Got 2.5"),
        ({"appeals": 1e6}, r"'appeals' parameter must be a whole number"),
        ({"zips": 100, "appeals": 999}, r"'appeals' parameter must be >= 1000, 10 for each ZIP. Got 999 instead"),
        ({"success": 0.0}, r"'success' parameter must lie between 0 and 1. Got 0.0"),
        ({"success": 1}, r"'success' parameter must lie between 0 and 1"),
        ({"success": float("nan")}, r"'success' parameter must lie between 0 and 1. Got nan"),
        ({"zip_sd": -0.1}, r"'zip_sd' parameter must lie between 0 and 2. Got -0.1"),
        ({"zip_sd": float("inf")}, r"'zip_sd' parameter must lie between 0 and 2"),
    ],
)
def test_bad_arguments_are_refused(given, message):
    with pytest.raises(DataError, match=message):
        simulate_donors(**given)
