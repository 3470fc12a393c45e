"""``covey warm-up``: compile what a fit needs, for example while a container image is built."""

from __future__ import annotations

from typing import Annotated, Any

import typer


def warm_up(
    randomised: Annotated[bool, typer.Option("--randomised", help="Also compile the randomised algorithms.")] = False,
) -> None:
    """Compile the loops of fits and predictions, and keep them on disk, so that the first fit starts at once.

    Set NUMBA_CACHE_DIR to choose the folder, to the same value as when covey runs later.

    [bold]Example[/bold]   NUMBA_CACHE_DIR=/opt/covey covey warm-up --randomised
    """
    import time
    import warnings
    from pathlib import Path

    import polars as pl

    from covey import HierarchicalClassifier, HierarchicalRegressor
    from covey.cli._options import console, working
    from covey.datasets import simulate
    from covey.losses.kernels import expand

    start = time.perf_counter()
    with working("compiling") as say, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for kind, family in ((HierarchicalRegressor, "gaussian"), (HierarchicalClassifier, "bernoulli")):
            say(f"compiling for {kind.__name__}")
            drawn = simulate(family, clusters=4, clients=8, rows=12, d=2, seed=0)
            ids = {"g": drawn.cluster, "i": drawn.client}
            rows = pl.DataFrame({**ids, "a": drawn.X[:, 0], "b": drawn.X[:, 1], "y": drawn.y})
            text = rows.with_columns(pl.col("g", "i").cast(pl.String)).sample(fraction=1.0, shuffle=True, seed=0)
            for formula in ("y ~ a + b + (1 | i)", "y ~ a + b + (1 | g/i)", "y ~ a + b + (1 + a + b | g/i)"):
                for table in (rows, text):
                    learned = kind(formula=formula).fit(table)
                    learned.predict(table)
            learned.predict_interval(text)
            learned.summary()
            given: dict[str, Any] = {"client": "i", "cluster": "g", "formula": "y ~ a + b"}
            kind(**given, gamma=1.0).fit(text)
            kind(**given, weights="weight", gamma=1.0).fit(text.with_columns(weight=1.0))
            for solver in ("apgd", "proxskip", "l2gd", "al2sgd_plus", "one_coin") if randomised else ():
                say(f"compiling {solver}")
                kind(**given, gamma=1.0, ridge=0.1, solver=solver, max_iter=20).fit(text)
    folder = getattr(getattr(expand, "_cache", None), "cache_path", None)
    kept = "not kept: no folder can be written, so set NUMBA_CACHE_DIR"
    if folder is not None:
        kept = f"kept under {Path(folder).parent}"
    console().print(f"compiled in {time.perf_counter() - start:.0f} s; {kept}", markup=False)
