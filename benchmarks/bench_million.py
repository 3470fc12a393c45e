"""A million clients x 10 rows, d = 5, Gaussian: peak memory over the input arrays, and growth from 100,000 clients.

Targets: at most 2.5 x the input arrays; time at most 1.2 x linear. Each size and row order runs in a process of its own,
which draws its rows, warms the kernels on a small table, and reports the peak of its resident memory, libraries included.
"""

from __future__ import annotations

import json
import subprocess
import sys

CHILD = """
import json, resource, sys, time
import numpy as np
from covey import HierarchicalRegressor

n, shuffled = int(sys.argv[1]), sys.argv[2] == "shuffled"
rng = np.random.default_rng(0)

def table(n):
    client = np.repeat(np.arange(n), 10)
    cluster = client % 50 if shuffled else client // -(-n // 50)
    if shuffled:
        order = rng.permutation(len(client))
        client = client[order]
        del order
        cluster = client % 50
    X = np.empty((len(client), 5))
    for a in range(0, len(X), 1 << 18):
        X[a : a + (1 << 18)] = rng.standard_normal((len(X[a : a + (1 << 18)]), 5))
    return X, rng.standard_normal(len(client)), client, cluster

def fit(X, y, client, cluster):
    return HierarchicalRegressor(fit_intercept=False, gamma=1.0, lam=1.0).fit(X, y, client=client, cluster=cluster)

fit(*table(1000))
arrays = table(n)
size = sum(array.nbytes for array in arrays)
times = []
for _ in range(5):
    start = time.perf_counter()
    model = fit(*arrays)
    times.append(time.perf_counter() - start)
    del model
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"seconds": sorted(times)[2], "input": size, "peak": peak}))
"""


def run(n: int, order: str) -> dict[str, float]:
    done = subprocess.run([sys.executable, "-c", CHILD, str(n), order], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


lines = []
for order in ("sorted", "shuffled"):
    small, large = run(100_000, order), run(1_000_000, order)
    memory, growth = large["peak"] / large["input"], large["seconds"] / (10 * small["seconds"])
    print(
        f"{order} rows: 100,000 clients {small['seconds']:.2f} s, 1,000,000 clients {large['seconds']:.2f} s, "
        f"input {large['input'] / 1e6:.0f} MB, peak {large['peak'] / 1e6:.0f} MB"
    )
    lines.append(f"{order}: memory ratio {memory:.2f} (target <= 2.5), time over linear {growth:.2f} (target <= 1.2)")
print("\n".join(lines))
