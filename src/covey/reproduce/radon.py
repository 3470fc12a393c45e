"""The fits of ``covey demo``: home radon by county and state."""

from __future__ import annotations

import numpy as np

from covey._typing import Floats
from covey.fitting.fit import fit
from covey.fitting.selection import locally_trained
from covey.model.model import Model
from covey.nodes.network import InMemory
from covey.problem.problem import Problem
from covey.tables.rows import GroupedData


def fit_all(data: GroupedData, problem: Problem) -> tuple[Model, Floats]:
    """The model of all rows, and the local estimate ``(n, d)`` of each client: NaN if its rows do not determine every term."""
    model = fit(InMemory.of(data, problem.loss), problem)
    local = locally_trained(data, problem.loss).theta
    determined = problem.loss.strong_convexity(data) > 0
    return model, np.where(determined[:, None], local, np.nan)


def typical_clients(model: Model, local: Floats, count: int = 8) -> list[int]:
    """Clients from the smallest to the largest, among those with a local estimate."""
    determined = np.flatnonzero(np.isfinite(local).all(axis=1))
    by_size = determined[np.argsort(model.rows[determined], kind="stable")]
    return [int(i) for i in by_size[np.linspace(0, len(by_size) - 1, count).round().astype(int)]]
