"""The models that a run leaves: at each site those of its own clients, at the operator's those of clusters and of the whole."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from covey.federation.operator.agreement import Agree, Deliver
from covey.fitting.fit import nobody, without_clients
from covey.model.files import save_model
from covey.model.model import Elsewhere, Fitted, Model, assemble
from covey.nodes.node import Node
from covey.objective.penalty import Penalty
from covey.problem.problem import Classes, Problem, resolve
from covey.problem.spec import Spec
from covey.solvers.result import Convergence, Fit
from covey.tables.design import plain_design_from_json
from covey.tables.scaling import Scale
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
    fit = Fit(node.coefficients(), delivered.w, delivered.wbar, Convergence(**delivered.convergence))
    problem = _problem(agreed, node.find(Scale), data.offset is not None)
    return assemble(problem, Fitted(fit, penalty, learned), tree, data.rows_per_client)


def _problem(agreed: Agree, scale: Scale | None, has_offset: bool) -> Problem:
    """What sites agreed on, for rows as they are."""
    draft = resolve(Spec.from_json(agreed.spec))
    design = plain_design_from_json(agreed.design, None if draft.formula is None else draft.formula.common)
    classes = None if agreed.classes is None else Classes.of(np.array(agreed.classes))
    return draft.of_design(design if scale is None else scale.design(design), classes, has_offset, draft.spec.nested)


def keep_model(node: Node, agreed: Agree, delivered: Deliver, path: Path) -> None:
    """Write a site's model to its own disk."""
    save_model(site_model(node, agreed, delivered), path, extra=delivered.said)


def operator_model(federation: Federation, fitted: Fitted) -> Model:
    """The models of the clusters and of the whole; the clients' stay at their sites."""
    problem = _problem(federation.agreed, federation.scale, federation.spec.offset is not None)
    elsewhere = Elsewhere(federation.roster, federation.totals.clients, federation.totals.rows)
    return assemble(problem, without_clients(fitted), nobody(federation.tree), np.empty(0, dtype=np.int64), elsewhere)
