"""How much the hierarchy depends on what it is told: clusters that are wrong, penalties that are off by ten.

The paper's simulation at 10 rows a client, where the clusters matter most.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from covey._typing import Floats, Ints
from covey.datasets import Simulation
from covey.fitting.selection import locally_trained, search, single_cluster
from covey.losses import Gaussian
from covey.objective.objective import Penalty
from covey.reproduce.simulation import GRID, draw, measure
from covey.reproduce.study import Say, Study, Table, generator, silent, whole
from covey.solvers import minimise
from covey.tables.rows import GroupedData

ROWS = 10
SHARES = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0)
FACTORS = (0.1, 1.0, 10.0)
GAMMAS, LAMS = np.geomspace(0.1, 10, 5), np.geomspace(0.1, 1000, 5)


def study(*, seed: int = 0, quick: bool = False, say: Say = silent) -> Study:
    """Wrong clusters, then wrong penalties; quick: one run instead of five, fewer shares."""
    runs, shares = (1, (0.0, 0.2, 0.5, 1.0)) if quick else (5, SHARES)
    grid = (GAMMAS[::2], LAMS[::2]) if quick else (GAMMAS, LAMS)
    wrong = wrong_clusters(shares, runs, grid, seed, say)
    off = wrong_penalties(runs, seed, say)
    return Study(
        "robustness",
        "Robustness: when the clusters or the penalties are wrong",
        {"rows": ROWS, "runs": runs, "shares": list(shares), "factors": list(FACTORS), "seed": seed},
        (*_about_clusters(wrong), _about_penalties(off)),
        (),
        (
            Table(
                "clusters", f"A share of clients put into a cluster at random, {ROWS} rows a client: average distance", wrong
            ),
            Table("penalties", f"Penalties off by ten (1 and 1 are right), {ROWS} rows a client: average distance", off),
        ),
        quick=quick,
    )


def mislabelled(drawn: Simulation, share: float, rng: np.random.Generator) -> tuple[GroupedData, Ints]:
    """The same rows with a share of the clients in clusters drawn at random; and whose row ``theta`` of each client is."""
    n, k = len(drawn.theta), len(drawn.w)
    parent = np.repeat(np.arange(k), n // k)
    moved = rng.permutation(n)[: round(share * n)]
    parent[moved] = rng.integers(k, size=len(moved))
    data = GroupedData.from_arrays(drawn.X, drawn.y, drawn.client, parent[drawn.client])
    return data, data.hierarchy.client_ids.to_numpy()


def wrong_clusters(shares: tuple[float, ...], runs: int, grid: tuple[Floats, Floats], seed: int, say: Say) -> pl.DataFrame:
    """Average distance for each share of wrong labels, with the true penalties and with penalties by cross-validation."""
    rows = []
    for run in range(runs):
        drawn = draw(ROWS, seed, run)
        alone = locally_trained(drawn.data, Gaussian()).theta
        one = single_cluster(drawn.data, Gaussian(), grid=GRID, seed=whole(generator(seed, 3, run))).theta
        for at, share in enumerate(shares):
            rng = generator(seed, 4, run, at)
            data, who = mislabelled(drawn, share, rng)
            found = search(data, Gaussian(), gammas=grid[0], lams=grid[1], seed=rng)
            distances = {
                "locally-trained": _distance(alone, drawn.theta),
                "single-cluster": _distance(one, drawn.theta),
                "hierarchy, penalties of the truth": _distance(_minimiser(data, 1.0, 1.0), drawn.theta[who]),
                "hierarchy, penalties by CV": _distance(_minimiser(data, found.gamma, found.lam), drawn.theta[who]),
            }
            rows.append({"wrong share": share, **distances})
            say("wrong clusters", run * len(shares) + at + 1, runs * len(shares))
    each = pl.DataFrame(rows)
    return each.group_by("wrong share", maintain_order=True).mean()


def wrong_penalties(runs: int, seed: int, say: Say) -> pl.DataFrame:
    """Average distance with ``gamma`` and ``lam`` a tenth of, equal to and ten times the truth."""
    rows = []
    for run in range(runs):
        drawn = draw(ROWS, seed, run)
        for gamma in FACTORS:
            for lam in FACTORS:
                told = measure(_minimiser(drawn.data, gamma, lam), drawn.theta)
                rows.append({"gamma": gamma, "lam": lam, "average": told["average"], "max": told["max"]})
        say("wrong penalties", run + 1, runs)
    means = pl.DataFrame(rows).group_by("gamma", "lam", maintain_order=True).mean()
    right = means.filter(pl.col("gamma") == 1, pl.col("lam") == 1)["average"][0]
    return means.with_columns((100 * (pl.col("average") / right - 1)).alias("percent above the right ones"))


def _minimiser(data: GroupedData, gamma: float, lam: float) -> Floats:
    return minimise(data, Gaussian(), Penalty.of(data.hierarchy, gamma=gamma, lam=lam)).theta


def _distance(estimate: Floats, truth: Floats) -> float:
    return measure(estimate, truth)["average"]


def _about_clusters(wrong: pl.DataFrame) -> list[str]:
    first, last = wrong.row(0, named=True), wrong.row(-1, named=True)
    one, told, cv = (
        f"{name}" for name in ("single-cluster", "hierarchy, penalties of the truth", "hierarchy, penalties by CV")
    )
    return [
        f"With all labels right the hierarchy's average distance is {first[told]:.2f}, against {first[one]:.2f} for a single "
        f"cluster; with the same penalties it is {turning_point(wrong)} ({last[told]:.2f} with all labels drawn at random).",
        f"Penalties by cross-validation on the same labels give {first[cv]:.2f} with all of them right and {last[cv]:.2f} with "
        f"all drawn at random ({last[one]:.2f} for a single cluster).",
    ]


def turning_point(wrong: pl.DataFrame) -> str:
    """Up to which share of clients relabelled at random the hierarchy is better than a single cluster, of those tried."""
    better = [
        row["wrong share"] for row in wrong.to_dicts() if row["hierarchy, penalties of the truth"] < row["single-cluster"]
    ]
    worse = [row["wrong share"] for row in wrong.to_dicts() if row["wrong share"] not in better]
    if not worse:
        return "better than a single cluster at every share tried"
    upto = f"better than a single cluster up to {100 * max(better):.0f}% and" if better else ""
    return f"{upto} worse from {100 * min(worse):.0f}% on, of the shares tried".strip()


def _about_penalties(off: pl.DataFrame) -> str:
    worst = off.sort("average").row(-1, named=True)
    return (
        f"Penalties off by ten cost at most {worst['percent above the right ones']:.1f}% of the average distance (gamma = "
        f"{worst['gamma']:g}, lam = {worst['lam']:g})."
    )
