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
BASIC = ("_typing", "_version", "errors", "records", "compiling", "threads", "kernels", "exact")
CORE = ("tree", "tables", "losses", "objective", "problem", "nodes", "solvers", "variance", "model", "fitting", "estimators")
INTERFACES = ("datasets", "engines", "federation", "reproduce", "report", "cli", "__main__")
ENGINES = ("duckdb", "ray", "pyspark", "ibis", "sqlglot")
INSIDE_FEDERATION = ("wire", "privacy", "site", "operator", "simulate", "flower")


PLOTS = SOURCE / "estimators" / "plotting.py"


def at_once(path):
    """Modules that are imported when a file is."""
    body = ast.parse(path.read_text()).body
    plain = [name.name for node in body if isinstance(node, ast.Import) for name in node.names]
    return plain + [node.module or "" for node in body if isinstance(node, ast.ImportFrom)]


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
    assert breaches([path for path in FILES if path != PLOTS], order) == []
    federation = [path for path in FILES if SOURCE / "federation" in path.parents]
    assert breaches(federation, INSIDE_FEDERATION, "covey.federation") == []


def test_the_core_needs_no_interface():
    """A statistician who fits in memory loads neither federation, nor plots, nor a command line.

    One file, the plots of an estimator, imports them inside its methods.
    """
    assert not [name for name in at_once(PLOTS) if name.startswith(("matplotlib", "covey.report"))]
    for path in FILES:
        if part(path) in (*BASIC, *CORE) and path != PLOTS:
            foreign = {"matplotlib", "rich", "typer", "flwr", *ENGINES}
            outside = {name.split(".")[0] for name in imports(path)} & foreign
            assert not outside, path
            assert not used(path) & set(INTERFACES) - {"datasets"}, path


def test_no_engine_is_loaded_by_a_fit(tmp_path):
    """Of a data frame, of a lazy table of Polars and of shards, with predictions of each; the packages of engines are absent.

    None in ``sys.modules`` makes an import fail, as if the package were not installed.
    """
    code = f"""
import sys
sys.modules.update(dict.fromkeys({ENGINES!r}))
import covey
from covey.nodes.layout import lay_out
homes = covey.datasets.load_radon()
shards = lay_out(homes.lazy(), "shards", "county", 2)
for table in (homes, homes.lazy(), shards):
    model = covey.fit(table, "log_radon ~ floor + (1 | county)")
    model.predict(homes.lazy()).collect()
    model.to_sql("homes")
print(sorted(name for name in sys.modules if name.startswith("covey.engines.")))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.stdout.strip() == "[]", done.stderr


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


PUBLIC = {name: getattr(covey, name) for name in covey.__all__ if not inspect.ismodule(getattr(covey, name))}
"""Functions and classes of the root."""


def public_functions():
    """Functions of the root, and the public methods that its classes define, by name."""
    for name, thing in PUBLIC.items():
        if inspect.isfunction(thing):
            yield name, thing
        elif not issubclass(thing, Exception):
            for part in dir(thing):
                method = inspect.unwrap(getattr(thing, part)) if not part.startswith("_") else None
                if inspect.isroutine(method) and (getattr(method, "__module__", "") or "").startswith("covey."):
                    yield f"{name}.{part}", method


def sections(doc):
    """The sections of a docstring in numpydoc's format: heading and lines."""
    parts = re.split(r"^(\w[\w ]*)\n-{3,}$", inspect.cleandoc(doc or ""), flags=re.M)
    return {"": parts[0], **dict(zip(parts[1::2], parts[2::2], strict=True))}


def documented(section):
    """Names before the colon, in a section whose entries are 'one, two : type'."""
    heads = re.findall(r"^(\S[^:\n]*)(?: :|$)", section, flags=re.M)
    return {name.strip().lstrip("*") for head in heads for name in head.split(",")}


def test_public_names_are_few_documented_and_there():
    assert 15 <= len(covey.__all__) <= 22
    assert set(dir(covey)) == {*covey.__all__, "__version__"}
    for name in covey.__all__:
        assert inspect.getdoc(getattr(covey, name)), name
    for estimator in (thing for name, thing in PUBLIC.items() if name.startswith("Hierarchical")):
        parts = sections(estimator.__doc__)
        assert {"Parameters", "Attributes", "Examples"} <= set(parts)
        assert set(inspect.signature(estimator).parameters) == documented(parts["Parameters"])
    with pytest.raises(AttributeError):
        covey.frobnicate  # noqa: B018


@pytest.mark.parametrize(("name", "function"), list(public_functions()))
def test_public_functions_are_documented_and_typed(name, function):
    """Functions of the root and methods of the estimators have numpydoc's sections and no ``Any``; others a summary."""
    parts, signature = sections(inspect.getdoc(function)), inspect.signature(function)
    assert parts[""].strip() or name == "InMemory.of"
    if not (function.__module__.startswith("covey.estimators") or "." not in name):
        return
    missing = set(signature.parameters) - {"self", "cls"} - documented(parts.get("Parameters", ""))
    assert not missing, f"{name} does not document {sorted(missing)}"
    assert "Returns" in parts or signature.return_annotation in ("None", None), name
    assert ">>>" in parts.get("Examples", ""), name
    named = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
    types = [str(each.annotation) for each in named] + [str(signature.return_annotation)]
    assert not [each for each in types if re.search(r"\bAny\b", each)], name


def test_a_second_process_compiles_nothing():
    """Every kernel comes from the cache: numba's own count of cache misses is zero."""
    code = """
import sys
from covey.solvers.first_order import kernels as randomised
from covey import datasets, GroupedData, Penalty
from covey.solvers import minimise
from covey.kernels import counting_sort, find_parents
from covey.kernels import rank_in_table
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
    versions = [tomllib.loads(path.read_text())["project"]["version"] for path in files]
    assert versions == [covey.__version__] * 2


def test_files_that_the_documentation_names_exist():
    root = SOURCE.parents[1]
    pages = [*root.glob("*.md"), *(root / "docs").rglob("*.md")]
    named = {(page.name, name) for page in pages for name in re.findall(r"`((?:\w+/)*\w+\.py)`", page.read_text())}
    assert named
    missing = [(page, name) for page, name in named if not any((place / name).exists() for place in (root, SOURCE))]
    assert missing == []
