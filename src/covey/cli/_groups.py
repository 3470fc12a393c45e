"""Options of a command that belong together, declared as the fields of a dataclass."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, get_type_hints


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
