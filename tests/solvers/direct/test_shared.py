"""Sparse shared columns: the elimination beside dense matrices, and fits with given penalties beside dense Newton steps."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import sparse

from covey import GroupedData, HierarchicalClassifier, HierarchicalPoissonRegressor, HierarchicalRegressor
from covey.solvers.direct import shared_kernels as kernels
from covey.solvers.direct.profile import independent
from covey.solvers.direct.shared import Entries, Layout, eliminate_upper, sum_shared

S = np.array([[[0.5, 0.1], [0.1, 0.3]]])
T = np.array([[[0.2, 0.05], [0.05, 0.4]]])


def rows(seed=0, n_rows=300, clients=25, clusters=4, columns=7):
    """Grouped rows with sparse columns and a response, all in the order of the clients."""
    rng = np.random.default_rng(seed)
    client = rng.integers(0, clients, n_rows)
    X = np.column_stack([np.ones(n_rows), rng.normal(size=n_rows)])
    data = GroupedData.from_arrays(X, rng.normal(size=n_rows), client, client % clusters)
    Z = (rng.random((n_rows, columns)) < 0.3) * rng.normal(size=(n_rows, columns))
    return data, Z, rng.random(n_rows)


def dense(data, Z, curves, free):
    """``[Z y]'V^-1[Z y]`` after the global model is eliminated."""
    client, parent = data.client_of_row, data.hierarchy.parent[data.client_of_row]
    V = np.diag(1 / curves) + (client[:, None] == client) * (data.X @ S[0] @ data.X.T)
    inverse = np.linalg.inv(V + (parent[:, None] == parent) * (data.X @ T[0] @ data.X.T))
    X, F = data.X[:, free], np.column_stack([Z, data.y])
    inverse = inverse - inverse @ X @ np.linalg.solve(X.T @ inverse @ X, X.T @ inverse)
    return F.T @ inverse @ F


@pytest.mark.parametrize("free", [[True, True], [False, True]])
def test_what_is_left_of_the_shared_columns_is_that_of_the_law_of_all_rows(free):
    (data, Z, curves), s = rows(), 7
    layout = Layout.of(sparse.csr_matrix(np.column_stack([Z, data.y])), s, data.client_ptr, data.hierarchy)
    top = eliminate_upper(sum_shared(data, layout, curves, S, response=True), T, np.array(free))
    whole = dense(data, Z, curves, np.array(free))
    L = np.tril(top.L)
    np.testing.assert_allclose(L @ L.T, whole[:s, :s], atol=1e-11)
    np.testing.assert_allclose(top.edge, whole[s], atol=1e-11)
    np.testing.assert_allclose(top.solve(top.edge[:s]), np.linalg.solve(whole[:s, :s], whole[:s, s]), atol=1e-12)
    np.testing.assert_allclose(top.log_determinant(), np.linalg.slogdet(whole[:s, :s])[1], rtol=1e-12)
    np.testing.assert_allclose(np.tril(top.covariance()), np.tril(np.linalg.inv(whole[:s, :s])), atol=1e-12)


def test_loops_do_what_numpy_does():
    rng = np.random.default_rng(1)
    data, Z, curves = rows(seed=1, columns=600)
    n, k, q, s = 25, 4, 2, 600
    layout = Layout.of(sparse.csr_matrix(Z), s, data.client_ptr, data.hierarchy)
    masks = data.client_of_row == np.arange(n)[:, None], data.hierarchy.parent == np.arange(k)[:, None]

    def full(units, G):
        whole = np.zeros((len(units.ptr) - 1, s, q))
        whole[np.repeat(np.arange(len(whole)), np.diff(units.ptr)), units.columns] = G
        return whole.swapaxes(1, 2)

    G, H = np.zeros((len(layout.clients.columns), q)), np.zeros((len(layout.clusters.columns), q))
    given = data.X, curves, data.client_ptr, layout.rows.ptr, layout.values, layout.clients.place, G
    kernels.cross_products(0, 1, *given)
    expected = np.stack([data.X[rows].T @ (curves[rows, None] * Z[rows]) for rows in masks[0]])
    np.testing.assert_allclose(full(layout.clients, G), expected, atol=1e-12)

    K = rng.normal(size=(n, q, q))
    kernels.lift(0, k, K, layout.clients.ptr, layout.clusters.place, data.hierarchy.cluster_ptr, G, H)
    np.testing.assert_allclose(
        full(layout.clusters, H), np.stack([(K @ expected)[of].sum(axis=0) for of in masks[1]]), atol=1e-12
    )

    M, C = rng.normal(size=(n, q, q)), np.zeros((s, s))
    M += M.swapaxes(1, 2)
    kernels.add_products(0, -(-s // kernels.COLUMNS), layout.clients.ptr, layout.clients.columns, G, M, C, np.empty(0))
    np.testing.assert_allclose(C, np.tril(np.einsum("ias,iab,ibt->st", expected, M, expected, optimize=True)), atol=1e-11)

    P, out, GP = rng.normal(size=(s, s)), np.empty((n, q, q)), np.empty_like(G)
    symmetric = np.tril(P) + np.tril(P, -1).T
    kernels.forms(0, n, layout.clients.ptr, layout.clients.columns, G, P, out, GP)
    np.testing.assert_allclose(out, expected @ symmetric @ expected.swapaxes(1, 2), atol=1e-10)
    where = np.repeat(np.arange(n), np.diff(layout.clients.ptr))
    np.testing.assert_allclose(GP, (expected @ symmetric)[where, :, layout.clients.columns], atol=1e-10)


def test_products_have_the_same_bits_in_any_pieces():
    _, Z, curves = rows(seed=2, columns=600)
    units = Entries.of(*np.nonzero(Z), len(Z), 601)
    values, M = Z[Z != 0][:, None], curves[:, None, None]
    whole, parts = np.zeros((600, 600)), np.zeros((600, 600))
    kernels.add_products(0, 3, units.ptr, units.columns, values, M, whole, np.empty(0))
    for block in (2, 0, 1):
        kernels.add_products(block, block + 1, units.ptr, units.columns, values, M, parts, np.empty(0))
    np.testing.assert_array_equal(whole, parts)


def test_the_last_column_of_each_dependency_is_left_out():
    rng = np.random.default_rng(3)
    Z = rng.normal(size=(50, 6))
    Z[:, 3] = Z[:, 0] - 2 * Z[:, 2]
    Z[:, 5] = Z[:, 1] + Z[:, 3]
    Z /= np.sqrt((Z**2).sum(axis=0))
    assert independent(Z.T @ Z)[0].tolist() == [True, True, True, False, True, False]


# Fits

N, CLIENTS, CLUSTERS, COLUMNS = 1500, 60, 6, 12


def table(family):
    rng = np.random.default_rng(4)
    client = rng.integers(0, CLIENTS, N)
    Z = sparse.random(N, COLUMNS, density=0.2, random_state=5, format="csr")
    eta = 0.3 + Z @ (0.5 * rng.normal(size=COLUMNS)) + (0.5 * rng.normal(size=CLIENTS))[client]
    draw = {
        "gaussian": lambda: eta + rng.normal(size=N),
        "bernoulli": lambda: (rng.random(N) < 1 / (1 + np.exp(-eta))) * 1.0,
        "poisson": lambda: rng.poisson(np.exp(eta)).astype(float),
    }
    return Z, draw[family](), client


def by_dense_newton(family, Z, y, client, gamma, lam, ridge, weights):
    """The objective of all coefficients at once: those of clients, of clusters, the global one, the shared ones."""
    a, b = CLIENTS, CLIENTS + CLUSTERS
    D, R = np.zeros((N, b + 1 + COLUMNS)), np.zeros((b, b + 1 + COLUMNS))
    D[np.arange(N), client], D[:, b + 1 :] = 1.0, Z.toarray()
    R[np.arange(a), np.arange(a)], R[np.arange(a), a + np.arange(a) % CLUSTERS] = np.sqrt(gamma), -np.sqrt(gamma)
    R[np.arange(a, b), np.arange(a, b)], R[np.arange(a, b), b] = np.sqrt(lam), -np.sqrt(lam)
    pull = np.concatenate([np.full(a, ridge), np.zeros(CLUSTERS + 1), np.full(COLUMNS, ridge * CLIENTS)])
    v = np.zeros(len(pull))
    for _ in range(40):
        m = D @ v
        mean = {"gaussian": m, "bernoulli": 1 / (1 + np.exp(-m)), "poisson": np.exp(m)}[family]
        curve = {"gaussian": np.ones(N), "bernoulli": mean * (1 - mean), "poisson": mean}[family]
        gradient = D.T @ (weights * (mean - y)) + R.T @ (R @ v) + pull * v
        v = v - np.linalg.solve(D.T @ ((weights * curve)[:, None] * D) + R.T @ R + np.diag(pull), gradient)
    return v[:a], v[a:b], v[b], v[b + 1 :]


@pytest.mark.parametrize("family", ["gaussian", "bernoulli", "poisson"])
@pytest.mark.parametrize("ridge", [0.0, 0.1])
def test_given_penalties_give_the_minimum_over_all_coefficients(family, ridge):
    Z, y, client = table(family)
    kinds = {"gaussian": HierarchicalRegressor, "bernoulli": HierarchicalClassifier, "poisson": HierarchicalPoissonRegressor}
    weights = np.random.default_rng(6).uniform(0.5, 2.0, N)
    model = kinds[family](gamma=2.0, lam=3.0, ridge=ridge)
    model.fit(Z, y, client=client, cluster=client % CLUSTERS, sample_weight=weights)
    theta, w, wbar, beta = by_dense_newton(family, Z, y, client, 2.0, 3.0, ridge, weights)
    assert model.convergence_.converged
    assert model.terms_ == ("Intercept",)
    assert model.coef_.shape == (CLIENTS, 1)
    np.testing.assert_allclose(model.shared_coef_, beta, atol=1e-9)
    np.testing.assert_allclose(model.coef_[np.argsort(model.clients_), 0], theta, atol=1e-9)
    np.testing.assert_allclose(model.cluster_coef_[:, 0], w, atol=1e-9)
    np.testing.assert_allclose(model.global_coef_, [wbar], atol=1e-9)
    margin = theta[client] + Z @ beta
    expected = {"gaussian": margin, "bernoulli": 1 / (1 + np.exp(-margin)), "poisson": np.exp(margin)}[family]
    given = {"client": client, "cluster": client % CLUSTERS}
    found = model.predict_proba(Z, **given)[:, 1] if family == "bernoulli" else model.predict(Z, **given)
    np.testing.assert_allclose(found, expected, atol=1e-8)
