"""A study on disk: the page, the tables and the figures."""

from __future__ import annotations

from dataclasses import replace

import polars as pl
import pytest

from covey.errors import DataError
from covey.report import results
from covey.report.figures import draw
from covey.report.results import save, section, summary, tally
from covey.reproduce import donors, limits, simulation
from covey.reproduce.mailings import simulated
from covey.reproduce.study import Claim, Study, Table


@pytest.fixture(scope="module")
def study():
    gain = limits.james_stein_table((2, 5), 3, 0, lambda *_: None)
    claims = (
        Claim("a number", 1.0, 1.01, 0.1),
        Claim("another", 2.0, 5.25, 0.1, "the paper's is wrong"),
        Claim("a third", 2.0, 5.0, None, "other data", comparable=False),
    )
    tables = (Table("james-stein", "Ratio of |errors|", gain), Table("more", "More", gain, shown=False))
    return Study("limits", "Limits", {"seed": 0}, ("It gains.",), claims, tables, ("A remark.",))


def test_a_row_has_ours_the_papers_and_the_difference(study, tmp_path):
    save(study, tmp_path, "covey reproduce limits")
    page = (tmp_path / "README.md").read_text()
    assert "| another | 5.250 | 2.000 | 3.250 | 0.100 | differs | the paper's is wrong |" in page
    assert "Verdicts on 3 printed numbers: 1 agrees, 1 differs, 1 not comparable." in page
    assert "![" in page
    assert "`covey reproduce limits`" in page
    assert pl.read_csv(tmp_path / "limits" / "james-stein.csv").equals(study.table("james-stein"))
    assert (tmp_path / "limits" / "claims.csv").exists()
    for ending in ("png", "svg"):
        assert (tmp_path / "limits" / f"james-stein.{ending}").stat().st_size > 5000
    for link in ("limits/james-stein.png", "limits/james-stein.csv", "limits/more.csv"):
        assert f"({link})" in page
        assert (tmp_path / link).exists()


def test_sections_of_other_studies_stay_and_ones_own_is_replaced(study, tmp_path, monkeypatch):
    monkeypatch.setattr(results, "draw", lambda *_: [])  # the page only
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
    columns = {
        "count": [1234567, 3],
        "setting": [0.01, 10.0],
        "measured": [0.12345, 1e-7],
        "large": [12345.6, 0.5],
        "words": ["a|b", None],
    }
    rows = results._markdown(pl.DataFrame(columns), 3).split("\n")[2:]
    assert rows == ["| 1,234,567 | 0.01 | 0.123 | 12,346 | a\\|b |", "| 3 | 10 | 1e-07 | 0 |  |"]
    assert results._markdown(pl.DataFrame({"tiny": [3.2e-15]}), -1).endswith("\n| 3.2e-15 |")


def test_quick_runs_are_marked(study):
    assert "Quick run" in section(replace(study, quick=True), [], "x")
    assert "Quick run" not in section(study, [], "x")


def test_the_screen_says_what_differs(study):
    text = summary(study)
    assert "It gains." in text
    assert "another: 5.250, the paper 2.000; the paper's is wrong" in text
    assert tally(study.claims[:1]) == "Verdicts on 1 printed numbers: 1 agrees."
    assert "1 agrees as one run" in tally((Claim("x", 1.0, 1.2, 0.1, loose=0.3),))


def test_a_file_in_the_way_is_refused(tmp_path):
    (tmp_path / "results").write_text("")
    with pytest.raises(DataError, match="is a file"):
        results.check_folder(tmp_path / "results")
    (tmp_path / "limits").write_text("")
    with pytest.raises(DataError, match="limits' is a file"):
        results.check_folder(tmp_path)


@pytest.mark.parametrize("content", [b"# My own project\n", b"caf\xe9", b""])
def test_a_readme_that_covey_did_not_write_is_not_replaced(study, tmp_path, content):
    (tmp_path / "README.md").write_bytes(content)
    with pytest.raises(DataError, match="not written by covey"):
        save(study, tmp_path, "x")
    assert (tmp_path / "README.md").read_bytes() == content


def test_a_reason_that_all_claims_share_is_stated_once(study):
    claims = tuple(Claim(f"number {i}", 1.0, 2.0, None, "other data", comparable=False) for i in range(3))
    page = section(replace(study, claims=claims), [], "x")
    assert page.count("other data") == 1
    assert "| number 0 | 2.000 | 1.000 | 1.000 |  | not comparable |  |" in page
    counts = section(replace(study, claims=(Claim("ZIP codes", 29490, 29490, None),)), [], "x")
    assert "| ZIP codes | 29,490 | 29,490 | 0 |" in counts


@pytest.mark.parametrize("kind", ["donors", "simulation", "robustness", "limits", "communication"])
def test_every_figure_has_labels_a_title_and_no_empty_panel(kind, tmp_path, monkeypatch):
    from covey.report import figures

    kept = []
    monkeypatch.setattr(figures.Figure, "savefig", lambda self, *_, **__: kept.append(self))
    drawn = draw(STUDIES[kind](), tmp_path)
    for title in TITLES[kind]:
        assert any(title in each for _, each in drawn), drawn
    for figure in kept:
        assert figure.get_suptitle()
        labels = [panel.get_xlabel() for panel in figure.axes] + [figure.get_supxlabel()]
        assert any(labels)
        assert any([*(panel.get_ylabel() for panel in figure.axes), figure.get_supylabel()])
        for panel in figure.axes:
            assert panel.has_data()
    if kind == "communication":  # bounds above the axis are cut off, and the legend says where
        race = next(figure for figure in kept if any("bound" in text for text in legend_of(figure)))
        assert [panel.get_ylim()[1] for panel in race.axes] == [30, 30]
        assert any("bound" in text and "not drawn above 30" in text for text in legend_of(race))


def legend_of(figure):
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


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
        for name in (*simulation.OF_THE_PAPER, "James-Stein", "oracle wbar")
    ]
    best = pl.when(pl.col("method") == "minimiser").then(pl.col("average") - 0.5).otherwise(pl.col("average"))
    each = pl.DataFrame(rows).with_columns(average=best)
    return Study("simulation", "S", {}, (), (), (Table("runs", "", each),))


def small_robustness():
    names = ["locally-trained", "single-cluster", "hierarchy, penalties of the truth", "hierarchy, penalties by CV"]
    values = [[3.0, 3.0, 3.0], [2.0, 2.0, 2.0], [1.0, 1.5, 2.5], [1.0, 1.5, 2.1]]
    wrong = pl.DataFrame({"wrong share": [0.0, 0.4, 1.0], **dict(zip(names, values, strict=True))})
    return Study("robustness", "R", {}, (), (), (Table("clusters", "", wrong),))


def small_limits():
    gain = pl.DataFrame(
        [
            {
                "design": design,
                "d": d,
                "|wbar*|": size,
                "clients": 0.9 + 0.025 * size,
                "standard error": 0.01,
                "global model": 0.5,
            }
            for design in limits.JAMES_STEIN_DESIGNS
            for d in (2, 5)
            for size in (0.0, 8.0)
        ]
    )
    return Study("limits", "L", {}, (), (), (Table("james-stein", "", gain),))


def small_comparison():
    counts = {"exchanges to 0.001": [2.0, 3.0], "exchanges to 0.001, sd": [0.0, 1.0]}
    counts |= {"exchanges to 1e-06": [4.0, None], "exchanges to 1e-06, sd": [0.5, None]}
    whole = pl.DataFrame({"problem": ["radon"] * 2, "solver": ["apgd", "l2gd"], "lowest gap": [1e-7, 2e-3], **counts})
    won = pl.DataFrame({"problem": ["radon"], "gap": ["1e-06"], "fewest exchanges, vectors only": ["apgd 4"]})
    return {"comparison-all": whole, "winners": won}


def small_communication():
    names = ("sweep", "newton", "al2sgd_plus", "l2gd", "l2gd switching", "one_coin")
    points = [
        {"solver": name, "kind": kind, "exchanges": float(count), "bytes": 1e4 * count, "gap": 1.0 / count}
        for name in names
        for kind in ("measured", "promised")
        for count in (1, 2, 50)
    ]
    race = pl.DataFrame({"solver": names, "exchanges to 1e-06": [1.0, 2.0, 84.0, None, None, None]})
    counts = {"iterations": [9.0, 5.0], "iterations, promised": [20.0, 9.0], "exchanges": [3.0, 2.0]}
    chance = pl.DataFrame({"multiple of the best": [0.1, 1.0], **counts})
    tau = pl.DataFrame({"tau": ["0", "tau* = 0.50"], "iterations": [9.0, 5.0]})
    tables = {"curves": pl.DataFrame(points), "race": race, "chance": chance, "tau": tau, **small_comparison()}
    return Study("communication", "C", {}, (), (), tuple(Table(name, "", frame) for name, frame in tables.items()))


STUDIES = {
    "donors": lambda: donors.study(simulated(zips=40, appeals=1500, seed=0), quick=True),
    "simulation": small_simulation,
    "robustness": small_robustness,
    "limits": small_limits,
    "communication": small_communication,
}
TITLES = {
    "donors": ["Of 40 ZIP codes", "Cross-validation chooses gamma ="],
    "simulation": [
        "three baselines at every size (at 10 rows 1.00, against 1.50 locally-trained, 1.50 single-model, 1.50 single-cluster)",
        "James-Stein is not closer at any size",
    ],
    "robustness": ["if 0%, 40% of the clients are in a random cluster, but not if 100% are", "at most 5.0% farther"],
    "limits": ["by up to 10.0%", "the largest ratio is 1.1000"],
    "communication": [
        "Exchanges of a client to a gap of 1e-06: sweep 1, newton 2, al2sgd_plus 84; not reached by l2gd, l2gd switching",
        "fewest exchanges (2) at 1 times the probabilities of Corollary 4.4; iterations: 9 at tau = 0, 5 at tau* = 0.50",
        "Fewest exchanges to a gap of 1e-06 among covey's solvers that send vectors: apgd 4 (radon)",
    ],
}


@pytest.mark.parametrize(("rows", "where"), [((1, 10), "except at 1, 10 rows"), ((10,), "except at 10 rows")])
def test_the_figure_of_distances_says_where_a_baseline_is_closer(rows, where, tmp_path):
    study = small_simulation()
    wins = (pl.col("method") == "single-model") & pl.col("rows").is_in(rows)
    runs = study.table("runs").with_columns(average=pl.when(wins).then(0.1).otherwise("average"))
    ((_, title),) = draw(replace(study, tables=(Table("runs", "", runs),)), tmp_path)
    assert where in title
    assert "at every size" not in title
