"""Estimated means and contrasts of the global model, as in emmeans of R (Lenth; Searle, Speed and Milliken 1980).

A mean is a combination ``l'wbar`` of the global coefficients. ``l`` is the mean row of a grid: the categories of interest, with
every combination of the other categories counting equally, and the other columns at their mean. Intervals and p-values are
those of a t distribution with Satterthwaite's degrees of freedom (:meth:`.Posterior.freedom`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import polars as pl

from covey._typing import Floats
from covey.errors import DataError, FormulaError, did_you_mean, one_of
from covey.model.posterior import p_value, quantile
from covey.problem.problem import as_frame
from covey.tables.design import Columns, Formula, numeric
from covey.tables.rows import side_by_side
from covey.tables.scaling import Scaled
from covey.tables.sparse import NOT_SPARSE, SparseDesign

if TYPE_CHECKING:
    from covey.model.model import Model

Adjust = Literal["none", "bonferroni", "holm", "tukey"]
ADJUSTMENTS = ("none", "bonferroni", "holm", "tukey")
Scale = Literal["link", "response"]
Method = Literal["pairwise", "reference"]
METHODS = ("pairwise", "reference")
_CELLS = 1_000_000


@dataclass(frozen=True)
class Grid:
    """Combinations of values of some columns, ``labels``, and the rows of ``X`` that they stand for, ``L (m, d)``."""

    labels: pl.DataFrame
    L: Floats


def grid_of(model: Model, terms: Sequence[str], at: Mapping[str, Any], data: Any = None) -> Grid:
    """The mean rows of the categories of ``terms``, or of the values that ``at`` has for them."""
    if isinstance(model.design, SparseDesign):
        raise DataError(NOT_SPARSE)
    design = model.design.inner if isinstance(model.design, Scaled) else model.design
    levels: Mapping[str, Sequence[Any]] = design.levels if isinstance(design, Formula) else {}
    for name in (name for name in (*terms, *at) if name not in design.columns):
        known = did_you_mean(name, design.columns, "the columns of the terms are")
        raise FormulaError(f"There is no term with the column {name!r}; {known}")
    values: dict[str, list[Any]] = {}
    for name in design.columns:
        if name in at:
            values[name] = _values(name, at[name], levels)
        elif name in levels:
            values[name] = list(levels[name])
        elif name in terms:
            raise DataError(
                f"Column {name!r} is numeric; give values, at={{{name!r}: [0, 1]}}, or write C({name}) in the formula."
            )
        else:
            values[name] = [_mean(model, design, name, data)]
    count = int(np.prod([len(each) for each in values.values()], dtype=np.float64)) if values else 1
    if count > _CELLS:
        raise DataError(f"The categories have {count:,} combinations, more than {_CELLS:,}; fix some of them with at=.")
    inner = [name for name in values if name not in terms]
    order = [*terms, *inner]
    cells = list(product(*(values[name] for name in order)))
    X = _rows(model, {name: [cell[k] for cell in cells] for k, name in enumerate(order)}, len(cells))
    m = int(np.prod([len(values[name]) for name in terms])) if terms else 1
    L = X.reshape(m, -1, X.shape[1]).mean(axis=1)
    labels = list(product(*(values[name] for name in terms)))
    return Grid(pl.DataFrame({name: [label[k] for label in labels] for k, name in enumerate(terms)}), L)


def _values(name: str, given: Any, levels: Mapping[str, Sequence[Any]]) -> list[Any]:
    listed = [given] if isinstance(given, str | int | float) else list(given)
    for value in listed:
        if name in levels and value not in levels[name]:
            raise DataError(f"Column {name!r} has no category {value!r}; {did_you_mean(value, levels[name])}")
        if name not in levels and not isinstance(value, int | float | np.number):
            raise DataError(f"Column {name!r} holds numbers, but at= has {value!r}; give a number.")
    return listed


def _mean(model: Model, design: Columns | Formula, name: str, data: Any) -> float:
    """The mean of a column: of the table ``data``, or from the sums of a linear model."""
    if data is not None:
        frame, count = as_frame(data), model.spec.frequency
        values = numeric(frame, name)
        there = ~np.isnan(values)
        return float(np.average(values[there], weights=None if count is None else numeric(frame, count)[there]))
    learned, terms = model.learned, list(model.terms)
    plain = name in terms and "Intercept" in terms and not isinstance(model.design, Scaled)
    others = isinstance(design, Formula) and any(
        name in factor.names()[0] and factor.kind != "lookup" for part in (design.rhs, *design.extra) for factor in part.factors
    )
    if plain and not others and learned is not None and model.problem.loss.reml and learned.has_sums and learned.whole is None:
        row = learned.units.C[:, terms.index("Intercept")].sum(axis=0)
        return float(row[terms.index(name)] / row[terms.index("Intercept")])
    raise DataError(
        f"The mean of column {name!r} is not part of the model; pass data=, the table of the fit, or at={{{name!r}: value}}."
    )


def _rows(model: Model, columns: dict[str, list[Any]], n: int) -> Floats:
    """The rows of ``X`` of a grid."""
    if model.spec.named or isinstance(model.design, Formula):
        frame = pl.DataFrame(columns) if columns else pl.DataFrame({"_": np.zeros(n)})
        return side_by_side(model.design.blocks(as_frame(frame)))
    matrix = np.column_stack([columns[name] for name in model.design.columns]) if columns else np.empty((n, 0))
    return side_by_side(model.design.blocks(matrix.astype(np.float64)))


def estimates(
    model: Model, labels: pl.DataFrame, L: Floats, *, coverage: float = 0.95, adjust: Adjust = "none", family: int = 0
) -> pl.DataFrame:
    """Estimates of ``L wbar``, with standard errors, intervals and p-values. ``family``: the number of means for Tukey."""
    if adjust not in ADJUSTMENTS:
        raise one_of("adjust", adjust, ADJUSTMENTS)
    posterior = model.posterior
    estimate, V = L @ model.wbar, posterior.learned.covariance
    error = np.sqrt(np.maximum(np.einsum("ma,ab,mb->m", L, V, L), 0.0))
    freedom, m = posterior.freedom(L), len(L)
    p, reach = p_value(estimate, error, freedom), quantile(coverage, freedom)
    if adjust in ("bonferroni", "holm") and m > 1:
        reach = quantile(1.0 - (1.0 - coverage) / m, freedom)
        p = np.minimum(m * p, 1.0) if adjust == "bonferroni" else _holm(p)
    elif adjust == "tukey" and family > 2:
        p, reach = _tukey(estimate, error, freedom, family, coverage)
    columns = {"estimate": estimate, "std_error": error, "df": freedom, "lower": estimate - reach * error}
    columns |= {"upper": estimate + reach * error, "p_value": p}
    return labels.with_columns(pl.Series(name, np.asarray(values, dtype=np.float64)) for name, values in columns.items())


def _holm(p: Floats) -> Floats:
    order, out = np.argsort(p), np.empty_like(p)
    out[order] = np.minimum(np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1)), 1.0)
    return out


def _tukey(estimate: Floats, error: Floats, freedom: Floats, family: int, coverage: float) -> tuple[Floats, Floats]:
    """P-values and half widths, in standard errors, by the studentised range of ``family`` means."""
    from scipy.stats import studentized_range

    df = np.minimum(freedom, 1e5)  # the distribution is that of infinitely many degrees of freedom then
    with np.errstate(divide="ignore", invalid="ignore"):
        q = np.sqrt(2.0) * np.abs(estimate / error)
    p = np.array([studentized_range.sf(x, family, v) for x, v in zip(q, df, strict=True)])
    by_df = {v: studentized_range.ppf(coverage, family, v) for v in set(df.tolist())}
    return p, np.array([by_df[v] for v in df.tolist()]) / np.sqrt(2.0)


def on_response(model: Model, found: pl.DataFrame) -> pl.DataFrame:
    """Estimates and intervals on the scale of the response, at a random effect of zero; standard errors by the delta method."""
    loss, margin = model.problem.loss, found["estimate"].to_numpy()
    step = 1e-5
    slope = (loss.mean(margin + step) - loss.mean(margin - step)) / (2 * step)
    changed = {name: loss.mean(found[name].to_numpy()) for name in ("estimate", "lower", "upper")}
    changed["std_error"] = np.abs(slope) * found["std_error"].to_numpy()
    return found.with_columns(pl.Series(name, np.asarray(values)) for name, values in changed.items())


def differences(grid: Grid, terms: Sequence[str], by: Sequence[str], method: Method) -> tuple[pl.DataFrame, Floats, int]:
    """Differences between the rows of a grid with equal ``by``: labels, ``L``, and the number of means that are compared."""
    if method not in METHODS:
        raise one_of("method", method, METHODS)
    labels, first = grid.labels, [name for name in terms if name not in by]
    names = [" ".join(_text(value) for value in row) for row in labels.select(first).iter_rows()]
    blocks: dict[tuple[Any, ...], list[int]] = {}
    for at, key in enumerate(labels.select(by).iter_rows() if by else [()] * len(labels)):
        blocks.setdefault(key, []).append(at)
    rows, L, size = [], [], 0
    for key, members in blocks.items():
        size = max(size, len(members))
        pairs = combinations(members, 2) if method == "pairwise" else ((other, members[0]) for other in members[1:])
        for a, b in pairs:
            rows.append((*key, f"{names[a]} - {names[b]}"))
            L.append(grid.L[a] - grid.L[b])
    if not rows:
        raise DataError(f"There is nothing to compare: {', '.join(map(repr, first))} has one value only.")
    table = pl.DataFrame(rows, schema=[*by, "contrast"], orient="row")
    return table, np.array(L), size


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def combinations_of(model: Model, given: Any) -> tuple[pl.DataFrame, Floats]:
    """Combinations of global coefficients: one mapping from terms to weights, several of them, or a matrix ``(m, d)``."""
    terms = list(model.terms)
    if isinstance(given, Mapping):
        given = [given]
    if isinstance(given, Sequence) and given and all(isinstance(each, Mapping) for each in given):
        L = np.zeros((len(given), len(terms)))
        for row, weights in zip(L, given, strict=True):
            for term, weight in weights.items():
                if term not in terms:
                    raise FormulaError(f"There is no term {term!r}; {did_you_mean(term, terms, 'the terms are')}")
                row[terms.index(term)] = weight
    else:
        try:
            L = np.atleast_2d(np.asarray(given, dtype=np.float64))
        except (TypeError, ValueError):
            raise DataError("A contrast is a column of categories, a mapping from terms to weights, or a matrix.") from None
        if L.shape[1] != len(terms):
            raise DataError(f"The contrast has {L.shape[1]} weights for {len(terms)} terms; give one for each term.")
    if not np.isfinite(L).all():
        raise DataError("The weights of a contrast must be finite numbers.")
    names = [" ".join(f"{weight:+g} {term}" for term, weight in zip(terms, row, strict=True) if weight) or "0" for row in L]
    return pl.DataFrame({"contrast": names}), L
