"""Variances at zero: where every derivative in the parameters is zero, whether or not it is an optimum."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from covey import GroupedData
from covey.datasets import simulate
from covey.losses import Bernoulli, Gaussian
from covey.variance.estimate import estimate, search
from covey.variance.laplace_likelihood import LaplaceCriterion
from covey.variance.linear_likelihood import LinearCriterion
from covey.variance.parameters import Shape
from covey.variance.search import Optimum, minimise, notes_at, resolve_boundary
from tests.conftest import seeds
from tests.networks import in_memory, surveyed

KINDS = ["isotropic", "diagonal", "full"]


def criterion_for_rows(data, shape, reml=True):
    return LinearCriterion(surveyed(data, Gaussian()), shape, reml=reml)


def stuck(criterion, x):
    """The result of a search that stops at ``x``."""
    value, gradient = criterion.value_and_gradient(x)
    return Optimum(x, value, gradient, np.eye(len(x)), 0.0)


def varied(client_sd=0.8, cluster_sd=0.8, seed=0, **other):
    return simulate(clusters=8, clients=6, rows=8, d=2, client_sd=client_sd, cluster_sd=cluster_sd, seed=seed, **other).data


@pytest.mark.parametrize("kind", KINDS)
def test_the_search_leaves_zero_variances_if_the_data_vary(kind):
    """The gradient at zero is zero for any data, so a search by gradients would stop there."""
    criterion = criterion_for_rows(varied(), Shape((0, 1), (0, 1), kind, kind))
    trap = stuck(criterion, np.zeros(criterion.parameters.n_parameters))
    assert not trap.gradient.any()
    out = resolve_boundary(criterion, trap)
    best = search(criterion)
    assert out.value < trap.value - 10
    assert out.value == pytest.approx(best.value, abs=1e-6)
    assert notes_at(criterion, best) == []


@pytest.mark.parametrize("level", ["client", "cluster"])
@pytest.mark.parametrize("kind", KINDS)
def test_one_level_at_zero_is_left_while_the_other_is_not_at_zero(level, kind):
    criterion = criterion_for_rows(varied(), Shape((0, 1), (0, 1), kind, kind))
    best = search(criterion)
    x, cut = best.x.copy(), criterion.parameters.client.n_parameters
    x[slice(0, cut) if level == "client" else slice(cut, None)] = 0.0
    assert resolve_boundary(criterion, stuck(criterion, x)).value == pytest.approx(best.value, abs=1e-6)


def test_a_wrong_perfect_correlation_is_left():
    """At a covariance of rank one the gradient in its factor is zero in some directions."""
    criterion = criterion_for_rows(varied(), Shape((0, 1), (), "full"))
    best = search(criterion)
    trap = minimise(lambda points: [_of_rank_one(criterion, x) for x in points], np.array([0.5, 0.5]), np.full(2, 10.0))
    x = np.array([trap.x[0], trap.x[1], 0.0])
    assert np.abs(criterion.value_and_gradient(x)[1]).max() < 1e-2
    assert criterion.value_and_gradient(x)[0] > best.value + 1
    assert resolve_boundary(criterion, stuck(criterion, x)).value == pytest.approx(best.value, abs=1e-6)


def _of_rank_one(criterion, x):
    value, gradient = criterion.value_and_gradient(np.array([x[0], x[1], 0.0]))
    return value, gradient[:2]


def test_one_cluster_at_zero_is_left():
    criterion = criterion_for_rows(varied(), Shape((0, 1), (), "diagonal", per_cluster=True))
    best = search(criterion)
    x = best.x.copy()
    x[6:8] = 0.0
    assert resolve_boundary(criterion, stuck(criterion, x)).value == pytest.approx(best.value, abs=1e-6)


def test_zero_variances_of_classes_are_left():
    data = simulate("bernoulli", clusters=8, clients=8, rows=15, d=1, client_sd=1.0, cluster_sd=1.0, seed=1).data
    criterion = LaplaceCriterion(surveyed(data, Bernoulli()), Shape((0,), (0,)))
    best = search(criterion)
    x = np.concatenate([np.zeros(2), best.x[2:]])
    assert resolve_boundary(criterion, stuck(criterion, x)).value == pytest.approx(best.value, abs=1e-6)


@settings(max_examples=10)
@given(seeds, st.sampled_from(KINDS))
def test_the_optimum_is_lower_than_its_neighbours_on_and_off_the_boundary(seed, kind):
    """The true variances are zero, so many optima are on the boundary. No allowed direction may lower the criterion."""
    data = simulate(clusters=5, clients=4, rows=4, d=2, client_sd=0.0, cluster_sd=0.0, seed=seed).data
    criterion = criterion_for_rows(data, Shape((0, 1), (0,), kind, kind))
    best = search(criterion)
    assert best.converged
    rng, d = np.random.default_rng(seed), 2
    S, T = criterion.covariances(best.x)
    for _ in range(20):
        step = 10.0 ** rng.uniform(-5, -1)
        u, v = rng.normal(size=(2, d)) * criterion.parameters.client.size
        more = step * {"isotropic": np.eye(d), "diagonal": np.diag(u**2), "full": np.outer(u, u)}[kind]
        up = step * np.diag([v[0] ** 2, 0.0])
        for below, above in ((S + more, T), (S, T + up), (S + more, T + up), (0.9 * S, T), (S, 0.9 * T)):
            assert criterion.at_covariances([(below, above)])[0].value >= best.value - 1e-6


def test_a_tiny_variance_is_set_to_zero():
    data = simulate(clusters=6, clients=5, rows=10, d=1, client_sd=0.0, cluster_sd=1.0, seed=3).data
    criterion = criterion_for_rows(data, Shape((0,), (0,)))
    best = search(criterion)
    assert best.x[0] == 0
    x = best.x.copy()
    x[0] = 1e-5
    snapped = resolve_boundary(criterion, stuck(criterion, x))
    assert snapped.x[0] == 0
    assert snapped.value <= criterion.value_and_gradient(x)[0] + 1e-8


def test_a_small_variance_that_matters_is_not_set_to_zero():
    """A column with tiny values: the variance of its coefficient is large in the units of the column."""
    drawn = simulate(clusters=6, clients=10, rows=20, d=2, intercept=True, client_sd=1.0, seed=3)
    X = drawn.X * [1.0, 1e-6]
    data = GroupedData.from_arrays(X, drawn.y, drawn.client)
    level = estimate(in_memory(data, Gaussian()), Shape((0, 1), ()))[1].components.client
    same = estimate(in_memory(GroupedData.from_arrays(drawn.X, drawn.y, drawn.client), Gaussian()), Shape((0, 1), ()))[
        1
    ].components.client
    np.testing.assert_allclose(level.sd * [1.0, 1e-6], same.sd, rtol=1e-5)


# Notes


def notes_of(x, shape, data):
    criterion = criterion_for_rows(data, shape)
    return notes_at(criterion, stuck(criterion, np.asarray(x, dtype=float)))


@pytest.mark.parametrize(
    ("x", "kind", "sentences"),
    [
        ([1, 1, 1, 1], "diagonal", []),
        ([0, 0, 1, 1], "diagonal", ["singular: no variation between clients"]),
        ([1, 1, 0, 0], "diagonal", ["singular: no variation between clusters"]),
        ([1, 0, 1, 1], "diagonal", ["singular: no variation of 'x1' between clients"]),
        ([1, 1, 0, 1], "diagonal", ["singular: no variation of 'x0' between clusters"]),
        ([0, 0], "isotropic", ["singular: no variation between clients", "singular: no variation between clusters"]),
        (
            [1, 2, 0, 1, 2, 3],
            "full",
            ["singular: the coefficients of 'x0', 'x1' vary in perfect correlation between clients"],
        ),
        ([0, 0, 1, 1, 2, 3], "full", ["singular: no variation of 'x0' between clients"]),
    ],
)
def test_notes_name_terms_that_do_not_vary(x, kind, sentences):
    assert notes_of(x, Shape((0, 1), (0, 1), kind, kind), varied()) == sentences


def test_notes_name_terms_in_the_order_of_the_data():
    data = simulate(clusters=4, clients=4, rows=6, d=3, seed=0).data
    assert notes_of([1.0, 0.0, 0.0, 1.0], Shape((1, 2), (0, 1)), data) == [
        "singular: no variation of 'x2' between clients",
        "singular: no variation of 'x1' between clusters",
    ]


def test_notes_name_clusters_and_count_further_ones():
    data, shape = varied(), Shape((0,), (), per_cluster=True)
    assert notes_of([1, 1, 0, 1, 1, 1, 1, 1], shape, data) == ["singular: no variation between clients of cluster 2"]
    all_of_them = notes_of(np.zeros(8), shape, data)
    assert len(all_of_them) == 5
    assert all_of_them[-1] == "singular: 4 more covariances"
