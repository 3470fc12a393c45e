"""Figures of ``docs/explanation/shrinkage.md``, from the bundled survey: ``python docs/figures/shrinkage.py``."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import numpy as np
import polars as pl
from matplotlib.figure import Figure

from covey import HierarchicalRegressor, datasets

HERE = Path(__file__).parent
ALONE, OWN, CLUSTER = "#8a8a8a", "#1f6fb4", "#d1495b"
STYLE = {
    "font.size": 11,
    "axes.titlepad": 12,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.hashsalt": "covey",
    "svg.fonttype": "path",
}
GAMMAS = np.geomspace(0.05, 500, 41)


def survey() -> pl.DataFrame:
    return datasets.load_radon()


def learned(homes: pl.DataFrame) -> HierarchicalRegressor:
    return HierarchicalRegressor(formula="log_radon ~ 1 + (1 | state/county)", tests=False).fit(homes)


def given(homes: pl.DataFrame, gamma: float, lam: float) -> HierarchicalRegressor:
    groups = {"client": "county", "cluster": "state"}
    return HierarchicalRegressor(formula="log_radon ~ 1", **groups, gamma=gamma, lam=lam).fit(homes)


def counties(homes: pl.DataFrame, model: HierarchicalRegressor) -> pl.DataFrame:
    """A row for each county: homes, mean of its own homes, estimate, and the estimate of its state."""
    own = homes.group_by("state", "county").agg(homes=pl.len(), alone=pl.col("log_radon").mean())
    fitted = model.coef_frame("client").select(county="client", estimate="estimate")
    upper = model.coef_frame("cluster").select(state="cluster", upper="estimate")
    return own.join(fitted, on="county").join(upper, on="state").sort("county")


def held_out(homes: pl.DataFrame, lam: float) -> list[float]:
    """Root mean squared error on every fifth home of each county, at each of ``GAMMAS``."""
    kept = pl.int_range(pl.len()).over("county") % 5 != 4
    train, test = homes.filter(kept), homes.filter(~kept)
    errors = []
    for gamma in GAMMAS:
        model = HierarchicalRegressor(formula="log_radon ~ 1", client="county", cluster="state", gamma=gamma, lam=lam).fit(
            train
        )
        errors.append(float(np.sqrt(np.mean((test["log_radon"].to_numpy() - model.predict(test)) ** 2))))
    return errors


def minnesota(table: pl.DataFrame) -> Figure:
    part = table.filter(state="MN")
    figure = Figure(figsize=(8, 4.2), layout="constrained")
    panel = figure.subplots()
    panel.vlines(part["homes"], part["alone"], part["estimate"], color=ALONE, linewidth=0.8, zorder=1)
    panel.scatter(part["homes"], part["alone"], s=22, facecolors="white", edgecolors=ALONE, zorder=2, label="county alone")
    panel.scatter(part["homes"], part["estimate"], s=20, color=OWN, zorder=3, label="hierarchical estimate")
    panel.axhline(part["upper"][0], color=CLUSTER, linewidth=1.6, zorder=0, label="Minnesota")
    panel.set_xscale("log")
    panel.xaxis.set_major_formatter("{x:g}")
    panel.set_xlabel("homes measured in the county (log scale)")
    panel.set_ylabel("mean log radon")
    panel.legend(frameon=False)
    panel.set_title("Counties with few homes move most", loc="left")
    return figure


def weight(table: pl.DataFrame, ratio: float) -> Figure:
    figure = Figure(figsize=(8, 3.8), layout="constrained")
    panel = figure.subplots()
    rows = np.geomspace(1, 1000, 200)
    panel.plot(rows, rows / (rows + ratio), color=OWN, linewidth=1.8)
    panel.plot(table["homes"], table["homes"] / (table["homes"] + ratio), "|", color=ALONE, markersize=9)
    panel.axvline(ratio, color=CLUSTER, linewidth=1.2, linestyle="--")
    panel.text(ratio * 1.08, 0.06, f"{ratio:.1f} homes: half and half", color=CLUSTER)
    panel.set_xscale("log")
    panel.xaxis.set_major_formatter("{x:g}")
    panel.set_ylim(0, 1)
    panel.set_xlabel("homes measured in the county (log scale)")
    panel.set_ylabel("weight of the county's own mean")
    panel.set_title("The weight of a county's own mean grows with its homes", loc="left")
    return figure


def path(homes: pl.DataFrame, ratio: float, lam: float) -> Figure:
    some = homes.filter(state="MN").group_by("county").len().sort("len", "county")["county"].to_list()[::9]
    tracks = []
    for gamma in GAMMAS:
        model = HierarchicalRegressor(formula="log_radon ~ 1", client="county", cluster="state", gamma=gamma, lam=lam).fit(
            homes
        )
        place = {name: at for at, name in enumerate(model.clients_.tolist())}
        tracks.append([model.coef_[place[name], 0] for name in some])
    figure = Figure(figsize=(8, 6), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    upper.plot(GAMMAS, tracks, color=OWN, linewidth=1.2)
    upper.set_ylabel("mean log radon")
    upper.set_title("Ten counties of Minnesota, from alone (left) to the mean of the state (right)", loc="left")
    lower.plot(GAMMAS, held_out(homes, lam), color=OWN, linewidth=1.8)
    lower.set_ylabel("held-out error")
    lower.set_xlabel("penalty gamma (log scale)")
    lower.set_xscale("log")
    lower.xaxis.set_major_formatter("{x:g}")
    for panel in (upper, lower):
        panel.axvline(ratio, color=CLUSTER, linewidth=1.2, linestyle="--")
    lower.text(ratio * 1.1, lower.get_ylim()[1], f"learned by REML: {ratio:.1f}", color=CLUSTER, va="top")
    return figure


def main() -> None:
    homes = survey()
    model = learned(homes)
    table, found = counties(homes, model), model.components_
    ratio, lam = found.residual / found.client.sd.item() ** 2, found.residual / found.cluster.sd.item() ** 2
    with mpl.rc_context(STYLE):
        figures = {"minnesota": minnesota(table), "weight": weight(table, ratio), "path": path(homes, ratio, lam)}
        for name, figure in figures.items():
            figure.savefig(HERE / f"shrinkage-{name}.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
