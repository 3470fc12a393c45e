"""``covey predict``: a model folder and a table to predictions."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer


def predict(
    model: Annotated[Path, typer.Argument(help="Model folder.")],
    data: Annotated[Path, typer.Argument(help="Table: .parquet, .csv, .csv.gz or .tsv.")],
    level: Annotated[str, typer.Option(help="client, cluster or global.")] = "client",
    unseen: Annotated[
        str, typer.Option(help="Clients not seen in training: 'parent' (the model one level up) or 'raise'.")
    ] = "parent",
    interval: Annotated[
        float | None, typer.Option(help="Add columns lower and upper that cover the expected response with this probability.")
    ] = None,
    noise: Annotated[bool, typer.Option("--noise", help="Let them cover a new response instead.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write to this .parquet or .csv file; else CSV goes to stdout.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, one object a row.")] = False,
) -> None:
    """Predict each row of a table, in its order.

    The column answered_by says whose model spoke: the client's own, its cluster's or the global one.

    [bold]Example[/bold]   covey predict model new_homes.csv --out predictions.parquet
    """
    import polars as pl

    from covey.cli._options import working
    from covey.errors import DataError
    from covey.model.files import load_model
    from covey.tables.rows import read_table

    if noise and interval is None:
        raise DataError("The option --noise is about an interval; give one with --interval 0.95.")
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
        margin, chosen = fitted.margin(table, level=level, unseen=unseen)
        ids = [name for name in (fitted.spec.cluster, fitted.spec.client) if name in table.columns]
        result = table.select(ids)
        mean = fitted.mean(margin)
        if fitted.classes is None:
            result = result.with_columns(prediction=pl.Series(mean))
        else:
            picked = fitted.classes[(margin > 0).astype(int)]
            result = result.with_columns(prediction=pl.Series(picked.tolist()), probability=pl.Series(mean))
        if interval is not None:
            how = {"coverage": interval, "noise": noise, "level": level, "unseen": unseen}
            lower, upper = fitted.intervals(table, **how).T  # type: ignore[arg-type]
            result = result.with_columns(lower=pl.Series(lower), upper=pl.Series(upper))
        result = result.with_columns(answered_by=pl.Series(chosen.level().tolist()))
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
