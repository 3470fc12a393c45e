"""A fitted model in words: what ``print(model)`` and ``covey show`` say."""

from __future__ import annotations

import numpy as np

from covey._typing import Floats
from covey.model import Model

_NAMES = {"gaussian": "linear", "bernoulli": "logistic", "poisson": "Poisson"}


def describe(model: Model) -> str:
    """A summary of a few lines: the data, the penalties, how the fit went, and the coefficients at each level."""
    lines = [title(model), *(f"  {line}" for line in facts(model)), *_table(model)]
    return "\n".join(lines)


def title(model: Model) -> str:
    kind = _NAMES[model.spec.family]
    what = f"Baseline {model.spec.baseline!r}, {kind}" if model.spec.baseline else f"Hierarchical {kind} model"
    return f"{what}: {model.spec.formula or ' + '.join(model.terms)}"


def facts(model: Model) -> list[str]:
    """One sentence each on the data, the classes, the penalties and the solver."""
    tree, spec = model.hierarchy, model.spec
    client = f" ({spec.client})" if spec.client else ""
    cluster = f" ({spec.cluster})" if spec.cluster else ""
    clients = f"{_count(tree.n_clients, 'client')}{client} in {_count(tree.n_clusters, 'cluster')}{cluster}"
    said = [f"{_count(int(model.rows.sum()), 'row')} of {clients}"]
    if model.classes is not None:
        no, yes = model.classes.tolist()
        said.append(f"log-odds of {yes!r} against {no!r}")
    if model.penalty is not None:
        said.append(
            f"penalties gamma {_range(model.penalty.gamma)} (client to cluster), lam {_range(model.penalty.lam)} "
            f"(cluster to global), loss by {spec.reduction} over rows"
        )
    end = model.convergence
    close = end.converged and end.gap is not None
    said.append(f"{end.solver}: {end.message}" + (f", objective within {end.gap:.0e} of its minimum" if close else ""))
    return said


def _table(model: Model) -> list[str]:
    """Each term: the global coefficient, and how clusters and clients spread about it."""
    width = max(8, *(len(term) for term in model.terms))
    head = (
        f"{'':{width}}  {'global':>10}  {'clusters: sd':>12} {'min':>9} {'max':>9}  {'clients: sd':>12} {'min':>9} {'max':>9}"
    )
    rows = []
    for at, term in enumerate(model.terms):
        clusters, clients = _spread(model.w[:, at]), _spread(model.theta[:, at])
        rows.append(f"{term:{width}}  {model.wbar[at]:>10.4g}  {clusters}  {clients}")
    return [head, *rows]


def _spread(values: Floats) -> str:
    return f"{values.std():>12.4g} {values.min():>9.4g} {values.max():>9.4g}"


def _range(values: Floats) -> str:
    low, high = float(np.min(values)), float(np.max(values))
    return f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
