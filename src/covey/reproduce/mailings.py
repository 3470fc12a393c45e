"""Three ways to a charity's mailing, as rows ``zip, cluster, success, recency, frequency``: what the donor study learns from.

- raw tables of appeals and gifts, as the paper had (:mod:`.solicitations`);
- the same tables simulated (:func:`covey.datasets.simulate_donors`), since the paper's own are private;
- the public mailing experiment of Karlan and List (2007), which its readers download themselves (openICPSR 113224).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl

from covey.datasets import simulate_donors
from covey.errors import DataError, unknown_column
from covey.reproduce.paper import CLIENTS
from covey.reproduce.solicitations import solicitations
from covey.tables.rows import GroupedData, read_table

TERMS = ("Intercept", "log(recency)", "log(frequency)")

# The public file has no ZIP codes, but eight census figures of each donor's: donors who share all of them share a ZIP area.
_CENSUS = (
    "pwhite", "pblack", "page18_39", "ave_hh_sz", "median_hhincome", "powner", "psch_atlstba", "pop_propurban",
)  # fmt: skip
_BRACKETS = (25_000, 50_000, 75_000, 100_000)
_BRACKET_NAMES = ("<25k", "25-50k", "50-75k", "75-100k", ">100k")
_DAYS_A_MONTH = 365.25 / 12


@dataclass(frozen=True)
class Mailing:
    """Rows ``zip, cluster, success, recency, frequency``, where they come from, and what was left out or put right.

    ``why`` says why the paper's numbers need not be those of these rows; None if there is no reason to set them side by side.
    """

    rows: pl.DataFrame
    source: str
    lines: tuple[str, ...]
    why: str | None = None

    @property
    def data(self) -> GroupedData:
        """Ready for a solver: an intercept, log recency and log frequency, as in the paper."""
        rows = self.rows
        recency, frequency = (np.log(rows[name].cast(pl.Float64).to_numpy()) for name in ("recency", "frequency"))
        X = np.column_stack([np.ones(len(rows)), recency, frequency])
        return GroupedData.from_arrays(X, rows["success"].to_numpy(), rows["zip"], rows["cluster"], terms=TERMS)


def from_tables(appeals: Path, gifts: Path, zips: Path) -> Mailing:
    """A charity's own tables, from files."""
    tables = [read_table(path, ids=("id",), text=("zip", "cluster")) for path in (appeals, gifts, zips)]
    found = solicitations(tables[0], tables[1], tables[2])
    return Mailing(found.rows, f"tables {appeals.name}, {gifts.name} and {zips.name}", tuple(found.lines()))


def simulated(*, zips: int, appeals: int, seed: int) -> Mailing:
    """Simulated tables of the paper's shape, through the same joins."""
    drawn = simulate_donors(zips=zips, appeals=appeals, seed=seed)
    found = solicitations(drawn.appeals, drawn.gifts, drawn.zips)
    shape = "of its shape" if zips == CLIENTS else "and few"
    why = f"the paper's data are private, these are simulated {shape}; the numbers of ZIP codes and brackets are set, not found"
    return Mailing(found.rows, "simulated tables", tuple(found.lines()), why)


def karlan_list(path: Path) -> Mailing:
    """The public experiment, as downloaded (``.dta``) or as a table ``zip_area, income_bracket, months_since_last,
    n_prior_gifts, gave``. A gift of m months ago is taken to be m and a half months old, so that a logarithm exists.
    """
    table = _from_stata(path) if path.suffix == ".dta" else read_table(path)
    needed = ("zip_area", "income_bracket", "months_since_last", "n_prior_gifts", "gave")
    for name in needed:
        if name not in table.columns:
            raise unknown_column(name, table.columns)
    complete = table.select(needed).drop_nulls()
    if complete.is_empty():
        raise DataError(f"The file {path.name!r} has no row in which {', '.join(map(repr, needed))} are all there.")
    least = {"gave": 0, "months_since_last": 0, "n_prior_gifts": 1}
    gave, months, gifts = (_number(complete[name], path, least[name]) for name in least)
    if not ((gave == 0) | (gave == 1)).all():
        odd = gave.filter((gave != 0) & (gave != 1))[0]
        raise DataError(f"The column 'gave' of {path.name!r} must hold 0 and 1 only; got {odd:g}.")
    rows = pl.DataFrame(
        {
            "zip": complete["zip_area"].cast(pl.String),
            "cluster": complete["income_bracket"].cast(pl.String),
            "success": gave.cast(pl.Int8),
            "recency": _DAYS_A_MONTH * (months + 0.5),
            "frequency": gifts,
        }
    )
    lines = [f"{table.height:,} letters were read."]
    if table.height > complete.height:
        lines.append(f"{table.height - complete.height:,} with a missing value left out.")
    lines.append(f"{rows.height:,} letters to {rows['zip'].n_unique():,} ZIP areas were kept, {gave.sum():,.0f} were answered.")
    return Mailing(rows, "the mailing experiment of Karlan and List (2007)", tuple(lines), "another charity, another mailing")


def _number(values: pl.Series, path: Path, least: float) -> pl.Series:
    numbers = values.cast(pl.Float64, strict=False)
    bad = (numbers.is_null() | ~numbers.is_finite() | (numbers < least)).arg_true()
    if len(bad):
        raise DataError(
            f"The column {values.name!r} of {path.name!r} must hold numbers >= {least:g}; got {values[int(bad[0])]!r}: is it "
            "the file of openICPSR 113224?"
        )
    return numbers


def _from_stata(path: Path) -> pl.DataFrame:
    import pandas as pd  # for this file only

    if not path.exists():
        raise DataError(f"There is no file {str(path)!r}; check the path.")
    needed = {"mrm2": "months_since_last", "freq": "n_prior_gifts", "gave": "gave"}
    try:
        frame = pd.read_stata(path, convert_categoricals=False)
    except Exception:  # a damaged file fails in as many ways as it can be damaged
        raise DataError(f"The file {str(path)!r} is no Stata file that can be read; download it again.") from None
    for name in (*needed, *_CENSUS):
        if name not in frame.columns:
            raise unknown_column(name, list(frame.columns))
    table = pl.DataFrame({name: frame[name].to_numpy() for name in (*needed, *_CENSUS)}).fill_nan(None)
    known = pl.all_horizontal(pl.col(name).is_not_null() for name in _CENSUS)
    bracket = np.searchsorted(_BRACKETS, table["median_hhincome"].fill_null(0).to_numpy())
    income = pl.Series(np.array(_BRACKET_NAMES)[bracket])
    area = pl.struct(_CENSUS).rank("dense").cast(pl.Int64)
    return table.with_columns(zip_area=pl.when(known).then(area), income_bracket=pl.when(known).then(income)).rename(
        {old: new for old, new in needed.items() if old != new}
    )
