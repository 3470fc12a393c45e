"""How much of covey one `covey fit` with bars passes: distinct functions, and the files they are in.

    python benchmarks/walk.py [--list]

Counted are Python functions that run during the command itself, on the radon survey, after everything is imported and
compiled. The last line is the number of files.
"""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

import covey
from covey.cli.fit import fit
from covey.datasets import load_radon

FORMULA = "log_radon ~ floor + (1 + floor | state/county)"
SOURCE = Path(covey.__file__).parent


def run(table: Path) -> None:
    arguments = {name: part.default for name, part in fit.__signature__.parameters.items()}  # type: ignore[attr-defined]
    with contextlib.redirect_stdout(io.StringIO()):
        fit(**{**arguments, "data": table, "formula": FORMULA, "holdout": 0.0})


def walked(table: Path) -> dict[str, set[str]]:
    """The functions that one fit passes, by file."""
    passed: dict[str, set[str]] = defaultdict(set)

    def note(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(SOURCE)) and code.co_name != "<module>":
            passed[str(Path(code.co_filename).relative_to(SOURCE))].add(code.co_qualname)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        run(table)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return passed


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "homes.parquet"
        load_radon().write_parquet(table)
        run(table)  # imports and compiles
        passed = walked(table)
    for file, functions in sorted(passed.items()):
        if "--list" in sys.argv:
            print(f"{len(functions):4d}  {file}: {', '.join(sorted(functions))}")
        else:
            print(f"{len(functions):4d}  {file}")
    print(f"{sum(map(len, passed.values()))} functions")
    print(len(passed))


if __name__ == "__main__":
    main()
