"""Tables in Spark, and in Ibis: the fit of the table in memory, the statements of covey, and mistakes in a sentence.

``make test-engines`` runs these tests. Spark needs Java.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import replace

import numpy as np
import polars as pl
import pytest

import covey
from covey import CoveyError, Spec
from covey.nodes import look
from tests.cli.shell import inside
from tests.model import test_scoring
from tests.nodes.test_lazy import FORMULAS, assert_equal, table_of

pytestmark = pytest.mark.engines


def spark_session():
    """A Spark session on this machine; a skipped test if there is no Java."""
    if not (shutil.which("java") or os.environ.get("JAVA_HOME")):
        pytest.skip("Spark needs Java, and there is neither a command java nor JAVA_HOME")
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    builder = builder.config("spark.sql.shuffle.partitions", "2").config("spark.driver.host", "127.0.0.1")
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    return session


@pytest.fixture(scope="module")
def spark():
    session = spark_session()
    yield session
    session.stop()


@pytest.fixture
def stored(spark, tmp_path):
    """A function that stores a table in two Parquet files, which Spark reads."""

    def store(table):
        folder = tmp_path / f"rows{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        for at in range(2):
            table[at::2].write_parquet(folder / f"{at}.parquet")
        return spark.read.parquet(str(folder))

    return store


@pytest.mark.parametrize("at", range(len(FORMULAS)))
def test_every_formula(stored, at):
    """Given penalties, REML with tests and intervals, weights, frequencies, categories, years and incomes."""
    table = table_of(at, 500, 15)
    assert_equal(covey.fit(table, FORMULAS[at]), covey.fit(stored(table), FORMULAS[at]))


@pytest.mark.parametrize("seed", range(3))
def test_badly_scaled_columns(stored, seed):
    """Years, incomes, and a column in millionths, with slopes that vary."""
    table = table_of(seed + 20, 800, 20).with_columns(tiny=pl.col("income") * 1e-12, year=pl.col("year") + 1e5)
    spec = Spec(formula="y ~ year + income + tiny:zone + (1 | cluster/client)")
    assert_equal(covey.fit(table, spec), covey.fit(stored(table), spec))


def test_two_queries(stored, monkeypatch):
    asked, real = [], look.collected
    for module in ("covey.nodes.look.collected", "covey.nodes.lazy.collected"):
        monkeypatch.setattr(module, lambda query, *rows: (asked.append(query), real(query, *rows))[1])
    covey.fit(stored(table_of(2, 500, 12)), FORMULAS[1])
    assert len(asked) == 2


def test_an_update_and_missing_values(stored):
    table, new = table_of(3, 500, 12), table_of(4, 60, 15)
    model = covey.fit(table, FORMULAS[0])
    assert_equal(model.update(new), model.update(stored(new)))
    holes = table.with_columns(income=pl.when(pl.col("client") == 3).then(None).otherwise(pl.col("income")))
    spec = Spec(formula="y ~ income + (1 | client)", na="drop")
    found = covey.fit(stored(holes), spec)
    assert_equal(covey.fit(holes, spec), found)
    assert found.model_.dropped == covey.fit(holes, spec).model_.dropped


MISTAKES = [
    ({"income": None}, Spec(formula="y ~ income + (1 | client)"), ["'income'", "client 5"]),
    ({"income": float("nan")}, Spec(formula="y ~ income + (1 | client)"), ["'income'", "client 5"]),
    ({"income": float("inf")}, Spec(formula="y ~ income + (1 | client)"), ["'income'", "infinite", "client 5"]),
    ({"income": -1.0}, Spec(formula="y ~ log(income) + (1 | client)"), ["log(income)", "client 5"]),
    ({"zone": None}, Spec(formula="y ~ zone + (1 | client)"), ["'zone'", "client 5"]),
    ({"w": -1.0}, Spec(formula="y ~ year + (1 | client)", weights="w"), ["'w'", "negative"]),
    ({"f": -1}, Spec(formula="y ~ year + (1 | client)", frequency="f"), ["'f'", "whole number"]),
    ({}, Spec(formula="y ~ yeer + (1 | client)"), ["'yeer'", "'year'"]),
    ({}, Spec(formula="y ~ poly(year, 2) + (1 | client)"), ["poly(year, 2)"]),
    ({}, Spec(formula="y ~ zone", family="poisson", client="client", gamma=1.0), ["poisson", "shards"]),
]


@pytest.mark.parametrize(("values", "spec", "facts"), MISTAKES)
def test_mistakes_name_column_and_client(stored, values, spec, facts):
    here = pl.col("client") == 5
    changed = {name: pl.when(here).then(pl.lit(value)).otherwise(pl.col(name)) for name, value in values.items()}
    with pytest.raises(CoveyError) as caught:
        covey.fit(stored(table_of(6, 300, 10).with_columns(**changed)), spec)
    assert [fact for fact in facts if fact not in str(caught.value)] == [], str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_client_in_two_clusters_and_a_table_that_is_gone(stored, tmp_path):
    table = table_of(6, 300, 10).with_row_index("row")
    moved = table.with_columns(cluster=pl.when(pl.col("row") == 7).then(pl.lit("elsewhere")).otherwise(pl.col("cluster")))
    spec = Spec(formula="y ~ year", client="client", cluster="cluster", gamma=1.0)
    with pytest.raises(CoveyError, match=r"Client \d+ is in clusters .*'elsewhere'"):
        covey.fit(stored(moved), spec)
    rows = stored(table)
    shutil.rmtree(tmp_path / "rows1")
    with pytest.raises(CoveyError, match="engine that holds the table cannot answer") as caught:
        covey.fit(rows, spec)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("formula", "more", "categories"),
    [
        ("y ~ year + income + (1 | cluster/client)", [], []),
        ("y ~ zone * log(income) + (1 | client)", ["--weights", "w"], ["--categories", "zone=west,east,north"]),
        ("log(y + 40) ~ I(year - 2000) + sqrt(income)", ["--client", "client", "--frequency", "f"], []),
    ],
)
def test_the_queries_of_covey_sql(spark, stored, tmp_path, formula, more, categories):
    """Spark runs the two statements, and writes a folder that ``covey fit --sums`` reads."""
    table, given = table_of(7, 500, 15), [*more, *categories]
    stored(table).createOrReplaceTempView("visits")
    said = inside("sql", formula, "--table", "visits", "--dialect", "spark", *given, cwd=tmp_path).stdout
    first, second = (part.strip().rstrip(";") for part in said.split("-- Sums by client: the input of covey fit --sums.\n"))
    assert set(spark.sql(first).collect()[0].asDict().values()) == {0, len(table)}
    spark.sql(second).write.parquet(str(tmp_path / "sums"))
    table.write_parquet(tmp_path / "rows.parquet")
    for rows, out, flags in (("sums", "one", ["--sums", *given]), ("rows.parquet", "two", [*more, "--holdout", "0"])):
        inside("fit", rows, formula, *flags, "--out", out, cwd=tmp_path)
    assert_same_coefficients(covey.load(tmp_path / "two"), covey.load(tmp_path / "one"))


def assert_same_coefficients(one, two):
    assert one.terms_ == two.terms_
    size = 1e-3 + np.abs(one.coef_).max(axis=0)
    assert np.abs((one.coef_ - two.coef_) / size).max() < 1e-10
    assert np.abs((one.global_coef_ - two.global_coef_) / size).max() < 1e-10


@pytest.mark.parametrize("at", [0, 1, 3, 5])
def test_a_table_of_ibis(at):
    """An Ibis table on DuckDB."""
    import ibis

    table = table_of(at, 500, 15)
    assert_equal(covey.fit(table, FORMULAS[at]), covey.fit(ibis.memtable(table), FORMULAS[at]))


@pytest.mark.filterwarnings("ignore::covey.ConvergenceWarning")
@pytest.mark.parametrize("at", [0, 3, 5])
def test_the_statement_that_predicts(spark, stored, tmp_path, at):
    """Spark predicts what the model predicts: linear, logistic and counts, with groups that are not in the model."""
    table = test_scoring.table_of(at)
    new = test_scoring.new_rows(table).with_columns(pl.col("row").cast(pl.Int64))
    model = covey.fit(table, replace(test_scoring.SPECS[at], tests=False))
    stored(new).createOrReplaceTempView("visits")
    rows = spark.sql(model.to_sql("visits", tmp_path / "coefficients", dialect="spark")).collect()
    named = "prediction" if model.model_.classes is None else "probability"
    found = [row[named] for row in sorted(rows, key=lambda row: row["row"])]
    assert found == pytest.approx(model.model_.response(new)[1].tolist(), rel=1e-9, abs=1e-9)


@pytest.mark.filterwarnings("ignore::covey.ConvergenceWarning")
@pytest.mark.parametrize("at", [0, 3, 5])
def test_predictions_of_a_dataframe_of_spark_stay_there(stored, at):
    """With braces in a category, and in the name of a column that the model does not use."""
    table = test_scoring.table_of(at).with_columns(pl.col("zone").replace("north", "{north}"))
    new = test_scoring.new_rows(table).with_columns(pl.col("row").cast(pl.Int64), pl.lit(1.0).alias("{row}"))
    model = covey.fit(table, replace(test_scoring.SPECS[at], tests=False))
    lazily = model.predict(stored(new))
    assert type(lazily).__module__.startswith("pyspark.sql")
    rows = sorted(lazily.collect(), key=lambda row: row["row"])
    named = "prediction" if model.model_.classes is None else "probability"
    _, mean, chosen = model.model_.response(new)
    assert [row[named] for row in rows] == pytest.approx(mean.tolist(), rel=1e-9, abs=1e-9)
    assert [row["answered_by"] for row in rows] == chosen.level().tolist()
