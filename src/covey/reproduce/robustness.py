"""How much the hierarchy loses if the clusters are wrong or the penalties are off by a factor of ten.

The data are those of the paper's simulation (Section 6.1 of arXiv:2204.13619) at 10 rows per client.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from covey._typing import Floats, Ints
from covey.datasets import Simulation
from covey.fitting.selection import locally_trained, search, single_cluster
from covey.losses import Gaussian
from covey.reproduce.simulation import GRID, draw, measure, minimiser
from covey.reproduce.study import Say, Study, Table, generator, integer_seed, silent, tracked
from covey.tables.rows import GroupedData

ROWS = 10
SHARES = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0)
FACTORS = (0.1, 1.0, 10.0)
GAMMAS, LAMS = np.geomspace(0.1, 10, 5), np.geomspace(0.1, 1000, 5)
TRUE_PENALTIES, CHOSEN_PENALTIES = "hierarchy, penalties of the truth", "hierarchy, penalties by CV"


def study(*, seed: int = 0, quick: bool = False, say: Say = silent) -> Study:
    """Wrong clusters, then wrong penalties; ``quick`` takes one run instead of five, and fewer shares."""
    runs, shares = (1, (0.0, 0.2, 0.5, 1.0)) if quick else (5, SHARES)
    grid = (GAMMAS[::2], LAMS[::2]) if quick else (GAMMAS, LAMS)
    wrong = wrong_clusters(shares, runs, grid, seed, say)
    off = wrong_penalties(runs, seed, say)
    return Study(
        name="robustness",
        title="Robustness: when the clusters or the penalties are wrong",
        settings={"rows": ROWS, "runs": runs, "shares": list(shares), "factors": list(FACTORS), "seed": seed},
        findings=findings(wrong, off),
        tables=(
            Table("clusters", f"Average distance if a share of the clients is in a random cluster, {ROWS} rows each", wrong),
            Table("penalties", f"Average distance if the penalties (1 and 1 are right) are off by ten, {ROWS} rows each", off),
        ),
        quick=quick,
    )


def mislabelled(drawn: Simulation, share: float, rng: np.random.Generator) -> tuple[GroupedData, Ints]:
    """The same rows with a share of the clients in random clusters, and for each client its row in ``drawn.theta``."""
    n, k = len(drawn.theta), len(drawn.w)
    parent = np.repeat(np.arange(k), n // k)
    moved = rng.permutation(n)[: round(share * n)]
    parent[moved] = rng.integers(k, size=len(moved))
    data = GroupedData.from_arrays(drawn.X, drawn.y, drawn.client, parent[drawn.client])
    return data, data.hierarchy.client_ids.to_numpy()


def wrong_clusters(shares: tuple[float, ...], runs: int, grid: tuple[Floats, Floats], seed: int, say: Say) -> pl.DataFrame:
    """Average distance by the share of clients in a random cluster, with true and with cross-validated penalties."""
    rows = []
    for run in tracked(range(runs), "wrong clusters", say):
        drawn = draw(ROWS, seed, run)
        alone = locally_trained(drawn.data, Gaussian()).theta
        one = single_cluster(drawn.data, Gaussian(), grid=GRID, seed=integer_seed(generator(seed, 3, run))).theta
        for at, share in enumerate(shares):
            rng = generator(seed, 4, run, at)
            data, who = mislabelled(drawn, share, rng)
            found = search(data, Gaussian(), gammas=grid[0], lams=grid[1], seed=rng)
            fits = {
                "locally-trained": (alone, drawn.theta),
                "single-cluster": (one, drawn.theta),
                TRUE_PENALTIES: (minimiser(data), drawn.theta[who]),
                CHOSEN_PENALTIES: (minimiser(data, found.gamma, found.lam), drawn.theta[who]),
            }
            rows.append({"wrong share": share} | {name: measure(*pair)["average"] for name, pair in fits.items()})
    return pl.DataFrame(rows).group_by("wrong share", maintain_order=True).mean()


def wrong_penalties(runs: int, seed: int, say: Say) -> pl.DataFrame:
    """Average distance with ``gamma`` and ``lam`` a tenth of, equal to and ten times the true values."""
    rows = []
    for run in tracked(range(runs), "wrong penalties", say):
        drawn = draw(ROWS, seed, run)
        for gamma in FACTORS:
            for lam in FACTORS:
                rows.append({"gamma": gamma, "lam": lam, **measure(minimiser(drawn.data, gamma, lam), drawn.theta)})
    means = pl.DataFrame(rows).select("gamma", "lam", "average", "max").group_by("gamma", "lam", maintain_order=True).mean()
    right = means.filter(pl.col("gamma") == 1, pl.col("lam") == 1)["average"][0]
    return means.with_columns((100 * (pl.col("average") / right - 1)).alias("percent above the right ones"))


def findings(wrong: pl.DataFrame, off: pl.DataFrame) -> tuple[str, ...]:
    """Sentences about the tables."""
    first, last, one = wrong.row(0, named=True), wrong.row(-1, named=True), "single-cluster"
    worst = off.sort("average").row(-1, named=True)
    return (
        f"With all clusters right the hierarchy has an average distance of {first[TRUE_PENALTIES]:.2f}, a single cluster "
        f"{first[one]:.2f}. With the true penalties the hierarchy is {where_closer(wrong)}. With all clusters random it has "
        f"{last[TRUE_PENALTIES]:.2f}.",
        f"With cross-validated penalties the average distance is {first[CHOSEN_PENALTIES]:.2f} with all clusters right and "
        f"{last[CHOSEN_PENALTIES]:.2f} with all clusters random ({last[one]:.2f} for a single cluster).",
        f"Penalties off by ten raise the average distance by at most {worst['percent above the right ones']:.1f}% (gamma = "
        f"{worst['gamma']:g}, lam = {worst['lam']:g}).",
    )


def where_closer(wrong: pl.DataFrame) -> str:
    """At which shares of clients in a random cluster the hierarchy is closer to the truth than a single cluster."""
    shares: dict[bool, list[str]] = {True: [], False: []}
    for row in wrong.to_dicts():
        shares[row[TRUE_PENALTIES] < row["single-cluster"]].append(f"{100 * row['wrong share']:g}%")
    if not (shares[True] and shares[False]):
        return (
            f"{'' if shares[True] else 'not '}closer to the truth than a single cluster at all shares of random clusters tried"
        )
    closer, others = (", ".join(shares[kind]) for kind in (True, False))
    return (
        f"closer to the truth than a single cluster if {closer} of the clients are in a random cluster, but not if {others} are"
    )
