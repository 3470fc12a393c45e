"""Elimination by triangular factors against elimination by matrices and against dense solves in numpy."""

from __future__ import annotations

import numpy as np
import pytest

from covey.nodes.network import BLOCK
from covey.solvers.direct import elimination
from covey.solvers.direct.elimination import Quadratic, Spread, marginalise, solve_columns
from covey.solvers.direct.factors import Factors
from covey.threads import use_threads

SCALES = {"zero": 0.0, "tiny": 1e-12, "one": 1.0, "huge": 1e8}


def clients(seed, q, d, n=2 * BLOCK + 70, rows=6):
    """Losses of clients in three cells, one of them empty. Some clients have constant columns, dependent columns or no rows."""
    rng = np.random.default_rng(seed)
    X, y = rng.normal(size=(n, rows, d)), rng.normal(size=(n, rows))
    X[:, :, 0] = 1.0
    X[5, :, q - 1], X[6, :, q - 1], X[7], y[7] = 2.0, 0.0, 0.0, 0.0
    A, b = np.einsum("nma,nmb->nab", X, X), np.einsum("nma,nm->na", X, y)
    ptr = np.array([0, BLOCK + 20, BLOCK + 20, n])
    return A, b, (0.5 * (y**2).sum(axis=1), np.full(n, float(rows))), ptr


def covariances(seed, q, d, k, scale):
    rng = np.random.default_rng(seed)
    half = rng.normal(size=(k, q, q))
    S = np.zeros((k, d, d))
    S[:, :q, :q] = scale * half @ half.transpose(0, 2, 1)
    return S


def factors_of(A, b, aside, ptr, q):
    total = np.add.reduceat(np.concatenate([A, np.zeros((1, *A.shape[1:]))]), ptr[:-1])
    total[np.diff(ptr) == 0] = 0.0
    return Factors.of(np.ascontiguousarray(A[:, :q]), total, b, aside, ptr)


@pytest.mark.parametrize(("q", "d"), [(1, 1), (1, 3), (2, 2), (2, 5), (4, 4)])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("each", [False, True], ids=["one covariance", "one per cell"])
def test_elimination_and_sensitivity_agree_with_those_by_matrices(q, d, scale, each):
    A, b, aside, ptr = clients(1, q, d)
    k, parent = len(ptr) - 1, np.repeat(np.arange(len(ptr) - 1), np.diff(ptr))
    S = covariances(2, q, d, k if each else 1, SCALES[scale])
    spread = Spread.of_covariances(S[parent] if each else S, len(b), q)
    expected, found = marginalise(Quadratic(A, b, *aside), spread, ptr), factors_of(A, b, aside, ptr, q).marginalise(S)
    # A pivot that is zero but for rounding, times a huge covariance, is rounding times 1e8 on both sides.
    np.testing.assert_allclose(found.log_determinants, expected.log_determinants, atol=1e-11 * max(1.0, SCALES[scale]) ** 0.7)
    for name in ("C", "r", "c", "n"):
        one, other = getattr(found.seen, name), getattr(expected.seen, name)
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-10 * max(1.0, np.abs(A).sum()), err_msg=name)
    if scale != "huge":  # where elimination by matrices has no more than a few digits
        x, P = np.random.default_rng(3).normal(size=(k, d)), 0.01 * np.broadcast_to(np.eye(d), (k, d, d)).copy()
        for one, other in zip(found.sensitivity(q, ptr, x, P), expected.sensitivity(q, ptr, x, P), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-7)


@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
def test_one_client_agrees_with_the_marginal_covariance_of_its_rows(scale):
    rng, q, d, m = np.random.default_rng(4), 2, 3, 7
    X, y = rng.normal(size=(m, d)), rng.normal(size=m)
    S = covariances(5, q, d, 1, scale)
    found = factors_of((X.T @ X)[None], (X.T @ y)[None], (np.array([0.5 * y @ y]), np.array([7.0])), np.array([0, 1]), q)
    eliminated = found.marginalise(S)
    V = np.eye(m) + X @ S[0] @ X.T
    # Solves with V lose digits if its eigenvalues differ much; the factors do not.
    tolerance = {"rtol": 1e-9, "atol": 1e-9} if scale < 1e6 else {"rtol": 1e-6, "atol": 1e-6}
    np.testing.assert_allclose(eliminated.seen.C[0], X.T @ np.linalg.solve(V, X), **tolerance)
    np.testing.assert_allclose(eliminated.seen.r[0], X.T @ np.linalg.solve(V, y), **tolerance)
    np.testing.assert_allclose(eliminated.seen.c[0], 0.5 * y @ np.linalg.solve(V, y), **tolerance)
    np.testing.assert_allclose(eliminated.log_determinants[0], np.linalg.slogdet(V)[1], **tolerance)


def test_the_limit_of_a_huge_covariance_has_no_cancellation():
    """With every term free, a client's rows say nothing about its cell; what remains is the sum of squared residuals."""
    rng, d, m = np.random.default_rng(6), 3, 9
    X, y = rng.normal(size=(m, d)), 1e3 + rng.normal(size=m)
    S, at = 1e12 * np.eye(d)[None], np.array([0, 1])
    found = factors_of((X.T @ X)[None], (X.T @ y)[None], (np.array([0.5 * y @ y]), np.array([9.0])), at, d).marginalise(S)
    residuals = y - X @ np.linalg.lstsq(X, y, rcond=None)[0]
    assert found.seen.c[0] == pytest.approx(0.5 * residuals @ residuals, rel=1e-6)
    np.testing.assert_allclose(found.seen.C[0], np.eye(d) * 1e-12, rtol=1e-6, atol=1e-18)


def test_the_bits_do_not_depend_on_the_number_of_threads():
    A, b, aside, ptr = clients(7, 2, 4, n=40 * BLOCK)
    results = []
    for threads in (1, 2):
        with use_threads(threads):
            found = factors_of(A, b, aside, ptr, 2).marginalise(covariances(8, 2, 4, 1, 1.0))
            bend, pull = found.sensitivity(2, ptr, b[:3], A[:3])
        results.append([found.seen.C, found.seen.r, found.seen.c, found.log_determinants, bend, pull])
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_columns_are_solved_with_the_rank_that_numpy_finds(rank):
    rng = np.random.default_rng(9)
    root = rng.normal(size=(300, 3, rank)) * np.array([1.0, 1e4, 1e-3])[:, None]
    A = root @ root.transpose(0, 2, 1)
    B = A @ rng.normal(size=(300, 3, 2))
    X, found = solve_columns(A, B)
    assert (found == rank).all()
    size = np.sqrt(np.einsum("naa->na", A))
    np.testing.assert_allclose((A @ X) / size[:, :, None], B / size[:, :, None], rtol=1e-7, atol=1e-7 * np.abs(B).max())
    if rank == 3:
        well = np.linalg.cond(A / (size[:, :, None] * size[:, None, :])) < 1e4
        assert well.sum() > 200
        unit, expected = size[:, :, None], np.linalg.solve(A[well], B[well])
        np.testing.assert_allclose((X * unit)[well], expected * unit[well], atol=1e-9 * np.abs(X * unit).max())


def test_a_singular_matrix_with_negative_pivots_is_not_taken_for_a_regular_one():
    """Rounding can make two pivots negative. Their product with infinite quotients would look large."""
    rng = np.random.default_rng(10)
    v = rng.choice([-1.0, 1.0], size=(200, 4, 1))
    noise = 1e-16 * rng.normal(size=(200, 4, 4))
    A = v @ v.transpose(0, 2, 1) + noise + noise.transpose(0, 2, 1)
    X, rank = solve_columns(A, A @ np.ones((4, 1)))
    assert (rank == 1).all()
    assert np.isfinite(X).all()
    assert elimination.MANY >= 4  # so that the compiled solver was asked
