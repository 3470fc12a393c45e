"""The demonstration: home radon by county in state."""

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
    """The model on all rows, and each client's estimate alone: NaN where its rows do not determine every term."""
    model = fit(InMemory.of(data, problem.loss), problem)
    local = locally_trained(data, problem.loss).theta
    determined = problem.loss.strong_convexity(data) > 0
    return model, np.where(determined[:, None], local, np.nan)


def typical_clients(model: Model, local: Floats, count: int = 8) -> list[int]:
    """Clients from the smallest to the largest, among those with an estimate of their own."""
    known = np.flatnonzero(np.isfinite(local).all(axis=1))
    by_size = known[np.argsort(model.rows[known], kind="stable")]
    return [int(i) for i in by_size[np.linspace(0, len(by_size) - 1, count).round().astype(int)]]
