"""The paper's simulation (20 clusters x 20 clients, d = 20) with estimated penalties instead of the true ones."""

from __future__ import annotations

import numpy as np
import pytest

from covey import Penalty
from covey.datasets import simulate
from covey.losses import Gaussian
from covey.solvers import minimise
from covey.variance.estimate import estimate
from covey.variance.parameters import Shape
from tests.networks import in_memory

ALL = tuple(range(20))


@pytest.mark.parametrize("rows", [5, 10, 25])
def test_estimated_penalties_lose_at_most_a_hundredth_of_the_error(rows):
    lost = []
    for seed in range(3):
        drawn = simulate(clusters=20, clients=20, rows=rows, d=20, seed=seed)
        known = minimise(drawn.data, Gaussian(), Penalty.of(drawn.data.hierarchy, gamma=1.0, lam=1.0))
        fit, learned = estimate(in_memory(drawn.data, Gaussian()), Shape(ALL, ALL, "isotropic", "isotropic"))
        errors = [np.linalg.norm(theta - drawn.theta, axis=1).mean() for theta in (fit.theta, known.theta)]
        lost.append(errors[0] / errors[1] - 1)
        assert learned.components.client.sd[0, 0] == pytest.approx(1.0, abs=0.1)
    assert np.mean(lost) < 0.01
