"""Variance components against lme4 and GPBoost, on the same rows in the same run.

Needs ``Rscript`` with lme4, and a Python with GPBoost: this one, or the one that ``COVEY_GPBOOST_PYTHON`` names; a peer that
is not there is left out. ``--quick`` leaves out lme4's fit of 30,000 clients, which takes minutes. Targets, peer's time over
covey's: linear, 30,000 clients: lmer 20, GPBoost 5; logistic: GPBoost 3; the paper's simulation: GPBoost 1; radon: lmer 1.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import polars as pl
from _timing import seconds

from covey import GroupedData
from covey.datasets import load_radon, simulate
from covey.losses import loss_of
from covey.nodes.network import InMemory
from covey.variance.estimate import estimate
from covey.variance.structure import Shape

PEERS = Path(__file__).parent / "peers"
GPBOOST = os.environ.get("COVEY_GPBOOST_PYTHON", sys.executable)
QUICK = "--quick" in sys.argv[1:]


def thirty_thousand(family: str) -> dict[str, np.ndarray]:
    """30,000 clients in 50 clusters, 20 rows each, three columns that vary at both levels, by different amounts."""
    rng = np.random.default_rng(0)
    w = np.array([1.0, -0.5, 0.25]) + np.array([0.5, 0.3, 0.2]) * rng.standard_normal((50, 3))
    parent = np.repeat(np.arange(50), 600)
    theta = w[parent] + np.array([0.6, 0.4, 0.3]) * rng.standard_normal((30_000, 3))
    client = np.repeat(np.arange(30_000), 20)
    X = rng.standard_normal((600_000, 3))
    X[:, 0] = 1.0
    y = loss_of(family).draw(np.einsum("la,la->l", X, theta[client]), rng)
    return {"X": X, "y": y, "client": client, "cluster": parent[client]}


def ours(rows: dict[str, np.ndarray], family: str, *, reml: bool) -> tuple[float, float]:
    """Seconds of the best of three fits, and the log-likelihood."""
    data = GroupedData.from_arrays(rows["X"], rows["y"], rows["client"], rows["cluster"])
    every = tuple(range(data.n_terms))
    found = []
    best = min(
        seconds(lambda: found.append(estimate(InMemory.of(data, loss_of(family)), Shape(every, every), reml=reml)))
        for _ in range(3)
    )
    fit, learned = found[-1]
    print(f"  covey   {best:8.3f} s  log-likelihood {learned.components.log_likelihood:.4f}  ({fit.convergence.message})")
    return best, learned.components.log_likelihood


def gpboost(rows: dict[str, np.ndarray], family: str, method: str) -> float | None:
    if subprocess.run([GPBOOST, "-c", "import gpboost"], capture_output=True).returncode:
        print("  GPBoost is not installed")
        return None
    with tempfile.TemporaryDirectory() as folder:
        np.savez(f"{folder}/rows.npz", **rows)
        command = [GPBOOST, str(PEERS / "gpboost_fit.py"), f"{folder}/rows.npz", family, method]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    told = json.loads(done.stdout.strip().splitlines()[-1])
    said = f"log-likelihood {told['log_likelihood']:.4f} ({method}), peak {told['megabytes']:.0f} MB"
    print(f"  GPBoost {told['seconds']:8.3f} s  {said}")
    return float(told["seconds"])


def lmer(table: pl.DataFrame, formula: str, family: str = "gaussian") -> float | None:
    if shutil.which("Rscript") is None:
        print("  R is not installed")
        return None
    with tempfile.TemporaryDirectory() as folder:
        table.write_csv(f"{folder}/rows.csv")
        command = ["Rscript", str(PEERS / "lmer.R"), f"{folder}/rows.csv", formula, family]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    told = json.loads(done.stdout.strip().splitlines()[-1])
    print(f"  lme4    {told['seconds']:8.3f} s  log-likelihood {told['log_likelihood']:.4f}")
    return float(told["seconds"])


def ratio(name: str, theirs: float | None, mine: float, target: float) -> None:
    if theirs is not None:
        print(f"ratio {name} {theirs / mine:.1f} (target >= {target:g})")


print("radon, floor and intercept by county in state, diagonal, REML")
homes = load_radon()
plain = {"X": np.column_stack([np.ones(len(homes)), homes["floor"].to_numpy()]), "y": homes["log_radon"].to_numpy()}
radon = {**plain, "client": homes["county"].to_numpy(), "cluster": homes["state"].to_numpy()}
mine, _ = ours(radon, "gaussian", reml=True)
table = homes.select(client="county", cluster="state", y="log_radon", floor="floor")
theirs = lmer(table, "y ~ floor + (1|cluster) + (0+floor|cluster) + (1|client) + (0+floor|client)")
ratio("radon, lmer", theirs, mine, 1)

print("the paper's simulation, m = 10, d = 20, diagonal, ML")
drawn = simulate(clusters=20, clients=20, rows=10, d=20, seed=0)
paper = {"X": drawn.X, "y": drawn.y, "client": drawn.client, "cluster": drawn.cluster}
mine, _ = ours(paper, "gaussian", reml=False)
ratio("simulation, GPBoost", gpboost(paper, "gaussian", "cholesky"), mine, 1)

print("30,000 clients, 600,000 rows, d = 3, diagonal, linear")
rows = thirty_thousand("gaussian")
mine, _ = ours(rows, "gaussian", reml=False)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(f"  covey's process so far, rows included: peak {peak:.0f} MB (target < 500)")
ratio("linear, GPBoost", gpboost(rows, "gaussian", "default"), mine, 5)
if not QUICK:
    mine, _ = ours(rows, "gaussian", reml=True)
    columns = {"client": rows["client"], "cluster": rows["cluster"], "y": rows["y"]}
    table = pl.DataFrame({**columns, "a": rows["X"][:, 1], "b": rows["X"][:, 2]})
    terms = " + ".join(f"({term}|{level})" for level in ("cluster", "client") for term in ("1", "0+a", "0+b"))
    ratio("linear, lmer", lmer(table, f"y ~ a + b + {terms}"), mine, 20)

print("the same, logistic, Laplace")
rows = thirty_thousand("bernoulli")
mine, _ = ours(rows, "bernoulli", reml=False)
ratio("logistic, GPBoost", gpboost(rows, "bernoulli_logit", "cholesky"), mine, 3)
