"""Centring columns that are far from zero does not change the model."""

from __future__ import annotations

import numpy as np
import pytest

from covey import GroupedData
from covey.losses import loss_of
from covey.variance.estimate import estimate
from covey.variance.parameters import Shape
from tests.networks import in_memory

FULL = Shape((0, 1), (), "full", "full")


def years(family, shift):
    rng = np.random.default_rng(0)
    client = np.repeat(np.arange(30), 15)
    t = rng.integers(0, 12, len(client)).astype(float)
    margin = 0.7 * rng.normal(size=30)[client] + (0.15 * rng.normal(size=30)[client] + 0.1) * (t - 6) + 1
    y = loss_of(family).draw(margin, rng)
    return GroupedData.from_arrays(np.column_stack([np.ones_like(t), t + shift]), y, client, terms=["Intercept", "t"])


@pytest.mark.parametrize("family", ["gaussian", "bernoulli", "poisson"])
@pytest.mark.parametrize("shift", [2000.0, 1e5])
def test_calendar_years_give_the_fit_of_years_since_the_first(family, shift):
    near, far = (estimate(in_memory(years(family, by), loss_of(family)), FULL) for by in (0.0, shift))
    assert far[0].convergence.converged
    assert far[1].components.log_likelihood == pytest.approx(near[1].components.log_likelihood, abs=1e-5)
    forth = np.array([[1.0, shift], [0.0, 1.0]])
    np.testing.assert_allclose(far[0].theta @ forth.T, near[0].theta, atol=1e-3)
    own = forth @ far[1].components.client.covariance[0] @ forth.T
    np.testing.assert_allclose(own, near[1].components.client.covariance[0], rtol=2e-2, atol=1e-3)
    ours, theirs = (np.sqrt(each[1].covariance[1, 1]) for each in (far, near))
    assert ours == pytest.approx(theirs, rel=2e-3)


@pytest.mark.parametrize("shift", [72.0, 2000.0])
def test_a_far_column_that_does_not_vary_keeps_the_standard_error_of_the_intercepts_sd(shift):
    """Centring such a column changes the global intercept, not the variance of the clients' intercepts."""
    near, far = (
        estimate(in_memory(years("gaussian", by), loss_of("gaussian")), Shape((0,), ()))[1].components.client
        for by in (0.0, shift)
    )
    assert np.isfinite(near.sd_error).all()
    np.testing.assert_allclose(far.sd, near.sd, rtol=1e-6)
    np.testing.assert_allclose(far.sd_error, near.sd_error, rtol=1e-4)


def test_a_far_column_that_varies_gives_no_standard_error_of_the_intercepts_sd():
    level = estimate(in_memory(years("gaussian", 2000.0), loss_of("gaussian")), FULL)[1].components.client
    assert np.isnan(level.sd_error).tolist() == [[True, False]]


def test_sums_and_intervals_are_in_the_users_units():
    data = years("gaussian", 2000.0)
    _, learned = estimate(in_memory(data, loss_of("gaussian")), FULL)
    gram = np.einsum("la,lb->ab", data.X, data.X)
    np.testing.assert_allclose(learned.units.C.sum(axis=0), gram, rtol=1e-9)
    slope = data.X.T @ (data.y - data.X @ learned.origin)
    np.testing.assert_allclose(learned.units.r.sum(axis=0), slope, atol=1e-4)
