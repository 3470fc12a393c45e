"""Newton for 29,490 clients against one pooled scikit-learn logistic regression on the same rows. Target: at most 1.0 x."""

from __future__ import annotations

import numpy as np
from _timing import alternate
from sklearn.linear_model import LogisticRegression

from covey import HierarchicalClassifier, Penalty
from covey.datasets import simulate
from covey.losses import Bernoulli
from covey.solvers import minimise

drawn = simulate(
    "bernoulli", clusters=5, clients=5898, rows=22, d=3, wbar=[-2.8, 0.3, -0.3], cluster_sd=0.2, client_sd=0.4,
    intercept=True, equal_rows=False, seed=0,
)  # fmt: skip
data = drawn.data
penalty = Penalty.of(data.hierarchy, gamma=1 / 0.4**2, lam=1 / 0.2**2)
fit = minimise(data, Bernoulli(), penalty, solver="newton")
shape = f"{data.n_clients:,} clients, {data.n_clusters} clusters, {data.n_rows:,} rows, d = {data.n_terms}"
print(f"{shape}, {100 * data.y.mean():.1f}% ones")
print(f"newton: {fit.convergence.message}, {fit.convergence.exchanges} exchanges")


def solver() -> None:
    minimise(data, Bernoulli(), penalty, solver="newton")


def estimator() -> None:
    model = HierarchicalClassifier(gamma=1 / 0.4**2, lam=1 / 0.2**2, fit_intercept=False)
    model.fit(drawn.X, drawn.y, client=drawn.client, cluster=drawn.cluster)


def pooled() -> None:
    LogisticRegression(solver="newton-cholesky", C=np.inf, fit_intercept=False).fit(drawn.X, drawn.y)


whole, theirs = alternate(estimator, pooled)
print(f"estimator with grouping and checks {whole:.3f} s, pooled scikit-learn {theirs:.3f} s: ratio {whole / theirs:.2f}")
ours, theirs = alternate(solver, pooled)
print(f"newton {ours:.3f} s, pooled scikit-learn {theirs:.3f} s")
print(f"ratio {ours / theirs:.2f} (target <= 1.0)")
