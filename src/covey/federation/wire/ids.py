"""Ids of clients and clusters as they travel: as JSON has them, in one order at all sites, or as keyed hashes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from datetime import date, datetime
from typing import Any

import numpy as np
import polars as pl

from covey._typing import Anything
from covey.errors import FederationError

_TYPES: dict[str, Any] = {
    "integers": pl.Int64,
    "text": pl.String,
    "booleans": pl.Boolean,
    "floating-point numbers": pl.Float64,
    "dates": pl.Date,
}


def tags_of(ids: Iterable[Any], salt: str) -> Anything:
    """Keyed hashes of ids, ``(n, 2)``, sorted, so that their order reveals nothing."""
    hashed = [bytes.fromhex(keyed_hash(each, salt)) for each in ids]
    return np.frombuffer(b"".join(sorted(hashed)), dtype="<u8").reshape(-1, 2).copy()


def keyed_hash(value: Any, salt: str) -> str:
    """A keyed hash of something, in hexadecimal."""
    return hashlib.blake2b(repr(value).encode(), digest_size=16, key=bytes.fromhex(salt)).hexdigest()


def in_order(values: Iterable[Any]) -> list[Any]:
    """Numbers, of whichever type, by value; then text."""
    return sorted(values, key=lambda value: (isinstance(value, str), value))


def plain_ids(ids: pl.Series) -> list[Any]:
    """Ids as JSON has them."""
    return [each.isoformat() if isinstance(each, date | datetime) else each for each in ids.to_list()]


def revive(ids: Iterable[Any], kind: str) -> pl.Series:
    """Ids from JSON, of the kind that they were."""
    if kind not in _TYPES:
        raise FederationError(f"Cluster ids of kind {kind!r} do not travel; convert the column to text.")
    plain = list(ids)
    if kind == "dates":
        plain = [date.fromisoformat(each) for each in plain]
    return pl.Series(plain, dtype=_TYPES[kind])
