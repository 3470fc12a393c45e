"""Designs of formulas: terms, values, saved categories, and expressions that are refused."""

from __future__ import annotations

import json

import narwhals as nw
import numpy as np
import polars as pl
import pytest

from covey.tables.design import Formula, inspect, response
from covey.tables.formula import Terms, parse_formula
from covey.tables.scaling import design_from_json

FRAME = nw.from_native(
    pl.DataFrame({"g": ["a", "b", "a", "c"], "x": [1.0, 2.0, 3.0, 4.0], "h": [1, 2, 1, 3], "my col": [1, 2, 3, 4]})
)


def learn(text, frame=FRAME):
    terms = Terms.parse(text)
    return Formula.of(terms, *inspect(terms, frame))


@pytest.mark.parametrize(
    ("formula", "terms"),
    [
        ("x", ("Intercept", "x")),
        ("0 + x", ("x",)),
        ("x - 1", ("x",)),
        ("1", ("Intercept",)),
        ("g", ("Intercept", "g[T.b]", "g[T.c]")),
        ("C(h)", ("Intercept", "C(h)[T.2]", "C(h)[T.3]")),
        ("g:x", ("Intercept", "g[a]:x", "g[b]:x", "g[c]:x")),
        ("log(x) + I(x**2) + sqrt(x)", ("Intercept", "log(x)", "I(x ** 2)", "sqrt(x)")),
        ("`my col`", ("Intercept", "my col")),
    ],
)
def test_terms(formula, terms):
    assert learn(formula, FRAME).terms == terms


def test_values():
    matrix = np.column_stack(learn("log(x) + x:h + g", FRAME).blocks(FRAME))
    np.testing.assert_allclose(matrix[1], [1, np.log(2), 1, 0, 4])


def test_categories_are_remembered_through_json():
    design = learn("g * x", FRAME)
    again = design_from_json(json.loads(json.dumps(design.to_json())))
    one_row = nw.from_native(pl.DataFrame({"x": [2.0], "g": ["b"]}))
    np.testing.assert_array_equal(np.column_stack(again.blocks(one_row)), [[1, 1, 0, 2, 2, 0]])


def test_pandas_categories_keep_their_order():
    import pandas as pd

    frame = nw.from_native(pd.DataFrame({"z": pd.Categorical(["a", "b", "c"], categories=["c", "b", "a"])}), eager_only=True)
    assert learn("z", frame).terms == ("Intercept", "z[T.b]", "z[T.a]")


def test_an_unknown_category_is_named():
    design = learn("g", FRAME)
    with pytest.raises(ValueError, match=r"Column 'g' has the category 'z' in row 0.*known ones are 'a', 'b', 'c'"):
        design.blocks(nw.from_native(pl.DataFrame({"g": ["z"]})))
    with pytest.raises(ValueError, match=r"Column 'g' has no category in row 1"):
        design.blocks(nw.from_native(pl.DataFrame({"g": ["a", None]})))


@pytest.mark.parametrize(
    "code",
    [
        "__import__('os').system('true')",
        "x.__class__",
        "np.log(x)",
        "eval(x)",
        "log(x).__class__",
        "I(open('f'))",
        "[x for x in x]",
        "log(x, x)",
        "exp(lambda: 1)",
        "I(x if x else x)",
        "{x.__class__}",
        "{().__class__}",
        "C(x, contr.__class__)",
        "C(x, contr.treatment(__import__('os')))",
        "scale(x.__class__)",
        "bs(x, df=__import__('os'))",
        "scale(*x)",
        "scale((z := x))",
        "offset(eval(x))",
    ],
)
def test_a_formula_cannot_run_code(code):
    with pytest.raises(ValueError, match=r"is not supported|cannot be read|is not a number|There is no column|is no number"):
        learn(code, FRAME)
    document = {"kind": "formula", "rhs": code, "terms": ["t"], "columns": ["x"], "levels": {}}
    with pytest.raises(ValueError, match=r"."):
        design_from_json(document).blocks(FRAME)


@pytest.mark.parametrize(
    ("formula", "message"),
    [
        ("xx", r"There is no column 'xx'; did you mean 'x'\?"),
        ("log(x", r"cannot be read"),
        ("lag(x)", r"'lag\(x\)' in 'lag\(x\)' is not supported; the functions"),
        ("C(h) + h", r"Column 'h' is used both as a category and as a number"),
        ("log(g)", r"Column 'g' is used both as a category and as a number|not supported"),
        (".", r"uses '.' for all columns"),
        ("0", r"has no terms"),
    ],
)
def test_mistakes_in_formulas(formula, message):
    with pytest.raises(ValueError, match=message):
        learn(formula, FRAME)


def test_response_may_be_an_expression():
    np.testing.assert_allclose(response(parse_formula("log(x) ~ 1"), FRAME), np.log([1, 2, 3, 4]))
    with pytest.raises(ValueError, match="There is no column 'z'"):
        response(parse_formula("z ~ 1"), FRAME)
    with pytest.raises(ValueError, match="must read 'response ~ terms'"):
        parse_formula("y ~ x ~ z")
