"""``solver="auto"`` takes the first direct solver that fits the loss: the sweep for a quadratic loss, Newton for any other.

It takes ``apgd``, which sends vectors, across a network whose matrices would be very large or may not leave their nodes.

:func:`solve` runs this solver, or one with a given name, over any network; :func:`minimise` does it for data in memory. The
order of the solvers is the ``place`` in their declarations (:mod:`.registry`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from covey._typing import Floats
from covey.errors import SolverError
from covey.losses import Loss
from covey.nodes.network import InMemory, Network
from covey.objective.objective import Penalty
from covey.solvers import registry
from covey.solvers.direct import james_stein as js
from covey.solvers.result import Fit, Progress
from covey.tables.rows import GroupedData

LARGEST_MATRICES = 32_000_000  # bytes in a reply; a site's answer to a sweep has one matrix for each cluster


def solve(
    network: Network,
    penalty: Penalty,
    *,
    solver: str = "auto",
    start: Fit | Floats | None = None,
    tol: float = 1e-8,
    max_iter: int | None = None,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
    james_stein: bool = False,
    progress: Progress | None = None,
) -> Fit:
    """Minimise the objective over any network.

    The result of a randomised algorithm has the same bits for any assignment of clients to nodes. The results of the direct
    solvers then differ by rounding only.

    Parameters
    ----------
    network : Network
        The nodes that hold the clients' rows: :class:`~covey.nodes.network.InMemory` for data in memory.
    penalty : Penalty
        ``gamma (n,)`` and ``lam (k,)``. The nodes must have these values of ``gamma`` too; they may differ between clients.
    solver : str
        Name of a solver. "auto" is the sweep for a quadratic loss and Newton for any other. It is ``apgd``
        across sites if it can be used, and the matrices of all clusters exceed 32 MB or a site sends vectors only.
    start : Fit or (n, d) array, optional
        A fit to begin at. ``apgd`` and the randomised algorithms also take coefficients, but not across sites.
    tol : float
        For Newton, the gradient norm at which it stops. ``apgd`` and the randomised algorithms stop
        when the gap of the objective to its minimum is at most ``tol`` times the difference between the objective
        and the value that it would have if every row were fitted perfectly.
    max_iter : int, optional
        Largest number of iterations; by default that of the solver.
    seed : int
        Seed of a randomised algorithm.
    options : mapping, optional
        Further keywords of the solver.
    james_stein : bool
        Whether to shrink the global model (:mod:`covey.solvers.direct.james_stein`). The other models are the best given it.
    progress : callable, optional
        Called during the run with the iteration, the objective and the gradient norm.

    Returns
    -------
    Fit
        Models of all levels. ``theta`` is ``(n, d)`` if the clients are in this process, otherwise ``(0, d)``.

    Examples
    --------
    >>> from covey import GroupedData, InMemory, Penalty
    >>> from covey.losses import Gaussian
    >>> data = GroupedData.from_arrays([[1.0], [1.0], [1.0]], [0.0, 3.0, 9.0], ["a", "b", "c"], ["x", "x", "y"])
    >>> penalty = Penalty.of(data.hierarchy)
    >>> solve(InMemory.of(data, Gaussian(), penalty.gamma), penalty, solver="newton").theta.ravel().round(3).tolist()
    [1.5, 3.0, 7.5]
    """
    registry.check_options(solver, options)
    chosen = _automatic(network, penalty, james_stein) if solver == "auto" else registry.find(solver)
    if james_stein and "james_stein" not in chosen.parameters:
        raise SolverError(f"james_stein=True needs the curvature, which {chosen.name!r} does not compute; use solver='auto'.")
    if james_stein:
        js.check(network.loss, penalty)
    given = {"start": start, "tol": tol, "max_iter": max_iter, "seed": seed, "progress": progress, "james_stein": james_stein}
    settings = {name: value for name, value in given.items() if name in chosen.parameters and value is not None}
    fit: Fit = chosen.run(network, penalty, **{**settings, **(options or {})})
    return fit


def _automatic(network: Network, penalty: Penalty, james_stein: bool) -> registry.Algorithm:
    """The first direct solver that fits the loss; ``apgd`` if matrices would be too large for a network, or are refused."""
    d, k = len(network.terms), network.tree.n_clusters
    tied = bool(((penalty.gamma > 0) & (penalty.gamma < np.inf)).all()) and not james_stein
    large = not network.places and 8 * k * d * (d + 1) // 2 > LARGEST_MATRICES
    if tied and (large or network.vectors_only):
        return registry.find("apgd")
    direct = [registry.find(name) for name in registry.direct()]
    return next(each for each in direct if network.loss.quadratic or not each.quadratic)


def minimise(
    data: GroupedData,
    loss: Loss,
    penalty: Penalty,
    *,
    solver: str = "auto",
    options: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Fit:
    """Minimise the objective for data in memory.

    Parameters
    ----------
    data : GroupedData
        The rows of all clients.
    loss : Loss
        The loss of a row.
    penalty : Penalty
        ``gamma (n,)`` and ``lam (k,)``.
    solver : str
        Name of a solver, or "auto".
    options : mapping, optional
        Keywords of the solver.
    **settings
        Further parameters of :func:`solve`, and keywords of the solver.

    Returns
    -------
    Fit
        Models of all levels.

    Examples
    --------
    >>> from covey import GroupedData, Penalty
    >>> from covey.losses import Gaussian, Poisson
    >>> data = GroupedData.from_arrays([[1.0], [1.0], [1.0]], [0.0, 3.0, 9.0], ["a", "b", "c"], ["x", "x", "y"])
    >>> penalty = Penalty.of(data.hierarchy, gamma=1.0, lam=1.0)
    >>> fit = minimise(data, Gaussian(), penalty)
    >>> fit.wbar.round(3).tolist(), fit.theta.ravel().round(3).tolist()
    ([4.5], [1.5, 3.0, 7.5])
    >>> minimise(data, Gaussian(), penalty, solver="al2sgd_plus", tol=1e-12).theta.ravel().round(5).tolist()
    [1.5, 3.0, 7.5]
    >>> minimise(data, Poisson(), penalty).theta.ravel().round(3).tolist()
    [-0.185, 0.981, 2.14]
    """
    registry.check_options(solver, options)
    common = {name: settings.pop(name) for name in registry.COMMON if name in settings}
    network = InMemory.of(data, loss, penalty.gamma)
    return solve(network, penalty, solver=solver, options={**(options or {}), **settings}, **common)
