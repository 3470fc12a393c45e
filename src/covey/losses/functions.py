"""Losses of one's own, given by functions of ``(margin, y)`` on numpy arrays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from covey._typing import Floats
from covey.errors import DataError, SolverError
from covey.losses.base import FAMILIES, Loss
from covey.tables.rows import GroupedData, Place

_SECANT = 1e-3

Function = Callable[[Floats, Floats], Any]


def from_functions(
    name: str,
    value: Function,
    slope: Function,
    curvature: Function,
    bounds: tuple[float, float],
    *,
    mean: Callable[[Floats], Any] | None = None,
    start: Callable[[Floats], Any] | None = None,
    two_classes: bool = False,
) -> Loss:
    """Register a convex loss under a name, and return it; solvers, estimators and ``covey.plan`` then take the name too.

    No code is saved with a model nor sent to a site: a process that reads the model, and every site of a fit across sites,
    registers the loss under the same name itself. Such a loss is no likelihood, so penalties are given, or chosen by
    ``penalty="cv"``.

    Parameters
    ----------
    name : what models and specifications call it; a loss registered under this name before is replaced
    value, slope, curvature : functions of arrays ``(margin, y)``, one number a row
        The loss and its first and second derivative in the margin ``x'theta + offset``.
    bounds : the least and the largest value of the second derivative, over all margins and responses
        The latter may be infinite; step sizes are then measured near the minimiser.
    mean : function of the margin, the prediction; the margin itself by default
    start : function of ``y``, a margin that suits each response
        Newton begins at the least-squares fit to these instead of at zero. A loss whose slope is constant far from its minimum
        needs it.
    two_classes : whether responses are one of two classes, coded 0 and 1; a classifier's ``predict_proba`` needs ``mean``

    Returns
    -------
    Loss, summed over rows and without a ridge; ``dataclasses.replace(loss, reduction="mean", ridge=0.1)`` has another.

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
    if name in FAMILIES and not issubclass(FAMILIES[name], _Functions):
        raise SolverError(f"The name {name!r} is that of a family that comes with covey; choose another for your loss.")
    low, high = (float(bound) for bound in bounds)
    if not 0 <= low <= high or not high > 0 or np.isinf(low):
        raise SolverError(
            f"The bounds of the curvature of {name!r} must be 0 <= low <= high, high > 0. Got {bounds!r} instead."
        )
    functions = {"value": value, "slope": slope, "curvature": curvature, "mean": mean, "start": start}
    body: dict[str, Any] = {
        "__doc__": f"The loss {name!r}, by functions.",
        "name": name,
        "title": name,
        "error_name": f"mean {name} loss",
        "curvature": (low, high),
        "two_classes": bool(two_classes),
        "functions": functions,
    }
    base = _Functions if start is None else _FunctionsWithStart
    made: type[Loss] = type(name, (base,), body)
    return made()


class _Functions(Loss):
    """What all losses by functions share."""

    likelihood: ClassVar[bool] = False
    third_per_second: ClassVar[float] = np.inf
    functions: ClassVar[dict[str, Any]]

    def mean(self, margin: Floats) -> Floats:
        mean = self.functions["mean"]
        if mean is None and self.two_classes:
            raise SolverError(
                f"The loss {self.name!r} says nothing of probabilities; give from_functions a mean=, or use predict and "
                "decision_function."
            )
        return margin if mean is None else _rows(mean(margin), margin, f"mean of {self.name!r}")

    def values(self, margin: Floats, y: Floats) -> Floats:
        return self._call("value", margin, y)

    def slopes(self, margin: Floats, y: Floats) -> Floats:
        return self._call("slope", margin, y)

    def curvatures(self, margin: Floats, y: Floats) -> Floats:
        return self._call("curvature", margin, y)

    def thirds(self, margin: Floats, y: Floats) -> Floats:
        raise SolverError(f"The loss {self.name!r} has no third derivative, which only learning from a likelihood needs.")

    def residual(self, y: Floats, dispersion: float = 1.0) -> float:
        raise SolverError(f"The loss {self.name!r} is no likelihood, so its responses have no variance.")

    def draw(self, margin: Floats, rng: np.random.Generator, dispersion: float = 1.0) -> Floats:
        raise SolverError(f"The loss {self.name!r} is no likelihood, so no responses can be drawn from it.")

    def check_values(self, y: Floats, place: Place) -> None:
        if self.two_classes and ((y != 0) & (y != 1)).any():
            row = int(((y != 0) & (y != 1)).argmax())
            raise DataError(f"The response is {y[row]:g} in {place(row)}; the loss {self.name!r} takes 0 and 1.")

    def _call(self, which: str, margin: Floats, y: Floats) -> Floats:
        return _rows(self.functions[which](margin, y), margin, f"{which} of {self.name!r}")


class _FunctionsWithStart(_Functions):
    """With margins that suit the responses, Newton has somewhere to begin, and somewhere to go where every row is flat."""

    def curvatures(self, margin: Floats, y: Floats) -> Floats:
        """The second derivative, and in what is not quadratic a thousandth of the slope's secant to the margin that suits.

        Where no row is curved, as that of Huber's loss far from every response, Newton's step would have no length; in this
        proportion it still loses all but a thousandth of its error near the minimum.
        """
        second = super().curvatures(margin, y)
        if self.quadratic:
            return second
        away = margin - self._target(y)
        with np.errstate(divide="ignore", invalid="ignore"):
            secant = self.slopes(margin, y) / away
        return second + _SECANT * np.where((away != 0) & (secant > 0), np.minimum(secant, self.curvature[1]), 0.0)

    def _target(self, y: Floats) -> Floats:
        return _rows(self.functions["start"](y), y, f"start of {self.name!r}")

    def working_response(self, data: GroupedData) -> GroupedData | None:
        target = self._target(data.y)
        return replace(data, y=target if data.offset is None else target - data.offset, offset=None)


def _rows(found: Any, rows: Floats, what: str) -> Floats:
    """One number a row, or an error that names the function."""
    values = np.asarray(found, dtype=np.float64)
    if values.shape != rows.shape:
        raise SolverError(f"The {what} returned shape {values.shape} for {len(rows)} rows; return one number a row.")
    return values
