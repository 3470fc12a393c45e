"""A study on disk: a section of the folder's README, a CSV file for each table, a PNG and an SVG for each figure."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import polars as pl

from covey._version import __version__
from covey.errors import DataError
from covey.report.figures import draw
from covey.reproduce.study import Claim, Study

ORDER = ("simulation", "donors", "donors-karlan-list", "donors-tables", "limits", "communication", "robustness")

_MARK = "<!-- study: {} -->"
_SECTION = re.compile(r"<!-- study: ([a-z-]+) -->\n(.*?)(?=<!-- study: |\Z)", re.DOTALL)
_HEAD = """# What the paper reports, and what covey finds

*Personalized Federated Learning with Multiple Known Clusters*, Lyu, Hanzely, Kolar, 2022. Each row of the first table of a
section holds our number, the paper's, and whether they agree; if not, why. Made by `covey reproduce`; every number follows
from the seed.

"""


def check_folder(folder: Path) -> None:
    """Refuse a place where results cannot be written, or where they would replace something else, before anything runs."""
    if folder.exists() and not folder.is_dir():
        raise DataError(f"{str(folder)!r} is a file; give a folder for the results with --out.")
    page = folder / "README.md"
    if page.exists() and not (page.is_file() and page.read_bytes().startswith(_HEAD.splitlines()[0].encode())):
        raise DataError(f"{str(page)!r} was not written by covey and would be replaced; give another folder with --out.")
    in_the_way = [name for name in ORDER if (folder / name).exists() and not (folder / name).is_dir()]
    if in_the_way:
        raise DataError(
            f"{str(folder / in_the_way[0])!r} is a file where a folder of results belongs; move it, or give another --out."
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as problem:
        raise DataError(
            f"Nothing can be written to {str(folder)!r} ({problem.strerror}); give another folder with --out."
        ) from None


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
    aside = page.with_suffix(".part")
    aside.write_text(_HEAD + "".join(f"{_MARK.format(name)}\n{sections[name]}" for name in known), encoding="utf-8")
    aside.replace(page)
    return [page, *(inner / f"{name}.png" for name, _ in figures)]


def section(study: Study, figures: list[tuple[str, str]], command: str) -> str:
    """A study in Markdown."""
    lines = [f"## {study.title}", "", *(f"- {said}" for said in study.findings), ""]
    if study.quick:
        lines += ["*A quick look, on smaller problems with fewer runs; leave out `--quick` for the numbers that count.*", ""]
    if study.claims:
        lines += [tally(study.claims), "", *_claims(study.claims), ""]
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


def _claims(claims: tuple[Claim, ...]) -> list[str]:
    """As a table; a reason that all rows share stands once, above it."""
    reasons = {claim.why for claim in claims}
    shared = [f"Throughout: {claims[0].why}.", ""] if len(reasons) == 1 and claims[0].why else []
    lines = ["| number | covey | paper | difference | chance allows | verdict | why |", "|---|---:|---:|---:|---:|---|---|"]
    for claim in claims:
        digits = 0 if all(float(value).is_integer() and abs(value) >= 2 for value in (claim.ours, claim.paper)) else 3
        numbers = [f"{value:,.{digits}f}" for value in (claim.ours, claim.paper, claim.difference)]
        allowed = "" if claim.spread is None else f"{claim.spread:.3f}"
        why = "" if shared else claim.why
        lines.append(f"| {' | '.join([claim.what, *numbers, allowed, claim.verdict, why])} |")
    return [*shared, *lines]


def claims_frame(claims: tuple[Claim, ...]) -> pl.DataFrame:
    """Ours, the paper's and the difference in one row each."""
    rows = [
        {
            "number": claim.what,
            "covey": float(claim.ours),
            "paper": float(claim.paper),
            "difference": float(claim.difference),
            "chance allows": claim.spread,
            "chance allows one run": claim.loose,
            "verdict": claim.verdict,
            "why": claim.why,
        }
        for claim in claims
    ]
    return pl.DataFrame(
        rows, infer_schema_length=None, schema_overrides={"chance allows": pl.Float64, "chance allows one run": pl.Float64}
    )


def tally(claims: tuple[Claim, ...]) -> str:
    """How many agree."""
    verdicts = [claim.verdict for claim in claims]
    words = {
        "agrees": ("agrees", "agree"),
        "agrees as one run": ("agrees as that of one run", "agree as those of one run"),
        "differs": ("differs", "differ"),
        "not comparable": ("cannot be compared", "cannot be compared"),
    }
    counts = {verdict: verdicts.count(verdict) for verdict in words}  # type: ignore[arg-type]
    told = ", ".join(f"{count} {words[verdict][count != 1]}" for verdict, count in counts.items() if count)
    return f"Of {len(claims)} number{'s' * (len(claims) != 1)} of the paper: {told}."


def _markdown(frame: pl.DataFrame, digits: int) -> list[str]:
    numeric = [dtype.is_numeric() for dtype in frame.dtypes]
    head = [name.replace("_", " ").replace("|", "\\|") for name in frame.columns]
    lines = [f"| {' | '.join(head)} |", f"| {' | '.join('---:' if right else '---' for right in numeric)} |"]
    formats = [_format(frame[name].drop_nulls().to_list(), digits) for name in frame.columns]
    for row in frame.iter_rows():
        cells = ["" if value is None else shown(value) for value, shown in zip(row, formats, strict=True)]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _format(values: list[Any], digits: int) -> Callable[[Any], str]:
    """One way to print a column: counts with separators, settings as they are, measurements with so many digits."""
    if not all(isinstance(value, int | float) for value in values):
        return lambda value: str(value).replace("|", "\\|")
    if digits < 0 and any(0 < abs(value) < 1e-3 for value in values):
        return lambda value: f"{value:.1e}"
    if all(float(value).is_integer() for value in values) or any(abs(value) >= 1000 for value in values):
        return lambda value: f"{value:,.0f}"
    if all(value == float(f"{value:.2g}") for value in values):
        return lambda value: f"{value:g}"
    return lambda value: f"{value:.{max(digits, 0)}f}" if abs(value) >= 0.5 * 10.0**-digits or value == 0 else f"{value:.1g}"


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
