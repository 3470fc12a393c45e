"""What a solver can do only where the clients are in its own process: begin at given coefficients, return them, save a run."""

from __future__ import annotations

from typing import Any

import numpy as np

from covey._typing import Floats
from covey.errors import SolverError
from covey.nodes.network import Network
from covey.nodes.node import Node
from covey.solvers.result import Fit


def coefficients(network: Network) -> Floats:
    """The clients' ``theta (n, d)``; ``(0, d)`` where they stay elsewhere."""
    node = network.clients()
    return np.empty((0, len(network.terms))) if node is None else node.coefficients()


def node_of(network: Network, parameter: str) -> Node:
    """The node that holds all clients, for a parameter that needs it."""
    node = network.clients()
    if node is None:
        raise SolverError(f"The {parameter!r} parameter is for clients that are all in memory; across a network leave it out.")
    return node


def begin_at(network: Network, start: Any) -> None:
    """Put the clients where a fit has them, or at coefficients ``(n, d)``; with neither they stay where they are."""
    given = start.theta if isinstance(start, Fit) else start
    if given is None or (isinstance(start, Fit) and len(given) == 0):
        return
    node = node_of(network, "start")
    shape = (node.data.n_clients, node.data.n_terms)
    want = f"The 'start' parameter must hold {shape[0]} x {shape[1]} finite numbers, a row for each client."
    try:
        theta = np.array(given, dtype=np.float64, order="C")
    except (TypeError, ValueError):
        raise SolverError(f"{want} Got {type(given).__name__} instead.") from None
    if theta.shape != shape:
        raise SolverError(f"{want} Got shape {theta.shape} instead.")
    lost = np.flatnonzero(~np.isfinite(theta).all(axis=1))
    if len(lost):
        client = node.data.hierarchy.client_ids[int(lost[0])]
        raise SolverError(f"{want} Client {client!r} has {theta[lost[0]].tolist()} instead.")
    node.theta = theta
