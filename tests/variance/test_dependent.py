"""Columns that other columns determine are dropped with a note, and terms that cannot vary by default do not.

Provenance: lme4 1.1.31 (R 4.2.2) on warpbreaks without wool B at tension H, ``block`` numbering the rows of a cell; and on
sleepstudy with ``z <- (as.integer(Subject) - 1) %% 5``, which is constant within subjects.
"""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from covey import HierarchicalClassifier, HierarchicalPoissonRegressor, HierarchicalRegressor, Spec, load, simulate_sites
from covey.datasets import load_radon
from covey.errors import DataError
from tests.r_tables import sleepstudy, warpbreaks_with_an_empty_cell

SLEEP, WARP = sleepstudy(), warpbreaks_with_an_empty_cell()
EMPTY = "wool[T.B]:tension[T.3H]"


def by_term(model):
    return dict(zip(model.terms_, model.global_coef_.tolist(), strict=True))


def test_an_empty_cell_as_in_lme4():
    model = HierarchicalRegressor(formula="breaks ~ wool * tension + (1 | block)").fit(WARP)
    found = model.components_
    assert found.log_likelihood == pytest.approx(-160.20720885705, abs=1e-6)
    assert (found.aic, found.bic) == pytest.approx((334.4144177141, 347.06105514249), abs=1e-6)
    fixed = [44.5555555556, -16.3333333333, -20.5555555556, -20.0, 21.1111111111, 0.0]
    assert list(by_term(model).values()) == pytest.approx(fixed, abs=1e-8)
    assert found.client.sd[0, 0] == pytest.approx(4.54514, rel=1e-5)
    assert found.zero == (EMPTY,)
    assert f"dropped: {EMPTY!r}" in str(model)


def test_an_empty_cell_of_counts_as_in_lme4():
    """``glmer(..., poisson, control = glmerControl(tolPwrss = 1e-12))``."""
    found = HierarchicalPoissonRegressor(formula="breaks ~ wool * tension + (1 | block)").fit(WARP).components_
    assert found.log_likelihood == pytest.approx(-185.06716, abs=1e-5)
    assert (found.aic, found.bic) == pytest.approx((382.13433, 392.97430), abs=1e-5)
    assert found.client.sd[0, 0] == pytest.approx(0.20256, abs=1e-5)


def test_new_rows_of_an_empty_cell_are_predicted_without_it(tmp_path):
    model = HierarchicalRegressor(formula="breaks ~ wool * tension + (1 | block)").fit(WARP)
    row = pl.DataFrame({"wool": ["B"], "tension": ["3H"], "block": ["b1"]})
    expected = sum(value for term, value in by_term(model).items() if term in ("Intercept", "wool[T.B]", "tension[T.3H]"))
    assert model.predict(row, level="global")[0] == pytest.approx(expected)
    assert load(model.save(tmp_path / "model")).predict(row)[0] == model.predict(row)[0]


@pytest.mark.parametrize("sites", [2, 3])
def test_sites_agree_on_what_is_dropped(sites):
    """At one site the rows of a category may be missing, though all sites together have it."""
    spec = Spec(formula="breaks ~ wool * tension + (1 | block)")
    here = HierarchicalRegressor(formula=spec.formula).fit(WARP)
    run = simulate_sites(WARP, spec, sites=sites)
    assert run.difference(here.model_) < 1e-9
    assert run.outcome.model.learned.components.notes == here.components_.notes


def test_the_first_of_dependent_columns_is_kept():
    table = SLEEP.with_columns(twice=2 * pl.col("Days") - 1, none=pl.lit(0.0))
    plain = HierarchicalRegressor(formula="Reaction ~ Days + (1 + Days | Subject)").fit(table)
    model = HierarchicalRegressor(formula="Reaction ~ Days + none + twice + (1 + Days | Subject)").fit(table)
    assert model.components_.zero == ("none", "twice")
    assert model.components_.log_likelihood == pytest.approx(plain.components_.log_likelihood, abs=1e-8)
    assert model.components_.aic == pytest.approx(plain.components_.aic, abs=1e-8)
    assert model.global_coef_[:2] == pytest.approx(plain.global_coef_, abs=1e-6)
    note = next(note for note in model.components_.notes if note.startswith("dropped"))
    assert "'none', 'twice'" in note


def test_a_dropped_term_may_still_vary():
    """lme4 drops columns of the common terms only."""
    table = SLEEP.with_columns(twice=2 * pl.col("Days"))
    plain = HierarchicalRegressor(formula="Reaction ~ Days + (1 + Days | Subject)").fit(table).components_
    model = HierarchicalRegressor(formula="Reaction ~ Days + twice + (1 + twice | Subject)").fit(table).components_
    assert model.log_likelihood == pytest.approx(plain.log_likelihood, abs=1e-7)
    assert 2 * model.client.sd[0, 1] == pytest.approx(plain.client.sd[0, 1], rel=1e-5)


@pytest.mark.parametrize(("size", "kept"), [(1e-6, True), (3e-7, True), (1e-8, False)])
def test_the_tolerance_is_that_of_lme4(size, kept):
    """lme4 keeps a column of which more than 1e-7 is left. The kept one has the fit of its difference from the other."""
    table = SLEEP.with_columns(apart=pl.col("Reaction").sin()).with_columns(near=pl.col("Days") + 6 * size * pl.col("apart"))
    found = HierarchicalRegressor(formula="Reaction ~ Days + near + (1 | Subject)", penalty="ml").fit(table)
    same = "Reaction ~ Days + apart + (1 | Subject)" if kept else "Reaction ~ Days + (1 | Subject)"
    expected = HierarchicalRegressor(formula=same, penalty="ml").fit(table)
    assert found.components_.zero == (() if kept else ("near",))
    assert found.components_.log_likelihood == pytest.approx(expected.components_.log_likelihood, abs=1e-6)
    assert found.predict(table) == pytest.approx(expected.predict(table), abs=1e-3)


@pytest.mark.parametrize(
    ("bar", "log_likelihood", "sds"),
    [
        ("(1 + z | Subject)", -890.01566234798, [33.918366, 1.909819]),
        ("(1 + z || Subject)", -890.03853000314, [35.76568, 4.902445]),
    ],
)
def test_a_slope_of_a_term_that_is_constant_within_clients_as_in_lme4(bar, log_likelihood, sds):
    found = HierarchicalRegressor(formula=f"Reaction ~ Days + z + {bar}").fit(SLEEP).components_
    assert found.log_likelihood == pytest.approx(log_likelihood, abs=1e-6)
    assert found.client.sd[0].tolist() == pytest.approx(sds, rel=1e-3)


@pytest.mark.parametrize(("bar", "values"), [("(1 + few | Subject)", 2), ("(1 + few || Subject)", 1)])
def test_too_few_values_within_clients_do_not_identify_a_slope(bar, values):
    few = (SLEEP["Subject"].to_numpy() % 2) if values == 2 else np.where(SLEEP["Subject"].to_numpy() % 2, 1.0, -1.0)
    with pytest.raises(DataError, match="'few' is constant within every client"):
        HierarchicalRegressor(formula=f"Reaction ~ Days + few + {bar}").fit(SLEEP.with_columns(few=few))


# Without bars and without vary= all terms vary that can


def test_a_term_that_is_constant_within_clients_does_not_vary_by_default():
    model = HierarchicalRegressor(client="Subject").fit(SLEEP.select("Subject", "Days", "z"), SLEEP["Reaction"])
    asked = HierarchicalRegressor(formula="Reaction ~ Days + z + (1 + Days || Subject)").fit(SLEEP)
    assert model.components_.client.terms == ("Intercept", "Days")
    assert model.components_.log_likelihood == pytest.approx(asked.components_.log_likelihood, abs=1e-8)
    assert model.coef_ == pytest.approx(asked.coef_, abs=1e-6)
    assert "note: 'z' is constant within every client, and so does not vary by client" in str(model)


def test_a_term_may_vary_by_cluster_alone():
    homes = load_radon()
    sizes = homes.group_by("county").len().with_columns(size=pl.col("len").log()).drop("len")
    table = homes.join(sizes, on="county").with_columns(west=(pl.col("state").rank("dense") > 4).cast(pl.Float64))
    rows, y = table.select("county", "state", "floor", "size", "west"), table["log_radon"]
    model = HierarchicalRegressor(client="county", cluster="state", tests=False).fit(rows, y)
    assert model.components_.client.terms == ("Intercept", "floor")
    assert model.components_.cluster.terms == ("Intercept", "floor", "size")
    assert len(model.components_.notes) >= 2
    run = simulate_sites(
        table, Spec(formula="log_radon ~ floor + size + west", client="county", cluster="state", tests=False), sites=2
    )
    assert run.difference(model.model_) < 1e-6
    assert run.outcome.model.learned.components.notes == model.components_.notes


def test_a_class_model_settles_what_varies_too():
    y = SLEEP["Reaction"] > 300
    model = HierarchicalClassifier(client="Subject", tests=False).fit(SLEEP.select("Subject", "Days", "z"), y)
    assert model.components_.client.terms == ("Intercept", "Days")


def test_terms_that_are_asked_for_vary_or_are_refused():
    table = SLEEP.with_columns(few=pl.col("Subject") % 2)
    with pytest.raises(DataError, match="'few' is constant within every client"):
        HierarchicalRegressor(client="Subject", vary=["1", "few"], covariance="full").fit(
            table.select("Subject", "Days", "few"), table["Reaction"]
        )


def test_a_copy_of_a_column_without_a_formula():
    rows = SLEEP.select("Subject", "Days").with_columns(copy=pl.col("Days"))
    model = HierarchicalRegressor(client="Subject").fit(rows, SLEEP["Reaction"])
    plain = HierarchicalRegressor(client="Subject").fit(rows.drop("copy"), SLEEP["Reaction"])
    assert model.components_.zero == ("copy",)
    assert model.components_.client.terms == ("Intercept", "Days")
    assert model.components_.log_likelihood == pytest.approx(plain.components_.log_likelihood, abs=1e-8)


def test_counts_of_groups_are_whole_numbers():
    rates = WARP.with_columns(breaks=pl.col("breaks") / 4)
    with pytest.raises(DataError, match=r"The response is 6\.5 in row 0 \(client 'b1'\); counts are whole.*offset"):
        HierarchicalPoissonRegressor(formula="breaks ~ wool + (1 | block)").fit(rates)


def test_a_client_with_one_class_is_fitted():
    """The variance of clients pulls its coefficient to that of the others; a common term that separates is refused."""
    y = (SLEEP["Reaction"] > 300) | (SLEEP["Subject"] == 0)
    table = SLEEP.with_columns(y=y, first=(pl.col("Subject") == 0).cast(pl.Float64))
    model = HierarchicalClassifier(formula="y ~ Days + (1 | Subject)").fit(table)
    assert np.isfinite(model.coef_).all()
    with pytest.raises(DataError, match="'first' separates the classes of all rows"):
        HierarchicalClassifier(formula="y ~ Days + first + (1 | Subject)").fit(table)
