"""Home radon in nine states: the US EPA / state residential radon survey, 1986-1989.

The table has 11,929 homes in 470 counties of 9 states; three of the states include tribal lands. The original file has 12,448
rows. Only first measurements are kept (``dupflag`` 0), which drops 440 rows. Rows with a radon of zero are dropped too (79
rows), so that the logarithm is finite. ``county`` is the most frequent name under each FIPS code, followed by the state,
because counties of different states share names. Where two codes of one state would have the same label, the code is added.
"""

from __future__ import annotations

from importlib import resources

import polars as pl


def load_radon() -> pl.DataFrame:
    """Load the bundled survey.

    Returns
    -------
    polars.DataFrame
        A row for each home, with the columns ``state``; ``county`` (unique across states); ``fips``; ``floor`` (0 if measured
        in a basement, 1 above); ``radon`` (pCi/L); ``log_radon``; ``uranium`` (county soil, ppm; null if unknown).

    Examples
    --------
    >>> load_radon().shape
    (11929, 7)
    """
    with resources.as_file(resources.files("covey.datasets") / "radon.parquet") as file:
        return pl.read_parquet(file)
