"""Compiled kernels compared with numpy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.errors import SolverError
from covey.losses import FAMILIES, Gaussian, kernels, loss_of
from covey.tables.rows import GroupedData
from covey.threads import BLOCK, block_count
from covey.tree.hierarchy import Hierarchy
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


@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.parametrize("d", [1, 3, 14])
@pytest.mark.parametrize("full", [False, True], ids=["plain", "weights and offset"])
def test_clients_of_all_sizes(name, d, full):
    """Clients without rows, several in a tile, exactly one tile, and more than one; more clients than in a block."""
    rng = np.random.default_rng(3)
    counts = np.concatenate([[0, 127, 1, 128, 129, 0, 300], rng.integers(0, 9, size=2 * BLOCK), [700, 0]])
    n, rows = len(counts), counts.sum()
    X, offset = rng.normal(size=(rows, d)), rng.normal(size=rows)
    y = {"bernoulli": rng.integers(0, 2, size=rows), "poisson": rng.poisson(2.0, size=rows)}.get(
        name, rng.gamma(2.0, size=rows)
    )
    hierarchy = Hierarchy(np.array([0, n]), pl.Series(np.arange(n)), pl.Series(["all"]))
    ptr, beside = np.concatenate([[0], np.cumsum(counts)]), (rng.uniform(0.0, 2.0, size=rows), offset) if full else ()
    data = GroupedData(X, y.astype(np.float64), ptr, hierarchy, tuple(f"x{a}" for a in range(d)), *beside)
    theta, loss, root = 0.3 * rng.normal(size=(n, d)), loss_of(name), rng.normal(size=(n, d, d))
    plain = uncompiled(loss).expand(data, theta)
    for order in (0, 1, 2):
        here = loss.expand(data, theta, order)
        np.testing.assert_allclose(here.value, plain.value, rtol=1e-10, atol=1e-10)
        np.testing.assert_allclose(here.gradient, plain.gradient[: len(here.gradient)], rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(here.hessian, plain.hessian[: len(here.hessian)], rtol=1e-9, atol=1e-9)
        assert (len(here.gradient), len(here.hessian)) == (n * (order > 0), n * (order > 1))
    by_rows = loss.expand_rows(data, theta)
    np.testing.assert_allclose(by_rows.curves, uncompiled(loss).expand_rows(data, theta).curves, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(by_rows.gradient, plain.gradient, rtol=1e-9, atol=1e-9)
    P = root @ root.swapaxes(1, 2)
    variance = np.einsum("la,lab,lb->l", X, P[data.client_of_row], X)
    for given_as in ({"P": P}, {"variance": variance}):
        expected = uncompiled(loss).bend(data, theta, P)
        np.testing.assert_allclose(loss.bend(data, theta, **given_as), expected, rtol=1e-9, atol=1e-8)


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
    power = np.exp(kernels.exponent(loss.code, margin))
    value, factor, first, second = kernels.pointwise(loss.code, margin, y, power)
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
