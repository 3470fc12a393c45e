"""Ids of rows as numbers: sorted or shuffled, text or numbers, in runs or not."""

from __future__ import annotations

import datetime

import numpy as np
import polars as pl
import pytest

from covey.tree.hierarchy import encode, lookup

DAY = datetime.date(2026, 1, 1)
IDS = {
    "text": [f"c{at}" for at in (11, 2, 300, 4, 50)],
    "integers": [10**15, 3, -7, 12, 5],
    "dates": [DAY + datetime.timedelta(days=at) for at in (3, 1, 9, 2, 40)],
    "truth": [True, False, True, False, True],
}


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("kind", IDS)
def test_codes_give_the_ids_back(kind, shuffled):
    """Against polars: sorted distinct ids, and the position of each row's id among them."""
    at = np.repeat(np.arange(5), [7, 1, 4, 9, 2])
    rows = pl.Series(IDS[kind]).gather(np.random.default_rng(0).permutation(at) if shuffled else at)
    distinct, codes = encode(rows, "client")
    assert distinct.equals(rows.unique().sort())
    assert distinct.gather(codes).equals(rows)
    np.testing.assert_array_equal(lookup(rows, distinct, "client"), codes)
    missing = lookup(rows, distinct[1:], "client")
    np.testing.assert_array_equal(missing, codes - 1)


def test_categories_met_earlier_in_the_process_change_nothing():
    keep = pl.Series(["z", "q", "b"] * 3).cast(pl.Categorical)
    distinct, codes = encode(["b", "z", "a", "z"], "client")
    assert distinct.to_list() == ["a", "b", "z"]
    assert codes.tolist() == [1, 2, 0, 2]
    assert len(keep) == 9
