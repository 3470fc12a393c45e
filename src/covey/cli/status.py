"""``covey status``: which sites are connected to a link, and what their nodes say of themselves."""

from __future__ import annotations

from typing import Annotated

import typer

from covey.cli._options import AsJson


def status(
    link: Annotated[str, typer.Option(help="The link, as Flower's config.toml names it.")],
    insecure: Annotated[bool, typer.Option("--insecure", help="The link has no keys and no TLS.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the sites of a link: state and since when, versions, keys and rules in short.

    The exit code is 0 if all registered sites are connected and answer, 1 if not, and 2 if the link does not answer.

    [bold]Example[/bold]   covey status --link link
    """
    from covey._version import __version__
    from covey.cli._options import print_json
    from covey.federation.flower.launch import status_of

    sites = status_of(link, insecure=insecure)
    if as_json:
        print_json(sites)
    else:
        for name, about in sites.items():
            other = "" if about.get("covey") in (None, __version__) else f" (here {__version__})"
            rules = ", ".join(f"{rule} {about[rule]}" for rule in ("minimum", "share", "secure", "approve") if rule in about)
            words = [f"{about['state']} since {about['since'] or 'never'}", f"covey {about.get('covey', '?')}{other}"]
            print(f"{name}: {', '.join(words)}, key {about.get('key') or 'none'}; {rules or 'it does not answer'}")
        print(f"{len(sites)} sites")
    raise typer.Exit(0 if sites and all("covey" in about for about in sites.values()) else 1)
