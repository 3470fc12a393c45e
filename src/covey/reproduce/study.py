"""The parts of a study: tables, findings in words, and the numbers that the paper prints beside ours.

The paper is Lyu, Hanzely and Kolar (2022), "Personalized Federated Learning with Multiple Known Clusters", arXiv:2204.13619. A
study is a function ``study(seed=..., quick=..., say=...)`` that returns a :class:`Study`. :mod:`covey.report.results` writes it
to files, and :mod:`covey.report.figures` draws its figures from its tables.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np
import polars as pl

from covey.errors import ConvergenceWarning

Say = Callable[[str, int, int], None]
"""Receives progress: the name of the current step, how many parts of it are done, and how many there are."""

Item = TypeVar("Item")
Verdict = Literal["agrees", "agrees as one run", "differs", "not comparable"]


def silent(step: str, done: int, total: int) -> None:
    """Report no progress."""


def tracked(items: Sequence[Item], step: str, say: Say) -> Iterator[Item]:
    """Iterate over ``items`` and report progress after each one."""
    for done, item in enumerate(items, 1):
        yield item
        say(step, done, len(items))


@contextmanager
def no_convergence_warnings() -> Iterator[None]:
    """Hide convergence warnings: the tables of a study show which runs did not converge."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        yield


@dataclass(frozen=True)
class Table:
    """A table of a study.

    Attributes
    ----------
    name : name of the CSV file, which has all digits
    title, note : text above and below the table on the page
    frame : the numbers
    digits : digits after the decimal point on the page
    shown : whether the page shows the table or only links to the CSV file
    """

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
    paper, ours : its value in the paper and here
    spread : largest difference that chance explains; None if the numbers do not depend on chance
    why : the reason for a difference, or why the two numbers cannot be compared
    comparable : whether both numbers come from the same kind of data
    loose : largest difference that chance explains if the paper's number comes from one run instead of the average of several
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
    """One part of ``covey reproduce``. Its settings, which include the seed, determine everything in it."""

    name: str
    title: str
    settings: dict[str, Any]
    findings: tuple[str, ...]
    claims: tuple[Claim, ...] = ()
    tables: tuple[Table, ...] = ()
    remarks: tuple[str, ...] = ()
    quick: bool = False

    def table(self, name: str) -> pl.DataFrame:
        """The numbers of one table."""
        return next(table.frame for table in self.tables if table.name == name)


def generator(seed: int, *path: int) -> np.random.Generator:
    """An independent random stream for each part of a study, so that a change in one part does not change the others."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=path))


def integer_seed(rng: np.random.Generator) -> int:
    """An integer seed drawn from a generator."""
    return int(rng.integers(2**31))
