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
    assert inside("fit", "--sums", "sums.parquet", formula, *categories, cwd=tmp_path).stdout == memory
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
