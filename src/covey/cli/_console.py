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


def print_json(document: Any) -> None:
    print(json.dumps(document, indent=2))
