"""Numbers and tables as text: counts with their noun, bytes, times, and columns of equal width."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_BYTES = (("B", 1.0), ("kB", 1e3), ("MB", 1e6), ("GB", 1e9), ("TB", 1e12))
_SECONDS = (("s", 1.0), ("min", 60.0), ("h", 3600.0), ("d", 86400.0), ("y", 3.156e7))


def counted(number: int, noun: str) -> str:
    """A number with its noun.

    >>> counted(1, "row"), counted(12000, "row")
    ('1 row', '12,000 rows')
    """
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def large(number: float) -> str:
    """A number that may be too large to write out.

    >>> large(12345.0), large(2.5e9)
    ('12,345', '2.5e+09')
    """
    return f"{number:,.0f}" if number < 1e7 else f"{number:.1e}"


def size(number: float) -> str:
    """Bytes.

    >>> size(999.0), size(123_456.0)
    ('999 B', '123 kB')
    """
    return _in_units(number, _BYTES, 1000)


def duration(seconds: float) -> str:
    """Seconds, in the unit that suits them.

    >>> duration(90.0), duration(7100.0)
    ('90 s', '118 min')
    """
    return _in_units(seconds, _SECONDS, 120)


def table(rows: Iterable[Sequence[str]], widths: Sequence[int]) -> list[str]:
    """Lines of cells, each at least as wide as its column; those of a negative width stand at the left.

    >>> table([["", "sd"], ["x", "0.25"]], [-4, 6])
    ['         sd', 'x      0.25']
    """
    return [
        " ".join(f"{cell:<{-width}}" if width < 0 else f"{cell:>{width}}" for cell, width in zip(row, widths, strict=False))
        for row in rows
    ]


def _in_units(number: float, units: tuple[tuple[str, float], ...], most: float) -> str:
    """Three digits in the first unit that keeps the number below ``most``, or in the last."""
    unit, size = next(((unit, size) for unit, size in units if number < most * size), units[-1])
    return f"{number / size:.3g} {unit}" if number / size < 1000 else f"{number / size:.0e} {unit}"
