"""Tables larger than memory: REML with tests by DuckDB and by Polars, and a logistic model on shards.

    python benchmarks/bench_engines.py [rows] [clients]

It writes Parquet files with d = 3 (an intercept and two columns) to a temporary folder, which it removes afterwards. Each fit
runs in a process of its own, which reports its largest anonymous memory and its processor seconds. A linear fit is compared
with the bare aggregate query for the same sums.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

FORMULA = "y ~ x1 + x2 + (1 | g/client)"
_BATCH = 5_000_000


def write(folder: Path, rows: int, clients: int) -> None:
    import numpy as np
    import polars as pl

    rng = np.random.default_rng(0)
    effect = rng.normal(size=clients) + 0.7 * rng.normal(size=100)[np.arange(clients) % 100]
    for at, start in enumerate(range(0, rows, _BATCH)):
        n = min(_BATCH, rows - start)
        client = rng.integers(clients, size=n)
        x1, x2 = rng.normal(2000.0, 8.0, n), rng.lognormal(10.0, 0.5, n)
        margin = effect[client] + 0.02 * (x1 - 2000) + 1e-5 * x2
        frame = {"client": client, "g": client % 100, "x1": x1, "x2": x2, "y": margin + rng.normal(size=n)}
        frame |= {"yes": (rng.random(n) < 1 / (1 + np.exp(-0.3 * margin))).astype(np.int8)}
        pl.DataFrame(frame).write_parquet(folder / f"{at:04d}.parquet")


def watch(peak: list[int]) -> None:
    """Record the largest anonymous memory of this process."""
    while True:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("RssAnon"):
                peak[0] = max(peak[0], int(line.split()[1]))
        time.sleep(0.05)


def bare(engine: str, rows: str) -> None:
    """The aggregate query alone, with the same sums."""
    import polars as pl

    z = ["x1 - 2000", "x2 - 25000", "y"]
    pairs = [(a, b) for at, a in enumerate(z) for b in z[at:]]
    if engine == "duckdb":
        import duckdb

        sums = ", ".join([*(f"sum({a})" for a in z), *(f"sum(({a}) * ({b}))" for a, b in pairs)])
        duckdb.sql(f"SELECT g, client, count(*), {sums} FROM '{rows}' GROUP BY g, client").arrow()
        return
    names = {a: pl.col(a.split(" ")[0]) - float(a.split(" ")[2]) if " " in a else pl.col(a) for a in z}
    sums = [*(names[a].sum().alias(a) for a in z), *((names[a] * names[b]).sum().alias(f"{a}*{b}") for a, b in pairs)]
    pl.scan_parquet(rows).group_by("g", "client").agg(pl.len(), *sums).collect(engine="streaming")


def work(what: str, engine: str, rows: str) -> None:
    peak = [0]
    threading.Thread(target=watch, args=(peak,), daemon=True).start()
    import duckdb
    import polars as pl

    import covey

    if what == "warm":
        covey.fit(pl.scan_parquet(rows).head(100_000), FORMULA)
        covey.fit(
            pl.read_parquet(rows, n_rows=20_000), covey.Spec(formula="yes ~ x1", family="bernoulli", client="g", gamma=1.0)
        )
    fit, Spec = covey.fit, covey.Spec  # imported here: the time of imports is not that of a fit
    start, cpu = time.perf_counter(), time.process_time()
    if what == "bare":
        bare(engine, rows)
    elif what == "fit":
        table = duckdb.sql(f"SELECT * FROM '{rows}'") if engine == "duckdb" else pl.scan_parquet(rows)
        fit(table, FORMULA)
    elif what == "shard":
        from covey.nodes.layout import lay_out

        lay_out(pl.scan_parquet(rows), engine, "client")
    elif what == "logistic":
        ids = {"client": "client", "cluster": "g"}
        fit(engine, Spec(formula="yes ~ x1 + x2", family="bernoulli", **ids, gamma=2.0, lam=1.0, standardize=True))
    print(time.perf_counter() - start, peak[0] / 1e6, time.process_time() - cpu)


def run(what: str, engine: str, rows: str) -> tuple[float, float, float]:
    """Seconds, the largest anonymous memory in GB, and processor seconds."""
    done = subprocess.run([sys.executable, __file__, "--work", what, engine, rows], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    seconds, memory, cpu = map(float, done.stdout.split()[-3:])
    return seconds, memory, cpu


def main(rows: int, clients: int) -> None:
    with tempfile.TemporaryDirectory(prefix="covey-bench-") as name:
        folder = Path(name) / "rows"
        folder.mkdir()
        write(folder, rows, clients)
        table, ratios = f"{folder}/*.parquet", {}
        run("warm", "polars", table)
        for engine in ("duckdb", "polars"):
            alone, whole = [], []
            for _ in range(3 if rows <= 20_000_000 else 1):
                alone.append(run("bare", engine, table))
                whole.append(run("fit", engine, table))
            seconds, bare_seconds = min(whole)[0], min(alone)[0]
            memory, bare_memory = (max(each[1] for each in runs) for runs in (whole, alone))
            ratios[engine] = seconds / bare_seconds
            cpu = min(each[2] for each in whole) / min(each[2] for each in alone)
            print(
                f"{engine:8} {rows:.0e} rows: bare {bare_seconds:6.1f} s, {bare_memory:5.2f} GB   "
                f"REML with tests {seconds:6.1f} s, {memory:.2f} GB   ratio of processor seconds {cpu:.2f}"
            )
        shards = f"{name}/shards"
        for what in ("shard", "logistic"):
            seconds, memory, cpu = run(what, shards, table)
            print(f"{what:8} {rows:.0e} rows: {seconds:7.1f} s   {memory:.2f} GB   {cpu:.2f} processor seconds")
        print("ratio to the bare query: " + ", ".join(f"{engine} {ratio:.2f}" for engine, ratio in ratios.items()))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(*sys.argv[2:5])
    else:
        main(
            int(float(sys.argv[1])) if len(sys.argv) > 1 else 1_000_000,
            int(float(sys.argv[2])) if len(sys.argv) > 2 else 10_000,
        )
