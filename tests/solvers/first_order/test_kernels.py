"""The compiled loops of the randomised algorithms against plain numpy. Whole runs are compared in ``test_references``."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from covey.exact import DIGITS, WIDE_DIGITS, from_digits
from covey.losses import loss_of
from covey.nodes.network import BLOCK, Blocks, Node
from covey.solvers.first_order import kernels, l2gd
from covey.solvers.first_order.protocol import empty_digits, summed
from covey.solvers.first_order.schedule import streams, uniforms
from tests.conftest import random_problem, seeds

FAMILIES = ["gaussian", "bernoulli", "poisson"]


def test_random_rows_are_those_of_splitmix64():
    """Against the generator in plain integers, as Steele, Lea and Flood (2014) print it."""

    def plain(stream, place):
        state = (stream + place * 0x9E3779B97F4A7C15) % 2**64
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
        return ((state ^ (state >> 31)) >> 11) * 2.0**-53

    own = streams(3, random_problem(1).data.hierarchy)
    drawn = uniforms(own, 0, 50)
    for i, stream in enumerate(own.tolist()):
        for t in range(50):
            assert drawn[i, t] == plain(stream, t + 1)
            assert kernels.draw_row(own[i], t, 17) == int(plain(stream, t + 1) * 17)


def moved(family, steps, closed, wanted):
    """``l2gd_move`` on a random problem: a pull with strength and force by cluster, then local steps."""
    problem = random_problem(6, family)
    data, loss, k = problem.data, replace(loss_of(family, "mean"), ridge=0.1), len(problem.lam)
    rng, blocks, d = np.random.default_rng(2), Blocks.of(data.hierarchy.cluster_ptr), data.n_terms
    strength, force, local = rng.uniform(0, 0.1, size=k), 0.1 * rng.normal(size=(k, d)), rng.uniform(1, 2, size=k)
    start, share = np.arange(k) * 3, rng.uniform(size=data.n_clients)
    node, rate = Node(data, loss, problem.gamma), l2gd.StepSizes(0.02, 30.0)
    basis = l2gd.Eigenbasis.of(node) if closed else l2gd._NO_BASIS
    theta = 0.3 * rng.normal(size=(data.n_clients, d))
    out, sums = np.empty_like(theta), empty_digits(blocks, d)
    kernels.l2gd_move(
        0, blocks.count, *loss.operands(data), closed, *basis, blocks.ptr, blocks.owner, node.gamma, share, strength, force,
        start, steps[:k], local, rate.eta, rate.mu, rate.last, wanted[:k], theta, out, sums,
    )  # fmt: skip
    expected, parent = theta.copy(), data.hierarchy.parent
    for i, j in enumerate(parent):
        expected[i] = theta[i] - problem.gamma[i] * (strength[j] * theta[i] - force[j])
        for s in range(steps[j]):
            eta = local[j] * float(rate.at(start[j] + s))
            expected[i] -= eta * loss.gradient(data.clients(i, i + 1), expected[i : i + 1])[0]
    means = np.array([(share[:, None] * expected)[parent == j].sum(axis=0) * wanted[j] for j in range(k)])
    return out, expected, summed(blocks, sums).total.floats(), means


@pytest.mark.parametrize(("family", "closed"), [*((family, False) for family in FAMILIES), ("gaussian", True)])
def test_l2gd_move(family, closed):
    steps, wanted = np.array([4, 0, 9, 1, 2, 6]), np.array([True, True, False, True, True, True])
    out, expected, sums, means = moved(family, steps, closed, wanted)
    np.testing.assert_allclose(out, expected, atol=1e-11)
    np.testing.assert_allclose(sums, means, atol=1e-11)


@pytest.mark.parametrize("family", FAMILIES)
def test_al2sgd_plus_move(family):
    problem = random_problem(6, family)
    data, loss, k = problem.data, replace(loss_of(family), ridge=0.1), len(problem.lam)
    rng, blocks, n, d = np.random.default_rng(2), Blocks.of(data.hierarchy.cluster_ptr), data.n_clients, data.n_terms
    strength, force, local = rng.uniform(0, 0.3, size=k), rng.normal(size=(k, d)), rng.uniform(1, 2, size=k)
    x, gradient, y, z = 0.3 * rng.normal(size=(4, n, d))
    start, steps, share, own = np.arange(k) * 3, np.arange(k)[::-1] % 4, rng.uniform(size=n), streams(5, data.hierarchy)
    exchanged, wanted = np.arange(k) % 2 == 0, np.arange(k) % 3 != 1
    pace, (eta, a1, a2, b1, b2) = (0.01, 0.3, 0.4, 0.9, 0.05), (0.01, 0.3, 0.4, 0.9, 0.05)
    y_out, z_out, sums = np.empty_like(y), np.empty_like(z), empty_digits(blocks, d)
    kernels.al2sgd_plus_move(
        0, blocks.count, *loss.operands(data), own, blocks.ptr, blocks.owner, problem.gamma, share, strength, force, exchanged,
        start, steps, local, 1, pace, wanted, x, gradient, y, z, y_out, z_out, sums,
    )  # fmt: skip
    plain, parent, ends = replace(loss, ridge=0.0), data.hierarchy.parent, np.empty((n, d))
    for i, j in enumerate(parent):
        mine, rows = data.clients(i, i + 1), data.rows_per_client[i]
        for s in range(-1 if exchanged[j] else 0, steps[j]):
            theta = a1 * z[i] + a2 * x[i] + (1 - a1 - a2) * y[i]
            if s < 0:
                change = problem.gamma[i] * (strength[j] * (theta - x[i]) - force[j])
            else:
                one = mine.rows(np.arange(rows) == int(uniforms(own[i : i + 1], start[j] + s, 1)[0, 0] * rows))
                there, here = (plain.gradient(one, at[None])[0] for at in (theta, x[i]))
                change = local[j] * (rows * (there - here) + 0.1 * (theta - x[i]))
            y[i] = theta - eta * (gradient[i] + change)
            z[i] = b1 * z[i] + (1 - b1) * theta + b2 / eta * (y[i] - theta)
        ends[i] = a1 * z[i] + a2 * x[i] + (1 - a1 - a2) * y[i]
    np.testing.assert_allclose(y_out, y, atol=1e-12)
    np.testing.assert_allclose(z_out, z, atol=1e-12)
    means = np.array([(share[:, None] * ends)[parent == j].sum(axis=0) * wanted[j] for j in range(k)])
    np.testing.assert_allclose(summed(blocks, sums).total.floats(), means, atol=1e-12)


def test_check():
    rng, n, d = np.random.default_rng(0), BLOCK + 30, 3
    own, gamma, parent = rng.normal(size=n), rng.uniform(size=n), rng.integers(0, 4, size=n)
    gradient, theta, w = rng.normal(size=(n, d)), rng.normal(size=(n, d)), rng.normal(size=(4, d))
    value, squared = (np.zeros((2, WIDE_DIGITS), dtype=np.int64) for _ in range(2))
    kernels.check(0, len(value), own, gradient, gamma, theta, parent, w, value, squared)
    away = theta - w[parent]
    assert float(from_digits(value.sum(axis=0))) == pytest.approx((own + 0.5 * gamma * (away**2).sum(axis=1)).sum(), rel=1e-12)
    expected = ((gradient + gamma[:, None] * away) ** 2).sum()
    assert float(from_digits(squared.sum(axis=0))) == pytest.approx(expected, rel=1e-12)


def test_project():
    """Each client's loss in its eigenbasis: where it is flat, neither curvature nor minimiser."""
    data, loss = random_problem(9, d=4).data, loss_of("gaussian")
    basis = l2gd.Eigenbasis.of(Node(data, loss, np.ones(data.n_clients)))
    here = loss.expand(data, np.zeros((data.n_clients, 4)))
    for i in range(data.n_clients):
        V, curved, best = (part[basis.ptr[i] : basis.ptr[i + 1]] for part in basis[1:])
        np.testing.assert_allclose(V.T * curved @ V, here.hessian[i], atol=1e-10)
        np.testing.assert_allclose(here.hessian[i] @ (V.T @ best), -here.gradient[i], atol=1e-8)
    assert basis.vectors.shape[0] == np.minimum(data.rows_per_client, 4).sum()


@settings(max_examples=25)
@given(seed=seeds, merge=st.booleans())
def test_group(seed, merge):
    """Rounds, read back cluster by cluster, are the choices of that cluster in their order."""
    rng = np.random.default_rng(seed)
    T, k = int(rng.integers(1, 60)), int(rng.integers(1, 4))
    between, within, refresh = rng.random(T) < 0.3, rng.random((T, k)) < 0.4, rng.random(T) < (0.0 if merge else 0.1)
    most = 2 * T + 1
    start, steps, inside = (np.zeros((most, k), dtype=np.int64) for _ in range(3))
    across, anchors = np.zeros(most, dtype=np.int64), np.zeros(most, dtype=bool)
    everybody, there = np.ones_like(within), np.ones((len(start), within.shape[1]), dtype=np.bool_)
    used = kernels.group(between, within, refresh, everybody, merge, start, steps, across, inside, anchors, there)
    for j in range(k):
        steps_of_cluster = []
        for r in range(used):
            steps_of_cluster += (
                ["local"] * steps[r, j] + ["between"] * across[r] + ["within"] * inside[r, j] + ["refresh"] * int(anchors[r])
            )
        plain = []
        for t in range(T):
            plain.append("between" if between[t] else "within" if within[t, j] else "local")
            plain += ["refresh"] * int(refresh[t])
        assert steps_of_cluster == plain


@pytest.mark.parametrize(("n", "d"), [(300, 1), (5, 3), (40, 13)])
def test_prepare_proximal(n, d):
    """The inverses, and the steps, averages and values that they give, against dense solves."""
    rng = np.random.default_rng(d)
    X, gamma, g = rng.normal(size=(n, d + 1, d)), rng.uniform(0.1, 3, size=n), rng.normal(size=(n, d))
    A, own, blocks = X.transpose(0, 2, 1) @ X, np.empty((n, d)), -(-n // BLOCK)
    inverse, pull = np.linalg.inv(A + gamma[:, None, None] * np.eye(d)), A.copy()
    kernels.prepare_proximal(0, blocks, pull, gamma, g, own)
    np.testing.assert_allclose(pull, gamma[:, None, None] * inverse, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(own, -np.einsum("iab,ib->ia", inverse, g), rtol=1e-9, atol=1e-12)
    parent, centre, zero = np.sort(rng.integers(0, 2, size=n)), rng.normal(size=(2, d)), rng.normal(size=n)
    ptr, share, theta = np.searchsorted(parent, [0, 1, 2]), rng.uniform(size=n), np.empty((n, d))
    sums, values = np.zeros((2, d, DIGITS), dtype=np.int64), np.zeros((2, WIDE_DIGITS), dtype=np.int64)
    kernels.proximal_step(0, 2, pull, own, g, zero, gamma, share, ptr, np.arange(2), centre, theta, sums, values)
    c = centre[parent]
    expected = np.einsum("iab,ib->ia", inverse, gamma[:, None] * c - g)
    np.testing.assert_allclose(theta, expected, rtol=1e-9, atol=1e-12)
    above = 0.5 * np.einsum("ia,iab,ib->i", theta, A, theta) + (g * theta).sum(axis=1)
    value = zero + above + 0.5 * gamma * ((theta - c) ** 2).sum(axis=1)
    for j in range(2):
        part = parent == j
        np.testing.assert_allclose(from_digits(sums).floats()[j], share[part] @ theta[part], rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(from_digits(values).floats()[j], value[part].sum(), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("d", [3, 6, 11, 20])
def test_controlled_steps(d):
    """Narrow and wide rows, in clients with any number of rows from none on, against steps in plain numpy."""
    rng, ptr = np.random.default_rng(d), np.cumsum([0, 0, 1, 2, 3, 4, 7, 9, 300, 1100])
    n, none = len(ptr) - 1, np.empty(0)
    X, y, offset = rng.normal(size=(ptr[-1], d)), rng.integers(0, 2, size=ptr[-1]).astype(float), rng.normal(size=ptr[-1])
    units, h, start = rng.uniform(0.01, 0.1, size=(n, 1)), rng.normal(size=(n, d)), rng.normal(size=(n, d))
    theta, expected, scale = start.copy(), start.copy(), 1 / np.maximum(np.diff(ptr), 1)
    kernels.controlled_steps(0, 1, 1, X, y, none, offset, scale, 0.1, ptr, units, 7, h, theta)
    for i in range(n):
        rows = slice(ptr[i], ptr[i + 1])
        for _ in range(7):
            slopes = 1 / (1 + np.exp(-(X[rows] @ expected[i] + offset[rows]))) - y[rows]
            expected[i] -= units[i] * (scale[i] * X[rows].T @ slopes + 0.1 * expected[i] - h[i])
    np.testing.assert_allclose(theta, expected, atol=1e-11)
