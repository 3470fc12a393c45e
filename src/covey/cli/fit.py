"""``covey fit``: fit the models of all clients, all clusters and the whole to a table."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from covey.cli._options import FITTING, AnyTable, AsJson, TableName, console, from_settings, print_json, working
from covey.cli.sql import Categories, categories_of


@from_settings("formula", *FITTING, "baseline", seed="Seed of the split, of cross-validation and of random choices.")
def fit(
    data: AnyTable,
    spec: Any,
    table: TableName = None,
    lazy: Annotated[bool, typer.Option("--lazy", help="Leave the Parquet file on disk, and read sums of its rows.")] = False,
    checkpoint: Annotated[
        Path | None, typer.Option(help="File in which newton and randomised algorithms save their state, to resume from.")
    ] = None,
    holdout: Annotated[float, typer.Option(help="Share of each client's rows for comparing models; 0 skips it.")] = 0.2,
    out: Annotated[Path | None, typer.Option(help="Folder for the model.")] = None,
    speeds: Annotated[
        Path | None,
        typer.Option(help="Time of a randomised algorithm's run, from a table as for covey plan."),
    ] = None,
    sums: Annotated[bool, typer.Option("--sums", help="The table is the result of the query of covey sql.")] = False,
    categories: Categories = None,
    engine: Annotated[str | None, typer.Option(help="ray: read each shard in an actor of a Ray cluster.")] = None,
    address: Annotated[str | None, typer.Option(help="Address of the Ray cluster: auto, or ray://head:10001.")] = None,
    no_sums: Annotated[bool, typer.Option("--no-sums", help="Do not save the clients' sums, which intervals need.")] = False,
    as_json: AsJson = False,
) -> None:
    """Fit one model for each client, each cluster and all data together.

    First, four kinds of models are compared on held-out rows. Then the hierarchical model is fitted to all rows. A linear model
    of many Parquet files, or of a table in DuckDB, is fitted from sums by client, which the engine computes. Shards (covey
    shard) are for all other models. There is no comparison then.

    [bold]Example[/bold]   covey fit homes.parquet "log_radon ~ floor" --client county --cluster state --out model
    """
    from dataclasses import replace

    from covey.engines.warehouse import open_table
    from covey.fitting.comparison import compare
    from covey.fitting.fit import check_solver
    from covey.fitting.fit import fit as fit_problem
    from covey.fitting.planning import clock_run
    from covey.model.files import check_target, save_model
    from covey.model.summary import describe
    from covey.nodes.layout import is_shards
    from covey.nodes.lazy import as_lazy, read_lazy
    from covey.nodes.look import collected
    from covey.nodes.network import InMemory
    from covey.nodes.queries import read_sums
    from covey.nodes.shards import check_engine, open_shards
    from covey.problem.problem import resolve
    from covey.problem.rows import read_rows
    from covey.tables.files import read_table

    if out is not None:
        check_target(out)
    if checkpoint is not None:
        spec = replace(spec, options={**(spec.options or {}), "checkpoint": str(checkpoint)})
    draft = resolve(spec)
    check_solver(draft.spec)
    check_engine(data, engine, address)
    with working("reading the table") as say, ExitStack() as stack:
        network: Any = None
        if is_shards(data):
            network, problem = stack.enter_context(open_shards(data, draft, engine=engine, address=address, say=say))
            rows = None
        else:
            rows = open_table(data, table, ids=[draft.spec.client, draft.spec.cluster], lazy=lazy)
            held = as_lazy(rows)
            if sums:
                result = rows if held is None else collected(held)  # Spark writes a folder of files
                grouped, problem = read_sums(result, draft, categories_of(categories))
            else:
                grouped, problem = read_rows(rows, draft) if held is None else read_lazy(held, draft)
            network = InMemory.of(grouped, problem.loss)
        comparison = None
        # Without groups all models are the same.
        if holdout and rows is not None and held is None and not sums and draft.spec.client is not None:
            comparison = compare(grouped, problem, test=holdout, progress=lambda name: say(f"fitting {name}"))
        say("fitting all rows")
        model = fit_problem(
            network,
            problem,
            progress=lambda at, _, norm: say(f"fitting all rows: iteration {at:,}, gradient norm {norm:.1e}"),
            count=lambda done, todo: say("cross-validating penalties", done, todo),
        )
        clock = None if speeds is None else clock_run(model, speeds=read_table(speeds, ids=["cluster"]))
        if out is not None:
            save_model(model, out, sums=not no_sums)
    if as_json:
        times = {} if clock is None else {"clock": clock.frame.to_dicts()}
        print_json({**_document(model, comparison), **times, "out": None if out is None else str(out)})
        return
    screen = console()
    if comparison is not None:
        from covey.report.tables import comparison_table

        screen.print(comparison_table(comparison.errors, spec.family, comparison.test_rows))
        screen.print()
    screen.print(describe(model), markup=False)
    if clock is not None:
        screen.print(f"\n{clock}", markup=False)
    if out is not None:
        screen.print(f"\nmodel written to {out}", markup=False)


def _document(model: Any, comparison: Any) -> dict[str, Any]:
    import json
    from dataclasses import asdict

    from covey.model.summary import Summary

    tree = model.hierarchy
    return {
        "family": model.spec.family,
        "terms": list(model.terms),
        "rows": int(model.rows.sum()),
        "clients": tree.n_clients,
        "clusters": tree.n_clusters,
        "global": dict(zip(model.terms, model.wbar.tolist(), strict=True)),
        "summary": Summary(model).to_json(),
        "convergence": asdict(model.convergence),
        "ledger": None if model.ledger is None else json.loads(json.dumps(asdict(model.ledger), default=lambda a: a.tolist())),
        "history": None if model.history is None else model.history.to_dicts(),
        "held_out": None if comparison is None else asdict(comparison),
    }
