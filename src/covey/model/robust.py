"""Cluster-robust (sandwich) covariances of the global coefficients of a linear model, from the sums of its clients.

With the bread ``M = (sum_j D_j)^-1`` and the score ``f_j = X_j'V_j^-1 A_j (y_j - X_j wbar)`` of a group, the covariance is

    M (sum_j f_j f_j') M

``V_j`` is the covariance of the group's rows, and ``D_j = X_j'V_j^-1 X_j``, both by the fitted model. These are what a group
reports in the elimination of its clients, so no rows are needed. The corrections ``A_j`` for few groups are those of
clubSandwich (Pustejovsky and Tipton 2018), with ``m`` groups, ``p`` coefficients and ``N`` rows:

    CR0                none
    CR1, CR1p, CR1S    the factors m / (m - 1), m / (m - p) and m (N - 1) / ((m - 1) (N - p)) of the covariance
    CR2                the symmetric A_j with A_j (V_j - X_j M X_j') A_j = V_j: the covariance is unbiased if V_j is right
    CR3                A_j = (I - X_j M X_j'V_j^-1)^-1, the jackknife

CR2 is computed in the space that the group's columns span: those of its fixed effects, and of the varying terms of each of its
clients. Outside that space ``A_j`` is the identity and does not meet ``X_j``. The scalar products of the columns, in the sums
of clients, are enough as long as every row has weight 1.

Satterthwaite's degrees of freedom of a coefficient are ``(sum_j p_jj)^2 / sum_ij p_ij^2``, where ``p`` is the covariance, by
the model, of the groups' shares ``c'M f_j`` of its estimated error. With ``h_j = A_j'V_j^-1 X_j M c`` it is

    p_ij = h_i'V_i h_i [i = j] - (X_i'h_i)'M (X_j'h_j)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

import numpy as np

from covey._typing import Floats
from covey.errors import SolverError, one_of
from covey.solvers.direct.elimination import eliminate, invert
from covey.variance.components import Learned

if TYPE_CHECKING:
    from covey.model.posterior import Posterior

Correction = Literal["CR0", "CR1", "CR1p", "CR1S", "CR2", "CR3"]
CORRECTIONS = get_args(Correction)
_WIDEST = 1500  # columns of one group in CR2
_RANK = 1e-12  # of a matrix of scalar products with ones on its diagonal


class Sandwich(NamedTuple):
    """The covariance ``(d, d)`` of the global coefficients, their degrees of freedom ``(d,)``, and the number of groups."""

    covariance: Floats
    freedom: Floats
    groups: int


class _Shares(NamedTuple):
    """By group: scores ``(m, d)``, and for each coefficient ``h'Vh (m, d)`` and ``X'h (m, d, d)`` with coefficients last."""

    scores: Floats
    sizes: Floats
    along: Floats


def sandwich(posterior: Posterior, wbar: Floats, correction: Correction = "CR1") -> Sandwich:
    """The sandwich. The groups are the clusters, if terms vary between clusters; otherwise the clients."""
    if correction not in CORRECTIONS:
        raise one_of("correction", correction, CORRECTIONS)
    learned = posterior.learned
    if learned.components.method not in ("REML", "ML"):
        raise SolverError("Robust standard errors are for linear models with groups; use those of coef_frame('global').")
    D, scores, rows = _groups(posterior, wbar, correction)
    m, free, p = len(D), learned.free, int(learned.free.sum())
    if m <= (p if correction == "CR1p" else 1):
        raise SolverError(
            f"Robust standard errors of the kind {correction!r} need more than {max(p, 1)} groups; there are {m}."
        )
    total = D.sum(axis=0)
    M = invert(total, free)[0]
    if correction == "CR2":
        shares = _unbiased(posterior.require_sums(), wbar, M)
    elif correction == "CR3":
        back = np.stack([total @ invert(total - each, free)[0] for each in D])  # (I - D_j M)^-1
        held = back.swapaxes(1, 2) @ M
        shares = _Shares(np.einsum("jab,jb->ja", back, scores), np.einsum("jac,jab,jbc->jc", held, D, held), D @ held)
    else:
        shares = _Shares(scores, np.einsum("ac,jab,bc->jc", M, D, M), D @ M)
    factors = {"CR1": m / (m - 1), "CR1p": m / max(m - p, 1), "CR1S": m * (rows - 1) / ((m - 1) * (rows - p))}
    covariance = factors.get(correction, 1.0) * (M @ (shares.scores.T @ shares.scores) @ M)
    return Sandwich(np.asarray(covariance), _freedom(shares, M), m)


def _freedom(shares: _Shares, M: Floats) -> Floats:
    """Satterthwaite's degrees of freedom. The sum of all ``p_ij^2`` follows from ``sum_j a_j a_j'``."""
    own = np.einsum("jac,ab,jbc->jc", shares.along, M, shares.along)
    trace = (shares.sizes - own).sum(axis=0)
    spread = np.einsum("jac,jbc->cab", shares.along, shares.along) @ M
    squares = (shares.sizes**2 - 2.0 * shares.sizes * own).sum(axis=0) + np.einsum("cab,cba->c", spread, spread)
    known = squares <= 0  # a coefficient that is not estimated
    return np.asarray(np.where(known, 1.0, trace**2 / np.where(known, 1.0, squares)))


def _groups(posterior: Posterior, wbar: Floats, correction: Correction) -> tuple[Floats, Floats, float]:
    """``D_j`` and the score ``X_j'V_j^-1 (y_j - X_j wbar)`` of each independent group, and the number of rows."""
    whole = posterior.learned.whole
    if whole is not None and whole.information is not None and whole.scores is not None:
        if correction == "CR2":
            raise SolverError("The correction 'CR2' needs the sums of all clients, which stay at the sites; use 'CR3'.")
        return whole.information, whole.scores, float(posterior.learned.components.rows)
    learned = posterior.require_sums(all_clients=True)
    tree, n = learned.tree, learned.tree.n_clients
    if not learned.components.cluster.terms:
        seen = eliminate(learned.units, learned.client, np.arange(n + 1))
    else:
        below = eliminate(learned.units, learned.client, tree.cluster_ptr)
        seen = eliminate(below, learned.cluster, np.arange(tree.n_clusters + 1))
    return seen.C, seen.r - seen.C @ (wbar - learned.origin), float(seen.n.sum())


def _unbiased(learned: Learned, wbar: Floats, M: Floats) -> _Shares:
    """The shares with the correction CR2."""
    if abs(learned.log_weights) > 1e-9 or not _rows_count_once(learned):
        raise SolverError("The correction 'CR2' is for rows of weight 1; use 'CR3', which allows weights.")
    d = len(learned.terms)
    parts: list[tuple[Floats, Floats, Floats]] = []
    for G, Sigma, products in _columns(learned, wbar):
        size = np.sqrt(np.maximum(np.diag(G), 1e-300))
        values, vectors = np.linalg.eigh(G / size[:, None] / size)
        kept = values > _RANK
        root = np.sqrt(values[kept])
        K = root[:, None] * vectors[:, kept].T * size  # the columns in an orthonormal basis of their span
        V, X = np.eye(len(K)) + K @ Sigma @ K.T, K[:, -d:]
        e = (vectors[:, kept].T @ (products / size)) / root
        A = _geometric_mean(V, V - X @ M @ X.T)
        W = np.linalg.solve(V, X)
        h = A @ W @ M
        parts.append((W.T @ (A @ e), np.einsum("ac,ab,bc->c", h, V, h), X.T @ h))
    return _Shares(*(np.stack(part) for part in zip(*parts, strict=True)))


def _geometric_mean(V: Floats, B: Floats) -> Floats:
    """The symmetric ``A`` with ``A B A = V``, on the range of ``B``."""
    L = np.linalg.cholesky(V)
    values, vectors = np.linalg.eigh(L.T @ B @ L)
    kept = values > _RANK * max(float(values[-1]), 1e-300)
    half = L @ vectors[:, kept]
    return np.asarray(half / np.sqrt(values[kept]) @ half.T)


def _rows_count_once(learned: Learned) -> bool:
    """Whether all weights are 1, if their geometric mean is 1: then they are if their arithmetic mean is 1 too."""
    if "Intercept" not in learned.terms:
        return True
    at = learned.terms.index("Intercept")
    return bool(np.isclose(learned.units.C[:, at, at].sum(), learned.components.rows, rtol=1e-9))


def _columns(learned: Learned, wbar: Floats) -> Iterator[tuple[Floats, Floats, Floats]]:
    """By group, for the varying columns of each client and then all common columns: scalar products, the prior covariance of
    their coefficients relative to the residual, and their products with the residuals.
    """
    tree, units, d = learned.tree, learned.units, len(learned.terms)
    below, above = learned.components.client.terms, learned.components.cluster.terms
    v = np.array([learned.terms.index(term) for term in below], dtype=np.int64)
    q, S = len(v), learned.client_covariances[:, v[:, None], v] if len(v) else np.zeros((1, 0, 0))
    T = learned.components.cluster.embedded(learned.terms)[0] / learned.dispersion
    ptr = tree.cluster_ptr if above else np.arange(tree.n_clients + 1)
    left = units.r - units.C @ (wbar - learned.origin)
    for start, end in zip(ptr[:-1].tolist(), ptr[1:].tolist(), strict=True):
        n = end - start
        if n * q + d > _WIDEST:
            raise SolverError(
                f"The correction 'CR2' needs a matrix of {n * q + d} columns for the group with {n} clients, more than "
                f"{_WIDEST}; use 'CR1' or 'CR3'."
            )
        cut, C = n * q, units.C[start:end]
        G, Sigma = np.zeros((cut + d, cut + d)), np.zeros((cut + d, cut + d))
        for i in range(n):
            own = slice(i * q, (i + 1) * q)
            G[own, own], G[own, cut:], G[cut:, own] = C[i][v[:, None], v], C[i][v], C[i][:, v]
            Sigma[own, own] = S[0] if len(S) == 1 else S[tree.parent[start + i]]
        G[cut:, cut:], Sigma[cut:, cut:] = C.sum(axis=0), T
        yield G, Sigma, np.concatenate([left[start:end][:, v].ravel(), left[start:end].sum(axis=0)])
