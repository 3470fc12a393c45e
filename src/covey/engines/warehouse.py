"""Open a table by its path: a file in memory, many Parquet files lazily, or a table of a DuckDB database."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import polars as pl

from covey.errors import DataError, did_you_mean
from covey.tables.files import is_pattern, read_parts, read_table, scan_table

_DATABASES = (".duckdb", ".ddb", ".db")


def open_table(
    path: str | Path,
    table: str | None = None,
    *,
    ids: Sequence[str | None] = (),
    text: Sequence[str | None] = (),
    lazy: bool = False,
    named_by: str = "--table",
) -> Any:
    """Open a table.

    Parameters
    ----------
    path : a file for :func:`covey.read_table`; a pattern or folder of Parquet files; or a DuckDB database
    table : the name of a table or view of the database, such as ``visits``, or ``raw.visits`` in a schema ``raw``
    ids, text : columns of a text file, as in :func:`covey.read_table`
    lazy : whether to leave a single Parquet file on disk too
    named_by : the setting that gives ``table``, for error messages

    Returns
    -------
    A polars frame, or a lazy frame of polars, or a relation of DuckDB. Nothing of a lazy table is read yet.
    """
    if Path(path).suffix in _DATABASES:
        return _relation(Path(path), table, named_by)
    _refuse_name(path, table, named_by)
    return scan_table(path) if lazy or is_pattern(path) else read_table(path, ids=ids, text=text)


def open_parts(
    path: str | Path, table: str | None = None, *, text: Sequence[str | None] = (), rows: int = 500_000
) -> Iterator[pl.DataFrame]:
    """Read what :func:`open_table` opens in parts of about this many rows, in its order."""
    if Path(path).suffix not in _DATABASES:
        _refuse_name(path, table, "--table")
        yield from read_parts(path, text=text, rows=rows)
        return
    relation = _relation(Path(path), table, "--table")
    import duckdb

    try:
        newer = hasattr(relation, "to_arrow_reader")
        reader = relation.to_arrow_reader(rows) if newer else relation.fetch_record_batch(rows)
        first = next(reader, None)
        yield pl.DataFrame(reader.schema.empty_table() if first is None else first)
        yield from map(pl.DataFrame, reader)
    except duckdb.Error as problem:
        raise DataError(f"The table {table!r} of {str(path)!r} cannot be read: {_first_line(problem)}.") from None


def _refuse_name(path: str | Path, table: str | None, named_by: str) -> None:
    if table is not None:
        raise DataError(
            f"{named_by} names a table of a DuckDB database, and {str(path)!r} does not end in .duckdb; leave it out."
        )


def in_engine(path: str | Path) -> bool:
    """Whether :func:`open_table` leaves the rows of a table where they are."""
    return Path(path).suffix in _DATABASES or is_pattern(path)


@contextmanager
def exported(relation: Any, folder: Path) -> Iterator[pl.LazyFrame]:
    """The rows of a relation of DuckDB in a Parquet file, which DuckDB writes in a stream, and which is deleted afterwards."""
    import duckdb

    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=".covey-", dir=folder) as scratch:
            path = Path(scratch) / "rows.parquet"
            relation.write_parquet(str(path))
            yield scan_table(path)
    except (duckdb.Error, OSError) as problem:
        raise DataError(f"The table cannot be written to {str(folder)!r}: {_first_line(problem)}.") from None


def _relation(path: Path, table: str | None, named_by: str) -> Any:
    if not path.is_file():
        raise DataError(f"There is no file {str(path)!r}; check the path.")
    if find_spec("duckdb") is None:
        raise DataError("A DuckDB database needs the package duckdb; pip install '.[duckdb]' in the folder of covey.")
    import duckdb

    try:
        connection = duckdb.connect(str(path), read_only=True)
        listed = connection.sql("SELECT table_schema, table_name FROM information_schema.tables ORDER BY 1, 2").fetchall()
    except duckdb.Error as problem:
        raise DataError(f"The database {str(path)!r} cannot be opened: {_first_line(problem)}.") from None
    places = {name if schema == "main" else f"{schema}.{name}": (schema, name) for schema, name in listed}
    names = list(places)
    if table is None:
        raise DataError(f"Name a table of {str(path)!r} with {named_by}; it has {', '.join(names[:8]) or 'none'}.")
    place = places.get(table) or places.get(table.removeprefix("main."))
    if place is None:
        raise DataError(f"The database {str(path)!r} has no table {table!r}; {did_you_mean(table, names)}")
    try:
        return connection.sql("SELECT * FROM " + ".".join('"' + part.replace('"', '""') + '"' for part in place))
    except duckdb.Error as problem:  # such as a view of a file that is gone
        raise DataError(f"The table {table!r} of {str(path)!r} cannot be read: {_first_line(problem)}.") from None


def _first_line(problem: Exception) -> str:
    return str(problem).splitlines()[0].rstrip(".")
