"""Turn the raw tables of a charity into rows for a model: one row for each appeal.

The tables are ``appeals(id, date)``, ``gifts(id, date, zip)`` and ``zips(zip, cluster)``; ``id`` is a donor. Dates are compared
by whole days. Only ``success`` uses gifts on or after the day of the appeal.

- success: 1 if a gift answers the appeal. A gift answers the donor's latest appeal on or before its day, and no other. Gifts
  before the donor's first appeal answer none.
- frequency: the number of the donor's gifts before the day of the appeal.
- recency: the days since the last of these gifts, at least 1.
- zip: the ZIP of that last gift, or of the latest earlier gift with a ZIP. If the donor made several gifts on that day with
  different ZIPs, the greatest ZIP counts, so that the order of the rows does not matter.
- cluster: the cluster of the ZIP in ``zips``, or "unknown" if there is none.

Two appeals to a donor on one day count as one. Appeals without an earlier gift or without a known ZIP are left out, and so are
ZIPs with fewer than ``at_least`` appeals. ``Solicitations.counts`` has the number of rows left out or corrected.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from covey.errors import DataError, unknown_column

_ISO = r"^\d{4}-\d{2}-\d{2}([T ]\d{2}:\d{2}(:\d{2}(\.\d+)?)?(Z|[+-]\d{2}:?\d{2})?)?$"
_ZIP_PLUS_FOUR = r"^\d{5}-?\d{4}$"
_TEXT = (pl.String, pl.Categorical, pl.Enum)

# Donor and day in one integer: then a join on one sorted column is a merge, and the days of a donor are adjacent.
_DONOR = 1 << 32
_DAY_0 = 1 << 31

_LABELS = {
    "appeals": "Appeals read",
    "gifts": "Gifts read",
    "appeals_out_of_order": "Appeals listed after a later one of the same donor; the table was sorted",
    "gifts_out_of_order": "Gifts listed after a later one of the same donor; the table was sorted",
    "appeals_same_day": "Appeals left out because they repeat another one to the same donor on the same day",
    "appeals_never_gave": "Appeals left out because they went to people without any gift",
    "appeals_before_first_gift": "Appeals left out because the donor had no gift on an earlier day",
    "appeals_without_zip": "Appeals left out because the donor's ZIP was unknown at that time",
    "gifts_before_first_appeal": "Gifts before the donor's first appeal; they count as history and answer no appeal",
    "gifts_never_appealed": "Gifts ignored because the donor got no appeal",
    "donors_moved": "Donors who changed ZIP between appeals; each appeal belongs to the ZIP at that time",
    "small_zips": "ZIPs left out because they have fewer than {at_least} appeals",
    "small_zip_appeals": "Appeals left out with these ZIPs",
    "unknown_zips": 'ZIPs kept that have no cluster in the zips table; their cluster is "unknown"',
    "unknown_zip_appeals": "Appeals kept in these ZIPs",
    "rows": "Appeals kept",
    "zips": "ZIPs kept",
    "clusters": "Clusters kept",
    "successes": "Appeals kept that a gift answers",
}


@dataclass(frozen=True)
class Solicitations:
    """The rows of a model and the number of rows read, left out and corrected.

    ``rows`` has the columns ``zip, cluster, id, date, success, recency, frequency`` and is sorted by cluster, ZIP, id and date.
    In ``counts``, ``rows`` equals ``appeals`` minus the appeals of the same day, to people who never gave, before the first
    gift, without a ZIP and in small ZIPs.
    """

    rows: pl.DataFrame
    counts: dict[str, int]
    at_least: int = 5

    def lines(self) -> list[str]:
        """A line for each count that is not zero.

        >>> Solicitations(pl.DataFrame(), {"appeals": 1200, "gifts": 0, "small_zips": 1}).lines()
        ['Appeals read: 1,200.', 'ZIPs left out because they have fewer than 5 appeals: 1.']
        """
        return [f"{_LABELS[name].format(at_least=self.at_least)}: {count:,}." for name, count in self.counts.items() if count]


def solicitations(appeals: pl.DataFrame, gifts: pl.DataFrame, zips: pl.DataFrame, *, at_least: int = 5) -> Solicitations:
    """Make one row for each appeal; the module docstring defines the columns.

    Dates are dates, datetimes or ISO text; ids and ZIPs are text or whole numbers. ZIPs are compared as text: short ones get
    leading zeros up to five digits, and ZIP+4 (``60637-1234``) is cut to five.

    Parameters
    ----------
    appeals : columns ``id``, ``date``
    gifts : columns ``id``, ``date``, ``zip``
    zips : columns ``zip``, ``cluster``
    at_least : ZIPs with fewer appeals are left out

    Returns
    -------
    Solicitations

    Examples
    --------
    >>> appeals = pl.DataFrame({"id": [1, 1], "date": ["2024-03-01", "2024-06-01"]})
    >>> gifts = pl.DataFrame({"id": [1, 1], "date": ["2024-02-28", "2024-03-09"], "zip": [2139, 2139]})
    >>> zips = pl.DataFrame({"zip": ["02139"], "cluster": ["middle"]})
    >>> solicitations(appeals, gifts, zips, at_least=1).rows.select("zip", "success", "recency", "frequency").rows()
    [('02139', 1, 2, 1), ('02139', 0, 84, 2)]
    """
    if isinstance(at_least, bool) or not isinstance(at_least, int | np.integer) or at_least < 1:
        raise DataError(f"The 'at_least' parameter must be a whole number >= 1. Got {at_least!r} instead.")
    cluster_of = _clusters(zips)
    asked, given = _table(appeals, "appeals"), _table(gifts, "gifts").with_columns(_zip(gifts, "gifts"))
    counts = {"appeals": asked.height, "gifts": given.height}
    donors, (asked, given) = _number_donors(asked, given)
    counts["appeals_out_of_order"], counts["gifts_out_of_order"] = _out_of_order(asked), _out_of_order(given)

    asked = asked.drop("id").unique("key").sort("key").with_row_index("appeal")
    counts["appeals_same_day"] = counts["appeals"] - asked.height
    given = _history(given)
    answered = _answered(given, asked)
    idle = given.filter(answered.is_null())
    history = idle.join(asked, on="donor", how="semi").height
    success = np.zeros(asked.height, dtype=np.int8)
    success[answered.drop_nulls().to_numpy()] = 1
    rows = _last_gift_before(asked.with_columns(success=pl.Series(success)), given)

    without = rows["frequency"].is_null()
    counts["appeals_never_gave"] = rows.filter(without).join(given, on="donor", how="anti").height
    counts["appeals_before_first_gift"] = int(without.sum()) - counts["appeals_never_gave"]
    del given, asked
    rows = rows.filter(~without)
    counts["appeals_without_zip"] = rows["zip"].null_count()
    rows = rows.drop_nulls("zip")
    counts |= {"gifts_before_first_appeal": history, "gifts_never_appealed": idle.height - history}
    if rows.is_empty():
        raise DataError(
            f"None of the {counts['appeals']} appeals comes after a gift of the same donor with a known ZIP; check that the "
            "ids of the two tables match and that the gifts start before the appeals."
        )
    moved = (pl.col("donor") == pl.col("donor").shift(1)) & (pl.col("zip") != pl.col("zip").shift(1))
    counts["donors_moved"] = rows.filter(moved)["donor"].n_unique()

    places = _places(rows, cluster_of)
    kept = places.filter(pl.col("len") >= at_least)
    counts["small_zips"] = places.height - kept.height
    counts["small_zip_appeals"] = rows.height - int(kept["len"].sum())
    if kept.is_empty():
        raise DataError(
            f"No ZIP has {at_least} appeals or more (the largest has {places['len'].max()!r}); lower the 'at_least' parameter."
        )
    # The rows are in order of donor and day, so a stable sort by place gives the final order.
    rows = rows.join(kept.select("zip", "place"), on="zip", maintain_order="left").sort("place", maintain_order=True)
    unknown = kept.filter(pl.col("cluster") == "unknown")
    if unknown.height == kept.height:
        example = "has no row with a cluster" if cluster_of.is_empty() else f"has for example {_short(cluster_of['zip'][0])}"
        raise DataError(
            f"The zips table has none of the {kept.height:,} ZIPs of the gifts table (for example {_short(kept['zip'][0])}); "
            f"it {example}. Write ZIPs in the same way in both tables."
        )
    counts |= {"unknown_zips": unknown.height, "unknown_zip_appeals": int(unknown["len"].sum())}
    counts |= {"rows": rows.height, "zips": kept.height, "clusters": kept["cluster"].n_unique()}
    counts["successes"] = int(rows["success"].sum())
    gathered = (places["cluster"].gather(rows["place"]), donors.gather(rows["donor"]))
    rows = rows.select("zip", *gathered, pl.col("day").alias("date"), "success", "recency", "frequency")
    return Solicitations(rows, counts, at_least)


def _number_donors(*tables: pl.DataFrame) -> tuple[pl.Series, list[pl.DataFrame]]:
    """The sorted ids of all donors, and the tables with ``donor`` (index of the id) and ``key`` (donor and day)."""
    kinds = [table.schema["id"] for table in tables]
    if kinds[0] != kinds[1]:
        if not all(kind.is_integer() for kind in kinds):
            raise DataError(f"The ids are {kinds[0]} in the appeals table but {kinds[1]} in the gifts table; use one type.")
        tables = tuple(table.with_columns(pl.col("id").cast(pl.Int64)) for table in tables)
    ids = pl.concat([table["id"].unique() for table in tables]).unique().sort()
    codes = pl.DataFrame({"id": ids}).with_columns(donor=pl.int_range(pl.len(), dtype=pl.Int64))
    key = pl.col("donor") * _DONOR + (pl.col("day").to_physical().cast(pl.Int64) + _DAY_0)
    return ids, [table.join(codes, on="id", how="left", maintain_order="left").with_columns(key=key) for table in tables]


def _out_of_order(table: pl.DataFrame) -> int:
    """Number of rows with an earlier day than the previous row of the same donor."""
    by_donor = table.select(pl.col("key").sort_by("donor", maintain_order=True)).to_series()
    return int((by_donor < by_donor.shift(1)).sum())


def _history(given: pl.DataFrame) -> pl.DataFrame:
    """The sorted gifts with ``frequency``, the number of the donor's gifts so far, and the latest known ``zip``."""
    given = given.drop("id").sort("key", "zip", nulls_last=False).with_row_index("gift")
    first = (pl.col("donor") != pl.col("donor").shift(1)).fill_null(True)
    start = pl.when(first).then("gift").forward_fill().cast(pl.Int64)
    known = pl.when(first | pl.col("zip").is_not_null()).then("gift").forward_fill()
    return given.with_columns(frequency=pl.col("gift").cast(pl.Int64) - start + 1, zip=pl.col("zip").gather(known)).drop("gift")


def _answered(given: pl.DataFrame, asked: pl.DataFrame) -> pl.Series:
    """For each gift the appeal that it answers: the donor's latest on or before its day, or null."""
    latest = given.select("key", "donor").join_asof(asked.select("key", "appeal", asked="donor"), on="key", strategy="backward")
    return latest.select(pl.when(pl.col("asked") == pl.col("donor")).then("appeal").alias("appeal")).to_series()


def _last_gift_before(asked: pl.DataFrame, given: pl.DataFrame) -> pl.DataFrame:
    """The appeals with ``zip``, ``recency`` and ``frequency`` from the donor's last gift before that day, or null."""
    last = given.filter((pl.col("key") != pl.col("key").shift(-1)).fill_null(True))  # the last gift of each day
    last = last.select("zip", "frequency", before="key", giver="donor", gift_day="day")
    rows = asked.with_columns(before=pl.col("key") - 1).drop("key").join_asof(last, on="before", strategy="backward")
    rows = rows.with_columns(recency=(pl.col("day") - pl.col("gift_day")).dt.total_days())
    same_donor = pl.when(pl.col("giver") == pl.col("donor"))
    known = (same_donor.then(name).alias(name) for name in ("zip", "recency", "frequency"))
    return rows.select("donor", "day", "success", *known)


def _places(rows: pl.DataFrame, cluster_of: pl.DataFrame) -> pl.DataFrame:
    """The ZIPs, sorted by cluster and ZIP, with their number of appeals ``len`` and their index ``place``."""
    places = rows.group_by("zip").len().join(cluster_of, on="zip", how="left")
    return places.with_columns(pl.col("cluster").fill_null("unknown")).sort("cluster", "zip").with_row_index("place")


def _clusters(zips: pl.DataFrame) -> pl.DataFrame:
    """The cluster of each ZIP; ZIPs without a cluster are left out."""
    _require(zips, "zips", "zip", "cluster")
    pairs = zips.select(_zip(zips, "zips"), pl.col("cluster").cast(pl.String).str.strip_chars().replace("", None))
    pairs = pairs.drop_nulls().unique()
    twice = pairs.filter(pl.col("zip").is_duplicated()).sort("zip", "cluster")
    if not twice.is_empty():
        (place, one), (_, other) = twice.rows()[:2]
        raise DataError(
            f"The ZIP {_short(place)} of the zips table is in clusters {_short(one)} and {_short(other)}; give it one cluster."
        )
    return pairs


def _table(frame: pl.DataFrame, name: str) -> pl.DataFrame:
    """Columns ``id`` and ``day`` of a table, without missing values."""
    _require(frame, name, "id", "date", *(["zip"] if name == "gifts" else []))
    if frame.is_empty():
        raise DataError(f"The {name} table has no rows; it needs at least one.")
    ids = frame["id"].cast(pl.String) if frame["id"].dtype in _TEXT else frame["id"]
    _refuse_missing(ids, name)
    if not (ids.dtype == pl.String or ids.dtype.is_integer()):
        raise DataError(f"The 'id' column of the {name} table holds {ids.dtype}; cast it to text or whole numbers.")
    return pl.DataFrame({"id": ids, "day": _days(frame["date"], name)})


def _days(dates: pl.Series, name: str) -> pl.Series:
    _refuse_missing(dates, name)
    if dates.dtype == pl.Date:
        return dates
    if isinstance(dates.dtype, pl.Datetime):
        return dates.dt.date()
    if dates.dtype not in _TEXT:
        raise _not_a_date(dates[0], 0, name)
    text = dates.cast(pl.String).str.strip_chars()
    days = text.str.slice(0, 10).str.to_date("%Y-%m-%d", strict=False)
    bad = (days.is_null() | ~text.str.contains(_ISO)).arg_true()
    if len(bad):
        raise _not_a_date(dates[int(bad[0])], int(bad[0]), name)
    return days


def _zip(frame: pl.DataFrame, name: str) -> pl.Series:
    """ZIPs as text: numbers and ZIP+4 become five digits, and blank text is missing.

    Spreadsheets drop leading zeros and append ``.0``; both are corrected.
    """
    kind = frame["zip"].dtype
    if not (kind in (*_TEXT, pl.Null) or kind.is_integer()):
        raise DataError(f"The 'zip' column of the {name} table holds {kind}; cast it to text or whole numbers.")
    zip_ = pl.col("zip").cast(pl.String).str.strip_chars().str.replace(r"^(\d{1,9})\.0$", "$1")
    zip_ = pl.when(zip_.str.contains(r"^\d{1,5}$")).then(zip_.str.zfill(5)).otherwise(zip_)
    cut = pl.when(zip_.str.contains(_ZIP_PLUS_FOUR)).then(zip_.str.slice(0, 5)).when(zip_ != "").then(zip_)
    return frame.select(cut.alias("zip")).to_series()


def _require(frame: pl.DataFrame, name: str, *columns: str) -> None:
    for column in columns:
        if column not in frame.columns:
            raise DataError(f"In the {name} table: {unknown_column(column, frame.columns)}")


def _refuse_missing(values: pl.Series, name: str) -> None:
    missing = values.is_null()
    if values.dtype in _TEXT:
        missing |= values.cast(pl.String).str.strip_chars() == ""
    if missing.any():
        rows = missing.arg_true()
        more = f" and {len(rows) - 1:,} more" if len(rows) > 1 else ""
        raise DataError(
            f"The {values.name!r} column of the {name} table is missing in row {rows[0]}{more}; fill it or drop the row."
        )


def _not_a_date(value: object, row: int, name: str) -> DataError:
    return DataError(f"The date {_short(value)} in row {row} of the {name} table is not a date; write it as 2024-01-31.")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:36]}...{text[-1]}"
