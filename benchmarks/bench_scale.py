"""Seconds per row and per client of each engine, and what 1e10 rows and 1e9 clients would take by these numbers.

    .venv-engines/bin/python benchmarks/bench_scale.py [scale] [engine ...]

For each engine the script fits several tables (d = 3) and then the model ``seconds = a + b rows + c clients`` to the times, by
least squares of relative errors with a, b, c >= 0. The linear model is REML with tests; the logistic model has given penalties.
Each engine has a process of its own, whose start, first fit and cluster are not counted. ``scale`` multiplies the rows.
Engines that are not installed are left out. ``make test-engines`` installs all of them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import polars as pl
from bench_engines import FORMULA, watch, write

SIZES = [(200_000, 1_000), (1_000_000, 1_000), (3_000_000, 1_000), (1_000_000, 100_000), (3_000_000, 300_000)]
NEEDS = {"memory": "polars", "polars": "polars", "duckdb": "duckdb", "spark": "pyspark"}
NEEDS |= {"logistic memory": "polars", "shards": "polars", "ray": "ray"}
SHARDS = 4


def prepare(engine: str):
    """A function that opens the table of a folder, as a user would name it."""
    if engine == "duckdb":
        import duckdb

        return lambda folder: duckdb.sql(f"SELECT * FROM '{folder}/rows/*.parquet'")
    if engine == "spark":
        from pyspark.sql import SparkSession

        build = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
        build = build.config("spark.sql.shuffle.partitions", "4").config("spark.driver.host", "127.0.0.1")
        session = build.config("spark.driver.memory", "4g").getOrCreate()
        session.sparkContext.setLogLevel("OFF")
        return lambda folder: session.read.parquet(f"{folder}/rows")
    if engine in ("shards", "ray"):
        return lambda folder: f"{folder}/shards"
    if engine == "polars":
        return lambda folder: pl.scan_parquet(f"{folder}/rows/*.parquet")
    return lambda folder: pl.read_parquet(f"{folder}/rows/*.parquet")


def work(engine: str, folders: list[str]) -> None:
    """Fit the tables in these folders, the first one twice; print seconds, processor seconds of this process, and memory."""
    import covey

    table, linear = prepare(engine), engine in ("memory", "polars", "duckdb", "spark")
    given = {"client": "client", "cluster": "g", "gamma": 2.0, "lam": 1.0, "standardize": True}
    spec = covey.Spec(formula=FORMULA) if linear else covey.Spec(formula="yes ~ x1 + x2", family="bernoulli", **given)
    where = {}
    if engine == "ray":
        os.environ["RAY_AUTH_MODE"] = "disabled"
        import ray

        ray.init(log_to_driver=False, include_dashboard=False, num_cpus=2)
        where = {"engine": "ray"}
    peak = [0]
    threading.Thread(target=watch, args=(peak,), daemon=True).start()
    found = []
    for folder in [folders[0], *folders]:
        peak[0], start, cpu = 0, time.perf_counter(), time.process_time()
        covey.fit(table(folder), spec, **where)
        found.append((time.perf_counter() - start, time.process_time() - cpu, peak[0] / 1e6))
    print(json.dumps(found[1:]))


def rates(sizes: list[tuple[int, int]], seconds: list[float]) -> tuple[np.ndarray, float]:
    """a, b and c, and the largest relative error of the model."""
    from scipy.optimize import nnls

    times, size = np.array(seconds), np.array([1.0, 1e6, 1e6])
    terms = np.array([[1.0, rows, clients] for rows, clients in sizes]) / size
    found = nnls(terms / times[:, None], np.ones(len(times)))[0]
    return found / size, float(np.abs(terms @ found / times - 1).max())


def measure(engines: list[str], scale: float) -> dict[str, list[list[float]]]:
    """The times of each engine for each size."""
    found = {}
    with tempfile.TemporaryDirectory(prefix="covey-scale-") as name:
        folders = []
        for at, (rows, clients) in enumerate(SIZES):
            folder = Path(name) / str(at)
            (folder / "rows").mkdir(parents=True)
            write(folder / "rows", int(scale * rows), int(scale * clients))
            if {"shards", "ray"} & set(engines):
                from covey.nodes.layout import lay_out

                lay_out(pl.scan_parquet(folder / "rows" / "*.parquet"), folder / "shards", "client", SHARDS)
            folders.append(str(folder))
        for engine in engines:
            command = [sys.executable, __file__, "--work", engine, *folders]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(done.stderr)
            found[engine] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(scale: float, engines: list[str]) -> None:
    found = measure(engines, scale)
    sizes = [(int(scale * rows), int(scale * clients)) for rows, clients in SIZES]
    print("engine            a [s]  b [us/row]  c [us/client]  error   largest: s    GB here   this process: us/row us/client")
    model = {}
    for engine, times in found.items():
        (a, b, c), error = rates(sizes, [each[0] for each in times])
        (_, cpu_rows, cpu_clients), _ = rates(sizes, [each[1] for each in times])
        bytes_client = max((times[-1][2] - times[2][2]) * 1e9 / (sizes[-1][1] - sizes[2][1]), 0.0)
        model[engine] = {"a": a, "b": b, "c": c, "bytes": bytes_client, "c_here": cpu_clients}
        print(
            f"{engine:16} {a:6.2f} {1e6 * b:11.3f} {1e6 * c:14.2f} {error:6.0%} {times[-1][0]:12.2f} {times[-1][2]:10.2f}"
            f" {1e6 * cpu_rows:21.3f} {1e6 * cpu_clients:9.2f}"
        )
    for engine in (name for name in ("spark", "ray") if name in model):
        print(projected(engine, model[engine], 1e10, 1e9))


def projected(engine: str, rate: dict[str, float], rows: float, clients: float) -> str:
    """What a table would need; the measured seconds are those of two cores."""
    by_rows, by_clients = 2 * rate["b"] * rows / 3600, 2 * rate["c"] * clients / 3600
    here, memory = rate["c_here"] * clients / 3600, rate["bytes"] * clients / 1e9
    return (
        f"{engine}: {rows:.0e} rows take {by_rows:.1f} core hours; {clients:.0e} clients take {by_clients:.1f} core hours, of "
        f"which {here:.1f} in the coordinator, which holds {rate['bytes']:.0f} bytes a client, {memory:,.0f} GB"
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(sys.argv[2], sys.argv[3:])
    else:
        chosen = [name for name, package in NEEDS.items() if find_spec(package) is not None]
        main(float(sys.argv[1]) if len(sys.argv) > 1 else 1.0, sys.argv[2:] or chosen)
