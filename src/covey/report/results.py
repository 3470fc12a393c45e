"""Write a study to a folder: a section of README.md, a CSV file for each table, and a PNG and an SVG file for each figure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from textwrap import fill
from typing import Any

import polars as pl

from covey._version import __version__
from covey.errors import DataError
from covey.report.figures import draw
from covey.reproduce.study import Claim, Study

ORDER = ("simulation", "donors", "donors-karlan-list", "donors-tables", "limits", "communication", "robustness")

_SECTION = re.compile(r"<!-- study: ([a-z-]+) -->\n(.*?)(?=<!-- study: |\Z)", re.DOTALL)
_HEAD = """# What the paper reports, and what covey finds

The paper is *Personalized Federated Learning with Multiple Known Clusters* by Lyu, Hanzely and Kolar (2022),
<https://arxiv.org/abs/2204.13619>. `covey reproduce` writes this page. The last lines of each section have the command
and the settings, which include the seed. If the paper prints numbers for a section, its first table has our number,
the paper's number, their difference and a verdict.

"""


def check_folder(folder: Path) -> None:
    """Raise an error if results cannot be written to a folder, or would replace a file that covey did not write."""
    for path in (folder, *(folder / name for name in ORDER)):
        if path.exists() and not path.is_dir():
            raise DataError(f"{str(path)!r} is a file, but results need a folder there; move it or change --out.")
    page = folder / "README.md"
    if page.exists() and not (page.is_file() and page.read_bytes().startswith(_HEAD.splitlines()[0].encode())):
        raise DataError(f"{str(page)!r} was not written by covey and would be replaced; give another folder with --out.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as problem:
        raise DataError(f"Cannot write to {str(folder)!r} ({problem.strerror}); give another folder with --out.") from None


def save(study: Study, folder: Path, command: str) -> list[Path]:
    """Write a study to a folder.

    Parameters
    ----------
    study : the study; its section replaces an earlier one in README.md, and other sections stay
    folder : created if it does not exist
    command : the command that made the study, for the page

    Returns
    -------
    list of Path
        README.md and the PNG files.
    """
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
    parts = [f"<!-- study: {name} -->\n{sections[name]}" for name in ORDER if name in sections]
    unfinished = page.with_suffix(".part")
    unfinished.write_text(_HEAD + "".join(parts), encoding="utf-8")
    unfinished.replace(page)
    return [page, *(inner / f"{name}.png" for name, _ in figures)]


def section(study: Study, figures: list[tuple[str, str]], command: str) -> str:
    """A study as Markdown."""
    blocks = [f"## {study.title}", _bullets(study.findings)]
    if study.quick:
        blocks.append(_prose("*Quick run on smaller problems with fewer repeats; run without `--quick` for the full study.*"))
    if study.claims:
        blocks += [_prose(tally(study.claims)), *_claims(study.claims)]
    blocks += [_prose(f"![{title}]({study.name}/{name}.png)") for name, title in figures]
    links = {table.name: f"{study.name}/{table.name}.csv" for table in study.tables}
    for table in study.tables:
        if table.shown:
            blocks += [_prose(f"**{table.title}** ([CSV]({links[table.name]}))"), _markdown(table.frame, table.digits)]
            blocks += [_prose(table.note)] if table.note else []
    hidden = [f"[{table.name}]({links[table.name]})" for table in study.tables if not table.shown]
    blocks += [_prose(f"More numbers: {', '.join(hidden)}.")] if hidden else []
    blocks += [_bullets(study.remarks)] if study.remarks else []
    settings = ", ".join(f"{name} = {value}" for name, value in study.settings.items())
    made = f"`{command}`, covey {__version__}.\n" + _prose(f"Settings: {settings}.")
    return "\n\n".join([*blocks, made]) + "\n\n"


def _prose(text: str, indent: str = "") -> str:
    return fill(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _bullets(sentences: Iterable[str]) -> str:
    return "\n".join(_prose(f"- {sentence}", "  ") for sentence in sentences)


def _claims(claims: tuple[Claim, ...]) -> list[str]:
    """The table of claims; a reason that all of them share is stated once, above the table."""
    shared = claims[0].why if len({claim.why for claim in claims}) == 1 else ""
    rows = []
    for claim in claims:
        digits = 0 if all(float(value).is_integer() and abs(value) >= 2 for value in (claim.ours, claim.paper)) else 3
        numbers = [f"{value:,.{digits}f}" for value in (claim.ours, claim.paper, claim.difference)]
        allowed = "" if claim.spread is None else f"{claim.spread:.3f}"
        rows.append([claim.what, *numbers, allowed, claim.verdict, "" if shared else claim.why])
    names = ("number", "covey", "paper", "difference", "chance allows", "verdict", "why")
    table = _grid(names, [False, *[True] * 4, False, False], rows)
    return [_prose(f"The same holds for all of them: {shared}."), table] if shared else [table]


def claims_frame(claims: tuple[Claim, ...]) -> pl.DataFrame:
    """A row for each claim: our number, the paper's, the difference and the verdict."""
    numbers = {"covey": "ours", "paper": "paper", "difference": "difference"}
    numbers |= {"chance allows": "spread", "chance allows one run": "loose"}
    columns = {"number": "what", **numbers, "verdict": "verdict", "why": "why"}
    rows = {name: [getattr(claim, attribute) for claim in claims] for name, attribute in columns.items()}
    return pl.DataFrame(rows, schema_overrides=dict.fromkeys(numbers, pl.Float64), strict=False)


def tally(claims: tuple[Claim, ...]) -> str:
    """How many claims have each verdict."""
    counts = Counter(claim.verdict for claim in claims)
    return f"Verdicts on {len(claims)} printed numbers: {', '.join(f'{count} {verdict}' for verdict, count in counts.items())}."


def _markdown(frame: pl.DataFrame, digits: int) -> str:
    formats = [_format(frame[name].drop_nulls().to_list(), digits) for name in frame.columns]
    rows = [
        ["" if value is None else shown(value) for value, shown in zip(row, formats, strict=True)] for row in frame.iter_rows()
    ]
    return _grid([name.replace("_", " ") for name in frame.columns], [dtype.is_numeric() for dtype in frame.dtypes], rows)


def _grid(names: Sequence[str], right: Sequence[bool], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table with columns aligned to the right or to the left."""
    cells = [[cell.replace("|", "\\|") for cell in row] for row in (names, *rows)]
    cells.insert(1, ["---:" if aligned else "---" for aligned in right])
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def _format(values: list[Any], digits: int) -> Callable[[Any], str]:
    """How to print a column: counts with separators, round settings as they are, other numbers with ``digits``."""
    if not all(isinstance(value, int | float) for value in values):
        return str
    if digits < 0 and any(0 < abs(value) < 1e-3 for value in values):
        return lambda value: f"{value:.1e}"
    if all(float(value).is_integer() for value in values) or any(abs(value) >= 1000 for value in values):
        return lambda value: f"{value:,.0f}"
    if all(value == float(f"{value:.2g}") for value in values):
        return lambda value: f"{value:g}"
    return lambda value: f"{value:.{max(digits, 0)}f}" if abs(value) >= 0.5 * 10.0**-digits or value == 0 else f"{value:.1g}"


def summary(study: Study) -> str:
    """A study in a few lines, for the terminal."""
    lines = [study.title, *(f"  - {sentence}" for sentence in study.findings)]
    if study.claims:
        lines.append(f"  - {tally(study.claims)}")
        lines += [
            f"    {claim.what}: {claim.ours:.3f}, the paper {claim.paper:.3f}; {claim.why}"
            for claim in study.claims
            if claim.verdict == "differs"
        ]
    return "\n".join([*lines, *(f"  - {sentence}" for sentence in study.remarks)])
