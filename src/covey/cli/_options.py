"""Options of the commands, made of the settings that :mod:`covey.problem.settings` declares.

A command that takes settings has a parameter ``spec``; :func:`from_settings` puts an option in its place for each setting::

    @from_settings("formula", "client", "gamma", "seed", seed="Seed of the split.")
    def fit(data: Annotated[Path, typer.Argument()], spec: Any, as_json: AsJson = False) -> None:
        ...                      # spec is a covey.problem.spec.Spec

Typer reads the signature that this makes. ``formula`` is an argument, everything else an option with the default and the help
of its declaration; a keyword gives another help to one of them. ``options`` is ``--option name=value``, which may be repeated.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from covey.cli._groups import option, together
from covey.problem.settings import declared
from covey.solvers.registry import choices, first_order

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

FITTING = (
    "client", "cluster", "family", "penalty", "vary", "covariance", "per_cluster", "tests", "gamma", "lam", "alpha",
    "reduction", "weights", "offset", "standardize", "ridge", "james_stein", "solver", "options", "tol", "max_iter", "seed",
)  # fmt: skip
"""The settings of every command that fits, in the order of their help."""


def from_settings(*names: str, **helps: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command an option for each of these settings; it gets them together, as its parameter ``spec``."""

    def make(given: dict[str, Any]) -> Any:
        from covey.problem.spec import Spec

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
