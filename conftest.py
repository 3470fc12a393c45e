"""Examples that write files do so in a folder of their own."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def own_folder_for_examples(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if isinstance(request.node, pytest.DoctestItem):
        monkeypatch.chdir(tmp_path)


def _drop_stale_kernels() -> None:
    """Numba looks at a kernel's own file only; kernels of other files also contain functions of these."""
    source = Path(__file__).parent / "src" / "covey"
    shared = ("losses/kernels.py", "kernels.py", "threads.py")
    changed = max((source / file).stat().st_mtime for file in shared)
    for cached in source.rglob("*.nb?"):
        with suppress(FileNotFoundError):  # another worker of the tests may be faster
            if cached.stat().st_mtime < changed:
                cached.unlink()


_drop_stale_kernels()
