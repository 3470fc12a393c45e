"""A run on disk: one file of plain arrays, written whole or not at all; reading it executes nothing.

The file says which run it belongs to (algorithm, seed, probabilities, step, loss, digests of data, penalties and start), and
only that run goes on from it.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from covey._typing import Anything, Floats
from covey.errors import SolverError
from covey.ledger import Ledger
from covey.objective import Objective
from covey.solvers.result import HISTORY

FORMAT = 1


@dataclass(frozen=True)
class Found:
    """Where a run was: the account so far, what the coordinator remembers (the anchor's means), and the nodes' arrays."""

    iteration: int
    ledger: Ledger
    history: list[dict[str, Any]]
    anchor: Floats
    nodes: dict[str, Floats]


@dataclass(frozen=True)
class Checkpoint:
    """Where a run is kept; with no path, nowhere."""

    path: Path | None
    identity: dict[str, str]

    @classmethod
    def at(cls, path: str | Path | None, identity: dict[str, Any], objective: Objective, start: Floats) -> Checkpoint:
        """The place for one run: its settings, and all that it runs on."""
        if path is None:
            return cls(None, {})
        target = Path(path)
        if target.is_dir() or not target.parent.is_dir() or not os.access(target.parent, os.W_OK):
            raise SolverError(f"The checkpoint {str(path)!r} must be a file in a folder that exists and can be written to.")
        data, loss, penalty = objective.data, objective.loss, objective.penalty
        rows = (data.X, data.y, data.weights, data.offset, data.client_ptr, data.hierarchy.cluster_ptr)
        parts = {
            **identity,
            "loss": [loss.name, loss.reduction, loss.ridge],
            "data": _digest(*rows),
            "penalties": _digest(penalty.gamma, penalty.lam),
            "start": _digest(start),
        }
        return cls(target, {"format": str(FORMAT), **{name: _digest_of(value) for name, value in parts.items()}})

    def write(
        self, iteration: int, ledger: Ledger, history: list[dict[str, Any]], anchor: Floats, nodes: dict[str, Floats]
    ) -> None:
        """Keep this moment in place of the last one."""
        if self.path is None:
            return
        account = {"identity": self.identity, "ledger": asdict(ledger)}
        arrays: dict[str, Anything] = {f"node.{name}": array for name, array in nodes.items()}
        arrays["iteration"], arrays["anchor"] = np.array(iteration), anchor
        arrays["history"] = np.array([[np.nan if row[name] is None else row[name] for name in HISTORY] for row in history])
        text = json.dumps(account, default=lambda array: array.tolist())
        arrays["account"] = np.frombuffer(text.encode(), dtype=np.uint8)
        fresh = self.path.with_name(self.path.name + ".part")
        try:
            with fresh.open("wb") as file:
                np.savez(file, **arrays)  # type: ignore[arg-type]
                file.flush()
                os.fsync(file.fileno())
            fresh.replace(self.path)
        except OSError as problem:
            fresh.unlink(missing_ok=True)
            raise SolverError(f"The checkpoint {str(self.path)!r} cannot be written: {problem.strerror}.") from None

    def read(self) -> Found | None:
        """The run as it was left; None if there is nothing yet."""
        if self.path is None or not self.path.exists():
            return None
        try:
            with np.load(self.path, allow_pickle=False) as file:
                arrays = dict(file.items())
            account = json.loads(arrays["account"].tobytes())
            counts: dict[str, Any] = {name: np.array(v) if isinstance(v, list) else v for name, v in account["ledger"].items()}
            ledger = Ledger(**counts)
            table, identity = arrays["history"].tolist(), dict(account["identity"])
            history = [{name: _cell(value, name) for name, value in zip(HISTORY, row, strict=True)} for row in table]
            found = Found(int(arrays["iteration"]), ledger, history, arrays["anchor"], {})
        except Exception:  # a damaged archive fails in more ways than zipfile and numpy document
            raise SolverError(f"The checkpoint {str(self.path)!r} cannot be read; delete it to start anew.") from None
        if identity != self.identity:
            other = next(name for name in {**self.identity, **identity} if identity.get(name) != self.identity.get(name))
            raise SolverError(
                f"The checkpoint {str(self.path)!r} is of another run (other {other}); give another path, or delete it to "
                "start anew."
            )
        found.nodes.update({name[5:]: array for name, array in arrays.items() if name.startswith("node.")})
        return found

    def kept(self) -> int | None:
        """The iteration last written."""
        if self.path is None or not self.path.exists():
            return None
        with np.load(self.path, allow_pickle=False) as file:
            return int(file["iteration"])


def _digest(*arrays: Anything | None) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(b"none" if array is None else np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def _digest_of(value: Any) -> str:
    """Short numbers and words as they are; long ones by their digest, so that a thousand clusters take no more room."""
    text = json.dumps(value, default=lambda array: array.tolist())
    return text if len(text) <= 80 else hashlib.sha256(text.encode()).hexdigest()


def _cell(value: float, name: str) -> Any:
    if np.isnan(value):
        return None
    return int(value) if HISTORY[name].is_integer() else value
