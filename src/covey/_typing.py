"""Types of arrays and arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from narwhals.typing import IntoFrame

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Anything = npt.NDArray[Any]

ArrayLike = npt.ArrayLike
TableLike = IntoFrame | npt.ArrayLike
"""A data frame of pandas, polars or pyarrow, a lazy table of an engine, or an array."""
PenaltyLike = Mapping[str, float] | Mapping[int, float] | npt.ArrayLike
"""One number, an array, or numbers by the ids of groups or clusters."""
RandomState = int | np.random.RandomState | None
"""As in scikit-learn: a seed, a generator, or None for other random numbers in each call."""


class Say(Protocol):
    """Receives progress: the current step, or "" for the last one, how many parts of it are done, and how many there are."""

    def __call__(self, step: str = "", done: int = 0, of: int = 0) -> None: ...


def silent(step: str = "", done: int = 0, of: int = 0) -> None:
    """Report no progress."""
