"""The README is short and true, and the shell session of the first tutorial runs; Python examples are doctests."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import polars as pl
import pytest

from covey.report.results import ORDER

README = Path(__file__).parents[1] / "README.md"
TUTORIAL = README.parent / "docs" / "tutorials" / "first-model.md"
SOURCE = tomllib.loads(README.with_name("pyproject.toml").read_text())["project"]["urls"]["Source"]
IMAGES = SOURCE.replace("github.com", "raw.githubusercontent.com") + "/main/"


def prose(page):
    """Lines outside of blocks of code and tables."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)
    return [line for line in text.splitlines() if not line.startswith(("|", "    "))]


def test_the_readme_is_short():
    assert len(README.read_text().splitlines()) <= 150


@pytest.mark.parametrize("page", [README, TUTORIAL, README.with_name("CHANGELOG.md"), README.with_name("CONTRIBUTING.md")])
def test_lines_of_prose_are_short(page):
    assert [line for line in prose(page) if len(line) > 120] == []


def test_images_are_there_and_found_from_an_index_page():
    images = re.findall(r"!\[[^]]*\]\((\S+\.png)\)", README.read_text())
    assert images
    for image in images:
        assert image.startswith(IMAGES)
        assert (README.parent / image.removeprefix(IMAGES)).exists()


def session():
    """Each command of the console block with the lines printed under it."""
    block = re.search(r"```console\n(.*?)```", TUTORIAL.read_text(), re.S).group(1)
    parts = re.split(r"^\$ ", block, flags=re.M)[1:]
    return [(part.split("\n", 1)[0], part.split("\n", 1)[1].rstrip("\n")) for part in parts]


def test_the_shell_session(tmp_path, homes):
    (tmp_path / "covey-demo").mkdir()
    homes.write_parquet(tmp_path / "covey-demo" / "homes.parquet")
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "COLUMNS": "100"}
    commands = session()
    assert len(commands) == 4
    for command, shown in commands:
        done = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True, env=environment, check=False)
        printed = (done.stdout or done.stderr).strip()
        assert done.returncode == (2 if "covey: " in shown else 0), done.stderr
        if shown:
            pattern = ".*".join(re.escape(piece) for piece in shown.split("..."))
            assert re.fullmatch(pattern, printed, re.S), f"{command}\n{printed}"
    assert (tmp_path / "predictions.csv").exists()


LINKS = [(page, link) for page in (README, TUTORIAL) for link in re.findall(r"\]\(([^)h][^)]*)\)", page.read_text())]


@pytest.mark.parametrize(("page", "link"), LINKS)
def test_links_lead_somewhere(page, link):
    assert (page.parent / link.split("#")[0]).exists()


def test_the_error_table_is_the_demos(tmp_path):
    """The numbers under 'make demo' are those it prints."""
    covey = Path(sys.executable).with_name("covey")
    printed = subprocess.run([covey, "demo"], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    for name, error in re.findall(
        r"^\| \**(single-model|locally-trained|single-cluster|hierarchical).*?\| \**([\d.]+)", README.read_text(), re.M
    ):
        assert re.search(rf"{name} +\S +{re.escape(error)}", printed), (name, error)


def test_the_committed_results_are_whole_and_what_the_readme_says():
    results = README.parent / "docs" / "results"
    page = (results / "README.md").read_text()
    for name in ORDER:
        assert (f"<!-- study: {name} -->" in page) == (name != "donors-tables")
    for link in re.findall(r"\]\(([^)]+)\)", page):
        assert (results / link).exists(), link
    assert "Quick run" not in page
    claims = pl.read_csv(results / "simulation" / "claims.csv")
    verdicts = dict(claims["verdict"].value_counts().iter_rows())
    said = re.search(
        r"paper's (\d+) numbers, .*? (\d+) agree with ours .*? (\d+) lie outside that, .*? (\d+) disagree",
        README.read_text(),
        re.S,
    )
    counts = claims.height, verdicts["agrees"], verdicts["agrees as one run"], verdicts["differs"]
    assert counts == tuple(map(int, said.groups()))
    donors = pl.read_csv(results / "donors" / "claims.csv")
    hidden = donors.filter(verdict="not comparable").height
    assert f"so {hidden} printed numbers cannot be" in README.read_text()
