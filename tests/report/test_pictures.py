"""Pictures of a model: titles are true, axes have labels, data that are needed are named, and nothing is drawn by accident."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import asdict
from itertools import pairwise

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import polars as pl
import pytest
from matplotlib.figure import Figure

import covey
from covey import CoveyError, HierarchicalClassifier, Spec
from covey.model.client_means import client_means
from covey.report.pictures import plural
from covey.report.style import draw_on
from tests.cli.shell import inside

mpl.use("Agg")


@pytest.fixture(scope="module")
def radon(homes):
    return covey.fit(homes, "log_radon ~ floor + (1 + floor | state/county)")


@pytest.fixture(scope="module")
def classes(homes):
    some = homes.with_columns(high=pl.when(pl.col("radon") > 4).then(pl.lit("high")).otherwise(pl.lit("low")))
    return some, HierarchicalClassifier(formula="high ~ C(floor) + (1 | county)", tests=False).fit(some)


def axes():
    return Figure(figsize=(8, 5), layout="constrained").subplots()


def title(ax):
    return " ".join(ax.get_title("left").split())


@pytest.mark.parametrize("dark", [False, True])
def test_every_picture_has_labels_and_a_title(radon, classes, homes, dark):
    table, classifier = classes
    drawn = [
        radon.plot.shrinkage(axes(), dark=dark),
        radon.plot.caterpillar(axes(), dark=dark),
        radon.plot.caterpillar(axes(), level="cluster", term="floor", dark=dark),
        radon.plot.variance(axes(), dark=dark),
        radon.plot.reliability(axes(), dark=dark),
        radon.plot.effect("floor", axes(), at={"floor": [0, 1]}, dark=dark),
        *(radon.plot.residuals(homes, axes(), kind=kind, dark=dark) for kind in ("fitted", "quantile", "group")),
        classifier.plot.calibration(table, axes(), dark=dark),
        classifier.plot.effect("floor", axes(), dark=dark),
        classifier.plot.shrinkage(axes(), data=table, dark=dark),
    ]
    for ax in drawn:
        assert ax.get_xlabel()
        assert ax.get_ylabel()
        assert len(title(ax)) > 20
        widest = max(len(line) for line in ax.get_title("left").splitlines())
        assert widest <= 100


def test_titles_state_numbers_of_the_model(radon, classes):
    found, moved = client_means(radon.model_), title(radon.plot.shrinkage(axes()))
    low = np.quantile(found.rows, 0.25)
    assert f"(at most {low:,.0f}) moves {100 * found.moved(found.rows <= low):.0f}%" in moved
    shares = radon.components_.shares
    assert f"{100 * (shares[0] + shares[1]):.0f}% of the variance" in title(radon.plot.variance(axes()))
    states = radon.random_effects("cluster").filter(term="Intercept").sort("deviation")
    apart = (states["deviation"].abs() > 1.959964 * states["conditional_variance"].sqrt()).sum()
    text = title(radon.plot.caterpillar(axes(), level="cluster"))
    assert text.startswith(f"The intercept differs from that of the global model in {apart} of 9 states")
    assert text.endswith(f"the highest is {states['cluster'][-1]}, the lowest {states['cluster'][0]}")
    change = radon.global_coef_[1]
    falls = np.mean(radon.coef_[:, 1] < 0)
    text = title(radon.plot.effect("floor", axes(), at={"floor": [0, 1]}))
    assert f"falls by {abs(change):.3g}" in text
    assert f"in {100 * falls:.0f}% of counties" in text
    share = radon.reliability().filter(term="Intercept")["reliability"]
    assert f"{100 * (share >= 0.5).mean():.0f}% of 470 counties" in title(radon.plot.reliability(axes()))


def test_means_from_sums_are_those_of_the_rows(radon, homes):
    by_rows = client_means(radon.model_, radon.plot._needed(homes))
    by_sums = client_means(radon.model_)
    for name in ("alone", "cluster", "overall", "own", "rows"):
        np.testing.assert_allclose(getattr(by_sums, name), getattr(by_rows, name), atol=1e-9)
    means = homes.group_by("county").agg(pl.col("log_radon").mean())
    expected = dict(means.iter_rows())
    assert by_sums.alone[7] == pytest.approx(expected[radon.clients_[7]])


def test_the_observed_shares_of_a_calibration_are_those_of_the_rows(classes):
    from covey.report.diagnostics import bins_of, calibration_table

    table, model = classes
    found = calibration_table(model.model_, model.plot._needed(table), 5)
    p = model.predict_proba(table)[:, 1]
    low = (table["high"] == "low").to_numpy()
    for part, (predicted, observed) in zip(bins_of(p, 5), found.select("predicted", "observed").rows(), strict=True):
        assert predicted == pytest.approx(p[part].mean())
        assert observed == pytest.approx(low[part].mean())
    assert (found["lower"] < found["observed"]).all()
    assert (found["upper"] > found["observed"]).all()


@pytest.mark.parametrize("values", [[0.0] * 95 + [1.0] * 5, [0.0] * 5 + [1.0] * 95, [2.0] * 100, list(range(100))])
def test_bins_do_not_split_equal_values(values):
    """Else the order of the table would decide who is in which bin."""
    from covey.report.diagnostics import bins_of

    values = np.array(values, dtype=float)
    parts = bins_of(np.random.default_rng(0).permutation(values), 10)
    assert sum(map(len, parts)) == 100
    assert len(parts) == min(10, len(np.unique(values)))
    shuffled = np.random.default_rng(0).permutation(values)
    assert all(shuffled[low].max() < shuffled[high].min() for low, high in pairwise(parts))


def test_pictures_say_which_data_they_need(radon, classes, homes, tmp_path):
    with pytest.raises(CoveyError, match=r"range of column 'floor'.*data="):
        radon.plot.effect("floor", axes())
    with pytest.raises(CoveyError, match="data="):
        classes[1].plot.shrinkage(axes())
    with pytest.raises(CoveyError, match="classifiers"):
        radon.plot.calibration(homes, axes())
    with pytest.raises(CoveyError, match="no history"):
        radon.plot.convergence(axes())
    with pytest.raises(CoveyError, match="no record of exchanges"):
        radon.plot.exchanges(ax=axes())
    with pytest.raises(CoveyError, match=r"'flor'.*'floor'"):
        radon.plot.caterpillar(axes(), term="flor")
    again = covey.load(radon.save(tmp_path / "m", sums=False))
    with pytest.raises(CoveyError, match="sums"):
        again.plot.caterpillar(axes())


def test_exchanges_of_a_run_and_of_the_operators_model(homes, tmp_path):
    spec = Spec(formula="log_radon ~ floor", client="county", cluster="state", gamma=6.0, solver="apgd")
    run = covey.simulate_sites(homes, spec, sites=3, out=tmp_path / "operator")
    plain = [asdict(each) for each in run.outcome.exchanges]
    model = covey.load(tmp_path / "operator")
    ax = model.plot.exchanges(plain, axes())
    assert title(ax).startswith(f"{len(plain)} exchanges sent")
    assert title(model.plot.exchanges(ax=axes())).startswith(f"{len(plain) - 1} exchanges")  # saved before the last one
    again = covey.load(model.save(tmp_path / "copy"))
    assert title(again.plot.exchanges(ax=axes())) == title(model.plot.exchanges(ax=axes()))
    in_memory = covey.fit(homes, spec)
    assert "converged" in title(in_memory.plot.convergence(axes()))


def test_many_groups_become_bands():
    rng = np.random.default_rng(0)
    client = np.repeat(np.arange(3000), rng.integers(1, 9, size=3000))
    table = pl.DataFrame({"y": rng.normal(size=len(client)) + rng.normal(size=3000)[client], "client": client})
    model = covey.HierarchicalRegressor(formula="y ~ 1 + (1 | client)", tests=False).fit(table)
    for ax in (model.plot.shrinkage(axes()), model.plot.reliability(axes()), model.plot.caterpillar(axes())):
        drawn = sum(len(part.get_offsets()) for part in ax.collections) + sum(len(line.get_xdata()) for line in ax.lines)
        assert drawn < 500
    ax = model.plot.caterpillar(axes())
    shown = len(ax.get_yticks())
    assert 16 <= shown <= 30  # so many names have room on these axes
    assert f"{3000 - shown:,} more between" in [text.get_text() for text in ax.texts]


def groups_of(rows, seed=0, sd=0.0):
    """Groups with these numbers of rows, whose means differ by ``sd``."""
    rng = np.random.default_rng(seed)
    client = np.repeat(np.arange(len(rows)), rows)
    y = rng.normal(size=len(client)) + sd * rng.normal(size=len(rows))[client]
    return pl.DataFrame({"y": y, "shop": [str(i) for i in client]})


def test_groups_that_do_not_differ_get_a_title_that_says_so():
    model = covey.HierarchicalRegressor(formula="y ~ 1 + (1 | shop)", tests=False).fit(groups_of(np.full(20, 10), seed=1))
    assert model.components_.client.sd.max() == 0.0
    assert title(model.plot.caterpillar(axes())).startswith("No shop differs")
    assert "move 100% of the way" in title(model.plot.shrinkage(axes()))


def test_many_groups_with_equally_many_rows_are_drawn():
    """Bands of groups of one size have a width, and counts have no decimals."""
    model = covey.HierarchicalRegressor(formula="y ~ 1 + (1 | shop)", tests=False).fit(groups_of(np.full(700, 3), sd=1.0))
    for ax in (model.plot.shrinkage(axes()), model.plot.reliability(axes())):
        widths = [np.ptp(path.vertices[:, 0]) for part in ax.collections for path in part.get_paths()]
        assert max(widths) > 0.5
        assert all(place == round(place) for place in ax.get_xticks())


def test_groups_of_two_sizes_are_compared():
    """Most have one row: the quarter with the fewest and the one with the most would be the same."""
    model = covey.HierarchicalRegressor(formula="y ~ 1 + (1 | shop)", tests=False).fit(
        groups_of(np.r_[np.ones(50, int), np.full(10, 300)], sd=1.0)
    )
    found = client_means(model.model_)
    few, others = (100 * found.moved(which) for which in (found.rows == 1, found.rows > 1))
    text = title(model.plot.shrinkage(axes()))
    assert "at most 1 row move" in text
    assert f"{few:.0f}%" in text
    assert f"{others:.0f}%" in text


def test_small_pictures_have_whole_labels(radon):
    """No label of an axis is longer than the figure, and names of groups do not overlap."""
    for draw in (radon.plot.shrinkage, radon.plot.caterpillar, radon.plot.variance, radon.plot.reliability):
        figure = Figure(figsize=(4.6, 3.4), layout="constrained")
        ax = draw(figure.subplots())
        figure.draw_without_rendering()
        for text in (ax.xaxis.label, ax.yaxis.label):
            box = text.get_window_extent()
            assert box.x0 >= -1
            assert box.y0 >= -1
            assert box.x1 <= figure.bbox.x1 + 1
            assert box.y1 <= figure.bbox.y1 + 1
        names = sorted(label.get_window_extent().y0 for label in ax.get_yticklabels() if label.get_text())
        height = min(label.get_window_extent().height for label in ax.get_yticklabels() if label.get_text())
        assert np.diff(names).min() > 0.95 * height


@pytest.mark.parametrize("size", [(8.0, 5.0), (4.6, 3.4)])
def test_legends_cover_neither_data_nor_the_title(radon, classes, homes, size):
    table, classifier = classes
    draws = [
        radon.plot.shrinkage,
        radon.plot.caterpillar,
        lambda ax: radon.plot.effect("floor", ax, at={"floor": [0, 1]}),
        *(lambda ax, kind=kind: radon.plot.residuals(homes, ax, kind=kind) for kind in ("fitted", "quantile", "group")),
        lambda ax: classifier.plot.calibration(table, ax),
    ]
    for draw in draws:
        figure = Figure(figsize=size, layout="constrained")
        ax = draw(figure.subplots())
        figure.draw_without_rendering()
        legend, above = ax.get_legend().get_window_extent(), ax._left_title.get_window_extent()
        assert legend.y0 >= ax.bbox.y1 - 1
        assert legend.x1 <= figure.bbox.x1 + 1
        assert above.y0 >= legend.y1 - 1
        assert above.y1 <= figure.bbox.y1 + 1
        assert above.x1 <= figure.bbox.x1 + 1


def test_a_timeline_names_the_clusters(radon, homes):
    model = covey.HierarchicalRegressor(formula="log_radon ~ floor", client="county", cluster="state", gamma=6, lam=4).fit(
        homes
    )
    ax = model.plot.timeline(homes, axes(), mode="rounds")
    assert [label.get_text() for label in ax.get_yticklabels()] == model.model_.hierarchy.cluster_ids.to_list()
    assert "'rounds'" in title(ax)
    with pytest.raises(CoveyError, match="asynchronous"):
        model.plot.timeline(homes, axes(), mode="late")
    with pytest.raises(CoveyError, match="does not read bars"):
        radon.plot.timeline(homes, axes())


def test_plural_words():
    assert [plural(word) for word in ("county", "day", "class", "shop")] == ["counties", "days", "classes", "shops"]


def test_a_fit_loads_neither_matplotlib_nor_the_report():
    code = (
        "import sys, covey; m = covey.fit(covey.datasets.load_radon(), 'log_radon ~ 1 + (1 | county)'); m.plot; "
        "print([name for name in sys.modules if name == 'matplotlib' or name.startswith('covey.report')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_shell_draws(radon, homes, tmp_path):
    radon.save(tmp_path / "model")
    homes.write_csv(tmp_path / "homes.csv")
    done = inside("plot", "model", "caterpillar", "--level", "cluster", "--dark", cwd=tmp_path)
    assert "9 states" in done.stdout
    assert (tmp_path / "caterpillar.png").stat().st_size > 10_000
    inside("plot", "model", "residuals", "--data", "homes.csv", "--against", "quantile", "--out", "r.svg", cwd=tmp_path)
    assert (tmp_path / "r.svg").read_text().lstrip().startswith("<?xml")
    for words, fact in (
        (("residuals",), "--data"),
        (("effect",), "--column"),
        (("pie",), "shrinkage"),
        (("variance", "--out", "v.gif"), ".png"),
    ):
        done = inside("plot", "model", *words, cwd=tmp_path, check=False)
        assert done.returncode == 2
        assert fact in done.stderr


def test_dollar_signs_in_names_are_text(homes):
    """matplotlib reads text between two of them as a formula, and fails if it is none."""
    table = homes.filter(pl.col("state").is_in(homes["state"].unique().sort()[:2].implode()))
    table = table.rename({"floor": "$floor_{$"}).with_columns(county="$" + pl.col("county") + "_^$")
    model = covey.fit(table, "log_radon ~ `$floor_{$` + (1 | county)")
    for ax in (None, axes()):
        for drawn in (
            model.plot.caterpillar(ax),
            model.plot.effect("$floor_{$", None if ax is None else axes(), at={"$floor_{$": [0, 1]}),
            model.plot.residuals(table, None if ax is None else axes(), kind="group"),
        ):
            drawn.get_figure().canvas.draw()
            plt.close("all")
    assert "_^$" in title(model.plot.caterpillar(axes()))


def test_numbers_on_axes_of_the_caller_stay_formulas():
    ax = axes()
    ax.set_yscale("log")

    def draw(ax, theme):
        ax.plot([1, 2], [1e-3, 1e5])
        return "a $ and a $"

    draw_on(ax, draw)
    ax.get_figure().canvas.draw()
    assert all(label.get_parse_math() for label in ax.get_yticklabels())
