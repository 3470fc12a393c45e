"""Random problems and dense references shared by the tests."""

from __future__ import annotations

from dataclasses import dataclass

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from covey import GroupedData, Penalty, datasets, threads

hypothesis.settings.register_profile("covey", deadline=None, max_examples=30, derandomize=True)
hypothesis.settings.load_profile("covey")


@dataclass(frozen=True)
class Problem:
    """Plain arrays of a random tree, with penalties given per client and per cluster."""

    X: np.ndarray
    y: np.ndarray
    client: np.ndarray
    cluster: np.ndarray
    weights: np.ndarray | None
    offset: np.ndarray | None
    gamma: np.ndarray
    lam: np.ndarray

    @property
    def data(self) -> GroupedData:
        return GroupedData.from_arrays(self.X, self.y, self.client, self.cluster, weights=self.weights, offset=self.offset)

    @property
    def penalty(self) -> Penalty:
        return Penalty.of(self.data.hierarchy, gamma=self.gamma, lam=self.lam)


def random_problem(
    seed: int, family: str = "gaussian", *, weighted: bool = True, max_rows: int = 6, d: int | None = None
) -> Problem:
    """A random tree: up to 5 clusters of up to 6 clients, unequal rows (some fewer than columns), rows shuffled."""
    rng = np.random.default_rng(seed)
    d = int(rng.integers(1, 5)) if d is None else d
    k = int(rng.integers(1, 6))
    parent = np.repeat(np.arange(k), rng.integers(1, 7, size=k))
    n = len(parent)
    counts = rng.integers(1, max_rows + 1, size=n)
    counts[0] += 3 * d  # enough rows in all for the global model to be determined
    client = np.repeat(np.arange(n), counts)
    N = len(client)
    X = rng.normal(size=(N, d))
    margin = (X * rng.normal(size=(n, d))[client]).sum(axis=1)
    offset = 0.3 * rng.normal(size=N) if weighted else None
    if family == "gaussian":
        y = margin + rng.normal(size=N)
    elif family == "bernoulli":
        y = (rng.random(N) < 1 / (1 + np.exp(-margin))).astype(float)
        y[:2] = 0, 1
    elif family == "gamma":
        y = rng.gamma(2.0, np.exp(np.clip(margin, -3, 3)) / 2.0)
    else:
        y = rng.poisson(np.exp(np.clip(margin, -3, 3))).astype(float)
        y[0] = 1
    weights = rng.uniform(0.2, 3.0, size=N) if weighted else None
    order = rng.permutation(N)
    shuffled = [None if a is None else a[order] for a in (X, y, client, parent[client], weights, offset)]
    return Problem(*shuffled, gamma=rng.uniform(0.1, 10, size=n), lam=rng.uniform(0.1, 10, size=k))


seeds = st.integers(min_value=0, max_value=2**32 - 1)


def dense_solution(problem: Problem, scaled: bool = False) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Minimise the multi-task form by one dense solve of the joint linear system in (theta, w, wbar)."""
    d, n, k = problem.X.shape[1], len(problem.gamma), len(problem.lam)
    weights = np.ones(len(problem.y)) if problem.weights is None else problem.weights
    y = problem.y if problem.offset is None else problem.y - problem.offset
    parent = np.array([problem.cluster[problem.client == i][0] for i in range(n)])
    K, rhs = np.zeros(((n + k + 1) * d,) * 2), np.zeros((n + k + 1) * d)
    eye = np.eye(d)

    def at(u: int) -> slice:
        return slice(u * d, (u + 1) * d)

    def tie(u: int, v: int, strength: float) -> None:
        K[at(u), at(u)] += strength * eye
        K[at(v), at(v)] += strength * eye
        K[at(u), at(v)] -= strength * eye
        K[at(v), at(u)] -= strength * eye

    for i in range(n):
        rows = problem.client == i
        K[at(i), at(i)] += problem.X[rows].T @ (weights[rows, None] * problem.X[rows])
        rhs[at(i)] = problem.X[rows].T @ (weights[rows] * y[rows])
        tie(i, n + parent[i], problem.gamma[i])
    for j in range(k):
        tie(n + j, n + k, problem.lam[j])
    unit = np.sqrt(np.diag(K)) if scaled else np.ones(len(rhs))
    K, rhs = K / np.outer(unit, unit), rhs / unit
    if not scaled:
        hypothesis.assume(np.linalg.cond(K) < 1e8)
    solution = np.linalg.solve(K, rhs)
    solution = (solution + np.linalg.solve(K, rhs - K @ solution)).reshape(-1, d) / unit.reshape(-1, d)
    return solution[:n], solution[n : n + k], solution[-1]


def gls_solution(problem: Problem) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Generalised least squares for wbar and the conditional means of w and theta, from the marginal law of all rows."""
    X, client, cluster = problem.X, problem.client, problem.cluster
    noise = np.eye(len(problem.y)) if problem.weights is None else np.diag(1 / problem.weights)
    y = problem.y if problem.offset is None else problem.y - problem.offset
    inner = X @ X.T
    same_cluster = (cluster[:, None] == cluster) / problem.lam[cluster][:, None]
    same_client = (client[:, None] == client) / problem.gamma[client][:, None]
    V = inner * (same_cluster + same_client) + noise
    VX, Vy = np.linalg.solve(V, X), np.linalg.solve(V, y)
    wbar = np.linalg.solve(X.T @ VX, X.T @ Vy)
    residual = np.linalg.solve(V, y - X @ wbar)
    w = np.array([wbar + X[cluster == j].T @ residual[cluster == j] / problem.lam[j] for j in range(len(problem.lam))])
    parent = [cluster[client == i][0] for i in range(len(problem.gamma))]
    theta = np.array(
        [w[parent[i]] + X[client == i].T @ residual[client == i] / problem.gamma[i] for i in range(len(problem.gamma))]
    )
    return theta, w, wbar


@pytest.fixture(scope="session")
def homes():
    return datasets.load_radon()


@pytest.fixture
def always_share(monkeypatch):
    """Share work between threads however little it is."""
    monkeypatch.setattr(threads, "WORTH_SHARING", 0.0)
