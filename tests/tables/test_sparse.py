"""Sparse columns: which terms of a formula become sparse, the columns of a sparse matrix, and what is refused."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
from scipy import sparse

import covey
from covey import CoveyError, HierarchicalClassifier, HierarchicalPoissonRegressor, HierarchicalRegressor, Spec
from covey.federation.simulate import simulate_sites
from covey.problem.problem import Problem, resolve
from covey.problem.rows import read_rows

N = 240
RNG = np.random.default_rng(0)
CLIENT = RNG.integers(0, 20, N)
FRAME = pl.DataFrame(
    {
        "x": RNG.normal(size=N),
        "product": [f"p{code:02d}" for code in RNG.integers(0, 12, N)],
        "size": RNG.integers(0, 3, N),
        "g": CLIENT % 4,
        "i": CLIENT,
        "y": RNG.normal(size=N),
    }
)
Z = sparse.random(N, 8, density=0.3, random_state=1, format="csr")


def read(formula, **settings):
    return read_rows(FRAME, resolve(Spec(formula=formula, **settings)))


@pytest.mark.parametrize(
    ("formula", "where"),
    [
        ("y ~ x + C(product) + (1 + x | g/i)", ["product"]),
        ("y ~ product + x + (1 | i)", ["product"]),
        ("y ~ x + C(size) + product + (1 + x | g/i)", ["size", "product"]),
        ("y ~ C(product) + C(size) * x + (1 | i)", ["product"]),
        ("y ~ C(product) + C(size) + (1 + C(size) | i)", ["product"]),
    ],
)
def test_indicators_of_a_formula_are_the_dense_ones(formula, where):
    (dense, _), (data, problem) = read(formula), read(formula, sparse=True)
    assert problem.vary == read(formula)[1].vary
    assert {*data.terms, *data.shared.terms} == set(dense.terms)
    assert [each.column for each in problem.sparse.coded] == where
    for terms, columns in ((data.terms, data.X), (data.shared.terms, data.shared.Z.toarray())):
        np.testing.assert_array_equal(columns, dense.X[:, [dense.terms.index(term) for term in terms]])
    assert Problem.from_json(problem.to_json()) == problem


def test_without_being_asked_only_very_many_categories_beside_bars_are_sparse():
    many = pl.DataFrame({"product": np.arange(1200) % 600, "i": np.arange(1200) % 30, "y": np.arange(1200) * 0.1})
    for formula, found in (("y ~ C(product) + (1 | i)", True), ("y ~ C(product)", False)):
        problem = read_rows(many, resolve(Spec(formula=formula)))[1]
        assert (problem.sparse is not None) is found
    assert read("y ~ C(product) + (1 | i)")[1].sparse is None
    for given in ({"sparse": False}, {"standardize": True}, {"family": "gamma"}):
        rows = many.with_columns(pl.col("y") + 1.0)
        assert read_rows(rows, resolve(Spec(formula="y ~ C(product) + (1 | i)", **given)))[1].sparse is None


def test_columns_of_a_sparse_matrix_are_shared_unless_they_are_named():
    model = HierarchicalRegressor(tests=False, vary=["1", "x3"], sparse=None).fit(Z, FRAME["y"], client=CLIENT)
    assert model.terms_ == ("Intercept", "x3")
    assert model.shared_terms_ == ("x0", "x1", "x2", "x4", "x5", "x6", "x7")
    for other in (Z.tocsc(), sparse.csr_array(Z), Z.toarray()):
        np.testing.assert_array_equal(model.predict(other, client=CLIENT), model.predict(Z, client=CLIENT))


def test_columns_that_depend_on_others_are_left_out():
    whole = sparse.csr_matrix(np.eye(12)[RNG.integers(0, 12, N)])  # with the intercept, the last category is too many
    y, empty = FRAME["y"].to_numpy(), sparse.csr_matrix((N, 1))
    full = HierarchicalRegressor(tests=False).fit(sparse.hstack([whole, empty]), y, client=CLIENT)
    less = HierarchicalRegressor(tests=False).fit(whole[:, :11], y, client=CLIENT)
    assert any("x11" in note and "x12" in note for note in full.components_.notes)
    np.testing.assert_array_equal(full.shared_coef_[11:], 0.0)
    np.testing.assert_allclose(full.shared_coef_[:11], less.shared_coef_, atol=1e-12)
    assert full.components_.parameters == less.components_.parameters


def test_frequencies_are_repeated_rows():
    counts, y = RNG.integers(0, 3, N), FRAME["y"].to_numpy()
    rows = np.repeat(np.arange(N), counts)
    model = HierarchicalRegressor(tests=False).fit(Z, y, client=CLIENT, frequency=counts)
    other = HierarchicalRegressor(tests=False).fit(Z[rows], y[rows], client=CLIENT[rows])
    np.testing.assert_allclose(model.shared_coef_, other.shared_coef_, atol=1e-12)
    np.testing.assert_allclose(model.coef_, other.coef_, atol=1e-12)


@pytest.mark.parametrize("learned", [True, False])
def test_a_saved_model_predicts_the_same(tmp_path, learned):
    given = {} if learned else {"gamma": 2.0, "client": "i", "cluster": "g"}
    bars = "+ (1 | g/i)" if learned else ""
    model = covey.fit(FRAME, Spec(formula=f"y ~ x + C(product) {bars}", sparse=True, **given))
    again = covey.load(model.save(tmp_path / "model"))
    new = FRAME.with_columns(i=pl.lit(99))
    for rows in (FRAME, new):
        np.testing.assert_array_equal(again.predict(rows), model.predict(rows))
    np.testing.assert_array_equal(again.shared_coef_, model.shared_coef_)
    assert again.shared_terms_ == model.shared_terms_
    assert str(again).splitlines()[:3] == str(model).splitlines()[:3]
    assert "11 shared coefficients" in str(model)
    assert len(model.summary().to_json()["global"]) == len(model.coef_frame("global")) == 13


def test_what_needs_dense_columns_says_so():
    model = HierarchicalRegressor(formula="y ~ x + C(product) + (1 | g/i)", sparse=True).fit(FRAME)
    asked = [
        lambda: model.predict_interval(FRAME),
        lambda: model.bootstrap(FRAME, draws=2),
        lambda: model.profile(FRAME),
        lambda: model.robust(),
        lambda: model.r2(FRAME),
        lambda: model.means("product"),
        lambda: model.to_sql("rows"),
        lambda: model.predict(FRAME.lazy()),
        lambda: model.add_clients(FRAME.with_columns(i=pl.col("i") + 100)),
    ]
    for ask in asked:
        with pytest.raises(CoveyError, match=r"not supported for a model with sparse columns.*sparse=False"):
            ask()


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"solver": "l2gd", "gamma": 1.0}, "solver='l2gd' is not supported with sparse columns"),
        ({"solver": "apgd", "gamma": 1.0}, "solver='apgd' is not supported with sparse columns"),
        ({"penalty": "cv"}, "penalty='cv' is not supported with sparse columns"),
        ({"baseline": "single-model"}, "baseline='single-model' is not supported"),
        ({"james_stein": True, "gamma": 1.0}, "james_stein=True is not supported"),
        ({"standardize": True, "gamma": 1.0}, "standardize=True is not supported"),
        ({"gamma": 1.0, "lam": 0.0}, "every gamma and lam must be positive"),
        ({"vary": ["x9"]}, "names 'x9', which is not a column"),
        ({"fit_intercept": False}, "so nothing varies"),
        ({"sparse": 3}, "'sparse' parameter must be True, False or None"),
    ],
)
def test_settings_that_sparse_columns_exclude(settings, sentence):
    with pytest.raises(CoveyError, match=sentence):
        HierarchicalRegressor(**settings).fit(Z, FRAME["y"], client=CLIENT, cluster=CLIENT % 4)


def test_tables_that_cannot_have_sparse_columns(tmp_path):
    spec, y = Spec(formula="y ~ x + C(product) + (1 | g/i)", sparse=True), FRAME["y"].to_numpy()
    with pytest.raises(CoveyError, match=r"sparse=True needs a table in memory"):
        covey.fit(FRAME.lazy(), spec)
    with pytest.raises(CoveyError, match=r"sparse=True needs a table in memory"):
        simulate_sites(FRAME, spec, sites=2)
    with pytest.raises(CoveyError, match=r"A plan does not know sparse columns"):
        covey.plan(FRAME, spec=Spec(formula="y ~ x + C(product)", client="i", cluster="g", gamma=1.0, sparse=True))
    with pytest.raises(CoveyError, match=r"found no term to make sparse"):
        covey.fit(FRAME, Spec(formula="y ~ x + C(product) * x + (1 | g/i)", sparse=True))
    with pytest.warns(UserWarning, match="No clients"), pytest.raises(CoveyError, match=r"pass client="):
        HierarchicalRegressor(gamma=1.0).fit(Z, y)
    bad = Z.copy()
    bad.data[0] = np.nan
    with pytest.raises(CoveyError, match=rf"Column 'x{bad.indices[0]}' is nan in row 0"):
        HierarchicalRegressor(gamma=1.0).fit(bad, y, client=CLIENT)


def test_a_category_without_a_finite_estimate_is_named():
    whole = sparse.csr_matrix(np.eye(12)[RNG.integers(0, 12, N)][:, 1:])
    ones = np.where(whole[:, [4]].toarray().ravel() == 1, 1.0, RNG.integers(0, 2, N))
    with pytest.raises(CoveyError, match=r"The rows of 'x4' have one class only"):
        HierarchicalClassifier(gamma=1.0).fit(whole, ones, client=CLIENT)
    counts = np.where(whole[:, [4]].toarray().ravel() == 1, 0.0, RNG.poisson(2.0, N))
    with pytest.raises(CoveyError, match=r"The rows of 'x4' have counts of zero only"):
        HierarchicalPoissonRegressor(gamma=1.0).fit(whole, counts, client=CLIENT)
    assert HierarchicalClassifier(gamma=1.0, ridge=0.01).fit(whole, ones, client=CLIENT).convergence_.converged
