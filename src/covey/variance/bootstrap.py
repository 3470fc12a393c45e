"""Parametric bootstrap of the variance components: draw data from the fitted model and estimate again.

For a linear model it draws sums instead of responses, so it needs no rows. Given ``A_i = X_i'X_i`` the sums of a client with
coefficients ``theta`` are normal, ``b_i ~ N(A_i theta, s2 A_i)``. Its residual sum of squares is ``s2`` times a chi-squared.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import polars as pl

from covey._typing import Floats
from covey.errors import ConvergenceWarning, SolverError
from covey.losses import Loss
from covey.nodes.network import InMemory
from covey.solvers.direct.elimination import Quadratic, Spread
from covey.tables.rows import GroupedData
from covey.variance.columns import ClientSums
from covey.variance.components import Components, Learned
from covey.variance.estimate import estimate, finish, search
from covey.variance.linear_likelihood import LinearCriterion
from covey.variance.parameters import Shape
from covey.variance.sampling import survey_of_sums

Count = Callable[[int, int], None]


@dataclass(frozen=True)
class Bootstrap:
    """Components of the fitted model, and of the fits to data drawn from it."""

    fitted: Components
    draws: tuple[Components, ...]

    def intervals(self, coverage: float = 0.95) -> pl.DataFrame:
        """Standard deviations with percentile intervals: one row per level and term, and per cluster with ``per_cluster``."""
        rows = []
        tail = (1 - coverage) / 2
        for level in ("client", "cluster"):
            fitted = getattr(self.fitted, level)
            sds = np.array([getattr(drawn, level).sd for drawn in self.draws])
            for m in range(len(fitted.covariance)):
                for a, term in enumerate(fitted.terms):
                    rows.append((level, m if len(fitted.covariance) > 1 else None, term, fitted.sd[m, a], sds[:, m, a]))
        if self.fitted.residual is not None:
            sds = np.sqrt(np.array([drawn.residual for drawn in self.draws], dtype=np.float64))
            rows.append(("residual", None, None, np.sqrt(self.fitted.residual), sds))
        schema = {"level": pl.String, "cluster": pl.Int64, "term": pl.String, "sd": pl.Float64}
        table = pl.DataFrame([row[:4] for row in rows], schema=schema, orient="row")
        low, high = (np.array([np.quantile(row[4], at) for row in rows]) for at in (tail, 1 - tail))
        return table.with_columns(
            std_error=pl.Series([row[4].std(ddof=1) for row in rows]), lower=pl.Series(low), upper=pl.Series(high)
        )


def bootstrap(
    learned: Learned,
    shape: Shape,
    wbar: Floats,
    *,
    data: GroupedData | None = None,
    loss: Loss | None = None,
    draws: int = 200,
    seed: int = 0,
    progress: Count | None = None,
) -> Bootstrap:
    """Draw from the fitted model and estimate again. All but linear models need their rows, ``data`` and ``loss``."""
    if draws < 2:
        raise SolverError(f"A bootstrap needs at least 2 draws to estimate their spread. Got {draws!r} instead.")
    by_rows = learned.components.method == "Laplace"
    if by_rows and (data is None or loss is None):
        raise SolverError("The bootstrap of this family needs the rows of the fit; pass them as you passed them to fit.")
    if by_rows and loss is not None and data is not None and data.weights is not None:
        loss.check_drawable(data.weights)
    rng, reml = np.random.default_rng(seed), learned.components.method == "REML"
    estimates = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        for theta in _draw_clients(learned, wbar, rng, draws):
            if data is not None and loss is not None and not loss.reml:
                y = loss.draw_rows(data.margin(theta), data.weights, rng, learned.dispersion)
                components = estimate(InMemory.of(replace(data, y=y), loss), shape)[1].components
            else:
                sums = _draw_sums(learned, theta, rng)
                criterion = LinearCriterion(survey_of_sums(sums, learned), shape, reml=reml)
                components = finish(criterion, search(criterion))[1].components
            estimates.append(components)
            if progress is not None:
                progress(len(estimates), draws)
    return Bootstrap(learned.components, tuple(estimates))


def _draw_clients(learned: Learned, wbar: Floats, rng: np.random.Generator, draws: int) -> Iterator[Floats]:
    client, cluster, tree = _roots(learned.client), _roots(learned.cluster), learned.tree
    scale = np.sqrt(learned.dispersion)
    for _ in range(draws):
        w = wbar + scale * _multiply(cluster, rng.normal(size=(tree.n_clusters, len(wbar))))
        yield tree.down(w) + scale * _multiply(client, rng.normal(size=(tree.n_clients, len(wbar))))


def _roots(spread: Spread) -> Floats:
    values, vectors = np.linalg.eigh(spread.shape)
    return np.asarray(vectors * np.sqrt(np.maximum(values, 0.0))[:, None, :])


def _multiply(roots: Floats, z: Floats) -> Floats:
    return z @ roots[0].T if len(roots) == 1 else np.asarray(np.einsum("iab,ib->ia", roots, z))


def _draw_sums(learned: Learned, theta: Floats, rng: np.random.Generator) -> ClientSums:
    """The sums of clients with coefficients ``theta``."""
    units, scale = learned.units, np.sqrt(learned.dispersion)
    values, vectors = np.linalg.eigh(units.C)
    solid = values > 1e-10 * np.maximum(values[:, -1:], 1e-300)
    root = np.sqrt(np.where(solid, values, 0.0))
    # In the eigenbasis the projection of the responses on the columns has independent coordinates.
    seen = root * np.einsum("iba,ib->ia", vectors, theta - learned.origin) + scale * solid * rng.normal(size=theta.shape)
    left = learned.dispersion * rng.chisquare(np.maximum(units.n - solid.sum(axis=1), 1e-300))
    left = np.where(units.n > solid.sum(axis=1), left, 0.0)
    r = np.einsum("iab,ib->ia", vectors, root * seen)
    return ClientSums(Quadratic(units.C, r, 0.5 * ((seen**2).sum(axis=1) + left), units.n), learned.origin, learned.log_weights)
