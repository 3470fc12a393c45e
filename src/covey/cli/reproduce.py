"""``covey reproduce``: the paper's tables and figures beside its printed numbers, and answers to what it left open."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer


def reproduce(
    study: Annotated[
        str, typer.Argument(help="simulation, donors, limits, communication, robustness, or all of them.")
    ] = "all",
    out: Annotated[Path, typer.Option(help="Folder for README.md, tables and figures.")] = Path("covey-results"),
    quick: Annotated[bool, typer.Option("--quick", help="Smaller and fewer runs, for a first look.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of all draws; the same seed gives the same digits.")] = 0,
    data: Annotated[
        Path | None, typer.Option(help="Donors: the mailing of Karlan and List (openICPSR 113224), .dta or a table.")
    ] = None,
    appeals: Annotated[Path | None, typer.Option(help="Donors: your own table of appeals (id, date).")] = None,
    gifts: Annotated[Path | None, typer.Option(help="Donors: your own table of gifts (id, date, zip).")] = None,
    zips: Annotated[Path | None, typer.Option(help="Donors: a table of ZIP codes (zip, cluster).")] = None,
) -> None:
    """Regenerate the paper's evidence and say, number by number, whether it agrees.

    [bold]Example[/bold]   covey reproduce simulation --out results
    """
    from covey.cli._options import bars, console
    from covey.errors import DataError, one_of
    from covey.report.results import check_folder, save, summary
    from covey.reproduce.catalogue import STUDIES, run

    if study not in (*STUDIES, "all"):
        raise one_of("study", study, (*STUDIES, "all"))
    if seed < 0:
        raise DataError(f"The seed must be a whole number >= 0. Got {seed!r} instead.")
    own = (appeals, gifts, zips) if appeals is not None and gifts is not None and zips is not None else None
    if own is None and (appeals, gifts, zips) != (None, None, None):
        raise DataError("Your own tables come together: give --appeals, --gifts and --zips.")
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
        with bars() as say:
            result = run(name, seed=seed, quick=quick, data=data, tables=own, say=say)
        written = save(result, out, command)
        screen.print(summary(result), markup=False)
        screen.print(f"  figures {', '.join(str(file) for file in written[1:])}\n", markup=False)
    screen.print(f"page   {out / 'README.md'}", markup=False)
