"""Check whether two versions of covey give the same bits on this machine.

    python tests/golden/compare.py ../other-checkout                 # this checkout and another one
    python tests/golden/compare.py ../other-checkout --python ../other-checkout/.venv/bin/python
    python tests/golden/compare.py                                   # this checkout and the record that is kept here

Run ``recorder.py`` of this folder and ``covey reproduce all --quick`` on both, list every quantity and every column of a table
whose bits differ, and end with exit code 1 if there are any. Against the record, made on another machine, the last
digits may differ. Columns of bytes are listed but do not count.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
THIS = HERE.parents[1]


@dataclass(frozen=True)
class Result:
    """The numbers of every fit, and the folder that holds the tables."""

    fits: dict[str, dict[str, Any]]
    tables: Path


def run(checkout: Path, python: str, folder: Path, only: str, reproduce: bool) -> Result:
    """Record one checkout."""
    folder.mkdir()
    source = checkout / "src"
    environment = {
        **os.environ,
        "PYTHONPATH": str(source),
        "PYTHONDONTWRITEBYTECODE": "1",
        "NUMBA_CACHE_DIR": str(Path(tempfile.gettempdir()) / f"covey-golden-{_digest(source)}"),
    }

    def call(*command: str, check: bool = True) -> str:
        done = subprocess.run([python, *command], cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=check)
        return done.stdout.strip()

    imported = Path(call("-c", "import covey; print(covey.__file__)")).resolve()
    if source not in imported.parents:
        raise SystemExit(f"{python} imports {imported}, which is not in {source}.")
    print(f"recording {checkout}", flush=True)
    call(str(HERE / "recorder.py"), "--quiet", "--only", only, "--out", "record.json", check=False)
    if reproduce:
        print(f"reproducing {checkout}", flush=True)
        call("-m", "covey", "reproduce", "all", "--quick", "--out", "tables")
    return Result(json.loads((folder / "record.json").read_text(encoding="utf-8")), folder / "tables")


def _digest(source: Path) -> str:
    """A hash of all code, because numba does not notice changes in functions of other files."""
    digest = hashlib.sha256()
    for file in sorted(source.rglob("*.py")):
        digest.update(str(file).encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def stored(only: str) -> Result:
    """The record in this folder."""
    fits = json.loads((HERE / "record.json").read_text(encoding="utf-8"))
    return Result({name: numbers for name, numbers in fits.items() if only in name}, HERE / "reproduce")


# Differences


def compare_fits(one: Result, two: Result) -> int:
    """Print the differences of each fit, and return the number of fits without any."""
    same = 0
    for name in {**one.fits, **two.fits}:
        lines = list(_differing(one.fits.get(name, {}), two.fits.get(name, {})))
        same += not lines
        if lines:
            print(f"{name}: largest relative difference {max(apart for apart, _ in lines):.1e}")
            for _, line in lines:
                print(f"    {line}")
    return same


def _differing(one: dict[str, Any], two: dict[str, Any]) -> Iterator[tuple[float, str]]:
    lacking = {
        which: numbers.get("failed", "there is no such fit")
        for which, numbers in (("the other version", one), ("this version", two))
        if not numbers or "failed" in numbers
    }
    if lacking:
        yield math.inf, "; ".join(f"{which}: {why}" for which, why in lacking.items())
        return
    for key in {**one, **two}:
        before, after = one.get(key), two.get(key)
        if json.dumps(before) == json.dumps(after):
            continue
        if key.endswith(" digest"):
            yield 0.0, key
        elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
            apart = max(relative(x, y) for x, y in zip(before, after, strict=True))
            yield apart, f"{key}  {apart:.1e}"
        elif _is_number(before) and _is_number(after):
            yield relative(before, after), f"{key}  {before} and {after}"
        else:
            yield math.inf, f"{key}  {_short(before)} and {_short(after)}"


def relative(x: Any, y: Any) -> float:
    """How far apart two numbers are, relative to the larger; infinite if only one of them is a number."""
    if x == y:
        return 0.0
    if not (_is_number(x) and _is_number(y)):
        return math.inf
    return float(abs(x - y) / max(abs(x), abs(y)))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _short(value: Any) -> str:
    text = "nothing" if value is None else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def compare_tables(one: Path, two: Path) -> tuple[int, int]:
    """Tell which columns of which tables differ; how many tables are the same but for bytes, and of how many."""
    names = sorted({str(file.relative_to(folder)) for folder in (one, two) for file in folder.rglob("*.csv")})
    same = 0
    for name in names:
        if not ((one / name).exists() and (two / name).exists()):
            print(f"{name}: only one of the two has it")
            continue
        if (one / name).read_bytes() == (two / name).read_bytes():
            same += 1
            continue
        columns = list(_columns_apart(_table(one / name), _table(two / name)))
        same += all(exempt for exempt, _ in columns)
        print(f"{name}:")
        for exempt, line in columns:
            print(f"    {line}{' (bytes do not count)' if exempt else ''}")
    return same, len(names)


def _table(file: Path) -> dict[str, list[str]]:
    with file.open(newline="", encoding="utf-8") as text:
        head, *rows = csv.reader(text)
    return {name: [row[at] for row in rows] for at, name in enumerate(head)}


def _columns_apart(one: dict[str, list[str]], two: dict[str, list[str]]) -> Iterator[tuple[bool, str]]:
    if list(one) != list(two):
        yield False, f"columns {', '.join(one)} and {', '.join(two)}"
        return
    for name in one:
        if one[name] != two[name]:
            if len(one[name]) != len(two[name]):
                yield False, f"{len(one[name])} and {len(two[name])} rows"
                return
            apart = max(relative(_value(x), _value(y)) for x, y in zip(one[name], two[name], strict=True))
            yield "bytes" in name, f"{name}  {apart:.1e}"


def _value(cell: str) -> float | str:
    try:
        return float(cell)
    except ValueError:
        return cell


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compare the bits of two versions of covey.")
    parser.add_argument("other", type=Path, nargs="?", help="another checkout; by default the record that is kept here")
    parser.add_argument("--python", default=sys.executable, help="the Python that runs the other checkout")
    parser.add_argument("--only", default="", help="fits whose name contains this")
    parser.add_argument("--no-reproduce", action="store_true", help="leave the tables of 'covey reproduce' out")
    asked = parser.parse_args(arguments)
    reproduce = not asked.no_reproduce
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if asked.other is None:
            other = stored(asked.only)
        else:
            # A path to a Python is not resolved: it may be a link within its environment.
            python = str(Path(asked.python).absolute()) if os.sep in asked.python else asked.python
            other = run(asked.other.resolve(), python, folder / "other", asked.only, reproduce)
        this = run(THIS, sys.executable, folder / "this", asked.only, reproduce)
        good = True
        if reproduce:
            same, tables = compare_tables(other.tables, this.tables)
            print(f"{same} of {tables} tables are the same")
            good = same == tables
        same, fits = compare_fits(other, this), len({**other.fits, **this.fits})
    print(f"{same} of {fits} fits have the same bits")
    return 0 if good and same == fits else 1


if __name__ == "__main__":
    sys.exit(main())
