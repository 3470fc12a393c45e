"""The rows of a table in shards, each with all rows of its clients. Every family and every solver can use them.

:func:`.lay_out` partitions a table into shards (:mod:`covey.nodes.layout`). :func:`open_shards` makes a node of each shard
(:mod:`covey.nodes.shard`). A :class:`Holder` has the shards: :class:`Here` in this process, one
after the other, or actors on a cluster, all at once (:mod:`covey.engines.ray`). Replies are added in the order of the shards,
so that the same shards give the same bits with any holder.
"""

from __future__ import annotations

import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import reduce
from importlib import import_module
from operator import add
from pathlib import Path
from typing import Any

import narwhals as nw
import numpy as np
import polars as pl

from covey._typing import Anything, Ints, Say, silent
from covey.errors import CoveyError, DataError, one_of, unknown_column
from covey.losses import Loss
from covey.nodes.layout import is_shards, manifest_of, parts_of
from covey.nodes.network import Arrived, Message, Network, Node, R, Request
from covey.nodes.shard import FindSums, FindValues, OpenedRows, OpenRows, ScaleRows, Shard, from_bytes, packed, to_bytes
from covey.problem.problem import Classes, Problem, Schema
from covey.problem.rows import columns_of, encode_response, used_columns
from covey.records import Record
from covey.tables.formula import ParsedFormula
from covey.tables.rows import GroupedData, group_ids
from covey.tables.scaling import Scale
from covey.tree.hierarchy import Hierarchy, as_labels

ENGINES = ("ray",)
"""Modules of ``covey.engines`` that hold shards elsewhere."""


class Holder(ABC):
    """Where the shards of a network are held."""

    @property
    @abstractmethod
    def count(self) -> int:
        """The number of shards."""

    @abstractmethod
    def ask(self, asked: Mapping[int, Record]) -> Iterator[Any]:
        """Ask shards, given by their numbers, and yield their replies in the same order."""

    @abstractmethod
    def close(self) -> None:
        """Release what the shards use."""


@dataclass
class Here(Holder):
    """Shards in this process, which are asked one after the other."""

    shards: tuple[Shard, ...]
    scratch: tempfile.TemporaryDirectory[str] | None = None

    @classmethod
    def at(cls, folder: Path) -> Here:
        """The shards of a folder; their arrays are in a hidden folder there."""
        scratch = tempfile.TemporaryDirectory(prefix=".covey-", dir=folder, ignore_cleanup_errors=True)
        return cls(tuple(Shard(part, Path(scratch.name)) for part in parts_of(folder)), scratch)

    @property
    def count(self) -> int:
        return len(self.shards)

    def ask(self, asked: Mapping[int, Record]) -> Iterator[Any]:
        for at, record in asked.items():
            yield self.shards[at].answer(record)

    def close(self) -> None:
        if self.scratch is not None:
            self.scratch.cleanup()


@dataclass
class Shards(Network):
    """A network with a node for each shard. Build it with :func:`open_shards`.

    Attributes
    ----------
    holder : who has the shards
    parts : the numbers of the shards that have rows; replies are added in this order
    whole : all clients, in the order of a table in memory
    where : for each of these shards, the positions of its clients in ``whole``
    occupied : (shards, k) which clusters have clients in each of them
    say : receives the number of shards that have answered a message
    """

    holder: Holder
    parts: tuple[int, ...]
    whole: Hierarchy
    where: tuple[Ints, ...]
    occupied: Anything
    names: tuple[str, ...]
    family: Loss
    say: Say = silent
    _arrived: list[Arrived] = field(default_factory=list)

    @classmethod
    def open(cls, holder: Holder, folder: Path, draft: Problem, say: Say = silent) -> tuple[Shards, Problem]:
        """Open the rows of all shards as a draft says, and complete the draft."""
        say("looking at the shards")
        problem, clusters = agree(folder, holder, draft)
        opened: dict[int, OpenedRows] = {}
        say("reading the shards")
        for at, found in enumerate(_all(holder, OpenRows(packed(problem), to_bytes(clusters)))):
            say(done=at + 1, of=holder.count)
            if found is not None:
                opened[at] = found
        if not opened:
            raise DataError("Every row has a missing value, so na='drop' leaves no row.")
        if problem.spec.standardize:
            total = reduce(add, [each.moments for each in opened.values() if each.moments is not None])
            scale = Scale.of(total, sum(each.rows for each in opened.values()), problem.terms)
            problem = problem.scaled(scale)
            list(holder.ask(dict.fromkeys(opened, ScaleRows(scale))))
        _check_whole(opened.values(), problem)
        ids = [from_bytes(each.clients) for each in opened.values()]
        sizes = np.array([each.sizes for each in opened.values()])
        nested = bool(problem.spec.nested) and problem.spec.cluster is not None
        network = cls._of(holder, tuple(opened), ids, sizes, clusters, nested, problem.terms, problem.loss)
        return replace(network, say=say), problem

    @classmethod
    def of(cls, parts: Sequence[GroupedData], loss: Loss) -> Shards:
        """A network of grouped rows, each part with all rows of its clients and with the clusters of all parts."""
        nodes = [Node(part, loss, np.ones(part.n_clients)) for part in parts]
        trees = [part.hierarchy for part in parts]
        ids, sizes = [tree.client_ids for tree in trees], np.array([tree.sizes for tree in trees])
        holder = Here(tuple(Shard(Path(), Path(), node) for node in nodes))
        places = tuple(range(len(parts)))
        return cls._of(holder, places, ids, sizes, trees[0].cluster_ids, trees[0].nested, parts[0].terms, loss)

    @classmethod
    def _of(
        cls,
        holder: Holder,
        parts: tuple[int, ...],
        ids: Sequence[pl.Series],
        sizes: Ints,
        clusters: pl.Series,
        nested: bool,
        terms: tuple[str, ...],
        loss: Loss,
    ) -> Shards:
        clients = pl.concat(ids)
        parent = np.concatenate([np.repeat(np.arange(len(clusters)), each) for each in sizes])
        order, _, whole = group_ids(clients, clusters.gather(parent), len(clients), nested)
        place = np.arange(len(clients))
        if order is not None:
            place[order] = np.arange(len(clients))
        where = tuple(np.split(place, np.cumsum(sizes.sum(axis=1))[:-1]))
        return cls(holder, parts, whole, where, sizes > 0, terms, loss)

    @property
    def tree(self) -> Hierarchy:
        return self.whole

    @property
    def terms(self) -> tuple[str, ...]:
        return self.names

    @property
    def loss(self) -> Loss:
        return self.family

    def send(self, message: Message[Any]) -> None:
        self._arrived.append(Arrived(message, self.ask(message)))

    def collect(self) -> list[Arrived]:
        arrived, self._arrived = self._arrived, []
        return arrived

    def ask(self, message: Message[Any]) -> Any:
        total, cells = None, message.cells
        asked = {at: message for at, j in zip(self.parts, self.occupied, strict=True) if cells is None or j[cells].any()}
        for at, reply in enumerate(self.holder.ask(asked)):
            total = reply if total is None else total + reply
            self.say(done=at + 1, of=len(asked))
        return total

    @property
    def places(self) -> Sequence[Ints]:
        return self.where

    def each(self, requests: Sequence[Request[R]]) -> list[R]:
        return list(self.holder.ask(dict(zip(self.parts, requests, strict=True))))


@contextmanager
def open_shards(
    folder: str | Path, draft: Problem, *, engine: str | None = None, address: str | None = None, say: Say = silent
) -> Iterator[tuple[Shards, Problem]]:
    """Read shards as a draft says, complete the draft, and release the shards after the context.

    Parameters
    ----------
    folder : the shards, from :func:`lay_out`
    draft : the problem, from :func:`resolve`
    engine : None for shards in this process, or one of ``ENGINES``
    address : address of the cluster of the engine
    say : receives the current step, and how many shards have done it

    Returns
    -------
    The network and the problem.
    """
    check_engine(folder, engine, address)
    folder = Path(folder)
    _check_client(folder, draft)
    held: AbstractContextManager[Holder]
    if engine is None:
        held = closing(Here.at(folder))
    else:  # loaded by its name, so that the core depends on no engine
        held = import_module(f"covey.engines.{engine}").actors(folder, draft, address)
    with held as holder:
        yield Shards.open(holder, folder, draft, say)


def check_engine(table: Any, engine: str | None, address: str | None) -> None:
    """Refuse an unknown engine, one for a table that is not in shards, and an address without an engine."""
    if engine is None and address is not None:
        raise CoveyError(f"The address {address!r} is that of an engine's cluster; add engine='ray', or leave it out.")
    if engine is not None and engine not in ENGINES:
        raise one_of("engine", engine, ENGINES)
    if engine is not None and not is_shards(table):
        what = f"{str(table)!r} is none" if isinstance(table, str | Path) else "this is a table"
        raise DataError(f"engine={engine!r} needs a folder of shards, and {what}; write one with covey shard.")


def _all(holder: Holder, asked: Record) -> Iterator[Any]:
    """The replies of all shards."""
    return holder.ask(dict.fromkeys(range(holder.count), asked))


# From files to nodes


def _check_client(folder: Path, draft: Problem) -> None:
    """Refuse shards that are not by the clients of a draft, or have no rows."""
    client = manifest_of(folder)["client"]
    if draft.spec.client is None:
        raise DataError(
            f"The shards are by {client!r} and the model has no clients; add client={client!r} or a term (1 | {client})."
        )
    if draft.spec.client != client:
        raise DataError(f"The shards are by {client!r} and the clients are {draft.spec.client!r}; write them again.")
    if not parts_of(folder):
        raise DataError("The table has no rows; covey needs at least one.")


def agree(folder: Path, holder: Holder, draft: Problem) -> tuple[Problem, pl.Series]:
    """Complete a draft from all shards: categories, classes, what functions such as ``scale(x)`` learn, and the clusters."""
    spec, formula = draft.spec, draft.formula
    if formula is None or formula.response is None:
        raise DataError("Shards need a formula that names the response, such as 'y ~ x + (1 | county)'.")
    schema = pl.scan_parquet(parts_of(folder)[0] / "*.parquet").collect_schema()
    for name in used_columns(draft):
        if name not in schema and name != formula.response:
            raise unknown_column(name, schema.names())
    wrapped = {name for factor in formula.right.factors for name in factor.names()[1]}
    held = [
        name for name in formula.right.names if name in wrapped or not (schema[name].is_numeric() or schema[name] == pl.Boolean)
    ]
    response = _response_with_classes(formula, draft, schema)
    names = tuple(dict.fromkeys(filter(None, (*held, response, spec.cluster))))
    found = list(_all(holder, FindValues(packed(draft), names)))
    if spec.na == "drop" and not any(each.usable for each in found):
        raise DataError("Every row has a missing value, so na='drop' leaves no row.")
    values = {name: pl.concat([from_bytes(each.values[name]) for each in found]).unique() for name in names}
    length = max([1, *(len(values[name]) for name in held)])
    small = {name: _padded(values[name], length) if name in held else pl.Series([1.0] * length) for name in schema.names()}
    columns, categories = columns_of(nw.from_native(pl.DataFrame(small), eager_only=True), draft)
    classes = None
    if draft.loss.two_classes:
        found_classes: Any = np.array([0, 1])
        if response is not None:
            present = values[response].drop_nulls() if spec.na == "drop" else values[response]
            found_classes = encode_response(present, draft.loss)[1]
        classes = Classes.of(found_classes)
    problem = _learned(draft.agree(Schema(columns, categories, classes, draft.names_offset)), holder)
    if spec.cluster is None:
        return problem, pl.Series(["all"])
    return problem, as_labels(values[spec.cluster].drop_nulls(), "cluster").unique().sort()


def _response_with_classes(formula: ParsedFormula, draft: Problem, schema: pl.Schema) -> str | None:
    """The column of the response, if it has two classes that must be found."""
    if not draft.loss.two_classes or formula.counts or draft.spec.trials is not None:
        return None
    name = (formula.response or "").strip("`")
    if name not in schema:
        raise unknown_column(name, schema.names())
    return name


def _padded(values: pl.Series, length: int) -> pl.Series:
    """A column of this length that has these values, and the first of them several times."""
    return values.gather(np.minimum(np.arange(length), len(values) - 1))


def _learned(problem: Problem, holder: Holder) -> Problem:
    """The problem after all that its functions learn from the rows of all shards."""
    design: Any = problem.design
    for _, _, call in getattr(design, "unlearned", ()):
        if call.spline:
            raise DataError(f"{call.text} takes its knots from all rows at once; write {call.example()}.")
    while problem.learning:
        total = None
        for found in _all(holder, FindSums(packed(problem))):
            total = found if total is None else total if found is None else total + found
        if total is None:
            break
        problem = problem.learn(total)
    return problem


def _check_whole(opened: Iterable[OpenedRows], problem: Problem) -> None:
    """Refuse what only all shards together show: responses that do not determine a model."""
    problem.loss.check_total(sum(each.y for each in opened))
    if not any(each.weighty for each in opened):
        raise DataError("All weights are zero; give at least one row a positive weight.")
