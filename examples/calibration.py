"""Which homes exceed the limit of 4 pCi/L? A logistic model for each county, and whether its probabilities hold.

python examples/calibration.py --out pictures
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
    homes = homes.sample(2000 if small else len(homes), shuffle=True, seed=0).with_columns(above=pl.col("radon") > 4)
    train, test = homes[len(homes) // 5 :], homes[: len(homes) // 5]
    model = covey.HierarchicalClassifier(formula="above ~ floor + (1 | state/county)", tests=False).fit(train)
    model.plot.calibration(test).figure.savefig(out / "calibration.png", dpi=110)
    print(model.contrast({"floor": 1.0}))
    # --8<-- [end:code]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--small", action="store_true", help="few rows, for a test")
    main(**vars(parser.parse_args()))
