"""``covey shard``: lay out a table in shards on disk, for tables that do not fit in memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Annotated

import typer

from covey.cli._options import TableName, working

if TYPE_CHECKING:
    from covey._typing import Say


def shard(
    data: Annotated[
        str, typer.Argument(help="The table: a Parquet file, a folder of them, a pattern 'rows/*.parquet', or .duckdb.")
    ],
    out: Annotated[Path, typer.Argument(help="Folder for the shards: a new one, or one with the shards of this table.")],
    client: Annotated[str, typer.Option(help="Column with the ids of the clients.")],
    table: TableName = None,
    shards: Annotated[int | None, typer.Option(help="Number of shards; by default one for every two million rows.")] = None,
) -> None:
    """Partition a table into shards, each with all rows of its clients. The table is read once, in a stream.

    A table of DuckDB is first written to a Parquet file beside the shards, which is deleted afterwards.

    A linear model needs no shards: covey fit reads sums of many Parquet files, or of a table in DuckDB.

    [bold]Example[/bold]   covey shard 'visits/*.parquet' visits.shards --client patient
    """
    import sys

    import polars as pl

    from covey.engines.warehouse import exported, open_table
    from covey.nodes.layout import laid_out, lay_out, parts_of

    if not laid_out(out, client, shards, source=data, named=table):
        with working("writing shards") as say, _watching(out, data, say), ExitStack() as stack:
            rows = open_table(data, table, lazy=True)
            if not isinstance(rows, pl.LazyFrame):
                rows = stack.enter_context(exported(rows, out.absolute().parent))
            lay_out(rows, out, client, shards, source=data, named=table)
    print(f"{len(parts_of(out)):,} shards by {client} in {out}", file=sys.stderr)


@contextmanager
def _watching(folder: Path, source: str, say: Say) -> Iterator[None]:
    """Say how much is written, about once a second. Shards are about as large as the files that they come from."""
    from covey.nodes.layout import files_of

    stop = Event()

    def watch() -> None:
        with suppress(OSError):  # the error of writing says what is wrong with the files
            whole = sum(file.stat().st_size for file in files_of(source))
            while not stop.wait(1.0):
                say(done=sum(file.stat().st_size for file in files_of(folder)), of=whole)

    thread = Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
