"""``covey plan``: what each solver would cost on a network, before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from covey.cli import _options


@_options.from_settings(
    "formula", "client", "cluster", "family", "gamma", "lam", "alpha", "reduction", "ridge", "weights", "offset", "standardize",
    "seed", gamma="Pull of clients to their cluster; learned if left out.", seed="Seed of the random choices in the figure.",
)  # fmt: skip
def plan(
    data: Annotated[Path, typer.Argument(help="Table: .parquet, .csv, .csv.gz or .tsv.")],
    spec: Any,
    accuracy: Annotated[float, typer.Option(help="Share of the squared distance to the minimiser that may be left.")] = 1e-6,
    latency: Annotated[float, typer.Option(help="Seconds for a message, one way.")] = 0.05,
    bandwidth: Annotated[float, typer.Option(help="Megabytes a second, each link.")] = 10.0,
    figure: Annotated[Path | None, typer.Option(help="PNG of all solvers, measured here: gap against exchanges.")] = None,
    max_iter: Annotated[int, typer.Option(help="Most iterations of a solver in the figure.")] = 20_000,
    as_json: _options.AsJson = False,
) -> None:
    """Iterations, exchanges on each link, bytes and time of every solver, to a given accuracy; the cheapest is marked.

    [bold]Example[/bold]   covey plan homes.parquet "log_radon ~ floor" --client county --cluster state --latency 0.05
    """
    from covey.cli._options import console, print_json, working
    from covey.errors import DataError
    from covey.fitting.planning import plan_for, race
    from covey.problem.problem import read_rows, resolve
    from covey.tables.rows import read_table

    if figure is not None and (figure.suffix not in (".png", ".pdf", ".svg") or not figure.absolute().parent.is_dir()):
        raise DataError(f"The figure {str(figure)!r} must end in .png, .pdf or .svg, and be in a folder that exists.")
    draft = resolve(spec)
    with working("reading the table") as say:
        grouped, problem = read_rows(read_table(data, ids=[draft.spec.client, draft.spec.cluster]), draft)
        say("measuring the problem")
        network = {"accuracy": accuracy, "latency": latency, "bandwidth": bandwidth}
        found = plan_for(grouped, problem, **network)
        if figure is not None:
            from covey.report.plots import race_figure

            paths = race(
                grouped, problem, accuracy=accuracy, max_iter=max_iter, progress=lambda name: say(f"racing in memory: {name}")
            )
            race_figure(paths, figure, accuracy=accuracy)
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
