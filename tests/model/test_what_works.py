"""The table of docs/how-to/inference.md: what works from a saved model, what needs rows, and what works across sites."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import numpy as np
import polars as pl
import pytest

import covey
from covey import CoveyError, HierarchicalPoissonRegressor
from covey.cli import app
from covey.federation.simulate import simulate_sites
from covey.problem.problem import Spec

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "inference.md"
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.read_text().splitlines() if line.startswith("| `")
]
FORMULA = "y ~ x + z + (1 | cluster/client)"

ASK = {
    "cov_": lambda model, rows: model.cov_,
    "contrast of weights": lambda model, rows: model.contrast({"x": 1.0}),
    "means": lambda model, rows: model.means("z", data=rows),
    "contrast of a column": lambda model, rows: model.contrast("z", data=rows),
    "compare": lambda model, rows: covey.compare(model, model),
    "random_effects": lambda model, rows: model.random_effects("cluster"),
    "residuals": lambda model, rows: model.residuals(rows, level="cluster"),
    "simulate": lambda model, rows: model.simulate(rows),
    "r2": lambda model, rows: model.r2(rows),
    "profile": lambda model, rows: model.profile(rows),
    "robust": lambda model, rows: model.robust(),
    "bootstrap": lambda model, rows: model.bootstrap(rows, draws=2),
    "marginaleffects": lambda model, rows: model.marginaleffects(rows),
}


def table():
    rng = np.random.default_rng(3)
    client = np.repeat(np.arange(24), 12)
    x, z = rng.normal(size=288), rng.integers(0, 2, size=288)
    margin = 1.0 + 0.3 * x + 0.2 * z + 0.4 * rng.normal(size=24)[client] + 0.4 * rng.normal(size=4)[client % 4]
    named = {
        "client": [f"c{i}" for i in client],
        "cluster": ["abcd"[i % 4] for i in client],
        "z": ["no" if i else "yes" for i in z],
    }
    return pl.DataFrame({**named, "x": x, "y": rng.poisson(np.exp(margin)).astype(float)})


@cache
def models():
    """A linear model, one of counts, and the operator's model of a fit across sites."""
    rows = table()
    run = simulate_sites(rows, Spec(formula=FORMULA), sites=2)
    return {
        "linear": covey.fit(rows, FORMULA),
        "counts": HierarchicalPoissonRegressor(formula=FORMULA).fit(rows),
        "operator": run.outcome.model,
    }


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    from covey.model.files import save_model

    for name, model in models().items():
        save_model(model, folder / name) if name == "operator" else model.save(folder / name)
    return {name: covey.load(folder / name) for name in models()}


def test_the_table_has_every_method():
    named = [re.sub("`", "", row[0]) for row in ROWS]
    assert named == list(ASK)


@pytest.mark.parametrize("at", range(len(ROWS)), ids=[re.sub("`", "", row[0]) for row in ROWS])
def test_each_cell_holds(loaded, at):
    method = re.sub("`", "", ROWS[at][0])
    for model, cell in zip(loaded.values(), ROWS[at][1:4], strict=True):
        ask = ASK[method]
        if cell == "saved":
            ask(model, None)
            continue
        with pytest.raises((CoveyError, TypeError)):
            ask(model, None)
        if cell == "no":
            with pytest.raises(CoveyError):
                ask(model, table())
        elif method == "marginaleffects":
            pytest.importorskip("marginaleffects")
        else:
            assert cell == "rows"
            ask(model, table())


def test_the_commands_exist():
    import typer.main

    commands = typer.main.get_command(app).commands
    for command in (re.sub("`", "", row[4]) for row in ROWS if row[4] != "-"):
        _, name, *option = command.split()
        assert set(option) <= {flag for parameter in commands[name].params for flag in parameter.opts}
