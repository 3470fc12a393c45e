"""The model that a run leaves at the operator's: clusters and the whole; the clients' models stay at their sites."""

from __future__ import annotations

import numpy as np

from covey.federation.operator.coordinator import Federation
from covey.fitting.learning import Fitted
from covey.model.files import spec_from_json
from covey.model.model import Elsewhere, Model
from covey.objective.penalty import Penalty
from covey.tree.hierarchy import Hierarchy


def operator_model(federation: Federation, fitted: Fitted) -> Model:
    """The models of the clusters and of the whole; the clients' stay at their sites."""
    agreed, fit, k = federation.agreed, fitted.fit, federation.tree.n_clusters
    no_clients = Hierarchy(np.zeros(k + 1, dtype=np.int64), federation.tree.client_ids[:0], federation.tree.cluster_ids)
    given = fitted.penalty
    return Model(
        spec_from_json(agreed.spec),
        agreed.design_for(federation.scale),
        no_clients,
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
