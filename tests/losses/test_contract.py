"""Every promise of the base class, on every registered family."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from covey import GroupedData, Penalty
from covey.errors import CoveyError
from covey.losses import FAMILIES, Loss, loss_of
from covey.solvers import minimise

NAMES = [name for name, family in FAMILIES.items() if family.compiled.fget(family()) and family.likelihood]
MARGINS = np.linspace(-3.0, 3.0, 61)


@pytest.fixture(params=NAMES)
def loss(request) -> Loss:
    return loss_of(request.param)


@pytest.fixture
def y(loss):
    return loss.draw(MARGINS, np.random.default_rng(1), 0.5)


def grouped(loss, clients=40, rows=25, weighted=False):
    rng = np.random.default_rng(2)
    client = np.repeat(np.arange(clients), rows)
    X = np.column_stack([np.ones(len(client)), 0.5 * rng.normal(size=len(client))])
    y = loss.draw(X @ [0.4, -0.3], rng, 0.25)
    weights = rng.uniform(0.5, 2.0, size=len(y)) if weighted else None
    return GroupedData.from_arrays(X, y, client, client // 4, weights=weights)


def place(row):
    return f"row {row}"


def test_families_that_come_with_covey_are_tested():
    assert set(NAMES) >= {"gaussian", "bernoulli", "poisson", "gamma"}


def test_derivatives_are_those_of_the_value(loss, y):
    h = 1e-4
    for value, slope in ((loss.values, loss.slopes), (loss.slopes, loss.curvatures), (loss.curvatures, loss.thirds)):
        difference = (value(MARGINS + h, y) - value(MARGINS - h, y)) / (2 * h)
        np.testing.assert_allclose(slope(MARGINS, y), difference, rtol=1e-5, atol=1e-6)


def test_bounds_hold(loss, y):
    low, high = loss.curvature
    wide = 30 * MARGINS
    second, third = loss.curvatures(wide, y), loss.thirds(wide, y)
    assert (second >= low).all()
    assert (second <= high).all()
    assert (np.abs(third) <= loss.third_per_second * second * (1 + 1e-12)).all()
    assert loss.quadratic == (low == high)
    assert loss.bounded == np.isfinite(high)
    assert not loss.reml or loss.quadratic


def test_the_mean_is_that_of_what_is_drawn_and_minimises_the_loss(loss):
    for margin in (-1.0, 0.3, 1.2):
        drawn = loss.draw(np.full(200_000, margin), np.random.default_rng(3), 0.5)
        mean = float(loss.mean(np.array([margin]))[0])
        assert drawn.mean() == pytest.approx(mean, abs=5 * drawn.std() / np.sqrt(len(drawn)))
        # The expected slope at the true margin is zero.
        slopes = loss.slopes(np.full(len(drawn), margin), drawn)
        assert slopes.mean() == pytest.approx(0.0, abs=5 * slopes.std() / np.sqrt(len(drawn)))


def test_the_dispersion_is_that_of_what_is_drawn(loss):
    few, many = (loss.draw(np.full(50_000, 0.7), np.random.default_rng(3), phi).var() for phi in (0.25, 1.0))
    assert many / few == pytest.approx(4.0 if loss.dispersion else 1.0, rel=0.1)
    assert loss.residual(np.array([2.0]), 0.25) > 0
    assert loss.dispersion_text(0.25)


def test_what_is_drawn_is_accepted(loss, y):
    loss.check_values(y, place)
    loss.check(y, place)
    loss.check_total(float(y.sum()))


@pytest.mark.parametrize(
    ("name", "wrong"), [("bernoulli", [0.0, 1.0, 2.0]), ("poisson", [1.0, 0.0, -2.0]), ("gamma", [1.0, 2.0, 0.0])]
)
def test_impossible_responses_are_refused_by_row_and_value(name, wrong):
    with pytest.raises(CoveyError, match="row 2") as told:
        loss_of(name).check(np.array(wrong), place)
    assert f"{wrong[2]:g}" in str(told.value)
    assert name in str(told.value)


@pytest.mark.parametrize("name", ["bernoulli", "poisson"])
def test_responses_that_teach_nothing_are_refused(name):
    loss = loss_of(name)
    loss.check_values(np.zeros(3), place)
    with pytest.raises(CoveyError, match="every row"):
        loss.check(np.zeros(3), place)
    if name == "poisson":
        with pytest.raises(CoveyError, match="every site"):
            loss.check_total(0.0)


@pytest.mark.parametrize("weighted", [False, True])
def test_perfect_is_the_lowest_value(loss, weighted):
    data = grouped(loss, weighted=weighted)
    lowest = loss.perfect(data)
    weights = np.ones(data.n_rows) if data.weights is None else data.weights
    tried = np.array([weights * loss.values(np.full(data.n_rows, m), data.y) for m in np.linspace(-60, 60, 4001)])
    found = np.add.reduceat(tried.min(axis=0), data.client_ptr[:-1])
    assert (lowest <= found + 1e-9 * (1 + np.abs(found))).all()
    np.testing.assert_allclose(lowest, found, rtol=5e-3, atol=2e-2)


def test_the_constant_completes_the_likelihood(loss):
    """Summed over all counts, or integrated over all responses, the density is 1."""
    if not loss.dispersion:
        values = np.arange(2.0 if loss.two_classes else 60.0)
        step = 1.0
    elif loss.reml:
        return  # the linear model's likelihood is in variance/linear_likelihood.py
    else:
        values, step = np.linspace(1e-4, 60.0, 600_001), 60.0 / 600_000
    at = GroupedData.from_arrays(np.ones((1, 1)), [1.0])
    margin = np.full(len(values), 0.4)
    constants = np.array([loss.constant(replace(at, y=np.array([y]))) for y in values[:: max(1, len(values) // 60)]])
    if loss.dispersion:
        shape = 4.0
        lowest = np.array([loss.perfect(replace(at, y=np.array([y])))[0] for y in (1.0, 2.0)])
        assert lowest[1] - lowest[0] == pytest.approx(np.log(2.0))
        # The dispersion at which the profile is taken is the best, whatever the objective.
        value, phi = loss.profile(10.0, 5.0, 4.0)
        assert 0 < phi < np.inf
        from scipy.special import gammaln

        def density_part(a):
            return a * 6.0 + 5.0 * (a - a * np.log(a) + gammaln(a))

        assert value == pytest.approx(density_part(1 / phi))
        assert value <= min(density_part(a) for a in np.geomspace(0.5 / phi, 2 / phi, 101)) + 1e-12
        log_density = -shape * (loss.values(margin, values) - 1 - np.log(values))
        log_density -= shape - shape * np.log(shape) + gammaln(shape) + np.log(values)
        assert np.exp(log_density).sum() * step == pytest.approx(1.0, abs=1e-4)
    else:
        total = np.exp(-loss.values(margin, values) - constants).sum()
        assert total == pytest.approx(1.0, abs=1e-9)


def test_the_linear_start_is_near(loss):
    """Newton begins near its end: the mean loss at the working response is close to the lowest."""
    data = grouped(loss)
    linear = loss.working_response(data)
    assert (linear is not None) == loss.linear_start
    if linear is None:
        return
    assert linear.offset is None
    shifted = replace(data, offset=np.full(data.n_rows, 0.7))
    np.testing.assert_allclose(loss.working_response(shifted).y, linear.y - 0.7)
    one = np.array([[np.average(linear.y, weights=linear.weights), 0.0]] * data.n_clients)
    assert loss.value(data, one).sum() < loss.value(data, np.zeros_like(one)).sum()


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("ridge", [0.0, 0.3])
def test_newton_finds_a_point_without_slope(loss, reduction, ridge):
    data, own = grouped(loss, weighted=True), replace(loss, reduction=reduction, ridge=ridge)
    penalty = Penalty.of(data.hierarchy, gamma=2.0, lam=1.0)
    fit = minimise(data, own, penalty, solver="newton", tol=1e-9)
    assert fit.convergence.converged
    slope = own.gradient(data, fit.theta) + 2.0 * (fit.theta - fit.w[data.hierarchy.parent])
    assert np.abs(slope).max() < 1e-7


def test_errors_are_zero_for_perfect_predictions_and_positive_else(loss):
    data = grouped(loss)
    best = float(loss.perfect(data).sum() / data.n_rows)
    assert loss.error(best, data) == pytest.approx(0.0, abs=1e-7)
    assert loss.error(best + 0.5, data) > 0.4


def test_intervals_of_new_responses_cover(loss):
    rows, rng = 20_000, np.random.default_rng(4)
    if loss.two_classes:
        with pytest.raises(CoveyError, match="noise"):
            loss.response_interval(np.zeros(2), np.ones(2), np.full(2, 1.96), 0.95, np.ones(2))
        return
    for sd, phi, centre in ((0.0, 0.25, 1.0), (0.3, 0.25, 2.0), (1.0, 0.01, 3.0), (0.5, 2.0, 3.0)):
        margin = np.full(rows, centre)
        one = loss.response_interval(margin[:1], np.full(1, sd**2), np.full(1, 1.2815515655446004), 0.8, np.full(1, phi))[0]
        drawn = loss.draw(margin + sd * rng.standard_normal(rows), rng, phi)
        below, above = (drawn < one[0]).mean(), (drawn > one[1]).mean()
        assert below <= 0.1 + 0.01
        assert above <= 0.1 + 0.01
        if loss.dispersion:  # counts are coarse, so that their intervals cover more
            assert below == pytest.approx(0.1, abs=0.01)
            assert above == pytest.approx(0.1, abs=0.01)


def test_it_is_described(loss):
    assert loss.title
    assert loss.error_name
    assert loss.private_rounds >= 1
    assert loss.compiled
    assert loss.likelihood
    assert type(loss).__doc__
