"""Sparse columns: `y ~ x + C(product) + (1 + x | g/i)` with 2,000 clients in 50 groups and 100,000 rows.

First sparse and dense columns with as many categories as dense columns can take: both fits by REML, without tests, one thread
each, in processes of their own, so that each has its own peak of memory. Log-likelihoods and coefficients must agree. Then
5,000 categories, sparse only. The last line has the ratios of the CPU seconds and of the memory of a fit, sparse / dense.
Memory is what the fit adds to the process with its data frame. "given" is a sparse fit with given penalties.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time

os.environ |= {"OPENBLAS_NUM_THREADS": "1", "COVEY_THREADS": "1"}  # before numpy starts its threads

import numpy as np
import pandas as pd

import covey
from covey import Spec

CLIENTS, GROUPS, ROWS, SMALL, LARGE = 2000, 50, 100_000, 400, 5000
FORMULA = "y ~ x + C(product) + (1 + x | g/i)"


def frame(products: int, rows: int = ROWS, clients: int = CLIENTS, groups: int = GROUPS) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    i, product, x = rng.integers(0, clients, rows), rng.integers(0, products, rows), rng.standard_normal(rows)
    g = i % groups
    y = 1.0 + 0.5 * x + (0.3 * rng.standard_normal(products))[product] + rng.standard_normal(rows)
    y += (0.6 * rng.standard_normal(clients))[i] + (0.4 * rng.standard_normal(groups))[g]
    y += x * ((0.3 * rng.standard_normal(clients))[i] + (0.2 * rng.standard_normal(groups))[g])
    return pd.DataFrame({"y": y, "x": x, "product": product, "g": g, "i": i})


def peak() -> float:
    """The most memory that the process has had so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def run(products: int, kind: str) -> dict[str, float]:
    """One fit in this process, after one to a small table that compiles."""
    spec = Spec(formula=FORMULA, sparse=kind == "sparse", tests=False)
    if kind == "given":
        spec = Spec(formula="y ~ x + C(product)", client="i", cluster="g", gamma=3.0, lam=6.0, sparse=True)
    covey.fit(frame(5, 600, 30, 3), spec)
    table = frame(products)
    before, start = peak(), time.process_time()
    model = covey.fit(table, spec)
    seconds, others = time.process_time() - start, model.global_coef_[2:] if kind == "dense" else model.shared_coef_
    end = model.convergence_
    return {
        "seconds": seconds,
        "megabytes": peak() - before,
        "evaluations": end.iterations,
        "log_likelihood": float("nan") if kind == "given" else model.components_.log_likelihood,
        "coefficients": float(np.sqrt((others**2).sum())),
    }


def in_process(products: int, kind: str) -> dict[str, float]:
    command = [sys.executable, __file__, str(products), kind]
    found: dict[str, float] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    print(
        f"{products:5d} categories, {kind:6s}: {found['seconds']:7.1f} CPU s, {found['megabytes']:6.0f} MB, "
        f"{found['evaluations']:.0f} steps" + ("" if kind == "given" else f", log-likelihood {found['log_likelihood']:.6f}"),
        flush=True,
    )
    return found


def main() -> None:
    print(f"{CLIENTS:,} clients in {GROUPS} groups, {ROWS:,} rows, REML, one thread; numpy {np.__version__}")
    dense, sparse = in_process(SMALL, "dense"), in_process(SMALL, "sparse")
    for name in ("log_likelihood", "coefficients"):
        if abs(sparse[name] - dense[name]) > 1e-9 * abs(dense[name]):
            raise SystemExit(f"The fits differ in {name}: {sparse[name]} and {dense[name]}.")
    in_process(LARGE, "given")
    in_process(LARGE, "sparse")
    seconds, memory = (sparse[name] / dense[name] for name in ("seconds", "megabytes"))
    print(f"sparse / dense at {SMALL} categories: CPU seconds {seconds:.2f}, memory {memory:.2f}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(run(int(sys.argv[1]), sys.argv[2])))
    else:
        main()
