"""``covey sql``: print the queries whose result ``covey fit --sums`` takes, for a database that covey does not reach."""

from __future__ import annotations

import re
from typing import Annotated, Any

import typer

from covey.cli._options import from_settings

Categories = Annotated[
    list[str] | None,
    typer.Option("--categories", help="Categories of a column, as in zone=east,north or floor=1,2; may be repeated."),
]


@from_settings("formula", "client", "cluster", "weights", "frequency", "offset")
def sql(
    spec: Any,
    table: Annotated[str, typer.Option(help="Name of the table.")] = "visits",
    dialect: Annotated[str, typer.Option(help="duckdb or spark.")] = "duckdb",
    categories: Categories = None,
) -> None:
    """Print two queries: one counts missing and infinite values, the other computes the sums by client that a linear fit needs.

    Run the second query, write its result to a Parquet file, and fit it with covey fit --sums.

    [bold]Example[/bold]   covey sql "cost ~ age + (1 | hospital/patient)" --table visits --dialect spark
    """
    from covey.errors import one_of
    from covey.nodes.queries import complete, sql_queries
    from covey.problem.problem import resolve
    from covey.tables.pushdown import DIALECTS

    if dialect not in DIALECTS:
        raise one_of("dialect", dialect, DIALECTS)
    problem = complete(resolve(spec), categories_of(categories))
    look, sums = sql_queries(problem, "spark" if dialect == "spark" else "duckdb", table)
    print(f"-- Look: every number of missing or infinite values must be 0.\n{look};\n")
    print(f"-- Sums by client: the input of covey fit --sums.\n{sums};")


def categories_of(given: list[str] | None) -> dict[str, list[Any]]:
    """The categories that options name: numbers or truth values if all of them can be read so, else text.

    >>> categories_of(["floor=1,2,10", "zone=a,1", "zip=01,02", "seen=true,false", "code='1','2'"])
    {'floor': [1, 2, 10], 'zone': ['a', '1'], 'zip': ['01', '02'], 'seen': [True, False], 'code': ['1', '2']}
    """
    from covey.errors import DataError

    found: dict[str, list[Any]] = {}
    for text in given or ():
        name, equals, values = text.partition("=")
        if not (name and equals and values):
            raise DataError(f"The option --categories must be column=a,b,c. Got {text!r} instead.")
        found[name] = _read(values.split(","))
    return found


def _read(values: list[str]) -> list[Any]:
    if all(re.fullmatch(r"-?(0|[1-9]\d*)", value) for value in values):
        return [int(value) for value in values]
    if all(re.fullmatch(r"-?(0|[1-9]\d*)(\.\d+)?", value) for value in values):
        return [float(value) for value in values]
    if all(value.lower() in ("true", "false") for value in values):
        return [value.lower() == "true" for value in values]
    return [value[1:-1] if re.fullmatch("'.*'", value) else value for value in values]
