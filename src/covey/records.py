"""Records: immutable values that are sent between nodes or stored on disk, and their encoding as bytes.

A record is a frozen dataclass. Its fields are records, arrays, bytes, numbers, text, tuples, dictionaries or None. Every
subclass of :class:`Record` registers itself under its class name, which is unique in covey. The encoding is a JSON header (the
tree of values, with a number in place of each array) followed by the arrays. Decoding only builds registered classes, so the
bytes cannot contain code.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

import numpy as np

from covey._typing import Anything
from covey.errors import CoveyError

_MAGIC = b"covey\x02"
_DTYPES = ("<f8", "<i8", "<u8", "|b1", "|u1")


class RecordError(CoveyError):
    """The bytes are not a record of covey."""


class Record:
    """Base class of everything that is sent or stored. Subclasses are frozen dataclasses."""

    registered: ClassVar[dict[str, type[Record]]] = {}

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        other = Record.registered.setdefault(cls.__name__, cls)
        if other.__module__ != cls.__module__:
            raise TypeError(f"Both {other.__module__} and {cls.__module__} define a record {cls.__name__!r}; rename one.")
        Record.registered[cls.__name__] = cls


class Reply(Record):
    """A reply of a node. Replies of several nodes are added field by field.

    A field whose metadata contain ``least`` is a lower bound: the sum has the smaller of the two values.
    """

    def __add__(self, other: Self) -> Self:
        values = []
        for part in fields(self):  # type: ignore[arg-type]
            one, two = getattr(self, part.name), getattr(other, part.name)
            added = None if one is None or two is None else one + two
            values.append(min(one, two) if part.metadata.get("least") else added)
        return type(self)(*values)


@dataclass(frozen=True)
class Count(Reply):
    """A count, summed over nodes."""

    number: int


def encode(value: Any) -> bytes:
    """Encode a record, or a plain value, as bytes.

    >>> decode(encode(Count(3)))
    Count(number=3)
    """
    arrays: list[Anything] = []
    tree = _flat(value, arrays)
    described = [[array.dtype.str, list(array.shape)] for array in arrays]
    head = json.dumps({"tree": tree, "arrays": described}, separators=(",", ":")).encode()
    return b"".join([_MAGIC, len(head).to_bytes(4, "little"), head, *(array.tobytes() for array in arrays)])


def decode(text: bytes) -> Any:
    """Decode the bytes that :func:`encode` returned."""
    try:
        if text[:6] != _MAGIC:
            raise ValueError("they do not start with its signature")
        size = int.from_bytes(text[6:10], "little")
        head = json.loads(text[10 : 10 + size])
        return _built(head["tree"], list(_arrays(text, 10 + size, head["arrays"])))
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError, RecursionError) as problem:
        raise RecordError(f"These {len(text)} bytes are not a message of covey: {problem}.") from None


def outline(value: Any) -> Any:
    """Return the structure of a value without its numbers: classes, types and shapes."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape
    if isinstance(value, Record):
        return type(value).__name__, *(outline(getattr(value, name)) for name in names(value))
    if isinstance(value, tuple | list):
        return tuple(outline(each) for each in value)
    return type(value).__name__


def digest(*arrays: Anything | None) -> str:
    """Return a checksum of some arrays."""
    checksum = hashlib.sha256()
    for array in arrays:
        checksum.update(b"none" if array is None else np.ascontiguousarray(array).tobytes())
    return checksum.hexdigest()


def names(record: Record) -> list[str]:
    """Return the names of the fields of a record."""
    return [part.name for part in fields(record) if part.init]  # type: ignore[arg-type]


def build(name: str, values: dict[str, Any]) -> Record:
    """Build a record, given the name of its class."""
    return Record.registered[name](**values)


def _flat(value: Any, arrays: list[Anything]) -> Any:
    """Turn a value into JSON types; append its arrays to ``arrays``."""
    if value is None or isinstance(value, bool | str | int | float):
        return value
    if isinstance(value, np.ndarray):
        array = np.ascontiguousarray(value).reshape(value.shape)
        if array.dtype.str not in _DTYPES:
            raise TypeError(f"arrays of {array.dtype} cannot be sent")
        arrays.append(array)
        return {"array": len(arrays) - 1}
    if isinstance(value, bytes):
        arrays.append(np.frombuffer(value, dtype=np.uint8))
        return {"bytes": len(arrays) - 1}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Record):
        return {"is": type(value).__name__, "has": {name: _flat(getattr(value, name), arrays) for name in names(value)}}
    if isinstance(value, tuple | list):
        return {"all": [_flat(each, arrays) for each in value]}
    if isinstance(value, dict):
        return {"by": [[name, _flat(each, arrays)] for name, each in value.items()]}
    raise TypeError(f"a {type(value).__name__} cannot be sent")


def _built(tree: Any, arrays: list[Anything]) -> Any:
    if not isinstance(tree, dict):
        return tree
    if "array" in tree:
        return arrays[tree["array"]]
    if "bytes" in tree:
        return arrays[tree["bytes"]].tobytes()
    if "all" in tree:
        return tuple(_built(each, arrays) for each in tree["all"])
    if "by" in tree:
        return {name: _built(each, arrays) for name, each in tree["by"]}
    return build(tree["is"], {name: _built(each, arrays) for name, each in tree["has"].items()})


def _arrays(text: bytes, at: int, described: list[Any]) -> Iterator[Anything]:
    for dtype, shape in described:
        if dtype not in _DTYPES:
            raise ValueError(f"they hold an array of {dtype!r}")
        count = int(np.prod(shape, dtype=np.int64)) if shape else 1
        array = np.frombuffer(text, np.dtype(dtype), count, at).reshape(shape)
        at += array.nbytes
        yield array.copy()
    if at != len(text):
        raise ValueError("their number differs from what the header says")
