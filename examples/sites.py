"""Three sites keep their rows: the same fit from sums, and what was sent.

python examples/sites.py --out pictures
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
    spec = covey.Spec(formula="log_radon ~ floor", client="county", cluster="state")
    run, model = covey.simulate_sites(homes, spec, sites=3), covey.fit(homes, spec)
    print(f"largest difference to the fit in memory: {run.difference(model.model_):.0e}")
    model.plot.exchanges(run.outcome.exchanges).figure.savefig(out / "sites.png", dpi=110)
    # --8<-- [end:code]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--small", action="store_true", help="few rows, for a test")
    main(**vars(parser.parse_args()))
