"""Settings of a command line or a Flower run: misspelt names and values out of range are refused."""

from __future__ import annotations

import math
import tomllib
from dataclasses import fields

import pytest

from covey.errors import CoveyError, FederationError
from covey.federation.flower.launch import APP
from covey.federation.operator.operate import operate
from covey.federation.operator.settings import (
    DEFAULTS,
    RUN_OPTIONS,
    Members,
    RunSettings,
    categories_of,
    check_settings,
    checked_settings,
    expected_of,
    run_settings_of,
    spec_of,
)
from covey.federation.wire.transport import InProcess, wait_for_sites
from covey.problem.problem import Spec

from .sites import by_turns, sites_of, table

GIVEN = {"formula": "y ~ x + z", "client": "client", "cluster": "cluster", "gamma": 2.0, "lam": 1.5}


@pytest.mark.parametrize(
    ("setting", "facts"),
    [
        ({"epsilom": 1}, ["'epsilom'", "did you mean 'epsilon'?"]),
        ({"secur": True}, ["'secur'", "did you mean 'secure'?"]),
        ({"minimum": 3}, ["'minimum'", "there are 'family', 'client'"]),
        ({"secure": "false"}, ["'secure'", "true or false", "'false'"]),
        ({"secure": 1}, ["'secure'", "true or false", "Got 1"]),
        ({"standardize": "no"}, ["'standardize'", "true or false", "'no'"]),
        ({"retries": -1}, ["'retries'", "whole number >= 0", "-1"]),
        ({"retries": 1.5}, ["'retries'", "whole number >= 0", "1.5"]),
        ({"timeout": -5}, ["'timeout'", "> 0", "-5"]),
        ({"timeout": 0}, ["'timeout'", "> 0", "Got 0"]),
        ({"timeout": math.inf}, ["'timeout'", "> 0", "inf"]),
        ({"pause": math.nan}, ["'pause'", ">= 0", "nan"]),
        ({"wait": "long"}, ["'wait'", ">= 0", "'long'"]),
        ({"sites": 0}, ["'sites'", "how many", "names", "Got 0"]),
        ({"sites": 2.5}, ["'sites'", "how many", "names", "Got 2.5"]),
        ({"on-loss": "go on"}, ["'on_loss'", "'stop', 'continue'", "'go on'"]),
        ({"categories": {"zz": ["a"]}}, ["'categories'", "'zz'", "did you mean 'z'?"]),
        ({"categories": '{"weight": ["a"]}'}, ["'categories'", "'weight'", "there are"]),
    ],
)
def test_mistakes_are_refused_in_a_sentence(setting, facts):
    sentences = []
    with pytest.raises(CoveyError) as error:
        operate(InProcess(sites_of(by_turns(table(0), 2))), {**GIVEN, **setting}, lambda _: None)
    sentences.append(str(error.value))
    if "on-loss" not in setting:  # which a run looks at when it begins
        with pytest.raises(CoveyError) as error:
            check_settings({**GIVEN, **setting})
        sentences.append(str(error.value))
    for sentence in sentences:
        assert all(fact in sentence for fact in facts), sentence


def test_settings_that_are_right_reach_the_run():
    given = {**GIVEN, "on-loss": "", "timeout": 5, "retries": 0, "pause": 0, "secure": True, "james-stein": False, "sites": "2"}
    assert checked_settings(given)["james_stein"] is False
    assert "on_loss" not in checked_settings(given)
    terms = run_settings_of(given)
    assert (terms.timeout, terms.retries, terms.pause, terms.secure) == (5, 0, 0, True)
    assert check_settings({**given, "wait": 7}) == (2, 7.0)
    text = operate(InProcess(sites_of(by_turns(table(0), 2))), {**GIVEN, "sites": 2}, lambda _: None)
    assert "Sites: s0, s1" in text


def test_the_defaults_are_in_one_place():
    """The defaults are those of RunSettings, except for the pause; empty settings of the app take the same."""
    app = tomllib.loads((APP / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    assert {name: app[name] for name in DEFAULTS} == dict.fromkeys(DEFAULTS, "")
    assert checked_settings({name: "" for name in app if name not in ("insecure", "settings")}) == {}
    for name in set(app) - {"insecure", "settings"}:
        assert name.replace("-", "_") in {*RUN_OPTIONS, *(each.name for each in fields(Spec))}
    terms = run_settings_of(GIVEN)
    assert {name: getattr(terms, name) for name in ("timeout", "retries", "pause")} == {
        "timeout": 600,
        "retries": 2,
        "pause": 20,
    }
    assert check_settings(GIVEN) == (1, 60.0)
    assert (RunSettings().timeout, RunSettings().retries) == (terms.timeout, terms.retries)


def test_who_is_expected():
    listed = Members({"north": frozenset("a"), "south": frozenset("b")})
    assert expected_of({}, Members()) == 1
    assert expected_of({"sites": 3}, Members()) == expected_of({"sites": "3"}, Members()) == 3
    assert expected_of({"sites": "west, east,west"}, Members()) == ("west", "east")
    assert expected_of({}, listed) == expected_of({"sites": 2}, listed) == ("north", "south")
    assert expected_of({"sites": "north"}, listed) == ("north",)
    with pytest.raises(FederationError, match="'sites' is 3, and the list of members has 2; leave out 'sites'"):
        expected_of({"sites": 3}, listed)


def test_the_allow_list_names_the_expected_sites(tmp_path):
    path = tmp_path / "members.csv"
    path.write_text("site,cluster\nnorth,a\nsouth,b\n")
    assert check_settings({**GIVEN, "members": str(path), "wait": 3}) == (("north", "south"), 3.0)
    with pytest.raises(FederationError, match="Not connected after 0 seconds: 'south'; start covey node there"):
        wait_for_sites(InProcess({"north": None}), expected_of({}, Members.read(path)), 0.0, lambda _: None)


def test_columns_that_categories_may_name():
    """Columns on both sides of the formula, also inside functions; without a formula any column."""
    lists = {"zone": ["a"], "high": [0, 1], "x": [1]}
    assert categories_of({"formula": "high ~ C(zone) + log(x) + (1 | g)", "categories": lists}) == lists
    assert categories_of({"categories": lists}) == lists


def test_a_specification_takes_names_with_commas():
    assert spec_of({"formula": "y ~ x + z", "client": "c", "vary": "x, z"}).vary == ["x", "z"]
