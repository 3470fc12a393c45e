"""What a solver leaves behind: the three levels of models, and an honest account of how well they solve the problem.

What a solver can do only where the clients are in its own process: begin at given coefficients, return them, save a run.

A run on disk: one record (:mod:`covey.records`), written whole or not at all; reading it executes nothing.

The file says which run it belongs to (algorithm, seed, probabilities, step, loss, digests of data, penalties and start), and
only that run goes on from it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import polars as pl

from covey._typing import Floats
from covey.errors import SolverError
from covey.nodes.network import Network, Node, Snapshot
from covey.objective.objective import Penalty
from covey.records import Record, RecordError, decode, digest, encode
from covey.solvers.ledger import Ledger

Progress = Callable[[int, float, float], None]
"""Called now and then with the iteration, the objective and the gradient norm."""


@dataclass(frozen=True)
class Convergence:
    """How the solver stopped.

    Attributes
    ----------
    solver : its name
    converged : whether the gradient is below the tolerance, or as small as float64 allows
    iterations, exchanges : steps taken; messages up and down that a network would have needed
    objective : the value of the objective at the solution
    gradient_norm : Euclidean norm of the gradient in all clients' coefficients
    gap : ``gradient_norm**2 / (2 mu)``, a bound on the distance to the lowest objective; None without strong convexity
    message : the same in words
    """

    solver: str
    converged: bool
    iterations: int
    exchanges: int
    objective: float
    gradient_norm: float
    gap: float | None
    message: str


@dataclass(frozen=True)
class Fit:
    """Coefficients of every client ``theta (n, d)``, every cluster ``w (k, d)`` and the whole ``wbar (d,)``.

    Iterative solvers also leave their ``history``, a row for each check, and a ``ledger`` of what crossed each link.
    """

    theta: Floats
    w: Floats
    wbar: Floats
    convergence: Convergence
    history: pl.DataFrame | None = None
    ledger: Ledger | None = None


HISTORY = {
    "iteration": pl.Int64,
    "objective": pl.Float64,
    "gap": pl.Float64,
    "certified_gap": pl.Float64,
    "gradient_norm": pl.Float64,
    "exchanges": pl.Int64,
    "exchanges_between": pl.Int64,
    "bytes": pl.Int64,
}
"""A row for each check: ``gap`` is to the minimum where that is known, the last three are what it cost so far."""


def after(first: Fit, second: Fit) -> Fit:
    """The second of two fits, the second begun where the first ended, with the iterations and costs of both."""
    spent, end = first.convergence, second.convergence
    end = replace(end, iterations=spent.iterations + end.iterations, exchanges=spent.exchanges + end.exchanges)
    history, ledger = second.history, second.ledger
    if first.history is not None and history is not None:
        cost = first.history[-1].select("iteration", "exchanges", "exchanges_between", "bytes").row(0, named=True)
        history = pl.concat([first.history, history.with_columns(pl.col(name) + cost[name] for name in cost)])
    if first.ledger is not None and ledger is not None:
        ledger = first.ledger + ledger
    return replace(second, convergence=end, history=history, ledger=ledger)


def entry(
    t: int, value: float, norm: float, certain: float | None, ledger: Ledger, minimum: float | None = None
) -> dict[str, Any]:
    """One row of a history; ``certain`` is a certified gap, if there is one."""
    gaps = None if minimum is None else value - minimum, certain
    spent = ledger.exchanges, int(ledger.between), int(ledger.bytes)
    return dict(zip(HISTORY, (t, value, *gaps, norm, *spent), strict=True))


def certified_gap(gradient_norm: float, mu: float) -> float | None:
    """``|grad|^2 / (2 mu)`` where ``mu > 0``."""
    return gradient_norm**2 / (2 * mu) if mu > 0 else None


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


FORMAT = 2

P = TypeVar("P", bound=Record)


@dataclass(frozen=True)
class SavedRun(Record):
    """A run as it was left: what identifies it, where its coordinator was, and where its node was."""

    identity: dict[str, str]
    progress: Record
    node: Snapshot


@dataclass(frozen=True)
class Checkpoint:
    """Where a run is kept, and the node that its clients are at; with no path, nowhere."""

    path: Path | None
    node: Node | None
    identity: dict[str, str]

    @classmethod
    def at(cls, path: str | Path | None, identity: dict[str, Any], network: Network, penalty: Penalty) -> Checkpoint:
        """The place for one run, before its first step: its settings, and all that it runs on."""
        if path is None:
            return cls(None, None, {})
        node = node_of(network, "checkpoint")
        if not isinstance(path, str | Path):
            raise SolverError(f"The 'checkpoint' parameter must be the path of a file. Got {path!r} instead.")
        target = Path(path)
        if target.is_dir() or not target.parent.is_dir() or not os.access(target.parent, os.W_OK):
            raise SolverError(f"The checkpoint {str(path)!r} must be a file in a folder that exists and can be written to.")
        data, loss = node.data, node.loss
        rows = (data.X, data.y, data.weights, data.offset, data.client_ptr, data.hierarchy.cluster_ptr)
        parts = {
            **identity,
            "loss": [loss.name, loss.reduction, loss.ridge],
            "data": digest(*rows),
            "penalties": digest(penalty.gamma, penalty.lam),
            "start": digest(node.coefficients()),
        }
        return cls(target, node, {"format": str(FORMAT), **{name: _digest_of(value) for name, value in parts.items()}})

    def write(self, progress: Record) -> None:
        """Keep this moment in place of the last one."""
        if self.path is None or self.node is None:
            return
        fresh = self.path.with_name(self.path.name + ".part")
        try:
            with fresh.open("wb") as file:
                file.write(encode(SavedRun(self.identity, progress, self.node.snapshot())))
                file.flush()
                os.fsync(file.fileno())
            fresh.replace(self.path)
        except OSError as problem:
            fresh.unlink(missing_ok=True)
            raise SolverError(f"The checkpoint {str(self.path)!r} cannot be written: {problem.strerror}.") from None

    def read(self) -> SavedRun | None:
        """The run as it was left; None if there is nothing yet."""
        if self.path is None or not self.path.exists():
            return None
        try:
            found = decode(self.path.read_bytes())
            if not isinstance(found, SavedRun):
                raise RecordError("It is another record.")
        except (RecordError, OSError):
            raise SolverError(f"The checkpoint {str(self.path)!r} cannot be read; delete it to start anew.") from None
        if found.identity != self.identity:
            both = {**self.identity, **found.identity}
            other = next(name for name in both if found.identity.get(name) != self.identity.get(name))
            raise SolverError(
                f"The checkpoint {str(self.path)!r} is of another run (other {other}); give another path, or delete it to "
                "start anew."
            )
        return found

    def resume(self, kind: type[P], wanted: Callable[[P], bool] = lambda _: True) -> P | None:
        """Put the node where it was left, and return how far the run had come; None if that is nothing, or not wanted."""
        found = self.read()
        if found is None or self.node is None or not isinstance(found.progress, kind) or not wanted(found.progress):
            return None
        self.node.restore(found.node)
        return found.progress


def _digest_of(value: Any) -> str:
    """Short numbers and words as they are; long ones by their digest, so that a thousand clusters take no more room."""
    text = json.dumps(value, default=lambda array: array.tolist())
    return text if len(text) <= 80 else hashlib.sha256(text.encode()).hexdigest()
