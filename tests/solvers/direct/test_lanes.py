"""Clients with about as many rows as terms, solved many at once, give what whole matrices give."""

from __future__ import annotations

import numpy as np
import pytest

from covey.losses import Gaussian
from covey.solvers.direct.elimination import Spread
from covey.solvers.direct.hessians import WholeHessians
from covey.solvers.direct.lanes import StackedMarginal, kernels
from covey.solvers.direct.spaces import linear_clients
from tests.solvers.direct.test_spaces import WIDE, covariance, rows

Q = WIDE - 2  # terms that vary
SIZES = tuple(np.random.default_rng(0).integers(8, 40, size=kernels.LANES + 5))  # more clients than one block has


def problem(weights=False):
    data = rows(WIDE, weights=weights, sizes=SIZES)
    tree, n = data.hierarchy, data.n_clients
    plain = Gaussian().expand(data, np.zeros((n, WIDE)))
    ours, whole = linear_clients(data, Gaussian(), np.zeros(WIDE), Q), WholeHessians(plain.hessian)

    def both(S):
        spread = Spread.of_covariances(S, n, Q)
        seen = ours.marginalise(None, spread, tree.cluster_ptr, (np.zeros(n), data.rows_that_count))
        return seen, whole.marginalise(-plain.gradient, spread, tree.cluster_ptr, (plain.value, data.rows_that_count))

    return tree, both


def same(ours, expected, tree, rng):
    for one, other in zip(vars(ours.seen).values(), vars(expected.seen).values(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(ours.log_determinants, expected.log_determinants, rtol=1e-10)
    x, P = rng.normal(size=(tree.n_clusters, WIDE)), covariance(rng, WIDE, WIDE, tree.n_clusters)
    for one, other in zip(
        ours.sensitivity(Q, tree.cluster_ptr, x, P), expected.sensitivity(Q, tree.cluster_ptr, x, P), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-8, atol=1e-8 * np.abs(other).max())


@pytest.mark.parametrize("kind", ["diagonal", "full", "one each"])
def test_matrices_of_all_clients_are_those_of_whole_hessians(kind):
    rng = np.random.default_rng(1)
    tree, both = problem(weights=kind == "full")
    S = covariance(rng, WIDE, Q, len(SIZES) if kind == "one each" else 1) * (np.eye(WIDE) if kind == "diagonal" else 1.0)
    ours, expected = both(S)
    assert isinstance(ours, StackedMarginal)
    same(ours, expected, tree, rng)


@pytest.mark.parametrize("terms", [[4], [0, 9]])
def test_a_change_of_variances_gives_what_solving_anew_gives(terms):
    rng, (tree, both) = np.random.default_rng(2), problem()
    S = np.diag(np.r_[rng.uniform(0.1, 1.0, size=Q), 0.0, 0.0])[None]
    after = S.copy()
    after[0, terms, terms] *= np.array([0.8, 1.1])[: len(terms)]
    changed = both(S)[0].changed(S[0], after[0], tree.cluster_ptr)
    same(changed, both(after)[1], tree, rng)


@pytest.mark.parametrize(
    "change",
    [lambda S: 2.0 * S, lambda S: S + np.eye(WIDE)[[0]].T @ np.eye(WIDE)[[1]], lambda S: 1.01 * S],
    ids=["large", "off the diagonal", "many terms"],
)
def test_another_change_is_solved_anew(change):
    tree, both = problem()
    S = np.diag(np.r_[np.ones(Q), 0.0, 0.0])
    assert both(S[None])[0].changed(S, change(S), tree.cluster_ptr) is None


def test_solve_lanes_is_what_numpy_computes():
    rng, ptr, d, q = np.random.default_rng(3), np.array([0, 4, 4, 11]), 5, 3
    R, Y, z = rng.normal(size=(11, d)), rng.normal(size=(11, q)), rng.normal(size=11)
    C, r, square, volume = np.empty((d, 3, d)), np.empty((3, d)), np.empty(3), np.empty(3)
    kernels.solve_lanes(0, 1, R, Y, z, ptr, C, r, square, volume)
    for i in range(3):
        part = slice(ptr[i], ptr[i + 1])
        K = np.eye(ptr[i + 1] - ptr[i]) + Y[part] @ Y[part].T
        solved = np.linalg.solve(K, np.column_stack([R[part], z[part]]))
        np.testing.assert_allclose(C[:, i], R[part].T @ solved[:, :d], atol=1e-12)
        np.testing.assert_allclose(r[i], R[part].T @ solved[:, d], atol=1e-12)
        np.testing.assert_allclose([square[i], volume[i]], [z[part] @ solved[:, d], np.linalg.slogdet(K)[1]], atol=1e-12)


def test_the_bits_of_a_client_do_not_depend_on_the_others():
    rng, d = np.random.default_rng(4), 5
    counts = rng.integers(1, 12, size=2 * kernels.LANES)
    ptr = np.concatenate([[0], np.cumsum(counts)])
    R, z = rng.normal(size=(ptr[-1], d)), rng.normal(size=ptr[-1])

    def solve(first, last):
        n, part = last - first, slice(ptr[first], ptr[last])
        C, r, square, volume = np.empty((d, n, d)), np.empty((n, d)), np.empty(n), np.empty(n)
        blocks = -(-n // kernels.LANES)
        kernels.solve_lanes(0, blocks, R[part], R[part], z[part], ptr[first : last + 1] - ptr[first], C, r, square, volume)
        return C.swapaxes(0, 1), r, square, volume

    whole = solve(0, len(counts))
    for first, last in ((0, 1), (3, 40), (50, len(counts))):
        for one, other in zip(whole, solve(first, last), strict=True):
            np.testing.assert_array_equal(one[first:last], other)
