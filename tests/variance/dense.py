"""Likelihoods of hierarchies from the law of all rows at once, with dense matrices: what the tests compare with."""

from __future__ import annotations

import numpy as np
from scipy import linalg, optimize, special, stats

from covey import GroupedData


def random_covariances(rng, m, d, rank=None, terms=None):
    """``m`` positive semi-definite matrices ``(d, d)``, of a rank, zero outside ``terms``."""
    factor = rng.normal(size=(m, d, d if rank is None else rank)) * rng.uniform(0.3, 1.5, size=(m, 1, 1))
    if terms is not None:
        factor[:, [a for a in range(d) if a not in terms]] = 0.0
    return factor @ factor.transpose(0, 2, 1)


def law(data: GroupedData, S_client, S_cluster):
    """The covariance of all responses in units of the residual variance, row by row."""
    client, parent = data.client_of_row, data.hierarchy.parent
    V = np.zeros((data.n_rows, data.n_rows))
    for a in range(data.n_rows):
        for b in range(data.n_rows):
            if parent[client[a]] == parent[client[b]]:
                V[a, b] += data.X[a] @ S_cluster[0] @ data.X[b]
            if client[a] == client[b]:
                V[a, b] += data.X[a] @ S_client[parent[client[a]] if len(S_client) > 1 else 0] @ data.X[b]
    return V + np.diag(np.ones(data.n_rows) if data.weights is None else 1 / data.weights)


def linear_log_likelihood(data: GroupedData, S_client, S_cluster, *, reml: bool):
    """The highest over the residual variance (and the global model); with it, both.

    REML is the density of the responses' contrasts, which do not know of the global model, less log|X'X| / 2 as lme4 has it.
    """
    V = law(data, S_client, S_cluster)
    y, X = data.y if data.offset is None else data.y - data.offset, data.X
    wbar = np.linalg.solve(X.T @ np.linalg.solve(V, X), X.T @ np.linalg.solve(V, y))
    residual = y - X @ wbar
    s2 = residual @ np.linalg.solve(V, residual) / (len(y) - reml * X.shape[1])
    if not reml:
        return stats.multivariate_normal(X @ wbar, s2 * V).logpdf(y), s2, wbar
    K = linalg.null_space(X.T)
    contrasts = stats.multivariate_normal(np.zeros(K.shape[1]), s2 * K.T @ V @ K).logpdf(K.T @ y)
    return contrasts - 0.5 * np.linalg.slogdet(X.T @ X)[1], s2, wbar


FAMILIES = {
    "bernoulli": (lambda margin, y: np.logaddexp(0, margin) - y * margin, lambda m: special.expit(m) * special.expit(-m)),
    "poisson": (lambda margin, y: np.exp(margin) - y * margin + special.gammaln(y + 1), np.exp),
}


def _root(S):
    values, vectors = np.linalg.eigh(S)
    return vectors * np.sqrt(np.maximum(values, 0.0))


def laplace_log_likelihood(data: GroupedData, family: str, S_client, S_cluster, wbar):
    """From the joint mode of all effects in units of their standard deviations, and one dense Hessian there."""
    pointwise, curvature = FAMILIES[family]
    d, n, k, parent = data.n_terms, data.n_clients, data.n_clusters, data.hierarchy.parent
    Z = np.zeros((data.n_rows, (n + k) * d))
    roots, root_above = [_root(S) for S in S_client], _root(S_cluster[0])
    for row, i in enumerate(data.client_of_row):
        j = parent[i]
        Z[row, i * d : (i + 1) * d] = data.X[row] @ (roots[j] if len(roots) > 1 else roots[0])
        Z[row, (n + j) * d : (n + j + 1) * d] = data.X[row] @ root_above
    base = data.X @ wbar + (0.0 if data.offset is None else data.offset)
    weights = np.ones(data.n_rows) if data.weights is None else data.weights

    def joint(z):
        return weights @ pointwise(base + Z @ z, data.y) + 0.5 * z @ z

    z = optimize.minimize(joint, np.zeros((n + k) * d), method="BFGS", options={"gtol": 1e-6}).x
    H = np.eye(len(z)) + Z.T @ ((weights * curvature(base + Z @ z))[:, None] * Z)
    return -joint(z) - 0.5 * np.linalg.slogdet(H)[1]


def slopes(function, x, step=1e-5):
    """Central differences."""
    out = np.empty_like(x)
    for at in np.ndindex(x.shape):
        ahead, back = x.copy(), x.copy()
        ahead[at] += step
        back[at] -= step
        out[at] = (function(ahead) - function(back)) / (2 * step)
    return out


def symmetric_slopes(function, S, step=1e-5):
    """The derivative in a symmetric matrix, as a symmetric matrix, by differences of both entries at once."""
    out = np.empty_like(S)
    for m, a, b in np.ndindex(S.shape):
        move = np.zeros_like(S)
        move[m, a, b] += 0.5 * step
        move[m, b, a] += 0.5 * step
        out[m, a, b] = (function(S + move) - function(S - move)) / (2 * step)
    return out
