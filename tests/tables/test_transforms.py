"""Functions of formulas that remember training rows, contrasts and offsets: against R, on disk and across sites."""

from __future__ import annotations

import json
import math

import narwhals as nw
import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import covey
from covey import CoveyError, HierarchicalPoissonRegressor, HierarchicalRegressor, Spec, simulate_sites
from covey.errors import DataError, FormulaError
from covey.federation.operator.settings import RunSettings
from covey.federation.wire.messages import Privacy
from covey.problem.problem import Problem, resolve
from covey.problem.rows import read_rows
from covey.tables.design import Formula, inspect
from covey.tables.formula import Terms, parse_formula
from covey.tables.scaling import design_from_json
from covey.tables.text import MOST_TERMS

X = [0.2, 0.5, 0.9, 1.4, 2.0, 2.7, 3.5, 4.4, 5.4, 6.5]
NEW = [-0.5, 3.0, 8.0]  # inside the training values and beyond both ends

# R 4.2.2 with splines: x and new as above,
#   predict(poly(x, 3), new); s <- scale(x), (new - attr(s, "scaled:center")) / attr(s, "scaled:scale");
#   predict(bs(x, df = 5), new);
#   predict(bs(x, knots = c(1, 3), Boundary.knots = c(0, 7), degree = 2, intercept = TRUE), new)
R_COLUMNS = {
    "poly(x, 3)": [
        [-0.503015222721, 0.83602452416, -1.4810252291],
        [0.0386934786709, -0.385301757088, 0.0732419251333],
        [0.812563052088, 1.63786046274, 3.5947837995],
    ],
    "scale(x)": [[-1.50904566816], [0.116080436013], [2.43768915626]],
    "bs(x, df=5)": [
        [-3.4389682813, 0.483388174676, -0.0137485970819, 0, 0],
        [0.00546591455682, 0.433329132081, 0.486215480448, 0.0749894729133, 0],
        [0, -0.0350140056022, 0.592972483111, -2.93295847751, 3.375],
    ],
    "bs(x, knots=c(1, 3), degree=2, include_intercept=TRUE, lower_bound=0, upper_bound=7)": [
        [2.25, -1.33333333333, 0.0833333333333, 0, 0],
        [0, 0, 0.666666666667, 0.333333333333, 0],
        [0, 0, 0.0416666666667, -0.604166666667, 1.5625],
    ],
}


def frame_of(**columns):
    return nw.from_native(pl.DataFrame(columns), eager_only=True)


def learn(text, frame):
    terms = Terms.parse(text)
    return Formula.of(terms, *inspect(terms, frame)).learn_from(frame)


def columns_of(design, frame):
    return np.column_stack(design.blocks(frame))


@pytest.mark.parametrize("call", R_COLUMNS)
def test_columns_of_new_rows_are_those_of_r(call):
    design = learn(f"0 + {call}", frame_of(x=X))
    again = design_from_json(json.loads(json.dumps(design.to_json())))
    assert again == design
    np.testing.assert_allclose(columns_of(again, frame_of(x=NEW)), R_COLUMNS[call], atol=1e-10)


def test_natural_splines_span_the_curves_of_r():
    """R: f <- lm(sin(x) ~ ns(x, df = 3)); predict(f, data.frame(x = new)). Beyond the ends both are straight lines."""
    design = learn("cr(x, df=3)", frame_of(x=X))
    coefficients, *_ = np.linalg.lstsq(columns_of(design, frame_of(x=X)), np.sin(X), rcond=None)
    found = columns_of(design, frame_of(x=NEW)) @ coefficients
    np.testing.assert_allclose(found, [-0.685823225549, -0.0513092853731, 1.0624576085], atol=1e-10)


AT = np.arange(120)
ZONE = np.array(list("abc"))[(AT // 10) % 3]
PLACE = ((7 * AT) % 23) / 5
ROWS = pl.DataFrame(
    {
        "g": AT % 10,
        "k": (AT % 10) // 5,
        "x": PLACE,
        "zone": ZONE,
        "y": np.sin(PLACE) + 0.4 * ((AT % 10) % 4) + np.cos(3 * AT) / 2 + 0.3 * (ZONE == "b"),
        "count": (AT * 13) % 7,
        "n": 1 + AT % 5,
        "t": ((11 * AT) % 17) / 3,
    }
)
THREE = pl.DataFrame({"g": [0, 3, 9], "x": [0.5, 2.2, 5.0], "zone": list("abc")})


# R 4.2.2, lme4 1.1-31: d has the columns of ROWS, with g as a factor; lmer(f, d) with ftol_abs = xtol_abs = 1e-14;
# logLik(m) and predict(m, new). ns(x, df = 4) has another basis, so its restricted likelihood is another one.
# contr.treatment(3, base = 2) and contr.sum(3) were set by contrasts(d$zone). center(x) is x - mean(x).
@pytest.mark.parametrize(
    ("formula", "log_likelihood", "predictions"),
    [
        ("y ~ poly(x, 2) + zone + (1 | g)", -74.6068517759, [0.6115263565, 2.2565509594, -1.8288493090]),
        ("y ~ bs(x, df=5) + (1 | g)", -76.1322967270, [0.5481012732, 2.1084456212, -0.1118658852]),
        ("y ~ cr(x, df=4) + (1 | g)", None, [0.6384814498, 2.0958859152, -0.9165928879]),
        (
            "y ~ scale(x) + C(zone, contr.treatment('b')) + (1 | g)",
            -108.9956203098,
            [0.9376163511, 1.6214214841, -0.5663965423],
        ),
        ("y ~ center(x) + C(zone, contr.sum) + (1 | g)", -110.3868607150, [0.9376163511, 1.6214214841, -0.5663965423]),
    ],
)
def test_fits_are_those_of_lmer(formula, log_likelihood, predictions):
    model = HierarchicalRegressor(formula=formula, tests=False).fit(ROWS)
    # With a small variance lmer stops at 1e-7 of the optimum.
    np.testing.assert_allclose(model.predict(THREE), predictions, atol=2e-7 if "contr" in formula else 2e-9)
    if log_likelihood is not None:
        assert model.components_.log_likelihood == pytest.approx(log_likelihood, abs=1e-8)
    np.testing.assert_allclose(model.predict(THREE[:1]), model.predict(THREE)[:1], rtol=1e-12)  # not by the new rows


def test_coefficients_of_chosen_contrasts_are_those_of_r():
    """fixef(m) of the two fits with contrasts above."""
    treatment = HierarchicalRegressor(formula="y ~ scale(x) + C(zone, contr.treatment('b')) + (1 | g)", tests=False).fit(ROWS)
    assert treatment.terms_[2:] == ("C(zone, contr.treatment('b'))[T.a]", "C(zone, contr.treatment('b'))[T.c]")
    expected = [1.094995325337, -0.456186988764, -0.316235139497, -0.313161944882]
    np.testing.assert_allclose(treatment.global_coef_, expected, atol=1e-7)
    sums = HierarchicalRegressor(formula="y ~ center(x) + C(zone, contr.sum) + (1 | g)", tests=False).fit(ROWS)
    expected = [0.885196297211, -0.340452178936, -0.106436111371, 0.209799028127]
    np.testing.assert_allclose(sums.global_coef_, expected, atol=1e-7)


@settings(max_examples=30, deadline=None)
@given(
    st.sets(st.integers(-30, 30), min_size=7), st.integers(1, 5), st.sampled_from([1e-3, 1.0, 1e6]), st.integers(-2000, 2000)
)
def test_polynomials_are_orthonormal(values, degree, unit, shift):
    x = unit * (np.array(sorted(values)) + shift)
    columns = columns_of(learn(f"poly(x, {degree})", frame_of(x=x)), frame_of(x=x))
    columns[:, 0] /= math.sqrt(len(x))
    np.testing.assert_allclose(columns.T @ columns, np.eye(degree + 1), atol=1e-8)


SITE_FORMULAS = [
    "y ~ poly(x, 3) + scale(n) + (1 | k/g)",
    "y ~ center(log(n)) + I(scale(x)**2) + scale(x):zone + (1 | g)",
    "y ~ bs(x, knots=[1, 3], lower_bound=0, upper_bound=5) + C(zone, contr.treatment('c')) + (1 | g)",
    "y ~ cr(x, knots=[1, 3], lower_bound=0, upper_bound=5) + (1 + scale(t) | g) + scale(t)",
    "y ~ zone + offset(log(n)) + (1 | g)",
]


@pytest.mark.parametrize("formula", SITE_FORMULAS)
def test_sites_agree_by_sums_and_models_are_saved(formula, tmp_path):
    spec = Spec(formula=formula, tests=False)
    model, run = covey.fit(ROWS, spec), simulate_sites(ROWS, spec, 3, models=tmp_path / "sites")
    assert run.difference(model.model_) < 1e-10
    assert run.outcome.model.design == model.model_.design  # the same bits
    model.save(tmp_path / "model")
    for again in (covey.load(tmp_path / "model"), covey.load(next((tmp_path / "sites").iterdir()))):
        assert again.model_.design == model.model_.design
        known = ROWS.filter(pl.col("g").is_in(again.clients_.tolist()))
        np.testing.assert_allclose(again.predict(known), model.predict(known), atol=1e-9)
    plain = model.model_.problem.to_json()
    assert Problem.from_json(json.loads(json.dumps(plain))) == model.model_.problem


def test_masked_sums_give_the_same_state():
    spec = Spec(formula="y ~ poly(x, 2) + (1 | g)", tests=False)
    run = simulate_sites(ROWS, spec, 3, settings=RunSettings(secure=True))
    assert run.outcome.model.design == covey.fit(ROWS, spec).model_.design


@pytest.mark.parametrize("call", ["bs(x, df=4)", "cr(x, df=4)", "bs(x, knots=[1, 3])"])
def test_across_sites_knots_must_be_given(call):
    with pytest.raises(CoveyError, match=r"takes its knots from the rows.*knots=\[1, 2\], lower_bound=0"):
        simulate_sites(ROWS, Spec(formula=f"y ~ {call} + (1 | g)"), 3)


def test_a_private_run_refuses_exact_sums():
    private = RunSettings(private=Privacy(1.0, 1.0, 2))
    with pytest.raises(CoveyError, match=r"scale\(x\) needs exact sums.*I\(\(x - 40\) / 10\)"):
        simulate_sites(ROWS, Spec(formula="y ~ scale(x)", client="g", gamma=1.0), 3, settings=private)


@pytest.mark.parametrize(
    ("formula", "words"),
    [
        ("scale(one)", ["scale(one)", "at least 2 different values"]),
        ("poly(few, 3)", ["poly(few, 3)", "at least 4 different values"]),
        ("bs(few, df=8)", ["bs(few, df=8)", "must increase", "give knots="]),
        ("scale(gap)", ["'gap'", "NaN in row 2"]),
        ("bs(gap, df=4)", ["'gap'", "NaN in row 2"]),
        ("C(g, contr.treatment('z'))", ["'g'", "'z'", "'a', 'b'"]),
        ("scale(g)", ["'g'", "category"]),
    ],
)
def test_rows_that_a_function_cannot_learn_from(formula, words):
    gap = [1.0, 2.0, float("nan"), *range(7)]
    frame = frame_of(one=[3.3] * 10, few=[1.0, 2.0, 3.0, 1.0, 2.0] * 2, gap=gap, g=["a", "b"] * 5)
    with pytest.raises((DataError, FormulaError)) as caught:
        learn(formula, frame)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    ("formula", "words"),
    [
        ("y ~ I(Days^2)", ["Days**2"]),
        ("y ~ x:z^2", ["I(z**2)"]),
        ("y ~ x**2", ["I(x**2)"]),
        ("y ~ x + 1|g", ["parentheses", "(1 | g)"]),
        ("y ~ factor(x)", ["C(x)"]),
        ("y ~ z + as.factor(x)", ["C(x)"]),
        ("y ~ a %in% b", ["a:b"]),
        ("y ~ C(x, Treatment('b'))", ['C(x, contr.treatment("b"))']),
        ("y ~ C(x, Sum)", ["C(x, contr.sum)"]),
        ("y ~ C(x, 'b')", ['contr.treatment("b")']),
        ("y ~ relevel(x, ref='b')", ["C(x, contr.treatment("]),
        ("y ~ np.log(x)", ["log(x)"]),
        ("y ~ ns(x, 3)", ["cr(x, df=4)"]),
        ("y ~ s(x)", ["cr(x, df=4)"]),
        ("y ~ poly(x)", ["poly(x, 2)"]),
        ("y ~ poly(x, 2, raw=True)", ["'raw'", "poly(x, 2)"]),
        ("y ~ poly(x, 99)", ["1 to 20"]),
        ("y ~ bs(x, df=2)", ["at least 3"]),
        ("y ~ bs(x, df=4, knots=[1])", ["df and knots"]),
        ("y ~ bs(x, knots=[3, 1])", ["must increase"]),
        ("y ~ bs(x, df=z)", ["df=5"]),
        ("y ~ bs(x, Boundary.knots=c(0, 1))", ["lower_bound"]),
        ("y ~ cr(x)", ["df=5"]),
        ("y ~ scale(center(x))", ["center(x)", "term of its own"]),
        ("y ~ log(poly(x, 2))", ["poly(x, 2)", "term of its own"]),
        ("y ~ log(C(x))", ["term of its own"]),
        ("y ~ center(3)", ["names no column"]),
        ("y ~ I(x > 2)", ["comparison", "column of 0 and 1"]),
        ("y ~ x - offset(z)", ["'+'"]),
        ("y ~ x:offset(z)", ["by itself"]),
        ("y ~ offset()", ["empty"]),
        ("y ~ offset(scale(z))", ["scale(z)", "column"]),
        ("scale(y) ~ x", ["scale(y)", "column"]),
        ("log(y)^2 ~ x", ["I(log(y)**2)"]),
    ],
)
def test_habits_of_other_languages_get_a_sentence_with_the_fix(formula, words):
    with pytest.raises(FormulaError) as caught:
        parse_formula(formula)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)


def test_columns_of_functions_count_as_terms():
    wide = ":".join(f"bs(x{at}, df=90)" for at in range(3))
    with pytest.raises(FormulaError, match=f"more than {MOST_TERMS:,} terms"):
        parse_formula(f"y ~ {wide}")


@pytest.mark.parametrize(
    "state",
    [
        {"scale(x)": [10.0, 1.0, 2.0]},
        {"scale(x)": [10.0, 1.0, math.nan, 0.0]},
        {"scale(x)": [1.0] * 6},
        {"scale(x)": [10.0, 1.0]},
        {},
        {"scale(x)": ["__import__('os')", 1.0]},
        {"poly(x, 2)": [1.0, 2.0]},
        {"__import__('os')": []},
    ],
)
def test_a_damaged_state_is_refused(state, tmp_path):
    model = covey.fit(ROWS, Spec(formula="y ~ scale(x) + (1 | g)", tests=False))
    folder = model.save(tmp_path / "model")
    document = json.loads((folder / "model.json").read_text())
    assert list(document["design"]["state"]) == ["scale(x)"]
    document["design"]["state"] = state
    (folder / "model.json").write_text(json.dumps(document))
    with pytest.raises(CoveyError, match=r"damaged|JSON"):
        covey.load(folder)


# Offsets


def test_an_offset_in_the_formula_is_that_of_a_column_and_of_glmer():
    """R: glmer(count ~ x + offset(log(n)) + (1 | g), d, poisson): logLik -273.76138284, fixef 0.13319649, -0.00754082."""
    terms = HierarchicalPoissonRegressor(formula="count ~ x + offset(log(n)) + (1 | g)", tests=False).fit(ROWS)
    setting = HierarchicalPoissonRegressor(formula="count ~ x + (1 | g)", offset="log(n)", tests=False).fit(ROWS)
    logged = ROWS.with_columns(log_n=pl.col("n").log())
    column = HierarchicalPoissonRegressor(formula="count ~ x + (1 | g)", offset="log_n", tests=False).fit(logged)
    for model in (terms, setting):
        np.testing.assert_allclose(model.coef_, column.coef_, rtol=1e-12)
        np.testing.assert_allclose(model.predict(ROWS), column.predict(logged), rtol=1e-12)
    assert terms.components_.log_likelihood == pytest.approx(-273.76138284, abs=1e-5)
    np.testing.assert_allclose(terms.global_coef_, [0.13319649, -0.00754082], atol=1e-4)
    with pytest.raises(DataError, match="There is no column 'n'"):
        terms.predict(ROWS.drop("n"))


def test_several_offsets_are_added_and_given_once():
    data, problem = read_rows(ROWS, resolve(Spec(formula="y ~ offset(x) + offset(log(n) / 2) + (1 | g)")))
    assert problem.has_offset
    assert data.offset.sum() == pytest.approx((ROWS["x"] + ROWS["n"].log() / 2).sum())
    with pytest.raises(FormulaError, match="given twice"):
        covey.fit(ROWS, Spec(formula="y ~ offset(x) + (1 | g)", offset="n"))
    with pytest.raises(FormulaError, match="given twice"):
        HierarchicalRegressor(formula="y ~ offset(x) + (1 | g)").fit(ROWS, offset=np.ones(120))
    with pytest.raises(DataError, match="'zone' holds string values"):
        covey.fit(ROWS, Spec(formula="y ~ x + (1 | g)", offset="2 * zone"))


def test_columns_of_an_offset_are_not_features():
    few = ROWS.select("y", "x", "n", "g")
    model = HierarchicalRegressor(client="g", offset="log(n)", tests=False).fit(few.drop("y"), few["y"])
    assert model.terms_ == ("Intercept", "x")
