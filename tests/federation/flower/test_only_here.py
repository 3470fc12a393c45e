"""Flower stays in its room: everything but ``federation/flower`` works without it."""

from __future__ import annotations

import ast
from pathlib import Path

import covey

SOURCE = Path(covey.__file__).parent


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def test_flower_is_imported_in_one_room_only():
    of_flower = {path for path in SOURCE.rglob("*.py") if any(name.split(".")[0] == "flwr" for name in imported(path))}
    assert {path.parent for path in of_flower} == {SOURCE / "federation" / "flower"}


def test_nothing_is_loaded_from_that_room_before_it_is_needed():
    """Its modules that import Flower are named in functions only, so that a covey without Flower imports as a whole."""
    room = "covey.federation.flower"
    for path in SOURCE.rglob("*.py"):
        if path.parent == SOURCE / "federation" / "flower":
            continue
        at_once = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ImportFrom)]
        assert not any((node.module or "").startswith(room) for node in at_once), path
