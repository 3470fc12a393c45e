"""One-coin L2GD against a plain Python loop over client objects: same arithmetic, same random choices. Target: 100 x.

Two problems: the paper's simulation (400 clients, d = 20, 10 rows each, p = 0.1, eta = 1e-4, 50,000 iterations), and a logistic
model of 29,490 clients with 3 coefficients and 22 rows each on average, by the iteration. The iterates must agree to 1e-9.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np
from _timing import seconds

from covey import GroupedData, Penalty
from covey._typing import Floats
from covey.datasets import simulate
from covey.losses import Bernoulli, Gaussian, Loss
from covey.objective.theory import Probabilities
from covey.solvers import minimise
from covey.solvers.first_order.schedule import Schedule


@dataclass
class Client:
    """What a straightforward implementation would hold for each client."""

    X: Floats
    y: Floats
    gamma: float
    cluster: int
    theta: Floats
    logistic: bool

    def gradient(self) -> Floats:
        margin = self.X @ self.theta
        mean = 1 / (1 + np.exp(-margin)) if self.logistic else margin
        return self.X.T @ (mean - self.y)


def plain(data: GroupedData, loss: Loss, penalty: Penalty, p: float, eta: float, iterations: int) -> Floats:
    tree, ptr, k = data.hierarchy, data.client_ptr, data.n_clusters
    clients = [
        Client(data.X[ptr[i] : ptr[i + 1]], data.y[ptr[i] : ptr[i + 1]], float(penalty.gamma[i]), int(tree.parent[i]),
               np.zeros(data.n_terms), loss.name == "bernoulli")
        for i in range(data.n_clients)
    ]  # fmt: skip
    alpha = penalty.alpha
    heads = Schedule(Probabilities(p, np.zeros(k), np.ones(k)), 0).choices(0, iterations).between
    for head in heads:
        if head:
            total, weight = np.zeros((k, data.n_terms)), np.zeros(k)
            for client in clients:
                total[client.cluster] += client.gamma * client.theta
                weight[client.cluster] += client.gamma
            means = total / weight[:, None]
            whole = (alpha * weight) @ means / (alpha * weight).sum()
            centres = alpha[:, None] * whole + (1 - alpha)[:, None] * means
            for client in clients:
                client.theta = client.theta - eta * client.gamma / p * (client.theta - centres[client.cluster])
        else:
            for client in clients:
                client.theta = client.theta - eta / (1 - p) * client.gradient()
    return np.array([client.theta for client in clients])


def compare(
    name: str, data: GroupedData, loss: Loss, penalty: Penalty, p: float, eta: float, ours: int, theirs: int, mu: float
) -> float:
    shape = f"{data.n_clients:,} clients, d = {data.n_terms}, {data.n_rows:,} rows"
    answer: dict[str, Floats] = {}

    def covey(iterations: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fit = minimise(
                data, loss, penalty, solver="one_coin", p=p, eta=eta, mu=mu, tol=0.0, max_iter=iterations, every=iterations
            )
        answer["covey"] = fit.theta

    def loop() -> None:
        answer["loop"] = plain(data, loss, penalty, p, eta, theirs)

    covey(theirs)  # warm-up: compiled kernels come from the cache
    slow = seconds(loop) / theirs
    error = float(np.abs(answer["loop"] - answer["covey"]).max())
    fast = min(seconds(lambda: covey(ours)) for _ in range(3)) / ours
    print(f"{name}: {shape}, {ours:,} iterations")
    print(f"  loop over clients {1e3 * slow:.3f} ms an iteration, covey {1e3 * fast:.4f} ms, iterates within {error:.1e}")
    if error > 1e-9:
        raise SystemExit("the iterates differ")
    print(f"  ratio {slow / fast:.0f}")
    return slow / fast


drawn = simulate(clusters=20, clients=20, rows=10, d=20, seed=0).data
first = compare("paper's simulation", drawn, Gaussian(), Penalty.of(drawn.hierarchy), 0.1, 1e-4, 50_000, 50_000, 0.1)
drawn = simulate(
    "bernoulli", clusters=5, clients=5898, rows=22, d=3, wbar=[-2.8, 0.3, -0.3], cluster_sd=0.2, client_sd=0.4,
    intercept=True, equal_rows=False, seed=0,
).data  # fmt: skip
second = compare("logistic", drawn, Bernoulli(), Penalty.of(drawn.hierarchy, 6.25, 25.0), 0.1, 1e-3, 1_000, 50, 0.1)
print(f"ratio {min(first, second):.0f} (target >= 100)")
