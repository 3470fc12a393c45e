"""``covey demo``: the main job on the bundled radon survey, start to finish."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the figure, the model and the table.")] = Path("covey-demo"),
    seed: Annotated[int, typer.Option(help="Seed of the held-out split and of cross-validation.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Fit home radon by county in state; compare four models; show how counties borrow from their state.

    [bold]Example[/bold]   covey demo --out covey-demo
    """
    from dataclasses import asdict

    from covey.cli._options import console, print_json, working
    from covey.datasets import load_radon
    from covey.federation.operator.report import agreement
    from covey.federation.simulate import simulate_sites
    from covey.fitting.comparison import compare
    from covey.model.files import check_target, save_model
    from covey.model.summary import describe, summary
    from covey.problem.problem import Spec, resolve
    from covey.problem.reading import read_rows
    from covey.report.plots import shrinkage_figure
    from covey.report.tables import comparison_table, shrinkage_table
    from covey.reproduce.radon import fit_all, typical_clients

    homes = load_radon()
    check_target(out / "model")
    out.mkdir(parents=True, exist_ok=True)
    homes.write_parquet(out / "homes.parquet")
    spec = Spec(client="county", cluster="state", formula="log_radon ~ floor", seed=seed)
    screen = console()
    if not as_json:
        clients, clusters = homes["county"].n_unique(), homes["state"].n_unique()
        screen.print(
            f"Radon in {len(homes):,} homes of {clients} counties (the clients) in {clusters} states (the clusters).\n"
        )
    with working("reading") as say:
        data, problem = read_rows(homes, resolve(spec))
        comparison = compare(data, problem, progress=lambda name: say(f"fitting {name}"))
        say("fitting all homes")
        model, local = fit_all(data, problem)
        save_model(model, out / "model")
        say("fitting across three sites")
        across = simulate_sites(homes, spec, sites=3, say=say)
        apart = across.difference(model)
        say("drawing")
        figure = shrinkage_figure(
            model,
            local,
            out / "shrinkage.png",
            unit="log pCi/L, basement",
            title="Counties with few homes borrow from their state; counties with many keep their own estimate",
        )
    if as_json:
        files = {"figure": str(figure), "model": str(out / "model"), "data": str(out / "homes.parquet")}
        federated = {"sites": list(across.outcome.roster), "difference": apart}
        federated["exchanges"] = [asdict(each) for each in across.outcome.exchanges]
        print_json({"held_out": asdict(comparison), "summary": summary(model).to_json(), "federated": federated, **files})
        return
    screen.print(comparison_table(comparison.errors, spec.family, comparison.test_rows))
    screen.print()
    screen.print(describe(model), markup=False)
    screen.print()
    screen.print(shrinkage_table(model, local, typical_clients(model, local)))
    screen.print("\n" + agreement(across.outcome, apart), markup=False)
    screen.print(f"\nfigure {figure}\nmodel  {out / 'model'}\ndata   {out / 'homes.parquet'}", markup=False)
    screen.print(f"\nNext:  {Path(sys.argv[0])} show {out / 'model'} --level client", markup=False)
