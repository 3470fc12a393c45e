"""Penalties: how strongly clients are tied to their cluster, and clusters to the global model.

The objective of the paper in its two forms, and the penalties that tie clients to clusters to the whole.

Multi-task form (eq. mtl_loss):   sum_i f_i(theta_i) + gamma_i/2 |theta_i - w_j|^2 + sum_j lam_j/2 |w_j - wbar|^2
Penalised form (eq. loss):        sum_i f_i(theta_i) + sum_j (1 - alpha_j) psi_j(theta) + phi(theta)

With ``alpha_j = lam_j / (lam_j + sum_{i in j} gamma_i)`` both have the same minimiser (prop. equiv_mtl). The mean
``tbar`` is the weighted one (the paper's two definitions agree only when the clusters' total penalties do).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from covey._typing import Anything, Floats
from covey.errors import PenaltyError
from covey.losses import Loss
from covey.tables.rows import GroupedData
from covey.tree.hierarchy import Hierarchy


@dataclass(frozen=True)
class Penalty:
    """How strongly clients are pulled to their cluster (``gamma``) and clusters to the global model (``lam``).

    Build it with :meth:`of`. ``lam`` may be 0 (clusters independent) or infinite (all clusters are one), which are
    ``alpha = 0`` and ``alpha = 1``.

    Parameters
    ----------
    gamma : (n,) one for each client, >= 0
    lam : (k,) one for each cluster, in [0, inf]
    cluster_gamma : (k,) the sum of ``gamma`` over each cluster, > 0
    """

    gamma: Floats
    lam: Floats
    cluster_gamma: Floats

    @classmethod
    def of(cls, hierarchy: Hierarchy, gamma: Any = 1.0, lam: Any = None, alpha: Any = None) -> Penalty:
        """From ``(gamma, lam)`` or ``(gamma, alpha)``.

        Each is a number, or one value for each cluster, or (``gamma`` only) for each client: an array in the order
        of ``hierarchy``, or a mapping from ids to values.

        >>> from covey import GroupedData
        >>> tree = GroupedData.from_arrays([[1.0]] * 3, [0.0] * 3, ["a", "b", "c"], ["x", "x", "y"]).hierarchy
        >>> Penalty.of(tree, gamma={"x": 1.0, "y": 4.0}, alpha=0.5).lam.tolist()
        [2.0, 4.0]
        """
        if lam is not None and alpha is not None:
            raise PenaltyError("Give lam or alpha, not both; alpha = lam / (lam + the cluster's sum of gamma).")
        clusters, clients = hierarchy.clusters, hierarchy.clients
        spread = _per_unit(gamma, "gamma", {"client": clients, "cluster": clusters})
        if len(spread) == len(clients):
            _check_range(spread, "gamma", clients, "client", np.inf, open_end=True)
        else:
            _check_range(spread, "gamma", clusters, "cluster", np.inf, open_end=True)
            spread = spread[hierarchy.parent]
        total = _cluster_sums(spread, hierarchy)
        idle = (total == 0) & (hierarchy.sizes > 0)
        if idle.any():
            name = clusters.tolist()[int(idle.argmax())]
            raise PenaltyError(
                f"gamma is 0 for every client of cluster {name!r}, so nothing ties them to it; give one a positive gamma, or "
                "fit baseline='locally-trained'."
            )
        if alpha is None:
            lam = _per_unit(1.0 if lam is None else lam, "lam", {"cluster": clusters})
            _check_range(lam, "lam", clusters, "cluster", np.inf)
        else:
            alpha = _per_unit(alpha, "alpha", {"cluster": clusters})
            _check_range(alpha, "alpha", clusters, "cluster", 1.0)
            with np.errstate(divide="ignore"):
                lam = np.where(alpha == 1.0, np.inf, alpha / (1.0 - alpha) * total)
        return cls(spread, lam, total)

    @property
    def alpha(self) -> Floats:
        """The mixing weight of each cluster, ``lam / (lam + cluster_gamma)``, in [0, 1]."""
        total = self.lam + self.cluster_gamma
        with np.errstate(invalid="ignore"):
            return np.where(np.isinf(self.lam), 1.0, self.lam / np.where(total > 0, total, 1.0))  # no clients, no tie: 0


def _cluster_sums(gamma: Floats, hierarchy: Hierarchy) -> Floats:
    """Correctly rounded, so that clients in another order, or known by their number only, give the same bits."""
    ptr, filled = hierarchy.cluster_ptr, hierarchy.sizes > 0
    first = np.zeros(hierarchy.n_clusters)
    first[filled] = gamma[ptr[:-1][filled]]
    total = hierarchy.sizes * first
    for j in np.unique(hierarchy.parent[gamma != first[hierarchy.parent]]):
        total[j] = math.fsum(gamma[ptr[j] : ptr[j + 1]])
    return total


def _per_unit(value: Any, name: str, units: Mapping[str, Anything]) -> Floats:
    """One value for each unit of the first level it fits; a single number goes to the last (coarsest) level."""
    coarsest = list(units.values())[-1]
    if isinstance(value, Mapping):
        return _from_mapping(value, name, units)
    try:
        values = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError):
        raise PenaltyError(f"The {name!r} parameter must be a number, an array or a mapping. Got {value!r} instead.") from None
    if values.ndim == 0:
        return np.full(len(coarsest), float(values))
    if values.ndim == 1 and any(len(values) == len(ids) for ids in units.values()):
        return values
    sizes = " or ".join(f"{len(ids)} (one for each {level})" for level, ids in units.items())
    raise PenaltyError(f"The {name!r} parameter must hold 1, {sizes} values. Got shape {values.shape} instead.")


def _from_mapping(value: Mapping[Any, Any], name: str, units: Mapping[str, Anything]) -> Floats:
    known_by = {level: ids.tolist() for level, ids in units.items()}  # dates too as those who write mappings have them
    level, ids = max(known_by.items(), key=lambda unit: sum(label in value for label in unit[1]) / len(unit[1]))
    lacking = [label for label in ids if label not in value]
    if lacking:
        raise PenaltyError(f"The {name!r} parameter has no value for {level} {lacking[0]!r}; give one for each {level}.")
    known = set(ids)
    extra = [label for label in value if label not in known]
    if extra:
        raise PenaltyError(f"The {name!r} parameter has a value for {extra[0]!r}, which is no {level} of the data.")
    return _per_unit([value[label] for label in ids], name, {level: units[level]})


def _check_range(values: Floats, name: str, ids: Anything, level: str, top: float, open_end: bool = False) -> None:
    bad = ~((values >= 0) & ((values < top) if open_end else (values <= top)))
    if bad.any():
        at = int(bad.argmax())
        end = ")" if open_end else "]"
        which = f" for {level} {ids.tolist()[at]!r}" if not bad.all() else ""
        raise PenaltyError(f"The {name!r} parameter must lie in [0, {top:g}{end}. Got {values[at]:g}{which} instead.")


@dataclass(frozen=True)
class Objective:
    """Both forms of the objective for one data set; ``theta (n, d)``, ``w (k, d)``, ``wbar (d,)``."""

    data: GroupedData
    loss: Loss
    penalty: Penalty

    def means(self, theta: Floats) -> tuple[Floats, Floats]:
        """``tbar_j (k, d)`` and ``tbar (d,)``; with all ``alpha = 0`` the latter is the plain mean of the former."""
        tbar_j = self.data.hierarchy.mean_up(theta, self.penalty.gamma)
        weight = self.penalty.alpha * self.penalty.cluster_gamma
        weight = weight if weight.any() else np.ones_like(weight)
        return tbar_j, weight @ tbar_j / weight.sum()

    def centres(self, theta: Floats) -> tuple[Floats, Floats]:
        """The ``w`` and ``wbar`` that are best for given ``theta``."""
        tbar_j, tbar = self.means(theta)
        alpha = self.penalty.alpha[:, None]
        return alpha * tbar + (1 - alpha) * tbar_j, tbar

    def value(self, theta: Floats) -> float:
        """The penalised form at ``theta``."""
        tree, penalty = self.data.hierarchy, self.penalty
        tbar_j, tbar = self.means(theta)
        alpha = penalty.alpha[tree.parent]
        to_cluster = ((theta - tree.down(tbar_j)) ** 2).sum(axis=1)
        to_global = ((theta - tbar) ** 2).sum(axis=1)
        ties = penalty.gamma * ((1 - alpha) * to_cluster + alpha * to_global)
        return float(self.loss.value(self.data, theta).sum() + 0.5 * ties.sum())

    def gradient(self, theta: Floats) -> Floats:
        """The gradient of the penalised form, ``(n, d)``."""
        w, _ = self.centres(theta)
        pull = self.penalty.gamma[:, None] * (theta - self.data.hierarchy.down(w))
        return self.loss.gradient(self.data, theta) + pull

    def multitask_value(self, theta: Floats, w: Floats, wbar: Floats) -> float:
        """The multi-task form."""
        ties = self.penalty.gamma * ((theta - self.data.hierarchy.down(w)) ** 2).sum(axis=1)
        apart = ((w - wbar) ** 2).sum(axis=1)
        with np.errstate(invalid="ignore"):
            held = np.where(apart > 0, self.penalty.lam * apart, 0.0)
        return float(self.loss.value(self.data, theta).sum() + 0.5 * ties.sum() + 0.5 * held.sum())

    def multitask_gradient(self, theta: Floats, w: Floats, wbar: Floats) -> tuple[Floats, Floats, Floats]:
        """The gradient of the multi-task form in ``theta``, ``w`` and ``wbar``; for finite ``lam``."""
        tree = self.data.hierarchy
        pull = self.penalty.gamma[:, None] * (theta - tree.down(w))
        hold = self.penalty.lam[:, None] * (w - wbar)
        return self.loss.gradient(self.data, theta) + pull, hold - tree.sum_up(pull), -hold.sum(axis=0)
