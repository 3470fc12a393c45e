"""Problems: from settings and columns, and through JSON and back."""

from __future__ import annotations

import json

import numpy as np
import polars as pl
import pytest

from covey import HierarchicalClassifier, HierarchicalRegressor
from covey.errors import CoveyError, FormulaError, ModelError
from covey.problem.problem import Problem, Schema, Spec, resolve
from covey.problem.rows import read_rows
from covey.problem.settings import declared

FRAME = pl.DataFrame(
    {
        "y": [0.1, 0.4, 0.2, 0.8, 0.5, 0.7],
        "x": [1.0, 2.0, 4.0, 3.0, 5.0, 1.0],
        "zone": ["u", "v", "u", "v", "u", "v"],
        "i": [1, 1, 2, 1, 2, 2],
        "k": ["a", "a", "a", "b", "b", "b"],
        "t": [0.5] * 6,
    }
)


@pytest.mark.parametrize(
    "spec",
    [
        Spec(formula="y ~ x + zone + (1 + x | k/i)"),
        Spec(formula="log(y) ~ x", client="i", cluster=None, offset="t", gamma={1: 2.0, 2: np.inf}),
        Spec(client="i", weights="t", formula="y ~ x * zone", standardize=True, vary={"client": ["x"]}),
        Spec(family="bernoulli", formula="zone ~ x", client="i", options={"p0": np.float64(0.5)}, solver="l2gd"),
    ],
)
def test_a_problem_goes_through_json(spec):
    draft = resolve(spec)
    assert draft.draft
    assert Problem.from_json(json.loads(json.dumps(draft.to_json()))).formula == draft.formula
    _, problem = read_rows(FRAME, draft)
    plain = json.loads(json.dumps(problem.to_json()))
    again = Problem.from_json(plain)
    assert again.to_json() == problem.to_json() == plain
    assert (again.terms, again.vary, again.classes) == (problem.terms, problem.vary, problem.classes)


def test_a_problem_from_json_is_checked():
    _, problem = read_rows(FRAME, resolve(Spec(formula="y ~ x + zone", client="i")))
    plain = problem.to_json()
    with pytest.raises(CoveyError, match="'tol' parameter must be a positive number"):
        Problem.from_json({**plain, "spec": {**plain["spec"], "tol": -1.0}})
    with pytest.raises(FormulaError, match="not those of the formula"):
        Problem.from_json({**plain, "design": {**plain["design"], "rhs": "x + exp(x)"}})
    with pytest.raises(ModelError, match="categories of column 'zone' are listed twice"):
        Problem.from_json({**plain, "design": {**plain["design"], "levels": {"zone": ["u", "u"]}}})


def test_a_draft_becomes_a_problem_of_known_categories_without_data():
    draft = resolve(Spec(formula="y ~ zone + (zone | k/i)"))
    problem = draft.agree(Schema(("zone",), {"zone": ["u", "v", "w"]}))
    assert problem.terms == ("Intercept", "zone[T.v]", "zone[T.w]") == problem.vary.client
    assert problem.spec.nested
    with pytest.raises(CoveyError, match="draft: the categories"):
        draft.terms  # noqa: B018


def test_the_stored_length_of_text_is_ignored():
    from covey.problem.problem import Classes

    assert Classes.from_json({"dtype": "<U400000000", "values": ["no", "yes"]}).array.dtype == "<U3"


def test_every_setting_is_declared_once():
    for estimator in (HierarchicalRegressor, HierarchicalClassifier):
        own = set(declared()) - {"family", "nested", "seed"}
        assert set(estimator().get_params()) == own | {"loss", "unseen", "random_state", "threads"}
        for name in own:
            assert f"{name}" in estimator.__doc__
            assert estimator().get_params()[name] == declared()[name].default
    with pytest.raises(TypeError, match="'gama'"):
        HierarchicalRegressor(gama=1.0)
