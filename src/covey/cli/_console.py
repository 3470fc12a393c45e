"""Where commands write: results to stdout, progress to stderr and only on a terminal."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console


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
