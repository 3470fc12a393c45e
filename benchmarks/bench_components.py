"""covey's public ``fit`` beside other programs for mixed models: the same rows, formula and number of threads, one run.

    python benchmarks/bench_components.py [--only TEXT] [--limit SECONDS] [--json FILE]

Every program runs in a process of its own with two threads: covey in this Python, the other Python programs in the one that
``COVEY_PEERS_PYTHON`` names (``make bench-report`` makes it), lme4 and glmmTMB through ``Rscript``. A program that is not
installed, refuses the model, needs more than 20 GB or takes longer than the limit is listed with that reason. The last
lines are the ratios: seconds of the fastest other program over covey's. Above 1, covey is faster.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import polars as pl
from peers.fit import PROGRAMS, bars

from covey.datasets import load_radon

HERE = Path(__file__).parent
PEERS_PYTHON = os.environ.get("COVEY_PEERS_PYTHON", sys.executable)
_POOLS = ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS", "RAYON_NUM_THREADS", "OPENBLAS_NUM_THREADS", "COVEY_THREADS")
THREADS = dict.fromkeys(_POOLS, "2")


@dataclass(frozen=True)
class Level:
    """A grouping: its column, and the terms whose coefficients differ between its groups."""

    column: str
    terms: tuple[str, ...] = ("1",)


@dataclass(frozen=True)
class Case:
    """A model, and the function that makes its rows."""

    title: str
    rows: Callable[[], pl.DataFrame]
    terms: tuple[str, ...]
    levels: tuple[Level, ...]
    family: str = "gaussian"
    independent: bool = False


def nested(groups: int, clients: int, rows: int, terms: int, *, varying: int, family: str = "gaussian") -> pl.DataFrame:
    """Clients in groups; the intercept and the first ``varying`` terms differ by group and by client."""
    rng = np.random.default_rng(0)
    group = np.repeat(np.arange(groups), clients * rows)
    client = np.repeat(np.arange(groups * clients), rows)
    X = rng.standard_normal((len(group), terms))
    margin = X @ np.linspace(0.5, -0.5, terms) + 0.5
    for column, count, sd in ((group, groups, 0.4), (client, groups * clients, 0.6)):
        effect = sd * rng.standard_normal((count, varying + 1))
        margin += effect[column, 0] + np.einsum("la,la->l", X[:, :varying], effect[column, 1:])
    chance = rng.random(len(group))
    y = margin + rng.standard_normal(len(group)) if family == "gaussian" else (chance < 1 / (1 + np.exp(-margin))) * 1.0
    columns = {f"x{place + 1}": X[:, place] for place in range(terms)}
    return pl.DataFrame({"g": group, "i": client, "y": y, **columns}).with_columns(pl.col("g", "i").cast(pl.String))


SHARED = tuple(f"x{place + 1}" for place in range(40))
CASES = (
    Case(
        "radon survey: 11,929 homes, 470 counties in 9 states, (1 + floor | state/county)",
        lambda: load_radon().select("state", "county", "floor", y="log_radon"),
        ("floor",),
        (Level("state", ("1", "floor")), Level("county", ("1", "floor"))),
    ),
    Case(
        "one grouping with 125,066 groups, 1,000,528 rows, (1 | i): the shape of statsmodels issue 9097",
        lambda: nested(1, 125_066, 8, 2, varying=0),
        ("x1", "x2"),
        (Level("i"),),
    ),
    Case(
        "30,000 clients, 600,000 rows, (1 + x1 | i)",
        lambda: nested(1, 30_000, 20, 1, varying=1),
        ("x1",),
        (Level("i", ("1", "x1")),),
    ),
    Case(
        "30,000 clients in 50 groups, 600,000 rows, (1 + x1 + x2 || g/i)",
        lambda: nested(50, 600, 20, 2, varying=2),
        ("x1", "x2"),
        (Level("g", ("1", "x1", "x2")), Level("i", ("1", "x1", "x2"))),
        independent=True,
    ),
    Case(
        "logistic, 5,000 clients in 50 groups, 100,000 rows, (1 | g/i)",
        lambda: nested(50, 100, 20, 2, varying=0, family="binomial"),
        ("x1", "x2"),
        (Level("g"), Level("i")),
        family="binomial",
    ),
    Case(
        "40 common terms, 2,000 clients of 5 rows in 20 groups, (1 | g/i)",
        lambda: nested(20, 100, 5, 40, varying=0),
        SHARED,
        (Level("g"), Level("i")),
    ),
    Case(
        "logistic, 40 common terms, 2,000 clients of 5 rows in 20 groups, (1 | g/i)",
        lambda: nested(20, 100, 5, 40, varying=0, family="binomial"),
        SHARED,
        (Level("g"), Level("i")),
        family="binomial",
    ),
)


def run(program: str, case: Case, folder: Path, limit: float) -> dict[str, object]:
    """What the program printed, or the reason why it printed nothing."""
    if program in ("lme4", "glmmTMB"):
        command = ["Rscript", str(HERE / "peers" / "fit.R"), program, str(folder / "rows.csv"), bars(asdict(case)), case.family]
    else:
        python = sys.executable if program == "covey" else PEERS_PYTHON
        command = [python, str(HERE / "peers" / "fit.py"), program, str(folder / "case.json"), str(folder / "rows.parquet")]
    if shutil.which(command[0]) is None:
        return {"reason": "not installed"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, env={**os.environ, **THREADS})
    except subprocess.TimeoutExpired:
        return {"reason": f"no answer in {limit:.0f} s"}
    if done.returncode == 0:
        return dict(json.loads(done.stdout.strip().splitlines()[-1]))
    lines = [line for line in done.stderr.strip().splitlines() if line.strip()] or ["ended without a message"]
    return {"reason": lines[-1].removeprefix("NotImplementedError: ")[:160]}


def compare(case: Case, programs: list[str], limit: float) -> dict[str, dict[str, object]]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = case.rows()
        rows.write_parquet(folder / "rows.parquet")
        rows.write_csv(folder / "rows.csv")
        described = {key: value for key, value in asdict(case).items() if key != "rows"}
        (folder / "case.json").write_text(json.dumps(described))
        results = {}
        for program in programs:
            results[program] = result = run(program, case, folder, limit)
            if "seconds" in result:
                print(f"  {program:12s} {result['seconds']:9.3f} s   log-likelihood {result['log_likelihood']:.3f}", flush=True)
            else:
                print(f"  {program:12s}         -     {result['reason']}", flush=True)
    return results


def ratio(results: dict[str, dict[str, object]]) -> float | None:
    others = [float(str(result["seconds"])) for name, result in results.items() if name != "covey" and "seconds" in result]
    return min(others) / float(str(results["covey"]["seconds"])) if others and "seconds" in results["covey"] else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds that a program may take for a case")
    parser.add_argument("--only", default="", help="cases whose title has this text")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    given = parser.parse_args()
    programs = ["covey", "lme4", "glmmTMB", *(name for name in PROGRAMS if name != "covey")]
    kept = {}
    for case in CASES:
        if given.only in case.title:
            print(case.title, flush=True)
            kept[case.title] = compare(case, programs, given.limit)
    if given.json:
        given.json.write_text(json.dumps(kept, indent=1) + "\n")
    for title, results in kept.items():
        value = ratio(results)
        print(f"ratio {'-' if value is None else f'{value:.2f}'}  {title}")


if __name__ == "__main__":
    main()
