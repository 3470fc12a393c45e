"""``covey fit``: from a table and a formula to models at three levels."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer


def fit(
    data: Annotated[Path, typer.Argument(help="Table: .parquet, .csv, .csv.gz or .tsv.")],
    formula: Annotated[str, typer.Argument(help="Response and terms: 'y ~ log(x) + zone', 'y ~ x + (x | cluster/client)'.")],
    client: Annotated[str | None, typer.Option(help="Column with the clients' ids, unless the formula names it.")] = None,
    cluster: Annotated[str | None, typer.Option(help="Column with the clusters' ids.")] = None,
    family: Annotated[str, typer.Option(help="gaussian, bernoulli (two classes) or poisson (counts).")] = "gaussian",
    penalty: Annotated[str, typer.Option(help="How to learn penalties: reml, ml or cv.")] = "auto",
    vary: Annotated[list[str] | None, typer.Option(help="A term that varies; all by default. Repeat it.")] = None,
    covariance: Annotated[str | None, typer.Option(help="isotropic, diagonal or full; diagonal by default.")] = None,
    per_cluster: Annotated[bool, typer.Option("--per-cluster", help="Learn each cluster's own spread of clients.")] = False,
    tests: Annotated[bool, typer.Option("--tests/--no-tests", help="Test whether clients differ and clusters matter.")] = True,
    gamma: Annotated[float | None, typer.Option(help="Pull of clients to their cluster, if not to be learned.")] = None,
    lam: Annotated[float | None, typer.Option(help="Pull of clusters to the global model (1 with --gamma).")] = None,
    alpha: Annotated[float | None, typer.Option(help="In place of --lam: 0 independent clusters, 1 one cluster.")] = None,
    reduction: Annotated[str, typer.Option(help="'sum' or 'mean' of the loss over a client's rows.")] = "sum",
    weights: Annotated[str | None, typer.Option(help="Column with row weights.")] = None,
    offset: Annotated[str | None, typer.Option(help="Column with a known part of the linear predictor.")] = None,
    baseline: Annotated[str | None, typer.Option(help="single-model, locally-trained or single-cluster.")] = None,
    ridge: Annotated[float, typer.Option(help="Pull of every client's coefficients to zero.")] = 0.0,
    james_stein: Annotated[
        bool,
        typer.Option("--james-stein", help="Shrink the global model towards zero by its uncertainty (more than two terms)."),
    ] = False,
    solver: Annotated[str, typer.Option(help="auto, sweep, newton, l2gd, al2sgd_plus or one_coin.")] = "auto",
    option: Annotated[list[str] | None, typer.Option(help="Of l2gd, al2sgd_plus or one_coin, as name=value: p0=0.1.")] = None,
    checkpoint: Annotated[Path | None, typer.Option(help="File that these and newton write, and resume from.")] = None,
    tol: Annotated[float, typer.Option(help="Gradient norm at which Newton stops; certified gap for these.")] = 1e-8,
    max_iter: Annotated[int | None, typer.Option(help="Most iterations.")] = None,
    holdout: Annotated[float, typer.Option(help="Share of each client's rows to compare models on; 0 skips it.")] = 0.2,
    seed: Annotated[int, typer.Option(help="Seed of the split, of cross-validation and of coins.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Folder for the model.")] = None,
    sums: Annotated[bool, typer.Option("--sums/--no-sums", help="Keep clients' sums in it, which intervals need.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Fit every client's, every cluster's and the global model.

    The models are compared on held-out rows first, each at its minimum; the one that is kept is then fitted to all rows.

    [bold]Example[/bold]   covey fit homes.parquet "log_radon ~ floor" --client county --cluster state --out model
    """
    from covey.cli._console import console, print_json, working
    from covey.comparison import compare
    from covey.data import read_table
    from covey.describe import describe
    from covey.errors import DataError
    from covey.model import fit_grouped, read_frame
    from covey.persist import check_target, save_model
    from covey.spec import Spec

    if out is not None:
        check_target(out)
    spec = Spec(
        family=family,
        client=client,
        cluster=cluster,
        weights=weights,
        offset=offset,
        formula=formula,
        gamma=gamma,
        lam=lam,
        alpha=alpha,
        penalty=penalty,  # type: ignore[arg-type]
        vary=vary,
        covariance=covariance,
        per_cluster=per_cluster,
        tests=tests,
        reduction=reduction,  # type: ignore[arg-type]
        ridge=ridge,
        james_stein=james_stein,
        baseline=baseline,
        solver=solver,  # type: ignore[arg-type]
        options=_options(option, checkpoint) or None,
        tol=tol,
        max_iter=max_iter,
        seed=seed,
    )
    spec.check()
    spec = spec.settled()
    if spec.client is None:
        raise DataError("Say which column holds the clients: --client, or a formula with (terms | cluster/client).")
    with working("reading the table") as say:

        def counting(done: int, todo: int) -> None:
            say(f"cross-validating penalties, {done} of {todo}")

        grouped, design, classes, spec = read_frame(read_table(data, ids=[spec.client, spec.cluster]), spec)
        comparison = None
        if holdout:
            comparison = compare(grouped, spec, design, test=holdout, progress=lambda name: say(f"fitting {name}"))
        say("fitting all rows")

        def watching(iteration: int, _: float, norm: float) -> None:
            say(f"fitting all rows: iteration {iteration:,}, gradient norm {norm:.1e}")

        model = fit_grouped(grouped, design, classes, spec, watching, counting)
        if out is not None:
            save_model(model, out, sums=sums)
    if as_json:
        document = _document(model, comparison)
        print_json({**document, "out": None if out is None else str(out)})
        return
    screen = console()
    if comparison is not None:
        from covey.report.tables import comparison_table

        screen.print(comparison_table(comparison.errors, family, comparison.test_rows))
        screen.print()
    screen.print(describe(model), markup=False)
    if out is not None:
        screen.print(f"\nmodel written to {out}", markup=False)


def _options(given: list[str] | None, checkpoint: Path | None) -> dict[str, Any]:
    """``name=value`` pairs; a value that reads as JSON (a number, a list) is one, anything else is text."""
    import json

    from covey.errors import SolverError

    options: dict[str, Any] = {}
    for pair in given or []:
        name, equals, text = (part.strip() for part in pair.partition("="))
        if not (name and equals):
            raise SolverError(f"The option --option must be name=value, such as p0=0.1. Got {pair!r} instead.")
        if name in options or name == "checkpoint":
            why = "is given twice" if name in options else "has an option of its own, --checkpoint"
            raise SolverError(f"The setting {name!r} {why}; leave out one.")
        try:
            options[name] = json.loads(text)
        except ValueError:
            options[name] = text
    return options if checkpoint is None else {**options, "checkpoint": str(checkpoint)}


def _document(model: Any, comparison: Any) -> dict[str, Any]:
    import json
    from dataclasses import asdict

    from covey.describe import summary

    tree = model.hierarchy
    return {
        "family": model.spec.family,
        "terms": list(model.terms),
        "rows": int(model.rows.sum()),
        "clients": tree.n_clients,
        "clusters": tree.n_clusters,
        "global": dict(zip(model.terms, model.wbar.tolist(), strict=True)),
        "summary": summary(model).to_json(),
        "convergence": asdict(model.convergence),
        "ledger": None if model.ledger is None else json.loads(json.dumps(asdict(model.ledger), default=lambda a: a.tolist())),
        "history": None if model.history is None else model.history.to_dicts(),
        "held_out": None if comparison is None else asdict(comparison),
    }
