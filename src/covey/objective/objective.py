"""The objective of the paper in its two forms, and the penalties.

The paper is "Personalized Federated Learning with Multiple Known Clusters" (Lyu, Hanzely, Kolar 2022, arXiv:2204.13619).

Equation 2.1 (loss), penalised form:       sum_i f_i(theta_i) + sum_j (1 - alpha_j) psi_j(theta) + phi(theta)
Equation 2.3 (mtl_loss), multi-task form:  sum_i ( f_i(theta_i) + gamma_i/2 |theta_i - w_j|^2 ) + sum_j lam_j/2 |w_j - wbar|^2

Here ``psi_j = 1/2 sum_{i in j} gamma_i |theta_i - tbar_j|^2`` and ``phi = 1/2 sum_j alpha_j sum_{i in j} gamma_i |theta_i -
tbar|^2``, with the averages ``tbar_j`` of clusters and ``tbar`` of all clients (Equation 2.2 (theta_bar_defn)).

Proposition 2.2 (equiv_mtl): with ``alpha_j = lam_j / (lam_j + sum_{i in j} gamma_i)`` both forms have the same minimiser. The
global average ``tbar`` is the weighted one; the two definitions in the paper agree only if all clusters have the same total
penalty. In terms of a mixed model, ``1/gamma`` and ``1/lam`` are the variances of clients about their cluster and of clusters
about the global model, relative to the residual variance.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from covey._typing import Anything, Floats
from covey.errors import PenaltyError
from covey.losses import Loss
from covey.tables.rows import GroupedData
from covey.tree.hierarchy import Hierarchy

PenaltyLike = npt.ArrayLike | Mapping[Any, float]
"""A number, one number for each unit, or a mapping from ids to numbers."""


@dataclass(frozen=True)
class Penalty:
    """Strength of the pull of clients to their cluster (``gamma``) and of clusters to the global model (``lam``).

    Build it with :meth:`of`. ``lam = 0`` (``alpha = 0``) makes clusters independent. ``lam = inf`` (``alpha = 1``) makes all
    clusters equal.

    Attributes
    ----------
    gamma : (n,) array
        Penalty of each client, >= 0.
    lam : (k,) array
        Penalty of each cluster, in [0, inf].
    cluster_gamma : (k,) array
        Sum of ``gamma`` over the clients of each cluster, positive unless the cluster is empty.
    """

    gamma: Floats
    lam: Floats
    cluster_gamma: Floats

    @classmethod
    def of(
        cls, hierarchy: Hierarchy, gamma: PenaltyLike = 1.0, lam: PenaltyLike | None = None, alpha: PenaltyLike | None = None
    ) -> Penalty:
        """Build penalties from ``gamma`` and ``lam``, or from ``gamma`` and ``alpha``.

        Parameters
        ----------
        hierarchy : Hierarchy
            The clients and clusters, for instance ``data.hierarchy``.
        gamma : float, array or mapping, optional
            One number, or one for each cluster or each client: an array in the order of ``hierarchy``, or a mapping from ids.
            The default is 1.
        lam : float, array or mapping, optional
            One number, or one for each cluster. The default is 1.
        alpha : float, array or mapping, optional
            ``lam / (lam + cluster_gamma)`` in [0, 1], instead of ``lam``.

        Returns
        -------
        Penalty

        Examples
        --------
        >>> from covey import GroupedData
        >>> tree = GroupedData.from_arrays([[1.0]] * 3, [0.0] * 3, ["a", "b", "c"], ["x", "x", "y"]).hierarchy
        >>> Penalty.of(tree, gamma={"x": 1.0, "y": 4.0}, alpha=0.5).lam.tolist()
        [2.0, 4.0]
        """
        if lam is not None and alpha is not None:
            raise PenaltyError("Give lam or alpha, not both; alpha = lam / (lam + the cluster's sum of gamma).")
        clusters = {"cluster": hierarchy.clusters}
        level, spread = _per_unit(gamma, "gamma", {"client": hierarchy.identities, **clusters}, np.inf, open_end=True)
        spread = spread[hierarchy.parent] if level == "cluster" else spread
        total = _cluster_sums(spread, hierarchy)
        idle = (total == 0) & (hierarchy.sizes > 0)
        if idle.any():
            name = hierarchy.clusters.tolist()[int(idle.argmax())]
            raise PenaltyError(
                f"gamma is 0 for every client of cluster {name!r}, so nothing pulls them to it; give one of them a positive "
                "gamma, or fit baseline='locally-trained'."
            )
        if alpha is None:
            return cls(spread, _per_unit(1.0 if lam is None else lam, "lam", clusters, np.inf)[1], total)
        mixing = _per_unit(alpha, "alpha", clusters, 1.0)[1]
        with np.errstate(divide="ignore"):
            return cls(spread, np.where(mixing == 1.0, np.inf, mixing / (1.0 - mixing) * total), total)

    @property
    def alpha(self) -> Floats:
        """Mixing weight of each cluster, ``lam / (lam + cluster_gamma)``, ``(k,)`` in [0, 1]; 0 for an empty cluster."""
        total = self.lam + self.cluster_gamma
        with np.errstate(invalid="ignore"):
            return np.where(np.isinf(self.lam), 1.0, self.lam / np.where(total > 0, total, 1.0))


def _cluster_sums(gamma: Floats, hierarchy: Hierarchy) -> Floats:
    """Sum ``gamma`` over each cluster, correctly rounded, so that the order of the clients changes no bit."""
    ptr, filled = hierarchy.cluster_ptr, hierarchy.sizes > 0
    first = np.zeros(hierarchy.n_clusters)
    first[filled] = gamma[ptr[:-1][filled]]
    total = hierarchy.sizes * first
    for j in np.unique(hierarchy.parent[gamma != first[hierarchy.parent]]):
        total[j] = math.fsum(gamma[ptr[j] : ptr[j + 1]])
    return total


def _per_unit(
    value: PenaltyLike, name: str, units: Mapping[str, Anything], top: float, open_end: bool = False
) -> tuple[str, Floats]:
    """Return one value for each unit of a level, and that level: the first that fits. A number fits the last level."""
    level, given = list(units)[-1], value
    if isinstance(value, Mapping):
        level, given = _from_mapping(value, name, units)
        units = {level: units[level]}
    try:
        values = np.asarray(given, dtype=np.float64)
    except (TypeError, ValueError):
        raise PenaltyError(f"The {name!r} parameter must be a number, an array or a mapping. Got {given!r} instead.") from None
    if values.ndim == 0:
        values = np.full(len(units[level]), float(values))
    else:
        fits = [level for level, ids in units.items() if values.shape == (len(ids),)]
        if not fits:
            sizes = " or ".join(f"{len(ids)} (one for each {level})" for level, ids in units.items())
            raise PenaltyError(f"The {name!r} parameter must hold 1, {sizes} values. Got shape {values.shape} instead.")
        level = fits[0]
    bad = ~((values >= 0) & ((values < top) if open_end else (values <= top)))
    if bad.any():
        at = int(bad.argmax())
        which = f" for {level} {units[level].tolist()[at]!r}" if not bad.all() else ""
        end = ")" if open_end else "]"
        raise PenaltyError(f"The {name!r} parameter must lie in [0, {top:g}{end}. Got {values[at]:g}{which} instead.")
    return level, values


def _from_mapping(value: Mapping[Any, float], name: str, units: Mapping[str, Anything]) -> tuple[str, list[float]]:
    """Find the level whose ids the mapping has, and return its values in the order of the ids."""
    labels = {level: ids.tolist() for level, ids in units.items()}  # Python objects, as in the mapping; dates too
    level, ids = max(labels.items(), key=lambda unit: sum(label in value for label in unit[1]) / len(unit[1]))
    missing = [label for label in ids if label not in value]
    if missing:
        raise PenaltyError(f"The {name!r} parameter has no value for {level} {missing[0]!r}; give one for each {level}.")
    expected = set(ids)
    extra = [label for label in value if label not in expected]
    if extra:
        raise PenaltyError(f"The {name!r} parameter has a value for {extra[0]!r}, which is not a {level} of the data.")
    return level, [value[label] for label in ids]


@dataclass(frozen=True)
class Objective:
    """Both forms of the objective for one data set.

    ``theta (n, d)`` are the coefficients of the clients, ``w (k, d)`` those of the clusters, ``wbar (d,)`` the global ones.

    Parameters
    ----------
    data : GroupedData
        Rows of all clients.
    loss : Loss
        Loss of the clients.
    penalty : Penalty
        Penalties of the clients and clusters.

    Examples
    --------
    >>> from covey import GroupedData, Objective, Penalty
    >>> from covey.solvers import minimise
    >>> from covey.losses import Gaussian
    >>> data = GroupedData.from_arrays([[1.0]] * 4, [0.0, 1.0, 2.0, 3.0], ["a", "a", "b", "b"])
    >>> penalty = Penalty.of(data.hierarchy, gamma=2.0)
    >>> theta = minimise(data, Gaussian(), penalty).theta
    >>> round(Objective(data, Gaussian(), penalty).value(theta), 6)
    1.5
    """

    data: GroupedData
    loss: Loss
    penalty: Penalty

    def means(self, theta: Floats) -> tuple[Floats, Floats]:
        """Return ``tbar_j (k, d)`` and ``tbar (d,)`` of Equation 2.2; if all ``alpha`` are 0, ``tbar`` is the plain mean."""
        tbar_j = self.data.hierarchy.mean_up(theta, self.penalty.gamma)
        weight = self.penalty.alpha * self.penalty.cluster_gamma
        weight = weight if weight.any() else np.ones_like(weight)
        return tbar_j, weight @ tbar_j / weight.sum()

    def centres(self, theta: Floats) -> tuple[Floats, Floats]:
        """Return the ``w`` and ``wbar`` that minimise the multi-task form for given ``theta``."""
        tbar_j, tbar = self.means(theta)
        alpha = self.penalty.alpha[:, None]
        return alpha * tbar + (1 - alpha) * tbar_j, tbar

    def value(self, theta: Floats) -> float:
        """Return the penalised form, Equation 2.1 (loss)."""
        tree, penalty = self.data.hierarchy, self.penalty
        tbar_j, tbar = self.means(theta)
        alpha = penalty.alpha[tree.parent]
        to_cluster = ((theta - tree.down(tbar_j)) ** 2).sum(axis=1)
        to_global = ((theta - tbar) ** 2).sum(axis=1)
        penalties = penalty.gamma * ((1 - alpha) * to_cluster + alpha * to_global)
        return float(self.loss.value(self.data, theta).sum() + 0.5 * penalties.sum())

    def gradient(self, theta: Floats) -> Floats:
        """Return the gradient of the penalised form, ``(n, d)``; Proposition 3.1 (reg_grad)."""
        w, _ = self.centres(theta)
        pull = self.penalty.gamma[:, None] * (theta - self.data.hierarchy.down(w))
        return self.loss.gradient(self.data, theta) + pull

    def multitask_value(self, theta: Floats, w: Floats, wbar: Floats) -> float:
        """Return the multi-task form, Equation 2.3 (mtl_loss)."""
        of_clients = self.penalty.gamma * ((theta - self.data.hierarchy.down(w)) ** 2).sum(axis=1)
        distance = ((w - wbar) ** 2).sum(axis=1)
        with np.errstate(invalid="ignore"):
            of_clusters = np.where(distance > 0, self.penalty.lam * distance, 0.0)
        return float(self.loss.value(self.data, theta).sum() + 0.5 * of_clients.sum() + 0.5 * of_clusters.sum())
