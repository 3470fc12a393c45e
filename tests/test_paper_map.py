"""What the pages about the paper and its notation name exists: modules, tests, commands, errata, identifiers."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer

import covey
from covey.cli import app

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "paper.md"
COLUMNS = ("paper", "says", "module", "test", "command", "differs")
NUMBERED = {  # the printed numbers of the paper, by the shared counter of its statements
    "Assumption": ("2.1", "4.1"),
    "Proposition": ("2.2", "3.1", "3.2", "3.3", "3.4", "5.3", "5.4"),
    "Theorem": ("3.5", "4.3", "5.1", "B.1"),
    "Corollary": ("3.6", "4.4", "5.2", "A.2"),
    "Lemma": ("4.2", "A.1"),
    "Algorithm": ("1", "2"),
    "Table": ("1", "2", "3"),
    "Figure": ("1", "2"),
}


def rows():
    """The rows of the page's table, by column."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines[1:]]
    assert all(len(each) == len(COLUMNS) for each in cells), [each[0] for each in cells if len(each) != len(COLUMNS)]
    return [dict(zip(COLUMNS, each, strict=True)) for each in cells]


def quoted(text):
    return re.findall(r"`([^`]+)`", text)


def anchors(page):
    """The anchors of a page's headings, as GitHub and mkdocs make them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading.lower())).strip("-") for heading in headings}


def test_every_statement_of_the_paper_has_a_row():
    named = [row["paper"] for row in rows()]
    for kind, numbers in NUMBERED.items():
        for number in numbers:
            assert sum(f"{name} ".startswith(f"{kind} {number} ") for name in named) == 1, f"{kind} {number}"
    for baseline in ("single-model", "locally-trained", "single-cluster"):
        assert any(baseline in name for name in named), baseline


@pytest.mark.parametrize("row", rows(), ids=lambda row: row["paper"])
def test_what_a_row_names_exists(row):
    for module in quoted(row["module"]):
        assert (ROOT / module).is_file(), f"docs/paper.md, {row['paper']}: there is no module {module}"
    for test in quoted(row["test"]):
        file, _, function = test.partition("::")
        assert (ROOT / file).is_file(), f"docs/paper.md, {row['paper']}: there is no file {file}"
        assert not function or f"def {function}(" in (ROOT / file).read_text(), (
            f"docs/paper.md, {row['paper']}: {file} has no test {function}"
        )
    for page, anchor in re.findall(r"\]\(([^)#]+)#?([^)]*)\)", row["differs"]):
        assert (PAGE.parent / page).is_file(), f"docs/paper.md, {row['paper']}: there is no page {page}"
        assert not anchor or anchor in anchors(PAGE.parent / page), f"docs/paper.md, {row['paper']}: {page} has no #{anchor}"


def shown():
    """Commands of the table (without arguments where they stand for a longer one), and those of the console block."""
    block = "".join(re.findall(r"```console\n(.*?)```", PAGE.read_text(), re.S))
    return sorted({command for row in rows() for command in quoted(row["command"])}), re.findall(r"^\$ (.*)$", block, re.M)


def test_every_command_parses():
    group = typer.main.get_command(app)
    short, full = shown()
    assert full
    for command in [*short, *full]:
        program, name, *arguments = shlex.split(command)
        assert program == "covey"
        assert name in group.commands, f"docs/paper.md: there is no command {command!r}"
        if arguments:
            group.commands[name].make_context(name, arguments)
    for command in short:
        if len(command.split()) == 2:
            assert any(f"{each} ".startswith(f"{command} ") for each in full), (
                f"docs/paper.md does not show {command!r} in full"
            )


def test_identifiers_of_the_notation_are_in_the_source():
    """The column "in the code" of docs/reference/notation.md."""
    page = (ROOT / "docs" / "reference" / "notation.md").read_text()
    source = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    words = set(re.findall(r"\w+", source))
    named = [line.split("|")[4] for line in page.splitlines() if line.startswith("| `") and line.count("|") == 6]
    assert len(named) > 20
    missing = {word for cell in named for name in quoted(cell) for word in re.findall(r"[A-Za-z_]\w*", name)} - words
    assert not missing, f"docs/reference/notation.md names {sorted(missing)}, which are not in the source"


def test_the_citation_has_the_version_and_the_paper():
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"version: {covey.__version__}\n" in citation
    assert "arxiv.org/abs/2204.13619" in citation
