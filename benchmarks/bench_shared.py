"""Terms that do not vary: 2,000 clients of 5 rows in 50 groups, 40 shared terms and `(1 | g/i)`, against lmer and glmmTMB.

Each side gets a data frame and fits once to warm up; then both take turns, with one thread each: CPU seconds. covey is
timed with and without its likelihood-ratio tests of the two levels, which the others do not run. The log-likelihoods must
agree to 1e-6 of their size. Needs R with lme4 and glmmTMB.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from pathlib import Path
from statistics import median

os.environ |= {"OPENBLAS_NUM_THREADS": "1", "COVEY_THREADS": "1"}  # before numpy starts its threads

import numpy as np
import pandas as pd

from covey import HierarchicalClassifier, HierarchicalRegressor

CLIENTS, GROUPS, ROWS, TERMS, REPEATS = 2000, 50, 5, 40, 3
FORMULA = "y ~ " + " + ".join(f"x{a}" for a in range(TERMS)) + " + (1 | g/i)"
PROGRAM = """
suppressMessages({library(lme4); library(glmmTMB)})
f <- read.csv(commandArgs(TRUE)[1])
formula <- as.formula(FORMULA)
fit <- if (commandArgs(TRUE)[2] == "lmer") function() lmer(formula, f) else function() glmmTMB(formula, f, family = binomial)
m <- fit()
cat("version", as.character(packageVersion(if (commandArgs(TRUE)[2] == "lmer") "lme4" else "glmmTMB")), logLik(m), "\\n")
repeats <- file("stdin", "r")
while (length(readLines(repeats, 1))) { t <- system.time(fit()); cat(t[1] + t[2], "\\n") }
"""


def rows(logistic: bool) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    i = np.repeat(np.arange(CLIENTS), ROWS)
    g, X = i // (CLIENTS // GROUPS), rng.standard_normal((CLIENTS * ROWS, TERMS))
    eta = X @ (0.2 * rng.standard_normal(TERMS))
    eta += (0.5 * rng.standard_normal(GROUPS))[g] + (0.7 * rng.standard_normal(CLIENTS))[i]
    y = (rng.random(len(eta)) < 1 / (1 + np.exp(-eta))) * 1.0 if logistic else eta + rng.standard_normal(len(eta))
    return pd.DataFrame(X, columns=[f"x{a}" for a in range(TERMS)]).assign(y=y, g=g, i=i)


def cpu(work: object) -> float:
    start = time.process_time()
    work()  # type: ignore[operator]
    return time.process_time() - start


def compare(name: str, model: HierarchicalClassifier | HierarchicalRegressor, frame: pd.DataFrame, folder: Path) -> str:
    frame.to_csv(folder / "rows.csv", index=False)
    (folder / "fit.R").write_text(PROGRAM.replace("FORMULA", repr(FORMULA)))
    command = ["Rscript", str(folder / "fit.R"), str(folder / "rows.csv"), name]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        if other.stdin is None or other.stdout is None:
            raise RuntimeError("R has no pipes")
        _, version, theirs = other.stdout.readline().split()
        plain = type(model)(formula=FORMULA, tests=False)
        ours = float(plain.fit(frame).model_.learned.components.log_likelihood)
        model.fit(frame)
        if abs(ours - float(theirs)) > 1e-6 * abs(ours):
            raise SystemExit(f"{name}: the log-likelihoods are {ours} and {theirs}")
        times: list[tuple[float, ...]] = []
        for _ in range(REPEATS):
            other.stdin.write("go\n")
            other.stdin.flush()
            spent = float(other.stdout.readline())
            times.append((cpu(lambda: plain.fit(frame)), cpu(lambda: model.fit(frame)), spent))
        other.stdin.close()
    alone, tests, peer = (median(each) for each in zip(*times, strict=True))
    print(f"{name} {version} {peer:.2f} s, covey {alone:.2f} s, with tests of both levels {tests:.2f} s")
    return f"{name} {alone / peer:.2f} (with tests {tests / peer:.2f})"


with tempfile.TemporaryDirectory() as place:
    results = [
        compare("lmer", HierarchicalRegressor(formula=FORMULA), rows(logistic=False), Path(place)),
        compare("glmmTMB", HierarchicalClassifier(formula=FORMULA), rows(logistic=True), Path(place)),
    ]
print("ratio covey / " + ", ".join(results) + " (targets <= 0.50 and 0.25)")
