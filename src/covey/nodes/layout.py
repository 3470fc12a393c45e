"""The folder of the shards of a table: write it, recognise it, and list what is in it.

:func:`lay_out` partitions a table into Parquet files by a hash of the client, once, in a stream. The manifest says which
table the shards are of, so that those of another table, or of files that have changed, are not taken for them.
"""

from __future__ import annotations

import json
import shutil
from glob import glob
from pathlib import Path
from typing import Any

import polars as pl

from covey.errors import DataError, unknown_column

MANIFEST = "shards.json"
_FORMAT = 1
_ROWS_OF_A_SHARD = 2_000_000


def lay_out(
    table: pl.LazyFrame,
    folder: str | Path,
    client: str,
    shards: int | None = None,
    *,
    source: str | Path | None = None,
    named: str | None = None,
) -> Path:
    """Partition a table into shards by a hash of the client, in a stream.

    Parameters
    ----------
    table : the table
    folder : where the shards are written; must not exist, or be empty, or have the shards of this table
    client : the column of clients
    shards : their number; by default one for every two million rows
    source : the file, folder or pattern that the table was scanned from; without it no shards count as those of this table
    named : which table of ``source`` it is, if there are several

    Returns
    -------
    The folder. If it has the shards of these files by this column already, nothing is done.
    """
    folder, names = Path(folder), table.collect_schema().names()
    if client not in names:
        raise unknown_column(client, names)
    facts = None if source is None else _fingerprint(table, source, named)
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


def laid_out(
    folder: str | Path, client: str, shards: int | None = None, *, source: str | Path, named: str | None = None
) -> bool:
    """Return whether a folder has the shards of these files already, without reading them.

    It is an error if it has shards of these files, but not those that are asked for.
    """
    if not is_shards(folder):
        return False
    found = manifest_of(Path(folder))["table"]
    if found is None or found.get("files") != _files(source) or found.get("named") != named:
        return False
    _check_same(Path(folder), client, shards, found)
    return True


def files_of(source: str | Path) -> list[Path]:
    """The files that a table is scanned from: a file, those of a folder, or those of a pattern."""
    path = Path(source)
    matching = [path] if path.is_file() else map(Path, glob(str(path), recursive=True))
    return sorted(path.rglob("*.parquet") if path.is_dir() else matching)


def _files(source: str | Path) -> list[list[Any]]:
    """The files of a table with their sizes and times."""
    return [[str(each.resolve()), each.stat().st_size, each.stat().st_mtime_ns] for each in files_of(source)]


def _fingerprint(table: pl.LazyFrame, source: str | Path, named: str | None) -> dict[str, Any]:
    """What tells whether a table is the one of some shards: its files with sizes and times, its columns and number of rows."""
    try:
        facts = _files(source)
        rows = int(table.select(pl.len()).collect(engine="streaming").item())
    except (pl.exceptions.PolarsError, OSError) as problem:
        raise DataError(f"The files {str(source)!r} cannot be read: {_first_line(problem)}.") from None
    columns = [[name, str(kind)] for name, kind in table.collect_schema().items()]
    return {"files": facts, "columns": columns, "rows": rows, **({} if named is None else {"named": named})}


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
