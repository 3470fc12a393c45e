"""The demonstration: mean home radon of each county by itself, by its state's model and by its personalised model."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from covey._typing import Floats, Ints
from covey.model.model import Model
from covey.tables.rows import GroupedData


@dataclass(frozen=True)
class Shrinkage:
    """Mean response of each client at its own average covariates, estimated in three ways, ``(n,)`` each.

    The rows of a client determine this mean, whatever covariates they have. They need not determine a coefficient: a county
    with 15 basements among 664 homes says little about its level in basements.

    Attributes
    ----------
    model : the fitted model
    alone : the mean of the client's own responses, which is what its own least-squares fit gives
    cluster : by the cluster's coefficients
    personalised : by the client's coefficients
    """

    model: Model
    alone: Floats
    cluster: Floats
    personalised: Floats

    @classmethod
    def of(cls, data: GroupedData, model: Model) -> Shrinkage:
        """Estimate the means for the rows that a linear model was fitted to."""
        start, rows = data.client_ptr[:-1], model.rows
        averages = np.add.reduceat(data.X, start) / rows[:, None]
        by_cluster, by_client = (
            (averages * coefficients).sum(axis=1) for coefficients in (model.w[model.hierarchy.parent], model.theta)
        )
        return cls(model, np.add.reduceat(data.y, start) / rows, by_cluster, by_client)

    @property
    def moved(self) -> Floats:
        """How far the estimate moves from that of the client alone to that of its cluster: 0 not at all, 1 all the way."""
        return (self.alone - self.personalised) / (self.alone - self.cluster)

    def typical(self, count: int = 8, apart: float = 0.15) -> Ints:
        """Clients from the fewest rows to the most, of those that alone are more than ``apart`` from their cluster."""
        chosen = np.flatnonzero(np.abs(self.alone - self.cluster) > apart)
        by_size = chosen[np.argsort(self.model.rows[chosen], kind="stable")]
        return np.asarray(by_size[np.linspace(0, len(by_size) - 1, count).round().astype(int)])
