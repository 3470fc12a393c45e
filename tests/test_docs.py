"""The documentation: what its pages say to do works, and its pages are complete and linked."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
import runpy
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import covey
from covey import datasets, losses, solvers
from covey.cli import app
from covey.losses import FAMILIES
from covey.records import Record
from covey.solvers import registry

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(path for path in DOCS.rglob("*.md") if "results" not in path.parts)
NAVIGATION = re.findall(r"^ +- .*: (\S+\.md)$|^  - .*: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
FIGURES = DOCS / "figures" / "shrinkage.py"


def load(path):
    """A Python file that belongs to no package, as a module."""
    spec = importlib.util.spec_from_file_location(f"docs_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def newcomer(tmp_path, monkeypatch):
    """An empty folder to work in; what its files register is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    families = set(FAMILIES)
    yield tmp_path
    ours = {path.stem for path in tmp_path.glob("*.py")}
    solvers_made = {name for name, solver in registry._registered.items() if solver.run.__module__ in ours}
    records = {name for name, record in Record.registered.items() if record.__module__ in ours}
    made = ((FAMILIES, set(FAMILIES) - families), (registry._registered, solvers_made), (Record.registered, records))
    for registered, names in made:
        for name in names:
            del registered[name]
    for name in ours:
        sys.modules.pop(name, None)


@pytest.mark.parametrize("name", ["add-a-family", "add-a-solver"])
def test_following_a_page_step_by_step_works(name, newcomer):
    """Every file of the page is written and every command run, in order; it prints what the page shows."""
    page = (DOCS / "how-to" / f"{name}.md").read_text()
    commands = 0
    for title, body, session in re.findall(r'```python title="([^"]+)"\n(.*?)```|```console\n(.*?)```', page, re.S):
        if title:
            (newcomer / title).write_text(body)
            continue
        for command, shown in re.findall(r"^\$ python (\S+)\n((?:(?!\$ ).*\n)*)", session, re.M):
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                runpy.run_path(str(newcomer / command), run_name="__main__")
            assert printed.getvalue() == shown, command
            commands += 1
    assert commands == {"add-a-family": 2, "add-a-solver": 1}[name]


def test_the_reference_has_every_public_name():
    page = (DOCS / "reference" / "api.md").read_text()
    for package in (covey, datasets, losses, solvers):
        names = [f"{package.__name__}.{name}" for name in package.__all__]
        modules = [name for name in names if name in ("covey.datasets", "covey.losses", "covey.solvers")]
        missing = [name for name in names if name not in modules and not re.search(rf"{re.escape(name)}\b", page)]
        assert missing == []


def test_the_reference_has_no_other_names():
    hooks = load(DOCS / "hooks" / "pages.py")
    named = re.findall(r"^::: (\S+)$", (DOCS / "reference" / "api.md").read_text(), re.M)
    assert len(named) == len(set(named)) > 30
    for name in named:
        assert callable(hooks.resolve(name)), name


def test_the_command_line_page_has_every_command_and_option():
    hooks = load(DOCS / "hooks" / "pages.py")
    assert hooks.COMMANDS in (DOCS / "reference" / "command-line.md").read_text()
    sections = dict(re.findall(r"^## covey (\S+)\n(.*?)(?=^## |\Z)", hooks.command_line(), re.M | re.S))
    assert set(re.findall(r"^\W*([a-z-]+) {2,}\S", help_of().split("Commands")[1], re.M)) == set(sections)
    for name, section in sections.items():
        options = set(re.findall(r"^\W*(--[a-z][\w-]*)", help_of(name), re.M)) - {"--help"}
        assert options <= set(re.findall(r"`(--[a-z][\w-]*)`", section)), name


def help_of(*command):
    """What ``covey COMMAND --help`` prints, on a wide screen."""
    done = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "300", "NO_COLOR": "1", "TERM": "dumb"})
    assert done.exit_code == 0
    return done.output


def test_sessions_are_marked_for_the_highlighter():
    hooks = load(DOCS / "hooks" / "pages.py")
    text = "```python\n>>> 1\n1\n```\n\n```python\nx = 1\n```\n"
    assert hooks.on_page_markdown(text, None, None, None).count("pycon") == 1


def test_every_page_is_in_the_navigation():
    listed = {entry for pair in NAVIGATION for entry in pair if entry}
    pages = {str(path.relative_to(DOCS)) for path in [*PAGES, DOCS / "results" / "README.md"]}
    assert listed == pages


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_links_between_pages_lead_somewhere(page):
    for link in re.findall(r"\]\((?!https?:|#|\))([^)\s]+)\)", page.read_text()):
        target = (page.parent / link.split("#")[0]).resolve()
        assert target.exists(), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_lines_of_prose_are_short(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    prose = [line for line in text.splitlines() if not line.startswith(("|", "    ", "!["))]
    assert [line for line in prose if len(line) > 120] == []


def test_nothing_is_loaded_from_another_server():
    """The site is read without a network: its own files name no address, apart from links that a reader follows."""
    config = (ROOT / "mkdocs.yml").read_text()
    assert "font: false" in config
    for text in (
        config,
        *(path.read_text() for folder in ("javascripts", "stylesheets") for path in (DOCS / folder).iterdir()),
    ):
        assert not re.search(r"https?://", text)
    for page in PAGES:
        assert not re.search(r"!\[[^]]*\]\(https?:|<(script|img|link)\b", page.read_text()), page


def test_the_learned_penalty_is_near_the_best_one_on_held_out_homes(monkeypatch):
    """What the last figure of the page on shrinkage shows."""
    figures = load(FIGURES)
    homes = figures.survey()
    found = figures.learned(homes).components_
    gamma, lam = (found.residual / level.sd.item() ** 2 for level in (found.client, found.cluster))
    monkeypatch.setattr(figures, "GAMMAS", gamma * 4.0 ** figures.np.arange(-3, 4))
    errors = figures.held_out(homes, lam)
    assert abs(errors.index(min(errors)) - 3) <= 1


def test_figures_of_the_pages_are_drawn_by_the_script():
    shown = re.findall(r"\]\(\.\./figures/shrinkage-(\w+)\.svg\)", (DOCS / "explanation" / "shrinkage.md").read_text())
    drawn = re.findall(r'"(\w+)": (?:minnesota|weight|path)\(', FIGURES.read_text())
    assert sorted(shown) == sorted(drawn)
