"""Groups and categories whose responses are all alike: fitted where the variance between groups bounds them, else refused."""

from __future__ import annotations

import warnings

import numpy as np
import polars as pl
import pytest
from scipy.special import expit

from covey import ConvergenceWarning, HierarchicalClassifier, HierarchicalPoissonRegressor
from covey.errors import DataError
from covey.federation.simulate import simulate_sites
from covey.problem.problem import Spec


def table():
    """600 rows of 60 clients in 12 clusters, with a factor of three categories."""
    rng = np.random.default_rng(0)
    g, i = np.repeat(np.arange(12), 50), np.repeat(np.arange(60), 10)
    f = rng.choice(["a", "b", "c"], size=600)
    margin = 0.2 + 0.7 * rng.normal(size=12)[g] + 0.7 * rng.normal(size=60)[i] + 0.5 * (f == "b")
    y = (rng.random(600) < expit(margin)).astype(int)
    return pl.DataFrame({"y": y, "g": [f"g{v}" for v in g], "i": [f"i{v}" for v in i], "f": f, "x": rng.normal(size=600)})


def with_ones(where):
    return table().with_columns(y=pl.when(where).then(1).otherwise("y"))


SEPARATED = with_ones(pl.col("f") == "c")
IN_ONE_GROUP = with_ones((pl.col("g") == "g3") & (pl.col("f") == "b"))


def fitted(formula, frame, **settings):
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConvergenceWarning)
        model = HierarchicalClassifier(formula=formula, tests=False, **settings).fit(frame)
    assert np.isfinite(model.coef_).all()
    assert model.convergence_.converged
    return model


@pytest.mark.parametrize(
    ("formula", "frame", "facts"),
    [
        ("y ~ f + (1 | g/i)", with_ones(pl.col("g") == "g3"), ["all rows of 9 of 60 clients", "all rows of 1 of 12 clusters"]),
        ("y ~ f + (f | g)", IN_ONE_GROUP, ["all rows with f = 'b' of 1 of 12 clients"]),
        ("y ~ f + (f | g) + (1 | g:i)", IN_ONE_GROUP, ["all rows with f = 'b' of 1 of 12 clusters"]),
        ("y ~ x + (f || g)", IN_ONE_GROUP, ["all rows with f = 'b' of 1 of 12 clients"]),  # no common coefficient
    ],
)
def test_one_class_in_some_groups_is_fitted_with_a_note(formula, frame, facts):
    model = fitted(formula, frame)
    (note,) = [note for note in model.components_.notes if "one class" in note]
    assert all(fact in note for fact in facts)
    assert "finite" in note
    assert note in str(model)


def test_both_classes_in_all_groups_need_no_note():
    frame = with_ones(pl.lit(False))
    assert not [note for note in fitted("y ~ f + (1 | g)", frame).components_.notes if "class" in note]


def test_sites_have_the_same_note():
    spec = Spec("bernoulli", formula="y ~ f + (f | g) + (1 | g:i)", tests=False)
    across = simulate_sites(IN_ONE_GROUP, spec, sites=3).outcome.model.learned.components
    assert across.notes == fitted(spec.formula, IN_ONE_GROUP).components_.notes


def test_counts_of_zero_in_one_group():
    frame = table().with_columns(y=pl.when(pl.col("g") == "g3").then(0).otherwise(3 * pl.col("y")))
    model = HierarchicalPoissonRegressor(formula="y ~ f + (1 | g)", tests=False).fit(frame)
    assert any("all rows of 1 of 12 clients have the count 0" in note for note in model.components_.notes)


@pytest.mark.parametrize(
    ("formula", "frame", "facts"),
    [
        ("y ~ f + (1 | g/i)", SEPARATED, ["category 'c' of 'f'", "the same class", "'f[T.c]' has no"]),
        ("y ~ f + (1 | g/i)", with_ones(pl.col("f") == "a"), ["reference category of 'f'", "the same class", "'f[T.b]'"]),
        (
            "y ~ f + (1 | g)",
            with_ones(pl.col("f") == "b").with_columns(y=pl.when(pl.col("f") == "c").then(0).otherwise("y")),
            ["each of the categories 'b', 'c' of 'f'", "the same class"],
        ),
        ("y ~ x + (1 | g)", table().with_columns(y=(pl.col("x") > 0).cast(int)), ["'Intercept', 'x' separate", "leave one"]),
        ("y ~ f*x + (f | g)", SEPARATED, ["'f[T.c]'"]),
    ],
)
def test_a_fixed_effect_that_separates_all_rows_is_refused_with_the_fix(formula, frame, facts):
    with pytest.raises(DataError, match="no finite estimate") as caught:
        HierarchicalClassifier(formula=formula).fit(frame)
    sentence = str(caught.value)
    assert all(fact in sentence for fact in [*facts, "gamma= and ridge="])


def test_a_category_with_counts_of_zero_is_refused():
    frame = table().with_columns(y=pl.when(pl.col("f") == "c").then(0).otherwise(3 * pl.col("y")))
    with pytest.raises(DataError, match="In the category 'c' of 'f' all rows have the count 0"):
        HierarchicalPoissonRegressor(formula="y ~ f + (1 | g)").fit(frame)


def test_the_fixes_work():
    """glmer, of lme4 1.1.31, stops at a coefficient of 21.05 with a standard error of 2397 and "failed to converge".

    ``glmer(y ~ f + (1 | g/i), SEPARATED, family = binomial)``: log-likelihood -246.3039, sds 0.69511 and 0.58377. Without the
    rows of ``f = 'c'`` it has the same numbers, since the likelihood of these rows is 1 in the limit.
    """
    without = fitted("y ~ f + (1 | g/i)", SEPARATED.filter(pl.col("f") != "c")).components_
    assert without.log_likelihood == pytest.approx(-246.3039, abs=1e-4)
    assert without.client.sd.item() == pytest.approx(0.69511, abs=2e-4)
    assert without.cluster.sd.item() == pytest.approx(0.58377, abs=2e-4)
    fitted("y ~ f + (1 | g/i)", SEPARATED.with_columns(f=pl.col("f").replace("c", "b")))
    given = {"client": "i", "cluster": "g", "gamma": 1.0, "lam": 1.0}
    model = HierarchicalClassifier(formula="y ~ f", ridge=0.1, **given).fit(SEPARATED)
    assert np.abs(model.coef_).max() < 10
    with pytest.warns(ConvergenceWarning, match="ridge="):
        HierarchicalClassifier(formula="y ~ f", **given).fit(SEPARATED)
