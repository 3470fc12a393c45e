"""Types of arrays and arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
