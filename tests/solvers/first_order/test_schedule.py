"""Random choices and rounds: exact probabilities, replay, grouping against a plain reading, counted exchanges."""

from __future__ import annotations

from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import kstest

from covey import GroupedData
from covey.errors import CoveyError
from covey.objective.theory import Probabilities, best_tau
from covey.solvers.first_order.schedule import Choices, Schedule, group, majority, server_probability, streams, uniforms
from covey.solvers.ledger import Ledger, expected, links, rates
from tests.conftest import seeds


def chances(p0=0.3, p=(0.2, 0.6, 0.4), rho=0.0):
    p = np.array(p)
    return Probabilities(p0, p, best_tau(p0, p), rho)


@given(p0=st.one_of(st.sampled_from([0.0, 1.0]), st.floats(1e-12, 1 - 1e-12)), k=st.integers(1, 9))
def test_the_majority_shows_heads_with_probability_exactly_p0(p0, k):
    q = server_probability(p0, k)
    votes = np.array(list(product([False, True], repeat=k)))
    chance = np.prod(np.where(votes, q, 1 - q), axis=1)
    assert chance[majority(votes)].sum() == pytest.approx(p0, abs=1e-12)


def test_each_server_votes_by_its_own_random_choice():
    schedule = Schedule(chances(p0=0.3, p=(0.1,) * 6), 4, vote="majority")
    exchanges = schedule.choices(0, 40_000).between
    assert exchanges.mean() == pytest.approx(0.3, abs=5 * np.sqrt(0.21 / 40_000))
    with pytest.raises(CoveyError, match=r"'vote' parameter must be one of 'central', 'majority'\. Got 'loudest'"):
        Schedule(chances(), 0, vote="loudest")


@given(seed=seeds, cuts=st.lists(st.integers(1, 4000), min_size=1, max_size=5))
@settings(max_examples=15)
def test_choices_do_not_depend_on_where_a_run_is_cut(seed, cuts):
    schedule = Schedule(chances(rho=0.1), seed)
    edges = [0, *np.cumsum(cuts).tolist()]
    parts = [schedule.choices(a, b) for a, b in pairwise(edges)]
    whole = schedule.choices(0, edges[-1])
    for name in ("between", "within", "refresh"):
        np.testing.assert_array_equal(np.concatenate([getattr(part, name) for part in parts]), getattr(whole, name))


def read_plainly(choices):
    """What each cluster does, iteration by iteration: 'l' local, 'w' within, 'b' between, 'r' a refresh after it."""
    clusters = [[] for _ in range(choices.within.shape[1])]
    for t in range(len(choices.between)):
        for j, steps in enumerate(clusters):
            steps.append("b" if choices.between[t] else "w" if choices.within[t, j] else "l")
            if choices.refresh[t]:
                steps.append("r")
    return ["".join(steps) for steps in clusters]


def read_rounds(rounds):
    clusters = ["" for _ in range(rounds.steps.shape[1])]
    clock = np.zeros(len(clusters), dtype=int)
    for turn in rounds:
        for j in range(len(clusters)):
            exchanges = int(turn.within[j])
            if turn.steps[j] or turn.takes_part[j]:
                assert turn.start[j] == clock[j]
            clusters[j] += "l" * int(turn.steps[j]) + "b" * turn.between + "w" * exchanges + "r" * turn.refresh
            clock[j] += int(turn.steps[j]) + turn.between + exchanges
    return clusters


@given(seed=seeds, p0=st.floats(0, 0.9), p=st.floats(0, 0.9), merge=st.booleans())
def test_rounds_hold_the_random_choices_in_order(seed, p0, p, merge):
    schedule = Schedule(chances(p0, (p, 0.5, 0.0), rho=0.0 if merge else 0.2), seed, merge)
    choices = schedule.choices(0, 60)
    rounds = group(choices, merge=merge)
    assert read_rounds(rounds) == read_plainly(choices)
    for turn in rounds:
        if not merge:
            assert turn.between <= 1
            assert turn.within.max() <= 1
            assert not (turn.between and turn.within.any())


def test_clusters_wait_only_at_an_exchange_between_them():
    """Cluster 0 exchanges at iterations 1 and 3, cluster 1 at 2: its first exchange shares a round with cluster 0's first."""
    within = np.array([[0, 0], [1, 0], [0, 1], [1, 0]], dtype=bool)
    rounds = group(Choices(np.zeros(4, dtype=bool), within, np.zeros(4, dtype=bool)))
    assert rounds.within.tolist() == [[1, 1], [1, 0], [0, 0]]
    assert rounds.steps.tolist() == [[1, 2], [1, 0], [0, 1]]


@pytest.mark.parametrize(("merge", "rho"), [(True, 0.0), (False, 0.0), (False, 0.15)])
def test_observed_exchanges_agree_with_the_expected_numbers(merge, rho):
    schedule, T = Schedule(chances(rho=rho), 9, merge), 200_000
    network = links(np.array([3, 1, 2]), d=4)
    seen = network.of(schedule.rounds(0, T), T)
    within, between = rates(schedule)
    np.testing.assert_allclose(seen.within, within * T, rtol=0.02)
    assert seen.between == pytest.approx(between * T, rel=0.02)
    alone, across = expected(schedule, T).paper_within, expected(schedule, T).paper_between
    if merge:
        # Between clusters the proposition is exact; within, it also counts exchanges just after an exchange between clusters.
        assert seen.between == pytest.approx(across, rel=0.02)
        np.testing.assert_allclose(seen.within - seen.between, (1 - 0.3) * alone, rtol=0.04)
    elif not rho:
        assert seen.between > 1.3 * across


def test_bytes_follow_from_exchanges():
    network = links(np.array([3, 1]), d=4)
    spent = network.count(np.array([10, 5]), 2)
    assert spent.bytes_within == 8 * (4 + 5) * (3 * 10 + 1 * 5)
    assert spent.bytes_between == 8 * (4 + 5) * 2 * 2
    assert (spent.exchanges, spent.bytes) == (10, spent.bytes_within + spent.bytes_between)
    total = spent + spent
    assert (total.within.tolist(), total.between) == ([20, 10], 4)
    assert isinstance(network.nothing, Ledger)
    assert links(np.array([7]), d=4).count(np.array([3]), 3).bytes_between == 0  # one cluster has no other to exchange with


def test_without_a_server_clusters_talk_to_each_other():
    network = links(np.array([3, 1, 1]), d=4, vote="majority")
    spent = network.count(np.array([1, 1, 1]), 1, votes=800)
    assert spent.bytes_between == 8 * 4.5 * 6 + 6 * 800 / 8


def test_streams_are_by_id():
    """The same wherever a client is, and another for another seed, cluster or kind of id."""
    client = np.arange(1000)
    tree = GroupedData.from_arrays(np.ones((1000, 1)), np.zeros(1000), client, client // 100).hierarchy
    mine = GroupedData.from_arrays(np.ones((3, 1)), np.zeros(3), [205, 7, 900], [2, 0, 9]).hierarchy
    assert streams(3, tree)[[7, 205, 900]].tolist() == streams(3, mine).tolist()
    as_text = GroupedData.from_arrays(np.ones((1000, 1)), np.zeros(1000), client.astype(str), client // 100).hierarchy
    moved = GroupedData.from_arrays(np.ones((1000, 1)), np.zeros(1000), client, 10 + client // 100).hierarchy
    everything = [streams(3, tree), streams(4, tree), streams(3, as_text), streams(3, moved)]
    assert len(np.unique(np.concatenate(everything))) == 4000
    assert streams(3, mine).tolist()[:2] == [
        7186283810920954531,
        1451745374748172689,
    ]  # of every version: saved runs depend on it


def test_uniforms_are_uniform_and_can_be_read_anywhere():
    tree = GroupedData.from_arrays(np.ones((1000, 1)), np.zeros(1000), np.arange(1000)).hierarchy
    drawn = uniforms(streams(0, tree), 0, 50)
    assert np.array_equal(drawn[:, 20:30], uniforms(streams(0, tree), 20, 10))
    assert kstest(drawn.ravel(), "uniform").pvalue > 1e-3
    assert np.abs(np.corrcoef(drawn[:, :5].T) - np.eye(5)).max() < 0.15
