"""The first start: on a read-only installation without a home, and what a terminal shows while loops compile."""

from __future__ import annotations

import os
import pty
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import covey
from covey import compiling

NOBODY = 65534
SORT = """
import numpy as np
from covey.kernels import rank_in_table
codes = np.zeros(2, dtype=np.int64)
rank_in_table(np.array([3, 1]), 1, np.zeros(3, dtype=np.int64), codes)
print(codes.tolist())
"""
MORE = "from covey.kernels import find_in_table; find_in_table(codes, 0, codes, codes)\n"


def obeying_modes():
    """A command that starts a process which cannot write to read-only folders; root can, without this."""
    if os.getuid() != 0:
        return []
    if shutil.which("setpriv") is None:
        pytest.skip("root writes to read-only folders, and there is no setpriv to prevent it")
    return ["setpriv", "--bounding-set=-dac_override,-fowner"]


def environment(source, **more):
    kept = {name: value for name, value in os.environ.items() if name in ("PATH", "LANG", "LD_LIBRARY_PATH")}
    return {**kept, "PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1", **more}


@pytest.fixture(scope="module")
def read_only(tmp_path_factory):
    """A copy of the package in which nothing can be written, a home like it, and an empty folder for temporary files."""
    top = tmp_path_factory.mktemp("installation")
    package = shutil.copytree(Path(covey.__file__).parent, top / "lib" / "covey", ignore=shutil.ignore_patterns("__pycache__"))
    (top / "home").mkdir()
    folders = [path for path in (top, *top.rglob("*")) if path.is_dir()]
    for path in folders:
        path.chmod(0o555)
    yield package.parent, top / "home"
    for path in folders:
        path.chmod(0o755)


def start(read_only, temporary, code):
    source, home = read_only
    given = environment(source, HOME=str(home), TMPDIR=str(temporary))
    command = [*obeying_modes(), sys.executable, "-c", code]
    return subprocess.run(command, env=given, capture_output=True, text=True, timeout=120, cwd=home)


def test_covey_starts_without_a_folder_of_its_own(read_only, tmp_path):
    done = start(read_only, tmp_path, f"{SORT}import numba; print(repr(numba.config.CACHE_DIR))")
    assert (done.returncode, done.stdout, done.stderr) == (0, "[1, 0]\n''\n", "")  # other packages keep their folders
    (folder,) = tmp_path.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert list(folder.rglob("*.nbi"))  # the compiled loop is kept


def test_covey_starts_where_compiled_loops_cannot_be_kept(read_only, tmp_path):
    (tmp_path / f"covey-{os.getuid()}").mkdir()
    (tmp_path / f"covey-{os.getuid()}").chmod(0o777)
    done = start(read_only, tmp_path, SORT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[1, 0]\n", "")
    assert not list(tmp_path.rglob("*.nbi"))


@pytest.mark.parametrize("wrong", ["open to others", "a link", "replaceable"])
def test_a_folder_that_others_can_write_to_is_not_used(tmp_path, monkeypatch, wrong):
    monkeypatch.setattr(compiling.tempfile, "gettempdir", lambda: str(tmp_path))
    folder = tmp_path / f"covey-{os.getuid()}"
    fresh = compiling.private_folder.__wrapped__
    assert fresh() == folder
    if wrong == "open to others":
        folder.chmod(0o770)
    elif wrong == "a link":
        folder.rename(tmp_path / "elsewhere")
        folder.symlink_to(tmp_path / "elsewhere")
    else:
        tmp_path.chmod(0o777)
    assert fresh() is None


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make a folder of another user")
def test_a_folder_of_another_user_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setattr(compiling.tempfile, "gettempdir", lambda: str(tmp_path))
    folder = tmp_path / f"covey-{os.getuid()}"
    folder.mkdir(mode=0o700)
    os.chown(folder, NOBODY, NOBODY)
    assert compiling.private_folder.__wrapped__() is None


def on_a_terminal(code, cache):
    """What a process writes to a terminal as its standard error."""
    ours, theirs = pty.openpty()
    given = environment(Path(covey.__file__).parents[1], NUMBA_CACHE_DIR=str(cache), HOME=str(cache))
    done = subprocess.run([sys.executable, "-c", code], env=given, stdout=subprocess.PIPE, stderr=theirs, timeout=120)
    os.close(theirs)
    assert done.returncode == 0
    try:
        return os.read(ours, 10_000).decode()
    except OSError:  # nothing was written
        return ""
    finally:
        os.close(ours)


def test_a_terminal_shows_once_that_loops_compile(tmp_path):
    assert on_a_terminal(SORT + MORE, tmp_path).count("compiling loops, once for this machine") == 1
    assert on_a_terminal(SORT, tmp_path) == ""  # from the disk


AFTER = """
import polars as pl
from numba.core import event
from covey import HierarchicalClassifier, HierarchicalRegressor, datasets
class Compiled(event.Listener):
    names = []
    def on_start(self, started):
        self.names.append(started.data["dispatcher"].__module__ + "." + started.data["dispatcher"].__name__)
    def on_end(self, ended):
        pass
event.register("numba:compile", Compiled())
homes = datasets.load_radon().with_columns(high=pl.col("radon") > 4)
model = HierarchicalRegressor(formula="log_radon ~ floor + (1 + floor | state/county)").fit(homes)
model.predict(homes), model.predict_interval(homes[:5])
HierarchicalClassifier(formula="high ~ floor + (1 | state/county)").fit(homes).predict_proba(homes)
HierarchicalRegressor(client="county", cluster="state", formula="log_radon ~ floor", gamma=1.0).fit(homes)
print([name for name in Compiled.names if name.startswith("covey.")])
"""


def test_nothing_is_compiled_after_warm_up(tmp_path):
    given = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "COVEY_THREADS": "1"}
    warm = subprocess.run([sys.executable, "-m", "covey", "warm-up"], env=given, capture_output=True, text=True, check=True)
    assert f"kept under {tmp_path}" in warm.stdout.replace("\n", "")
    after = subprocess.run([sys.executable, "-c", AFTER], env=given, capture_output=True, text=True, check=True)
    assert after.stdout.splitlines()[-1] == "[]"
