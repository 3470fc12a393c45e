"""The data of the donor study: rows ``zip, cluster, success, recency, frequency`` from three sources.

- Raw tables of appeals and gifts, as in the paper (:mod:`.solicitations`).
- Simulated tables of the same kind (:func:`covey.datasets.simulate_donors`), because the paper's are private.
- The public mailing experiment of Karlan and List (2007), which users download themselves (openICPSR 113224).
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
from covey.tables.files import read_table
from covey.tables.rows import GroupedData

TERMS = ("Intercept", "log(recency)", "log(frequency)")
APPEALS = 5_000_000  # the size that the paper's quartiles of accuracy and 6% success imply

# The public file has no ZIP codes, but eight census figures of each donor's ZIP code. Donors with equal figures form an area.
_CENSUS = (
    "pwhite", "pblack", "page18_39", "ave_hh_sz", "median_hhincome", "powner", "psch_atlstba", "pop_propurban",
)  # fmt: skip
_BRACKETS = (25_000, 50_000, 75_000, 100_000)
_BRACKET_NAMES = ("<25k", "25-50k", "50-75k", "75-100k", ">100k")
_DAYS_A_MONTH = 365.25 / 12


@dataclass(frozen=True)
class Mailing:
    """The rows of a mailing.

    Attributes
    ----------
    rows : columns ``zip, cluster, success, recency, frequency``
    source : where the rows come from
    lines : sentences about rows that were read, left out and corrected
    why : why the paper's numbers may differ from those of these rows; None if a comparison makes no sense
    name : name of the study with these rows
    """

    rows: pl.DataFrame
    source: str
    lines: tuple[str, ...]
    why: str | None = None
    name: str = "donors"

    @property
    def data(self) -> GroupedData:
        """The rows for a solver, with the paper's terms: intercept, log recency and log frequency."""
        rows = self.rows
        recency, frequency = (np.log(rows[name].cast(pl.Float64).to_numpy()) for name in ("recency", "frequency"))
        X = np.column_stack([np.ones(len(rows)), recency, frequency])
        return GroupedData.from_arrays(X, rows["success"].to_numpy(), rows["zip"], rows["cluster"], terms=TERMS)


def from_tables(appeals: Path, gifts: Path, zips: Path) -> Mailing:
    """Rows from the files of a user's own tables."""
    found = solicitations(*(read_table(path, ids=("id",), text=("zip", "cluster")) for path in (appeals, gifts, zips)))
    source = f"tables {appeals.name}, {gifts.name} and {zips.name}"
    return Mailing(found.rows, source, tuple(found.lines()), name="donors-tables")


def simulated(*, zips: int = CLIENTS, appeals: int = APPEALS, seed: int) -> Mailing:
    """Rows from simulated tables, by default of the paper's size."""
    drawn = simulate_donors(zips=zips, appeals=appeals, seed=seed)
    found = solicitations(drawn.appeals, drawn.gifts, drawn.zips)
    shape = "of its shape" if zips == CLIENTS else "and few"
    why = f"the paper's data are private, these are simulated {shape}; the numbers of ZIP codes and brackets are set, not found"
    return Mailing(found.rows, "simulated tables", tuple(found.lines()), why)


def karlan_list(path: Path) -> Mailing:
    """Rows from the public experiment.

    ``path`` is the file as downloaded (``.dta``), or a table with the columns ``zip_area, income_bracket, months_since_last,
    n_prior_gifts, gave``. A gift of m months ago counts as m + 0.5 months old, so that its logarithm is finite.
    """
    table = _from_stata(path) if path.suffix == ".dta" else read_table(path)
    needed = ("zip_area", "income_bracket", "months_since_last", "n_prior_gifts", "gave")
    _check_columns(table.columns, needed)
    complete = table.select(needed).drop_nulls()
    if complete.is_empty():
        raise DataError(f"In the file {path.name!r} every row lacks one of {', '.join(map(repr, needed))}.")
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
    lines = (
        f"Appeals read: {table.height:,}.",
        f"Appeals left out because a value is missing: {table.height - complete.height:,}.",
        f"Appeals kept: {rows.height:,}, in {rows['zip'].n_unique():,} ZIP areas; answered by a gift: {gave.sum():,.0f}.",
    )
    why = "another charity, another mailing"
    return Mailing(rows, "the mailing experiment of Karlan and List (2007)", lines, why, "donors-karlan-list")


def _check_columns(columns: list[str], needed: tuple[str, ...]) -> None:
    for name in needed:
        if name not in columns:
            raise unknown_column(name, columns)


def _number(values: pl.Series, path: Path, least: float) -> pl.Series:
    numbers = values.cast(pl.Float64, strict=False)
    bad = (numbers.is_null() | ~numbers.is_finite() | (numbers < least)).arg_true()
    if len(bad):
        raise DataError(
            f"The column {values.name!r} of {path.name!r} must hold numbers >= {least:g}; got {values[int(bad[0])]!r}. Check "
            "that it is the file of openICPSR 113224."
        )
    return numbers


def _from_stata(path: Path) -> pl.DataFrame:
    """The downloaded file, with areas of equal census figures and brackets of income."""
    import pandas as pd  # only this file format needs it

    if not path.exists():
        raise DataError(f"There is no file {str(path)!r}; check the path.")
    try:
        frame = pd.read_stata(path, convert_categoricals=False)
    except Exception:  # pandas raises many kinds of errors for a damaged file
        raise DataError(f"The file {str(path)!r} is not a Stata file that can be read; download it again.") from None
    names = {"mrm2": "months_since_last", "freq": "n_prior_gifts"}
    needed = (*names, "gave", *_CENSUS)
    _check_columns(list(frame.columns), needed)
    table = pl.DataFrame({name: frame[name].to_numpy() for name in needed}).fill_nan(None)
    known = pl.all_horizontal(pl.col(name).is_not_null() for name in _CENSUS)
    bracket = np.searchsorted(_BRACKETS, table["median_hhincome"].fill_null(0).to_numpy())
    income = pl.Series(np.array(_BRACKET_NAMES)[bracket])
    area = pl.struct(_CENSUS).rank("dense").cast(pl.Int64)
    return table.with_columns(zip_area=pl.when(known).then(area), income_bracket=pl.when(known).then(income)).rename(names)
