"""Where commands write: results to stdout, progress to stderr and only on a terminal.

Options of a command that belong together, declared as the fields of a dataclass.

Options of the commands, made of the settings that :mod:`covey.problem.problem` declares.

A command that takes settings has a parameter ``spec``; :func:`from_settings` puts an option in its place for each setting::

    @from_settings("formula", "client", "gamma", "seed", seed="Seed of the split.")
    def fit(data: Annotated[Path, typer.Argument()], spec: Any, as_json: AsJson = False) -> None:
        ...                      # spec is a covey.problem.problem.Spec

Typer reads the signature that this makes. ``formula`` is an argument, everything else an option with the default and the help
of its declaration; a keyword gives another help to one of them. ``options`` is ``--option name=value``, which may be repeated.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Annotated, Any, get_type_hints

import typer
from rich.console import Console

from covey.problem.settings import declared
from covey.solvers.registry import choices, first_order


def console() -> Console:
    return Console(highlight=False, soft_wrap=True)


@contextmanager
def working(first: str) -> Iterator[Callable[[str], None]]:
    """A live line that says what is being done; nothing at all in a pipe."""
    screen = Console(stderr=True)
    if not screen.is_terminal:
        yield lambda _: None
        return
    with screen.status(first) as status:
        yield lambda what: status.update(what)


@contextmanager
def bars() -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar for each kind of work, by its name; nothing at all in a pipe."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    screen = Console(stderr=True)
    if not screen.is_terminal:
        yield lambda *_: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=screen, transient=True) as progress:
        tasks: dict[str, Any] = {}

        def say(what: str, done: int, todo: int) -> None:
            if what not in tasks:
                tasks[what] = progress.add_task(what, total=todo)
            progress.update(tasks[what], completed=done)

        yield say


def print_json(document: Any) -> None:
    print(json.dumps(document, indent=2))


def group(kind: type[Any], name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command an option for each field of a dataclass; it gets them together, as its parameter ``name``.

    A field is declared as typer has it: ``timeout: Annotated[float | None, typer.Option(help="...")] = None``.
    """
    hints = get_type_hints(kind, include_extras=True)
    options = [option(part.name, hints[part.name], part.default) for part in fields(kind)]
    return together(name, options, lambda given: kind(**given))


def together(
    name: str, options: Sequence[inspect.Parameter], make: Callable[[dict[str, Any]], Any]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Put options in the place of a command's parameter ``name``; the command gets what ``make`` makes of their values.

    Typer reads the signature that this leaves.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        parameters: list[inspect.Parameter] = []
        for each in inspect.signature(command, eval_str=True).parameters.values():
            parameters += options if each.name == name else [each.replace(kind=inspect.Parameter.KEYWORD_ONLY)]

        def run(**given: Any) -> None:
            command(**{name: make({each.name: given.pop(each.name) for each in options})}, **given)

        run.__name__, run.__doc__, run.__module__ = command.__name__, command.__doc__, command.__module__
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        return run

    return decorate


def option(name: str, annotation: Any, default: Any = inspect.Parameter.empty) -> inspect.Parameter:
    """A parameter as typer reads it; without a default it is required."""
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

FITTING = (
    "client", "cluster", "family", "penalty", "vary", "covariance", "per_cluster", "tests", "gamma", "lam", "alpha",
    "reduction", "weights", "offset", "standardize", "ridge", "james_stein", "solver", "options", "tol", "max_iter", "seed",
)  # fmt: skip
"""The settings of every command that fits, in the order of their help."""


def from_settings(*names: str, **helps: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command an option for each of these settings; it gets them together, as its parameter ``spec``."""

    def make(given: dict[str, Any]) -> Any:
        from covey.problem.problem import Spec

        chosen = {name: given[_shown(name)] for name in names}
        if "options" in chosen:
            chosen["options"] = settings_of(chosen["options"]) or None
        return Spec(**chosen)

    return together("spec", [_parameter(name, helps.get(name)) for name in names], make)


def _shown(name: str) -> str:
    """The name of a setting on the command line."""
    return "option" if name == "options" else name


def _parameter(name: str, help: str | None) -> inspect.Parameter:
    part = declared()[name]
    kind: Any = part.metadata["shell"]
    default, shown = part.default, _shown(name)
    help = part.metadata["help"] if help is None else help
    help = help.format(choices=", ".join(choices()), first_order=", ".join(first_order()))
    if name == "formula":
        return option(name, _annotated(kind, typer.Argument(help=help)))
    flag = f"--{shown.replace('_', '-')}"
    if kind is bool and default:
        flag = f"{flag}/--no-{shown.replace('_', '-')}"
    return option(shown, _annotated(kind, typer.Option(flag, help=help)), default)


def _annotated(kind: Any, about: Any) -> Any:
    return Annotated.__class_getitem__((kind, about))  # type: ignore[attr-defined]


def settings_of(given: list[str] | None) -> dict[str, object]:
    """``name=value`` pairs; a value that reads as JSON (a number, a list) is one, anything else is text."""
    import json

    from covey.errors import SolverError

    options: dict[str, object] = {}
    for pair in given or []:
        name, equals, text = (part.strip() for part in pair.partition("="))
        if not (name and equals):
            raise SolverError(f"The option --option must be name=value, such as p0=0.1. Got {pair!r} instead.")
        if name in options or name == "checkpoint":
            twice = "is given twice; leave out one"
            own = "is not an --option; covey fit has --checkpoint, and covey federate --out resumes by itself"
            raise SolverError(f"The setting {name!r} {twice if name in options else own}.")
        try:
            options[name] = json.loads(text)
        except ValueError:
            options[name] = text
    return options
