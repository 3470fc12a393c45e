"""What the values of a column are: numbers, categories in their declared order, missing values; rows without missing values.

pandas, polars (``Enum``) and arrow (dictionaries) let a user declare the categories of a column and their order, which covey
keeps. A ``Categorical`` of polars has no declared order; its categories are sorted, like those of text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from numbers import Real
from typing import Any

import narwhals as nw
import numpy as np
import polars as pl

from covey._typing import Anything, Floats, Ints
from covey.errors import DataError, listing
from covey.records import Record
from covey.tree.hierarchy import is_missing

_NUMBERS = (Real, Decimal, np.bool_)


def is_numeric(series: nw.Series[Any]) -> bool:
    """Whether a column holds numbers or booleans; a column of objects does if all its values that are present are numbers."""
    if series.dtype == nw.Object:
        present = [value for value in series.to_list() if not is_missing(value)]
        return bool(present) and all(isinstance(value, _NUMBERS) for value in present)
    return bool(series.dtype.is_numeric() or series.dtype == nw.Boolean)


def as_numbers(series: nw.Series[Any]) -> Floats:
    """A numeric column as float64, with NaN for missing values."""
    if series.dtype == nw.Object:
        return np.array([np.nan if is_missing(value) else float(value) for value in series.to_list()])
    return np.asarray(series.cast(nw.Float64()).to_numpy(), dtype=np.float64)


def is_categorical(series: nw.Series[Any]) -> bool:
    """Whether the column is declared to hold categories."""
    return series.dtype in (nw.Categorical, nw.Enum)


def category_values(series: nw.Series[Any]) -> list[Any]:
    """The values of a column of categories."""
    values = series.to_list()
    return [_plain(value) for value in values] if is_categorical(series) else values


def category_codes(series: nw.Series[Any], name: str, levels: Sequence[Any]) -> Ints:
    """The positions of a column's values among known categories; any other value is refused."""
    import pandas as pd

    values = category_values(series)
    codes: Ints = pd.Index(levels, dtype=object).get_indexer(pd.Index(values, dtype=object))
    for row in np.flatnonzero(codes < 0)[:1]:
        if is_missing(values[row]):
            raise DataError(f"Column {name!r} has no category in row {row}; fill it or leave the row out.")
        raise DataError(
            f"Column {name!r} has the category {values[row]!r} in row {row}, which training did not see; "
            f"the known ones are {listing(levels)}."
        )
    return codes


def declared_order(series: nw.Series[Any]) -> list[Any] | None:
    """The declared categories in order, also those that do not occur; None if the column declares no order."""
    native: Any = series.to_native()
    if isinstance(native, pl.Series):
        categories = native.dtype.categories.to_list() if isinstance(native.dtype, pl.Enum) else None
    elif hasattr(native, "cat") and hasattr(native.cat, "categories"):  # pandas
        categories = native.cat.categories.tolist()
    elif hasattr(native, "unify_dictionaries"):  # arrow
        chunks = native.unify_dictionaries().chunks
        categories = chunks[0].dictionary.to_pylist() if chunks and hasattr(chunks[0], "dictionary") else None
    else:
        categories = None
    return None if categories is None else [_plain(value) for value in categories]


def _plain(value: Any) -> Any:
    """A declared category as JSON can hold it: an interval or a date is text."""
    return value if isinstance(value, str | int | float) or is_missing(value) else str(value)


def missing(values: Any) -> Anything:
    """Which values of a column or an array are missing: None, NaN, NA."""
    series = nw.from_native(values, series_only=True, pass_through=True)
    if isinstance(series, nw.Series) and series.dtype != nw.Object:
        absent = series.is_null()
        if series.dtype.is_float():
            absent = absent | series.is_nan().fill_null(False)
        return np.asarray(absent.to_numpy(), dtype=bool)
    array = series.to_numpy() if isinstance(series, nw.Series) else np.asarray(values)
    if array.dtype.kind != "O":
        return np.isnan(array) if array.dtype.kind == "f" else np.zeros(array.shape, dtype=bool)
    return np.array([is_missing(value) for value in array.tolist()], dtype=bool)


@dataclass(frozen=True)
class Dropped(Record):
    """How many rows ``na="drop"`` left out, and the missing values of each column; a row may lack several."""

    rows: int
    of: int
    columns: dict[str, int]

    def __add__(self, other: Dropped | None) -> Dropped:
        if other is None:
            return self
        names = {*self.columns, *other.columns}
        columns = {name: self.columns.get(name, 0) + other.columns.get(name, 0) for name in sorted(names)}
        return Dropped(self.rows + other.rows, self.of + other.of, columns)

    def __str__(self) -> str:
        by_column = ", ".join(f"{count:,} of {name}" for name, count in self.columns.items() if count)
        what = f"{self.rows:,} of {self.of:,} rows dropped because values are missing"
        return f"{what} ({by_column})" if by_column else what


def choose_rows(
    columns: Mapping[str, Any], n_rows: int, frequency: Any = None, na: str = "refuse"
) -> tuple[Ints | None, Dropped | None]:
    """The rows that count (None: all), and what ``na="drop"`` drops: rows with missing values in these columns."""
    rows, dropped = _complete(columns, n_rows) if na == "drop" else (None, None)
    if frequency is not None:
        repeats = np.ones(n_rows, dtype=np.int64)
        used = slice(None) if rows is None else rows
        repeats[used] = repeats_of(take(frequency, rows), len(repeats[used]))
        if not repeats.all():
            every = np.arange(n_rows) if rows is None else rows
            rows = every[repeats[every] > 0]
    return rows, dropped


def _complete(columns: Mapping[str, Any], n_rows: int) -> tuple[Ints | None, Dropped]:
    absent = {name: missing(values) for name, values in columns.items()}
    for name, found in absent.items():
        if found.shape != (n_rows,):
            raise DataError(f"There are {len(found)} values of {name} for {n_rows} rows; give one for each row.")
    any_missing = np.logical_or.reduce([np.zeros(n_rows, dtype=bool), *absent.values()])
    counts = {name: int(found.sum()) for name, found in absent.items()}
    dropped = Dropped(int(any_missing.sum()), n_rows, counts)
    if any_missing.all():
        worst = max(counts, key=counts.__getitem__)
        raise DataError(f"Every row has a missing value ({worst!r} in {counts[worst]} rows), so na='drop' leaves no row.")
    return (np.flatnonzero(~any_missing) if any_missing.any() else None), dropped


def take(values: Any, rows: Ints | None) -> Any:
    """Some rows of a frame, a column or an array."""
    if rows is None or values is None:
        return values
    series = nw.from_native(values, allow_series=True, eager_only=True, pass_through=True)
    return series[rows] if isinstance(series, nw.Series | nw.DataFrame) else np.asarray(values)[rows]


def repeats_of(frequency: Any, n_rows: int) -> Ints:
    """How often each row counts; anything but whole numbers >= 0 is refused."""
    try:
        values = np.asarray(frequency, dtype=np.float64)
    except (TypeError, ValueError):
        raise DataError("The frequency must be whole numbers; convert the column.") from None
    if values.shape != (n_rows,):
        raise DataError(f"The frequency has shape {values.shape} for {n_rows} rows; give one whole number for each row.")
    bad = ~(np.isfinite(values) & (values >= 0) & (values == np.floor(values)))
    if bad.any():
        row = int(bad.argmax())
        raise DataError(
            f"The frequency is {values[row]:g} in row {row}; it counts equal rows, so it must be a whole number >= 0 "
            "(weights= takes precisions)."
        )
    if not values.any():
        raise DataError("Every frequency is 0; at least one row must count.")
    if values.sum() >= 2**31:
        raise DataError(f"The frequencies add up to {values.sum():.3g} rows, more than covey can hold; fit a sample of them.")
    return values.astype(np.int64)
