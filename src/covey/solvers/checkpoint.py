"""A run on disk: one record (:mod:`covey.records`), written whole or not at all; reading it executes nothing.

The file says which run it belongs to (algorithm, seed, probabilities, step, loss, digests of data, penalties and start), and
only that run goes on from it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from covey.errors import SolverError
from covey.nodes.network import Network
from covey.nodes.node import Node, Snapshot
from covey.objective.penalty import Penalty
from covey.records import Record, RecordError, decode, digest, encode
from covey.solvers.clients import node_of

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
