"""Private sweeps: the influence of one client, the noise, and the exact fit without clip and noise."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from covey import GroupedData, Penalty
from covey.errors import PenaltyError, SolverError
from covey.federation.privacy.differential import (
    NoisySums,
    PlaceClients,
    Privacy,
    ReleaseSums,
    clipped,
    flat,
    node_contributions,
    plausible,
    private_across,
    seeded_normal,
    square,
    summed,
    system_normal,
)
from covey.losses import Bernoulli, Gaussian, Poisson
from covey.nodes.network import InMemory, Node
from covey.solvers import minimise
from covey.threads import use_threads

LOSSES = {loss.name: loss for loss in (Gaussian(), Bernoulli(), Poisson())}
UNITS = 2.0**36


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    with use_threads(1):
        yield


def make(family, seed=0, clients=30, clusters=3, d=3, rows=6, scale=1.0):
    rng = np.random.default_rng(seed)
    n = clients * rows
    client = np.repeat(np.arange(clients), rows)
    X = np.column_stack([np.ones(n), rng.normal(size=(n, d - 1)) * scale])
    margin = np.einsum("la,la->l", X, 0.4 + 0.5 * rng.normal(size=(clients, d))[client])
    y = {
        "gaussian": margin + rng.normal(size=n),
        "bernoulli": (rng.random(n) < 1 / (1 + np.exp(-margin))).astype(float),
        "poisson": rng.poisson(np.exp(np.clip(margin, -5, 5))).astype(float),
    }[family]
    return GroupedData.from_arrays(X, y, client, client % clusters)


def network(data, family, gamma=2.0, lam=3.0, draw=None):
    penalty = Penalty.of(data.hierarchy, gamma=gamma, lam=lam)
    return InMemory(Node(data, LOSSES[family], penalty.gamma, draw=draw)), penalty


# Sensitivity


@settings(max_examples=40, deadline=None)
@given(
    family=st.sampled_from(sorted(LOSSES)),
    seed=st.integers(0, 10**6),
    clip=st.sampled_from([0.01, 0.3, 1.0, 7.0]),
    gamma=st.sampled_from([1e-3, 1.0, 50.0]),
    scale=st.sampled_from([1e-3, 1.0, 100.0]),
    left_out=st.integers(0, 9),
)
def test_the_rows_of_one_client_move_all_sums_by_the_clip_at_most(family, seed, clip, gamma, scale, left_out):
    """With weights of zero a client has no rows and no contribution: the neighbouring data of the definition of epsilon."""
    data = make(family, seed, clients=10, scale=scale)
    w = np.random.default_rng(seed).normal(size=(3, 3))
    sums = []
    for weight in (1.0, 0.0):
        weights = np.where(data.client_of_row == left_out, weight, 1.0)
        over, _ = network(replace(data, weights=weights), family, gamma)
        sums.append(ReleaseSums(w, 0.0, clip).at(over.node).sums)
    moved = (sums[0] - sums[1]) / UNITS * clip
    assert np.linalg.norm(moved) <= clip
    assert (np.abs(moved).sum(axis=1) > 0).sum() <= 1  # a client is in one sum only


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=4, max_size=4), st.floats(1e-6, 1e6))
def test_no_contribution_is_longer_than_the_clip(values, clip):
    units = clipped(np.array([values]), clip)[0]
    assert sum(int(unit) ** 2 for unit in units) <= 2**72
    if not np.isfinite(values).all():
        assert not units.any()


def test_contributions_below_the_clip_are_as_they_are_and_longer_ones_keep_their_direction():
    v = np.array([[0.3, -0.4, 0.0], [3.0, -4.0, 0.0]])
    units = clipped(v, 1.0) / UNITS
    np.testing.assert_allclose(units[0], v[0], atol=2 / UNITS)
    np.testing.assert_allclose(units[1], v[1] / 5, atol=2 / UNITS + 2e-12)


@pytest.mark.parametrize("family", sorted(LOSSES))
def test_a_contribution_is_the_slope_and_curvature_of_the_clients_envelope(family):
    """By differences: ``F(w) = min_theta f(theta) + gamma/2 |theta - w|^2``."""
    data, gamma, d = make(family, clients=4, clusters=1), 2.0, 3
    over, _ = network(data, family, gamma)
    w = np.array([[0.2, -0.1, 0.3]])

    def slope(at):
        node_contributions(over.node, at)
        return gamma * (at - over.node.coefficients())

    v = node_contributions(over.node, w)
    np.testing.assert_allclose(-gamma * v[:, -d:], slope(w), atol=1e-9)
    curvature, h = gamma * square(v[:, :-d], d), 1e-5
    for a in range(d):
        step = h * np.eye(d)[[a]]
        np.testing.assert_allclose(curvature[:, a], (slope(w + step) - slope(w - step)) / (2 * h), atol=1e-6)
    eigenvalues = np.linalg.eigvalsh(curvature)
    assert (eigenvalues > 0).all()
    assert (eigenvalues < gamma).all()


def test_a_matrix_as_a_vector_has_the_same_norm_and_comes_back():
    C = np.random.default_rng(1).normal(size=(5, 4, 4))
    C = C + C.swapaxes(1, 2)
    np.testing.assert_allclose(np.linalg.norm(flat(C), axis=1), np.linalg.norm(C, axis=(1, 2)))
    np.testing.assert_allclose(square(flat(C), 4), C, atol=1e-15)


def test_sums_are_exact_and_clusters_without_clients_are_zero():
    units = np.array([[2**40, 1], [3, -5], [7, 7]])
    assert summed(units, np.array([0, 2, 2, 3])).tolist() == [[2**40 + 3, -4], [0, 0], [7, 7]]


# Noise


def test_the_systems_noise_is_standard_normal():
    drawn = system_normal(200_000)
    assert stats.kstest(drawn, "norm").pvalue > 1e-6
    assert abs(drawn.std() - 1) < 6 / np.sqrt(2 * 200_000)
    assert len(np.unique(drawn)) == len(drawn)
    assert not np.array_equal(drawn[:100], system_normal(100))


def test_noise_in_a_sum_has_the_stated_deviation_and_no_seed():
    data = make("gaussian", clients=6)
    over, _ = network(data, "gaussian")
    w, noise, clip = np.zeros((3, 3)), 3.0, 0.5
    quiet = ReleaseSums(w, 0.0, clip).at(over.node).sums
    drawn = np.array([ReleaseSums(w, noise, clip).at(over.node).sums - quiet for _ in range(400)]) / UNITS * clip
    assert abs(drawn.std() / (noise * clip) - 1) < 6 / np.sqrt(2 * drawn.size)
    assert abs(drawn.mean()) < 6 * noise * clip / np.sqrt(drawn.size)
    apart = drawn.reshape(400, -1)
    correlation = np.corrcoef(apart.T) - np.eye(apart.shape[1])
    assert np.abs(correlation).max() < 6 / np.sqrt(400)


def test_clusters_without_clients_at_a_node_get_no_noise_and_seeds_repeat():
    data = make("gaussian", clients=6)
    part = data.clients(0, 2)  # both of the first cluster
    first, again = (
        ReleaseSums(np.zeros((3, 3)), 1.0, 1.0).at(network(part, "gaussian", draw=seeded_normal(7))[0].node) for _ in "ab"
    )
    assert np.array_equal(first.sums, again.sums)
    assert first.draws.tolist() == [1, 0, 0]
    assert first.sums[0].all()
    assert not first.sums[1:].any()


# The fit


@pytest.mark.parametrize("family", sorted(LOSSES))
@pytest.mark.parametrize("lam", [0.5, 30.0, np.inf])
def test_without_noise_and_clip_it_is_the_exact_fit(family, lam):
    data = make(family)
    over, penalty = network(data, family, lam=lam)
    fit = private_across(over, penalty, Privacy(0.0, 20.0, 8))
    exact = minimise(data, LOSSES[family], penalty, solver="newton", tol=1e-11)
    np.testing.assert_allclose(fit.w, exact.w, atol=1e-8)
    np.testing.assert_allclose(fit.wbar, exact.wbar, atol=1e-8)
    np.testing.assert_allclose(over.node.coefficients(), exact.theta, atol=1e-8)
    assert not fit.convergence.converged
    assert np.isnan(fit.convergence.objective)


def test_a_gaussian_loss_needs_one_round():
    data = make("gaussian")
    over, penalty = network(data, "gaussian")
    fit = private_across(over, penalty, Privacy(0.0, 20.0, 1))
    np.testing.assert_allclose(fit.w, minimise(data, Gaussian(), penalty, solver="sweep").w, atol=1e-8)


def test_large_counts_are_no_trouble():
    data = make("poisson")
    data = replace(data, y=data.y * 10_000)
    over, penalty = network(data, "poisson")
    fit = private_across(over, penalty, Privacy(0.0, 50.0, 8))
    np.testing.assert_allclose(fit.w, minimise(data, Poisson(), penalty, solver="newton", tol=1e-6).w, atol=1e-7)


@pytest.mark.parametrize("family", sorted(LOSSES))
def test_more_noise_is_farther_from_the_exact_fit(family):
    data = make(family, clients=300)
    exact = minimise(data, LOSSES[family], Penalty.of(data.hierarchy, gamma=2.0, lam=3.0), solver="newton")
    apart = []
    for noise in (0.03, 0.3, 3.0):
        errors = []
        for seed in range(8):
            over, penalty = network(data, family, draw=seeded_normal(seed))
            errors.append(private_across(over, penalty, Privacy(noise, 4.0, 4)).w - exact.w)
        apart.append(np.sqrt(np.mean(np.square(errors))))
    assert apart[0] < apart[1] < apart[2]
    assert apart[0] < 0.02


def test_noise_adds_over_nodes_and_sums_do_not_depend_on_the_split():
    data = make("bernoulli", clients=9)
    w = np.full((3, 3), 0.1)
    whole = ReleaseSums(w, 0.0, 1.0).at(network(data, "bernoulli")[0].node)
    parts = [ReleaseSums(w, 0.0, 1.0).at(network(data.clients(*at), "bernoulli")[0].node) for at in ((0, 4), (4, 9))]
    total = parts[0] + parts[1]
    assert np.array_equal(total.sums, whole.sums)
    assert total.draws.tolist() == [1, 2, 1]
    assert isinstance(total, NoisySums)


def test_only_impossible_matrices_are_made_plausible():
    good = np.array([[2.0, 0.5], [0.5, 1.0]])
    bad = np.array([[-1.0, 0.0], [0.0, 9.0]])
    fixed = plausible(np.stack([good, bad]), np.array([5, 5]), np.array([0.1, 0.1]))
    np.testing.assert_allclose(fixed[0], good, atol=1e-14)
    np.testing.assert_allclose(fixed[1], np.diag([0.1 * np.sqrt(2), 5.0]), atol=1e-14)


def test_place_clients_has_an_empty_reply():
    over, _ = network(make("gaussian"), "gaussian")
    assert PlaceClients(np.zeros((3, 3))).at(over.node) is None
    assert over.node.theta is not None


def test_invalid_parameters_are_refused():
    for wrong in ({"noise": -1.0}, {"noise": np.nan}, {"clip": 0.0}, {"clip": np.inf}, {"rounds": 1.5}, {"rounds": True}):
        with pytest.raises(SolverError, match=f"'{next(iter(wrong))}' parameter must"):
            Privacy(**{"noise": 1.0, "clip": 1.0, "rounds": 1, **wrong})
    data = make("gaussian", clients=6)
    penalty = Penalty.of(data.hierarchy, gamma=np.arange(1.0, 7.0), lam=1.0)
    with pytest.raises(PenaltyError, match="one positive gamma"):
        private_across(InMemory.of(data, Gaussian(), penalty.gamma), penalty, Privacy(1.0, 1.0, 1))
