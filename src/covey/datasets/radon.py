"""Home radon in nine states: the US EPA / state residential radon survey, 1986-1989.

11,929 homes in 470 counties of 9 states (and, in three of them, of tribal lands). Rules of cleaning, from 12,448 rows: kept the
rows marked as first measurements (``dupflag`` 0, which drops 440), then those with radon above zero (which drops 79, so
that the logarithm exists). ``county`` is the most frequent name under each FIPS code, with the state, since
counties of different states share names; where two codes of a state would share a label the code is added.
"""

from __future__ import annotations

from importlib import resources

import polars as pl


def load_radon() -> pl.DataFrame:
    """The bundled survey, a row for each home.

    Columns: ``state``; ``county`` (unique across states); ``fips``; ``floor`` (0 measured in a basement, 1 above);
    ``radon`` (pCi/L); ``log_radon``; ``uranium`` (county soil, ppm; null where not known).

    >>> load_radon().shape
    (11929, 7)
    """
    with resources.as_file(resources.files("covey.datasets") / "radon.parquet") as file:
        return pl.read_parquet(file)
