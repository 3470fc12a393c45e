"""REML and ML with sparse columns: beside the same model with dense columns, beside lme4, and by differences."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

import covey
from covey import Spec
from covey.fitting.fit import shape_of
from covey.fitting.sparse import begin
from covey.nodes.network import InMemory
from covey.problem.problem import resolve
from covey.problem.rows import read_rows
from covey.variance.identify import survey
from covey.variance.shared_likelihood import SharedCriterion


def table(rows=1200, clients=60, groups=6, products=12, seed=0):
    rng = np.random.default_rng(seed)
    i, product, x = rng.integers(0, clients, rows), rng.integers(0, products, rows), rng.normal(size=rows)
    g = i % groups
    y = 1.0 + 0.5 * x + (0.3 * rng.normal(size=products))[product]
    y += (0.6 * rng.normal(size=clients))[i] + (0.4 * rng.normal(size=groups))[g]
    y += x * ((0.3 * rng.normal(size=clients))[i] + (0.2 * rng.normal(size=groups))[g]) + rng.normal(size=rows)
    named = {"product": [f"p{code:03d}" for code in product], "z": rng.normal(size=rows), "w": rng.uniform(0.5, 2.0, rows)}
    return pl.DataFrame({"y": y, "x": x, "g": g, "i": i, **named})


CASES = {
    "slopes": ("y ~ x + C(product) + (1 + x | g/i)", {}),
    "weights and a dense shared term": ("y ~ x + z + C(product) + (1 | g/i)", {"weights": "w"}),
    "one level, offset": ("y ~ x + C(product) + offset(0.3 * z) + (1 | i)", {}),
    "ML": ("y ~ x + z + C(product) + (1 + x | g/i)", {"penalty": "ml"}),
    "a term that varies by cluster only": ("y ~ x + C(product) + (1 + x || g) + (1 | g:i)", {}),
    "a term that varies about zero": ("y ~ C(product) + (1 + x || g/i)", {}),
    "one covariance for each cluster": ("y ~ x + C(product) + (1 + x || g/i)", {"per_cluster": True, "tests": False}),
}


@pytest.mark.parametrize("case", CASES)
def test_estimates_are_those_of_dense_columns(case):
    formula, settings = CASES[case]
    dense, found = (covey.fit(table(), Spec(formula=formula, sparse=kind, **settings)) for kind in (False, True))
    at, shared = ([dense.terms_.index(term) for term in terms] for terms in (found.terms_, found.shared_terms_))
    assert len(shared) == 11
    for ours, theirs in (
        (found.coef_, dense.coef_[:, at]),
        (found.cluster_coef_, dense.cluster_coef_[:, at]),
        (found.global_coef_, dense.global_coef_[at]),
        (found.shared_coef_, dense.global_coef_[shared]),
        (found.cov_, dense.cov_[np.ix_(at, at)]),
        (found.model_.shared.errors, np.sqrt(np.diag(dense.cov_))[shared]),
    ):
        np.testing.assert_allclose(ours, theirs, atol=1e-9)
    one, other = found.components_, dense.components_
    assert (one.parameters, one.rows) == (other.parameters, other.rows)
    np.testing.assert_allclose(one.log_likelihood, other.log_likelihood, rtol=1e-12)
    for level in ("client", "cluster"):
        ours, theirs = getattr(one, level), getattr(other, level)
        np.testing.assert_allclose(ours.covariance, theirs.covariance, atol=1e-9)
        np.testing.assert_allclose(ours.sd_error, theirs.sd_error, atol=1e-7)
    assert len(one.tests) == len(other.tests)
    for ours, theirs in zip(one.tests, other.tests, strict=True):
        np.testing.assert_allclose(ours.statistic, theirs.statistic, atol=1e-8)
    np.testing.assert_allclose(found.predict(table(seed=0)), dense.predict(table(seed=0)), atol=1e-9)


# lme4 1.1-31: lmer(y ~ x + product + (1 + x | g/i), control = lmerControl(optCtrl = list(xtol_rel = 1e-12, ftol_abs = 1e-14)))
# on table(6000, 120, 10, 300, seed=7). Variances and covariances are those of the intercept, of x, and between them.
LME4 = {
    "log_likelihood": -8752.85358769,
    "coefficients": [1.937027162182, 0.470761164676, -1.271369817168, -1.023395479781],
    "errors": [0.2616420808824, 0.0921868759034, 0.3049578600808, 0.3385380696659],
    "client": [0.3793347214141, 0.1006578485645, 0.0134775262048],
    "cluster": [0.1423487556927, 0.0747524550858, 0.0670205396876],
    "residual": 0.9728407935703,
}


def test_three_hundred_categories_beside_lme4():
    model = covey.fit(
        table(6000, 120, 10, 300, seed=7), Spec(formula="y ~ x + product + (1 + x | g/i)", sparse=True, tests=False)
    )
    found = model.components_
    np.testing.assert_allclose(found.log_likelihood, LME4["log_likelihood"], rtol=1e-11)
    np.testing.assert_allclose(found.residual, LME4["residual"], rtol=1e-5)
    for level in ("client", "cluster"):
        S = getattr(found, level).covariance[0]
        np.testing.assert_allclose([S[0, 0], S[1, 1], S[0, 1]], LME4[level], rtol=1e-4)
    shared = [model.shared_terms_.index(f"product[T.p{code}]") for code in ("001", "299")]
    np.testing.assert_allclose([*model.global_coef_, *model.shared_coef_[shared]], LME4["coefficients"], rtol=1e-5)
    errors = [*np.sqrt(np.diag(model.cov_)), *model.model_.shared.errors[shared]]
    np.testing.assert_allclose(errors, LME4["errors"], rtol=1e-5)


@pytest.mark.parametrize("reml", [True, False])
@pytest.mark.parametrize("formula", ["y ~ x + z + C(product) + (1 + x | g/i)", "y ~ C(product) + (1 + x || g) + (1 | g:i)"])
def test_the_gradient_is_that_of_differences(formula, reml):
    data, problem = read_rows(table(rows=500), resolve(Spec(formula=formula, sparse=True)))
    network = InMemory.of(data, problem.loss)
    shape = shape_of(network.tree, network.terms, problem.spec, problem.vary, problem.zero)
    prepared = begin(network)
    known = survey(network, shape)
    criterion = SharedCriterion(known, known.shape or shape, prepared, reml=reml)
    x = criterion.start(0.4, 0.3) * np.linspace(0.8, 1.3, criterion.parameters.n_parameters)
    gradient, step = criterion.value_and_gradient(x)[1], 1e-5
    for at in range(len(x)):
        move = step * (np.arange(len(x)) == at)
        ahead, back = (criterion.value_and_gradient(x + sign * move)[0] for sign in (1, -1))
        np.testing.assert_allclose(gradient[at], (ahead - back) / (2 * step), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["bernoulli", "poisson"])
def test_laplace_reaches_the_optimum_of_dense_columns(family):
    """Both searches end within their tolerance of one optimum; the standard errors leave out the determinants."""
    rng, rows = np.random.default_rng(1), table(rows=900, clients=40, groups=5, products=8)
    eta = 0.4 * (rows["y"] - rng.normal(size=900)).to_numpy()
    y = rng.poisson(np.exp(eta)) if family == "poisson" else (rng.random(900) < 1 / (1 + np.exp(-eta))).astype(int)
    rows = rows.with_columns(y=pl.Series(y))
    formula = "y ~ x + z + C(product) + (1 | g/i)"
    dense, found = (covey.fit(rows, Spec(formula=formula, family=family, sparse=kind)) for kind in (False, True))
    at, shared = ([dense.terms_.index(term) for term in terms] for terms in (found.terms_, found.shared_terms_))
    one, other = found.components_, dense.components_
    assert found.convergence_.converged
    assert one.parameters == other.parameters
    np.testing.assert_allclose(one.log_likelihood, other.log_likelihood, rtol=1e-11)
    np.testing.assert_allclose(found.shared_coef_, dense.global_coef_[shared], atol=1e-6)
    np.testing.assert_allclose(found.coef_, dense.coef_[:, at], atol=1e-6)
    np.testing.assert_allclose(one.client.covariance, other.client.covariance, atol=1e-6)
    np.testing.assert_allclose(found.cov_, dense.cov_[np.ix_(at, at)], atol=1e-5)
    np.testing.assert_allclose(found.model_.shared.errors, np.sqrt(np.diag(dense.cov_))[shared], rtol=0.03)
    for ours, theirs in zip(one.tests, other.tests, strict=True):
        np.testing.assert_allclose(ours.statistic, theirs.statistic, atol=1e-7)
    new = rows.with_columns(i=pl.lit(999))
    np.testing.assert_allclose(found.predict(new), dense.predict(new), atol=1e-6)


@pytest.mark.parametrize("sparse", [True, False])
def test_columns_that_determine_every_unit_are_refused(sparse):
    rows = table(rows=400, clients=30, groups=5).with_columns(twin=pl.format("c{}", "i"), kind=pl.format("k{}", "g"))
    for formula, level in (("y ~ x + twin + (1 | i)", "client"), ("y ~ x + kind + (1 | g) + (1 | g:i)", "cluster")):
        with pytest.raises(covey.CoveyError, match=rf"already give every {level} its own coefficient of 'Intercept'"):
            covey.fit(rows, Spec(formula=formula, sparse=sparse))
    model = covey.fit(rows, Spec(formula="y ~ x + kind + (1 + x || g:i)", sparse=sparse, tests=False))
    assert model.convergence_.converged
