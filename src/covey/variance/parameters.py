"""Which terms vary, and covariances as functions of parameters.

:class:`Shape` says which terms vary at which level, before any data is read. :class:`Parameters` maps a vector of parameters
to the covariances of clients and clusters.

The covariance of a level is ``S = L L'``, in units of the columns' sizes. ``L`` is a multiple of the identity, diagonal, or
lower triangular; its entries are the parameters. lme4 uses the same Cholesky factor, with bounds on its diagonal (Bates,
Maechler, Bolker and Walker 2015). Here an entry may have either sign, so the search has no constraints, and a level without
variation is a point like any other. At such a point every derivative in ``L`` is zero, whether it is an optimum or not. The
derivative in ``S`` decides (:func:`.resolve_boundary`).

In the paper, arXiv:2204.13619, ``S`` is a multiple of the identity: ``I / gamma`` for clients, ``I / lam`` for clusters.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np

from covey._typing import Anything, Floats, Ints

Kind = Literal["isotropic", "diagonal", "full"]
"""The form of a covariance: one variance for all terms (as in the paper), one per term, or one per term and correlations."""


@dataclass(frozen=True)
class Shape:
    """The positions of the terms that vary at each level, and the form of their covariance.

    With ``per_cluster`` there is one covariance of clients for each cluster, instead of one for all clusters. The terms of
    ``zero`` have the global coefficient 0: they vary about zero, or were dropped because other terms determine them.
    """

    client: tuple[int, ...]
    cluster: tuple[int, ...]
    client_kind: Kind = "diagonal"
    cluster_kind: Kind = "diagonal"
    per_cluster: bool = False
    zero: tuple[int, ...] = ()

    def free(self, order: Ints) -> Anything:
        """Which of the terms at these positions have a global coefficient that is estimated."""
        return ~np.isin(order, self.zero)

    def without(self) -> dict[str, Shape]:
        """The two models with one level less. The key is the level that does not vary."""
        return {"client": replace(self, client=(), per_cluster=False), "cluster": replace(self, cluster=())}

    def order(self, d: int) -> Ints:
        """The working order of ``d`` terms: first those that vary by client, then those that vary by cluster only.

        Eliminating a client costs almost nothing for the terms behind those that vary.
        """
        rank = [(a not in self.client and a not in self.cluster, a not in self.client, a) for a in range(d)]
        return np.array(sorted(range(d), key=rank.__getitem__), dtype=np.int64)


@dataclass(frozen=True)
class Variation:
    """The covariance of the clients about their cluster, or of the clusters about the global model, as a function.

    Parameters
    ----------
    terms : positions of the ``q`` terms that vary, in the working order of terms
    kind : "isotropic" (one variance for all of them), "diagonal" (one for each) or "full" (with correlations)
    size : (q,) the unit of each of these terms' coefficients: one over the root mean square of its column
    count : the number of covariances: one, or one for each cluster
    """

    terms: Ints
    kind: Kind
    size: Floats
    count: int = 1

    @property
    def q(self) -> int:
        return len(self.terms)

    @property
    def width(self) -> int:
        """The number of leading terms that contain all varying terms."""
        return int(self.terms.max()) + 1 if self.q else 0

    @cached_property
    def entries(self) -> tuple[Ints, Ints]:
        """Rows and columns of the entries of ``L`` that may differ from zero."""
        return np.tril_indices(self.q) if self.kind == "full" else (np.arange(self.q), np.arange(self.q))

    @property
    def is_shared(self) -> bool:
        """Whether all terms share one parameter."""
        return self.kind == "isotropic" and self.q > 0

    @property
    def n_parameters(self) -> int:
        return self.count * (1 if self.is_shared else len(self.entries[0]))

    @property
    def unit(self) -> Floats:
        """The unit of each term. Terms that share a variance share one unit, so that they do so in the user's units too."""
        if self.is_shared:
            return np.full(self.q, 1.0 / np.sqrt((self.size**-2).mean()))
        return self.size

    def factors(self, x: Floats) -> Floats:
        """``L (count, q, q)``, in the user's units."""
        L = np.zeros((self.count, self.q, self.q))
        rows, columns = self.entries
        L[:, rows, columns] = x.reshape(self.count, -1)
        return self.unit[:, None] * L

    def matrices(self, x: Floats) -> Floats:
        """``S (count, q, q)`` of the varying terms, in the user's units."""
        L = self.factors(x)
        return np.asarray(L @ L.swapaxes(1, 2))

    def covariances(self, x: Floats, d: int) -> Floats:
        """``S (count, d, d)``, zero where a term does not vary."""
        whole = np.zeros((self.count, d, d))
        whole[:, self.terms[:, None], self.terms] = self.matrices(x)
        return whole

    def gradient(self, x: Floats, G: Floats) -> Floats:
        """The gradient in ``x``, from ``G (count, q, q)``, the gradient in ``S``."""
        rows, columns = self.entries
        slope = (2.0 * self.unit[:, None] * (G @ self.factors(x)))[:, rows, columns]
        return np.asarray(slope.sum(axis=1) if self.is_shared else slope).ravel()

    def of_covariances(self, S: Floats) -> Floats:
        """The parameters of covariances ``(count, q, q)``. Covariances of another form are first reduced to this one."""
        scaled = S / (self.unit[:, None] * self.unit)
        rows, columns = self.entries
        if self.kind == "full":
            return np.asarray(_factor(scaled)[:, rows, columns]).ravel()
        variances = np.maximum(scaled[:, rows, columns], 0.0)
        return np.sqrt(variances.mean(axis=1) if self.is_shared else variances).ravel()

    def even(self, sd: float) -> Floats:
        """The parameters if every term has the standard deviation ``sd``, in its unit."""
        return self.of_covariances(np.broadcast_to(np.diag((sd * self.size) ** 2), (self.count, self.q, self.q)))

    def pick(self, G: Floats) -> Floats:
        """The rows and columns of the varying terms of matrices ``(..., d, d)``."""
        return np.asarray(G[..., self.terms[:, None], self.terms])


@dataclass(frozen=True)
class Parameters:
    """The covariances of both levels as one vector: the clients' parameters, then the clusters'.

    A vector may have more entries: the parameters of the global model follow.
    """

    client: Variation
    cluster: Variation

    @classmethod
    def of(cls, shape: Shape, size: Floats, clusters: int) -> Parameters:
        """For columns whose coefficients have the units ``size (d,)``, in the order of the data."""
        order = shape.order(len(size))
        place = np.argsort(order)
        client, cluster = (np.sort(place[list(terms)]).astype(np.int64) for terms in (shape.client, shape.cluster))
        count = clusters if shape.per_cluster else 1
        below = Variation(client, shape.client_kind, size[order][client], count)
        return cls(below, Variation(cluster, shape.cluster_kind, size[order][cluster]))

    @property
    def n_parameters(self) -> int:
        """The number of parameters of both covariances."""
        return self.client.n_parameters + self.cluster.n_parameters

    def split(self, x: Anything) -> list[tuple[Variation, Anything]]:
        """The variation of clients and that of clusters, with the views of ``x`` that hold their parameters."""
        cut = self.client.n_parameters
        return [(self.client, x[:cut]), (self.cluster, x[cut : self.n_parameters])]

    def covariances(self, x: Floats, d: int) -> tuple[Floats, Floats]:
        """``(count, d, d)`` of clients and ``(1, d, d)`` of clusters."""
        client, cluster = (variation.covariances(part, d) for variation, part in self.split(x))
        return client, cluster

    def gradient(self, x: Floats, client: Floats, cluster: Floats) -> Floats:
        """The gradient in the parameters, from those in the covariances of clients and clusters."""
        parts = zip(self.split(x), (client, cluster), strict=True)
        return np.concatenate([variation.gradient(part, variation.pick(G)) for (variation, part), G in parts])

    def even(self, client: float, cluster: float) -> Floats:
        """The parameters if every term has these standard deviations between clients and between clusters, in its unit."""
        return np.concatenate([self.client.even(client), self.cluster.even(cluster)])

    def far(self, x: Floats, factor: float) -> list[Floats]:
        """Points far from ``x``. In each one level's standard deviations are multiplied or divided by ``factor``.

        A level without variation gets a standard deviation of 1 instead.
        """
        points = []
        for level, (variation, part) in enumerate(self.split(x)):
            if len(part):
                for other in [factor * part, part / factor] if part.any() else [variation.even(1.0)]:
                    points.append(x.copy())
                    self.split(points[-1])[level][1][:] = other
        return points

    def deviations(self, x: Floats) -> Anything:
        """Which entries of ``x`` are standard deviations: the criterion depends on them by their squares only."""
        mask = np.zeros(len(x), dtype=bool)
        for variation, part in self.split(mask):
            part[:] = variation.kind != "full" or variation.q == 1
        return mask

    def free(self, x: Floats) -> Anything:
        """Which entries of ``x`` change the criterion. A variance of zero, and a full covariance of zero, do not."""
        free = np.ones(len(x), dtype=bool)
        for (variation, part), (_, mask) in zip(self.split(x), self.split(free), strict=True):
            parts = part.reshape(variation.count, -1)
            held = ~parts.any(axis=1, keepdims=True) if variation.kind == "full" else parts == 0
            mask[:] = ~np.broadcast_to(held, parts.shape).ravel()
        return free


def _factor(S: Floats) -> Floats:
    """Lower triangular ``L`` with ``L L' = S``. ``S (m, q, q)`` may be singular."""
    L = np.zeros_like(S)
    for p in range(S.shape[1]):
        rest = S[:, p:, p] - np.einsum("mac,mc->ma", L[:, p:, :p], L[:, p, :p])
        pivot = np.sqrt(np.maximum(rest[:, 0], 0.0))
        L[:, p, p] = pivot
        good = rest[:, 0] > 1e-12 * np.maximum(S[:, p, p], 1e-300)
        L[:, p + 1 :, p] = np.where(good[:, None], rest[:, 1:] / np.where(good, pivot, 1.0)[:, None], 0.0)
    return L
