"""Degrees of freedom against lmerTest, intervals against exact integration, and both at a variance of zero.

The numbers of lmerTest are those of version 3.1.3 (R 4.2.2, lme4 1.1.31): ``summary(m)$coefficients[, c("df", "Pr(>|t|)")]``
and ``contest1D(m, L)$df`` of the model ``m`` that is written beside them.
"""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
from scipy import special, stats

from covey import HierarchicalClassifier, HierarchicalRegressor
from covey.datasets import load_radon, simulate
from covey.federation.simulate import simulate_sites
from covey.model.files import load_model
from covey.problem.problem import Spec
from covey.variance import sampling

# lme4's data: 18 subjects on days 0 to 9, and 10 batches (A to J) of 3 casks (a to c) with two samples each.
SLEEP = """
249.56 258.7047 250.8006 321.4398 356.8519 414.6901 382.2038 290.1486 430.5853 466.3535 222.7339 205.2658 202.9778
204.707 207.7161 215.9618 213.6303 217.7272 224.2957 237.3142 199.0539 194.3322 234.32 232.8416 229.3074 220.4579
235.4208 255.7511 261.0125 247.5153 321.5426 300.4002 283.8565 285.133 285.7973 297.5855 280.2396 318.2613 305.3495
354.0487 287.6079 285 301.8206 320.1153 316.2773 293.3187 290.075 334.8177 293.7469 371.5811 234.8606 242.8118 272.9613
309.7688 317.4629 309.9976 454.1619 346.8311 330.3003 253.8644 283.8424 289.555 276.7693 299.8097 297.171 338.1665
332.0265 348.8399 333.36 362.0428 265.4731 276.2012 243.3647 254.6723 279.0244 284.1912 305.5248 331.5229 335.7469
377.299 241.6083 273.9472 254.4907 270.8021 251.4519 254.6362 245.4523 235.311 235.7541 237.2466 312.3666 313.8058
291.6112 346.1222 365.7324 391.8385 404.2601 416.6923 455.8643 458.9167 236.1032 230.3167 238.9256 254.922 250.7103
269.7744 281.5648 308.102 336.2806 351.6451 256.2968 243.4543 256.2046 255.5271 268.9165 329.7247 379.4445 362.9184
394.4872 389.0527 250.5265 300.0576 269.8939 280.5891 271.8274 304.6336 287.7466 266.5955 321.5418 347.5655 221.6771
298.1939 326.8785 346.8555 348.7402 352.8287 354.4266 360.4326 375.6406 388.5417 271.9235 268.4369 257.2424 277.6566
314.8222 317.2135 298.1353 348.1229 340.28 366.5131 225.264 234.5235 238.9008 240.473 267.5373 344.1937 281.1481
347.5855 365.163 372.2288 269.8804 272.4428 277.8989 281.7895 279.1705 284.512 259.2658 304.6306 350.7807 369.4692
269.4117 273.474 297.5968 310.6316 287.1726 329.6076 334.4818 343.2199 369.1417 364.1236
"""
PASTES = """
62.8 62.6 60.1 62.3 62.7 63.1 60 61.4 57.5 56.9 61.1 58.9 58.7 57.5 63.9 63.1 65.4 63.7 57.1 56.4 56.9 58.6 64.7 64.5
55.1 55.1 54.7 54.2 58.8 57.5 63.4 64.9 59.3 58.1 60.5 60 62.5 62.6 61 58.7 56.9 57.7 59.2 59.4 65.2 66 64.8 64.1 54.8
54.8 64 64 57.7 56.8 58.3 59.3 59.2 59.2 58.9 56.6
"""


def sleepstudy():
    reaction = np.array(SLEEP.split(), dtype=float)
    return pl.DataFrame({"y": reaction, "Days": np.tile(np.arange(10.0), 18), "Subject": np.repeat(np.arange(18), 10)})


def pastes():
    batch, cask = np.repeat(np.arange(10), 6), np.tile(np.repeat(np.arange(3), 2), 10)
    columns = {"batch": batch, "cask": 3 * batch + cask, "late": (batch >= 5) * 1.0, "c": cask - 1.0}
    return pl.DataFrame({"y": np.array(PASTES.split(), dtype=float), **columns})


def radon():
    homes = load_radon().rename({"log_radon": "y"})
    return homes.filter(pl.col("uranium").is_not_null() & pl.col("uranium").is_not_nan())


def flat():
    """A data set whose estimated variance between clusters is zero."""
    drawn = simulate(
        clusters=4,
        clients=6,
        rows=5,
        d=2,
        wbar=[1.0, 0.5],
        cluster_sd=0.0,
        client_sd=0.8,
        intercept=True,
        equal_rows=False,
        seed=1,
    )
    return drawn.frame().drop("x0")


# rows, formula, penalty; df and p of each coefficient; a combination and its df
LMERTEST = {
    # lmer(Reaction ~ Days + (Days | Subject), sleepstudy)
    "full": (sleepstudy, "y ~ Days + (Days | Subject)", "reml", [16.9997, 17.0], [1.17156e-17, 3.26382e-06], [1, 5], 16.9998),
    # lmer(Reaction ~ Days + (Days || Subject), sleepstudy)
    "diagonal": (
        sleepstudy, "y ~ Days + (Days || Subject)", "reml", [18.1562, 18.1561], [1.89338e-18, 2.5941e-06], [1, 5], 25.0661,
    ),
    # the same with REML = FALSE
    "ML": (sleepstudy, "y ~ Days + (Days || Subject)", "ml", [19.3484, 19.3492], [1.56676e-19, 1.29517e-06], [1, 5], 26.3077),
    # Pastes$late <- batch %in% LETTERS[6:10]; Pastes$c <- as.numeric(cask) - 2; lmer(strength ~ late + c + (1 | batch/cask))
    "nested": (
        pastes, "y ~ late + c + (1 | batch/cask)", "reml", [8, 8, 19], [7.30504e-12, 0.776179, 0.293536], [1, 0.5, 1], 21.0281,
    ),
    # lmer(log_radon ~ floor + uranium + (1 | state/county)) on covey.datasets.load_radon()
    "radon": (
        radon, "y ~ floor + uranium + (1 | state/county)", "reml", [15.1437, 11562.1, 361.028],
        [0.0786098, 2.43359e-196, 1.722e-07], [1, 1, 1], 9.09819,
    ),
    # lmer(y ~ x1 + (1 | cluster/client)) on flat(): singular
    "singular": (
        flat, "y ~ x1 + (1 | cluster/client)", "reml", [22.3567, 95.8497], [3.71037e-05, 1.30355e-05], [1, 1], 43.5722,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LMERTEST)
def test_degrees_of_freedom_and_p_values_are_those_of_lmertest(name):
    rows, formula, penalty, df, p, combination, of_combination = LMERTEST[name]
    model = HierarchicalRegressor(formula=formula, penalty=penalty, tests=False).fit(rows())
    frame = model.coef_frame("global")
    np.testing.assert_allclose(frame["df"], df, rtol=1e-4)
    np.testing.assert_allclose(frame["p_value"], p, rtol=2e-3)
    found = model.model_.posterior.freedom(np.array([combination], dtype=float))
    np.testing.assert_allclose(found, of_combination, rtol=1e-4)


def test_degrees_of_freedom_do_not_jump_if_a_covariate_of_clients_is_not_quite_constant():
    """8 clients: 6 degrees of freedom. By containment the second had those of the rows, and intervals that were far too short.

    lmerTest has 6.000 and 6.000 too.
    """
    drawn = simulate(clusters=1, clients=8, rows=12, d=1, wbar=1.0, cluster_sd=0.0, client_sd=1.0, intercept=True, seed=5)
    z = (drawn.client % 2) * 1.0
    found = []
    for jitter in (0.0, 1e-3):
        rows = pl.DataFrame({"y": drawn.y, "i": drawn.client, "z": z + jitter * np.random.default_rng(1).normal(size=len(z))})
        model = HierarchicalRegressor(formula="y ~ z + (1 | i)", tests=False).fit(rows)
        found.append(model.coef_frame("global")["df"][1])
    np.testing.assert_allclose(found, 6.0, rtol=1e-3)


def exact_interval(y, coverage):
    """The interval of the first of ``k`` clients with ``n`` rows each, ``y (k, n)``: the posterior of a random intercept.

    The variance between clients is ``phi s2``. The prior is ``1 / (phi + 1 / n)`` for ``phi``, ``1 / s2`` for ``s2``, flat for
    the mean. Given ``phi`` the client's mean has a t distribution; ``phi`` is integrated on a fine grid.
    """
    k, n = y.shape
    means, N = y.mean(axis=1), y.size
    phi = np.expm1(np.linspace(0, np.log(1e6), 1001))  # fine near zero, and far beyond the estimate
    step = np.gradient(phi)
    within, between = ((y - means[:, None]) ** 2).sum(), n * ((means - means.mean()) ** 2).sum()
    squares = within + between / (1 + n * phi)
    log_density = -0.5 * (k - 1) * np.log(1 + n * phi) - 0.5 * (N - 1) * np.log(squares) - np.log(phi + 1 / n)
    weights = np.exp(log_density - log_density.max()) * step
    weights /= weights.sum()
    left = 1 / (1 + n * phi)  # the weight of the overall mean
    centre = left * means.mean() + (1 - left) * means[0]
    scale = np.sqrt(squares / (N - 1) * (phi * left + left**2 * (phi + 1 / n) / k))
    grid = np.linspace(means.mean() - 6, means.mean() + 6, 401)
    cdf = np.array([weights @ stats.t.cdf((at - centre) / scale, N - 1) for at in grid])
    return np.interp([(1 - coverage) / 2, (1 + coverage) / 2], cdf, grid)


@pytest.mark.parametrize(("points", "close"), [(sampling.POINTS, 0.04), (1000, 0.01)])
@pytest.mark.parametrize("client_sd", [1.0, 0.0])
def test_intervals_are_those_of_exact_integration_also_at_a_variance_of_zero(client_sd, points, close, monkeypatch):
    monkeypatch.setattr(sampling, "POINTS", points)
    k, n = 5, 4
    y = np.random.default_rng(3).normal(size=(k, n)) + client_sd * np.arange(k)[::-1, None]
    model = HierarchicalRegressor(formula="y ~ 1 + (1 | i)", tests=False)
    model.fit(pl.DataFrame({"y": y.ravel(), "i": np.repeat(np.arange(k), n)}))
    assert (model.components_.client.sd.item() == 0) == (client_sd == 0)
    for coverage in (0.8, 0.95):
        found, exact = model.coef_frame("client", coverage), exact_interval(y, coverage)
        np.testing.assert_allclose([found["lower"][0], found["upper"][0]], exact, atol=close * np.ptp(exact))
    plug_in = 2 * 1.96 * found["std_error"][0]
    assert np.ptp(exact) > 1.05 * plug_in


@pytest.mark.parametrize("far", [0.0, 2000.0])
def test_across_sites_intervals_are_those_in_memory(far, tmp_path):
    """At the operator, and at the sites for their clients. A column far from zero is centred in both."""
    rows = flat().with_columns(pl.col("x1") + far)
    spec = Spec(formula="y ~ x1 + (x1 | cluster/client)", tests=False)
    run = simulate_sites(rows, spec, sites=2, models=tmp_path)
    whole = HierarchicalRegressor(formula=spec.formula, tests=False).fit(rows)
    at_sites = [load_model(path)[0].coefficients("client") for path in sorted(tmp_path.iterdir())]
    found = {"client": pl.concat(at_sites), **{level: run.outcome.model.coefficients(level) for level in ("cluster", "global")}}
    for level, ours in found.items():
        ours, theirs = (frame.sort(pl.col("^(client|cluster)$"), "term") for frame in (ours, whole.coef_frame(level)))
        for name in ("std_error", "lower", "upper"):
            np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-4, atol=1e-4 * theirs["std_error"].min())


def test_the_summary_has_p_values():
    model = HierarchicalRegressor(formula="y ~ late + c + (1 | batch/cask)").fit(pastes())
    late = model.summary().to_json()["global"][1]
    assert late["p_value"] == pytest.approx(0.776179, rel=1e-3)
    assert late["df"] == pytest.approx(8, rel=1e-3)
    printed = str(model).splitlines()
    head = next(line for line in printed if "std. error" in line)
    row = next(line for line in printed if line.startswith("late"))
    assert head.split()[5] == "p"
    assert row.split()[6] == "0.78"


def classes(seed, clusters, clients, rows, cluster_sd, client_sd):
    """Classes, with a slope and a covariate ``z`` that differs between clusters only."""
    rng = np.random.default_rng(seed)
    g, i = np.repeat(np.arange(clusters), clients * rows), np.repeat(np.arange(clusters * clients), rows)
    x, z = rng.normal(size=len(g)), (g % 2) * 1.0
    margin = 0.3 * x + 0.4 * z + cluster_sd * rng.normal(size=clusters)[g] + client_sd * rng.normal(size=i.max() + 1)[i]
    return pl.DataFrame({"y": (rng.random(len(g)) < special.expit(margin)) * 1, "x": x, "z": z, "g": g, "i": i})


def dense_freedom(model, frame, bars):
    """Satterthwaite's degrees of freedom of the linear model at the mode, from whole matrices.

    ``V`` is the covariance of the working responses. The variances have twice the inverse of the information
    ``tr(P Z_a Z_a' P Z_b Z_b')``, and the variance ``(X'V^-1 X)^-1`` of coefficients the derivative ``C X'V^-1 Z Z'V^-1 X C``.
    """
    X = np.column_stack([np.ones(len(frame)), frame["x"], frame["z"]])
    p = model.predict_proba(frame)[:, 1]
    V, blocks = np.diag(1 / (p * (1 - p))), []
    for group, column, variance in bars:
        Z = (frame[group].to_numpy()[:, None] == np.unique(frame[group])) * column[:, None]
        blocks.append(Z @ Z.T)
        V += variance * blocks[-1]
    inverse = np.linalg.inv(V)
    C = np.linalg.inv(X.T @ inverse @ X)
    P = inverse - inverse @ X @ C @ X.T @ inverse
    information = np.array([[np.trace(P @ a @ P @ b) for b in blocks] for a in blocks])
    slopes = np.array([np.diag(C @ X.T @ inverse @ block @ inverse @ X @ C) for block in blocks])
    variance = np.einsum("pa,pq,qa->a", slopes, 2 * np.linalg.inv(information), slopes)
    return 2 / (variance / np.diag(C) ** 2 + 2 / (len(X) - 3))


@pytest.mark.parametrize(("seed", "cluster_sd"), [(0, 0.7), (3, 0.0)])
def test_classes_have_the_degrees_of_freedom_of_the_linear_model_at_the_mode(seed, cluster_sd):
    """Also if a variance is estimated as zero: it is uncertain like any other."""
    frame = classes(seed, 6, 4, 12, cluster_sd, 0.6)
    model = HierarchicalClassifier(formula="y ~ x + z + (1 | g/i) + (0 + x | g)", tests=False).fit(frame)
    parts, one, x = model.components_, np.ones(len(frame)), frame["x"].to_numpy()
    between = dict(zip(parts.cluster.terms, parts.cluster.covariance[0].diagonal(), strict=True))
    assert (between["Intercept"] == 0) == (cluster_sd == 0)
    bars = [("i", one, parts.client.covariance.item()), ("g", one, between["Intercept"]), ("g", x, between["x"])]
    np.testing.assert_allclose(model.coef_frame("global")["df"], dense_freedom(model, frame, bars), rtol=1e-4)


def test_degrees_of_freedom_of_classes_do_not_jump():
    """A covariate that is constant within 8 clients has about 6 degrees of freedom, and by containment 238 with a jitter."""
    rng = np.random.default_rng(0)
    i = np.repeat(np.arange(8), 30)
    z, y = (i % 2) * 1.0, (rng.random(240) < special.expit(0.3 + rng.normal(size=8)[i])) * 1
    found = []
    for jitter in (0.0, 1e-3):
        rows = pl.DataFrame({"y": y, "i": i, "z": z + jitter * np.random.default_rng(1).normal(size=240)})
        model = HierarchicalClassifier(formula="y ~ z + (1 | i)", tests=False).fit(rows)
        found.append(model.coef_frame("global")["df"][1])
    assert 5 < found[0] < 6.5
    assert found[1] == pytest.approx(found[0], rel=1e-3)


@pytest.mark.parametrize("kind", ["diagonal", "full", "isotropic"])
def test_across_sites_degrees_of_freedom_of_classes_are_those_in_memory(kind):
    frame = classes(1, 6, 4, 12, 0.7, 0.6).with_columns(x=pl.col("x") + 20.0)
    spec = Spec(
        "bernoulli", formula="y ~ x + z", client="i", cluster="g", covariance=kind, vary=("Intercept", "x"), tests=False
    )
    across = simulate_sites(frame, spec, sites=3).outcome.model
    settings = {"formula": "y ~ x + z", "client": "i", "cluster": "g", "covariance": kind, "vary": ("Intercept", "x")}
    whole = HierarchicalClassifier(**settings, tests=False).fit(frame)
    np.testing.assert_allclose(across.coefficients("global")["df"], whole.coef_frame("global")["df"], rtol=1e-5)


def test_clusters_of_other_families_have_normal_quantiles():
    frame = classes(2, 6, 5, 15, 0.5, 0.5)
    frame = HierarchicalClassifier(formula="y ~ x + (1 | g/i)", tests=False).fit(frame).coef_frame("cluster")
    np.testing.assert_allclose(frame["upper"] - frame["lower"], 2 * 1.959963984540054 * frame["std_error"], rtol=1e-12)
