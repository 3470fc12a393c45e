"""Wide clients: 3,000 clients of 20 rows in 20 groups, given penalties, against ten lines of numpy in the space of the rows.

A client with fewer rows than terms needs only a matrix as large as its rows. Both sides get arrays and give all coefficients,
with one thread each; the answers must agree to 1e-9. Then the same rows with classes, against a loop of scikit-learn fits of
the clients (ridge penalty, defaults otherwise), which share nothing: the loop is timed on a tenth of the clients. The peak
of memory is that of a process that fits 30,000 clients of 20 rows and 300 terms, with libraries, over the bytes of its columns.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

os.environ |= {"OPENBLAS_NUM_THREADS": "1", "COVEY_THREADS": "1"}  # before numpy starts its threads

import numpy as np
from _timing import alternate
from sklearn.linear_model import LogisticRegression

from covey import GroupedData, Penalty
from covey.losses import Bernoulli, Gaussian
from covey.solvers import minimise

GROUPS, CLIENTS, ROWS = 20, 150, 20
GAMMA, LAM = 1.0, 2.0


def rows_solve(X: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Coefficients of every client: ``X`` is (clients, rows, terms), sorted by group."""
    K = np.eye(ROWS) + X @ X.transpose(0, 2, 1) / GAMMA
    solved = np.linalg.solve(K, np.concatenate([X, y[:, :, None]], axis=2))
    tall = (array.reshape(GROUPS, CLIENTS * ROWS, -1) for array in (X, solved))
    sums = np.stack([left.T @ right for left, right in zip(*tall, strict=True)])
    A, r = sums[:, :, :-1], sums[:, :, -1]
    prior = LAM * np.eye(X.shape[2])
    weight = LAM * (np.eye(X.shape[2]) - LAM * np.linalg.inv(A + prior))
    pulled = LAM * np.linalg.solve(A + prior, r[:, :, None])[:, :, 0]
    wbar = np.linalg.solve(weight.sum(axis=0), pulled.sum(axis=0))
    w = np.linalg.solve(A + prior, (r + LAM * wbar)[:, :, None])[:, :, 0].repeat(CLIENTS, axis=0)
    residual = solved[:, :, -1] - (solved[:, :, :-1] @ w[:, :, None])[:, :, 0]
    return w + (X.transpose(0, 2, 1) @ residual[:, :, None])[:, :, 0] / GAMMA


def loop(X: np.ndarray, y: np.ndarray) -> None:
    for rows, classes in zip(X, y, strict=True):
        if 0 < classes.sum() < ROWS:  # scikit-learn refuses one class
            LogisticRegression(C=1 / GAMMA, fit_intercept=False).fit(rows, classes)


MEMORY = """
import resource
import numpy as np
from covey import GroupedData, Penalty
from covey.losses import Gaussian
from covey.solvers import minimise

rng, client = np.random.default_rng(0), np.repeat(np.arange(30_000), 20)
X, y = rng.standard_normal((600_000, 300)), rng.standard_normal(600_000)
data = GroupedData.from_arrays(X, y, client, client // 150)
minimise(data, Gaussian(), Penalty.of(data.hierarchy, gamma=1.0, lam=2.0))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / X.nbytes)
"""
done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True)
print(f"30,000 clients, d = 300: peak memory over input {float(done.stdout):.2f} (target <= 2.5)")

ratios, logistic = [], []
for d in (10, 30, 100, 300, 1000):
    rng = np.random.default_rng(d)
    X = rng.standard_normal((GROUPS * CLIENTS, ROWS, d))
    y = X @ rng.standard_normal(d) / np.sqrt(d) + rng.standard_normal(X.shape[:2])
    client = np.repeat(np.arange(GROUPS * CLIENTS), ROWS)
    data = GroupedData.from_arrays(X.reshape(-1, d), y.ravel(), client, client // CLIENTS)
    penalty = Penalty.of(data.hierarchy, gamma=GAMMA, lam=LAM)
    difference = np.abs(minimise(data, Gaussian(), penalty).theta - rows_solve(X, y)).max()
    if difference > 1e-9:
        raise SystemExit(f"the answers differ by {difference:.1e}")
    ours, theirs = alternate(lambda: minimise(data, Gaussian(), penalty), lambda: rows_solve(X, y), repeats=3)  # noqa: B023
    ratios.append(ours / theirs)
    print(
        f"d = {d:4d}: covey {ours:.3f} s, numpy in row space {theirs:.3f} s, ratio {ratios[-1]:.2f}, same to {difference:.0e}"
    )
    classes = (y > 0) * 1.0
    data = replace(data, y=classes.ravel())
    fit = minimise(data, Bernoulli(), penalty)
    tenth = len(X) // 10
    ours, theirs = alternate(lambda: minimise(data, Bernoulli(), penalty), lambda: loop(X[:tenth], classes[:tenth]), repeats=3)  # noqa: B023
    logistic.append(ours / (10 * theirs))
    print(
        f"logistic, d = {d:4d}: covey {ours:.3f} s ({fit.convergence.exchanges} exchanges), "
        f"loop of scikit-learn {10 * theirs:.3f} s, ratio {logistic[-1]:.2f}"
    )
print("ratio covey / loop of scikit-learn (targets <= 0.2 to d = 100, 1.0 at 300): " + ", ".join(f"{v:.2f}" for v in logistic))
print("ratio covey / numpy (target <= 1.2): " + ", ".join(f"{value:.2f}" for value in ratios))
