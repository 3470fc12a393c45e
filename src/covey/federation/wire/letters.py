"""Letters: the envelopes of messages to sites and of their replies; and the numbers of a reply apart from its form.

Letters are records (:mod:`covey.records`): reading one builds registered classes and nothing else.

    letter    run, epoch, exchange: where the sender is; body: the message, or the reply
    epoch     grows when a run begins anew with fewer sites
    exchange  grows by one with each letter that changes nodes
    after     the exchange of the last such letter to this site: not all exchanges concern all sites
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from covey import exact
from covey._typing import Anything
from covey.records import Record, RecordError, build, names

_SUMS = ("exact", "wide")  # kinds of holes for exact sums, of which there are narrow ones and wide ones


@dataclass(frozen=True)
class Letter(Record):
    """One message or reply, and where its sender is.

    Attributes
    ----------
    run, epoch, exchange, after : see the head of this module
    body : a :class:`~covey.nodes.network.Message` to a site; its reply, or a :class:`Refusal`, to the coordinator
    mute : whether only a receipt is wanted: a site that catches up sends no sum a second time
    """

    run: str
    epoch: int
    exchange: int
    body: Any = None
    mute: bool = False
    after: int = -1


@dataclass(frozen=True)
class Refusal(Record):
    """Why a site does not do what it was asked.

    ``reason`` is "data" (its table or settings: the sentence is for people), "behind" (it has not seen the exchanges before
    this one; ``exchange`` is the last it has), "stale" (it is past this one) or "broken" (a fault of the program).
    """

    reason: str
    sentence: str
    exchange: int = -1


# Numbers apart from their places


def split(message: Any) -> tuple[Any, exact.Exact]:
    """A reply as its skeleton, which holds no number, and all its numbers in one row that can be added and masked.

    They are :data:`~covey.exact.WIDE`, whatever they were, so that nothing tells how large they are.
    """
    floats: list[Anything] = []
    sums: list[exact.Exact] = []
    skeleton = _hollow(message, floats, sums)
    values = np.concatenate([np.empty(0), *floats])
    return skeleton, exact.Exact.join([exact.Exact.of(values, exact.WIDE), *sums])


def join(skeleton: Any, numbers: exact.Exact) -> Any:
    """The reverse: the reply with these numbers; infinite ones, where a sum is not a number."""
    holes = list(_holes(skeleton))
    places = {True: 0, False: 0}
    for hole in holes:
        places[hole.kind in _SUMS] += hole.size
    if numbers.shape != (sum(places.values()),):
        raise RecordError(f"A reply has numbers of shape {numbers.shape} for {sum(places.values())} places.")
    at = {True: places[False], False: 0}

    def take(hole: Hole) -> Any:
        start = at[hole.kind in _SUMS]
        at[hole.kind in _SUMS] += hole.size
        part = numbers[start : start + hole.size].reshape(*hole.shape)
        if hole.kind in _SUMS:
            return part if hole.kind == "wide" else part.narrowed()
        floats = np.where(part.finite, part.floats(), np.inf)
        if hole.kind in ("int", "float"):
            return int(floats) if hole.kind == "int" else float(floats)
        return floats.astype(np.dtype(hole.kind))

    return _filled(skeleton, take)


def _hollow(value: Any, floats: list[Anything], sums: list[exact.Exact]) -> Any:
    if isinstance(value, exact.Exact):
        wide = value.limbs.shape[-1] == exact.WIDE
        sums.append((value if wide else value.widened()).reshape(-1))
        return Hole("wide" if wide else "exact", tuple(value.shape))
    if isinstance(value, np.ndarray) and value.dtype.kind in "fiu":
        floats.append(value.astype(np.float64).ravel())
        return Hole(value.dtype.str, tuple(value.shape))
    if isinstance(value, int | float | np.number) and not isinstance(value, bool):
        floats.append(np.array([float(value)]))
        return Hole("int" if isinstance(value, int | np.integer) else "float", ())
    if isinstance(value, Record):
        return {name: _hollow(getattr(value, name), floats, sums) for name in names(value)} | {"": type(value).__name__}
    if isinstance(value, tuple | list):
        return tuple(_hollow(each, floats, sums) for each in value)
    if value is None or isinstance(value, bool | str):
        return value
    raise TypeError(f"a {type(value).__name__} cannot be masked")


def _holes(value: Any) -> Iterator[Hole]:
    if isinstance(value, Hole):
        yield value
    elif isinstance(value, dict | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _holes(each)


def _filled(value: Any, take: Callable[[Hole], Any]) -> Any:
    if isinstance(value, Hole):
        return take(value)
    if isinstance(value, dict):
        return build(value[""], {name: _filled(each, take) for name, each in value.items() if name})
    if isinstance(value, tuple):
        return tuple(_filled(each, take) for each in value)
    return value


@dataclass(frozen=True)
class Hole(Record):
    """Where numbers belong: their kind and shape."""

    kind: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)
