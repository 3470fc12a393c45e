"""A fitted model in words: what ``print(model)`` and ``covey show`` say."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from covey._typing import Floats
from covey.model.inference import quantile
from covey.model.model import Model
from covey.tree.hierarchy import Hierarchy
from covey.variance.components import Components, LevelComponents


def describe(model: Model, coverage: float = 0.95) -> str:
    """A summary of a few lines: the data, the penalties, how the fit went, and the coefficients at each level."""
    head = [title(model), *(f"  {line}" for line in facts(model))]
    return "\n".join([*head, *(_table(model) if model.learned is None else _learned_tables(model, coverage))])


@dataclass(frozen=True)
class Summary:
    """A fitted model in words, for ``print``, and in numbers, as ``to_json`` has them."""

    model: Model
    coverage: float = 0.95

    def __str__(self) -> str:
        return describe(self.model, self.coverage)

    def to_json(self) -> dict[str, Any]:
        """Plain values: the data, the global coefficients with intervals, the variance components, tests and warnings."""
        model, tree, learned = self.model, self.model.hierarchy, self.model.learned
        document: dict[str, Any] = {
            "title": title(model),
            "family": model.spec.family,
            "standardize": bool(model.spec.standardize),
            "rows": model.n_rows,
            "clients": int(model.clients_of_cluster.sum()),
            "clusters": tree.n_clusters,
            "coverage": self.coverage,
            "global": model.coefficients("global", self.coverage).to_dicts(),
            "converged": bool(model.convergence.converged),
            "message": model.convergence.message,
        }
        if learned is None:
            penalty = None
            if model.penalty is not None:
                penalty = {"gamma": _ends(_gammas(model)), "lam": _ends(model.penalty.lam)}
            return {**document, "method": model.spec.learns, "penalty": penalty, "warnings": []}
        found = learned.components
        levels = {"cluster": found.cluster, "client": found.client}
        return {
            **document,
            "method": found.method,
            "log_likelihood": found.log_likelihood,
            "parameters": found.parameters,
            "aic": found.aic,
            "bic": found.bic,
            "variance_components": [row for name, level in levels.items() for row in _component_rows(name, level, tree)],
            "residual_sd": None if found.residual is None else float(np.sqrt(found.residual)),
            "share_of_variance": dict(zip(("cluster", "client", "residual"), found.shares, strict=True)),
            "tests": [asdict(test) for test in found.tests],
            "warnings": list(found.notes),
        }


def summary(model: Model, coverage: float = 0.95) -> Summary:
    """What is known of a model: see :class:`Summary`."""
    quantile(coverage)  # refused here, not when the summary is printed
    return Summary(model, coverage)


def _plain(label: Any) -> Any:
    """An id as JSON has it: a date as text."""
    return label if isinstance(label, str | int | float | bool) else str(label)


def _component_rows(name: str, level: LevelComponents, tree: Hierarchy) -> list[dict[str, Any]]:
    rows = []
    for m, a in np.ndindex(*level.sd.shape):
        error, which = level.sd_error[m, a], _plain(tree.cluster_ids[m]) if len(level.sd) > 1 else None
        beside = {term: float(level.correlation[m, a, b]) for b, term in enumerate(level.terms[:a])}
        known = {term: None if np.isnan(value) else value for term, value in beside.items()}
        rows.append(
            {
                "level": name,
                "cluster": which,
                "term": level.terms[a],
                "sd": float(level.sd[m, a]),
                "sd_error": None if np.isnan(error) else float(error),
                "correlation": known if level.kind == "full" else {},
            }
        )
    return rows


def title(model: Model) -> str:
    kind = model.spec.loss.title
    what = f"Baseline {model.spec.baseline!r}, {kind}" if model.spec.baseline else f"Hierarchical {kind} model"
    return f"{what}: {model.spec.formula or ' + '.join(model.terms)}"


def facts(model: Model) -> list[str]:
    """One sentence each on the data, the classes, the penalties and the solver."""
    tree, spec = model.hierarchy, model.spec
    client = f" ({spec.client})" if spec.client else ""
    cluster = f" ({spec.cluster})" if spec.cluster else ""
    number = int(model.clients_of_cluster.sum())
    clients = f"{counted(number, 'client')}{client} in {counted(tree.n_clusters, 'cluster')}{cluster}"
    away = "" if model.elsewhere is None else f", at {counted(len(model.elsewhere.sites), 'site')} with the clients' models"
    # Of a private fit across sites nobody knows how many rows there are.
    rows = "" if model.elsewhere is not None and model.n_rows == 0 else f"{counted(model.n_rows, 'row')} of "
    said = [f"{rows}{clients}{away}"]
    if spec.standardize:
        said.append("terms are standardised: coefficients are per standard deviation")
    if model.classes is not None:
        no, yes = model.classes.tolist()
        said.append(f"log-odds of {yes!r} against {no!r}")
    if model.learned is not None:
        found = model.learned.components
        # A site has some of the rows only, and a model to which clients were added has others.
        of = "" if found.rows == model.n_rows else f", learned from {counted(int(found.rows), 'row')}"
        said.append(
            f"{found.method}: log-likelihood {found.log_likelihood:.2f}, AIC {found.aic:.1f}, BIC {found.bic:.1f}, "
            f"{found.parameters} parameters{of}"
        )
        said.append(model.convergence.message)
        return [*said, *_tested(found), *(f"note: {note}" for note in found.notes)]
    if model.penalty is not None:
        said.append(
            f"penalties gamma {_range(_gammas(model))} (client to cluster), lam {_range(model.penalty.lam)} "
            f"(cluster to global){_chosen(spec.learns)}, loss by {spec.reduction} over rows"
        )
    end = model.convergence
    close = end.converged and end.gap is not None
    said.append(f"{end.solver}: {end.message}" + (f", objective within {end.gap:.0e} of its minimum" if close else ""))
    return said


def _gammas(model: Model) -> Floats:
    """What ties clients, here or at their sites."""
    if model.penalty is None or model.elsewhere is None:
        return np.empty(0) if model.penalty is None else model.penalty.gamma
    each = model.penalty.cluster_gamma / model.elsewhere.clients
    return np.array([float(f"{gamma:.12g}") for gamma in each])  # dividing a sum leaves differences in the last digits


def _chosen(how: str | None) -> str:
    return {None: "", "cv": ", by cross-validation"}.get(how, f", by {'REML' if how == 'reml' else 'ML'}")


_QUESTIONS = {"client": "clients differ", "cluster": "clusters matter"}


def _tested(found: Components) -> list[str]:
    """A sentence for each level that was tested."""
    return [
        f"{_QUESTIONS[test.level]}: likelihood ratio {test.statistic:.1f} for {counted(test.parameters, 'parameter')}, "
        f"p {_p_value(test.p_value)}"
        for test in found.tests
    ]


def _p_value(p: float) -> str:
    return "< 1e-4" if p < 1e-4 else f"= {p:.2g}"


def _learned_tables(model: Model, coverage: float) -> list[str]:
    """Each term: the global coefficient with its interval, and how it varies at each level; then the shares of variance."""
    found = model.posterior.learned.components
    levels = {"sd of clusters (se)": found.cluster, "sd of clients (se)": found.client}
    levels = {head: level for head, level in levels.items() if level.terms}
    rows = [["", "global", "std. error", f"{100 * coverage:g}% interval", *levels]]
    for row in model.coefficients("global", coverage).iter_rows(named=True):
        interval = f"{row['lower']:.4g} to {row['upper']:.4g}"
        spreads = [_sd(level, row["term"]) for level in levels.values()]
        rows.append([row["term"], f"{row['estimate']:.4g}", f"{row['std_error']:.3g}", interval, *spreads])
    lines = table(rows, [_first(model), 11, 11, 22, 20, 19])
    sd = "" if found.residual is None else f" ({model.spec.loss.dispersion_text(found.residual)})"
    shares = zip(("clusters", "clients"), (found.cluster, found.client), found.shares[:2], strict=True)
    parts = [f"{100 * share:.1f}% between {name}" for name, level, share in shares if level.terms]
    lines.append(f"share of variance: {', '.join(parts)}, {100 * found.shares[2]:.1f}% residual{sd}")
    for name, level in (("clusters", found.cluster), ("clients", found.client)):
        if level.kind == "full" and len(level.terms) > 1 and len(level.covariance) == 1:
            pairs = [(a, b) for a in range(len(level.terms)) for b in range(a)]
            told = ", ".join(f"{level.terms[b]} and {level.terms[a]} {level.correlation[0, a, b]:.2f}" for a, b in pairs[:6])
            lines.append(f"correlation between {name}: {told}" + (", ..." if len(pairs) > 6 else ""))
    return lines


def _sd(level: LevelComponents, term: str) -> str:
    if term not in level.terms:
        return "-"
    at = level.terms.index(term)
    sds, errors = level.sd[:, at], level.sd_error[:, at]
    if len(sds) > 1:
        return f"{sds.min():.3g} to {sds.max():.3g}"
    return f"{sds[0]:.4g}" + ("" if np.isnan(errors[0]) else f" ({errors[0]:.2g})")


def _table(model: Model) -> list[str]:
    """Each term: the global coefficient, and how clusters and clients spread about it."""
    rows = [["", "global", "clusters: sd", "min", "max", "clients: sd", "min", "max"]]
    for at, term in enumerate(model.terms):
        rows.append([term, f"{model.wbar[at]:.4g}", *_spread(model.w[:, at]), *_spread(model.theta[:, at])])
    return table(rows, [_first(model), 11, 13, 9, 9, 13, 9, 9])


def _first(model: Model) -> int:
    """The width of the column of terms, which stand at the left."""
    return -max(8, *(len(term) for term in model.terms))


def _spread(values: Floats) -> list[str]:
    if not len(values):
        return ["at sites", "", ""]
    return [f"{values.std():.4g}", f"{values.min():.4g}", f"{values.max():.4g}"]


def _ends(values: Floats) -> list[float | str]:
    """The smallest and the largest; infinity, which JSON lacks, as text."""
    return [float(end) if np.isfinite(end) else "inf" for end in (values.min(), values.max())]


def _range(values: Floats) -> str:
    low, high = (f"{end:.4g}" for end in (float(np.min(values)), float(np.max(values))))
    return low if low == high else f"{low} to {high}"


def counted(number: int, noun: str) -> str:
    """A number with its noun.

    >>> counted(1, "row"), counted(12000, "row")
    ('1 row', '12,000 rows')
    """
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def table(rows: Iterable[Sequence[str]], widths: Sequence[int]) -> list[str]:
    """Lines of cells, padded to the widths of their columns; a negative width aligns to the left.

    >>> table([["", "sd"], ["x", "0.25"]], [-4, 6])
    ['         sd', 'x      0.25']
    """
    return [
        " ".join(f"{cell:<{-width}}" if width < 0 else f"{cell:>{width}}" for cell, width in zip(row, widths, strict=False))
        for row in rows
    ]
