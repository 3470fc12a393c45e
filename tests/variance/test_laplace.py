"""The Laplace approximation against a dense one and against the integral itself."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.special import expit, logsumexp

from covey import GroupedData
from covey.losses import Bernoulli, Poisson
from covey.solvers.direct.elimination import Spread, cluster_covariances
from covey.solvers.direct.newton_node import LocalProblem, node_start
from covey.variance.columns import TermOrder
from covey.variance.identify import survey
from covey.variance.laplace_likelihood import (
    LaplaceCriterion,
    LaplaceLikelihood,
    ModeState,
    node_bends,
    node_curvature,
    node_slopes,
)
from covey.variance.parameters import Shape
from tests.conftest import random_problem, seeds
from tests.networks import in_memory, shard
from tests.variance.dense import laplace_log_likelihood, random_covariances, slopes, symmetric_slopes

LOSSES = {"bernoulli": Bernoulli(), "poisson": Poisson()}
families = st.sampled_from(["bernoulli", "poisson"])


def criterion_of(data, family, tol=1e-11):
    d = data.n_terms
    return LaplaceLikelihood(in_memory(data, LOSSES[family]), TermOrder(np.arange(d), d), d, tol)


def a_point(seed, family, *, d=2, per_cluster=False):
    data, rng = random_problem(seed, family, d=d, max_rows=4).data, np.random.default_rng(seed)
    S = random_covariances(rng, data.n_clusters if per_cluster else 1, d)
    return data, S, random_covariances(rng, 1, d), 0.5 * rng.normal(size=d)


@settings(max_examples=15)
@given(seeds, families, st.booleans())
def test_the_value_equals_a_dense_computation(seed, family, per_cluster):
    data, S, T, wbar = a_point(seed, family, per_cluster=per_cluster)
    ours = criterion_of(data, family)(S, T, wbar).value + 2 * LOSSES[family].constant(data)
    assert ours == pytest.approx(-2 * laplace_log_likelihood(data, family, S, T, wbar), rel=1e-7)


@pytest.mark.parametrize("family", ["bernoulli", "poisson"])
def test_singular_and_zero_covariances(family):
    data, S, T, wbar = a_point(3, family, d=3)
    rng, none = np.random.default_rng(0), np.zeros((1, 3, 3))
    rank_one = random_covariances(rng, 1, 3, rank=1)
    for below, above in ((rank_one, T), (S, rank_one), (none, T), (S, none), (none, none)):
        ours = criterion_of(data, family)(below, above, wbar).value + 2 * LOSSES[family].constant(data)
        assert ours == pytest.approx(-2 * laplace_log_likelihood(data, family, below, above, wbar), rel=1e-7)


@pytest.mark.parametrize("rows", [20, 80])
@pytest.mark.parametrize("family", ["bernoulli", "poisson"])
def test_the_error_against_the_integral_falls_with_the_rows_of_a_client(family, rows):
    """A random intercept of six clients, integrated on a grid, where the trapezoidal rule is exact to rounding."""
    rng, n, sd = np.random.default_rng(1), 6, 0.7
    client = np.repeat(np.arange(n), rows)
    X = np.c_[np.ones(n * rows), rng.normal(size=n * rows)]
    wbar, offset = np.array([0.3, -0.5]), 0.2 * rng.normal(size=n * rows)
    y = LOSSES[family].draw(X @ wbar + offset + sd * rng.normal(size=n)[client], rng)
    data = GroupedData.from_arrays(X, y, client, offset=offset)
    S = np.diag([sd**2, 0.0])[None]
    ours = -0.5 * criterion_of(data, family)(S, np.zeros((1, 2, 2)), wbar).value - LOSSES[family].constant(data)

    z = np.linspace(-6, 6, 1201)
    margin = (X @ wbar + offset)[:, None] + z
    law = stats.bernoulli(expit(margin)) if family == "bernoulli" else stats.poisson(np.exp(margin))
    logs = law.logpmf(y[:, None])
    exact = sum(logsumexp(logs[client == i].sum(axis=0) + stats.norm(0, sd).logpdf(z)) + np.log(z[1] - z[0]) for i in range(n))
    assert 1e-8 < abs(ours - exact) / n < 0.25 / rows


@settings(max_examples=20)
@given(seeds, families, st.booleans())
def test_the_gradient_in_the_covariances_and_the_global_model(seed, family, per_cluster):
    data, S, T, wbar = a_point(seed, family, per_cluster=per_cluster)
    marginal = criterion_of(data, family)
    here = marginal(S, T, wbar)
    close = {"rtol": 2e-4, "atol": 2e-4 * max(1.0, abs(here.value))}
    np.testing.assert_allclose(here.client_slope, symmetric_slopes(lambda S: marginal(S, T, wbar).value, S, 1e-4), **close)
    np.testing.assert_allclose(here.cluster_slope, symmetric_slopes(lambda T: marginal(S, T, wbar).value, T, 1e-4), **close)
    np.testing.assert_allclose(here.global_slope, slopes(lambda wbar: marginal(S, T, wbar).value, wbar, 1e-4), **close)


@settings(max_examples=20)
@given(seeds, families, st.sampled_from(["isotropic", "diagonal", "full"]))
def test_the_gradient_in_the_parameters(seed, family, kind):
    rng = np.random.default_rng(seed)
    n, rows = 12, 8
    client, X = np.repeat(np.arange(n), rows), rng.normal(size=(n * rows, 3))
    y = LOSSES[family].draw(0.5 * X[:, 0] + 0.3 * rng.normal(size=n)[client], rng)
    data = GroupedData.from_arrays(X, y, client, client // 4, weights=rng.uniform(0.5, 2, len(y)), offset=0.1 * X[:, 1])
    shape = Shape((2,), (0, 2), kind, kind, bool(rng.integers(2)))
    criterion = LaplaceCriterion(survey(in_memory(data, LOSSES[family]), shape), shape)
    x = 0.5 * rng.normal(size=criterion.parameters.n_parameters + 3)
    differences = slopes(lambda x: criterion.value_and_gradient(x)[0], x, 1e-4)
    np.testing.assert_allclose(criterion.value_and_gradient(x)[1], differences, rtol=1e-4, atol=1e-3)


@given(seeds, families)
def test_the_points_evaluated_before_do_not_matter(seed, family):
    """The last mode is only a starting value for the next search for a mode."""
    data, S, T, wbar = a_point(seed, family)
    marginal = criterion_of(data, family)
    marginal(9.0 * S, 0.1 * T, wbar + 1.0)
    assert marginal(S, T, wbar).value == pytest.approx(criterion_of(data, family)(S, T, wbar).value, rel=1e-9)


@settings(max_examples=6, deadline=None)
@given(seeds, st.sampled_from(["bernoulli", "poisson"]))
def test_sums_over_three_nodes_are_those_of_one_node(seed, family):
    """Clients are assigned to nodes at random. At the mode the replies of the nodes add up to those of one node."""
    data, S, T, wbar = a_point(seed, family)
    criterion = criterion_of(data, family)
    whole, mode = criterion(S, T, wbar), criterion.network.node.state(ModeState).state.now
    owner = np.random.default_rng(seed).integers(0, 3, size=data.n_clients)
    nodes = []
    for mine in (np.flatnonzero(owner == site) for site in range(3)):
        if len(mine):
            node = LocalProblem(shard(data, mine), criterion.network.loss, Spread.of_covariances(S, len(mine)))
            nodes.append((node, node_start(node, mode.theta[mine], mode.u[mine])[0].now))
    own = [node_curvature(node, at) for node, at in nodes]
    C = sum(each.seen.C for each in own)
    P, K = cluster_covariances(C, T[0], np.zeros_like(T[0])), np.eye(len(wbar)) + C @ T[0]
    bends = [node_bends(node, at, P) for node, at in nodes]
    y = np.linalg.solve(K, sum(lifted for _, lifted in bends)[:, :, None])[:, :, 0] @ T[0]
    sent = [node_slopes(node, at, here, g, P, y) for (node, at), here, (g, _) in zip(nodes, own, bends, strict=True)]
    slope = sum(bend - pull for bend, pull in sent).sum(axis=0)
    np.testing.assert_allclose(slope, whole.client_slope[0], rtol=1e-9, atol=1e-9)
