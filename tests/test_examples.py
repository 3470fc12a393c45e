"""The scripts of ``examples`` run on few rows and write their picture; the gallery shows each of them."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = ("calibration", "comparison", "embeddings", "shrinkage", "sites", "slopes")


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_example_runs(name, tmp_path):
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"))["main"](tmp_path, small=True)
    assert (tmp_path / f"{name}.png").stat().st_size > 5_000


def test_the_gallery_shows_every_example():
    page = (ROOT / "docs" / "gallery.md").read_text()
    for name in SCRIPTS:
        assert f'--8<-- "examples/{name}.py:code"' in page
        assert (ROOT / "docs" / "images" / "gallery" / f"{name}.png").stat().st_size > 5_000
