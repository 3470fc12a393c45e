"""apgd and proxskip against batched numpy for the same iterations: same arithmetic, same random choices. Target: at most 1.0.

Both sides begin with the rows and end with the clients' coefficients. Numpy holds the rows of all clients in one array ``(n, m,
d)``, as a short script would. Both compute the objective at every exchange of apgd. Solutions must agree to 1e-4: the
proximal steps of a logistic loss are inexact on both sides.
"""

from __future__ import annotations

import time
import warnings

import numpy as np

from covey import GroupedData, Penalty
from covey._typing import Floats
from covey.datasets import simulate
from covey.losses import Bernoulli, Gaussian, Loss
from covey.objective.theory import Probabilities
from covey.solvers import minimise
from covey.solvers.first_order.apgd import momentum
from covey.solvers.first_order.protocol import Centres
from covey.solvers.first_order.schedule import Schedule

REPEATS = 3


class Batched:
    """The rows of clients with equally many rows, and what numpy needs of the penalty."""

    def __init__(self, data: GroupedData, loss: Loss, penalty: Penalty) -> None:
        n, m = data.n_clients, int(data.rows_per_client[0])
        self.X, self.y = data.X.reshape(n, m, -1), data.y.reshape(n, m)
        self.logistic, self.tree, self.penalty, self.scale = loss.name == "bernoulli", data.hierarchy, penalty, 1 / m

    def mean(self, theta: Floats) -> Floats:
        margin = np.matmul(self.X, theta[:, :, None])[:, :, 0]
        return 1 / (1 + np.exp(-margin)) if self.logistic else margin

    def gradient(self, theta: Floats) -> Floats:
        return self.scale * np.matmul((self.mean(theta) - self.y)[:, None, :], self.X)[:, 0]

    def value(self, theta: Floats, centre: Floats, tie: float) -> float:
        margin = np.matmul(self.X, theta[:, :, None])[:, :, 0]
        loss = np.logaddexp(0.0, margin) - self.y * margin if self.logistic else 0.5 * (self.y - margin) ** 2
        apart = ((theta - centre[self.tree.parent]) ** 2).sum(axis=1)
        return float(self.scale * loss.sum() + 0.5 * (self.penalty.gamma * apart).sum()) + tie

    def hessian(self, theta: Floats) -> Floats:
        mean = self.mean(theta)
        weight = mean * (1 - mean) if self.logistic else np.ones_like(mean)
        return self.scale * np.matmul(self.X.transpose(0, 2, 1), weight[:, :, None] * self.X)

    def averages(self, weights: Floats, theta: Floats) -> Floats:
        total = np.add.reduceat(weights, self.tree.cluster_ptr[:-1])
        return np.asarray(np.add.reduceat(weights[:, None] * theta, self.tree.cluster_ptr[:-1], axis=0) / total[:, None])


def plain_apgd(at: Batched, exchanges: int) -> Floats:
    gamma, parent, top = at.penalty.gamma[:, None], at.tree.parent, Centres.of(at.penalty)
    theta, k = np.zeros((len(parent), at.X.shape[2])), at.tree.n_clusters
    c, before, t, eye = np.zeros((k, theta.shape[1])), np.zeros((k, theta.shape[1])), 0.0, np.eye(theta.shape[1])
    inverse, linear, values = None, at.gradient(theta), list[float]()
    for exchange in range(exchanges):
        if at.logistic:
            for _ in range(6):
                slope = at.gradient(theta) + gamma * (theta - c[parent])
                theta = theta - np.linalg.solve(at.hessian(theta) + gamma[:, :, None] * eye, slope[:, :, None])[:, :, 0]
        else:
            inverse = np.linalg.inv(at.hessian(theta) + gamma[:, :, None] * eye) if inverse is None else inverse
            theta = np.matmul(inverse, (gamma * c[parent] - linear)[:, :, None])[:, :, 0]
        means = at.averages(at.penalty.gamma, theta)
        v = top.centres(means)[0]
        values.append(at.value(theta, v, top.tie(means)))
        restart = exchange > 0 and float((top.total[:, None] * (c - v) * (v - before)).sum()) > 0
        t, beta = momentum(0.0 if restart else t, 0.0)
        c, before = (v if exchange == 0 else v + beta * (v - before)), v
    return theta


def plain_proxskip(at: Batched, eta: float, p: float, iterations: int) -> Floats:
    k, gamma, parent, s = at.tree.n_clusters, at.penalty.gamma[:, None], at.tree.parent, eta / p
    soft = Penalty.of(at.tree, at.penalty.gamma / (1 + s * at.penalty.gamma), at.penalty.lam)
    top, theta = Centres.of(soft), np.zeros((len(parent), at.X.shape[2]))
    h = np.zeros_like(theta)
    for head in Schedule(Probabilities(p, np.zeros(k), np.ones(k)), 0).choices(0, iterations).between:
        x = theta - eta * (at.gradient(theta) - h)
        theta = x
        if head:
            z = x - s * h
            theta = (z + s * gamma * top.centres(at.averages(soft.gamma, z))[0][parent]) / (1 + s * gamma)
            h = h + (theta - x) / s
    return theta


def compare(name: str, data: GroupedData, loss: Loss) -> float:
    penalty = Penalty.of(data.hierarchy, gamma=1.0, lam=5.0)
    L = float(loss.smoothness(data).max())
    eta, p, iterations, exchanges = 1 / L, 0.1, 1000, 20
    limits = {"tol": 0.0, "max_iter": iterations, "every": iterations, "eta": eta, "p": p, "mu": 0.1, "L": L}
    pairs = {
        "apgd": (
            lambda: minimise(data, loss, penalty, solver="apgd", tol=0.0, max_iter=exchanges).theta,
            lambda: plain_apgd(Batched(data, loss, penalty), exchanges),
        ),
        "proxskip": (
            lambda: minimise(data, loss, penalty, solver="proxskip", **limits).theta,
            lambda: plain_proxskip(Batched(data, loss, penalty), eta, p, iterations),
        ),
    }
    worst = 0.0
    for solver, sides in pairs.items():
        best, answers = [np.inf, np.inf], [np.zeros(0), np.zeros(0)]
        for _ in range(REPEATS):
            for at, side in enumerate(sides):
                start = time.process_time()
                answers[at] = side()
                best[at] = min(best[at], time.process_time() - start)
        error = float(np.abs(answers[0] - answers[1]).max())
        if error > 1e-4:
            raise SystemExit(f"{solver}: the coefficients differ by {error:.1e}")
        print(f"{name}, {solver}: covey {best[0]:.3f} s, numpy {best[1]:.3f} s, ratio {best[0] / best[1]:.2f}")
        worst = max(worst, best[0] / best[1])
    return worst


warnings.simplefilter("ignore")
sizes = {"small": (20, 20, 20, 20), "wide": (10, 30, 50, 60), "many": (20, 500, 20, 4)}
ratios = []
for name, (clusters, clients, rows, d) in sizes.items():
    shape = {"clusters": clusters, "clients": clients, "rows": rows, "d": d, "seed": 0}
    ratios.append(compare(f"{name}, linear", simulate(**shape).data, Gaussian("mean")))
    ratios.append(compare(f"{name}, logistic", simulate("bernoulli", **shape).data, Bernoulli("mean")))
print(f"ratio {max(ratios):.2f} (target <= 1.0)")
