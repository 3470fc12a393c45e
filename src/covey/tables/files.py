"""Read a table from a file, or scan many files lazily."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from glob import iglob
from pathlib import Path
from typing import Any

import polars as pl

from covey.errors import DataError

_LARGE = 1 << 26  # bytes of a text file from which on it is read in parts


def read_table(path: str | Path, *, ids: Sequence[str | None] = (), text: Sequence[str | None] = ()) -> pl.DataFrame:
    r"""Read a table from a file.

    Parameters
    ----------
    path : str or Path
        A Parquet file (``.parquet``, ``.pq``), or text with commas (``.csv``) or tabs (``.tsv``), which may be compressed
        (``.csv.gz``, ``.tsv.gz``). In a text file, empty fields and ``NA`` are missing values.
    ids : sequence of str
        Columns of a text file that hold ids. Numbers with leading zeros (ZIP codes) stay text there. None is ignored.
    text : sequence of str
        Columns of a text file that are read as text, even if they look like numbers. None is ignored.

    Returns
    -------
    polars.DataFrame

    Examples
    --------
    >>> import covey, pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder) / "homes.csv"
    ...     _ = path.write_text("zip,radon\n02139,1.5\n55401,NA\n")
    ...     covey.read_table(path, ids=["zip"]).rows()
    [('02139', 1.5), ('55401', None)]
    """
    path = Path(path)
    suffix = "".join(path.suffixes[-2:]) if path.suffix == ".gz" else path.suffix
    if not path.exists():
        raise DataError(f"There is no file {str(path)!r}; check the path.")
    if path.is_dir():
        raise DataError(f"{str(path)!r} is a folder; give a file.")
    try:
        if suffix in (".parquet", ".pq"):
            return pl.read_parquet(path)
        if suffix in (".csv", ".csv.gz", ".tsv", ".tsv.gz"):
            return _read_csv(path, "\t" if "tsv" in suffix else ",", set(ids), set(text))
    except (pl.exceptions.PolarsError, OSError) as problem:
        reason = str(problem).strip().splitlines()[0].rstrip(".")
        raise DataError(f"The file {str(path)!r} cannot be read: {reason}.") from None
    raise DataError(f"The file {str(path)!r} must end in .parquet, .csv, .csv.gz or .tsv; convert it first.")


def _read_csv(path: Path, separator: str, ids: set[str | None], text: set[str | None]) -> pl.DataFrame:
    names = pl.read_csv(path, separator=separator, n_rows=0, quote_char=None, truncate_ragged_lines=True).columns
    if len(names) == 1 and ";" in names[0]:
        raise DataError(
            f"The file {str(path)!r} has semicolons between its columns, and covey reads commas; write it again with "
            f"polars.read_csv({str(path)!r}, separator=';', decimal_comma=True).write_csv('commas.csv')."
        )
    names = pl.read_csv(path, separator=separator, n_rows=0).columns
    as_text = {name: pl.String for name in names if name in ids | text}
    frame = pl.read_csv(path, separator=separator, infer_schema_length=None, null_values=["NA"], schema_overrides=as_text)
    for name in set(as_text) - text:
        numbers = frame[name].cast(pl.Int64, strict=False)
        if (numbers.cast(pl.String).eq_missing(frame[name])).all():
            frame = frame.with_columns(numbers)
    return frame


def read_parts(path: str | Path, *, text: Sequence[str | None] = (), rows: int = 500_000) -> Iterator[pl.DataFrame]:
    """Read a table in parts of about this many rows, in its order: a file for :func:`read_table`, or many Parquet files."""
    path = Path(path)
    try:
        if is_pattern(path) or path.suffix in (".parquet", ".pq"):
            if not is_pattern(path) and not path.exists():
                raise DataError(f"There is no file {str(path)!r}; check the path.")
            table = scan_table(path)
        elif path.suffix in (".csv", ".tsv") and path.is_file() and path.stat().st_size > _LARGE:
            options: dict[str, Any] = {"separator": "\t" if path.suffix == ".tsv" else ",", "null_values": ["NA"]}
            names = pl.scan_csv(path, **options).collect_schema().names()
            overrides = {name: pl.String for name in names if name in text}
            options |= {"infer_schema_length": None, "schema_overrides": overrides}
            table = pl.scan_csv(path, **options)
        else:
            table = read_table(path, text=text).lazy()
        parts = table.collect_batches(chunk_size=rows, maintain_order=True, engine="streaming")
        first = next(parts, None)
        yield table.head(0).collect() if first is None else first
        yield from parts
    except pl.exceptions.PolarsError as problem:
        reason = str(problem).strip().splitlines()[0].rstrip(".")
        raise DataError(f"The file {str(path)!r} cannot be read: {reason}.") from None


def is_pattern(path: str | Path) -> bool:
    """Whether a path stands for several files: a folder, or a pattern such as ``rows/*.parquet``."""
    return (any(sign in str(path) for sign in "*?[") and not Path(path).exists()) or Path(path).is_dir()


def scan_table(path: str | Path) -> pl.LazyFrame:
    """Scan Parquet files without reading them.

    Parameters
    ----------
    path : str or Path
        A Parquet file, a folder of them, or a pattern such as ``rows/*.parquet``.

    Returns
    -------
    polars.LazyFrame
    """
    pattern = Path(path) / "**" / "*.parquet" if Path(path).is_dir() else Path(path)
    if pattern.suffix not in (".parquet", ".pq"):
        raise DataError(f"Only Parquet files are read lazily, and {str(path)!r} does not end in .parquet; convert them first.")
    if not any(iglob(str(pattern), recursive=True)):
        where = "The folder {} has no Parquet files" if Path(path).is_dir() else "No file matches {}"
        raise DataError(f"{where.format(repr(str(path)))}; check the path.")
    try:
        found = pl.scan_parquet(pattern, hive_partitioning=False)
        found.collect_schema()
    except (pl.exceptions.PolarsError, OSError) as problem:
        reason = str(problem).strip().splitlines()[0].rstrip(".")
        raise DataError(f"The files {str(path)!r} cannot be read: {reason}.") from None
    return found
