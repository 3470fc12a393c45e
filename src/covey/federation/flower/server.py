"""Flower's server app: it runs beside the link, waits for the sites, runs the fit and prints the result.

``app/pyproject.toml`` describes it; ``covey federate`` starts it, with the settings of the run as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from covey.errors import CoveyError
from covey.federation.flower.launch import REPORT
from covey.federation.flower.transport import FlowerTransport
from covey.federation.privacy.signing import load_key

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run a federated fit with the settings of the run."""
    report = None
    try:
        from covey.federation.operator.operate import operate

        settings = json.loads(str(context.run_config["settings"]))  # as covey federate writes them
        report, insecure, key = (settings.pop(name, None) for name in ("report", "insecure", "operator_key"))
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
    _leave(report, {"text": text})


def _leave(report: str | None, document: Mapping[str, str]) -> None:
    """Write the outcome to a file for the process that started the run, since Flower may lose the end of its log.

    If this process may not write there, such as a service with a folder of its own for temporary files, the log has to do.
    """
    try:
        Path(report or "").write_text(json.dumps(document), encoding="utf-8")
    except OSError:
        print(f"{REPORT}{json.dumps(document)}", flush=True)


def _say(what: str) -> None:
    print(f"covey: {what}", flush=True)
