"""Methods that covey's solvers are compared with. They are baselines of a study, in plain numpy, and no solvers for users.

    nesterov    Nesterov's accelerated gradient method on the whole objective, with its constants known
    permfl      PerMFL of Banerjee, Dadras, Yurtsever and Bhuyan (2024), arXiv:2407.14251: devices in teams
    fedavg      FedAvg of McMahan et al. (2017), arXiv:1602.05629, with fine-tuning of its model at each client

Only ``nesterov`` minimises covey's objective. The objective of PerMFL is ``mean over teams of min over w of ( mean over devices
of min over theta of f(theta) + lambda/2 |theta - w|^2 ) + gamma/2 |w - x|^2``. It has the same minimiser as covey's if all
clusters have ``N`` clients, all clients the penalty ``lambda``, and all clusters the penalty ``gamma N``; else it has another,
because every team counts the same. FedAvg minimises no such objective.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from covey._typing import Floats
from covey.objective.objective import Objective


def nesterov(objective: Objective, *, L: float, mu: float) -> Iterator[Floats]:
    """The clients' coefficients after each exchange, from zero; the objective is ``L``-smooth and ``mu``-strongly convex.

    Nesterov (2004), Introductory Lectures on Convex Optimization, scheme 2.2.22. A gradient needs the sums of all clients.
    """
    theta = ahead = np.zeros((objective.data.n_clients, objective.data.n_terms))
    beta = (1 - math.sqrt(mu / L)) / (1 + math.sqrt(mu / L))
    while True:
        before, theta = theta, ahead - objective.gradient(ahead) / L
        ahead = theta + beta * (theta - before)
        yield theta


def permfl(
    objective: Objective, *, lam: float, gamma: float, alpha: float, eta: float, beta: float, K: int, steps: int
) -> Iterator[Floats]:
    """The devices' coefficients after each global round, from zero, by the update rules of Algorithm 1 of PerMFL.

    ``lam`` ties devices to teams and ``gamma`` teams to the server. ``alpha``, ``eta`` and ``beta`` are the steps of devices,
    teams and server. A global round has ``K`` exchanges within teams, each after ``steps`` steps of every device.
    """
    data, tree = objective.data, objective.data.hierarchy
    x, theta = np.zeros(data.n_terms), np.zeros((data.n_clients, data.n_terms))
    while True:
        w = np.tile(x, (data.n_clusters, 1))
        for _ in range(K):
            theta = start = tree.down(w)
            for _ in range(steps):
                theta = theta - alpha * (objective.loss.gradient(data, theta) + lam * (theta - start))
            w = (1 - eta * (lam + gamma)) * w + eta * gamma * x + eta * lam * tree.mean_up(theta, np.ones(data.n_clients))
        x = (1 - beta * gamma) * x + beta * gamma * w.mean(axis=0)
        yield theta


def fedavg(objective: Objective, *, eta: float, steps: int) -> Iterator[Floats]:
    """The global model ``(d,)`` after each exchange, from zero: local gradient steps, then an average weighted by rows."""
    data = objective.data
    x, share = np.zeros(data.n_terms), data.rows_per_client / data.n_rows
    while True:
        x = share @ fine_tuned(objective, x, eta=eta, steps=steps)
        yield x


def fine_tuned(objective: Objective, x: Floats, *, eta: float, steps: int) -> Floats:
    """Every client's gradient steps on its own rows from ``x``; ``(n, d)``."""
    theta = np.broadcast_to(x, (objective.data.n_clients, objective.data.n_terms))
    for _ in range(steps):
        theta = theta - eta * objective.loss.gradient(objective.data, theta)
    return np.asarray(theta)
