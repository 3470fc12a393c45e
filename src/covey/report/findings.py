"""What a report says: held-out errors by group, surprising groups, verdicts on assumptions, and words for a manager."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import polars as pl
from scipy import special

from covey._typing import Floats
from covey.errors import ConvergenceWarning, CoveyError
from covey.fitting.comparison import TEST_SHARE
from covey.fitting.fit import learn
from covey.fitting.selection import client_losses
from covey.model.model import Model
from covey.nodes.network import InMemory
from covey.problem.problem import Spec, as_frame
from covey.tables.rows import GroupedData
from covey.tree.hierarchy import segment_sum

RIVALS = {"single-model": "one pooled model", "locally-trained": "local models", "hierarchical": "this model"}


@dataclass(frozen=True)
class Gains:
    """Held-out losses of the clients ``(n,)`` under three models, and the weights of their held-out rows.

    ``rows`` has the expected responses of the held-out rows under this model, their responses and their weights.
    """

    losses: dict[str, Floats]
    weights: Floats
    error_name: str
    errors: dict[str, float]
    train_rows: int
    test_rows: int
    rows: tuple[Floats, Floats, Floats]

    def by_cluster(self, model: Model) -> pl.DataFrame:
        """The mean held-out loss of each cluster under each model."""
        tree, use = model.hierarchy, self.weights > 0
        at = tree.parent[use]
        total = np.bincount(at, self.weights[use], tree.n_clusters)
        with np.errstate(invalid="ignore", divide="ignore"):
            means = {
                name: np.bincount(at, self.weights[use] * loss[use], tree.n_clusters) / total
                for name, loss in self.losses.items()
            }
        names = [str(each) for each in tree.cluster_ids.to_list()]
        return pl.DataFrame({"cluster": names, "held": total, **means}).filter(pl.col("held") > 0)

    def better(self, rival: str) -> tuple[int, int, int]:
        """The numbers of clients that this model predicts better, worse and equally well than a rival."""
        use = self.weights > 0
        change = (self.losses["hierarchical"] - self.losses[rival])[use]
        return int((change < 0).sum()), int((change > 0).sum()), int((change == 0).sum())


def gains(model: Model, data: GroupedData, say: Callable[[str], None] = lambda _: None) -> Gains | None:
    """Fit this model, one pooled model and local models to part of the rows, and score them on the rest.

    None if no rows can be held out.
    """
    problem, spec = model.problem, model.spec
    train, held = data.split(TEST_SHARE, spec.seed)
    if held.n_rows == 0 or data.hierarchy.n_clients < 2:
        return None
    plain = Spec(family=spec.family, reduction=spec.reduction, ridge=spec.ridge, seed=spec.seed)
    trials = {name: replace(plain, baseline=name) for name in ("single-model", "locally-trained")}
    trials["hierarchical"] = replace(spec, solver="auto", options=None, tests=False)
    losses, errors, loss = {}, {}, replace(spec.loss, reduction="sum", ridge=0.0)
    weights = held.rows_per_client.astype(float)
    if held.weights is not None:
        weights = segment_sum(held.weights, held.client_ptr)
    for name, trial in trials.items():
        say(f"fitting {RIVALS[name]} to 80% of the rows")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            try:
                fit = learn(InMemory.of(train, spec.loss), replace(problem, spec=trial)).fit
            except CoveyError:
                return None
        losses[name] = client_losses(fit.theta, held, loss)
        use = weights > 0
        mean = float((losses[name][use] * weights[use]).sum() / weights[use].sum())
        errors[name] = spec.loss.error(mean, held)
    margin = (held.X * np.repeat(fit.theta, np.diff(held.client_ptr), axis=0)).sum(axis=1)
    margin = margin if held.offset is None else margin + held.offset
    rows = spec.loss.mean(margin), held.y, np.ones(held.n_rows) if held.weights is None else held.weights
    return Gains(losses, weights, spec.loss.error_name, errors, train.n_rows, held.n_rows, rows)


def surprises(model: Model) -> tuple[str, Floats] | None:
    """For the first term that varies by client: its name, and each client's deviation in units of its standard deviation.

    A deviation has the variance ``S`` between clients less its conditional variance, if the model is right. None without sums.
    """
    learned = model.learned
    if learned is None or not learned.has_sums or learned.whole is not None or not learned.components.client.terms:
        return None
    term = learned.components.client.terms[0]
    at = model.terms.index(term)
    deviation = model.theta[:, at] - model.w[model.hierarchy.parent, at]
    prior = learned.dispersion * learned.client.shape[:, at, at]
    left = prior - model.posterior.deviation_variances("client")[:, at, at]
    with np.errstate(invalid="ignore", divide="ignore"):
        return term, np.where(left > 1e-9 * prior, deviation / np.sqrt(np.maximum(left, 1e-300)), 0.0)


def normality(values: Floats) -> tuple[str, str]:
    """A verdict on whether values are standard normal, by the largest difference of the distributions, and its reason."""
    n = len(values)
    if n < 8:
        return "fair", f"There are only {n}, too few to tell."
    ordered = np.sort(values)
    apart = float(np.abs(special.ndtr(ordered) - (np.arange(1, n + 1) - 0.5) / n).max())
    chance = 1.36 / np.sqrt(n)  # the 95% quantile of the difference by chance (Kolmogorov)
    verdict = "good" if apart <= max(0.03, chance) else "fair" if apart <= max(0.08, 2 * chance) else "bad"
    return verdict, (
        f"The distribution differs from the normal one by at most {100 * apart:.1f} percentage points; chance alone gives up "
        f"to {100 * chance:.1f}."
    )


def fingerprint(table: Any) -> str:
    """A SHA-256 hash of a table: its columns, types and values in order, the same for every library of frames."""
    frame, digest = as_frame(table), hashlib.sha256()
    for name in sorted(frame.columns):
        series = pl.Series(name, frame.get_column(name).to_list(), strict=False)
        text = series.cast(pl.String, strict=False) if not series.dtype.is_numeric() else series.cast(pl.Float64)
        digest.update(name.encode())
        digest.update(text.to_frame().write_csv(float_precision=12).encode())
    return digest.hexdigest()
