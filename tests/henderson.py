"""Henderson's mixed-model equations, dense: an independent account of what a hierarchy's coefficients are and how sure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Dense:
    """Means and covariances of the coefficients at three levels, given the variance components."""

    wbar: np.ndarray
    w: np.ndarray
    theta: np.ndarray
    whole: np.ndarray
    clusters: np.ndarray
    clients: np.ndarray


def root(S):
    """``L`` with ``L L' = S``, singular or not."""
    values, vectors = np.linalg.eigh(S)
    return vectors * np.sqrt(np.maximum(values, 0.0))


def henderson(X, y, client, cluster, residual, S_client, S_cluster, weights=None, offset=None):
    """Solve for ``(wbar, z_j, z_i)`` in ``theta_i = wbar + L z_j + L_j z_i``, ``z`` standard normal, ``wbar`` unpenalised.

    ``client`` and ``cluster`` count from 0, without gaps; ``S_client (k, d, d)`` or ``(1, d, d)``, ``S_cluster (d, d)``.
    """
    n, k, d = client.max() + 1, cluster.max() + 1, X.shape[1]
    parent = np.array([cluster[client == i][0] for i in range(n)])
    weights = np.ones(len(y)) if weights is None else weights
    y = y if offset is None else y - offset
    S_client = np.broadcast_to(S_client, (k, d, d))
    # Each unit's coefficients as a linear map of the unknowns.
    maps = np.zeros((1 + k + n, d, (1 + k + n) * d))
    maps[:, :, :d] = np.eye(d)
    for j in range(k):
        maps[1 + j, :, (1 + j) * d : (2 + j) * d] = root(S_cluster)
    for i in range(n):
        maps[1 + k + i] = maps[1 + parent[i]]
        maps[1 + k + i, :, (1 + k + i) * d : (2 + k + i) * d] = root(S_client[parent[i]])
    Z = np.einsum("ld,ldu->lu", X, maps[1 + k + client])
    K = (Z.T * weights) @ Z / residual + np.diag(np.repeat([0.0, 1.0], [d, (k + n) * d]))
    inverse = np.linalg.inv(K)
    values = maps @ (inverse @ (Z.T @ (weights * y) / residual))
    spread = np.einsum("uap,pq,ubq->uab", maps, inverse, maps)
    return Dense(values[0], values[1 : 1 + k], values[1 + k :], spread[0], spread[1 : 1 + k], spread[1 + k :])


def beside(model, X, y, client, cluster, **settings):
    """The same for the variance components of a fitted estimator; ids as they are there."""
    found = model.components_
    codes = [np.searchsorted(known, ids) for known, ids in ((model.clients_, client), (model.clusters_, cluster))]
    S_client, S_cluster = found.client.embedded(model.terms_), found.cluster.embedded(model.terms_)[0]
    return henderson(X, y, *codes, found.residual, S_client, S_cluster, **settings)
