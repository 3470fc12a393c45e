"""Options that commands share, and where commands write.

A command that fits has a parameter ``spec``. :func:`from_settings` replaces it by one option for each setting that
:class:`~covey.problem.settings.Spec` declares::

    @from_settings("formula", "client", "gamma", "seed", seed="Seed of the split.")
    def fit(data: Table, spec: Any, as_json: AsJson = False) -> None:
        ...                      # spec is a Spec

``formula`` becomes an argument. The others become options with the declared default and help. A keyword replaces the help of
one option. ``options`` becomes ``--option name=value``, which may be repeated. :func:`group` does the same for the fields of
a dataclass.

Results go to stdout. Progress goes to stderr, and only to a terminal.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from rich.console import Console
from rich.text import Text

from covey.errors import SolverError
from covey.problem.settings import Spec, declared
from covey.solvers.registry import choices, first_order

if TYPE_CHECKING:
    from covey._typing import Say

Command = Callable[..., None]
Decorator = Callable[[Command], Command]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Table = Annotated[Path, typer.Argument(help="File with the table: .parquet, .csv, .csv.gz or .tsv.")]
AnyTable = Annotated[
    str, typer.Argument(help="The table: .parquet, .csv, .csv.gz or .tsv; a pattern 'rows/*.parquet', a folder, or .duckdb.")
]
TableName = Annotated[str | None, typer.Option("--table", help="Table of a DuckDB database.")]

FITTING = (
    "client", "cluster", "family", "penalty", "vary", "covariance", "per_cluster", "tests", "gamma", "lam", "alpha",
    "reduction", "weights", "offset", "frequency", "trials", "na", "standardize", "ridge", "james_stein", "solver", "options",
    "tol", "max_iter", "seed",
)  # fmt: skip
"""The settings of every command that fits, in the order of their help."""


def console() -> Console:
    return Console(highlight=False, soft_wrap=True)


@contextmanager
def working(first: str) -> Iterator[Say]:
    """A line on the terminal that says what is being done, with a bar for its parts; nothing in a pipe."""
    screen, current = Console(stderr=True), [first]

    def say(step: str = "", done: int = 0, of: int = 0) -> None:
        current[0] = step or current[0]
        share = min(done / of, 1.0) if of else 0.0
        status.update(Text(f"{current[0]}  |{'=' * int(30 * share):30}| {share:.0%}" if of else current[0]))

    if not screen.is_terminal:
        yield lambda step="", done=0, of=0: None
        return
    with screen.status(first) as status:
        yield say


def print_json(document: Any) -> None:
    print(json.dumps(document, indent=2))


def from_settings(*names: str, **helps: str) -> Decorator:
    """Give a command an option for each of these settings; its parameter ``spec`` receives them as a :class:`Spec`."""

    def make(given: dict[str, Any]) -> Spec:
        chosen = {name: given[_shown(name)] for name in names}
        if "options" in chosen:
            chosen["options"] = _options_of(chosen["options"] or ()) or None
        return Spec(**chosen)

    return _together("spec", [_parameter(name, helps.get(name)) for name in names], make)


def group(kind: type[Any], name: str) -> Decorator:
    """Give a command an option for each field of a dataclass; its parameter ``name`` receives them as one object.

    A field is declared like an option of typer: ``timeout: Annotated[float | None, typer.Option(help="...")] = None``.
    """
    hints = get_type_hints(kind, include_extras=True)
    options = [_option(part.name, hints[part.name], part.default) for part in fields(kind)]
    return _together(name, options, lambda given: kind(**given))


def _together(name: str, options: Sequence[inspect.Parameter], make: Callable[[dict[str, Any]], Any]) -> Decorator:
    """Replace the parameter ``name`` of a command by options; the command receives what ``make`` makes of their values."""

    def decorate(command: Command) -> Command:
        parameters: list[inspect.Parameter] = []
        for each in inspect.signature(command, eval_str=True).parameters.values():
            parameters += options if each.name == name else [each.replace(kind=inspect.Parameter.KEYWORD_ONLY)]

        def run(**given: Any) -> None:
            command(**{name: make({each.name: given.pop(each.name) for each in options})}, **given)

        run.__name__, run.__doc__, run.__module__ = command.__name__, command.__doc__, command.__module__
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in parameters}  # typer reads these two
        return run

    return decorate


def _option(name: str, annotation: Any, default: Any = inspect.Parameter.empty) -> inspect.Parameter:
    """A parameter as typer reads it; without a default it is required."""
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _shown(name: str) -> str:
    """The name of a setting on the command line."""
    return "option" if name == "options" else name


def _parameter(name: str, help: str | None) -> inspect.Parameter:
    part, shown = declared()[name], _shown(name)
    kind: Any = part.metadata["shell"]
    help = part.metadata["help"] if help is None else help
    help = help.format(choices=", ".join(choices()), first_order=", ".join(first_order()))
    if name == "formula":
        return _option(name, Annotated[kind, typer.Argument(help=help)])
    flag = shown.replace("_", "-")
    flags = f"--{flag}/--no-{flag}" if kind is bool and part.default else f"--{flag}"
    return _option(shown, Annotated[kind, typer.Option(flags, help=help)], part.default)


def _options_of(given: Sequence[str]) -> dict[str, object]:
    """Pairs ``name=value``; a value that is JSON (a number, a list) is read as JSON, any other value is text."""
    options: dict[str, object] = {}
    for pair in given:
        name, equals, text = (part.strip() for part in pair.partition("="))
        if not (name and equals):
            raise SolverError(f"The option --option must be name=value, such as p0=0.1. Got {pair!r} instead.")
        if name in options:
            raise SolverError(f"The setting {name!r} is given twice; leave out one.")
        if name == "checkpoint":
            raise SolverError(
                "The setting 'checkpoint' is not an --option; covey fit has --checkpoint, covey federate resumes from --out."
            )
        try:
            options[name] = json.loads(text)
        except ValueError:
            options[name] = text
    return options
