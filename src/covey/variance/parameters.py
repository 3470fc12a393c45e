"""Covariances of clients and clusters as functions of a vector of parameters.

The covariance of a level is ``S = L L'``, in units of the columns' sizes. ``L`` is a multiple of the identity, diagonal, or
lower triangular; its entries are the parameters. lme4 uses the same Cholesky factor, but with bounds on its diagonal (Bates,
Maechler, Bolker and Walker 2015). Here an entry may have either sign, so the search has no constraints, and a level without
variation is a point like any other. At such a point every derivative in ``L`` is zero, whether it is an optimum or not. The
derivative in ``S`` decides (:mod:`.boundary`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from covey._typing import Anything, Floats, Ints
from covey.variance.structure import Kind, Shape


@dataclass(frozen=True)
class Variation:
    """The covariance of the clients about their cluster, or of the clusters about the global model.

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
        """How many of the first terms contain all that vary."""
        return int(self.terms.max()) + 1 if self.q else 0

    @property
    def each(self) -> int:
        """The number of parameters of one covariance."""
        if self.q == 0:
            return 0
        return {"isotropic": 1, "diagonal": self.q, "full": self.q * (self.q + 1) // 2}[self.kind]

    @property
    def n_parameters(self) -> int:
        return self.count * self.each

    @property
    def unit(self) -> Floats:
        """Each term's unit; one unit for all terms if they share a variance, so that it is the same in the user's units."""
        if self.kind == "isotropic" and self.q:
            return np.full(self.q, 1.0 / np.sqrt((self.size**-2).mean()))
        return self.size

    def factors(self, x: Floats) -> Floats:
        """``L (count, q, q)``, in the user's units."""
        L = np.zeros((self.count, self.q, self.q))
        values = x.reshape(self.count, self.each)
        at = np.arange(self.q)
        if self.kind == "full":
            rows, columns = np.tril_indices(self.q)
            L[:, rows, columns] = values
        else:
            L[:, at, at] = values
        return self.unit[:, None] * L

    def covariances(self, x: Floats, d: int) -> Floats:
        """``S (count, d, d)``, zero where a term does not vary."""
        L = self.factors(x)
        whole = np.zeros((self.count, d, d))
        whole[:, self.terms[:, None], self.terms] = L @ L.swapaxes(1, 2)
        return whole

    def gradient(self, x: Floats, G: Floats) -> Floats:
        """The gradient in ``x``, from ``G (count, q, q)``, the gradient in ``S``."""
        slope = 2.0 * self.unit[:, None] * (G @ self.factors(x))
        at = np.arange(self.q)
        if self.kind == "full":
            rows, columns = np.tril_indices(self.q)
            return np.asarray(slope[:, rows, columns]).ravel()
        diagonal = slope[:, at, at]
        return np.asarray(diagonal.sum(axis=1) if self.kind == "isotropic" and self.q else diagonal).ravel()

    def of_covariances(self, S: Floats) -> Floats:
        """The parameters of covariances ``(count, q, q)``; of the nearest of this kind if they are of another."""
        scaled = S / (self.unit[:, None] * self.unit)
        at = np.arange(self.q)
        if self.kind == "full":
            rows, columns = np.tril_indices(self.q)
            return np.asarray(_factor(scaled)[:, rows, columns]).ravel()
        variances = np.maximum(scaled[:, at, at], 0.0)
        if self.kind == "isotropic" and self.q:
            variances = variances.mean(axis=1, keepdims=True)
        return np.sqrt(variances).ravel()

    def even(self, sd: float) -> Floats:
        """The parameters when every term varies by ``sd`` of its unit."""
        S = np.diag((sd * self.size) ** 2)
        return self.of_covariances(np.broadcast_to(S, (self.count, self.q, self.q)))

    def pick(self, G: Floats) -> Floats:
        """The block of the varying terms in matrices ``(count, d, d)``."""
        return np.asarray(G[:, self.terms[:, None], self.terms])


@dataclass(frozen=True)
class Parameters:
    """The covariances of both levels as one vector: the clients' parameters, then the clusters'.

    A vector may go on after these, with parameters of the global model.
    """

    client: Variation
    cluster: Variation

    @classmethod
    def of(cls, shape: Shape, size: Floats, clusters: int) -> Parameters:
        """For columns whose coefficients have the units ``size (d,)``, in the data's order."""
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

    def split(self, x: Floats) -> list[tuple[Variation, Floats]]:
        """The clients' and the clusters' variation, each with its parameters."""
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
        """The parameters when every term varies by the same share of its unit at each level."""
        return np.concatenate([self.client.even(client), self.cluster.even(cluster)])

    def far(self, x: Floats, factor: float) -> list[Floats]:
        """Points far from ``x``: one level's variation ``factor`` times as large or small, or some instead of none."""
        points, first = [], 0
        for variation, part in self.split(x):
            if len(part):
                others = [factor * part, part / factor] if part.any() else [variation.even(1.0)]
                points += [np.concatenate([x[:first], other, x[first + len(part) :]]) for other in others]
            first += len(part)
        return points

    def free(self, x: Floats) -> Anything:
        """Which entries of ``x`` move anything: not a variance at zero, nor a full covariance that is zero as a whole."""
        free = np.ones(len(x), dtype=bool)
        first = 0
        for variation, part in self.split(x):
            parts = part.reshape(variation.count, -1)
            held = ~parts.any(axis=1, keepdims=True) if variation.kind == "full" else parts == 0
            free[first : first + len(part)] = ~np.broadcast_to(held, parts.shape).ravel()
            first += len(part)
        return free


def _factor(S: Floats) -> Floats:
    """Lower triangular ``L`` with ``L L' = S``, for semi-definite ``S (m, q, q)`` too."""
    L = np.zeros_like(S)
    for p in range(S.shape[1]):
        rest = S[:, p:, p] - np.einsum("mac,mc->ma", L[:, p:, :p], L[:, p, :p])
        pivot = np.sqrt(np.maximum(rest[:, 0], 0.0))
        L[:, p, p] = pivot
        good = rest[:, 0] > 1e-12 * np.maximum(S[:, p, p], 1e-300)
        L[:, p + 1 :, p] = np.where(good[:, None], rest[:, 1:] / np.where(good, pivot, 1.0)[:, None], 0.0)
    return L
