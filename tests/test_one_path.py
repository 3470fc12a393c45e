"""Every interface takes the same path: it parses the formula, checks the settings, groups the rows, builds the model, once."""

from __future__ import annotations

from collections import Counter

import pytest

from covey import HierarchicalRegressor
from covey.fitting import fit as fitting
from covey.model import model as models
from covey.problem import problem as problems
from covey.problem.problem import Spec
from covey.tables.rows import GroupedData

FORMULA = "log_radon ~ floor + (1 + floor | state/county)"
ONCE = {"parse_formula": 1, "check": 1, "from_blocks": 1, "assemble": 1, "Model": 1, "learn": 1}


@pytest.fixture
def calls(monkeypatch):
    """Counts how often each step runs, and how many texts formulaic parses."""
    counted: Counter[str] = Counter()

    def spy(owner, name, key=None):
        real = owner.__dict__[name]
        of_class = isinstance(real, classmethod)
        call = real.__func__ if of_class else real

        def counting(*given, **settings):
            counted[key or name] += 1
            return call(*given, **settings)

        monkeypatch.setattr(owner, name, classmethod(counting) if of_class else counting)

    from formulaic.parser import DefaultFormulaParser

    spy(problems, "parse_formula")
    spy(Spec, "check")
    spy(GroupedData, "from_blocks")
    spy(fitting, "assemble")
    spy(fitting, "learn")
    spy(models.Model, "__init__", "Model")
    spy(DefaultFormulaParser, "get_terms_from_ast", "texts")
    return counted


def test_estimators(homes, calls):
    HierarchicalRegressor(formula=FORMULA, tests=False).fit(homes)
    assert calls.pop("texts") == 2  # the common terms, and those of the bar
    assert dict(calls) == ONCE


def test_arrays(homes, calls):
    given = {"client": homes["county"], "cluster": homes["state"]}
    HierarchicalRegressor(gamma=1.0).fit(homes[["floor"]].to_numpy(), homes["log_radon"], **given)
    assert dict(calls) == {name: times for name, times in ONCE.items() if name != "parse_formula"}


def test_the_command_line(homes, calls, tmp_path):
    from covey.cli.fit import fit

    homes.write_parquet(tmp_path / "homes.parquet")
    arguments = {name: part.default for name, part in fit.__signature__.parameters.items()}
    arguments |= {"data": tmp_path / "homes.parquet", "formula": FORMULA, "tests": False, "holdout": 0.0}
    fit(**arguments)
    assert calls.pop("texts") == 2
    assert dict(calls) == ONCE


def test_sites(homes, calls):
    """The operator parses the formula and checks the settings; a site checks the agreed settings and groups its rows, once.

    A site also compares the formula with its text, when a run begins and when it joins: it does not trust the operator.
    """
    from covey.federation.simulate import simulate_sites

    sites = 3
    simulate_sites(homes, Spec(formula=FORMULA, tests=False), sites)
    assert calls.pop("texts") == 2 + 2 * 2 * sites
    expected = {**ONCE, "check": 1 + sites, "from_blocks": sites}
    assert dict(calls) == expected
