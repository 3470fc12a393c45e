"""Losses compared with finite differences, with scipy, and with their declared bounds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from scipy.special import expit, log1p

from covey import GroupedData
from covey.losses import Bernoulli, Gamma, Gaussian, Poisson, loss_of
from tests.conftest import random_problem, seeds
from tests.networks import strong_convexity

FAMILIES = ("gaussian", "bernoulli", "poisson", "gamma")


def reference(family, margin, y):
    if family == "gaussian":
        return 0.5 * (margin - y) ** 2
    if family == "bernoulli":
        return np.logaddexp(0, margin) - y * margin
    if family == "gamma":
        return y * np.exp(-margin) + margin
    return np.exp(margin) - y * margin


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("weighted", [True, False])
@given(seed=seeds)
def test_value_gradient_and_hessian(family, reduction, weighted, seed):
    # Up to 200 rows per client, so that a client spans several tiles of the kernel.
    problem = random_problem(seed, family, weighted=weighted, max_rows=200 if seed % 3 == 0 else 5)
    data, loss = problem.data, loss_of(family, reduction)
    theta = np.random.default_rng(seed).normal(size=(data.n_clients, data.n_terms))
    margin = data.margin(theta)
    row_weights = np.ones(data.n_rows) if data.weights is None else data.weights
    values = row_weights * reference(family, margin, data.y)
    slope, curve = {
        "gaussian": lambda: (margin - data.y, np.ones_like(margin)),
        "bernoulli": lambda: (expit(margin) - data.y, expit(margin) * (1 - expit(margin))),
        "poisson": lambda: (np.exp(margin) - data.y, np.exp(margin)),
        "gamma": lambda: (1 - data.y * np.exp(-margin), data.y * np.exp(-margin)),
    }[family]()
    here = loss.expand(data, theta)
    for i in range(data.n_clients):
        rows = slice(data.client_ptr[i], data.client_ptr[i + 1])
        scale = 1.0 if reduction == "sum" else 1.0 / row_weights[rows].sum()
        X, w = data.X[rows], row_weights[rows]
        np.testing.assert_allclose(here.value[i], scale * values[rows].sum(), rtol=1e-11)
        np.testing.assert_allclose(here.gradient[i], scale * X.T @ (w * slope[rows]), rtol=1e-9, atol=1e-11)
        np.testing.assert_allclose(here.hessian[i], scale * X.T @ ((w * curve[rows])[:, None] * X), rtol=1e-9, atol=1e-11)
    np.testing.assert_allclose(loss.values(margin, data.y), reference(family, margin, data.y), rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("family", ["gaussian", "bernoulli"])
@given(seed=seeds)
def test_curvature_lies_within_the_declared_bounds(family, seed):
    problem = random_problem(seed, family)
    loss = loss_of(family, ridge=0.05)
    theta = 3 * np.random.default_rng(seed).normal(size=(problem.data.n_clients, problem.data.n_terms))
    eigenvalues = np.linalg.eigvalsh(loss.hessian(problem.data, theta))
    assert (eigenvalues[:, -1] <= loss.smoothness(problem.data) * (1 + 1e-12)).all()
    lowest = strong_convexity(loss, problem.data)
    assert (eigenvalues[:, 0] >= lowest * (1 - 1e-9) - 1e-12).all()
    bound = loss.smallest_curvature(loss.hessian(problem.data, theta))
    assert bound <= lowest.min() * (1 + 1e-9)
    if family == "gaussian":
        assert bound >= lowest.min() / problem.data.n_terms * (1 - 1e-9)


def test_gaussian_bounds_are_attained():
    data = random_problem(7).data
    gram = Gaussian().hessian(data, np.zeros((data.n_clients, data.n_terms)))
    np.testing.assert_allclose(Gaussian().smoothness(data), np.linalg.eigvalsh(gram)[:, -1])
    assert np.isinf(Poisson().smoothness(data)).all()
    assert Bernoulli().smallest_curvature(gram) == 0


@pytest.mark.parametrize("margin", [-1e3, -40.0, 0.0, 40.0, 1e3])
@pytest.mark.parametrize("family", FAMILIES)
def test_results_are_finite_at_large_margins(family, margin):
    data = GroupedData.from_arrays([[margin, 0.0], [-margin, 1.0]], [1.0, 0.5 if family == "gamma" else 0.0])
    here = loss_of(family).expand(data, np.array([[1.0, 0.0]]))
    assert all(np.isfinite(part).all() for part in (here.value, here.gradient, here.hessian))
    if family == "bernoulli":
        expected = 2 * (log1p(np.exp(-abs(margin))) + max(-margin, 0))
        assert here.value[0] == pytest.approx(expected, rel=1e-14, abs=1e-15)


@pytest.mark.parametrize(("loss", "sign"), [(Poisson(), 1), (Gamma(), -1)])
def test_continuation_is_smooth(loss, sign):
    """Derivatives agree with differences around the margin where a quadratic continues the exponential."""
    step = 1e-3
    for margin in (sign * 299.5, sign * 300.0, sign * 300.5, sign * 400.0):
        data = GroupedData.from_arrays([[1.0]], [2.0])
        values = [loss.expand(data, np.array([[margin + h]])) for h in (-step, 0, step)]
        slope = (values[2].value - values[0].value) / (2 * step)
        curve = (values[2].gradient - values[0].gradient) / (2 * step)
        np.testing.assert_allclose(slope, values[1].gradient[0], rtol=1e-3)
        np.testing.assert_allclose(curve.ravel(), values[1].hessian.ravel(), rtol=2e-3)


def test_rows_of_weight_zero_do_not_count():
    X, y = np.ones((3, 1)), [1.0, 5.0, 700.0]
    data = GroupedData.from_arrays(X, y, weights=[1.0, 1.0, 0.0])
    assert Poisson("mean").value(data, np.zeros((1, 1)))[0] == pytest.approx(1.0)


def test_a_client_without_rows_has_no_loss():
    data = random_problem(3).data
    empty = data.rows(data.client_of_row > 0)
    here = Gaussian("mean").expand(empty, np.ones((data.n_clients, data.n_terms)))
    assert here.value[0] == 0
    assert (here.hessian[0] == 0).all()
