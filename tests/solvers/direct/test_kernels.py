"""The compiled loops of elimination against plain numpy: more children than in a block, every shape of covariance."""

from __future__ import annotations

import numpy as np
import pytest

from covey.nodes.network import BLOCK, Blocks
from covey.solvers.direct import elimination, kernels
from covey.solvers.direct.elimination import Spread
from covey.threads import block_count

D = 3


def shape_of(shape, i):
    return np.eye(D) if len(shape) == 0 else shape[i if len(shape) > 1 else 0]


def absorbed(A, b, scale, S):
    """``C = K^-1 A``, ``r = K^-1 b`` and ``log|K|``, ``K = I + scale A S``."""
    K = np.eye(len(b)) + scale * A @ S
    return np.linalg.solve(K, A), np.linalg.solve(K, b), np.log(abs(np.linalg.det(K)))


@pytest.fixture(params=["identity", "one for all", "one each", "some terms shared"])
def children(request):
    """Children of three parents, one of them empty and one larger than a block; one child is detached, one is its parent."""
    rng = np.random.default_rng(0)
    m = BLOCK + 60
    root = rng.normal(size=(m, D, 5))
    A, b, scale = root @ root.transpose(0, 2, 1), rng.normal(size=(m, D)), rng.uniform(0.1, 3.0, size=m)
    scale[3], scale[7] = np.inf, 0.0
    half = rng.normal(size=(m, D, D))
    full = half @ half.transpose(0, 2, 1)
    width = D
    if request.param == "some terms shared":
        width = 2
        full[:, 2:], full[:, :, 2:] = 0.0, 0.0
    shape = {"identity": np.empty((0, D, D)), "one for all": full[:1]}.get(request.param, full)
    ptr = np.array([0, BLOCK + 10, BLOCK + 10, m])
    return A, b, scale, np.ascontiguousarray(shape), width, ptr


def test_blocks_are_cuts_of_one_parent_each():
    blocks = Blocks.of(np.array([0, 3, 3, 3 + 2 * BLOCK + 1]))
    assert blocks.ptr.tolist() == [0, 3, 3 + BLOCK, 3 + 2 * BLOCK, 4 + 2 * BLOCK]
    assert blocks.owner.tolist() == [0, 2, 2, 2]
    assert blocks.of_parent.tolist() == [0, 1, 1, 4]
    assert not blocks.one_each
    assert Blocks.of(np.array([0, 3, 5])).one_each


def test_eliminate(children):
    A, b, scale, shape, width, ptr = children
    blocks, m = Blocks.of(ptr), len(b)
    C, r, c, volume = np.zeros((blocks.count, D, D)), np.zeros((blocks.count, D)), np.zeros(m), np.zeros(m)
    each_C, each_r = np.zeros((m, D, D)), np.zeros((m, D))
    kernels.eliminate(0, blocks.count, A, b, scale, shape, width, blocks.ptr, C, r, c, volume, each_C, each_r)
    for block in range(blocks.count):
        sum_C, sum_r = np.zeros((D, D)), np.zeros(D)
        for i in range(blocks.ptr[block], blocks.ptr[block + 1]):
            if np.isinf(scale[i]):
                continue
            S = shape_of(shape, i)
            one_C, one_r, logdet = absorbed(A[i], b[i], scale[i], S)
            np.testing.assert_allclose(each_C[i], one_C, atol=1e-10)
            np.testing.assert_allclose(each_r[i], one_r, atol=1e-10)
            assert volume[i] == pytest.approx(logdet, abs=1e-10)
            assert c[i] == pytest.approx(-0.5 * scale[i] * b[i] @ S @ one_r, abs=1e-10)
            sum_C, sum_r = sum_C + one_C, sum_r + one_r
        np.testing.assert_allclose(C[block], sum_C, atol=1e-8)
        np.testing.assert_allclose(r[block], sum_r, atol=1e-8)


def test_descend(children):
    A, b, scale, shape, width, ptr = children
    parent, x = np.repeat(np.arange(3), np.diff(ptr)), np.random.default_rng(1).normal(size=(3, D))
    t, force = np.full_like(b, 9.0), np.full_like(b, 9.0)
    kernels.descend(0, block_count(len(b)), A, b, scale, shape, width, parent, x, t, force)
    for i in np.flatnonzero(np.isfinite(scale)):
        C, r, _ = absorbed(A[i], b[i], scale[i], shape_of(shape, i))
        np.testing.assert_allclose(force[i], r - C @ x[parent[i]], atol=1e-10)
        np.testing.assert_allclose(t[i], x[parent[i]] + scale[i] * shape_of(shape, i) @ force[i], atol=1e-10)
    assert (t[3] == 9.0).all(), "a detached child is left to its caller"


@pytest.mark.parametrize("several", [1, 7, 100])
def test_descend_by_lapack(children, several, monkeypatch):
    """As the compiled loop, for any number of clients in one call; no bit depends on that number."""
    A, b, scale, shape, width, ptr = children
    parent, x = np.repeat(np.arange(3), np.diff(ptr)), np.random.default_rng(1).normal(size=(3, D))
    spread = Spread(scale, shape, width)
    expected = elimination.descend(A, b, spread, parent, x)
    monkeypatch.setattr(elimination, "MANY", -1)
    alone = elimination.descend(A, b, spread, parent, x)
    monkeypatch.setattr(elimination, "_TOGETHER", several * D * D)
    found = elimination.descend(A, b, spread, parent, x)
    for one, other, plain in zip(found, alone, expected, strict=True):
        np.testing.assert_allclose(one, plain, atol=1e-10)
        np.testing.assert_array_equal(one, other)


def test_sensitivity(children):
    C, r, _, _, width, ptr = children
    rng, blocks = np.random.default_rng(2), Blocks.of(ptr)
    x, half = rng.normal(size=(3, D)), rng.normal(size=(3, D, D))
    P = half @ half.transpose(0, 2, 1)
    bend, pull = np.zeros((blocks.count, width, width)), np.zeros((blocks.count, width, width))
    kernels.sensitivity(0, blocks.count, C, r, width, blocks.ptr, blocks.owner, x, P, bend, pull)
    for block, j in enumerate(blocks.owner):
        own = range(blocks.ptr[block], blocks.ptr[block + 1])
        expected = sum(C[i] - C[i] @ P[j] @ C[i] for i in own)
        forces = np.array([r[i] - C[i] @ x[j] for i in own])
        np.testing.assert_allclose(bend[block], expected[:width, :width], rtol=1e-10, atol=1e-8)
        np.testing.assert_allclose(pull[block], (forces.T @ forces)[:width, :width], rtol=1e-10, atol=1e-8)


def test_posterior(children):
    A, _, scale, shape, _, ptr = children
    scale = np.where(np.isinf(scale), 1.0, scale)
    parent, half = np.repeat(np.arange(3), np.diff(ptr)), np.random.default_rng(3).normal(size=(3, D, D))
    P, out = half @ half.transpose(0, 2, 1), np.empty_like(A)
    kernels.posterior(0, block_count(len(A)), A, scale, shape, parent, P, out)
    for i in range(len(A)):
        S = scale[i] * shape_of(shape, i)
        J = np.linalg.inv(np.eye(D) + S @ A[i])
        np.testing.assert_allclose(out[i], J @ S + J @ P[parent[i]] @ J.T, atol=1e-9)
