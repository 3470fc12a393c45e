"""Covariances as functions of parameters: units, shared terms, gradients and the inverse function."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.datasets import simulate
from covey.losses import Gaussian
from covey.variance.linear_likelihood import LinearCriterion
from covey.variance.parameters import Parameters, Shape, Variation
from covey.variance.search import approach, mm_step
from tests.conftest import random_problem, seeds
from tests.networks import surveyed
from tests.variance.dense import random_covariances, slopes

KINDS = ["isotropic", "diagonal", "full"]
kinds = st.sampled_from(KINDS)


def a_level(seed, kind, q=3, count=2):
    rng = np.random.default_rng(seed)
    level = Variation(np.arange(q), kind, 10.0 ** rng.uniform(-2, 2, size=q), count)
    return level, rng.normal(size=level.n_parameters), rng


@pytest.mark.parametrize(("kind", "each"), [("isotropic", 1), ("diagonal", 3), ("full", 6)])
def test_the_number_of_parameters(kind, each):
    assert Variation(np.arange(3), kind, np.ones(3), 5).n_parameters == 5 * each
    assert Variation(np.arange(0), kind, np.ones(0)).n_parameters == 0


def test_isotropic_is_one_variance_in_the_users_units():
    level, x, _ = a_level(0, "isotropic")
    S = level.covariances(x, 3)
    np.testing.assert_allclose(S, S[:, :1, :1] * np.eye(3), rtol=1e-14)
    assert S[0, 0, 0] != pytest.approx(S[1, 0, 0])


def test_diagonal_is_a_variance_for_each_term_in_units_of_its_column():
    level, x, _ = a_level(0, "diagonal")
    np.testing.assert_allclose(level.covariances(x, 3), [np.diag((row * level.size) ** 2) for row in x.reshape(2, 3)])


def test_full_covers_every_covariance():
    level, _, rng = a_level(1, "full")
    S = random_covariances(rng, 2, 3)
    np.testing.assert_allclose(level.covariances(level.of_covariances(S), 3), S, rtol=1e-9, atol=1e-12)


@given(seeds, kinds, st.integers(0, 3))
def test_parameters_of_covariances_give_the_same_covariances(seed, kind, rank):
    """Also for singular covariances and for zero."""
    level, x, rng = a_level(seed, kind)
    if kind == "full":
        S = random_covariances(rng, 2, 3, rank=max(rank, 1)) * bool(rank) * level.size[:, None] * level.size
    else:
        x[rng.random(len(x)) < 0.3] = 0.0
        S = level.covariances(x, 3)
    back = level.covariances(level.of_covariances(S), 3)
    np.testing.assert_allclose(back / (level.size[:, None] * level.size), S / (level.size[:, None] * level.size), atol=1e-7)


@given(seeds, kinds)
def test_the_gradient_in_the_parameters_matches_differences(seed, kind):
    level, x, rng = a_level(seed, kind)
    G = random_covariances(rng, 2, 3) - random_covariances(rng, 2, 3)
    differences = slopes(lambda x: float((G * level.covariances(x, 3)).sum()), x)
    np.testing.assert_allclose(level.gradient(x, G), differences, rtol=1e-5, atol=1e-4 * np.abs(differences).max())


@pytest.mark.parametrize("kind", ["diagonal", "full"])
def test_an_even_start_has_the_same_sd_for_every_term_in_its_unit(kind):
    level, _, _ = a_level(2, kind)
    S = level.covariances(level.even(0.3), 3)
    np.testing.assert_allclose(S, np.broadcast_to(np.diag((0.3 * level.size) ** 2), (2, 3, 3)), rtol=1e-12)


@given(seeds)
def test_terms_that_do_not_vary_come_last_in_the_working_order(seed):
    rng = np.random.default_rng(seed)
    d = int(rng.integers(1, 7))
    client, cluster = (tuple(np.flatnonzero(rng.random(d) < 0.5).tolist()) for _ in range(2))
    shape, size = Shape(client, cluster), rng.uniform(1, 9, size=d)
    order = shape.order(d)
    assert sorted(order.tolist()) == list(range(d))
    shared = [a not in client and a not in cluster for a in order]
    assert shared == sorted(shared)
    parameters = Parameters.of(shape, size, clusters=3)
    for level, terms in ((parameters.client, client), (parameters.cluster, cluster)):
        assert sorted(order[level.terms].tolist()) == sorted(terms)
        np.testing.assert_allclose(level.size, size[order[level.terms]])
        assert level.width == (max(level.terms) + 1 if terms else 0)
    assert parameters.client.width == len(client)  # terms that vary by client come first


def test_only_clients_have_a_covariance_for_each_cluster():
    parameters = Parameters.of(Shape((0,), (0,), per_cluster=True), np.ones(2), clusters=7)
    assert (parameters.client.count, parameters.cluster.count) == (7, 1)


@given(seeds, kinds, st.booleans())
def test_a_cheap_step_never_raises_the_criterion(seed, kind, reml):
    data, rng = random_problem(seed, d=2).data, np.random.default_rng(seed)
    shape = Shape((0, 1), (0, 1), kind, kind)
    criterion = LinearCriterion(surveyed(data, Gaussian()), shape, reml=reml)
    x = rng.normal(size=criterion.parameters.n_parameters)
    before = criterion.value_and_gradient(x)[0]
    for _ in range(4):
        x = approach(criterion, x, 1)[0]
        after = criterion.value_and_gradient(x)[0]
        assert after <= before + 1e-8 * abs(before)
        before = after


def test_a_cheap_step_of_a_full_covariance_solves_its_equation():
    level, x, rng = a_level(3, "full")
    bend, pull = random_covariances(rng, 2, 3) + np.eye(3), random_covariances(rng, 2, 3)
    S, T = level.covariances(x, 3), level.covariances(mm_step(level, x, bend, pull), 3)
    np.testing.assert_allclose(T @ bend @ T, S @ pull @ S, rtol=1e-6, atol=1e-9 * np.abs(S @ pull @ S).max())


@pytest.mark.parametrize("kind", KINDS)
def test_the_guess_at_the_curvature_is_near_the_truth(kind):
    """Within a factor of ten for balanced data, after the cheap steps."""
    data = simulate(clusters=20, clients=15, rows=10, d=2, client_sd=0.7, cluster_sd=0.7, seed=4).data
    criterion = LinearCriterion(surveyed(data, Gaussian()), Shape((0, 1), (0, 1), kind, kind), reml=True)
    x, guess = approach(criterion, criterion.start(0.5, 0.5), 12)
    truth = np.diag([slopes(lambda x, a=a: criterion.value_and_gradient(x)[1][a], x, 1e-4) for a in range(len(x))])
    assert (guess / truth > 0.1).all()
    assert (guess / truth < 10).all()
