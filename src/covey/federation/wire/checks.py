"""Checks of a number among settings, in one place."""

from __future__ import annotations

import math
import numbers
from typing import Any

from covey.errors import CoveyError, FederationError


def check_number(
    what: str,
    value: Any,
    *,
    least: float | None = None,
    above: float | None = None,
    below: float = math.inf,
    whole: bool = False,
    error: type[CoveyError] = FederationError,
) -> None:
    """Refuse what is not a finite number of some range; booleans are not numbers.

    >>> check_number("setting 'retries'", -1, least=0, whole=True)
    Traceback (most recent call last):
    covey.errors.FederationError: The setting 'retries' must be a whole number >= 0. Got -1 instead.
    """
    kind = numbers.Integral if whole else numbers.Real
    good = isinstance(value, kind) and not isinstance(value, bool) and math.isfinite(value)
    if good and (least is None or value >= least) and (above is None or value > above) and value < below:
        return
    bounds = {">=": least, ">": above, "<": None if below == math.inf else below}
    limits = " and ".join(f"{sign} {limit}" for sign, limit in bounds.items() if limit is not None)
    raise error(f"The {what} must be a {'whole ' * whole}number {limits}. Got {value!r} instead.")
