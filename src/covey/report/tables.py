"""Rich tables: models side by side, and how far clients are shrunk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from rich.table import Table

from covey._typing import Floats
from covey.losses import family_of
from covey.model.model import Model


def comparison_table(errors: Mapping[str, float], family: str, rows: int) -> Table:
    """Held-out error of each model, the best in bold."""
    best = min(errors.values())
    table = Table(title=f"Held-out error on {rows:,} rows", title_justify="left", title_style="bold")
    table.add_column("model")
    table.add_column(family_of(family).error_name, justify="right")
    table.add_column("above the best", justify="right")
    for name, error in errors.items():
        style = "bold" if error == best else ""
        above = "" if error == best or best == 0 else f"+{100 * (error / best - 1):.1f}%"
        table.add_row(name, f"{error:.4f}", above, style=style)
    return table


def shrinkage_table(model: Model, local: Floats, units: Sequence[int], term: int = 0) -> Table:
    """One term's estimate for some clients: alone, its cluster's, personalised, and how far it has moved to its cluster."""
    spec = model.spec
    table = Table(title=f"Shrinkage of {model.terms[term]!r}", title_justify="left", title_style="bold")
    for name in (spec.client or "client", spec.cluster or "cluster"):
        table.add_column(name)
    for name in ("rows", "alone", "cluster", "personalised", "moved to cluster"):
        table.add_column(name, justify="right")
    for i in units:
        j = int(model.hierarchy.parent[i])
        alone, cluster, own = local[i, term], model.w[j, term], model.theta[i, term]
        # With several terms the path is not a straight line; a share means something only where the ends are apart.
        moved = f"{100 * (alone - own) / (alone - cluster):.0f}%" if abs(alone - cluster) > 0.15 else ""
        table.add_row(
            str(model.hierarchy.client_ids[i]),
            str(model.hierarchy.cluster_ids[j]),
            f"{model.rows[i]:,}",
            f"{alone:.2f}",
            f"{cluster:.2f}",
            f"{own:.2f}",
            moved,
        )
    return table


def _with_errors(model: Model, level: str, values: Floats) -> list[list[str]]:
    """Coefficients with their standard errors in brackets, if these are known."""
    if model.learned is None or not model.learned.has_standard_errors(level):
        return [[f"{value:.4g}" for value in row] for row in values]
    errors = np.atleast_2d(model.posterior.standard_errors(level))  # type: ignore[arg-type]
    pairs = zip(values, errors[: len(values)], strict=True)
    return [[f"{value:.4g} ({error:.2g})" for value, error in zip(*pair, strict=True)] for pair in pairs]


def coefficient_table(model: Model, level: str, limit: int) -> Table:
    """Coefficients of one level, a row for each unit and a column for each term."""
    tree, spec = model.hierarchy, model.spec
    table = Table(title=f"Coefficients, {level} level", title_justify="left", title_style="bold")
    if level == "global":
        table.add_column("term")
        table.add_column("estimate", justify="right")
        for term, told in zip(model.terms, _with_errors(model, level, model.wbar[None])[0], strict=True):
            table.add_row(term, told)
        return table
    values = model.w if level == "cluster" else model.theta
    shown = _with_errors(model, level, values[:limit])
    table.add_column(spec.cluster or "cluster")
    if level == "client":
        table.add_column(spec.client or "client")
        table.add_column("rows", justify="right")
    else:
        table.add_column("clients", justify="right")
    for term in model.terms:
        table.add_column(term, justify="right")
    for at in range(min(limit, len(values))):
        if level == "client":
            ids = [str(tree.cluster_ids[int(tree.parent[at])]), str(tree.client_ids[at]), f"{model.rows[at]:,}"]
        else:
            ids = [str(tree.cluster_ids[at]), f"{model.clients_of_cluster[at]:,}"]
        table.add_row(*ids, *shown[at])
    if len(values) > limit:
        table.caption = f"{limit} of {len(values):,}; --limit shows more"
        table.caption_justify = "left"
    return table
