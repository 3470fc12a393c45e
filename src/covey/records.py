"""Records: immutable values that are sent between nodes or stored on disk, and their encoding as bytes.

A record is a frozen dataclass. Its fields are records, arrays, bytes, numbers, text, tuples, dictionaries or None. Every
subclass of :class:`Record` registers itself under its class name, which is unique in covey. The encoding is a checksum and a
JSON header (the tree of values, with a number in place of each array), followed by the arrays. Decoding only builds registered
classes, so the bytes cannot contain code.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import numpy as np

from covey._typing import Anything
from covey.errors import CoveyError

_MAGIC, _CHECKSUM = b"covey\x05", 16
_MAGIC_WITHOUT_CHECKSUM = b"covey\x02"  # written by earlier versions
_DTYPES = ("<f8", "<i8", "<u8", "|b1", "|u1")
_USED = np.empty(0)


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


@dataclass(frozen=True)
class Axes:
    """What the numbers in a field of a message or reply look like, for :mod:`covey.federation.wire.schema`.

    Attributes
    ----------
    sizes : lengths of the axes: numbers, ``k`` (clusters), ``d`` (terms), or what the ``sizes`` of the message name; ``n`` is
        any length
    kind : ``count`` (whole, not negative), ``steps`` (a count that is not too large), ``square`` (not negative), ``psd``
        (symmetric, no negative eigenvalue), ``covariance`` (the same, almost without tolerance), or empty
    """

    sizes: str
    kind: Literal["", "count", "steps", "square", "psd", "covariance"] = ""


class Reply(Record):
    """A reply of a node. Replies of several nodes are added field by field.

    The annotation of an array declares its :class:`Axes`. A field whose metadata contain ``least`` is a lower bound: the sum
    has the smaller of the two values. One whose metadata contain ``overflows`` may be infinite.
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
    return seal(b"".join([len(head).to_bytes(4, "little"), head, *(array.tobytes() for array in arrays)]))


def seal(content: bytes) -> bytes:
    """Put the signature of covey and a checksum before the content of a record."""
    return _MAGIC + checksum(content) + content


def write_file(path: Path, content: bytes) -> None:
    """Write a file that only its owner can read, completely or not at all: beside the final one, flushed, moved into place."""
    part = path.with_name(path.name + ".part")
    try:
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def checksum(*parts: bytes | memoryview) -> bytes:
    """Return a checksum of 16 bytes, which detects damage but not intent."""
    found = hashlib.blake2b(digest_size=_CHECKSUM)
    for part in parts:
        found.update(part)
    return found.digest()


def decode(text: bytes, most: int | None = None) -> Any:
    """Decode the bytes that :func:`encode` returned. ``most`` limits the bytes of the JSON header, which grow in memory."""
    try:
        start = len(_MAGIC) + _CHECKSUM * (text[: len(_MAGIC)] == _MAGIC)
        if text[: len(_MAGIC)] not in (_MAGIC, _MAGIC_WITHOUT_CHECKSUM):
            raise ValueError("they do not start with its signature")
        if start > len(_MAGIC) and checksum(memoryview(text)[start:]) != text[len(_MAGIC) : start]:
            raise ValueError("their checksum is wrong")
        size = int.from_bytes(text[start : start + 4], "little")
        if most is not None and size > most:
            raise ValueError(f"their header has {size} bytes, more than {most}")
        head = json.loads(text[start + 4 : start + 4 + size])
        return _built(head["tree"], list(_arrays(text, start + 4 + size, head["arrays"])))
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError, RecursionError) as problem:
        ours = type(problem) in (ValueError, KeyError) or isinstance(problem, CoveyError)
        why = str(problem).rstrip(".")[:200] if ours else "their header is not valid"
        raise RecordError(f"These {len(text)} bytes are not a message of covey: {why}.") from None


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
        if isinstance(tree, list):
            raise ValueError("their header has a list where a value must be")
        return tree
    if "array" in tree or "bytes" in tree:
        at = tree["array" if "array" in tree else "bytes"]
        array, arrays[at] = arrays[at], _USED
        if array is _USED:  # the same bytes in a thousand places would take a thousand times their memory
            raise ValueError("their header uses an array twice")
        return array if "array" in tree else array.tobytes()
    if "all" in tree:
        return tuple(_built(each, arrays) for each in tree["all"])
    if "by" in tree:
        return {name: _built(each, arrays) for name, each in tree["by"]}
    return build(tree["is"], {name: _built(each, arrays) for name, each in tree["has"].items()})


def _arrays(text: bytes, at: int, described: list[Any]) -> Iterator[Anything]:
    for dtype, shape in described:
        if dtype not in _DTYPES or not all(type(length) is int and 0 <= length < 2**48 for length in shape):
            raise ValueError(f"they hold an array of {str(dtype)[:20]!r} with shape {str(shape)[:40]}")
        count = int(np.prod(shape, dtype=np.int64)) if shape else 1
        array = np.frombuffer(text, np.dtype(dtype), count, at).reshape(shape)
        at += array.nbytes
        yield array.copy()
    if at != len(text):
        raise ValueError("their number differs from what the header says")
