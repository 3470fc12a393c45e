"""Donors at the paper's size: 5 million appeals to rows (target: a minute), 33 x 33 x 5 fits of 29,490 clients (15 minutes).

The grid is timed on three columns of it, all five folds, and scaled up; the full one is ``covey reproduce donors``. The last
line is what a warm start along the path saves over a cold start at the same penalties.
"""

from __future__ import annotations

import time
import warnings
from functools import partial

import numpy as np
from _timing import seconds

from covey import Penalty
from covey.datasets import simulate_donors
from covey.fitting.selection import search
from covey.losses import Bernoulli
from covey.reproduce.donors import GRID
from covey.reproduce.mailings import Mailing
from covey.reproduce.solicitations import solicitations
from covey.solvers import minimise

warnings.simplefilter("ignore")
drawn = simulate_donors(seed=0)
start = time.perf_counter()
found = solicitations(drawn.appeals, drawn.gifts, drawn.zips)
print(f"{drawn.appeals.height:,} appeals to rows in {time.perf_counter() - start:.1f} s")

data, _ = Mailing(found.rows, "simulated tables", ()).data.split(0.2, 0)
columns = GRID[[32, 16, 0]]
minimise(data, Bernoulli(), Penalty.of(data.hierarchy, gamma=100.0, lam=1.0))
warm = seconds(partial(search, data, Bernoulli(), gammas=columns, lams=GRID, score="client")) / (5 * len(columns) * len(GRID))
train = data.rows(data.folds(5, 0) != 0)
penalties = [Penalty.of(data.hierarchy, gamma=float(gamma), lam=1.0) for gamma in columns]
cold = np.mean([seconds(partial(minimise, train, Bernoulli(), penalty, tol=1e-4)) for penalty in penalties])
minutes = warm * 5 * len(GRID) ** 2 / 60
print(f"{data.n_clients:,} clients, {data.n_rows:,} rows: {1000 * warm:.0f} ms a fit, the whole grid about {minutes:.1f} min")
print(f"warm start over cold start: {cold / warm:.1f} x")
