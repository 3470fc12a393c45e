"""Simulated hierarchies of any size, from the model the objective comes from (PAPER.md, sections 1 and 4).

w_j = wbar + N(0, cluster_sd^2 I)    theta_i = w_j + N(0, client_sd^2 I)    y | x'theta_i from the family
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from covey._typing import Floats, Ints
from covey.errors import DataError
from covey.losses import loss_of
from covey.tables.rows import GroupedData


@dataclass(frozen=True)
class Simulation:
    """Rows and the truth behind them: ``theta (n, d)``, ``w (k, d)``, ``wbar (d,)``; ids count from 0."""

    X: Floats
    y: Floats
    client: Ints
    cluster: Ints
    theta: Floats
    w: Floats
    wbar: Floats

    @property
    def data(self) -> GroupedData:
        """Ready for a solver."""
        return GroupedData.from_arrays(self.X, self.y, self.client, self.cluster)

    def frame(self) -> pl.DataFrame:
        """As a table with columns ``client``, ``cluster``, ``y``, ``x0``, ``x1``, ..."""
        columns: dict[str, Any] = {"client": self.client, "cluster": self.cluster, "y": self.y}
        return pl.DataFrame({**columns, **{f"x{a}": self.X[:, a] for a in range(self.X.shape[1])}})


def simulate(
    family: str = "gaussian",
    *,
    clusters: int = 20,
    clients: int = 20,
    rows: float = 10,
    d: int = 3,
    wbar: Any = 0.0,
    cluster_sd: float = 1.0,
    client_sd: float = 1.0,
    noise_sd: float = 1.0,
    intercept: bool = False,
    equal_rows: bool = True,
    seed: int | np.random.Generator = 0,
) -> Simulation:
    """Draw a hierarchy of ``clusters`` x ``clients`` clients and their rows.

    Parameters
    ----------
    family : "gaussian", "bernoulli", "poisson" or "gamma"
    noise_sd : residual standard deviation of a Gaussian response, coefficient of variation of a gamma one
    rows : rows of each client; with ``equal_rows=False`` their mean, at least one each
    d : number of coefficients; ``X`` is standard normal, its first column 1 with ``intercept``
    wbar : the global coefficients, a number or ``d`` of them

    >>> drawn = simulate("poisson", clusters=3, clients=4, rows=5, d=2, client_sd=0.3, cluster_sd=0.3, seed=1)
    >>> drawn.X.shape, drawn.theta.shape, drawn.data.n_clusters
    ((60, 2), (12, 2), 3)
    """
    loss = loss_of(family)
    if min(clusters, clients, d) < 1 or rows < 1:
        raise DataError("A simulation needs at least one cluster, client, row and coefficient.")
    if min(cluster_sd, client_sd, noise_sd) < 0:
        raise DataError("Standard deviations must be >= 0.")
    rng = np.random.default_rng(seed)
    n = clusters * clients
    centre = np.broadcast_to(np.asarray(wbar, dtype=np.float64), (d,)).copy()
    w = centre + cluster_sd * rng.standard_normal((clusters, d))
    parent = np.repeat(np.arange(clusters), clients)
    theta = w[parent] + client_sd * rng.standard_normal((n, d))
    counts = np.full(n, int(rows)) if equal_rows else 1 + rng.negative_binomial(1.5, 1.5 / (0.5 + rows), size=n)
    client = np.repeat(np.arange(n), counts)
    X = rng.standard_normal((len(client), d))
    if intercept:
        X[:, 0] = 1.0
    margin = np.einsum("ld,ld->l", X, theta[client])
    y = loss.draw(margin, rng, noise_sd**2)
    return Simulation(X, y, client, parent[client], theta, w, centre)
