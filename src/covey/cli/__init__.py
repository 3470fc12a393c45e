"""The command line: one file per command. Numerical libraries load only when a command runs.

A mistake in the input is one sentence on stderr and exit code 2, never a traceback.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any

import typer

from covey.cli import demo, federate, fit, node, plan, predict, reproduce, show
from covey.errors import CoveyError

app = typer.Typer(
    name="covey",
    help="A model for every client, every known cluster of clients and the whole network at once.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


class _Stopped(Exception):  # noqa: N818 - no error, but how a user ends a command
    """An interrupt, with what its command says of it; typer would make an exit code of the interrupt itself."""


def _stoppable(command: Callable[..., None]) -> Callable[..., None]:
    @wraps(command)
    def stopping(*arguments: Any, **options: Any) -> None:
        try:
            command(*arguments, **options)
        except KeyboardInterrupt as stopped:
            raise _Stopped(str(stopped)) from None

    return stopping


app.command("fit")(_stoppable(fit.fit))
app.command("predict")(_stoppable(predict.predict))
app.command("show")(_stoppable(show.show))
app.command("plan")(_stoppable(plan.plan))
app.command("demo")(_stoppable(demo.demo))
app.command("reproduce")(_stoppable(reproduce.reproduce))
app.command("federate")(_stoppable(federate.federate))
app.command("link")(_stoppable(node.link))
app.command("node")(_stoppable(node.node))

_ClickError: Any = typer.BadParameter.__mro__[2]  # the base of all usage errors; click or typer's own copy of it


@app.callback(invoke_without_command=True)
def _version(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", help="Print the version and stop."),
) -> None:
    if version:
        from covey import __version__

        typer.echo(f"covey {__version__}")
        raise typer.Exit


def main() -> None:
    """Run the command line."""
    warnings.showwarning = _show_warning
    try:
        code = app(standalone_mode=False)
    except CoveyError as problem:
        code = _fail(str(problem))
    except _ClickError as problem:
        code = _fail(_usage(problem))
    except OSError as problem:
        if isinstance(problem, BrokenPipeError):
            # The reader of a pipe has seen enough; what is still buffered has nowhere to go.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            code = 0
        else:
            where = f": {problem.filename}" if problem.filename else ""
            code = _fail(f"{problem.strerror or problem}{where}; check the path and its permissions.")
    except (_Stopped, KeyboardInterrupt, typer.Abort) as stopped:
        if str(stopped):
            _fail(str(stopped))  # what is kept of a long run
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
