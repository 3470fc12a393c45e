"""The report and three pages of the site in a real browser: make test-browser."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

import covey
from tests.browser.driver import Browser, find_browser

pytestmark = [pytest.mark.browser, pytest.mark.skipif(find_browser() is None, reason="needs chromium and chromedriver")]
SITE = Path(__file__).parents[2] / "site"
ENTER, TAB = "\ue007", "\ue004"


@pytest.fixture(scope="module")
def report(homes, tmp_path_factory):
    model = covey.fit(homes, "log_radon ~ floor + (1 | state/county)")
    return model.report(tmp_path_factory.mktemp("browser") / "radon.html", data=homes)


@pytest.fixture(scope="module")
def light():
    browser = Browser()
    yield browser
    browser.close()


def colours(browser):
    ink, paper = browser.run("const s = getComputedStyle(document.body); return [s.color, s.backgroundColor]")
    return [sum(map(int, text[4:-1].split(","))) for text in (ink, paper)]


def shown(browser, kind):
    return browser.run(f"return [...document.querySelectorAll('figure .{kind}')].every(i => i.offsetParent !== null)")


def test_a_search_finds_a_group(light, report):
    light.open(report)
    light.type("#find", "hennepin")
    assert light.text("#count") == "1 group"
    assert light.text("#hits button") == "Hennepin, MN"  # the name of the state is not repeated
    assert light.text("#story h3") == "Hennepin, MN"
    assert "own rows determine" in light.text("#story")
    light.run("document.getElementById('find').value = ''")
    light.type("#find", "zzz")
    assert "No group" in light.text("#count")
    assert light.errors() == []


def test_the_keyboard_opens_a_story(light, report):
    light.open(report)
    light.type("#find", "clay")
    assert "groups" in light.text("#count")
    light.press(TAB)
    light.press(ENTER)
    assert "Clay" in light.text("#story h3")
    assert light.run("return document.activeElement.id") == "story"


def test_tables_sort(light, report):
    light.open(report)
    column = "return [...document.querySelectorAll('#surprises tbody tr')].map(r => parseFloat(r.cells[2].dataset.v))"
    before = light.run(column)
    light.click("#surprises thead th:nth-child(3) button")
    assert light.run(column) == sorted(before)
    assert light.run("return document.querySelector('#surprises thead th:nth-child(3)').ariaSort") == "ascending"
    light.click("#surprises thead th:nth-child(3) button")
    assert light.run(column) == sorted(before, reverse=True)
    assert light.errors() == []


def test_dark_mode_and_print(light, report):
    light.open(report)
    ink, paper = colours(light)
    assert ink < paper
    assert shown(light, "light")
    light.prefer("prefers-color-scheme", "dark")
    ink, paper = colours(light)
    assert ink > paper
    assert shown(light, "dark")
    assert not shown(light, "light")
    light.prefer("prefers-color-scheme", "dark", media="print")  # print is light also for readers who prefer dark
    ink, paper = colours(light)
    assert ink < paper
    assert shown(light, "light")
    assert light.run("return getComputedStyle(document.querySelector('nav')).display") == "none"
    light.prefer("prefers-color-scheme", "light")


def test_names_that_a_screen_reader_needs(light, report):
    light.open(report)
    assert light.run("return document.documentElement.lang") == "en"
    assert light.run("return [...document.querySelectorAll('input')].every(i => document.querySelector(`label[for=${i.id}]`))")
    assert light.run("return [...document.querySelectorAll('table')].every(t => t.caption && t.caption.textContent)")
    assert light.run("return [...document.querySelectorAll('th')].every(t => t.scope === 'col')")
    levels = light.run("return [...document.querySelectorAll('h1,h2,h3')].map(h => +h.tagName[1])")
    assert all(after - before <= 1 for before, after in pairwise(levels))


@pytest.mark.parametrize("page", ["index.html", "gallery.html", "tutorials/first-model.html"])
def test_pages_of_the_site(light, page):
    path = SITE / page
    if not path.exists():
        path = SITE / page.replace(".html", "") / "index.html"
    light.open(path)
    assert light.run("return document.querySelector('h1').textContent")
    assert light.run("return [...document.images].every(i => i.complete && i.naturalWidth > 0)")
    assert light.errors() == []
