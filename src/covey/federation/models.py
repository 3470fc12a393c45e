"""The models that a run leaves: at each site those of its own clients, at the operator's those of clusters and of the whole."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from covey.federation.operator.agreement import Agree, Deliver
from covey.fitting.learning import Fitted
from covey.model.files import save_model, spec_from_json
from covey.model.model import Elsewhere, Model
from covey.nodes.node import Node
from covey.objective.penalty import Penalty
from covey.solvers.result import Convergence
from covey.tables.design import Design, plain_design_from_json
from covey.tables.scaling import Scale
from covey.tree.hierarchy import Hierarchy
from covey.variance.components import Components, Whole
from covey.variance.frame import node_learned

if TYPE_CHECKING:
    from covey.federation.operator.coordinator import Federation


def site_model(node: Node, agreed: Agree, delivered: Deliver) -> Model:
    """A site's own clients under the clusters of all: what predicts, and gives intervals, at the site."""
    data, tree = node.data, node.data.hierarchy
    penalty = None if delivered.lam is None else Penalty(node.gamma, delivered.lam, tree.sum_up(node.gamma))
    known = delivered.learned
    learned = None
    if known is not None:
        whole = Whole.from_json(known["whole"])
        learned = node_learned(node, Components.from_json(known["components"]), np.array(known["covariance"]), whole)
    return Model(
        spec_from_json(agreed.spec),
        _design(agreed, node.find(Scale)),
        tree,
        node.coefficients(),
        delivered.w,
        delivered.wbar,
        data.rows_per_client,
        Convergence(**delivered.convergence),
        penalty,
        None if agreed.classes is None else np.array(agreed.classes),
        data.offset is not None,
        learned=learned,
    )


def _design(agreed: Agree, scale: Scale | None) -> Design:
    """What sites agreed on, for rows as they are."""
    design = plain_design_from_json(agreed.design)
    return design if scale is None else scale.design(design)


def keep_model(node: Node, agreed: Agree, delivered: Deliver, path: Path) -> None:
    """Write a site's model to its own disk."""
    save_model(site_model(node, agreed, delivered), path, extra=delivered.said)


def operator_model(federation: Federation, fitted: Fitted) -> Model:
    """The models of the clusters and of the whole; the clients' stay at their sites."""
    agreed, fit, k = federation.agreed, fitted.fit, federation.tree.n_clusters
    nobody = Hierarchy(np.zeros(k + 1, dtype=np.int64), federation.tree.client_ids[:0], federation.tree.cluster_ids)
    given = fitted.penalty
    return Model(
        spec_from_json(agreed.spec),
        _design(agreed, federation.scale),
        nobody,
        np.empty((0, len(fit.wbar))),
        fit.w,
        fit.wbar,
        np.empty(0, dtype=np.int64),
        fit.convergence,
        None if given is None else Penalty(given.gamma[:0], given.lam, given.cluster_gamma),
        None if agreed.classes is None else np.array(agreed.classes),
        federation.spec.offset is not None,
        fit.history,
        fit.ledger,
        fitted.learned,
        Elsewhere(federation.roster, federation.totals.clients, federation.totals.rows),
    )
