"""Do clusters matter, do clients differ? Likelihood-ratio tests of the hypothesis that a level's variances are zero.

Zero is the boundary of the parameter space, so under the null hypothesis the statistic is not chi-squared but chi-bar-squared
(Self and Liang 1987; Stram and Lee 1994): the squared length of a normal vector after projection on the cone of allowed
directions. For one variance that gives half the usual p-value, for ``p`` variances a binomial mixture, for a full covariance
the sum of squared positive eigenvalues of a symmetric normal matrix. Estimates of several variances are taken as uncorrelated.
The length of the vector is independent of its direction. So the p-value is a mean over directions ``u`` of chi-squared tails,
``P(chi2_p > t / h(u))``, where ``h`` is the share of the squared length that remains after projection.
"""

from __future__ import annotations

import warnings

import numpy as np
from scipy import special

from covey._typing import Floats
from covey.errors import ConvergenceWarning
from covey.solvers.result import Progress
from covey.variance.components import Learned, LikelihoodRatio
from covey.variance.criterion import criterion_for
from covey.variance.estimate import find_optimum
from covey.variance.frame import threads_of
from covey.variance.parameters import Parameters
from covey.variance.structure import Kind, Shape
from covey.variance.survey import Survey

_DIRECTIONS = 4096


def likelihood_ratios(
    known: Survey, learned: Learned, shape: Shape, *, reml: bool = True, progress: Progress | None = None
) -> tuple[LikelihoodRatio, ...]:
    """Test every level that varies, each by a fit without it, over the network that was surveyed for the fit.

    What the nodes keep of the fit stays as it is. A statistic far below zero shows that the fit has missed its optimum.
    """
    tests, network = [], known.network
    whole = Parameters.of(shape, np.ones(len(network.terms)), network.tree.n_clusters)
    for level, null in shape.without().items():
        components = getattr(learned.components, level)
        if not components.terms:
            continue
        with warnings.catch_warnings(), threads_of(network):
            warnings.simplefilter("ignore", ConvergenceWarning)  # the fit itself has warned
            best, _ = find_optimum(criterion_for(known, null, reml=reml), progress)
        statistic = best.value + 2 * learned.components.log_likelihood
        p_value = chi_bar_tail(statistic, components.kind, len(components.terms), len(components.covariance))
        tests.append(LikelihoodRatio(level, statistic, getattr(whole, level).n_parameters, p_value))
    return tuple(tests)


def chi_bar_tail(statistic: float, kind: Kind, q: int, count: int = 1) -> float:
    """The probability of a statistic at least as large if all of ``count`` covariances of ``q`` terms are zero.

    >>> round(chi_bar_tail(2.706, "isotropic", 3), 3), round(chi_bar_tail(2.706, "diagonal", 1), 3)
    (0.05, 0.05)
    """
    if statistic <= 0:
        return 1.0
    if kind == "full" and q > 1:
        share, p = _cone_shares(q, count)
        with np.errstate(divide="ignore"):
            return float(special.chdtrc(p, statistic / share).mean())
    p = count * (1 if kind == "isotropic" else q)
    k = np.arange(1, p + 1)
    # Binomial weights; scipy.stats has them too, and takes a second to import.
    weights = np.exp(special.gammaln(p + 1) - special.gammaln(k + 1) - special.gammaln(p - k + 1) - p * np.log(2))
    return float(weights @ special.chdtrc(k, statistic))


def _cone_shares(q: int, count: int) -> tuple[Floats, int]:
    """For random symmetric matrices, the share of squared length in positive eigenvalues; and the number of dimensions."""
    rng = np.random.default_rng(0)
    draws = rng.normal(size=(_DIRECTIONS, count, q, q))
    # A symmetric matrix whose coordinates, in an orthonormal basis of such matrices, are independent standard normals.
    symmetric = (draws + draws.swapaxes(2, 3)) / 2
    values = np.linalg.eigvalsh(symmetric)
    positive, whole = (np.maximum(values, 0.0) ** 2).sum(axis=(1, 2)), (values**2).sum(axis=(1, 2))
    return positive / whole, count * q * (q + 1) // 2
