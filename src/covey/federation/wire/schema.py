"""The schema of replies: what a site may send in answer to a message, and its limits.

The schema is in the declarations. ``Message[R]`` names the class of the reply, its fields have types, and arrays have
:class:`~covey.records.Axes`. A value is checked before the coordinator computes with it: its class, types, lengths of axes,
finite numbers, whole counts that are not negative, and matrices without negative eigenvalues beyond rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, ForwardRef, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np

from covey._typing import Anything, Floats
from covey.errors import FederationError, whole
from covey.exact import LIMBS, WIDE, Exact
from covey.kernels import TOO_LARGE
from covey.nodes.network import Message, Node, Sizes
from covey.records import Axes, Record

_LARGEST = 2**53  # of a count: floating-point numbers hold all whole numbers below
_ROUNDING = 1e-6  # of the largest eigenvalue of a matrix
_NO_TOLERANCE = 1e-12  # of a correlation
_MOST_STEPS = 10**7
_LONGEST = 10_000  # characters of one text


class Misfit(FederationError):  # noqa: N818 - an event
    """A value that does not fit its schema, as a clause about the site that sent it."""


@dataclass(frozen=True)
class Limits:
    """The most that one site may send.

    Attributes
    ----------
    clusters, categories : number of clusters of a site, and of categories of one column
    clients : number of clients in one cluster
    bytes, header : length of a reply, and of the part of it that is not numbers
    """

    clusters: int = 100_000
    categories: int = 10_000
    clients: int = 10_000_000
    bytes: int = 1 << 30
    header: int = 1 << 25

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Limits:
        """The default limits with some others in their place."""
        names = [part.name for part in fields(cls)]
        unknown = [name for name in given if name not in names]
        if unknown:
            raise FederationError(f"There is no limit {str(unknown[0])!r}; there are {', '.join(names)}.")
        return cls(**{name: whole(f"limit {name!r}", value, least=1) for name, value in given.items()})


def check_reply(message: Message[Any], reply: Any, sizes: Sizes) -> None:
    """Raise :class:`Misfit` if a reply does not fit its message; ``sizes`` has ``k``, ``d`` and those of earlier messages."""
    last = message.parts[-1]
    kind: Any = type(last)
    _check(reply, _reply_type(kind) if last.reply else None, "its reply", sizes)


def merged_sizes(message: Message[Any], sizes: Sizes) -> dict[str, Any]:
    """The sizes that hold for the reply to a message: those of earlier messages, and its own.

    ``terms`` is the number of terms, ``order`` that of the working order of the likelihood, which may leave some out.
    """
    found = dict(sizes)
    for part in message.parts:
        found |= {"points": (), "d": "terms", **part.sizes}
        if hasattr(part, "order"):
            found["order"] = found["d"] = len(part.order.terms)
    return found


def check_message(message: Message[Any], node: Node) -> None:
    """Raise :class:`Misfit` if the arrays of a message do not fit a node: compiled code does not check its indices.

    Values may be anything, such as infinite penalties.
    """
    kept = [0, *(len(state.order.terms) for state in node.states.values() if hasattr(state, "order"))]
    sizes: dict[str, Any] = {"k": node.data.n_clusters, "terms": node.data.n_terms, "order": kept[-1], "loose": True}
    for part in message.parts:
        try:
            order = getattr(part, "order", None)
            if order is not None:
                check_record(order, type(order), {**sizes, "d": "terms"})
                inside = order.terms.ndim == 1 and ((order.terms >= 0) & (order.terms < node.data.n_terms)).all()
                _require(bool(inside) and 0 <= order.width <= len(order.terms), "order", "terms that are not there")
            sizes = merged_sizes(part, sizes)
        except (AttributeError, IndexError, KeyError, TypeError):
            raise Misfit(f"it sent a {type(part).__name__} of another form") from None
        _check(part, type(part), "", sizes)


def check_record(value: Any, kind: Any, sizes: Sizes | None = None) -> None:
    """Raise :class:`Misfit` if a value is not of a kind: a class of records, or a type of their fields."""
    _check(value, kind, getattr(kind, "__name__", "its reply"), sizes or {})


@cache
def _reply_type(kind: type) -> Any:
    """The type of reply that a class of messages declares."""
    for base in kind.__mro__:
        for declared in vars(base).get("__orig_bases__", ()):
            if isinstance(get_origin(declared), type) and issubclass(get_origin(declared), Message):
                found = get_args(declared)[0]
                if not isinstance(found, TypeVar):
                    return Record.registered[found.__forward_arg__] if isinstance(found, ForwardRef) else found
    raise TypeError(f"{kind.__name__} does not declare its reply")


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _check(value: Any, declared: Any, name: str, sizes: Sizes, axes: Axes | None = None, *, bound: bool = False) -> None:
    """Check a value against a type; ``bound`` says that it may be infinite."""
    origin = get_origin(declared)
    if origin is Annotated:
        declared, axes = get_args(declared)
        _check(value, declared, name, sizes, axes, bound=bound)
    elif origin in (UnionType, Union):
        if value is not None:
            _check(value, next(each for each in get_args(declared) if each is not NoneType), name, sizes, axes)
    elif declared is object:
        return  # checked elsewhere
    elif declared in (None, NoneType):
        _require(value is None, name, f"a {type(value).__name__} where nothing was asked")
    elif origin is np.ndarray:
        _check_array(value, get_args(get_args(declared)[1])[0], name, sizes, axes)
    elif declared is Exact:
        _check_exact(value, name, sizes, axes or Axes(""))
    elif isinstance(declared, type) and issubclass(declared, Record):
        _check_fields(value, declared, sizes)
    elif origin is tuple:
        _require(isinstance(value, tuple), name, f"a {type(value).__name__} in place of a list")
        kinds = get_args(declared)
        parts = [kinds[0]] * len(value) if kinds[-1] is ... else kinds
        _require(len(value) == len(parts), name, f"{len(value)} parts in place of {len(parts)}")
        for part, kind in zip(value, parts, strict=True):
            _check(part, kind, name, sizes)
    elif origin is dict:
        _require(isinstance(value, dict), name, f"a {type(value).__name__} in place of values by name")
        for key, part in value.items():
            _check(key, str, name, sizes)
            _check(part, get_args(declared)[1], name, sizes)
    else:
        _check_plain(value, declared, name, sizes, axes, bound=bound)


def _check_fields(value: Any, kind: type, sizes: Sizes) -> None:
    _require(type(value) is kind, "", f"a {type(value).__name__} in place of a {kind.__name__}")
    for part in fields(value):
        free = bool(part.metadata.get("least") or part.metadata.get("overflows"))
        _check(getattr(value, part.name), _hints(kind)[part.name], f"{kind.__name__}.{part.name}", sizes, bound=free)


def _check_plain(value: Any, declared: Any, name: str, sizes: Sizes, axes: Axes | None, *, bound: bool) -> None:
    """A single number, text or boolean; ``Any`` allows each of them."""
    if "loose" in sizes:
        kind = (int, float) if declared is float else declared if isinstance(declared, type) else object
        _require(isinstance(value, kind), name, f"a {type(value).__name__} in place of another value")
        return
    kinds = (bool, int, float, str) if declared is Any else (declared,)
    _require(type(value) in kinds, name, f"a {type(value).__name__} in place of a {getattr(declared, '__name__', 'value')}")
    if isinstance(value, str):
        _require(len(value) <= _LONGEST, name, f"a text of {len(value)} characters")
        _require(value.isprintable(), name, f"the text {value[:60]!r}, which has control characters")
    elif isinstance(value, float):
        _require(not math.isnan(value) and (bound or math.isfinite(value)), name, "a number that is not finite")
        _check_kind(np.array(value), name, "" if axes is None else axes.kind)
    elif declared is int:
        _require(0 <= value < _LARGEST, name, f"the count {str(value)[:30]}")


def _check_array(value: Any, dtype: Any, name: str, sizes: Sizes, axes: Axes | None) -> None:
    _require(isinstance(value, np.ndarray), name, f"a {type(value).__name__} in place of numbers")
    _require(dtype is Any or value.dtype == dtype, name, f"numbers of type {value.dtype} in place of {np.dtype(dtype)}")
    if "loose" in sizes and axes is None:
        return
    axes = axes or Axes("")
    _check_shape(value.shape, name, sizes, axes)
    if value.dtype.kind == "f" and "loose" not in sizes:
        _require(bool(np.isfinite(value).all()), name, "a number that is not finite; look there at very large values")
    _check_kind(value, name, axes.kind)


def _check_exact(value: Any, name: str, sizes: Sizes, axes: Axes) -> None:
    """Exact sums. One that is not a number says so itself, and its solver explains it."""
    _require(type(value) is Exact, name, f"a {type(value).__name__} in place of exact sums")
    _check_array(value.size, np.int64, name, sizes, Axes(axes.sizes))
    _check_array(value.limbs, np.uint64, name, sizes, Axes(f"{axes.sizes} {LIMBS}|{WIDE}"))
    _require(bool(((value.size >= 0) & (value.size <= TOO_LARGE)).all()), name, "sums of a wrong size")
    if axes.kind:
        _check_kind(np.where(value.finite, value.floats(), 0.0), name, axes.kind)


def _check_shape(shape: tuple[int, ...], name: str, sizes: Sizes, axes: Axes) -> None:
    wanted = list(_lengths(axes.sizes.split(), sizes))
    fits = len(shape) == len(wanted) and all(
        want is None or (have in want if isinstance(want, tuple) else have == want)
        for have, want in zip(shape, wanted, strict=True)
    )
    shown = " x ".join("n" if want is None else str(want) for want in wanted) or "one number"
    _require(fits, name, f"numbers of shape {' x '.join(map(str, shape[:8])) or 'one number'} in place of {shown}")


def _lengths(axes: Iterable[Any], sizes: Sizes) -> Iterable[Any]:
    """The length that each axis must have; None for any, a tuple for several choices."""
    for axis in axes:
        if isinstance(axis, int) or axis.isdigit():
            yield int(axis)
        elif axis == "n":
            yield None
        elif "|" in axis:
            yield tuple(_lengths(axis.split("|"), sizes))
        else:
            found = sizes[axis]
            yield from _lengths(found if isinstance(found, tuple) else (found,), sizes)


def _check_kind(value: Anything, name: str, kind: str) -> None:
    """Refuse numbers that a sum over clients cannot have."""
    if kind in ("count", "square"):
        _require(bool((value >= 0).all()), name, "a negative number")
    if kind == "steps":
        _require(bool(((value >= 0) & (value <= _MOST_STEPS)).all()), name, "a number of steps that would take too long")
    if kind == "count":
        _require(bool((value == np.floor(value)).all() and (value < _LARGEST).all()), name, "a number that is not a count")
    if kind == "psd":
        _require(_is_psd(value), name, "a matrix that is not positive semi-definite, so it is no sum over rows")
    if kind == "covariance":  # with another matrix one client could be made to dominate the sums
        variances = np.einsum("...aa->...a", value)
        units = np.sqrt(np.where(variances > 0, variances, 1.0))
        fits = (variances >= 0).all() and _is_psd(value / (units[..., :, None] * units[..., None, :]), _NO_TOLERANCE)
        _require(bool(fits), name, "a matrix that is no covariance")


def _is_psd(matrices: Floats, rounding: float = _ROUNDING) -> bool:
    """Whether matrices ``(..., d, d)`` are symmetric and have no negative eigenvalue, up to rounding."""
    if matrices.size == 0:
        return True
    size = np.abs(matrices).max(axis=(-1, -2), keepdims=True)
    scaled = matrices / np.where(size > 0, size, 1.0)
    if (np.abs(scaled - np.swapaxes(scaled, -1, -2)) > rounding).any():
        return False
    try:
        np.linalg.cholesky(scaled + np.where(size > 0, rounding, 1.0) * np.eye(matrices.shape[-1]))
    except np.linalg.LinAlgError:
        return False
    return True


def _require(fits: bool, name: str, wrong: str) -> None:
    if not fits:
        raise Misfit(f"it sent {wrong}" + (f" ({name})" if name else ""))
