"""Messages to a site itself: before the fit, to agree on the problem, and after it, to hand out the models.

    hello     coordinator   sends   the draft of the problem, and its version of covey
              site          sends   Profile: types of its columns, its categories and clusters; no counts and no client ids
    salt      one site      draws   the key of the tags, and seals it for each other site; only if sums are masked
    agree     coordinator   sends   the agreed problem, with all categories, and the ids of all clusters in order
              site          sends   Joined: tags of its clients, which show whether two sites have the same client; SiteTotals
    deliver   coordinator   sends   the coefficients of the clusters and the global ones; each site writes its clients' models
    abandon   coordinator   sends   that a run has stopped for good, in place of deliver; each site deletes its state of it

A tag is a keyed hash of a client id. The coordinator draws the key. With secure aggregation a site draws it, and the
coordinator never sees it: it can see that two tags are equal, but it cannot test guesses of ids.

All other messages go to the node that holds the rows of a site. They are declared where they are sent: in
:mod:`covey.nodes.network`; in the solvers, below :mod:`covey.solvers`; in ``columns``, ``identify``, ``linear_likelihood`` and
``laplace_likelihood`` of :mod:`covey.variance`; and in :mod:`covey.federation.privacy.differential`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

import polars as pl

from covey._typing import Floats, Ints
from covey.errors import FormulaError, SolverError, number, whole
from covey.exact import Exact
from covey.federation.wire.codec import ids_from_json
from covey.kernels import Limbs
from covey.nodes.network import Message
from covey.problem.problem import Problem
from covey.records import Axes, Record, Reply
from covey.tables.formula import ParsedFormula, Terms

R = TypeVar("R")


class SiteMessage(Message[R]):
    """A message that the site answers itself; its node does not see it."""


@dataclass(frozen=True)
class Privacy(Record):
    """The differential privacy of a fit.

    Parameters
    ----------
    noise : standard deviation of the noise in each sum, as a multiple of ``clip``
    clip : the most that one client adds to a sum, in units of the coefficients
    rounds : how often sums are released

    >>> Privacy(noise=2.0, clip=1.0, rounds=0)
    Traceback (most recent call last):
    covey.errors.SolverError: The 'rounds' parameter must be a whole number >= 1. Got 0 instead.
    """

    noise: float
    clip: float
    rounds: int

    def __post_init__(self) -> None:
        if number("noise", self.noise, least=0) >= 2**20:
            raise SolverError(f"The 'noise' parameter must be below 2**20, for sums to fit in 64 bits. Got {self.noise}.")
        number("clip", self.clip, above=0)
        whole("rounds", self.rounds, least=1)


@dataclass(frozen=True)
class Profile(Record):
    """Description of a site's table.

    Attributes
    ----------
    version : of covey at the site
    kinds : "numbers" or "categories", for each column of the formula
    ids : types of the ids of "client" and "cluster", and of the values of the "response"
    levels : categories of the columns that hold categories
    clusters : ids of the clusters, sorted
    classes : classes of a binary response that occur at the site
    key : the site's public key for this run, if sums are masked
    signature : of the key, by the key of the site's node
    vectors : whether the site sends at most one number for each cluster and term in a reply
    """

    version: str
    kinds: dict[str, str]
    ids: dict[str, str]
    levels: dict[str, tuple[Any, ...]]
    clusters: tuple[Any, ...]
    classes: tuple[Any, ...] | None
    key: str = ""
    signature: str = ""
    vectors: bool = False


@dataclass(frozen=True)
class RunDraft(Record):
    """What a run asks for: the draft of the problem, without categories and clusters, and the coordinator's version."""

    version: str
    problem: dict[str, Any]
    secure: bool = False
    private: Privacy | None = None


@dataclass(frozen=True)
class Hello(RunDraft, SiteMessage[Profile], label="hello", phase="set-up"):
    """Begin a run."""


@dataclass(frozen=True)
class Ready(Record):
    """Whether a site would take part in a run, as a clause about the site."""

    would: str


@dataclass(frozen=True)
class AskReady(RunDraft, SiteMessage[Ready], label="dry run", phase="set-up"):
    """Ask whether a site would take part in a run, without starting it."""


@dataclass(frozen=True)
class SealedSalts(Record):
    """The key of the tags, sealed for each other site, in hexadecimal."""

    sealed: dict[str, str]


@dataclass(frozen=True)
class DrawSalt(SiteMessage[SealedSalts], label="salt", phase="set-up"):
    """Draw the key of the tags, and seal it for the sites with these public keys, which they have signed."""

    keys: dict[str, str]
    signatures: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class SiteTotals(Reply):
    """Numbers of clients ``(k,)`` and rows ``(k,)`` of each cluster, and the sum of the responses.

    If terms are standardised, also their :func:`~covey.tables.scaling.moments`. ``learning`` are the sums of functions such as
    ``scale(x)`` that are not yet agreed (:meth:`~covey.tables.design.Formula.sums`). With ``na="drop"``, the numbers of rows
    that were dropped, of all rows, and of the missing values of each column that the problem uses.
    """

    clients: Annotated[Ints, Axes("k", "count")]
    rows: Annotated[Ints, Axes("k", "count")]
    response: Annotated[Exact, Axes("")]
    moments: Annotated[Exact | None, Axes("2 d")] = None
    learning: Annotated[Exact | None, Axes("learning 2")] = None
    dropped: Annotated[Ints | None, Axes("dropped", "count")] = None


@dataclass(frozen=True)
class Joined(Record):
    """Tags of a site's clients.

    Attributes
    ----------
    tags : (n, 2) tags of its clients, two numbers of eight bytes each, sorted, so that their order reveals nothing
    pairs : (n, 2) tags of pairs of cluster and client, if the operator has an allow-list of clients
    """

    tags: Annotated[Limbs, Axes("n 2")]
    pairs: Annotated[Limbs | None, Axes("n 2")] = None


@dataclass(frozen=True)
class Agree(SiteMessage[tuple[Joined, SiteTotals]], label="agree", phase="set-up"):
    """The agreed problem.

    Attributes
    ----------
    problem : the problem as JSON
    clusters, cluster_kind : ids of all clusters in order, and their type
    roster : names of all sites
    keys : their public keys, if sums are masked
    salt : key of the client tags; sealed for this site, if sums are masked
    private : the differential privacy of the fit, if any
    listed : whether the site is to send tags of pairs of cluster and client, for the operator's allow-list
    signatures : of the keys, by the keys of the sites' nodes
    """

    problem: dict[str, Any]
    clusters: tuple[Any, ...]
    cluster_kind: str
    roster: tuple[str, ...]
    keys: dict[str, str]
    salt: str
    private: Privacy | None = None
    listed: bool = False
    signatures: dict[str, str] = field(default_factory=dict)

    def cluster_ids(self) -> pl.Series:
        """The ids of all clusters in their own type."""
        return ids_from_json(self.clusters, self.cluster_kind)


@dataclass(frozen=True)
class Deliver(SiteMessage[None], label="deliver", phase="finish"):
    """The upper levels of the model, from which a site writes the models of its clients.

    Attributes
    ----------
    w, wbar : coefficients of the clusters, and the global ones
    lam : (k,) penalties of the clusters, if penalties were given
    convergence, learned, about : as in a model folder
    """

    w: Floats
    wbar: Floats
    lam: Floats | None
    convergence: dict[str, Any]
    learned: dict[str, Any] | None
    about: dict[str, Any]


@dataclass(frozen=True)
class Abandon(SiteMessage[None], label="abandon", phase="finish"):
    """The run has stopped for good; the site deletes what it remembers of it."""


def check_knots(terms: Terms, *, private: bool) -> None:
    """Refuse functions that sites cannot agree on by sums; in a private run also those that need sums without noise."""
    for _, transform in terms.transforms.values():
        if transform.spline and not transform.given():
            what = f"{transform.text} takes its knots from the rows, which stay at their sites"
            raise FormulaError(f"{what}; give them all: {transform.example()}.")
        if private and not transform.spline:
            what = f"{transform.text} needs exact sums over the rows, which a private run does not send"
            raise FormulaError(f"{what}; give the numbers in the formula, as in I((x - 40) / 10).")


def formula_of(problem: Problem) -> tuple[ParsedFormula, str]:
    """The formula and its response, which a federated fit needs."""
    formula = problem.formula
    if formula is None or formula.response is None:
        raise FormulaError("Across sites a formula names the response and the terms: write 'response ~ terms'.")
    return formula, formula.response
