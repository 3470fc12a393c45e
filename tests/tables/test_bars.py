"""Bars in formulas: the group columns, the terms that vary, and client ids that repeat in several clusters."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import narwhals as nw
import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.errors import CoveyError, DataError, FormulaError
from covey.tables.design import (
    Formula,
    Grouping,
    Vary,
    grouping_of,
    inspect,
    vary_from_bars,
    vary_from_setting,
)
from covey.tables.formula import Bar, ParsedFormula, Terms, split_bars
from covey.tables.scaling import design_from_json

ROWS = [(zone, kind, x) for zone in "abc" for kind in ("(0, 1]", "(1, 2]") for x in (1.0, 2.0, 4.0)]
FRAME = nw.from_native(
    pl.DataFrame(
        {
            "zone": [row[0] for row in ROWS],
            "kind": [row[1] for row in ROWS],
            "x": [row[2] for row in ROWS],
            "z": [row[2] ** 2 + at for at, row in enumerate(ROWS)],
            "my col": [float(at % 5) for at in range(len(ROWS))],
            "code": [at % 2 + 1 for at in range(len(ROWS))],
            "same": ["one"] * len(ROWS),
        }
    )
)


def refusal(call, *given, kind=FormulaError):
    """The message of the error that a call raises; it must be short, ASCII and end with a full stop."""
    with pytest.raises(kind) as caught:
        call(*given)
    sentence = str(caught.value)
    assert isinstance(caught.value, CoveyError)
    assert len(sentence) < 260
    assert sentence.endswith(".")
    assert sentence.isascii()
    return sentence


def learn(rhs):
    """The design of a formula with bars, and the terms that vary."""
    fixed, bars = split_bars(rhs)
    terms = Terms.parse(fixed)
    design = Formula.of(terms, *inspect(ParsedFormula(None, None, terms, bars).right, FRAME), bars)
    grouping = grouping_of(bars)
    return design, vary_from_bars(bars, grouping.client, grouping.cluster, design)


# Splitting


def bar(terms, group, within=None, diagonal=False):
    return Bar(Terms.parse(terms), group, within, diagonal)


@pytest.mark.parametrize(
    ("rhs", "fixed", "bars"),
    [
        ("x + (1 + x | g)", "x", [bar("1 + x", "g")]),
        ("x + (1 + x || g)", "x", [bar("1 + x", "g", None, True)]),
        ("(1|g)", "1", [bar("1", "g")]),
        ("0 + (1|g)", "0", [bar("1", "g")]),
        ("(1|g) + x", "x", [bar("1", "g")]),
        ("+ (1|g) + x", "x", [bar("1", "g")]),
        ("(1|g) - 1 + x", "- 1 + x", [bar("1", "g")]),
        ("x - 1 + (0 + x | g)", "x - 1", [bar("0 + x", "g")]),
        ("x + (-1 + x | g) - z", "x - z", [bar("-1 + x", "g")]),
        ("x + (x | g) + z", "x + z", [bar("x", "g")]),
        ("(1 | a/b)", "1", [bar("1", "a"), bar("1", "b", "a")]),
        ("(x || a / b)", "1", [bar("x", "a", None, True), bar("x", "b", "a", True)]),
        ("(1 | a:b)", "1", [bar("1", "b", "a")]),
        ("(1 | a) + (x | a:b)", "1", [bar("1", "a"), bar("x", "b", "a")]),
        ("log(x) + (1 + log(x) | g)", "log(x)", [bar("1 + log(x)", "g")]),
        ("x*z + (1 + (x + z)**2 | g)", "x*z", [bar("1 + (x + z)**2", "g")]),
        ("(1 | `my col`)", "1", [bar("1", "my col")]),
        ("(1 | `a/b:c`/`d|e`)", "1", [bar("1", "a/b:c"), bar("1", "d|e", "a/b:c")]),
        ("`p|q` + (1 + `p|q` | g)", "`p|q`", [bar("1 + `p|q`", "g")]),
        ("`+(` + (`+(` | g)", "`+(`", [bar("`+(`", "g")]),
        ("(1 | site.id)", "1", [bar("1", "site.id")]),
        ("x\n+ (1\n| g)", "x", [bar("1", "g")]),
    ],
)
def test_bars_are_split_off(rhs, fixed, bars):
    assert split_bars(rhs) == (fixed, tuple(bars))


@pytest.mark.parametrize("rhs", ["x", "", " x +  z ", "log(x", "`a|b` + x", "x + `(1 | g)`", "x +"])
def test_a_formula_without_bars_comes_back_as_it_is(rhs):
    assert split_bars(rhs) == (rhs, ())


def test_formulaic_loads_when_a_formula_is_parsed():
    code = "import sys; from covey.tables.formula import parse_formula; print('formulaic' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "False", done.stderr


NEEDS = "The bar in {} needs parentheses around its terms and its group, as in (1 | g)."
ALONE = "The bar term in {} must stand by itself, joined by '+', as in x + (1 | g)."
GROUPS = "The groups {} are not supported; write one column"
DEEP = "The groups {} have more than two levels; keep two, as in (1 | cluster/client)."
MANY = "The bar term {} has more than one bar; write one bar term for each group."
MATCH = "The parentheses of {} do not match; close each bar term, as in (1 | g)."


@pytest.mark.parametrize(
    ("rhs", "sentence"),
    [
        ("1 | g", NEEDS.format("'1 | g'")),
        ("x + 1 || g", NEEDS.format("'1 || g'")),
        ("[1 | g]", NEEDS.format("'[1 | g]'")),
        ("(x) | g", NEEDS.format("'(x) | g'")),
        ("x * (1 | g)", ALONE.format("'x * (1 | g)'")),
        ("x + (1 | g):z", ALONE.format("'(1 | g):z'")),
        ("(1 | g) * (1 | h)", ALONE.format("'(1 | g) * (1 | h)'")),
        ("(1 | g)(1 | h)", ALONE.format("'(1 | g)(1 | h)'")),
        ("((1 | g))", ALONE.format("'((1 | g))'")),
        ("(x + (1 | g))", ALONE.format("'(x + (1 | g))'")),
        ("(1 + (1 | h) | g)", ALONE.format("'(1 + (1 | h) | g)'")),
        ("log(1 | g)", ALONE.format("'log(1 | g)'")),
        ("x - (1 | g)", "The bar term '(1 | g)' follows '-'; bar terms can only be added, with '+'."),
        ("(1 | g | h)", MANY.format("'(1 | g | h)'")),
        ("(1 ||| g)", MANY.format("'(1 ||| g)'")),
        ("( | g)", "The bar term '( | g)' has no terms before its bar; write 1 for an intercept that varies."),
        ("(1 | )", "The bar term '(1 | )' has no group after its bar; name the column of the groups."),
        ("(|)", "The bar term '(|)' has no terms before its bar; write 1 for an intercept that varies."),
        ("(1 | g", MATCH.format("'(1 | g'")),
        ("1 | g)", MATCH.format("'1 | g)'")),
        (")1 | g(", MATCH.format("')1 | g('")),
        ("(1 | a/b/c)", DEEP.format("'a/b/c'")),
        ("(1 | a:b:c)", DEEP.format("'a:b:c'")),
        ("(1 | a/b:c)", DEEP.format("'a/b:c'")),
        ("(1 | a + b)", GROUPS.format("'a + b'")),
        ("(1 | a * b)", GROUPS.format("'a * b'")),
        ("(1 | factor(g))", GROUPS.format("'factor(g)'")),
        ("(1 | my col)", GROUPS.format("'my col'")),
        ("(1 | 1)", GROUPS.format("'1'")),
        ("(1 | a/)", GROUPS.format("'a/'")),
        ("(1 | ``)", GROUPS.format("'``'")),
        ("(1 | a/a)", "The groups 'a/a' name one column twice; write (1 | cluster/client) with two columns."),
        ("(1 | a:`a`)", "The groups 'a:`a`' name one column twice; write (1 | cluster/client) with two columns."),
    ],
)
def test_bars_that_cannot_be_read(rhs, sentence):
    assert refusal(split_bars, rhs).startswith(sentence)


@pytest.mark.parametrize(
    "rhs", ["x + 1 | {}", "(1 | {}/b/c)", "{} * (1 | g)", "(1 | {}", "- (1 | {})", "(1 | {} + b)", "({} |)"]
)
def test_a_long_formula_is_shortened_in_messages(rhs):
    assert "..." in refusal(split_bars, rhs.format("column" * 100))


NAMES = st.from_regex(r"[a-z][a-z0-9_.]{0,6}", fullmatch=True) | st.from_regex(r"`[a-z |/:+()*-]{1,8}`", fullmatch=True)
TERMS = st.lists(st.builds("log({})".format, st.from_regex("[a-z]{1,3}", fullmatch=True)) | NAMES, min_size=1, max_size=3)
SPACE = st.sampled_from(["", " ", "  "])


@given(
    fixed=st.lists(NAMES, max_size=3),
    bars=st.lists(
        st.tuples(TERMS, st.lists(NAMES, min_size=1, max_size=2, unique_by=lambda s: s.strip("`")), SPACE), max_size=3
    ),
    diagonal=st.booleans(),
    data=st.data(),
)
def test_split_gives_back_the_pieces(fixed, bars, diagonal, data):
    stroke = "||" if diagonal else "|"
    written = [f"({' + '.join(terms)}{gap}{stroke}{gap}{'/'.join(groups)})" for terms, groups, gap in bars]
    order = data.draw(st.permutations([*[(name, False) for name in fixed], *[(bar, True) for bar in written]]))
    rhs = " + ".join(text for text, _ in order)
    kept, found = split_bars(rhs)
    assert kept == (" + ".join(text for text, is_bar in order if not is_bar) or ("1" if bars else ""))
    expected = {
        bar(" + ".join(terms), name.strip("`"), groups[0].strip("`") if at else None, diagonal)
        for terms, groups, _ in bars
        for at, name in enumerate(groups)
    }
    assert set(found) == expected


@given(st.text(alphabet="xg1 0+-|/:*()`", max_size=25))
def test_any_text_is_split_or_refused_with_a_message(rhs):
    try:
        fixed, bars = split_bars(rhs)
    except FormulaError:
        refusal(split_bars, rhs)
        return
    assert fixed == rhs if not bars else "|" not in re.sub("`[^`]*`", "", fixed)


# Which column is which


@pytest.mark.parametrize(
    ("rhs", "client", "cluster", "grouping"),
    [
        ("x", None, None, Grouping(None, None)),
        ("x", "b", "a", Grouping("b", "a")),
        ("(1 | a/b)", None, None, Grouping("b", "a", True)),
        ("(1 | a:b)", None, None, Grouping("b", "a", True)),
        ("(1 | a) + (1 | a:b)", None, None, Grouping("b", "a", True)),
        ("(1 | g)", None, None, Grouping("g", None)),
        ("(1 | g) + (0 + x | g)", None, None, Grouping("g", None)),
        ("(1 | a) + (1 | b)", "b", "a", Grouping("b", "a")),
        ("(1 | a)", "b", "a", Grouping("b", "a")),
        ("(1 | b)", "b", "a", Grouping("b", "a")),
        ("(1 | b)", "b", None, Grouping("b", None)),
        ("(1 | a)", None, "a", Grouping(None, "a")),
        ("(1 | a/b)", "b", "a", Grouping("b", "a", True)),
        ("(1 | a/b)", "b", None, Grouping("b", "a", True)),
        ("(1 | a:b)", None, "a", Grouping("b", "a", True)),
    ],
)
def test_columns_of_clients_and_clusters(rhs, client, cluster, grouping):
    assert grouping_of(split_bars(rhs)[1], client, cluster) == grouping


@pytest.mark.parametrize(
    ("rhs", "client", "cluster", "sentence"),
    [
        (
            "(1 | a) + (1 | b)",
            None,
            None,
            "The formula groups by 'a' and by 'b', and crossed groupings are not supported. If one is within the other, "
            "write (1 | outer/inner): (1 | a/b) if each 'b' is in one 'a', else (1 | b/a).",
        ),
        (
            "(1 | c)",
            "b",
            "a",
            "The bars name 'c' as groups, with client='b' and cluster='a'; write (1 | cluster/client), or set client= and "
            "cluster= to match.",
        ),
        ("(1 | a) + (1 | b)", "b", None, "The bars name 'a', 'b' as groups, with client='b' and cluster=None; ..."),
        ("(1 | a) + (1 | b) + (1 | c)", None, None, "The formula has 3 groupings, 'a', 'b', 'c'; covey fits one, ..."),
        ("(1 | b)", None, "a", "The bars name 'b' as groups, with client=None and cluster='a'; ..."),
        ("(1 | a/b) + (1 | c)", None, None, "The bars name 'a', 'c' as groups, with client='b' and cluster='a'; ..."),
        (
            "(1 | a/b)",
            "a",
            "b",
            "The bars say that 'b' lies within 'a', but client='a' and cluster='b'; make them agree.",
        ),
        ("(1 | a:b)", None, "c", "The bars say that 'b' lies within 'a', but client=None and cluster='c'; make them agree."),
        (
            "(1 | a/b) + (1 | a/c)",
            None,
            None,
            "The bars nest groups in two ways, 'a:b' and 'a:c'; use one cluster column and one client column.",
        ),
        ("(1 | a:b) + (1 | b:a)", None, None, "The bars nest groups in two ways, 'a:b' and 'b:a'; ..."),
        (
            "(1 | a/b) + (0 + x | b)",
            None,
            None,
            "'b' is alone in one bar and within 'a' in another; write the group the same way in both bars, as a:b or a/b.",
        ),
    ],
)
def test_bars_and_settings_that_disagree(rhs, client, cluster, sentence):
    assert refusal(grouping_of, split_bars(rhs)[1], client, cluster).startswith(sentence.removesuffix("..."))


# What varies


ZONES = ("zone[T.b]", "zone[T.c]")


@pytest.mark.parametrize(
    ("rhs", "terms", "kind"),
    [
        ("x + (1 | g)", ("Intercept",), "diagonal"),
        ("x + (x | g)", ("Intercept", "x"), "full"),
        ("x + (x + 1 || g)", ("Intercept", "x"), "diagonal"),
        ("x + (0 + x | g)", ("x",), "diagonal"),
        ("x + (-1 + x | g)", ("x",), "diagonal"),
        ("x + (x - 1 | g)", ("x",), "diagonal"),
        ("x + z + (z + x | g)", ("Intercept", "x", "z"), "full"),
        ("x + (1 | g) + (0 + x | g)", ("Intercept", "x"), "diagonal"),
        ("x + z + (1 + x || g) + (0 + z | g)", ("Intercept", "x", "z"), "diagonal"),
        ("zone + x + (zone | g)", ("Intercept", *ZONES), "full"),
        ("zone + x + (zone || g)", ("Intercept", *ZONES), "diagonal"),
        ("C(code) + (C( code ) | g)", ("Intercept", "C(code)[T.2]"), "full"),
        ("kind + (kind | g)", ("Intercept", "kind[T.(1, 2]]"), "full"),
        ("0 + zone + (0 + zone | g)", ("zone[a]", "zone[b]", "zone[c]"), "full"),
        ("0 + zone + kind + (0 + kind + zone | g)", ("zone[a]", "zone[b]", "zone[c]", "kind[T.(1, 2]]"), "full"),
        ("x * z + (z * x | g)", ("Intercept", "x", "z", "x:z"), "full"),
        ("x * z + (0 + z:x | g)", ("x:z",), "diagonal"),
        ("zone * x + (x * zone | g)", ("Intercept", *ZONES, "x", "zone[T.b]:x", "zone[T.c]:x"), "full"),
        ("log(x) + I(x**2) + (log( x ) + I(x ** 2) | g)", ("Intercept", "log(x)", "I(x ** 2)"), "full"),
        ("`my col` + (0 + `my col` | g)", ("my col",), "diagonal"),
        ("x + same + (same | g)", ("Intercept",), "diagonal"),
    ],
)
def test_what_varies(rhs, terms, kind):
    design, vary = learn(rhs)
    assert vary == Vary(tuple(term for term in design.terms if term in terms), (), kind, None)
    assert set(vary.client) == set(terms)


@pytest.mark.parametrize(
    ("rhs", "vary"),
    [
        ("x + (x | a/b)", Vary(("Intercept", "x"), ("Intercept", "x"), "full", "full")),
        ("x + (1 | a) + (x | a:b)", Vary(("Intercept", "x"), ("Intercept",), "full", "diagonal")),
        ("x + (x || a) + (0 + x | a:b)", Vary(("x",), ("Intercept", "x"), "diagonal", "diagonal")),
        ("x + (1 | a:b)", Vary(("Intercept",), (), "diagonal", None)),
        ("x + (1 | a/b) + (0 + x | a)", Vary(("Intercept",), ("Intercept", "x"), "diagonal", "diagonal")),
    ],
)
def test_what_varies_at_two_levels(rhs, vary):
    assert learn(rhs)[1] == vary


def test_without_bars_no_term_varies():
    assert learn("x")[1] == Vary((), ())


@pytest.mark.parametrize(
    ("rhs", "common", "zero", "varies"),
    [
        ("x + (1 + z | g)", ("Intercept", "x"), ("z",), ("Intercept", "z")),
        ("0 + x + (x | g)", ("x",), ("Intercept",), ("Intercept", "x")),
        ("0 + (1 | g)", (), ("Intercept",), ("Intercept",)),
        ("0 + zone + (1 | g)", ("zone[a]", "zone[b]", "zone[c]"), ("Intercept",), ("Intercept",)),
        ("zone + (0 + zone | g)", ("Intercept", *ZONES), ("zone[a]", "zone[b]", "zone[c]"), ("zone[a]", "zone[b]", "zone[c]")),
        ("x + (0 + z | a) + (1 | a:b)", ("Intercept", "x"), ("z",), ("Intercept",)),
        ("x * z + (0 + z:x | g)", ("Intercept", "x", "z", "x:z"), (), ("x:z",)),
    ],
)
def test_terms_that_only_bars_name_have_no_common_coefficient(rhs, common, zero, varies):
    design, vary = learn(rhs)
    assert design.terms == (*common, *zero)
    assert design.zero == zero
    assert set(vary.client) == set(varies)
    assert len(design.blocks(FRAME)) == len(design.terms)
    assert design_from_json(json.loads(json.dumps(design.to_json()))) == design


@pytest.mark.parametrize(
    ("rhs", "sentence"),
    [
        ("x + (0 | g)", "The bar term '(0 | g)' has no terms; write 1 for an intercept that varies."),
        ("x + (1 | g) + (x | g)", "'Intercept' varies by 'g' in two bars; leave it out of one..."),
        ("x + (1 | g) + (1 | g)", "'Intercept' varies by 'g' in two bars; leave it out of one..."),
        (
            "x + z + (1 + x | g) + (0 + z | g)",
            "The bars of 'g' correlate some terms only; write one bar...",
        ),
    ],
)
def test_bars_that_do_not_fit_the_terms(rhs, sentence):
    assert refusal(learn, rhs).startswith(sentence.removesuffix("..."))


@pytest.mark.parametrize("terms", ["lag(x)", "x.__class__", "eval(x)", "x ~ z", "log(x, x)"])
def test_a_bar_cannot_run_code(terms):
    with pytest.raises(CoveyError, match=r"is not supported|cannot be read|has several parts|There is no column"):
        learn(f"x + ({terms} | g)")


def test_the_categories_come_from_the_design_and_not_from_data():
    design = Formula.of(Terms.parse("zone"), ["zone"], {"zone": [1, 2, 3]})
    vary = vary_from_bars([bar("zone", "g")], "g", None, design)
    assert vary.client == design.terms


# The setting


TERMS_OF = ("Intercept", "x", *ZONES, "zone[T.b]:x", "zone[T.c]:x", "zone[T.b]:kind[T.(1, 2]]", "kind[T.(1, 2]]")


@pytest.mark.parametrize(
    ("vary", "client", "cluster"),
    [
        (None, TERMS_OF, TERMS_OF),
        ([], (), ()),
        ("x", ("x",), ("x",)),
        (["x", "1"], ("Intercept", "x"), ("Intercept", "x")),
        (("x", "Intercept", "x", "1"), ("Intercept", "x"), ("Intercept", "x")),
        (np.array(["x"]), ("x",), ("x",)),
        (["zone"], ZONES, ZONES),
        (["zone[T.c]"], ("zone[T.c]",), ("zone[T.c]",)),
        (["zone:x"], ("zone[T.b]:x", "zone[T.c]:x"), ("zone[T.b]:x", "zone[T.c]:x")),
        (["kind"], ("kind[T.(1, 2]]",), ("kind[T.(1, 2]]",)),
        (["zone:kind"], ("zone[T.b]:kind[T.(1, 2]]",), ("zone[T.b]:kind[T.(1, 2]]",)),
        ({"client": ["x"]}, ("x",), TERMS_OF),
        ({"cluster": "1", "client": []}, (), ("Intercept",)),
        ({"cluster": None}, TERMS_OF, TERMS_OF),
        ({}, TERMS_OF, TERMS_OF),
    ],
)
def test_vary_setting(vary, client, cluster):
    assert vary_from_setting(vary, TERMS_OF) == Vary(client, cluster)


@pytest.mark.parametrize(
    ("vary", "sentence"),
    [
        (["q"], "The 'vary' parameter names 'q', which is not a term; the terms are 'x', 'z[T.b]'."),
        ("1", "The 'vary' parameter names 'Intercept', which is not a term; the terms are 'x', 'z[T.b]'."),
        ({"client": ["x", ""]}, "The 'vary' parameter names '', which is not a term; the terms are 'x', 'z[T.b]'."),
        ([None], "The 'vary' parameter names 'None', which is not a term; the terms are 'x', 'z[T.b]'."),
        (5, "The 'vary' parameter must be a list of terms, or lists by level. Got 5 instead."),
        ({"client": True}, "The 'vary' parameter must be a list of terms, or lists by level. Got True instead."),
        ({"county": ["x"]}, "The 'vary' parameter has the key 'county'; its levels are 'client' and 'cluster'."),
    ],
)
def test_invalid_vary_settings(vary, sentence):
    assert refusal(vary_from_setting, vary, ("x", "z[T.b]"), kind=DataError) == sentence


@given(st.lists(st.sampled_from(TERMS_OF)))
def test_vary_setting_keeps_the_order_of_the_terms(names):
    chosen = vary_from_setting(names, TERMS_OF).client
    assert chosen == tuple(term for term in TERMS_OF if term in names)
