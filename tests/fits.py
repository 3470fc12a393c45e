"""Fits in memory for tests: a table and a specification to a model."""

from __future__ import annotations

from typing import Any

from covey.fitting.fit import fit
from covey.model.model import Model
from covey.nodes.network import InMemory
from covey.problem.problem import Spec, resolve
from covey.problem.rows import Arrays, read_rows


def fit_table(X: Any, spec: Spec, y: Any = None, **arrays: Any) -> Model:
    data, problem = read_rows(X, resolve(spec), Arrays(y, **arrays))
    return fit(InMemory.of(data, problem.loss), problem)
