"""Seconds per exchange of a deployment on this machine: three sites under TLS with node keys, 80 clusters across all sites.

    python benchmarks/bench_deployed.py

27,000 rows of 2,000 clients. Every process is real: link, coordinator and nodes. Prints the seconds of each exchange and last
the ratio of their mean to the 1.5 s that the federation aims at.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

import numpy as np
import polars as pl

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.federation.flower.deployment import Deployment

CLIENTS, CLUSTERS, ROWS, SITES = 2000, 80, 27_000, ("east", "north", "west")
RULES = {"client": "client", "groups": ["cluster"], "columns": ["x", "y"], "minimum": 3, "share": 0.9}
SETTINGS = {"formula": "y ~ x", "client": "client", "cluster": "cluster", "sites": ",".join(SITES)}


def table() -> pl.DataFrame:
    rng = np.random.default_rng(0)
    client = np.concatenate([np.arange(CLIENTS), rng.integers(0, CLIENTS, ROWS - CLIENTS)])
    x = rng.normal(size=ROWS)
    y = rng.normal(size=CLIENTS)[client] + 0.5 * x + rng.normal(size=ROWS)
    return pl.DataFrame({"client": client, "cluster": client % CLUSTERS, "x": x, "y": y})


def main() -> None:
    frame = table()
    with tempfile.TemporaryDirectory() as folder:
        deployment = Deployment(Path(folder))
        try:
            deployment.start_link()
            deployment.register(*SITES)
            for at, site in enumerate(SITES):
                frame.filter(pl.col("client") // CLUSTERS % len(SITES) == at).write_parquet(Path(folder) / f"{site}.parquet")
                deployment.start_node(site, **RULES)
            for name, more in {"compiles": {"gamma": 1.0}, "sweep": {"gamma": 1.0}, "reml": {"tests": False}}.items():
                code, out, err = deployment.run({**SETTINGS, **more})
                if code:
                    raise SystemExit(err)
                total = re.search(r"in all +(\d+) .* ([\d.]+)$", out, re.M)
                each = float(total[2]) / int(total[1])
                print(f"{name:10} {total[1]:>4} exchanges, {each:.2f} s each")
            print(f"seconds per exchange over 1.5: {each / 1.5:.2f}")
        finally:
            deployment.stop()


if __name__ == "__main__":
    main()
