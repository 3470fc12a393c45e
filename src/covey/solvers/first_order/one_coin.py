"""The one-coin variant, which the paper's experiments use (PAPER.md, section 2, last point).

    each iteration: heads with probability p, then every client does
        theta_i -= eta gamma_i / p ( theta_i - (alpha_j tbar + (1 - alpha_j) tbar_j) )
    else
        theta_i -= eta / (1 - p) grad f_i(theta_i)

That is algorithm 1 with ``p_j = 0`` and ``tau = 1``; the whole penalty is stepped on at once, which allows a longer step.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Unpack

from covey.losses import Loss
from covey.nodes.network import Network
from covey.objective.objective import Objective
from covey.objective.penalty import Penalty
from covey.objective.theory import one_coin_recipe
from covey.solvers.first_order.curvature import constants_across
from covey.solvers.first_order.l2gd import Steps, descent
from covey.solvers.first_order.loop import Control, Keepers, Watch, in_memory, nobody
from covey.solvers.result import Fit
from covey.tables.rows import GroupedData


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
    settings: dict[str, Any] = {"steps": steps, "eta": eta, "p": p, "mu": mu, "L": L}
    return in_memory(partial(one_coin_across, **settings), Objective(data, loss, penalty), Control.of("one_coin", watch))


def one_coin_across(
    network: Network,
    penalty: Penalty,
    control: Control,
    keepers: Keepers = nobody,
    *,
    steps: Steps = "constant",
    eta: float | None = None,
    p: float | None = None,
    mu: float | None = None,
    L: float | None = None,
) -> Fit:
    """The one-coin variant over any network, from where its nodes are; the clients' models stay there."""
    known = constants_across(network, penalty, mu=mu, L=L)
    known.need_curvature()
    return descent("one_coin", network, penalty, known, one_coin_recipe(known, p), eta, steps, control, keepers)
