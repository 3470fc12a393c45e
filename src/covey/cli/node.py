"""``covey link``, which the operator runs and to which sites connect, and ``covey node``, which a site runs with its table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

Home = Annotated[Path, typer.Option(help="Folder of the site: its site.toml, its state and its clients' models.")]


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
    context: typer.Context,
    home: Home = Path(),
    table: Annotated[Path | None, typer.Option(help="The site's table, if not the one of site.toml.")] = None,
    link: Annotated[str | None, typer.Option(help="Host and port of the link, if not those of site.toml.")] = None,
    key: Annotated[Path | None, typer.Option(help="The site's private key, if not the one of site.toml.")] = None,
    ca: Annotated[Path | None, typer.Option(help="The link's certificate, if not the one of site.toml.")] = None,
    site: Annotated[str | None, typer.Option(help="The site's name, if not the one of site.toml.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="No TLS and no keys: on one machine, to try it.")] = False,
) -> None:
    """Connect a site to a link, and answer what its site.toml allows, from its own table, until stopped.

    'covey node init' writes a site.toml. Without one, give --link, --table, --site, --key and --ca; every fit is then refused.

    [bold]Example[/bold]   covey node --home north
    """
    if context.invoked_subcommand is not None:
        return
    from covey.federation.flower.launch import start_node
    from covey.federation.site.file import SiteFile

    given = {"table": table, "link": link, "key": key, "ca": ca, "site": site, "insecure": insecure or None}
    start_node(SiteFile.read(home, **given))


def init(
    table: Annotated[
        Path, typer.Argument(help="The site's table: .parquet, .csv, .tsv or .duckdb, or a folder or pattern of Parquet files.")
    ],
    home: Home,
    client: Annotated[str, typer.Option(help="Column with the ids of the clients.")],
    table_name: Annotated[str | None, typer.Option(help="Name of the table in a .duckdb file.")] = None,
    site: Annotated[str | None, typer.Option(help="The site's name; by default that of its folder.")] = None,
    groups: Annotated[str, typer.Option(help="Columns by which clients may be grouped, separated by commas.")] = "",
    columns: Annotated[str | None, typer.Option(help="Columns that fits may use; by default all others.")] = None,
    link: Annotated[str, typer.Option(help="Host and port of the operator's link.")] = "",
    key: Annotated[Path | None, typer.Option(help="The site's private key.")] = None,
    ca: Annotated[Path | None, typer.Option(help="The link's certificate, from the operator.")] = None,
    operator: Annotated[Path | None, typer.Option(help="Public key (.pub) of the operator who may ask.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="No TLS and no keys: on one machine, to try it.")] = False,
) -> None:
    """Write a site.toml with a comment on every rule. Read it, and take out what the site does not want to answer.

    [bold]Example[/bold]   covey node init homes.parquet --home north --client county --groups state --link 127.0.0.1:8000
    """
    import narwhals as nw

    from covey.engines.warehouse import open_table
    from covey.errors import FederationError, unknown_column
    from covey.federation.privacy.signing import bare
    from covey.federation.site.file import LIMITS, NAME, PLACES, RULES
    from covey.federation.site.policy import ANY
    from covey.federation.site.state import private_folder
    from covey.records import write_file

    if (home / NAME).exists():
        raise FederationError(f"There is a file {str(home / NAME)!r} already; edit it, or remove it first.")
    lazy = table.suffix in (".parquet", ".pq")
    opened: Any = nw.from_native(open_table(table, table_name, lazy=lazy, named_by="--table-name"))
    found = opened.collect_schema().names()
    grouping = [each.strip() for each in groups.split(",") if each.strip()]
    asked = None if columns is None else [each.strip() for each in columns.split(",")]
    for name in (client, *grouping, *(asked or ())):
        if name not in found:
            raise unknown_column(name, found)
    places: dict[str, Any] = {"site": site or home.resolve().name, "table": str(table.resolve()), "link": link}
    places["table_name"] = table_name
    places |= {"key": str(key.resolve()) if key else "", "ca": str(ca.resolve()) if ca else "", "insecure": insecure}
    rest = [name for name in found if name != client and name not in grouping] if asked is None else asked
    chosen: dict[str, Any] = {"client": client, "groups": grouping, "columns": rest, "families": ["gaussian"]}
    chosen |= {"solvers": ["sweep", "learn"], "secure": False, "replies": "all", "share": 0.75}
    chosen["operators"] = [ANY] if insecure else [] if operator is None else [bare(operator.read_text(encoding="utf-8"))]
    text = "# What this site allows. The rest is refused. If you delete a rule, its default applies; the defaults of most\n"
    text += "# rules are stricter than below. Without epsilon no noise is required.\n"
    for name, comment in PLACES.items():
        unused = name == "table_name" and table_name is None
        text += f"\n# {comment}\n" + ('# table_name = "visits"\n' if unused else f"{name} = {_toml(places[name])}\n")
    for name, about in RULES.items():
        text += f"\n# {about['comment']}\n{name} = {_toml(chosen.get(name, about['strict']))}\n"
    for name, comment in LIMITS.items():
        text += f"\n# {comment}\n# {name} = {'1e-6' if name == 'delta' else '1.0'}\n"
    text += "\n# Public keys of other sites by name, for masked runs; two in a list while a site replaces its key.\n[peers]\n"
    write_file(private_folder(home) / NAME, text.encode())
    print(f"{home / NAME} is written. Read it, and take out the columns that this site does not want to answer about.")
    if not chosen["operators"]:
        print("No operator may ask yet: write the operator's public key into 'operators', or give --operator.")


def _toml(value: Any) -> str:
    import json

    return json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False)
