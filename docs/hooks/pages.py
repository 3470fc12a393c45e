"""Hooks of ``mkdocs build``: fill in the command line and the places of public names, mark interactive sessions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import reduce
from importlib import import_module
from typing import Any

import typer

from covey.cli import app

COMMANDS = "<!-- commands -->"


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Fill in the commands, and mark interactive Python sessions, so that prompts and output look different from code."""
    if COMMANDS in markdown:
        markdown = markdown.replace(COMMANDS, command_line())
    markdown = re.sub(r"^::: (covey\.[\w.]+)\n(?: {4}options:\n)?", _reference, markdown, flags=re.M)
    # GitHub wants a backslash before a bar within code within a table; Python-Markdown would show it.
    markdown = re.sub(r"^\|.*$", lambda row: re.sub(r"`[^`]*`", _bars, row[0]), markdown, flags=re.M)
    return re.sub(r"^(\s*```)python\n(?=\s*>>>)", r"\1pycon\n", markdown, flags=re.M)


def _bars(code: re.Match[str]) -> str:
    return code[0].replace(r"\|", "|")


def _reference(found: re.Match[str]) -> str:
    """A public name under its public heading, read where it is defined: a function may have the name of its module."""
    public = found[1]
    thing = resolve(public)
    options = f"    options:\n      heading: {public}\n      toc_label: {public.rsplit('.', 1)[1]}\n"
    return f"[](){{ #{public} }}\n\n::: {thing.__module__}.{thing.__qualname__}\n{options}"


def resolve(public: str) -> Any:
    """What a public name such as ``covey.solvers.sweep`` stands for."""
    return reduce(getattr, public.split(".")[1:], import_module("covey"))


def command_line() -> str:
    """Every command of ``covey`` as Markdown: purpose, example, arguments and options with their defaults."""
    group: Any = typer.main.get_command(app)
    return "\n\n".join(_command(name, command) for name, command in _with_parts(group))


def _with_parts(group: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    """All commands, those that have further commands with these after them."""
    for name, command in group.commands.items():
        yield f"{before}{name}", command
        if hasattr(command, "commands"):
            yield from _with_parts(command, f"{before}{name} ")


def _command(name: str, command: Any) -> str:
    arguments = [part for part in command.params if part.param_type_name == "argument"]
    options = [part for part in command.params if part.param_type_name == "option" and not part.hidden]
    usage = " ".join(["covey", name, *(part.name.upper() for part in arguments), "[OPTIONS]"])
    parts = [f"## covey {name}", f"```text\n{usage}\n```", _prose(command.help or "")]
    if arguments:
        rows = [f"| `{part.name.upper()}` | {_cell(part.help)} |" for part in arguments]
        parts.append("\n".join(["| argument | meaning |", "|---|---|", *rows]))
    rows = [f"| {_flags(part)} | {_default(part)} | {_cell(part.help)} |" for part in options]
    parts.append("\n".join(["| option | default | meaning |", "|---|---|---|", *rows]))
    return "\n\n".join(parts)


def _prose(text: str) -> str:
    """The help of a command; lines that begin with ``Example`` become blocks of code."""
    plain = re.sub(r"\[/?[a-z ]+\]", "", text)
    paragraphs = [re.sub(r"\s*\n\s*", " ", part.strip()) for part in plain.split("\n\n") if part.strip()]
    return "\n\n".join(re.sub(r"^Examples?:?\s+(covey .*)$", r"```console\n$ \1\n```", part) for part in paragraphs)


def _flags(option: Any) -> str:
    flags = " / ".join(f"`{flag}`" for flag in (*option.opts, *option.secondary_opts))
    return flags if option.is_flag else f"{flags} VALUE"


def _default(option: Any) -> str:
    if option.required:
        return "required"
    if option.is_flag:
        return "on" if option.default and option.secondary_opts else "off"
    return "" if option.default is None or callable(option.default) else f"`{option.default}`"


def _cell(text: str | None) -> str:
    return " ".join((text or "").replace("|", r"\|").split())
