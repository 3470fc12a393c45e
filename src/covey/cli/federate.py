"""``covey federate``: a fit across sites that keep their data."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from covey.cli import _options
from covey.cli._options import group


@dataclass(frozen=True)
class RunOptions:
    """Options of a run, beside those of the model; each is declared here only."""

    simulate: Annotated[int | None, typer.Option(help="Split the clients among this many sites on this machine.")] = None
    by: Annotated[str | None, typer.Option(help="To simulate: the column with the site of each row.")] = None
    minimum: Annotated[int | None, typer.Option(help="To simulate: least clients in each sum that leaves a site (1).")] = None
    speeds: Annotated[
        Path | None,
        typer.Option(help="To simulate: speeds of clusters, as for covey plan; prints how long a randomised algorithm takes."),
    ] = None
    link: Annotated[str | None, typer.Option(help="To deploy: the link, as Flower's config.toml names it.")] = None
    sites: Annotated[str | None, typer.Option(help="To deploy: the least number of sites, or their names: a,b,c.")] = None
    wait: Annotated[
        float | None, typer.Option(help="To deploy: seconds to wait for sites to connect, and for owners to decide (60).")
    ] = None
    pause: Annotated[
        float | None, typer.Option(help="To deploy: seconds before a message is sent again, for a site to come back (20).")
    ] = None
    insecure: Annotated[bool, typer.Option("--insecure", help="To deploy on a link without keys and TLS.")] = False
    members: Annotated[
        Path | None, typer.Option(help="Allow-list: a table with the columns site, cluster and, optionally, client.")
    ] = None
    secure: Annotated[
        bool, typer.Option("--secure", help="Mask the sums: a coordinator that follows the protocol sees only their totals.")
    ] = False
    epsilon: Annotated[float | None, typer.Option(help="Differential privacy for every client; needs given penalties.")] = None
    delta: Annotated[float | None, typer.Option(help="With --epsilon: the probability that its bound fails (1e-6).")] = None
    clip: Annotated[float | None, typer.Option(help="With --epsilon: the most a client adds to a sum (1).")] = None
    rounds: Annotated[
        int | None, typer.Option(help="With --epsilon: how often sums are sent (2; 3 if the family is not gaussian).")
    ] = None
    categories: Annotated[str | None, typer.Option(help='Allowed values of columns, as JSON: \'{"zone": ["a", "b"]}\'.')] = None
    limits: Annotated[
        str | None,
        typer.Option(help="What a site may send at most: '{\"clusters\": 200000}'; also categories, clients, bytes, header."),
    ] = None
    timeout: Annotated[float | None, typer.Option(help="Seconds to wait for a site's reply (600).")] = None
    retries: Annotated[int | None, typer.Option(help="How often a message without reply is sent again (2).")] = None
    operator_key: Annotated[
        Path | None, typer.Option(help="To deploy: your private key; sites that list its public half answer you.")
    ] = None
    dry_run: Annotated[bool, typer.Option("--dry-run", help="To deploy: only ask the sites whether they would take part.")] = (
        False
    )
    on_loss: Annotated[str, typer.Option(help="When a site is lost: stop, or continue without it.")] = "stop"
    out: Annotated[
        Path | None, typer.Option(help="Folder for the models of clusters and the global one; with --simulate also of clients.")
    ] = None

    @property
    def deployed(self) -> bool:
        """Whether the sites are on other machines."""
        return self.link is not None

    def check(self, words: list[str], as_json: bool) -> None:
        """Refuse options that contradict each other."""
        from covey.errors import CoveyError

        here = self.simulate is not None or self.by is not None
        if not here and not self.deployed:
            raise CoveyError("Say where the sites are: --simulate 3 for three on this machine, or --link NAME for real ones.")
        if here and self.deployed:
            raise CoveyError("--simulate and --by are for one machine, --link for real sites; leave out one.")
        if self.simulate is not None and self.by is not None:
            raise CoveyError("--simulate says how many sites there are, --by which column names them; leave out one.")
        if self.deployed and self.minimum is not None:
            raise CoveyError("--minimum is a setting of each node; leave it out.")
        if self.deployed and self.speeds is not None:
            raise CoveyError("--speeds puts a simulated run on a clock; real sites have a speed of their own. Leave it out.")
        if self.deployed and as_json:
            raise CoveyError("--json does not go with --link; leave it out.")
        deploys: dict[str, Any] = {
            "sites": self.sites,
            "wait": self.wait,
            "pause": self.pause,
            "insecure": self.insecure or None,
        }
        deploys |= {"operator-key": self.operator_key, "dry-run": self.dry_run or None}
        for name in (name for name, value in deploys.items() if value is not None and not self.deployed):
            raise CoveyError(f"--{name} is for --link; leave it out.")
        if len(words) != (1 if self.deployed else 2):
            needed = "a formula" if self.deployed else "a table and a formula, in this order"
            raise CoveyError(f"covey federate needs {needed}; got {len(words)} arguments: {' '.join(words)[:80]!r}.")

    def settings(self) -> dict[str, Any]:
        """The options by name; paths as text."""
        given = {part.name: getattr(self, part.name) for part in fields(self)}
        if not self.deployed:
            given["pause"] = 0.0  # a site on this machine does not have to come back
        return {name: str(value) if isinstance(value, Path) else value for name, value in given.items()}


@group(RunOptions, "run")
@_options.from_settings(*_options.FITTING, penalty="How to learn penalties: reml or ml.")
def federate(
    words: Annotated[
        list[str],
        typer.Argument(metavar="[DATA] FORMULA", help="The formula; to simulate, the table before it."),
    ],
    run: RunOptions,
    spec: Any,
    as_json: _options.AsJson = False,
) -> None:
    """Fit the models of all clients, all clusters and the global model across sites; clients' models stay at their sites.

    [bold]Example[/bold]   covey federate --simulate 3 homes.parquet "log_radon ~ floor" --client county --cluster state
    """
    run.check(words, as_json)
    settings: dict[str, Any] = {
        "formula": words[-1],
        **{name: getattr(spec, name) for name in _options.FITTING},
        **run.settings(),
    }
    if run.link is not None:
        from covey.federation.flower.launch import deploy
        from covey.federation.operator.settings import RunSettings, expected_sites, spec_of
        from covey.problem.problem import resolve

        checked = RunSettings.of(settings)  # before Flower starts a run
        checked.check(resolve(spec_of(settings)))
        expected_sites(settings["sites"], checked.members)
        raise typer.Exit(deploy(settings, run.link))
    _simulate(words[0], settings, run, as_json)


def _simulate(data: str, settings: dict[str, Any], options: RunOptions, as_json: bool) -> None:
    import shutil
    from dataclasses import asdict

    from covey.cli._options import console, print_json, working
    from covey.federation.operator.operate import report
    from covey.federation.operator.settings import RunSettings, spec_of
    from covey.federation.simulate import simulate_sites
    from covey.model.files import check_target, is_model
    from covey.model.summary import Summary
    from covey.problem.problem import resolve
    from covey.tables.files import read_table

    spec, out = spec_of(settings), options.out
    sites = options.by if options.by is not None else options.simulate or 0
    place = None if out is None else check_target(out / "operator")
    with working("reading the table") as say:
        settled = resolve(spec).spec
        table = read_table(data, ids=[settled.client, settled.cluster])
        run = simulate_sites(
            table,
            spec,
            sites,
            settings=RunSettings.of(settings),
            minimum=1 if options.minimum is None else options.minimum,
            models=None if out is None else out / "sites",
            out=place,
            on_loss=settings["on_loss"],
            say=say,
        )
        clock = None if options.speeds is None else run.clock(read_table(options.speeds, ids=["cluster"]))
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
                "summary": Summary(outcome.model).to_json(),
                "exchanges": [asdict(each) for each in outcome.exchanges],
                "clock": None if clock is None else clock.frame.to_dicts(),
                "out": None if out is None else str(out),
            }
        )
        return
    screen = console()
    screen.print(report(run.outcome), markup=False)
    if clock is not None:
        screen.print(f"\n{clock}", markup=False)
    if out is not None:
        screen.print(f"\nmodels of clusters and global model  {out / 'operator'}", markup=False)
        screen.print(f"models of each site's clients        {out / 'sites'}", markup=False)
