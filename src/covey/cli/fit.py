"""``covey fit``: from a table and a formula to models at three levels."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from covey.cli import _options


def fit(
    data: Annotated[Path, typer.Argument(help="Table: .parquet, .csv, .csv.gz or .tsv.")],
    formula: Annotated[str, typer.Argument(help="Response and terms: 'y ~ log(x) + zone', 'y ~ x + (x | cluster/client)'.")],
    client: _options.Client = None,
    cluster: _options.Cluster = None,
    family: _options.Family = "gaussian",
    penalty: Annotated[str, typer.Option(help="How to learn penalties: reml, ml or cv.")] = "auto",
    vary: _options.Vary = None,
    covariance: _options.Covariance = None,
    per_cluster: _options.PerCluster = False,
    tests: _options.Tests = True,
    gamma: _options.Gamma = None,
    lam: _options.Lam = None,
    alpha: _options.Alpha = None,
    reduction: _options.Reduction = "sum",
    weights: _options.Weights = None,
    offset: _options.Offset = None,
    standardize: _options.Standardize = False,
    baseline: Annotated[str | None, typer.Option(help="single-model, locally-trained or single-cluster.")] = None,
    ridge: _options.Ridge = 0.0,
    james_stein: _options.JamesStein = False,
    solver: _options.Solver = "auto",
    option: _options.Option = None,
    checkpoint: Annotated[Path | None, typer.Option(help="File that these and newton write, and resume from.")] = None,
    tol: _options.Tol = 1e-8,
    max_iter: _options.MaxIter = None,
    holdout: Annotated[float, typer.Option(help="Share of each client's rows to compare models on; 0 skips it.")] = 0.2,
    seed: Annotated[int, typer.Option(help="Seed of the split, of cross-validation and of coins.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Folder for the model.")] = None,
    sums: Annotated[bool, typer.Option("--sums/--no-sums", help="Keep clients' sums in it, which intervals need.")] = True,
    as_json: _options.AsJson = False,
) -> None:
    """Fit every client's, every cluster's and the global model.

    The models are compared on held-out rows first, each at its minimum; the one that is kept is then fitted to all rows.

    [bold]Example[/bold]   covey fit homes.parquet "log_radon ~ floor" --client county --cluster state --out model
    """
    from covey.cli._console import console, print_json, working
    from covey.errors import DataError
    from covey.fitting.comparison import compare
    from covey.model.files import check_target, save_model
    from covey.model.model import fit_grouped, read_frame
    from covey.model.summary import describe
    from covey.problem.spec import Spec
    from covey.tables.rows import read_table

    if out is not None:
        check_target(out)
    kept = {} if checkpoint is None else {"checkpoint": str(checkpoint)}
    spec = Spec(
        family=family,
        client=client,
        cluster=cluster,
        weights=weights,
        offset=offset,
        formula=formula,
        standardize=standardize,
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
        solver=solver,
        options={**_options.settings_of(option), **kept} or None,
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


def _document(model: Any, comparison: Any) -> dict[str, Any]:
    import json
    from dataclasses import asdict

    from covey.model.summary import summary

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
