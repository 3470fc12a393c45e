"""Residuals, draws, means, contrasts, comparisons and profiles: laws, limits and mistakes."""

from __future__ import annotations

from functools import partial

import numpy as np
import polars as pl
import pytest
from scipy import stats
from scipy.optimize import approx_fprime, minimize_scalar

import covey
from covey import CoveyError, HierarchicalGammaRegressor, HierarchicalPoissonRegressor, HierarchicalRegressor, Spec
from covey.datasets import load_radon, simulate
from covey.variance.holding import Along, Angle, Length
from tests.r_tables import sleepstudy


@pytest.fixture(scope="module")
def homes():
    return load_radon()


@pytest.fixture(scope="module")
def radon(homes):
    return covey.fit(homes, "log_radon ~ floor + (1 | state/county)")


def groups(rng, family):
    """Rows of 40 clients whose responses follow a model of the family."""
    client = np.repeat(np.arange(40), 25)
    x = rng.normal(size=len(client))
    margin = 0.5 + 0.3 * x + 0.4 * rng.normal(size=40)[client]
    y = {"gamma": lambda: rng.gamma(2.0, np.exp(margin) / 2.0), "poisson": lambda: rng.poisson(np.exp(margin))}[family]()
    return pl.DataFrame({"y": y, "x": x, "client": client})


@pytest.mark.parametrize(("family", "kind"), [("gamma", HierarchicalGammaRegressor), ("poisson", HierarchicalPoissonRegressor)])
def test_quantile_residuals_are_standard_normal_if_the_model_is_right(family, kind):
    rows = groups(np.random.default_rng(1), family)
    model = kind(formula="y ~ x + (1 | client)", random_state=3).fit(rows)
    found = model.residuals(rows, kind="quantile")
    assert stats.kstest(found, "norm").pvalue > 0.01
    assert (found == model.residuals(rows, kind="quantile")).all()
    scaled = model.residuals(rows, kind="scaled")
    assert np.std(scaled) == pytest.approx(1.0, abs=0.12)


def test_rows_that_were_dropped_have_no_residual(homes):
    some = homes[:400].with_columns(floor=pl.when(pl.int_range(pl.len()) == 7).then(None).otherwise(pl.col("floor")))
    model = HierarchicalRegressor(formula="log_radon ~ floor + (1 | county)", na="drop").fit(some)
    found = model.residuals(some)
    assert np.flatnonzero(np.isnan(found)).tolist() == [7]
    np.testing.assert_allclose(found[:7], some["log_radon"][:7].to_numpy() - model.predict(some[:7]))


def test_draws_have_the_variances_of_the_model(radon, homes):
    """The covariance of two rows of one county, of one state, and of two states, over many draws of new groups."""
    first = homes.filter(pl.col("county").is_in(["Apache, AZ", "Pima, AZ"]) | (pl.col("state") == "IN"))
    rows = pl.concat([first.filter(pl.col("county") == name)[:2] for name in ("Apache, AZ", "Pima, AZ")] + [first[-1:]])
    model = radon
    drawn = model.set_params(random_state=5).simulate(rows, 20_000)
    C, parts = np.cov(drawn), model.components_
    state, county, residual = parts.cluster.covariance[0, 0, 0], parts.client.covariance[0, 0, 0], parts.residual
    assert C[0, 0] == pytest.approx(state + county + residual, rel=0.05)
    assert C[0, 1] == pytest.approx(state + county, rel=0.1)
    assert C[0, 2] == pytest.approx(state, rel=0.15)
    assert abs(C[0, 4]) < 0.04
    assert drawn.mean(axis=1) == pytest.approx(model.predict(rows, level="global"), abs=0.05)
    fitted = model.simulate(rows, 20_000, effects="fitted")
    assert fitted.mean(axis=1) == pytest.approx(model.predict(rows), abs=0.03)
    assert np.cov(fitted)[0, 1] == pytest.approx(0.0, abs=0.03)


def test_means_need_what_they_say(radon, homes):
    homes = homes.drop_nulls()
    model = covey.fit(homes, "log_radon ~ log(uranium + 3) * C(floor) + (1 | state/county)")
    with pytest.raises(CoveyError, match=r"mean of column 'uranium'.*data="):
        model.means("floor")
    given = model.means("floor", data=homes)
    at = model.means("floor", at={"uranium": float(homes["uranium"].mean())})
    np.testing.assert_allclose(given["estimate"], at["estimate"])
    with pytest.raises(CoveyError, match=r"'flor'.*'floor'"):
        model.means("flor")
    with pytest.raises(CoveyError, match=r"'floor' has no category 7"):
        model.means("floor", at={"floor": [7], "uranium": 1.0})
    with pytest.raises(CoveyError, match=r"is numeric; give values, at="):
        radon.means("floor")
    with pytest.raises(CoveyError, match="no term 'flor'"):
        radon.contrast({"flor": 1.0})
    np.testing.assert_allclose(radon.contrast(np.eye(2))["estimate"], radon.global_coef_)


def test_standardised_terms_have_the_same_means(homes):
    homes = homes.drop_nulls()
    plain, scaled = (
        HierarchicalRegressor(formula="log_radon ~ uranium + C(floor) + (1 | county)", standardize=on).fit(homes)
        for on in (False, True)
    )
    at = {"uranium": [0.0, 2.0]}
    ours, theirs = (model.means(["uranium", "floor"], at=at) for model in (scaled, plain))
    for column in ("estimate", "std_error", "df"):
        np.testing.assert_allclose(ours[column], theirs[column], rtol=1e-6)


def test_only_models_of_the_same_rows_are_compared(radon, homes):
    fewer = covey.fit(homes[:-1], "log_radon ~ floor + (1 | state/county)")
    with pytest.raises(CoveyError, match="numbers of rows"):
        covey.compare(radon, fewer)
    other = covey.fit(homes.with_columns(log_radon=pl.col("log_radon") * 2), "log_radon ~ 1 + (1 | state/county)")
    with pytest.raises(CoveyError, match="responses"):
        covey.compare(radon, other)
    with pytest.raises(CoveyError, match="at least two"):
        covey.compare(radon)
    given = covey.fit(homes, Spec(formula="log_radon ~ floor", client="county", gamma=1.0))
    with pytest.raises(CoveyError, match="learned from the data"):
        covey.compare(radon, given)


def test_models_that_are_not_nested_have_no_test(homes, radon):
    other = covey.fit(homes, "log_radon ~ C(floor) + state + (1 | county)")
    found = covey.compare(radon, other)
    assert found["p_value"].to_list() == [None, None]
    assert found["aic"].is_not_null().all()


@pytest.mark.parametrize(
    ("small", "large", "nested"),
    [
        ("1 + (1 + floor | county)", "floor + week + (1 + floor || county)", False),
        ("1 + (1 + floor || county)", "floor + (1 + floor | county)", True),
        ("1 + (1 | county)", "floor + (1 + floor || county)", True),
    ],
)
def test_a_model_with_fewer_covariances_does_not_contain_one_with_more(homes, small, large, nested):
    homes = homes.with_columns(week=pl.int_range(pl.len()) % 7)
    models = [covey.fit(homes, Spec(formula=f"log_radon ~ {rhs}", tests=False)) for rhs in (small, large)]
    found = covey.compare(*models)
    assert found["model"][0].endswith(small)
    assert (found["p_value"][1] is not None) == nested


def test_simulate_takes_weights_and_trials_that_are_not_columns():
    """A row of weight 100 has a hundredth of the residual variance; of 10 trials a share is a number of tenths."""
    rng = np.random.default_rng(0)
    client, x = np.repeat(np.arange(40), 10), rng.normal(size=400)
    y = x + rng.normal(size=40)[client] + rng.normal(size=400)
    model = covey.HierarchicalRegressor(random_state=0, tests=False).fit(x[:, None], y, client=client)
    plain, heavy = (
        model.simulate(x[:, None], 20, client=client, effects="fitted", sample_weight=weight)
        - model.predict(x[:, None], client=client)[:, None]
        for weight in (None, np.full(400, 100.0))
    )
    np.testing.assert_allclose(plain / 10, heavy, rtol=1e-9)
    share = rng.integers(0, 11, 400) / 10
    classes = covey.HierarchicalClassifier(random_state=0, tests=False).fit(
        x[:, None], share, client=client, trials=np.full(400, 10)
    )
    drawn = classes.simulate(x[:, None], client=client, trials=np.full(400, 10)) * 10
    assert np.abs(drawn - drawn.round()).max() < 1e-9
    assert 1 < drawn.mean() < 9
    assert drawn.max() > 1
    with pytest.raises(CoveyError, match="one positive number"):
        classes.simulate(x[:, None], client=client, trials=[1.0])


def test_a_saved_model_says_the_same(radon, homes, tmp_path):
    again = covey.load(radon.save(tmp_path / "model"))
    for name in ("random_effects", "robust"):
        assert getattr(again, name)().equals(getattr(radon, name)())
    assert again.r2() == radon.r2()
    small = covey.fit(homes, "log_radon ~ 1 + (1 | state/county)")
    assert covey.compare(small, again).equals(covey.compare(small, radon))
    without = covey.load(radon.save(tmp_path / "small", sums=False))
    for ask in (without.profile, without.robust, without.r2, lambda: covey.compare(small, without)):
        with pytest.raises(CoveyError, match="sums"):
            ask()
    assert without.random_effects()["conditional_variance"].null_count() == 470


def test_a_profile_from_zero_has_its_lower_end_there():
    """Clients do not differ here, so the estimate is zero or small and the interval starts at zero."""
    data = simulate(clusters=8, clients=6, rows=8, d=1, client_sd=0.0, cluster_sd=1.0, seed=4).data
    table = pl.DataFrame({"y": data.y, "client": data.client_of_row, "cluster": data.hierarchy.parent[data.client_of_row]})
    model = covey.fit(table, "y ~ 1 + (1 | cluster/client)")
    found = model.profile()
    assert found.filter(level="client")["lower"].to_list() == [0.0]
    upper = float(found.filter(level="client")["upper"][0])
    assert upper > model.components_.client.sd[0, 0]
    assert 0 < found.filter(level="residual")["lower"][0] < np.sqrt(model.components_.residual)


def test_the_profile_rises_by_the_quantile_at_its_ends():
    """The likelihood at an end of the interval, maximised by a dense computation over the other two parameters."""

    rows = sleepstudy()
    model = HierarchicalRegressor(formula="Reaction ~ Days + (1 | Subject)", penalty="ml").fit(rows)
    y, X = rows["Reaction"].to_numpy(), np.column_stack([np.ones(180), rows["Days"].to_numpy()])
    Z = (rows["Subject"].to_numpy()[:, None] == np.arange(18)).astype(float)

    def deviance(sd, sigma):
        between = sigma**2 + 10 * sd**2  # variance of a sum over the ten rows of a subject, divided by ten
        W = (np.eye(180) - sd**2 / between * Z @ Z.T) / sigma**2
        e = y - X @ np.linalg.solve(X.T @ W @ X, X.T @ W @ y)
        return 18 * np.log(between) + 162 * np.log(sigma**2) + e @ W @ e + 180 * np.log(2 * np.pi)

    lowest = -2 * model.components_.log_likelihood
    for end in model.profile(coverage=0.9)[0].select("lower", "upper").row(0):
        best = minimize_scalar(partial(deviance, end), bounds=(20.0, 45.0), options={"xatol": 1e-5}).fun
        assert best - lowest == pytest.approx(stats.chi2.ppf(0.9, 1), rel=1e-6)


def test_a_hold_has_its_value_and_the_gradient_of_its_map():
    """Rows of a factor of three terms: lengths, angles and a direction; gradients by differences."""
    rng = np.random.default_rng(0)
    z, target = rng.normal(size=7), rng.normal(size=7)
    rows = [np.array([0]), np.array([1, 2]), np.array([3, 4, 5])]
    holds = [(Length(rows[1], 2.0), 0.7), (Along(rng.normal(size=7), 1.0, 0.3), -1.2)]
    holds += [(Angle(rows[a], rows[b]), value) for a, b in ((0, 1), (0, 2), (1, 2)) for value in (-0.8, 0.3)]
    for hold, value in holds:
        assert hold.of(hold.place(z, value)) == pytest.approx(value, abs=1e-12)
        assert hold.of(hold.place(z, hold.of(z))) == pytest.approx(hold.of(z), abs=1e-12)

        def distance(free, hold=hold, value=value):
            return float(((hold.place(free, value) - target) ** 2 * np.arange(1, 8)).sum())

        slope = 2.0 * (hold.place(z, value) - target) * np.arange(1, 8)
        assert hold.gradient(z, value, slope) == pytest.approx(approx_fprime(z, distance, 1e-7), abs=1e-4)


def test_a_correlation_that_the_data_do_not_tell_has_the_limits_as_ends():
    """Three subjects: every correlation is possible."""
    rows = sleepstudy()
    few = rows.filter(pl.col("Subject").is_in(rows["Subject"].unique(maintain_order=True)[:3].to_list()))
    model = covey.fit(few, "Reaction ~ Days + (Days | Subject)")
    found = model.profile(coverage=0.99).filter(parameter="correlation")
    assert found.select("lower", "upper").row(0) == (-1.0, 1.0)


def test_the_correction_of_few_groups_refuses_weights_and_wide_groups(monkeypatch):
    rows = sleepstudy().with_columns(w=pl.Series(np.tile([1.0, 2.0], 90)))
    model = HierarchicalRegressor(formula="Reaction ~ Days + (1 | Subject)", weights="w").fit(rows)
    with pytest.raises(CoveyError, match="weight 1; use 'CR3'"):
        model.robust("CR2")
    monkeypatch.setattr("covey.model.robust._WIDEST", 2)
    with pytest.raises(CoveyError, match="use 'CR1' or 'CR3'"):
        HierarchicalRegressor(formula="Reaction ~ Days + (1 | Subject)").fit(rows).robust("CR2")


def test_the_unbiased_sandwich_in_other_units():
    """Multiplying a column by a thousand divides its error by a thousand, and changes no other."""
    rows = sleepstudy()
    plain, scaled = (
        covey.fit(rows.with_columns(pl.col("Days") * by), "Reaction ~ Days + (Days | Subject)").robust("CR2")
        for by in (1, 1000)
    )
    assert scaled["std_error"].to_numpy() * [1, 1000] == pytest.approx(plain["std_error"].to_numpy(), rel=1e-6)
    assert scaled["df"].to_numpy() == pytest.approx(plain["df"].to_numpy(), rel=1e-6)


def test_counts_and_classes_say_which_rows_they_need():
    rows = groups(np.random.default_rng(0), "poisson")
    model = HierarchicalPoissonRegressor(formula="y ~ x + (1 | client)").fit(rows)
    for ask in (model.profile, model.r2):
        with pytest.raises(CoveyError, match="needs the rows"):
            ask()
    with pytest.raises(CoveyError, match="linear models"):
        model.robust()
    gamma = HierarchicalGammaRegressor(formula="y ~ x + (1 | client)").fit(groups(np.random.default_rng(0), "gamma"))
    with pytest.raises(CoveyError, match="gamma family; bootstrap has intervals"):
        gamma.profile(groups(np.random.default_rng(0), "gamma"))
    assert 0 < gamma.r2(groups(np.random.default_rng(0), "gamma")).marginal < 1
