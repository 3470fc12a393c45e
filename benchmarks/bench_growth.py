"""Seconds against the number of clients and of terms, beside counts of operations: given penalties, 20 rows for each client.

    python benchmarks/bench_growth.py [FIGURE.svg]

One thread. The solver gets arrays and gives all coefficients; a point is the fastest of several runs. The prediction counts
multiplications and additions, in loops over small matrices and in products of large ones. Three numbers are fitted to all
points: operations a second of either kind, and the seconds that any fit takes. With more than 16 terms a client is solved in
the space of its rows, so the count changes there.
"""

from __future__ import annotations

import os
import sys

os.environ |= {"OPENBLAS_NUM_THREADS": "1", "COVEY_THREADS": "1"}  # before numpy starts its threads

import matplotlib as mpl
import numpy as np
from _timing import seconds
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, ScalarFormatter
from scipy.optimize import nnls

from covey import GroupedData, Penalty
from covey.losses import Gaussian
from covey.solvers import minimise
from covey.solvers.direct.spaces import space_of

ROWS, CELL = 20, 150  # rows for each client, clients in each group
CLIENTS = {10: (1_500, 3_000, 7_500, 15_000, 30_000, 75_000), 100: (1_500, 3_000, 7_500, 15_000, 30_000)}
TERMS = (2, 4, 8, 16, 30, 60, 100, 200, 300, 600)
BLUE, RED = "#1f6fb4", "#d1495b"
STYLE = {"font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "covey"}


def fit_seconds(clients: int, d: int) -> float:
    rng, client = np.random.default_rng(d), np.repeat(np.arange(clients), ROWS)
    X, y = rng.standard_normal((len(client), d)), rng.standard_normal(len(client))
    data = GroupedData.from_arrays(X, y, client, client // CELL)
    penalty = Penalty.of(data.hierarchy, gamma=1.0, lam=2.0)
    minimise(data, Gaussian(), penalty)
    return min(seconds(lambda: minimise(data, Gaussian(), penalty)) for _ in range(3 if clients * d > 1e6 else 7))


def operations(clients: int, d: int) -> tuple[float, float]:
    """Multiplications and additions in loops over small matrices, and in products and solutions of large ones."""
    m, cells = ROWS, clients / CELL
    if space_of(d, d) == "terms":
        # The Gram matrix; (I + A S)^-1 [A | b] on the way up and again on the way down.
        loops, products = m * d * (d + 1) + 2 * (2 / 3 * d**3 + 2 * d**2 * (d + 1)), 0.0
    else:
        # K = I + R S R', its factor, and G = L^-1 R; then the sums of G'G for the clients of a cell.
        loops, products = 2 * m**2 * d + m**3 / 3, 2.0 * m * d**2
    return clients * loops, clients * products + cells * (2 / 3 + 4) * d**3


points = [("clients", n, d) for d, sizes in CLIENTS.items() for n in sizes] + [("terms", 3_000, d) for d in TERMS]
measured = np.array([fit_seconds(n, d) for _, n, d in points])
work = np.array([(*operations(n, d), 1.0) for _, n, d in points])
cost = nnls(work / measured[:, None], np.ones(len(points)))[0]
predicted = work @ cost
for (kind, n, d), ours, line in zip(points, measured, predicted, strict=True):
    print(f"{kind:7s} {n:7,d} clients, d = {d:3d}: {ours:7.4f} s, predicted {line:7.4f} s, ratio {ours / line:.2f}")
rates = " and ".join(f"{1e-9 / each:.1f}" if each > 0 else "any number of" for each in cost[:2])
print(f"fitted: {rates} billion operations a second in loops and in products, {1e3 * cost[2]:.1f} ms for any fit")


def panel(kind: str, d: int | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The places of points on the horizontal axis, and their measured and predicted seconds."""
    mine = np.array([point[0] == kind and d in (None, point[2]) for point in points])
    x = np.array([point[1 if kind == "clients" else 2] for point in points])
    return x[mine], measured[mine], predicted[mine]


def apart(kind: str) -> float:
    _, ours, line = panel(kind)
    return float(np.exp(np.abs(np.log(ours / line)).max()))


for d in CLIENTS:
    x, ours, line = panel("clients", d)
    growth = [float(np.polyfit(np.log(x), np.log(each), 1)[0]) for each in (ours, line)]
    print(f"exponent in clients, d = {d}: {growth[0]:.2f}, predicted {growth[1]:.2f}")
print(f"measured and predicted differ by a factor of at most {apart('clients'):.2f} (clients) and {apart('terms'):.2f} (terms)")
if len(sys.argv) > 1:
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(10.0, 4.4), layout="constrained")
        left, right = figure.subplots(1, 2)
        for ax, kind, d, color, label in (
            (left, "clients", 100, RED, "100 terms"),
            (left, "clients", 10, BLUE, "10 terms"),
            (right, "terms", None, BLUE, "3,000 clients"),
        ):
            x, ours, line = panel(kind, d)
            ax.loglog(x, ours, "o", color=color, label=f"{label}, measured")
            in_rows = x > 16 if kind == "terms" else np.zeros(len(x), dtype=bool)
            ax.loglog(x[~in_rows], line[~in_rows], color=color, alpha=0.6, label=f"{label}, predicted")
            ax.loglog(x[in_rows], line[in_rows], color=color, alpha=0.6)
        for ax, kind, what, ticks in (
            (left, "clients", "clients", (1_500, 5_000, 15_000, 50_000)),
            (right, "terms", "terms (above 16 in the space of the rows)", (2, 4, 8, 16, 30, 60, 100, 200, 600)),
        ):
            ax.set_title(
                f"Seconds against {kind}: within a factor of\n{apart(kind):.1f} of the prediction", loc="left", fontsize=11
            )
            ax.set_xticks(ticks)
            ax.xaxis.set_major_formatter(ScalarFormatter())
            ax.xaxis.set_minor_formatter(NullFormatter())
            ax.set(xlabel=what, ylabel="seconds of a fit (one thread)")
            ax.grid(alpha=0.25)
            ax.legend(frameon=False, fontsize=9)
        figure.savefig(sys.argv[1], metadata={"Date": None})
