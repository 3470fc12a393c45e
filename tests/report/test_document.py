"""The report: its contents are those of the model, it is one small file, and strings of a user cannot break out of it."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import numpy as np
import polars as pl
import pytest

import covey
from covey import CoveyError, HierarchicalClassifier, Spec
from covey.federation.operator.settings import RunSettings
from covey.model.new_rows import group_rows
from covey.problem.rows import Arrays
from covey.report.checks import _calibrated, by_chance
from covey.report.diagnostics import calibration_table, shares
from covey.report.document import _effects, _question
from covey.report.findings import fingerprint, gains, normality
from tests.cli.shell import inside

SECTIONS = (
    "answer",
    "model",
    "coefficients",
    "gains",
    "surprises",
    "search",
    "assumptions",
    "unclear",
    "federation",
    "reproduce",
)
EVIL = "<script>alert(1)</script>\"'&</script><img src=x onerror=alert(2)>"


class Reader(HTMLParser):
    """Counts tags, collects ids and visible text, and checks that tags are closed in order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.ids, self.text, self.links, self.sources = [], {}, [], [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        named = dict(attrs)
        self.tags[tag] = self.tags.get(tag, 0) + 1
        self.ids += [named["id"]] if "id" in named else []
        self.links += [named["href"]] if "href" in named else []
        self.sources += [named["src"]] if "src" in named else []
        assert not [name for name in named if name.startswith("on")]
        if tag == "img":
            assert named["alt"]
        if tag not in ("meta", "img", "input", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "script" not in self.open and "style" not in self.open:
            self.text.append(data)


@pytest.fixture(scope="module")
def written(homes, tmp_path_factory):
    model = covey.fit(homes, "log_radon ~ floor + (1 | state/county)")
    path = tmp_path_factory.mktemp("report") / "radon.html"
    assert model.report(path, data=homes) == path
    return model, path.read_text()


def groups_of(text):
    return json.loads(re.search(r'<script type="application/json" id="groups">(.*?)</script>', text, re.S).group(1))


def test_the_report_has_every_section_and_needs_no_network(written):
    _, text = written
    page = Reader(text)
    assert [name for name in SECTIONS if name not in page.ids] == []
    assert {link for link in page.links if link.startswith("#")} >= {f"#{name}" for name in SECTIONS}
    assert not [link for link in page.links if not link.startswith("#")]
    assert all(source.startswith("data:image/png;base64,") for source in page.sources)
    assert page.tags["h1"] == page.tags["main"] == 1
    assert page.tags["script"] == 2
    assert "default-src 'none'" in text
    assert len(text) < 3_000_000
    assert "pass data=" not in "".join(page.text)


def test_numbers_of_the_report_are_those_of_the_model(written, homes):
    model, text = written
    said = " ".join("".join(Reader(text).text).split())
    marginal, conditional = model.r2()
    assert f"{100 * marginal:.1f}% of the variance" in said
    assert f"groups {100 * conditional:.1f}%" in said
    assert f"{model.global_coef_[1]:.4g}" in said
    from covey.fitting.comparison import compare
    from covey.problem.problem import resolve
    from covey.problem.rows import read_rows

    errors = compare(*read_rows(homes, resolve(model.model_.spec))).errors
    assert f"its error is {errors['hierarchical']:.4g}" in said
    change = 100 * (errors["hierarchical"] / errors["single-model"] - 1)
    assert f"{-change:.1f}% smaller than with one pooled model" in said
    assert fingerprint(homes) in said
    effects = model.random_effects("client")
    unclear = (effects["deviation"].abs() <= 1.96 * effects["conditional_variance"].sqrt()).sum()
    assert f"{unclear} of 470 counties cannot be told apart" in said


def test_the_search_has_every_group(written, homes):
    model, text = written
    found = groups_of(text)
    assert len(found["rows"]) == 470
    row = next(row for row in found["rows"] if row[0] == "Apache, AZ")
    own = model.coef_frame("client").filter(client="Apache, AZ", term="Intercept").row(0, named=True)
    assert found["clusters"][row[1]] == "AZ"
    assert row[2] == own["rows"]
    assert row[3] == pytest.approx(homes.filter(county="Apache, AZ")["log_radon"].mean(), rel=1e-3)
    assert row[6:9] == pytest.approx([own["estimate"], own["lower"], own["upper"]], rel=1e-3)
    assert row[9] == pytest.approx(model.reliability().filter(client="Apache, AZ")["reliability"][0], rel=1e-3)


def test_strings_of_a_user_cannot_break_out(tmp_path):
    rng = np.random.default_rng(0)
    group = np.repeat(np.arange(12), 10)
    names = [f"{EVIL}{at}" for at in range(12)]
    table = pl.DataFrame(
        {
            "y": rng.normal(size=120) + rng.normal(size=12)[group],
            "<b>x": rng.normal(size=120),
            "</script>g": [names[at] for at in group],
            "<i>c": [f"{EVIL}c{at % 3}" for at in group],
        }
    )
    model = covey.fit(table, Spec(formula="y ~ `<b>x`", client="</script>g", cluster="<i>c", vary=["1"]))
    text = model.report(tmp_path / "evil.html", data=table, title=EVIL, question=EVIL).read_text()
    page = Reader(text)
    assert page.tags["script"] == 2
    assert set(page.tags) & {"b", "i"} == set()
    assert page.tags["img"] == text.count("data:image/png;base64,")
    assert groups_of(text)["rows"][0][0].startswith("<script>")


def test_a_saved_model_alone_says_what_needs_rows(written, tmp_path):
    model, _ = written
    again = covey.load(model.save(tmp_path / "model"))
    text = again.report(tmp_path / "alone.html").read_text()
    said = "".join(Reader(text).text)
    assert said.count("pass data=") >= 3
    assert len(groups_of(text)["rows"]) == 470
    without = covey.load(model.save(tmp_path / "small", sums=False))
    assert "sums of all clients" in without.report(tmp_path / "small.html").read_text()


def test_given_penalties_classifiers_and_no_clusters(homes, tmp_path):
    given = covey.fit(homes, Spec(formula="log_radon ~ floor", client="county", cluster="state", gamma=6.0))
    assert "penalties were given" in given.report(tmp_path / "given.html", data=homes).read_text()
    some = homes.with_columns(high=(pl.col("radon") > 4).cast(pl.Int64))[:3000]
    model = HierarchicalClassifier(formula="high ~ floor + (1 | county)", tests=False).fit(some)
    text = "".join(Reader(model.report(tmp_path / "c.html", data=some).read_text()).text)
    assert "Calibration" in text
    assert "How does the probability of 1 depend on floor" in text
    assert f"With one unit more of floor, the odds of 1 are multiplied by {np.exp(model.global_coef_[1]):.3g}" in text
    assert "cross-entropy" in text
    arrays = covey.HierarchicalRegressor(gamma=1.0).fit([[0.0], [1.0], [2.0]], [1.0, 3.0, 2.0], client=["a", "b", "b"])
    assert arrays.report(tmp_path / "arrays.html").stat().st_size > 1000
    with pytest.raises(CoveyError, match="named columns"):
        arrays.report(tmp_path / "arrays.html", data=homes)
    with pytest.raises(CoveyError, match="folder that exists"):
        arrays.report(tmp_path / "nowhere" / "r.html")


def test_categories_and_rates_are_said_in_words(homes):
    place = pl.when(pl.col("floor") == 0).then(pl.lit("basement")).otherwise(pl.lit("above"))
    some = homes[:800].with_columns(place=place, count=pl.col("radon").round())
    model = covey.HierarchicalPoissonRegressor(formula="count ~ place + (1 | county)", tests=False).fit(some)
    (said,) = _effects(model.model_)
    rate = np.exp(model.global_coef_[1])
    assert said.startswith(f"With place = basement instead of above, the mean of count is multiplied by {rate:.3g} (95%")
    assert _question(model.model_) == "How does count depend on place, and how does it differ between counties?"


def test_thirty_thousand_groups_fit_in_three_megabytes(tmp_path):
    rng = np.random.default_rng(0)
    client = np.repeat(np.arange(30_000), rng.integers(1, 4, size=30_000))
    y = rng.normal(size=len(client)) + rng.normal(size=30_000)[client]
    table = pl.DataFrame({"y": y, "customer": [f"customer number {at:06} of all shops" for at in client], "shop": client % 300})
    model = covey.HierarchicalRegressor(formula="y ~ 1 + (1 | shop/customer)", tests=False).fit(table)
    path = model.report(tmp_path / "many.html")
    assert 2_900_000 < path.stat().st_size < 3_000_000
    kept = len(groups_of(path.read_text())["rows"])
    assert kept > 25_000
    assert kept == 30_000 or f"{kept:,} of 30,000" in path.read_text()


def test_the_report_of_a_run_across_sites(homes, tmp_path):
    spec = Spec(formula="log_radon ~ floor", client="county", cluster="state", gamma=6.0)
    covey.simulate_sites(homes, spec, sites=3, out=tmp_path / "operator", models=tmp_path / "sites")
    text = "".join(Reader(covey.load(tmp_path / "operator").report(tmp_path / "o.html").read_text()).text)
    assert "site1, site2, site3" in text
    assert "sweep up" in text
    assert "no epsilon" in text
    site = "".join(Reader(covey.load(tmp_path / "sites" / "site1").report(tmp_path / "s.html").read_text()).text)
    assert "site1, site2, site3" in site


def test_the_report_of_a_site_does_not_claim_the_rows_of_others(homes, tmp_path):
    spec = Spec(formula="log_radon ~ floor", client="county", cluster="state", tests=False)
    covey.simulate_sites(homes[:3000], spec, sites=2, models=str(tmp_path / "sites"))
    model = covey.load(tmp_path / "sites" / "site1")
    text = "".join(Reader(model.report(tmp_path / "s.html").read_text()).text)
    own = f"This site has {model.model_.n_rows:,} rows of {len(model.clients_)} counties."
    assert f"learned from 3,000 rows at all sites. {own}" in text
    assert "explained (R2): This part needs the rows" in text
    assert "Effect of floor: This part needs the rows" in text


def test_the_report_of_a_private_run_says_what_was_spent(homes, tmp_path):
    spec = Spec(formula="log_radon ~ floor", client="county", cluster="state", gamma=6.0, lam=6.0)
    covey.simulate_sites(homes, spec, sites=2, settings=RunSettings.of({"epsilon": 4.0}), out=tmp_path / "private")
    text = "".join(Reader(covey.load(tmp_path / "private").report(tmp_path / "p.html", data=homes).read_text()).text)
    assert "Privacy spent for every county: epsilon 4, delta 1e-06" in text
    assert "left the sites with noise" in text
    assert "learned from 470 counties" in text  # rows are not counted
    assert "did not converge" not in text


def test_a_right_model_of_small_groups_is_called_calibrated():
    """On its own rows such a model looks wrong, because it moves small groups towards the others."""
    rng = np.random.default_rng(0)
    client = np.repeat(np.arange(1500), 10)
    margin = rng.normal(size=1500)[client] - 0.5
    y = (rng.uniform(size=len(client)) < 1 / (1 + np.exp(-margin))).astype(int)
    table = pl.DataFrame({"y": y, "client": client})
    model = HierarchicalClassifier(formula="y ~ 1 + (1 | client)", tests=False).fit(table)
    seen = calibration_table(model.model_, model.plot._needed(table))
    assert _calibrated(seen, "")[0] != "good"
    held = gains(model.model_, group_rows(model.model_, table, Arrays()))
    assert len(held.rows[0]) == held.test_rows
    assert _calibrated(shares(*held.rows), "")[0] == "good"
    wrong = 1 / (1 + np.exp(-2 * margin))
    assert _calibrated(shares(wrong, y.astype(float), np.ones(len(y))), "")[0] != "good"


@pytest.mark.parametrize("rows", [60, 5000])
def test_equal_spreads_are_found_with_few_and_with_many_rows(rows):
    """The ratio of the largest to the smallest of five standard deviations is compared with what chance gives."""
    rng = np.random.default_rng(0)
    ratios = [np.ptp(np.log(rng.normal(size=(5, rows // 5)).std(axis=1))) for _ in range(400)]
    assert np.mean(np.exp(ratios) > by_chance(rows // 5)) == pytest.approx(0.05, abs=0.035)


def test_the_hash_does_not_depend_on_the_library_or_the_order_of_columns(homes):
    some = homes[:50]
    assert fingerprint(some) == fingerprint(some.to_pandas()) == fingerprint(some.select(sorted(some.columns)))
    assert fingerprint(some) != fingerprint(some[::-1])


def test_verdicts():
    rng = np.random.default_rng(0)
    assert normality(rng.normal(size=5000))[0] == "good"
    assert normality(rng.exponential(size=5000))[0] == "bad"
    assert normality(rng.normal(size=5))[0] == "fair"


@pytest.mark.filterwarnings("ignore:No clients were named")
def test_a_regression_without_groups_has_a_report_with_its_rows(homes, tmp_path):
    some = homes[:200]
    model = covey.HierarchicalRegressor(formula="log_radon ~ floor").fit(some)
    text = model.report(tmp_path / "plain.html", data=some).read_text()
    assert "How does log_radon depend on floor?" in text
    assert "learned from 200 rows." in text
    assert "no groups that gain or lose" in text
    assert 'id="find"' not in text
    assert "quantile residuals" in text


def test_the_shell_writes_a_report(homes, tmp_path):
    some = homes[:300]
    covey.fit(some, "log_radon ~ floor + (1 | county)").save(tmp_path / "model")
    some.write_csv(tmp_path / "homes.csv")
    done = inside("report", "model", "--data", "homes.csv", "--title", "Radon & homes", cwd=tmp_path)
    assert done.stdout.strip() == "report.html"
    assert "<title>Radon &amp; homes</title>" in (tmp_path / "report.html").read_text()
