"""Flower's server app: it runs beside the link, waits for the sites, runs the fit and prints the result.

``app/pyproject.toml`` describes it; ``covey federate`` or ``flwr run`` starts it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from covey.errors import CoveyError, FederationError
from covey.federation.flower.transport import FlowerTransport
from covey.federation.privacy.signing import load_key

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run a federated fit with the settings of the run."""
    report = None
    try:
        from covey.federation.operator.operate import operate

        settings = read_settings(context.run_config)
        report, insecure = settings.pop("report", None), settings.pop("insecure", False)
        if not isinstance(insecure, bool):
            raise FederationError(f"The setting 'insecure' must be true or false. Got {insecure!r} instead.")
        key = settings.pop("operator_key", None)
        transport = FlowerTransport(grid, named=not insecure, key=None if key is None else load_key(Path(str(key))))
        text = json.dumps(transport.about()) if settings.pop("status", False) else operate(transport, settings, _say)
    except KeyboardInterrupt as stopped:
        _leave(report, {"mistake": str(stopped)})
        raise
    except CoveyError as problem:
        _leave(report, {"mistake": str(problem)})
        # Flower logs what ends a run with its traceback; a mistake in the settings has none that would help.
        sys.tracebacklimit = 0
        raise
    if not _leave(report, {"text": text}):
        print(text, flush=True)


def _leave(report: str | None, document: Mapping[str, str]) -> bool:
    """Write the outcome to a file for the process that started the run, since Flower may lose the end of its log."""
    try:
        Path(report or "").write_text(json.dumps(document), encoding="utf-8")
    except OSError:
        return False
    return True


def read_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a run from Flower's run config, which has no lists, no None and no nesting.

    Empty text stands for a setting that is not given. ``settings`` is JSON and takes precedence over the others.

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


def _say(what: str) -> None:
    print(f"covey: {what}", flush=True)
