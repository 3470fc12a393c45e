"""A fitted model as text, for ``print(model)`` and ``covey show``, and as plain values for JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from covey._typing import Floats
from covey.model.model import Model
from covey.model.posterior import quantile
from covey.tree.hierarchy import Hierarchy
from covey.variance.components import Components, LevelComponents


def describe(model: Model, coverage: float = 0.95) -> str:
    """A summary of a few lines: the data, the penalties, the convergence, and the coefficients at each level."""
    head = [title(model), *(f"  {line}" for line in facts(model))]
    return "\n".join([*head, *(_table(model) if model.learned is None else _learned_tables(model, coverage))])


@dataclass(frozen=True)
class Summary:
    """A fitted model as text, by ``print``, and as plain values, by ``to_json``."""

    model: Model
    coverage: float = 0.95

    def __post_init__(self) -> None:
        quantile(self.coverage)  # an error here, not when the summary is printed

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
            "dropped": None if model.dropped is None else asdict(model.dropped),
        }
        if learned is None:
            penalty = None if model.penalty is None else {"gamma": _ends(_gammas(model)), "lam": _ends(model.penalty.lam)}
            method = model.spec.learns if document["clients"] > 1 else None
            return {**document, "method": method, "penalty": penalty, "warnings": []}
        components = learned.components
        levels = {"cluster": components.cluster, "client": components.client}
        return {
            **document,
            "method": components.method,
            "log_likelihood": components.log_likelihood,
            "parameters": components.parameters,
            "aic": components.aic,
            "bic": components.bic,
            "variance_components": [row for name, level in levels.items() for row in _component_rows(name, level, tree)],
            "residual_sd": None if components.residual is None else float(np.sqrt(components.residual)),
            "share_of_variance": dict(zip(("cluster", "client", "residual"), components.shares, strict=True)),
            "tests": [asdict(test) for test in components.tests],
            "warnings": list(components.notes),
        }


def _plain(label: Any) -> Any:
    """An id for JSON: a date as text."""
    return label if isinstance(label, str | int | float | bool) else str(label)


def _component_rows(name: str, level: LevelComponents, tree: Hierarchy) -> list[dict[str, Any]]:
    rows = []
    for m, a in np.ndindex(*level.sd.shape):
        error, which = level.sd_error[m, a], _plain(tree.cluster_ids[m]) if len(level.sd) > 1 else None
        others = {term: float(level.correlation[m, a, b]) for b, term in enumerate(level.terms[:a])}
        correlation = {term: None if np.isnan(value) else value for term, value in others.items()}
        rows.append(
            {
                "level": name,
                "cluster": which,
                "term": level.terms[a],
                "sd": float(level.sd[m, a]),
                "sd_error": None if np.isnan(error) else float(error),
                "correlation": correlation if level.kind == "full" else {},
            }
        )
    return rows


def title(model: Model) -> str:
    kind = model.spec.loss.title
    what = f"Baseline {model.spec.baseline!r}, {kind}" if model.spec.baseline else f"Hierarchical {kind} model"
    if is_plain(model):
        what = f"{kind[0].upper()}{kind[1:]} regression without groups"
    return f"{what}: {model.spec.formula or ' + '.join(model.terms)}"


def is_plain(model: Model) -> bool:
    """Whether the model is a plain regression with standard errors."""
    return model.learned is not None and not model.learned.components.grouped


def facts(model: Model) -> list[str]:
    """One sentence each on the data, the classes, the penalties and the solver."""
    tree, spec = model.hierarchy, model.spec
    client = f" ({spec.client})" if spec.client else ""
    cluster = f" ({spec.cluster})" if spec.cluster else ""
    number = int(model.clients_of_cluster.sum())
    clients = f"{counted(number, 'client')}{client} in {counted(tree.n_clusters, 'cluster')}{cluster}"
    away = "" if model.elsewhere is None else f", at {counted(len(model.elsewhere.sites), 'site')} with the clients' models"
    # A private fit across sites does not count rows.
    rows = "" if model.elsewhere is not None and model.n_rows == 0 else f"{counted(model.n_rows, 'row')} of "
    lines = [f"{rows}{clients}{away}"]
    if is_plain(model):
        freedom = model.posterior.freedom().min()
        use = "normal quantiles" if np.isinf(freedom) else f"quantiles of t with {freedom:g} degrees of freedom"
        lines = [f"{counted(model.n_rows, 'row')}, no groups: a plain regression; intervals use {use}"]
    if model.dropped is not None:
        lines.append(f"note: {model.dropped}")
    if model.shared is not None:
        size, what = len(model.shared.terms), "shared coefficient"
        lines.append(f"{counted(size, what)} of sparse columns, {_range(model.shared.beta)}: coef_frame('global') has them")
    if spec.standardize:
        lines.append("terms are standardised: coefficients are per standard deviation")
    if model.classes is not None:
        no, yes = model.classes.tolist()
        lines.append(f"log-odds of {yes!r} against {no!r}")
    if model.learned is not None:
        components = model.learned.components
        # A site has only some of the rows of the fit, and a model has others after clients were added.
        of = "" if components.rows == model.n_rows else f", learned from {counted(int(components.rows), 'row')}"
        criteria = f"AIC {components.aic:.1f}, BIC {components.bic:.1f}, {components.parameters} parameters{of}"
        if components.method == "REML":
            also = ", also standardised" if spec.standardize else ""
            criteria += f"; compare only models with the same fixed effects{also}"
        lines.append(f"{components.method}: log-likelihood {components.log_likelihood:.2f}, {criteria}")
        lines.append(model.convergence.message)
        return [*lines, *_test_lines(components), *(f"note: {note}" for note in components.notes)]
    if model.penalty is not None:
        learned_by = {"cv": ", by cross-validation", "reml": ", by REML", "ml": ", by ML"}.get(spec.learns or "", "")
        gamma, lam = _range(_gammas(model)), _range(model.penalty.lam)
        penalties = f"penalties gamma {gamma} (client to cluster), lam {lam} (cluster to global){learned_by}"
        chosen = "one client only: a plain regression, in which penalties have no effect" if number == 1 else penalties
        lines.append(f"{chosen}, loss by {spec.reduction} over rows")
    end = model.convergence
    gap = f", objective within {end.gap:.0e} of its minimum" if end.converged and end.gap is not None else ""
    return [*lines, f"{end.solver}: {end.message}{gap}"]


def _gammas(model: Model) -> Floats:
    """The penalties ``gamma`` of clients, here or at their sites."""
    if model.penalty is None or model.elsewhere is None:
        return np.empty(0) if model.penalty is None else model.penalty.gamma
    mean = model.penalty.cluster_gamma / model.elsewhere.clients
    return np.array([float(f"{gamma:.12g}") for gamma in mean])  # the last digits are rounding


def _test_lines(components: Components) -> Iterator[str]:
    """A sentence for each level that was tested."""
    for test in components.tests:
        p = f"p {'' if test.p_value < 1e-4 else '= '}{_p(test.p_value)}"
        statistic = f"likelihood-ratio statistic {test.statistic:.1f} for {counted(test.parameters, 'parameter')}"
        yield f"variation between {test.level}s: {statistic}, {p}"


def _learned_tables(model: Model, coverage: float) -> list[str]:
    """A table of the global coefficients, with intervals and standard deviations at each level, and the shares of variance."""
    components = model.posterior.learned.components
    levels = {"sd between clusters (se)": components.cluster, "sd between clients (se)": components.client}
    levels = {head: level for head, level in levels.items() if level.terms}
    rows = [["", "estimate", "std. error", f"{100 * coverage:g}% interval", "p", *levels]]
    for row in model.coefficients("global", coverage).head(len(model.terms)).iter_rows(named=True):
        interval = f"{row['lower']:.4g} to {row['upper']:.4g}"
        spreads = [_sd(level, row["term"]) for level in levels.values()]
        known = row["term"] in components.zero  # a coefficient that is 0 by the model has no error
        estimate = [f"{row['estimate']:.4g}", f"{row['std_error']:.3g}", interval, _p(row["p_value"])]
        rows.append([row["term"], *(["0", "-", "-", "-"] if known else estimate), *spreads])
    lines = table(rows, [_first(model), 10, 11, 20, 8, 26, 25])
    s2 = components.residual
    if is_plain(model):
        return lines if s2 is None else [*lines, f"residual {model.spec.loss.dispersion_name} {np.sqrt(s2):.4g}"]
    sd = "" if s2 is None else f" ({model.spec.loss.dispersion_name} {np.sqrt(s2):.4g})"
    shares = zip(("clusters", "clients"), (components.cluster, components.client), components.shares[:2], strict=True)
    parts = [f"{100 * share:.1f}% between {name}" for name, level, share in shares if level.terms]
    residual = f"{100 * components.shares[2]:.1f}% residual{sd}"
    lines.append(f"share of variance, mean over rows: {', '.join(parts)}, {residual}")
    for name, level in (("clusters", components.cluster), ("clients", components.client)):
        if level.kind == "full" and len(level.terms) > 1 and len(level.covariance) == 1:
            pairs = [(a, b) for a in range(len(level.terms)) for b in range(a)]
            text = ", ".join(f"{level.terms[b]} and {level.terms[a]} {level.correlation[0, a, b]:.2f}" for a, b in pairs[:6])
            lines.append(f"correlation between {name}: {text}" + (", ..." if len(pairs) > 6 else ""))
    return lines


def _p(value: float) -> str:
    return "< 1e-4" if value < 1e-4 else f"{value:.2g}"


def _sd(level: LevelComponents, term: str) -> str:
    if term not in level.terms:
        return "-"
    at = level.terms.index(term)
    sds, errors = level.sd[:, at], level.sd_error[:, at]
    if len(sds) > 1:
        return f"{sds.min():.3g} to {sds.max():.3g}"
    return f"{sds[0]:.4g}" + ("" if np.isnan(errors[0]) else f" ({errors[0]:.2g})")


def _table(model: Model) -> list[str]:
    """A table of the global coefficients, with the spread of clusters and clients."""
    rows = [["", "global", "clusters: sd", "min", "max", "clients: sd", "min", "max"]]
    for at, term in enumerate(model.terms):
        rows.append([term, f"{model.wbar[at]:.4g}", *_spread(model.w[:, at]), *_spread(model.theta[:, at])])
    return table(rows, [_first(model), 11, 13, 9, 9, 13, 9, 9])


def _first(model: Model) -> int:
    """The width of the column of terms; negative to align it left."""
    return -max(8, *(len(term) for term in model.terms))


def _spread(values: Floats) -> list[str]:
    if not len(values):
        return ["at sites", "", ""]
    return [f"{values.std():.4g}", f"{values.min():.4g}", f"{values.max():.4g}"]


def _ends(values: Floats) -> list[float | str]:
    """The smallest and the largest value. JSON has no infinity, so that is text."""
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
