"""Parsed formulas: through JSON and back, and no formula that runs code or never ends."""

from __future__ import annotations

import json
import time

import narwhals as nw
import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.errors import DataError, FormulaError
from covey.tables.design import Formula, inspect, response
from covey.tables.formula import ParsedFormula, Terms, parse_formula

FRAME = nw.from_native(
    pl.DataFrame({"y": [1.0, 2.0, 4.0], "x": [1.0, 2.0, 3.0], "g": ["a", "b", "a"], "my y": [3.0, 2.0, 1.0]})
)

TEXTS = [
    "y ~ x",
    "log(y) ~ x * g + I(x**2) + (1 + x | a/b)",
    "x + g:x - 1",
    "`my y` ~ 0 + g + (0 + g || b)",
    "my y ~ x",
    "y ~ 2:x + sqrt(x) + {x + 1} + C(g)",
]


@pytest.mark.parametrize("text", TEXTS)
def test_a_parsed_formula_goes_through_json_without_another_parse(text, monkeypatch):
    parsed = parse_formula(text)
    plain = json.loads(json.dumps(parsed.to_json()))
    from formulaic.parser import DefaultFormulaParser

    def refuse(*_, **__):
        raise AssertionError("text is parsed again")

    monkeypatch.setattr(DefaultFormulaParser, "get_tokens_from_formula", refuse)
    again = ParsedFormula.from_json(plain)
    assert again == parsed
    design = Formula.of(again.common, *inspect(again.common, FRAME))
    assert np.isfinite(np.column_stack(design.blocks(FRAME))).all()
    if again.response is not None:
        assert len(np.asarray(response(again, FRAME))) == 3


TERMS = ["1", "0", "x", "z", "w", "`my y`", "x:z", "z:x:w", "x*`my y`", "(x + z + w)**3", "log(x)", "I(x**2):z", "scale(z)"]


@given(st.lists(st.sampled_from(TERMS), min_size=1, max_size=5), st.booleans())
def test_terms_of_numbers_are_those_of_formulaic(chosen, without_intercept):
    terms = Terms.parse(" + ".join(chosen) + (" - 1" if without_intercept else ""))
    rng = np.random.default_rng(0)
    columns = {name: np.exp(rng.normal(size=7)) for name in ("x", "z", "w", "my y")}
    state = {"scale(z)": (7.0, 1.2, 3.4)}
    here, coded = terms.evaluate(columns, 7, state), terms._coded(columns, 7, state)
    assert list(here) == list(coded)
    for name, values in here.items():
        np.testing.assert_allclose(values, coded[name], rtol=1e-15)


@pytest.mark.parametrize(
    ("factor", "message"),
    [
        (["__import__('os').system('true')", "python"], "is not supported"),
        (["x.__class__", "python"], "is not supported"),
        (["(lambda: 1)()", "python"], "is not supported"),
        (["x", "exec"], "neither a column nor a number"),
        ([["x"], "lookup"], "neither a column nor a number"),
        (["__import__('os')", "literal"], "is not a number"),
        (["'text'", "literal"], "is not a number"),
        (["9**9**9**9", "python"], "needs a column"),
        (["x + (1 << 99999999999)", "python"], "is not supported"),
        (["x ^ 2", "python"], r"write a power with '\*\*'"),
        (["-" * 90_000 + "x", "python"], "cannot be read"),
    ],
)
def test_a_factor_from_json_is_checked(factor, message):
    plain = {"text": "t", "terms": [[factor]]}
    with pytest.raises(FormulaError, match=message):
        Terms.from_json(plain)


@pytest.mark.parametrize(
    "text",
    [
        f"({'+'.join(f'I(x+{at})' for at in range(12))})**12",
        "*".join(f"({'+'.join(f'a{i}b{j}' for j in range(12))})" for i in range(12)),
        ":".join(f"({'+'.join(f'a{i}b{j}' for j in range(12))})" for i in range(12)),
        "x**999999999",
        "x**1000",
        "(x + z)^25",
        "+".join(f"x{at}" for at in range(6_000)),
        "x + " * 30_000 + "x",
        "y ~ x + ((a + b + c + d + e)**12 | g)",
    ],
)
def test_a_formula_with_too_many_terms_is_refused_at_once(text):
    start = time.perf_counter()
    with pytest.raises(FormulaError, match=r"more than 5,000 terms"):
        parse_formula(text)
    assert time.perf_counter() - start < 5.0


def test_products_and_powers_of_a_few_terms_are_fine():
    assert len(parse_formula("(a + b + c + d)**3").common.terms) == 15
    assert len(parse_formula("a * b * c * d * e").common.terms) == 32


def test_a_response_with_an_odd_name_is_a_column():
    assert np.asarray(response(parse_formula("my y ~ x"), FRAME)).tolist() == [3.0, 2.0, 1.0]
    with pytest.raises(DataError, match=r"There is no column 'my z'; did you mean 'my y'"):
        response(parse_formula("my z ~ x"), FRAME)
