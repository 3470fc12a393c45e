"""The messages to a site itself: what all sites agree on before the fit, and what each gets at its end.

    Hello      coordinator   sends   the draft of the problem and its own version
               site          sends   Profile: kinds of its columns, the categories and clusters it has; no counts, no clients
    DrawSalt   one site      draws   the key of the tags, sealed for each other site; only if sums are masked
    Agree      coordinator   sends   the agreed problem, with all categories, and all clusters in order
               site          sends   Joined: tags of its clients, by which two sites with the same client are found; SiteTotals
    Deliver    coordinator   sends   the upper levels; each site writes its clients' models

A tag is a keyed hash of a client's id. The key is drawn by the coordinator, or with secure aggregation by the sites among
themselves: the coordinator then sees that two tags are equal, and cannot try ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import polars as pl

from covey._typing import Anything, Floats, Ints
from covey.errors import FormulaError, SolverError
from covey.exact import Exact
from covey.federation.wire.checks import check_number
from covey.federation.wire.ids import revive
from covey.nodes.network import Message
from covey.problem.problem import Problem
from covey.records import Record, Reply
from covey.tables.formula import ParsedFormula

R = TypeVar("R")


class SiteMessage(Message[R]):
    """A message that a site answers itself, where all others are for the node that holds its rows."""


@dataclass(frozen=True)
class Privacy(Record):
    """How private a fit is to be.

    Parameters
    ----------
    noise : standard deviation of the noise in each sum, as a multiple of ``clip``
    clip : the most that one client adds to a sum, in units of coefficients
    rounds : how often sums are released

    >>> Privacy(noise=2.0, clip=1.0, rounds=0)
    Traceback (most recent call last):
    covey.errors.SolverError: The 'rounds' parameter must be a whole number >= 1. Got 0 instead.
    """

    noise: float
    clip: float
    rounds: int

    def __post_init__(self) -> None:
        check_number("'noise' parameter", self.noise, least=0, below=2**20, error=SolverError)
        check_number("'clip' parameter", self.clip, above=0, error=SolverError)
        check_number("'rounds' parameter", self.rounds, least=1, whole=True, error=SolverError)


@dataclass(frozen=True)
class Profile(Record):
    """What a site's table is like.

    Attributes
    ----------
    version : of covey at the site
    kinds : of each column that the formula names, "numbers" or "categories"
    ids : kinds of the ids of "client" and "cluster", and of the values of the "response"
    levels : the categories of columns that hold some
    clusters : ids, in order
    classes : of a binary response, those that occur
    key : the site's public key of this run, if sums are to be masked
    repeated : whether the same id of a client occurs in two of its clusters
    """

    version: str
    kinds: dict[str, str]
    ids: dict[str, str]
    levels: dict[str, tuple[Any, ...]]
    clusters: tuple[Any, ...]
    classes: tuple[Any, ...] | None
    key: str = ""
    repeated: bool = False


@dataclass(frozen=True)
class Hello(SiteMessage[Profile], label="hello", phase="set-up"):
    """The draft of the problem, before categories and clusters are agreed on, and the coordinator's version."""

    version: str
    problem: dict[str, Any]
    secure: bool = False
    private: Privacy | None = None


@dataclass(frozen=True)
class SealedSalts(Record):
    """The key of the tags, sealed for each other site, in hexadecimal."""

    sealed: dict[str, str]


@dataclass(frozen=True)
class DrawSalt(SiteMessage[SealedSalts], label="salt", phase="set-up"):
    """Draw the key of the tags, and seal it for each site whose public key is here."""

    keys: dict[str, str]


@dataclass(frozen=True)
class SiteTotals(Reply):
    """Clients ``(k,)`` and rows ``(k,)`` of each cluster, and the sum of responses.

    If terms are to be standardised, also their :func:`~covey.tables.scaling.moments`.
    """

    clients: Ints
    rows: Ints
    response: Exact
    moments: Exact | None = None


@dataclass(frozen=True)
class Joined(Record):
    """What a site shows of its clients and rows.

    Attributes
    ----------
    tags : (n, 2) of its clients, sorted, so that their order reveals nothing; eight bytes times two for each
    rows : a keyed hash of all its rows, which shows later that a site without its memory has the same; "" in a private run
    pairs : (n, 2) tags of its clients with their clusters, if the operator has a list of them
    """

    tags: Anything
    rows: str
    pairs: Anything | None = None


@dataclass(frozen=True)
class Agree(SiteMessage[tuple[Joined, SiteTotals]], label="agree", phase="set-up"):
    """What all sites have in common.

    Attributes
    ----------
    problem : the agreed problem, as JSON has it
    clusters, cluster_kind : ids of all clusters, in order, and what kind they are
    roster : all sites
    keys : their public keys, if sums are to be masked
    salt : the key of the clients' tags; sealed for this site, if sums are to be masked
    private : how private the fit is to be, if it is
    listed : whether tags of clients and their clusters together are wanted too, for the operator's list
    """

    problem: dict[str, Any]
    clusters: tuple[Any, ...]
    cluster_kind: str
    roster: tuple[str, ...]
    keys: dict[str, str]
    salt: str
    private: Privacy | None = None
    listed: bool = False

    def cluster_ids(self) -> pl.Series:
        """The ids of all clusters, of their kind."""
        return revive(self.clusters, self.cluster_kind)


@dataclass(frozen=True)
class Deliver(SiteMessage[None], label="deliver", phase="finish"):
    """The upper levels, and all that a site needs to write its own clients' models.

    Attributes
    ----------
    w, wbar : models of clusters and of the whole
    lam : (k,) what ties clusters, if penalties were given
    convergence, learned, about : as a model on disk has them
    """

    w: Floats
    wbar: Floats
    lam: Floats | None
    convergence: dict[str, Any]
    learned: dict[str, Any] | None
    about: dict[str, Any]


def formula_of(problem: Problem) -> tuple[ParsedFormula, str]:
    """The formula and its response, which across sites it must name."""
    formula = problem.formula
    if formula is None or formula.response is None:
        raise FormulaError("Across sites a formula names the response and the terms: write 'response ~ terms'.")
    return formula, formula.response
