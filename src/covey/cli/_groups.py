"""Options of a command that belong together, declared as the fields of a dataclass."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any, get_type_hints


def group(kind: type[Any], name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command an option for each field of a dataclass; it gets them together, as its parameter ``name``.

    A field is declared as typer has it: ``timeout: Annotated[float | None, typer.Option(help="...")] = None``.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(kind, include_extras=True)
        parameters: list[inspect.Parameter] = []
        for each in inspect.signature(command, eval_str=True).parameters.values():
            made = [_parameter(part.name, part.default, hints[part.name]) for part in fields(kind)]
            parameters += made if each.name == name else [each.replace(kind=inspect.Parameter.KEYWORD_ONLY)]

        def run(**given: Any) -> None:
            command(**{name: kind(**{part.name: given.pop(part.name) for part in fields(kind)})}, **given)

        run.__name__, run.__doc__, run.__module__ = command.__name__, command.__doc__, command.__module__
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        return run

    return decorate


def _parameter(name: str, default: Any, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
