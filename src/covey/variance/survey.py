"""What the coordinator learns of all nodes before any search: totals, a frame for all sums, whether levels can be told apart.

It does not depend on which levels vary, so a fit and the fits that test it share it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from covey._typing import Anything, Floats
from covey.losses import loss_of
from covey.nodes.network import InMemory, Network
from covey.solvers.direct.elimination import Quadratic
from covey.tables.rows import GroupedData
from covey.tree.hierarchy import Hierarchy
from covey.variance.centring import RowTotals, frame_for
from covey.variance.frame import ClientSums, CountingNetwork, WorkingColumns, threads_of, without_rows
from covey.variance.gaussian import invert
from covey.variance.identify import FLAT, Evidence, WeighEvidence, bent, check_classes, check_rank, check_told_apart
from covey.variance.laplace import pooled
from covey.variance.structure import Shape


@dataclass(frozen=True)
class Survey:
    """What is known of all rows.

    Attributes
    ----------
    network : the nodes, which see their rows in ``frame`` now
    above : each cluster's sums of its clients' losses about the frame's origin
    log_weights : the sum over all rows
    middle : (d,) of counts and classes the one model of all rows
    totals, evidence : as the nodes told them; None where there are no rows
    """

    network: CountingNetwork
    frame: WorkingColumns
    above: Quadratic
    log_weights: float
    middle: Floats
    totals: RowTotals | None = None
    evidence: Evidence | None = None

    @property
    def flat(self) -> Anything:
        """Which terms are constant within every cluster, and within every client, ``(2, d)``."""
        constant = np.array([term == "Intercept" for term in self.network.terms])
        if self.evidence is None or not constant.any():
            return np.stack([constant, constant])
        one = int(constant.argmax())
        return np.stack([counts[one] == 0 for counts in (bent(self.frame.sums_told(self.above).C, FLAT), self.evidence.bent)])

    @classmethod
    def of_sums(cls, sums: ClientSums, tree: Hierarchy, terms: tuple[str, ...]) -> Survey:
        """Of a linear model of which only its clients' sums are at hand."""
        n, d = tree.n_clients, len(terms)
        nothing = GroupedData(np.empty((0, d)), np.empty(0), np.zeros(n + 1, dtype=np.int64), tree, terms)
        network = InMemory.of(nothing, loss_of("gaussian"), np.ones(n))
        without_rows(network.node, sums)
        above = Quadratic(*(tree.sum_up(each) for each in (sums.units.C, sums.units.r, sums.units.c, sums.units.n)))
        return cls(CountingNetwork(network), WorkingColumns(np.zeros(d), -1, sums.origin), above, sums.log_weights, np.zeros(d))


def survey(network: Network, shape: Shape, *, check: bool = True) -> Survey:
    """Ask the nodes for it; with ``check``, refuse levels that this data cannot tell from each other."""
    with threads_of(network):
        return _survey(CountingNetwork(network), shape, check)


def _survey(network: CountingNetwork, shape: Shape, check: bool) -> Survey:
    loss, terms = network.loss, network.terms
    frame, totals = frame_for(network, shape)
    check_rank(totals.gram, terms)
    inverse, linear = invert(totals.gram)[0], loss.name == "gaussian"
    if linear:
        # About the pooled fit, so that sums of squares are of residuals and lose no digits to a large mean.
        frame = replace(frame, origin=inverse @ totals.rhs)
    evidence = network.ask(WeighEvidence(frame, shape.client, inverse))
    if check:
        check_told_apart(network, evidence, shape, squares=totals.response_squares if linear else None)
    if check and loss.name == "bernoulli":
        check_classes(evidence, shape)
    middle = np.zeros(len(terms)) if linear else pooled(network)
    return Survey(network, frame, evidence.above, totals.log_weights, middle, totals, evidence)
