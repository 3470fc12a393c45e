"""``covey plan``: estimate what each solver would cost on a network, before anything runs there."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from covey.cli._options import AsJson, Table, console, from_settings, print_json, working


@from_settings(
    "formula", "client", "cluster", "family", "gamma", "lam", "alpha", "reduction", "ridge", "weights", "offset",
    "frequency", "trials", "na", "standardize",
    "seed", gamma="Pull of clients towards their cluster; learned if left out.", seed="Seed of random choices in the figure.",
)  # fmt: skip
def plan(
    data: Table,
    spec: Any,
    accuracy: Annotated[
        float, typer.Option(help="Accuracy to reach: share of the squared distance to the minimiser that may remain.")
    ] = 1e-6,
    latency: Annotated[float, typer.Option(help="Seconds that a message takes, one way.")] = 0.05,
    bandwidth: Annotated[float, typer.Option(help="Megabytes per second of each connection.")] = 10.0,
    rows_per_second: Annotated[float, typer.Option(help="Rows whose gradient a client computes in a second.")] = 1e6,
    speeds: Annotated[
        Path | None,
        typer.Option(help="Table of clusters with other speeds: columns cluster, rows_per_second, latency, bandwidth."),
    ] = None,
    timeline: Annotated[
        Path | None, typer.Option(help="Draw when each cluster computes, sends and waits in l2gd: .png, .pdf or .svg.")
    ] = None,
    figure: Annotated[
        Path | None, typer.Option(help="Run all solvers here, and draw their gap against exchanges: .png, .pdf or .svg.")
    ] = None,
    max_iter: Annotated[int, typer.Option(help="Largest number of iterations of a solver in the figure.")] = 20_000,
    as_json: AsJson = False,
) -> None:
    """Estimate iterations, exchanges on each connection, bytes and time of every solver; that with the shortest time is marked.

    [bold]Example[/bold]   covey plan homes.parquet "log_radon ~ floor" --client county --cluster state --latency 0.05
    """
    from dataclasses import asdict

    from covey.errors import DataError
    from covey.fitting.planning import example_timelines, race
    from covey.fitting.planning import plan as plan_solvers
    from covey.problem.problem import resolve
    from covey.problem.rows import read_rows
    from covey.tables.files import read_table

    for path in (figure, timeline):
        if path is not None and (path.suffix not in (".png", ".pdf", ".svg") or not path.absolute().parent.is_dir()):
            raise DataError(f"The figure {str(path)!r} must end in .png, .pdf or .svg, and be in a folder that exists.")
    draft = resolve(spec)
    with working("reading the table") as say:
        grouped, problem = read_rows(read_table(data, ids=[draft.spec.client, draft.spec.cluster]), draft)
        say("measuring the problem")
        network: dict[str, Any] = {"accuracy": accuracy, "latency": latency, "bandwidth": bandwidth}
        network["rows_per_second"] = rows_per_second
        table = None if speeds is None else read_table(speeds, ids=["cluster"])
        found = plan_solvers(grouped, problem.spec, **network, speeds=table)
        if timeline is not None:
            from covey.report.plots import timeline_figure

            names = [str(label) for label in grouped.hierarchy.cluster_ids.to_list()]
            timeline_figure(example_timelines(grouped, found, problem.spec.seed), names, timeline)
        if figure is not None:
            from covey.report.plots import race_figure

            paths = race(
                grouped, problem, accuracy=accuracy, max_iter=max_iter, progress=lambda name: say(f"running {name} in memory")
            )
            race_figure(paths, figure, accuracy=accuracy)
    if as_json:
        solvers = [{name: _finite(value) for name, value in asdict(cost).items()} for cost in found.costs]
        about = {"cheapest": found.cheapest, "solvers": solvers, "figure": None if figure is None else str(figure)}
        about["timeline"] = None if timeline is None else str(timeline)
        print_json({**network, **about})
        return
    screen = console()
    screen.print(str(found), markup=False)
    for path in (figure, timeline):
        if path is not None:
            screen.print(f"\nfigure {path}", markup=False)


def _finite(value: Any) -> Any:
    """The value; None for infinity, which JSON lacks."""
    return None if value == float("inf") else value
