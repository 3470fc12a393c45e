"""Every space gives what whole matrices give: plain numpy on dense Hessians is the reference."""

from __future__ import annotations

import numpy as np
import pytest

from covey import GroupedData
from covey.losses import Bernoulli, Gamma, Gaussian, Poisson
from covey.solvers.direct import kernels, row_space
from covey.solvers.direct.elimination import Spread, absorb_leading, cluster_covariances, leading_width, sensitivity
from covey.solvers.direct.hessians import LeadingHessians, WholeHessians, by_cell
from covey.solvers.direct.spaces import expand, hessians, linear_clients, space_of

D = 11


def rows(d, *, loss=None, weights=False, seed=0, sizes=(3, 7, 1, 5, 2, 9, 4, 6, 3)):
    """Clients of different sizes in three clusters, one of them with one client."""
    rng = np.random.default_rng(seed)
    client = np.repeat(np.arange(len(sizes)), sizes)
    X, y = rng.normal(size=(len(client), d)), rng.normal(size=len(client))
    if loss is not None and not loss.quadratic:
        y = rng.integers(0, 2, size=len(client)) if loss.two_classes else rng.gamma(2.0, size=len(client))
        y = np.round(y) if loss.name == "poisson" else y
    w = rng.uniform(0.0, 2.0, size=len(client)) if weights else None
    offset = 0.1 * rng.normal(size=len(client)) if weights else None
    return GroupedData.from_arrays(X, y, client, np.minimum(client // 4, 2), weights=w, offset=offset)


def covariance(rng, d, q, m=1):
    half, S = rng.normal(size=(m, q, q)), np.zeros((m, d, d))
    S[:, :q, :q] = half @ half.transpose(0, 2, 1)
    return S


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("q", [0, 1, 3])
@pytest.mark.parametrize("loss", [Gaussian(), Bernoulli(ridge=0.3), Poisson("mean"), Gamma()])
def test_shared_terms_are_eliminated_as_in_whole_matrices(loss, q, each):
    data, rng = rows(D, loss=loss, weights=each), np.random.default_rng(1)
    tree, theta = data.hierarchy, 0.2 * rng.normal(size=(data.n_clients, D))
    S = covariance(rng, D, q, data.n_clients if each else 1)
    spread, ptr = Spread.of_covariances(S, data.n_clients, q), tree.cluster_ptr
    b, aside = rng.normal(size=theta.shape), (rng.normal(size=len(theta)), data.rows_that_count)
    here = expand(data, loss, theta, q)
    assert space_of(D, q) == "leading"
    assert not len(here.hessian)
    some, whole = hessians(data, loss, here, q), WholeHessians(loss.hessian(data, theta))
    plain = loss.expand(data, theta)
    np.testing.assert_allclose(here.value, plain.value, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(here.gradient, plain.gradient, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(some.leading(q), whole.leading(q), rtol=1e-10, atol=1e-12)

    ours, theirs = some.marginalise(b, spread, ptr, aside), whole.marginalise(b, spread, ptr, aside)
    for one, other in zip(
        (*vars(ours.seen).values(), ours.log_determinants), (*vars(theirs.seen).values(), theirs.log_determinants), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-10)
    np.testing.assert_allclose(some.lift(b, spread, ptr, aside), theirs.seen.r, rtol=1e-9, atol=1e-10)
    np.testing.assert_allclose(some.curvature(spread, ptr).log_determinants, theirs.log_determinants, rtol=1e-9, atol=1e-10)

    x, P = rng.normal(size=(tree.n_clusters, D)), covariance(rng, D, 2, tree.n_clusters)
    for one, other in zip(sensitivity(ours, q, ptr, x, P), sensitivity(theirs, q, ptr, x, P), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-10)
    (t, force), (t_whole, force_whole) = (H.descend(b, spread, tree.parent, x) for H in (some, whole))
    np.testing.assert_allclose(t, t_whole, rtol=1e-9, atol=1e-10)
    np.testing.assert_allclose(force[:, :q], force_whole[:, :q], rtol=1e-9, atol=1e-10)
    bends = [H.bend(data, loss, theta, spread, P) for H in (some, whole)]
    np.testing.assert_allclose(*bends, rtol=1e-9, atol=1e-9)


def test_whole_matrices_without_rows_give_the_same_sums():
    data = rows(D)
    A, tree = Gaussian().hessian(data, np.zeros((data.n_clients, D))), data.hierarchy
    some = LeadingHessians.of_matrices(A, tree.cluster_ptr, 2)
    other = LeadingHessians.of_rows(data, np.ones(data.n_rows), 0.0, 2)
    np.testing.assert_allclose(some.A, other.A, atol=1e-12)
    np.testing.assert_allclose(some.shared, other.shared, atol=1e-12)


@pytest.mark.parametrize("width", [3, 80])
def test_products_by_cell_are_those_of_numpy(width):
    rng, ptr = np.random.default_rng(0), np.array([0, 1, 1, 7, 20])
    left, weights = rng.normal(size=(20, width)), rng.uniform(size=20)
    out = by_cell(left, left, weights, ptr)
    for j in range(4):
        part = slice(ptr[j], ptr[j + 1])
        np.testing.assert_allclose(out[j], left[part].T @ (weights[part, None] * left[part]), atol=1e-12)


def test_cross_products_are_those_of_numpy():
    data, which, curves = rows(5), np.array([3, 0]), np.random.default_rng(3).uniform(size=40)
    A = np.empty((data.n_clients, 2, 5))
    kernels.cross_products(0, 1, data.X, curves, data.client_ptr, which, A)
    for i in range(data.n_clients):
        part = slice(data.client_ptr[i], data.client_ptr[i + 1])
        np.testing.assert_allclose(A[i], data.X[part][:, which].T @ (curves[part, None] * data.X[part]), atol=1e-12)


@pytest.mark.parametrize("q", [0, 2, 4])
def test_the_upper_level_is_solved_in_its_varying_terms(q):
    rng, d = np.random.default_rng(4), 4
    half = rng.normal(size=(3, d, 6))
    C, r, S, P0 = half @ half.transpose(0, 2, 1), rng.normal(size=(3, d)), covariance(rng, d, q)[0], covariance(rng, d, d)[0]
    K = np.eye(d) + C @ S
    assert leading_width(S) == q
    D_, r_, log_determinants = absorb_leading(C, r, S, q)
    np.testing.assert_allclose(D_, np.linalg.solve(K, C), atol=1e-10)
    np.testing.assert_allclose(r_, np.linalg.solve(K, r[:, :, None])[:, :, 0], atol=1e-10)
    np.testing.assert_allclose(log_determinants, np.linalg.slogdet(K)[1], atol=1e-10)
    J = np.linalg.inv(np.eye(d) + S @ C)
    np.testing.assert_allclose(cluster_covariances(C, S, P0, q), J @ S + J @ P0 @ J.transpose(0, 2, 1), atol=1e-9)


WIDE = 19  # terms of clients in row space; some clients have more rows, most have fewer
SIZES = (3, 7, 1, 25, 2, 40, 4, 6, 19)


def spread_of(kind, rng, n, q):
    """Covariances of every form; one client is its parent, and with penalties one has no tie to it."""
    if kind == "penalties":
        gamma = rng.uniform(0.2, 3.0, size=n)
        gamma[2], gamma[4] = 0.0, 1e12
        return Spread.of_penalty(gamma, WIDE)
    S = covariance(rng, WIDE, q, n if kind == "one each" else 1)
    if kind == "diagonal":
        S = S * np.eye(WIDE)
    return Spread.of_covariances(S, n, q)


@pytest.mark.parametrize("kind", ["penalties", "diagonal", "full", "one each"])
@pytest.mark.parametrize("loss", [Gaussian(), Bernoulli(), Poisson("mean", ridge=0.3), Gamma()])
def test_row_space_gives_what_whole_matrices_give(loss, kind):
    data, rng = rows(WIDE, loss=loss, weights=kind != "full", sizes=SIZES), np.random.default_rng(1)
    tree, n, q = data.hierarchy, data.n_clients, WIDE if kind == "penalties" else WIDE - 2
    theta, spread, ptr = 0.1 * rng.normal(size=(n, WIDE)), spread_of(kind, rng, n, q), tree.cluster_ptr
    here = expand(data, loss, theta, q)
    assert space_of(WIDE, q) == "rows"
    ours, whole = hessians(data, loss, here, q), WholeHessians(loss.hessian(data, theta))
    b, aside = -loss.gradient(data, theta), (rng.normal(size=n), data.rows_that_count)
    close = {"rtol": 1e-8, "atol": 1e-8}
    seen, expected = ours.marginalise(b, spread, ptr, aside), whole.marginalise(b, spread, ptr, aside)
    for one, other in zip(vars(seen.seen).values(), vars(expected.seen).values(), strict=True):
        np.testing.assert_allclose(one, other, **close)
    np.testing.assert_allclose(seen.log_determinants, expected.log_determinants, **close)
    np.testing.assert_allclose(ours.lift(b, spread, ptr, aside), expected.seen.r, **close)
    np.testing.assert_allclose(ours.leading(q), whole.leading(q), **close)
    x, P = rng.normal(size=(tree.n_clusters, WIDE)), covariance(rng, WIDE, 3, tree.n_clusters)
    for one, other in zip(ours.descend(b, spread, tree.parent, x), whole.descend(b, spread, tree.parent, x), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-7, atol=1e-7)
    if kind != "penalties":
        for one, other in zip(seen.sensitivity(q, ptr, x, P), expected.sensitivity(q, ptr, x, P), strict=True):
            np.testing.assert_allclose(one, other, **close)
        bends = [H.bend(data, loss, theta, spread, P) for H in (ours, whole)]
        np.testing.assert_allclose(*bends, **close)


@pytest.mark.parametrize("kind", ["penalties", "diagonal", "full", "one each"])
@pytest.mark.parametrize("ridge", [0.0, 0.5])
def test_a_linear_model_in_row_space_gives_what_its_normal_equations_give(kind, ridge, monkeypatch):
    monkeypatch.setattr(row_space, "_PIECE", 20 * WIDE)  # several pieces
    loss, rng = Gaussian(ridge=ridge), np.random.default_rng(2)
    data = rows(WIDE, weights=kind != "full", sizes=SIZES)
    tree, n, q = data.hierarchy, data.n_clients, WIDE if kind == "penalties" else WIDE - 2
    spread, ptr, zero = spread_of(kind, rng, n, q), tree.cluster_ptr, np.zeros((n, WIDE))
    ours, plain = linear_clients(data, loss, np.zeros(WIDE), q), loss.expand(data, zero)
    whole, b = WholeHessians(plain.hessian), -plain.gradient
    np.testing.assert_allclose(ours.linear_terms(), b, atol=1e-10)
    seen = ours.marginalise(None, spread, ptr, (np.zeros(n), data.rows_that_count))
    expected = whole.marginalise(b, spread, ptr, (plain.value, data.rows_that_count))
    for one, other in zip(vars(seen.seen).values(), vars(expected.seen).values(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-9)
    x, P = rng.normal(size=(tree.n_clusters, WIDE)), covariance(rng, WIDE, WIDE, tree.n_clusters)
    for one, other in zip(ours.descend(None, spread, tree.parent, x), whole.descend(b, spread, tree.parent, x), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-8, atol=1e-8)
    if kind != "penalties":
        for one, other in zip(seen.sensitivity(q, ptr, x, P), expected.sensitivity(q, ptr, x, P), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-8, atol=1e-8)
    floor = whole.smallest_curvature(loss)
    assert 0.0 <= ours.smallest_curvature(loss) <= max(floor, ridge) + 1e-12


@pytest.mark.parametrize("gamma", [1e-14, 1e-6, 1.0, 1e8, 1e14])
def test_row_space_loses_no_digits_at_the_limits(gamma):
    data, rng = rows(WIDE, sizes=(5, 30, 8)), np.random.default_rng(3)
    x = rng.normal(size=(1, WIDE))
    spread, parent = Spread.of_penalty(np.full(3, gamma), WIDE), np.zeros(3, dtype=np.int64)
    t, force = linear_clients(data, Gaussian(), np.zeros(WIDE), WIDE).descend(None, spread, parent, x)
    for i in range(3):
        # The ridge regression about x as a least-squares problem, whose condition is the root of that of normal equations.
        part = slice(data.client_ptr[i], data.client_ptr[i + 1])
        stacked = np.vstack([data.X[part], np.sqrt(gamma) * np.eye(WIDE)])
        step = np.linalg.lstsq(stacked, np.append(data.y[part] - data.X[part] @ x[0], np.zeros(WIDE)), rcond=0.0)[0]
        np.testing.assert_allclose(t[i] - x[0], step, rtol=1e-6, atol=1e-9 * np.abs(step).max() + 1e-15)
        np.testing.assert_allclose(force[i], gamma * step, rtol=1e-6, atol=1e-9 * gamma * np.abs(step).max())
