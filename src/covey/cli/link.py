"""``covey link``: the meeting point of the sites, run by the operator."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def link(
    cert: Annotated[Path | None, typer.Option(help="The link's TLS certificate.")] = None,
    key: Annotated[Path | None, typer.Option(help="Its private key.")] = None,
    ca: Annotated[Path | None, typer.Option(help="Who signed the certificate, if not itself.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="No TLS and no keys: on one machine, to try it.")] = False,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8000,
    database: Annotated[Path, typer.Option(help="File that keeps the registered sites and the runs.")] = Path("link.db"),
    isolated: Annotated[
        bool, typer.Option("--isolated", help="Leave the coordinator to a flower-superexec of its own, to survive a restart.")
    ] = False,
) -> None:
    """Start the link that sites connect to; it carries letters, and starts the coordinator of each run.

    [bold]Example[/bold]   covey link --cert link.crt --key link.key
    """
    from covey.federation.flower.launch import start_link

    start_link(database=database, host=host, port=port, certificate=cert, key=key, ca=ca, insecure=insecure, isolated=isolated)
