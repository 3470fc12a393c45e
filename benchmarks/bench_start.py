"""From ``python`` start to radon coefficients in a second process. Target: under 3 s. And ``covey --help``: under 0.7 s."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from statistics import median

from _timing import seconds

FIT = """
from covey import HierarchicalRegressor, datasets
homes = datasets.load_radon()
print(HierarchicalRegressor(client="county", cluster="state", formula="{formula}").fit(homes).coef_[0])
"""
PLAIN = """
from covey import HierarchicalRegressor, datasets
homes = datasets.load_radon()
model = HierarchicalRegressor(client="county", cluster="state")
print(model.fit(homes[["county", "state", "floor"]], homes["log_radon"]).coef_[0])
"""
CORE = """
from covey import GroupedData, Penalty, datasets
from covey.solvers import minimise
from covey.losses import Gaussian
homes = datasets.load_radon()
data = GroupedData.from_arrays(homes[["floor"]].to_numpy(), homes["log_radon"], homes["county"], homes["state"])
print(minimise(data, Gaussian(), Penalty.of(data.hierarchy)).theta[0])
"""
COVEY = Path(sys.executable).with_name("covey")


def timed(*command: str) -> float:
    def once() -> None:
        subprocess.run(command, check=True, capture_output=True)

    once()
    return median(seconds(once) for _ in range(5))


formula = timed(sys.executable, "-c", FIT.format(formula="log_radon ~ floor"))
print(f"python to coefficients, estimator with a formula: {formula:.2f} s")
helped = timed(str(COVEY), "--help")
print(f"covey --help: {helped:.2f} s, ratio to the limit {helped / 0.7:.2f} (target <= 1.0)")
core = timed(sys.executable, "-c", CORE)
print(f"python to coefficients, solver without scikit-learn: {core:.2f} s, ratio to the limit {core / 3:.2f} (target <= 1.0)")
sklearn = timed(sys.executable, "-c", "import sklearn.base")
print(f"scikit-learn's own import: {sklearn:.2f} s")
plain = timed(sys.executable, "-c", PLAIN)
print(f"python to coefficients, estimator on columns: {plain:.2f} s, ratio to the limit {plain / 3:.2f} (target <= 1.0)")
