"""The coverage of intervals, by simulation from the true model, with estimated variance components.

``benchmarks/interval_coverage.py`` measures more designs, with 2,000 data sets each.
"""

from __future__ import annotations

import numpy as np
import pytest

from covey import HierarchicalClassifier, HierarchicalRegressor
from covey.datasets import simulate

WHAT = ("clients", "clusters", "whole", "new rows", "new clients", "new clusters")


def covered(family, clusters, clients, rows, coverages, seed, cluster_sd=0.7, **settings):
    """The share of intervals of one data set that contain the true value: ``(coverages, WHAT)``."""
    fresh = 4
    drawn = simulate(
        family, clusters=clusters + fresh, clients=clients + 1, rows=rows + 1, d=2, wbar=[0.3, -0.4], cluster_sd=cluster_sd,
        client_sd=0.5, intercept=True, seed=seed,
    )  # fmt: skip
    first_row = np.arange(len(drawn.y)) % (rows + 1) == 0
    held_client, held_cluster = drawn.client % (clients + 1) == 0, drawn.cluster < fresh
    fitted = ~(first_row | held_client | held_cluster)
    X, y, client, cluster = drawn.X[:, 1:], drawn.y, drawn.client, drawn.cluster
    estimator = HierarchicalRegressor if family == "gaussian" else HierarchicalClassifier
    model = estimator(tests=False, **settings).fit(X[fitted], y[fitted], client=client[fitted], cluster=cluster[fitted])
    truth = {"client": drawn.theta[model.clients_], "cluster": drawn.w[model.clusters_], "global": drawn.wbar}
    expected = np.einsum("ld,ld->l", drawn.X, drawn.theta[client])
    expected = expected if family == "gaussian" else 1 / (1 + np.exp(-expected))
    shares = []
    for coverage in coverages:
        inside = []
        for level, values in truth.items():
            frame = model.coef_frame(level, coverage)
            inside.append((frame["lower"].to_numpy() <= values.ravel()) & (values.ravel() <= frame["upper"].to_numpy()))
        noise = family == "gaussian"
        for rows_of, target, noisy in (
            (first_row & ~held_client & ~held_cluster, y if noise else expected, noise),
            (first_row & held_client & ~held_cluster, expected, False),
            (first_row & held_cluster, expected, False),
        ):
            low, high = model.predict_interval(
                X[rows_of], client[rows_of], cluster[rows_of], coverage=coverage, noise=noisy
            ).T  # fmt: skip
            inside.append((low <= target[rows_of]) & (target[rows_of] <= high))
        shares.append([np.mean(each) for each in inside])
    return np.array(shares)


def test_gaussian_intervals_have_their_nominal_coverage():
    coverages = np.array([0.9, 0.95])
    shares = np.array([covered("gaussian", 25, 12, 6, coverages, seed) for seed in range(50)])
    mean, error = shares.mean(axis=0), shares.std(axis=0, ddof=1) / np.sqrt(len(shares))
    # A share near 1 in every data set has almost no spread, so allow for the spread of independent units.
    off = np.abs(mean - coverages[:, None]) / np.maximum(error, 1e-3)
    assert (off < 3.5).all(), dict(zip(WHAT, zip(mean.T.round(3).tolist(), off.T.round(1).tolist(), strict=True), strict=True))


@pytest.mark.parametrize(("clusters", "clients", "cluster_sd"), [(3, 6, 1.0), (5, 10, 0.7), (20, 10, 0.1)])
def test_gaussian_intervals_with_few_clusters_or_variances_near_zero(clusters, clients, cluster_sd):
    """At a nominal 95%, 93% or more in the long run (90% with 3 clusters); these are few data sets.

    With the components taken as known, it was 85%, 91% and 83% for the coefficients of clusters.
    """
    shares = [covered("gaussian", clusters, clients, 6, [0.95], seed, cluster_sd)[0] for seed in range(40)]
    coverage = dict(zip(WHAT, np.mean(shares, axis=0).round(3).tolist(), strict=True))
    assert coverage.pop("whole") > 0.85  # two coefficients in each data set
    assert min(coverage.values()) > 0.9, coverage
    assert coverage["clusters"] > 0.92, coverage


@pytest.mark.filterwarnings("ignore::covey.errors.ConvergenceWarning")
def test_logistic_intervals_have_about_their_nominal_coverage():
    shares = np.array([covered("bernoulli", 15, 8, 20, [0.95], seed) for seed in range(12)])[:, 0]
    coverage = dict(zip(WHAT, shares.mean(axis=0).round(3).tolist(), strict=True))
    print("coverage of 95% intervals, logistic:", coverage)
    assert min(coverage["clients"], coverage["new rows"], coverage["new clients"]) > 0.85
    assert max(coverage["clients"], coverage["new rows"], coverage["new clients"]) < 0.99
