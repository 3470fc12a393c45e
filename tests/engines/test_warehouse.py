"""Tables of a DuckDB database: in any schema, with any name, and no raw error of the database."""

from __future__ import annotations

import duckdb
import pytest

from covey import CoveyError
from covey.engines.warehouse import open_table


@pytest.fixture
def house(tmp_path):
    with duckdb.connect(tmp_path / "house.duckdb") as connection:
        connection.sql("CREATE TABLE visits AS SELECT 1 AS n")
        for at, schema in enumerate(("raw", 'o"dd')):
            quoted = schema.replace('"', '""')
            connection.sql(f'CREATE SCHEMA "{quoted}"')
            connection.sql(f'CREATE TABLE "{quoted}"."two words" AS SELECT {at + 2} AS n')
        connection.sql("CREATE TABLE gone AS SELECT 1 AS n")
        connection.sql("CREATE VIEW broken AS SELECT * FROM gone")
        connection.sql("DROP TABLE gone")
    return tmp_path / "house.duckdb"


@pytest.mark.parametrize(("table", "n"), [("visits", 1), ("main.visits", 1), ("raw.two words", 2), ('o"dd.two words', 3)])
def test_a_table_of_any_schema(house, table, n):
    assert open_table(house, table).fetchall() == [(n,)]


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ("broken", "'broken' of .*cannot be read"),
        ("raw.visits", "no table 'raw.visits'"),
        ("two words", "did you mean 'raw.two words'"),
        (None, "raw.two words"),
    ],
)
def test_a_table_that_cannot_be_opened(house, table, said):
    with pytest.raises(CoveyError, match=said):
        open_table(house, table)
