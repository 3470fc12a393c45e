"""The compiled loops of tables and ids do what plain numpy does."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given

from covey.kernels import (
    counting_sort,
    find_in_table,
    find_pairs,
    find_parents,
    multiply_rows,
    rank_in_segments,
    rank_in_table,
    take_rows,
)
from tests.conftest import seeds

EACH_ROW = np.empty(0, dtype=np.int64)  # no list of runs


def drawn(seed):
    """The clients of random rows, out of 8, and the clusters of these clients, out of 3."""
    rng = np.random.default_rng(seed)
    client = rng.integers(8, size=int(rng.integers(1, 40)))
    return rng, client, rng.integers(3, size=8)


@given(seeds)
def test_parents_and_counts(seed):
    _, client, home = drawn(seed)
    parent, counts = np.full(8, -1), np.zeros(8, dtype=np.int64)
    assert find_parents(client, EACH_ROW, home[client], parent, counts) == -1
    np.testing.assert_array_equal(counts, np.bincount(client, minlength=8))
    np.testing.assert_array_equal(parent, np.where(counts > 0, home, -1))


def test_the_first_row_that_puts_a_client_in_a_second_cluster():
    client, cluster = np.array([0, 1, 0, 1]), np.array([2, 0, 2, 1])
    assert find_parents(client, EACH_ROW, cluster, np.full(2, -1), np.zeros(2, dtype=np.int64)) == 3


@given(seeds)
def test_runs_of_rows_give_the_same_as_their_rows(seed):
    rng, client, home = drawn(seed)
    lengths = rng.integers(1, 4, size=len(client))
    runs, rows, rank = np.concatenate([[0], np.cumsum(lengths)]), np.repeat(client, lengths), rng.permutation(8)
    cluster = np.where(rng.random(len(rows)) < 0.02, 3, home[rows])
    ptr = np.concatenate([[0], np.cumsum(np.bincount(rank[rows], minlength=8))])

    def results(codes, runs):
        parent, counts, order = np.full(8, -1), np.zeros(8, dtype=np.int64), np.empty(len(rows), dtype=np.int32)
        row = find_parents(codes, runs, cluster, parent, counts)
        moved = counting_sort(codes, runs, rank, ptr, order)
        return row, moved, order.tolist(), (parent.tolist(), counts.tolist()) if row < 0 else None

    assert results(client, runs) == results(rows, EACH_ROW)


@given(seeds)
def test_rows_are_sorted_by_rank_and_keep_their_order(seed):
    rng, client, _ = drawn(seed)
    rank = rng.permutation(8)
    ptr = np.concatenate([[0], np.cumsum(np.bincount(rank[client], minlength=8))])
    order = np.empty(len(client), dtype=np.int32)
    moved = counting_sort(client, EACH_ROW, rank, ptr, order)
    expected = np.argsort(rank[client], kind="stable")
    np.testing.assert_array_equal(order, expected)
    assert moved == (expected != np.arange(len(client))).any()


@given(seeds)
def test_clients_are_found_by_id_and_cluster(seed):
    rng, _, _ = drawn(seed)
    parent = np.sort(rng.integers(5, size=12))
    ids = np.concatenate([rng.permutation(12)[: (parent == j).sum()] for j in range(5)])  # an id once in a cluster
    order, ptr = np.argsort(ids, kind="stable"), np.concatenate([[0], np.cumsum(np.bincount(ids, minlength=12))])
    code, cluster = rng.integers(-1, 12, size=60), rng.integers(-1, 6, size=60)
    found = np.empty(60, dtype=np.int64)
    find_pairs(0, 60, code, cluster, ptr, order, parent, found)
    known = {pair: at for at, pair in enumerate(zip(ids.tolist(), parent.tolist(), strict=True))}
    assert found.tolist() == [known.get(pair, -1) for pair in zip(code.tolist(), cluster.tolist(), strict=True)]


@given(seeds)
def test_rows_are_taken(seed):
    rng, client, _ = drawn(seed)
    source, target = rng.normal(size=(8, 2)), np.zeros((len(client), 4))
    take_rows(0, len(client), source, client, target, 1)
    zeros = np.zeros((len(client), 1))
    np.testing.assert_array_equal(target, np.hstack([zeros, source[client], zeros]))


@given(seeds)
def test_ranks_are_those_of_sorted_distinct_values(seed):
    rng, _, _ = drawn(seed)
    values = rng.integers(-5, 20, size=30)
    place, codes = np.zeros(int(np.ptp(values)) + 1, dtype=np.int64), np.empty(30, dtype=np.int64)
    rank_in_table(values, int(values.min()), place, codes)
    distinct, inverse = np.unique(values, return_inverse=True)
    np.testing.assert_array_equal(codes, inverse)
    np.testing.assert_array_equal(np.flatnonzero(place) + values.min(), distinct)


def test_values_are_found_in_a_table():
    place, codes = np.array([0, -1, 1]), np.empty(6, dtype=np.int64)
    find_in_table(np.array([7, 8, 9, 6, 10, -(2**62)]), 7, place, codes)
    assert codes.tolist() == [0, -1, 1, -1, -1, -1]


@given(seeds)
def test_rows_are_multiplied_by_the_coefficients_of_their_model(seed):
    rng, client, _ = drawn(seed)
    rows, table, product = rng.normal(size=(len(client), 3)), rng.normal(size=(8, 3)), np.empty(len(client))
    which = np.where(rng.random(len(client)) < 0.3, -1, client)
    multiply_rows(0, len(client), rows, table, which, product)
    np.testing.assert_allclose(product, (rows * table[which]).sum(axis=1), rtol=1e-12, atol=1e-14)


@given(seeds)
def test_ranks_within_segments(seed):
    rng, client, _ = drawn(seed)
    ptr = np.concatenate([[0], np.cumsum(np.bincount(client, minlength=8))])
    values, rank = rng.integers(4, size=len(client)).astype(float), np.full(len(client), -1)
    rank_in_segments(0, 8, values, ptr, 4, rank)
    for first, last in pairwise(ptr):
        expected = np.argsort(np.argsort(values[first:last], kind="stable"), kind="stable")
        np.testing.assert_array_equal(rank[first:last], expected if last - first <= 4 else -1)
