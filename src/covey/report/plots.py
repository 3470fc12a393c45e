"""Figures of a model and of a plan, and the style of all figures; :mod:`.figures` draws the figures of the studies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

import matplotlib as mpl
import numpy as np
import polars as pl
from matplotlib.figure import Figure

from covey._typing import Floats
from covey.reproduce.communication import exchanges_to_gap
from covey.reproduce.radon import Shrinkage
from covey.solvers.clock import Mode, Timeline
from covey.solvers.registry import names

_ALONE, _OWN, _CLUSTER = "#b0b0b0", "#1f6fb4", "#d1495b"


def shrinkage_figure(found: Shrinkage, path: Path, *, title: str, clients: str, rows: str, unit: str) -> Path:
    """Draw the mean of each client alone and personalised, relative to its cluster, against its number of rows.

    ``clients`` and ``rows`` are the words for them, such as "counties" and "homes in the county".
    """
    tree, spec = found.model.hierarchy, found.model.spec
    cluster, k = spec.cluster or "cluster", tree.n_clusters
    columns = min(3, k)
    lines = -(-k // columns)

    def draw() -> tuple[Figure, str]:
        figure = Figure(figsize=(3.7 * columns, 2.5 * lines + 1.3), layout="constrained")
        panels = np.atleast_1d(np.array(figure.subplots(lines, columns, sharex=True, sharey=True))).ravel()
        for panel in panels[k:]:
            panel.set_visible(False)
        for j, panel in enumerate(panels[:k]):
            units = slice(tree.cluster_ptr[j], tree.cluster_ptr[j + 1])
            counts = found.model.rows[units]
            alone, own = (values[units] - found.cluster[units] for values in (found.alone, found.personalised))
            panel.axhline(0.0, color=_CLUSTER, linewidth=1.6, zorder=1, label=f"{cluster}'s model")
            panel.vlines(counts, alone, own, color=_ALONE, linewidth=0.7, zorder=1)
            name = f"{spec.client or 'client'} alone"
            panel.scatter(counts, alone, s=16, facecolors="white", edgecolors=_ALONE, linewidths=1.0, zorder=2, label=name)
            panel.scatter(counts, own, s=14, color=_OWN, zorder=3, label="personalised")
            panel.set_xscale("log")
            panel.xaxis.set_major_formatter("{x:g}")
            panel.set_title(f"{tree.cluster_ids[j]}: {len(counts)} {clients}", loc="left")
            if j + columns >= k:
                panel.set_xlabel(f"{rows} (log scale)")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
        figure.supylabel(f"mean minus that of the {cluster}'s model ({unit})", fontsize=11)
        return figure, title

    save_figure(draw, path)
    return path


# The colours of Okabe and Ito, which colour-blind readers can tell apart. Markers and lines differ too, for print in grey.
STYLES: list[dict[str, Any]] = [
    {"color": "#0072b2", "marker": "o", "linestyle": "-"},
    {"color": "#d55e00", "marker": "s", "linestyle": "--"},
    {"color": "#009e73", "marker": "^", "linestyle": "-."},
    {"color": "#cc79a7", "marker": "D", "linestyle": (0, (5, 1))},
    {"color": "#000000", "marker": "v", "linestyle": "-"},
    {"color": "#e69f00", "marker": "P", "linestyle": "--"},
    {"color": "#56b4e9", "marker": "X", "linestyle": "-."},
]
_SETTINGS: Any = {
    "font.size": 11,
    "legend.fontsize": 10,
    "legend.frameon": False,
    "lines.linewidth": 1.5,
    "lines.markersize": 5,
    "errorbar.capsize": 3,
    "axes.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.hashsalt": "covey",  # with a random salt the same figure would give other bytes in every run
    "svg.fonttype": "none",
}
_METADATA: dict[str, dict[str, None]] = {".png": {"Software": None}, ".svg": {"Date": None}}
_SMALLEST_GAP = 1e-14

GAP_LABEL = (
    f"gap: (objective - minimum) / (same at zero)\n(log scale; values below {_SMALLEST_GAP:g} are drawn at {_SMALLEST_GAP:g})"
)


def save_figure(draw: Callable[[], tuple[Figure, str]], *paths: Path) -> str:
    """Draw a figure in the style that all figures share, put its title on it, save it to each path, and return the title."""
    with mpl.rc_context(_SETTINGS):
        figure, title = draw()
        lines = wrap(title, int(10.2 * figure.get_figwidth()), break_on_hyphens=False)
        figure.suptitle("\n".join(lines), fontsize=12.5, x=0.01, ha="left")
        for path in paths:
            figure.savefig(path, dpi=150, metadata=_METADATA.get(path.suffix))
    return title


def plot_gap(panel: Any, solver: str, x: Floats, gap: Floats) -> str:
    """Plot the gap of a solver on two log scales and return the colour; a variant ("l2gd switching") has a dashed line."""
    name, *variant = solver.split()
    style = STYLES[names().index(name) % len(STYLES)]
    style = {**style, "marker": "", "linestyle": (0, (2, 1))} if variant else style
    panel.loglog(x, np.maximum(gap, _SMALLEST_GAP), markevery=max(1, len(x) // 10), label=solver, **style)
    return str(style["color"])


def race_figure(histories: Mapping[str, pl.DataFrame], path: Path, *, accuracy: float) -> Path:
    """Plot the measured gap of each solver against its exchanges and save the figure.

    Parameters
    ----------
    histories : by solver, a frame with the columns ``exchanges`` and ``gap``
    path : a .png, .pdf or .svg file
    accuracy : a gap that the figure marks
    """

    def draw() -> tuple[Figure, str]:
        figure = Figure(figsize=(8.5, 5.4), layout="constrained")
        panel = figure.subplots()
        exchanges: dict[str, Any] = {}
        for name, history in histories.items():
            plot_gap(panel, name, history["exchanges"].to_numpy() + 1, history["gap"].to_numpy())
            exchanges[name] = history.filter(pl.col("gap") <= accuracy)["exchanges"].min()
        panel.axhline(accuracy, color="#808080", linewidth=1.0, linestyle=":", zorder=0)
        panel.text(1.01, accuracy, f"gap\n{accuracy:g}", transform=panel.get_yaxis_transform(), va="center")
        panel.xaxis.set_major_formatter("{x:,.0f}")
        panel.set_xlabel("exchanges of a client, plus one (log scale)")
        panel.set_ylabel(GAP_LABEL)
        figure.legend(loc="outside lower center", ncols=4)
        return figure, exchanges_to_gap(exchanges, accuracy)

    save_figure(draw, path)
    return path


_COLOURS = ("#0072b2", "#e69f00", "#dddddd", "#cc79a7")


def shown_clusters(number: int, most: int = 30) -> list[int]:
    """The positions of the clusters that a timeline shows: all, or ``most`` of them at equal distances."""
    return np.unique(np.linspace(0, number - 1, min(number, most)).round().astype(int)).tolist()  # type: ignore[no-any-return]


def draw_timeline(
    panel: Any, found: Timeline, clusters: Sequence[str], shown: Sequence[int], colours: Sequence[str] = _COLOURS
) -> None:
    """Bars of what each of the ``shown`` clusters does, and a line where the run ends, in the last colour."""
    for kind, colour in zip(("computing", "sending", "waiting"), colours, strict=False):
        for place, cluster in enumerate(shown):
            here = found.frame.filter(pl.col("kind") == kind, pl.col("cluster") == cluster)
            spans = list(zip(here["start"], here["end"] - here["start"], strict=True))
            panel.broken_barh(spans, (place - 0.4, 0.8), color=colour, label=kind if place == 0 else None)
    panel.axvline(found.seconds, color=colours[-1], linewidth=1.2)
    panel.set_yticks(range(len(shown)), [clusters[j] for j in shown], fontsize=8, parse_math=False)
    panel.set_ylim(len(shown) - 0.5, -0.5)


def timeline_figure(timelines: Mapping[Mode, Timeline], clusters: Sequence[str], path: Path) -> Path:
    """Plot when each cluster computes, sends and waits, one panel for each mode, and save the figure.

    Parameters
    ----------
    timelines : by mode
    clusters : names of the clusters
    path : a .png, .pdf or .svg file
    """
    shown = shown_clusters(len(clusters))
    last = max(found.seconds for found in timelines.values())

    def draw() -> tuple[Figure, str]:
        figure = Figure(figsize=(9.5, 1.2 + len(timelines) * (0.8 + 0.16 * len(shown))), layout="constrained")
        panels = np.atleast_1d(figure.subplots(len(timelines), 1, sharex=True))
        for panel, (mode, found) in zip(panels, timelines.items(), strict=True):
            draw_timeline(panel, found, clusters, shown)
            panel.set_title(f"{mode}: {found.seconds:.3g} s", loc="left", fontsize=10.5)
            panel.set_xlim(0, 1.02 * last)
        panels[-1].set_xlabel("seconds")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3)
        more = "" if len(shown) == len(clusters) else f" ({len(shown)} of {len(clusters)} shown)"
        return figure, f"What each cluster does{more}, by when clusters wait for each other"

    save_figure(draw, path)
    return path
