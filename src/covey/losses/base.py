"""The base class of all losses: the negative log-likelihood of a client's rows (up to a constant), summed or averaged.

``f_i(theta_i) = scale_i * sum_l weight_l * loss(x_l' theta_i + offset_l, y_l)`` with ``scale_i = 1`` for ``sum`` and
``1 / sum_l weight_l`` for ``mean``. A ``ridge`` adds ``ridge/2 |theta_i|^2``: it pulls each client to zero, where the
penalties of the hierarchy pull it to its cluster.

A family is one subclass in one file of this package. It registers itself when the class is made, and states what other
parts of covey need to know of it as traits (class variables) and methods; nothing outside this package asks for its name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from covey._typing import Floats
from covey.errors import PenaltyError, SolverError, one_of
from covey.losses import kernels, plain
from covey.records import Record
from covey.tables.rows import GroupedData, Place
from covey.tree.hierarchy import segment_sum

Reduction = Literal["sum", "mean"]

FAMILIES: dict[str, type[Loss]] = {}
"""Every family by its name, in the order in which they were registered."""

_NONE = np.empty(0)


@dataclass(frozen=True)
class Expansion(Record):
    """Value ``(n,)``, gradient ``(n, d)`` and Hessian ``(n, d, d)`` of every client's loss."""

    value: Floats
    gradient: Floats
    hessian: Floats


@dataclass(frozen=True)
class Loss(ABC):
    """A family of responses: its loss in the margin, and how responses are checked, drawn, scored and described.

    A subclass with a ``name`` is registered under it. Functions of ``(margin, y)`` take and return arrays of one number a row.
    """

    reduction: Reduction = "sum"
    ridge: float = 0.0

    name: ClassVar[str]
    title: ClassVar[str]
    """As in "Hierarchical linear model"."""
    error_name: ClassVar[str]
    """What :meth:`error` measures."""
    code: ClassVar[int | None] = None
    """Of the compiled kernels; None if the loss is known to numpy only."""
    curvature: ClassVar[tuple[float, float]]
    """Bounds of the second derivative in the margin, over all margins and responses."""
    third_per_second: ClassVar[float]
    """A bound of the third derivative in the margin as a multiple of the second, over all margins; infinite if unknown."""
    likelihood: ClassVar[bool] = True
    """Whether ``exp(-loss)`` is a density, up to ``constant``, so that penalties can be learned from it."""
    reml: ClassVar[bool] = False
    """Whether responses are normal about the margin: the likelihood then has a closed form, and REML exists."""
    dispersion: ClassVar[bool] = False
    """Whether the loss is that of a dispersion of 1, and the dispersion is estimated with the penalties."""
    two_classes: ClassVar[bool] = False
    """Whether responses are one of two classes, coded 0 and 1."""
    private_rounds: ClassVar[int] = 3
    """Releases of a fit with differential privacy, unless it says otherwise."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" in cls.__dict__:
            FAMILIES[cls.name] = cls

    def __post_init__(self) -> None:
        if self.reduction not in ("sum", "mean"):
            raise one_of("reduction", self.reduction, ("sum", "mean"))
        if not 0 <= self.ridge < np.inf:
            raise PenaltyError(f"The 'ridge' parameter must lie in [0, inf). Got {self.ridge!r} instead.")
        if self.code is not None and self.code not in kernels.CODES:
            raise SolverError(
                f"The loss {self.name!r} has the code {self.code!r}, which no compiled kernel knows; leave the code out and "
                "the loss is evaluated with numpy."
            )

    # What a family has to state

    @abstractmethod
    def mean(self, margin: Floats) -> Floats:
        """The expected response at a margin."""

    @abstractmethod
    def values(self, margin: Floats, y: Floats) -> Floats:
        """The loss of each row."""

    @abstractmethod
    def slopes(self, margin: Floats, y: Floats) -> Floats:
        """Its first derivative in the margin."""

    @abstractmethod
    def curvatures(self, margin: Floats, y: Floats) -> Floats:
        """Its second derivative in the margin."""

    @abstractmethod
    def thirds(self, margin: Floats, y: Floats) -> Floats:
        """Its third derivative in the margin."""

    @abstractmethod
    def residual(self, y: Floats, dispersion: float = 1.0) -> float:
        """The variance of a response about its mean, on the scale of the margin."""

    @abstractmethod
    def draw(self, margin: Floats, rng: np.random.Generator, dispersion: float = 1.0) -> Floats:
        """Responses at given margins."""

    @abstractmethod
    def check_values(self, y: Floats, place: Place) -> None:
        """Refuse responses that the family cannot have; ``place`` names a row."""

    # What a family may state

    def check(self, y: Floats, place: Place) -> None:
        """Refuse those, and responses from which nothing can be learned."""
        self.check_values(y, place)

    def check_total(self, total: float) -> None:  # noqa: B027
        """Refuse responses from which nothing can be learned, given their sum over the rows of all sites."""

    def working_response(self, data: GroupedData) -> GroupedData | None:
        """The rows of a linear problem whose solution is near that of the loss, where Newton begins; None: it begins at 0."""
        return None

    def constant(self, data: GroupedData) -> float:
        """What the losses of all rows leave out of the negative log-likelihood, whatever coefficients and dispersion."""
        return 0.0

    def perfect(self, data: GroupedData) -> Floats:
        """The lowest value that each client's loss could have, whatever the margins, ``(n,)``: that of a perfect fit."""
        return np.zeros(data.n_clients)

    def profile(self, objective: float, weight: float, perfect: float) -> tuple[float, float]:
        """The negative log-likelihood, but for ``constant``, at the best dispersion; and that dispersion.

        ``objective`` is the loss of all rows with its penalties, at a dispersion of 1; ``weight`` the sum of the rows'
        weights and ``perfect`` the lowest loss that they could have.
        """
        return objective, 1.0

    def dispersion_text(self, dispersion: float) -> str:
        """An estimated dispersion in words."""
        return f"dispersion {dispersion:.4g}"

    def error(self, mean_loss: float, data: GroupedData) -> float:
        """The error of predictions by :attr:`error_name`, zero if perfect, given their mean loss on the rows of ``data``."""
        return mean_loss

    def response_interval(self, margin: Floats, variance: Floats, reach: Floats, coverage: float, noise: Floats) -> Floats:
        """Where new responses lie, ``(rows, 2)``.

        Margins are normal with a ``variance``, intervals for them reach ``reach`` standard errors to either side; ``noise`` is
        the dispersion of each response.
        """
        raise SolverError(f"There is no interval for a new response of the {self.name} loss; leave noise=True out.")

    # What follows from that

    @property
    def quadratic(self) -> bool:
        """Whether the loss is its own expansion to second order."""
        return self.curvature[0] == self.curvature[1]

    @property
    def bounded(self) -> bool:
        """Whether the second derivative in the margin has an upper bound."""
        return bool(np.isfinite(self.curvature[1]))

    @property
    def compiled(self) -> bool:
        """Whether compiled kernels know the loss."""
        return self.code is not None

    @property
    def linear_start(self) -> bool:
        """Whether Newton begins at the solution of a linear problem (:meth:`working_response`)."""
        return type(self).working_response is not Loss.working_response

    def expand(self, data: GroupedData, theta: Floats, order: int = 2) -> Expansion:
        """Value, gradient and Hessian at ``theta (n, d)`` in one pass; what lies above ``order`` stays empty."""
        if self.code is None:
            value, gradient, hessian = plain.expand(self, data, self.scale(data), theta, order)
        else:
            value, gradient, hessian = _expand(self.code, data, self.scale(data), theta, order)
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
        if self.quadratic:
            return np.zeros_like(theta)
        if self.code is None:
            return plain.bend(self, data, theta, P)
        out = np.zeros_like(theta)
        family, X, y, weights, offset, *_ = self.operands(data)
        kernels.bend(family, X, y, weights, offset, data.client_ptr, theta, P, out)
        return out

    def scale(self, data: GroupedData) -> Floats:
        """What each client's sum is multiplied by."""
        if self.reduction == "sum":
            return np.ones(data.n_clients)
        rows = data.rows_per_client if data.weights is None else segment_sum(data.weights, data.client_ptr)
        return 1.0 / np.where(rows > 0, rows, 1.0)

    def operands(self, data: GroupedData) -> tuple[Any, ...]:
        """What a kernel needs to know of the rows: family, ``X``, ``y``, weights, offset, scale, ridge, ``client_ptr``.

        The family is a code, or the loss itself if it is not compiled.
        """
        weights, offset = (_NONE if values is None else values for values in (data.weights, data.offset))
        family = self if self.code is None else self.code
        return family, data.X, data.y, weights, offset, self.scale(data), float(self.ridge), data.client_ptr

    def smoothness(self, data: GroupedData) -> Floats:
        """An upper bound ``L_i`` on the curvature of each client's loss, at any point."""
        if not self.bounded:
            return np.full(data.n_clients, np.inf)
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
        if not self.quadratic:
            return self.ridge
        floor = np.empty(len(hessian))
        kernels.curvature_floor(hessian, floor)
        return float(floor.min(initial=np.inf))


def _gram_eigenvalues(loss: Loss, data: GroupedData) -> Floats:
    """Eigenvalues of ``scale_i X_i' W_i X_i`` in ascending order, ``(n, d)``: the Hessian of a quadratic loss."""
    gram = _expand(kernels.GAUSSIAN, data, loss.scale(data), np.zeros((data.n_clients, data.n_terms)), 2)[2]
    eigenvalues: Floats = np.maximum(np.linalg.eigvalsh(gram), 0.0)
    return eigenvalues


def _expand(code: int, data: GroupedData, scale: Floats, theta: Floats, order: int) -> tuple[Floats, Floats, Floats]:
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
    return value, gradient, hessian
