"""The compiled counts and sums before a search, against plain numpy: more rows and clients than in a block."""

from __future__ import annotations

import numpy as np
import pytest

from covey.threads import BLOCK, block_count
from covey.variance import kernels
from covey.variance.evidence import GramRows


@pytest.fixture(scope="module")
def gram():
    """Clients with four columns: some with proportional columns, with a column of zeros, or without rows."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(2 * BLOCK + 30, 6, 4))
    X[:, :, 0] = 1.0
    X[:40, :, 1] = -3.0
    X[30:60, :, 2] = 0.0
    X[50:55] = 0.0
    return np.einsum("nma,nmb->nab", X, X)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shifted", [False, True])
def test_sums_of_rows(weighted, shifted):
    rng, blocks = np.random.default_rng(1), 3
    n = 2 * kernels.ROWS + 17
    X, y = rng.normal(size=(n, 3)), 5.0 + rng.normal(size=n)
    X[::3, 1], X[:, 2] = 1.0, 1.0
    weights = rng.uniform(0.0, 2.0, size=n) if weighted else np.empty(0)
    offset = rng.normal(size=n) if shifted else np.empty(0)
    ones, sums = np.full((blocks, 3), -1), np.full((blocks, 3, 4), np.nan)
    kernels.sum_rows(0, blocks, X, y, weights, offset, ones, sums)
    np.testing.assert_array_equal(ones.sum(axis=0), (X == 1.0).sum(axis=0))
    r, w = y - (offset if shifted else 0.0), weights if weighted else 1.0
    expected = [[*X.sum(axis=0), y.sum()], [*(X**2).sum(axis=0), 0.0], [*((w * r) @ X), (w * r * r).sum()]]
    np.testing.assert_allclose(sums.sum(axis=0), expected, rtol=1e-11)


@pytest.mark.parametrize("terms", [[0], [1, 3], [0, 1, 2, 3]])
def test_counts_of_clients_with_columns_that_are_not_proportional(gram, terms):
    A, diagonal = gram[:, terms], np.einsum("iaa->ia", gram)
    full = diagonal[:, terms, None] * diagonal[:, None, :]
    expected = (full - A**2 > 1e-10 * np.maximum(full, 1e-300)).sum(axis=0)
    count = np.full((block_count(len(A)), *A.shape[1:]), -1)
    arrays = np.ascontiguousarray(A), np.ascontiguousarray(diagonal), np.array(terms)
    kernels.count_not_proportional(0, len(count), *arrays, 1e-10, count)
    np.testing.assert_array_equal(count.sum(axis=0), expected)
    found = GramRows(*arrays).n_not_proportional(1e-10)
    np.testing.assert_array_equal(found[terms], expected)
    np.testing.assert_array_equal(found[:, terms], expected.T)
    if 0 in terms:
        assert found[0, 1] == len(gram) - 40 - 5  # a multiple of the ones in 40 clients; 5 others have no rows


@pytest.mark.parametrize("terms", [[0], [1, 3], [0, 1, 2, 3]])
def test_counts_of_clients_that_the_common_coefficients_do_not_determine(gram, terms):
    A, diagonal, inverse = gram[:, terms], np.einsum("iaa->ia", gram), np.linalg.inv(gram[:70].sum(axis=0))
    inverse[0] *= 0.9  # the kernel must not take the matrix for a symmetric one
    fitted = np.einsum("iab,bc,iac->ia", A, inverse, A)
    expected = (diagonal[:, terms] - fitted > 1e-8 * diagonal[:, terms]).sum(axis=0)
    found = GramRows(np.ascontiguousarray(A), diagonal, np.array(terms)).n_not_determined(inverse)
    np.testing.assert_array_equal(found[terms], expected)
    assert found[[a for a in range(4) if a not in terms]].tolist() == [0.0] * (4 - len(terms))
