"""This checkout against another one, alternating in one run: newton, REML, Laplace, one_coin and a million clients.

    python benchmarks/against.py OTHER_CHECKOUT [--python OTHER_PYTHON]

Each checkout has a process of its own, which draws the same rows, warms its kernels and then fits on command. The public
estimators are timed, so that both may be of any edition. ``components`` is REML with 3 varying terms and a variance for each,
``wide`` the same with 20. Prints the largest ratio of this checkout's time to the other's last.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from statistics import median

REPEATS = 7

CHILD = """
import sys, time, warnings
import numpy as np
from covey import HierarchicalClassifier, HierarchicalRegressor
from covey.datasets import simulate

warnings.simplefilter("ignore")
print("ready", flush=True)


def newton():
    drawn = simulate("bernoulli", clusters=5, clients=5898, rows=22, d=3, wbar=[-2.8, 0.3, -0.3], cluster_sd=0.2,
                     client_sd=0.4, intercept=True, equal_rows=False, seed=0)
    model = HierarchicalClassifier(gamma=6.25, lam=25.0, fit_intercept=False)
    return lambda: model.fit(drawn.X, drawn.y, client=drawn.client, cluster=drawn.cluster)


def components():
    drawn = simulate(clusters=50, clients=600, rows=20, d=3, wbar=[1.0, -0.5, 0.25], cluster_sd=0.3, client_sd=0.5, seed=0)
    model = HierarchicalRegressor(fit_intercept=False, tests=False)
    return lambda: model.fit(drawn.X, drawn.y, client=drawn.client, cluster=drawn.cluster)


def wide():
    rng = np.random.default_rng(20)
    client = np.repeat(np.arange(3000), 20)
    X, sds = rng.standard_normal((60_000, 20)), np.linspace(0.2, 0.8, 20)
    w = sds * rng.standard_normal((20, 20))
    theta = w.repeat(150, axis=0) + sds[::-1] * rng.standard_normal((3000, 20))
    y = (X * theta[client]).sum(axis=1) + rng.standard_normal(60_000)
    model = HierarchicalRegressor(fit_intercept=False, tests=False)
    return lambda: model.fit(X, y, client=client, cluster=client // 150)


def laplace():
    drawn = simulate("bernoulli", clusters=50, clients=100, rows=20, d=2, wbar=[0.5, -0.5], cluster_sd=0.4, client_sd=0.6,
                     seed=0)
    model = HierarchicalClassifier(fit_intercept=False, tests=False)
    return lambda: model.fit(drawn.X, drawn.y, client=drawn.client, cluster=drawn.cluster)


def one_coin():
    drawn = simulate(clusters=20, clients=20, rows=10, d=20, seed=0)
    options = {"p": 0.1, "eta": 1e-4, "mu": 1e-3, "every": 50_000}
    model = HierarchicalRegressor(fit_intercept=False, gamma=1.0, lam=1.0, solver="one_coin", max_iter=50_000, tol=1e-300,
                                  options=options)
    return lambda: model.fit(drawn.X, drawn.y, client=drawn.client, cluster=drawn.cluster)


def million():
    rng = np.random.default_rng(0)
    client = np.repeat(np.arange(1_000_000), 10)
    X, y, cluster = rng.standard_normal((len(client), 5)), rng.standard_normal(len(client)), client // 20_000
    model = HierarchicalRegressor(fit_intercept=False, gamma=1.0, lam=1.0)
    return lambda: model.fit(X, y, client=client, cluster=cluster)


for line in sys.stdin:
    word = line.strip()
    if word != "go":
        work = globals()[word]()
        work()
        print("warm", flush=True)
        continue
    start = time.perf_counter()
    work()
    print(time.perf_counter() - start, flush=True)
"""


def started(checkout: Path, python: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(checkout.resolve() / "src")}
    command = [python, "-c", CHILD]
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def asked(process: subprocess.Popen[str], word: str) -> str:
    if process.stdin is None or process.stdout is None:
        raise RuntimeError("the process has no pipes")
    process.stdin.write(f"{word}\n")
    process.stdin.flush()
    return process.stdout.readline().strip()


def main() -> None:
    arguments = sys.argv[1:]
    python = arguments[arguments.index("--python") + 1] if "--python" in arguments else sys.executable
    both = started(Path(__file__).parents[1], sys.executable), started(Path(arguments[0]), python)
    for process in both:
        if process.stdout is None or process.stdout.readline().strip() != "ready":
            raise SystemExit("A checkout cannot be imported.")
    worst = 0.0
    for name in ("newton", "components", "wide", "laplace", "one_coin", "million"):
        for process in both:
            asked(process, name)
        times = [[float(asked(process, "go")) for process in both] for _ in range(REPEATS)]
        ours, theirs = (median(each) for each in zip(*times, strict=True))
        worst = max(worst, ours / theirs)
        print(f"{name:12} this {ours:8.3f} s   other {theirs:8.3f} s   ratio {ours / theirs:.3f}", flush=True)
    for process in both:
        process.kill()
    print(f"largest ratio {worst:.3f} (target <= 1.05)")


if __name__ == "__main__":
    main()
