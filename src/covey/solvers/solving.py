"""``solve`` over any network, and ``minimise`` for data in memory: a solver by its name, or the one that fits."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

from covey.errors import SolverError
from covey.losses import Loss
from covey.nodes.network import InMemory, Network, threads_for
from covey.objective.objective import Penalty
from covey.solvers import registry
from covey.solvers.direct import james_stein as js
from covey.solvers.registry import Algorithm, check_options
from covey.solvers.result import Fit, Progress
from covey.tables.rows import GroupedData


def solve(
    network: Network,
    penalty: Penalty,
    *,
    solver: str = "auto",
    start: Any = None,
    tol: float = 1e-8,
    max_iter: int | None = None,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
    james_stein: bool = False,
    progress: Progress | None = None,
) -> Fit:
    """Minimise the objective over any network.

    Which node holds which client changes no bit of the result of a randomised algorithm, and only rounding of the others.

    Parameters
    ----------
    network : nodes that hold the clients; :class:`~covey.nodes.network.InMemory` for data in memory
    penalty : its ``gamma`` is what the nodes have
    solver : "auto" is the sweep for a quadratic loss and Newton for any other
    start : a fit to begin at, for clients in memory; the randomised algorithms also take coefficients ``(n, d)``
    tol : the gradient norm at which Newton stops; for a randomised algorithm, the share of the objective to which the minimum
        has to be certified
    max_iter : most iterations; by default that of the solver
    seed : for randomised algorithms
    options : further keywords of the solver
    james_stein : shrink the global model (:mod:`covey.solvers.direct.james_stein`); the others are the best given that
    progress : called now and then with the iteration, the objective and the gradient norm

    Returns
    -------
    Fit
        With the clients' ``theta`` where they are in this process; elsewhere ``theta`` is empty, ``(0, d)``.

    >>> from covey import GroupedData, InMemory, Penalty
    >>> from covey.losses import Gaussian
    >>> data = GroupedData.from_arrays([[1.0], [1.0], [1.0]], [0.0, 3.0, 9.0], ["a", "b", "c"], ["x", "x", "y"])
    >>> penalty = Penalty.of(data.hierarchy)
    >>> solve(InMemory.of(data, Gaussian(), penalty.gamma), penalty, solver="newton").theta.ravel().round(3).tolist()
    [1.5, 3.0, 7.5]
    """
    check_options(solver, options)
    chosen = fitting(network.loss) if solver == "auto" else registry.find(solver)
    if james_stein and "james_stein" not in chosen.parameters:
        raise SolverError(f"james_stein=True needs the curvature that {chosen.name!r} never sees; use solver='auto'.")
    if james_stein:
        js.check(network.loss, penalty)
    asked = {"start": start, "tol": tol, "max_iter": max_iter, "seed": seed, "progress": progress, "james_stein": james_stein}
    settings = {name: value for name, value in asked.items() if name in chosen.parameters and value is not None}
    node = network.clients()
    with nullcontext() if node is None else threads_for(node.data):
        fit: Fit = chosen.run(network, penalty, **{**settings, **(options or {})})
    return fit


def minimise(
    data: GroupedData,
    loss: Loss,
    penalty: Penalty,
    *,
    options: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Fit:
    """Minimise the objective of data in memory.

    Keywords are those of :func:`solve`, and options of the solver.

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
    own = {name: value for name, value in settings.items() if name not in (*registry.COMMON, "solver")}
    common = {name: value for name, value in settings.items() if name not in own}
    if own:
        check_options(common.get("solver", "auto"), options)
        options = {**(options or {}), **own}
    return solve(InMemory.of(data, loss, penalty.gamma), penalty, options=options, **common)


def fitting(loss: Loss) -> Algorithm:
    """The first of the direct solvers that the loss allows."""
    found = (registry.find(name) for name in registry.direct())
    return next(each for each in found if loss.quadratic or not each.quadratic)
