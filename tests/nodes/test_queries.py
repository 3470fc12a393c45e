"""The queries of ``covey sql``: their result is fitted to the numbers of the table."""

from __future__ import annotations

import duckdb
import numpy as np
import polars as pl
import pytest

import covey
from covey import CoveyError, Spec
from covey.fitting.fit import fit
from covey.nodes.network import InMemory
from covey.nodes.queries import complete, read_sums, sql_queries
from covey.problem.problem import resolve
from tests.cli.shell import inside
from tests.nodes.test_lazy import table_of

ZONES = {"zone": ["west", "east", "north"]}
CASES = [
    (Spec(formula="y ~ year + income + (1 | cluster/client)"), {}),
    (Spec(formula="y ~ zone * log(income) + (1 | client)", weights="w"), ZONES),
    (Spec(formula="log(y + 40) ~ I(year - 2000)", client="client", gamma=2.0, frequency="f", offset="income"), {}),
]


@pytest.mark.parametrize(("spec", "categories"), CASES)
def test_the_sums_of_a_database_give_the_fit_of_the_table(spec, categories):
    visits, draft = table_of(1, 500, 15), resolve(spec)
    connection = duckdb.connect()
    connection.from_arrow(visits.to_arrow()).create("visits")
    look, sums = sql_queries(complete(draft, categories), "duckdb", "visits")
    assert connection.sql(look).pl().row(0) == (500, *[0] * (len(connection.sql(look).columns) - 1))
    data, problem = read_sums(connection.sql(sums).pl(), draft, categories)
    found, memory = fit(InMemory.of(data, problem.loss), problem), covey.fit(visits, spec)
    assert found.terms == memory.terms_
    size = 1e-3 + np.abs(memory.coef_).max(axis=0)
    assert np.abs((found.theta - memory.coef_) / size).max() < 1e-10


def sums_of(table, spec, categories, name="visits"):
    """The result of the second query, which DuckDB computes."""
    connection, draft = duckdb.connect(), resolve(spec)
    connection.from_arrow(table.to_arrow()).create(name)
    found = connection.sql(sql_queries(complete(draft, categories), "duckdb", name)[1]).pl()
    return read_sums(found, draft, categories)


def spoilt(column, value):
    return pl.when(pl.int_range(pl.len()) < 3).then(value).otherwise(pl.col(column)).alias(column)


@pytest.mark.parametrize(
    ("setting", "column", "value"),
    [
        ({"formula": "y ~ log(income) + (1 | client)"}, "income", 0.0),
        ({"formula": "y ~ income + (1 | client)"}, "income", None),
        ({"formula": "y ~ zone + (1 | client)"}, "zone", pl.lit("south")),
        ({"formula": "y ~ zone + (1 | client)"}, "zone", None),
        ({"formula": "y ~ year + (1 | client)"}, "client", None),
        ({"formula": "y ~ year + (1 | client)", "weights": "w"}, "w", -1.0),
        ({"formula": "y ~ year + (1 | client)", "frequency": "f"}, "f", 1.5),
        ({"formula": "y ~ year + (1 | client)", "frequency": "f"}, "f", -1),
        ({"formula": "y ~ year + (1 | client)", "frequency": "f"}, "f", None),
        ({"formula": "y ~ log(income)"}, "income", 0.0),
        ({"formula": "y ~ income + (1 | client)"}, "income", float("nan")),
        ({"formula": "y ~ income + (1 | client)"}, "income", float("-inf")),
        ({"formula": "y ~ year + (1 | client)"}, "y", float("inf")),
        ({"formula": "y ~ year + (1 | client)", "weights": "w"}, "w", float("nan")),
        ({"formula": "y ~ year + (1 | client)", "weights": "w"}, "w", float("inf")),
    ],
)
def test_rows_that_cannot_be_summed_are_counted(setting, column, value):
    table, categories = table_of(3, 200, 10), ZONES if "zone" in setting["formula"] else {}
    sums_of(table, Spec(**setting), categories)
    bad = table.with_columns(spoilt(column, value))
    with pytest.raises(CoveyError, match=r"^3 rows.* cannot be summed"):
        sums_of(bad, Spec(**setting), categories)
    if value is None or (isinstance(value, float) and not np.isfinite(value)):  # the first query finds it too
        look = sql_queries(complete(resolve(Spec(**setting)), categories), "duckdb", "bad")[0]
        assert duckdb.connect().from_arrow(bad.to_arrow()).query("bad", look).pl()["missing " + column][0] == 3


def test_a_row_of_frequency_zero_may_have_any_value():
    table = table_of(3, 200, 10).with_columns(income=pl.when(pl.col("f") > 0).then(pl.col("income")))
    data, _ = sums_of(table, Spec(formula="y ~ income + (1 | client)", frequency="f"), {})
    assert data.rows_per_client.sum() > 0


@pytest.mark.parametrize("names", [("rows", "c0", "weight"), ("z0", "one", "times"), ("s0", "covey", "centred")])
def test_columns_may_have_the_names_of_sums(names):
    table = table_of(4, 300, 10).rename(dict(zip(("client", "year", "w"), names, strict=True)))
    spec = Spec(formula=f"y ~ {names[1]} + (1 | {names[0]})", weights=names[2])
    data, problem = sums_of(table, spec, {}, name="centres")
    found, memory = fit(InMemory.of(data, problem.loss), problem), covey.fit(table, spec)
    assert found.theta == pytest.approx(memory.coef_, rel=1e-8, abs=1e-10)


def test_numbers_as_categories_and_a_folder_of_sums(tmp_path):
    """The model of the sums predicts on the table, whose categories are numbers."""
    table = table_of(5, 300, 10).with_columns(floor=pl.Series([1, 2, 10] * 100))
    formula, categories = "y ~ C(floor) + (1 | client)", ["--categories", "floor=1,2,10"]
    table.write_parquet(tmp_path / "visits.parquet")
    said = inside("sql", formula, *categories, cwd=tmp_path).stdout
    assert "WHEN 10 THEN" in said
    connection = duckdb.connect()
    connection.from_arrow(table.to_arrow()).create("visits")
    sums = connection.sql(said.split("covey fit --sums.\n")[1].strip().rstrip(";")).pl()
    folder = tmp_path / "sums"
    folder.mkdir()
    (folder / "_SUCCESS").touch()
    sums[:4].write_parquet(folder / "part-0.parquet")
    sums[4:].write_parquet(folder / "part-1.parquet")
    inside("fit", "--sums", "sums", formula, *categories, "--out", "model", cwd=tmp_path)
    memory = covey.fit(table, formula)
    assert covey.load(tmp_path / "model").predict(table) == pytest.approx(memory.predict(table), rel=1e-8)


def without_evaluations(said):
    return [line for line in said.splitlines() if not line.endswith("evaluations")]


def test_the_command_line(tmp_path):
    visits, formula = table_of(2, 400, 12), "y ~ zone + year + (1 | cluster/client)"
    visits.write_parquet(tmp_path / "visits.parquet")
    categories = ["--categories", "zone=east,north,west"]
    said = inside("sql", formula, "--table", "visits", *categories, cwd=tmp_path).stdout
    query = said.split("covey fit --sums.\n")[1].strip().rstrip(";")
    connection = duckdb.connect()
    connection.from_arrow(visits.to_arrow()).create("visits")
    connection.sql(query).pl().write_parquet(tmp_path / "sums.parquet")
    memory = inside("fit", "visits.parquet", formula, "--holdout", "0", cwd=tmp_path).stdout
    summed = inside("fit", "--sums", "sums.parquet", formula, *categories, cwd=tmp_path).stdout
    # The engine's sums differ in the last bits, and with them the number of evaluations.
    assert without_evaluations(summed) == without_evaluations(memory)
    other = inside("fit", "--sums", "sums.parquet", "y ~ year + (1 | cluster/client)", cwd=tmp_path, check=False)
    assert (other.returncode, "too many" in other.stderr) == (2, True)
    spark = inside("sql", formula, "--dialect", "spark", *categories, cwd=tmp_path).stdout
    assert "`client`" in spark
    assert inside("sql", formula, "--dialect", "oracle", cwd=tmp_path, check=False).returncode == 2


def test_mistakes():
    draft = resolve(Spec(formula="y ~ C(zone) + (1 | client)"))
    with pytest.raises(CoveyError, match=r"'zone'.*--categories zone="):
        complete(draft, {})
    with pytest.raises(CoveyError, match=r"scale\(x\) learns"):
        complete(resolve(Spec(formula="y ~ scale(x) + (1 | client)")), {})
    with pytest.raises(CoveyError, match="'client'"):
        read_sums(pl.DataFrame({"rows": [1]}), resolve(Spec(formula="y ~ x + (1 | client)")), {})
