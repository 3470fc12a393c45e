"""Settings of a run: values out of range are refused before it starts."""

from __future__ import annotations

import math

import pytest

from covey.errors import CoveyError, FederationError
from covey.federation.operator.operate import operate
from covey.federation.operator.settings import Members, RunSettings, expected_sites
from covey.federation.wire.transport import InProcess, wait_for_sites
from covey.problem.problem import Spec, resolve

from .sites import by_turns, sites_of, table

GIVEN = {"formula": "y ~ x + z", "client": "client", "cluster": "cluster", "gamma": 2.0, "lam": 1.5}


@pytest.mark.parametrize(
    ("setting", "facts"),
    [
        ({"retries": -1}, ["'retries'", "whole number >= 0", "-1"]),
        ({"retries": 1.5}, ["'retries'", "whole number >= 0", "1.5"]),
        ({"timeout": -5}, ["'timeout'", "> 0", "-5"]),
        ({"timeout": 0}, ["'timeout'", "> 0", "Got 0"]),
        ({"timeout": math.inf}, ["'timeout'", "> 0", "inf"]),
        ({"pause": math.nan}, ["'pause'", ">= 0", "nan"]),
        ({"wait": "long"}, ["'wait'", ">= 0", "'long'"]),
        ({"sites": 0}, ["'sites'", "least number", "names", "Got 0"]),
        ({"on_loss": "go on"}, ["'on_loss'", "'stop', 'continue'", "'go on'"]),
        ({"categories": '{"zz": ["a"]}'}, ["'categories'", "'zz'", "did you mean 'z'?"]),
        ({"categories": '{"weight": ["a"]}'}, ["'categories'", "'weight'", "there are"]),
    ],
)
def test_mistakes_are_refused_in_a_sentence(setting, facts):
    with pytest.raises(CoveyError) as error:
        operate(InProcess(sites_of(by_turns(table(0), 2))), {**GIVEN, **setting}, lambda _: None)
    assert all(fact in str(error.value) for fact in facts), error.value


def test_settings_that_are_right_reach_the_run():
    given = {**GIVEN, "on_loss": None, "timeout": 5, "retries": 0, "pause": 0, "secure": True, "wait": 7}
    settings = RunSettings.of(given)
    assert (settings.timeout, settings.retries, settings.pause, settings.secure, settings.patience) == (5, 0, 0, True, 7)
    text = operate(InProcess(sites_of(by_turns(table(0), 2))), {**GIVEN, "sites": 2}, lambda _: None)
    assert "Sites: s0, s1" in text


def test_defaults_across_machines():
    settings = RunSettings.of(GIVEN)
    assert (settings.timeout, settings.retries, settings.pause, settings.patience) == (600, 2, 20, 60)
    assert (RunSettings().timeout, RunSettings().retries) == (settings.timeout, settings.retries)


def test_who_is_expected(tmp_path):
    listed = Members({"north": frozenset("a"), "south": frozenset("b")})
    assert expected_sites(None, Members()) == 1
    assert expected_sites(3, Members()) == expected_sites("3", Members()) == 3
    assert expected_sites("west, east,west", Members()) == ("west", "east")
    assert expected_sites(None, listed) == expected_sites("2", listed) == ("north", "south")
    assert expected_sites("north", listed) == ("north",)
    with pytest.raises(FederationError, match="'sites' is 3, and the list of members has 2; leave out 'sites'"):
        expected_sites("3", listed)
    path = tmp_path / "members.csv"
    path.write_text("site,cluster\nnorth,a\nsouth,b\n")
    with pytest.raises(FederationError, match="Not connected after 0 seconds: 'south'; start covey node there"):
        wait_for_sites(InProcess({"north": None}), expected_sites(None, Members.read(path)), 0.0, lambda _: None)


def test_columns_that_categories_may_name():
    """Columns on both sides of the formula, also inside functions."""
    settings = RunSettings(categories={"zone": ["a"], "high": [0, 1], "x": [1]})
    settings.check(resolve(Spec(formula="high ~ C(zone) + log(x) + (1 | g)")))
    with pytest.raises(FederationError, match="'zone' of 'categories' is not in the formula"):
        settings.check(resolve(Spec(formula="high ~ log(x) + (1 | g)")))
