"""Shards on a Ray cluster: each shard is an actor, on machines of one owner that share the folder of the shards.

:func:`actors` connects to a cluster and starts an actor for each shard. The coordinator sends records of covey as bytes
(:mod:`covey.records`), as to a site, and an actor returns bytes. Ray itself moves these bytes with pickle between processes
that trust each other, so a Ray cluster is for machines of one owner and not for sites.

The coordinator keeps the messages that each actor has answered. If an actor dies, or its machine does, another actor opens the
shard again and answers these messages once more, so that its state has the same bits. After ``SAVE_EVERY`` messages the state
itself is kept instead of them.
"""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from covey._version import __version__
from covey.errors import CoveyError, DataError
from covey.losses import FAMILIES, from_functions
from covey.losses.functions import FunctionLoss
from covey.nodes.layout import parts_of
from covey.nodes.network import Message
from covey.nodes.requests import PutCoefficients, PutGamma, PutSnapshot, TakeSnapshot
from covey.nodes.shard import OpenRows, ScaleRows, Shard
from covey.nodes.shards import Holder
from covey.problem.problem import Problem
from covey.records import Record, decode, encode

INSTALL_RAY = "in the folder of covey: pip install '.[ray]'"
SAVE_EVERY = 50  # messages after which the state of an actor is fetched
MOST_DEATHS = 3  # of the actor of one shard during one message
_OPENING = (OpenRows, ScaleRows)
_CHANGING = (Message, PutCoefficients, PutGamma)
_PATIENCE = 10.0  # seconds to connect to a cluster
_SHARED = 50_000  # bytes of a message from which on all actors of a machine share one copy


@dataclass(frozen=True)
class Mistake(Record):
    """The reply to a message that raised an error of covey: the name of its class, and its text."""

    kind: str
    text: str


class ShardActor:
    """The process of one shard on a machine of the cluster."""

    def __init__(self, part: str, losses: list[dict[str, Any]]) -> None:
        import covey.fitting.fit  # noqa: F401 - registers the messages of the likelihood
        from covey.solvers.registry import load_all

        load_all()
        for settings in losses:
            from_functions(**settings)
        self.scratch = tempfile.TemporaryDirectory(prefix="covey-", ignore_cleanup_errors=True)
        self.shard = Shard(Path(part), Path(self.scratch.name))

    def about(self) -> tuple[str, str, bool]:
        """The version of covey here, the name of the machine, and whether it can read the shard."""
        return __version__, socket.gethostname(), any(self.shard.part.glob("*.parquet"))

    def answer(self, asked: bytes) -> bytes:
        """Answer one encoded message, request or task."""
        with np.errstate(all="ignore"):  # numbers that are not finite are reported by the coordinator
            try:
                return encode(self.shard.answer(decode(asked)))
            except CoveyError as mistake:
                return encode(Mistake(type(mistake).__name__, str(mistake)))


@dataclass
class Log:
    """What the actor of one shard must answer again after it has died: how its rows were opened, and what came since."""

    opening: list[bytes] = field(default_factory=list)
    since: list[bytes] = field(default_factory=list)

    def add(self, record: Record, text: bytes, reply: Any) -> None:
        """Note an answered message."""
        if isinstance(record, _OPENING):
            self.opening.append(text)
        elif isinstance(record, PutSnapshot):
            self.since = [text]
        elif isinstance(record, TakeSnapshot) and not isinstance(reply, Mistake):
            self.since = [encode(PutSnapshot(reply))]
        elif isinstance(record, _CHANGING):
            self.since.append(text)


@dataclass
class Actors(Holder):
    """The actors of all shards.

    Attributes
    ----------
    parts : the folders of the shards
    start : starts the actor of a shard
    deaths : the number of actors that died, for each shard
    """

    parts: list[Path]
    start: Callable[[Path], Any]
    alive: list[Any] = field(default_factory=list)
    logs: list[Log] = field(default_factory=list)
    deaths: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.alive = [self.start(part) for part in self.parts]
        self.logs, self.deaths = [Log() for _ in self.parts], [0] * len(self.parts)
        for at, found in self._replies(dict.fromkeys(range(self.count), ("about",))):
            if isinstance(found, CoveyError):
                raise found
            version, machine, there = found
            if version != __version__:
                raise CoveyError(
                    f"The machine {machine!r} has covey {version}, and this one has {__version__}; install the same version."
                )
            if not there:
                raise DataError(
                    f"The machine {machine!r} cannot read {str(self.parts[at])!r}; put the shards into a folder that all "
                    "machines of the cluster share, under the same path."
                )

    @property
    def count(self) -> int:
        return len(self.parts)

    def ask(self, asked: Mapping[int, Record]) -> Iterator[Any]:
        texts = {id(record): encode(record) for record in asked.values()}
        sent = {name: text if len(text) < _SHARED else _ray().put(text) for name, text in texts.items()}
        arriving = self._replies({at: ("answer", sent[id(record)]) for at, record in asked.items()})
        early = dict[int, Any]()  # replies, and errors, of shards whose turn has not come
        for turn in asked:
            while turn not in early:
                at, found = next(arriving)
                early[at] = self._noted(at, asked[at], texts[id(asked[at])], found)
            reply = early.pop(turn)
            if isinstance(reply, CoveyError):  # the other shards answer too, which their logs must say
                for at, found in arriving:
                    self._noted(at, asked[at], texts[id(asked[at])], found)
                raise reply
            yield reply
        full = [at for at in asked if len(self.logs[at].since) >= SAVE_EVERY]
        if full:
            list(self.ask(dict.fromkeys(full, TakeSnapshot())))

    def _noted(self, at: int, record: Record, text: bytes, found: Any) -> Any:
        """The decoded reply to a record, or the error in its place; the log notes that the actor has answered."""
        if isinstance(found, CoveyError):
            return found
        reply = decode(found)
        self.logs[at].add(record, text, reply)
        return _error_of(reply) if isinstance(reply, Mistake) else reply

    def _replies(self, calls: Mapping[int, tuple[Any, ...]]) -> Iterator[tuple[int, Any]]:
        """Call a method of some actors, all at once; yield the numbers of the shards and the replies as they arrive.

        An actor that dies is replaced while the others work. An error takes the place of a reply that does not come.
        """
        ray = _ray()
        waiting = {self._call(at, *call): at for at, call in calls.items()}
        deaths = dict.fromkeys(calls, 0)
        while waiting:
            ray.wait(list(waiting), num_returns=1)
            for done in ray.wait(list(waiting), num_returns=len(waiting), timeout=0)[0]:
                at = waiting.pop(done)
                try:
                    found = ray.get(done)
                except (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError) as problem:  # the actor, or its reply
                    deaths[at], self.deaths[at] = deaths[at] + 1, self.deaths[at] + 1
                    if deaths[at] < MOST_DEATHS:
                        waiting[self._again(at, calls[at])] = at
                        continue
                    found = CoveyError(
                        f"The actor of {self.parts[at].name} has died {MOST_DEATHS} times in a row ({_first_line(problem)}); "
                        "if it ran out of memory, write more and smaller shards."
                    )
                except ray.exceptions.RayTaskError as problem:
                    failed = f"{type(problem.cause).__name__}: {_first_line(problem.cause)}"
                    found = CoveyError(f"The actor of {self.parts[at].name} has failed ({failed}).")
                except ray.exceptions.RayError as problem:
                    found = CoveyError(f"Ray cannot carry out a message: {_first_line(problem)}.")
                yield at, found

    def _call(self, at: int, method: str, *arguments: Any) -> Any:
        """Call a method of an actor, which answers in the order of the calls."""
        return getattr(self.alive[at], method).remote(*arguments)

    def _again(self, at: int, call: tuple[Any, ...]) -> Any:
        """Start another actor of a shard, bring it up to date, and call its method again."""
        _ray().kill(self.alive[at])  # it may live, if only its reply is lost
        self.alive[at] = self.start(self.parts[at])
        for text in (*self.logs[at].opening, *self.logs[at].since):
            self._call(at, "answer", text)
        return self._call(at, *call)

    def close(self) -> None:
        for actor in self.alive:
            _ray().kill(actor)
        self.alive = []


@contextmanager
def actors(folder: str | Path, draft: Problem, address: str | None = None) -> Iterator[Actors]:
    """Start an actor for each shard of a folder, and end them after the context.

    Parameters
    ----------
    folder : the shards; all machines of the cluster read them under this path
    draft : the problem; a loss that is not covey's own is sent to the actors
    address : address of the cluster, such as ``"auto"`` or ``"ray://head:10001"``; not used if this process is connected to
        one already. By default the cluster that this process
        is connected to, or the one in ``RAY_ADDRESS``, or else a new one on this machine, which ends with the context
    """
    ray = _ray()
    parts = [part.resolve() for part in parts_of(Path(folder))]
    mine = not ray.is_initialized()
    if mine:
        quiet: dict[str, Any] = {"log_to_driver": False, "configure_logging": False, "include_dashboard": False}
        try:
            _connect_once(address)
            # Without "local" Ray would look for a cluster that somebody else has started here, and wait for one that is gone.
            chosen = address or (None if "RAY_ADDRESS" in os.environ else "local")
            ray.init(address=chosen, **(quiet if address is None else {"log_to_driver": False}))
        except (OSError, ValueError, RuntimeError) as problem:
            where = "a new Ray cluster" if address is None else f"the Ray cluster at {address!r}"
            raise CoveyError(f"{where[0].upper()}{where[1:]} cannot be reached: {_first_line(problem)}.") from None
    try:
        losses = _own_losses(draft)
        actor = ray.remote(num_cpus=0, max_restarts=0, scheduling_strategy="SPREAD")(ShardActor)
        holder = Actors(parts, lambda part: actor.remote(str(part), losses))
        try:
            yield holder
        finally:
            holder.close()
    finally:
        if mine:
            ray.shutdown()


def _connect_once(address: str | None) -> None:
    """Raise an error at once if nobody answers at ``host:port``; Ray itself would try again for minutes."""
    host, colon, port = (address or "").removeprefix("ray://").rpartition(":")
    if colon and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=_PATIENCE).close()


def _own_losses(draft: Problem) -> list[dict[str, Any]]:
    """What registers the loss of a problem in an actor, if it is a user's own."""
    loss: Any = FAMILIES[draft.loss.name]
    if not issubclass(loss, FunctionLoss):
        return []
    return [{"name": loss.name, "bounds": loss.curvature, "two_classes": loss.two_classes, **loss.functions}]


def _error_of(mistake: Mistake) -> CoveyError:
    """The error of covey that an actor reports."""
    import covey.errors

    kind = getattr(covey.errors, mistake.kind, CoveyError)
    return kind(mistake.text) if isinstance(kind, type) and issubclass(kind, CoveyError) else CoveyError(mistake.text)


def _first_line(problem: BaseException) -> str:
    lines = [line for line in str(problem).strip().splitlines() if line.strip()]
    return (lines or [type(problem).__name__])[0].strip().rstrip(".")


def _ray() -> Any:
    if find_spec("ray") is None:
        raise CoveyError(f"engine='ray' needs the package ray; {INSTALL_RAY}.")
    import ray

    return ray
