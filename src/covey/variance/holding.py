"""Parameters held fixed in a search, and the ends of profile intervals.

Each :class:`Hold` is a function of the vector ``z``, with a map that moves ``z`` to where the function has a given value. The
search is over all of ``z``; along the direction that the map takes away, its gradient is zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np

from covey._typing import Floats, Ints

Function = Callable[[Floats], tuple[float, Floats]]
"""A value and its gradient."""

_CLOSE = 1e-9  # of the distance between two points of the search for an end
_STEPS = 60
_FARTHEST = 6.0  # a correlation, by Fisher's transformation; beyond it is 1


class Hold(Protocol):
    """A function of ``z`` that is held fixed, and the ends of its range."""

    limits: ClassVar[tuple[float, float]]

    def of(self, z: Floats) -> float:
        """Its value at ``z``."""
        ...

    def place(self, z: Floats, value: float) -> Floats:
        """The point near ``z`` that has this value."""
        ...

    def gradient(self, z: Floats, value: float, slope: Floats) -> Floats:
        """The gradient in ``z``, from the one at the point that has this value."""
        ...

    def ways(self, value: float) -> tuple[Iterator[float], Iterator[float]]:
        """Values ever farther below and above an estimate."""
        ...


@dataclass(frozen=True)
class Length:
    """The standard deviation of a term: the length of the entries ``at``, times ``unit``."""

    limits: ClassVar[tuple[float, float]] = (0.0, np.inf)
    at: Ints
    unit: float

    def of(self, z: Floats) -> float:
        return self.unit * float(np.linalg.norm(z[self.at]))

    def place(self, z: Floats, value: float) -> Floats:
        moved = z.copy()
        moved[self.at] = value / self.unit * _direction(z[self.at])
        return moved

    def gradient(self, z: Floats, value: float, slope: Floats) -> Floats:
        out, direction = slope.copy(), _direction(z[self.at])
        across = slope[self.at] - direction * float(direction @ slope[self.at])
        out[self.at] = value / self.unit / max(float(np.linalg.norm(z[self.at])), 1e-300) * across
        return out

    def ways(self, value: float) -> tuple[Iterator[float], Iterator[float]]:
        down = [*(value / 1.5**k for k in range(1, 18)), 0.0] if value > 0 else []
        first = max(value, 1e-2 * self.unit)
        return iter(down), (first * 1.4**k for k in range(1, _STEPS))


@dataclass(frozen=True)
class Angle:
    """The correlation of two terms: the cosine of the angle between the rows ``one`` and ``other``, which has more entries."""

    limits: ClassVar[tuple[float, float]] = (-1.0, 1.0)
    one: Ints
    other: Ints

    def of(self, z: Floats) -> float:
        a, b = self._rows(z)
        size = float(np.linalg.norm(a) * np.linalg.norm(b))
        return float(np.clip(a @ b / size, -1.0, 1.0)) if size > 0 else np.nan

    def place(self, z: Floats, value: float) -> Floats:
        u, w = self._axes(z)
        moved = z.copy()
        moved[self.other] = np.linalg.norm(z[self.other]) * (value * u + np.sqrt(1.0 - value**2) * w)
        return moved

    def gradient(self, z: Floats, value: float, slope: Floats) -> Floats:
        (a, b), (u, w), out = self._rows(z), self._axes(z), slope.copy()
        G, side, length = slope[self.other], np.sqrt(1.0 - value**2), float(np.linalg.norm(b))
        if length == 0.0:
            return out
        turned = length * side / max(float(np.linalg.norm(b - u * (u @ b))), 1e-12 * length)
        beside = G - w * float(w @ G)
        out[self.other] = float(G @ (value * u + side * w)) * b / length + turned * (beside - u * float(u @ G))
        pull = length * value * G - turned * (float(G @ u) * b + float(b @ u) * beside)
        across = (pull - u * float(u @ pull)) / max(float(np.linalg.norm(a)), 1e-300)
        out[self.one] += across[: len(self.one)]
        return out

    def ways(self, value: float) -> tuple[Iterator[float], Iterator[float]]:
        if not np.isfinite(value):
            return iter(()), iter(())
        grid = np.tanh(np.linspace(-_FARTHEST, _FARTHEST, 17)).tolist()
        return iter([*(at for at in reversed(grid) if at < value), -1.0]), iter([*(at for at in grid if at > value), 1.0])

    def _rows(self, z: Floats) -> tuple[Floats, Floats]:
        a, b = np.zeros(len(self.other)), z[self.other]
        a[: len(self.one)] = z[self.one]
        return a, b

    def _axes(self, z: Floats) -> tuple[Floats, Floats]:
        """Unit vectors along the first row, and across it towards the second."""
        a, b = self._rows(z)
        u = _direction(a)
        across = b - u * float(u @ b)
        if np.linalg.norm(across) > 1e-12 * np.linalg.norm(b):
            return u, _direction(across)
        return u, np.eye(len(b))[-1]  # the first row has no last entry


@dataclass(frozen=True)
class Along:
    """A linear function ``offset + direction @ z``. ``step`` is the length of the first step of the search for an end."""

    limits: ClassVar[tuple[float, float]] = (-np.inf, np.inf)
    direction: Floats
    step: float
    offset: float = 0.0

    def of(self, z: Floats) -> float:
        return self.offset + float(self.direction @ z)

    def place(self, z: Floats, value: float) -> Floats:
        return np.asarray(z + self.direction * (value - self.of(z)) / float(self.direction @ self.direction))

    def gradient(self, z: Floats, value: float, slope: Floats) -> Floats:
        return np.asarray(slope - self.direction * float(self.direction @ slope) / float(self.direction @ self.direction))

    def ways(self, value: float) -> tuple[Iterator[float], Iterator[float]]:
        steps = [self.step * (1.5**k - 0.5) for k in range(1, _STEPS)]
        return (value - step for step in steps), (value + step for step in steps)


class Profile:
    """The least value of a function as a function of what is held. Each search starts where the last one ended."""

    def __init__(self, function: Function, hold: Hold, best: Floats) -> None:
        self.function, self.hold, self.best, self.z = function, hold, best, best
        self.estimate = hold.of(best)

    def at(self, value: float) -> float:
        def function(z: Floats) -> tuple[float, Floats]:
            lowest, slope = self.function(self.hold.place(z, value))
            return lowest, self.hold.gradient(z, value, slope)

        lowest, self.z = minimise_from(function, self.z)
        return lowest


def minimise_from(function: Function, start: Floats) -> tuple[float, Floats]:
    """The minimum near ``start``, and where it is."""
    from scipy.optimize import minimize

    if len(start) == 0:
        return function(start)[0], start
    with np.errstate(all="ignore"):
        found = minimize(function, start, jac=True, method="BFGS", options={"gtol": 1e-7, "maxiter": 500})
    return float(found.fun), np.asarray(found.x if np.isfinite(found.fun) else start)


def ends(profile: Profile, lowest: float, rise: float) -> tuple[float, float]:
    """Where the profile has risen by ``rise`` above ``lowest``; the limit of the range on a side where it does not."""
    from scipy.optimize import brentq

    def excess(at: float) -> float:
        return profile.at(at) - lowest - rise

    found = list(profile.hold.limits)
    for side, way in enumerate(profile.hold.ways(profile.estimate)):
        profile.z, inner = profile.best, profile.estimate
        for outer in way:
            if excess(outer) > 0:
                found[side] = float(brentq(excess, inner, outer, xtol=_CLOSE * abs(outer - inner), rtol=1e-13))
                break
            inner = outer
    return found[0], found[1]


def _direction(v: Floats) -> Floats:
    length = float(np.linalg.norm(v))
    return v / length if length > 0 else np.eye(len(v))[0]
