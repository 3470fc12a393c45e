"""What covey raises, and the few words every message shares.

Each error is one sentence or two: what is wrong, where (column, client, row, value), and what to do.
The command line prints it as it stands and exits with code 2.
"""

from __future__ import annotations

import difflib
import sys
import warnings
from collections.abc import Iterable


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
