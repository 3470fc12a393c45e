"""What crosses each link: exchanges and bytes, as they really have to happen, and as the paper expects them.

Two kinds of link: between a cluster's server and each of its clients, and between the clusters (through a central server, or
from each to each). An exchange between clusters needs one within every cluster first, and counts on both.

The paper's ``p0 (1 - p0) T`` counts an exchange only after a local step: through consecutive steps towards averages these are
known. That holds where ``gamma`` is equal within a cluster (see :class:`.Schedule`); otherwise each needs its own exchange.
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
    """Exchanges and bytes so far. Adds.

    Attributes
    ----------
    within : (k,) exchanges between each cluster's server and its clients
    between : exchanges between the clusters
    bytes_within, bytes_between : up and down, all links of a kind together, checks included
    checks : exchanges of the whole network that only served to see how far a run had got
    paper_within, paper_between : what the paper expects (prop. expected_num_comm), those between clusters counted once
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
        """Exchanges of the client that had most, checks included."""
        return int(np.max(self.within)) + self.checks

    @property
    def bytes(self) -> float:
        return self.bytes_within + self.bytes_between


@dataclass(frozen=True)
class Links:
    """The network: how many clients each cluster has, and the floats that cross a link up and down in one exchange.

    ``direct`` says that clusters talk to one another without a server, ``tied`` that they have something to say: with one
    cluster, or with ``alpha = 0`` in all, nothing crosses between them.
    """

    clients: Ints
    up: int
    down: int
    direct: bool = False
    tied: bool = True

    @property
    def pairs(self) -> int:
        """Links between clusters: one each to the server, or one each to every other."""
        k = len(self.clients)
        if k == 1 or not self.tied:
            return 0
        return k * (k - 1) if self.direct else k

    def count(self, within: Any, between: float, *, votes: float = 0) -> Ledger:
        """Exchanges as a ledger; ``votes`` is the iterations voted on, one bit from each server to each other."""
        floats = _FLOAT * (self.up + self.down)
        each_way = floats / 2 if self.direct else floats
        ballots = self.pairs * votes / 8 if self.direct else 0
        return Ledger(
            within,
            between if self.pairs else 0 * between,
            float(floats * (within * self.clients).sum()),
            float(each_way * between * self.pairs + ballots),
        )

    def of(self, rounds: Rounds, iterations: int) -> Ledger:
        """What some rounds of the schedule cost."""
        everybody = (rounds.between > 0) | rounds.refresh
        within = ((rounds.within > 0) | everybody[:, None]).sum(axis=0)
        return self.count(within, int(everybody.sum()), votes=iterations)

    @property
    def check(self) -> Ledger:
        """A check: sums up, centres down, value and gradient up."""
        spent = replace(self, up=self.up + 2, down=self.up).count(np.ones_like(self.clients), 1)
        return replace(spent, within=0 * self.clients, between=0, checks=1)

    @property
    def nothing(self) -> Ledger:
        return self.count(np.zeros_like(self.clients), 0)


def links(clients: Ints, d: int, vote: Vote = "central", tied: bool = True) -> Links:
    """The network of the randomised algorithms: a vector up, a vector and a strength down."""
    return Links(clients, d, d + 1, vote == "majority", tied)


def quadratic_links(clients: Ints, d: int) -> Links:
    """The network of the sweep and of Newton: a symmetric matrix, two vectors and six numbers up, a vector and two down."""
    return Links(clients, d * (d + 1) // 2 + 2 * d + 6, d + 2)


def paper_rates(schedule: Schedule) -> tuple[Floats, float]:
    """Expected exchanges an iteration by prop. expected_num_comm: within each cluster alone ``(k,)``, and between clusters."""
    chances = schedule.probabilities
    return (1 - chances.p0) * chances.p * (1 - chances.p), chances.p0 * (1 - chances.p0)


def rates(schedule: Schedule) -> tuple[Floats, float]:
    """Expected exchanges an iteration that have to happen: within each cluster ``(k,)`` in all, and between clusters.

    With merging, an exchange within a cluster is needed only after a local step (not after an exchange between clusters, which
    leaves the mean known), so there are fewer than the proposition says.
    """
    chances = schedule.probabilities
    p0, p = chances.p0, chances.p
    if schedule.merge:
        between, within = p0 * (1 - p0), (1 - p0) * p * (1 - p0) * (1 - p)
    else:
        between, within = p0, (1 - p0) * p
    return within + between + chances.rho, between + chances.rho


def expected(schedule: Schedule, iterations: int) -> Ledger:
    """The paper's numbers for some iterations, as a ledger with nothing else in it."""
    within, between = paper_rates(schedule)
    return Ledger(0 * schedule.probabilities.p.astype(np.int64), 0, 0.0, 0.0, 0, within * iterations, between * iterations)
