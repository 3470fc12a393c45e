"""Pictures that check a model: residuals, calibration, the search of a solver, and what a federated run sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import numpy as np
import polars as pl
from matplotlib.colors import ListedColormap
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter
from scipy import special

from covey._typing import Floats, Ints
from covey.errors import DataError, SolverError, one_of
from covey.fitting.planning import example_timelines, plan, size
from covey.model.model import Model
from covey.model.new_rows import Observed
from covey.model.residuals import residuals as residuals_of
from covey.report.pictures import MANY, band, log_counts, many, mean_of, percent, plural, words
from covey.report.plots import draw_timeline, shown_clusters
from covey.report.style import Draw, Theme, room_on
from covey.solvers.clock import MODES, Mode
from covey.tables.rows import GroupedData

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RESIDUAL_PLOTS = ("fitted", "quantile", "group")
_POINTS = 2000  # rows that are drawn one by one
_GROUPS = 30


def residuals(model: Model, rows: Observed, kind: str = "fitted", seed: int = 0) -> Draw:
    """Quantile residuals against fitted values, against the normal distribution, or by client."""
    if kind not in RESIDUAL_PLOTS:
        raise one_of("kind", kind, RESIDUAL_PLOTS)
    found = residuals_of(model, rows, "quantile" if model.learned is not None else "pearson", seed)
    if kind == "fitted":
        return _against_fitted(model, rows, found)
    return _against_normal(found) if kind == "quantile" else _by_group(model, rows, found)


def bins_of(values: Floats, most: int) -> list[Ints]:
    """Positions of the values in at most ``most`` bins of about equal size, in order; equal values share a bin.

    >>> [len(part) for part in bins_of(np.array([0.1, 0.9, 0.1, 0.1, 0.9]), 5)]
    [3, 2]
    """
    near = np.round((values - values.min()) / max(np.ptp(values), 1e-300), 9)  # equal but for rounding
    order = np.argsort(near, kind="stable")
    near, n = near[order], len(order)
    wanted = (np.arange(1, most) * n) // most
    low, high = (np.searchsorted(near, near[wanted], side=side) for side in ("left", "right"))
    cuts = np.unique(np.where(wanted - low <= high - wanted, low, high))
    return np.split(order, cuts[(cuts > 0) & (cuts < n)])


def _against_fitted(model: Model, rows: Observed, found: Floats) -> Draw:
    fitted = model.problem.loss.mean(model.margin_of(rows.X, rows.chosen, rows.offset))
    parts = bins_of(fitted, min(20, max(1, len(fitted) // 15)))
    middle, centre = (np.array([np.mean(values[part]) for part in parts]) for values in (fitted, found))

    def draw(ax: Axes, theme: Theme) -> str:
        if len(found) <= _POINTS:
            ax.scatter(fitted, found, s=12, color=theme.client, alpha=0.5, linewidths=0)
        else:
            ramp = ListedColormap(mpl.colormaps[theme.ramp](np.linspace(*theme.ends, 256)))  # single rows are visible too
            drawn = ax.hexbin(fitted, found, gridsize=60, mincnt=1, bins="log", cmap=ramp, linewidths=0.1)
            ax.figure.colorbar(drawn, ax=ax, label="rows (log scale)")
        ax.axhline(0.0, color=theme.ink, linewidth=0.9)
        ax.plot(middle, centre, color=theme.cluster, linewidth=2.0, label="mean of rows with similar predictions")
        ax.set_xlabel(f"predicted {mean_of(model)}")
        ax.set_ylabel("residual (standard normal if the model is right)")
        ax.legend()
        worst = int(np.abs(centre).argmax())
        return (
            f"The mean residual is between {centre.min():.2f} and {centre.max():.2f} in {many(len(parts), 'bin')} of "
            f"predictions; it is farthest from zero near {middle[worst]:.3g}"
        )

    return draw


def _against_normal(found: Floats) -> Draw:
    ordered, n = np.sort(found), len(found)
    normal = special.ndtri((np.arange(1, n + 1) - 0.5) / n)
    apart = np.abs(special.ndtr(ordered) - (np.arange(1, n + 1) - 0.5) / n).max()
    beyond = float((np.abs(found) > 3).mean())

    def draw(ax: Axes, theme: Theme) -> str:
        keep = np.unique(
            np.r_[np.arange(min(50, n)), np.linspace(0, n - 1, min(n, 500)).astype(int), np.arange(max(0, n - 50), n)]
        )
        ends = [min(normal[0], ordered[0]), max(normal[-1], ordered[-1])]
        ax.plot(ends, ends, color=theme.cluster, linewidth=1.4, label="normal distribution")
        ax.scatter(normal[keep], ordered[keep], s=14, color=theme.client, zorder=3, label="rows")
        ax.set_xlabel("quantile of the normal distribution (standard deviations)")
        ax.set_ylabel("quantile of the residuals (standard deviations)")
        ax.legend()
        return (
            f"The distribution of residuals is within {100 * apart:.1f} percentage points of the normal one; "
            f"{100 * beyond:.2g}% are beyond 3 standard deviations (0.27% expected)"
        )

    return draw


def group_scores(model: Model, rows: Observed, found: Floats) -> tuple[Floats, Floats]:
    """The mean residual of each client times the root of its number of rows, and that number; NaN without rows."""
    seen, n = rows.chosen.client >= 0, model.hierarchy.n_clients
    count = np.bincount(rows.chosen.client[seen], minlength=n).astype(float)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.bincount(rows.chosen.client[seen], found[seen], n) / np.sqrt(count), count


def _by_group(model: Model, rows: Observed, found: Floats) -> Draw:
    client, _ = words(model)
    spread = np.array([])
    ids = rows.chosen.client
    n = model.hierarchy.n_clients
    count = np.bincount(ids[ids >= 0], minlength=n)
    mean = np.bincount(ids[ids >= 0], found[ids >= 0], n) / np.maximum(count, 1)
    square = np.bincount(ids[ids >= 0], found[ids >= 0] ** 2, n) / np.maximum(count, 1)
    spread = np.sqrt(np.maximum(square - mean**2, 0.0))
    use = count >= 5

    def draw(ax: Axes, theme: Theme) -> str:
        if n <= _GROUPS:
            parts = [found[ids == at] for at in range(n)]
            boxes = ax.boxplot(
                parts, vert=True, patch_artist=True, widths=0.6, flierprops={"markersize": 3, "markeredgecolor": theme.faint}
            )
            for box in boxes["boxes"]:
                box.set(facecolor=theme.client, alpha=0.5, edgecolor=theme.ink)
            for part in ("whiskers", "caps", "medians"):
                for line in boxes[part]:
                    line.set_color(theme.ink)
            names = [str(name) for name in model.hierarchy.client_ids.to_list()]
            ax.set_xticks(range(1, n + 1), names, rotation=60 if n > 8 else 0, ha="right" if n > 8 else "center")
            ax.axhline(0.0, color=theme.cluster, linewidth=1.2)
            ax.set_xlabel(client)
            ax.set_ylabel("residual (standard normal if the model is right)")
        else:
            if use.sum() <= MANY:
                ax.scatter(count[use], spread[use], s=18, color=theme.client, alpha=0.75, label=f"one {client}")
            else:
                band(
                    ax, count[use].astype(float), spread[use], theme.client, f"middle 80% of {plural(client)}, and median", 0.45
                )
            ax.axhline(1.0, color=theme.cluster, linewidth=1.2, label="expected with many rows")
            log_counts(ax, count[use].astype(float))
            ax.set_xlabel(f"rows of the {client}" + (" (log scale)" if ax.get_xscale() == "log" else ""))
            ax.set_ylabel("standard deviation of the residuals (near 1 with many rows)")
            ax.legend()
        if not use.any():
            return f"No {client} has 5 rows or more, so spreads of residuals are not compared"
        low, high = spread[use].min(), spread[use].max()
        return (
            f"Residuals have a standard deviation between {low:.2f} and {high:.2f} in "
            f"{many(int(use.sum()), client)} with 5 rows or more; with many rows it should be near 1"
        )

    return draw


def calibration_table(model: Model, rows: Observed, bins: int = 10) -> pl.DataFrame:
    """Predicted and observed shares of the second class, with 95% intervals (Wilson), in bins of about equally many rows."""
    if model.classes is None:
        raise SolverError(f"Calibration is for classifiers; this is a {model.spec.loss.title} model. Look at its residuals.")
    p = model.problem.loss.mean(model.margin_of(rows.X, rows.chosen, rows.offset))
    return shares(p, rows.y, rows.weights, bins)


def shares(p: Floats, y: Floats, total: Floats, bins: int = 10) -> pl.DataFrame:
    """The table of :func:`calibration_table` from probabilities, responses and weights ``(N,)``."""
    table = []
    for part in (part for part in bins_of(p, min(bins, len(p))) if total[part].sum() > 0):
        n, z = float(total[part].sum()), 1.959964
        predicted, observed = (float(np.average(values[part], weights=total[part])) for values in (p, y))
        centre = (observed + z * z / (2 * n)) / (1 + z * z / n)
        half = z / (1 + z * z / n) * np.sqrt(observed * (1 - observed) / n + z * z / (4 * n * n))
        table.append((predicted, observed, centre - half, centre + half, n))
    return pl.DataFrame(table, schema=["predicted", "observed", "lower", "upper", "trials"], orient="row")


def calibration(model: Model, rows: Observed, bins: int = 10) -> Draw:
    """Observed against predicted probabilities."""
    return calibration_of(calibration_table(model, rows, bins), model)


def calibration_of(found: pl.DataFrame, model: Model) -> Draw:
    """The picture of :func:`calibration`, from its table."""

    def draw(ax: Axes, theme: Theme) -> str:
        x, y = found["predicted"].to_numpy(), found["observed"].to_numpy()
        ends = [min(x.min(), y.min()) * 0.9, min(1.0, max(x.max(), found["upper"].max()) * 1.05)]
        ax.plot(ends, ends, color=theme.faint, linewidth=1.2, linestyle="--", label="perfect")
        bars = np.stack([y - found["lower"].to_numpy(), found["upper"].to_numpy() - y])
        ax.errorbar(
            x,
            y,
            yerr=np.maximum(bars, 0),
            fmt="o",
            color=theme.client,
            capsize=3,
            label="rows with similar predictions, with 95% intervals",
        )
        ax.set_xlabel(f"predicted {mean_of(model)}")
        ax.set_ylabel("observed share")
        ax.legend()
        apart = np.abs(x - y)
        inside = int(((x >= found["lower"].to_numpy()) & (x <= found["upper"].to_numpy())).sum())
        return (
            f"Predictions differ from observed shares by at most {100 * apart.max():.1f} percentage points; the interval "
            f"includes the prediction in {inside} of {many(len(x), 'bin')}"
        )

    return draw


def convergence(model: Model) -> Draw:
    """The objective and the norm of its gradient at each step of the solver."""
    history = model.history
    if history is None or len(history) < 2:
        raise SolverError(
            "This model has no history of its solver: a fit that learns variances keeps none, an exact solver takes one step, "
            "and files do not contain it. Fit with given penalties and an iterative solver, and draw before saving."
        )
    norm, step = history["gradient_norm"].to_numpy(), history["iteration"].to_numpy()

    def draw(ax: Axes, theme: Theme) -> str:
        least = 1e-18 * float(norm.max()) or 1e-300
        ax.plot(step, np.maximum(norm, least), color=theme.client, marker="o", markersize=4, label="norm of the gradient")
        gap = history["certified_gap"].to_numpy().astype(float)
        both = np.isfinite(gap).any()
        if both:
            ax.plot(step, np.maximum(gap, least), color=theme.cluster, linestyle="--", label="certified gap of the objective")
        ax.set_yscale("log")
        ax.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
        ax.xaxis.set_major_formatter("{x:,.0f}")
        ax.set_xlabel("iteration")
        low = bool(norm.min() < least or (both and np.nanmin(gap) < least))
        drawn = f"log scale; values below {least:.0e} are drawn there" if low else "log scale"
        ax.set_ylabel(f"norm of the gradient{' and gap' if both else ''} ({drawn})")
        ax.legend()
        end = model.convergence
        state = "converged" if end.converged else "did not converge"
        return (
            f"{end.solver} {state}: the gradient's norm fell from {norm[0]:.2g} to {norm[-1]:.2g} in "
            f"{many(end.iterations, 'iteration')}"
        )

    return draw


def timeline(model: Model, data: GroupedData, mode: Mode = "asynchronous") -> Draw:
    """What each cluster does in the randomised algorithm ``l2gd`` on these rows, by the clock of :mod:`covey.solvers.clock`."""
    if mode not in MODES:
        raise one_of("mode", mode, MODES)
    found = example_timelines(data, plan(data, model.spec), model.spec.seed)
    if mode not in found:
        raise DataError("Single iterations are too short to be drawn here; choose mode='rounds' or mode='asynchronous'.")
    names = [str(label) for label in data.hierarchy.cluster_ids.to_list()]
    _, cluster = words(model)

    def draw(ax: Axes, theme: Theme) -> str:
        shown = shown_clusters(len(names), max(4, min(30, int(room_on(ax, 140) / 10))))
        draw_timeline(ax, found[mode], names, shown, (theme.client, theme.cluster, theme.idle, theme.warning))
        ax.set_xlabel("seconds, by the speeds that covey plan takes by default")
        ax.set_ylabel(cluster if len(shown) == len(names) else f"{cluster} ({len(shown)} of {len(names)})")
        ax.legend()
        parts = found[mode].frame
        waits = float((parts["end"] - parts["start"]).filter(parts["kind"] == "waiting").sum())
        share = waits / max(len(names) * found[mode].seconds, 1e-300)
        others = ", ".join(f"{each} {one.seconds:.3g} s" for each, one in found.items() if each != mode)
        beside = f" ({others})" if others else ""
        return (
            f"A run of about five exchanges takes {found[mode].seconds:.3g} s in the mode {mode!r}{beside}; on average a "
            f"{cluster} waits {percent(share)} of the time"
        )

    return draw


def exchanges(run: Sequence[Mapping[str, Any]]) -> Draw:
    """Bytes that a federated run sent, by kind of message, to the sites and from them."""
    if not run:
        raise SolverError(
            "This model has no record of exchanges. The model that the operator of a fit across sites saved has one; or pass "
            "the exchanges of a run."
        )
    labels = list(dict.fromkeys(str(each["label"]) for each in run))
    sums = {
        label: [sum(float(each[way]) for each in run if each["label"] == label) for way in ("down", "up")] for label in labels
    }
    times = {label: sum(each["label"] == label for each in run) for label in labels}

    def draw(ax: Axes, theme: Theme) -> str:
        place = np.arange(len(labels))
        pairs = np.array([sums[label] for label in labels])
        ax.hlines(place, pairs.min(axis=1).clip(1), pairs.max(axis=1).clip(1), color=theme.faint, linewidth=1.0, zorder=1)
        for way, (name, colour, marker) in enumerate(
            (("to the sites", theme.cluster, "s"), ("from the sites", theme.client, "o"))
        ):
            ax.scatter(pairs[:, way].clip(1), place, s=48, color=colour, marker=marker, label=name, zorder=2)
        ax.set_yticks(place, [f"{label} ({times[label]}x)" for label in labels])
        ax.tick_params(axis="y", labelsize=9)
        ax.set_ylim(len(labels) - 0.4, -0.6)
        ax.set_xscale("log")
        ax.xaxis.set_major_locator(LogLocator(subs=(1.0,), numticks=5))
        ax.xaxis.set_major_formatter(lambda value, _: size(value))
        ax.xaxis.set_minor_formatter(NullFormatter())
        ax.grid(axis="x", color=theme.idle, linewidth=0.8)
        ax.set_axisbelow(True)
        ax.set_xlabel("bytes, all sites together (log scale)")
        ax.set_ylabel("message, and how often")
        ax.legend()
        down, up = (sum(pair[at] for pair in sums.values()) for at in (0, 1))
        top = max(labels, key=lambda label: sum(sums[label]))
        share = sum(sums[top]) / max(down + up, 1.0)
        return (
            f"{many(len(run), 'exchange')} sent {size(down)} to the sites and {size(up)} back; "
            f"{percent(share)} of it is {top!r}"
        )

    return draw
