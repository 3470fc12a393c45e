"""``covey compare``, ``means``, ``contrast``, ``residuals`` and ``simulate``: inference from saved models."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from covey.cli._options import AsJson, Table, console, print_json, working

ModelFolder = Annotated[Path, typer.Argument(help="Model folder.")]
At = Annotated[list[str] | None, typer.Option("--at", help="Hold a column at values: name=1,2 or name=word; repeatable.")]
By = Annotated[list[str] | None, typer.Option(help="Further column of categories; repeatable.")]
Data = Annotated[Path | None, typer.Option(help="Table of the fit, for the means of numeric columns.")]
Coverage = Annotated[float, typer.Option(help="Coverage of the intervals.")]
Out = Annotated[Path | None, typer.Option(help="File for the result, .parquet or .csv; default: CSV to stdout.")]


def compare(
    models: Annotated[list[Path], typer.Argument(help="Two or more model folders, fitted to the same rows.")],
    as_json: AsJson = False,
) -> None:
    """Compare models of the same rows: likelihood-ratio tests, AIC and BIC.

    Linear models that were fitted by REML are fitted again by ML, from the sums that they keep.

    [bold]Example[/bold]   covey compare small large
    """
    from covey.errors import SolverError
    from covey.estimators.comparing import comparison
    from covey.model.files import load_model

    if len(models) < 2:
        raise SolverError(f"A comparison needs at least two models. Got {len(models)} instead; name two folders.")
    found = comparison([load_model(path)[0] for path in models], [str(path) for path in models])
    _print(found, "Comparison by maximum likelihood", as_json)


def means(
    model: ModelFolder,
    term: Annotated[str, typer.Argument(help="Column of categories, or a numeric column with --at.")],
    by: By = None,
    at: At = None,
    data: Data = None,
    scale: Annotated[str, typer.Option(help="link (the linear predictor) or response.")] = "link",
    coverage: Coverage = 0.95,
    as_json: AsJson = False,
) -> None:
    """Estimate the mean response of each category by the global model (marginal means).

    [bold]Example[/bold]   covey means model zone --at floor=0,1
    """
    from covey.errors import one_of

    if scale not in ("link", "response"):
        raise one_of("--scale", scale, ("link", "response"))
    given: dict[str, Any] = {"by": by or [], "at": _at(at), "data": table_for(data), "scale": scale, "coverage": coverage}
    _print(loaded(model).means(term, **given), f"Estimated means of {term}", as_json)


def contrast(
    model: ModelFolder,
    term: Annotated[str, typer.Argument(help="Column whose means are compared.")],
    method: Annotated[str, typer.Option(help="pairwise, or reference: each category minus the first.")] = "pairwise",
    by: By = None,
    at: At = None,
    data: Data = None,
    adjust: Annotated[str, typer.Option(help="For many comparisons: none, bonferroni, holm or tukey.")] = "none",
    coverage: Coverage = 0.95,
    as_json: AsJson = False,
) -> None:
    """Estimate differences between the means of categories, with intervals and p-values.

    [bold]Example[/bold]   covey contrast model zone --adjust holm
    """
    given: dict[str, Any] = {"by": by or [], "at": _at(at), "data": table_for(data), "method": method, "adjust": adjust}
    _print(loaded(model).contrast(term, coverage=coverage, **given), f"Contrasts of {term}", as_json)


def residuals(
    model: ModelFolder,
    data: Table,
    kind: Annotated[str, typer.Option(help="response, pearson, deviance, working, scaled or quantile.")] = "response",
    level: Annotated[str, typer.Option(help="Whose model to use: client, cluster or global.")] = "client",
    out: Out = None,
) -> None:
    """Compute the residual of every row of a table, which must have the response.

    [bold]Example[/bold]   covey residuals model homes.parquet --kind pearson --out residuals.csv
    """
    import polars as pl

    check_out(out)
    with working("computing"):
        found = loaded(model).residuals(table_for(data, model), kind=kind, level=level)
    _write(pl.DataFrame({"residual": found}), out, "residuals")


def simulate(
    model: ModelFolder,
    data: Table,
    n: Annotated[int, typer.Option(help="Number of draws.", min=1)] = 1,
    effects: Annotated[str, typer.Option(help="new: draw groups too; fitted: the groups of the model.")] = "new",
    seed: Annotated[int, typer.Option(help="Seed of the draws.")] = 0,
    out: Out = None,
) -> None:
    """Draw responses from a model, for the rows of a table.

    [bold]Example[/bold]   covey simulate model homes.parquet --n 20 --out draws.parquet
    """
    import polars as pl

    check_out(out)
    with working("drawing"):
        drawn = loaded(model).set_params(random_state=seed).simulate(table_for(data, model), n, effects=effects)
    _write(pl.DataFrame({f"draw_{at + 1}": drawn[:, at] for at in range(n)}), out, "rows of draws")


def loaded(path: Path) -> Any:
    """The estimator of a model folder."""
    from covey.estimators import load

    return load(path)


def table_for(path: Path | None, model: Path | None = None) -> Any:
    """A table; the ids of a model that are text stay text."""
    import polars as pl

    from covey.model.files import load_model
    from covey.tables.files import read_table

    if path is None:
        return None
    if model is None:
        return read_table(path)
    fitted = load_model(model)[0]
    kinds = {fitted.spec.client: fitted.hierarchy.client_ids.dtype, fitted.spec.cluster: fitted.hierarchy.cluster_ids.dtype}
    return read_table(path, text=[name for name, kind in kinds.items() if kind == pl.String and name is not None])


def _at(given: list[str] | None) -> dict[str, Any]:
    """Pairs ``name=value,value``; values are numbers or words."""
    from covey.errors import DataError

    found: dict[str, Any] = {}
    for pair in given or ():
        name, equals, text = (part.strip() for part in pair.partition("="))
        if not (name and equals and text):
            raise DataError(f"The option --at must be name=value, such as floor=0,1. Got {pair!r} instead.")
        found[name] = [_number(part.strip()) for part in text.split(",")]
    return found


def _number(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def check_out(out: Path | None) -> None:
    """Refuse a file that cannot be written, before any work."""
    from covey.errors import DataError

    if out is not None and (out.suffix not in (".parquet", ".csv") or out.is_dir() or not out.absolute().parent.is_dir()):
        raise DataError(f"The output {str(out)!r} must be a file that ends in .parquet or .csv, in a folder that exists.")


def _write(found: Any, out: Path | None, what: str) -> None:
    if out is None:
        sys.stdout.write(found.write_csv())
        return
    if out.suffix == ".parquet":
        found.write_parquet(out)
    else:
        found.write_csv(out)
    print(f"{len(found):,} {what} written to {out}", file=sys.stderr)


def _print(found: Any, title: str, as_json: bool) -> None:
    from covey.report.tables import frame_table

    if as_json:
        print_json(found.to_dicts())
        return
    console().print(frame_table(found, title))
