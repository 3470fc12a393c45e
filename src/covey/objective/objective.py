"""The objective of the paper in its two forms, and the penalties that tie clients to clusters to the whole.

Multi-task form (eq. mtl_loss):   sum_i f_i(theta_i) + gamma_i/2 |theta_i - w_j|^2 + sum_j lam_j/2 |w_j - wbar|^2
Penalised form (eq. loss):        sum_i f_i(theta_i) + sum_j (1 - alpha_j) psi_j(theta) + phi(theta)

With ``alpha_j = lam_j / (lam_j + sum_{i in j} gamma_i)`` both have the same minimiser (prop. equiv_mtl). The mean
``tbar`` is the weighted one (the paper's two definitions agree only when the clusters' total penalties do).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from covey._typing import Floats
from covey.losses import Loss
from covey.objective.penalty import Penalty
from covey.tables.rows import GroupedData


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
