"""REML and ML against the density of all rows at once, and their gradients against differences."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from covey.losses import Gaussian as Squares
from covey.solvers.direct.elimination import Quadratic, Spread, cluster_covariances, invert, marginalise, sensitivity
from covey.variance.columns import ClientSums, client_losses
from covey.variance.linear_likelihood import LinearCriterion
from covey.variance.parameters import Shape
from covey.variance.upper import upper
from tests.conftest import random_problem, seeds
from tests.networks import surveyed
from tests.variance.dense import linear_log_likelihood, random_covariances, slopes, symmetric_slopes


def criterion_of(data, reml):
    """The criterion as a function of both covariances, with all terms in the order of the data, and the clients' sums."""
    survey, terms = surveyed(data, Squares()), tuple(range(data.n_terms))
    node = survey.network.network.node
    sums = ClientSums(client_losses(node), survey.columns.origin, survey.log_weights)
    criterion = LinearCriterion(survey, Shape(terms, terms), reml=reml)
    return lambda S, T: criterion.at_covariances([(S, T)])[0], sums


@given(seeds, st.booleans(), st.booleans())
def test_the_criterion_is_the_density_of_all_rows(seed, reml, per_cluster):
    data, rng = random_problem(seed).data, np.random.default_rng(seed)
    S = random_covariances(rng, data.n_clusters if per_cluster else 1, data.n_terms)
    T = random_covariances(rng, 1, data.n_terms)
    marginal, sums = criterion_of(data, reml)
    here = marginal(S, T)
    log_likelihood, s2, wbar = linear_log_likelihood(data, S, T, reml=reml)
    assert here.value == pytest.approx(-2 * log_likelihood, rel=1e-9, abs=1e-7)
    assert here.top.dispersion == pytest.approx(s2, rel=1e-8)
    np.testing.assert_allclose(sums.origin + here.top.wbar, wbar, rtol=1e-7, atol=1e-7)


@settings(max_examples=12)
@given(seeds, st.booleans())
def test_singular_and_zero_covariances(seed, reml):
    data, rng = random_problem(seed, d=3).data, np.random.default_rng(seed)
    for S, T in (
        (random_covariances(rng, 1, 3, rank=1), random_covariances(rng, 1, 3, rank=2)),
        (np.zeros((1, 3, 3)), random_covariances(rng, 1, 3)),
        (random_covariances(rng, 1, 3), np.zeros((1, 3, 3))),
        (np.zeros((1, 3, 3)), np.zeros((1, 3, 3))),
    ):
        log_likelihood, _, _ = linear_log_likelihood(data, S, T, reml=reml)
        assert criterion_of(data, reml)[0](S, T).value == pytest.approx(-2 * log_likelihood, rel=1e-9, abs=1e-7)


def test_without_weights_and_offset():
    data = random_problem(5, weighted=False, d=2).data
    S, T = np.diag([0.4, 0.0])[None], np.diag([1.0, 2.0])[None]
    expected = -2 * linear_log_likelihood(data, S, T, reml=True)[0]
    assert criterion_of(data, True)[0](S, T).value == pytest.approx(expected, rel=1e-10)


def test_a_row_of_no_weight_does_not_count():
    problem = random_problem(7, d=2)
    weights = problem.weights.copy()
    weights[::5] = 0.0
    keep = weights > 0
    arrays = [None if a is None else a[keep] for a in (problem.X, problem.y, problem.client, problem.cluster)]
    some = replace(problem, weights=weights)
    rest = replace(
        problem,
        X=arrays[0],
        y=arrays[1],
        client=arrays[2],
        cluster=arrays[3],
        weights=weights[keep],
        offset=problem.offset[keep],
    )
    S, T = np.diag([0.4, 0.3])[None], np.diag([1.0, 2.0])[None]
    a, b = (criterion_of(each.data, True)[0](S, T).value for each in (some, rest))
    assert a == pytest.approx(b, rel=1e-12)
    assert a == pytest.approx(-2 * linear_log_likelihood(rest.data, S, T, reml=True)[0], rel=1e-10)


@given(seeds, st.booleans(), st.booleans(), st.sampled_from(["isotropic", "diagonal", "full"]))
def test_terms_that_vary_at_one_level_or_none(seed, reml, per_cluster, kind):
    """The working order of terms does not change the likelihood."""
    data, rng = random_problem(seed, d=4).data, np.random.default_rng(seed)
    client, cluster = (tuple(sorted(rng.choice(4, size=rng.integers(0, 4), replace=False).tolist())) for _ in range(2))
    shape = Shape(client, cluster, kind, kind, per_cluster)
    criterion = LinearCriterion(surveyed(data, Squares()), shape, reml=reml)
    x = rng.normal(size=criterion.parameters.n_parameters)
    back = criterion.order.inverse
    S, T = (each[:, back[:, None], back] for each in criterion.covariances(x))
    for level, terms in ((S, client), (T, cluster)):
        zero = [a for a in range(4) if a not in terms]
        assert not level[:, zero].any()
        assert (np.diagonal(level, axis1=1, axis2=2)[:, list(terms)] > 0).all()
    assert criterion.value_and_gradient(x)[0] == pytest.approx(
        -2 * linear_log_likelihood(data, S, T, reml=reml)[0], rel=1e-9, abs=1e-7
    )


@given(seeds, st.booleans(), st.booleans())
def test_the_gradient_in_the_covariances(seed, reml, per_cluster):
    data, rng = random_problem(seed).data, np.random.default_rng(seed)
    S = random_covariances(rng, data.n_clusters if per_cluster else 1, data.n_terms)
    T = random_covariances(rng, 1, data.n_terms)
    marginal, _ = criterion_of(data, reml)
    here = marginal(S, T)
    np.testing.assert_allclose(here.client_slope, symmetric_slopes(lambda S: marginal(S, T).value, S), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(here.cluster_slope, symmetric_slopes(lambda T: marginal(S, T).value, T), rtol=1e-4, atol=1e-4)


@given(seeds, st.booleans(), st.booleans())
def test_several_points_together_give_the_bits_of_each_alone(seed, reml, per_cluster):
    data, rng = random_problem(seed).data, np.random.default_rng(seed)
    count = data.n_clusters if per_cluster else 1
    points = [(random_covariances(rng, count, data.n_terms), random_covariances(rng, 1, data.n_terms)) for _ in range(3)]
    terms = tuple(range(data.n_terms))
    criterion = LinearCriterion(surveyed(data, Squares()), Shape(terms, terms), reml=reml)
    for here, point in zip(criterion.at_covariances(points), points, strict=True):
        (alone,) = criterion.at_covariances([point])
        assert here.value == alone.value
        np.testing.assert_array_equal(here.client_slope, alone.client_slope)
        np.testing.assert_array_equal(here.cluster_slope, alone.cluster_slope)


@given(seeds, st.booleans())
def test_the_pull_is_the_derivative_of_the_residual_variance(seed, reml):
    data, rng = random_problem(seed, d=2).data, np.random.default_rng(seed)
    S, T = random_covariances(rng, 1, 2), random_covariances(rng, 1, 2)
    marginal, _ = criterion_of(data, reml)
    top, pull = marginal(S, T).top, marginal(S, T).pull
    shrinks = symmetric_slopes(lambda S: np.log(marginal(S, T).top.dispersion), S)
    np.testing.assert_allclose(-pull[0] / top.dof, shrinks, rtol=1e-4, atol=1e-6)
    shrinks = symmetric_slopes(lambda T: np.log(marginal(S, T).top.dispersion), T)
    np.testing.assert_allclose(-pull[1] / top.dof, shrinks, rtol=1e-4, atol=1e-6)


@given(seeds, st.booleans(), st.sampled_from(["isotropic", "diagonal", "full"]))
def test_the_gradient_in_the_parameters(seed, reml, kind):
    data, rng = random_problem(seed, d=3).data, np.random.default_rng(seed)
    shape = Shape((0, 2), (2, 1), kind, kind, bool(rng.integers(2)))
    criterion = LinearCriterion(surveyed(data, Squares()), shape, reml=reml)
    x = rng.normal(size=criterion.parameters.n_parameters)
    differences = slopes(lambda x: criterion.value_and_gradient(x)[0], x)
    np.testing.assert_allclose(criterion.value_and_gradient(x)[1], differences, rtol=1e-4, atol=1e-4)


@given(seeds, st.booleans())
def test_sums_over_three_nodes_are_those_of_one_node(seed, reml):
    """Clients are assigned to nodes at random. The replies of the nodes add up to those of one node."""
    data, rng = random_problem(seed).data, np.random.default_rng(seed)
    S, T = random_covariances(rng, data.n_clusters, data.n_terms), random_covariances(rng, 1, data.n_terms)
    whole, sums = criterion_of(data, reml)
    owner, parent, k = rng.integers(3, size=data.n_clients), data.hierarchy.parent, data.n_clusters
    nodes = []
    for node in range(3):
        mine = np.flatnonzero(owner == node)
        units = Quadratic(*(each[mine] for each in (sums.units.C, sums.units.r, sums.units.c, sums.units.n)))
        ptr = np.concatenate([[0], np.cumsum(np.bincount(parent[mine], minlength=k))])
        spread = Spread.of_covariances(S[parent[mine]], len(mine))
        nodes.append((marginalise(units, spread, ptr), ptr))
    seen = nodes[0][0].seen + nodes[1][0].seen + nodes[2][0].seen
    top = upper(seen, sum(float(own.log_determinants.sum()) for own, _ in nodes) - sums.log_weights, T[0], reml)
    answers = [sensitivity(own, data.n_terms, ptr, top.w, top.P) for own, ptr in nodes]
    bend, pull = (sum(parts) for parts in zip(*answers, strict=True))
    here = whole(S, T)
    assert top.criterion == pytest.approx(here.value, rel=1e-12)
    np.testing.assert_allclose(bend - pull / top.dispersion, here.client_slope, rtol=1e-8, atol=1e-8)


@given(seeds)
def test_cluster_covariances_are_those_of_a_joint_normal(seed):
    """``w`` about ``wbar`` with covariance ``S``, seen with precision ``C``; ``wbar`` with covariance ``P0``."""
    rng = np.random.default_rng(seed)
    C, S, P0 = (random_covariances(rng, 1, 3)[0] for _ in range(3))
    own = np.linalg.inv(C + np.linalg.inv(S))
    J = own @ np.linalg.inv(S)
    np.testing.assert_allclose(cluster_covariances(C[None], S, P0)[0], own + J @ P0 @ J.T, rtol=1e-6, atol=1e-8)


@given(seeds)
def test_the_inverse_and_determinant_in_any_units(seed):
    rng = np.random.default_rng(seed)
    A, units = random_covariances(rng, 1, 4)[0] + np.eye(4), 10.0 ** rng.integers(-8, 9, size=4)
    inverse, log_determinant = invert(A * units * units[:, None])
    np.testing.assert_allclose(inverse * units * units[:, None], np.linalg.inv(A), rtol=1e-9)
    assert log_determinant == pytest.approx(np.linalg.slogdet(A)[1] + 2 * np.log(units).sum(), rel=1e-10, abs=1e-9)
