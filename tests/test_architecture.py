"""The architecture: what may import what, what the packages promise, a documented and typed public interface."""

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
FILES = sorted(SOURCE.rglob("*.py"))
BASIC = ("_typing", "_version", "errors", "records", "exact")
CORE = ("tree", "tables", "losses", "objective", "problem", "nodes", "solvers", "variance", "model", "fitting", "estimators")
INTERFACES = ("datasets", "federation", "reproduce", "report", "cli", "__main__")
INSIDE_FEDERATION = ("wire", "privacy", "site", "operator", "simulate", "flower")


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def used(path, package="covey"):
    """The parts of a package that a file imports from."""
    depth = package.count(".") + 1
    named = [name.split(".") for name in imports(path) if name.startswith(package + ".")]
    return {parts[depth] for parts in named}


def part(path, package="covey"):
    return path.relative_to(SOURCE.parent / package.replace(".", "/")).parts[0].removesuffix(".py")


def breaches(files, order, package="covey"):
    """Pairs of files and parts that come after them in the order."""
    rank = {name: at for at, name in enumerate(order)}
    mine = [path for path in files if part(path, package) in rank]
    return [
        (str(path), name) for path in mine for name in used(path, package) if rank.get(name, -1) > rank[part(path, package)]
    ]


def test_folders_import_only_from_those_before_them():
    order = (*BASIC, *CORE, *INTERFACES)
    assert {part(path) for path in FILES} - {"__init__"} <= set(order)
    assert breaches(FILES, order) == []
    federation = [path for path in FILES if SOURCE / "federation" in path.parents]
    assert breaches(federation, INSIDE_FEDERATION, "covey.federation") == []


def test_the_core_needs_no_interface():
    """A statistician who fits in memory loads neither federation, nor plots, nor a command line."""
    for path in FILES:
        if part(path) in (*BASIC, *CORE):
            outside = {name.split(".")[0] for name in imports(path)} & {"matplotlib", "rich", "typer", "flwr"}
            assert not outside, path
            assert not used(path) & set(INTERFACES) - {"datasets"}, path


def test_flower_is_imported_in_its_folder_only():
    for path in FILES:
        if SOURCE / "federation" / "flower" not in path.parents:
            assert "flwr" not in {name.split(".")[0] for name in imports(path)}, path
            at_once = [node.module or "" for node in ast.parse(path.read_text()).body if isinstance(node, ast.ImportFrom)]
            assert not [name for name in at_once if name.startswith("covey.federation.flower")], path


def test_nothing_is_pickled_and_source_is_ascii():
    for path in FILES:
        assert not {"pickle", "joblib", "shelve", "marshal", "dill"} & set(imports(path)), path
        assert path.read_text().isascii(), path


def test_public_names_are_few_documented_and_there():
    assert len(covey.__all__) <= 22
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
from covey.solvers.first_order import kernels as randomised
from covey import datasets, minimise, GroupedData, Penalty
from covey.tables.rows import counting_sort, find_parents
from covey.tree.kernels import rank_in_table
from covey.losses import Gaussian, Bernoulli, kernels
from covey.solvers.direct import kernels as direct
homes = datasets.load_radon().sample(fraction=1.0, shuffle=True, seed=0)
for loss, y in ((Gaussian(), homes["log_radon"]), (Bernoulli(), homes["radon"] > 4)):
    data = GroupedData.from_arrays(homes[["floor"]].to_numpy(), y, homes["fips"].rank("dense"), homes["state"])
    minimise(data, loss, Penalty.of(data.hierarchy), solver="newton")
minimise(GroupedData.from_arrays(data.X, data.y), Gaussian(), Penalty.of(data.pooled().hierarchy))
for solver in ("l2gd", "al2sgd_plus"):
    minimise(data, Gaussian(ridge=0.1), Penalty.of(data.hierarchy), solver=solver, max_iter=20)
    minimise(data, Bernoulli(ridge=0.1), Penalty.of(data.hierarchy), solver=solver, max_iter=20)
moves = (randomised.group, randomised.l2gd_move, randomised.al2sgd_plus_move)
of_data = (counting_sort, find_parents, rank_in_table)
kernels_used = (kernels.expand, kernels.curvature_floor, direct.eliminate, direct.descend, *of_data, *moves)
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


def test_files_that_the_documentation_names_exist():
    root = SOURCE.parents[1]
    pages = [*root.glob("*.md"), *(root / "docs").rglob("*.md")]
    named = {(page.name, name) for page in pages for name in re.findall(r"`((?:\w+/)*\w+\.py)`", page.read_text())}
    assert named
    missing = [each for each in named if not any((place / each[1]).exists() for place in (root, SOURCE))]
    assert missing == []
