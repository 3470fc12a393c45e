"""Nodes on disk: the rows of a table in shards, each with all rows of its clients. Every family and every solver can use them.

:func:`lay_out` partitions a table into shards of Parquet files by a hash of the client, once, in a stream. :meth:`Shards.open`
codes the rows of each shard as the problem says and writes them to arrays on disk. Each shard is then a node whose rows are
mapped from these arrays: a message reads them, and the system takes their memory back when it needs it. Only the coefficients
and sums of clients stay in memory.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from glob import glob
from pathlib import Path
from typing import Any

import narwhals as nw
import numpy as np
import polars as pl

from covey._typing import Floats, Ints
from covey.errors import DataError, unknown_column
from covey.losses import Loss
from covey.nodes.network import Arrived, Message, Network, Node
from covey.problem.problem import Classes, Problem, Schema
from covey.problem.rows import columns_of, encode_response, read_part, used_columns
from covey.tables.formula import ParsedFormula
from covey.tables.rows import GroupedData, group_ids
from covey.tables.scaling import Scale, moments
from covey.tree.hierarchy import Hierarchy, as_labels

MANIFEST = "shards.json"
_FORMAT = 1
_ROWS_OF_A_SHARD = 2_000_000
_ARRAYS = ("X", "y", "weights", "offset")
Say = Callable[[str], None]


def lay_out(
    table: pl.LazyFrame, folder: str | Path, client: str, shards: int | None = None, *, source: str | Path | None = None
) -> Path:
    """Partition a table into shards by a hash of the client, in a stream.

    Parameters
    ----------
    table : the table
    folder : where the shards are written; must not exist, or be empty, or have the shards of this table
    client : the column of clients
    shards : their number; by default one for every two million rows
    source : the file, folder or pattern that the table was scanned from; without it no shards count as those of this table

    Returns
    -------
    The folder. If it has the shards of these files by this column already, nothing is done.
    """
    folder, names = Path(folder), table.collect_schema().names()
    if client not in names:
        raise unknown_column(client, names)
    facts = None if source is None else _fingerprint(table, source)
    if (folder / MANIFEST).is_file():
        _check_same(folder, client, shards, facts)
        return folder
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise DataError(f"{str(folder)!r} exists and has no shards of covey; give a new folder.")
    if shards is not None and shards < 1:
        raise DataError(f"The number of shards must be at least 1. Got {shards} instead.")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        if shards is None:
            rows = int(table.select(pl.len()).collect(engine="streaming").item())
            shards = max(1, -(-rows // _ROWS_OF_A_SHARD))
        key = "shard"
        while key in names:  # the files leave out the column with the name of the key
            key += "_"
        by_hash = (pl.col(client).hash(seed=20) % shards).alias(key)
        target = pl.PartitionBy(folder, key=by_hash, include_key=False)
        table.sink_parquet(target, mkdir=True, engine="streaming")
    except (pl.exceptions.PolarsError, OSError) as problem:
        shutil.rmtree(folder, ignore_errors=True)
        raise DataError(f"The shards cannot be written to {str(folder)!r}: {_first_line(problem)}.") from None
    # The manifest is written last: a folder without it is not complete.
    manifest = {"format": _FORMAT, "client": client, "shards": shards, "key": key, "table": facts}
    (folder / MANIFEST).write_text(json.dumps(manifest) + "\n")
    return folder


def _fingerprint(table: pl.LazyFrame, source: str | Path) -> dict[str, Any]:
    """What tells whether a table is the one of some shards: its files with sizes and times, its columns and number of rows."""
    path = Path(source)
    matching = [path] if path.is_file() else map(Path, glob(str(path), recursive=True))
    try:
        files = sorted(path.rglob("*.parquet") if path.is_dir() else matching)
        facts = [[str(each.resolve()), each.stat().st_size, each.stat().st_mtime_ns] for each in files]
        rows = int(table.select(pl.len()).collect(engine="streaming").item())
    except (pl.exceptions.PolarsError, OSError) as problem:
        raise DataError(f"The files {str(source)!r} cannot be read: {_first_line(problem)}.") from None
    return {"files": facts, "columns": [[name, str(kind)] for name, kind in table.collect_schema().items()], "rows": rows}


def _first_line(problem: Exception) -> str:
    return str(problem).strip().splitlines()[0].rstrip(".")


def _check_same(folder: Path, client: str, shards: int | None, table: dict[str, Any] | None) -> None:
    """Refuse a folder whose shards are not those that are asked for."""
    found, fix = manifest_of(folder), "give another folder, or remove this one first"
    if found["client"] != client:
        raise DataError(f"{str(folder)!r} has shards by {found['client']!r}, not by {client!r}; {fix}.")
    if shards not in (None, found["shards"]):
        raise DataError(f"{str(folder)!r} has {found['shards']} shards, not {shards}; {fix}.")
    if table is None or found["table"] != table:
        raise DataError(f"{str(folder)!r} has shards of another table, or of these files before they changed; {fix}.")


def manifest_of(folder: Path) -> dict[str, Any]:
    """The manifest of a folder of shards."""
    try:
        found = json.loads((folder / MANIFEST).read_text())
        kinds = {"client": str, "key": str, "shards": int, "table": dict | None}
        if found["format"] == _FORMAT and all(isinstance(found[name], kind) for name, kind in kinds.items()):
            return dict(found)
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise DataError(f"{str(folder)!r} has no readable {MANIFEST}; write the shards again with covey shard.")


def is_shards(path: Any) -> bool:
    """Whether a path is a folder of shards."""
    return isinstance(path, str | Path) and (Path(path) / MANIFEST).is_file()


def parts_of(folder: Path) -> list[Path]:
    """The folders of the shards that have rows, in order."""
    start = f"{manifest_of(folder)['key']}="
    found = [each for each in folder.iterdir() if each.name.startswith(start) and each.is_dir()]
    return sorted(found, key=lambda each: int(each.name.removeprefix(start)))


def column_names(folder: str | Path) -> list[str]:
    """The columns of the table in a folder of shards."""
    return pl.scan_parquet(parts_of(Path(folder))[0] / "*.parquet").collect_schema().names()


@dataclass
class Shards(Network):
    """A network with a node for each shard. Build it with :meth:`open`.

    Attributes
    ----------
    parts : the nodes, in order; replies are added in this order, so that the same shards give the same bits
    whole : all clients, in the order of a table in memory
    places : for each node, the positions of its clients in ``whole``
    """

    parts: tuple[Node, ...]
    whole: Hierarchy
    places: tuple[Ints, ...]
    scratch: tempfile.TemporaryDirectory[str] | None = None
    say: Say | None = None
    _arrived: list[Arrived] = field(default_factory=list)

    @classmethod
    def open(cls, folder: str | Path, draft: Problem, *, say: Say | None = None) -> tuple[Shards, Problem]:
        """Read shards as a draft says, and complete the draft.

        Parameters
        ----------
        folder : the shards, from :func:`lay_out`
        draft : the problem, from :func:`resolve`
        say : called with a line about the current step

        Returns
        -------
        The network and the problem.
        """
        folder, say = Path(folder), say or (lambda _: None)
        client, parts = manifest_of(folder)["client"], parts_of(Path(folder))
        if draft.spec.client is None:
            raise DataError(
                f"The shards are by {client!r} and the model has no clients; add client={client!r} or a term (1 | {client})."
            )
        if draft.spec.client != client:
            raise DataError(f"The shards are by {client!r} and the clients are {draft.spec.client!r}; write them again.")
        if not parts:
            raise DataError("The table has no rows; covey needs at least one.")
        say("looking at the shards")
        problem, clusters = agree(folder, parts, draft)
        scratch = tempfile.TemporaryDirectory(prefix=".covey-", dir=folder, ignore_cleanup_errors=True)
        stored, total, rows = list[_Stored](), None, 0
        for at, part in enumerate(parts):
            say(f"reading shard {at + 1} of {len(parts)}")
            data = _read(part, problem, clusters)
            if data is None:
                continue
            if problem.spec.standardize:
                found = moments(data.X)
                total, rows = found if total is None else total + found, rows + data.n_rows
            stored.append(_Stored.write(Path(scratch.name) / str(at), data))
        if not stored:
            raise DataError("Every row has a missing value, so na='drop' leaves no row.")
        if total is not None:
            scale = Scale.of(total, rows, problem.terms)
            problem = problem.scaled(scale)
            stored = [each.rewritten(scale) for each in stored]
        network = cls.of([each.mapped() for each in stored], problem.loss)
        _check_whole(network, problem)
        network.scratch, network.say = scratch, say
        return network, problem

    @classmethod
    def of(cls, parts: Sequence[GroupedData], loss: Loss) -> Shards:
        """A network of grouped rows, each part with all rows of its clients and with the clusters of all parts."""
        trees = [part.hierarchy for part in parts]
        ids = pl.concat([tree.client_ids for tree in trees])
        cluster = pl.concat([tree.cluster_of_client for tree in trees])
        order, _, whole = group_ids(ids, cluster, len(ids), trees[0].nested)
        place = np.arange(len(ids))
        if order is not None:
            place[order] = np.arange(len(ids))
        ends = np.cumsum([tree.n_clients for tree in trees])[:-1]
        nodes = tuple(Node(part, loss, np.ones(part.n_clients)) for part in parts)
        return cls(nodes, whole, tuple(np.split(place, ends)))

    @property
    def tree(self) -> Hierarchy:
        return self.whole

    @property
    def terms(self) -> tuple[str, ...]:
        return self.parts[0].data.terms

    @property
    def loss(self) -> Loss:
        return self.parts[0].loss

    def send(self, message: Message[Any]) -> None:
        self._arrived.append(Arrived(message, self.ask(message)))

    def collect(self) -> list[Arrived]:
        arrived, self._arrived = self._arrived, []
        return arrived

    def ask(self, message: Message[Any]) -> Any:
        total, cells = None, message.cells
        for node in self.parts:
            if cells is not None and not (node.data.hierarchy.sizes[cells] > 0).any():
                continue
            reply = message.at(node)
            _release(node)
            total = reply if total is None else total + reply
        return total

    def nodes(self) -> Sequence[tuple[Node, Ints]]:
        return list(zip(self.parts, self.places, strict=True))


def _release(node: Node) -> None:
    """Forget copies of rows. Sums of clients are small and stay."""
    for name, entry in list(node.cache.items()):
        if any(isinstance(each, GroupedData) for each in (entry if isinstance(entry, tuple) else (entry,))):
            del node.cache[name]


# From files to arrays


def agree(folder: Path, parts: Sequence[Path], draft: Problem) -> tuple[Problem, pl.Series]:
    """Complete a draft from all shards: categories, classes, what functions such as ``scale(x)`` learn, and the clusters."""
    spec, formula = draft.spec, draft.formula
    if formula is None or formula.response is None:
        raise DataError("Shards need a formula that names the response, such as 'y ~ x + (1 | county)'.")
    table = pl.scan_parquet([part / "*.parquet" for part in parts])
    schema = table.collect_schema()
    for name in used_columns(draft):
        if name not in schema and name != formula.response:
            raise unknown_column(name, schema.names())
    table = _counted(table, draft)
    if spec.na == "drop" and table.head(1).collect(engine="streaming").is_empty():
        raise DataError("Every row has a missing value, so na='drop' leaves no row.")
    wrapped = {name for factor in formula.right.factors for name in factor.names()[1]}
    held = [
        name for name in formula.right.names if name in wrapped or not (schema[name].is_numeric() or schema[name] == pl.Boolean)
    ]
    values = {name: _distinct(table, name) for name in held}
    length = max([1, *(len(each) for each in values.values())])
    small = {name: _padded(values[name], length) if name in values else pl.Series([1.0] * length) for name in schema.names()}
    names, categories = columns_of(nw.from_native(pl.DataFrame(small), eager_only=True), draft)
    classes = Classes.of(_classes(table, formula, draft)) if draft.loss.two_classes else None
    problem = draft.agree(Schema(names, categories, classes, draft.names_offset))
    problem = _learned(problem, parts)
    if spec.cluster is None:
        return problem, pl.Series(["all"])
    return problem, as_labels(_distinct(table, spec.cluster).drop_nulls(), "cluster").unique().sort()


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


def _padded(values: pl.Series, length: int) -> pl.Series:
    """A column of this length that has these values, and the first of them several times."""
    return values.gather(np.minimum(np.arange(length), len(values) - 1))


def _classes(table: pl.LazyFrame, formula: ParsedFormula, draft: Problem) -> Any:
    """The two classes of the response."""
    if formula.counts or draft.spec.trials is not None:
        return np.array([0, 1])
    name = (formula.response or "").strip("`")
    if name not in table.collect_schema():
        raise unknown_column(name, table.collect_schema().names())
    values = _distinct(table, name)
    return encode_response(values.drop_nulls() if draft.spec.na == "drop" else values, draft.loss)[1]


def _frames(parts: Sequence[Path], problem: Problem) -> Iterator[Any]:
    from covey.problem.rows import Arrays, usable_rows

    for part in parts:
        rows = _counted(pl.scan_parquet(part / "*.parquet"), problem).collect()
        if len(rows):
            yield usable_rows(nw.from_native(rows, eager_only=True), problem, Arrays())[0]


def _learned(problem: Problem, parts: Sequence[Path]) -> Problem:
    """The problem after all that its functions learn from the rows of all shards."""
    design: Any = problem.design
    for _, _, call in getattr(design, "unlearned", ()):
        if call.spline:
            raise DataError(f"{call.text} takes its knots from all rows at once; write {call.example()}.")
    while problem.learning:
        total = None
        for frame in _frames(parts, problem):
            found = problem.design.sums(frame)  # type: ignore[union-attr]
            total = found if total is None else total + found
        if total is None:
            break
        problem = problem.learn(total)
    return problem


def _read(part: Path, problem: Problem, clusters: pl.Series) -> GroupedData | None:
    """The rows of one shard; None if all are left out."""
    spec = problem.spec
    table = pl.scan_parquet(part / "*.parquet")
    schema = table.collect_schema().names()
    names = [name for name in dict.fromkeys([*used_columns(problem), *problem.design.columns]) if name in schema]
    if spec.na == "drop" and not len(table.select(names).fill_nan(None).drop_nulls().head(1).collect()):
        return None
    try:
        return read_part(table.select(names).collect(), problem, clusters, weighed=False)
    except DataError as mistake:
        raise DataError(f"{str(mistake).rstrip('.')} (the row is in {part.name}).") from None


def _check_whole(network: Shards, problem: Problem) -> None:
    """Refuse what only all shards together show: responses that do not determine a model."""
    problem.loss.check_total(sum(float(node.data.y.sum()) for node in network.parts))
    weights = [node.data.weights for node in network.parts]
    if all(each is not None and not each.any() for each in weights):
        raise DataError("All weights are zero; give at least one row a positive weight.")


@dataclass(frozen=True)
class _Stored:
    """Grouped rows with their large arrays in files."""

    folder: Path
    data: GroupedData

    @classmethod
    def write(cls, folder: Path, data: GroupedData) -> _Stored:
        folder.mkdir()
        empty: dict[str, Any] = {}
        for name in _ARRAYS:
            array: Floats | None = getattr(data, name)
            if array is not None:
                np.save(folder / f"{name}.npy", array)
            empty[name] = None if array is None else array[:0]
        return cls(folder, replace(data, **empty))

    def mapped(self) -> GroupedData:
        """The rows, mapped from the files."""
        there = [name for name in _ARRAYS if getattr(self.data, name) is not None]
        return replace(self.data, **{name: np.load(self.folder / f"{name}.npy", mmap_mode="r") for name in there})

    def rewritten(self, scale: Scale) -> _Stored:
        """The same rows, standardised."""
        np.save(self.folder / "X.new.npy", scale.rows(self.mapped()).X)
        (self.folder / "X.new.npy").replace(self.folder / "X.npy")
        return self
