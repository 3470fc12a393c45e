"""Figures. Matplotlib is imported here only."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from covey._typing import Floats
from covey.model import Model

_ALONE, _OWN, _CLUSTER = "#b0b0b0", "#1f6fb4", "#d1495b"


def shrinkage_figure(model: Model, local: Floats, path: Path, *, term: int = 0, unit: str, title: str) -> Path:
    """Local, cluster and personalised estimates of one term against the number of rows, a panel for each cluster.

    Rows of ``local`` that are NaN (clients with too little data for a fit of their own) show no local estimate.
    """
    tree = model.hierarchy
    k = tree.n_clusters
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
            rows, alone, own = model.rows[units], local[units, term], model.theta[units, term]
            panel.vlines(rows, alone, own, color=_ALONE, linewidth=0.7, zorder=1)
            panel.scatter(rows, alone, s=16, facecolors="white", edgecolors=_ALONE, linewidths=1.0, zorder=2, label="alone")
            panel.axhline(model.w[j, term], color=_CLUSTER, linewidth=1.6, zorder=3, label="cluster")
            panel.scatter(rows, own, s=14, color=_OWN, zorder=4, label="personalised")
            panel.set_xscale("log")
            panel.xaxis.set_major_formatter("{x:g}")
            panel.set_title(f"{tree.cluster_ids[j]}: {len(rows)} clients", fontsize=11, loc="left")
            if j + columns >= k:
                panel.set_xlabel("rows of the client (log scale)", fontsize=11)
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=11)
        figure.suptitle(title, fontsize=13, x=0.01, ha="left")
        figure.supylabel(f"{model.terms[term]} ({unit})", fontsize=11)
        figure.savefig(path, dpi=150)
    return path
