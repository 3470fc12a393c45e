"""``covey reproduce``: repeat the experiments of the paper (arXiv:2204.13619) and compare with its printed numbers.

Further studies answer questions that the paper leaves open.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from covey.cli._options import console


def reproduce(
    study: Annotated[str, typer.Argument(help="simulation, donors, limits, communication, robustness, or all.")] = "all",
    out: Annotated[Path, typer.Option(help="Folder for README.md, tables and figures.")] = Path("covey-results"),
    quick: Annotated[bool, typer.Option("--quick", help="Fewer and smaller runs, for a first look.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of all random numbers; the same seed gives the same results.")] = 0,
    data: Annotated[
        Path | None, typer.Option(help="For donors: the data of Karlan and List (openICPSR 113224), as .dta or a table.")
    ] = None,
    appeals: Annotated[Path | None, typer.Option(help="For donors: your own table of appeals (id, date).")] = None,
    gifts: Annotated[Path | None, typer.Option(help="For donors: your own table of gifts (id, date, zip).")] = None,
    zips: Annotated[Path | None, typer.Option(help="For donors: your own table of ZIP codes (zip, cluster).")] = None,
) -> None:
    """Repeat the experiments of the paper, and compare every number with the printed one.

    [bold]Example[/bold]   covey reproduce simulation --out results
    """
    from covey.errors import DataError, one_of
    from covey.report.results import check_folder, save, summary
    from covey.reproduce.catalogue import STUDIES, run

    if study not in (*STUDIES, "all"):
        raise one_of("study", study, (*STUDIES, "all"))
    if seed < 0:
        raise DataError(f"The seed must be a whole number >= 0. Got {seed!r} instead.")
    own = (appeals, gifts, zips) if appeals is not None and gifts is not None and zips is not None else None
    if own is None and (appeals, gifts, zips) != (None, None, None):
        raise DataError("Your own tables are needed together: give --appeals, --gifts and --zips.")
    if own is not None and data is not None:
        raise DataError("The study of donors takes --data or your own tables, not both; run it twice into the same folder.")
    if study not in ("donors", "all") and (own or data is not None):
        raise DataError(f"The study {study!r} draws its own data; leave out --data, --appeals, --gifts and --zips.")
    check_folder(out)
    given = {"--data": data, "--appeals": appeals, "--gifts": gifts, "--zips": zips}
    files = [f"{option} {shlex.quote(path.name)}" for option, path in given.items() if path is not None]
    command = " ".join(["covey reproduce", study, *files, *(["--quick"] if quick else []), f"--seed {seed}"])
    screen = console()
    for name in STUDIES if study == "all" else (study,):
        with _progress_bars() as say:
            result = run(name, seed=seed, quick=quick, data=data, tables=own, say=say)
        written = save(result, out, command)
        screen.print(summary(result), markup=False)
        screen.print(f"  figures {', '.join(str(file) for file in written[1:])}\n", markup=False)
    screen.print(f"page   {out / 'README.md'}", markup=False)


@contextmanager
def _progress_bars() -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar for each kind of work, by its name; nothing in a pipe."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    screen = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as progress:
        tasks: dict[str, Any] = {}

        def say(what: str, done: int, todo: int) -> None:
            if what not in tasks:
                tasks[what] = progress.add_task(what, total=todo)
            progress.update(tasks[what], completed=done)

        yield say
