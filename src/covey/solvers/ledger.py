"""Exchanges and bytes: those that have to happen, and those that the paper (arXiv:2204.13619) expects.

There are two kinds of links: between the server of a cluster and each of its clients, and between the clusters, either through
a central server or directly from each to each. An exchange is a round trip: sums up, centres down. An exchange between
clusters needs one within every cluster first, and counts on both kinds of links.

Proposition 3.2 (expected_num_comm) counts ``p0 (1 - p0) T`` exchanges between clusters, because consecutive steps towards
averages need only one. That holds if ``gamma`` is equal within each cluster (see :class:`.Schedule`). Otherwise each step needs
its own exchange.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from covey._typing import Floats, Ints
from covey.records import Reply
from covey.solvers.first_order.schedule import Rounds, Schedule, Vote

_FLOAT = 8  # bytes


@dataclass(frozen=True)
class Ledger(Reply):
    """Exchanges and bytes so far. Ledgers can be added.

    Attributes
    ----------
    within : (k,) exchanges between each cluster's server and its clients
    between : exchanges between the clusters
    bytes_within, bytes_between : bytes in both directions over all links of a kind, checks included
    checks : exchanges of the whole network that only measure progress
    paper_within, paper_between : numbers expected by Proposition 3.2 (expected_num_comm)
    """

    within: Any
    between: float
    bytes_within: float
    bytes_between: float
    checks: int = 0
    paper_within: Any = 0.0
    paper_between: float = 0.0

    @property
    def exchanges(self) -> int:
        """The largest number of exchanges that a client takes part in, checks included."""
        return int(np.max(self.within)) + self.checks

    @property
    def bytes(self) -> float:
        return self.bytes_within + self.bytes_between


@dataclass(frozen=True)
class Links:
    """The links of a network: the number of clients of each cluster, and the floats that an exchange sends up and down a link.

    ``direct`` says that clusters exchange without a central server. ``tied`` is False if they have nothing to exchange, because
    ``alpha = 0`` in all of them.
    """

    clients: Ints
    up: int
    down: int
    direct: bool = False
    tied: bool = True

    @property
    def pairs(self) -> int:
        """The number of links between clusters."""
        k = len(self.clients)
        if k == 1 or not self.tied:
            return 0
        return k * (k - 1) if self.direct else k

    def count(self, within: Any, between: float, *, votes: float = 0, used: float | None = None) -> Ledger:
        """Exchanges as a ledger; ``votes`` is the number of votes, in each of which a server sends one bit to each other.

        ``used`` is how often a link between clusters was used, if not all were used in every exchange.
        """
        floats = _FLOAT * (self.up + self.down)
        each_way = floats / 2 if self.direct else floats
        ballots = self.pairs * votes / 8 if self.direct else 0
        return Ledger(
            within,
            between if self.pairs else 0 * between,
            float(floats * (within * self.clients).sum()),
            float(each_way * (between * self.pairs if used is None or not self.pairs else used) + ballots),
        )

    def of(self, rounds: Rounds, iterations: int) -> Ledger:
        """The cost of some rounds."""
        together = rounds.together
        within, size = ((rounds.within > 0) | together).sum(axis=0), together.sum(axis=1)
        used = None if rounds.present is None else float((size * (size - 1) if self.direct else size).sum())
        return self.count(within, int(((rounds.between > 0) | rounds.refresh).sum()), votes=iterations, used=used)

    @property
    def check(self) -> Ledger:
        """The cost of a check: sums up, centres down, value and gradient up."""
        spent = replace(self, up=self.up + 2, down=self.up).count(np.ones_like(self.clients), 1)
        return replace(spent, within=0 * self.clients, between=0, checks=1)

    @property
    def nothing(self) -> Ledger:
        return self.count(np.zeros_like(self.clients), 0)


@dataclass(frozen=True)
class Course:
    """What a run of a randomised algorithm did, for a clock (:mod:`covey.solvers.clock`).

    Attributes
    ----------
    schedule, links : its random choices, and what an exchange sends
    checks : iterations at which the whole network measured progress
    rows_per_step : rows that a client reads for a local step; None for all
    """

    schedule: Schedule
    links: Links
    checks: tuple[int, ...]
    rows_per_step: int | None = None


def links(clients: Ints, d: int, vote: Vote = "central", tied: bool = True) -> Links:
    """The links of the randomised algorithms: a vector up, a vector and a strength down."""
    return Links(clients, d, d + 1, vote == "majority", tied)


def quadratic_links(clients: Ints, d: int) -> Links:
    """The links of the direct solvers: a symmetric matrix, two vectors and six numbers up, a vector and two numbers down."""
    return Links(clients, d * (d + 1) // 2 + 2 * d + 6, d + 2)


def rates(schedule: Schedule) -> tuple[Floats, float]:
    """Expected exchanges in an iteration that have to happen: all within each cluster ``(k,)``, and those between clusters.

    If exchanges are merged, a cluster needs one only after a local step, and none after an exchange between clusters, whose
    averages include its own. So there are fewer than Proposition 3.2 says.
    """
    chances = schedule.probabilities
    p0, p = chances.p0, chances.p
    if schedule.merge:
        between, within = p0 * (1 - p0), (1 - p0) * p * (1 - p0) * (1 - p)
    else:
        between, within = p0, (1 - p0) * p
    reached = between if chances.present is None else chances.reached
    return within + reached + chances.rho, between + chances.rho


def expected(schedule: Schedule, iterations: int) -> Ledger:
    """A ledger with the numbers of Proposition 3.2 for some iterations, and nothing else.

    ``paper_within`` counts exchanges within a cluster alone, ``paper_between`` those between clusters.
    """
    p0, p = schedule.probabilities.p0, schedule.probabilities.p
    within, between = (1 - p0) * p * (1 - p), p0 * (1 - p0)
    return Ledger(0 * p.astype(np.int64), 0, 0.0, 0.0, 0, within * iterations, between * iterations)
