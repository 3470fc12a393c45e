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
    effects: Annotated[bool, typer.Option("--effects", help="Deviations of clients or clusters, with variances.")] = False,
    robust: Annotated[
        str | None, typer.Option(help="Global coefficients with robust errors: CR0, CR1, CR1p, CR1S, CR2, CR3.")
    ] = None,
    profile: Annotated[str | None, typer.Option(help="Profile intervals: components, penalties or coefficients.")] = None,
    r2: Annotated[bool, typer.Option("--r2", help="Shares of variance explained, marginal and conditional.")] = False,
    data: Annotated[
        Path | None, typer.Option(help="Rows of the fit; --profile and --r2 of counts and classes need it.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all coefficients of the level as JSON.")] = False,
) -> None:
    """Print the summary and the coefficients of a model.

    With --effects, --robust, --profile or --r2, these instead of the coefficients.

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
    asked = {"--effects": effects, "--robust": robust is not None, "--profile": profile is not None, "--r2": r2}
    if sum(asked.values()) > 1:
        raise ModelError(f"Choose one of {listing([name for name, given in asked.items() if given])}.")
    if level == "client" and fitted.elsewhere is not None:
        raise ModelError(f"The clients' models are at their sites, {listing(fitted.elsewhere.sites, 5)}; show them there.")
    if any(asked.values()):
        below = "client" if level == "client" else "cluster"
        _print_instead(
            model, below, effects=effects, robust=robust, profile=profile, r2=r2, data=data, limit=limit, as_json=as_json
        )
        return
    if as_json:
        about = {"title": title(fitted), "facts": facts(fitted), "summary": Summary(fitted).to_json()}
        coefficients = fitted.coefficients(level).to_dicts()  # type: ignore[arg-type]
        print_json({**about, "level": level, "coefficients": coefficients})
        return
    screen = console()
    screen.print(describe(fitted), markup=False)
    screen.print()
    screen.print(coefficient_table(fitted, level, limit))


def _print_instead(
    path: Path,
    level: str,
    *,
    effects: bool,
    robust: str | None,
    profile: str | None,
    r2: bool,
    data: Path | None,
    limit: int,
    as_json: bool,
) -> None:
    """Print random effects, robust standard errors, R2 or profile intervals."""
    import polars as pl

    from covey.cli.infer import loaded, table_for
    from covey.report.tables import frame_table

    estimator = loaded(path)
    if effects:
        found, title = estimator.random_effects(level), f"Deviations of {level}s, with conditional variances"
    elif robust is not None:
        found, title = estimator.robust(robust), f"Global coefficients with cluster-robust standard errors ({robust})"
    elif r2:
        found, title = pl.DataFrame([estimator.r2(table_for(data, path))._asdict()]), "R2: by fixed effects, and with groups"
    else:
        found = estimator.profile(table_for(data, path), which=profile)
        title = f"95% profile intervals of {profile}"
    if as_json:
        print_json(found.to_dicts())
        return
    console().print(frame_table(found, title, limit))
