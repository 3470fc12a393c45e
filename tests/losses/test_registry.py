"""A family is one file: the registry, and no branch on a family's name outside ``covey.losses``."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import covey
from covey.errors import CoveyError
from covey.losses import FAMILIES, Gamma, family_of, loss_of

SOURCE = Path(covey.__file__).parent
NAMES = {"gaussian", "bernoulli", "poisson", "gamma"}
OUTSIDE = [path for path in SOURCE.rglob("*.py") if path.relative_to(SOURCE).parts[0] != "losses"]
# The penalty between clients and clusters is called gamma too, and is compared by that name.
DISTINCT = NAMES - {"gamma"}


def names_in(node: ast.AST) -> set[str]:
    return {each.value for each in ast.walk(node) if isinstance(each, ast.Constant) and isinstance(each.value, str)}


def branches(tree: ast.AST) -> list[int]:
    """Lines of comparisons with a family's name, of cases of a match, and of dictionaries by it."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            literal = [
                each
                for each in (node.left, *node.comparators)
                if isinstance(each, ast.Constant | ast.Tuple | ast.List | ast.Set)
            ]
            if any(names_in(each) & DISTINCT for each in literal):
                found.append(node.lineno)
        elif isinstance(node, ast.Dict):
            if any(isinstance(key, ast.Constant) and key.value in DISTINCT for key in node.keys):
                found.append(node.lineno)
        elif isinstance(node, ast.MatchValue) and names_in(node) & DISTINCT:
            found.append(node.lineno)
    return found


@pytest.mark.parametrize("path", OUTSIDE, ids=lambda path: str(path.relative_to(SOURCE)))
def test_nothing_outside_branches_on_a_family(path):
    assert branches(ast.parse(path.read_text())) == []


def test_the_search_finds_branches():
    for line in ('x == "poisson"', 'x not in ("a", "gaussian")', 'x = {"bernoulli": 1}["bernoulli"]', '"gaussian" != x'):
        assert branches(ast.parse(line)), line
    for line in ('loss_of("gaussian")', 'def f(family="gaussian"): ...', "x == y"):
        assert not branches(ast.parse(line)), line


def test_every_family_is_registered_by_its_own_file():
    assert set(FAMILIES) >= NAMES
    for name in NAMES:
        assert FAMILIES[name].__module__ == f"covey.losses.{name}"
        assert (SOURCE / "losses" / f"{name}.py").exists()
        assert family_of(name) is FAMILIES[name]
        assert family_of(loss_of(name, "mean", 0.1)) is FAMILIES[name]
    assert family_of(Gamma()).dispersion


def test_an_unknown_family_is_refused_with_those_there_are():
    with pytest.raises(CoveyError, match="from_functions") as told:
        loss_of("weibull")
    assert "'weibull'" in str(told.value)
    assert all(repr(name) in str(told.value) for name in NAMES)
