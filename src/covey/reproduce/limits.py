"""Limits of unbiased estimators: Propositions 5.3 (not_gls) and 5.4 (JS) of arXiv:2204.13619.

- Proposition 5.3 (not_gls) states that generalised least squares on all clients' rows has no larger error than the minimiser.
  It needs one dense problem for each client, which the paper calls costly. This study solves these problems as the proof
  defines them. The solution equals the minimiser for every design (errata 5).
- Proposition 5.4 (JS) states that a biased estimator has no larger error, and leaves the shrinkage factor open. The server of
  covey computes the factor. This study measures the gain by the number of coefficients and the length of the true global model.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import polars as pl

from covey._typing import Floats
from covey.datasets import simulate
from covey.losses import Gaussian
from covey.objective.objective import Penalty
from covey.reproduce.study import Say, Study, Table, generator, silent, tracked
from covey.solvers import minimise
from covey.tables.rows import GroupedData

JAMES_STEIN_DESIGNS = ("one cluster", "five clusters", "unequal columns")
DIMENSIONS = (2, 3, 4, 5, 10, 20, 50)
SIZES = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0)

_ROUNDING = 1e-9


def study(*, seed: int = 0, quick: bool = False, say: Say = silent) -> Study:
    """Dense generalised least squares on random designs, then James-Stein; ``quick`` takes fewer draws and dimensions."""
    draws, repeats, dimensions = (3, 20, (2, 5, 20)) if quick else (20, 150, DIMENSIONS)
    equal = gls_table(draws, seed, say)
    gain = james_stein_table(dimensions, repeats, seed, say)
    return Study(
        name="limits",
        title="Limits of unbiased estimators: generalised least squares and James-Stein",
        settings={"designs": draws, "repeats": repeats, "dimensions": list(dimensions), "sizes": list(SIZES), "seed": seed},
        findings=findings(equal, gain),
        tables=(
            Table("gls", "Dense generalised least squares (Proposition 5.3, not_gls) against the minimiser", equal, digits=-2),
            Table(
                "james-stein",
                "Mean squared error with James-Stein divided by that without, by coefficients d and |wbar*|",
                gain,
                "A ratio below 1 is a gain. 'clients' and 'global model' say whose error it is. One cluster: ten clients as in "
                "Proposition 5.4 (JS). Five clusters: 4 clients each, with 10 rows each. Unequal columns: three clients in one "
                "cluster whose data have little information on the first coefficient (precision 0.3; the others have 100), "
                "and wbar* lies along it.",
            ),
        ),
        quick=quick,
    )


# Generalised least squares


def gls(data: GroupedData, penalty: Penalty, client: int) -> Floats:
    """The estimator ``theta_tilde`` of one client in the proof of Proposition 5.3 (not_gls).

    It treats all rows as noisy observations of this client's ``theta``, here ``theta_1``. The noise of a row of client ``a`` is
    ``x'(theta_a - theta_1)`` plus the residual. ``theta_a - theta_1`` has the covariance of the ``xi`` in the proof:
    ``1/lam_j`` for cluster ``j`` and ``1/gamma_i`` for client ``i``. This is one dense N x N system for N rows.
    """
    parent, owner = data.hierarchy.parent, data.client_of_row
    within, across = 1 / penalty.gamma, 1 / penalty.lam
    a, b = owner[:, None], owner[None, :]
    same, cluster = parent[client], parent[owner]
    C: Floats = (a == b) * within[owner][:, None] + within[client] * (1.0 - (a == client) - (b == client))
    C += (cluster[:, None] == cluster[None, :]) * across[cluster][:, None]
    C += across[same] * (1.0 - (cluster[:, None] == same) - (cluster[None, :] == same))
    noise = 1.0 if data.weights is None else 1 / data.weights
    omega = C * (data.X @ data.X.T) + np.diag(np.broadcast_to(noise, data.n_rows))
    weighted = np.linalg.solve(omega, np.column_stack([data.X, data.y]))
    normal = data.X.T @ weighted
    solved: Floats = np.linalg.solve(normal[:, :-1], normal[:, -1])
    return solved


def _orthogonal(rng: np.random.Generator, rows: int, d: int) -> Floats:
    """``X'X`` is a multiple of the identity, the case of Theorem 5.1 (blue)."""
    X: Floats = rng.uniform(0.5, 3) * np.linalg.qr(rng.standard_normal((max(rows, d), d)))[0]
    return X


def _collinear(rng: np.random.Generator, rows: int, d: int) -> Floats:
    X = rng.standard_normal((rows, d))
    X[:, -1] = X[:, 0] + 0.01 * X[:, -1]
    return X


def _gaussian(rng: np.random.Generator, rows: int, d: int) -> Floats:
    return rng.standard_normal((rows, d))


DESIGNS: dict[str, tuple[Callable[[np.random.Generator, int, int], Floats], tuple[int, int], bool]] = {
    "orthogonal (thm. blue)": (_orthogonal, (4, 9), False),
    "Gaussian": (_gaussian, (4, 9), False),
    "fewer rows than coefficients": (_gaussian, (1, 4), False),
    "nearly collinear columns": (_collinear, (4, 9), False),
    "unequal variances everywhere": (_gaussian, (2, 9), True),
}


def gls_table(draws: int, seed: int, say: Say) -> pl.DataFrame:
    """The largest difference between dense generalised least squares and the minimiser, over all clients and draws."""
    rows = []
    for at, name in enumerate(tracked(list(DESIGNS), "generalised least squares", say)):
        worst, clients = 0.0, 0
        for draw in range(draws):
            data, penalty = _problem(generator(seed, 6, at, draw), name)
            theta = minimise(data, Gaussian(), penalty).theta
            dense = np.array([gls(data, penalty, i) for i in range(data.n_clients)])
            worst = max(worst, float(np.abs(dense - theta).max() / np.abs(theta).max()))
            clients += data.n_clients
        rows.append({"design": name, "draws": draws, "dense problems": clients, "largest relative difference": worst})
    return pl.DataFrame(rows)


def _problem(rng: np.random.Generator, name: str) -> tuple[GroupedData, Penalty]:
    """Data and penalties drawn from one of ``DESIGNS``."""
    design, sizes, unequal = DESIGNS[name]
    k, d = int(rng.integers(2, 5)), 4
    clients = rng.integers(2, 5, size=k)
    parent = np.repeat(np.arange(k), clients)
    n = len(parent)
    blocks = [design(rng, int(rng.integers(*sizes)), d) for _ in range(n)]
    gamma, lam = rng.uniform(0.3, 3, size=k), np.full(k, rng.uniform(0.3, 3))
    sigma2 = np.ones(n)
    if unequal:
        lam, sigma2 = rng.uniform(0.3, 3, size=k), rng.uniform(0.2, 4, size=n)
    w = rng.standard_normal(d) + rng.standard_normal((k, d)) / np.sqrt(lam)[:, None]
    theta = w[parent] + rng.standard_normal((n, d)) / np.sqrt(gamma[parent])[:, None]
    y = [X @ theta[i] + np.sqrt(sigma2[i]) * rng.standard_normal(len(X)) for i, X in enumerate(blocks)]
    client = np.repeat(np.arange(n), [len(X) for X in blocks])
    weights = None if not unequal else 1 / sigma2[client]
    data = GroupedData.from_arrays(np.concatenate(blocks), np.concatenate(y), client, parent[client], weights=weights)
    return data, Penalty.of(data.hierarchy, gamma=gamma[parent], lam=lam)


# James-Stein


def james_stein_table(dimensions: tuple[int, ...], repeats: int, seed: int, say: Say) -> pl.DataFrame:
    """Mean squared error with James-Stein divided by that without, for clients and global model, with standard errors."""
    rows = []
    for d in tracked(dimensions, "James-Stein", say):
        for design in JAMES_STEIN_DESIGNS:
            errors = np.array([_errors(design, d, generator(seed, 7, d, repeat)) for repeat in range(repeats)])
            for s, size in enumerate(SIZES):
                (plain, shrunk), (plain_top, shrunk_top) = errors[:, s, 0].T, errors[:, s, 1].T
                ratio = shrunk.mean() / plain.mean()
                error = (shrunk - ratio * plain).std() / np.sqrt(repeats) / plain.mean()
                ratios = {"clients": ratio, "standard error": error, "global model": shrunk_top.mean() / plain_top.mean()}
                rows.append({"design": design, "d": d, "|wbar*|": size, **ratios})
    return pl.DataFrame(rows)


def _errors(design: str, d: int, rng: np.random.Generator) -> Floats:
    """Squared errors of one draw: ``(sizes of wbar*, clients or global model, without or with James-Stein)``."""
    direction = rng.standard_normal(d)
    direction /= np.linalg.norm(direction)
    if design == "five clusters":
        drawn = simulate(clusters=5, clients=4, rows=10, d=d, seed=rng)
        X, y, theta, client, cluster, lam = drawn.X, drawn.y, drawn.theta, drawn.client, drawn.cluster, 1.0
    else:
        n, scale = 10, np.ones(d)
        if design == "unequal columns":
            n, scale, direction = 3, np.sqrt(np.append(0.3, np.full(d - 1, 100.0))), np.eye(d)[0]
        theta = rng.standard_normal((n, d))
        X, client, cluster = np.tile(np.diag(scale), (n, 1)), np.repeat(np.arange(n), d), np.zeros(n * d, dtype=int)
        y, lam = (theta * scale).ravel() + rng.standard_normal(n * d), np.inf
    errors = np.empty((len(SIZES), 2, 2))
    for s, size in enumerate(SIZES):
        wbar = size * direction
        data = GroupedData.from_arrays(X, y + X @ wbar, client, cluster)
        penalty = Penalty.of(data.hierarchy, gamma=1.0, lam=lam)
        for j, shrink in enumerate((False, True)):
            fit = minimise(data, Gaussian(), penalty, james_stein=shrink)
            errors[s, 0, j] = ((fit.theta - theta - wbar) ** 2).sum(axis=1).mean()
            errors[s, 1, j] = ((fit.wbar - wbar) ** 2).sum()
    return errors


def findings(equal: pl.DataFrame, gain: pl.DataFrame) -> tuple[str, ...]:
    """Sentences about the tables."""
    worst = max(equal["largest relative difference"].to_list())
    same = "they are the same estimator" if worst < _ROUNDING else "they are NOT the same estimator"
    best = gain.sort("clients").row(0, named=True)
    harm = gain.filter(pl.col("clients") > 1 + 3 * pl.col("standard error") + 1e-12)
    cells = [f"{row['design']}, d = {row['d']}, |wbar*| = {row['|wbar*|']:g}: {row['clients']:.3f}" for row in harm.to_dicts()]
    return (
        f"In {equal['dense problems'].sum():,} dense problems of five kinds, generalised least squares and the minimiser "
        f"differ by at most {worst:.0e} of the largest coefficient: {same}. The minimiser needs one exchange.",
        f"The largest gain of James-Stein is {100 * (1 - best['clients']):.1f}% of the clients' squared error "
        f"({best['design']}, d = {best['d']}, |wbar*| = {best['|wbar*|']:g}).",
        f"James-Stein raises the clients' error by more than three standard errors in {len(cells)} of {gain.height} cells"
        + (f" ({cells[0]})." if cells else "."),
    )
