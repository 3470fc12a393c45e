"""``covey report``: write the report of a saved model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from covey.cli._options import working


def report(
    model: Annotated[Path, typer.Argument(help="Model folder.")],
    data: Annotated[Path | None, typer.Option(help="Table of the fit; held-out errors and residuals need it.")] = None,
    out: Annotated[Path, typer.Option(help="File for the report.")] = Path("report.html"),
    title: Annotated[str | None, typer.Option(help="Heading of the report.")] = None,
    question: Annotated[str | None, typer.Option(help="The question that the model answers, in your words.")] = None,
    show: Annotated[bool, typer.Option("--open", help="Open the report in a browser.")] = False,
) -> None:
    """Write one HTML file about a model, to read and to send: answer, tests, gains, surprising groups, search, checks.

    [bold]Example[/bold]   covey report model --data homes.parquet --out radon.html
    """
    from covey.cli.infer import loaded, table_for

    with working("writing the report"):
        path = loaded(model).report(out, table_for(data, model), title=title, question=question)
    print(path)
    if show:
        import webbrowser

        webbrowser.open(path.absolute().as_uri())
