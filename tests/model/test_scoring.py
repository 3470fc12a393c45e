"""Predictions by an engine: the numbers of ``predict``, for every family and for groups that are not in the model."""

from __future__ import annotations

from dataclasses import replace

import duckdb
import numpy as np
import polars as pl
import pytest
from polars.testing import assert_frame_equal

import covey
from covey import CoveyError, Spec
from covey.engines.warehouse import open_parts
from covey.model.scoring import Scoring, scored
from covey.tables import files
from tests.cli.shell import inside


def table_of(seed, rows=600, clients=25):
    """Clients in clusters, a badly scaled column, categories, an exposure, and responses of every family."""
    rng = np.random.default_rng(seed)
    client = rng.integers(clients, size=rows)
    year, zone = rng.integers(1995, 2025, rows), rng.choice(["east", "north", "it's"], rows)
    effect = (1.5 * rng.normal(size=clients))[client] + rng.normal(size=4)[client % 4]
    margin = 0.3 + effect + 0.03 * (year - 2010) + 0.5 * (zone == "it's")
    p = 1 / (1 + np.exp(-margin))
    return pl.DataFrame(
        {"year": year, "zone": zone, "client": client, "cluster": [f"g{j}" for j in client % 4]}
        | {"y": margin + rng.normal(size=rows), "exposure": rng.uniform(0.5, 2.0, rows), "floor": rng.integers(3, size=rows)}
        | {"won": np.where(rng.random(rows) < p, "yes", "no"), "n": rng.poisson(np.exp(0.3 * margin))}
        | {"cost": rng.gamma(3.0, np.exp(0.3 * margin) / 3)}
    )


def new_rows(table):
    """Rows of known clients, of new clients in known clusters, of new clusters, and without ids."""
    new = table.head(40).with_row_index("row")
    client = pl.when(pl.col("row") % 4 == 1).then(1000 + pl.col("row")).when(pl.col("row") % 4 == 3).then(None)
    cluster = pl.when(pl.col("row") % 8 == 5).then(pl.lit("elsewhere")).when(pl.col("row") % 8 == 7).then(None)
    return new.with_columns(client=client.otherwise("client").cast(pl.Int64), cluster=cluster.otherwise("cluster"))


SPECS = [
    Spec(formula="y ~ year + zone + (1 | cluster/client)"),
    Spec(formula="y ~ center(year) * zone + (1 + year | client)", standardize=False),
    Spec(formula="y ~ I(year - 2010) + C(floor)", client="client", cluster="cluster", gamma=2.0, lam=1.0, standardize=True),
    Spec(formula="won ~ I((year - 2010) / 10) + zone", family="bernoulli", client="client", cluster="cluster"),
    Spec(formula="won ~ 1 + (1 | client)", family="bernoulli"),
    Spec(formula="n ~ zone + offset(log(exposure)) + (1 | client)", family="poisson"),
    Spec(formula="cost ~ scale(year)", family="gamma", client="client", cluster="cluster", gamma=1.0, lam=1.0),
    Spec(formula="y ~ log(exposure) + zone", family="gaussian"),
]


def by_engines(model, new, folder, **where):
    """The results of the lazy engines and of the statement, in the order of the rows."""
    connection = duckdb.connect()
    relation = connection.from_arrow(new.to_arrow())
    found = {"polars": model.predict(new.lazy(), **where).collect()}
    lazily = model.predict(relation, **where)
    model.predict(relation.filter("row > 1000"), **where)  # a later prediction does not change an earlier one
    found["duckdb"] = lazily.pl()
    relation.create("new rows")
    found["files"] = connection.sql(model.to_sql("new rows", folder, **where)).pl()
    for each in folder.iterdir():
        connection.sql(f"CREATE TABLE {each.stem} AS FROM '{each}'")
    found["tables"] = connection.sql(model.to_sql("main.new rows", **where)).pl()
    return {name: each.sort("row") for name, each in found.items()}


@pytest.mark.filterwarnings("ignore::covey.ConvergenceWarning")
@pytest.mark.parametrize("at", range(len(SPECS)))
def test_engines_predict_what_the_model_predicts(at, tmp_path):
    table = table_of(at)
    new, model = new_rows(table), covey.fit(table, replace(SPECS[at], tests=False))
    levels = ["client", "cluster", "global"] if SPECS[at].cluster or "/" in SPECS[at].formula else ["client"]
    for level in levels:
        for expected in (True, False) if level == levels[-1] or at == 3 else (True,):
            memory = model.predict(new, level=level, expected=expected)
            answered = model.model_.response(new, level=level)[2].level().tolist()
            for name, found in by_engines(model, new, tmp_path / f"{level}{expected}", level=level, expected=expected).items():
                assert found.columns[: len(new.columns)] == new.columns
                assert found["answered_by"].to_list() == answered, name
                if model.model_.classes is None:
                    assert found["prediction"].to_numpy() == pytest.approx(memory, rel=1e-9, abs=1e-9), name
                else:
                    assert found["prediction"].to_list() == memory.tolist()
                    probability = model.predict_proba(new, level=level, expected=expected)[:, 1]
                    assert found["probability"].to_numpy() == pytest.approx(probability, rel=1e-9, abs=1e-9), name


@pytest.mark.parametrize("sd", [0.01, 1.0, 3.0, 5.0, 15.0])
def test_the_mean_over_groups_of_a_logistic_model(sd):
    """Against quadrature on a fine grid, also for groups that differ very much."""
    table = table_of(1)
    model = covey.fit(table, replace(SPECS[4], tests=False))
    model = model.model_
    parts = model.learned.components
    client = replace(parts.client, covariance=np.full_like(parts.client.covariance, sd**2))
    model = replace(model, learned=replace(model.learned, components=replace(parts, client=client)))
    new = pl.DataFrame({"client": [-1]})
    found = scored(model, new.lazy()).collect()["probability"][0]
    z = np.linspace(-9, 9, 200_001)
    density = np.exp(-0.5 * z * z)
    true = float((density / (1 + np.exp(-model.wbar[0] - sd * z))).sum() / density.sum())
    assert found == pytest.approx(true, abs=1e-9)


BAD = {
    "missing": {"year": None},
    "new category": {"zone": "south"},
    "missing category": {"zone": None},
    "infinite": {"exposure": float("inf")},
    "logarithm": {"exposure": -1.0},
    "moved": {"cluster": "g3"},
}


@pytest.mark.parametrize("what", BAD)
def test_rows_that_predict_refuses_have_a_null_prediction(what, tmp_path):
    table = table_of(2)
    model = covey.fit(
        table, Spec(formula="y ~ year + zone + log(exposure)", client="client", cluster="cluster", gamma=1.0, lam=1.0)
    )
    rows = table.filter(pl.col("client") % 4 == 1).head(3).with_row_index("row")
    (column, value), *_ = BAD[what].items()
    bad = rows.with_columns(pl.when(pl.col("row") == 1).then(pl.lit(value)).otherwise(column).alias(column))
    with pytest.raises(CoveyError):
        model.predict(bad)
    for name, found in by_engines(model, bad, tmp_path / "coefficients").items():
        assert found["prediction"].is_null().to_list() == [False, True, False], name


def test_ids_of_other_types_and_categories_of_polars():
    """Client 12.0 is client 12, as in memory; text ids for numbers are refused."""
    table = table_of(3)
    model = covey.fit(table, Spec(formula="y ~ zone", client="client", cluster="cluster", gamma=1.0, lam=1.0))
    new = new_rows(table)
    memory = model.predict(new)
    halves = pl.when(pl.col("row") % 4 == 1).then(pl.col("client") + 0.5).otherwise("client")
    odd = new.with_columns(client=halves, zone=pl.col("zone").cast(pl.Categorical))
    for found in (model.predict(odd.lazy()).collect(), model.predict(duckdb.from_arrow(odd.to_arrow())).pl()):
        assert found.sort("row")["prediction"].to_numpy() == pytest.approx(memory, rel=1e-12)
    with pytest.raises(CoveyError, match=r"client ids are string.*integer"):
        model.predict(new.with_columns(pl.col("client").cast(pl.String)).lazy())


def test_unseen_clients_may_be_refused():
    table = table_of(4)
    model = covey.fit(table, Spec(formula="y ~ year", client="client", gamma=1.0)).set_params(unseen="raise")
    found = model.predict(new_rows(table).lazy()).collect().sort("row")
    assert found["prediction"].is_null().to_list() == [row % 2 == 1 for row in range(40)]


def test_what_no_engine_can_predict():
    table = table_of(5)
    lazy = table.lazy()
    model = covey.fit(table, Spec(formula="y ~ bs(year, df=4)", client="client", gamma=1.0))
    with pytest.raises(CoveyError, match=r"bs\(year, df=4\) cannot be evaluated by the engine"):
        model.predict(lazy)
    model = covey.fit(table, Spec(formula="y ~ year", client="client", gamma=1.0))
    for odd, said in (
        (lazy.drop("year"), "'year'"),
        (lazy.drop("client"), "'client'"),
        (lazy.with_columns(prediction=1), "'prediction' already"),
    ):
        with pytest.raises(CoveyError, match=said):
            model.predict(odd)
    with pytest.raises(CoveyError, match="ids and offset in columns"):
        model.predict(lazy, client=table["client"])
    with pytest.raises(CoveyError, match="dialect"):
        model.to_sql("visits", dialect="oracle")
    arrays = covey.HierarchicalRegressor(gamma=1.0).fit(table.select("year").to_numpy(), table["y"].to_numpy())
    with pytest.raises(CoveyError, match="fitted to arrays"):
        arrays.to_sql("visits")


def test_the_statement_of_spark_quotes_names_and_text():
    model = covey.fit(table_of(6), SPECS[0])
    said = Scoring(model.model_, "spark").statement("`visits`")
    assert "`zone` IN ('east', 'it\\'s', 'north')" in said
    assert "EXCEPT (covey_margin)" in said
    assert '"' not in said


def test_the_command_line_writes_the_statement(tmp_path):
    table = table_of(7)
    model = covey.fit(table, replace(SPECS[0], tests=False))
    model.save(tmp_path / "model")
    said = inside("predict", "model", "visits", "--sql", "duckdb", "--out", "coefficients", cwd=tmp_path).stdout
    connection = duckdb.connect()
    connection.from_arrow(new_rows(table).to_arrow()).create("visits")
    found = connection.sql(said.rstrip().rstrip(";")).pl().sort("row")["prediction"].to_numpy()
    assert found == pytest.approx(model.predict(new_rows(table)), rel=1e-9)
    assert "EXCEPT" in inside("predict", "model", "visits", "--sql", "spark", cwd=tmp_path).stdout
    for wrong in (("--sql", "oracle"), ("--sql", "spark", "--interval", "0.9")):
        assert inside("predict", "model", "visits", *wrong, cwd=tmp_path, check=False).returncode == 2


def test_the_command_line_predicts_in_parts(tmp_path, monkeypatch):
    """In parts of 50 rows, from many files and from text; an error leaves no file, and tells from where rows are counted."""
    table = table_of(8)
    covey.fit(table, replace(SPECS[0], tests=False)).save(tmp_path / "model")
    whole, folder = tmp_path / "all.parquet", tmp_path / "rows"
    folder.mkdir()
    for at in range(3):
        table[at * 200 : (at + 1) * 200].write_parquet(folder / f"{at}.parquet")
    table.write_parquet(whole)
    table.write_csv(tmp_path / "all.csv")
    inside("predict", "model", "all.parquet", "--interval", "0.9", "--out", "one.parquet", cwd=tmp_path)
    with duckdb.connect(tmp_path / "all.duckdb") as database:
        database.sql(f"CREATE TABLE visits AS SELECT * FROM read_parquet('{whole}')")
    monkeypatch.setattr(open_parts, "__kwdefaults__", {"text": (), "rows": 50})
    monkeypatch.setattr(files, "_LARGE", 0)
    in_database = ("all.duckdb", "--table", "visits")
    for source in (("all.parquet",), ("rows/*.parquet",), ("rows",), ("all.csv",), in_database):
        for out in ("parts.parquet", "parts.csv"):
            inside("predict", "model", *source, "--interval", "0.9", "--out", out, cwd=tmp_path)
            assert_frame_equal(covey.read_table(tmp_path / out), pl.read_parquet(tmp_path / "one.parquet"), rel_tol=1e-12)
    said = inside("predict", "model", "all.csv", "--interval", "0.9", cwd=tmp_path).stdout
    assert said == (tmp_path / "parts.csv").read_text()
    bad = table.with_columns(year=pl.when(pl.int_range(pl.len()) == 333).then(None).otherwise("year"))
    bad.write_parquet(whole)
    done = inside("predict", "model", "all.parquet", "--out", "bad.parquet", cwd=tmp_path, check=False)
    assert (done.returncode, "'year'" in done.stderr, "counted from row" in done.stderr) == (2, True, True)
    assert not (tmp_path / "bad.parquet").exists()
