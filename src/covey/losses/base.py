"""The base class of all losses: the negative log-likelihood of a client's rows, up to a constant.

Client ``i`` has the loss ``f_i(theta_i) = scale_i * sum_l weight_l * loss(margin_l, y_l)`` with the linear predictor
``margin_l = x_l' theta_i + offset_l`` (Assumption 4.1 (strong_conv_smooth_ae) of arXiv:2204.13619 with weights and offsets).
``scale_i`` is 1 for ``reduction="sum"`` and ``1 / sum_l weight_l`` for ``"mean"``. A ``ridge`` adds
``ridge/2 |theta_i|^2``: it pulls every client towards zero, while the penalties of the hierarchy pull it towards its cluster.

A family is one subclass in one file of this package, and registers itself. Class variables (traits) and methods state what
the rest of covey needs to know about it. No code outside this package compares family names.

What a new family needs: the traits of :class:`Loss` and its seven abstract methods. They are numpy code; a family with a
``code`` also needs compiled code in :mod:`.kernels`. A family that users should find has an estimator in
:mod:`covey.estimators`; otherwise they name it in ``loss=``. A family has no parameters besides ``reduction`` and ``ridge``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from covey._typing import Floats, Ints
from covey.errors import CoveyError, DataError, PenaltyError, SolverError, one_of
from covey.losses import kernels
from covey.records import Record
from covey.tables.rows import GroupedData, Place
from covey.threads import block_count, share
from covey.tree.hierarchy import segment_sum

Reduction = Literal["sum", "mean"]
Link = Literal["identity", "logit", "log"]

FAMILIES: dict[str, type[Loss]] = {}
"""All families by name, in order of registration."""

_OTHER_NAMES = {
    "binomial": "bernoulli",
    "logistic": "bernoulli",
    "normal": "gaussian",
    "linear": "gaussian",
    "count": "poisson",
}

_NONE = np.empty(0)
_WIDE = 12  # columns from which on values and gradients are computed row by row
_LARGEST_LOG = 50.0  # exp(50) is 5e21, more than any exposure
_NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(40)


def family_of(family: str | Loss) -> type[Loss]:
    """Return the class of a family, given its name or one of its losses.

    >>> family_of("poisson").title
    'Poisson'
    """
    if isinstance(family, Loss):
        return type(family)
    if family not in FAMILIES:
        other = _OTHER_NAMES.get(str(family).lower())
        fix = f"Write {other!r}." if other else "A loss of your own needs covey.losses.from_functions in every process."
        raise CoveyError(
            f"The 'family' parameter must be one of {', '.join(map(repr, FAMILIES))}. Got {family!r} instead. {fix}"
        )
    return FAMILIES[family]


def loss_of(family: str, reduction: Reduction = "sum", ridge: float = 0.0) -> Loss:
    """Return a loss, given the name of its family.

    >>> loss_of("poisson").name
    'poisson'
    """
    return family_of(family)(reduction, ridge)


@dataclass(frozen=True)
class Expansion(Record):
    """Value ``(n,)``, gradient ``(n, d)`` and Hessian ``(n, d, d)`` of the loss of every client.

    Instead of the Hessians it may hold ``curves (rows,)``, the second derivative of each row's loss in its margin: the Hessian
    of a client is then the sum of ``curves[l] x_l x_l'`` over its rows, plus the ridge.
    """

    value: Floats
    gradient: Floats
    hessian: Floats
    curves: Floats = field(default_factory=lambda: np.empty(0))


@dataclass(frozen=True)
class Loss(ABC):
    """Base class of the families.

    A subclass states the loss as a function of the linear predictor, and how responses are checked, drawn and scored. It is
    registered under its ``name``. Methods that take ``margin`` and ``y`` take and return arrays ``(rows,)``.

    Parameters
    ----------
    reduction : "sum" or "mean", optional
        Whether the loss of a client is the sum (default) or the weighted mean over its rows.
    ridge : float, optional
        Adds ``ridge/2 |theta_i|^2`` to the loss of every client. The default is 0.
    """

    reduction: Reduction = "sum"
    ridge: float = 0.0

    name: ClassVar[str]
    title: ClassVar[str]
    """Name of the model in reports, as in "Hierarchical linear model"."""
    error_name: ClassVar[str]
    """Name of the quantity that :meth:`error` returns."""
    code: ClassVar[int | None] = None
    """Number of the family in the compiled kernels. None: the loss is evaluated with numpy."""
    curvature: ClassVar[tuple[float, float]]
    """Lower and upper bound of the second derivative in the margin, over all margins and responses."""
    third_per_second: ClassVar[float]
    """Upper bound of ``|third derivative| / second derivative`` in the margin; infinite if unknown."""
    likelihood: ClassVar[bool] = True
    """Whether ``exp(-loss - constant)`` is a density. Only then can penalties be learned from the likelihood."""
    reml: ClassVar[bool] = False
    """Whether responses are normal about the margin. The likelihood then has a closed form, and REML exists."""
    dispersion: ClassVar[bool] = False
    """Whether the family has a dispersion, which is estimated with the penalties. The loss is then for dispersion 1."""
    dispersion_name: ClassVar[str] = "sd"
    """Name of the square root of the dispersion in reports."""
    responses: ClassVar[str] = "numbers"
    """The responses that the family accepts, for error messages."""
    two_classes: ClassVar[bool] = False
    """Whether responses are two classes, coded 0 and 1."""
    link: ClassVar[Link | None] = None
    """The link between the expected response and the margin; None: another function, which no database can evaluate."""
    private_rounds: ClassVar[int] = 3
    """Default number of releases of a fit with differential privacy."""

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
                f"The loss {self.name!r} has the code {self.code!r}, but no compiled kernel has that code. Remove the code; "
                "the loss is then evaluated with numpy."
            )

    # Every family defines these methods.

    @abstractmethod
    def mean(self, margin: Floats) -> Floats:
        """Return the expected response."""

    @abstractmethod
    def values(self, margin: Floats, y: Floats) -> Floats:
        """Return the loss of each row."""

    @abstractmethod
    def slopes(self, margin: Floats, y: Floats) -> Floats:
        """Return the first derivative in the margin."""

    @abstractmethod
    def curvatures(self, margin: Floats, y: Floats) -> Floats:
        """Return the second derivative in the margin."""

    @abstractmethod
    def thirds(self, margin: Floats, y: Floats) -> Floats:
        """Return the third derivative in the margin."""

    @abstractmethod
    def residual(self, y: Floats, dispersion: float = 1.0) -> float:
        """Return the variance of a response about its mean, on the scale of the margin."""

    @abstractmethod
    def draw(self, margin: Floats, rng: np.random.Generator, dispersion: float = 1.0) -> Floats:
        """Draw random responses."""

    # A family may override these methods.

    def impossible(self, y: Floats) -> npt.NDArray[np.bool_]:
        """Return which responses the family cannot have, ``(rows,)``."""
        return np.asarray((y != 0) & (y != 1)) if self.two_classes else np.zeros(len(y), dtype=np.bool_)

    def check_values(self, y: Floats, place: Place) -> None:
        """Raise an error if a response is impossible; ``place`` turns a row number into a name for the message."""
        bad = self.impossible(y)
        if bad.any():
            row = int(bad.argmax())
            raise DataError(f"The response is {y[row]:g} in {place(row)}; the {self.name} family takes {self.responses}.")

    def check_grouped(self, y: Floats, place: Place) -> None:  # noqa: B027
        """Raise an error if a response is impossible in a model of groups, though a plain regression could use it."""

    def check(self, y: Floats, place: Place) -> None:
        """Raise an error if a response is impossible, or if all responses together do not determine a model."""
        self.check_values(y, place)

    def check_offset(self, offset: Floats | None) -> None:
        """Raise an error for offsets that cannot be on the scale of the margin."""
        if self.link == "log" and offset is not None and np.abs(offset).max(initial=0.0) > _LARGEST_LOG:
            raise DataError(
                f"The offset has the value {offset[np.abs(offset).argmax()]:g}. In the {self.name} family it is on the log "
                "scale: exp(offset) multiplies the mean. Give the logarithm of the exposure."
            )

    def check_drawable(self, weights: Floats) -> None:
        """Raise an error if random responses of rows with these weights cannot be drawn."""
        if (weights != 1).any():
            raise SolverError(
                "Responses with weights are drawn for linear models only; repeat the rows instead of weighting them."
            )

    def draw_rows(self, margin: Floats, weights: Floats | None, rng: np.random.Generator, dispersion: float = 1.0) -> Floats:
        """Draw random responses of rows with weights that :meth:`check_drawable` accepts."""
        return self.draw(margin, rng, dispersion)

    def check_total(self, total: float) -> None:  # noqa: B027
        """Raise an error if the sum of the responses of all sites shows that they do not determine a model."""

    def working_response(self, data: GroupedData) -> GroupedData | None:
        """Return rows of a linear problem whose solution is a good starting point for Newton; None: it starts at zero."""
        return None

    def lowest(self, y: Floats) -> Floats:
        """Return the lowest loss that a row can have at any margin, ``(rows,)``."""
        return np.zeros(len(y))

    def constants(self, y: Floats) -> Floats:
        """Return the part of each row's negative log-likelihood that the loss leaves out, ``(rows,)``.

        It depends neither on the margin nor on the dispersion.
        """
        return np.zeros(len(y))

    def profile(self, objective: float, weight: float, perfect: float) -> tuple[float, float]:
        """Return the negative log-likelihood at the best dispersion, without ``constant``, and that dispersion.

        ``objective`` is the loss of all rows with its penalties at dispersion 1, ``weight`` is the sum of the weights of the
        rows, and ``perfect`` is the lowest loss that the rows can have.
        """
        return objective, 1.0

    def error(self, mean_loss: float, data: GroupedData) -> float:
        """Return the error :attr:`error_name` of predictions, given their mean loss on ``data``; 0 for perfect predictions."""
        return mean_loss

    def expected(self, margin: Floats, variance: Floats) -> Floats:
        """Return the expected response of margins that are normal about ``margin`` with this ``variance``.

        By Gauss-Hermite quadrature; a family with a closed form overrides it.
        """
        sd, weights = np.sqrt(variance), _WEIGHTS / _WEIGHTS.sum()
        return np.asarray(sum(weight * self.mean(margin + sd * node) for node, weight in zip(_NODES, weights, strict=True)))

    def response_interval(self, margin: Floats, variance: Floats, reach: Floats, coverage: float, noise: Floats) -> Floats:
        """Return prediction intervals for new responses, ``(rows, 2)``.

        Margins are normal with the given ``variance``. Their confidence intervals extend ``reach`` standard errors to either
        side. ``noise`` is the dispersion of each response.
        """
        raise SolverError(f"The {self.name} loss has no prediction interval for a new response; leave noise=True out.")

    def variances(self, margin: Floats) -> Floats:
        """Return the variance of a response of weight 1 at dispersion 1; by default that of the canonical link."""
        return self.curvatures(margin, self.mean(margin))

    def distribution(self, margin: Floats, y: Floats, weights: Floats, dispersion: float = 1.0) -> tuple[Floats, Floats]:
        """Return the probability of a response below ``y`` and that of one of at most ``y``, for rows with weights."""
        raise SolverError(f"The {self.name} loss has no quantile residuals; choose another kind.")

    # The rest follows from the methods above.

    @property
    def quadratic(self) -> bool:
        """Whether the loss is quadratic in the margin."""
        return self.curvature[0] == self.curvature[1]

    @property
    def bounded(self) -> bool:
        """Whether the second derivative in the margin has an upper bound."""
        return bool(np.isfinite(self.curvature[1]))

    @property
    def compiled(self) -> bool:
        """Whether compiled kernels evaluate the loss."""
        return self.code is not None

    @property
    def linear_start(self) -> bool:
        """Whether Newton starts at the solution of a linear problem (:meth:`working_response`)."""
        return type(self).working_response is not Loss.working_response

    def constant(self, data: GroupedData) -> float:
        """Return the part of the negative log-likelihood of all rows that their losses leave out."""
        none = type(self).constants is Loss.constants
        return 0.0 if none else float(_weighted(self.constants(data.y), data).sum())

    def perfect(self, data: GroupedData) -> Floats:
        """Return the lowest loss that each client can have with any margins, ``(n,)``."""
        if type(self).lowest is Loss.lowest:
            return np.zeros(data.n_clients)
        return self.scale(data) * segment_sum(_weighted(self.lowest(data.y), data), data.client_ptr)

    def expand(self, data: GroupedData, theta: Floats, order: int = 2) -> Expansion:
        """Return value, gradient and Hessian at ``theta (n, d)``, computed in one pass over the rows.

        Derivatives above ``order`` are not computed; their arrays are empty.
        """
        if self.code is None:
            value, gradient, hessian = self._expand_with_numpy(data, theta, order)
        else:
            value, gradient, hessian = self._expand_compiled(self.code, data, theta, order)
        if self.ridge:
            value += 0.5 * self.ridge * (theta**2).sum(axis=1)
            gradient += self.ridge * theta[: len(gradient)]
            hessian += self.ridge * np.eye(data.n_terms)
        return Expansion(value, gradient, hessian)

    def expand_rows(self, data: GroupedData, theta: Floats) -> Expansion:
        """Return value, gradient and the curvature of each row at ``theta (n, d)``. No Hessians are built."""
        d = theta.shape[1]
        curves = np.empty(data.n_rows)
        if self.code is None:
            value, gradient, _ = self._expand_with_numpy(data, theta, 1)
            curves = _weighted(self.curvatures(data.margin(theta), data.y), data) * self.scale(data)[data.client_of_row]
        else:
            value, gradient, _ = self._expand_compiled(self.code, data, theta, 1, curves)
        if self.ridge:
            value += 0.5 * self.ridge * (theta**2).sum(axis=1)
            gradient += self.ridge * theta
        return Expansion(value, gradient, np.empty((0, d, d)), curves)

    def _expand_with_numpy(self, data: GroupedData, theta: Floats, order: int) -> tuple[Floats, Floats, Floats]:
        """Expand the loss without the ridge, as :func:`kernels.expand` does."""
        d, X, y, margin, scale = data.n_terms, data.X, data.y, data.margin(theta), self.scale(data)
        value = scale * segment_sum(_weighted(self.values(margin, y), data), data.client_ptr)
        gradient, hessian = np.empty((0, d)), np.empty((0, d, d))
        if order >= 1:
            rows = _weighted(self.slopes(margin, y), data)[:, None] * X
            gradient = scale[:, None] * segment_sum(rows, data.client_ptr)
        if order >= 2:
            products = _weighted(self.curvatures(margin, y), data)[:, None, None] * (X[:, :, None] * X[:, None, :])
            hessian = scale[:, None, None] * segment_sum(products, data.client_ptr)
        return value, gradient, hessian

    def _expand_compiled(
        self, code: int, data: GroupedData, theta: Floats, order: int, curves: Floats = _NONE
    ) -> tuple[Floats, Floats, Floats]:
        """Expand the loss of the family with this code without the ridge. Unless ``curves`` is empty, fill it."""
        _, X, y, weights, offset, scale, _, ptr = self.operands(data)
        n, d = theta.shape
        value, blocks = np.empty(n), block_count(n)
        rows = X, y, weights, offset, scale, ptr, np.ascontiguousarray(theta)
        squares = code == kernels.GAUSSIAN
        if squares and order == 2:
            gradient, hessian = np.empty((n, d)), np.empty((n, d, d))
            share(kernels.expand_quadratic, blocks, *rows, value, gradient, hessian)
        elif order == 2 or (d < _WIDE and not len(curves) and not squares):
            gradient, hessian = np.empty((n if order >= 1 else 0, d)), np.empty((n if order >= 2 else 0, d, d))
            share(kernels.expand, blocks, code, order, *rows, value, gradient, hessian)
        else:
            gradient, hessian = np.empty((n, d)), np.empty((0, d, d))
            share(kernels.expand_rows, blocks, code, *rows, value, gradient, curves)
        return value, gradient if order >= 1 else gradient[:0], hessian

    def value(self, data: GroupedData, theta: Floats) -> Floats:
        """Return the loss of each client, ``(n,)``."""
        return self.expand(data, theta, order=0).value

    def gradient(self, data: GroupedData, theta: Floats) -> Floats:
        """Return the gradient of each client's loss, ``(n, d)``."""
        return self.expand(data, theta, order=1).gradient

    def hessian(self, data: GroupedData, theta: Floats) -> Floats:
        """Return the Hessian of each client's loss, ``(n, d, d)``."""
        return self.expand(data, theta, order=2).hessian

    def bend(self, data: GroupedData, theta: Floats, P: Floats | None = None, variance: Floats | None = None) -> Floats:
        """Return the gradient in ``theta_i`` of ``trace(P_i H_i(theta_i))`` of each client, ``(n, d)``.

        ``H_i`` is the Hessian of the sum over the client's rows, whatever the reduction. In place of ``P (n, d, d)``, the
        ``variance (rows,)`` of each row's margin ``x_l'P_i x_l`` will do.
        """
        if self.quadratic:
            return np.zeros_like(theta)
        family, X, y, weights, offset, *_ = self.operands(data)
        if self.code is None:
            if P is not None:
                variance = np.einsum("la,lab,lb->l", X, P[data.client_of_row], X)
            rows = (_weighted(self.thirds(data.margin(theta), y), data) * np.asarray(variance))[:, None] * X
            return segment_sum(rows, data.client_ptr)
        out, d = np.zeros_like(theta), data.n_terms
        P, variance = (np.empty((0, d, d)) if P is None else P), (_NONE if variance is None else variance)
        rows = family, X, y, weights, offset, data.client_ptr
        share(kernels.bend, block_count(len(theta)), *rows, theta, P, variance, out)
        return out

    def scale(self, data: GroupedData) -> Floats:
        """Return the factor of each client's sum over rows, ``(n,)``."""
        if self.reduction == "sum":
            return np.ones(data.n_clients)
        rows = data.weight_of_client
        return 1.0 / np.where(rows > 0, rows, 1.0)

    def operands(self, data: GroupedData) -> tuple[Any, Floats, Floats, Floats, Floats, Floats, float, Ints]:
        """Return the arguments of a kernel: family, ``X``, ``y``, weights, offset, scale, ridge, ``client_ptr``.

        The family is a code, or the loss itself if it is not compiled.
        """
        weights, offset = (_NONE if values is None else values for values in (data.weights, data.offset))
        family = self if self.code is None else self.code
        return family, data.X, data.y, weights, offset, self.scale(data), float(self.ridge), data.client_ptr

    def smoothness(self, data: GroupedData) -> Floats:
        """Return an upper bound ``L_i`` on the curvature of each client's loss at any point, ``(n,)``."""
        if not self.bounded:
            return np.full(data.n_clients, np.inf)
        gram = self._expand_compiled(kernels.GAUSSIAN, data, np.zeros((data.n_clients, data.n_terms)), 2)[2]
        return np.asarray(self.curvature[1] * np.maximum(np.linalg.eigvalsh(gram)[:, -1], 0.0) + self.ridge)

    def row_smoothness(self, data: GroupedData, second: Floats | float | None = None) -> Floats:
        """Return an upper bound on the curvature of each ``f_il``, where ``f_i = 1/m_i sum_l f_il`` over a client's rows.

        ``second`` is the second derivative in the margin; the default is its upper bound.
        """
        size = np.einsum("la,la->l", data.X, data.X) * (1.0 if data.weights is None else data.weights)
        share = self.scale(data) * data.rows_per_client
        bound: Floats = (self.curvature[1] if second is None else second) * size * share[data.client_of_row] + self.ridge
        return bound

    def smallest_curvature(self, hessian: Floats) -> float:
        """Return a lower bound ``mu`` on the curvature of all clients' losses at any point, given their Hessians at one."""
        if not self.quadratic:
            return self.ridge
        floor = np.empty(len(hessian))
        share(kernels.curvature_floor, block_count(len(hessian)), hessian, floor)
        return float(floor.min(initial=np.inf))


def _weighted(values: Floats, data: GroupedData) -> Floats:
    return values if data.weights is None else data.weights * values
