"""The report of a model: one HTML file for a colleague, from a saved model and, where it needs them, the rows of the fit."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from covey import __version__
from covey.errors import CoveyError
from covey.model.client_means import ClientMeans, client_means
from covey.model.explained import r2
from covey.model.model import Model
from covey.model.new_rows import Observed, group_rows, observed_rows
from covey.model.summary import facts, is_plain, title
from covey.problem.rows import Arrays
from covey.report import pictures
from covey.report.checks import NEEDS, assumptions, not_told_apart, reproduce
from covey.report.checks import federation as left_sites
from covey.report.findings import RIVALS, Gains, gains, surprises
from covey.report.page import Page
from covey.report.pictures import many, plural, words
from covey.tables.design import Formula
from covey.tables.scaling import Scaled

_MOST_BYTES = 2_970_000  # of a report, with the table that the search reads
_CLUSTERS = 300  # rows of the table of clusters
_TOP = 10

Say = Callable[[str], None]


def report(
    model: Model,
    data: Any = None,
    *,
    heading: str | None = None,
    question: str | None = None,
    federation: Mapping[str, Any] | None = None,
    say: Say = lambda _: None,
) -> str:
    """The report as HTML. ``data`` is a table with the rows of the fit; parts that need it say so if it is None."""
    rows = None if data is None else observed_rows(model, data, Arrays())
    grouped = None if data is None else group_rows(model, data, Arrays())
    held: Gains | None = None
    if grouped is not None and grouped.hierarchy.identities.tolist() == model.hierarchy.identities.tolist():
        held = gains(model, grouped, say)
    say("writing the report")
    page = Page(heading or title(model), f"Report of a model by covey {__version__}.")
    means = _means(model, rows)
    private = dict((federation or {}).get("privacy") or {})
    _answer(page, model, question, held, private)
    _model(page, model, rows)
    _coefficients(page, model, data)
    _gains(page, model, held, data is not None)
    _surprises(page, model, means)
    assumptions(page, model, rows, private, held)
    not_told_apart(page, model)
    left_sites(page, model, federation)
    reproduce(page, model, data)
    _search(page, model, means)  # last: its table takes the bytes that are left
    return page.html()


def _means(model: Model, rows: Observed | None) -> ClientMeans | None:
    try:
        return client_means(model, rows)
    except CoveyError:
        return None


def _response(model: Model) -> str:
    return pictures.mean_of(model)


# The question and the answer


def _answer(page: Page, model: Model, question: str | None, held: Gains | None, private: Mapping[str, Any]) -> None:
    page.section("answer", "The question and the answer")
    page.paragraphs(question or _question(model))
    page.answer(*_sentences(model, held, private))


def _question(model: Model) -> str:
    client, cluster = words(model)
    others = list(model.design.columns) if model.spec.named else [term for term in model.terms if term != "Intercept"]
    depends = f"depend on {_and(others[:4])}{' and more' if len(others) > 4 else ''}" if others else ""
    response = _response(model) if model.classes is None else f"the {_response(model)}"
    if is_plain(model):
        return f"How does {response} {depends}?" if others else f"What is {response}?"
    where = f"{plural(client)} in {plural(cluster)}" if model.hierarchy.n_clusters > 1 else plural(client)
    return f"How does {response} {depends}{', and how does it ' if others else ''}differ between {where}?"


def _and(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _sentences(model: Model, held: Gains | None, private: Mapping[str, Any]) -> list[str]:
    client, cluster = words(model)
    of = [many(model.n_rows, "row")] if model.n_rows else []  # a private run does not count rows
    of += [] if is_plain(model) else [many(int(model.clients_of_cluster.sum()), client)]
    said, part = [f"The model learned from {' of '.join(of)}."], model.learned
    if part is not None and part.whole is not None and model.hierarchy.n_clients:  # of one site
        said = [f"The model learned from {many(part.components.rows, 'row')} at all sites. This site has {' of '.join(of)}."]
    if private:
        said.append(
            f"Differential privacy protects every {client} (epsilon {private['epsilon']:g}, delta {private['delta']:g}): sums "
            "left the sites with noise, so estimates are noisy too, and how near they are to the optimum is unknown."
        )
    if not model.convergence.converged and not private:
        said.append(f"Caution: the fit did not converge ({model.convergence.message}).")
    learned = model.learned
    if learned is not None and learned.components.grouped and np.isfinite(learned.components.shares).all():
        between, within, rest = (100 * share for share in learned.components.shares)
        groups = f"{within:.0f}% lies between {plural(client)}"
        if model.hierarchy.n_clusters > 1:
            groups = f"{between:.0f}% lies between {plural(cluster)}, {within:.0f}% between the {plural(client)} of a {cluster}"
        said.append(f"Of the variation that the fixed effects leave open, {groups}, and {rest:.0f}% within {plural(client)}.")
    if learned is not None:
        said += _effects(model)
    if held is not None:
        ours, pooled, local = (held.errors[name] for name in ("hierarchical", "single-model", "locally-trained"))
        said.append(
            f"On {many(held.test_rows, 'row')} that the models had not seen, its error is {ours:.4g}: "
            f"{_change(ours, pooled)} than with one pooled model, and {_change(ours, local)} than with a model for each "
            f"{client} alone ({held.error_name}; smaller is better)."
        )
    return said


def _change(ours: float, other: float) -> str:
    change = 100 * (ours / other - 1) if other else 0.0
    return f"{abs(change):.1f}% {'smaller' if change < 0 else 'larger'}"


def _effects(model: Model) -> list[str]:
    said = []
    link, zero = model.problem.loss.link, model.posterior.learned.components.zero
    for row in model.coefficients("global").iter_rows(named=True):
        if row["term"] == "Intercept" or row["term"] in zero:
            continue
        ends = [row["estimate"], row["lower"], row["upper"]]
        if link in ("logit", "log"):
            of = f"the odds of {_classes(model)}" if link == "logit" else f"the mean of {pictures.response_of(model)}"
            shown = [f"{float(np.exp(min(each, 700.0))):.3g}" for each in ends]
            effect = f"{of} are multiplied by {shown[0]}" if link == "logit" else f"{of} is multiplied by {shown[0]}"
        else:
            of = pictures.response_of(model) if link == "identity" else "the linear predictor"
            shown = [f"{each:.3g}" for each in ends]
            effect = f"{of} is {abs(row['estimate']):.3g} {'higher' if row['estimate'] > 0 else 'lower'}"
        clear = row["lower"] > 0 or row["upper"] < 0
        sure = "" if clear else "; this is not distinguishable from no effect"
        said.append(f"{_step(model, row['term'])}, {effect} (95% interval {shown[1]} to {shown[2]}){sure}.")
    return said[:6]


def _classes(model: Model) -> str:
    return "a success" if model.classes is None else repr(model.classes.tolist()[1])


def _step(model: Model, term: str) -> str:
    """The change that a coefficient belongs to: from the first category to another one, or a unit more of a number."""
    design = model.design.inner if isinstance(model.design, Scaled) else model.design
    column, _, level = term.partition("[T.")
    column = column.removeprefix("C(").removesuffix(")")
    levels = design.levels.get(column) if isinstance(design, Formula) else None
    if levels is not None and level.endswith("]") and "contr" not in column:
        return f"With {column} = {level[:-1]} instead of {levels[0]}"
    return f"With one unit more of {term}"


# The model


def _model(page: Page, model: Model, rows: Observed | None) -> None:
    page.section("model", "The model and its tests")
    page.items(facts(model))
    learned = model.learned
    if learned is None:
        page.need("The penalties were given, so there are no standard errors, tests and shares of variance.")
        return
    components = learned.components
    levels = [("client", components.client), ("cluster", components.cluster)]
    sds = [
        (words(model)[0 if name == "client" else 1], term, float(level.sd[:, at].mean()), _finite(level.sd_error[:, at].mean()))
        for name, level in levels
        for at, term in enumerate(level.terms)
    ]
    if components.residual is not None:
        sds.append(("residual", "", float(np.sqrt(components.residual)), None))
    page.table(
        "Standard deviations" if is_plain(model) else "Standard deviations between groups",
        ["between", "term", "standard deviation", "standard error"],
        sds,
    )
    if components.tests:
        tests = [
            (words(model)[0 if each.level == "client" else 1], each.statistic, each.parameters, each.p_value)
            for each in components.tests
        ]
        page.table("Likelihood-ratio tests of each level", ["variation between", "statistic", "parameters", "p-value"], tests)
    try:
        marginal, conditional = r2(model, rows)
        groups = "" if is_plain(model) else f", the fixed effects and the groups {100 * conditional:.1f}%"
        page.paragraphs(
            f"The fixed effects explain {100 * marginal:.1f}% of the variance{groups} (R2 of Nakagawa and Schielzeth)."
        )
    except CoveyError as problem:
        page.need(f"The share of the variance that is explained (R2): {NEEDS if rows is None else problem}")
    if components.grouped and np.isfinite(components.shares).all():
        page.figure(pictures.variance_shares(model), (8.0, 3.2))


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def _coefficients(page: Page, model: Model, data: Any) -> None:
    page.section("coefficients", "Coefficients by level")
    client, cluster = words(model)
    found = model.coefficients("global")
    names = {"term": "term", "estimate": "estimate", "std_error": "standard error", "lower": "lower", "upper": "upper"}
    names |= {"df": "degrees of freedom", "p_value": "p-value"}
    head = [name for name in names if name in found.columns]
    page.table("The global model", [names[name] for name in head], found.select(head).rows())
    if model.hierarchy.n_clusters > 1:
        own = model.coefficients("cluster")
        head = [
            name for name in ("cluster", "clients", "term", "estimate", "std_error", "lower", "upper") if name in own.columns
        ]
        shown = {"cluster": cluster, "clients": plural(client), **names}
        rows = [
            [str(value) if at == 0 else value for at, value in enumerate(row)] for row in own[:_CLUSTERS].select(head).rows()
        ]
        page.table(f"Models of {plural(cluster)}", [shown[name] for name in head], rows)
        if len(own) > _CLUSTERS:
            page.paragraphs(f"The first {_CLUSTERS} of {len(own):,} rows.")
    columns = [name for name in model.design.columns if model.spec.named]
    for name in columns[:2]:
        try:
            page.figure(pictures.effect(model, name, data=data))
        except CoveyError as problem:
            page.need(f"Effect of {name}: {NEEDS if data is None else problem}")


# Who gains


def _gains(page: Page, model: Model, held: Gains | None, has_data: bool) -> None:
    client, cluster = words(model)
    page.section("gains", "Who gains and who loses")
    if is_plain(model):
        page.need("A regression without groups has no groups that gain or lose; name their column and fit again.")
        return
    if held is None and not model.hierarchy.n_clients:
        page.need(
            f"The models of {plural(client)} are at their sites; a report of a site's model compares its {plural(client)}."
        )
        return
    if held is None:
        page.need("The rows are not those of the fit, or none can be held out." if has_data else NEEDS)
        return
    page.paragraphs(
        f"Three models were fitted to {held.train_rows:,} rows and compared on {held.test_rows:,} others: one pooled model, a "
        f"local model for each {client}, and this model."
    )
    page.table(
        f"Held-out error ({held.error_name}; smaller is better)",
        ["model", held.error_name],
        [(RIVALS[name], float(error)) for name, error in held.errors.items()],
    )
    for rival in ("single-model", "locally-trained"):
        won, lost, equal = held.better(rival)
        same = f", {equal:,} are predicted equally well" if equal else ""
        page.paragraphs(f"Compared with {RIVALS[rival]}, {won:,} {plural(client)} gain and {lost:,} lose{same}.")
    if model.hierarchy.n_clusters > 1:
        table = held.by_cluster(model).sort("held", descending=True)[:_CLUSTERS]
        head = [cluster, "held-out rows", *(RIVALS[name] for name in held.errors)]
        page.table(
            f"Mean held-out loss of a row of each {cluster} (negative log-likelihood up to a constant; smaller is better)",
            head,
            table.rows(),
        )


def _surprises(page: Page, model: Model, means: ClientMeans | None) -> None:
    client, cluster = words(model)
    page.section("surprises", f"The most surprising {plural(client)}")
    if is_plain(model):
        page.need("A regression without groups has none to compare.")
        return
    found = surprises(model)
    if found is None:
        page.need("This part needs learned variances and the sums of all clients, which this model does not have.")
        return
    term, scores = found
    order = np.argsort(-np.abs(scores), kind="stable")[:_TOP].tolist()
    tree, rows = model.hierarchy, []
    for i in order:
        own = [None, None] if means is None else [_finite(means.alone[i]), _finite(means.cluster[i])]
        upper = [str(tree.cluster_ids[int(tree.parent[i])])] if tree.n_clusters > 1 else []
        rows.append([str(tree.client_ids[i]), *upper, int(model.rows[i]), *own, float(scores[i])])
    above = cluster if tree.n_clusters > 1 else "global"
    page.paragraphs(
        f"How far each {client} is from what the {above} model expects, in standard deviations of such deviations ({term}). "
        f"About 5% of {plural(client)} are expected beyond 2; {100 * float((np.abs(scores) > 2).mean()):.1f}% are."
    )
    head = [
        client,
        *([cluster] if tree.n_clusters > 1 else []),
        "rows",
        "own mean",
        f"expected by the {above} model",
        "standard deviations",
    ]
    page.table(f"The {len(rows)} most surprising {plural(client)}", head, rows)
    if model.learned is not None and model.learned.has_sums:
        page.figure(pictures.caterpillar(model), (8.0, 6.4))


def _search(page: Page, model: Model, means: ClientMeans | None) -> None:
    client, cluster = words(model)
    page.section("search", f"Any {client}: its own story", before="assumptions")
    tree, n = model.hierarchy, model.hierarchy.n_clients
    if is_plain(model):
        page.need("A regression without groups has none to search.")
        return
    if not n:
        page.need(f"The models of {plural(client)} are at their sites, not in this model.")
        return
    found, learned = surprises(model), model.learned
    term = found[0] if found is not None else model.terms[0]
    at, nothing = model.terms.index(term), np.full(n, np.nan)
    lower = upper = weight = nothing
    if learned is not None and learned.has_sums:
        table = model.coefficients("client")
        if "lower" in table.columns:
            lower, upper = (table[name].to_numpy().reshape(n, -1)[:, at] for name in ("lower", "upper"))
        weight = model.posterior.reliability[:, at]
    parts = (nothing,) * 3 if means is None else (means.alone, means.cluster, means.own)
    columns = [*parts, model.theta[:, at], lower, upper, weight, nothing if found is None else found[1]]
    document: dict[str, Any] = {
        "words": {"client": client, "cluster": cluster, "term": term, "above": cluster if tree.n_clusters > 1 else "global"},
        "clusters": [str(each) for each in tree.cluster_ids.to_list()] if tree.n_clusters > 1 else [None] * tree.n_clusters,
    }
    if learned is not None and learned.has_sums and len(model.reliability()):  # a variance of zero has no reliability
        page.figure(pictures.reliability(model))
    if means is not None:
        page.figure(pictures.shrinkage_of(means, model))
    ids, counts = [str(each) for each in tree.client_ids.to_list()], model.rows
    order = np.argsort(-counts, kind="stable")
    document["rows"], size = [], len(page.html().encode())
    for i in order.tolist():
        row = [ids[i], int(tree.parent[i]), int(counts[i]), *(_short(values[i]) for values in columns)]
        size += len(json.dumps(row, separators=(",", ":")).replace("<", "\\u003c")) + 1
        if size > _MOST_BYTES:
            break
        document["rows"].append(row)
    about = [
        "Type a part of the name: number of rows, own mean, estimate with interval, and how far and why it was moved towards "
        "the others."
    ]
    if len(document["rows"]) < n:
        kept = len(document["rows"])
        about.append(f"The search has the {kept:,} of {n:,} {plural(client)} with the most rows; covey show has all.")
    page.search(about, f"Find {'an' if client[:1].lower() in 'aeiou' else 'a'} {client}", document)


def _short(value: float) -> float | None:
    return float(f"{value:.4g}") if np.isfinite(value) else None
