"""Encoding: the envelope of a message or reply, a reply as a row of numbers that can be masked, and ids as JSON or as tags.

Envelopes are records (:mod:`covey.records`): to decode one builds registered classes and nothing else.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import date, datetime
from typing import Any

import numpy as np
import polars as pl

from covey._typing import Anything
from covey.errors import FederationError
from covey.exact import WIDE, Exact
from covey.records import Record, RecordError, names

SAME_VERSION = "; install the same version of covey everywhere"  # the fix in errors about unreadable messages
_ID_TYPES: dict[str, Any] = {
    "integers": pl.Int64,
    "text": pl.String,
    "booleans": pl.Boolean,
    "floating-point numbers": pl.Float64,
    "dates": pl.Date,
}


@dataclass(frozen=True)
class Envelope(Record):
    """One message or reply, and its place in the run.

    Attributes
    ----------
    run : name of the run
    epoch : number of the start of the run, from 0; it starts again when it continues with fewer sites
    exchange : number of the exchange in its epoch; only exchanges that change nodes count
    body : a :class:`~covey.nodes.network.Message` to a site; to the coordinator the reply, or a :class:`Refusal`
    after : the last exchange before this one that went to the same site, since not every exchange goes to every site
    """

    run: str
    epoch: int
    exchange: int
    body: Any = None
    after: int = -1

    @property
    def well_formed(self) -> bool:
        """Whether its place in the run is of the declared types; decoding does not check them."""
        return type(self.run) is str and all(type(each) is int for each in (self.epoch, self.exchange, self.after))


@dataclass(frozen=True)
class Refusal(Record):
    """Why a site does not answer a message.

    Attributes
    ----------
    reason : ``data`` (its table or its policy; the sentence is for people), ``waiting`` (for its owner's approval), ``behind``
        (it has not seen the exchanges before this one), ``stale`` (it has answered later ones) or ``broken`` (a program error)
    sentence : the reason in words, without any data of the site
    """

    reason: str
    sentence: str


def printable(text: object) -> str:
    """A sentence of a site without control characters, which could change what a terminal shows."""
    return "".join(each if each.isprintable() else "?" for each in str(text))[:2000]


def printable_texts(value: Any) -> Any:
    """A value of JSON types, with all its texts printable."""
    if isinstance(value, dict):
        return {printable(name): printable_texts(part) for name, part in value.items()}
    if isinstance(value, tuple | list):
        return tuple(printable_texts(part) for part in value)
    return printable(value) if isinstance(value, str) else value


# A reply as a skeleton and a row of numbers


@dataclass(frozen=True)
class Placeholder(Record):
    """Stands in a skeleton for numbers of this kind and shape."""

    kind: str
    shape: tuple[int, ...]


def split(reply: Any) -> tuple[Any, Exact]:
    """Separate a reply into its skeleton, which holds no number, and all its numbers in one row, which can be added and masked.

    All numbers become :data:`~covey.exact.WIDE` sums, so that the encoding does not show how large they are.
    """
    numbers = [Exact.of(np.empty(0), WIDE)]

    def take(value: Any) -> Placeholder:
        if isinstance(value, Exact):
            wide = value.limbs.shape[-1] == WIDE
            numbers.append((value if wide else value.widened()).reshape(-1))
            return Placeholder("wide" if wide else "exact", tuple(value.shape))
        array = np.asarray(value)
        if array.dtype.kind not in "fiu":
            raise TypeError(f"a {type(value).__name__} cannot be masked")
        numbers.append(Exact.of(array.astype(np.float64).ravel(), WIDE))
        kind = array.dtype.str if isinstance(value, np.ndarray) else "float" if array.dtype.kind == "f" else "int"
        return Placeholder(kind, tuple(array.shape))

    skeleton = _with_numbers(reply, take)
    return skeleton, Exact.join(numbers)


def join(skeleton: Any, numbers: Exact) -> Any:
    """Put a skeleton and its numbers together again; a sum that is not finite becomes infinity."""
    at = 0

    def fill(place: Any) -> Any:
        nonlocal at
        if not isinstance(place, Placeholder):
            raise RecordError(f"A masked reply shows a {type(place).__name__}.")
        start, at = at, at + math.prod(place.shape)
        part = numbers[start:at].reshape(*place.shape)
        if place.kind in ("exact", "wide"):
            return part if place.kind == "wide" else part.narrowed()
        floats = np.where(part.finite, part.floats(), np.inf)
        if place.kind in ("int", "float"):
            return int(floats) if place.kind == "int" else float(floats)
        if place.kind not in ("<f8", "<i8", "<u8"):
            raise RecordError(f"A reply has numbers of the unknown kind {str(place.kind)[:20]!r}.")
        return floats.astype(np.dtype(place.kind))

    reply = _with_numbers(skeleton, fill)
    if numbers.shape != (at,):
        raise RecordError(f"A reply has numbers of shape {numbers.shape} for {at} places.")
    return reply


def _with_numbers(value: Any, change: Callable[[Any], Any]) -> Any:
    """A value of records and tuples with others in place of its numbers."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, tuple | list):
        return tuple(_with_numbers(part, change) for part in value)
    if isinstance(value, Record) and not isinstance(value, Exact | Placeholder):
        return type(value)(**{name: _with_numbers(getattr(value, name), change) for name in names(value)})
    return change(value)


# Ids


def client_tags(ids: Iterable[Any], salt: str) -> Anything:
    """Keyed hashes of client ids, ``(n, 2)``, sorted, so that their order reveals nothing."""
    hashed = [bytes.fromhex(keyed_hash(client, salt)) for client in ids]
    return np.frombuffer(b"".join(sorted(hashed)), dtype="<u8").reshape(-1, 2).copy()


def keyed_hash(value: Any, salt: str) -> str:
    """A keyed hash of any value, in hexadecimal."""
    return hashlib.blake2b(repr(value).encode(), digest_size=16, key=bytes.fromhex(salt)).hexdigest()


def in_order(values: Iterable[Any]) -> list[Any]:
    """Sort values the same way at all sites: numbers of any type by value, then text."""
    return sorted(values, key=lambda value: (isinstance(value, str), value))


def ids_to_json(ids: pl.Series) -> list[Any]:
    """Ids as JSON can hold them: dates become text."""
    return [value.isoformat() if isinstance(value, date | datetime) else value for value in ids.to_list()]


def ids_from_json(ids: Iterable[Any], kind: str) -> pl.Series:
    """Ids of a kind again, from JSON."""
    if kind not in _ID_TYPES:
        raise FederationError(f"Cluster ids of kind {kind!r} cannot be sent; convert the column to text.")
    try:
        values = [date.fromisoformat(value) for value in ids] if kind == "dates" else list(ids)
        return pl.Series(values, dtype=_ID_TYPES[kind])
    except (TypeError, ValueError, OverflowError, pl.exceptions.PolarsError):
        raise FederationError(f"Some cluster ids are not {kind}; convert the column to one type.") from None
