"""The numbers of small fits of every kind are those of the record, to a billionth.

``record.json`` was made at commit 681de36 by ``recorder.py``; the plan was recorded again when it got further solvers,
the number of messages of the randomised algorithms across sites when clusters got a smoothness of their own, and intervals
of global coefficients of counts and classes when they got Satterthwaite's degrees of freedom. On the
machine that made it the bits are the same, which ``compare.py`` checks; on another processor the last few bits differ, so this
compares to a relative 1e-9, also what likelihood searches find. Only how many evaluations such a search takes to settle its
last digits depends on rounding, and is compared loosely; gradient norms, which are rounding at a solution, are compared in
units of the objective.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.golden.recorder import FITS, Numbers

RECORD: dict[str, Numbers] = json.loads((Path(__file__).parent / "record.json").read_text(encoding="utf-8"))

RELATIVE = 1e-9
FLOOR = 1e-12  # of the largest number of a quantity
COUNTS = ("iterations", "exchanges", "exchanges in all")
NEAR_ZERO = ("gradient_norm", "gap", "history gradient_norm", "history gap", "history certified_gap")


def test_every_fit_has_its_record():
    assert list(FITS) == list(RECORD)


@pytest.mark.parametrize("name", RECORD)
def test_the_numbers_are_those_of_the_record(name):
    found = json.loads(json.dumps(FITS[name](), allow_nan=False))
    apart = differences(RECORD[name], found)
    assert not apart, "\n".join([f"{len(apart)} quantities are not as recorded", *apart])


def differences(expected: Numbers, found: Numbers) -> list[str]:
    """What is not as recorded, a line for each quantity."""
    lines = [f"{key} is missing" for key in expected if key not in found]
    lines += [f"{key} is new" for key in found if key not in expected]
    for key in expected:
        if key in found and not key.endswith(" digest") and not _same(key, expected, found):
            lines.append(f"{key}: {_shown(expected[key], found[key])}")
    return lines


def _same(key: str, expected: Numbers, found: Numbers) -> bool:
    one, two = expected[key], found[key]
    part, name = key.rpartition(": ")[::2]
    part += ": " if part else ""
    if name in COUNTS and f"{part}method" in expected:
        return abs(one - two) <= 2 + 0.1 * one
    if not isinstance(one, list):
        return bool(one == two)
    floor = FLOOR * _largest(one)
    if name.removesuffix(" rows").removesuffix(" sums of squares").removesuffix(" sums") in NEAR_ZERO:
        floor = max(floor, RELATIVE * (1 + _largest(expected[f"{part}objective"])))
    return len(one) == len(two) and all(_close(x, y, floor) for x, y in zip(one, two, strict=True))


def _close(x: Any, y: Any, floor: float) -> bool:
    if isinstance(x, str) or isinstance(y, str):  # nan, inf
        return bool(x == y)
    return abs(x - y) <= RELATIVE * abs(x) + floor


def _largest(values: list[Any]) -> float:
    return max((abs(value) for value in values if not isinstance(value, str)), default=0.0)


def _shown(one: Any, two: Any) -> str:
    if not isinstance(one, list) or not isinstance(two, list) or len(one) != len(two):
        return f"{two!r} where {one!r} is recorded"
    apart = [(x, y) for x, y in zip(one, two, strict=True) if x != y]
    x, y = max(
        apart, key=lambda pair: float("inf") if isinstance(pair[0], str) or isinstance(pair[1], str) else abs(pair[0] - pair[1])
    )
    return f"{y!r} where {x!r} is recorded, and {len(apart) - 1} other of {len(one)} numbers"
