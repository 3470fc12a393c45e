"""``covey show``: print a model folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from covey.cli._options import console, print_json


def show(
    model: Annotated[Path, typer.Argument(help="Model folder.")],
    level: Annotated[str, typer.Option(help="Which coefficients to list: global, cluster or client.")] = "cluster",
    limit: Annotated[int, typer.Option(help="Largest number of rows to list.", min=1)] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="Print all coefficients of the level as JSON.")] = False,
) -> None:
    """Print the summary and the coefficients of a model.

    [bold]Example[/bold]   covey show model --level client --limit 40
    """
    from covey.errors import ModelError, listing, one_of
    from covey.model.files import load_model
    from covey.model.summary import Summary, describe, facts, title
    from covey.report.tables import coefficient_table
    from covey.tree.hierarchy import LEVELS

    if level not in LEVELS:
        raise one_of("--level", level, LEVELS)
    fitted, _ = load_model(model)
    if level == "client" and fitted.elsewhere is not None:
        raise ModelError(f"The clients' models are at their sites, {listing(fitted.elsewhere.sites, 5)}; show them there.")
    if as_json:
        about = {"title": title(fitted), "facts": facts(fitted), "summary": Summary(fitted).to_json()}
        coefficients = fitted.coefficients(level).to_dicts()  # type: ignore[arg-type]
        print_json({**about, "level": level, "coefficients": coefficients})
        return
    screen = console()
    screen.print(describe(fitted), markup=False)
    screen.print()
    screen.print(coefficient_table(fitted, level, limit))
