"""The models that a run leaves at a site: those of its own clients, under the clusters of all sites."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from covey.federation.wire.agreement import Deliver
from covey.model.files import save_model
from covey.model.model import Fitted, Model, assemble
from covey.nodes.network import Node
from covey.objective.objective import Penalty
from covey.problem.problem import Problem
from covey.solvers.result import Convergence, Fit
from covey.tables.scaling import Scale
from covey.variance.columns import node_learned
from covey.variance.components import Components, Whole


def site_model(node: Node, problem: Problem, delivered: Deliver) -> Model:
    """A site's own clients under the clusters of all: what predicts, and gives intervals, at the site."""
    data, tree = node.data, node.data.hierarchy
    penalty = None if delivered.lam is None else Penalty(node.gamma, delivered.lam, tree.sum_up(node.gamma))
    upper, learned = delivered.learned, None
    if upper is not None:
        whole = Whole.from_json(upper["whole"])
        learned = node_learned(node, Components.from_json(upper["components"]), np.array(upper["covariance"]), whole)
    scale = node.find(Scale)
    fit = Fit(node.coefficients(), delivered.w, delivered.wbar, Convergence(**delivered.convergence))
    fitted = Fitted(fit, penalty, learned)
    return assemble(problem if scale is None else problem.scaled(scale), fitted, tree, data.rows_per_client)


def keep_model(node: Node, problem: Problem, delivered: Deliver, path: Path) -> None:
    """Write a site's model to its own disk."""
    save_model(site_model(node, problem, delivered), path, extra=delivered.about)
