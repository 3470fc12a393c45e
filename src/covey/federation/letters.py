"""What travels, as bytes: requests down, replies up, and a node's memory when it is put aside on its own disk.

A message is a tree of frozen dataclasses with arrays, numbers, words, tuples and None as leaves. Written, it is a header in
JSON (the tree, with a number in place of each array) and then the arrays, as they are. Reading builds the classes of
:data:`MODULES` and nothing else; no code comes with a letter.

    letter    run, epoch, exchange: where the sender is; kind; body
    epoch     grows when a run begins anew with fewer sites
    exchange  grows by one with each letter that changes nodes
    after     the exchange of the last such letter to this node: not all exchanges concern all nodes
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from importlib import import_module
from typing import Any

import numpy as np

from covey import exact
from covey._typing import Anything
from covey.errors import CoveyError

MODULES = (
    "exact", "network", "scaling", "losses.base", "theory", "schedule", "solvers.elimination", "solvers.sweep",
    "solvers.newton", "solvers.james_stein", "solvers.private", "solvers.protocol", "solvers.lanczos",
    "solvers.curvature", "solvers.l2gd", "solvers.al2sgd_plus", "variance.frame", "variance.centring",
    "variance.gaussian", "variance.laplace", "variance.identify", "federation.agreement", "federation.masking",
)  # fmt: skip
"""Where the classes that may travel are."""

_MAGIC = b"covey\x01"
_SUMS = ("exact", "wide")  # kinds of holes for exact sums, of which there are narrow ones and wide ones
_DTYPES = ("<f8", "<i8", "<u8", "|b1", "|u1")


class LetterError(CoveyError):
    """Bytes that are no letter, or one that does not fit where the reader is."""


@dataclass(frozen=True)
class Letter:
    """One message and where its sender is.

    Attributes
    ----------
    run, epoch, exchange, after : see the head of this module
    kind : "hello", "salt", "agree", "ask" or "deliver" down; "reply", "ready" or "refusal" up
    body : the message
    mute : whether only a word of receipt is wanted: a node that catches up says nothing again
    """

    run: str
    epoch: int
    exchange: int
    kind: str
    body: Any = None
    mute: bool = False
    after: int = -1


@dataclass(frozen=True)
class Refusal:
    """Why a node does not do what it was asked.

    ``reason`` is "data" (its table or settings: the sentence is for people), "behind" (it has not seen the exchanges before
    this one; ``exchange`` is the last it has), "stale" (it is past this one) or "broken" (a fault of the program).
    """

    reason: str
    sentence: str
    exchange: int = -1


def _name(cls: type) -> str:
    return f"{cls.__module__.removeprefix('covey.')}.{cls.__name__}"


def _is_message(cls: Any) -> bool:
    return isinstance(cls, type) and (is_dataclass(cls) or (issubclass(cls, tuple) and hasattr(cls, "_fields")))


def _is_frozen(cls: Any) -> bool:
    """Whether a class is a message: those that are not frozen hold a program's state."""
    return not is_dataclass(cls) or bool(getattr(cls, "__dataclass_params__").frozen)  # noqa: B009


def _known() -> dict[str, type]:
    modules = [import_module(f"covey.{name}") for name in MODULES]
    own = [(module, cls) for module in modules for cls in vars(module).values() if _is_message(cls)]
    found = {_name(cls): cls for module, cls in own if cls.__module__ == module.__name__ and _is_frozen(cls)}
    return {**found, **{_name(cls): cls for cls in (Letter, Refusal)}}


_KNOWN = _known()


def encode(message: Any) -> bytes:
    """A message as bytes.

    >>> from covey.solvers.sweep import Up
    >>> letter = Letter("r1", 0, 3, "ask", Up())
    >>> decode(encode(letter)) == letter
    True
    """
    arrays: list[Anything] = []
    tree = _flat(message, arrays)
    described = [[array.dtype.str, list(array.shape)] for array in arrays]
    head = json.dumps({"tree": tree, "arrays": described}, separators=(",", ":")).encode()
    return b"".join([_MAGIC, len(head).to_bytes(4, "little"), head, *(array.tobytes() for array in arrays)])


def decode(letter: bytes) -> Any:
    """The message that some bytes stand for."""
    try:
        if letter[:6] != _MAGIC:
            raise ValueError("it does not begin like one")
        size = int.from_bytes(letter[6:10], "little")
        head = json.loads(letter[10 : 10 + size])
        return _built(head["tree"], list(_arrays(letter, 10 + size, head["arrays"])))
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError, RecursionError) as problem:
        raise LetterError(f"These {len(letter)} bytes are no letter of covey's: {problem}.") from None


def _flat(value: Any, arrays: list[Anything]) -> Any:
    """The tree of a message as JSON has it; arrays are put aside."""
    if value is None or isinstance(value, bool | str | int | float):
        return value
    if isinstance(value, np.ndarray):
        array = np.ascontiguousarray(value).reshape(value.shape)
        if array.dtype.str not in _DTYPES:
            raise TypeError(f"arrays of {array.dtype} do not travel")
        arrays.append(array)
        return {"array": len(arrays) - 1}
    if isinstance(value, np.generic):
        return value.item()
    if _is_message(type(value)):
        return {"is": _name(type(value)), "has": {name: _flat(getattr(value, name), arrays) for name in _fields(value)}}
    if isinstance(value, tuple | list):
        return {"all": [_flat(each, arrays) for each in value]}
    if isinstance(value, dict):
        return {"by": [[name, _flat(each, arrays)] for name, each in value.items()]}
    raise TypeError(f"a {type(value).__name__} does not travel")


def _built(tree: Any, arrays: list[Anything]) -> Any:
    if not isinstance(tree, dict):
        return tree
    if "array" in tree:
        return arrays[tree["array"]]
    if "all" in tree:
        return tuple(_built(each, arrays) for each in tree["all"])
    if "by" in tree:
        return {name: _built(each, arrays) for name, each in tree["by"]}
    return _KNOWN[tree["is"]](**{name: _built(each, arrays) for name, each in tree["has"].items()})


def _fields(value: Any) -> list[str]:
    return [each.name for each in fields(value) if each.init] if is_dataclass(value) else list(value._fields)


def _arrays(letter: bytes, at: int, described: list[Any]) -> Iterator[Anything]:
    for dtype, shape in described:
        if dtype not in _DTYPES:
            raise ValueError(f"it holds an array of {dtype!r}")
        count = int(np.prod(shape, dtype=np.int64)) if shape else 1
        array = np.frombuffer(letter, np.dtype(dtype), count, at).reshape(shape)
        at += array.nbytes
        yield array.copy()
    if at != len(letter):
        raise ValueError("its length is not what its head says")


def outline(message: Any) -> Any:
    """What a message looks like without its numbers: classes, kinds and shapes."""
    if isinstance(message, np.ndarray):
        return message.dtype.str, message.shape
    if _is_message(type(message)):
        return _name(type(message)), *(outline(getattr(message, name)) for name in _fields(message))
    if isinstance(message, tuple | list):
        return tuple(outline(each) for each in message)
    return type(message).__name__


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
        raise LetterError(f"A reply has numbers of shape {numbers.shape} for {sum(places.values())} places.")
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
    if _is_message(type(value)):
        return {name: _hollow(getattr(value, name), floats, sums) for name in _fields(value)} | {"": _name(type(value))}
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
        return _KNOWN[value[""]](**{name: _filled(each, take) for name, each in value.items() if name})
    if isinstance(value, tuple):
        return tuple(_filled(each, take) for each in value)
    return value


@dataclass(frozen=True)
class Hole:
    """Where numbers belong: their kind and shape."""

    kind: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)


_KNOWN[_name(Hole)] = Hole
