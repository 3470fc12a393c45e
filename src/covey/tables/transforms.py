"""Functions of a formula that remember their training rows: ``center``, ``scale``, ``poly``, ``bs`` and ``cr``.

``center(x)`` subtracts the mean and ``scale(x)`` also divides by the standard deviation. ``poly(x, q)`` has the orthogonal
polynomials of R's ``poly``, by the three-term recurrence of Stieltjes (Gautschi 2004, Orthogonal Polynomials, section 2.2). The
polynomial of degree ``k`` needs two sums over the rows, given those of lower degrees. Such sums can be added over sites, so all
three are learned in rounds: one for ``center``, two for ``scale``, ``q + 1`` for ``poly``. The sums are exact
(:mod:`covey.exact`), so the result is the same to the last bit for any assignment of rows to sites.

``bs`` has the B-splines of R's ``splines::bs``. ``cr`` has natural cubic splines, which span the same curves as
``splines::ns`` with the same knots: column ``j`` is the spline that is 1 at knot ``j + 1`` and 0 at all others. Knots are given
in the formula, or they are quantiles of the training rows, which sums cannot give.

What a call has learned is a list of numbers, its state: ``n``, the mean and then two numbers for each degree, or the knots.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from covey._typing import Floats
from covey.errors import DataError, FormulaError
from covey.exact import WIDE, Exact, segment_sum

State = tuple[float, ...]

OPTIONS = {
    "center": (),
    "scale": (),
    "poly": ("degree",),
    "bs": ("df", "knots", "degree", "include_intercept", "lower_bound", "upper_bound"),
    "cr": ("df", "knots", "lower_bound", "upper_bound"),
}
_HIGHEST_DEGREE, _MOST_COLUMNS = 20, 100
_NEW_DEGREE = 1e-20  # a polynomial whose mean square is this small against the lower degrees is zero in all rows


@dataclass(frozen=True)
class Transform:
    """One call of such a function: its text, its name, the expression that it transforms, and its options."""

    text: str
    name: str
    argument: ast.expr
    options: dict[str, Any]

    @classmethod
    def read(cls, call: ast.Call) -> Transform:
        """Read a call whose name is in ``OPTIONS``; the options are numbers, True or False, or lists of numbers."""
        text, name = ast.unparse(call), call.func.id  # type: ignore[attr-defined]
        names, given = OPTIONS[name], dict[str, Any]()
        if not call.args or len(call.args) > 1 + len(names):
            raise FormulaError(f"{text} has too few or too many arguments; write {_usage(name)}.")
        pairs = [*zip(names, call.args[1:], strict=False), *((each.arg, each.value) for each in call.keywords)]
        for option, value in pairs:
            if option not in names or option in given:
                raise FormulaError(f"{text} has an unknown option {option!r}, or has it twice; write {_usage(name)}.")
            given[option] = _constant(value, text, name)
        transform = cls(text, name, call.args[0], given)
        transform._check()
        return transform

    def _check(self) -> None:
        for option, value in self.options.items():
            kind: Any = {"knots": tuple, "include_intercept": bool, "df": int, "degree": int}.get(option, int | float)
            if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
                raise FormulaError(f"The option {option!r} of {self.text} has the value {value!r}; write {_usage(self.name)}.")
        knots, (lower, upper) = self.options.get("knots"), self._bounds
        inside = [*([] if lower is None else [lower]), *(knots or ()), *([] if upper is None else [upper])]
        if (self.name == "poly" and "degree" not in self.options) or (self.name == "cr" and not self.options):
            raise FormulaError(f"{self.text} is incomplete; write {_usage(self.name)}.")
        if knots is not None and "df" in self.options:
            raise FormulaError(f"{self.text} has df and knots; leave one out, since the knots decide the number of columns.")
        if not all(low < high for low, high in pairwise(inside)):
            raise FormulaError(f"The knots of {self.text} must increase, and lie between lower_bound and upper_bound.")
        if not 1 <= self.degree <= _HIGHEST_DEGREE or self._n_knots < 0 or not 1 <= self.width <= _MOST_COLUMNS:
            least = self.degree + bool(self.options.get("include_intercept"))
            df = f", so df must be at least {least}" if "df" in self.options else ""
            limits = f"1 to {_MOST_COLUMNS} columns and a degree of 1 to {_HIGHEST_DEGREE}"
            raise FormulaError(f"{self.text} must have {limits}{df}.")

    @property
    def spline(self) -> bool:
        """Whether the state is a list of knots."""
        return self.name in ("bs", "cr")

    @property
    def degree(self) -> int:
        """The degree of the polynomials."""
        return int(self.options.get("degree", 3 if self.spline else 1)) if self.name != "cr" else 1

    @property
    def width(self) -> int:
        """The number of columns."""
        if not self.spline:
            return self.degree
        return self._n_knots + self.degree + bool(self.options.get("include_intercept"))

    @property
    def _n_knots(self) -> int:
        """The number of knots between the bounds."""
        if "df" in self.options:
            return int(self.options["df"]) - self.degree - bool(self.options.get("include_intercept"))
        return len(self.options.get("knots", ()))

    @property
    def _bounds(self) -> tuple[float | None, float | None]:
        return self.options.get("lower_bound"), self.options.get("upper_bound")

    @property
    def size(self) -> int:
        """How many numbers the complete state has."""
        if self.spline:
            return self._n_knots + 2
        return {"center": 2, "scale": 4}.get(self.name, 2 * self.degree + 2)

    def given(self) -> State:
        """The state that the formula itself gives: the knots of a spline with bounds; else nothing."""
        lower, upper = self._bounds
        if not self.spline or lower is None or upper is None or (self._n_knots and "knots" not in self.options):
            return ()
        return (float(lower), *self.options.get("knots", ()), float(upper))

    def example(self) -> str:
        """The call with knots and bounds, as the user could write it."""
        return f"{self.name}({ast.unparse(self.argument)}, knots=[1, 2], lower_bound=0, upper_bound=3), with your numbers"

    def check(self, state: Sequence[Any]) -> State:
        """The state from JSON; one that does not belong to this call is refused."""
        numbers = tuple(float(value) for value in state)
        partly = len(numbers) == self.size or (not self.spline and len(numbers) % 2 == 0 and len(numbers) < self.size)
        if not partly or not np.isfinite(numbers).all() or (self.spline and not (np.diff(numbers) > 0).all()):
            raise FormulaError(f"The values that {self.text} learned from its training rows are damaged; fit the model again.")
        return numbers

    # From rows to the state

    def place_knots(self, x: Floats) -> State:
        """The knots from training rows: the bounds are their ends, and quantiles divide the rows, as in R."""
        self._refuse_gaps(x)
        low, high = (end if given is None else given for end, given in zip((x.min(), x.max()), self._bounds, strict=True))
        inner = x[(x >= low) & (x <= high)]
        knots = self.options.get("knots")
        if knots is None:
            shares = np.linspace(0.0, 1.0, self._n_knots + 2)[1:-1]
            knots = np.quantile(inner, shares).tolist() if len(inner) else [low]
        found = (float(low), *map(float, knots), float(high))
        if not all(before < after for before, after in pairwise(found)):
            raise DataError(
                f"The knots of {self.text} would be {', '.join(f'{knot:g}' for knot in found)}, which must increase; "
                "give knots= between the smallest and the largest value, or a smaller df."
            )
        return found

    def sums(self, x: Floats, state: State) -> Exact:
        """The two sums of the next round, ``(2,)``."""
        self._refuse_gaps(x)
        p, factor = self._next(x, state)
        return segment_sum(np.column_stack([p * p, factor * p * p]), np.array([0, len(x)]), WIDE)[0]

    def sum_columns(self, x: Floats, state: State) -> tuple[Floats, Floats]:
        """The square roots of the absolute values that are added in :meth:`sums`."""
        p, factor = self._next(x, state)
        return np.abs(p), np.sqrt(np.abs(factor)) * np.abs(p)

    def learn(self, state: State, sums: Floats) -> State:
        """The state after one more round, given the sums over all rows."""
        square, moment = (float(value) for value in sums)
        if not np.isfinite([square, moment]).all():
            raise DataError(f"The values of {ast.unparse(self.argument)} are too large for {self.text}; use a larger unit.")
        # The sum of squares of equal values, or of a polynomial that is zero in all rows, is zero up to rounding.
        least = (0.0, 1e-28 * state[1] ** 2 * state[0] if state else 0.0, _NEW_DEGREE * state[0] if state else 0.0)
        if square <= least[min(len(state) // 2, 2)]:
            needed = 2 if self.name == "scale" else self.degree + 1
            raise DataError(
                f"{self.text} needs at least {needed} different values of {ast.unparse(self.argument)}, and training rows have "
                f"fewer; leave it out{'' if self.name == 'scale' else ', or lower its degree'}."
            )
        return (*state, square, moment / square)

    def _refuse_gaps(self, x: Floats) -> None:
        bad = np.flatnonzero(~np.isfinite(x))
        if len(bad):
            word = "NaN" if np.isnan(x[bad[0]]) else "infinite (inf)"
            what = ast.unparse(self.argument)
            drop = " A fit can drop such rows: na='drop' (in the shell --na drop)." if np.isnan(x[bad[0]]) else ""
            raise DataError(f"Column {what!r} is {word} in row {bad[0]}; fill the value or leave the row out.{drop}")

    def _next(self, x: Floats, state: State) -> tuple[Floats, Floats]:
        """The polynomial of the next degree, and the factor of the second sum."""
        if not state:
            return np.ones_like(x), x
        if len(state) == 2:
            return x - state[1], x - state[1]
        return self._polynomials(x, state, len(state) // 2)[:, -1], self._standard(x, state)

    # From the state to columns

    def values(self, x: Floats, state: State) -> Floats:
        """The columns ``(rows, width)``, zero as long as the state is incomplete."""
        columns: Floats = np.zeros((len(x), self.width))
        if len(state) < self.size:
            return columns
        if self.spline:
            return self._natural(x, state) if self.name == "cr" else self._b_splines(x, state)
        if self.name == "center":
            columns[:, 0] = x - state[1]
        elif self.name == "scale":
            columns[:, 0] = (x - state[1]) / np.sqrt(state[2] / (state[0] - 1.0))
        else:
            columns[:] = self._polynomials(x, state, self.degree)[:, 1:] / np.sqrt([state[0], *state[4::2]])
        return columns

    def _standard(self, x: Floats, state: State) -> Floats:
        """Values of mean 0 and mean square 1, on which the recurrence neither overflows nor loses digits."""
        z: Floats = (x - state[1]) / np.sqrt(state[2] / state[0])
        return z

    def _polynomials(self, x: Floats, state: State, degree: int) -> Floats:
        """The monic orthogonal polynomials of degrees 0 to ``degree`` in the standard values."""
        z = self._standard(x, state)
        centres = [state[3] / np.sqrt(state[2] / state[0]), *state[5::2]]
        squares = [state[0], state[0], *state[4::2]]
        found = [np.ones_like(z), z]
        for k, centre in enumerate(centres[: degree - 1], 1):
            found.append((z - centre) * found[k] - squares[k] / squares[k - 1] * found[k - 1])
        return np.column_stack(found)

    def _b_splines(self, x: Floats, state: State) -> Floats:
        from scipy.interpolate import BSpline

        ends = self.degree
        knots = np.array([*[state[0]] * ends, *state, *[state[-1]] * ends])
        columns = np.full((len(x), len(knots) - ends - 1), np.nan)
        there = np.isfinite(x)
        # Beyond its bounds the polynomial at the end of the spline goes on, as in R.
        columns[there] = BSpline.design_matrix(x[there], knots, ends, extrapolate=True).toarray()
        return columns if self.options.get("include_intercept") else columns[:, 1:]

    def _natural(self, x: Floats, state: State) -> Floats:
        from scipy.interpolate import CubicSpline

        knots = np.array(state)
        spline = CubicSpline(knots, np.eye(len(knots)), bc_type="natural")
        near = np.clip(x, knots[0], knots[-1])
        columns = spline(near) + (x - near)[:, None] * spline(near, 1)  # a natural spline is linear beyond its bounds
        return np.asarray(columns[:, 1:], dtype=np.float64)


def _usage(name: str) -> str:
    return {
        "center": "center(x)",
        "scale": "scale(x)",
        "poly": "poly(x, 2), with the degree as a whole number",
        "bs": "bs(x, df=5) or bs(x, knots=[1, 2], lower_bound=0, upper_bound=3)",
        "cr": "cr(x, df=5) or cr(x, knots=[1, 2], lower_bound=0, upper_bound=3)",
    }[name]


def _constant(node: ast.expr, text: str, name: str) -> Any:
    """The value of an option: a number, True or False, or several numbers, ``[1, 2]``, ``(1, 2)`` or ``c(1, 2)`` as in R."""
    several = node.elts if isinstance(node, ast.List | ast.Tuple) else None
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "c" and not node.keywords:
        several = node.args
    if several is not None:
        numbers = [_constant(each, text, name) for each in several]
        if not any(isinstance(number, tuple) for number in numbers):
            return tuple(float(number) for number in numbers)
    minus = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub)
    inner = node.operand if isinstance(node, ast.UnaryOp) and minus else node
    if isinstance(inner, ast.Constant) and isinstance(inner.value, int | float) and abs(inner.value) < 1e300:
        return -inner.value if minus else inner.value
    if isinstance(inner, ast.Name) and inner.id in ("TRUE", "FALSE"):
        return inner.id == "TRUE"
    raise FormulaError(f"The option {ast.unparse(node)} of {text} is no number and no list of numbers; write {_usage(name)}.")
