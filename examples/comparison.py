"""Is the basement all there is? Compare nested models, test a contrast, and find the extreme states.

python examples/comparison.py --out pictures
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
    homes = homes.sample(2000, seed=0) if small else homes
    plain = covey.fit(homes, "log_radon ~ 1 + (1 | state/county)")
    model = covey.fit(homes, "log_radon ~ C(floor) + (1 | state/county)")
    print(covey.compare(plain, model))
    print(model.contrast("floor"))
    model.plot.caterpillar(level="cluster").figure.savefig(out / "comparison.png", dpi=110)
    # --8<-- [end:code]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--small", action="store_true", help="few rows, for a test")
    main(**vars(parser.parse_args()))
