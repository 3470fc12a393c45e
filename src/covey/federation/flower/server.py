"""The app beside the link: waits for the sites, runs the fit, prints the result.

It is described by ``app/pyproject.toml`` and started by ``covey federate`` or ``flwr run``.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from covey.errors import CoveyError, FederationError, listing
from covey.federation.flower.transport import FlowerTransport
from covey.federation.wire.transport import Transport

app = ServerApp()

_PAUSE = 1.0  # seconds between looks at who is connected


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run a federated fit with the settings of the run."""
    report = None
    try:
        from covey.federation.operator.operate import operate
        from covey.federation.operator.settings import awaited

        settings = read_settings(context.run_config)
        report, insecure = settings.pop("report", None), settings.pop("insecure", False)
        if not isinstance(insecure, bool):
            raise FederationError(f"The setting 'insecure' must be true or false. Got {insecure!r} instead.")
        expected, patience = awaited(settings)
        transport = FlowerTransport(grid, named=not insecure)
        wait_for_sites(transport, expected, patience, _say)
        text = operate(transport, settings, _say)
    except CoveyError as problem:
        _leave(report, {"mistake": str(problem)})
        # Flower logs what ends a run with its traceback; a mistake in the settings has none that would help.
        sys.tracebacklimit = 0
        raise
    if not _leave(report, {"text": text}):
        print(text, flush=True)


def _leave(report: str | None, document: Mapping[str, str]) -> bool:
    """Whether the outcome could be left in a file for who started the run: the end of Flower's log is at times lost."""
    try:
        Path(report or "").write_text(json.dumps(document), encoding="utf-8")
    except OSError:
        return False
    return True


def read_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a run from Flower's run config, which knows no lists, no nothing and no nesting.

    Empty text stands for a setting that is not given; the value of ``settings`` is JSON and goes before the others.

    Examples
    --------
    >>> read_settings({"formula": "y ~ x", "seed": "", "settings": '{"gamma": 2}'})
    {'formula': 'y ~ x', 'gamma': 2}
    """
    given = {name: value for name, value in config.items() if value != ""}
    try:
        given |= json.loads(given.pop("settings", "{}"))
    except (ValueError, TypeError):
        raise FederationError("The setting 'settings' must be a JSON object; leave it out, or write it as '{...}'.") from None
    return given


def wait_for_sites(transport: Transport, sites: int | Sequence[str], patience: float, say: Callable[[str], None]) -> None:
    """Wait until the expected sites are connected: so many, or those named; if they are not in time, say who is missing.

    Examples
    --------
    >>> from covey.federation.wire.transport import InProcess
    >>> wait_for_sites(InProcess({"north": None, "south": None}), ("north", "south"), 0.0, print)
    2 sites are connected: 'north', 'south'
    """
    deadline = time.monotonic() + patience
    before: tuple[str, ...] | None = None
    while True:
        here = transport.sites()
        missing = _missing(here, sites)
        if not missing:
            say(f"{len(here)} sites are connected: {listing(here)}")
            return
        if here != before:
            say(f"waiting for {missing}; connected: {listing(here) or 'nobody'}")
            before = here
        if time.monotonic() >= deadline:
            raise FederationError(
                f"Not connected after {patience:g} seconds: {missing}; start covey node there, or change --sites."
            )
        time.sleep(_PAUSE)


def _missing(here: tuple[str, ...], sites: int | Sequence[str]) -> str:
    if isinstance(sites, int):
        return f"{sites - len(here)} of {sites} sites" if len(here) < sites else ""
    return listing(name for name in sites if name not in here)


def _say(what: str) -> None:
    print(f"covey: {what}", flush=True)
