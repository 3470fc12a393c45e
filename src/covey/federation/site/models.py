"""The models that a run leaves at a site: those of its own clients, under the clusters of all sites."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from covey.federation.wire.agreement import Agree, Deliver
from covey.model.files import save_model, spec_from_json
from covey.model.model import Model
from covey.nodes.node import Node
from covey.objective.penalty import Penalty
from covey.solvers.result import Convergence
from covey.tables.scaling import Scale
from covey.variance.components import Components, Whole
from covey.variance.frame import node_learned


def site_model(node: Node, agreed: Agree, delivered: Deliver) -> Model:
    """A site's own clients under the clusters of all: what predicts, and gives intervals, at the site."""
    data, tree = node.data, node.data.hierarchy
    penalty = None if delivered.lam is None else Penalty(node.gamma, delivered.lam, tree.sum_up(node.gamma))
    upper, learned = delivered.learned, None
    if upper is not None:
        whole = Whole.from_json(upper["whole"])
        learned = node_learned(node, Components.from_json(upper["components"]), np.array(upper["covariance"]), whole)
    return Model(
        spec_from_json(agreed.spec),
        agreed.design_for(node.find(Scale)),
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


def keep_model(node: Node, agreed: Agree, delivered: Deliver, path: Path) -> None:
    """Write a site's model to its own disk."""
    save_model(site_model(node, agreed, delivered), path, extra=delivered.about)
