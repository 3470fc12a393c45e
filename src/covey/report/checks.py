"""The second half of a report: checks of assumptions, limits, what left the sites, and how to repeat the fit."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import numpy as np
import polars as pl

from covey import __version__
from covey._typing import Floats
from covey.model.model import Model
from covey.model.new_rows import Observed
from covey.model.residuals import residuals
from covey.model.summary import is_plain
from covey.report import diagnostics
from covey.report.findings import Gains, fingerprint, normality, surprises
from covey.report.page import Page
from covey.report.pictures import many, plural, words

NEEDS = "This part needs the rows: pass data=, the table that the model was fitted to (in the shell, --data)."


def assumptions(page: Page, model: Model, rows: Observed | None, private: Mapping[str, Any], held: Gains | None = None) -> None:
    """Verdicts on convergence, effects, residuals and calibration; ``held`` has rows that a fit did not see."""
    page.section("assumptions", "Assumptions, checked")
    end = model.convergence
    page.verdict("Convergence", "good" if end.converged else "fair" if private else "bad", _sentence(end.message))
    found = surprises(model)
    if found is not None:
        verdict, why = normality(found[1][np.isfinite(found[1]) & (found[1] != 0)])
        page.verdict(f"Normal distribution of the effects of {plural(words(model)[0])} ({found[0]})", verdict, why)
    elif not is_plain(model):
        page.need("The distribution of effects needs learned variances and the sums of all clients.")
    if rows is None:
        page.need(f"Residuals{' and calibration' if model.classes is not None else ''}: {NEEDS}")
        return
    if model.learned is None:
        page.need("Residuals are not checked: the model has given penalties and no residual variance.")
        return
    errors = residuals(model, rows, "quantile", 0)
    verdict, why = normality(errors)
    page.verdict("Distribution of the responses about their means (quantile residuals)", verdict, why)
    verdict, why = _spread(model, rows, errors)
    page.verdict("Equal spread of residuals along the predictions", verdict, why)
    page.figure(diagnostics.residuals(model, rows, "fitted"))
    if not is_plain(model):
        page.paragraphs(
            f"The model moves {plural(words(model)[0])} with few rows towards the others. So the residuals of the fit's rows "
            "rise a little along the predictions, even if the model is right."
        )
    page.figure(diagnostics.residuals(model, rows, "quantile"))
    if model.classes is not None:
        table = diagnostics.calibration_table(model, rows) if held is None else diagnostics.shares(*held.rows)
        page.verdict(
            "Calibration", *_calibrated(table, "that the model was fitted to" if held is None else "that a fit did not see")
        )
        page.figure(diagnostics.calibration_of(table, model))


def _calibrated(table: pl.DataFrame, rows: str) -> tuple[str, str]:
    """A verdict on the shares of bins: three of ten intervals miss a right prediction with a chance of about 1%."""
    apart = float(np.abs(table["predicted"] - table["observed"]).max())
    missed = int(((table["predicted"] < table["lower"]) | (table["predicted"] > table["upper"])).sum())
    why = (
        f"On rows {rows}, predictions differ from observed shares by at most {100 * apart:.1f} percentage points, and the 95% "
        f"interval of the share misses the prediction in {missed} of {many(len(table), 'bin')} of rows."
    )
    if missed <= 2 or apart < 0.03:
        return "good", why
    return ("fair" if apart < 0.1 else "bad"), why


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:].rstrip(".") + "."


def _spread(model: Model, rows: Observed, errors: Floats) -> tuple[str, str]:
    fitted = model.margin_of(rows.X, rows.chosen, rows.offset)
    parts = [part for part in diagnostics.bins_of(fitted, 5) if len(part) >= 10]
    if len(parts) < 2:
        return "fair", "There are too few rows to tell."
    sds = [float(np.std(errors[part])) for part in parts]
    ratio = max(sds) / max(min(sds), 1e-12)
    chance = by_chance(min(map(len, parts)))
    text = (
        f"Standard deviations of rows with similar predictions are between {min(sds):.2f} and {max(sds):.2f}, a ratio of "
        f"{ratio:.2f}; chance alone gives up to {chance:.2f}."
    )
    return ("good" if ratio < max(1.3, chance) else "fair" if ratio < max(1.8, chance**1.5) else "bad"), text


def by_chance(n: int) -> float:
    """The 95% quantile of the ratio of the largest to the smallest of five standard deviations of ``n`` normal numbers each.

    Their logs have variance ``1 / (2 (n - 1))``; 3.86 is the quantile of the range of five standard normal numbers.
    """
    return float(np.exp(3.86 * np.sqrt(0.5 / (n - 1))))


def not_told_apart(page: Page, model: Model) -> None:
    """What the data do not distinguish."""
    client, cluster = words(model)
    page.section("unclear", "What could not be told apart")
    said, learned = [], model.learned
    if learned is None:
        page.need("This part needs learned variances; the penalties of this model were given.")
        return
    said += [_sentence(note) for note in learned.components.notes]
    for test in learned.components.tests:
        if test.p_value > 0.05:
            noun = plural(client if test.level == "client" else cluster)
            said.append(f"The data do not show that {noun} differ (p = {test.p_value:.2g}).")
    for row in model.coefficients("global").iter_rows(named=True):
        if row["p_value"] is not None and row["p_value"] > 0.05 and row["term"] != "Intercept":
            said.append(f"The effect of {row['term']} is not distinguishable from zero (p = {row['p_value']:.2g}).")
    if learned.has_sums and learned.whole is None:
        for level, noun, above in (
            ("client", client, cluster if model.hierarchy.n_clusters > 1 else "global"),
            ("cluster", cluster, "global"),
        ):
            if getattr(learned.components, level).terms:
                found = model.random_effects(level)  # type: ignore[arg-type]
                term = found["term"][0]
                own = found.filter(term=term)
                unclear = int((own["deviation"].abs() <= 1.96 * own["conditional_variance"].sqrt()).sum())
                said.append(f"{unclear:,} of {many(len(own), noun)} cannot be told apart from the {above} model in {term}.")
    page.items(said or ["Nothing: every level and every fixed effect is distinguishable."])


# Federation, and how to repeat it


def federation(page: Page, model: Model, run: Mapping[str, Any] | None) -> None:
    """What a federated run sent, and the privacy that it spent."""
    page.section("federation", "What left each site")
    if not run:
        page.paragraphs("The model was not fitted across sites: all rows were in one place.")
        return
    page.paragraphs(
        f"Run {run.get('run')} with {many(len(run.get('sites', ())), 'site')}: {', '.join(map(str, run.get('sites', ())))}."
    )
    for site, why in dict(run.get("without") or {}).items():
        page.paragraphs(f"Without {site} ({why}).")
    private = run.get("privacy")
    if private:
        settings = ", ".join(
            f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in private.items()
            if name not in ("epsilon", "delta")
        )
        client, cluster = words(model)
        page.paragraphs(
            f"Privacy spent for every {client}: epsilon {private['epsilon']:g}, delta {private['delta']:g}. Sums over the "
            f"{plural(client)} of each {cluster} left the sites with noise ({settings})."
        )
    else:
        page.paragraphs("No noise was added (no epsilon): sums over the clients of each cluster left the sites.")
    sent = run.get("exchanges") or ()
    if not sent:
        page.need("The messages are not part of this model; the model that the operator saved has them.")
        return
    labels = list(dict.fromkeys(str(each["label"]) for each in sent))
    table = []
    for label in labels:
        own = [each for each in sent if each["label"] == label]
        table.append(
            [
                label,
                len(own),
                max(int(each["sites"]) for each in own),
                *(sum(int(each[way]) for each in own) for way in ("down", "up")),
            ]
        )
    page.table("Messages", ["message", "times", "sites", "bytes to the sites", "bytes from the sites"], table)
    page.figure(diagnostics.exchanges(list(sent)))


def reproduce(page: Page, model: Model, data: Any) -> None:
    """Specification, versions, hash of the data and citation."""
    page.section("reproduce", "How to cite and reproduce it")
    spec = {name: value for name, value in model.spec.to_json().items() if value is not None}
    page.heading("Specification")
    page.code(json.dumps(spec, indent=1, sort_keys=True, default=str))
    page.heading("Versions")
    libraries = {name: version(name) for name in ("numpy", "scipy", "numba", "polars", "scikit-learn")}
    page.code(
        "\n".join(
            f"{name} {number}"
            for name, number in {"covey": __version__, "Python": platform.python_version(), **libraries}.items()
        )
    )
    page.heading("Data")
    if data is None:
        page.need("The hash of the data needs the rows: pass data= (in the shell, --data).")
    else:
        page.code(f"SHA-256 of the table (columns by name, values as text): {fingerprint(data)}")
    page.heading("Commands")
    if model.elsewhere is not None:
        page.paragraphs("These repeat the fit where all rows are in one place; covey federate repeats it across sites.")
    page.code(
        "import covey, json\n"
        'spec = covey.Spec.from_json(json.loads(open("specification.json").read()))    # the specification above\n'
        'model = covey.fit(covey.read_table("the table"), spec)\n'
        'model.report("report.html", data=covey.read_table("the table"))'
    )
    page.heading("Citation")
    page.paragraphs(
        f"Model fitted with covey {__version__}, which implements Lyu, Hanzely and Kolar (2022), Personalized Federated "
        "Learning with Multiple Known Clusters, arXiv:2204.13619."
    )
