"""The search on functions with a minimum in closed form, and on difficult ones."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from scipy.optimize import rosen, rosen_der, rosen_hess

from covey import GroupedData
from covey.losses import loss_of
from covey.variance.estimate import estimate
from covey.variance.parameters import Shape
from covey.variance.search import minimise
from tests.conftest import seeds
from tests.networks import in_memory


def valley(x):
    return float(rosen(x)), rosen_der(x)


def minimise_of(function, *given, calls=None, **settings):
    """Minimise a function of one point; ``calls`` gets the number of points of each call."""

    def at(points):
        if calls is not None:
            calls.append(len(points))
        return [function(x) for x in points]

    return minimise(at, *given, **settings)


@given(seeds)
def test_a_quadratic_in_any_units(seed):
    rng = np.random.default_rng(seed)
    p = int(rng.integers(1, 7))
    root, centre, units = rng.normal(size=(p, p)), rng.normal(size=p), 10.0 ** rng.uniform(-6, 6, size=p)
    H = (root @ root.T + np.eye(p)) / (units[:, None] * units)
    best = minimise_of(lambda x: (float(0.5 * (x - units * centre) @ H @ (x - units * centre)), H @ (x - units * centre)),
                    np.zeros(p), np.diag(H))  # fmt: skip
    assert best.converged
    np.testing.assert_allclose(best.x / units, centre, atol=1e-4)
    np.testing.assert_allclose(best.hessian * units * units[:, None], root @ root.T + np.eye(p), rtol=1e-4, atol=1e-4)


def test_a_curved_valley_and_the_hessian_at_its_minimum():
    best = minimise_of(valley, np.array([-1.2, 1.0, -0.5]), np.full(3, 200.0))
    assert best.converged
    np.testing.assert_allclose(best.x, 1.0, atol=2e-4)
    np.testing.assert_allclose(best.hessian, rosen_hess(np.ones(3)), rtol=2e-2)
    assert best.value == pytest.approx(0.0, abs=1e-8)


def test_the_decrement_bounds_the_distance_to_the_minimum():
    """The decrement estimates the difference to the minimum, which is zero."""
    best = minimise_of(valley, np.array([-1.2, 1.0]), np.full(2, 200.0))
    assert best.converged
    assert 0 <= best.value <= 2 * best.decrement + 1e-12


def test_a_saddle_is_left():
    """The start is on its stable side, where a search by gradients alone would stop."""
    best = minimise_of(
        lambda x: (float(x[0] ** 2 + (x[1] ** 2 - 1) ** 2), np.array([2 * x[0], 4 * x[1] * (x[1] ** 2 - 1)])),
        np.array([1.0, 1e-7]),
        np.ones(2),
    )
    assert best.converged
    assert abs(best.x[1]) == pytest.approx(1.0, abs=1e-4)


def test_a_function_without_minimum_never_converges():
    best = minimise_of(lambda x: (float(-x.sum()), -np.ones(2)), np.zeros(2), np.ones(2))
    assert not best.converged


def test_points_with_infinite_or_nan_values_are_avoided():
    def walled(x):
        if x[0] > 2.0:
            return np.nan, np.full(1, np.nan)
        return float((x[0] - 1.9) ** 2), 2 * (x - 1.9)

    best = minimise_of(walled, np.array([-30.0]), np.array([0.1]))
    assert best.converged
    assert best.x[0] == pytest.approx(1.9, abs=1e-4)


def test_a_flat_direction_does_not_prevent_convergence():
    """The factor of a singular covariance has flat directions, because only its square matters."""
    best = minimise_of(lambda x: (float((x[0] - 3) ** 2), np.array([2 * (x[0] - 3), 0.0])), np.zeros(2), np.ones(2))
    assert best.converged
    assert best.x == pytest.approx([3.0, 0.0], abs=1e-6)


def test_nothing_to_search_takes_one_evaluation():
    calls = []
    best = minimise_of(lambda x: (5.0, np.empty(0)), np.empty(0), np.empty(0), calls=calls)
    assert (best.value, best.converged, calls) == (5.0, True, [1])


def test_progress_is_called_for_every_evaluation():
    calls, reports = [], []
    minimise_of(valley, np.array([-1.2, 1.0]), np.full(2, 200.0), calls=calls, progress=lambda *report: reports.append(report))
    assert [report[0] for report in reports] == list(range(1, sum(calls) + 1))


def test_many_parameters_need_no_hessian_by_differences():
    p = 250
    curve, centre = np.linspace(1, 50, p), np.linspace(-1, 1, p)
    calls = []
    best = minimise_of(
        lambda x: (float(0.5 * curve @ (x - centre) ** 2), curve * (x - centre)), np.zeros(p), curve, calls=calls
    )
    assert best.converged
    np.testing.assert_allclose(best.x, centre, atol=1e-3)
    assert sum(calls) < p


def test_the_points_of_a_hessian_are_evaluated_together():
    calls = []
    minimise_of(valley, np.array([-1.2, 1.0, -0.5]), np.full(3, 200.0), calls=calls)
    assert set(calls) == {1, 3}
    assert calls.count(3) < calls.count(1)


def years(seed, family="gaussian"):
    """Rows of clients in the years 2000 to 2010, about half of the seeds with slopes that vary."""
    rng = np.random.default_rng(seed)
    i = np.repeat(np.arange(40), 6)
    year = rng.integers(2000, 2011, len(i)).astype(float)
    margin = 0.1 * (year - 2005) + rng.normal(size=40)[i] + 0.1 * (seed % 2) * rng.normal(size=40)[i] * (year - 2005)
    y = loss_of(family).draw(margin, rng)
    return GroupedData.from_arrays(
        np.stack([np.ones(len(i)), year], axis=1), y, i, np.zeros(len(i)), terms=["Intercept", "year"]
    )


@pytest.mark.parametrize("seed", range(24))
def test_uncorrelated_effects_of_years_converge_and_are_not_worse_than_their_null_models(seed):
    """The two variances are determined in their sum only, which a search in standard deviations follows along an arc."""
    data, loss = years(seed), loss_of("gaussian")
    fit, learned = estimate(in_memory(data, loss), Shape((0, 1), ()))
    assert fit.convergence.converged
    assert fit.convergence.iterations < 120
    for null in (Shape((0,), ()), Shape((1,), ())):
        smaller = estimate(in_memory(data, loss), null)[1]
        assert learned.components.log_likelihood > smaller.components.log_likelihood - 1e-6


def test_uncorrelated_effects_of_years_in_counts():
    data, loss = years(3, "poisson"), loss_of("poisson")
    fit, learned = estimate(in_memory(data, loss), Shape((0, 1), ()))
    assert fit.convergence.converged
    for null in (Shape((0,), ()), Shape((1,), ())):
        assert learned.components.log_likelihood > estimate(in_memory(data, loss), null)[1].components.log_likelihood - 1e-6
