"""Which terms vary at which level, and how: the covariances as functions of a few parameters.

A level's covariance is ``S = L L'`` in units of the columns' sizes: ``L`` is a multiple of the identity, diagonal, or lower
triangular, and its entries are the parameters. They may have any sign and any may be zero, so the search is free of
constraints, and a level without variation is a point like any other. At such a point every derivative in ``L`` vanishes,
whether the likelihood falls there or rises; so what decides is the derivative in ``S`` (see :mod:`.boundary`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from covey._typing import Floats, Ints

Kind = Literal["isotropic", "diagonal", "full"]
KINDS = ("isotropic", "diagonal", "full")


@dataclass(frozen=True)
class Variation:
    """How the children of one level vary about their parents.

    Parameters
    ----------
    terms : positions of the terms that vary
    kind : "isotropic" (one variance for all of them, the paper's), "diagonal" (one each) or "full" (with correlations)
    size : (q,) the unit of each of these terms' coefficients: one over the root mean square of its column
    count : how many covariances there are: one, or one for each cluster
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
        return int(self.terms.max()) + 1 if self.q else 0

    @property
    def each(self) -> int:
        """Parameters of one covariance."""
        if self.q == 0:
            return 0
        return {"isotropic": 1, "diagonal": self.q, "full": self.q * (self.q + 1) // 2}[self.kind]

    @property
    def n_parameters(self) -> int:
        return self.count * self.each

    @property
    def _unit(self) -> Floats:
        """Each term's unit; one for all, if they share a variance, so that it is the same in the user's units."""
        if self.kind == "isotropic" and self.q:
            return np.full(self.q, 1.0 / np.sqrt((self.size**-2).mean()))
        return self.size

    def factors(self, x: Floats) -> Floats:
        """``L (count, q, q)``, in the users' units."""
        L = np.zeros((self.count, self.q, self.q))
        values = x.reshape(self.count, self.each)
        at = np.arange(self.q)
        if self.kind == "full":
            rows, columns = np.tril_indices(self.q)
            L[:, rows, columns] = values
        else:
            L[:, at, at] = values
        return self._unit[:, None] * L

    def covariances(self, x: Floats, d: int) -> Floats:
        """``S (count, d, d)``, zero where a term does not vary."""
        L = self.factors(x)
        return self.embed(L @ L.swapaxes(1, 2), d)

    def embed(self, S: Floats, d: int) -> Floats:
        whole = np.zeros((len(S), d, d))
        whole[:, self.terms[:, None], self.terms] = S
        return whole

    def gradient(self, x: Floats, G: Floats) -> Floats:
        """The derivative in ``x``, given ``G (count, q, q)``, that in ``S``."""
        slope = 2.0 * self._unit[:, None] * (G @ self.factors(x))
        at = np.arange(self.q)
        if self.kind == "full":
            rows, columns = np.tril_indices(self.q)
            return np.asarray(slope[:, rows, columns]).ravel()
        diagonal = slope[:, at, at]
        return np.asarray(diagonal.sum(axis=1) if self.kind == "isotropic" and self.q else diagonal).ravel()

    def of_covariances(self, S: Floats) -> Floats:
        """The parameters of given covariances ``(count, q, q)``, the nearest there are."""
        scaled = S / (self._unit[:, None] * self._unit)
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

    def nearer(self, x: Floats, bend: Floats, pull: Floats) -> Floats:
        """One step of the MM algorithm for variance components (Zhou, Hu, Zhou and Lange 2019) from ``x``.

        The criterion's slope in ``S`` is ``bend - pull``; the step solves ``T bend T = S pull S`` for the next covariance.
        """
        if self.q == 0:
            return x
        L = self.factors(x)
        S = L @ L.swapaxes(1, 2)
        if self.kind == "full":
            values, vectors = np.linalg.eigh(bend)
            root = np.sqrt(np.maximum(values, 1e-12 * np.abs(values).max(axis=1, keepdims=True) + 1e-300))
            half, back = _recomposed(vectors, root), _recomposed(vectors, 1.0 / root)
            values, vectors = np.linalg.eigh(half @ S @ pull @ S @ half)
            return self.of_covariances(back @ _recomposed(vectors, np.sqrt(np.maximum(values, 0.0))) @ back)
        at = np.arange(self.q)
        down, up = np.maximum(bend[:, at, at], 0.0), np.maximum(pull[:, at, at], 0.0)
        if self.kind == "isotropic":
            down, up = down.sum(axis=1, keepdims=True), up.sum(axis=1, keepdims=True)
        ratio = np.clip(up / np.where(down > 0, down, 1.0), 1e-4, 1e4)
        return np.asarray(x * ratio.ravel() ** 0.25)

    def curvature(self, x: Floats, bend: Floats, units: int) -> Floats:
        """About how curved the criterion is in each parameter: the slope ``bend`` is a sum over ``units`` of much the same."""
        unit = self._unit**2
        L = self.factors(x) / self._unit[:, None]
        at = np.arange(self.q)
        down = unit * np.maximum(bend[:, at, at], 1e-12)
        size = np.maximum((L**2).sum(axis=2), 1e-4)
        each = 4.0 * size * down**2 * self.count / max(units, 1)
        if self.kind == "full":
            rows, _ = np.tril_indices(self.q)
            return np.asarray(each[:, rows]).ravel()
        if self.kind == "isotropic" and self.q:
            return np.asarray(4.0 * size[:, :1] * down.sum(axis=1, keepdims=True) ** 2 * self.count / (units * self.q)).ravel()
        return np.asarray(each).ravel()

    def pick(self, G: Floats) -> Floats:
        """The block of the varying terms."""
        return np.asarray(G[:, self.terms[:, None], self.terms])


@dataclass(frozen=True)
class Shape:
    """Which terms vary, by position, and how: what is asked for, before any data is seen."""

    client: tuple[int, ...]
    cluster: tuple[int, ...]
    client_kind: Kind = "diagonal"
    cluster_kind: Kind = "diagonal"
    per_cluster: bool = False

    def without(self) -> dict[str, Shape]:
        """The same with one level less, by that level."""
        return {"client": replace(self, client=(), per_cluster=False), "cluster": replace(self, cluster=())}

    def order(self, d: int) -> Ints:
        """Terms that vary first, shared ones last: what is shared costs elimination next to nothing there."""
        rank = [(a not in self.client and a not in self.cluster, a not in self.client, a) for a in range(d)]
        return np.array(sorted(range(d), key=rank.__getitem__), dtype=np.int64)


@dataclass(frozen=True)
class Structure:
    """How clients vary about their cluster, and clusters about the whole, with terms in the order of :meth:`Shape.order`."""

    client: Variation
    cluster: Variation

    @classmethod
    def of(cls, shape: Shape, size: Floats, clusters: int) -> Structure:
        """For columns of ``size``, in the data's order."""
        order = shape.order(len(size))
        place = np.argsort(order)
        client, cluster = (np.sort(place[list(terms)]).astype(np.int64) for terms in (shape.client, shape.cluster))
        count = clusters if shape.per_cluster else 1
        below = Variation(client, shape.client_kind, size[order][client], count)
        return cls(below, Variation(cluster, shape.cluster_kind, size[order][cluster]))

    @property
    def n_parameters(self) -> int:
        return self.client.n_parameters + self.cluster.n_parameters

    def split(self, x: Floats) -> tuple[Floats, Floats]:
        cut = self.client.n_parameters
        return x[:cut], x[cut : cut + self.cluster.n_parameters]


def _recomposed(vectors: Floats, values: Floats) -> Floats:
    return np.asarray(np.einsum("mab,mb,mcb->mac", vectors, values, vectors))


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
