"""Missing values and frequencies on the command line."""

from __future__ import annotations

import json

import numpy as np
import polars as pl

from .shell import inside


def test_rows_are_dropped_and_counted(tmp_path, homes):
    times = np.random.default_rng(0).integers(0, 3, size=len(homes))
    floor = pl.when(pl.int_range(pl.len()) % 1000 == 7).then(None).otherwise("floor")
    holes = homes.with_columns(floor=floor, times=times)
    holes.write_csv(tmp_path / "holes.csv")
    gaps = holes.filter(pl.col("floor").is_null())
    fit = ("fit", str(tmp_path / "holes.csv"), "log_radon ~ floor + (1 | state/county)", "--no-tests", "--holdout", "0")
    refused = inside(*fit, cwd=tmp_path, check=False)
    assert refused.returncode == 2
    assert "Column 'floor' is NaN in row 7" in refused.stderr
    shown = inside(*fit, "--na", "drop", cwd=tmp_path)
    assert f"note: {len(gaps)} of {len(homes):,} rows dropped because values are missing ({len(gaps)} of floor)" in shown.stdout
    document = json.loads(inside(*fit, "--na", "drop", "--frequency", "times", "--json", cwd=tmp_path).stdout)
    assert document["summary"]["dropped"]["columns"]["floor"] == len(gaps)
    assert document["summary"]["rows"] == times.sum() - gaps["times"].sum()
