"""``covey demo``: fit the bundled radon survey, compare models, draw a figure, and fit again across sites."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the figure, the model and the table.")] = Path("covey-demo"),
    seed: Annotated[int, typer.Option(help="Seed of the held-out split and of cross-validation.")] = 0,
    show: Annotated[bool, typer.Option("--open", help="Open the report in a browser.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Fit a model of radon in homes by county and state, compare it with three others, and fit it across three sites.

    Last, it writes a report of the model.

    [bold]Example[/bold]   covey demo --out covey-demo
    """
    from dataclasses import asdict

    from covey.cli._options import console, print_json, working
    from covey.datasets import load_radon
    from covey.federation.operator.operate import agreement
    from covey.federation.simulate import simulate_sites
    from covey.fitting.comparison import compare
    from covey.fitting.fit import fit
    from covey.model.files import check_target, save_model
    from covey.model.summary import Summary, describe
    from covey.nodes.network import InMemory
    from covey.problem.problem import Spec, resolve
    from covey.problem.rows import read_rows
    from covey.report.document import report
    from covey.report.plots import shrinkage_figure
    from covey.report.tables import comparison_table, shrinkage_table
    from covey.reproduce.radon import Shrinkage

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
        model = fit(InMemory.of(data, problem.loss), problem)
        shrinkage = Shrinkage.of(data, model)
        save_model(model, out / "model")
        say("fitting across three sites")
        across = simulate_sites(homes, spec, sites=3, say=say)
        apart = across.difference(model)
        say("drawing")
        figure = shrinkage_figure(
            shrinkage,
            out / "shrinkage.png",
            title="Counties with few homes borrow from their state; counties with many stay close to their own mean",
            clients="counties",
            rows="homes in the county",
            unit="log radon",
        )
        say("writing the report")
        page = out / "report.html"
        page.write_text(report(model, homes, heading="Radon in homes of 470 counties", say=say), encoding="utf-8")
    if show:
        import webbrowser

        webbrowser.open(page.absolute().as_uri())
    if as_json:
        files = {"figure": str(figure), "model": str(out / "model"), "data": str(out / "homes.parquet"), "report": str(page)}
        federated = {"sites": list(across.outcome.roster), "difference": apart}
        federated["exchanges"] = [asdict(each) for each in across.outcome.exchanges]
        print_json({"held_out": asdict(comparison), "summary": Summary(model).to_json(), "federated": federated, **files})
        return
    screen.print(comparison_table(comparison.errors, spec.family, comparison.test_rows))
    screen.print()
    screen.print(describe(model), markup=False)
    screen.print()
    title = "Mean log radon of eight counties, from few homes to many"
    caption = (
        "alone: mean of the county's own homes; state: by the state's model, at the same floors; moved: how far the estimate\n"
        "moves from alone (0%) to the state (100%). Shown are counties that alone are more than 0.15 from their state."
    )
    screen.print(shrinkage_table(shrinkage, shrinkage.typical(), title, caption))
    screen.print("\n" + agreement(across.outcome, apart), markup=False)
    screen.print(f"\nfigure {figure}\nmodel  {out / 'model'}\ndata   {out / 'homes.parquet'}", markup=False)
    command = "python -m covey" if Path(sys.argv[0]).stem == "__main__" else sys.argv[0]
    screen.print(f"\nNext:  {command} show {out / 'model'} --level client", markup=False)
    screen.print(f"Report of the model, to open in a browser: {page}", markup=False)
