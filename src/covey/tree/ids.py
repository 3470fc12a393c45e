"""Ids of clients and clusters: from any column to one type, sorted vocabularies and integer codes.

Ids are integers, text, booleans, dates or floats, all of one kind; null stands for a missing id.
"""

from __future__ import annotations

from typing import Any, cast

import narwhals as nw
import numpy as np
import polars as pl

from covey._typing import Anything, Ints
from covey.errors import DataError
from covey.tree import kernels

_KINDS = {
    pl.Int64: "integers",
    pl.String: "text",
    pl.Boolean: "booleans",
    pl.Float64: "floating-point numbers",
    pl.Date: "dates",
}


def as_labels(values: Any, what: str) -> pl.Series:
    """Any column or sequence of ids as a polars series of one kind, missing ids as null.

    >>> as_labels([3.0, float("nan"), 1.0], "client").to_list()
    [3, None, 1]
    """
    series = nw.from_native(values, series_only=True, pass_through=True)
    if isinstance(series, nw.Series):
        native = series.to_native()
        if isinstance(native, pl.Series):
            return _canonical(native, what)
        values = native.to_pylist() if hasattr(native, "to_pylist") else native
    if not isinstance(values, np.ndarray):
        values = np.asarray(values) if hasattr(values, "__array__") else np.array(values, dtype=object)
    if values.ndim != 1:
        raise DataError(f"The {what} ids must be one-dimensional; got an array of shape {values.shape}.")
    if values.dtype.kind == "O":
        return _from_objects(values, what)
    return _canonical(pl.Series(values), what)


def encode(values: Any, what: str) -> tuple[pl.Series, Ints]:
    """The sorted distinct ids, and for each row the position of its id among them; a missing id is an error.

    >>> ids, codes = encode(["b", "a", "b"], "client")
    >>> ids.to_list(), codes.tolist()
    (['a', 'b'], [1, 0, 1])
    """
    if isinstance(values, np.ndarray) and values.dtype == np.int64 and values.ndim == 1 and len(values):
        return _encode_integers(values)  # as they are: a table of many millions of rows is not copied
    labels = as_labels(values, what)
    missing = labels.null_count()
    if missing:
        row = int(labels.is_null().arg_max() or 0)
        rows = "1 row has" if missing == 1 else f"{missing} rows have"
        raise DataError(f"{rows} no {what} id (first: row {row}); fill the column or leave the rows out.")
    if labels.dtype == pl.Int64 and len(labels):
        return _encode_integers(labels.to_numpy())
    distinct = labels.unique().sort()
    return distinct, lookup(labels, distinct, what)


def _encode_integers(values: Ints) -> tuple[pl.Series, Ints]:
    low, high = int(values.min()), int(values.max())
    if high - low < 4 * len(values) + 1024:
        # A table over a compact range costs two passes; sorting millions of rows costs seconds.
        place = np.zeros(high - low + 1, dtype=np.int64)
        codes = np.empty(len(values), dtype=np.int64)
        kernels.rank_in_table(values, low, place, codes)
        return pl.Series(np.flatnonzero(place) + low), codes
    ids, inverse = np.unique(values, return_inverse=True)
    return pl.Series(ids), inverse.astype(np.int64, copy=False)


def lookup(labels: pl.Series, known: pl.Series, what: str) -> Ints:
    """For each row the position of its id among the known ones; -1 where it is unseen or missing."""
    if labels.null_count() == len(labels) or len(known) == 0:
        return np.full(len(labels), -1, dtype=np.int64)
    if labels.dtype != known.dtype:
        if {labels.dtype, known.dtype} != {pl.Int64, pl.Float64}:
            shown = labels.drop_nulls()[0]
            raise DataError(
                f"The {what} ids are {kind(labels)} here (such as {shown!r}) but were {kind(known)} in training "
                f"(such as {known[0]!r}); convert the column to {kind(known)}."
            )
        if known.dtype == pl.Int64:
            labels = pl.Series(
                [int(value) if value is not None and value == int(value) else None for value in labels], dtype=pl.Int64
            )
        else:
            labels = labels.cast(pl.Float64)
    position = pl.Series(np.arange(len(known)))
    found = labels.replace_strict(known, position, default=-1, return_dtype=pl.Int64)
    return cast(Ints, found.fill_null(-1).to_numpy().astype(np.int64))


def kind(labels: pl.Series) -> str:
    return _KINDS.get(labels.dtype.base_type(), str(labels.dtype))


def to_array(labels: pl.Series) -> Anything:
    """As a numpy array of plain Python values for text, else of the matching dtype."""
    if labels.dtype == pl.String:
        return np.array(labels.to_list(), dtype=object)
    return cast(Anything, labels.to_numpy())


def _canonical(series: pl.Series, what: str) -> pl.Series:
    dtype = series.dtype
    if dtype.is_integer():
        if dtype == pl.UInt64 and (series.max() or 0) > 2**63 - 1:  # type: ignore[operator]
            raise _too_large(what)
        return series.cast(pl.Int64)
    if dtype.is_float():
        series = series.cast(pl.Float64).fill_nan(None)
        # A column of whole numbers turns to floats as soon as one is missing: 12.0 is still client 12.
        known = series.drop_nulls()
        if bool((known == known.floor()).all()) and bool(known.is_finite().all()):
            if len(known) and float(known.abs().max()) > 2**53:  # type: ignore[arg-type]
                raise _too_large(what)
            return series.cast(pl.Int64)
        return series
    if isinstance(dtype, pl.Categorical | pl.Enum):
        return series.cast(pl.String)
    if dtype in (pl.String, pl.Boolean, pl.Date, pl.Null) or isinstance(dtype, pl.Datetime):
        return series
    raise DataError(f"The {what} ids must be integers, text, booleans or dates; got a column of type {dtype}.")


def _from_objects(values: Anything, what: str) -> pl.Series:
    present = [None if is_missing(value) else value for value in values]
    types = {type(value) for value in present if value is not None}
    if types and all(issubclass(t, int | np.integer) and t is not bool for t in types):
        if max(abs(int(value)) for value in present if value is not None) > 2**63 - 1:
            raise _too_large(what)
        return pl.Series(present, dtype=pl.Int64)
    if types and all(issubclass(t, float | int | np.floating | np.integer) and t is not bool for t in types):
        return _canonical(pl.Series(present, dtype=pl.Float64), what)
    if types and all(issubclass(t, str) for t in types):
        return pl.Series([None if value is None else str(value) for value in present], dtype=pl.String)
    if len(types) > 1:
        kinds = " and ".join(sorted(t.__name__ for t in types))
        first = {type(value): value for value in reversed(present) if value is not None}
        shown = " and ".join(repr(value) for value in sorted(first.values(), key=present.index)[:2])
        raise DataError(f"The {what} ids mix {kinds} (such as {shown}); convert them to one type.")
    return _canonical(pl.Series(present), what)


def _too_large(what: str) -> DataError:
    return DataError(f"The {what} ids are too large for whole numbers of 64 bits; convert the column to text.")


def is_missing(value: Any) -> bool:
    """Whether one value stands for none: None, NaN, pandas' NA and NaT."""
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return True
    return isinstance(value, float | np.floating) and bool(np.isnan(value))
