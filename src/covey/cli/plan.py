"""``covey plan``: what each solver would cost on a network, before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from covey.cli import _options


def plan(
    data: Annotated[Path, typer.Argument(help="Table: .parquet, .csv, .csv.gz or .tsv.")],
    formula: Annotated[str, typer.Argument(help="Response and terms, such as 'y ~ log(x) + zone'.")],
    client: Annotated[str | None, typer.Option(help="Column with the clients' ids.")] = None,
    cluster: Annotated[str | None, typer.Option(help="Column with the clusters' ids.")] = None,
    family: Annotated[
        str, typer.Option(help="gaussian, bernoulli (two classes), poisson (counts) or gamma (positive).")
    ] = "gaussian",
    gamma: Annotated[float | None, typer.Option(help="Pull of clients to their cluster; learned if left out.")] = None,
    lam: Annotated[float | None, typer.Option(help="Pull of clusters to the global model (1 with --gamma).")] = None,
    alpha: Annotated[float | None, typer.Option(help="In place of --lam: 0 independent clusters, 1 one cluster.")] = None,
    reduction: Annotated[str, typer.Option(help="'sum' or 'mean' of the loss over a client's rows.")] = "sum",
    ridge: Annotated[float, typer.Option(help="Pull of every client's coefficients to zero.")] = 0.0,
    weights: Annotated[str | None, typer.Option(help="Column with row weights.")] = None,
    offset: Annotated[str | None, typer.Option(help="Column with a known part of the linear predictor.")] = None,
    standardize: _options.Standardize = False,
    accuracy: Annotated[float, typer.Option(help="Share of the squared distance to the minimiser that may be left.")] = 1e-6,
    latency: Annotated[float, typer.Option(help="Seconds for a message, one way.")] = 0.05,
    bandwidth: Annotated[float, typer.Option(help="Megabytes a second, each link.")] = 10.0,
    figure: Annotated[Path | None, typer.Option(help="PNG of all solvers, measured here: gap against exchanges.")] = None,
    max_iter: Annotated[int, typer.Option(help="Most iterations of a solver in the figure.")] = 20_000,
    seed: Annotated[int, typer.Option(help="Seed of the coins in the figure.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Iterations, exchanges on each link, bytes and time of every solver, to a given accuracy; the cheapest is marked.

    [bold]Example[/bold]   covey plan homes.parquet "log_radon ~ floor" --client county --cluster state --latency 0.05
    """
    from covey.cli._console import console, print_json, working
    from covey.errors import DataError
    from covey.fitting.planning import plan as plan_for
    from covey.fitting.planning import race
    from covey.model.model import read_frame
    from covey.problem.spec import Spec
    from covey.tables.rows import read_table

    if figure is not None and (figure.suffix not in (".png", ".pdf", ".svg") or not figure.absolute().parent.is_dir()):
        raise DataError(f"The figure {str(figure)!r} must end in .png, .pdf or .svg, and be in a folder that exists.")
    settings: dict[str, Any] = {"gamma": gamma, "lam": lam, "alpha": alpha, "reduction": reduction, "ridge": ridge}
    columns: dict[str, Any] = {"formula": formula, "client": client, "cluster": cluster, "weights": weights, "offset": offset}
    spec = Spec(family=family, seed=seed, standardize=standardize, **columns, **settings)
    spec.check()
    with working("reading the table") as say:
        grouped, *_ = read_frame(read_table(data, ids=[client, cluster]), spec)
        say("measuring the problem")
        network = {"accuracy": accuracy, "latency": latency, "bandwidth": bandwidth}
        found = plan_for(grouped, family=family, **network, **settings)
        if figure is not None:
            from covey.report.plots import race_figure

            told = race(
                grouped, spec, accuracy=accuracy, max_iter=max_iter, progress=lambda name: say(f"racing in memory: {name}")
            )
            race_figure(told, figure, accuracy=accuracy)
    if as_json:
        from dataclasses import asdict

        document = {**network, "cheapest": found.cheapest, "solvers": [_finite(asdict(cost)) for cost in found.costs]}
        print_json({**document, "figure": None if figure is None else str(figure)})
        return
    screen = console()
    screen.print(str(found), markup=False)
    if figure is not None:
        screen.print(f"\nfigure {figure}", markup=False)


def _finite(cost: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinity."""
    return {name: None if value == float("inf") else value for name, value in cost.items()}
