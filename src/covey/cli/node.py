"""``covey link``, which the operator runs and to which sites connect, and ``covey node``, which a site runs with its table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def link(
    cert: Annotated[Path | None, typer.Option(help="The link's TLS certificate.")] = None,
    key: Annotated[Path | None, typer.Option(help="Its private key.")] = None,
    ca: Annotated[Path | None, typer.Option(help="The certificate of its issuer, if it is not self-signed.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="No TLS and no keys: on one machine, to try it.")] = False,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all network interfaces.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8000,
    database: Annotated[Path, typer.Option(help="File that keeps the registered sites and the runs.")] = Path("link.db"),
    isolated: Annotated[
        bool, typer.Option("--isolated", help="A separate flower-superexec starts the coordinator; runs survive a restart.")
    ] = False,
) -> None:
    """Start the link that sites connect to; it carries messages, and starts the coordinator of each run.

    [bold]Example[/bold]   covey link --cert link.crt --key link.key
    """
    from covey.federation.flower.launch import start_link

    start_link(database=database, host=host, port=port, certificate=cert, key=key, ca=ca, insecure=insecure, isolated=isolated)


def node(
    data: Annotated[
        Path, typer.Argument(help="The site's table: .parquet, .csv, .csv.gz or .tsv. It is read here and stays here.")
    ],
    home: Annotated[Path, typer.Option(help="Folder for the site's state and for its clients' models.")],
    link: Annotated[str, typer.Option(help="Host and port of the operator's link.")],
    key: Annotated[Path | None, typer.Option(help="The site's private key, whose public half the operator registered.")] = None,
    ca: Annotated[Path | None, typer.Option(help="The link's certificate, from the operator.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="No TLS and no keys: on one machine, to try it.")] = False,
    site: Annotated[str | None, typer.Option(help="The site's name; needed with --insecure, else checked.")] = None,
    minimum: Annotated[
        int | None, typer.Option(help="Least number of clients of each cluster and each category; else runs are refused (3).")
    ] = None,
    client: Annotated[str | None, typer.Option(help="Column of the clients; fits with another are refused.")] = None,
    columns: Annotated[str | None, typer.Option(help="Allow-list of columns, separated by commas; no expressions.")] = None,
    secure: Annotated[bool, typer.Option("--secure", help="Send masked sums only.")] = False,
    epsilon: Annotated[
        float | None, typer.Option(help="Answer only with differential privacy, up to this epsilon in one run.")
    ] = None,
    epsilon_total: Annotated[float | None, typer.Option(help="The largest epsilon of all runs together.")] = None,
    delta: Annotated[float | None, typer.Option(help="The delta at which these limits are measured (1e-6).")] = None,
) -> None:
    """Connect a site to a link, and answer the operator's fits from the site's own table until stopped.

    [bold]Example[/bold]   covey node homes.parquet --home north --link link.example.org:8000 --key north.key --ca link.crt
    """
    from covey.errors import FederationError, whole
    from covey.federation.flower.launch import start_node
    from covey.federation.site.policy import Budget

    if insecure and site is None:
        raise FederationError("Without keys the operator cannot name this site; give it a name with --site.")
    if minimum is not None:
        whole("--minimum", minimum, least=1)
    limits = {"epsilon": epsilon, "epsilon_total": epsilon_total, "delta": delta}
    Budget.of(limits, home)  # wrong limits are refused here, not at the first message
    about = {"client": client, "columns": columns, "secure": secure or None}
    settings = {"site": site, "minimum": minimum, **about, **limits}
    start_node(data, home=home, link=link, key=key, ca=ca, insecure=insecure, settings=settings)
