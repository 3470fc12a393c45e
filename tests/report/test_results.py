"""A study on disk: the page, the tables, the figures."""

from __future__ import annotations

from dataclasses import replace

import polars as pl
import pytest

from covey.errors import DataError
from covey.experiments import donors, limits, simulation
from covey.experiments.mailings import simulated
from covey.experiments.study import Claim, Study, Table
from covey.report import results
from covey.report.figures import draw
from covey.report.results import save, section, summary, tally


@pytest.fixture(scope="module")
def study():
    gain = limits.james_stein_table((2, 5), 3, 0, lambda *_: None)
    claims = (
        Claim("a number", 1.0, 1.01, 0.1),
        Claim("another", 2.0, 5.0, 0.1, "the paper's is wrong"),
        Claim("a third", 2.0, 5.0, None, "other data", comparable=False),
    )
    tables = (Table("james-stein", "Ratio of |errors|", gain), Table("more", "More", gain, shown=False))
    return Study("limits", "Limits", {"seed": 0}, ("It gains.",), claims, tables, ("A remark.",))


def test_a_row_has_ours_the_papers_and_the_difference(study, tmp_path):
    save(study, tmp_path, "covey reproduce limits")
    page = (tmp_path / "README.md").read_text()
    assert "| another | 5.000 | 2.000 | 3.000 | 0.100 | differs | the paper's is wrong |" in page
    assert "Of 3 numbers of the paper: 1 agree, 1 differ, 1 cannot be compared." in page
    assert "![" in page
    assert "`covey reproduce limits`" in page
    assert pl.read_csv(tmp_path / "limits" / "james-stein.csv").equals(study.table("james-stein"))
    assert (tmp_path / "limits" / "claims.csv").exists()
    for ending in ("png", "svg"):
        assert (tmp_path / "limits" / f"james-stein.{ending}").stat().st_size > 5000
    for link in ("limits/james-stein.png", "limits/james-stein.csv", "limits/more.csv"):
        assert f"({link})" in page
        assert (tmp_path / link).exists()


def test_sections_of_other_studies_stay_and_ones_own_is_replaced(study, tmp_path):
    save(study, tmp_path, "first")
    page = tmp_path / "README.md"
    other = "<!-- study: simulation -->\n## Simulation\n\nkept\n\n"
    page.write_text(page.read_text().replace("<!-- study: limits -->", other + "<!-- study: limits -->"))
    save(replace(study, findings=("It gains more.",)), tmp_path, "second")
    text = page.read_text()
    assert text.count("<!-- study: limits -->") == 1
    assert "kept" in text
    assert "It gains more." in text
    assert "`first`" not in text
    assert text.index("study: simulation") < text.index("study: limits")


def test_the_same_study_gives_the_same_bytes(study, tmp_path):
    for name in ("a", "b"):
        save(study, tmp_path / name, "covey reproduce")
    for file in sorted((tmp_path / "a").rglob("*.*")):
        assert file.read_bytes() == (tmp_path / "b" / file.relative_to(tmp_path / "a")).read_bytes()


def test_numbers_print_with_sensible_digits():
    told = [results._cell(value, 3) for value in (None, 1234567, 0.12345, 1e-7, 12345.6, 29490.0, 0.0, "a|b")]
    assert told == ["", "1,234,567", "0.123", "1e-07", "12,346", "29,490", "0.000", "a\\|b"]
    assert results._cell(3.2e-15, -1) == "3.2e-15"


def test_quick_looks_are_marked(study):
    assert "quick look" in section(replace(study, quick=True), [], "x")
    assert "quick look" not in section(study, [], "x")


def test_the_screen_says_what_differs(study):
    text = summary(study)
    assert "It gains." in text
    assert "another: 5.000, the paper 2.000; the paper's is wrong" in text
    assert tally(study.claims[:1]) == "Of 1 numbers of the paper: 1 agree."


def test_a_file_in_the_way_is_refused(tmp_path):
    (tmp_path / "results").write_text("")
    with pytest.raises(DataError, match="is a file"):
        results.check_folder(tmp_path / "results")


@pytest.mark.parametrize("kind", ["donors", "simulation", "robustness"])
def test_every_figure_has_labels_a_title_and_no_empty_panel(kind, tmp_path, monkeypatch):
    from covey.report import figures

    kept = []
    monkeypatch.setattr(figures.Figure, "savefig", lambda self, *_, **__: kept.append(self))
    draw(STUDIES[kind](), tmp_path)
    for figure in kept:
        assert figure.get_suptitle()
        labels = [panel.get_xlabel() for panel in figure.axes] + [figure.get_supxlabel()]
        assert any(labels)
        assert any(panel.get_ylabel() for panel in figure.axes)
        for panel in figure.axes:
            assert panel.has_data()


def small_simulation():
    rows = [
        {
            "rows": m,
            "run": run,
            "method": name,
            **dict.fromkeys(("average", "sd", "max"), 1.0 + run),
            **dict.fromkeys(("average_squared", "sd_squared", "max_squared"), 1.0),
        }
        for m in (1, 10)
        for run in range(2)
        for name in (*simulation.OF_THE_PAPER, *simulation.BEYOND)
    ]
    each = pl.DataFrame(rows)
    table = simulation._distances(simulation.summary(each))
    return Study("simulation", "S", {}, (), (), (Table("runs", "", each), Table("distance", "", table)))


def small_robustness():
    names = ["locally-trained", "single-cluster", "hierarchy, penalties of the truth", "hierarchy, penalties by CV"]
    wrong = pl.DataFrame({"wrong share": [0.0, 1.0], **{name: [1.0, 2.0] for name in names}})
    return Study("robustness", "R", {}, (), (), (Table("clusters", "", wrong),))


STUDIES = {
    "donors": lambda: donors.study(simulated(zips=40, appeals=1500, seed=0), quick=True),
    "simulation": small_simulation,
    "robustness": small_robustness,
}
