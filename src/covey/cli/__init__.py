"""The command line: one file for each command.

Numerical libraries are loaded only when a command runs. A mistake in the input is one sentence on stderr and exit code 2, not
a traceback.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any

import typer

from covey.cli import (
    demo,
    federate,
    fit,
    infer,
    node,
    plan,
    plot,
    predict,
    report,
    reproduce,
    shard,
    show,
    site,
    sql,
    status,
    warm_up,
)
from covey.errors import CoveyError

app = typer.Typer(
    name="covey",
    help="Fit mixed models: one model for each client, each cluster of clients and all data together.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


class _Stopped(Exception):  # noqa: N818 - the user has ended the command
    """An interrupt, with the message of its command. Typer would turn ``KeyboardInterrupt`` into an exit code."""


def _stoppable(command: Callable[..., None]) -> Callable[..., None]:
    @wraps(command)
    def stopping(**options: Any) -> None:
        try:
            command(**options)
        except KeyboardInterrupt as stopped:
            raise _Stopped(str(stopped)) from None

    return stopping


for _command in (
    fit.fit, predict.predict, show.show, plot.plot, report.report, shard.shard, plan.plan, demo.demo, reproduce.reproduce,
    federate.federate, node.link, status.status, warm_up.warm_up, sql.sql,
):  # fmt: skip
    app.command()(_stoppable(_command))

for _command in (infer.compare, infer.means, infer.contrast, infer.residuals, infer.simulate):
    app.command(rich_help_panel="Inference from saved models")(_stoppable(_command))

_node = typer.Typer(invoke_without_command=True, callback=_stoppable(node.node))
_node.command()(_stoppable(node.init))
_site = typer.Typer(
    no_args_is_help=True, help="At a site: what was asked, the owner's decisions, the audit log, a check of a fit."
)
for _command in (site.runs, site.approve, site.refuse, site.log, site.check):
    _site.command()(_stoppable(_command))
app.add_typer(_node, name="node")
app.add_typer(_site, name="site")

_ClickError: Any = typer.BadParameter.__mro__[2]  # the base class of all usage errors, in click or in typer's copy of it


@app.callback(invoke_without_command=True)
def _version(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    if version:
        from covey import __version__

        typer.echo(f"covey {__version__}")
        raise typer.Exit


def main() -> None:
    """Run the command line."""
    warnings.showwarning = _show_warning
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that a long run says what it has saved
    try:
        code = app(standalone_mode=False)
    except CoveyError as problem:
        code = _fail(str(problem))
    except _ClickError as problem:
        code = _fail(_usage(problem))
    except BrokenPipeError:
        # The program that reads our output has stopped. The rest of the output is discarded.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except OSError as problem:
        where = f": {problem.filename}" if problem.filename else ""
        code = _fail(f"{problem.strerror or problem}{where}; check the path and its permissions.")
    except (_Stopped, KeyboardInterrupt, typer.Abort) as stopped:
        if str(stopped):
            _fail(str(stopped))  # what a long run has saved
        code = 130
    sys.exit(code if isinstance(code, int) else 0)


def _fail(sentence: str) -> int:
    print(f"covey: {sentence}", file=sys.stderr)
    return 2


def _usage(problem: Any) -> str:
    context = getattr(problem, "ctx", None)
    command = context.command_path if context is not None else "covey"
    if type(problem).__name__ == "NoArgsIsHelpError":
        print(context.get_help() if context is not None else "")
        sys.exit(2)
    return f"{problem.format_message().rstrip('.')}; see '{command} --help'."


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"covey: warning: {message}", file=sys.stderr)
