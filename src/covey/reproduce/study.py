"""What a study leaves behind: tables, findings in words, and each number of the paper beside ours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import polars as pl

Say = Callable[[str, int, int], None]
"""Told what is being done, and how much of it is done and to do."""

Verdict = Literal["agrees", "agrees as one run", "differs", "not comparable"]


def silent(what: str, done: int, todo: int) -> None:
    """Say nothing."""


@dataclass(frozen=True)
class Table:
    """Numbers for a reader: shown with so many ``digits`` after the point, kept in full in a file of that ``name``."""

    name: str
    title: str
    frame: pl.DataFrame
    note: str = ""
    digits: int = 3
    shown: bool = True


@dataclass(frozen=True)
class Claim:
    """One number that the paper prints, beside ours.

    Attributes
    ----------
    what : the number, in words
    paper, ours : its value there and here
    spread : how far the two may lie apart by chance; None where no chance is involved or none is known
    loose : the same if the paper's is not the average of its runs, as it says, but that of one of them
    why : what is behind a difference, or why the two cannot be compared
    """

    what: str
    paper: float
    ours: float
    spread: float | None
    why: str = ""
    comparable: bool = True
    loose: float | None = None

    @property
    def difference(self) -> float:
        return self.ours - self.paper

    @property
    def verdict(self) -> Verdict:
        if not self.comparable:
            return "not comparable"
        if abs(self.difference) <= (self.spread or 0.0):
            return "agrees"
        return "agrees as one run" if abs(self.difference) <= (self.loose or 0.0) else "differs"


@dataclass(frozen=True)
class Study:
    """One part of ``covey reproduce``: everything in it follows from its settings, the seed among them."""

    name: str
    title: str
    settings: dict[str, Any]
    findings: tuple[str, ...]
    claims: tuple[Claim, ...] = ()
    tables: tuple[Table, ...] = ()
    remarks: tuple[str, ...] = ()
    quick: bool = False

    def table(self, name: str) -> pl.DataFrame:
        """The frame of one table."""
        return next(table.frame for table in self.tables if table.name == name)


def generator(seed: int, *path: int) -> np.random.Generator:
    """A stream of its own for each part of a study, from one seed: parts can be left out without changing the others."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=path))


def whole(rng: np.random.Generator) -> int:
    """A seed drawn from a generator, for what takes a whole number."""
    return int(rng.integers(2**31))
