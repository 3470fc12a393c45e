"""``covey predict``: predict the rows of a table of any size with a saved model, or print the statement that does."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from covey.cli._options import AnyTable, TableName, working

if TYPE_CHECKING:
    import polars as pl

    from covey.model.model import Model


def predict(
    model: Annotated[Path, typer.Argument(help="Model folder.")],
    data: AnyTable,
    table: TableName = None,
    level: Annotated[str, typer.Option(help="Whose model to use: client, cluster or global.")] = "client",
    unseen: Annotated[
        str, typer.Option(help="For clients not seen in training: 'parent' uses the model one level up, 'raise' stops.")
    ] = "parent",
    interval: Annotated[
        float | None, typer.Option(help="Add columns lower and upper: an interval of the mean response, such as 0.95.")
    ] = None,
    expected: Annotated[
        bool,
        typer.Option(help="For groups not seen in training, the mean over groups; --no-expected: at a random effect of zero."),
    ] = True,
    noise: Annotated[bool, typer.Option("--noise", help="With --interval: an interval of a new response instead.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="File for the predictions, .parquet or .csv; default: CSV to stdout.")
    ] = None,
    sql: Annotated[
        str | None, typer.Option(help="duckdb or spark: print the statement that predicts the table DATA of a database.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, one object for each row.")] = False,
) -> None:
    """Predict every row of a table.

    The column answered_by says which model made the prediction: that of the client, of its cluster, or the global one. Rows are
    read and written in parts, so the table need not fit in memory; it may be a pattern 'rows/*.parquet', or a table of a DuckDB
    database (--table). With --sql, DATA is the name of a table, and --out is a folder for the coefficients, which the statement
    reads.

    [bold]Example[/bold]   covey predict model new_homes.csv --out predictions.parquet
    """
    from covey.engines.warehouse import open_parts
    from covey.errors import DataError
    from covey.model.files import load_model
    from covey.model.scoring import write_sql

    where = {"level": level, "unseen": unseen, "expected": expected}
    if sql is not None:
        if interval is not None or noise or as_json or table is not None:
            raise DataError("The option --sql writes predictions only; leave out --interval, --noise, --json and --table.")
        print(f"{write_sql(load_model(model)[0], str(data), out, sql, **where)};")
        return
    if noise and interval is None:
        raise DataError("The option --noise needs an interval; add --interval 0.95.")
    if out is not None and out.suffix not in (".parquet", ".csv"):
        raise DataError(f"The output {str(out)!r} must end in .parquet or .csv.")
    if out is not None and (as_json or out.is_dir() or not out.absolute().parent.is_dir()):
        reason = "--json prints to stdout; leave one of them out" if as_json else "its folder must exist, and it must be a file"
        raise DataError(f"The output {str(out)!r} cannot be written: {reason}.")
    fitted, _ = load_model(model)
    spec, tree = fitted.spec, fitted.hierarchy
    kinds = {spec.client: tree.client_ids.dtype, spec.cluster: tree.cluster_ids.dtype}
    rows = 0
    with _written(out, as_json) as write, working("predicting"):
        for part in open_parts(data, table, text=[name for name, kind in kinds.items() if str(kind) == "String"]):
            try:
                write(_predicted(fitted, part, interval, noise, where))
            except DataError as mistake:
                counted = f" (rows are counted from row {rows:,} of the table)" if rows else ""
                raise DataError(f"{str(mistake).rstrip('.')}{counted}.") from None
            rows += len(part)
    if out is not None:
        print(f"{rows:,} predictions written to {out}", file=sys.stderr)


def _predicted(fitted: Model, table: pl.DataFrame, interval: float | None, noise: bool, where: dict[str, Any]) -> pl.DataFrame:
    """The predictions of some rows."""
    import polars as pl

    margin, mean, chosen = fitted.response(table, **where)
    columns = {name: table[name] for name in (fitted.spec.cluster, fitted.spec.client) if name in table.columns}
    if fitted.classes is None:
        columns |= {"prediction": pl.Series(mean)}
    else:
        picked = fitted.classes[(margin > 0).astype(int)]
        columns |= {"prediction": pl.Series(picked.tolist()), "probability": pl.Series(mean)}
    if interval is not None:
        lower, upper = fitted.intervals(table, coverage=interval, noise=noise, **where).T
        columns |= {"lower": pl.Series(lower), "upper": pl.Series(upper)}
    return pl.DataFrame({**columns, "answered_by": pl.Series(chosen.level().tolist())})


@contextmanager
def _written(out: Path | None, as_json: bool) -> Iterator[Any]:
    """Writes parts of the result as they come. A file appears when all of it is written."""
    import polars as pl

    if out is None:
        yield _Text(sys.stdout, as_json).write
        return
    with tempfile.TemporaryDirectory(prefix=".covey-", dir=out.absolute().parent) as scratch:
        whole = Path(scratch) / out.name
        if out.suffix == ".csv":
            with whole.open("wb") as file:
                yield _Text(file, False).write
        else:
            parts = Path(scratch) / "parts"
            parts.mkdir()
            yield lambda part: part.write_parquet(parts / f"{len(list(parts.iterdir())):09d}.parquet")
            pl.scan_parquet(parts / "*.parquet").sink_parquet(whole)
        whole.replace(out)


class _Text:
    """Writes frames as CSV with one header, or as lines of JSON."""

    def __init__(self, file: Any, as_json: bool) -> None:
        self.file, self.as_json, self.header = file, as_json, True

    def write(self, part: pl.DataFrame) -> None:
        text = part.write_ndjson() if self.as_json else part.write_csv(include_header=self.header)
        self.file.write(text if self.file is sys.stdout else text.encode())
        self.header = False
