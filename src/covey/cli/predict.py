"""``covey predict``: predict the rows of a table with a saved model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from covey.cli._options import Table, working


def predict(
    model: Annotated[Path, typer.Argument(help="Model folder.")],
    data: Table,
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
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, one object for each row.")] = False,
) -> None:
    """Predict every row of a table.

    The column answered_by says which model made the prediction: that of the client, of its cluster, or the global one.

    [bold]Example[/bold]   covey predict model new_homes.csv --out predictions.parquet
    """
    import polars as pl

    from covey.errors import DataError
    from covey.model.files import load_model
    from covey.tables.files import read_table

    if noise and interval is None:
        raise DataError("The option --noise needs an interval; add --interval 0.95.")
    if out is not None and out.suffix not in (".parquet", ".csv"):
        raise DataError(f"The output {str(out)!r} must end in .parquet or .csv.")
    if out is not None and (as_json or out.is_dir() or not out.absolute().parent.is_dir()):
        reason = "--json prints to stdout; leave one of them out" if as_json else "its folder must exist, and it must be a file"
        raise DataError(f"The output {str(out)!r} cannot be written: {reason}.")
    with working("predicting"):
        fitted, _ = load_model(model)
        spec, tree = fitted.spec, fitted.hierarchy
        kinds = {spec.client: tree.client_ids.dtype, spec.cluster: tree.cluster_ids.dtype}
        table = read_table(data, text=[name for name, kind in kinds.items() if kind == pl.String])
        where = {"level": level, "unseen": unseen, "expected": expected}
        margin, mean, chosen = fitted.response(table, **where)  # type: ignore[arg-type]
        ids = [name for name in (fitted.spec.cluster, fitted.spec.client) if name in table.columns]
        columns = {name: table[name] for name in ids}
        if fitted.classes is None:
            columns |= {"prediction": pl.Series(mean)}
        else:
            picked = fitted.classes[(margin > 0).astype(int)]
            columns |= {"prediction": pl.Series(picked.tolist()), "probability": pl.Series(mean)}
        if interval is not None:
            lower, upper = fitted.intervals(table, coverage=interval, noise=noise, **where).T  # type: ignore[arg-type]
            columns |= {"lower": pl.Series(lower), "upper": pl.Series(upper)}
        result = pl.DataFrame({**columns, "answered_by": pl.Series(chosen.level().tolist())})
    if out is not None:
        if out.suffix == ".parquet":
            result.write_parquet(out)
        else:
            result.write_csv(out)
        print(f"{len(result):,} predictions written to {out}", file=sys.stderr)
    elif as_json:
        sys.stdout.write(result.write_ndjson())
    else:
        sys.stdout.write(result.write_csv())
