"""Rules for means over a normal distribution: Gauss-Hermite quadrature in one or two directions, and else seeded draws."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from covey._typing import Anything, Floats, Ints

# Nodes of a Gauss-Hermite rule along each of one or two directions, and draws if there are more. The first number is for a
# quick check. The others are for a careful one, which follows if the result looks bad: integrands are then far from normal. The
# second is for clusters, which need fewer nodes than clients, because they have more rows.
GRIDS = {1: (7, 15, 41), 2: (5, 7, 15)}
_DRAWS = 24, 256, 1024
QUICK, CLUSTERS, CLIENTS = range(3)
_BATCHES, POOL = 8, 4093  # batches for the jackknife; the pool that the draws of a client are from


@dataclass(frozen=True)
class Rule:
    """Nodes for a mean over a standard normal distribution in ``r`` directions, with the logs of their weights ``(n,)``.

    ``z`` is ``(n, r)`` for a Gauss-Hermite rule. For a rule with random draws it is a pool of draws. Nodes belong to a
    ``batch (n,)``; a rule without random draws has one.
    """

    z: Floats
    log_weight: Floats
    batch: Ints

    @classmethod
    def rough(cls, r: int) -> Rule:
        """A rule with few nodes, exact for polynomials of degree 5: in two directions the mode and a hexagon."""
        if r not in GRIDS:
            return cls.over(r, QUICK)
        angles = np.arange(2 if r == 1 else 6) * (np.pi if r == 1 else np.pi / 3)
        around = np.sqrt(2 + r) * np.stack([np.cos(angles), np.sin(angles)], axis=1)[:, :r]
        weights = np.append(2.0, np.full(len(angles), r / len(angles))) / (2 + r)
        return cls(np.vstack([np.zeros((1, r)), around]), np.log(weights), np.zeros(len(weights), dtype=np.int64))

    @classmethod
    def over(cls, r: int, care: int) -> Rule:
        if r == 0:
            return cls(np.zeros((1, 0)), np.zeros(1), np.zeros(1, dtype=np.int64))
        if r in GRIDS:
            z, weight = np.polynomial.hermite_e.hermegauss(GRIDS[r][care])
            grid = np.stack(np.meshgrid(*[z] * r), axis=-1).reshape(-1, r)
            weights = np.prod(np.stack(np.meshgrid(*[weight / weight.sum()] * r), axis=-1), axis=-1).ravel()
            return cls(grid, np.log(weights), np.zeros(len(grid), dtype=np.int64))
        pool, draws = np.random.default_rng(0).normal(size=(POOL, r)), _DRAWS[care]
        return cls(pool, np.full(draws, -np.log(draws)), np.arange(draws) // 2 % _BATCHES)

    @property
    def n(self) -> int:
        return len(self.log_weight)

    @property
    def r(self) -> int:
        return int(self.z.shape[1])

    def node(self, at: int, keys: Ints) -> Floats:
        """Node ``at`` of each unit, ``(len(keys), r)``. Random draws depend on its key, and come in pairs ``z, -z``."""
        if len(self.z) == self.n:
            return np.broadcast_to(self.z[at], (len(keys), self.r))
        return np.asarray((1 - 2 * (at % 2)) * self.z[(keys + at // 2) % POOL])

    @property
    def sets(self) -> list[Anything]:
        """Which nodes each estimate uses, boolean ``(n,)``: first all of them, then all but one batch each."""
        whole, count = np.ones(self.n, dtype=bool), int(self.batch.max()) + 1
        return [whole, *(self.batch != b for b in range(count))] if count > 1 else [whole]

    def log_means(self, logs: Floats) -> tuple[Floats, Floats]:
        """For ``logs (n, ...)``: the logs of the means of ``exp(logs)`` by each set, ``(sets, ...)``; each node's share."""
        added = logs + self.log_weight.reshape(-1, *[1] * (logs.ndim - 1))
        top = added.max(axis=0)
        parts = np.exp(added - top)
        means = [top + np.log(parts[used].sum(axis=0) * (len(used) / used.sum())) for used in self.sets]
        return np.stack(means), parts / parts.sum(axis=0)


def factor(S: Floats) -> Floats:
    """``L (..., d, r)`` with ``L L' = S``; ``r`` is the largest rank of the covariances ``S (..., d, d)``."""
    size = np.sqrt(np.maximum(np.einsum("...aa->...a", S), 0.0))
    unit = np.where(size > 0, size, 1.0)  # a rank must not depend on the units of the columns
    values, vectors = np.linalg.eigh(S / (unit[..., :, None] * unit[..., None, :]))
    values = np.where(values > 1e-12 * values.max(initial=0.0), values, 0.0)
    r = int((values > 0).sum(axis=-1).max(initial=0))
    d = S.shape[-1]
    return np.asarray((size[..., :, None] * vectors * np.sqrt(values)[..., None, :])[..., d - r :])
