"""The coverage of intervals of nominal 95%, by simulation from the true model, and their width.

    python benchmarks/interval_coverage.py [--sets 2000] [--only TEXT] [--logistic-sets 200] [--json FILE]

Each data set has clusters of clients, with a random intercept and slope at both levels. It also has a new client of a
cluster and a client of a new cluster, without rows. Widths are means over data sets, relative to an interval that knows the
variance components and has normal quantiles. NUMBA_NUM_THREADS=1 is fastest, since data sets are small.
"""

from __future__ import annotations

import argparse
import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from covey import HierarchicalClassifier, HierarchicalRegressor
from covey.solvers.direct.elimination import Spread, cluster_covariances, eliminate, posterior
from covey.tree.hierarchy import Resolved
from covey.variance.linear_likelihood import invert

LEVELS = ("client", "cluster", "global", "new client", "new cluster")
WBAR = np.array([0.3, -0.4])


@dataclass(frozen=True)
class Design:
    """Numbers of clusters, of clients in each and of rows of each; sds of intercept and slope between clusters and clients."""

    title: str
    clusters: int
    clients: int
    rows: int
    cluster_sd: tuple[float, float]
    client_sd: tuple[float, float]
    family: str = "gaussian"
    kind: str = "diagonal"

    def __str__(self) -> str:
        clusters, clients = (", ".join(f"{sd:g}" for sd in sds) for sds in (self.cluster_sd, self.client_sd))
        return f"{self.title}{self.clusters} x {self.clients} x {self.rows}; cluster sds {clusters}; client sds {clients}"


SDS = (1.0, 0.5)
DESIGNS = (
    Design("", 20, 10, 6, SDS, SDS),
    Design("", 20, 10, 6, (0.1, 0.1), SDS),
    Design("", 5, 10, 6, SDS, SDS),
    Design("", 3, 6, 6, SDS, SDS),
    Design("", 20, 10, 6, (1.0, 1.0), (0.5, 0.5)),
    Design("", 20, 10, 6, (0.1, 0.1), (0.5, 0.5)),
    Design("", 5, 10, 6, (1.0, 1.0), (0.5, 0.5)),
    Design("", 3, 6, 6, (1.0, 1.0), (0.5, 0.5)),
    Design("full covariances: ", 20, 10, 6, (0.1, 0.1), SDS, kind="full"),
    Design("full covariances: ", 5, 10, 6, SDS, SDS, kind="full"),
    Design("full covariances: ", 3, 6, 6, SDS, SDS, kind="full"),
    Design("logistic: ", 20, 10, 20, SDS, SDS, "bernoulli"),
    Design("logistic: ", 20, 10, 6, SDS, SDS, "bernoulli"),
)


def measured(design: Design, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """For each of ``LEVELS`` the share of one data set's intervals that contain the truth, and their mean width, relative."""
    rng, k, n = np.random.default_rng(seed), design.clusters, design.clients
    cluster_sd, client_sd = np.array(design.cluster_sd), np.array(design.client_sd)
    w = WBAR + cluster_sd * rng.normal(size=(k + 1, 2))
    parent = np.repeat(np.arange(k + 1), n + 1)
    theta = w[parent] + client_sd * rng.normal(size=(len(parent), 2))
    is_new = np.arange(len(parent)) % (n + 1) == n
    fitted = np.flatnonzero(~is_new & (parent < k))
    client = np.repeat(fitted, design.rows)
    x = rng.normal(size=len(client))
    margin = theta[client, 0] + theta[client, 1] * x
    if design.family == "gaussian":
        model: Any = HierarchicalRegressor(tests=False, covariance=design.kind)
        y = margin + rng.normal(size=len(x))
    else:
        model = HierarchicalClassifier(tests=False, covariance=design.kind)
        y = (rng.random(len(x)) < 1 / (1 + np.exp(-margin))).astype(int)
    model.fit(x[:, None], y, client=client, cluster=parent[client])
    ends, truth = {}, {"client": theta[fitted], "cluster": w[:k], "global": WBAR}
    for level in truth:
        frame = model.coef_frame(level)
        ends[level] = [frame[name].to_numpy().reshape(np.shape(truth[level])) for name in ("lower", "upper")]
    new = {"new client": is_new & (parent < k), "new cluster": parent == k}
    for level, which in new.items():
        at = np.flatnonzero(which)
        truth[level], ends[level] = theta[at], new_coefficients(model, at, parent[at], level)
    oracle = known_widths(model, cluster_sd, client_sd) if design.family == "gaussian" else dict.fromkeys(LEVELS, np.nan)
    inside = [np.mean((ends[name][0] <= truth[name]) & (truth[name] <= ends[name][1])) for name in LEVELS]
    wide = [np.mean((ends[name][1] - ends[name][0]) / oracle[name]) for name in LEVELS]
    return np.array(inside), np.array(wide)


def new_coefficients(model: Any, client: np.ndarray, cluster: np.ndarray, level: str) -> list[np.ndarray]:
    """Intervals of the intercept and of the slope of clients without rows: those of rows that are unit vectors."""
    posterior, chosen = (
        model.model_.posterior,
        Resolved(np.full(len(client), -1), cluster if level == "new client" else 0 * cluster - 1),
    )
    columns = []
    for row in np.eye(2):
        X = np.tile(row, (len(client), 1))
        if posterior.is_averaged("client"):
            columns.append(posterior.averaged(X, chosen, "client", 0.95))
            continue
        centre = X @ np.concatenate([model.cluster_coef_, model.global_coef_[None]])[chosen.index(0)].T
        half = posterior.reach(0.95, X, chosen, "client") * np.sqrt(posterior.margin_variance(X, chosen, "client"))
        columns.append((np.diag(centre) - half, np.diag(centre) + half))
    return [np.column_stack([ends[side] for ends in columns]) for side in (0, 1)]


def known_widths(model: Any, cluster_sd: np.ndarray, client_sd: np.ndarray) -> dict[str, np.ndarray]:
    """Widths of intervals that know the variance components, for a residual sd of 1."""
    learned, S, above = model.model_.learned, np.diag(client_sd**2), np.diag(cluster_sd**2)
    spread = Spread.of_covariances(S[None], learned.tree.n_clients)
    seen = eliminate(learned.units, spread, learned.tree.cluster_ptr)
    whole, _ = invert(np.linalg.solve(np.eye(2) + seen.C @ above, seen.C).sum(axis=0))
    clusters = cluster_covariances(seen.C, above, whole)
    clients = posterior(learned.units.C, spread, learned.tree.parent, clusters)
    covariances = (clients, clusters, whole, clusters + S, whole + above + S)
    return {name: 2 * 1.96 * np.sqrt(np.einsum("...aa->...a", V)) for name, V in zip(LEVELS, covariances, strict=True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sets", type=int, default=2000)
    parser.add_argument("--logistic-sets", type=int, default=200)
    parser.add_argument("--only", default="")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    results = {}
    print(f"{'coverage in % (width relative to known components)':<66}" + "".join(f"{name:>14}" for name in LEVELS))
    for design in DESIGNS:
        if asked.only not in str(design):
            continue
        sets = asked.sets if design.family == "gaussian" else asked.logistic_sets
        inside, wide = (np.array(part) for part in zip(*(measured(design, seed) for seed in range(sets)), strict=True))
        cells = [
            f"{100 * share:.1f} ({width:.2f})" for share, width in zip(inside.mean(axis=0), wide.mean(axis=0), strict=True)
        ]
        print(f"{design!s:<66}" + "".join(f"{cell:>14}" for cell in cells), flush=True)
        error = inside.std(axis=0) / np.sqrt(sets)
        results[str(design)] = {"sets": sets, "coverage": dict(zip(LEVELS, inside.mean(axis=0).round(4).tolist(), strict=True))}
        results[str(design)]["error"] = dict(zip(LEVELS, error.round(4).tolist(), strict=True))
    if asked.json:
        asked.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
