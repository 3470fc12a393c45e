"""Residuals of rows, and responses that are drawn from a fitted model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import polars as pl
from scipy import special

from covey._typing import Floats, Ints
from covey.errors import DataError, SolverError, one_of
from covey.model.new_rows import Observed, ids_of, new_rows
from covey.problem.problem import as_frame
from covey.tables.design import numeric
from covey.tree.hierarchy import as_labels

if TYPE_CHECKING:
    from covey.model.model import Model

ResidualKind = Literal["response", "pearson", "deviance", "working", "scaled", "quantile"]
RESIDUALS = ("response", "pearson", "deviance", "working", "scaled", "quantile")
Effects = Literal["new", "fitted"]
EFFECTS = ("new", "fitted")


def residuals(model: Model, rows: Observed, kind: ResidualKind = "response", seed: int = 0) -> Floats:
    """Residuals ``(rows,)``. The first four kinds are those of lme4, at the margin of each row's model.

    ``scaled`` are Pearson residuals divided by the residual standard deviation. ``quantile`` are standard normal if the model
    is right (Dunn and Smyth 1996); those of counts and classes are drawn at random within the jump of the distribution.
    """
    if kind not in RESIDUALS:
        raise one_of("kind", kind, RESIDUALS)
    loss, margin, y = model.problem.loss, model.margin_of(rows.X, rows.chosen, rows.offset), rows.y
    mean, root = loss.mean(margin), np.sqrt(rows.weights)
    if kind == "response":
        return np.asarray(y - mean)
    if kind == "working":
        return np.asarray(-loss.slopes(margin, y) / loss.curvatures(margin, mean))
    if kind == "deviance":
        above = np.maximum(loss.values(margin, y) - loss.lowest(y), 0.0)
        return np.asarray(np.sign(y - mean) * root * np.sqrt(2.0 * above))
    if kind == "quantile":
        low, high = loss.distribution(margin, y, rows.weights, _dispersion(model, kind))
        drawn = low + (high - low) * np.random.default_rng(seed).random(len(y))
        return np.asarray(special.ndtri(np.clip(drawn, 1e-16, 1.0 - 1e-16)))
    pearson = root * (y - mean) / np.sqrt(loss.variances(margin))
    return np.asarray(pearson if kind == "pearson" else pearson / np.sqrt(_dispersion(model, kind)))


def _dispersion(model: Model, kind: str) -> float:
    if not model.problem.loss.dispersion:
        return 1.0
    if model.learned is None:
        raise SolverError(
            f"Residuals of the kind {kind!r} need the residual variance, which a model with given penalties does not have; "
            "leave out gamma, lam and alpha, or choose the kind 'pearson'."
        )
    return model.learned.dispersion


def simulate(
    model: Model, X: Any, n: int, *, seed: int, effects: Effects = "new", weights: Any = None, trials: Any = None, **where: Any
) -> Floats:
    """Responses ``(rows, n)`` drawn from a model with learned variances, for the rows of ``X``.

    With the effects ``new`` each column of the result has other groups: the coefficients of clusters and clients are drawn
    about the global model. With ``fitted`` the groups are those of the model.
    """
    if effects not in EFFECTS:
        raise one_of("effects", effects, EFFECTS)
    learned, loss, rng = model.posterior.learned, model.problem.loss, np.random.default_rng(seed)
    rows, chosen, offset = new_rows(model, X, **where)
    margin, dispersion = model.margin_of(rows, chosen, offset), learned.dispersion
    weights = _weights(model, X, weights if trials is None else trials, len(rows))
    if weights is not None and not loss.reml:
        loss.check_drawable(weights)
    out = np.empty((len(rows), n))
    if effects == "new":
        margin = rows @ model.wbar + (0.0 if offset is None else offset)
        cluster, client = _codes(model, X, len(rows), where)
        roots = [_root(learned.cluster.shape[0]), _root(learned.client_covariances.mean(axis=0))]
    for draw in range(n):
        here = margin
        if effects == "new":
            for code, root in zip((cluster, client), roots, strict=True):
                deviations = rng.normal(size=(int(code.max(initial=-1)) + 1, rows.shape[1])) @ root.T
                here = here + np.sqrt(dispersion) * np.einsum("la,la->l", rows, deviations[code])
        if loss.reml and weights is not None:
            out[:, draw] = here + np.sqrt(dispersion / weights) * rng.standard_normal(len(here))
        else:
            out[:, draw] = loss.draw_rows(here, weights, rng, dispersion)
    return out


def _weights(model: Model, X: Any, given: Any, n_rows: int) -> Floats | None:
    """Weights, or numbers of trials, of the rows to draw: those given, or a column of ``X``."""
    if given is not None:
        weights = np.asarray(given, dtype=np.float64)
        if weights.shape != (n_rows,) or not (weights > 0).all():
            raise DataError(f"sample_weight and trials need one positive number for each of the {n_rows:,} rows.")
        return weights
    if not model.spec.named:
        return None
    frame, formula = as_frame(X), model.problem.formula
    for name in (model.spec.trials, model.spec.weights):
        if name is not None:
            return numeric(frame, name)
    if formula is not None and formula.counts:
        from covey.tables.design import response

        return np.asarray(response(formula, frame)).sum(axis=1)  # type: ignore[no-any-return]
    return None


def _codes(model: Model, X: Any, n_rows: int, where: dict[str, Any]) -> tuple[Ints, Ints]:
    """Numbers of the cluster and of the client of each row, seen in training or not."""
    client, cluster = ids_of(model, X, where.get("client"), where.get("cluster"))
    parts = {}
    for name, ids in (("cluster", cluster), ("client", client)):
        parts[name] = pl.Series([0] * n_rows) if ids is None else as_labels(ids, name)
    if cluster is None and client is not None:  # a client that the model has is in its cluster of the fit
        places = model.hierarchy.find(parts["client"], np.zeros(n_rows, dtype=np.int64))
        known = np.where(places >= 0, model.hierarchy.parent[np.maximum(places, 0)], model.hierarchy.n_clusters)
        parts["cluster"] = pl.Series(known)
    table = pl.DataFrame(parts)
    outer = table["cluster"].rank("dense").fill_null(0).to_numpy().astype(np.int64)
    inner = table.select(pl.struct("cluster", "client").rank("dense"))["cluster"].to_numpy().astype(np.int64)
    return outer - outer.min(initial=0), inner - inner.min(initial=0)


def _root(S: Floats) -> Floats:
    values, vectors = np.linalg.eigh(S)
    return np.asarray(vectors * np.sqrt(np.maximum(values, 0.0)))
