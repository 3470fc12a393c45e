"""One shard: a part of a table that has all rows of its clients, and is a node whose rows are mapped from disk.

A :class:`Shard` is where its rows are read: in this process, or in an actor on another machine (:mod:`covey.engines.ray`). It
carries out tasks until its rows are open (:class:`FindValues`, :class:`FindSums`, :class:`OpenRows`), and then what a node is
asked. A message reads the rows, and the system takes their memory back when it needs it. Only the coefficients and sums of
clients stay in memory.
"""

from __future__ import annotations

import json
import os
import tempfile
from contextlib import suppress
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any, Generic

import narwhals as nw
import numpy as np
import polars as pl

from covey._typing import Floats, Ints
from covey.errors import DataError, SolverError
from covey.exact import Exact
from covey.nodes.network import Message, Node, R, Request
from covey.problem.problem import Problem
from covey.problem.rows import Arrays, read_part, usable_rows, used_columns
from covey.records import Record
from covey.tables.rows import GroupedData
from covey.tables.scaling import Scale, moments

_ARRAYS = ("X", "y", "weights", "offset")


@dataclass
class Shard:
    """The rows of a shard, and the node that they become.

    Attributes
    ----------
    part : folder with its Parquet files
    scratch : folder for the files of arrays, which are deleted as soon as they are mapped
    node : the node, once the rows are open
    """

    part: Path
    scratch: Path
    node: Node | None = None

    def answer(self, asked: Record) -> Any:
        """Carry out a task of the shard, or a message or a request to its node."""
        if isinstance(asked, Task):
            return asked.at(self)
        if self.node is None or not isinstance(asked, Message | Request):
            raise SolverError(f"The shard {self.part.name} is asked for {type(asked).__name__} before its rows are open.")
        reply = asked.at(self.node)
        _release(self.node)
        return reply

    @property
    def files(self) -> pl.LazyFrame:
        return pl.scan_parquet(self.part / "*.parquet")

    def mapped(self, data: GroupedData) -> GroupedData:
        """The same rows, with their large arrays mapped from files."""
        there: dict[str, Any] = {name: getattr(data, name) for name in _ARRAYS}
        mapped: dict[str, Any] = {name: self.map(array) for name, array in there.items() if array is not None}
        return replace(data, **mapped)

    def map(self, array: Floats) -> Floats:
        """An array, mapped from a file."""
        handle, path = tempfile.mkstemp(suffix=".npy", dir=self.scratch)
        os.close(handle)
        np.save(path, array)
        found: Floats = np.load(path, mmap_mode="r")
        with suppress(OSError):  # where a mapped file cannot be deleted, it goes with its folder
            os.unlink(path)
        return found


def _release(node: Node) -> None:
    """Forget copies of rows. Sums of clients are small and stay."""
    for name, entry in list(node.cache.items()):
        if any(isinstance(each, GroupedData) for each in (entry if isinstance(entry, tuple) else (entry,))):
            del node.cache[name]


class Task(Record, Generic[R]):
    """What a shard is asked to do with its files."""

    def at(self, shard: Shard) -> R:
        raise NotImplementedError


@dataclass(frozen=True)
class FindValues(Task["FoundValues"]):
    """Find the distinct values of some columns in the rows that count for a draft (:func:`packed`)."""

    draft: str
    names: tuple[str, ...]

    def at(self, shard: Shard) -> FoundValues:
        table = _counted(shard.files, unpacked(self.draft))
        values = {name: to_bytes(_distinct(table, name)) for name in self.names}
        return FoundValues(not table.head(1).collect(engine="streaming").is_empty(), values)


@dataclass(frozen=True)
class FoundValues(Record):
    """Whether any rows count, and the values of each column (:func:`to_bytes`)."""

    usable: bool
    values: dict[str, bytes]


@dataclass(frozen=True)
class FindSums(Task[Exact | None]):
    """Sum what functions such as ``scale(x)`` learn from rows; None if no rows count."""

    problem: str

    def at(self, shard: Shard) -> Exact | None:
        problem = unpacked(self.problem)
        rows = _counted(shard.files, problem).collect()
        if not len(rows):
            return None
        found: Exact = problem.design.sums(usable_rows(nw.from_native(rows, eager_only=True), problem, Arrays())[0])  # type: ignore[union-attr]
        return found


@dataclass(frozen=True)
class OpenRows(Task["OpenedRows | None"]):
    """Code the rows as a problem says, under the clusters of all shards; None if all rows are left out."""

    problem: str
    clusters: bytes

    def at(self, shard: Shard) -> OpenedRows | None:
        problem = unpacked(self.problem)
        data = self._read(shard, problem)
        if data is None:
            return None
        found = moments(data.X) if problem.spec.standardize else None
        tree, weights = data.hierarchy, data.weights
        weighty = weights is None or bool(weights.any())
        opened = OpenedRows(data.n_rows, to_bytes(tree.client_ids), tree.sizes, float(data.y.sum()), weighty, found)
        shard.node = Node(shard.mapped(data), problem.loss, np.ones(data.n_clients))
        return opened

    def _read(self, shard: Shard, problem: Problem) -> GroupedData | None:
        table = shard.files
        schema = table.collect_schema().names()
        names = [name for name in dict.fromkeys([*used_columns(problem), *problem.design.columns]) if name in schema]
        table = table.select(names)
        if problem.spec.na == "drop" and not len(table.fill_nan(None).drop_nulls().head(1).collect()):
            return None
        try:
            return read_part(table.collect(), problem, from_bytes(self.clusters), weighed=False)
        except DataError as mistake:
            raise DataError(f"{str(mistake).rstrip('.')} (the row is in {shard.part.name}).") from None


@dataclass(frozen=True)
class OpenedRows(Record):
    """What the coordinator needs to know of open rows.

    Attributes
    ----------
    rows : their number
    clients : the ids of the clients (:func:`to_bytes`)
    sizes : (k,) the number of clients in each cluster
    y : the sum of the responses
    weighty : whether a row has a positive weight
    moments : sums of columns and squares, if terms are standardised
    """

    rows: int
    clients: bytes
    sizes: Ints
    y: float
    weighty: bool
    moments: Exact | None


@dataclass(frozen=True)
class ScaleRows(Task[None]):
    """Standardise the open rows."""

    scale: Scale

    def at(self, shard: Shard) -> None:
        if shard.node is not None:
            data = shard.node.data
            shard.node.data = replace(data, X=shard.map(self.scale.rows(data).X))


def packed(problem: Problem) -> str:
    """A problem as text."""
    return json.dumps(problem.to_json())


def unpacked(text: str) -> Problem:
    """The problem that :func:`packed` wrote."""
    return Problem.from_json(json.loads(text))


def to_bytes(values: pl.Series) -> bytes:
    """A column as bytes, with its type.

    >>> from_bytes(to_bytes(pl.Series(["b", None], dtype=pl.Enum(["b", "a"])))).dtype
    Enum(categories=['b', 'a'])
    """
    file = BytesIO()
    values.alias("values").to_frame().write_ipc(file)
    return file.getvalue()


def from_bytes(text: bytes) -> pl.Series:
    """The column that :func:`to_bytes` wrote."""
    return pl.read_ipc(BytesIO(text))["values"]


def _counted(table: pl.LazyFrame, problem: Problem) -> pl.LazyFrame:
    """The rows that count, as :func:`usable_rows` chooses them, so that no category is only in rows that are left out."""
    schema, spec = table.collect_schema(), problem.spec
    names = [name for name in used_columns(problem) if name in schema]
    if spec.na == "drop":
        table = table.filter(pl.col(name).is_not_null() for name in names)
        table = table.filter(pl.col(name).is_not_nan() for name in names if schema[name].is_float())
    if spec.frequency in names and schema[spec.frequency].is_numeric():
        table = table.filter(pl.col(spec.frequency) != 0)
    return table


def _distinct(table: pl.LazyFrame, name: str) -> pl.Series:
    return table.select(pl.col(name).unique()).collect(engine="streaming")[name]
