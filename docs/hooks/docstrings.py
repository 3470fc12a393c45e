"""Docstrings as mkdocstrings needs them: those of the running program, in numpydoc and Markdown."""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from typing import Any

import griffe

SECTION = re.compile(r"^(Parameters|Attributes|Returns|Raises)\n-+\n", re.M)


class Docstrings(griffe.Extension):
    """Replace and rewrite docstrings after they are read."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Write roles and examples as Markdown, and one-line descriptions of parameters as descriptions."""
        if obj.docstring is None:
            return
        text = running(obj) if obj.is_class else None
        obj.docstring.value = sessions(parameters(roles(text or obj.docstring.value)))


def running(cls: griffe.Object) -> str | None:
    """The docstring of a class as the program has it: that of an estimator is completed when it is imported."""
    try:
        found = getattr(import_module(cls.module.path), cls.name, None)
    except ImportError:  # of an optional part, such as Flower
        return None
    return inspect.cleandoc(found.__doc__) if inspect.isclass(found) and found.__doc__ else None


def roles(text: str) -> str:
    """``:class:`~covey.x.Y``` becomes ```Y```."""
    text = re.sub(r":[a-z]+:`~[\w.]*?(\w+)`", r"`\1`", text)
    return re.sub(r":[a-z]+:`\.?([^`]+)`", r"`\1`", text)


def parameters(text: str) -> str:
    """``name : what it is``, without an indented description below, describes a parameter: this is no type.

    Of ``a, b : type`` with one description below, each name gets a row of its own.
    """
    lines, inside, out, others = text.split("\n"), False, [], []
    for at, line in enumerate([*lines, ""]):
        following = lines[at + 1] if at + 1 < len(lines) else ""
        if not line.startswith(" ") and not (line == "" and following.startswith(" ")):
            out += others
            others = []
        if re.fullmatch(r"-{3,}", following):
            inside = line.strip() in ("Parameters", "Attributes")
        found = re.fullmatch(r"(\*{0,2}\w[\w, *]*?) : (.*)", line) if inside else None
        if found is None:
            out.append(line)
            continue
        first, *rest = found[1].split(", ")
        kind, said = (f" : {found[2]}", []) if following.startswith(" ") else ("", [f"    {found[2]}"])
        out += [f"{first}{kind}", *said]
        others = [part for name in rest for part in (f"{name}{kind}", f"    See `{first}`.")]
    return "\n".join(out).rstrip()


def sessions(text: str) -> str:
    """Examples outside of a section ``Examples`` become blocks of code."""
    head, mark, tail = text.partition("\nExamples\n---")
    blocks = re.sub(r"(?:^|(?<=\n\n))(>>>.*?)(?=\n\n|\Z)", r"```pycon\n\1\n```", head.rstrip(), flags=re.S)
    return blocks + ("\n" + mark + tail if mark else "")
