"""Every promise of the base class, on every registered family and, where it applies, on user-defined losses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.special import expit, gammaln

from covey import GroupedData, Penalty
from covey.errors import CoveyError, SolverError
from covey.losses import FAMILIES, Loss, from_functions, loss_of
from covey.solvers import minimise
from tests.networks import strong_convexity

NAMES = list(FAMILIES)
MARGINS = np.linspace(-3.0, 3.0, 61)


def huber():
    return from_functions(
        "huber",
        value=lambda m, y: np.where(np.abs(m - y) <= 1, 0.5 * (m - y) ** 2, np.abs(m - y) - 0.5),
        slope=lambda m, y: np.clip(m - y, -1, 1),
        curvature=lambda m, y: (np.abs(m - y) <= 1).astype(float),
        bounds=(0.0, 1.0),
        start=lambda y: y,
    )


def logit():
    own = loss_of("bernoulli")
    return from_functions("logit", own.values, own.slopes, own.curvatures, own.curvature, mean=own.mean, two_classes=True)


def square():
    return from_functions("square", lambda m, y: (m - y) ** 2, lambda m, y: 2 * (m - y), lambda m, y: 2.0 + 0 * m, (2.0, 2.0))


FUNCTIONS = {"huber": huber, "logit": logit, "square": square}


@pytest.fixture(params=NAMES)
def loss(request) -> Loss:
    """A loss of each family that comes with covey."""
    return loss_of(request.param)


@pytest.fixture(params=[*NAMES, *FUNCTIONS])
def any_loss(request):
    """These, and user-defined losses: with a start, with two classes, and quadratic."""
    before = dict(FAMILIES)
    yield FUNCTIONS[request.param]() if request.param in FUNCTIONS else loss_of(request.param)
    FAMILIES.clear()
    FAMILIES.update(before)


def drawn(loss, margin, rng, dispersion=0.25):
    """Responses: by the family, or similar ones for a loss that is not a likelihood."""
    if loss.likelihood:
        return loss.draw(margin, rng, dispersion)
    if loss.two_classes:
        return (rng.random(len(margin)) < expit(margin)).astype(float)
    return margin + rng.standard_normal(len(margin))


def responses(loss):
    return drawn(loss, MARGINS, np.random.default_rng(1), 0.5)


@pytest.fixture
def y(loss):
    return responses(loss)


def grouped(loss, clients=40, rows=25, weighted=False):
    rng = np.random.default_rng(2)
    client = np.repeat(np.arange(clients), rows)
    X = np.column_stack([np.ones(len(client)), 0.5 * rng.normal(size=len(client))])
    y = drawn(loss, X @ [0.4, -0.3], rng)
    weights = rng.uniform(0.5, 2.0, size=len(y)) if weighted else None
    return GroupedData.from_arrays(X, y, client, client // 4, weights=weights)


def place(row):
    return f"row {row}"


def test_all_families_of_covey_are_tested():
    assert set(NAMES) >= {"gaussian", "bernoulli", "poisson", "gamma"}


def test_derivatives_agree_with_differences(any_loss):
    h, y = 1e-4, responses(any_loss)
    pairs = [(any_loss.values, any_loss.slopes), (any_loss.slopes, any_loss.curvatures)]
    if any_loss.likelihood:
        pairs.append((any_loss.curvatures, any_loss.thirds))
    else:
        with pytest.raises(SolverError, match="third derivative"):
            any_loss.thirds(MARGINS, y)
    # A user-defined loss with a start has a thousandth of a secant added to its curvature, and may have kinks.
    extra = 1.1e-3 if not any_loss.likelihood and any_loss.linear_start else 1e-6
    for value, slope in pairs:
        difference = (value(MARGINS + h, y) - value(MARGINS - h, y)) / (2 * h)
        np.testing.assert_allclose(slope(MARGINS, y), difference, rtol=1e-5, atol=extra)


def test_bounds_hold(any_loss):
    low, high = any_loss.curvature
    wide, y = 30 * MARGINS, responses(any_loss)
    second = any_loss.curvatures(wide, y)
    assert (second >= low).all()
    assert (second <= high * (1.0 if any_loss.likelihood else 1.001)).all()
    if any_loss.likelihood:
        assert (np.abs(any_loss.thirds(wide, y)) <= any_loss.third_per_second * second * (1 + 1e-12)).all()
    else:
        assert any_loss.third_per_second == np.inf
    assert any_loss.quadratic == (low == high)
    assert any_loss.bounded == np.isfinite(high)
    assert not any_loss.reml or any_loss.quadratic


def test_value_gradient_and_hessian_are_sums_over_rows(any_loss):
    data = grouped(any_loss, weighted=True)
    theta = 0.3 * np.random.default_rng(5).normal(size=(data.n_clients, data.n_terms))
    margin, w = data.margin(theta), data.weights
    for reduction, ridge in (("sum", 0.0), ("mean", 0.3)):
        own = replace(any_loss, reduction=reduction, ridge=ridge)
        here, rows = own.expand(data, theta), slice(data.client_ptr[3], data.client_ptr[4])
        X, scale = data.X[rows], 1.0 if reduction == "sum" else 1.0 / w[rows].sum()
        value = scale * (w * own.values(margin, data.y))[rows].sum() + 0.5 * ridge * theta[3] @ theta[3]
        gradient = scale * X.T @ (w * own.slopes(margin, data.y))[rows] + ridge * theta[3]
        hessian = scale * X.T * (w * own.curvatures(margin, data.y))[rows] @ X + ridge * np.eye(2)
        for found, expected in ((here.value, value), (here.gradient, gradient), (here.hessian, hessian)):
            np.testing.assert_allclose(found[3], expected, rtol=1e-9, atol=1e-10)
        np.testing.assert_array_equal(own.value(data, theta), own.expand(data, theta, order=0).value)
        np.testing.assert_array_equal(own.gradient(data, theta), own.expand(data, theta, order=1).gradient)
        assert own.expand(data, theta, order=0).gradient.size == own.expand(data, theta, order=1).hessian.size == 0


def test_bend_is_the_gradient_of_a_trace(any_loss):
    data = grouped(any_loss, clients=3, rows=9, weighted=True)
    rng = np.random.default_rng(6)
    theta, root = 0.3 * rng.normal(size=(3, 2)), rng.normal(size=(3, 2, 2))
    P = root @ root.swapaxes(1, 2)
    if not (any_loss.likelihood or any_loss.quadratic):
        with pytest.raises(SolverError, match="third derivative"):
            any_loss.bend(data, theta, P)
        return

    def trace(point):
        return np.einsum("iab,iba->i", P, any_loss.hessian(data, point))

    for a in range(2):
        step = 1e-5 * np.eye(2)[a]
        difference = (trace(theta + step) - trace(theta - step)) / 2e-5
        np.testing.assert_allclose(any_loss.bend(data, theta, P)[:, a], difference, rtol=1e-5, atol=1e-6)


def test_curvature_of_clients_and_rows_is_within_the_bounds(any_loss):
    data, own = grouped(any_loss, weighted=True), replace(any_loss, reduction="mean", ridge=0.05)
    theta = np.random.default_rng(7).normal(size=(data.n_clients, data.n_terms))
    hessian = own.hessian(data, theta)
    eigenvalues, slack = np.linalg.eigvalsh(hessian), 1.002  # a user-defined loss with a start adds a thousandth
    assert (eigenvalues[:, -1] <= own.smoothness(data) * slack).all()
    assert (eigenvalues[:, 0] * slack >= strong_convexity(own, data)).all()
    assert own.smallest_curvature(hessian) <= eigenvalues.min() * slack
    assert (own.smoothness(data) <= np.maximum.reduceat(own.row_smoothness(data), data.client_ptr[:-1]) * slack).all()
    assert np.isinf(own.smoothness(data)).all() == (not own.bounded)


def test_operands_are_the_arguments_of_a_kernel(any_loss):
    data = grouped(any_loss, weighted=True)
    family, X, y, weights, offset, scale, ridge, ptr = any_loss.operands(data)
    assert family is any_loss if any_loss.code is None else family == any_loss.code
    assert any_loss.compiled == (any_loss.code is not None)
    assert (X is data.X, y is data.y, weights is data.weights, len(offset), ridge) == (True, True, True, 0, 0.0)
    np.testing.assert_array_equal(scale, any_loss.scale(data))
    np.testing.assert_array_equal(ptr, data.client_ptr)


@pytest.mark.parametrize("settings", [{"reduction": "median"}, {"ridge": -1.0}, {"ridge": np.inf}, {"ridge": np.nan}])
def test_settings_out_of_range_are_refused(any_loss, settings):
    with pytest.raises(CoveyError, match=next(iter(settings))):
        replace(any_loss, **settings)


def test_the_mean_is_the_mean_of_draws_and_minimises_the_loss(loss):
    for margin in (-1.0, 0.3, 1.2):
        drawn = loss.draw(np.full(200_000, margin), np.random.default_rng(3), 0.5)
        mean = float(loss.mean(np.array([margin]))[0])
        assert drawn.mean() == pytest.approx(mean, abs=5 * drawn.std() / np.sqrt(len(drawn)))
        # The expected slope at the true margin is zero.
        slopes = loss.slopes(np.full(len(drawn), margin), drawn)
        assert slopes.mean() == pytest.approx(0.0, abs=5 * slopes.std() / np.sqrt(len(drawn)))


def test_the_expected_response_is_an_integral(loss):
    """Against adaptive quadrature, for small and large variances; the default of the base class for moderate ones."""
    margins, sds = np.meshgrid([-12.0, -2.5, 0.0, 0.7, 6.0], [1e-9, 0.3, 0.99, 1.01, 2.5, 6.0])
    margin, sd = margins.ravel(), sds.ravel()

    def integral(m, s):
        def density(z):
            return float(loss.mean(np.array([m + s * z]))[0]) * np.exp(-(z**2) / 2) / np.sqrt(2 * np.pi)

        # The log link moves the peak of the integrand to z = s.
        return quad(density, -12, 18, points=[-m / s, 0.0, s] if s > 0.1 else [0.0], epsabs=1e-12, epsrel=1e-11, limit=400)[0]

    expected = np.array([integral(m, s) for m, s in zip(margin, sd, strict=True)])
    np.testing.assert_allclose(loss.expected(margin, sd**2), expected, rtol=1e-7, atol=1e-10)
    moderate = sd < 1.0
    default = Loss.expected(loss, margin[moderate], sd[moderate] ** 2)
    np.testing.assert_allclose(default, expected[moderate], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(loss.expected(margin, np.zeros(len(margin))), loss.mean(margin), rtol=1e-14)


def test_the_dispersion_is_the_dispersion_of_draws(loss):
    few, many = (loss.draw(np.full(50_000, 0.7), np.random.default_rng(3), phi).var() for phi in (0.25, 1.0))
    assert many / few == pytest.approx(4.0 if loss.dispersion else 1.0, rel=0.1)
    assert loss.residual(np.array([2.0]), 0.25) > 0
    assert loss.dispersion_name


def test_possible_responses_are_accepted(any_loss):
    y = responses(any_loss)
    assert not any_loss.impossible(y).any()
    any_loss.check_values(y, place)
    any_loss.check(y, place)
    any_loss.check_total(float(y.sum()))


def test_impossible_responses_are_refused_by_row_and_value(any_loss):
    y = responses(any_loss)
    for wrong in (-2.0, 0.0, 0.5):
        y[2] = wrong
        assert any_loss.impossible(y).sum() == any_loss.impossible(y)[2]
        if any_loss.impossible(y)[2]:
            with pytest.raises(CoveyError, match="row 2") as caught:
                any_loss.check(y, place)
            assert all(fact in str(caught.value) for fact in (f"{wrong:g}", any_loss.name, any_loss.responses))
    refuses = {"bernoulli", "logit", "poisson", "gamma"}
    assert any_loss.impossible(np.array([-2.0]))[0] == (any_loss.name in refuses)


@pytest.mark.parametrize("name", ["bernoulli", "poisson"])
def test_responses_that_determine_no_model_are_refused(name):
    loss = loss_of(name)
    loss.check_values(np.zeros(3), place)
    with pytest.raises(CoveyError, match="every row"):
        loss.check(np.zeros(3), place)
    if name == "poisson":
        with pytest.raises(CoveyError, match="every site"):
            loss.check_total(0.0)


@pytest.mark.parametrize("weighted", [False, True])
def test_perfect_is_the_lowest_value(any_loss, weighted):
    loss = any_loss
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
        # The profile is taken at the best dispersion.
        value, phi = loss.profile(10.0, 5.0, 4.0)
        assert 0 < phi < np.inf

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


def test_the_linear_start_is_near(any_loss):
    """Newton starts near the minimum: the fit to the working response has a lower loss than zero has."""
    loss = any_loss
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
def test_newton_reaches_a_point_with_zero_gradient(any_loss, reduction, ridge):
    data, own = grouped(any_loss, weighted=True), replace(any_loss, reduction=reduction, ridge=ridge)
    penalty = Penalty.of(data.hierarchy, gamma=2.0, lam=1.0)
    fit = minimise(data, own, penalty, solver="newton", tol=1e-9)
    assert fit.convergence.converged
    slope = own.gradient(data, fit.theta) + 2.0 * (fit.theta - fit.w[data.hierarchy.parent])
    assert np.abs(slope).max() < 1e-7


def test_errors_are_zero_for_perfect_predictions_and_positive_otherwise(any_loss):
    loss = any_loss
    data = grouped(loss)
    best = float(loss.perfect(data).sum() / data.n_rows)
    assert loss.error(best, data) == pytest.approx(0.0, abs=1e-7)
    assert loss.error(best + 0.5, data) > 0.4


def test_intervals_of_new_responses_cover(any_loss):
    loss = any_loss
    rows, rng = 20_000, np.random.default_rng(4)
    if loss.two_classes or not loss.likelihood:
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
        if loss.dispersion:  # intervals of counts cover more, because counts are coarse
            assert below == pytest.approx(0.1, abs=0.01)
            assert above == pytest.approx(0.1, abs=0.01)


def test_it_is_described(any_loss):
    assert any_loss.title
    assert any_loss.error_name
    assert any_loss.private_rounds >= 1
    assert type(any_loss).__doc__
    assert FAMILIES[any_loss.name] is type(any_loss)
    assert any_loss.compiled == any_loss.likelihood == (any_loss.name in NAMES)


def test_a_loss_that_is_not_a_likelihood_says_so(any_loss):
    if any_loss.likelihood:
        return
    for call in (lambda: any_loss.draw(MARGINS, np.random.default_rng(0)), lambda: any_loss.residual(MARGINS)):
        with pytest.raises(SolverError, match=repr(any_loss.name)):
            call()
