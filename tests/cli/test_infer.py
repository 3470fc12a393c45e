"""Inference in the shell: what is printed is what the estimator returns; mistakes end with 2 and one sentence."""

from __future__ import annotations

import json

import polars as pl
import pytest

import covey
from tests.cli.shell import inside
from tests.r_tables import sleepstudy


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("infer")
    rows = sleepstudy()
    rows.write_csv(place / "sleep.csv")
    covey.fit(rows, "Reaction ~ half + (1 | Subject)").save(place / "small")
    covey.fit(rows, "Reaction ~ Days * half + (1 | Subject)").save(place / "large")
    return place


def run(folder, *words):
    return inside(*words, cwd=folder).stdout


def test_the_shell_prints_what_the_estimator_returns(folder):
    model, small = covey.load(folder / "large"), covey.load(folder / "small")

    def documents(*words):
        return json.loads(run(folder, *words))

    large = "large"
    assert documents("means", large, "half", "--json") == model.means("half").to_dicts()
    assert documents("means", large, "half", "--at", "Days=3", "--json") == model.means("half", at={"Days": 3}).to_dicts()
    assert documents("contrast", large, "half", "--json") == model.contrast("half").to_dicts()
    compared = documents("compare", "small", large, "--json")
    assert [row["aic"] for row in compared] == covey.compare(small, model)["aic"].to_list()
    assert documents("show", large, "--robust", "CR1", "--json") == model.robust("CR1").to_dicts()
    effects = documents("show", large, "--effects", "--level", "client", "--json")
    assert effects == model.random_effects("client").to_dicts()
    assert documents("show", large, "--r2", "--json") == [model.r2()._asdict()]
    assert documents("show", large, "--profile", "penalties", "--json") == model.profile(which="penalties").to_dicts()
    assert "profile" in run(folder, "show", large, "--profile", "components")


def test_residuals_and_draws_are_files(folder):
    run(folder, "residuals", "large", "sleep.csv", "--out", "r.csv")
    found, model = pl.read_csv(folder / "r.csv")["residual"], covey.load(folder / "large")
    assert found.to_list() == model.residuals(pl.read_csv(folder / "sleep.csv")).tolist()
    run(folder, "simulate", "large", "sleep.csv", "--n", "3", "--seed", "1", "--out", "d.parquet")
    first = pl.read_parquet(folder / "d.parquet")
    assert first.shape == (180, 3)
    drawn = run(folder, "simulate", "large", "sleep.csv", "--n", "3", "--seed", "1")
    assert pl.read_csv(drawn.encode()).equals(first)


@pytest.mark.parametrize(
    ("words", "fact"),
    [
        (("means", "large", "hallf"), "half"),
        (("means", "large", "half", "--at", "Days"), "name=value"),
        (("contrast", "large", "half", "--adjust", "fdr"), "tukey"),
        (("compare", "large"), "two"),
        (("show", "large", "--profile", "components", "--r2"), "one of"),
        (("show", "large", "--profile", "sd"), "penalties"),
        (("show", "large", "--robust", "CR4"), "CR3"),
        (("residuals", "large", "sleep.csv", "--kind", "raw"), "pearson"),
        (("simulate", "large", "sleep.csv", "--effects", "old"), "fitted"),
    ],
)
def test_a_mistake_is_one_sentence(folder, words, fact):
    done = inside(*words, cwd=folder, check=False)
    assert done.returncode == 2
    assert fact in done.stderr
    assert "Traceback" not in done.stderr
