"""Predictions for groups that were not seen: means over groups, against quadrature, R and simulated data."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
from scipy import integrate, stats
from scipy.special import expit

from covey import (
    HierarchicalClassifier,
    HierarchicalGammaRegressor,
    HierarchicalPoissonRegressor,
    HierarchicalRegressor,
    Spec,
    load,
)
from covey.datasets import simulate
from covey.federation.simulate import simulate_sites

ESTIMATORS = {
    "gaussian": HierarchicalRegressor,
    "bernoulli": HierarchicalClassifier,
    "poisson": HierarchicalPoissonRegressor,
    "gamma": HierarchicalGammaRegressor,
}
MEANS = {"gaussian": lambda m: m, "bernoulli": expit, "poisson": np.exp, "gamma": np.exp}

# Rows of a client and cluster of the training data, of a new client, and of a new cluster.
ASK = {"client": [0, 99, 99], "cluster": [0, 0, 99]}


def predicted(model, X, **how):
    result = model.predict_proba(X, **how)[:, 1] if hasattr(model, "predict_proba") else model.predict(X, **how)
    return np.asarray(result)


def over(mean, margin, variance):
    """The mean of ``mean(margin + sd Z)``, by adaptive quadrature."""
    sd = np.sqrt(variance)
    return integrate.quad(lambda z: mean(margin + sd * z) * stats.norm.pdf(z), -12, 12, epsabs=1e-13, limit=200)[0]


@pytest.fixture(scope="module", params=list(ESTIMATORS))
def fitted(request):
    """A family, and its model with random intercepts and slopes of clients in clusters."""
    family = request.param
    drawn = simulate(
        family, clusters=8, clients=10, rows=12, d=2, wbar=[0.3, -0.4], intercept=True, cluster_sd=0.7, client_sd=0.6, seed=4
    )
    model = ESTIMATORS[family](covariance="full", fit_intercept=False, tests=False)
    return family, model.fit(drawn.X, drawn.y, client=drawn.client, cluster=drawn.cluster)


@pytest.mark.parametrize("level", ["client", "cluster", "global"])
def test_unknown_groups_are_integrated_out(fitted, level):
    family, model = fitted
    mean, found = MEANS[family], model.components_
    own, above = (part.embedded(model.terms_)[0] for part in (found.client, found.cluster))
    assert min(np.diag(own).min(), np.diag(above).min()) > 0.01
    x = np.array([1.0, 1.7])
    got = predicted(model, np.tile(x, (3, 1)), level=level, **ASK)
    at_zero = predicted(model, np.tile(x, (3, 1)), level=level, **ASK, expected=False)
    client, cluster, whole = model.coef_[0], model.cluster_coef_[0], model.global_coef_
    everything = own + above
    by_level = {
        "client": ((client, 0 * own), (cluster, own), (whole, everything)),
        "cluster": ((cluster, own), (cluster, own), (whole, everything)),
        "global": ((whole, everything),) * 3,
    }
    for at, (coefficients, covariance) in enumerate(by_level[level]):
        assert got[at] == pytest.approx(over(mean, x @ coefficients, x @ covariance @ x), rel=1e-8)
        assert at_zero[at] == pytest.approx(mean(x @ coefficients), rel=1e-12)


def test_an_offset_moves_the_margin(fitted):
    family, model = fitted
    found, X, offset = model.components_, np.array([[1.0, 0.5]]), 0.8
    S = sum(part.embedded(model.terms_)[0] for part in (found.client, found.cluster))
    expected = over(MEANS[family], X[0] @ model.global_coef_ + offset, X[0] @ S @ X[0])
    assert predicted(model, X, level="global", offset=[offset])[0] == pytest.approx(expected, rel=1e-8)


def test_each_cluster_may_have_a_client_variance_of_its_own():
    drawn = simulate("poisson", clusters=5, clients=12, rows=10, d=1, intercept=True, cluster_sd=0.5, client_sd=0.7, seed=3)
    model = HierarchicalPoissonRegressor(per_cluster=True, fit_intercept=False, tests=False)
    model.fit(drawn.X, drawn.y, client=drawn.client, cluster=drawn.cluster)
    variances = model.components_.client.covariance[:, 0, 0]
    got = model.predict(np.ones((6, 1)), cluster=[0, 1, 2, 3, 4, 99], level="cluster")
    np.testing.assert_allclose(got[:5], np.exp(model.cluster_coef_[:, 0] + variances / 2), rtol=1e-12)
    # A new cluster has the mean variance of the others.
    spread = variances.mean() + model.components_.cluster.covariance[0, 0, 0]
    assert got[5] == pytest.approx(np.exp(model.global_coef_[0] + spread / 2))


def test_classes_are_those_of_the_expected_probability(fitted):
    family, model = fitted
    if family != "bernoulli":
        return
    X, ask = np.column_stack([np.ones(41), np.linspace(-3, 3, 41)]), {"client": [99] * 41, "cluster": [99] * 41}
    p = model.predict_proba(X, **ask)
    np.testing.assert_array_equal(model.predict(X, **ask), model.classes_[(p[:, 1] > 0.5).astype(int)])
    np.testing.assert_array_equal(model.predict(X, **ask), model.predict(X, **ask, expected=False))
    np.testing.assert_array_equal(model.predict_log_proba(X, **ask), np.log(p))
    zero = model.predict_log_proba(X, **ask, expected=False)
    np.testing.assert_allclose(zero[:, 1] - zero[:, 0], model.decision_function(X, **ask), atol=1e-12)
    assert (np.abs(p[:, 1] - 0.5) <= np.abs(np.exp(zero[:, 1]) - 0.5)).all(), "means lie nearer to 1/2"


@pytest.mark.parametrize(
    "settings", [{"gamma": 1.0}, {"baseline": "single-model"}, {"solver": "l2gd", "max_iter": 50, "tol": 1e-2}]
)
@pytest.mark.filterwarnings("ignore::covey.errors.ConvergenceWarning")
def test_without_variance_components_the_effect_is_zero(settings):
    """A given penalty is the same for every term, whatever its scale, so it is not a variance to integrate over."""
    drawn = simulate("bernoulli", clusters=3, clients=5, rows=12, d=1, intercept=True, seed=0)
    model = HierarchicalClassifier(fit_intercept=False, random_state=0, **settings)
    model.fit(drawn.X, drawn.y, client=drawn.client, cluster=drawn.cluster)
    p = model.predict_proba([[1.0]], client=[99], cluster=[99])[0, 1]
    assert p == expit(model.global_coef_[0])
    assert p == model.predict_proba([[1.0]], client=[99], cluster=[99], expected=False)[0, 1]


def test_counts_of_new_groups_have_the_right_mean():
    """300 groups of unit variance: at a random effect of zero the prediction would be 2.6, with a mean of y of 4.5."""
    drawn = simulate(
        "poisson", clusters=1, clients=300, rows=10, d=1, cluster_sd=0.0, client_sd=1.0, wbar=1.0, intercept=True, seed=0
    )
    model = HierarchicalPoissonRegressor(fit_intercept=False, tests=False).fit(drawn.X, drawn.y, client=drawn.client)
    assert model.predict([[1.0]], client=[999], expected=False)[0] < 0.65 * drawn.y.mean()
    assert model.predict([[1.0]], client=[999])[0] == pytest.approx(drawn.y.mean(), rel=0.03)


# Ticks on the heads of 403 red grouse chicks (Elston et al. 2001, Parasitology 122; ``grouseticks`` of lme4): for each location
# and year the number of chicks and of their ticks. A sum of Poisson counts with an offset has the likelihood of the counts.
GROUSE = {
    95: "4 3 67, 7 8 386, 9 4 40, 11 4 39, 13 7 33, 14 6 9, 17 3 11, 19 6 38, 22 2 8, 26 3 15, 28 4 6, 30 1 2, 31 5 3, 32 2 0, "
    "33 3 5, 34 3 1, 36 1 0, 37 4 5, 38 4 2, 44 4 3, 45 3 0, 47 3 0, 48 3 4, 51 10 4, 53 1 3, 54 4 0, 59 4 0, 60 2 7, 62 2 3, "
    "63 8 2",
    96: "1 5 88, 3 7 13, 4 6 300, 5 3 52, 6 9 119, 8 2 18, 10 1 7, 11 1 24, 12 3 12, 13 1 7, 14 16 133, 18 3 15, 19 4 26, "
    "20 5 53, 21 1 3, 23 8 117, 24 5 332, 27 3 6, 28 5 37, 29 5 9, 30 3 23, 36 8 78, 37 4 6, 40 6 40, 42 5 10, 46 3 46, "
    "47 2 3, 50 12 93, 52 3 0, 53 5 22, 55 2 9, 60 2 11, 61 3 3, 62 4 5",
    97: "1 3 3, 2 3 4, 4 11 27, 10 2 2, 11 1 3, 14 2 0, 15 7 5, 16 3 15, 19 10 18, 22 6 12, 25 7 18, 28 10 21, 30 3 0, 31 3 3, "
    "34 2 0, 35 1 0, 36 7 5, 39 3 3, 41 3 2, 43 1 0, 49 5 1, 50 5 0, 51 4 0, 56 11 2, 57 7 3, 58 2 0, 62 3 1, 63 6 3",
}
# R 4.2.2, lme4 1.1.31, on the 403 chicks, for each fold = location %% 5 left out:
#   m <- glmer(TICKS ~ YEAR + (1 | LOCATION), poisson); p <- predict(m, left_out, type = "response", re.form = NA)
# the sd of locations, sum(p), and sum(p) * exp(sd^2 / 2).
LME4 = [
    (1.3760949, 172.841845, 445.499254),
    (1.31400789, 187.127742, 443.678350),
    (1.16244928, 196.561910, 386.302834),
    (1.40959594, 233.599039, 630.861593),
    (1.13026235, 254.215853, 481.511545),
]


def test_new_locations_of_grouse_ticks_as_in_lme4():
    cells = [(year, *map(int, cell.split())) for year, text in GROUSE.items() for cell in text.split(", ")]
    frame = pl.DataFrame(cells, schema=["year", "location", "chicks", "ticks"], orient="row")
    frame = frame.with_columns(log_chicks=pl.col("chicks").log())
    assert (frame["chicks"].sum(), frame["ticks"].sum()) == (403, 2567)
    model = HierarchicalPoissonRegressor(formula="ticks ~ C(year) + (1 | location)", offset="log_chicks", tests=False)
    total = 0.0
    for fold, (sd, at_zero, mean) in enumerate(LME4):
        left_out = frame["location"] % 5 == fold
        model.fit(frame.filter(~left_out))
        assert model.components_.client.sd[0, 0] == pytest.approx(sd, rel=1e-4)
        assert model.predict(frame.filter(left_out), expected=False).sum() == pytest.approx(at_zero, rel=1e-3)
        assert model.predict(frame.filter(left_out)).sum() == pytest.approx(mean, rel=1e-3)
        total += model.predict(frame.filter(left_out)).sum()
    # 2.59 ticks a chick at an effect of zero, 5.93 as a mean over locations, 6.37 observed.
    assert total / 403 == pytest.approx(5.93, abs=0.01)


@pytest.mark.parametrize(
    ("family", "wbar", "sds", "rows"),
    [("bernoulli", 1.5, (1.0, 1.5), 15), ("poisson", 0.5, (0.6, 0.8), 6), ("gamma", 0.5, (0.6, 0.8), 6)],
)
def test_predictions_for_new_groups_are_calibrated(family, wbar, sds, rows):
    """New clients in clusters that were seen, and clients of new clusters: the mean prediction is the mean response."""
    off = np.array([_off(family, wbar, sds, rows, seed) for seed in range(16)])  # (seeds, kind of group, expected or not)
    centre, error = off.mean(axis=0), off.std(axis=0, ddof=1) / np.sqrt(len(off))
    assert (np.abs(centre[:, 0]) < 3 * error[:, 0]).all(), centre
    assert (np.abs(centre[:, 1]) > 5 * error[:, 1]).all(), centre


def _off(family, wbar, sds, rows, seed):
    """Mean prediction minus mean response: for new clients and new clusters, as a mean over groups and at effect zero."""
    drawn = simulate(
        family,
        clusters=60,
        clients=8,
        rows=rows,
        d=1,
        wbar=wbar,
        intercept=True,
        cluster_sd=sds[0],
        client_sd=sds[1],
        seed=seed,
    )
    new_cluster = drawn.cluster < 20
    new_client = (drawn.client % 8 < 4) & ~new_cluster
    seen = ~(new_cluster | new_client)
    model = ESTIMATORS[family](fit_intercept=False, tests=False)
    model.fit(drawn.X[seen], drawn.y[seen], client=drawn.client[seen], cluster=drawn.cluster[seen])
    return [
        [
            (predicted(model, drawn.X[new], cluster=drawn.cluster[new], expected=how) - drawn.y[new]).mean()
            for how in (True, False)
        ]
        for new in (new_client, new_cluster)
    ]


def test_intervals_are_of_the_same_quantity_as_predictions(fitted):
    """At a coarser level both are of a mean over clients; at the client level the interval is of the client's own mean."""
    family, model = fitted
    X, found = np.array([[1.0, 0.3]] * 3), model.components_
    own = X[0] @ found.client.embedded(model.terms_)[0] @ X[0]
    both = own + X[0] @ found.cluster.embedded(model.terms_)[0] @ X[0]
    posterior, mean = model.model_.posterior, MEANS[family]
    for level, spread in (("client", None), ("cluster", own), ("global", both)):
        point, low, high = (
            predicted(model, X, level=level, **ASK),
            *model.predict_interval(X, level=level, coverage=0.9, **ASK).T,
        )
        assert ((low < point) & (point < high)).all()
        zero = model.predict_interval(X, level=level, coverage=0.9, **ASK, expected=False)
        if spread is None:
            np.testing.assert_array_equal(zero, np.column_stack([low, high]))
            continue
        margins = model.model_.margin(X, level=level, **{key: np.array(ids) for key, ids in ASK.items()})
        if posterior.is_averaged(level):  # a linear model, whose intervals average over the variance components
            ends = posterior.averaged(X, margins[1], level, 0.9)
        else:
            half = posterior.reach(0.9, X, margins[1], level) * np.sqrt(posterior.margin_variance(X, margins[1], level))
            ends = margins[0] - half, margins[0] + half
        for at in range(3):
            for side, end in ((low, ends[0][at]), (high, ends[1][at])):
                assert side[at] == pytest.approx(over(mean, end, spread), rel=1e-7)
        np.testing.assert_allclose(zero[:, 0], mean(ends[0]))


@pytest.mark.parametrize("family", ["gaussian", "poisson"])
def test_intervals_of_new_responses_at_coarser_levels_cover(family):
    """With noise, a row at the cluster or global level is a response of a client that may be any."""
    drawn = simulate(
        family, clusters=40, clients=20, rows=6, d=1, wbar=1.0, intercept=True, cluster_sd=0.5, client_sd=0.8, seed=2
    )
    new = drawn.client % 20 < 5
    model = ESTIMATORS[family](fit_intercept=False, tests=False)
    model.fit(drawn.X[~new], drawn.y[~new], client=drawn.client[~new], cluster=drawn.cluster[~new])
    for level in ("cluster", "global"):
        ask = {"cluster": drawn.cluster[new], "level": level, "noise": True, "coverage": 0.9}
        (low, high), y = model.predict_interval(drawn.X[new], **ask).T, drawn.y[new]
        assert 0.86 < ((low <= y) & (y <= high)).mean() < (0.94 if family == "gaussian" else 0.98)  # counts are coarse
        narrow = model.predict_interval(drawn.X[new], **ask, expected=False)
        assert ((narrow[:, 0] <= y) & (y <= narrow[:, 1])).mean() < 0.86


def test_models_without_sums_and_at_operators_predict_the_same(tmp_path):
    drawn = simulate("poisson", clusters=4, clients=6, rows=8, d=1, intercept=True, cluster_sd=0.5, client_sd=0.7, seed=5)
    frame = drawn.frame().with_columns(pl.col("client", "cluster").cast(pl.String))
    spec = Spec(family="poisson", formula="y ~ 1 + (1 | cluster/client)", tests=False)
    model = HierarchicalPoissonRegressor(formula=spec.formula, tests=False).fit(frame)
    new = frame[:4].with_columns(client=pl.Series(["0", "new", "new", "new"]), cluster=pl.Series(["0", "0", "1", "new"]))
    expected = model.predict(new)
    again = load(model.save(tmp_path / "model", sums=False))
    np.testing.assert_array_equal(again.predict(new), expected)
    np.testing.assert_array_equal(again.predict_interval(new, level="global"), model.predict_interval(new, level="global"))
    run = simulate_sites(frame, spec, 3, models=tmp_path)
    operator = run.outcome.model
    # The operator has no clients, so its answer is a mean over clients for all rows.
    _, mean, _ = operator.response(new)
    np.testing.assert_allclose(mean[1:], expected[1:], rtol=1e-9)
    assert mean[0] == pytest.approx(model.predict(new, level="cluster")[0], rel=1e-9)
    for site in run.outcome.roster:
        np.testing.assert_allclose(load(tmp_path / site).predict(new)[1:], expected[1:], rtol=1e-9)
