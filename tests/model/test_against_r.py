"""Inference beside R. ``reference/inference.R`` made ``reference/inference.json``, which has the versions of its packages."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import numpy as np
import polars as pl
import pytest

import covey
from covey import HierarchicalClassifier, HierarchicalRegressor
from covey.datasets import load_radon
from covey.model.robust import sandwich
from tests.r_tables import cbpp, sleepstudy

R = json.loads((Path(__file__).parent / "reference" / "inference.json").read_text())
GAUSSIAN, LAPLACE = 1e-5, 1e-3


@cache
def slopes():
    return covey.fit(sleepstudy(), "Reaction ~ Days * half + (Days | Subject)")


@cache
def nested():
    place = pl.when(pl.col("floor") == 0).then(pl.lit("basement")).otherwise(pl.lit("upper"))
    return covey.fit(load_radon().with_columns(place=place), "log_radon ~ place + (1 | state/county)")


@cache
def herds(terms="period"):
    return HierarchicalClassifier(formula=f"cbind(incidence, size - incidence) ~ {terms} + (1 | herd)").fit(cbpp())


def close(ours, theirs, tol):
    """Equal to ``tol``, relative to the largest number."""
    theirs = np.asarray(theirs, dtype=float)
    np.testing.assert_allclose(np.asarray(ours, dtype=float), theirs, rtol=tol, atol=tol * np.abs(theirs).max())


def close_p(ours, theirs, tol):
    """P-values, equal to ``tol``; small ones by their logarithm, which a relative error of a statistic multiplies."""
    np.testing.assert_allclose(np.asarray(ours, dtype=float), np.asarray(theirs, dtype=float), rtol=tol, atol=tol)
    close(np.log(np.asarray(ours, dtype=float)), np.log(np.asarray(theirs, dtype=float)), tol)


def same_table(ours, theirs, tol, columns=("estimate", "std_error", "df", "lower", "upper", "p_value")):
    for mine, other in zip(columns, ("estimate", "se", "df", "lower", "upper", "p"), strict=False):
        (close_p if mine == "p_value" else close)(ours[mine], theirs[other], tol)


def test_coefficients_and_their_covariance():
    close(slopes().global_coef_, R["slopes"]["coefficients"], GAUSSIAN)
    close(slopes().cov_, R["slopes"]["cov"], GAUSSIAN)
    close(nested().cov_, R["nested"]["cov"], GAUSSIAN)
    close(herds().cov_, R["herds"]["cov"], LAPLACE)


def test_means_and_contrasts_of_emmeans():
    model, theirs = slopes(), R["slopes"]
    same_table(model.means("half"), theirs["means"], GAUSSIAN)
    same_table(model.contrast("half"), theirs["pairs"], GAUSSIAN)
    same_table(model.means("half", by="Days", at={"Days": [0, 9]}).sort("Days"), theirs["at"], GAUSSIAN)
    half = model.contrast("half", by="Days", at={"Days": [0, 9]})
    by_hand = model.contrast([{"half[T.late]": -1.0}, {"half[T.late]": -1.0, "Days:half[T.late]": -9.0}])
    for column in ("estimate", "std_error", "p_value"):
        np.testing.assert_allclose(half[column], by_hand[column])


@pytest.mark.parametrize(("adjust", "name"), [("tukey", "pairs"), ("none", "plain"), ("holm", "holm")])
def test_adjusted_contrasts_of_emmeans(adjust, name):
    model, theirs = covey.fit(sleepstudy(), "Reaction ~ C(z) + Days + (1 | Subject)"), R["slopes"]["tukey"]
    same_table(model.contrast("z", adjust=adjust), theirs[name], GAUSSIAN)
    same_table(model.means("z"), theirs["means"], GAUSSIAN)


def test_means_and_contrasts_of_a_classifier():
    """emmeans takes normal quantiles for ``glmer``; covey takes those of t, so intervals are not compared."""
    columns = ("estimate", "std_error")
    same_table(herds().means("period"), R["herds"]["means"], LAPLACE, columns)
    same_table(herds().means("period", scale="response"), R["herds"]["response"], LAPLACE, columns)
    same_table(herds().contrast("period"), R["herds"]["pairs"], LAPLACE, columns)


def test_residuals_of_lme4():
    close(slopes().residuals(sleepstudy())[:12], R["slopes"]["residuals"], GAUSSIAN)
    for kind, theirs in R["herds"]["residuals"].items():
        close(herds().residuals(cbpp(), kind=kind), theirs, LAPLACE)


def test_deviations_and_conditional_variances_of_lme4():
    found = slopes().random_effects()
    close(found["deviation"].to_numpy().reshape(-1, 2), R["slopes"]["deviations"], GAUSSIAN)
    close(found["conditional_variance"].to_numpy().reshape(-1, 2), R["slopes"]["variances"], GAUSSIAN)
    states = nested().random_effects("cluster")
    assert states["cluster"].to_list() == R["nested"]["states"]
    close(states["deviation"], R["nested"]["state"], GAUSSIAN)
    close(states["conditional_variance"], R["nested"]["state_variance"], GAUSSIAN)
    counties = {f"{row['client']}:{row['cluster']}": row for row in nested().random_effects().to_dicts()}
    some = [counties[name] for name in R["nested"]["county_names"]]
    close([row["deviation"] for row in some], R["nested"]["county"], GAUSSIAN)
    close([row["conditional_variance"] for row in some], R["nested"]["county_variance"], GAUSSIAN)
    found = {row["client"]: row for row in herds().random_effects().to_dicts()}
    close([found[herd]["deviation"] for herd in R["herds"]["herds"]], R["herds"]["deviations"], LAPLACE)
    close([found[herd]["conditional_variance"] for herd in R["herds"]["herds"]], R["herds"]["variances"], LAPLACE)


def test_r2_of_performance():
    two = covey.fit(sleepstudy(), "Reaction ~ Days + (Days | Subject)")
    close(two.r2()[::-1], R["slopes"]["r2"], GAUSSIAN)
    close(two.r2(sleepstudy()), two.r2(), 1e-12)
    close(nested().r2()[::-1], R["nested"]["r2"], GAUSSIAN)
    close(herds().r2(cbpp())[::-1], R["herds"]["r2"], LAPLACE)


def test_comparisons_of_anova():
    one, two = (covey.fit(sleepstudy(), f"Reaction ~ Days + ({terms} | Subject)") for terms in ("1", "Days"))
    pairs = {"effects": (two, one), "common": (slopes(), two)}
    for name, models in pairs.items():
        same_comparison(covey.compare(*models), R["comparison"][name], GAUSSIAN)
    same_comparison(covey.compare(herds("1"), herds()), R["herds"]["comparison"], LAPLACE)


def same_comparison(ours, theirs, tol):
    for mine, other in (("parameters", "parameters"), ("log_likelihood", "loglik"), ("aic", "aic"), ("bic", "bic")):
        close(ours[mine], theirs[other], tol)
    for mine, other in (("statistic", "statistic"), ("df", "df")):
        close(ours[mine][1:], theirs[other], tol)
    close_p(ours["p_value"][1:], theirs["p"], tol)


def test_profile_intervals_of_lme4():
    """Standard deviations, correlations, penalties by lme4's deviance function, and coefficients."""
    for name, terms, order in (("one", "1", [0, 1]), ("two", "Days", [0, 2, 1, 3])):
        model = HierarchicalRegressor(formula=f"Reaction ~ Days + ({terms} | Subject)", penalty="ml").fit(sleepstudy())
        close(model.profile().select("lower", "upper"), np.array(R["profile"][name])[order], GAUSSIAN)
        penalties = model.profile(which="penalties").select("estimate", "lower", "upper")
        for ours, theirs in zip(penalties.rows(), R["profile"][f"{name}_penalties"], strict=True):
            close(ours, theirs, GAUSSIAN)
        coefficients = model.profile(which="coefficients").select("lower", "upper")
        close(coefficients, R["profile"][f"{name}_beta"], GAUSSIAN)
    close(herds().profile(cbpp()).select("lower", "upper"), R["herds"]["profile"], LAPLACE)
    close(herds().profile(cbpp(), which="coefficients").select("lower", "upper"), R["herds"]["profile_beta"], LAPLACE)


def test_coefficients_of_a_reml_fit_are_profiled_by_the_full_likelihood():
    model = HierarchicalRegressor(formula="Reaction ~ Days + (Days | Subject)").fit(sleepstudy())
    close(model.profile(which="coefficients").select("lower", "upper"), R["profile"]["two_beta"], GAUSSIAN)


@pytest.mark.parametrize(("model", "name"), [(slopes, "slopes"), (nested, "nested")])
def test_sandwiches_of_clubsandwich(model, name):
    """Covariances, and Satterthwaite's degrees of freedom of ``coef_test``."""
    model = model()
    for correction, theirs in R[name]["robust"].items():
        found = model.robust(correction)
        V = sandwich(model.model_.posterior, model.global_coef_, correction).covariance
        close(V, theirs["cov"], GAUSSIAN)
        close(found["std_error"], np.sqrt(np.diag(theirs["cov"])), GAUSSIAN)
        close(found["df"], theirs["df"], GAUSSIAN)
