"""The error of Laplace's approximation: how it is reported, and when the approximation has failed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

# The approximation has failed if it exceeds the log-likelihood by more than NOTICED and by OVERSTATED for each group; if it
# changes the standard deviations of a level by a factor of more than exp(BIASED); or if a standard deviation of the
# margin is above TOO_LARGE. Then most responses of a group are certain, so no data determine how large it is.
NOTICED, OVERSTATED, BIASED, TOO_LARGE = 2.0, 0.0075, 0.4, 20.0


@dataclass(frozen=True)
class Approximation:
    """The error of Laplace's approximation, by quadrature at the optimum (:mod:`covey.variance.quadrature`).

    Attributes
    ----------
    error : the log-likelihood by quadrature less Laplace's
    standard_error : of ``error``, if it comes from a sample of clusters or from random draws; else 0
    bias : about how much larger the logs of the standard deviations of clients and of clusters should be
    failed : whether the estimates should not be used
    """

    error: float
    standard_error: float
    bias: tuple[float, float]
    failed: bool

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Approximation:
        return cls(**{**plain, "bias": tuple(plain["bias"])})

    def __str__(self) -> str:
        within = f" +- {2 * self.standard_error:.1g}" if self.standard_error else ""
        verdict = ", so it fails" if self.failed else ""
        return f"the approximation's error in the log-likelihood is {self.error:.2g}{within} (quadrature){verdict}"

    def failure(self, log_likelihood: float) -> str:
        """What failed and what to do; ``log_likelihood`` is the approximate one."""
        parts = [
            f"Laplace's approximation fails for this data, so these estimates should not be used: it gives a log-likelihood of "
            f"{log_likelihood:.1f}, quadrature gives {log_likelihood + self.error:.1f}"
        ]
        bias, level = max(zip(self.bias, ("clients", "clusters"), strict=True), key=lambda each: abs(each[0]))
        if abs(bias) > BIASED:
            wrong = f"too {'small' if bias > 0 else 'large'} by a factor of about {np.exp(min(abs(bias), 2.0)):.1f} or more"
            parts.append(f"standard deviations between {level} are {wrong}")
        parts.append("the rows of a client say too little about it: few rows, or rows of one class only")
        parts.append("let fewer terms vary, leave out a level (its part of the bar), or write no bars and give gamma= and lam=")
        return "; ".join(parts)
