"""Seconds against the number of clients and of terms, beside counts of operations: given penalties, 20 rows for each client.

    python benchmarks/bench_growth.py [FIGURE.svg]

One thread. The solver gets arrays and gives all coefficients; a point is the fastest of several runs. A line counts the
multiplications and additions of the algorithm, divided by one number of operations for each second. This number is the mean
(of logarithms) over the points of the line. With more than 16 terms a client is solved in the space of its rows, so the
count changes there.
"""

from __future__ import annotations

import os
import sys

os.environ |= {"OPENBLAS_NUM_THREADS": "1", "COVEY_THREADS": "1"}  # before numpy starts its threads

import matplotlib as mpl
import numpy as np
from _timing import seconds
from matplotlib.figure import Figure

from covey import GroupedData, Penalty
from covey.losses import Gaussian
from covey.solvers import minimise
from covey.solvers.direct.spaces import space_of

ROWS, CELL = 20, 150  # rows for each client, clients in each group
CLIENTS, TERMS = (1_500, 3_000, 7_500, 15_000, 30_000, 75_000), (2, 4, 8, 16, 30, 60, 100, 200, 300, 600)
STYLE = {"font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "covey"}


def fit_seconds(clients: int, d: int) -> float:
    rng, client = np.random.default_rng(d), np.repeat(np.arange(clients), ROWS)
    X, y = rng.standard_normal((len(client), d)), rng.standard_normal(len(client))
    data = GroupedData.from_arrays(X, y, client, client // CELL)
    penalty = Penalty.of(data.hierarchy, gamma=1.0, lam=2.0)
    minimise(data, Gaussian(), penalty)
    return min(seconds(lambda: minimise(data, Gaussian(), penalty)) for _ in range(3 if clients * d > 1e6 else 7))


def operations(clients: int, d: int) -> float:
    """Multiplications and additions."""
    m, cells = ROWS, clients / CELL
    if space_of(d, d) == "terms":
        # The Gram matrix; (I + A S)^-1 [A | b] on the way up and again on the way down.
        each = m * d * (d + 1) + 2 * (2 / 3 * d**3 + 2 * d**2 * (d + 1))
    else:
        # K = I + R S R', its factor, L^-1 R, and the product G'G for the sum over the clients of a cell.
        each = m**2 * d + m**3 / 3 + m**2 * d + 2 * m * d**2
    return clients * each + cells * (2 / 3 + 4) * d**3


def slope(x: np.ndarray, y: np.ndarray) -> float:
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def draw(points: dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]], titles: dict[str, str], path: str) -> None:
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(10.0, 4.4), layout="constrained")
        axes = figure.subplots(1, 2)
        for name, (x, measured, counted) in points.items():
            ax = axes[0] if name.startswith("clients") else axes[1]
            color = {"clients, d = 10": "#1f6fb4", "clients, d = 100": "#d1495b"}.get(name, "#1f6fb4")
            label = name.removeprefix("clients, ") if ax is axes[0] else "3,000 clients"
            ax.loglog(x, measured, "o", color=color, label=f"{label}, measured")
            ax.loglog(x, counted, "-", color=color, alpha=0.6, label=f"{label}, by operations")
        for ax, (what, title) in zip(axes, titles.items(), strict=True):
            ax.set_title(title, loc="left", fontsize=11)
            ax.set_xlabel(what)
            ax.set_ylabel("seconds of a fit (one thread)")
            ax.legend(frameon=False, fontsize=9)
            ax.grid(alpha=0.25)
        figure.savefig(path, metadata={"Date": None})


points = {}
for d in (10, 100):
    sizes = np.array([n for n in CLIENTS if n * d * ROWS <= 8e7])
    points[f"clients, d = {d}"] = (
        sizes,
        np.array([fit_seconds(n, d) for n in sizes]),
        np.array([operations(n, d) for n in sizes]),
    )
terms = np.array(TERMS)
points["terms"] = terms, np.array([fit_seconds(3_000, d) for d in TERMS]), np.array([operations(3_000, d) for d in TERMS])

for name, (x, measured, count) in points.items():
    predicted, in_rows = np.empty(len(x)), np.array([name == "terms" and space_of(d, d) == "rows" for d in x])
    for mine in (in_rows, ~in_rows):
        predicted[mine] = count[mine] * np.exp(np.log(measured[mine] / count[mine]).sum() / max(mine.sum(), 1))
    points[name] = x, measured, predicted
    for at, spent, ops, line in zip(x, measured, count, predicted, strict=True):
        print(f"{name}: {at:6,d}  {spent:8.4f} s  by operations {line:8.4f} s  {ops / spent / 1e9:5.1f} Gflop/s")
by_clients = [slope(points[f"clients, d = {d}"][0], points[f"clients, d = {d}"][1]) for d in (10, 100)]
wide = terms >= 100
measured, predicted = (slope(terms[wide], points["terms"][at][wide]) for at in (1, 2))
print(f"exponent in clients: {by_clients[0]:.2f} with d = 10, {by_clients[1]:.2f} with d = 100; by operations 1.00")
print(f"exponent in terms, from d = 100 on: {measured:.2f}; by operations {predicted:.2f}")
if len(sys.argv) > 1:
    titles = {
        "clients": f"Time grows like clients to the power {by_clients[0]:.2f} (d = 10)\nand {by_clients[1]:.2f} (d = 100)",
        "terms d": f"From d = 100 on, time grows like d to the power {measured:.2f},\noperations like {predicted:.2f}",
    }
    draw(points, titles, sys.argv[1])
