"""What every loss is: the negative log-likelihood of a client's rows (up to a constant), summed or averaged.

``f_i(theta_i) = scale_i * sum_l weight_l * loss(x_l' theta_i + offset_l, y_l)`` with ``scale_i = 1`` for ``sum`` and
``1 / sum_l weight_l`` for ``mean``. A ``ridge`` adds ``ridge/2 |theta_i|^2``: it pulls each client to zero, where the
penalties of the hierarchy pull it to its cluster.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from covey._typing import Floats
from covey.errors import PenaltyError, one_of
from covey.losses import kernels
from covey.records import Record
from covey.tables.rows import GroupedData, Place
from covey.tree.hierarchy import segment_sum

Reduction = Literal["sum", "mean"]

_NONE = np.empty(0)


@dataclass(frozen=True)
class Expansion(Record):
    """Value ``(n,)``, gradient ``(n, d)`` and Hessian ``(n, d, d)`` of every client's loss."""

    value: Floats
    gradient: Floats
    hessian: Floats


@dataclass(frozen=True)
class Loss(ABC):
    """A family of responses. Subclasses say how the mean follows from the margin and how curved the loss can be."""

    reduction: Reduction = "sum"
    ridge: float = 0.0

    name: ClassVar[str]
    code: ClassVar[int]
    curvature: ClassVar[tuple[float, float]]
    """Bounds of the second derivative in the margin, over all margins."""

    def __post_init__(self) -> None:
        if self.reduction not in ("sum", "mean"):
            raise one_of("reduction", self.reduction, ("sum", "mean"))
        if not 0 <= self.ridge < np.inf:
            raise PenaltyError(f"The 'ridge' parameter must lie in [0, inf). Got {self.ridge!r} instead.")

    @abstractmethod
    def mean(self, margin: Floats) -> Floats:
        """The expected response at a margin."""

    @abstractmethod
    def residual(self, y: Floats) -> float:
        """The variance of a response about its mean, on the scale of the margin; of a linear model relative to itself, 1."""

    @abstractmethod
    def draw(self, margin: Floats, rng: np.random.Generator) -> Floats:
        """Responses at given margins (of a linear model: with a residual of 1)."""

    @abstractmethod
    def check_values(self, y: Floats, place: Place) -> None:
        """Refuse responses that the family cannot have; ``place`` names a row."""

    def check(self, y: Floats, place: Place) -> None:
        """Refuse those, and responses from which nothing can be learned."""
        self.check_values(y, place)

    def pointwise(self, margin: Floats, y: Floats) -> Floats:
        """The loss of each row at its margin, with no weight."""
        rows = len(y)
        value, ptr = np.empty(rows), np.arange(rows + 1)
        kernels.expand(
            self.code, 0, margin[:, None], y, _NONE, _NONE, np.ones(rows), ptr, np.ones((rows, 1)), value,
            np.empty((0, 1)), np.empty((0, 1, 1)),
        )  # fmt: skip
        return value

    def expand(self, data: GroupedData, theta: Floats, order: int = 2) -> Expansion:
        """Value, gradient and Hessian at ``theta (n, d)`` in one pass; what lies above ``order`` stays empty."""
        found = _expand(self.code, data, self.scale(data), theta, order)
        value, gradient, hessian = found.value, found.gradient, found.hessian
        if self.ridge:
            value += 0.5 * self.ridge * (theta**2).sum(axis=1)
            gradient += self.ridge * theta[: len(gradient)]
            hessian += self.ridge * np.eye(data.n_terms)
        return Expansion(value, gradient, hessian)

    def value(self, data: GroupedData, theta: Floats) -> Floats:
        """Each client's loss, ``(n,)``."""
        return self.expand(data, theta, order=0).value

    def gradient(self, data: GroupedData, theta: Floats) -> Floats:
        """Each client's gradient, ``(n, d)``."""
        return self.expand(data, theta, order=1).gradient

    def hessian(self, data: GroupedData, theta: Floats) -> Floats:
        """Each client's Hessian, ``(n, d, d)``."""
        return self.expand(data, theta, order=2).hessian

    def bend(self, data: GroupedData, theta: Floats, P: Floats) -> Floats:
        """The gradient in ``theta`` of each client's ``trace(P_i H_i(theta_i))``, ``(n, d)``; of a sum over rows only."""
        out = np.zeros_like(theta)
        if self.curvature[0] < self.curvature[1]:
            family, X, y, weights, offset, *_ = self.operands(data)
            kernels.bend(family, X, y, weights, offset, data.client_ptr, theta, P, out)
        return out

    def constant(self, data: GroupedData) -> float:
        """What the losses of all rows leave out of the negative log-likelihood, whatever the coefficients."""
        return 0.0

    def scale(self, data: GroupedData) -> Floats:
        """What each client's sum is multiplied by."""
        if self.reduction == "sum":
            return np.ones(data.n_clients)
        rows = data.rows_per_client if data.weights is None else segment_sum(data.weights, data.client_ptr)
        return 1.0 / np.where(rows > 0, rows, 1.0)

    def perfect(self, data: GroupedData) -> Floats:
        """The lowest value that each client's loss could have, whatever the margins, ``(n,)``: that of a perfect fit."""
        return np.zeros(data.n_clients)

    def operands(self, data: GroupedData) -> tuple[Any, ...]:
        """What a kernel needs to know of the rows: family, ``X``, ``y``, weights, offset, scale, ridge, ``client_ptr``."""
        weights, offset = (_NONE if values is None else values for values in (data.weights, data.offset))
        return self.code, data.X, data.y, weights, offset, self.scale(data), float(self.ridge), data.client_ptr

    def smoothness(self, data: GroupedData) -> Floats:
        """An upper bound ``L_i`` on the curvature of each client's loss, at any point."""
        return self.curvature[1] * _gram_eigenvalues(self, data)[:, -1] + self.ridge

    def row_smoothness(self, data: GroupedData, bend: Floats | float | None = None) -> Floats:
        """For each row an upper bound on the curvature of ``f_il``, where ``f_i = 1/m_i sum_l f_il`` over a client's rows.

        ``bend`` is the second derivative in the margin; by default its upper bound.
        """
        size = np.einsum("la,la->l", data.X, data.X) * (1.0 if data.weights is None else data.weights)
        share = self.scale(data) * data.rows_per_client
        bound: Floats = (self.curvature[1] if bend is None else bend) * size * share[data.client_of_row] + self.ridge
        return bound

    def strong_convexity(self, data: GroupedData) -> Floats:
        """A lower bound ``mu_i`` on the curvature of each client's loss, at any point; 0 where there is none."""
        if self.curvature[0] == 0.0:
            return np.full(data.n_clients, self.ridge)
        eigenvalues = _gram_eigenvalues(self, data)
        # A rank-deficient client shows rounding instead of zero; only what is clear of that is claimed.
        floor = 8 * data.n_terms * np.finfo(float).eps * eigenvalues[:, -1]
        lowest = eigenvalues[:, 0] - floor
        return self.curvature[0] * np.where(lowest > floor, lowest, 0.0) + self.ridge

    def smallest_curvature(self, hessian: Floats) -> float:
        """A lower bound ``mu`` on the curvature of all clients' losses at any point, given their Hessians at some point."""
        if self.curvature[0] < self.curvature[1]:
            return self.ridge
        floor = np.empty(len(hessian))
        kernels.curvature_floor(hessian, floor)
        return float(floor.min(initial=np.inf))


def _gram_eigenvalues(loss: Loss, data: GroupedData) -> Floats:
    """Eigenvalues of ``scale_i X_i' W_i X_i`` in ascending order, ``(n, d)``: the Hessian of a quadratic loss."""
    gram = _expand(kernels.GAUSSIAN, data, loss.scale(data), np.zeros((data.n_clients, data.n_terms)), 2).hessian
    eigenvalues: Floats = np.maximum(np.linalg.eigvalsh(gram), 0.0)
    return eigenvalues


def _expand(code: int, data: GroupedData, scale: Floats, theta: Floats, order: int) -> Expansion:
    n, d = theta.shape
    value = np.empty(n)
    gradient = np.empty((n if order >= 1 else 0, d))
    hessian = np.empty((n if order >= 2 else 0, d, d))
    kernels.expand(
        code,
        order,
        data.X,
        data.y,
        _NONE if data.weights is None else data.weights,
        _NONE if data.offset is None else data.offset,
        scale,
        data.client_ptr,
        np.ascontiguousarray(theta),
        value,
        gradient,
        hessian,
    )
    return Expansion(value, gradient, hessian)
