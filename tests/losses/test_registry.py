"""A family is one file: the registry, and no comparison with a family's name outside ``covey.losses``."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

import covey
from covey import Penalty
from covey.datasets import simulate
from covey.errors import CoveyError
from covey.losses import FAMILIES, Gamma, Poisson, family_of, loss_of
from covey.solvers import minimise
from covey.variance.estimate import estimate
from covey.variance.parameters import Shape
from tests.networks import in_memory

SOURCE = Path(covey.__file__).parent
NAMES = {"gaussian", "bernoulli", "poisson", "gamma"}
OUTSIDE = [path for path in SOURCE.rglob("*.py") if path.relative_to(SOURCE).parts[0] != "losses"]
# A penalty is called gamma too, and code may compare that name.
DISTINCT = NAMES - {"gamma"}


def names_in(node: ast.AST) -> set[str]:
    return {each.value for each in ast.walk(node) if isinstance(each, ast.Constant) and isinstance(each.value, str)}


def branches(tree: ast.AST) -> list[int]:
    """Lines that compare a family's name, match it, or use it as a key of a dictionary."""
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
def test_no_code_outside_compares_family_names(path):
    assert branches(ast.parse(path.read_text())) == []


def test_comparisons_are_detected():
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


def test_an_unknown_family_is_refused_with_the_known_ones():
    with pytest.raises(CoveyError, match="from_functions") as caught:
        loss_of("weibull")
    assert "'weibull'" in str(caught.value)
    assert all(repr(name) in str(caught.value) for name in NAMES)


def test_a_new_family_is_one_class():
    """A class without a compiled kernel is enough to fit and to learn penalties."""

    class Counts(Poisson):
        """Poisson again, in plain numpy."""

        name: ClassVar[str] = "counts"
        code: ClassVar[int | None] = None

    try:
        data = simulate("poisson", clusters=6, clients=5, rows=6, d=2, cluster_sd=0.4, client_sd=0.3, seed=2).data
        assert not loss_of("counts").compiled
        fits = [minimise(data, loss_of(name), Penalty.of(data.hierarchy), solver="newton") for name in ("poisson", "counts")]
        np.testing.assert_allclose(fits[0].theta, fits[1].theta, atol=1e-9)
        found = [estimate(in_memory(data, loss_of(name)), Shape((0, 1), (0,)))[1].components for name in ("poisson", "counts")]
        assert found[0].log_likelihood == pytest.approx(found[1].log_likelihood, abs=1e-8)
        np.testing.assert_allclose(found[0].client.sd, found[1].client.sd, rtol=1e-5)
    finally:
        del FAMILIES["counts"]
