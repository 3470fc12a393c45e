"""The errors that covey raises, and helpers for their messages.

A message has one or two sentences: what is wrong, where it is (column, client, row, value), and how to correct it. The command
line prints the message and exits with code 2.
"""

from __future__ import annotations

import difflib
import math
import sys
import warnings
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any

INSTALL_FLOWER = "in the folder of covey: pip install '.[flower]'"


class CoveyError(ValueError):
    """A mistake that the caller can correct; the base class of all errors of covey."""


class DataError(CoveyError):
    """A mistake in the table, its columns or its values."""


class FormulaError(CoveyError):
    """A formula that cannot be read, or that needs something that is not supported."""


class PenaltyError(CoveyError):
    """A penalty that is out of range, or that does not fit the hierarchy."""


class SolverError(CoveyError):
    """A solver that does not fit the problem, or one of its options that is out of range."""


class ModelError(CoveyError):
    """A model folder that is missing, damaged or from another version."""


class FederationError(CoveyError):
    """Sites that do not fit together, do not answer, or may not do what they are asked."""


class ConvergenceWarning(UserWarning):
    """A solver stopped before it reached its tolerance, or the optimum is not finite."""


def unknown_column(name: object, columns: Iterable[object]) -> DataError:
    """The error for a column that is not there; it suggests a similar name."""
    return DataError(f"There is no column {name!r}; {did_you_mean(name, columns, 'the columns are')}")


def did_you_mean(name: object, known: Iterable[object], otherwise: str = "there are", most: int = 8) -> str:
    """The end of a sentence about an unknown name: a similar name, or all names after the words ``otherwise``.

    >>> did_you_mean("conty", ["county", "state"])
    "did you mean 'county'?"
    """
    words = [str(word) for word in known]
    near = nearest(name, words)
    return f"{otherwise} {listing(words, most)}." if near is None else f"did you mean {near!r}?"


def nearest(name: object, known: Iterable[object]) -> str | None:
    """The known name that is most similar to an unknown one; None if no name is similar."""
    near = difflib.get_close_matches(str(name), [str(word) for word in known], n=1)
    return near[0] if near else None


def one_of(argument: str, value: object, choices: Iterable[str]) -> CoveyError:
    """The error for a parameter that is none of its choices."""
    words = ", ".join(repr(choice) for choice in choices)
    return CoveyError(f"The {argument!r} parameter must be one of {words}. Got {value!r} instead.")


def listing(names: Iterable[object], most: int = 8) -> str:
    """A short list for messages: ``'a', 'b' and 3 more``."""
    words = [repr(name) for name in names]
    more = f" and {len(words) - most} more" if len(words) > most else ""
    return ", ".join(words[:most]) + more


def warn(sentence: str) -> None:
    """Issue a :class:`ConvergenceWarning` that points to the line outside of covey that caused it."""
    level, frame = 1, sys._getframe(0)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] == "covey":
        level, frame = level + 1, frame.f_back
    warnings.warn(sentence, ConvergenceWarning, stacklevel=level)


def number(
    name: str, value: Any, *, least: float = -math.inf, above: float = -math.inf, below: float = math.inf, kind: type = Real
) -> float:
    """Return a parameter that is a finite number in range; booleans are not numbers. A name with a space is printed as it is.

    >>> number("timeout", -1, above=0)
    Traceback (most recent call last):
    covey.errors.SolverError: The 'timeout' parameter must be a number > 0. Got -1 instead.
    """
    if _is_number(value, kind) and least <= value < below and value > above and math.isfinite(value):
        return float(value)
    bounds = {">=": least, ">": above, "<": below}
    limits = " and ".join(f"{sign} {limit:.16g}" for sign, limit in bounds.items() if math.isfinite(limit))
    required = f"{'whole ' * (kind is Integral)}number {limits}".rstrip()
    what = name if " " in name else f"{name!r} parameter"
    raise SolverError(f"The {what} must be a {required}. Got {_shown(value)} instead.")


def whole(name: str, value: Any, *, least: int = 0, below: float = math.inf) -> int:
    """Return a parameter that is a whole number, at least ``least`` and below ``below``."""
    number(name, value, least=least, below=below, kind=Integral)
    return int(value)


def probability(name: str, value: Any) -> float:
    """Return a parameter that is a number in [0, 1]."""
    if not (_is_number(value, Real) and 0 <= value <= 1):
        raise SolverError(f"The {name!r} parameter must lie in [0, 1]. Got {_shown(value)} instead.")
    return float(value)


def _is_number(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    """The value for a message; numbers of numpy are shown like those of Python."""
    return repr(value.item() if isinstance(value, Real) and hasattr(value, "item") else value)
