"""Fits beside a process that keeps one processor busy, against the same fits on one thread. Target: at most 1.3 x.

The busy process is pinned to one of the processors that this process may use. Both fits run beside it and take turns.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from statistics import median

from _timing import seconds

from covey import HierarchicalClassifier, HierarchicalRegressor
from covey.datasets import simulate
from covey.threads import most_threads, use_threads

REPEATS = 9
BUSY = "import os; os.sched_setaffinity(0, {{{place}}})\nwhile True: pass"


def newton() -> Callable[[], object]:
    drawn = simulate(
        "bernoulli", clusters=5, clients=5898, rows=22, d=3, wbar=[-2.8, 0.3, -0.3], cluster_sd=0.2, client_sd=0.4,
        intercept=True, equal_rows=False, seed=0,
    )  # fmt: skip
    model = HierarchicalClassifier(gamma=6.25, lam=25.0, fit_intercept=False)
    return lambda: model.fit(drawn.X, drawn.y, client=drawn.client, cluster=drawn.cluster)


def reml() -> Callable[[], object]:
    drawn = simulate(clusters=50, clients=600, rows=20, d=3, wbar=[1.0, -0.5, 0.25], cluster_sd=0.3, client_sd=0.5, seed=0)
    model = HierarchicalRegressor(fit_intercept=False, tests=False)
    return lambda: model.fit(drawn.X, drawn.y, client=drawn.client, cluster=drawn.cluster)


def main() -> None:
    worst = 0.0
    print(f"{most_threads()} processors, load {os.getloadavg()[0]:.1f}")
    for make in (newton, reml):
        fit = make()
        fit()
        place = max(os.sched_getaffinity(0))
        with subprocess.Popen([sys.executable, "-c", BUSY.format(place=place)]) as busy:
            alone, free = [], []
            for _ in range(REPEATS):
                with use_threads(1):
                    alone.append(seconds(fit))
                free.append(seconds(fit))
            busy.kill()
        ratio = median(free) / median(alone)
        worst = max(worst, ratio)
        print(f"{make.__name__}: one thread {median(alone):.3f} s, as many as are free {median(free):.3f} s: ratio {ratio:.2f}")
    print(f"ratio {worst:.2f} (target <= 1.3)")


if __name__ == "__main__":
    main()
