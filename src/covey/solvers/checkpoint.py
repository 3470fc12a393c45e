"""A run on disk: one file of plain arrays, written whole or not at all; reading it executes nothing.

The file says which run it belongs to (algorithm, seed, probabilities, step, a digest of data and penalties), and only that run
goes on from it.
"""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from covey._typing import Floats
from covey.data import GroupedData
from covey.errors import SolverError
from covey.ledger import Ledger
from covey.objective import Penalty

FORMAT = 1


@dataclass(frozen=True)
class Found:
    """Where a run was: the nodes' arrays, what the coordinator remembered, the account so far."""

    iteration: int
    ledger: Ledger
    history: list[dict[str, Any]]
    nodes: dict[str, Floats]
    guide: dict[str, Floats]


@dataclass(frozen=True)
class Checkpoint:
    """Where a run is kept; with no path, nowhere."""

    path: Path | None
    identity: str

    @classmethod
    def at(cls, path: str | Path | None, recipe: dict[str, Any], data: GroupedData, penalty: Penalty) -> Checkpoint:
        if path is None:
            return cls(None, "")
        target = Path(path)
        if target.is_dir() or not target.parent.is_dir():
            raise SolverError(f"The checkpoint {str(path)!r} must be a file in a folder that exists.")
        digest = hashlib.sha256()
        for part in (data.X, data.y, data.weights, data.offset, data.client_ptr, penalty.gamma, penalty.lam):
            if part is not None:
                digest.update(np.ascontiguousarray(part).data)
        identity = {"format": FORMAT, "data": digest.hexdigest(), **recipe}
        return cls(target, json.dumps(identity, sort_keys=True, default=_plain))

    def write(
        self, iteration: int, ledger: Ledger, history: list[dict[str, Any]], nodes: dict[str, Floats], guide: dict[str, Floats]
    ) -> None:
        if self.path is None:
            return
        text = {
            "identity": self.identity,
            "iteration": str(iteration),
            "history": json.dumps(history),
            "ledger": json.dumps({**asdict(ledger), "within": ledger.within.tolist()}),
        }
        arrays = {f"node.{name}": array for name, array in nodes.items()} | {
            f"guide.{name}": array for name, array in guide.items()
        }
        fresh = self.path.with_name(self.path.name + ".part")
        with fresh.open("wb") as file:
            np.savez(file, **{name: np.array(value) for name, value in text.items()}, **arrays)  # type: ignore[arg-type]
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(self.path)

    def read(self) -> Found | None:
        """The run as it was left; None if there is nothing yet."""
        if self.path is None or not self.path.exists():
            return None
        try:
            with np.load(self.path, allow_pickle=False) as file:
                arrays = dict(file.items())
            identity, iteration = str(arrays["identity"]), int(str(arrays["iteration"]))
            history, counts = json.loads(str(arrays["history"])), json.loads(str(arrays["ledger"]))
            ledger = Ledger(**{**counts, "within": np.array(counts["within"])})
        except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile):
            raise SolverError(f"The checkpoint {str(self.path)!r} cannot be read; delete it to start anew.") from None
        if identity != self.identity:
            raise SolverError(
                f"The checkpoint {str(self.path)!r} is of another run ({_difference(identity, self.identity)}); "
                "give another path, or delete it to start anew."
            )
        parts: dict[str, dict[str, Floats]] = {"node": {}, "guide": {}}
        for name, array in arrays.items():
            owner, _, field = name.partition(".")
            if field:
                parts[owner][field] = array
        return Found(iteration, ledger, history, parts["node"], parts["guide"])

    def kept(self) -> int | None:
        """The iteration last written."""
        found = self.read()
        return None if found is None else found.iteration


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else str(value)


def _difference(theirs: str, ours: str) -> str:
    """The first setting that differs, in words."""
    old, new = json.loads(theirs), json.loads(ours)
    for name in new:
        if old.get(name) != new[name]:
            return "other data or penalties" if name == "data" else f"other {name}"
    return "other settings"
