"""Compiled kernels compared with numpy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.errors import SolverError
from covey.losses import FAMILIES, Gaussian, kernels, loss_of
from covey.threads import block_count
from tests.conftest import random_problem, seeds


def uncompiled(loss):
    """The same loss, evaluated with numpy."""
    return type("Uncompiled", (type(loss),), {"code": None})(loss.reduction, loss.ridge)


COMPILED = [name for name, family in FAMILIES.items() if family.code is not None]


@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.parametrize("order", [0, 1, 2])
@given(seed=seeds)
def test_expand(name, order, seed):
    # Up to 200 rows per client, so that a client spans several tiles of the kernel.
    data = random_problem(seed, name, weighted=seed % 2 == 0, max_rows=200 if seed % 3 == 0 else 5).data
    loss = loss_of(name, "mean" if seed % 5 == 0 else "sum")
    theta = np.random.default_rng(seed).normal(size=(data.n_clients, data.n_terms))
    here = loss.expand(data, theta, order)
    plain = uncompiled(loss).expand(data, theta, order)
    for compiled, by_numpy in ((here.value, plain.value), (here.gradient, plain.gradient), (here.hessian, plain.hessian)):
        np.testing.assert_allclose(compiled, by_numpy, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", [name for name in COMPILED if not loss_of(name).quadratic])
@given(seed=seeds)
def test_bend(name, seed):
    data, loss = random_problem(seed, name, weighted=seed % 2 == 0).data, loss_of(name)
    rng = np.random.default_rng(seed)
    theta, root = rng.normal(size=(data.n_clients, data.n_terms)), rng.normal(size=(data.n_clients, data.n_terms, data.n_terms))
    P = root @ root.swapaxes(1, 2)
    np.testing.assert_allclose(loss.bend(data, theta, P), uncompiled(loss).bend(data, theta, P), rtol=1e-9, atol=1e-9)


def test_bend_of_a_quadratic_is_zero():
    data = random_problem(1).data
    theta = np.ones((data.n_clients, data.n_terms))
    assert not Gaussian().bend(data, theta, np.tile(np.eye(data.n_terms), (data.n_clients, 1, 1))).any()


@given(seed=seeds)
def test_curvature_floor(seed):
    """One over the trace of the inverse; zero for a singular matrix."""
    rng = np.random.default_rng(seed)
    d = int(rng.integers(1, 5))
    root = rng.normal(size=(7, d, d))
    A = root @ root.swapaxes(1, 2) + 0.1 * np.eye(d)
    A[0] = 0.0
    floor = np.empty(7)
    kernels.curvature_floor(0, block_count(len(A)), A, floor)
    expected = 1 / np.einsum("iaa->i", np.linalg.inv(A[1:]))
    np.testing.assert_allclose(floor[1:], expected, rtol=1e-9)
    assert floor[0] == 0
    assert (floor <= np.linalg.eigvalsh(A)[:, 0] + 1e-12).all()


@given(st.lists(st.floats(-800, 709), min_size=1, max_size=70))
def test_exponentials(values):
    x, m = np.array(values), len(values)
    whole, power = np.empty(m), np.zeros(m)
    kernels.exponentials(x.copy(), m, whole, power)
    np.testing.assert_allclose(power, np.exp(np.maximum(x, -708.0)), rtol=4e-16)


def test_exponentials_keep_nan():
    x, power = np.array([np.nan, 0.0]), np.zeros(2)
    kernels.exponentials(x, 2, np.empty(2), power)
    assert np.isnan(power[0])
    assert power[1] == 1.0


@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.parametrize("margin", [-800.0, -5.0, 0.0, 5.0, 800.0])
def test_slope_and_pointwise(name, margin):
    loss, y = loss_of(name), 1.0
    value, factor, first, second = kernels.pointwise(loss.code, margin, y)
    at = np.array([margin]), np.array([y])
    assert value + np.log(factor) == pytest.approx(loss.values(*at)[0], rel=1e-12, abs=1e-14)
    assert first == pytest.approx(loss.slopes(*at)[0], rel=1e-12, abs=1e-14)
    assert second == pytest.approx(loss.curvatures(*at)[0], rel=1e-9, abs=1e-14)


def test_an_unknown_code_is_refused():
    class Odd(Gaussian):
        code = 77

    with pytest.raises(SolverError, match="77"):
        Odd()
    with pytest.raises(SolverError, match="77"):
        replace(Odd.__new__(Odd), ridge=1.0)
