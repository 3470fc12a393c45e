"""User-defined losses, given by functions of ``(margin, y)`` on numpy arrays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from covey._typing import Floats
from covey.errors import SolverError
from covey.losses.base import FAMILIES, Loss
from covey.tables.rows import GroupedData

_SECANT = 1e-3

Function = Callable[..., npt.ArrayLike]


def from_functions(
    name: str,
    value: Function,
    slope: Function,
    curvature: Function,
    bounds: tuple[float, float],
    *,
    mean: Function | None = None,
    start: Function | None = None,
    two_classes: bool = False,
) -> Loss:
    """Register a convex loss under a name and return it.

    Solvers, estimators and :func:`covey.plan` then accept the loss, or its name. Models and messages contain only the name,
    never code. A process that loads a model with this loss has to register the loss first, and so does every site of a fit
    across sites. Such a loss has no likelihood: give the penalties, or choose them with ``penalty="cv"``.

    Parameters
    ----------
    name : str
        Name in models and specifications. It replaces an earlier user-defined loss with the same name.
    value, slope, curvature : callable
        Functions of arrays ``(margin, y)``, both ``(rows,)``, that return ``(rows,)``: the loss and its first and second
        derivative in the margin ``x'theta + offset``.
    bounds : (float, float)
        Smallest and largest value of the second derivative over all margins and responses. The largest may be infinite;
        step sizes are then measured near the minimiser.
    mean : callable, optional
        Prediction as a function of the margin. The default is the margin itself.
    start : callable, optional
        A suitable margin as a function of ``y``. Newton then starts at the least-squares fit to these margins instead of at
        zero. A loss with a constant slope far from its minimum, such as Huber's, needs it.
    two_classes : bool, optional
        Whether responses are two classes, coded 0 and 1. ``predict_proba`` of a classifier also needs ``mean``.

    Returns
    -------
    Loss
        The loss, summed over rows and without a ridge. ``dataclasses.replace(loss, reduction="mean", ridge=0.1)`` changes
        both.

    Examples
    --------
    >>> import numpy as np
    >>> from covey import GroupedData, Penalty
    >>> from covey.solvers import minimise
    >>> huber = from_functions(
    ...     "huber",
    ...     value=lambda m, y: np.where(abs(m - y) < 1, 0.5 * (m - y) ** 2, abs(m - y) - 0.5),
    ...     slope=lambda m, y: np.clip(m - y, -1, 1),
    ...     curvature=lambda m, y: (abs(m - y) < 1).astype(float),
    ...     bounds=(0.0, 1.0),
    ...     start=lambda y: y,
    ... )
    >>> data = GroupedData.from_arrays([[1.0]] * 5, [0.1, 0.2, 0.3, 0.4, 90.0])
    >>> minimise(data, huber, Penalty.of(data.hierarchy)).wbar.round(3).tolist()
    [0.5]
    """
    if not (isinstance(name, str) and name):
        raise SolverError(f"The name of a loss must be text. Got {name!r} instead.")
    if name in FAMILIES and not issubclass(FAMILIES[name], FunctionLoss):
        raise SolverError(f"The family {name!r} comes with covey; choose another name for your loss.")
    low, high = (float(bound) for bound in bounds)
    if not 0 <= low <= high or not high > 0 or np.isinf(low):
        raise SolverError(
            f"The bounds of the curvature of {name!r} must be 0 <= low <= high, high > 0. Got {bounds!r} instead."
        )
    body = {
        "__doc__": f"The user-defined loss {name!r}.",
        "name": name,
        "title": name,
        "error_name": f"mean {name} loss",
        "curvature": (low, high),
        "two_classes": bool(two_classes),
        "functions": {"value": value, "slope": slope, "curvature": curvature, "mean": mean, "start": start},
    }
    made: type[Loss] = type(name, (FunctionLoss,), body)
    return made()


class FunctionLoss(Loss):
    """Base class of the user-defined losses."""

    likelihood: ClassVar[bool] = False
    third_per_second: ClassVar[float] = np.inf
    responses: ClassVar[str] = "0 and 1"  # of two classes; any number otherwise
    functions: ClassVar[dict[str, Function | None]]

    def mean(self, margin: Floats) -> Floats:
        if self.functions["mean"] is not None:
            return self._call("mean", margin)
        if self.two_classes:
            raise SolverError(
                f"The loss {self.name!r} has no probabilities; give from_functions a mean=, or use predict and "
                "decision_function."
            )
        return margin

    def values(self, margin: Floats, y: Floats) -> Floats:
        return self._call("value", margin, y)

    def slopes(self, margin: Floats, y: Floats) -> Floats:
        return self._call("slope", margin, y)

    def curvatures(self, margin: Floats, y: Floats) -> Floats:
        """Return the second derivative plus, if there is a ``start``, a thousandth of the secant of the slope to the start.

        Where no row has curvature, as with Huber's loss far from all responses, a step of Newton would otherwise have no
        length. Near the minimum, a step with this addition still removes all but about a thousandth of the error.
        """
        second = self._call("curvature", margin, y)
        if self.quadratic or not self.linear_start:
            return second
        away = margin - self._call("start", y)
        with np.errstate(divide="ignore", invalid="ignore"):
            secant = self.slopes(margin, y) / away
        return second + _SECANT * np.where((away != 0) & (secant > 0), np.minimum(secant, self.curvature[1]), 0.0)

    def thirds(self, margin: Floats, y: Floats) -> Floats:
        raise SolverError(f"The loss {self.name!r} has no third derivative. Only the likelihood of a family needs one.")

    def residual(self, y: Floats, dispersion: float = 1.0) -> float:
        raise SolverError(f"The loss {self.name!r} is not a likelihood, so its responses have no variance.")

    def draw(self, margin: Floats, rng: np.random.Generator, dispersion: float = 1.0) -> Floats:
        raise SolverError(f"The loss {self.name!r} is not a likelihood, so no responses can be drawn from it.")

    @property
    def linear_start(self) -> bool:
        return self.functions["start"] is not None

    def working_response(self, data: GroupedData) -> GroupedData | None:
        if not self.linear_start:
            return None
        target = self._call("start", data.y)
        return replace(data, y=target if data.offset is None else target - data.offset, offset=None)

    def _call(self, which: str, *rows: Floats) -> Floats:
        """Call a function of the user and check the shape of its result."""
        values = np.asarray(self.functions[which](*rows), dtype=np.float64)  # type: ignore[misc]
        if values.shape != rows[0].shape:
            raise SolverError(
                f"The {which} of {self.name!r} returned shape {values.shape} for {len(rows[0])} rows; return one value per row."
            )
        return values
