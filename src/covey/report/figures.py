"""The figures of the studies, each drawn from the study's own tables and saved as PNG and SVG."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from textwrap import wrap
from typing import Any

import matplotlib as mpl
import numpy as np
import polars as pl
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure

from covey.report.plots import racer
from covey.reproduce.limits import JAMES_STEIN_DESIGNS
from covey.reproduce.robustness import turning_point
from covey.reproduce.simulation import exceptions
from covey.reproduce.study import Study

# Okabe and Ito's colours, which everybody can tell apart, each with a marker and a line of its own for print in grey.
_STYLES: list[dict[str, Any]] = [
    {"color": "#0072b2", "marker": "o", "linestyle": "-"},
    {"color": "#d55e00", "marker": "s", "linestyle": "--"},
    {"color": "#009e73", "marker": "^", "linestyle": "-."},
    {"color": "#cc79a7", "marker": "D", "linestyle": ":"},
    {"color": "#000000", "marker": "v", "linestyle": "-"},
    {"color": "#e69f00", "marker": "P", "linestyle": "--"},
    {"color": "#56b4e9", "marker": "X", "linestyle": "-."},
]
_PRINT: Any = {
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.hashsalt": "covey",  # else every run would name the parts of a drawing anew
    "svg.fonttype": "none",
}


def draw(study: Study, folder: Path) -> list[tuple[str, str]]:
    """All figures of a study into a folder; the file name of each without its ending, and its title."""
    kind = "donors" if study.name.startswith("donors") else study.name
    drawn = []
    for name, make in _FIGURES[kind].items():
        with mpl.rc_context(_PRINT):
            figure, title = make(study)
            figure.suptitle("\n".join(wrap(title, 92)), fontsize=12.5, x=0.01, ha="left")
            figure.savefig(folder / f"{name}.png", dpi=150, metadata={"Software": None})
            figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
        drawn.append((name, title))
    return drawn


def _distance(study: Study) -> tuple[Figure, str]:
    """Figure sim_mse_n, and how far each method is from the minimiser."""
    runs = study.table("runs")
    figure = Figure(figsize=(11.5, 5.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    methods = ["locally-trained", "single-model", "single-cluster", "one-coin iterate", "minimiser"]
    for name, style in zip(methods, _STYLES, strict=False):
        told = _by(runs.filter(pl.col("method") == name), "rows", "average")
        left.errorbar(*told, capsize=3, linewidth=1.5, markersize=5, label=name, **style)
    best = runs.filter(pl.col("method") == "minimiser").select("rows", "run", least="average")
    beside = runs.join(best, on=["rows", "run"]).with_columns(above=100 * (pl.col("average") / pl.col("least") - 1))
    shown = ["locally-trained", "single-cluster", "one-coin iterate", "James-Stein", "oracle wbar"]
    for name in shown:
        style = _STYLES[[*methods, "James-Stein", "oracle wbar"].index(name)]
        told = _by(beside.filter(pl.col("method") == name), "rows", "above")
        right.errorbar(*told, capsize=3, linewidth=1.5, markersize=5, label=name, **style)
    right.axhline(0, color="#000000", linewidth=0.8)
    right.set_yscale("symlog", linthresh=1)
    right.yaxis.set_major_formatter("{x:g}")
    left.set_yscale("log")
    left.set_yticks([0.3, 0.5, 1, 2, 3, 4, 6])
    left.yaxis.set_major_formatter("{x:g}")
    left.yaxis.set_minor_formatter("")
    left.set_ylabel("average distance to the true coefficients (log scale)")
    right.set_ylabel("percent farther from the truth than the minimiser\n(linear from -1 to 1, logarithmic beyond)")
    for panel in (left, right):
        panel.set_xscale("log")
        panel.set_xticks(sorted(runs["rows"].unique().to_list()))
        panel.xaxis.set_major_formatter("{x:g}")
        panel.xaxis.set_minor_formatter("")
        panel.set_xlabel("rows of each client (log scale)")
        panel.legend(frameon=False, fontsize=9.5)
    table = study.table("distance")
    ten = {row["method"]: row["average"] for row in table.filter(pl.col("rows") == 10).to_dicts()}
    worse = exceptions(runs)
    claim = "closest to the truth at every size" if not worse else f"not closest everywhere ({worse[0]})"
    title = (
        f"The hierarchy is {claim}: {ten['minimiser']:.2f} at 10 rows a client, against "
        f"{ten['single-cluster']:.2f} for one cluster and {ten['locally-trained']:.2f} alone (bars: sd between runs)"
    )
    return figure, title


def _by(frame: pl.DataFrame, x: str, y: str) -> tuple[Any, Any, Any]:
    told = frame.group_by(x).agg(pl.col(y).mean().alias("mean"), pl.col(y).std().alias("sd")).sort(x)
    return told[x].to_numpy(), told["mean"].to_numpy(), told["sd"].to_numpy()


def _wrong_clusters(study: Study) -> tuple[Figure, str]:
    wrong = study.table("clusters")
    figure = Figure(figsize=(8.5, 5.2), layout="constrained")
    panel = figure.subplots()
    share = 100 * wrong["wrong share"].to_numpy()
    for name, style in zip(wrong.columns[1:], _STYLES, strict=False):
        panel.plot(share, wrong[name].to_numpy(), linewidth=1.6, markersize=5, label=name, **style)
    panel.set_xlabel("clients put into a cluster at random (percent)")
    panel.set_ylabel("average distance to the true coefficients")
    panel.legend(frameon=False, fontsize=10)
    cost = 100 * float((wrong["hierarchy, penalties by CV"].to_numpy() / wrong["single-cluster"].to_numpy() - 1).max())
    harm = "never worse than it" if cost <= 0 else f"at worst {cost:.1f}% worse"
    return figure, f"The hierarchy is {turning_point(wrong)}; with penalties by cross-validation {harm}"


def _james_stein(study: Study) -> tuple[Figure, str]:
    gain = study.table("james-stein")
    figure = Figure(figsize=(12.5, 5.2), layout="constrained")
    panels = figure.subplots(1, 3, sharey=True)
    words = ("10 clients in one cluster (prop. JS)", "5 clusters of 4 clients", "3 clients, unequal columns")
    for panel, design, name in zip(panels, JAMES_STEIN_DESIGNS, words, strict=True):
        for d, style in zip(gain["d"].unique(maintain_order=True).to_list(), _STYLES, strict=False):
            here = gain.filter(pl.col("design") == design, pl.col("d") == d)
            size, ratio, error = (here[name].to_numpy() for name in ("|wbar*|", "clients", "standard error"))
            panel.errorbar(size, ratio, 2 * error, capsize=3, linewidth=1.5, markersize=5, label=f"d = {d}", **style)
        panel.axhline(1, color="#606060", linewidth=0.8)
        panel.set_title(name, fontsize=11)
    figure.supxlabel("|wbar*|, length of the true global model, in standard deviations of a client", fontsize=11)
    panels[0].set_ylabel("clients' mean squared error, James-Stein / plain")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=10)
    best = gain.sort("clients").row(0, named=True)
    worst = gain.sort("clients").row(-1, named=True)
    title = (
        f"James-Stein lowers the clients' squared error by up to {100 * (1 - best['clients']):.0f}%, where the global model "
        f"is near zero; at worst it raises it by {100 * (worst['clients'] - 1):.1f}% (bars: two standard errors)"
    )
    return figure, title


def _race(study: Study) -> tuple[Figure, str]:
    curves = study.table("curves")
    figure = Figure(figsize=(11.5, 5.6), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for panel, axis, words in zip(
        panels,
        ("exchanges", "bytes"),
        ("exchanges of a client (log scale)", "bytes of the whole network (log scale)"),
        strict=True,
    ):
        for name, style in zip(curves["solver"].unique(maintain_order=True).to_list(), _STYLES, strict=False):
            here = curves.filter(pl.col("solver") == name, pl.col("gap") < 100, pl.col(axis) > 0)
            color = racer(name)[0]  # as in the figure of a plan
            told, theory = here.filter(pl.col("kind") == "measured"), here.filter(pl.col("kind") == "promised")
            line = "-" if name in ("sweep", "newton") else style["linestyle"] if style["linestyle"] != ":" else (0, (5, 1))
            x, gap = _smoothed(told[axis].to_numpy(), told["gap"].to_numpy())
            panel.plot(
                x, np.maximum(gap, 1e-12), color=color, marker=style["marker"], markersize=4,
                markevery=1 if name in ("sweep", "newton") else 3, linestyle=line, linewidth=1.4, label=name,
            )  # fmt: skip
            panel.plot(theory[axis].to_numpy(), theory["gap"].to_numpy(), color=color, linewidth=1.4, linestyle=":")
        panel.set_xscale("log")
        panel.set_yscale("log")
        panel.set_ylim(3e-13, 30)
        panel.set_xlim(left=0.7 if axis == "exchanges" else 5e3)
        panel.set_xlabel(words)
    panels[0].set_ylabel("objective above its minimum, share of that at zero")
    panels[0].plot([], [], color="#606060", linestyle=":", label="promised, same colour")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=7, frameon=False, fontsize=10)
    rows = {row["solver"]: row["exchanges to 1e-06"] for row in study.table("race").to_dicts()}
    reached = ", ".join(f"{name} {count:,.0f}" for name, count in rows.items() if count is not None)
    missed = ", ".join(name for name, count in rows.items() if count is None)
    return figure, f"Exchanges to a gap of 1e-6: {reached}" + (f"; not reached by {missed}" if missed else "")


def _smoothed(x: Any, gap: Any) -> tuple[Any, Any]:
    """Means over a twelfth of a decade: a run by coins jumps at each exchange, and the theorems speak of its mean."""
    bins = np.floor(12 * np.log10(x)).astype(int)
    starts = np.flatnonzero(np.diff(bins, prepend=bins[0] - 1))
    counts = np.diff(np.append(starts, len(x)))
    return np.add.reduceat(x, starts) / counts, np.add.reduceat(gap, starts) / counts


def _settings(study: Study) -> tuple[Figure, str]:
    chance, tau = study.table("chance"), study.table("tau")
    figure = Figure(figsize=(11.5, 5.0), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    multiple = chance["multiple of the best"].to_numpy()
    for name, style in zip(("iterations", "iterations, promised", "exchanges"), _STYLES, strict=False):
        left.plot(multiple, chance[name].to_numpy(), linewidth=1.6, markersize=5, label=name, **style)
    left.set_xscale("log")
    left.set_yscale("log")
    left.xaxis.set_major_formatter("{x:g}")
    left.set_xlabel("chance of an exchange, multiple of cor. opt_conv_rate (log scale)")
    left.set_ylabel("number to a gap of 1e-6 (log scale)")
    left.legend(frameon=False, fontsize=10)
    places = np.arange(len(tau))
    right.bar(places, tau["iterations"].to_numpy(), width=0.6, color="#0072b2")
    right.set_xticks(places, [f"tau = {name}" if not name.startswith("tau") else name for name in tau["tau"].to_list()])
    right.set_ylabel("iterations to a gap of 1e-6")
    right.set_xlabel("share of the cluster term in global exchanges")
    best = chance.sort("exchanges").row(0, named=True)["multiple of the best"]
    counts = ", ".join(f"{count:,.0f} with tau = {name}" for name, count in tau.select("tau", "iterations").iter_rows())
    title = f"al2sgd_plus needs fewest exchanges at {best:g} x the theorem's chances; iterations: {counts}"
    return figure, title


def _histograms(study: Study) -> tuple[Figure, str]:
    """Figure cross_hist: the distribution of the clients' cross-entropy under each model."""
    counts = study.table("histogram")
    table = {row["model"]: row for row in study.table("cross-entropy").to_dicts()}
    figure = Figure(figsize=(11.5, 4.6), layout="constrained")
    panels = figure.subplots(1, 3, sharey=True)
    for panel, model in zip(panels, ("hierarchical", "locally-trained", "single-model"), strict=True):
        values = counts[model].to_numpy()
        panel.bar(
            counts["from"].to_numpy(), values, width=0.05, align="edge", color="#0072b2", edgecolor="white", linewidth=0.2
        )
        panel.axvline(1, color="#d55e00", linewidth=1.2, linestyle="--")
        if table[model]["ZIPs"] >= 50:
            panel.set_yscale("log")
        panel.set_title(f"{model}: average {table[model]['average']:.3f}", fontsize=11)
        panel.set_ylim(bottom=0.7 if table[model]["ZIPs"] >= 50 else 0)
        panel.text(
            0.98, 0.95, f"{table[model]['above 1']:,} above 1", transform=panel.transAxes, ha="right", va="top", fontsize=10
        )
    panels[0].set_ylabel("ZIP codes" + (" (log scale)" if table["hierarchical"]["ZIPs"] >= 50 else ""))
    figure.supxlabel("cross-entropy of a ZIP code on held-out rows, in nats a row (last bar: 3 and more)", fontsize=11)
    ours, single, alone = (table[name] for name in ("hierarchical", "single-model", "locally-trained"))
    title = (
        f"Of {alone['ZIPs']:,} ZIP codes {alone['above 1']:,} have a cross-entropy above 1 when trained alone, "
        f"{single['above 1']:,} under a single model, {ours['above 1']:,} under the hierarchy"
    )
    return figure, title


def _penalties(study: Study) -> tuple[Figure, str]:
    """The cross-validated score over the grid."""
    grid = study.table("penalties")
    gammas = grid["gamma"].to_numpy()
    lams = np.array([float(name.removeprefix("lam=")) for name in grid.columns[1:]])
    scores = grid.select(grid.columns[1:]).to_numpy()
    figure = Figure(figsize=(8.5, 5.6), layout="constrained")
    panel = figure.subplots()
    drawn = panel.pcolormesh(lams, gammas, scores, shading="nearest", cmap="viridis_r", norm=PowerNorm(0.5), rasterized=True)
    i, j = np.unravel_index(scores.argmin(), scores.shape)
    panel.plot(lams[j], gammas[i], marker="*", markersize=15, color="white", markeredgecolor="black", clip_on=False)
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.set_xlabel("lam, pull of clusters to the global model (log scale)")
    panel.set_ylabel("gamma, pull of ZIP codes to their cluster (log scale)")
    figure.colorbar(drawn, label="cross-validated mean client cross-entropy")
    across, whole = float(np.ptp(scores[i])), float(np.ptp(scores))
    along = (
        "lam hardly matters"
        if across < 0.01 * whole
        else f"along lam the score moves by {100 * across / whole:.0f}% of its range"
    )
    return figure, f"Cross-validation takes gamma = {gammas[i]:.3g}, lam = {lams[j]:.3g} (star); {along}"


_FIGURES: dict[str, dict[str, Callable[[Study], tuple[Figure, str]]]] = {
    "simulation": {"distance": _distance},
    "robustness": {"clusters": _wrong_clusters},
    "limits": {"james-stein": _james_stein},
    "communication": {"race": _race, "settings": _settings},
    "donors": {"cross-entropy": _histograms, "penalties": _penalties},
}
