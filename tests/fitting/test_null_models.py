"""Terms that only a bar names vary about zero. This is the null model of the usual test of a common coefficient.

Provenance: lme4 1.1.31 (R 4.2.2), ``lmer(formula, sleepstudy, control = lmerControl("bobyqa", optCtrl = list(rhoend =
1e-10)))`` with ``sleepstudy$half <- factor(ifelse(Days < 5, "early", "late"))``; glmmTMB 1.1.5 for cbpp, with ``t`` the number
of the period less 2.5.
"""

from __future__ import annotations

import polars as pl
import pytest

from covey import HierarchicalClassifier, HierarchicalRegressor, Spec, load, simulate_sites
from covey.errors import FormulaError, PenaltyError
from tests.r_tables import cbpp, sleepstudy

SLEEP = sleepstudy()


@pytest.mark.parametrize(
    ("formula", "penalty", "log_likelihood", "aic", "bic", "common", "sds", "residual"),
    [
        (
            "Reaction ~ 1 + (1 + Days | Subject)", "ml", -887.73794098054, 1785.4758819611, 1801.4406662155,
            {"Intercept": 257.7618}, [24.6155, 11.92670], 25.59182,
        ),
        (
            "Reaction ~ 1 + (1 + Days | Subject)", "reml", -884.92245192935, 1779.8449038587, 1795.8096881131,
            {"Intercept": 257.7618}, [25.52677, 11.92670], 25.59182,
        ),
        (
            "Reaction ~ 0 + (1 | Subject)", "ml", -992.8398454715, 1989.679690943, 1996.0656046448,
            {}, [300.50524], 44.25907,
        ),
        (
            "Reaction ~ 0 + Days + (1 | Subject)", "reml", -930.84412076635, 1867.6882415327, 1877.2671120854,
            {"Days": 10.67193}, [253.0842], 30.99711,
        ),
        # The bar codes the categories of ``half`` in another way than a common term would.
        (
            "Reaction ~ Days + (0 + half | Subject)", "reml", -874.85175682036, 1761.7035136407, 1780.8612547461,
            {"Intercept": 250.99048, "Days": 10.042212}, [28.16857, 50.06677], 26.07391,
        ),
    ],
)  # fmt: skip
def test_null_models_as_in_lme4(formula, penalty, log_likelihood, aic, bic, common, sds, residual):
    model = HierarchicalRegressor(formula=formula, penalty=penalty).fit(SLEEP)
    found = model.components_
    assert (found.log_likelihood, found.aic, found.bic) == pytest.approx((log_likelihood, aic, bic), abs=1e-6)
    coefficients = dict(zip(model.terms_, model.global_coef_, strict=True))
    assert coefficients == pytest.approx({**dict.fromkeys(found.zero, 0.0), **common}, rel=1e-5)
    assert found.client.sd[0].tolist() == pytest.approx(sds, rel=1e-4)
    assert found.residual**0.5 == pytest.approx(residual, rel=1e-5)
    assert set(found.zero) == set(model.terms_) - set(common)


def test_the_usual_test_of_a_common_coefficient():
    """``anova(null, full)`` of lme4 1.1.31: chi-squared 23.53654, 1 degree of freedom."""
    formulas = ("Reaction ~ 1 + (1 + Days | Subject)", "Reaction ~ Days + (1 + Days | Subject)")
    null, full = (HierarchicalRegressor(formula=each, penalty="ml").fit(SLEEP).components_ for each in formulas)
    assert full.parameters == null.parameters + 1
    assert 2 * (full.log_likelihood - null.log_likelihood) == pytest.approx(23.53654, abs=1e-4)


def test_a_null_model_of_trials_as_in_glmmtmb():
    model = HierarchicalClassifier(formula="cbind(incidence, size - incidence) ~ 1 + (1 + t | herd)").fit(cbpp())
    found = model.components_
    assert found.log_likelihood == pytest.approx(-98.169272986916, abs=1e-6)
    assert (found.aic, found.bic) == pytest.approx((204.33854597383, 212.43995273677), abs=1e-6)
    assert model.global_coef_.tolist() == pytest.approx([-2.434876, 0.0], abs=1e-5)
    assert found.client.sd[0].tolist() == pytest.approx([0.529235, 0.649960], rel=1e-4)


def test_a_term_that_varies_about_zero_is_shown_as_known():
    model = HierarchicalRegressor(formula="Reaction ~ 1 + (1 + Days | Subject)").fit(SLEEP)
    (line,) = (line for line in str(model).splitlines() if line.startswith("Days "))
    assert line.split()[:4] == ["Days", "0", "-", "-"]
    assert model.predict(SLEEP, level="global").std() == pytest.approx(0.0, abs=1e-9)
    assert model.predict(SLEEP).std() > 30


def test_saving_updating_and_drawing_keep_zero(tmp_path):
    model = HierarchicalRegressor(formula="Reaction ~ 1 + (1 + Days | Subject)", random_state=0).fit(SLEEP)
    again = load(model.save(tmp_path / "model"))
    assert (again.coef_ == model.coef_).all()
    assert again.components_.zero == ("Days",)
    part = HierarchicalRegressor(formula=model.formula).fit(SLEEP.filter(pl.col("Subject") != 3))
    more = part.add_clients(SLEEP.filter(pl.col("Subject") == 3))
    assert more.global_coef_[1] == 0.0
    less = more.remove_clients([3])
    assert less.coef_ == pytest.approx(part.coef_, abs=1e-8)
    assert again.bootstrap(draws=3)["sd"].is_finite().all()


def test_across_sites_and_a_model_file_are_the_same(tmp_path):
    spec = Spec(formula="Reaction ~ 1 + (1 + Days | Subject)")
    run = simulate_sites(SLEEP, spec, sites=3, models=tmp_path)
    here = HierarchicalRegressor(formula=spec.formula).fit(SLEEP)
    assert run.difference(here.model_) < 1e-9
    assert run.outcome.model.learned.components.zero == ("Days",)
    assert load(tmp_path / "site1").terms_ == here.terms_


def test_standardised_terms_need_a_common_intercept():
    with pytest.raises(FormulaError, match=r"needs a common intercept; add 1"):
        HierarchicalRegressor(formula="Reaction ~ 0 + Days + (1 | Subject)", standardize=True).fit(SLEEP)


def test_randomised_algorithms_estimate_every_global_coefficient():
    with pytest.raises(PenaltyError, match=r"estimates every global coefficient"):
        HierarchicalRegressor(formula="Reaction ~ 0 + (1 | Subject)", solver="l2gd").fit(SLEEP)
