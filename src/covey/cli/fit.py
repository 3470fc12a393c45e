"""``covey fit``: from a table and a formula to models at three levels."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from covey.cli import _options


@_options.from_settings(
    "formula", *_options.FITTING, "baseline", seed="Seed of the split, of cross-validation and of random choices."
)
def fit(
    data: Annotated[Path, typer.Argument(help="Table: .parquet, .csv, .csv.gz or .tsv.")],
    spec: Any,
    checkpoint: Annotated[Path | None, typer.Option(help="File that these and newton write, and resume from.")] = None,
    holdout: Annotated[float, typer.Option(help="Share of each client's rows to compare models on; 0 skips it.")] = 0.2,
    out: Annotated[Path | None, typer.Option(help="Folder for the model.")] = None,
    sums: Annotated[bool, typer.Option("--sums/--no-sums", help="Keep clients' sums in it, which intervals need.")] = True,
    as_json: _options.AsJson = False,
) -> None:
    """Fit every client's, every cluster's and the global model.

    The models are compared on held-out rows first, each at its minimum; the one that is kept is then fitted to all rows.

    [bold]Example[/bold]   covey fit homes.parquet "log_radon ~ floor" --client county --cluster state --out model
    """
    from dataclasses import replace

    from covey.cli._options import console, print_json, working
    from covey.errors import DataError
    from covey.fitting.comparison import compare
    from covey.fitting.fit import check_solver
    from covey.fitting.fit import fit as fit_problem
    from covey.model.files import check_target, save_model
    from covey.model.summary import describe
    from covey.nodes.network import InMemory
    from covey.problem.problem import read_rows, resolve
    from covey.tables.rows import read_table

    if out is not None:
        check_target(out)
    if checkpoint is not None:
        spec = replace(spec, options={**(spec.options or {}), "checkpoint": str(checkpoint)})
    draft = resolve(spec)
    check_solver(draft.spec)
    if draft.spec.client is None:
        raise DataError("Say which column holds the clients: --client, or a formula with (terms | cluster/client).")
    with working("reading the table") as say:

        def counting(done: int, todo: int) -> None:
            say(f"cross-validating penalties, {done} of {todo}")

        grouped, problem = read_rows(read_table(data, ids=[draft.spec.client, draft.spec.cluster]), draft)
        comparison = None
        if holdout:
            comparison = compare(grouped, problem, test=holdout, progress=lambda name: say(f"fitting {name}"))
        say("fitting all rows")

        def watching(iteration: int, _: float, norm: float) -> None:
            say(f"fitting all rows: iteration {iteration:,}, gradient norm {norm:.1e}")

        model = fit_problem(InMemory.of(grouped, problem.loss), problem, progress=watching, count=counting)
        if out is not None:
            save_model(model, out, sums=sums)
    if as_json:
        document = _document(model, comparison)
        print_json({**document, "out": None if out is None else str(out)})
        return
    screen = console()
    if comparison is not None:
        from covey.report.tables import comparison_table

        screen.print(comparison_table(comparison.errors, spec.family, comparison.test_rows))
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
