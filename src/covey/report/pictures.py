"""Pictures of a fitted model: shrinkage, deviations, effects of terms, shares of variance and reliability.

Each function returns what draws the picture (:data:`.Draw`). Its title is computed from the model. Beyond a few hundred groups
single marks become bands: quantiles of groups with similar numbers of rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from covey._typing import Floats
from covey.errors import DataError, SolverError, did_you_mean
from covey.model.client_means import ClientMeans, client_means
from covey.model.means import estimates, grid_of
from covey.model.model import Model
from covey.model.new_rows import Observed
from covey.model.posterior import quantile
from covey.report.style import Draw, Theme, room_on
from covey.tables.design import Formula, numeric
from covey.tables.scaling import Scaled
from covey.tree.hierarchy import Level

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MANY = 600  # groups; more are drawn as bands
_LINES = 60  # clients whose lines are drawn one by one
_CLUSTER_LINES = 24
_BINS = 24


def words(model: Model) -> tuple[str, str]:
    """The user's words for a client and a cluster: the names of their columns."""
    return model.spec.client or "client", model.spec.cluster or "cluster"


def plural(noun: str) -> str:
    """The plural of a noun, by the rules of regular ones.

    >>> plural("county"), plural("shop"), plural("branch"), plural("day")
    ('counties', 'shops', 'branches', 'days')
    """
    if noun.endswith("y") and noun[-2:-1].lower() not in "aeiou":
        return noun[:-1] + "ies"
    return noun + ("es" if noun.endswith(("s", "x", "ch", "sh")) else "s")


def many(number: int, noun: str) -> str:
    """A number with its noun."""
    return f"{number:,} {noun if number == 1 else plural(noun)}"


def response_of(model: Model) -> str:
    """The name of the response."""
    formula = model.problem.formula
    return "response" if formula is None or formula.response is None else formula.response


def scale_of(model: Model) -> str:
    """The scale of the linear predictor, in words."""
    link = model.problem.loss.link
    words = {"identity": f"units of {response_of(model)}", "logit": "log-odds", "log": "units of the log of the mean"}
    return words.get(link, "units of the linear predictor") if link is not None else "units of the linear predictor"


def percent(share: float) -> str:
    """A share as text."""
    return f"{100 * share:.0f}%"


def shrinkage(model: Model, rows: Observed | None = None) -> Draw:
    """Each client's own mean and its personalised mean, relative to the mean by its cluster's model, against its rows."""
    return shrinkage_of(client_means(model, rows), model)


def shrinkage_of(found: ClientMeans, model: Model) -> Draw:
    """The picture of :func:`shrinkage`, from the means."""
    client, cluster = words(model)
    above = cluster if model.hierarchy.n_clusters > 1 else "global"
    use = np.isfinite(found.alone) & (found.rows > 0)
    alone, own, n = (values[use] for values in (found.alone - found.cluster, found.own - found.cluster, found.rows))

    def draw(ax: Axes, theme: Theme) -> str:
        ax.axhline(0.0, color=theme.cluster, linewidth=1.6, zorder=1, label=f"by the {above} model")
        if len(n) <= MANY:
            ax.vlines(n, alone, own, color=theme.faint, linewidth=0.7, zorder=1)
            ax.scatter(
                n, alone, s=22, facecolors="none", edgecolors=theme.faint, linewidths=1.1, label=f"{client} alone", zorder=2
            )
            ax.scatter(n, own, s=16, color=theme.client, label="personalised", zorder=3)
        else:
            for values, colour, label, alpha in (
                (alone, theme.faint, f"{client} alone (middle 80%)", 0.45),
                (own, theme.client, "personalised (middle 80%)", 0.6),
            ):
                band(ax, n, values, colour, label, alpha)
        log_counts(ax, n)
        ax.set_xlabel(f"rows of the {client} (log scale)" if ax.get_xscale() == "log" else f"rows of the {client}")
        of = f"mean {response_of(model)}" if model.classes is None else f"share of {model.classes.tolist()[1]!r}"
        ax.set_ylabel(f"{of}, minus that by the {above} model")
        ax.legend()
        return _shrinkage_title(n, alone, own, client, above)

    return draw


def _shrinkage_title(n: Floats, alone: Floats, own: Floats, client: str, above: str) -> str:
    if not len(n):
        return f"No {client} has rows of its own, so there is nothing to compare"

    def moved(which: Any) -> float:
        return float(1.0 - (alone[which] * own[which]).sum() / max(float((alone[which] ** 2).sum()), 1e-300))

    low, high = np.quantile(n, [0.25, 0.75])
    if n.min() == n.max():
        return f"On average, own means of {plural(client)} move {percent(moved(slice(None)))} of the way to the {above} model"
    if low == high:  # most have equally many rows
        few = n <= low if low < n.max() else n < low
        return (
            f"Means of {plural(client)} with at most {many(int(n[few].max()), 'row')} move {percent(moved(few))} of the way to "
            f"the {above} model, those of others {percent(moved(~few))}"
        )
    few, most = n <= low, n >= high
    return (
        f"The quarter with the fewest rows (at most {n[few].max():,.0f}) moves {percent(moved(few))} of the way to the {above} "
        f"model, the quarter with the most (at least {n[most].min():,.0f}) {percent(moved(most))}"
    )


def log_counts(ax: Axes, n: Floats) -> None:
    """A log scale for numbers of rows that differ much."""
    if len(n) and n.max() > 8 * max(n.min(), 1.0):
        ax.set_xscale("log")
        ax.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if n.max() < 300 * max(n.min(), 1.0) else (1.0,)))
        ax.xaxis.set_major_formatter("{x:,.0f}")
        ax.xaxis.set_minor_formatter(NullFormatter())
    elif len(n):
        ax.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        if n.min() == n.max():
            ax.set_xlim(float(n[0]) - 1.0, float(n[0]) + 1.0)


def _bins(n: Floats) -> list[Any]:
    """Groups of clients with similar numbers of rows."""
    edges = np.unique(np.quantile(n, np.linspace(0, 1, _BINS + 1)))
    if len(edges) < 3:
        edges = np.array([n.min(), n.max() + 1])
    where = np.clip(np.searchsorted(edges, n, side="right") - 1, 0, len(edges) - 2)
    return [which for which in (where == at for at in range(len(edges) - 1)) if which.any()]


def band(ax: Axes, n: Floats, values: Floats, colour: str, label: str, alpha: float) -> None:
    """The middle 80% of values in bins of ``n``, and their median."""
    groups = _bins(n)
    middle = np.array([np.median(n[which]) for which in groups])
    low, centre, high = (np.array([np.quantile(values[which], at) for which in groups]) for at in (0.1, 0.5, 0.9))
    if len(middle) == 1:  # all have equally many rows
        middle = middle[0] + np.array([-0.3, 0.3])
        low, centre, high = (np.repeat(each, 2) for each in (low, centre, high))
    ax.fill_between(middle, low, high, color=colour, alpha=alpha, linewidth=0, label=label)
    ax.plot(middle, centre, color=colour, linewidth=1.4)


def caterpillar(model: Model, level: Level = "client", term: str | None = None, n: int = 15, coverage: float = 0.95) -> Draw:
    """Deviations of clients from their cluster, or of clusters from the global model, sorted, with intervals."""
    found = model.random_effects(level)
    if "conditional_variance" not in found.columns or found["conditional_variance"].null_count():
        raise SolverError("Intervals of deviations need learned variances and the sums of all clients; use the original fit.")
    terms = found["term"].unique(maintain_order=True).to_list()
    if not terms:
        raise DataError(f"No term varies by {level}, so there is nothing to draw.")
    term = terms[0] if term is None else term
    if term not in terms:
        raise DataError(f"No term {term!r} varies by {level}; {did_you_mean(term, terms)}")
    found = found.filter(term=term).sort("deviation")
    value, half = found["deviation"].to_numpy(), quantile(coverage) * np.sqrt(found["conditional_variance"].to_numpy())
    names = [str(name) for name in found[level].to_list()]
    client, cluster = words(model)
    noun, above = (
        (client, cluster if model.hierarchy.n_clusters > 1 else "global model")
        if level == "client"
        else (cluster, "global model")
    )
    apart = int((np.abs(value) > half).sum())

    def named(at: int) -> str:
        return f"{noun} {names[at]}" if names[at].isdigit() else names[at]

    what = "The intercept" if term == "Intercept" else f"The coefficient of {term}"
    title = (
        f"{what} differs from that of the {above} in {apart:,} of {many(len(value), noun)} (the interval excludes 0); the "
        f"highest is {named(-1)}, the lowest {named(0)}"
    )
    if value[0] == value[-1] == 0.0:
        title = f"No {noun} differs: the variance of {term} between {plural(noun)} is estimated as zero"

    def draw(ax: Axes, theme: Theme) -> str:
        room = room_on(ax, len(title))
        most = max(2, min(n, int((room / _LEAST - 3) / 2)))  # so many names have room above each other
        shown = np.arange(len(value))
        if len(value) > 2 * most + 3:  # the gap takes the room of three names
            shown = np.r_[np.arange(most), np.arange(len(value) - most, len(value))]
        place = np.arange(len(shown)) + (3 * (np.arange(len(shown)) >= most) if len(shown) < len(value) else 0)
        clear = np.abs(value[shown]) > half[shown]
        for which, colour in ((clear, theme.client), (~clear, theme.faint)):
            ax.errorbar(
                value[shown][which], place[which], xerr=half[shown][which], fmt="o", markersize=4, color=colour, elinewidth=1.2,
                label=f"interval {'excludes' if colour == theme.client else 'includes'} 0" if which.any() else None,
            )  # fmt: skip
        if len(shown) < len(value):
            more = f"{len(value) - len(shown):,} more between"
            box = {"facecolor": theme.paper, "edgecolor": "none", "pad": 2}
            middle = ax.get_yaxis_transform()
            ax.text(0.5, most + 1, more, transform=middle, ha="center", va="center", color=theme.faint, bbox=box)
        ax.axvline(0.0, color=theme.cluster, linewidth=1.2, zorder=0)
        ax.set_yticks(place, [name if len(name) <= 28 else name[:27] + "..." for name in np.array(names)[shown]])
        ax.tick_params(axis="y", labelsize=min(9.5, max(6.5, 0.8 * room / (place[-1] + 1.6))))
        ax.set_ylim(-0.8, place[-1] + 0.8)
        per = "" if term == "Intercept" else f" for a unit of {term}"
        ax.set_xlabel(f"{term}: deviation from the {above}, with {percent(coverage)} intervals ({scale_of(model)}{per})")
        ax.set_ylabel(noun)
        ax.legend()
        return title

    return draw


_LEAST = 9.0  # points from a name to the next one


def variance_shares(model: Model) -> Draw:
    """The shares of clusters, clients and residual in the variance of a row."""
    components = model.posterior.learned.components
    if not components.grouped or not np.isfinite(components.shares).all():
        raise SolverError("This model has no variance components to draw; fit it with groups and learned variances.")
    client, cluster = words(model)
    labels = [f"between {plural(cluster)}", f"between {plural(client)} of a {cluster}", "residual, within"]
    parts = [(label, share) for label, share in zip(labels, components.shares, strict=True) if share > 0 or label == labels[2]]
    if model.hierarchy.n_clusters == 1:
        parts = [(label.replace(" of a cluster", ""), share) for label, share in parts]

    def draw(ax: Axes, theme: Theme) -> str:
        colours = {labels[0]: theme.cluster, labels[1]: theme.client, labels[2]: theme.faint}
        for at, (label, share) in enumerate(parts):
            original = next(name for name in labels if name.startswith(label))
            ax.barh(at, 100 * share, color=colours[original], height=0.62)
            ax.text(100 * share + 1, at, f"{100 * share:.1f}%", va="center", color=theme.ink)
        ax.set_yticks(range(len(parts)), [label.replace(" of a ", "\nof a ") for label, _ in parts])
        ax.set_xlim(0, 108)
        ax.set_ylim(len(parts) - 0.4, -0.6)
        of = "a row" if model.problem.loss.reml else "the linear predictor and its residual"
        ax.set_xlabel(f"share of the variance of {of}, mean over rows (percent)")
        ax.set_ylabel("source of variation")
        largest = max(parts, key=lambda part: part[1])
        groups = sum(share for label, share in parts if label != labels[2])
        return f"Groups account for {percent(groups)} of the variance; the largest part is {largest[0]} ({percent(largest[1])})"

    return draw


def reliability(model: Model, term: str | None = None) -> Draw:
    """How much the rows of each client determine its coefficient, against its number of rows."""
    found = model.reliability()
    terms = found["term"].unique(maintain_order=True).to_list()
    if not terms:
        raise DataError("No term varies by client, so there is no reliability to draw.")
    term = terms[0] if term is None else term
    if term not in terms:
        raise DataError(f"No term {term!r} varies by client; {did_you_mean(term, terms)}")
    found = found.filter(term=term)
    n, share = found["rows"].to_numpy().astype(float), found["reliability"].to_numpy()
    client, _ = words(model)

    def draw(ax: Axes, theme: Theme) -> str:
        if len(n) <= MANY:
            ax.scatter(n, share, s=18, color=theme.client, alpha=0.75, label=f"one {client}")
        else:
            band(ax, n, share, theme.client, f"middle 80% of {plural(client)}, and median", 0.45)
        ax.axhline(0.5, color=theme.faint, linewidth=1.0, linestyle=":")
        log_counts(ax, n)
        ax.set_ylim(-0.02, 1.02)
        ax.set_xlabel(f"rows of the {client} (log scale)" if ax.get_xscale() == "log" else f"rows of the {client}")
        ax.set_ylabel(f"reliability of {term} (1: own rows only)")
        ax.legend()
        half = float((share >= 0.5).mean())
        enough = n[share >= 0.5]
        least = f"; the smallest of these has {many(int(enough.min()), 'row')}" if len(enough) else ""
        return f"Own rows determine at least half of {term} in {percent(half)} of {many(len(n), client)}{least}"

    return draw


def effect(model: Model, column: str, *, data: Any = None, at: Mapping[str, Any] | None = None, coverage: float = 0.95) -> Draw:
    """The predicted response along a column: global with a band, clusters as lines, clients as lines or as a band."""
    at = dict(at or {})
    design = model.design.inner if isinstance(model.design, Scaled) else model.design
    categories = design.levels.get(column) if isinstance(design, Formula) else None
    if column not in design.columns:
        raise DataError(f"There is no term with the column {column!r}; {did_you_mean(column, design.columns)}")
    if categories is None and column not in at:
        if data is None:
            raise DataError(
                f"The range of column {column!r} is not part of the model; pass data=, or at={{{column!r}: [low, high]}}."
            )
        from covey.problem.problem import as_frame

        values = numeric(as_frame(data), column)
        low, high = float(np.nanmin(values)), float(np.nanmax(values))
        at[column] = (
            np.unique(values[np.isfinite(values)]).tolist()
            if len(np.unique(values)) <= 2
            else np.linspace(low, high, 60).tolist()
        )
    elif categories is None and len(at[column]) == 2:
        low, high = sorted(map(float, at[column]))
        at[column] = np.linspace(low, high, 60).tolist()
    grid = grid_of(model, [column], at, data)
    loss, x = model.problem.loss, grid.labels[column].to_list()
    lines = {level: loss.mean(grid.L @ part.T) for level, part in (("client", model.theta), ("cluster", model.w))}
    centre = loss.mean(grid.L @ model.wbar)
    interval = None
    if model.learned is not None:
        found = estimates(model, grid.labels, grid.L, coverage=coverage)
        interval = loss.mean(found["lower"].to_numpy()), loss.mean(found["upper"].to_numpy())
    client, cluster = words(model)
    k = model.hierarchy.n_clusters

    def draw(ax: Axes, theme: Theme) -> str:
        place = np.arange(len(x)) if categories is not None else np.asarray(x, dtype=float)
        own = lines["client"]
        if own.shape[1] <= _LINES:
            ax.plot(place, own, color=theme.client, linewidth=0.7, alpha=0.6)
            ax.plot([], [], color=theme.client, linewidth=0.9, label=f"each {client}")
        else:
            low, high = np.quantile(own, [0.1, 0.9], axis=1)
            ax.fill_between(
                place, low, high, color=theme.client, alpha=0.28, linewidth=0, label=f"middle 80% of {plural(client)}"
            )
        if 1 < k <= _CLUSTER_LINES:
            ax.plot(place, lines["cluster"], color=theme.cluster, linewidth=1.1, alpha=0.85)
            ax.plot([], [], color=theme.cluster, label=f"each {cluster}")
        elif k > 1:
            low, high = np.quantile(lines["cluster"], [0.1, 0.9], axis=1)
            ax.fill_between(
                place, low, high, color=theme.cluster, alpha=0.35, linewidth=0, label=f"middle 80% of {plural(cluster)}"
            )
        if interval is not None:
            ax.fill_between(
                place, *interval, color=theme.overall, alpha=0.18, linewidth=0, label=f"global, {percent(coverage)} interval"
            )
        ax.plot(place, centre, color=theme.overall, linewidth=2.4, label="global")
        if categories is not None:
            ax.set_xticks(place, [str(value) for value in x])
        ax.set_xlabel(column)
        ax.set_ylabel(f"predicted {mean_of(model)}")
        ax.legend()
        change = centre[-1] - centre[0]
        up = (own[-1] > own[0]).mean() if own.shape[1] else np.nan
        agree = up if change > 0 else 1 - up
        towards = "rises" if change > 0 else "falls"
        agreement = f"; it {towards} in {percent(agree)} of {plural(client)}" if own.shape[1] > 1 and np.isfinite(agree) else ""
        if abs(change) <= 1e-9 * max(float(np.abs(centre).max()), 1e-300):
            return f"{sentence(mean_of(model))} does not depend on {column} in the global model"
        ends = f"from {column} = {_short(x[0])} to {_short(x[-1])}"
        return f"{sentence(mean_of(model))} {towards} by {abs(change):.3g} {ends} in the global model{agreement}"

    return draw


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def sentence(text: str) -> str:
    """The text as the beginning of a sentence; names of columns stay as they are."""
    return f"P{text[1:]}" if text.startswith("probability of ") else text


def mean_of(model: Model) -> str:
    """What a prediction is, in the user's words."""
    if model.classes is not None:
        return f"probability of {model.classes.tolist()[1]!r}"
    return response_of(model)
