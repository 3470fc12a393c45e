"""Spec: how penalties are learned, and messages for settings that contradict each other."""

from __future__ import annotations

import numpy as np
import pytest

from covey import HierarchicalRegressor
from covey.datasets import simulate
from covey.errors import CoveyError
from covey.fitting.fit import check_solver
from covey.problem.problem import Spec, resolve

DRAWN = simulate(clusters=6, clients=5, rows=8, d=2, intercept=True, cluster_sd=0.8, client_sd=0.5, seed=3)
FRAME = DRAWN.frame().drop("x0").rename({"x1": "x0"})
NAMED = {"client": "client", "cluster": "cluster", "formula": "y ~ x0"}


@pytest.mark.parametrize(
    ("settings", "learns"),
    [
        ({}, "reml"),
        ({"family": "bernoulli"}, "ml"),
        ({"family": "poisson"}, "ml"),
        ({"penalty": "ml"}, "ml"),
        ({"penalty": "reml", "vary": ["x"]}, "reml"),
        ({"penalty": "cv"}, "cv"),
        ({"penalty": "cv", "family": "poisson", "reduction": "mean"}, "cv"),
        ({"gamma": 1.0}, None),
        ({"lam": 2.0}, None),
        ({"alpha": 0.5}, None),
        ({"gamma": 0.0}, None),
        ({"baseline": "single-model"}, None),
        ({"solver": "l2gd"}, "reml"),
        ({"james_stein": True}, "reml"),
    ],
)
def test_how_penalties_are_learned(settings, learns):
    spec = Spec(**settings)
    spec.check()
    assert spec.learns == learns
    assert spec.by_likelihood == (learns in ("reml", "ml"))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"penalty": "reml", "gamma": 1.0}, "penalty='reml' chooses the penalties itself; leave out gamma="),
        ({"penalty": "cv", "alpha": 1.0}, "penalty='cv' chooses the penalties itself; leave out alpha="),
        ({"penalty": "ml", "baseline": "single-model"}, "leave out baseline="),
        ({"penalty": "best"}, "'penalty' parameter must be one of 'auto', 'reml', 'ml', 'cv'. Got 'best'"),
        ({"penalty": "reml", "family": "poisson"}, "penalty='reml' is for the gaussian family; for poisson use penalty='ml'"),
        ({"gamma": 1.0, "vary": ["x"]}, "vary= says which variances are learned"),
        ({"penalty": "cv", "covariance": "full"}, "covariance= says which variances are learned"),
        ({"lam": 1.0, "per_cluster": True}, "per_cluster= says which variances are learned"),
        ({"baseline": "single-model", "vary": ["x"]}, "vary= says which variances are learned"),
        ({"reduction": "mean"}, "With reduction='mean' there is no likelihood"),
        ({"ridge": 0.5}, "With ridge=0.5 there is no likelihood"),
        ({"solver": "l2gd", "covariance": "full"}, "solver='l2gd' uses one penalty for all terms"),
        ({"james_stein": True, "covariance": {"client": "diagonal"}}, "james_stein=True uses one penalty for all terms"),
        ({"covariance": "round"}, "'covariance' parameter must be one of 'isotropic', 'diagonal', 'full'. Got 'round'"),
        ({"covariance": {"row": "full"}}, "'covariance' parameter has the key 'row'"),
        ({"per_cluster": "yes"}, "'per_cluster' parameter must be True or False. Got 'yes'"),
        ({"tests": 1}, "'tests' parameter must be True or False. Got 1"),
    ],
)
def test_contradicting_settings_are_one_message(settings, sentence):
    with pytest.raises(CoveyError) as caught:
        check_solver(resolve(Spec(**settings)).spec)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith(".")


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"vary": ["x"]}, "bars say what varies, and so does vary="),
        ({"gamma": 1.0}, "leave out gamma, lam, alpha, baseline and penalty='cv'"),
        ({"baseline": "single-model"}, "leave out gamma, lam, alpha, baseline and penalty='cv'"),
        ({"penalty": "cv"}, "leave out gamma, lam, alpha, baseline and penalty='cv'"),
        ({"client": "other"}, "make them agree"),
    ],
)
def test_settings_that_contradict_bars_are_one_message(settings, sentence):
    with pytest.raises(CoveyError) as caught:
        resolve(Spec(formula="y ~ x + (1 | g/h)", **settings))
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_bars_name_the_columns():
    spec = resolve(Spec(formula="y ~ x + (1 | g/h)")).spec
    assert (spec.client, spec.cluster, spec.nested) == ("h", "g", True)
    spec = resolve(Spec(formula="y ~ x + (1 | h)")).spec
    assert (spec.client, spec.cluster, spec.nested) == ("h", None, False)
    assert resolve(Spec(formula="y ~ x")).spec.client is None


@pytest.mark.parametrize(
    ("formula", "settings"),
    [
        ("y ~ x0 + (1 + x0 | cluster/client)", {"covariance": "full"}),
        ("y ~ x0 + (1 + x0 || cluster/client)", {}),
        ("y ~ x0 + (1 | cluster/client)", {"vary": ["1"]}),
        ("y ~ x0 + (1 | cluster) + (0 + x0 | cluster:client)", {"vary": {"client": ["x0"], "cluster": ["Intercept"]}}),
        (
            "y ~ x0 + (1 | cluster) + (x0 | cluster:client)",
            {"vary": {"cluster": ["1"]}, "covariance": {"client": "full"}},
        ),
        ("y ~ x0 + (1 + x0 || client)", {"cluster": None}),
        ("y ~ x0 + (1 | client)", {"cluster": None, "vary": ["1"]}),
    ],
)
def test_bars_and_settings_that_say_the_same_fit_the_same(formula, settings):
    by_bars = HierarchicalRegressor(formula=formula).fit(FRAME)
    by_settings = HierarchicalRegressor(**{**NAMED, **settings}).fit(FRAME)
    np.testing.assert_array_equal(by_bars.coef_, by_settings.coef_)
    assert by_bars.components_.log_likelihood == by_settings.components_.log_likelihood
    assert by_bars.components_.tests == by_settings.components_.tests
    assert by_bars.components_.client.terms == by_settings.components_.client.terms


def test_only_the_terms_in_a_bar_vary():
    model = HierarchicalRegressor(formula="y ~ x0 + (1 | cluster/client)").fit(FRAME)
    assert np.ptp(model.coef_[:, 1]) < 1e-12
    assert np.ptp(model.coef_[:, 0]) > 0.1
    assert model.components_.client.terms == model.components_.cluster.terms == ("Intercept",)
