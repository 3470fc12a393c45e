"""Does the floor matter everywhere? A slope for each county and state, and the prediction for a new county.

python examples/slopes.py --out pictures
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib as mpl
import polars as pl

import covey


def main(out: Path, small: bool = False) -> None:
    mpl.use("Agg")
    # --8<-- [start:code]
    homes = covey.datasets.load_radon()
    homes = homes.sample(2000, seed=0) if small else homes
    model = covey.fit(homes, "log_radon ~ floor + (1 + floor | state/county)")
    model.plot.effect("floor", at={"floor": [0, 1]}).figure.savefig(out / "slopes.png", dpi=110)
    new = homes[:1].with_columns(county=pl.lit("a new county"))
    print(model.predict_interval(new))
    # --8<-- [end:code]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--small", action="store_true", help="few rows, for a test")
    main(**vars(parser.parse_args()))
