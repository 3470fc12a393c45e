"""``covey plot``: draw a picture of a saved model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from covey.cli._options import working

KINDS = (
    "shrinkage", "caterpillar", "variance", "reliability", "effect", "residuals", "calibration", "convergence", "exchanges",
    "timeline",
)  # fmt: skip
_NEED_DATA = ("residuals", "calibration", "timeline")


def plot(
    model: Annotated[Path, typer.Argument(help="Model folder.")],
    kind: Annotated[str, typer.Argument(help=f"One of {', '.join(KINDS)}.")],
    data: Annotated[
        Path | None, typer.Option(help="Table of the fit; residuals, calibration, timeline and some effects need it.")
    ] = None,
    column: Annotated[str | None, typer.Option(help="For effect: the column.")] = None,
    term: Annotated[str | None, typer.Option(help="For caterpillar and reliability: the term.")] = None,
    level: Annotated[str, typer.Option(help="For caterpillar: client or cluster.")] = "client",
    against: Annotated[str, typer.Option(help="For residuals: fitted, quantile or group.")] = "fitted",
    out: Annotated[Path | None, typer.Option(help="File: .png, .svg or .pdf; default: KIND.png.")] = None,
    dark: Annotated[bool, typer.Option("--dark", help="Light lines on a dark ground.")] = False,
) -> None:
    """Draw a picture of a model. Its title states what it shows.

    [bold]Example[/bold]   covey plot model shrinkage --out shrinkage.png
    """
    from covey.cli.infer import loaded, table_for
    from covey.errors import DataError, one_of

    if kind not in KINDS:
        raise one_of("kind", kind, KINDS)
    out = Path(f"{kind}.png") if out is None else out
    if out.suffix not in (".png", ".svg", ".pdf") or out.is_dir() or not out.absolute().parent.is_dir():
        raise DataError(f"The picture {str(out)!r} must be a file that ends in .png, .svg or .pdf, in a folder that exists.")
    if kind in _NEED_DATA and data is None:
        raise DataError(f"The picture {kind!r} needs rows with their responses; add --data with the table of the fit.")
    if kind == "effect" and column is None:
        raise DataError("The picture 'effect' needs a column; add --column.")
    with working("drawing"):
        import matplotlib as mpl

        mpl.use("Agg")
        estimator = loaded(model)
        table = table_for(data, model)
        plots, given = estimator.plot, _options_of(kind, term, level)
        if kind == "effect":
            ax = plots.effect(column, data=table, dark=dark)
        elif kind == "residuals":
            ax = plots.residuals(table, kind=against, dark=dark)
        elif kind in ("calibration", "shrinkage", "timeline"):
            ax = getattr(plots, kind)(data=table, dark=dark)
        else:
            ax = getattr(plots, kind)(**given, dark=dark)
        ax.figure.savefig(out, dpi=150, metadata={"Date": None} if out.suffix == ".svg" else None)
    print(f"{' '.join(ax.get_title('left').split())}\n{out}")


def _options_of(kind: str, term: str | None, level: str) -> dict[str, Any]:
    if kind == "caterpillar":
        return {"level": level, "term": term}
    return {"term": term} if kind == "reliability" else {}
