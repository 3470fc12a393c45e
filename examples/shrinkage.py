"""Counties with few homes borrow from their state: fit, draw the shrinkage, write a report.

python examples/shrinkage.py --out pictures
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib as mpl

import covey


def main(out: Path, small: bool = False) -> None:
    mpl.use("Agg")
    # --8<-- [start:code]
    homes = covey.datasets.load_radon()
    homes = homes[:1500] if small else homes
    model = covey.fit(homes, "log_radon ~ floor + (1 | state/county)")
    model.plot.shrinkage().figure.savefig(out / "shrinkage.png", dpi=110)
    print(model.report(out / "radon.html", data=homes))
    # --8<-- [end:code]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--small", action="store_true", help="few rows, for a test")
    main(**vars(parser.parse_args()))
