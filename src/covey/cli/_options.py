"""The options that several commands share, each said once."""

from __future__ import annotations

from typing import Annotated

import typer

from covey.solvers.registry import choices, randomised

Client = Annotated[str | None, typer.Option(help="Column with the clients' ids, unless the formula names it.")]
Cluster = Annotated[str | None, typer.Option(help="Column with the clusters' ids.")]
Family = Annotated[str, typer.Option(help="gaussian, bernoulli (two classes), poisson (counts) or gamma (positive).")]
Vary = Annotated[list[str] | None, typer.Option(help="A term that varies; all by default. Repeat it.")]
Covariance = Annotated[str | None, typer.Option(help="isotropic, diagonal or full; diagonal by default.")]
PerCluster = Annotated[bool, typer.Option("--per-cluster", help="Learn each cluster's own spread of clients.")]
Tests = Annotated[bool, typer.Option("--tests/--no-tests", help="Test whether clients differ and clusters matter.")]
Gamma = Annotated[float | None, typer.Option(help="Pull of clients to their cluster, if not to be learned.")]
Lam = Annotated[float | None, typer.Option(help="Pull of clusters to the global model (1 with --gamma).")]
Alpha = Annotated[float | None, typer.Option(help="In place of --lam: 0 independent clusters, 1 one cluster.")]
Reduction = Annotated[str, typer.Option(help="'sum' or 'mean' of the loss over a client's rows.")]
Weights = Annotated[str | None, typer.Option(help="Column with row weights.")]
Offset = Annotated[str | None, typer.Option(help="Column with a known part of the linear predictor.")]
Standardize = Annotated[
    bool, typer.Option("--standardize", help="Put terms about their mean, in units of their standard deviation.")
]
Ridge = Annotated[float, typer.Option(help="Pull of every client's coefficients to zero.")]
JamesStein = Annotated[
    bool,
    typer.Option("--james-stein", help="Shrink the global model towards zero by its uncertainty (more than two terms)."),
]
Solver = Annotated[str, typer.Option(help=f"One of {', '.join(choices())}.")]
Option = Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(randomised())}, as name=value: p0=0.1.")]
Tol = Annotated[float, typer.Option(help="Gradient norm at which Newton stops; certified gap for these.")]
MaxIter = Annotated[int | None, typer.Option(help="Most iterations.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def settings_of(given: list[str] | None) -> dict[str, object]:
    """``name=value`` pairs; a value that reads as JSON (a number, a list) is one, anything else is text."""
    import json

    from covey.errors import SolverError

    options: dict[str, object] = {}
    for pair in given or []:
        name, equals, text = (part.strip() for part in pair.partition("="))
        if not (name and equals):
            raise SolverError(f"The option --option must be name=value, such as p0=0.1. Got {pair!r} instead.")
        if name in options or name == "checkpoint":
            twice = "is given twice; leave out one"
            own = "is no --option; covey fit has --checkpoint, and covey federate --out resumes by itself"
            raise SolverError(f"The setting {name!r} {twice if name in options else own}.")
        try:
            options[name] = json.loads(text)
        except ValueError:
            options[name] = text
    return options
