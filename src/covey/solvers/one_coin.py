"""The one-coin variant, which the paper's experiments use (PAPER.md, section 2, last point).

    each iteration: heads with probability p, then every client does
        theta_i -= eta gamma_i / p ( theta_i - (alpha_j tbar + (1 - alpha_j) tbar_j) )
    else
        theta_i -= eta / (1 - p) grad f_i(theta_i)

That is algorithm 1 with ``p_j = 0`` and ``tau = 1``; the whole penalty is stepped on at once, which allows a longer step.
"""

from __future__ import annotations

from typing import Unpack

import numpy as np

from covey.data import GroupedData
from covey.errors import SolverError
from covey.losses import Loss
from covey.objective import Penalty
from covey.schedule import Vote
from covey.solvers.curvature import constants
from covey.solvers.l2gd import Steps, descent
from covey.solvers.result import Fit
from covey.solvers.rounds import Watch
from covey.theory import Coins, best_one_coin, one_coin_smoothness, probability


def one_coin(
    data: GroupedData,
    loss: Loss,
    penalty: Penalty,
    *,
    steps: Steps = "constant",
    eta: float | None = None,
    p: float | None = None,
    mu: float | None = None,
    L: float | None = None,
    vote: Vote = "central",
    **watch: Unpack[Watch],
) -> Fit:
    """L2GD with one coin for all: every exchange is one of the whole network. Parameters as for ``l2gd``.

    >>> from covey import GroupedData, Penalty
    >>> from covey.losses import Gaussian
    >>> data = GroupedData.from_arrays([[1.0], [1.0], [1.0]], [0.0, 3.0, 9.0], ["a", "b", "c"], ["x", "x", "y"])
    >>> fit = one_coin(data, Gaussian(), Penalty.of(data.hierarchy), steps="switching", tol=1e-3)
    >>> fit.convergence.converged, fit.wbar.round(1).tolist()
    (True, [4.5])
    """
    known = constants(data, loss, penalty, mu=mu, L=L)
    known.need_curvature()
    chance = best_one_coin(known) if p is None else probability("p", p)
    if chance in (0, 1):
        raise SolverError(f"With p = {chance:g} clients never exchange, or never learn from their own rows; give 0 < p < 1.")
    k = data.n_clusters
    drawn = Coins(chance, np.zeros(k), np.ones(k))
    return descent("one_coin", data, loss, penalty, known, drawn, one_coin_smoothness(known, chance), eta, steps, vote, watch)
