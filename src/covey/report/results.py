"""A study on disk: a section of the folder's README, a CSV file for each table, a PNG and an SVG for each figure."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import polars as pl

from covey._version import __version__
from covey.errors import DataError
from covey.experiments.study import Claim, Study
from covey.report.figures import draw

ORDER = ("simulation", "donors", "donors-karlan-list", "donors-tables", "limits", "communication", "robustness")

_MARK = "<!-- study: {} -->"
_SECTION = re.compile(r"<!-- study: ([a-z-]+) -->\n(.*?)(?=<!-- study: |\Z)", re.DOTALL)
_HEAD = """# What the paper reports, and what covey finds

*Personalized Federated Learning with Multiple Known Clusters*, Lyu, Hanzely, Kolar, 2022. Each row of the first table of a
section holds our number, the paper's, and whether they agree; if not, why. Made by `covey reproduce`; every number follows
from the seed.

"""


def check_folder(folder: Path) -> None:
    """Refuse a place where results cannot be written, before anything runs."""
    if folder.exists() and not folder.is_dir():
        raise DataError(f"{str(folder)!r} is a file; give a folder for the results with --out.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise DataError(f"The folder {str(folder)!r} cannot be made ({problem.strerror}); give another with --out.") from None


def save(study: Study, folder: Path, command: str) -> list[Path]:
    """Write a study; sections of other studies in the folder's README stay. Returns the files written."""
    check_folder(folder)
    inner = folder / study.name
    inner.mkdir(exist_ok=True)
    for table in study.tables:
        table.frame.write_csv(inner / f"{table.name}.csv")
    if study.claims:
        claims_frame(study.claims).write_csv(inner / "claims.csv")
    figures = draw(study, inner)
    page = folder / "README.md"
    sections = dict(_SECTION.findall(page.read_text(encoding="utf-8"))) if page.exists() else {}
    sections[study.name] = section(study, figures, command)
    known = [name for name in ORDER if name in sections]
    page.write_text(_HEAD + "".join(f"{_MARK.format(name)}\n{sections[name]}" for name in known), encoding="utf-8")
    return [page, *(inner / f"{name}.png" for name, _ in figures)]


def section(study: Study, figures: list[tuple[str, str]], command: str) -> str:
    """A study in Markdown."""
    lines = [f"## {study.title}", "", *(f"- {said}" for said in study.findings), ""]
    if study.quick:
        lines += ["*A quick look, on smaller problems with fewer runs; leave out `--quick` for the numbers that count.*", ""]
    if study.claims:
        lines += [f"{tally(study.claims)}", "", *_markdown(claims_frame(study.claims), 3), ""]
    for name, title in figures:
        lines += [f"![{title}]({study.name}/{name}.png)", ""]
    for table in study.tables:
        if table.shown:
            lines += [
                f"**{table.title}** ([CSV]({study.name}/{table.name}.csv))",
                "",
                *_markdown(table.frame, table.digits),
                "",
            ]
            lines += [table.note, ""] if table.note else []
    hidden = [f"[{table.name}]({study.name}/{table.name}.csv)" for table in study.tables if not table.shown]
    if hidden:
        lines += [f"More numbers: {', '.join(hidden)}.", ""]
    if study.remarks:
        lines += [*(f"- {said}" for said in study.remarks), ""]
    settings = ", ".join(f"{name} = {value}" for name, value in study.settings.items())
    return "\n".join([*lines, f"`{command}`, covey {__version__}; {settings}.", "", ""])


def claims_frame(claims: tuple[Claim, ...]) -> pl.DataFrame:
    """Ours, the paper's and the difference in one row each."""
    rows = [
        {
            "number": claim.what,
            "covey": float(claim.ours),
            "paper": float(claim.paper),
            "difference": float(claim.difference),
            "chance allows": claim.spread,
            "verdict": claim.verdict,
            "why": claim.why,
        }
        for claim in claims
    ]
    return pl.DataFrame(rows, infer_schema_length=None, schema_overrides={"chance allows": pl.Float64})


def tally(claims: tuple[Claim, ...]) -> str:
    """How many agree."""
    verdicts = [claim.verdict for claim in claims]
    counts = {verdict: verdicts.count(verdict) for verdict in ("agrees", "differs", "not comparable")}
    words = {"agrees": "agree", "differs": "differ", "not comparable": "cannot be compared"}
    told = ", ".join(f"{count} {words[verdict]}" for verdict, count in counts.items() if count)
    return f"Of {len(claims)} numbers of the paper: {told}."


def _markdown(frame: pl.DataFrame, digits: int) -> list[str]:
    numeric = [dtype.is_numeric() for dtype in frame.dtypes]
    head = [name.replace("_", " ").replace("|", "\\|") for name in frame.columns]
    lines = [f"| {' | '.join(head)} |", f"| {' | '.join('---:' if right else '---' for right in numeric)} |"]
    for row in frame.iter_rows():
        lines.append(f"| {' | '.join(_cell(value, digits) for value in row)} |")
    return lines


def _cell(value: Any, digits: int) -> str:
    if value is None:
        return ""
    if isinstance(value, int):
        return f"{value:,}"
    if not isinstance(value, float):
        return str(value).replace("|", "\\|")
    if digits < 0:
        return f"{value:.1e}"
    if abs(value) >= 1000 or (value == int(value) and abs(value) >= 10):
        return f"{value:,.0f}"
    return f"{value:.{digits}f}" if abs(value) >= 0.5 * 10.0**-digits or value == 0 else f"{value:.1g}"


def summary(study: Study) -> str:
    """A study in a few lines, for the screen."""
    lines = [study.title, *(f"  - {said}" for said in study.findings)]
    if study.claims:
        lines.append(f"  - {tally(study.claims)}")
        lines += [
            f"    {claim.what}: {claim.ours:.3f}, the paper {claim.paper:.3f}; {claim.why}"
            for claim in study.claims
            if claim.verdict == "differs"
        ]
    return "\n".join([*lines, *(f"  - {said}" for said in study.remarks)])
