"""What covey raises, and the few words every message shares.

Each error is one sentence or two: what is wrong, where (column, client, row, value), and what to do.
The command line prints it as it stands and exits with code 2.

Checks of single numbers that a user gives, with the sentence that says what they have to be.

Numbers and tables as text: counts with their noun, bytes, times, and columns of equal width.
"""

from __future__ import annotations

import difflib
import math
import sys
import warnings
from collections.abc import Iterable, Sequence
from numbers import Integral, Real
from typing import Any


class CoveyError(ValueError):
    """Anything the caller can put right."""


class DataError(CoveyError):
    """The table, its columns or its values."""


class FormulaError(CoveyError):
    """The formula cannot be read, or asks for something that is not supported."""


class PenaltyError(CoveyError):
    """A penalty out of its range, or one that does not fit the hierarchy."""


class SolverError(CoveyError):
    """A solver that does not fit the problem, or a setting out of its range."""


class ModelError(CoveyError):
    """A model folder that is missing, damaged or from another version."""


class FederationError(CoveyError):
    """Sites that do not fit together, do not answer, or may not do what they ask."""


class ConvergenceWarning(UserWarning):
    """A solver stopped before it reached its tolerance, or the optimum is not finite."""


def unknown_column(name: object, columns: Iterable[object]) -> DataError:
    """The error for a column that is not there, with the nearest name that is."""
    return DataError(f"There is no column {name!r}; {did_you_mean(name, columns, 'the columns are')}")


def did_you_mean(name: object, known: Iterable[object], otherwise: str = "there are", most: int = 8) -> str:
    """The end of a sentence about an unknown name: the nearest known one, or else all of them after ``otherwise``.

    >>> did_you_mean("conty", ["county", "state"])
    "did you mean 'county'?"
    """
    words = [str(word) for word in known]
    near = nearest(name, words)
    return f"{otherwise} {listing(words, most)}." if near is None else f"did you mean {near!r}?"


def nearest(name: object, known: Iterable[object]) -> str | None:
    """The known name that an unknown one is probably meant to be, if there is one."""
    near = difflib.get_close_matches(str(name), [str(word) for word in known], n=1)
    return near[0] if near else None


def one_of(argument: str, value: object, choices: Iterable[str]) -> CoveyError:
    """The error for an option outside its vocabulary."""
    words = ", ".join(repr(choice) for choice in choices)
    return CoveyError(f"The {argument!r} parameter must be one of {words}. Got {value!r} instead.")


def listing(names: Iterable[object], most: int = 8) -> str:
    """A short enumeration for messages: ``'a', 'b' and 3 more``."""
    words = [repr(name) for name in names]
    if len(words) <= most:
        return ", ".join(words)
    return ", ".join(words[:most]) + f" and {len(words) - most} more"


def warn(sentence: str) -> None:
    """A :class:`ConvergenceWarning` that points to the line outside of covey which led to it."""
    level, frame = 1, sys._getframe(0)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] == "covey":
        level, frame = level + 1, frame.f_back
    warnings.warn(sentence, ConvergenceWarning, stacklevel=level)


def number(name: str, value: Any, *, least: float = -math.inf, above: float = -math.inf) -> float:
    """A finite number, at least ``least`` and above ``above``."""
    if not (_is_number(value) and math.isfinite(value) and value >= least and value > above):
        range_ = f" > {above:g}" if above > -math.inf else f" >= {least:g}" if least > -math.inf else ""
        raise SolverError(f"The {name!r} parameter must be a number{range_}. Got {_plain(value)!r} instead.")
    return float(value)


def probability(name: str, value: Any) -> float:
    """A number in [0, 1]."""
    if not (_is_number(value) and 0 <= value <= 1):
        raise SolverError(f"The {name!r} parameter must lie in [0, 1]. Got {_plain(value)!r} instead.")
    return float(value)


def whole(name: str, value: Any, *, least: int = 0, below: int | None = None) -> int:
    """A whole number, at least ``least`` and below ``below``."""
    if not (isinstance(value, Integral) and _is_number(value) and least <= int(value) < (math.inf if below is None else below)):
        raise SolverError(f"The {name!r} parameter must be a whole number >= {least}. Got {_plain(value)!r} instead.")
    return int(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _plain(value: Any) -> Any:
    """Numbers of numpy print as Python's own do."""
    return getattr(value, "item", lambda: value)() if isinstance(value, Real) else value


_BYTES = (("B", 1.0), ("kB", 1e3), ("MB", 1e6), ("GB", 1e9), ("TB", 1e12))
_SECONDS = (("s", 1.0), ("min", 60.0), ("h", 3600.0), ("d", 86400.0), ("y", 3.156e7))


def counted(number: int, noun: str) -> str:
    """A number with its noun.

    >>> counted(1, "row"), counted(12000, "row")
    ('1 row', '12,000 rows')
    """
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def large(number: float) -> str:
    """A number that may be too large to write out.

    >>> large(12345.0), large(2.5e9)
    ('12,345', '2.5e+09')
    """
    return f"{number:,.0f}" if number < 1e7 else f"{number:.1e}"


def size(number: float) -> str:
    """Bytes.

    >>> size(999.0), size(123_456.0)
    ('999 B', '123 kB')
    """
    return _in_units(number, _BYTES, 1000)


def duration(seconds: float) -> str:
    """Seconds, in the unit that suits them.

    >>> duration(90.0), duration(7100.0)
    ('90 s', '118 min')
    """
    return _in_units(seconds, _SECONDS, 120)


def table(rows: Iterable[Sequence[str]], widths: Sequence[int]) -> list[str]:
    """Lines of cells, each at least as wide as its column; those of a negative width stand at the left.

    >>> table([["", "sd"], ["x", "0.25"]], [-4, 6])
    ['         sd', 'x      0.25']
    """
    return [
        " ".join(f"{cell:<{-width}}" if width < 0 else f"{cell:>{width}}" for cell, width in zip(row, widths, strict=False))
        for row in rows
    ]


def _in_units(number: float, units: tuple[tuple[str, float], ...], most: float) -> str:
    """Three digits in the first unit that keeps the number below ``most``, or in the last."""
    unit, size = next(((unit, size) for unit, size in units if number < most * size), units[-1])
    return f"{number / size:.3g} {unit}" if number / size < 1000 else f"{number / size:.0e} {unit}"
