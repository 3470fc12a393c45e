"""Results of solvers: models of all levels, convergence and history; and the start and the checkpoint of a run.

Three things are possible only if all clients are in this process: to begin at given coefficients, to return the clients'
coefficients, and to save a run.

A checkpoint is one record (:mod:`covey.records`) in a file. It is written completely or not at all, and reading it executes no
code. It holds the identity of its run: algorithm, seed, probabilities, step, loss, and digests of data, penalties and start.
Only a run with the same identity continues from it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import polars as pl

from covey._typing import Floats
from covey.errors import SolverError
from covey.nodes.network import Network, Snapshot
from covey.nodes.requests import DigestRows, PutCoefficients, PutSnapshot, TakeSnapshot, coefficients_of
from covey.objective.objective import Penalty
from covey.records import Record, RecordError, decode, digest, encode, write_file
from covey.solvers.ledger import Course, Ledger, quadratic_links

Progress = Callable[[int, float, float], None]
"""Called during a run with the iteration, the objective and the gradient norm."""


@dataclass(frozen=True)
class Convergence:
    """How a solver stopped.

    Attributes
    ----------
    solver : name of the solver
    converged : for a direct solver, whether the gradient norm is below the tolerance, or as small as float64 allows; for a
        randomised algorithm, whether the gap is certified to be within the (relative) tolerance; for ``apgd`` the same, but
        its gap is an estimate unless ``mu`` is given
    iterations : number of steps
    exchanges : number of round trips that a network would need: sums up, centres down. Clients of different clusters take
        part in different numbers of exchanges; this is the largest
    objective : value of the objective at the solution
    gradient_norm : Euclidean norm of the gradient in all clients' coefficients
    gap : upper bound on the objective less its minimum; None if no bound is certain
    message : the same in words

    If variances were learned, these describe the search: ``converged`` whether it ended at a local optimum, ``iterations`` the
    evaluations, ``exchanges`` the messages to nodes, ``objective`` twice the negative log-likelihood, ``gradient_norm`` that in
    the parameters, and ``gap`` an estimate of the distance of the objective from a local minimum.
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
class SharedCoefficients:
    """The coefficients ``beta (s,)`` of sparse shared columns, and their standard errors: NaN if there are none."""

    terms: tuple[str, ...]
    beta: Floats
    errors: Floats


@dataclass(frozen=True)
class Fit:
    """Coefficients of the clients ``theta (n, d)``, of the clusters ``w (k, d)`` and of the global model ``wbar (d,)``.

    ``shared`` are the coefficients of sparse columns, if there are any.
    ``history`` has a row for each step or check, ``ledger`` counts exchanges and bytes. ``course`` says in which iterations a
    randomised algorithm had them.
    """

    theta: Floats
    w: Floats
    wbar: Floats
    convergence: Convergence
    history: pl.DataFrame | None = None
    ledger: Ledger | None = None
    course: Course | None = None
    shared: SharedCoefficients | None = None

    @classmethod
    def of(cls, network: Network, w: Floats, wbar: Floats, end: Convergence, history: pl.DataFrame, ledger: Ledger) -> Fit:
        """With the clients' coefficients in the network; ``(0, d)`` if the clients are in other processes."""
        return cls(coefficients_of(network), w, wbar, end, history, ledger)


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
"""A row for each check. ``gap`` needs the minimum as an option; the last three columns are the cost so far."""


def after(first: Fit, second: Fit) -> Fit:
    """The second of two fits, which began where the first ended, with the iterations and costs of both."""
    spent, end = first.convergence, second.convergence
    end = replace(end, iterations=spent.iterations + end.iterations, exchanges=spent.exchanges + end.exchanges)
    history, ledger = second.history, second.ledger
    if first.history is not None and history is not None:
        cost = first.history[-1].select("iteration", "exchanges", "exchanges_between", "bytes").row(0, named=True)
        history = pl.concat([first.history, history.with_columns(pl.col(name) + cost[name] for name in cost)])
    if first.ledger is not None and ledger is not None:
        ledger = first.ledger + ledger
    return replace(second, convergence=end, history=history, ledger=ledger, course=None)


def entry(
    t: int, value: float, norm: float, certain: float | None, ledger: Ledger, minimum: float | None = None
) -> dict[str, Any]:
    """One row of a history; ``certain`` is the certified gap, if there is one."""
    gaps = None if minimum is None else value - minimum, certain
    spent = ledger.exchanges, int(ledger.between), int(ledger.bytes)
    return dict(zip(HISTORY, (t, value, *gaps, norm, *spent), strict=True))


def direct_history(network: Network, path: Iterable[tuple[int, float, float, int]], mu: float) -> tuple[pl.DataFrame, Ledger]:
    """History and ledger of a direct solver, whose exchanges are all of the whole network.

    ``path`` has the iteration, the objective, the gradient norm and the number of exchanges so far, for each step.
    """
    links, clusters = quadratic_links(network.tree.sizes, len(network.terms)), np.ones(network.tree.n_clusters, dtype=np.int64)
    rows, ledger = [], links.nothing
    for iteration, value, norm, exchanges in path:
        ledger = links.count(exchanges * clusters, exchanges)
        rows.append(entry(iteration, value, norm, certified_gap(norm, mu), ledger))
    return pl.DataFrame(rows, schema=HISTORY), ledger


def certified_gap(gradient_norm: float, mu: float) -> float | None:
    """``|grad|^2 / (2 mu)`` if ``mu > 0``."""
    return gradient_norm**2 / (2 * mu) if mu > 0 else None


def _need_places(network: Network, parameter: str) -> None:
    """Raise an error that names the ``parameter`` if the nodes have other owners."""
    if not network.places:
        raise SolverError(f"The {parameter!r} parameter does not work across sites; leave it out.")


def begin_at(network: Network, start: Fit | Floats | None) -> None:
    """Put the clients at the coefficients of a fit, or at coefficients ``(n, d)``; None leaves them as they are."""
    given = start.theta if isinstance(start, Fit) else start
    if given is None or (isinstance(start, Fit) and len(given) == 0):
        return
    _need_places(network, "start")
    shape = (network.tree.n_clients, len(network.terms))
    want = f"The 'start' parameter must hold {shape[0]} x {shape[1]} finite numbers, a row for each client."
    try:
        theta = np.array(given, dtype=np.float64, order="C")
    except (TypeError, ValueError):
        raise SolverError(f"{want} Got {type(given).__name__} instead.") from None
    if theta.shape != shape:
        raise SolverError(f"{want} Got shape {theta.shape} instead.")
    lost = np.flatnonzero(~np.isfinite(theta).all(axis=1))
    if len(lost):
        client = network.tree.identity(int(lost[0]))
        raise SolverError(f"{want} Client {client!r} has {theta[lost[0]].tolist()} instead.")
    places = network.places
    network.each([PutCoefficients(theta if len(places) == 1 else theta[at]) for at in places])


FORMAT = 2

P = TypeVar("P", bound=Record)


@dataclass(frozen=True)
class SavedRun(Record):
    """A saved run: its identity, the progress of its coordinator, and the state of its nodes."""

    identity: dict[str, str]
    progress: Record
    nodes: tuple[Snapshot, ...]


@dataclass(frozen=True)
class Checkpoint:
    """The file of a run and the network whose nodes are saved. Without a path nothing is saved."""

    path: Path | None
    network: Network
    identity: dict[str, str]

    @classmethod
    def at(cls, path: str | Path | None, identity: dict[str, Any], network: Network, penalty: Penalty) -> Checkpoint:
        """The checkpoint of a run, to be called before its first step; ``identity`` holds the settings of its solver."""
        if path is None:
            return cls(None, network, {})
        _need_places(network, "checkpoint")
        if not isinstance(path, str | Path):
            raise SolverError(f"The 'checkpoint' parameter must be the path of a file. Got {path!r} instead.")
        target = Path(path)
        if target.is_dir() or not target.parent.is_dir() or not os.access(target.parent, os.W_OK):
            raise SolverError(f"The checkpoint {str(path)!r} must be a file in a folder that exists and can be written to.")
        loss = network.loss
        rows = network.every(DigestRows())
        parts = {
            **identity,
            "loss": [loss.name, loss.reduction, loss.ridge],
            "data": rows,
            "penalties": digest(penalty.gamma, penalty.lam),
            "start": digest(coefficients_of(network)),
        }
        return cls(target, network, {"format": str(FORMAT), **{name: _digest_of(value) for name, value in parts.items()}})

    def write(self, progress: Record) -> None:
        """Write the progress of a run in place of the last one."""
        if self.path is None:
            return
        saved = encode(SavedRun(self.identity, progress, tuple(self.network.every(TakeSnapshot()))))
        try:
            write_file(self.path, saved)
        except OSError as problem:
            raise SolverError(f"The checkpoint {str(self.path)!r} cannot be written: {problem.strerror}.") from None

    def read(self) -> SavedRun | None:
        """The saved run; None if there is no file yet."""
        if self.path is None or not self.path.exists():
            return None
        try:
            run = decode(self.path.read_bytes())
            if not isinstance(run, SavedRun):
                raise RecordError("It is another record.")
        except (RecordError, OSError):
            raise SolverError(f"The checkpoint {str(self.path)!r} cannot be read; delete it to start anew.") from None
        if run.identity != self.identity:
            both = {**self.identity, **run.identity}
            other = next(name for name in both if run.identity.get(name) != self.identity.get(name))
            raise SolverError(
                f"The checkpoint {str(self.path)!r} is of another run (other {other}); give another path, or delete it to "
                "start anew."
            )
        return run

    def resume(self, kind: type[P], wanted: Callable[[P], bool] = lambda _: True) -> P | None:
        """Restore the node and return the progress of the run; None if there is none, or if it is not ``wanted``."""
        run = self.read()
        if run is None or not isinstance(run.progress, kind) or not wanted(run.progress):
            return None
        self.network.each([PutSnapshot(saved) for saved in run.nodes])
        return run.progress


def _digest_of(value: Any) -> str:
    """A setting as text, or the digest of the text if it is long."""
    text = json.dumps(value, default=lambda array: array.tolist())
    return text if len(text) <= 80 else hashlib.sha256(text.encode()).hexdigest()
