"""Tables show the numbers of the model; figures have labels and a title that states the numbers."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import polars as pl
import pytest
from rich.console import Console
from scipy import stats

from covey.fitting import comparison
from covey.fitting.fit import fit
from covey.nodes.network import InMemory
from covey.problem.problem import Spec, resolve
from covey.problem.rows import read_rows
from covey.report import plots
from covey.report.plots import shrinkage_figure
from covey.report.tables import coefficient_table, comparison_table, shrinkage_table
from covey.reproduce.communication import exchanges_to_gap
from covey.reproduce.radon import Shrinkage


def text_of(table):
    screen = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    screen.print(table)
    return screen.export_text()


def radon(homes):
    spec = Spec(client="county", cluster="state", formula="log_radon ~ floor", gamma=6.0, lam=4.0)
    data, problem = read_rows(homes, resolve(spec))
    model = fit(InMemory.of(data, problem.loss), problem)
    return data, model, Shrinkage.of(data, model)


def test_tables(homes):
    _, model, found = radon(homes)
    assert "+10.0%" in text_of(comparison_table({"a": 1.1, "b": 1.0}, "gaussian", 10))
    units = found.typical()
    text = text_of(shrinkage_table(found, units, "Some counties", "what they are"))
    for i in units.tolist():
        (line,) = (line for line in text.splitlines() if str(model.hierarchy.client_ids[i]) in line)
        assert f"{found.personalised[i]:.2f}" in line
        assert line.split()[-2].endswith("%")  # no cell is blank
    assert "3 of 470" in text_of(coefficient_table(model, "client", 3))


def test_the_mean_of_a_client_alone_is_its_least_squares_fit(homes):
    data, model, found = radon(homes)
    for i in (0, 5, 100, 300):
        rows = slice(data.client_ptr[i], data.client_ptr[i + 1])
        X, y = data.X[rows], data.y[rows]
        assert found.alone[i] == pytest.approx(X.mean(axis=0) @ np.linalg.lstsq(X, y, rcond=None)[0])
        assert found.personalised[i] == pytest.approx(X.mean(axis=0) @ model.theta[i])
        assert found.cluster[i] == pytest.approx(X.mean(axis=0) @ model.w[model.hierarchy.parent[i]])


def test_the_title_of_the_figure_is_true(homes):
    """Counties with few homes borrow from their state; counties with many stay close to their own mean. In every state."""
    _, problem = read_rows(homes, resolve(Spec(client="county", cluster="state", formula="log_radon ~ floor")))
    data, _ = read_rows(homes, problem)
    model = fit(InMemory.of(data, problem.loss), problem)
    found = Shrinkage.of(data, model)
    distance, rows = np.abs(found.alone - found.personalised), model.rows
    assert stats.spearmanr(rows, distance).statistic < -0.7
    for j in range(model.hierarchy.n_clusters):
        of_state = model.hierarchy.parent == j
        assert stats.spearmanr(rows[of_state], distance[of_state]).statistic < -0.4
    assert np.median(found.moved[rows <= 5]) > 0.5
    assert distance[rows > 100].max() < 0.06
    units = found.typical()
    assert (np.diff(rows[units]) >= 0).all()
    assert (np.abs(found.alone - found.cluster)[units] > 0.15).all()
    assert found.moved[units[0]] > 0.5 > 0.1 > found.moved[units[-1]] > 0


def test_penalties_are_learned_without_the_test_rows(homes, monkeypatch):
    """Changing the held-out responses changes nothing in what is fitted."""
    from dataclasses import replace

    from covey.model.model import Fitted

    spec = Spec(client="county", cluster="state", formula="log_radon ~ floor")
    data, problem = read_rows(homes, resolve(spec))
    marked = replace(data, y=np.arange(data.n_rows, dtype=float))
    held = marked.split(0.2, spec.seed)[1].y.astype(int)
    spoilt = data.y.copy()
    spoilt[held] += 100.0
    fits = []
    keep, alone = comparison.learn, comparison.single_cluster
    monkeypatch.setattr(comparison, "learn", lambda *given: fits.append(keep(*given).fit) or Fitted(fits[-1]))
    monkeypatch.setattr(comparison, "single_cluster", lambda *given, **how: fits.append(alone(*given, **how)) or fits[-1])
    first, second = (comparison.compare(d, problem) for d in (data, replace(data, y=spoilt)))
    for before, after in zip(fits[:4], fits[4:], strict=True):
        np.testing.assert_array_equal(before.theta, after.theta)
    assert second.errors["hierarchical"] > 10 * first.errors["hierarchical"]


def test_figure(homes, tmp_path):
    _, _, found = radon(homes)
    path = shrinkage_figure(
        found, tmp_path / "f.png", title="Small counties move", clients="counties", rows="homes", unit="log radon"
    )
    pixels = plt.imread(path)
    assert pixels.shape[1] > 1200
    assert (pixels[..., :3].min(axis=2) < 0.9).mean() > 0.01


def test_the_race_names_the_solvers_that_reach_the_gap_and_those_that_do_not(tmp_path):
    histories = {
        "newton": pl.DataFrame({"exchanges": [0, 1, 5], "gap": [1.0, 0.1, 0.0]}),
        "al2sgd_plus": pl.DataFrame({"exchanges": [0, 1000, 4000], "gap": [1.0, 1e-3, 1e-7]}),
        "one_coin": pl.DataFrame({"exchanges": [0, 10, 20], "gap": [1.0, 0.5, 0.4]}),
    }
    reached = {"newton": 5, "al2sgd_plus": 4000, "one_coin": None}
    title = "Exchanges of a client to a gap of 1e-06: newton 5, al2sgd_plus 4,000; not reached by one_coin"
    assert exchanges_to_gap(reached, 1e-6) == title
    assert exchanges_to_gap({"l2gd": None}, 1e-6) == "Exchanges of a client to a gap of 1e-06: not reached by l2gd"
    path = plots.race_figure(histories, tmp_path / "race.png", accuracy=1e-6)
    assert plt.imread(path).shape[1] > 1000


def test_the_race_says_where_it_cuts_small_gaps(monkeypatch, tmp_path):
    drawn = []
    monkeypatch.setattr(plots.Figure, "savefig", lambda self, *_, **__: drawn.append(self))
    plots.race_figure({"newton": pl.DataFrame({"exchanges": [0, 5], "gap": [1.0, 0.0]})}, tmp_path / "r.png", accuracy=1e-6)
    (panel,) = drawn[0].axes
    assert panel.get_lines()[0].get_ydata().min() == 1e-14
    assert "values below 1e-14 are drawn at 1e-14" in panel.get_ylabel()
    assert drawn[0].get_suptitle() == "Exchanges of a client to a gap of 1e-06: newton 5"
