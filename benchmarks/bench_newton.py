"""Newton for 29,490 clients against one pooled scikit-learn logistic regression on the same rows, thread for thread.

The estimator gets a data frame with columns of ids, and returns a fitted model: the time includes encoding ids and classes,
checks, sorting, Newton to a gradient norm of 1e-8 and building the model. scikit-learn gets the matrix and the classes as
arrays (newton-cholesky, no penalty, default tolerance). Target: at most 1.2 x; the solver alone at most 1.0 x.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from _timing import alternate
from sklearn.linear_model import LogisticRegression
from threadpoolctl import threadpool_limits

from covey import HierarchicalClassifier, Penalty
from covey.datasets import simulate
from covey.losses import Bernoulli
from covey.solvers import minimise
from covey.threads import use_threads

drawn = simulate(
    "bernoulli", clusters=5, clients=5898, rows=22, d=3, wbar=[-2.8, 0.3, -0.3], cluster_sd=0.2, client_sd=0.4,
    intercept=True, equal_rows=False, seed=0,
)  # fmt: skip
data = drawn.data
penalty = Penalty.of(data.hierarchy, gamma=1 / 0.4**2, lam=1 / 0.2**2)
frame = pd.DataFrame(drawn.X[:, 1:], columns=["a", "b"]).assign(client=drawn.client, cluster=drawn.cluster)
fit = minimise(data, Bernoulli(), penalty, solver="newton")
shape = f"{data.n_clients:,} clients, {data.n_clusters} clusters, {data.n_rows:,} rows, d = {data.n_terms}"
print(f"{shape}, {100 * data.y.mean():.1f}% ones")
print(f"newton: {fit.convergence.message}, {fit.convergence.exchanges} exchanges")


def solver() -> None:
    minimise(data, Bernoulli(), penalty, solver="newton")


def estimator() -> HierarchicalClassifier:
    return HierarchicalClassifier(client="client", cluster="cluster", gamma=1 / 0.4**2, lam=1 / 0.2**2).fit(frame, drawn.y)


def pooled() -> None:
    LogisticRegression(solver="newton-cholesky", C=np.inf, fit_intercept=False).fit(drawn.X, drawn.y)


difference = np.abs(estimator().coef_ - fit.theta).max()
if difference > 1e-9:
    raise SystemExit(f"estimator and solver differ by {difference:.1e}")
ratios = []
for threads in (1, 2):
    with threadpool_limits(threads), use_threads(threads):
        whole, theirs = alternate(estimator, pooled)
        ours, other = alternate(solver, pooled)
    ratios.append((whole / theirs, ours / other))
    print(f"{threads} thread(s): estimator {whole:.3f} s, solver {ours:.3f} s, pooled scikit-learn {theirs:.3f} s")
for name, at, target in (("estimator", 0, 1.2), ("solver", 1, 1.0)):
    print(f"ratio {name} / scikit-learn on 1 and 2 threads: {ratios[0][at]:.2f} and {ratios[1][at]:.2f} (target <= {target})")
