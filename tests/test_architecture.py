"""The house keeps its rules: what may import what, no pickle, a documented and typed public face."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import covey

SOURCE = Path(covey.__file__).parent
CORE = [
    path
    for path in SOURCE.rglob("*.py")
    if path.relative_to(SOURCE).parts[0] not in ("report", "cli", "reproduce", "__main__.py")
]


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


@pytest.mark.parametrize("path", CORE, ids=lambda path: str(path.relative_to(SOURCE)))
def test_the_core_imports_no_face(path):
    for name in imports(path):
        assert not name.startswith(("covey.report", "covey.cli", "covey.reproduce", "matplotlib", "rich", "typer"))


@pytest.mark.parametrize("path", SOURCE.rglob("*.py"), ids=lambda path: str(path.relative_to(SOURCE)))
def test_flower_stays_in_its_room(path):
    if SOURCE / "federation" / "flower" not in path.parents:
        assert not [name for name in imports(path) if name.split(".")[0] == "flwr"]
        at_once = [node.module or "" for node in ast.parse(path.read_text()).body if isinstance(node, ast.ImportFrom)]
        assert not [name for name in at_once if name.startswith("covey.federation.flower")]  # all else works without Flower


def test_modules_import_only_from_those_before_them():
    """The reading order that docs/notation.md states is the import order."""
    notes = (SOURCE.parents[1] / "docs" / "notation.md").read_text()
    order = re.findall(r"`(\w+)`", notes.split("a test checks this list):")[1])
    rank = {name: at for at, name in enumerate(order)}
    rooms = {path.relative_to(SOURCE).parts[0].removesuffix(".py") for path in SOURCE.rglob("*.py")}
    assert rooms - {"__init__", "__main__", "_typing", "_version"} == set(order)
    for path in SOURCE.rglob("*.py"):
        room = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        if room not in rank:
            continue
        for name in imports(path):
            used = name.removeprefix("covey.").split(".")[0]
            if name.startswith("covey.") and used in rank:
                assert rank[used] <= rank[room], f"{room} imports {used}"


@pytest.mark.parametrize("path", [*SOURCE.rglob("*.py")], ids=lambda path: str(path.relative_to(SOURCE)))
def test_nothing_is_pickled(path):
    assert not {"pickle", "joblib", "shelve", "marshal", "dill"} & set(imports(path))
    assert path.read_text().isascii()


def test_public_names_are_few_documented_and_there():
    assert len(covey.__all__) <= 15
    for name in covey.__all__:
        thing = getattr(covey, name)
        assert inspect.getdoc(thing), name
        if inspect.isfunction(thing):
            assert ">>>" in (inspect.getdoc(thing) or "") or name == "read_table", name
    assert "client, cluster : str, int or None" in covey.HierarchicalClassifier.__doc__
    with pytest.raises(AttributeError):
        covey.frobnicate  # noqa: B018


def test_a_second_process_compiles_nothing():
    """Every kernel comes from the cache: numba's own count of cache misses is zero."""
    code = """
import sys
from covey.solvers.first_order.schedule import _group
from covey.solvers import al2sgd_plus, l2gd
from covey import datasets, sweep, newton, GroupedData, Penalty
from covey.tables.rows import _counting_sort, _find_parents
from covey.tree.ids import _rank_in_table
from covey.losses import Gaussian, Bernoulli, kernels
from covey.solvers.direct.elimination import _eliminate, _descend
homes = datasets.load_radon().sample(fraction=1.0, shuffle=True, seed=0)
for loss, y in ((Gaussian(), homes["log_radon"]), (Bernoulli(), homes["radon"] > 4)):
    data = GroupedData.from_arrays(homes[["floor"]].to_numpy(), y, homes["fips"].rank("dense"), homes["state"])
    newton(data, loss, Penalty.of(data.hierarchy))
sweep(GroupedData.from_arrays(data.X, data.y), Gaussian(), Penalty.of(data.pooled().hierarchy))
for solver in (l2gd, al2sgd_plus):
    solver(data, Gaussian(ridge=0.1), Penalty.of(data.hierarchy), max_iter=20)
    solver(data, Bernoulli(ridge=0.1), Penalty.of(data.hierarchy), max_iter=20)
by_coins = [sys.modules[f"covey.solvers.first_order.{name}"]._move for name in ("l2gd", "al2sgd_plus")]
of_data = (_counting_sort, _find_parents, _rank_in_table)
kernels_used = (kernels.expand, kernels.curvature_floor, _eliminate, _descend, _group, *of_data, *by_coins)
assert all(sum(k.stats.cache_hits.values()) for k in kernels_used)
print(sum(sum(k.stats.cache_misses.values()) for k in kernels_used))
"""
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "0", done.stderr


def test_one_version():
    files = SOURCE.parents[1] / "pyproject.toml", SOURCE / "federation" / "flower" / "app" / "pyproject.toml"
    told = [tomllib.loads(path.read_text())["project"]["version"] for path in files]
    assert told == [covey.__version__] * 2
