"""Checks of single numbers that a user gives, with the sentence that says what they have to be."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any

from covey.errors import SolverError


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
