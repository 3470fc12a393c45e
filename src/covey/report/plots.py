"""Figures of a model and of a plan; those of the studies are in ``figures``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from textwrap import wrap
from typing import Any

import matplotlib as mpl
import numpy as np
import polars as pl
from matplotlib.figure import Figure

from covey.reproduce.radon import Shrinkage
from covey.solvers.registry import direct, names

_ALONE, _OWN, _CLUSTER = "#b0b0b0", "#1f6fb4", "#d1495b"


def shrinkage_figure(found: Shrinkage, path: Path, *, title: str, clients: str, rows: str, unit: str) -> Path:
    """Draw the mean of each client alone and personalised, relative to its cluster, against its number of rows.

    ``clients`` and ``rows`` are the words for them, such as "counties" and "homes in the county".
    """
    tree, spec = found.model.hierarchy, found.model.spec
    cluster, k = spec.cluster or "cluster", tree.n_clusters
    columns = min(3, k)
    lines = -(-k // columns)
    with mpl.rc_context({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(3.7 * columns, 2.5 * lines + 1.3), layout="constrained")
        panels = np.atleast_1d(np.array(figure.subplots(lines, columns, sharex=True, sharey=True))).ravel()
        for j, panel in enumerate(panels):
            if j >= k:
                panel.set_visible(False)
                continue
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
            panel.set_title(f"{tree.cluster_ids[j]}: {len(counts)} {clients}", fontsize=11, loc="left")
            if j + columns >= k:
                panel.set_xlabel(f"{rows} (log scale)", fontsize=11)
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=11)
        figure.suptitle(title, fontsize=13, x=0.01, ha="left")
        figure.supylabel(f"mean minus that of the {cluster}'s model ({unit})", fontsize=11)
        figure.savefig(path, dpi=150)
    return path


_COLOURS = ("#1f6fb4", "#2a9d8f", "#8d6a9f", "#e2a03f", "#d1495b")
_SMALLEST_GAP = 1e-14


def racer(name: str) -> tuple[str, str, str]:
    """Colour, marker and line of a solver, by its place among them; a variant of it has a broken line."""
    solver, *variant = name.split()
    if solver not in names():
        return "#606060", "", ":"
    at = names().index(solver)
    return _COLOURS[at % len(_COLOURS)], "os^D"[at % 4] if solver in direct() else "", "--" if variant else "-"


def race_figure(told: Mapping[str, pl.DataFrame], path: Path, *, accuracy: float) -> Path:
    """Gap to the minimum against exchanges, measured, a line for each solver; both axes are logarithmic."""
    with mpl.rc_context({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(8.5, 5.2), layout="constrained")
        panel = figure.subplots()
        for name, history in told.items():
            color, marker, line = racer(name)
            exchanges, gap = history["exchanges"].to_numpy(), history["gap"].to_numpy()
            # A gap below rounding has no logarithm worth drawing; an exchange is counted from one to have a place on the axis.
            kept = np.maximum(gap, _SMALLEST_GAP)
            panel.plot(exchanges + 1, kept, color=color, marker=marker, linestyle=line, markersize=5, linewidth=1.6, label=name)
        panel.axhline(accuracy, color="#b0b0b0", linewidth=1.0, linestyle=":", zorder=0)
        panel.set_xscale("log")
        panel.set_yscale("log")
        panel.xaxis.set_major_formatter("{x:,.0f}")
        middle = panel.get_yaxis_transform()
        panel.text(0.5, accuracy, f"gap {accuracy:g}", transform=middle, fontsize=10, ha="center", va="bottom")
        panel.set_xlabel("exchanges of a client, plus one (log scale)")
        panel.set_ylabel("objective above its minimum, share of that at zero")
        figure.legend(loc="outside lower center", ncols=len(told), frameon=False, fontsize=10)
        figure.suptitle(_finding(told, accuracy), fontsize=12.5, x=0.01, ha="left")
        figure.savefig(path, dpi=150)
    return path


def _finding(told: Mapping[str, pl.DataFrame], accuracy: float) -> str:
    """Who gets there, in how many exchanges."""
    there: dict[str, Any] = {
        name: history.filter(pl.col("gap") <= accuracy)["exchanges"].min() for name, history in told.items()
    }
    got = [f"{name} {count:,}" for name, count in there.items() if count is not None]
    missed = [name for name, count in there.items() if count is None]
    words = f"Exchanges to a gap of {accuracy:g}: {', '.join(got)}" if got else f"None reaches a gap of {accuracy:g}"
    rest = f"; not reached here by {', '.join(missed)}" if got and missed else ""
    return "\n".join(wrap(words + rest, 88))
