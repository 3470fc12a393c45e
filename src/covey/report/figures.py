"""The figures of the studies, drawn from their tables and saved as PNG and SVG."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure

from covey.model.summary import counted
from covey.report.plots import GAP_LABEL, STYLES, plot_gap, save_figure
from covey.reproduce.communication import TARGET, exchanges_to_gap
from covey.reproduce.comparison import GAPS
from covey.reproduce.donors import change_along_lam
from covey.reproduce.limits import JAMES_STEIN_DESIGNS
from covey.reproduce.robustness import CHOSEN_PENALTIES, where_closer
from covey.reproduce.simulation import BASELINES, OF_THE_PAPER
from covey.reproduce.study import Study


def draw(study: Study, folder: Path) -> list[tuple[str, str]]:
    """Draw all figures of a study into a folder; returns the name of each, without suffix, and its title."""
    figures = _FIGURES[study.name.split("-")[0]]
    paths = {name: (folder / f"{name}.png", folder / f"{name}.svg") for name in figures}
    return [(name, save_figure(partial(make, study), *paths[name])) for name, make in figures.items()]


def _panels(width: float, height: float, count: int = 1, **options: Any) -> tuple[Figure, list[Any]]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, list(np.atleast_1d(figure.subplots(1, count, **options)))


def _distance(study: Study) -> tuple[Figure, str]:
    """Figure 1 (sim_mse_n), and the distances relative to the minimiser's."""
    runs = study.table("runs")
    figure, (left, right) = _panels(11.5, 5.6, 2)
    styles = dict(zip((*OF_THE_PAPER, "James-Stein", "oracle wbar"), STYLES, strict=True))
    optimum = runs.filter(pl.col("method") == "minimiser").select("rows", "run", least="average")
    runs = runs.join(optimum, on=["rows", "run"]).with_columns(above=100 * (pl.col("average") / pl.col("least") - 1))
    relative = ["locally-trained", "single-cluster", "one-coin iterate", "James-Stein", "oracle wbar"]
    for panel, column, methods in ((left, "average", OF_THE_PAPER), (right, "above", relative)):
        for name in methods:
            by_rows = runs.filter(pl.col("method") == name).group_by("rows")
            points = by_rows.agg(pl.col(column).mean().alias("mean"), pl.col(column).std().alias("sd")).sort("rows")
            panel.errorbar(*(points[part].to_numpy() for part in ("rows", "mean", "sd")), label=name, **styles[name])
        panel.set_xscale("log")
        panel.set_xticks(sorted(runs["rows"].unique().to_list()))
        panel.xaxis.set_minor_formatter("")
        panel.set_xlabel("rows of each client (log scale)")
        panel.legend()
    right.axhline(0, color="#000000", linewidth=0.8)
    right.set_yscale("symlog", linthresh=1)
    left.set_yscale("log")
    left.set_yticks([0.3, 0.5, 1, 2, 3, 4, 6])
    left.yaxis.set_minor_formatter("")
    for axis in (left.xaxis, left.yaxis, right.xaxis, right.yaxis):
        axis.set_major_formatter("{x:g}")
    left.set_ylabel("average distance to the true coefficients (log scale)")
    right.set_ylabel("percent farther from the truth than the minimiser\n(linear from -1 to 1, logarithmic beyond)")
    means = runs.group_by("rows", "method").agg(pl.col("average").mean(), pl.col("least").mean(), pl.col("above").mean())
    lost = means.filter(pl.col("method").is_in(BASELINES), pl.col("average") <= pl.col("least")).sort("rows")["rows"].unique()
    where = "at every size" if lost.is_empty() else f"except at {', '.join(map(str, lost.to_list()))} rows"
    ten = dict(means.filter(pl.col("rows") == 10).select("method", "average").iter_rows())
    gain, at = means.filter(pl.col("method") == "James-Stein").select(-pl.col("above"), "rows").sort("above").row(-1)
    against = ", ".join(f"{ten[name]:.2f} {name}" for name in BASELINES)
    shrunk = f"closer still by up to {gain:.1f}% (at {counted(at, 'row')})" if gain > 0 else "not closer at any size"
    title = (
        f"The minimiser is closer to the truth than the paper's three baselines {where} (at 10 rows {ten['minimiser']:.2f}, "
        f"against {against}). James-Stein is {shrunk}. Bars: sd between runs"
    )
    return figure, title


def _wrong_clusters(study: Study) -> tuple[Figure, str]:
    wrong = study.table("clusters")
    figure, (panel,) = _panels(8.5, 5.4)
    for name, style in zip(wrong.columns[1:], STYLES, strict=False):
        panel.plot(100 * wrong["wrong share"].to_numpy(), wrong[name].to_numpy(), label=name, **style)
    panel.set_xlabel("clients in a random cluster (percent)")
    panel.set_ylabel("average distance to the true coefficients")
    panel.legend()
    cost = 100 * float((wrong[CHOSEN_PENALTIES] / wrong["single-cluster"] - 1).to_numpy().max())
    worst = f"at most {cost:.1f}% farther than a single cluster" if cost > 0 else "closer than a single cluster at all of them"
    return figure, f"With the true penalties the hierarchy is {where_closer(wrong)}; with cross-validated ones it is {worst}"


def _james_stein(study: Study) -> tuple[Figure, str]:
    gain = study.table("james-stein")
    figure, panels = _panels(12.5, 5.2, 3, sharey=True)
    titles = ("10 clients in one cluster (Proposition 5.4)", "5 clusters of 4 clients", "3 clients, unequal columns")
    for panel, design, title in zip(panels, JAMES_STEIN_DESIGNS, titles, strict=True):
        for d, style in zip(gain["d"].unique(maintain_order=True).to_list(), STYLES, strict=False):
            here = gain.filter(pl.col("design") == design, pl.col("d") == d)
            size, ratio, error = (here[name].to_numpy() for name in ("|wbar*|", "clients", "standard error"))
            panel.errorbar(size, ratio, 2 * error, label=f"d = {d}", **style)
        panel.axhline(1, color="#606060", linewidth=0.8)
        panel.set_title(title)
    figure.supxlabel("|wbar*|, length of the true global model, in standard deviations of a client", fontsize=11)
    panels[0].set_ylabel("clients' mean squared error,\nwith James-Stein divided by without")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center")
    best, worst = (gain.sort("clients").row(at, named=True) for at in (0, -1))
    title = (
        f"James-Stein lowers the clients' squared error by up to {100 * (1 - best['clients']):.1f}% ({best['design']}, "
        f"d = {best['d']}, |wbar*| = {best['|wbar*|']:g}); the largest ratio is {worst['clients']:.4f} "
        "(bars: two standard errors)"
    )
    return figure, title


def _race(study: Study) -> tuple[Figure, str]:
    curves = study.table("curves")
    figure, panels = _panels(11.5, 5.8, 2, sharey=True)
    axes = (
        ("exchanges", "exchanges of a client (log scale, from 0.7)", 0.7),
        ("bytes", "bytes of the whole network (log scale, from 5,000)", 5e3),
    )
    for panel, (axis, label, least) in zip(panels, axes, strict=True):
        for name in curves["solver"].unique(maintain_order=True).to_list():
            here = curves.filter(pl.col("solver") == name, pl.col("gap") < 100, pl.col(axis) > 0)
            measured, bound = (here.filter(pl.col("kind") == kind) for kind in ("measured", "promised"))
            colour = plot_gap(panel, name, *_smoothed(measured[axis].to_numpy(), measured["gap"].to_numpy()))
            panel.plot(bound[axis].to_numpy(), bound["gap"].to_numpy(), color=colour, linestyle=":")
        panel.axhline(TARGET, color="#808080", linewidth=1.0, zorder=0)
        panel.text(0.99, TARGET, f"gap {TARGET:g}", transform=panel.get_yaxis_transform(), ha="right", va="bottom", fontsize=10)
        panel.set_ylim(5e-15, 30)
        panel.set_xlim(left=least)
        panel.set_xlabel(label)
    panels[0].set_ylabel(GAP_LABEL)
    panels[0].plot(
        [], [], color="#606060", linestyle=":", label="bound of the theorem, in the solver's colour; not drawn above 30"
    )
    handles = panels[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=4, title="measured (means over a twelfth of a decade)")
    exchanges = dict(study.table("race").select("solver", f"exchanges to {TARGET:g}").iter_rows())
    return figure, exchanges_to_gap(exchanges, TARGET)


def _smoothed(x: Any, gap: Any) -> tuple[Any, Any]:
    """Means over a twelfth of a decade, because the theorems bound the mean of a randomised run, which jumps."""
    bins = np.floor(12 * np.log10(x)).astype(int)
    starts = np.flatnonzero(np.diff(bins, prepend=bins[0] - 1))
    counts = np.diff(np.append(starts, len(x)))
    return np.add.reduceat(x, starts) / counts, np.add.reduceat(gap, starts) / counts


def _comparison(study: Study) -> tuple[Figure, str]:
    """Exchanges of each solver to two gaps on every problem."""
    table = study.table("comparison-all")
    solvers = table["solver"].unique(maintain_order=True).to_list()
    problems = table["problem"].unique(maintain_order=True).to_list()
    figure = Figure(figsize=(11.5, 4.0 * -(-len(problems) // 2) + 1), layout="constrained")
    panels = list(figure.subplots(-(-len(problems) // 2), 2, sharex=True, sharey=True).ravel())
    for panel in panels[len(problems) :]:
        panel.remove()
    for panel, problem in zip(panels, problems, strict=False):
        here = {row["solver"]: row for row in table.filter(pl.col("problem") == problem).to_dicts()}
        for gap, style, filled in zip(GAPS, STYLES, ("white", None), strict=False):
            column, line = f"exchanges to {gap:g}", {**style, "linestyle": "none"}
            seen = [(solvers.index(name), row[column], row[f"{column}, sd"]) for name, row in here.items() if row[column]]
            place, count, sd = (np.array(part) for part in zip(*seen, strict=True))
            below = np.minimum(sd, 0.9 * count)  # a bar to below 0 has no end on a logarithmic axis
            look = {**line, **({"markerfacecolor": filled} if filled else {})}
            panel.errorbar(count, place, xerr=np.array([below, sd]), label=f"to a gap of {gap:g}", **look)
        for name in solvers:
            row = here.get(name)
            if row is None or row[f"exchanges to {GAPS[-1]:g}"] is None:
                end = "does not apply" if row is None else f"ends at a gap of {row['lowest gap']:.1e}"
                at = panel.get_yaxis_transform()
                panel.text(1.0, solvers.index(name), end, transform=at, ha="right", va="center", fontsize=9.5, color="#505050")
        panel.set_xscale("log")
        panel.set_xlim(0.7, 3e5)
        panel.xaxis.set_major_formatter("{x:,.0f}")
        panel.set_yticks(range(len(solvers)), solvers)
        panel.set_ylim(len(solvers) - 0.5, -0.5)
        panel.set_title(problem)
    for panel in panels[max(0, len(problems) - 2) : len(problems)]:
        panel.set_xlabel("exchanges of a client (log scale)")
    figure.supylabel("covey's solvers, then their rivals", fontsize=11)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    best = study.table("winners").filter(pl.col("gap") == f"{GAPS[-1]:g}").select("problem", "fewest exchanges, vectors only")
    words = ", ".join(f"{winner} ({problem})" for problem, winner in best.iter_rows())
    return figure, (
        f"Fewest exchanges to a gap of {GAPS[-1]:g} among covey's solvers that send vectors: {words}. Sweep and newton send "
        "matrices too. Bars: sd between runs"
    )


def _settings(study: Study) -> tuple[Figure, str]:
    chance, tau = study.table("chance"), study.table("tau")
    figure, (left, right) = _panels(11.5, 5.0, 2, width_ratios=(3, 2))
    for name, style in zip(("iterations", "iterations, promised", "exchanges"), STYLES, strict=False):
        left.loglog(chance["multiple of the best"].to_numpy(), chance[name].to_numpy(), label=name, **style)
    left.xaxis.set_major_formatter("{x:g}")
    left.set_xlabel("p0 and p, as a multiple of those of Corollary 4.4 (log scale)")
    left.set_ylabel(f"iterations or exchanges\nto a gap of {TARGET:g} (log scale)")
    left.legend()
    labels = [name if name.startswith("tau") else f"tau = {name}" for name in tau["tau"].to_list()]
    right.bar(labels, tau["iterations"].to_numpy(), width=0.6, color=STYLES[0]["color"])
    right.set_ylabel(f"iterations to a gap of {TARGET:g}")
    right.set_xlabel("tau, share of the cluster term\nin exchanges between clusters")
    best = chance.sort("exchanges").row(0, named=True)
    counts = ", ".join(f"{count:,.0f} at {label}" for label, count in zip(labels, tau["iterations"].to_list(), strict=True))
    return figure, (
        f"al2sgd_plus needs the fewest exchanges ({best['exchanges']:.0f}) at {best['multiple of the best']:g} times the "
        f"probabilities of Corollary 4.4; iterations: {counts}"
    )


def _histograms(study: Study) -> tuple[Figure, str]:
    """Figure 2 (cross_hist): the distribution of the clients' cross-entropy under each model."""
    counts = study.table("histogram")
    table = {row["model"]: row for row in study.table("cross-entropy").to_dicts()}
    many = table["hierarchical"]["ZIPs"] >= 50
    figure, panels = _panels(11.5, 4.6, 3, sharey=True)
    for panel, model in zip(panels, ("hierarchical", "locally-trained", "single-model"), strict=True):
        left, height = counts["from"].to_numpy(), counts[model].to_numpy()
        panel.bar(left, height, width=0.05, align="edge", color=STYLES[0]["color"], edgecolor="white", linewidth=0.2)
        panel.axvline(1, color=STYLES[1]["color"], linewidth=1.2, linestyle="--")
        panel.set_yscale("log" if many else "linear")
        panel.set_ylim(bottom=0.7 if many else 0)
        panel.set_title(f"{model}: average {table[model]['average']:.3f}")
        panel.text(0.98, 0.95, f"{table[model]['above 1']:,} above 1", transform=panel.transAxes, ha="right", va="top")
    panels[0].set_ylabel("number of ZIP codes" + (" (log scale)" if many else ""))
    figure.supxlabel("cross-entropy of a ZIP code on held-out rows, in nats per row (last bar: 3 and more)", fontsize=11)
    ours, single, alone = (table[name]["above 1"] for name in ("hierarchical", "single-model", "locally-trained"))
    return figure, (
        f"Of {table['hierarchical']['ZIPs']:,} ZIP codes, {alone:,} have a cross-entropy above 1 if trained alone, {single:,} "
        f"under a single model and {ours:,} under the hierarchy"
    )


def _penalties(study: Study) -> tuple[Figure, str]:
    """The cross-validated score on the grid of penalties."""
    grid = study.table("penalties")
    gammas, scores = grid["gamma"].to_numpy(), grid.drop("gamma").to_numpy()
    lams = np.array([float(name.removeprefix("lam=")) for name in grid.columns[1:]])
    figure, (panel,) = _panels(8.5, 5.6)
    drawn = panel.pcolormesh(lams, gammas, scores, shading="nearest", cmap="viridis_r", norm=PowerNorm(0.5), rasterized=True)
    i, j = np.unravel_index(scores.argmin(), scores.shape)
    edges = [name for name, at, last in (("gamma", i, len(gammas)), ("lam", j, len(lams))) if at in (0, last - 1)]
    edge = f", the edge of the grid for {' and '.join(edges)}" if edges else ""
    panel.plot(lams[j], gammas[i], marker="*", markersize=15, color="white", markeredgecolor="black", clip_on=False)
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.set_xlabel("lam, penalty on the distance of clusters to the global model (log scale)")
    panel.set_ylabel("gamma, penalty on the distance\nof ZIP codes to their cluster (log scale)")
    figure.colorbar(drawn, label="cross-validated mean client cross-entropy (nats per row)")
    along = change_along_lam(scores)
    return (
        figure,
        f"Cross-validation chooses gamma = {gammas[i]:.3g} and lam = {lams[j]:.3g} (star{edge}); along lam the score {along}",
    )


_FIGURES: dict[str, dict[str, Callable[[Study], tuple[Figure, str]]]] = {
    "simulation": {"distance": _distance},
    "robustness": {"clusters": _wrong_clusters},
    "limits": {"james-stein": _james_stein},
    "communication": {"race": _race, "settings": _settings, "comparison": _comparison},
    "donors": {"cross-entropy": _histograms, "penalties": _penalties},
}
