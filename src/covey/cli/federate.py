"""``covey federate``: the same fit across sites that keep their data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from covey.cli import _options


@_options.from_settings(*_options.FITTING, penalty="How to learn penalties: reml or ml.", seed="Seed of random choices.")
def federate(
    words: Annotated[
        list[str],
        typer.Argument(metavar="[DATA] FORMULA", help="Response and terms; before them, only to simulate, the table."),
    ],
    simulate: Annotated[int | None, typer.Option(help="Deal the clients out to so many sites on this machine.")] = None,
    by: Annotated[str | None, typer.Option(help="To simulate: the column that says at which site a row is.")] = None,
    link: Annotated[str | None, typer.Option(help="To deploy: the link, as Flower's config.toml names it.")] = None,
    spec: Any = None,
    sites: Annotated[str | None, typer.Option(help="To deploy: how many sites must be there, or their names: a,b,c.")] = None,
    members: Annotated[Path | None, typer.Option(help="Table of site, cluster and perhaps client: who may bring whom.")] = None,
    minimum: Annotated[int | None, typer.Option(help="To simulate: clients that must stand behind each sum (1).")] = None,
    secure: Annotated[bool, typer.Option("--secure", help="Mask the sums: the coordinator sees only totals.")] = False,
    wait: Annotated[float | None, typer.Option(help="To deploy: seconds to wait for sites to connect (60).")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="To deploy on a link that authenticates nobody.")] = False,
    epsilon: Annotated[
        float | None, typer.Option(help="Differential privacy for every client; needs --gamma and --lam.")
    ] = None,
    delta: Annotated[float | None, typer.Option(help="With --epsilon: the probability that it fails (1e-6).")] = None,
    clip: Annotated[float | None, typer.Option(help="With --epsilon: the most a client adds to a sum (1).")] = None,
    rounds: Annotated[
        int | None, typer.Option(help="With --epsilon: how often sums are sent (2; 3 for classes, counts).")
    ] = None,
    categories: Annotated[str | None, typer.Option(help='What columns may hold, as JSON: \'{"zone": ["a", "b"]}\'.')] = None,
    timeout: Annotated[float | None, typer.Option(help="Seconds to wait for a site's reply (600).")] = None,
    retries: Annotated[int | None, typer.Option(help="How often a letter without reply is sent again (2).")] = None,
    pause: Annotated[float | None, typer.Option(help="To deploy: seconds before that, for a site to come back (20).")] = None,
    on_loss: Annotated[str, typer.Option(help="When a site is lost: stop, or continue without it.")] = "stop",
    out: Annotated[Path | None, typer.Option(help="Folder for the models of clusters and of the whole.")] = None,
    as_json: _options.AsJson = False,
) -> None:
    """Fit every client's, every cluster's and the global model across sites; clients' models stay at their sites.

    [bold]Example[/bold]   covey federate --simulate 3 homes.parquet "log_radon ~ floor" --client county --cluster state
    """
    from covey.errors import CoveyError

    if simulate is None and by is None and link is None:
        raise CoveyError("Say where the sites are: --simulate 3 for so many on this machine, or --link NAME for real ones.")
    if (simulate is not None or by is not None) == (link is not None):
        raise CoveyError("--simulate and --by are for one machine, --link for real sites; leave out one.")
    if simulate is not None and by is not None:
        raise CoveyError("--simulate says how many sites there are, --by which column names them; leave out one.")
    of_one, of_link = {"minimum": minimum, "json": as_json or None}, {"sites": sites, "wait": wait, "pause": pause}
    other = of_one if link is not None else {**of_link, "insecure": insecure or None}
    for name in (name for name, value in other.items() if value is not None):
        why = "is a setting of each node" if name == "minimum" else "does not go with" if link is not None else "is for"
        raise CoveyError(f"--{name} {why}{'' if name == 'minimum' else ' --link'}; leave it out.")
    if len(words) != (1 if link is not None else 2):
        needed = "a formula" if link is not None else "a table and a formula, in this order"
        raise CoveyError(f"covey federate needs {needed}; got {len(words)} arguments: {' '.join(words)[:80]!r}.")
    settings: dict[str, Any] = {
        "formula": words[-1],
        **{name: getattr(spec, name) for name in _options.FITTING},
        "members": None if members is None else str(members),
        "secure": secure,
        "epsilon": epsilon,
        "delta": delta,
        "clip": clip,
        "rounds": rounds,
        "categories": categories,
        "timeout": timeout,
        "retries": retries,
        "on_loss": on_loss,
        "out": None if out is None else str(out),
    }
    if link is not None:
        from covey.federation.flower.launch import deploy
        from covey.federation.operator.settings import awaited

        settings |= {"sites": sites, "wait": wait, "pause": pause}
        awaited(settings)  # what is wrong with them is said here, not by a run that Flower has to start first
        raise typer.Exit(deploy({**settings, "insecure": insecure}, link))
    behind = 1 if minimum is None else minimum
    settings["pause"] = 0.0  # on one machine nobody has to come back
    _simulate(words[0], settings, by if by is not None else simulate or 0, behind, out, as_json)


def _simulate(data: str, settings: dict[str, Any], sites: int | str, minimum: int, out: Path | None, as_json: bool) -> None:
    import shutil
    from dataclasses import asdict

    from covey.cli._console import console, print_json, working
    from covey.federation.operator.report import report
    from covey.federation.operator.settings import spec_of, terms_of
    from covey.federation.simulate import simulate
    from covey.model.files import check_target, is_model
    from covey.model.summary import summary
    from covey.problem.problem import resolve
    from covey.tables.rows import read_table

    spec, terms = spec_of(settings), terms_of(settings)
    place = None if out is None else check_target(out / "operator")
    with working("reading the table") as say:
        settled = resolve(spec).spec
        table = read_table(data, ids=[settled.client, settled.cluster])
        run = simulate(
            table,
            spec,
            sites,
            terms=terms,
            minimum=minimum,
            models=None if out is None else out / "sites",
            journal=None if out is None else out / "journal",
            out=place,
            on_loss=settings["on_loss"],
            say=say,
        )
        if out is not None:
            for old in (out / "sites").iterdir():
                if old.name not in run.outcome.roster and is_model(old):
                    shutil.rmtree(old)  # a site of an earlier run into the same folder
    if as_json:
        outcome = run.outcome
        print_json(
            {
                "sites": list(outcome.roster),
                "without": dict(outcome.without),
                "missed": dict(outcome.missed),
                "privacy": None if outcome.privacy is None else dict(outcome.privacy),
                "summary": summary(outcome.model).to_json(),
                "exchanges": [asdict(each) for each in outcome.exchanges],
                "out": None if out is None else str(out),
            }
        )
        return
    screen = console()
    screen.print(report(run.outcome), markup=False)
    if out is not None:
        screen.print(f"\nmodels of clusters and of the whole  {out / 'operator'}", markup=False)
        screen.print(f"models of each site's clients        {out / 'sites'}", markup=False)
