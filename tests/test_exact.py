"""Exact sums equal rational arithmetic for any order, split and number of threads; they are never a wrong number."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import reduce
from itertools import pairwise, product
from operator import add

import numba
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from covey.exact import DIGITS, LIMBS, QUANTUM, WIDE, WIDE_DIGITS, Exact, from_digits, segment_sum, total
from covey.kernels import (
    TOO_LARGE,
    accumulate_in,
    accumulate_moments,
    accumulate_rows,
    carry_digits,
    round_limbs,
    sum_pieces,
)
from covey.threads import use_threads

QUANTA = 2**96

addends = st.one_of(
    st.floats(-(2.0**80), 2.0**80),
    st.floats(-1e3, 1e3),
    st.floats(-(2.0**-40), 2.0**-40),
    st.integers(-(2**53), 2**53).map(lambda m: m * QUANTUM / 4),  # ties and neighbours of the quantum
    st.builds(math.ldexp, st.floats(-1, 1), st.integers(-150, 80)),
)
anything = st.one_of(addends, st.sampled_from([math.nan, math.inf, -math.inf, 2.0**94, -1e300, 2.0**93, -(2.0**93)]))


def rounded(x):
    """The nearest multiple of the quantum, ties to even, in rational arithmetic."""
    return Fraction(round(Fraction(x) * QUANTA), QUANTA)


def fractions(exact):
    """The finite sums as fractions, in order."""
    return [Fraction(whole, 2 ** (32 * exact.limbs.shape[-1])) for whole in exact.integers().ravel().tolist()]


def same(a, b):
    return a.limbs.tolist() == b.limbs.tolist() and a.size.tolist() == b.size.tolist()


@given(st.lists(addends, max_size=40))
def test_a_sum_is_the_exact_sum_correctly_rounded(values):
    total = segment_sum(np.array(values, dtype=float), np.array([0, len(values)]))
    truth = sum(map(rounded, values), Fraction())
    assert fractions(total)[0] == truth
    assert total.floats()[0] == float(truth)  # Python's division of integers is correctly rounded


@given(st.lists(st.builds(math.ldexp, st.floats(-1, 1, width=32), st.integers(-60, 80)), min_size=1, max_size=40))
def test_sums_of_multiples_of_the_quantum_agree_with_fsum(values):
    values = [x for x in values if x == 0 or abs(x) >= 2.0**-64]
    assert Exact.of(values).sum().floats() == math.fsum(values)


@given(st.lists(anything, min_size=1, max_size=30), st.randoms(use_true_random=False), st.data())
def test_any_order_and_any_split_give_the_same_bits(values, random, data):
    at_once = segment_sum(np.array(values), np.array([0, len(values)]))[0]
    shuffled = list(values)
    random.shuffle(shuffled)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(values)), max_size=5)))
    parts = segment_sum(np.array(shuffled), np.array([0, *cuts, len(values)]))
    one_by_one = reduce(add, (Exact.of(x) for x in shuffled))
    assert same(at_once, parts.sum())
    assert same(at_once, one_by_one)
    assert same(at_once, reduce(add, (parts[j] for j in range(len(cuts) + 1))))


def of_integers(wholes):
    """Multiples of the quantum, modulo 2^192."""
    rows = b"".join((whole % 2**192).to_bytes(8 * LIMBS, "little") for whole in wholes)
    limbs = np.frombuffer(rows, "<u8").reshape(-1, LIMBS).astype(np.uint64)
    return Exact(limbs, np.zeros(len(limbs), dtype=np.int64))


@given(
    st.lists(st.builds(lambda whole, drop: whole >> drop, st.integers(-(2**191), 2**191 - 1), st.integers(0, 191)), min_size=1)
)
def test_any_limbs_round_to_the_nearest_number(wholes):
    exact = of_integers(wholes)
    assert exact.integers().tolist() == wholes
    assert exact.floats().tolist() == [whole / QUANTA for whole in wholes]


@given(st.integers(2**52, 2**53 - 1), st.integers(1, 137), st.sampled_from([1, -1]))
def test_ties_go_to_even_and_the_last_bit_breaks_them(leading, below, sign):
    tie = (2 * leading + 1) << below
    wholes = [sign * (tie + nudge) for nudge in (-1, 0, 1)]
    assert of_integers(wholes).floats().tolist() == [whole / QUANTA for whole in wholes]


@given(hnp.arrays(float, (2, 3, 4), elements=anything))
def test_differences_undo_sums(values):
    a, b = Exact.of(values[0]), Exact.of(values[1])
    back = a + b - b
    assert back.limbs.tolist() == a.limbs.tolist()
    finite = a.finite & b.finite & (a + b).finite
    np.testing.assert_array_equal((a - b).floats()[finite], (a + Exact.of(-values[1])).floats()[finite])
    assert ((a - b).finite == (a + b).finite).all()


def test_rounding_at_the_quantum():
    values = np.array([1.0, 0.5, 1.5, 2.5, 0.75, -0.5, -1.5, -0.25]) * QUANTUM
    assert (Exact.of(values).floats() / QUANTUM).tolist() == [1, 0, 2, 2, 1, 0, -2, 0]
    tiny = np.array([5e-324, -5e-324, 1e-310, 0.0, -0.0])
    assert Exact.of(tiny).limbs.tolist() == np.zeros((5, LIMBS)).tolist()


def test_numbers_of_ordinary_size_are_exact():
    rng = np.random.default_rng(0)
    values = rng.choice([-1, 1], 20_000) * 10 ** rng.uniform(-13, 28, size=20_000)
    np.testing.assert_array_equal(Exact.of(values).floats(), values)
    ends = np.concatenate([s * 2.0 ** np.arange(-96, 94) for s in (1, -1)])
    np.testing.assert_array_equal(Exact.of(ends).floats(), ends)
    largest = np.nextafter(2.0**94, 0)
    assert Exact.of([largest, -largest]).floats().tolist() == [largest, -largest]


def test_cancellation_is_exact():
    values = np.array([2.0**92, 2.0**-96, 1.0, -(2.0**92), -1.0])
    assert segment_sum(values, np.array([0, 5])).floats().tolist() == [2.0**-96]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 2.0**94, -(2.0**94), 1e308])
def test_sums_that_are_not_finite_or_too_large_stay_so(bad):
    total = Exact.of([1.0, bad]) + Exact.of([2.0, 3.0])
    assert not (total - Exact.of([0.0, bad])).finite[1]
    np.testing.assert_array_equal((total - Exact.of([0.0, bad])).floats(), [3.0, np.nan])
    np.testing.assert_array_equal(total.sum().floats(), np.nan)
    assert total.size.tolist() == (total + total).size.tolist() == [0, TOO_LARGE]  # the size itself does not overflow
    assert total.integers().tolist() == [3 * QUANTA, None]


def test_a_sum_that_could_overflow_is_nan():
    """Beyond 2^95 the integer overflows. The sum must then be NaN, even if other addends cancel it."""
    for many in (4, 5, 64):
        assert np.isnan(segment_sum(np.full(many, 2.0**93), np.array([0, many])).floats()).all()
    large = Exact.of(np.full(4, 2.0**93))
    assert np.isnan(large.sum().floats())
    assert np.isnan((large.sum() - large.sum()).floats())
    just = np.full(TOO_LARGE // 2**28 - 1, 2.0**92)
    assert segment_sum(just, np.array([0, len(just)])).floats().tolist() == [just.sum()]


def test_segments_of_any_shape_with_empty_ones():
    rng = np.random.default_rng(1)
    ptr = np.array([0, 0, 3, 3, 5000, 5000])
    values = rng.normal(size=(5000, 2, 3))
    sums = segment_sum(values, ptr)
    assert sums.shape == (5, 2, 3)
    truth = [[[math.fsum(values[a:b, i, j]) for j in range(3)] for i in range(2)] for a, b in pairwise(ptr)]
    np.testing.assert_allclose(sums.floats(), truth, rtol=0, atol=0)
    assert segment_sum(np.empty((0, 2)), np.array([0, 0])).floats().tolist() == [[0.0, 0.0]]
    assert segment_sum(np.empty((4, 0)), np.array([0, 4])).shape == (1, 0)
    assert same(segment_sum(values.transpose(0, 2, 1), ptr), segment_sum(values.transpose(0, 2, 1).copy(), ptr))


def test_the_same_bits_with_any_number_of_threads(always_share):
    values = np.random.default_rng(2).normal(size=(100_000, 3))
    ptr = np.array([0, 10, 60_000, 100_000])
    with use_threads(1):
        alone = segment_sum(values, ptr)
    with use_threads(4):
        assert same(alone, segment_sum(values, ptr))


@numba.njit(fastmath=True)
def _collect(values, digits):
    for x in values:
        accumulate_in(digits.reshape((1, len(digits))), 0, x)


@given(hnp.arrays(float, 20, elements=addends))
def test_accumulate_inside_a_kernel_with_fast_arithmetic(values):
    digits = np.zeros(DIGITS, dtype=np.int64)
    _collect(values, digits)
    assert same(from_digits(digits), Exact.of(values).sum())


def test_shapes():
    values = np.arange(24.0).reshape(2, 3, 4)
    exact = Exact.of(values)
    assert exact.shape == (2, 3, 4)
    for axis in (0, 1, 2, -1):
        np.testing.assert_array_equal(exact.sum(axis).floats(), values.sum(axis))
    np.testing.assert_array_equal(exact[1, :, 2].floats(), values[1, :, 2])
    np.testing.assert_array_equal(exact.reshape(6, -1).floats(), values.reshape(6, -1))
    assert exact[1, 2, 3].shape == ()
    assert exact[1, 2, 3].floats() == 23.0
    joined = Exact.join([exact, Exact.zeros(2, 2), Exact.of(7.0)])
    assert joined.floats().tolist() == [*range(24), 0, 0, 0, 0, 7]


@given(st.integers(0, 2**32 - 1), st.sampled_from([1e-30, 1e-9, 1.0, 1e5, 1e6, 1e25]))
def test_accumulate_rows_agrees_with_single_additions(seed, size):
    """The fast path for small numbers gives the same bits, also with large numbers and NaN among them."""
    rng = np.random.default_rng(seed)
    rows, weights = size * rng.normal(size=(5000, 3)) * 10.0 ** rng.integers(-3, 3, size=(5000, 1)), rng.random(5000)
    rows[::7] = 0.0
    rows[rng.integers(5000), 2] = rng.choice([np.nan, np.inf, -1e40, 1.0])
    digits = np.zeros((3, DIGITS), dtype=np.int64)
    accumulate_rows(digits, weights, rows)
    quick, slow = from_digits(digits), segment_sum(weights[:, None] * rows, np.array([0, 5000]))
    assert np.array_equal(quick.floats(), slow.floats()[0], equal_nan=True)
    assert np.array_equal(quick.limbs[quick.finite], slow.limbs[0][quick.finite])


def test_many_large_addends_do_not_overflow():
    digits = np.zeros((1, DIGITS), dtype=np.int64)
    accumulate_rows(digits, np.ones(200_000), np.full((200_000, 1), -524287.5))
    assert from_digits(digits).floats().tolist() == [-524287.5 * 200_000]


# Kernels compared with plain loops


def value_of(digits):
    """The value of a row of digits in quanta; the last digit is the size."""
    return sum(int(digit) << 32 * at for at, digit in enumerate(digits[:-1]))


def plain_sum(values, limbs):
    """A plain sum: each value is rounded to quanta and added modulo ``2^(64 n)``; sizes are added too."""
    unit, room = 2 ** (32 * limbs), 2 ** (32 * limbs - 2)
    total = size = 0
    for x in map(float, values):
        if not abs(x) < room:  # NaN too
            size += TOO_LARGE
        else:
            total += round(Fraction(x) * unit)
            size += int(abs(x)) // 2 ** (32 * limbs - 32)
    return total, min(size, TOO_LARGE)


@given(st.lists(anything, max_size=8), st.sampled_from([LIMBS, WIDE]))
def test_accumulate_is_a_plain_sum(values, limbs):
    digits = np.zeros((2, 2 * limbs + 1), dtype=np.int64)
    for x in values:
        accumulate_in(digits[:1], 0, x)
        accumulate_in(digits, 1, x)
    total, size = plain_sum(values, limbs)
    for row in digits:
        assert min(int(row[-1]), TOO_LARGE) == size
        assert value_of(row) == total


@given(hnp.arrays(float, (7, 2), elements=addends), hnp.arrays(float, 7, elements=st.floats(-2, 2)))
def test_accumulate_rows_is_a_plain_sum(rows, weights):
    digits = np.zeros((2, DIGITS), dtype=np.int64)
    accumulate_rows(digits, weights, rows)
    for column in range(2):
        assert value_of(digits[column]) == plain_sum(weights * rows[:, column], LIMBS)[0]


@given(hnp.arrays(float, (6, 2), elements=st.floats(-1e20, 1e20)))
def test_accumulate_moments_is_a_plain_sum_and_one_of_squares(X):
    digits = np.zeros((2, 2, WIDE_DIGITS), dtype=np.int64)
    accumulate_moments(X, digits)
    for column in range(2):
        values = [Fraction(x) for x in X[:, column].tolist()]
        squares = sum(value**2 for value in values)
        assert value_of(digits[0, column]) == plain_sum(X[:, column], WIDE)[0]
        assert abs(Fraction(value_of(digits[1, column]), 2**288) - squares) <= Fraction(18, 2**288)


@given(hnp.arrays(np.int64, (3, DIGITS), elements=st.integers(-(2**61), 2**61)))
def test_carrying_digits_keeps_their_value(digits):
    digits[:, -1] = np.abs(digits[:, -1])
    limbs, size = np.empty((3, LIMBS), dtype=np.uint64), np.empty(3, dtype=np.int64)
    carry_digits(digits, limbs, size)
    assert [int.from_bytes(row.tobytes(), "little") for row in limbs] == [value_of(row) % 2**192 for row in digits]
    assert size.tolist() == [min(int(row[-1]), TOO_LARGE) for row in digits]


@given(hnp.arrays(np.uint64, (4, LIMBS)), st.integers(0, 2))
def test_rounding_limbs_is_a_division_of_integers(limbs, large):
    size = np.array([0, 0, 0, large * TOO_LARGE], dtype=np.int64)
    nearest = np.empty(4)
    round_limbs(limbs, size, nearest)
    wholes = [int.from_bytes(row.tobytes(), "little", signed=True) for row in limbs]
    expected = [math.nan if size[at] else whole / QUANTA for at, whole in enumerate(wholes)]
    np.testing.assert_array_equal(nearest, expected)


def test_sums_of_pieces_are_plain_sums():
    rows = np.random.default_rng(4).normal(size=(40, 2)) * 10.0 ** np.arange(-20, 20)[:, None]
    ptr, start, owner = np.array([0, 0, 13, 40]), np.array([0, 13]), np.array([1, 2])
    out = np.zeros((2, 2, DIGITS), dtype=np.int64)
    sum_pieces(0, 2, rows, ptr, start, owner, out)
    for piece, column in product(range(2), range(2)):
        expected = plain_sum(rows[ptr[owner[piece]] : ptr[owner[piece] + 1], column], LIMBS)[0]
        assert value_of(out[piece, column]) == expected


# Wide sums

of_any_size = st.builds(math.ldexp, st.floats(-1, 1), st.integers(-350, 284))


@given(st.lists(of_any_size, max_size=40), st.randoms(use_true_random=False))
def test_a_wide_sum_is_the_exact_sum_correctly_rounded(values, random):
    truth = sum((Fraction(round(Fraction(x) * 2**288), 2**288) for x in values), Fraction())
    found = total(np.array(values))
    assert fractions(found) == [truth]
    assert float(found) == float(truth)
    random.shuffle(values)
    assert same(found, reduce(add, (Exact.of(x, WIDE) for x in values), Exact.zeros(limbs=WIDE)))


def test_wide_sums_of_too_large_numbers_are_nan():
    for bad in (math.nan, math.inf, 2.0**286, -1e300):
        assert math.isnan(total(np.array([1.0, bad])))
    largest = np.nextafter(2.0**286, 0)
    assert float(total(np.array([largest]))) == largest
    assert math.isnan(total(np.full(5, largest)))
    assert float(total(np.array([2.0**-288, -(2.0**284), 2.0**284]))) == 2.0**-288


@given(st.lists(anything, min_size=1, max_size=12))
def test_wider_and_narrower_is_the_same_number(values):
    narrow = Exact.of(values)
    np.testing.assert_array_equal(narrow.widened().floats(), narrow.floats())
    back = narrow.widened().narrowed()
    np.testing.assert_array_equal(back.floats(), narrow.floats())
    assert back.limbs[narrow.finite].tolist() == narrow.limbs[narrow.finite].tolist()
    assert set(narrow.widened().size.tolist()) <= {0, TOO_LARGE}
    whole, parts = narrow.sum(), narrow.widened().sum().narrowed()
    if whole.finite:
        assert same(Exact(whole.limbs, np.int64(0) * whole.size), Exact(parts.limbs, np.int64(0) * parts.size))
        assert parts.finite
