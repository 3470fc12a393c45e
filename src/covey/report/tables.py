"""Tables for the terminal: held-out errors of models, shrinkage of clients, and coefficients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import polars as pl
from rich.table import Table

from covey._typing import Floats, Ints
from covey.losses import family_of
from covey.model.model import Model
from covey.reproduce.radon import Shrinkage


def _table(title: str, text: Sequence[str], numbers: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table whose columns are first text, aligned to the left, then numbers, aligned to the right."""
    table = Table(title=title, title_justify="left", title_style="bold", caption_justify="left")
    for name in text:
        table.add_column(name)
    for name in numbers:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*row)
    return table


def comparison_table(errors: Mapping[str, float], family: str, rows: int) -> Table:
    """The held-out error of each model; the best is bold."""
    best = min(errors.values())
    above = ["best" if error == best else f"+{100 * (error / best - 1):.1f}%" if best else "-" for error in errors.values()]
    cells = [(name, f"{error:.4f}", more) for (name, error), more in zip(errors.items(), above, strict=True)]
    numbers = (family_of(family).error_name, "above the best")
    table = _table(f"Held-out error on {rows:,} rows", ["model"], numbers, cells)
    for row, error in zip(table.rows, errors.values(), strict=True):
        row.style = "bold" if error == best else ""
    words = [f"{name}: {_MODELS[name]}" for name in errors if name in _MODELS]
    table.caption = "\n".join(words) if words else None
    return table


_MODELS = {
    "single-model": "one for all rows",
    "locally-trained": "one for each group alone",
    "single-cluster": "groups move towards one common mean",
    "hierarchical": "the model below",
}


def shrinkage_table(found: Shrinkage, units: Ints, title: str, caption: str) -> Table:
    """The mean of some clients: alone, by their cluster's model, personalised, and how far it has moved to the cluster."""
    model, cells = found.model, []
    for i in units.tolist():
        means = [f"{values[i]:.2f}" for values in (found.alone, found.cluster, found.personalised)]
        cells.append([str(model.hierarchy.client_ids[i]), f"{model.rows[i]:,}", *means, f"{100 * found.moved[i]:.0f}%"])
    numbers = ("rows", "alone", model.spec.cluster or "cluster", "personalised", "moved")
    table = _table(title, [model.spec.client or "client"], numbers, cells)
    table.caption = caption
    return table


def _with_errors(model: Model, level: str, values: Floats) -> list[list[str]]:
    """Coefficients as text, with their standard errors in brackets if the model has them."""
    if model.learned is None or not model.learned.has_standard_errors(level):
        return [[f"{value:.4g}" for value in row] for row in values]
    errors = np.atleast_2d(model.posterior.standard_errors(level))  # type: ignore[arg-type]
    pairs = zip(values, errors[: len(values)], strict=True)
    return [[f"{value:.4g} ({error:.2g})" for value, error in zip(*pair, strict=True)] for pair in pairs]


def coefficient_table(model: Model, level: str, limit: int) -> Table:
    """The coefficients of one level: a row for each client or cluster, up to ``limit``, and a column for each term."""
    tree, cluster, title = model.hierarchy, model.spec.cluster or "cluster", f"Coefficients, {level} level"
    if level == "global":
        estimates = _with_errors(model, level, model.wbar[None])[0]
        return _table(title, ["term"], ["estimate"], zip(model.terms, estimates, strict=True))
    values = (model.w if level == "cluster" else model.theta)[:limit]
    shown = _with_errors(model, level, values)
    if level == "client":
        names, size = [cluster, model.spec.client or "client"], "rows"
        ids = [[str(tree.cluster_ids[int(tree.parent[i])]), str(tree.client_ids[i])] for i in range(len(values))]
        sizes, total = model.rows, len(model.theta)
    else:
        names, size = [cluster], "clients"
        ids = [[str(tree.cluster_ids[j])] for j in range(len(values))]
        sizes, total = model.clients_of_cluster, len(model.w)
    cells = [[*ids[at], f"{sizes[at]:,}", *shown[at]] for at in range(len(values))]
    table = _table(title, names, [size, *model.terms], cells)
    table.caption = f"{limit} of {total:,}; --limit shows more" if total > limit else None
    return table


def frame_table(found: pl.DataFrame, title: str, limit: int = 1000) -> Table:
    """A frame as a table: text to the left, numbers to the right; p-values as in summaries."""
    text = [name for name, kind in found.schema.items() if not kind.is_numeric()]
    numbers = [name for name in found.columns if name not in text]
    cells = [
        [*("" if row[name] is None else str(row[name]) for name in text), *(_number(name, row[name]) for name in numbers)]
        for row in found[:limit].iter_rows(named=True)
    ]
    table = _table(title, text, numbers, cells)
    table.caption = f"{limit} of {len(found):,}; --limit shows more" if len(found) > limit else None
    return table


def _number(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    if name == "p_value" and value < 1e-4:
        return "< 1e-4"
    return f"{value:,}" if isinstance(value, int) else f"{value:.5g}"
