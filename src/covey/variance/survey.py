"""What the coordinator asks of all nodes before any search: totals, working columns, and whether levels are identifiable.

The answers do not depend on which levels vary, so a fit and the fits that test it share them.
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
from covey.variance.centring import RowTotals, choose_columns
from covey.variance.frame import ClientSums, CountingNetwork, WorkingColumns, threads_of, use_sums
from covey.variance.identify import (
    PROPORTIONAL,
    Evidence,
    WeighEvidence,
    check_classes,
    check_identifiable,
    check_rank,
    n_not_proportional,
)
from covey.variance.laplace_likelihood import pooled
from covey.variance.linear_likelihood import invert
from covey.variance.structure import Shape


@dataclass(frozen=True)
class Survey:
    """What the coordinator knows of all rows.

    Attributes
    ----------
    network : the nodes, which use ``columns`` from now on
    columns : the working columns of all nodes
    cluster_sums : each cluster's sum of its clients' losses about the origin
    log_weights : the sum over all rows
    middle : (d,) the one model of all rows, for counts and classes; zero for a linear model
    totals, evidence : the nodes' replies; None where there are no rows
    """

    network: CountingNetwork
    columns: WorkingColumns
    cluster_sums: Quadratic
    log_weights: float
    middle: Floats
    totals: RowTotals | None = None
    evidence: Evidence | None = None

    @property
    def constant_within(self) -> Anything:
        """Which terms are constant within every cluster, and within every client, ``(2, d)``."""
        constant = np.array([term == "Intercept" for term in self.network.terms])
        if self.evidence is None or not constant.any():
            return np.stack([constant, constant])
        one = int(constant.argmax())
        clusters = n_not_proportional(self.columns.losses_to_user_units(self.cluster_sums).C, PROPORTIONAL)
        return np.stack([clusters[one] == 0, self.evidence.clearly_not_proportional[one] == 0])

    @classmethod
    def of_sums(cls, sums: ClientSums, tree: Hierarchy, terms: tuple[str, ...]) -> Survey:
        """Of a linear model of which there are only its clients' sums."""
        n, d = tree.n_clients, len(terms)
        no_rows = GroupedData(np.empty((0, d)), np.empty(0), np.zeros(n + 1, dtype=np.int64), tree, terms)
        network = InMemory.of(no_rows, loss_of("gaussian"), np.ones(n))
        use_sums(network.node, sums)
        cluster_sums = Quadratic(*(tree.sum_up(each) for each in (sums.units.C, sums.units.r, sums.units.c, sums.units.n)))
        columns = WorkingColumns(np.zeros(d), -1, sums.origin)
        return cls(CountingNetwork(network), columns, cluster_sums, sums.log_weights, np.zeros(d))


def survey(network: Network, shape: Shape, *, check: bool = True) -> Survey:
    """Ask the nodes; with ``check``, refuse levels whose variances this data cannot tell apart."""
    with threads_of(network):
        return _survey(CountingNetwork(network), shape, check)


def _survey(network: CountingNetwork, shape: Shape, check: bool) -> Survey:
    loss, terms = network.loss, network.terms
    columns, totals = choose_columns(network, shape)
    check_rank(totals.gram, terms)
    inverse, linear = invert(totals.gram)[0], loss.reml
    if linear:
        # About the pooled fit, so that sums of squares are of residuals and lose no digits to a large mean.
        columns = replace(columns, origin=inverse @ totals.rhs)
    evidence = network.ask(WeighEvidence(columns, shape.client, inverse))
    if check:
        check_identifiable(network, evidence, shape, squares=totals.response_squares if linear else None)
    if check and loss.two_classes:
        check_classes(evidence, shape)
    middle = np.zeros(len(terms)) if linear else pooled(network)
    return Survey(network, columns, evidence.cluster_sums, totals.log_weights, middle, totals, evidence)
