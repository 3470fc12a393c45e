"""Simulate data from the hierarchical model of equation 5.1 (hlm) in arXiv:2204.13619, with any family of responses.

w_j = wbar + N(0, cluster_sd^2 I)    theta_i = w_j + N(0, client_sd^2 I)    y given x'theta_i from the family
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
    """Rows ``X (N, d)``, ``y``, ``client`` and ``cluster (N,)``, and the coefficients that generated them.

    The true coefficients are ``theta (n, d)`` of clients, ``w (k, d)`` of clusters and ``wbar (d,)``. Ids count from 0.
    """

    X: Floats
    y: Floats
    client: Ints
    cluster: Ints
    theta: Floats
    w: Floats
    wbar: Floats

    @property
    def data(self) -> GroupedData:
        """The rows in the form that solvers take."""
        return GroupedData.from_arrays(self.X, self.y, self.client, self.cluster)

    def frame(self) -> pl.DataFrame:
        """The rows as a table with columns ``client``, ``cluster``, ``y``, ``x0``, ``x1``, ..."""
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
    """Simulate ``clusters`` clusters with ``clients`` clients each.

    Parameters
    ----------
    family : "gaussian", "bernoulli", "poisson" or "gamma"
    noise_sd : residual standard deviation of a Gaussian response; coefficient of variation of a gamma response
    rows : rows of each client; with ``equal_rows=False`` their mean, and each client has at least one
    d : number of coefficients
    wbar : the global coefficients, one number or ``d`` numbers
    cluster_sd, client_sd : standard deviation of clusters around the global model and of clients around their cluster
    intercept : whether the first column of ``X`` is 1; the other columns are standard normal
    equal_rows : whether all clients have the same number of rows
    seed : a whole number or a generator

    Returns
    -------
    Simulation

    Examples
    --------
    >>> drawn = simulate("poisson", clusters=3, clients=4, rows=5, d=2, client_sd=0.3, cluster_sd=0.3, seed=1)
    >>> drawn.X.shape, drawn.theta.shape, drawn.data.n_clusters
    ((60, 2), (12, 2), 3)
    """
    loss = loss_of(family)
    if min(clusters, clients, d) < 1 or rows < 1:
        raise DataError(f"A simulation needs clusters, clients, rows and d >= 1; got {clusters}, {clients}, {rows:g} and {d}.")
    if min(cluster_sd, client_sd, noise_sd) < 0:
        raise DataError(f"Standard deviations must be >= 0; got {cluster_sd:g}, {client_sd:g} and {noise_sd:g}.")
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
