"""From raw tables to rows: each rule on a table small enough to check by hand, and all rules against a plain loop."""

from __future__ import annotations

from collections import Counter
from datetime import date, timedelta

import numpy as np
import polars as pl
import pytest
from hypothesis import given

from covey.datasets import simulate_donors
from covey.errors import DataError
from covey.reproduce.solicitations import solicitations
from tests.conftest import seeds

DAY_0 = date(2020, 1, 1)
ZIPS = pl.DataFrame({"zip": ["60637", "02139"], "cluster": ["middle", "lower-middle"]})
ROW_COLUMNS = ["zip", "cluster", "id", "date", "success", "recency", "frequency"]


def day(number):
    return DAY_0 + timedelta(days=number)


def appeals_of(*pairs):
    return pl.DataFrame([(who, day(when)) for who, when in pairs], ["id", "date"], orient="row")


def gifts_of(*triples):
    schema = {"id": pl.Int64, "date": pl.Date, "zip": pl.String}
    return pl.DataFrame([(who, day(when), zip_) for who, when, zip_ in triples], schema, orient="row")


def drawn(appeals, gifts, zips=ZIPS, at_least=1):
    """Days from the first day, and rows as tuples without cluster: easy to write down."""
    result = solicitations(appeals_of(*appeals), gifts_of(*gifts), zips, at_least=at_least)
    rows = [
        (zip_, who, (when - DAY_0).days, success, recency, frequency)
        for zip_, _, who, when, success, recency, frequency in result.rows.iter_rows()
    ]
    return rows, result.counts


def test_a_gift_answers_the_latest_appeal_on_or_before_its_day():
    gifts = [(1, -10, "60637"), (1, 20, "60637"), (1, 400, "60637")]
    rows, counts = drawn([(1, 0), (1, 20), (1, 50)], gifts)
    # The gift of day 20 answers the appeal of day 20, not that of day 0; the last appeal waits for ever.
    assert rows == [("60637", 1, 0, 0, 10, 1), ("60637", 1, 20, 1, 30, 1), ("60637", 1, 50, 1, 30, 2)]
    assert counts["successes"] == 2
    assert counts["gifts_before_first_appeal"] == 1


def test_the_day_before_the_next_appeal_still_answers():
    rows, _ = drawn([(1, 0), (1, 20)], [(1, -1, "60637"), (1, 19, "60637")])
    assert rows == [("60637", 1, 0, 1, 1, 1), ("60637", 1, 20, 0, 1, 2)]


def test_several_gifts_answer_one_appeal_once_and_all_count():
    gifts = [(1, -5, "60637"), (1, -5, "60637"), (1, 3, "60637"), (1, 3, "60637"), (1, 4, "60637")]
    rows, counts = drawn([(1, 0), (1, 30)], gifts)
    assert rows == [("60637", 1, 0, 1, 5, 2), ("60637", 1, 30, 0, 26, 5)]
    assert counts["successes"] == 1


def test_a_gift_on_the_day_of_the_appeal_is_not_before_it():
    rows, counts = drawn([(1, 0), (1, 9)], [(1, 0, "60637")])
    assert rows == [("60637", 1, 9, 0, 9, 1)]
    assert counts["appeals_before_first_gift"] == 1
    assert counts["appeals_never_gave"] == 0


def test_appeals_without_history_are_left_out_and_counted_by_reason():
    rows, counts = drawn([(1, 0), (2, 0), (2, 5), (3, 0)], [(1, -1, "60637"), (3, 7, "60637")])
    assert [row[1] for row in rows] == [1]
    assert counts["appeals_never_gave"] == 2
    assert counts["appeals_before_first_gift"] == 1


def test_neighbours_do_not_lend_their_gifts_or_appeals():
    rows, counts = drawn([(2, 0)], [(1, -3, "60637"), (2, -9, "60637"), (3, 4, "60637")])
    assert rows == [("60637", 2, 0, 0, 9, 1)]
    assert counts["gifts_never_appealed"] == 2
    assert counts["gifts_before_first_appeal"] == 1


def test_two_appeals_on_a_day_are_one():
    rows, counts = drawn([(1, 0), (1, 0), (1, 0)], [(1, -3, "60637"), (1, 0, "60637")])
    assert rows == [("60637", 1, 0, 1, 3, 1)]
    assert counts["appeals_same_day"] == 2


def test_rows_out_of_order_are_sorted_and_counted():
    """A row is out of order if the one of the same donor before it is later; other donors in between do not matter."""
    gifts = [(1, 5, "60637"), (2, -9, "60637"), (1, -2, "60637"), (1, -1, "60637"), (2, -9, "60637")]
    rows, counts = drawn([(1, 10), (2, 0), (1, 0), (1, 3)], gifts)
    assert [row[2:] for row in rows if row[1] == 1] == [(0, 0, 1, 2), (3, 1, 4, 2), (10, 0, 5, 3)]
    assert counts["appeals_out_of_order"] == 1
    assert counts["gifts_out_of_order"] == 1


def test_the_zip_is_the_one_known_at_the_time():
    gifts = [(1, -9, None), (1, -5, "60637"), (1, 2, "02139"), (1, 12, None)]
    rows, counts = drawn([(1, -7), (1, 0), (1, 10), (1, 20)], gifts)
    assert rows == [("02139", 1, 10, 1, 8, 3), ("02139", 1, 20, 0, 8, 4), ("60637", 1, 0, 1, 5, 2)]
    assert counts["appeals_without_zip"] == 1
    assert counts["donors_moved"] == 1


def test_of_two_zips_on_a_day_the_greater_is_taken():
    for order in (1, -1):
        rows, _ = drawn([(1, 0)], [(1, -1, "60637"), (1, -1, None), (1, -1, "02139")][::order])
        assert rows == [("60637", 1, 0, 0, 1, 3)]


def test_zips_without_a_cluster_are_unknown():
    zips = pl.DataFrame({"zip": ["60637", "02139", None, "99999"], "cluster": ["middle", None, "poor", "poor"]})
    appeals, gifts = appeals_of((1, 0), (2, 0), (3, 0), (3, 1)), gifts_of((1, -1, "60637"), (2, -1, "02139"), (3, -1, "10001"))
    result = solicitations(appeals, gifts, zips, at_least=1)
    assert result.rows["cluster"].to_list() == ["middle", "unknown", "unknown", "unknown"]
    assert result.rows["zip"].to_list() == ["60637", "02139", "10001", "10001"]
    assert (result.counts["unknown_zips"], result.counts["unknown_zip_appeals"]) == (2, 3)
    assert (result.counts["zips"], result.counts["clusters"]) == (3, 2)


def test_small_zips_are_left_out():
    appeals = [(1, n) for n in range(5)] + [(2, n) for n in range(4)]
    gifts = [(1, -1, "60637"), (2, -1, "02139")]
    rows, counts = drawn(appeals, gifts, at_least=5)
    assert {row[0] for row in rows} == {"60637"}
    assert (counts["small_zips"], counts["small_zip_appeals"]) == (1, 4)
    assert drawn(appeals, gifts, at_least=4)[1]["zips"] == 2


def test_zips_are_compared_as_text_of_five_digits():
    appeals = appeals_of((1, 0), (2, 0), (3, 0))
    as_text = gifts_of((1, -1, "02139"), (2, -1, "02139-4307"), (3, -1, "02139-43"))
    numbers = pl.DataFrame({"zip": [2139], "cluster": ["middle"]})
    assert solicitations(appeals, as_text, numbers, at_least=1).rows.select("zip", "cluster").rows() == [
        ("02139", "middle"),
        ("02139", "middle"),
        ("02139-43", "unknown"),
    ]
    as_numbers = as_text.with_columns(zip=pl.Series([2139, 2139, None], dtype=pl.Int32))
    result = solicitations(appeals, as_numbers, pl.DataFrame({"zip": ["02139-0001"], "cluster": ["middle"]}), at_least=1)
    assert result.rows["cluster"].to_list() == ["middle", "middle"]
    assert result.counts["appeals_without_zip"] == 1


def test_blank_zips_and_clusters_are_missing():
    gifts = gifts_of((1, -3, " 60637 "), (1, -2, " "), (2, -5, "60601"))
    zips = pl.DataFrame({"zip": ["60637", "60601"], "cluster": ["", "middle"]})
    result = solicitations(appeals_of((1, 0), (2, 0)), gifts, zips, at_least=1)
    assert result.rows.select("zip", "cluster", "recency").rows() == [("60601", "middle", 5), ("60637", "unknown", 2)]


FORMS = {
    "datetime": lambda frame: frame.with_columns(pl.col("date").cast(pl.Datetime) + pl.duration(hours=23)),
    "text": lambda frame: frame.with_columns(pl.col("date").cast(pl.String)),
    "text with time": lambda frame: frame.with_columns(pl.format("{}T08:30:00Z", "date").alias("date")),
    "categorical": lambda frame: frame.with_columns(pl.col("date").cast(pl.String).cast(pl.Categorical)),
    "32 bits": lambda frame: frame.with_columns(pl.col("id").cast(pl.Int32)),
}


@pytest.mark.parametrize("form", FORMS)
def test_other_types_give_the_same_rows(form):
    appeals, gifts, zips = random_tables(3)
    expected = solicitations(appeals, gifts, zips, at_least=2)
    result = solicitations(FORMS[form](appeals), gifts, zips, at_least=2)
    assert result.rows.equals(expected.rows)
    assert result.counts == expected.counts
    assert solicitations(appeals, FORMS[form](gifts), zips, at_least=2).rows.equals(expected.rows)


def test_ids_may_be_text():
    appeals, gifts, zips = random_tables(4)
    expected = solicitations(appeals, gifts, zips, at_least=2)
    named = [frame.with_columns(pl.format("donor {}", "id").alias("id")) for frame in (appeals, gifts)]
    rows = solicitations(*named, zips, at_least=2).rows
    back = rows.with_columns(pl.col("id").str.slice(6).cast(pl.Int64)).sort("cluster", "zip", "id", "date")
    assert back.equals(expected.rows)


def random_tables(seed):
    """A few donors, days and ZIPs, so that every coincidence happens: same days, missing ZIPs, strangers, no order."""
    rng = np.random.default_rng(seed)
    n, m, donors, days = rng.integers(20, 60), rng.integers(10, 60), rng.integers(3, 12), rng.integers(5, 60)
    appeals = appeals_of(*zip(rng.integers(donors, size=n).tolist(), rng.integers(days, size=n).tolist(), strict=True))
    places = rng.choice(["00001", "00002", "00003-1234", "00004", None], size=m).tolist()
    who, when = rng.integers(donors + 2, size=m).tolist(), rng.integers(-20, days + 10, size=m).tolist()
    zips = pl.DataFrame({"zip": [1, 2, 3], "cluster": ["a", "b", ["a", None][seed % 2]]})
    return appeals, gifts_of(*zip(who, when, places, strict=True)), zips


def by_loops(appeals, gifts, zips, at_least):
    """The definitions once more, appeal by appeal, with nothing but dictionaries and lists."""
    counts = Counter(appeals=appeals.height, gifts=gifts.height)
    cluster_of = {f"{zip_:05}": cluster for zip_, cluster in zips.iter_rows()}
    asked, given = {}, {}
    latest = {}
    for who, when in appeals.iter_rows():
        counts["appeals_out_of_order"] += who in latest and when < latest[who]
        latest[who] = when
        if when in asked.setdefault(who, []):
            counts["appeals_same_day"] += 1
        else:
            asked[who].append(when)
    latest = {}
    for who, when, zip_ in gifts.iter_rows():
        counts["gifts_out_of_order"] += who in latest and when < latest[who]
        latest[who] = when
        given.setdefault(who, []).append((when, (zip_ or "")[:5]))
    for who, presents in given.items():
        if who not in asked:
            counts["gifts_never_appealed"] += len(presents)
        else:
            counts["gifts_before_first_appeal"] += sum(when < min(asked[who]) for when, _ in presents)
    rows, seen = [], {}
    for who, days in asked.items():
        for when in days:
            if who not in given:
                counts["appeals_never_gave"] += 1
                continue
            before = sorted(present for present in given[who] if present[0] < when)
            if not before:
                counts["appeals_before_first_gift"] += 1
                continue
            known = [zip_ for _, zip_ in before if zip_]
            if not known:
                counts["appeals_without_zip"] += 1
                continue
            end = min((later for later in days if later > when), default=date.max)
            success = any(when <= gift_day < end for gift_day, _ in given[who])
            seen.setdefault(who, set()).add(known[-1])
            cluster = cluster_of.get(known[-1]) or "unknown"
            rows.append((known[-1], cluster, who, when, int(success), (when - before[-1][0]).days, len(before)))
    counts["donors_moved"] = sum(len(places) > 1 for places in seen.values())
    sizes = Counter(row[0] for row in rows)
    small = {zip_: size for zip_, size in sizes.items() if size < at_least}
    counts["small_zips"], counts["small_zip_appeals"] = len(small), sum(small.values())
    rows = sorted((row for row in rows if row[0] not in small), key=lambda row: (row[1], row[0], row[2], row[3]))
    unknown = [row[0] for row in rows if row[1] == "unknown"]
    counts["unknown_zips"], counts["unknown_zip_appeals"] = len(set(unknown)), len(unknown)
    counts["rows"], counts["successes"] = len(rows), sum(row[4] for row in rows)
    counts["zips"], counts["clusters"] = len({row[0] for row in rows}), len({row[1] for row in rows})
    return rows, counts


def left(appeals, gifts, zips, at_least):
    try:
        return solicitations(appeals, gifts, zips, at_least=at_least)
    except DataError:
        return None


@given(seeds)
def test_joins_agree_with_loops(seed):
    tables, at_least = random_tables(seed), 1 + seed % 6
    rows, counts = by_loops(*tables, at_least)
    result = left(*tables, at_least)
    if result is None:
        assert all(row[1] == "unknown" for row in rows), "nothing left, or no ZIP in the table of ZIPs"
        return
    assert result.rows.columns == ROW_COLUMNS
    assert result.rows.rows() == rows
    assert result.counts == {name: counts[name] for name in result.counts}
    assert set(result.counts) >= set(counts)


@given(seeds)
def test_the_order_of_the_rows_does_not_matter(seed):
    tables = random_tables(seed)
    expected = left(*tables, 2)
    result = left(*(frame.sample(fraction=1.0, shuffle=True, seed=seed) for frame in tables), 2)
    if expected is None:
        assert result is None
        return
    assert result.rows.equals(expected.rows)
    differ = {name for name in expected.counts if expected.counts[name] != result.counts[name]}
    assert differ <= {"appeals_out_of_order", "gifts_out_of_order"}


def test_a_large_table_is_shuffled_without_effect():
    """Large enough for joins and sorts that run on several threads."""
    drawn = simulate_donors(zips=300, appeals=30_000)
    tables = (drawn.appeals, drawn.gifts, drawn.zips)
    expected = solicitations(*tables)
    result = solicitations(*(frame.sample(fraction=1.0, shuffle=True, seed=1) for frame in tables))
    assert result.rows.equals(expected.rows)
    assert expected.rows.sort("cluster", "zip", "id", "date").equals(expected.rows)
    assert expected.counts["appeals_out_of_order"] == expected.counts["gifts_out_of_order"] == 0
    assert result.counts["appeals_out_of_order"] > 1000


def test_rows_have_the_types_promised_and_appeals_add_up():
    result = solicitations(*random_tables(5), at_least=3)
    types = [pl.String, pl.String, pl.Int64, pl.Date, pl.Int8, pl.Int64, pl.Int64]
    assert result.rows.schema == dict(zip(ROW_COLUMNS, types, strict=True))
    counts = result.counts
    out = ["appeals_same_day", "appeals_never_gave", "appeals_before_first_gift", "appeals_without_zip", "small_zip_appeals"]
    assert counts["rows"] == result.rows.height == counts["appeals"] - sum(counts[name] for name in out)
    assert result.rows.null_count().sum_horizontal().item() == 0
    assert result.rows["recency"].min() >= 1
    assert result.rows["frequency"].min() >= 1


def test_lines_say_what_happened():
    appeals = appeals_of(*((1, n) for n in range(1200)), (1, 3), (2, 0), (3, 0))
    result = solicitations(appeals, gifts_of((1, -1, "60637"), (3, -1, "02139"), (3, 0, "02139")), ZIPS)
    assert result.lines() == [
        "Appeals read: 1,203.",
        "Gifts read: 3.",
        "Appeals listed after a later one of the same donor; the table was sorted: 1.",
        "Appeals left out because they repeat another one to the same donor on the same day: 1.",
        "Appeals left out because they went to people without any gift: 1.",
        "Gifts before the donor's first appeal; they count as history and answer no appeal: 2.",
        "ZIPs left out because they have fewer than 5 appeals: 1.",
        "Appeals left out with these ZIPs: 1.",
        "Appeals kept: 1,200.",
        "ZIPs kept: 1.",
        "Clusters kept: 1.",
    ]


APPEALS, GIFTS = appeals_of((1, 0), (1, 5)), gifts_of((1, -1, "60637"), (1, 2, "60637"))


def text_dates(frame, *values):
    return frame.with_columns(date=pl.Series(values))


LONG = "the thirty-second day of the month of January of the year of the great flood"
REFUSED = {
    "no column": (APPEALS.drop("date"), GIFTS, ZIPS, r"In the appeals table: There is no column 'date'; the columns are 'id'"),
    "near column": (APPEALS, GIFTS.rename({"zip": "zips"}), ZIPS, r"gifts table: .* 'zip'; did you mean 'zips'\?"),
    "no cluster": (APPEALS, GIFTS, ZIPS.drop("cluster"), r"In the zips table: There is no column 'cluster'"),
    "no appeals": (APPEALS[:0], GIFTS, ZIPS, r"The appeals table has no rows"),
    "no gifts": (APPEALS, GIFTS[:0], ZIPS, r"The gifts table has no rows"),
    "no id": (
        APPEALS.with_columns(id=pl.Series([1, None])),
        GIFTS,
        ZIPS,
        r"The 'id' column of the appeals table is missing in row 1; fill it or drop the row",
    ),
    "blank id": (APPEALS.with_columns(id=pl.Series(["", " "])), GIFTS, ZIPS, r"appeals table is missing in row 0 and 1 more"),
    "no date": (APPEALS, text_dates(GIFTS, day(0), None), ZIPS, r"The 'date' column of the gifts table is missing in row 1"),
    "blank date": (APPEALS, text_dates(GIFTS, " ", "2020-01-01"), ZIPS, r"The 'date' .* gifts table is missing in row 0"),
    "bad date": (
        APPEALS,
        text_dates(GIFTS, "2020-01-01", "2020-02-30"),
        ZIPS,
        r"date '2020-02-30' in row 1 of the gifts table",
    ),
    "other date": (text_dates(APPEALS, "1/2/2020", "1/3/2020"), GIFTS, ZIPS, r"date '1/2/2020' in row 0 .* not a date; write"),
    "cut date": (text_dates(APPEALS, "2020-01-015", "2020-01-01"), GIFTS, ZIPS, r"date '2020-01-015' in row 0"),
    "long date": (text_dates(APPEALS, LONG, LONG), GIFTS, ZIPS, r"The date 'the thirty-second .*\.\.\.' in row 0"),
    "number date": (text_dates(APPEALS, 20200101, 20200102), GIFTS, ZIPS, r"The date 20200101 in row 0 of the appeals table"),
    "float id": (APPEALS.cast({"id": pl.Float64}), GIFTS, ZIPS, r"'id' column of the appeals table holds Float64; cast it to"),
    "other id": (APPEALS.cast({"id": pl.String}), GIFTS, ZIPS, r"ids are String in the appeals table but Int64 in the gifts"),
    "float zip": (APPEALS, GIFTS.with_columns(zip=pl.lit(60637.0)), ZIPS, r"'zip' column of the gifts table holds Float64"),
    "two clusters": (
        APPEALS,
        GIFTS,
        pl.DataFrame({"zip": ["60637", "60637-0001"], "cluster": ["middle", "poor"]}),
        r"The ZIP '60637' of the zips table is in clusters 'middle' and 'poor'; give it one cluster",
    ),
    "no match": (APPEALS, GIFTS.with_columns(id=pl.lit(7)), ZIPS, r"None of the 2 appeals .* gift of the same donor"),
    "no zip": (APPEALS, GIFTS.with_columns(zip=pl.lit(None)), ZIPS, r"None of the 2 appeals .* with a known ZIP"),
    "too few": (APPEALS, GIFTS, ZIPS, r"No ZIP has 5 appeals or more \(the largest has 2\); lower the 'at_least' parameter"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_tables_are_refused(case):
    appeals, gifts, zips, message = REFUSED[case]
    with pytest.raises(DataError, match=message) as refusal:
        solicitations(appeals, gifts, zips)
    assert len(str(refusal.value)) < 260


@pytest.mark.parametrize("at_least", [0, -1, 2.5, True])
def test_at_least_is_a_positive_whole_number(at_least):
    with pytest.raises(DataError, match=rf"'at_least' parameter must be a whole number >= 1. Got {at_least}"):
        solicitations(APPEALS, GIFTS, ZIPS, at_least=at_least)


def test_a_zip_twice_with_the_same_cluster_is_one():
    zips = pl.DataFrame({"zip": ["60637", "60637", "60637"], "cluster": ["middle", None, "middle"]})
    assert solicitations(APPEALS, GIFTS, zips, at_least=1).rows["cluster"].to_list() == ["middle", "middle"]


def small(zips, gift_zip):
    dates = [f"2024-0{month}-01" for month in range(2, 8)]
    appeals = pl.DataFrame({"id": [1] * 6, "date": dates})
    gifts = pl.DataFrame({"id": [1], "date": ["2024-01-01"], "zip": [gift_zip]})
    return solicitations(appeals, gifts, pl.DataFrame({"zip": zips, "cluster": ["middle"] * len(zips)}))


@pytest.mark.parametrize("written", ["2139", "02139", "2139.0", "02139-1234", "021391234", 2139])
def test_a_zip_that_a_spreadsheet_changed_is_still_that_zip(written):
    assert small(["02139"], written).rows["cluster"].unique().to_list() == ["middle"]
    assert small([written], "02139").rows["zip"].unique().to_list() == ["02139"]


def test_tables_that_share_no_zip_are_refused():
    with pytest.raises(DataError, match=r"none of the 1 ZIPs .*'02139'.* has for example '60637'"):
        small(["60637"], "02139")
    with pytest.raises(DataError, match="has no row with a cluster"):
        solicitations(
            pl.DataFrame({"id": [1] * 5, "date": [f"2024-0{month}-01" for month in range(2, 7)]}),
            pl.DataFrame({"id": [1], "date": ["2024-01-01"], "zip": ["02139"]}),
            pl.DataFrame({"zip": [], "cluster": []}, schema={"zip": pl.String, "cluster": pl.String}),
        )
